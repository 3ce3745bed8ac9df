#include "tensorflow.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace fastpipe {
namespace {

using Floats = float __attribute__((vector_size(16)));
using FourBytes = std::uint8_t __attribute__((vector_size(4)));

// Between which two elements of a line an element of the output lies, and how far from the first.
struct Place {
  std::int32_t before, after;
  float part;
};

void find_places(std::int32_t in, std::int32_t out, Place* places) {
  const float scale = static_cast<float>(in) / static_cast<float>(out);
  for (std::int32_t i = 0; i < out; ++i) {
    const float place = (static_cast<float>(i) + 0.5f) * scale - 0.5f, floor = std::floor(place);
    const std::int32_t after = std::min(static_cast<std::int32_t>(std::ceil(place)), in - 1);
    places[i] = {std::min(std::max(static_cast<std::int32_t>(floor), 0), after), after, place - floor};
  }
}

Floats pixel_at(const std::uint8_t* pixel, bool is_last) {
  FourBytes bytes = {};
  if (is_last) {  // there may be nothing behind it
    std::memcpy(&bytes, pixel, 3);
  } else {
    std::memcpy(&bytes, pixel, 4);
  }
  return __builtin_convertvector(bytes, Floats);
}

// One row, resampled; `to` has room for one more element.
void stretch_row(const std::uint8_t* row, std::int32_t width, std::int32_t channels, const Place* places,
                 std::int32_t out, float* to) {
  if (channels != 3) {
    for (std::int32_t x = 0; x < out; ++x) {
      for (std::int32_t c = 0; c < channels; ++c) {
        const auto a = static_cast<float>(row[places[x].before * channels + c]);
        const auto b = static_cast<float>(row[places[x].after * channels + c]);
        to[x * channels + c] = a + (b - a) * places[x].part;
      }
    }
    return;
  }
  for (std::int32_t x = 0; x < out; ++x) {
    const Place place = places[x];
    const Floats a = pixel_at(row + std::int64_t{3} * place.before, place.before == width - 1);
    const Floats b = pixel_at(row + std::int64_t{3} * place.after, place.after == width - 1);
    const Floats made = a + (b - a) * place.part;
    std::memcpy(to + std::int64_t{3} * x, &made, sizeof made);
  }
}

bool resize_bilinear(const Pixels& source, Size to, Arena& arena, float* out) {
  const std::int64_t line = std::int64_t{to.width} * source.channels;
  auto* columns = arena.array<Place>(static_cast<std::size_t>(to.width));
  auto* rows = arena.array<Place>(static_cast<std::size_t>(to.height));
  float* lines[2] = {arena.array<float>(static_cast<std::size_t>(line + 1)),
                     arena.array<float>(static_cast<std::size_t>(line + 1))};
  if (columns == nullptr || rows == nullptr || lines[0] == nullptr || lines[1] == nullptr) return false;
  find_places(source.width, to.width, columns);
  find_places(source.height, to.height, rows);
  std::int32_t held[2] = {-1, -1};  // which row of the image is in each line
  for (std::int32_t y = 0; y < to.height; ++y) {
    const Place place = rows[y];
    const int first = held[1] == place.before ? 1 : 0;
    const std::int32_t wanted[2] = {place.before, place.after};
    for (int i = 0; i < 2; ++i) {
      const int half = i == 0 ? first : 1 - first;
      if (held[half] == wanted[i]) continue;
      stretch_row(source.data + wanted[i] * source.pitch, source.width, source.channels, columns, to.width,
                  lines[half]);
      held[half] = wanted[i];
    }
    const float *top = lines[first], *bottom = lines[1 - first];
    float* into = out + y * line;
    for (std::int64_t x = 0; x < line; ++x) into[x] = top[x] + (bottom[x] - top[x]) * place.part;
  }
  return true;
}

std::int32_t nearest(std::int32_t i, float scale, std::int32_t in) {
  return std::min(static_cast<std::int32_t>(std::floor((static_cast<float>(i) + 0.5f) * scale)), in - 1);
}

void resize_nearest(const Pixels& source, Size to, float* out) {
  const float across = static_cast<float>(source.width) / static_cast<float>(to.width);
  const float down = static_cast<float>(source.height) / static_cast<float>(to.height);
  for (std::int32_t y = 0; y < to.height; ++y) {
    const std::uint8_t* row = source.data + nearest(y, down, source.height) * source.pitch;
    for (std::int32_t x = 0; x < to.width; ++x) {
      const std::uint8_t* pixel = row + std::int64_t{nearest(x, across, source.width)} * source.channels;
      for (std::int32_t c = 0; c < source.channels; ++c) *out++ = static_cast<float>(pixel[c]);
    }
  }
}

}  // namespace

bool resize_as_tensorflow(const Pixels& source, Parity parity, Size to, Arena& arena, float* out) noexcept {
  if (parity == Parity::tensorflow_bilinear) return resize_bilinear(source, to, arena, out);
  resize_nearest(source, to, out);
  return true;
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
