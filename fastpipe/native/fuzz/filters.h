// Filters as the inputs of fuzz targets describe them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../codecs.h"

namespace fastpipe::fuzz {

// Two bytes for each step: which of these filters, with bitshuffle's codec in the upper half; an element's bytes.
template <std::size_t N>
std::vector<FilterStep> read_steps(const std::uint8_t* from, std::size_t count, const ChunkFilter (&filters)[N],
                                   std::uint8_t block) {
  std::vector<FilterStep> steps;
  for (std::size_t i = 0; i < count; ++i) {
    FilterStep step;
    step.filter = filters[(from[2 * i] & 15) % N];
    step.codec = from[2 * i] >> 4;
    step.element = from[2 * i + 1];
    step.block = std::int64_t{8} * block;
    steps.push_back(step);
  }
  return steps;
}

}  // namespace fastpipe::fuzz
