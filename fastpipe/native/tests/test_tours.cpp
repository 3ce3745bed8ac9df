// Tours: which units patches touch, and how many a memory of a fixed size decodes.
#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "../tours.h"
#include "check.h"

using namespace fastpipe;

namespace {

using Numbers = std::vector<std::int64_t>;

TouchedBoxes boxes_of(const Numbers& firsts, const Numbers& lows, const Numbers& counts, const Numbers& steps) {
  const auto patches = static_cast<std::int64_t>(firsts.size());
  return {patches,     static_cast<std::int64_t>(lows.size()) / patches, firsts.data(), lows.data(), counts.data(),
          steps.data()};
}

std::int64_t decoded(const Numbers& units, const Numbers& ends, const Numbers& visits, std::int64_t held,
                     std::int64_t most = std::numeric_limits<std::int64_t>::max()) {
  return decoded_units({units.data(), ends.data(), static_cast<std::int64_t>(ends.size()), visits.data(),
                        static_cast<std::int64_t>(visits.size())},
                       held, most);
}

}  // namespace

TEST("tours: units are numbered through all volumes, in C order") {
  const Numbers firsts{0, 12}, lows{0, 1, 1, 0}, counts{1, 2, 2, 1}, steps{4, 1, 3, 1};
  const TouchedBoxes boxes = boxes_of(firsts, lows, counts, steps);
  Numbers ends(2), units(4);
  CHECK(touched_ends(boxes, ends.data()) == 4);
  CHECK((ends == Numbers{2, 4}));
  touched_units(boxes, units.data());
  CHECK((units == Numbers{1, 2, 12 + 3, 12 + 6}));
}

TEST("tours: counts that cannot be are refused") {
  const std::int64_t large = std::int64_t{1} << 40;
  for (const Numbers& counts : {Numbers{-1, 2}, Numbers{large, large}}) {
    const Numbers firsts{0}, lows{0, 0}, steps{1, 1};
    Numbers ends(1);
    CHECK(touched_ends(boxes_of(firsts, lows, counts, steps), ends.data()) == -1);
  }
  const Numbers firsts{0, 0}, lows{0, 0}, counts{std::int64_t{1} << 61, (std::int64_t{1} << 61) + 1}, steps{1, 1};
  Numbers ends(2);
  CHECK(touched_ends(boxes_of(firsts, lows, counts, steps), ends.data()) == -1);
}

TEST("tours: what is not wanted again is forgotten first, then what was not used for longest") {
  CHECK(decoded({0, 1, 0}, {1, 2, 3}, {2, 1}, 1) == 2);                 // 1 goes at once
  CHECK(decoded({0, 1, 0}, {1, 2, 3}, {2, 2}, 1) == 3);                 // 1 stays, and 0 goes
  CHECK(decoded({0, 1, 2, 0}, {1, 4}, {2, 2, 2}, 3) == 3);              // there is room for all
  CHECK(decoded({0, 1, 2, 3}, {1, 2, 3, 4}, {1, 1, 1, 1}, 9, 1) == 2);  // after the second it is enough
  CHECK(decoded({}, {}, {}, 1) == 0);
}

TEST("tours: any order decodes what a plain list of units says") {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    const std::int64_t kinds = 1 + random() % 12, held = random() % 6;
    Numbers units, ends, visits(static_cast<std::size_t>(kinds));
    for (int patch = random() % 20; patch > 0; --patch) {
      for (int place = random() % 4; place > 0; --place) {
        units.push_back(random() % kinds);
        ++visits[static_cast<std::size_t>(units.back())];
      }
      ends.push_back(static_cast<std::int64_t>(units.size()));
    }
    for (auto& count : visits) count += random() % 2;
    std::vector<std::int64_t> held_units;
    Numbers left = visits;
    std::int64_t expected = 0;
    for (const std::int64_t unit : units) {
      const auto at = std::find(held_units.begin(), held_units.end(), unit);
      if (at == held_units.end()) {
        ++expected;
      } else {
        held_units.erase(at);
      }
      held_units.push_back(unit);
      if (--left[static_cast<std::size_t>(unit)] <= 0) {
        held_units.pop_back();
      } else if (static_cast<std::int64_t>(held_units.size()) > held) {
        held_units.erase(held_units.begin());
      }
    }
    CHECK(decoded(units, ends, visits, held) == expected);
  }
}
