// Which input pixels make an output pixel, and how much each counts.  The arithmetic is that of Pillow's
// Resample.c (doubles, then 22-bit fixed point) and of torch's interpolate on bytes (16-bit fixed point),
// operation by operation: the last bit of a weight shows in the pixels.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "resample.h"

namespace fastpipe {
namespace {

constexpr int kBits = 22;
constexpr double kPi = 3.14159265358979323846;
constexpr double kSupport[] = {0.5, 1.0, 1.0, 2.0, 3.0, 0.5, 0.5, 1.0, 2.0};

constexpr bool is_nearest(int mode) { return mode == kNearest || mode == kNearestFloor; }

// Return whether the filter keeps its width when it shrinks an image.
constexpr bool is_sharp(int mode) { return mode == kSharpBilinear || mode == kSharpBicubic; }

// Two numbers that are computed side by side.
typedef double Pair __attribute__((vector_size(16)));

double sinc(double x) {
  if (x == 0.0) return 1.0;
  x = x * kPi;
  return std::sin(x) / x;
}

double hamming(double x) {
  x = std::fabs(x);
  if (x == 0.0) return 1.0;
  if (x >= 1.0) return 0.0;
  x = x * kPi;
  // Pillow's two constants are single precision.
  return std::sin(x) / x * (double{0.54f} + double{0.46f} * std::cos(x));
}

double lanczos(double x) { return -3.0 <= x && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0; }

// A filter's values at two distances of x (scaled) pixels from the centre.
template <int mode>
inline Pair filter_values(Pair x) {
  const Pair zero = {0.0, 0.0}, one = {1.0, 1.0};
  if constexpr (mode == kBox) return ((x > -0.5) & (x <= 0.5)) ? one : zero;
  if constexpr (mode == kHamming) return Pair{hamming(x[0]), hamming(x[1])};
  if constexpr (mode == kLanczos) return Pair{lanczos(x[0]), lanczos(x[1])};
  x = x < 0.0 ? -x : x;
  if constexpr (mode == kBilinear || mode == kSharpBilinear) return x < 1.0 ? 1.0 - x : zero;
  const double a = mode == kSharpBicubic ? -0.75 : -0.5;
  const Pair inner = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
  const Pair outer = (((x - 5.0) * x + 8.0) * x - 4.0) * a;
  return x < 1.0 ? inner : x < 2.0 ? outer : zero;
}

// How an axis is scaled, in doubles.
struct Scaling {
  int mode;
  std::int32_t in_size;
  double start, scale, stretch, shrink;

  Scaling(int filter, std::int32_t size, std::int64_t start8, std::int64_t extent8, std::int32_t out_size)
      : mode(filter & (kNarrow - 1)),
        in_size(size),
        start(static_cast<double>(start8) / 8.0),
        scale(static_cast<double>(extent8) / 8.0 / out_size),
        stretch(is_sharp(mode) ? 1.0 : std::max(scale, 1.0)),
        shrink(1.0 / stretch) {}

  double center(std::int64_t output) const { return start + (static_cast<double>(output) + 0.5) * scale; }
};

// The input pixels under a filter: the first, and past the last.
struct Inputs {
  std::int64_t first, last;
};

// Where a filter that does not widen begins, which may be before the edge.
std::int64_t sharp_left(int mode, double center) {
  return static_cast<std::int64_t>(std::floor(center - 0.5)) - static_cast<std::int64_t>(kSupport[mode]) + 1;
}

inline Inputs inputs_at(const Scaling& s, double center) {
  const std::int64_t size = s.in_size;
  if (is_sharp(s.mode)) {
    const std::int64_t left = sharp_left(s.mode, center), reach = static_cast<std::int64_t>(kSupport[s.mode]);
    const std::int64_t first = std::min(std::max<std::int64_t>(left, 0), size - 1);
    return {first, std::max(std::min(left + 2 * reach, size), first + 1)};
  }
  const double support = kSupport[s.mode] * s.stretch;
  const auto first = static_cast<std::int64_t>(center - support + 0.5);
  const auto last = static_cast<std::int64_t>(center + support + 0.5);
  return {std::max<std::int64_t>(first, 0), std::min(last, size)};
}

// Pillow walks to the nearest pixel in steps of the scale, with their rounding.
std::int32_t nearest_input(const Scaling& s, std::int64_t output, double walked) {
  const double place = s.mode == kNearest ? walked : static_cast<double>(output) * s.scale;
  return static_cast<std::int32_t>(std::min<std::int64_t>(static_cast<std::int64_t>(place), s.in_size - 1));
}

// Weights of one output, which are still to be divided by their total.
struct Weights {
  std::int32_t first, count;  // inputs
  double total;
};

template <int mode>
inline Weights weights_at(const Scaling& s, double center, std::int32_t room, double* exact) {
  const Inputs inputs = inputs_at(s, center);
  const auto count = static_cast<std::int32_t>(std::clamp<std::int64_t>(inputs.last - inputs.first, 0, room));
  const auto first = static_cast<std::int32_t>(inputs.first);
  if constexpr (is_sharp(mode)) {  // pixels beyond an edge count for the pixel at the edge
    std::fill_n(exact, count, 0.0);
    const std::int64_t left = sharp_left(mode, center), last = std::int64_t{s.in_size} - 1;
    for (std::int64_t x = left; x < left + 2 * static_cast<std::int64_t>(kSupport[mode]); ++x) {
      const std::int64_t place = std::min(std::max<std::int64_t>(x, 0), last) - inputs.first;
      exact[place] += filter_values<mode>(Pair{static_cast<double>(x) + 0.5 - center, 0})[0];
    }
    return {first, count, 1.0};
  }
  double total = 0.0;
  std::int32_t k = 0;
  for (; k + 1 < count; k += 2) {
    const auto place = static_cast<double>(k + inputs.first);
    const Pair values = filter_values<mode>((Pair{place, place + 1.0} - center + 0.5) * s.shrink);
    std::memcpy(exact + k, &values, sizeof values);
    total += values[0];
    total += values[1];
  }
  if (k < count) {
    const auto place = static_cast<double>(k + inputs.first);
    exact[k] = filter_values<mode>((Pair{place, place} - center + 0.5) * s.shrink)[0];
    total += exact[k];
  }
  return {first, count, total != 0.0 ? total : 1.0};
}

// Bits of the fixed-point weights: as many as keep the largest weight of the whole axis within 16 bits.
template <int mode>
int narrow_bits(const Scaling& s, const Axis& axis, double* exact) {
  double largest = 0.0;
  for (std::int32_t i = 0; i < axis.out_size; ++i) {
    const Weights found = weights_at<mode>(s, s.center(i), axis.pitch, exact);
    for (std::int32_t k = 0; k < found.count; ++k) largest = std::max(largest, exact[k] / found.total);
  }
  int bits = 0;
  while (bits < kBits && static_cast<std::int64_t>(0.5 + largest * (1 << (bits + 1))) < (1 << 15)) ++bits;
  return bits;
}

struct Table {
  std::int32_t* starts;
  std::int32_t* taps;
  std::int32_t* weights;
};

// A half added, away from zero.
inline Pair rounded(Pair x) { return x < 0.0 ? x - 0.5 : x + 0.5; }

// Write an output's place.
inline void place(const Axis& axis, const Table& table, std::int32_t output, std::int32_t first, std::int32_t count) {
  table.starts[output] = axis.turned ? axis.in_size - first - count : first;
  table.taps[output] = count;
  std::int32_t* weights = table.weights + std::int64_t{output} * axis.pitch;
  if (axis.turned) std::reverse(weights, weights + count);
}

// A mirrored output is written from its end.
inline std::int32_t place_of(const Axis& axis, std::int32_t i) { return axis.mirrored ? axis.length - 1 - i : i; }

template <int mode>
void fill(const Scaling& s, int bits, const Axis& axis, const Table& table, double* exact, std::int32_t from) {
  const double one = 1 << bits;
  const std::int32_t unit = 1 << (kBits - bits);
  for (std::int32_t i = from; i < axis.length; ++i) {
    const std::int32_t to = place_of(axis, i);
    std::int32_t* weights = table.weights + std::int64_t{to} * axis.pitch;
    const Weights found = weights_at<mode>(s, s.center(std::int64_t{axis.first} + i), axis.pitch, exact);
    for (std::int32_t k = 0; k < found.count; ++k) {
      weights[k] = static_cast<std::int32_t>(rounded(Pair{exact[k] / found.total * one, 0.0})[0]) * unit;
    }
    place(axis, table, to, found.first, found.count);
  }
}

// The same of two outputs at a time, which have at most `most` inputs each; returns how many outputs are
// done.
template <int mode, int most>
std::int32_t fill_pairs(const Scaling& s, int bits, const Axis& axis, const Table& table) {
  const Pair zero = {0.0, 0.0}, unity = {1.0, 1.0};
  const double one = 1 << bits;
  const std::int32_t unit = 1 << (kBits - bits);
  std::int32_t i = 0;
  for (; i + 1 < axis.length; i += 2) {
    const Pair center = {s.center(std::int64_t{axis.first} + i), s.center(std::int64_t{axis.first} + i + 1)};
    const Inputs a = inputs_at(s, center[0]), b = inputs_at(s, center[1]);
    if (a.last - a.first > most || b.last - b.first > most) break;
    const Pair first = {static_cast<double>(a.first), static_cast<double>(b.first)};
    const Pair last = {static_cast<double>(a.last), static_cast<double>(b.last)};
    Pair values[most], total = zero, input = first;
    for (int k = 0; k < most; ++k, input += 1.0) {
      values[k] = input < last ? filter_values<mode>((input - center + 0.5) * s.shrink) : zero;
      total += values[k];
    }
    total = total != 0.0 ? total : unity;
    const std::int32_t to[2] = {place_of(axis, i), place_of(axis, i + 1)};
    std::int32_t* const weights[2] = {table.weights + std::int64_t{to[0]} * axis.pitch,
                                      table.weights + std::int64_t{to[1]} * axis.pitch};
    for (int k = 0; k < most; ++k) {
      const Pair weight = rounded(values[k] / total * one);
      weights[0][k] = static_cast<std::int32_t>(weight[0]) * unit;
      weights[1][k] = static_cast<std::int32_t>(weight[1]) * unit;
    }
    place(axis, table, to[0], static_cast<std::int32_t>(a.first), static_cast<std::int32_t>(a.last - a.first));
    place(axis, table, to[1], static_cast<std::int32_t>(b.first), static_cast<std::int32_t>(b.last - b.first));
  }
  return i;
}

template <int mode>
void fill(const Scaling& s, bool narrow, const Axis& axis, const Table& table, double* exact) {
  const int bits = narrow ? narrow_bits<mode>(s, axis, exact) : kBits;
  std::int32_t done = 0;
  if constexpr (mode == kBox || mode == kBilinear || mode == kBicubic) {
    const double most = std::min(2 * kSupport[mode] * s.stretch + 1, static_cast<double>(axis.pitch));
    // No more than the pitch: what lies behind an output's weights may be another's.
    switch (static_cast<int>(std::min(most, 9.0))) {
      case 1:
      case 2:
        done = fill_pairs<mode, 2>(s, bits, axis, table);
        break;
      case 3:
        done = fill_pairs<mode, 3>(s, bits, axis, table);
        break;
      case 4:
        done = fill_pairs<mode, 4>(s, bits, axis, table);
        break;
      case 5:
        done = fill_pairs<mode, 5>(s, bits, axis, table);
        break;
      case 6:
        done = fill_pairs<mode, 6>(s, bits, axis, table);
        break;
      case 7:
        done = fill_pairs<mode, 7>(s, bits, axis, table);
        break;
      case 8:
        done = fill_pairs<mode, 8>(s, bits, axis, table);
        break;
      default:
        break;
    }
  }
  fill<mode>(s, bits, axis, table, exact, done);
}

void fill_nearest(const Scaling& s, const Axis& axis, const Table& table) {
  double walked = 0.5 * s.scale;
  for (std::int32_t i = 0; s.mode == kNearest && i < axis.first; ++i) walked += s.scale;
  for (std::int32_t i = 0; i < axis.length; ++i) {
    const std::int32_t to = axis.mirrored ? axis.length - 1 - i : i;
    const std::int32_t input = nearest_input(s, std::int64_t{axis.first} + i, walked);
    table.starts[to] = axis.turned ? axis.in_size - 1 - input : input;
    table.taps[to] = 1;
    table.weights[std::int64_t{to} * axis.pitch] = 1 << kBits;
    walked += s.scale;
  }
}

}  // namespace

Axis make_axis(int filter, std::int32_t in_size, std::int32_t out_size, std::int32_t first, std::int32_t length,
               bool turned, bool mirrored, std::int64_t start8, std::int64_t extent8) noexcept {
  if (turned) start8 = std::int64_t{8} * in_size - start8 - extent8;  // of the input as it is after turning
  const Scaling s(filter, in_size, start8, extent8, out_size);
  std::int64_t low, high;
  if (is_nearest(s.mode)) {
    double walked = 0.5 * s.scale;
    for (std::int32_t i = 0; s.mode == kNearest && i < first; ++i) walked += s.scale;
    low = nearest_input(s, first, walked);
    for (std::int32_t i = 0; s.mode == kNearest && i < length - 1; ++i) walked += s.scale;
    high = std::int64_t{nearest_input(s, std::int64_t{first} + length - 1, walked)} + 1;
  } else {
    low = inputs_at(s, s.center(first)).first;
    high = inputs_at(s, s.center(std::int64_t{first} + length - 1)).last;
  }
  Axis axis;
  axis.in_size = in_size;
  axis.start8 = start8;
  axis.extent8 = extent8;
  axis.out_size = out_size;
  axis.first = first;
  axis.length = length;
  axis.turned = turned;
  axis.mirrored = mirrored;
  axis.low = static_cast<std::int32_t>(turned ? in_size - high : low);
  axis.high = static_cast<std::int32_t>(turned ? in_size - low : high);
  const double pitch = std::ceil(kSupport[s.mode] * s.stretch) * 2 + 1;
  axis.pitch = pitch < std::numeric_limits<std::int32_t>::max() ? static_cast<std::int32_t>(pitch)
                                                                : std::numeric_limits<std::int32_t>::max();
  return axis;
}

void axis_table(int filter, const Axis& axis, std::int32_t* memory, double* exact) noexcept {
  const Table table{memory, memory + axis.length, memory + std::int64_t{2} * axis.length};
  const Scaling s(filter, axis.in_size, axis.start8, axis.extent8, axis.out_size);
  const bool narrow = filter >= kNarrow;
  switch (s.mode) {
    case kBox:
      return fill<kBox>(s, narrow, axis, table, exact);
    case kBilinear:
      return fill<kBilinear>(s, narrow, axis, table, exact);
    case kHamming:
      return fill<kHamming>(s, narrow, axis, table, exact);
    case kBicubic:
      return fill<kBicubic>(s, narrow, axis, table, exact);
    case kLanczos:
      return fill<kLanczos>(s, narrow, axis, table, exact);
    case kSharpBilinear:
      return fill<kSharpBilinear>(s, narrow, axis, table, exact);
    case kSharpBicubic:
      return fill<kSharpBicubic>(s, narrow, axis, table, exact);
    default:
      return fill_nearest(s, axis, table);
  }
}

}  // namespace fastpipe
