// The clock that durations are measured with.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

namespace fastpipe {

// Nanoseconds of a clock that never goes back, and that processes of a machine share.
inline std::int64_t now_ns() noexcept {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Adds the time from one point to the next to a sum.
class Watch {
 public:
  Watch() : since_(now_ns()) {}
  void add_to(std::atomic<std::int64_t>& sum) noexcept {
    const std::int64_t time = now_ns();
    sum.fetch_add(time - since_, std::memory_order_relaxed);
    since_ = time;
  }

 private:
  std::int64_t since_;
};

}  // namespace fastpipe
