// The inner loops of resampling, conversion and decoding: one table of functions for each Level, equal in all their
// results.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastpipe {

// Resampling of rows of one image, as resample_columns takes it.
struct Columns {
  std::int32_t channels = 3;              // 1 or 3, interleaved in the rows
  std::int32_t width = 0;                 // pixels of a row
  std::int32_t count = 0;                 // pixels of a resampled row
  std::int32_t pitch = 0;                 // weights kept for each
  const std::int32_t* starts = nullptr;   // (count) from the first pixel of a row
  const std::int32_t* taps = nullptr;     // (count)
  const std::int32_t* weights = nullptr;  // (count, pitch)
  // Bytes from one colour of a resampled row to the next: a multiple of the kernels' tile.
  std::int64_t plane = 0;
  std::uint8_t* memory = nullptr;  // columns_memory() bytes, aligned to 64
};

// How bytes become float32: (v * inverse - mean) * (1 / std), where v * inverse is fma(v, high, v * low).
// Element i of the output has number i % kLanes of each, which are those of one channel, or of three in turn.
struct AffineFactors {
  static constexpr int kLanes = 48;
  float mean[kLanes];
  float high[kLanes];  // the inverse of std
  float low[kLanes];
  float inverse_high, inverse_low;
};

// Where a row of planes goes as floats.
struct RowsOfFloats {
  int channels;
  std::int64_t plane;            // bytes from one channel to the next, before; 0: all are copies of one
  std::int64_t count;            // pixels
  const AffineFactors* factors;  // (channels)
  float* to[3];                  // (channels)
  bool streams;                  // see Kernels::affine
};

// Which two elements of a line an element of a resized one lies between, and how far from the first.
struct Between {
  std::int32_t before, after;  // neither becomes smaller along a line
  float part;
};

// The low and the high bytes of the 16-bit words that bytes become.
struct Words16 {
  std::uint8_t bytes[2][256];
};

struct Kernels {
  int tile;  // see resample_columns

  // Have what was written past the caches seen by other threads: see `affine`.  Null: this level never writes so, as it
  // is not faster.
  void (*end_streaming)();

  // How much memory resampling of rows needs.
  std::size_t (*columns_memory)(const Columns&);
  // Arrange the weights in that memory.
  void (*prepare_columns)(const Columns&);
  // How many rows should be resampled at a time, once that is done: fewer cost nearly as much.
  int (*rows_at_once)(const Columns&);
  // Resample rows, at most `rows_at_once`, into rows of planes: channels * plane bytes, of which those from
  // `count` on are unspecified.  Each `tile` bytes are in the order that is best for this level; see
  // `untile`.
  void (*resample_columns)(const Columns&, const std::uint8_t* const* rows, int number, std::uint8_t* const* out);
  // Put the bytes of tiles in the order of the pixels; size is a multiple of a tile.  Null: they are in it.
  void (*untile)(const std::uint8_t* from, std::int64_t size, std::uint8_t* to);
  // Resample columns: out[i] = clip((2**21 + sum over k of rows[k][i] * weights[k]) >> 22), for i < size.
  void (*weighted_rows)(const std::uint8_t* const* rows, const std::int32_t* weights, std::int32_t taps,
                        std::int64_t size, std::uint8_t* out);
  // The same and untile and affine in one.  Null: this level has nothing better than these.
  void (*weighted_rows_affine)(const std::uint8_t* const* rows, const std::int32_t* weights, std::int32_t taps,
                               const RowsOfFloats&);

  // Separate and interleave the colours of `count` pixels; planes begin `plane` bytes apart.
  void (*split)(const std::uint8_t* pixels, std::int64_t count, std::uint8_t* planes, std::int64_t plane);
  void (*interleave)(const std::uint8_t* const* planes, std::int64_t count, std::uint8_t* pixels);
  void (*reverse)(const std::uint8_t* from, std::int64_t count, std::uint8_t* to);
  // Luma with Pillow's integer weights.
  void (*luma)(const std::uint8_t* const* planes, std::int64_t count, std::uint8_t* grey);

  // Convert elements of a row.  Null: this level has nothing better than a table of 256 values.
  //
  // streams: write past the caches, where memory is aligned to 64: what is in them serves the next image better than
  // this one's pixels, which this thread does not read.
  void (*affine)(const std::uint8_t* from, std::int64_t count, const AffineFactors&, float* to, bool streams);
  void (*lookup16)(const std::uint8_t* from, std::int64_t count, const Words16&, std::uint16_t* to, bool streams);
  void (*lookup16_interleaved)(const std::uint8_t* const* planes, std::int64_t count, const Words16*, std::uint16_t* to,
                               bool streams);

  // Resize a row of `width` pixels of three colours to `count` pixels of floats; `to` has room for one number more.
  void (*stretch_row)(const std::uint8_t* row, std::int32_t width, const Between*, std::int32_t count, float* to);
  // out[i] = top[i] + (bottom[i] - top[i]) * part, each operation rounded.
  void (*between_rows)(const float* top, const float* bottom, float part, std::int64_t count, float* out);

  // Interleave planes of bytes: to[element * k + byte] = from[plane * byte + k], for k < count.
  void (*unshuffle)(const std::uint8_t* from, std::int64_t plane, std::int32_t element, std::int64_t count,
                    std::uint8_t* to);
  // The same for bits, each row of which has `row` bytes, with a bit for each of 8 * row elements.
  void (*unshuffle_bits)(const std::uint8_t* from, std::int64_t row, std::int32_t element, std::uint8_t* to);
};

// The table of the level in use.
const Kernels& kernels() noexcept;

}  // namespace fastpipe
