// Tours through volumes: which units patches touch, and how many of these a memory of a fixed size decodes.
#pragma once

#include <cstdint>

namespace fastpipe {

// The boxes of units that patches touch.  All arrays in C order.
struct TouchedBoxes {
  std::int64_t patches = 0;
  std::int64_t dims = 0;
  const std::int64_t* firsts = nullptr;  // (patches): the number of the first unit of each patch's volume
  const std::int64_t* lows = nullptr;    // (patches, dims): the place in the grid of the first unit that it touches
  const std::int64_t* counts = nullptr;  // (patches, dims): how many it touches along each dimension
  const std::int64_t* steps = nullptr;   // (patches, dims): from the number of a unit to that of the next one
};

// Write to (patches) where the numbers of each patch end; how many there are in all, or -1 where a count is below 0
// or there are more than 2^62.
[[nodiscard]] std::int64_t touched_ends(const TouchedBoxes& boxes, std::int64_t* ends) noexcept;

// Write the numbers of all units that patches touch, patch after patch, each patch's in C order.
void touched_units(const TouchedBoxes& boxes, std::int64_t* numbers) noexcept;

// The units of patches that come one after the other.
struct UnitUses {
  const std::int64_t* units = nullptr;  // from 0 to kinds - 1, patch after patch
  const std::int64_t* ends = nullptr;   // (patches): where those of each patch end
  std::int64_t patches = 0;
  const std::int64_t* visits = nullptr;  // (kinds): how many patches, these among them, touch each unit
  std::int64_t kinds = 0;
};

// Count the units that are decoded, if those are forgotten first that no patch will touch again, and then those that
// were not used for the longest time.
//
// held: units for which there is memory.
// most: after a patch with which more are decoded it is enough.
// Returns -1 where there is no memory.
[[nodiscard]] std::int64_t decoded_units(const UnitUses& uses, std::int64_t held, std::int64_t most) noexcept;

}  // namespace fastpipe
