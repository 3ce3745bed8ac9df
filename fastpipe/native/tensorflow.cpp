#include "tensorflow.h"

#include <algorithm>
#include <cmath>

#include "kernels.h"

namespace fastpipe {
namespace {

void find_places(std::int32_t in, std::int32_t out, Between* places) {
  const float scale = static_cast<float>(in) / static_cast<float>(out);
  for (std::int32_t i = 0; i < out; ++i) {
    const float place = (static_cast<float>(i) + 0.5f) * scale - 0.5f, floor = std::floor(place);
    const std::int32_t after = std::min(static_cast<std::int32_t>(std::ceil(place)), in - 1);
    places[i] = {std::min(std::max(static_cast<std::int32_t>(floor), 0), after), after, place - floor};
  }
}

// A row of pixels of any number of channels.
void stretch_any_row(const std::uint8_t* row, std::int32_t channels, const Between* places, std::int32_t count,
                     float* to) {
  for (std::int32_t x = 0; x < count; ++x) {
    for (std::int32_t c = 0; c < channels; ++c) {
      const auto a = static_cast<float>(row[places[x].before * channels + c]);
      const auto b = static_cast<float>(row[places[x].after * channels + c]);
      *to++ = a + (b - a) * places[x].part;
    }
  }
}

bool resize_bilinear(const Pixels& source, Size to, Arena& arena, float* out) {
  const std::int64_t line = std::int64_t{to.width} * source.channels;
  auto* columns = arena.array<Between>(static_cast<std::size_t>(to.width));
  auto* rows = arena.array<Between>(static_cast<std::size_t>(to.height));
  float* lines[2] = {arena.array<float>(static_cast<std::size_t>(line + 1)),
                     arena.array<float>(static_cast<std::size_t>(line + 1))};
  if (columns == nullptr || rows == nullptr || lines[0] == nullptr || lines[1] == nullptr) return false;
  find_places(source.width, to.width, columns);
  find_places(source.height, to.height, rows);
  const Kernels& level = kernels();
  std::int32_t held[2] = {-1, -1};  // which row of the image is in each line
  for (std::int32_t y = 0; y < to.height; ++y) {
    const Between place = rows[y];
    const int first = held[1] == place.before ? 1 : 0;
    const std::int32_t wanted[2] = {place.before, place.after};
    for (int i = 0; i < 2; ++i) {
      const int half = i == 0 ? first : 1 - first;
      if (held[half] == wanted[i]) continue;
      const std::uint8_t* row = source.data + wanted[i] * source.pitch;
      if (source.channels == 3) {
        level.stretch_row(row, source.width, columns, to.width, lines[half]);
      } else {
        stretch_any_row(row, source.channels, columns, to.width, lines[half]);
      }
      held[half] = wanted[i];
    }
    level.between_rows(lines[first], lines[1 - first], place.part, line, out + y * line);
  }
  return true;
}

std::int32_t nearest(std::int32_t i, float scale, std::int32_t in) {
  return std::min(static_cast<std::int32_t>(std::floor((static_cast<float>(i) + 0.5f) * scale)), in - 1);
}

bool resize_nearest(const Pixels& source, Size to, Arena& arena, float* out) {
  const float across = static_cast<float>(source.width) / static_cast<float>(to.width);
  const float down = static_cast<float>(source.height) / static_cast<float>(to.height);
  auto* columns = arena.array<std::int32_t>(static_cast<std::size_t>(to.width));
  if (columns == nullptr) return false;
  for (std::int32_t x = 0; x < to.width; ++x) columns[x] = nearest(x, across, source.width) * source.channels;
  for (std::int32_t y = 0; y < to.height; ++y) {
    const std::uint8_t* row = source.data + nearest(y, down, source.height) * source.pitch;
    for (std::int32_t x = 0; x < to.width; ++x) {
      for (std::int32_t c = 0; c < source.channels; ++c) *out++ = static_cast<float>(row[columns[x] + c]);
    }
  }
  return true;
}

}  // namespace

bool resize_as_tensorflow(const Pixels& source, Parity parity, Size to, Arena& arena, float* out) noexcept {
  if (parity == Parity::tensorflow_bilinear) return resize_bilinear(source, to, arena, out);
  return resize_nearest(source, to, arena, out);
}

void scale(const std::uint8_t* from, std::int64_t count, const Scaling& how, std::uint8_t* to) noexcept {
  const auto* floats = reinterpret_cast<const float*>(from);
  auto* out = reinterpret_cast<float*>(to);
  const float factor = how.factor, offset = how.offset;
  switch (how.kind) {
    case Scaling::Kind::none:
      break;
    case Scaling::Kind::bytes_to_floats:
      for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(from[i]) * factor;
      if (offset != 0) {
        for (std::int64_t i = 0; i < count; ++i) out[i] += offset;
      }
      break;
    case Scaling::Kind::floats_to_floats:
      for (std::int64_t i = 0; i < count; ++i) out[i] = floats[i] * factor + offset;
      break;
    case Scaling::Kind::floats_to_bytes:
      for (std::int64_t i = 0; i < count; ++i) {
        to[i] = static_cast<std::uint8_t>(std::min(std::max(std::nearbyint(floats[i]), 0.0f), 255.0f));
      }
      break;
  }
}

}  // namespace fastpipe
