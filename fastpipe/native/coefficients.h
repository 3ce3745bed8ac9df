// The coefficients of a JPEG in a form of our own, which is cached instead of its pixels.
//
// All of a JPEG's pixels follow from its quantised coefficients, and no Huffman code has to be decoded again.  Rows of
// blocks can be read by themselves, and columns can be passed over.
//
// The form, in the machine's byte order.  A header (`CoefficientHeader`); then, for each component and each of its
// rows of blocks, where the row begins, and where the last one ends, uint32, counted from the beginning of the entry;
// then the rows.  A row has, of its blocks from left to right:
//   - heads, a byte each: how many bytes of its mask are there (0 … 8); kWideDc, kWideValues
//   - counts, a byte each: how many values are bytes; the others are half bytes
//   - what is added to the DC coefficient of the block before, int8, or int16 after kWideDc
//   - masks, as many bytes as are not 0 from the lowest on: bit i, if coefficient i + 1 of the zigzag order is not 0
//   - values of these coefficients, in their order: int8, or int16 after kWideValues; then half bytes, the lower first:
//     v + 8 of a negative v, else v + 7
// kCoefficientSlack bytes follow.
//
// An entry may be compressed.  Its table says where strips of kStripRows rows begin in place of rows.  A strip has, of
// each of its rows, how many bytes its differences, its masks and its values take, uint32 each; then how many bytes
// each of five frames of zstd takes, uint32; then these: the heads of all rows, their counts, and so on.
#pragma once

#include <cstdint>

#include "arena.h"
#include "codecs.h"
#include "jpeg_pixels.h"
#include "span.h"

namespace fastpipe {

constexpr int kCoefficientsVersion = 1;          // of this form, and of indices
constexpr std::int64_t kCoefficientSlack = 256;  // bytes that reading may touch behind the last row

// Write an entry.
//
// rows: of all MCUs.
// entry: in the arena.
// Returns made, or declined: damaged coefficients, no_memory, or too_large for an entry.
Status pack_coefficients(const JpegFrame& frame, CoefficientRows& rows, Arena& arena, Bytes* entry) noexcept;

// Write an entry in the compressed form.  Returns it, in the arena; no bytes where there is no memory.
//
// entry: of pack_coefficients().
Bytes compress_coefficients(Bytes entry, Arena& arena, CodecStates& codecs) noexcept;

// Reads an entry of either form, of which no byte is trusted.
class KeptCoefficients : public CoefficientRows {
 public:
  // Begin to read an entry; false where it is none, or is damaged.
  //
  // arena: for strips of a compressed entry, until the last row has been read.
  bool open(Bytes entry, Arena& arena, CodecStates& codecs) noexcept;
  const JpegFrame& frame() const noexcept { return frame_; }
  // The size of the entry, or about that of one that is not compressed.
  std::size_t nbytes() const noexcept { return is_compressed_ ? entry_.size / 3 * 4 : entry_.size; }
  bool read(std::int32_t row, std::int32_t first, std::int32_t count, std::int16_t* const* blocks,
            const std::int64_t* pitches, const bool* dc_only) noexcept override;

 private:
  // The last strip of a component that was inflated: rows as those of an entry that is not compressed.
  struct Strip {
    std::int32_t number = -1;
    const std::uint8_t* rows = nullptr;
    const std::uint32_t* begins = nullptr;  // of each row, and where the last one ends
  };

  friend Bytes compress_coefficients(Bytes, Arena&, CodecStates&) noexcept;
  Bytes part(std::int64_t number) const noexcept;
  Bytes row_of(int component, std::int32_t y) noexcept;
  bool inflate(int component, std::int32_t number) noexcept;

  Bytes entry_;
  JpegFrame frame_;
  bool is_compressed_ = false;
  std::int64_t above_[3] = {};  // strips of the components before
  Strip strips_[3];
  Arena* arena_ = nullptr;
  CodecStates* codecs_ = nullptr;
};

}  // namespace fastpipe
