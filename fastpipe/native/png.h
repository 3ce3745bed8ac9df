// PNG: what a file says of itself, and its pixels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arena.h"
#include "codecs.h"
#include "span.h"
#include "status.h"

namespace fastpipe {

// The numbers that PNG gives the kinds of pixels.
enum class PngColour : std::int32_t { grey = 0, rgb = 2, palette = 3, grey_alpha = 4, rgba = 6 };

// Facts from a PNG's chunks; all zero where this is no PNG, or its structure is broken anywhere.
struct PngHeader {
  std::int32_t height = 0, width = 0;  // in pixels
  std::int32_t bits = 0;               // of a sample: 1, 2, 4, 8 or 16
  PngColour colour = PngColour::grey;
  // The file is one that Pillow opens and converts to RGB without a warning or an error, and decode_png() converts
  // alike: 8 bits, no transparent colour, no chunk that Pillow may refuse.
  bool trusted = false;
  bool may_turn = false;  // a chunk is there in which Pillow looks for an EXIF orientation
  Bytes palette;          // 3 bytes for each colour; none where there is no palette
  std::size_t data = 0;   // where the first chunk of pixels begins in the file
  bool is_png() const { return height > 0; }
  std::int32_t channels() const;  // samples of a pixel
};

// Walk the chunks up to the last, and compare their checksums.  Interlaced and animated files count as broken.
PngHeader read_png_header(Bytes file, Arena& arena, CodecStates& states) noexcept;

// Decode the first rows as they are stored, packed where samples have fewer than 8 bits.
//
// count: 1 … header.height.
// rows: height, width and pitch are in rows and bytes; valid until the arena is reset.
// Returns made, or declined: damaged, no_memory.
Status decode_png_rows(Bytes file, const PngHeader& header, std::int32_t count, Arena& arena, CodecStates& states,
                       Pixels* rows) noexcept;

// Decode a box that lies inside the image to RGB, as Pillow's convert("RGB") does.
//
// file: of which read_png_header() says that it is trusted.
// Otherwise as decode_png_rows().
Status decode_png(Bytes file, const PngHeader& header, const Box& box, Arena& arena, CodecStates& states,
                  Pixels* pixels) noexcept;

}  // namespace fastpipe
