// What the fuzz targets share.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../span.h"
#include "../status.h"

namespace fastpipe::fuzz {

// Larger images only cost time.
constexpr std::int64_t kMostPixels = std::int64_t{1} << 20;

// End the process if an invariant does not hold.
inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

// Choices that depend on all bytes of an input, so that the inputs themselves are plain files.
class Choices {
 public:
  explicit Choices(Bytes from) : state_(from.size) {
    for (std::size_t i = 0; i < from.size; ++i) state_ = (state_ ^ from.data[i]) * 1099511628211u;
  }
  std::int32_t below(std::int32_t count) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::int32_t>((state_ >> 33) % static_cast<std::uint32_t>(count));
  }
  bool flip() { return below(2) == 1; }
  double uniform() { return below(1 << 30) / static_cast<double>(1 << 30); }

 private:
  std::uint64_t state_;
};

inline Box box_inside(Choices& choices, Size size) {
  Box box;
  box.top = choices.below(size.height);
  box.left = choices.below(size.width);
  box.height = 1 + choices.below(size.height - box.top);
  box.width = 1 + choices.below(size.width - box.left);
  return box;
}

inline bool same(const Status& one, const Status& other) {
  return one.outcome == other.outcome && one.reason == other.reason && one.detail == other.detail;
}

}  // namespace fastpipe::fuzz
