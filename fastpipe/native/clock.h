// The clock that durations are measured with.
#pragma once

#include <cstdint>
#include <ctime>

namespace fastpipe {

// Nanoseconds of a clock that never goes back, and that processes of a machine share.
inline std::int64_t now_ns() noexcept {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace fastpipe
