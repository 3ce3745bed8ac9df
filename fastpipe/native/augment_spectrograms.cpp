#include <algorithm>
#include <cmath>
#include <cstring>

#include "canvas.h"

namespace fastpipe {

namespace {

// A whole number of a table that is within a range.
std::int64_t limited(double value, std::int64_t low, std::int64_t high) noexcept {
  if (!(value > static_cast<double>(low))) return low;  // NaN neither
  return value < static_cast<double>(high) ? static_cast<std::int64_t>(value) : high;
}

}  // namespace

void mask(Canvas& canvas, const AugmentStep& step, const double* row) noexcept {
  const float value = step.options[2] != 0 ? 0.0f : canvas.mean();
  float* const planes = canvas.planes();
  if (planes == nullptr) return;
  const std::int64_t bins = canvas.height, frames = canvas.width;
  const int time_masks = step.options[0], count = time_masks + step.options[1];
  for (std::int64_t c = 0; c < canvas.channels; ++c) {
    float* const plane = planes + c * bins * frames;
    for (int at = 0; at < count; ++at) {
      const bool is_of_time = at < time_masks;
      // Masked is what is at least the begin, and less than the end, which may be fractions.
      const std::int64_t begin = limited(std::ceil(row[2 * at]), 0, is_of_time ? frames : bins);
      const std::int64_t end = limited(std::ceil(row[2 * at + 1]), begin, is_of_time ? frames : bins);
      if (!is_of_time) {
        std::fill(plane + begin * frames, plane + end * frames, value);
        continue;
      }
      for (std::int64_t f = 0; f < bins; ++f) std::fill(plane + f * frames + begin, plane + f * frames + end, value);
    }
  }
}

void shift(Canvas& canvas, const AugmentStep& step, const double* row) noexcept {
  const bool rolls = step.options[0] != 0;
  const std::int64_t frames = canvas.width;
  const double frames_by = rolls ? std::fmod(std::trunc(row[0]), static_cast<double>(frames)) : row[0];
  const std::int64_t by = limited(frames_by, -frames, frames);
  float* const planes = canvas.planes();
  if (planes == nullptr || by == 0 || frames == 0) return;
  for (std::int64_t line = 0; line < canvas.channels * canvas.height; ++line) {
    float* const begin = planes + line * frames;
    if (rolls) {
      std::rotate(begin, begin + ((frames - by) % frames + frames) % frames, begin + frames);
    } else if (by > 0) {
      std::memmove(begin + by, begin, static_cast<std::size_t>(frames - by) * sizeof(float));
      std::fill(begin, begin + by, step.numbers[0]);
    } else {
      std::memmove(begin, begin - by, static_cast<std::size_t>(frames + by) * sizeof(float));
      std::fill(begin + frames + by, begin + frames, step.numbers[0]);
    }
  }
}

}  // namespace fastpipe
