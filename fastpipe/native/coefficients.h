// The coefficients of a JPEG in a form of our own, which is cached instead of its pixels.
//
// All of a JPEG's pixels follow from its quantised coefficients, and no Huffman code has to be decoded again.  Rows of
// blocks can be read by themselves, and columns can be passed over.
//
// The form, little-endian.  A header (`CoefficientHeader`).  The steps of each component, row by row.  For each
// component and each of its rows of blocks, where the row begins, and where the last one ends, uint32, counted from the
// entry's beginning.  Then the rows, each with, of its blocks from left to right:
//   - how many bits a difference of DC coefficients takes, a byte
//   - shapes, a byte each: a number in kBlockShapes
//   - what is added to the DC coefficient of the block before, as many bits as that byte says; the least number is an
//     escape: the difference is below
//   - masks, as many bits as the shape says: bit i, if coefficient i + 1 of the zigzag order is not 0
//   - the first values of coefficients that are not 0, as many as the shape says, int8: 0 behind the block's last one,
//     and -128 is an escape
//   - of each block, the numbers that are escaped, int16, that of the DC coefficient first; then the values that
//     are half bytes, v + 7, or v + 8 of a negative v; then the others, two bits each, v + 1, or v + 2 of a negative v
// Each begins at a whole byte, and bits are filled from the lowest on.  kCoefficientSlack bytes follow the last row.
#pragma once

#include <cstdint>

#include "arena.h"
#include "jpeg_pixels.h"
#include "span.h"

namespace fastpipe {

constexpr int kCoefficientsVersion = 2;         // of this form, and of indices
constexpr std::int64_t kCoefficientSlack = 72;  // bytes that reading may touch behind the last row

// Write an entry.
//
// rows: of all MCUs.
// entry: in the arena.
// Returns made, or declined: damaged coefficients, no_memory, or too_large for an entry.
Status pack_coefficients(const JpegFrame& frame, CoefficientRows& rows, Arena& arena, Bytes* entry) noexcept;

// Reads an entry, of which no byte is trusted.
class KeptCoefficients : public CoefficientRows {
 public:
  // Begin to read an entry; false where it is none, or is damaged.
  bool open(Bytes entry) noexcept;
  const JpegFrame& frame() const noexcept { return frame_; }
  std::size_t nbytes() const noexcept { return entry_.size; }
  bool read(std::int32_t row, std::int32_t first, std::int32_t count, std::int16_t* const* blocks,
            const std::int64_t* pitches, const bool* dc_only) noexcept override;

 private:
  Bytes row_of(int component, std::int32_t y) const noexcept;

  Bytes entry_;
  std::size_t table_begin_ = 0;
  JpegFrame frame_;
};

}  // namespace fastpipe
