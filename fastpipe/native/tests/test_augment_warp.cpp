// Affine maps of images: three channels at once give what each gives alone, at every level; and no place leads outside.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "../arena.h"
#include "../augment.h"
#include "../simd.h"
#include "check.h"

namespace {

using namespace fastpipe;

struct Sides {
  std::int64_t height, width;
};

AugmentPlan warp_plan(Sides size, bool is_nearest, bool has_fill) {
  AugmentPlan plan;
  plan.columns = 6;
  AugmentStep step;
  step.kind = AugmentStep::Kind::warp;
  step.options = {is_nearest ? 1 : 0, 0, static_cast<std::int32_t>(size.height), static_cast<std::int32_t>(size.width)};
  if (has_fill) step.numbers = {0.25f};
  plan.steps.push_back(step);
  return plan;
}

// Planar, or with the channels of each pixel together.
ImageView view_of(std::vector<float>& memory, std::int64_t channels, Sides size, bool is_interleaved) {
  constexpr std::int64_t word = sizeof(float);
  ImageView view;
  view.data = reinterpret_cast<const std::uint8_t*>(memory.data());
  view.element = Element::float32;
  view.channels = channels;
  view.height = size.height;
  view.width = size.width;
  view.strides[0] = is_interleaved ? word : word * size.height * size.width;
  view.strides[1] = is_interleaved ? word * size.width * channels : word * size.width;
  view.strides[2] = is_interleaved ? word * channels : word;
  return view;
}

std::vector<float> warped(const AugmentPlan& plan, std::vector<float> image, std::int64_t channels, Sides size,
                          bool is_interleaved, const double* matrix) {
  std::vector<float> out(image.size());
  Arena arena;
  const ImageView to = view_of(out, channels, size, is_interleaved);
  CHECK(augment(plan, view_of(image, channels, size, is_interleaved), nullptr, matrix, to, false, arena) ==
        Change::made);
  return out;
}

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();
constexpr double kMaps[][6] = {
    {1, 0, 0, 0, 1, 0},
    {0.9, 0.3, 1.25, -0.3, 0.9, -2.5},
    {-1, 0, 0, 0, -1, 0},
    {1, 0, 0.999999, 0, 1, 0.999999},
    {1, 0, 1 - 0x1p-23, 0, 1, 1 - 0x1p-23},
    {1, 0, -0.9999999, 0, 1, -0.9999999},
    {1, 0, 7.9999995, 0, 1, 7.9999995},
    {0.01, 0, 0, 0, 0.01, 0},
    {1e30, 0, 0, 0, 1, 0},
    {kNan, 0, 0, 0, 1, 0},
    {1, 0, kInfinity, 0, 1, -kInfinity},
};
constexpr Sides kSizes[] = {{1, 1}, {1, 7}, {5, 1}, {8, 8}, {13, 19}, {33, 66}, {64, 128}};

}  // namespace

TEST("a warp of three channels is that of each, bit for bit, at every level") {
  const Level before = level();
  std::uint32_t state = 1;
  for (const Sides size : kSizes) {
    const std::int64_t count = size.height * size.width;
    std::vector<float> planar(static_cast<std::size_t>(3 * count)), interleaved(planar.size());
    for (float& value : planar) {
      state = state * 1664525u + 1013904223u;
      value = static_cast<float>(state >> 8) * 0x1p-24f;
    }
    for (std::int64_t c = 0; c < 3; ++c) {
      for (std::int64_t i = 0; i < count; ++i) {
        interleaved[static_cast<std::size_t>(3 * i + c)] = planar[static_cast<std::size_t>(c * count + i)];
      }
    }
    for (const auto& matrix : kMaps) {
      for (int kind = 0; kind < 4; ++kind) {
        const AugmentPlan plan = warp_plan(size, (kind & 1) != 0, (kind & 2) != 0);
        std::vector<float> first;
        for (int number = 0; number < 3; ++number) {
          if (!force_level(static_cast<Level>(number))) continue;
          const std::vector<float> made = warped(plan, planar, 3, size, false, matrix);
          const std::vector<float> other = warped(plan, interleaved, 3, size, true, matrix);
          for (std::int64_t c = 0; c < 3; ++c) {
            const auto begin = planar.begin() + c * count;
            const std::vector<float> one = warped(plan, {begin, begin + count}, 1, size, false, matrix);
            CHECK(std::memcmp(one.data(), made.data() + c * count, one.size() * sizeof(float)) == 0);
            for (std::int64_t i = 0; i < count; ++i) {
              const float value = other[static_cast<std::size_t>(3 * i + c)];
              CHECK(std::memcmp(&value, &one[static_cast<std::size_t>(i)], sizeof value) == 0);
            }
          }
          if (first.empty()) first = made;
          CHECK(std::memcmp(first.data(), made.data(), made.size() * sizeof(float)) == 0);
        }
      }
    }
  }
  CHECK(force_level(before));
}

TEST("places a little before the end of an image are within it") {
  const Level before = level();
  for (int number = 0; number < 3; ++number) {
    if (!force_level(static_cast<Level>(number))) continue;
    for (const Sides size : kSizes) {
      const std::vector<float> ones(static_cast<std::size_t>(3 * size.height * size.width), 1.0f);
      for (int shift = 1; shift < 27; ++shift) {
        const double at = 1 - std::ldexp(1.0, -shift);
        const double matrix[6] = {1, 0, at, 0, 1, at};
        const std::vector<float> made = warped(warp_plan(size, false, false), ones, 3, size, false, matrix);
        const float last = made[static_cast<std::size_t>(size.height * size.width - 1)];
        // Of the last pixel a part is inside: nothing else has been read.
        CHECK(std::fabs(last - static_cast<float>((1 - at) * (1 - at))) < 1e-4f);
        for (const float value : made) CHECK(value >= 0.0f && value <= 1.000001f);
      }
    }
  }
  CHECK(force_level(before));
}
