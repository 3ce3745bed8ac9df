// Which instruction set the kernels use.  No variant changes a bit of any result.
#pragma once

namespace fastpipe {

enum class Level : int { baseline = 0, avx2 = 1, avx512 = 2 };

// The best level of this processor and operating system; in sanitizer builds baseline.
Level best_level() noexcept;

// The level in use: best_level(), unless force_level() named another.
Level level() noexcept;

// For tests: use this level from now on, in all threads.  False where the processor does not have it.
bool force_level(Level level) noexcept;

}  // namespace fastpipe
