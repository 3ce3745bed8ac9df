// JPEG: what a file says of itself, and decoding the part of it that is needed.
#pragma once

#include <cstdint>
#include <memory>

#include "arena.h"
#include "coefficients.h"
#include "span.h"
#include "status.h"

namespace fastpipe {

// Facts from a JPEG's header; all zero where this is no JPEG, or its structure is broken before the first scan.
struct JpegHeader {
  std::int32_t height = 0, width = 0;  // in pixels, before any EXIF turn
  bool trusted = false;          // libjpeg-turbo gives Pillow's pixels for this kind of file, and all scans are there
  std::int32_t orientation = 0;  // EXIF orientation 1 … 8; 1 where there is none; 0 where Pillow has to be asked
  std::int64_t frame = 0;        // where the frame header's body begins in the file
  bool is_jpeg() const { return height > 0; }
};

// Walk a JPEG's segments and, of a kind that may be trusted, its scans up to the end marker.
JpegHeader read_jpeg_header(Bytes file) noexcept;

// Return whether only comments and application segments follow the scan that goes on at `position`.  Tables may follow
// a scan, too.  No pixel depends on them, but Pillow reads them and fails if they are damaged.
bool ends_after_scan(Bytes file, std::int64_t position) noexcept;

// Places in a JPEG at which decoding can begin: a checksum of the file, uint64, and the index that ScanRows writes.
struct JpegIndex {
  Bytes known;            // no byte of which is trusted, and which is not used if it is another file's; or nothing
  Bytes* made = nullptr;  // where to put a new one, in the arena; no bytes of a file that has none.  Null for nowhere
};

// Decodes parts of trusted JPEGs to RGB with libjpeg-turbo's accurate settings (islow DCT, fancy upsampling), which
// are Pillow's, or as `JpegPixels` says.  For one thread; keeps its tables and buffers from image to image.
class JpegDecoder {
 public:
  JpegDecoder() noexcept;
  ~JpegDecoder();
  JpegDecoder(const JpegDecoder&) = delete;
  JpegDecoder& operator=(const JpegDecoder&) = delete;

  // Decode a box that lies inside the image: the same pixels as a crop of the whole decoded image.
  //
  // file: of which read_jpeg_header() says that it is trusted.
  // arena: where the pixels (and rows that are decoded beside them) lie, valid until it is reset.
  // pixels: where they are, of the box's size, 3 channels (1 of luma); the pitch may be wider than the box.
  // index: with a known one, entropy decoding begins near the box; to make one, all of the file is read.
  // Returns made, or declined: damaged (any warning of libjpeg's is one), no_memory.
  Status decode(Bytes file, Box box, Arena& arena, Pixels* pixels, JpegPixels kind = JpegPixels::pillow,
                JpegIndex index = {}) noexcept;

  // Find out whether decode() may fail later: made if only a warning about the pixels' data is possible, for which
  // Pillow raises no error.  Declined as decode(), or with Reason::asked if the file has several scans, whose tables
  // are only read with the scans.
  Status probe(Bytes file) noexcept;

  // Read all coefficients of a file, and whatever follows them, and write them in the form of pack_coefficients().
  //
  // entry: in the arena.
  // Returns made, or declined as decode(); untrusted if decode_pixels() does not take such a file; too_large.
  Status pack(Bytes file, Arena& arena, Bytes* entry) noexcept;

  // Decode a box of the image at 1 / factor (2, 4 or 8) of its size, each side rounded up.  Otherwise as decode().
  Status decode_reduced(Bytes file, int factor, Box box, Arena& arena, Pixels* pixels, JpegIndex index = {}) noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The version of libjpeg-turbo that this was compiled with.
const char* jpeg_version() noexcept;

}  // namespace fastpipe
