// Resampling of 8-bit images that equals Pillow's bit for bit, or torch's.
#pragma once

#include <cstdint>

#include "arena.h"
#include "span.h"

namespace fastpipe {

// Filters.  Those of Pillow widen when they shrink an image (antialiasing).
enum Filter : std::int32_t {
  kBox = 0,
  kBilinear = 1,
  kHamming = 2,
  kBicubic = 3,
  kLanczos = 4,
  kNearest = 5,        // to the centre: Pillow, and torchvision's NEAREST_EXACT
  kNearestFloor = 6,   // rounded down: torch's "nearest"
  kSharpBilinear = 7,  // torch's without antialiasing, which do not widen and repeat the edge
  kSharpBicubic = 8,
  kNarrow = 16,  // a flag: weights of 16 bits, as torch and Pillow-SIMD have them, instead of Pillow's 22
};

// One axis of a resize.
struct Axis {
  std::int32_t in_size = 0;
  std::int64_t start8 = 0, extent8 = 0;  // the part of the input that becomes the output, in eighths of a pixel
  std::int32_t out_size = 0;
  std::int32_t first = 0, length = 0;  // the part of the output that is wanted
  bool turned = false;                 // resample the input as if it had been mirrored before
  bool mirrored = false;               // mirror the output
  std::int32_t low = 0, high = 0;      // the range of input pixels that is needed, and has to be there
  std::int32_t pitch = 0;              // weights kept for each output pixel
};

// The axis of a resize with this filter, from all of an input, or from a part of it in eighths of a pixel.
Axis make_axis(int filter, std::int32_t in_size, std::int32_t out_size, std::int32_t first, std::int32_t length,
               bool turned, bool mirrored, std::int64_t start8, std::int64_t extent8) noexcept;
inline Axis make_axis(int filter, std::int32_t in_size, std::int32_t out_size, std::int32_t first, std::int32_t length,
                      bool turned, bool mirrored) noexcept {
  return make_axis(filter, in_size, out_size, first, length, turned, mirrored, 0, std::int64_t{8} * in_size);
}

// Fixed-point weights of an axis: of each output its first input pixel, the number of inputs and their weights,
// scaled by 2**22; mirrored outputs are in their order.  int32 (length * (pitch + 2)): starts, taps, weights.
void axis_table(int filter, const Axis& axis, std::int32_t* table, double* exact /* pitch */) noexcept;

struct ConversionTables;

// What becomes of the bytes of an image.
struct Conversion {
  enum class Kind : std::int32_t { bytes = 0, affine = 1, table = 2 };
  Kind kind = Kind::bytes;
  std::int32_t channels = 3;  // of the output; grey is copied to three
  bool interleaved = false;   // channels-last memory
  std::int32_t word = 1;      // bytes of an element of the output
  bool divide = true;         // affine: (v / 255 - mean) / std in float32, or with v * (1 / 255)
  float mean[3] = {0, 0, 0};
  float std[3] = {1, 1, 1};
  const std::uint8_t* table = nullptr;       // table: channels × 256 words
  const ConversionTables* tables = nullptr;  // what make_tables() prepared of this; null: it is done for each image
};

// Whether, and when, colours become luma as Pillow's convert("L") computes it.
enum class Grey : std::int32_t { none = 0, before = 1, after = 2 };

// Resample, mirror, make grey and convert in one pass.
//
// source: the pixels from (y.low, x.low) to (y.high, x.high), 3 channels, or 1 that stays one.
// vertical_first: the order of the two passes, each of which rounds to bytes.
// out: how.word * how.channels * y.length * x.length bytes, written completely, planes or interleaved pixels.
// Returns false where there is no memory, or the pixels are fewer than the axes need.
[[nodiscard]] bool resample(const Pixels& source, int filter, const Axis& x, const Axis& y, bool vertical_first,
                            Grey grey, const Conversion& how, Arena& arena, std::uint8_t* out) noexcept;

}  // namespace fastpipe
