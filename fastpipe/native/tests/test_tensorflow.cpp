// TensorFlow's resizes and the scaling of samples: by a second, slower way to compute the same.
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "../simd.h"
#include "../tensorflow.h"
#include "check.h"
#include "make_jpeg.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::tests;

// One element of tf.image.resize(image, to, "bilinear"), from its definition.
float bilinear_at(const Pixels& image, Size to, std::int32_t y, std::int32_t x, std::int32_t c) {
  const float across = static_cast<float>(image.width) / static_cast<float>(to.width);
  const float down = static_cast<float>(image.height) / static_cast<float>(to.height);
  const float in_x = (static_cast<float>(x) + 0.5f) * across - 0.5f;
  const float in_y = (static_cast<float>(y) + 0.5f) * down - 0.5f;
  const auto value = [&](float row, float column) {
    const auto clamp = [](float place, std::int32_t size) {
      return std::min(std::max(static_cast<std::int32_t>(place), 0), size - 1);
    };
    return static_cast<float>(
        image.data[clamp(row, image.height) * image.pitch + clamp(column, image.width) * image.channels + c]);
  };
  const auto row_at = [&](float row) {
    const float left = value(row, std::floor(in_x)), right = value(row, std::ceil(in_x));
    return left + (right - left) * (in_x - std::floor(in_x));
  };
  const float top = row_at(std::floor(in_y)), bottom = row_at(std::ceil(in_y));
  return top + (bottom - top) * (in_y - std::floor(in_y));
}

}  // namespace

TEST("tensorflow: resizes to the last bit at each level, at the ends of memory, of any size and stride") {
  Arena arena;
  for (const auto& [level, channels] : {std::pair{Level::baseline, 1},
                                        {Level::baseline, 3},
                                        {Level::baseline, 4},
                                        {Level::avx2, 3},
                                        {Level::avx512, 3}}) {
    if (!force_level(level)) continue;
    for (const Size from : {Size{1, 1}, Size{1, 9}, Size{7, 1}, Size{13, 17}, Size{40, 33}}) {
      for (const Size to : {Size{1, 1}, Size{5, 3}, Size{13, 17}, Size{31, 64}}) {
        arena.reset();
        const std::int64_t pitch = std::int64_t{from.width} * channels + (from.height > 1 ? 5 : 0);
        // Exactly as long as the pixels, so that a sanitizer sees what is read behind them.
        const std::size_t size =
            static_cast<std::size_t>(pitch * (from.height - 1) + std::int64_t{from.width} * channels);
        const std::unique_ptr<std::uint8_t[]> bytes(new std::uint8_t[size]);
        for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(random_below(256));
        const Pixels image{bytes.get(), pitch, from.height, from.width, channels};
        std::vector<float> made(static_cast<std::size_t>(to.height) * to.width * channels);
        CHECK(resize_as_tensorflow(image, Parity::tensorflow_bilinear, to, arena, made.data()));
        bool is_same = true;
        for (std::int32_t y = 0; y < to.height; ++y) {
          for (std::int32_t x = 0; x < to.width; ++x) {
            for (std::int32_t c = 0; c < channels; ++c) {
              const float expected = bilinear_at(image, to, y, x, c);
              const float found = made[static_cast<std::size_t>((y * to.width + x) * channels + c)];
              is_same = is_same && std::memcmp(&expected, &found, sizeof found) == 0;
            }
          }
        }
        CHECK(is_same);
        CHECK(resize_as_tensorflow(image, Parity::tensorflow_nearest, to, arena, made.data()));
        for (const float value : made) CHECK(value >= 0 && value <= 255 && value == std::floor(value));
      }
    }
  }
  CHECK(force_level(best_level()));
}

TEST("tensorflow: samples are scaled in float32, and rounded to even") {
  const std::vector<std::uint8_t> bytes{0, 1, 127, 255};
  std::vector<float> floats(4);
  const auto run = [](const void* from, Scaling::Kind kind, float factor, float offset, void* to) {
    scale(static_cast<const std::uint8_t*>(from), 4, {kind, factor, offset}, static_cast<std::uint8_t*>(to));
  };
  run(bytes.data(), Scaling::Kind::bytes_to_floats, 1.0f / 255.0f, 0, floats.data());
  CHECK(floats[3] == 255.0f * (1.0f / 255.0f) && floats[0] == 0);
  run(bytes.data(), Scaling::Kind::bytes_to_floats, 1.0f / 127.5f, -1, floats.data());
  CHECK(floats[0] == -1 && floats[2] == 127.0f * (1.0f / 127.5f) + -1.0f);
  const std::vector<float> numbers{-3, 0.5f, 1.5f, 300};
  std::vector<std::uint8_t> rounded(4);
  run(numbers.data(), Scaling::Kind::floats_to_bytes, 1, 0, rounded.data());
  CHECK((rounded == std::vector<std::uint8_t>{0, 0, 2, 255}));
  run(numbers.data(), Scaling::Kind::floats_to_floats, 2, 1, floats.data());
  CHECK((floats == std::vector<float>{-5, 2, 4, 601}));
}
