// TensorFlow's resizes of 8-bit images to floats, in its arithmetic; and the scaling of samples.
#pragma once

#include <cstdint>

#include "arena.h"
#include "span.h"

namespace fastpipe {

// Whose pixels a plan makes.
enum class Parity : std::int32_t {
  pillow = 0,
  tensorflow_bilinear = 1,  // tf.image.resize(..., "bilinear" or "nearest") without antialiasing, of images
  tensorflow_nearest = 2,   // that tf.image.decode_image() has decoded
};

// Resample to float32 (to.height, to.width, channels).  Returns false where there is no memory.
//
// The reference is TensorFlow's resize_bilinear_op.cc and resize_nearest_neighbor_op.cc, with half_pixel_centers.
[[nodiscard]] bool resize_as_tensorflow(const Pixels& source, Parity parity, Size to, Arena& arena,
                                        float* out) noexcept;

// What becomes of a sample's numbers at last: number * factor + offset in float32, each operation rounded, or bytes
// that are clipped and rounded, halves to even.
struct Scaling {
  enum class Kind : std::int32_t { none = 0, bytes_to_floats = 1, floats_to_floats = 2, floats_to_bytes = 3 };
  Kind kind = Kind::none;
  float factor = 1, offset = 0;
};

// Scale so many numbers.
void scale(const std::uint8_t* from, std::int64_t count, const Scaling& how, std::uint8_t* to) noexcept;

}  // namespace fastpipe
