// Motion at every level that this processor has: equal bit for bit, and what plain loops make of it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "../augment_motion.h"
#include "../simd.h"
#include "check.h"
#include "random.h"

namespace {

using namespace fastpipe;
using tests::between;
using tests::random_number;
using tests::uniform;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// What 16 bits say, by the definitions of the formats.
float number_of(std::uint16_t bits, MotionType type) {
  if (type == MotionType::bfloat16) return float_of(std::uint32_t{bits} << 16);
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction != 0 ? float_of(0x7FC00000u) : sign * kInfinity;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
}

// Whether 16 bits are the nearest number to a float, of two that are as near the even one.
bool is_nearest(std::uint16_t bits, float value, MotionType type) {
  const float found = number_of(bits, type);
  if (std::isnan(value) || std::isnan(found)) return std::isnan(value) && std::isnan(found);
  if (std::signbit(value) != std::signbit(found)) return false;
  // Infinity stands where the next number would be, if there was one.
  const auto place = [type](std::uint16_t at) {
    const double number = number_of(at, type);
    return std::isinf(number) ? (type == MotionType::float16 ? 65536.0 : std::ldexp(1.0, 128)) : std::fabs(number);
  };
  if (std::isinf(value)) return std::isinf(found);
  const double wanted = std::fabs(double{value}), apart = std::fabs(place(bits) - wanted);
  const std::uint16_t size = bits & 0x7FFF;
  const double below = size > 0 ? std::fabs(place(size - 1) - wanted) : 1e300;
  const double above = std::isinf(found) ? 1e300 : std::fabs(place(size + 1) - wanted);
  const bool is_even = (bits & 1) == 0;
  return (apart < below || (apart == below && is_even)) && (apart < above || (apart == above && is_even));
}

// Sequences with all that MotionBatch takes; memory ends where they end.
struct Case {
  Motion motion;
  std::vector<std::uint8_t> source, out;
  std::vector<double> speeds, scales, shifts;
  std::vector<std::int64_t> order, lengths, new_lengths;

  Case(std::int64_t count, std::int64_t frames, std::int64_t joints, std::int64_t coordinates, MotionType type,
       MotionType then, int layout) {
    Motion& m = motion;
    m.count = count, m.frames = frames, m.joints = joints, m.coordinates = coordinates;
    m.source_type = type, m.out_type = then;
    const std::int64_t word = bytes_of(type), all = count * frames * joints * coordinates;
    const std::int64_t packed[4] = {frames * joints * coordinates, joints * coordinates, coordinates, 1};
    const std::int64_t by_coordinate[4] = {frames * joints * coordinates, joints, 1, frames * joints};
    const std::int64_t repeated[4] = {0, joints * coordinates, coordinates, 1};
    for (int i = 0; i < 4; ++i) {
      m.strides[i] = word * (layout == 0 ? packed[i] : layout == 1 ? by_coordinate[i] : repeated[i]);
    }
    source.resize(static_cast<std::size_t>(word * (layout == 2 ? all / count : all)));
    for (std::size_t i = 0; i < source.size(); i += static_cast<std::size_t>(word)) {
      const float value = random_number() % 50 == 0 ? -kInfinity : static_cast<float>(uniform(-3, 3));
      const std::uint32_t bits = type == MotionType::float32 ? bits_of(value) : bits_of(value) >> 16;
      std::memcpy(&source[i], &bits, static_cast<std::size_t>(word));
    }
    for (std::int64_t n = 0; n < count; ++n) {
      speeds.push_back(n % 3 == 0 ? 1.0 : n % 3 == 1 ? 0.5 : uniform(0.3, 3));
      lengths.push_back(between(1, frames));
      const bool is_moved = between(0, 1) == 1;
      for (std::int64_t j = 0; j < joints; ++j) order.push_back(is_moved ? between(0, joints - 1) : j);
    }
    for (std::int64_t i = 0; i < count * coordinates; ++i) {
      scales.push_back(uniform(-2, 2));
      shifts.push_back(uniform(-2, 2));
    }
    new_lengths.resize(static_cast<std::size_t>(count));
    out.resize(static_cast<std::size_t>(all * bytes_of(then)));
  }

  void run(bool has_lengths, int threads = 1) {
    std::fill(out.begin(), out.end(), std::uint8_t{0xA5});
    motion.source = source.data(), motion.out = out.data();
    motion.speeds = speeds.data(), motion.scales = scales.data(), motion.shifts = shifts.data();
    motion.order = order.data(), motion.lengths = has_lengths ? lengths.data() : nullptr;
    motion.new_lengths = new_lengths.data();
    const auto batch = std::make_shared<MotionBatch>(motion);
    run_in_threads(batch, threads);
    CHECK(batch->is_whole());
  }

  float given(std::int64_t n, std::int64_t t, std::int64_t j, std::int64_t c) const {
    const std::int64_t* s = motion.strides;
    const std::uint8_t* at = source.data() + n * s[0] + t * s[1] + j * s[2] + c * s[3];
    std::uint32_t bits = 0;
    std::memcpy(&bits, at, static_cast<std::size_t>(bytes_of(motion.source_type)));
    return motion.source_type == MotionType::float32 ? float_of(bits)
                                                     : number_of(static_cast<std::uint16_t>(bits), motion.source_type);
  }

  bool is_made(std::int64_t n, std::int64_t t, std::int64_t j, std::int64_t c, float wanted) const {
    const std::int64_t place = ((n * motion.frames + t) * motion.joints + j) * motion.coordinates + c;
    if (motion.out_type == MotionType::float32) {
      float found;
      std::memcpy(&found, out.data() + 4 * place, 4);
      return std::isnan(wanted) ? std::isnan(found) : bits_of(found) == bits_of(wanted);
    }
    std::uint16_t found;
    std::memcpy(&found, out.data() + 2 * place, 2);
    return is_nearest(found, wanted, motion.out_type);
  }

  // What plain loops make of it.
  float wanted(std::int64_t n, std::int64_t t, std::int64_t j, std::int64_t c, std::int64_t length, bool holds) const {
    const double speed = speeds[std::size_t(n)];
    std::int64_t new_length = new_lengths[std::size_t(n)];
    if (t >= new_length && speed == 1) return given(n, t, j, c);
    if (t >= new_length && !holds) return 0;
    t = t < new_length ? t : new_length - 1;
    const std::int64_t from = order[std::size_t(n * motion.joints + j)];
    const double place = double(t) * speed;
    const std::int64_t at = std::min(static_cast<std::int64_t>(place), length - 1);
    const float part = static_cast<float>(place - double(at)), rest = 1 - part;
    float value = given(n, at, from, c);
    if (part != 0) {
      const float next = given(n, std::min(at + 1, length - 1), from, c);
      value = rest == 0 ? next : rest * value + part * next;
    }
    const auto column = std::size_t(n * motion.coordinates + c);
    return value * static_cast<float>(scales[column]) + static_cast<float>(shifts[column]);
  }
};

constexpr MotionType kTypes[] = {MotionType::float32, MotionType::float16, MotionType::bfloat16};

TEST("motion is what plain loops make of it, at every level, of every type and layout") {
  for (int round = 0; round < 300; ++round) {
    const MotionType type = kTypes[round % 3];
    const MotionType then = round % 4 == 0 ? MotionType::float32 : round % 7 == 0 ? kTypes[round % 2 + 1] : type;
    const std::int64_t joints = round % 10 == 0 ? 1100 : between(1, 27);
    Case one(between(1, 9), between(1, 40), joints, between(1, 5), type, then, round % 5 % 3);
    const bool has_lengths = between(0, 1) == 1;
    std::vector<std::uint8_t> first;
    for (int i = static_cast<int>(best_level()); i >= 0; --i) {
      CHECK(force_level(static_cast<Level>(i)));
      one.run(has_lengths);
      if (first.empty()) first = one.out;
      CHECK(first == one.out);
    }
    CHECK(force_level(best_level()));
    const Motion& m = one.motion;
    bool is_right = true;
    for (std::int64_t n = 0; n < m.count; ++n) {
      const std::int64_t length = has_lengths ? one.lengths[std::size_t(n)] : m.frames;
      CHECK(one.new_lengths[std::size_t(n)] == played_length(length, one.speeds[std::size_t(n)], m.frames));
      for (std::int64_t t = 0; t < m.frames; ++t) {
        for (std::int64_t j = 0; j < m.joints; ++j) {
          for (std::int64_t c = 0; c < m.coordinates; ++c) {
            is_right &= one.is_made(n, t, j, c, one.wanted(n, t, j, c, length, !has_lengths));
          }
        }
      }
    }
    CHECK(is_right);
  }
}

TEST("motion in threads is motion in one") {
  Case one(200, 100, 25, 3, MotionType::float32, MotionType::float32, 0);
  one.run(true);
  const std::vector<std::uint8_t> wanted = one.out;
  for (int threads = 2; threads < 5; ++threads) {
    one.run(true, threads);
    CHECK(one.out == wanted);
  }
}

TEST("motion: numbers of 16 bits are read as they are, and written as the nearest") {
  for (int i = 0; i <= static_cast<int>(best_level()); ++i) {
    CHECK(force_level(static_cast<Level>(i)));
    for (const MotionType type : {MotionType::float16, MotionType::bfloat16}) {
      Case all(1, 64, 1024, 1, type, MotionType::float32, 0);
      for (std::uint32_t bits = 0; bits < 65536; ++bits) std::memcpy(&all.source[2 * bits], &bits, 2);
      all.scales[0] = 1, all.shifts[0] = -0.0, all.speeds[0] = 1;
      for (std::int64_t j = 0; j < 1024; ++j) all.order[std::size_t(j)] = j;
      all.run(false);
      bool is_right = true;
      for (std::int64_t k = 0; k < 65536; ++k) {
        is_right &= all.is_made(0, k / 1024, k % 1024, 0, number_of(static_cast<std::uint16_t>(k), type));
      }
      CHECK(is_right);
      // Floats near each of them, near what is between two of them, and any.
      for (int kind = 0; kind < 5; ++kind) {
        Case some(1, 64, 1024, 1, MotionType::float32, type, 0);
        for (std::int64_t k = 0; k < 65536; ++k) {
          float value = number_of(static_cast<std::uint16_t>(k), type);
          const float next = number_of(static_cast<std::uint16_t>(k + 1), type);
          if (kind > 0) value = static_cast<float>((double{value} + double{next}) / 2);
          if (kind > 1) value = kind == 2 ? std::nextafterf(value, kInfinity) : std::nextafterf(value, -kInfinity);
          if (kind > 3) value = float_of(random_number());
          std::memcpy(&some.source[std::size_t(4 * k)], &value, 4);
        }
        some.scales[0] = 1, some.shifts[0] = -0.0, some.speeds[0] = 1;
        some.order = all.order;
        some.run(false);
        for (std::int64_t k = 0; k < 65536; ++k) {
          is_right &= some.is_made(0, k / 1024, k % 1024, 0, some.given(0, k / 1024, k % 1024, 0));
        }
        CHECK(is_right);
      }
    }
  }
  CHECK(force_level(best_level()));
}

TEST("speeds and lengths that are none do no harm to motion") {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double speed : {kNan, infinity, -infinity, 0.0, -0.0, -1.5, 1e-320, 1e300, -1e300, 1e-9}) {
    Case one(7, 9, 5, 3, MotionType::float32, MotionType::float16, 1);
    std::fill(one.speeds.begin(), one.speeds.end(), speed);
    std::fill(one.scales.begin(), one.scales.end(), kNan);
    std::fill(one.shifts.begin(), one.shifts.end(), 1e300);
    one.lengths = {-5, 0, 1, 9, 10, std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()};
    for (const bool has_lengths : {false, true}) {
      one.run(has_lengths);
      for (const std::int64_t length : one.new_lengths) CHECK(1 <= length && length <= 9);
    }
  }
  CHECK(played_length(9, 2.0, 9) == 5 && played_length(9, 0.5, 9) == 9 && played_length(3, 0.5, 9) == 5);
  CHECK(played_length(1, 0.1, 9) == 1 && played_length(4, 1.0, 9) == 4);
}

}  // namespace
