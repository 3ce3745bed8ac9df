#include "tours.h"

#include <new>
#include <vector>

namespace fastpipe {

namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 62;

// The units that are remembered, from the one not used for the longest time on.
class Ring {
 public:
  explicit Ring(std::int64_t kinds)
      : links_(static_cast<std::size_t>(kinds) + 1, Link{kNowhere, kNowhere}), head_(kinds) {
    at(head_) = {head_, head_};
  }

  bool holds(std::int64_t unit) { return at(unit).newer != kNowhere; }
  std::int64_t oldest() { return at(head_).newer; }

  void append(std::int64_t unit) {
    const std::int64_t last = at(head_).older;
    at(unit) = {last, head_};
    at(last).newer = unit;
    at(head_).older = unit;
  }

  void remove(std::int64_t unit) {
    const Link link = at(unit);
    at(link.newer).older = link.older;
    at(link.older).newer = link.newer;
    at(unit).newer = kNowhere;
  }

 private:
  static constexpr std::int64_t kNowhere = -1;
  struct Link {
    std::int64_t older, newer;
  };
  Link& at(std::int64_t unit) { return links_[static_cast<std::size_t>(unit)]; }

  std::vector<Link> links_;
  const std::int64_t head_;
};

}  // namespace

std::int64_t touched_ends(const TouchedBoxes& boxes, std::int64_t* ends) noexcept {
  std::int64_t total = 0;
  for (std::int64_t patch = 0; patch < boxes.patches; ++patch) {
    std::int64_t each = 1;
    for (std::int64_t dim = 0; dim < boxes.dims; ++dim) {
      const std::int64_t count = boxes.counts[patch * boxes.dims + dim];
      if (count < 0 || (count > 0 && each > kMost / count)) return -1;
      each *= count;
    }
    if (total > kMost - each) return -1;
    total += each;
    ends[patch] = total;
  }
  return total;
}

void touched_units(const TouchedBoxes& boxes, std::int64_t* numbers) noexcept {
  // As unsigned numbers, which may overflow.
  using Wide = std::uint64_t;
  for (std::int64_t patch = 0; patch < boxes.patches; ++patch) {
    const std::int64_t* lows = boxes.lows + patch * boxes.dims;
    const std::int64_t* counts = boxes.counts + patch * boxes.dims;
    const std::int64_t* steps = boxes.steps + patch * boxes.dims;
    std::int64_t count = 1;
    for (std::int64_t dim = 0; dim < boxes.dims; ++dim) count *= counts[dim];
    for (std::int64_t place = 0; place < count; ++place) {
      std::int64_t left = place;
      Wide number = static_cast<Wide>(boxes.firsts[patch]);
      for (std::int64_t dim = boxes.dims; dim-- > 0;) {
        number += static_cast<Wide>(lows[dim] + left % counts[dim]) * static_cast<Wide>(steps[dim]);
        left /= counts[dim];
      }
      *numbers++ = static_cast<std::int64_t>(number);
    }
  }
}

std::int64_t decoded_units(const UnitUses& uses, std::int64_t held, std::int64_t most) noexcept {
  try {
    Ring ring(uses.kinds);
    std::vector<std::int64_t> left(uses.visits, uses.visits + uses.kinds);
    std::int64_t decoded = 0, remembered = 0;
    const std::int64_t* unit = uses.units;
    for (std::int64_t patch = 0; patch < uses.patches; ++patch) {
      for (const std::int64_t* end = uses.units + uses.ends[patch]; unit < end; ++unit) {
        if (ring.holds(*unit)) {
          ring.remove(*unit);
        } else {
          ++decoded;
          ++remembered;
        }
        ring.append(*unit);
        const bool is_over = --left[static_cast<std::size_t>(*unit)] <= 0;
        if (is_over || remembered > held) {
          ring.remove(is_over ? *unit : ring.oldest());
          --remembered;
        }
      }
      if (decoded > most) break;
    }
    return decoded;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

}  // namespace fastpipe
