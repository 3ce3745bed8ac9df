#include "simulate.h"

#include <time.h>

#include <atomic>
#include <cerrno>

namespace fastpipe {
namespace {

std::atomic<std::int64_t> simulated_ns{0};

}  // namespace

void simulate_decoding(std::int64_t nanoseconds) noexcept { simulated_ns.store(nanoseconds); }

bool waited_in_place_of_decoding() noexcept {
  const std::int64_t wait = simulated_ns.load(std::memory_order_relaxed);
  if (wait == 0) return false;
  timespec left{static_cast<time_t>(wait / 1'000'000'000), static_cast<long>(wait % 1'000'000'000)};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
  return true;
}

}  // namespace fastpipe
