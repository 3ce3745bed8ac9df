// From a JPEG's coefficients to its pixels, at its size or at a part of it: the part of decoding that follows entropy
// decoding.
//
// Inverse DCT, upsampling and colour conversion are those of libjpeg-turbo's accurate settings (ISLOW, fancy
// upsampling), which are Pillow's, or with its fast DCT (IFAST), which TensorFlow takes.  Pixels are equal bit for bit.
#pragma once

#include <cstdint>

#include "arena.h"
#include "span.h"
#include "status.h"

namespace fastpipe {

// The place in a block of each coefficient of the zigzag order.  Places behind the last one are asked for only where
// data are damaged.
constexpr std::uint8_t kZigzag[64 + 32] = {0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,   //
                                           12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,  7,  14, 21, 28,  //
                                           35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51,  //
                                           58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,  //
                                           63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,  //
                                           63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63};

// Whose pixels are decoded: Pillow's RGB; or those of TensorFlow, whose default is the fast DCT: RGB, or the luma
// alone.
enum class JpegPixels : std::int32_t { pillow = 0, tensorflow = 1, tensorflow_grey = 2 };

// A component of a frame.  A block has 8 x 8 samples.
struct JpegPlane {
  std::int32_t horizontal = 1, vertical = 1;  // sampling factors: blocks of it in an MCU
  std::int32_t columns = 0, rows = 0;         // blocks that hold samples of the image, without those that fill MCUs
  std::uint16_t steps[64] = {};               // its quantisation table, row by row
};

// What decoding has to know of a file but its coefficients: a grey image, or one of YCbCr.
struct JpegFrame {
  Size size;                    // in pixels
  std::int32_t components = 0;  // 1 or 3
  JpegPlane planes[3];

  std::int32_t mcu_rows() const noexcept { return of_mcus(size.height, planes[0].vertical); }
  std::int32_t mcu_columns() const noexcept { return of_mcus(size.width, planes[0].horizontal); }

  // Return its size at 1 / factor.
  Size reduced(int factor) const noexcept {
    return {(size.height + factor - 1) / factor, (size.width + factor - 1) / factor};
  }

  // Set the number of blocks of each plane by `size` and the sampling factors.  Returns whether decode_pixels() takes
  // such a frame: chroma has all of the luma's samples, half of them along rows, or half along both sides; and more
  // than two in a row.
  bool complete() noexcept;

 private:
  static std::int32_t of_mcus(std::int32_t pixels, std::int32_t factor) noexcept {
    return (pixels + 8 * factor - 1) / (8 * factor);
  }
};

// Where a frame's coefficients come from.  For one thread.
class CoefficientRows {
 public:
  virtual ~CoefficientRows() = default;

  // Write the coefficients of the MCUs first … first + count - 1 of a row of MCUs.  Rows are asked for from the top
  // down, each at most once.
  //
  // blocks: of each component, or null where a component's are not needed: its `vertical` rows of blocks, each of them
  // `count * horizontal` blocks of 64 coefficients, not yet multiplied by their steps, row by row.  Blocks that hold no
  // samples of the image are left as they are.
  // pitches: coefficients from one row of blocks to the next.
  // dc_only: of each component, whether the first coefficient of a block is enough; the others may then be anything.
  // Returns false where the coefficients are damaged.
  virtual bool read(std::int32_t row, std::int32_t first, std::int32_t count, std::int16_t* const* blocks,
                    const std::int64_t* pitches, const bool* dc_only) noexcept = 0;
};

// Decode a box that lies inside the image to RGB: the pixels of a crop of the whole decoded image.
//
// frame: of which complete() was true.
// factor: decode at 1 / factor (1, 2, 4 or 8) of the size, each side rounded up; the box is one of that image.
// arena: where the pixels lie, valid until it is reset.
// kind: with TensorFlow's, the factor is 1.
// Returns made, or declined: no_memory; damaged, also where coefficients are such as no encoder makes of 8 bits, which
// libjpeg-turbo's variants for different processors decode differently.
Status decode_pixels(const JpegFrame& frame, CoefficientRows& rows, int factor, Box box, Arena& arena, Pixels* pixels,
                     JpegPixels kind = JpegPixels::pillow) noexcept;

}  // namespace fastpipe
