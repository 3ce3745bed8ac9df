#include "simd.h"

#include <atomic>
#include <cstring>
#include <new>

#include "kernels.h"
#include "levels.h"

namespace fastpipe {
namespace {

namespace baseline {
#include "kernels_baseline.inc"
}  // namespace baseline

#ifdef FASTPIPE_X86
namespace avx2 {
#include "kernels_avx2.inc"
}  // namespace avx2

namespace avx512 {
#include "kernels_avx512.inc"
}  // namespace avx512
#endif

constexpr int kUnknown = -1;
std::atomic<int> level_in_use{kUnknown};

}  // namespace

Level best_level() noexcept {
#ifdef FASTPIPE_X86
  // These ask the operating system, too, whether it keeps the wider registers.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Level::baseline;
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
                          __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("gfni");
  return has_avx512 ? Level::avx512 : Level::avx2;
#else
  return Level::baseline;
#endif
}

Level level() noexcept {
  int value = level_in_use.load(std::memory_order_relaxed);
  if (value == kUnknown) {
    const int best = static_cast<int>(best_level());
    // Unless another thread was faster.
    if (level_in_use.compare_exchange_strong(value, best, std::memory_order_relaxed)) value = best;
  }
  return static_cast<Level>(value);
}

bool force_level(Level level) noexcept {
  if (level < Level::baseline || level > best_level()) return false;
  level_in_use.store(static_cast<int>(level), std::memory_order_relaxed);
  return true;
}

const Kernels& kernels() noexcept {
#ifdef FASTPIPE_X86
  switch (level()) {
    case Level::avx512:
      return avx512::kTable;
    case Level::avx2:
      return avx2::kTable;
    default:
      break;
  }
#endif
  return baseline::kTable;
}

}  // namespace fastpipe
