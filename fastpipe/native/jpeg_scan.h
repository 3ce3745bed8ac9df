// The coefficients of a sequential JPEG, decoded from its scan; and an index, with which decoding begins in the middle.
//
// An index says, for every so many MCUs, where in the file the bits of an MCU begin, and which DC coefficients come
// before them.  It takes at most 2 % of the file's bytes and a few more.  It has no version of its own: the cache's key
// has one. All numbers are little-endian: how many MCUs are from one entry to the next, uint32; then an entry for each
// such number of MCUs but the first:
//   - the position of the MCU's first bit, counted in bits from the file's beginning, 5 bytes; in front of a restart
//     marker, if the MCU follows one
//   - for each component, the DC coefficient of the last block before, int16
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "arena.h"
#include "jpeg_pixels.h"
#include "span.h"

namespace fastpipe {

// Decodes Huffman codes of a file with one scan (SOF0 or SOF1).  For one thread; keeps its tables from image to image,
// as many files have the same.
//
// Where a function returns true, libjpeg-turbo decodes the same coefficients without a warning.  Whatever is unusual is
// false, and left to libjpeg.
class ScanRows : public CoefficientRows {
 public:
  ScanRows() noexcept;
  ~ScanRows() override;
  ScanRows(const ScanRows&) = delete;
  ScanRows& operator=(const ScanRows&) = delete;

  // Read the header and the tables of a file of which read_jpeg_header() says that it is trusted.  The file has to stay
  // until its last row has been read.  False if the file is not decoded here.
  bool open(Bytes file) noexcept;

  // The frame of the file; complete() was true.
  const JpegFrame& frame() const noexcept;

  // Without an index, all MCUs down to the end of the row are decoded, and all codes above are checked; with one, only
  // the MCUs that are asked for, and those from the entry of the index before them.
  bool read(std::int32_t row, std::int32_t first, std::int32_t count, std::int16_t* const* blocks,
            const std::int64_t* pitches, const bool* dc_only) noexcept override;

  // Return where in the file the coded data go on behind the last MCU that was read: ends_after_scan() takes that.
  std::int64_t position() const noexcept;

  // Begin to write the index of a file that has just been opened.  It lies in the arena.
  void begin_index(Arena& arena) noexcept;
  // Pass over the MCUs behind the last one that was read, and return the index; no bytes if the scan is damaged, or
  // there was no memory.  Another open() has to follow before read().
  Bytes end_index() noexcept;

  // Use an index, of which no byte is trusted, for the file that has just been opened.  It has to stay until the last
  // row has been read.  False if it has not the size of an index of such a file; it is then not used.
  bool use_index(Bytes index) noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fastpipe
