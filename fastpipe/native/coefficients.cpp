#include "coefficients.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "block_shapes.h"
#include "levels.h"

namespace fastpipe {
namespace {

constexpr char kMagic[8] = {'f', 'p', 'c', 'o', 'e', 'f', '2', '\n'};
constexpr std::int64_t kMostOfEntry = std::numeric_limits<std::int32_t>::max();
constexpr int kEscape = -128;                   // the value does not fit, and follows in the row's bits
constexpr int kMostHalf = 8, kMostQuarter = 2;  // the largest values of half bytes, and of two bits
constexpr int kStreams = 5;                     // of a row
// Of a block, in bytes: shape, DC, mask, values that are bytes; and bits, as if all were of int16.
constexpr std::int64_t kMostOfStream[kStreams] = {1, 2, 8, 63, 2 * 64};
constexpr std::int64_t kMostOfBlock =
    kMostOfStream[0] + kMostOfStream[1] + kMostOfStream[2] + kMostOfStream[3] + kMostOfStream[4];

struct CoefficientHeader {
  char magic[8];
  std::int32_t height, width, components;
  std::int32_t horizontal, vertical;  // the first component's sampling factors
  std::int32_t step_size;             // bytes of a step, 1 or 2
};

// Where the coefficients of the file's order are in a block, and the other way round.
struct Places {
  std::uint16_t in_rows[64] = {};
  std::uint8_t in_zigzag[64] = {};
  constexpr Places() {
    for (std::size_t i = 0; i < 64; ++i) {
      in_rows[i] = kZigzag[i];
      in_zigzag[kZigzag[i]] = static_cast<std::uint8_t>(i);
    }
  }
};
constexpr Places kPlaces;

// Return the bits below a number, 0 … 63.
inline __attribute__((always_inline)) constexpr std::uint64_t bits_below(std::int64_t count) noexcept {
  return (std::uint64_t{1} << count) - 1;
}

// A shape and a number of values that are not 0: how many of these are bytes, half bytes and two bits.
struct ValueCounts {
  std::int64_t bytes, halves, quarters;
  __attribute__((always_inline)) ValueCounts(BlockShape shape, std::int64_t count) noexcept
      : bytes(count < shape.bytes ? count : shape.bytes),
        halves((count < shape.halves ? count : shape.halves) - bytes),
        quarters(count - bytes - halves) {}
};

// What is known of a block's coefficients but the first.  Bits are those of the zigzag order.
struct Nonzero {
  std::uint64_t found, escaped;  // those that are not 0, and of these, those that are beyond -127 to 127
  std::int64_t count;            // of those that are not 0
  std::int64_t bytes, halves;    // of these, up to the last one that is more than a half byte, and than two bits

  // large, larger: coefficients that are more than two bits, and than a half byte.
  __attribute__((always_inline)) void take(std::uint64_t not_zero, std::uint64_t large, std::uint64_t larger,
                                           std::uint64_t no_byte) noexcept {
    found = not_zero;
    escaped = no_byte;
    count = __builtin_popcountll(found);
    halves = up_to_last(large);
    bytes = up_to_last(larger);
  }
  // Return how many bits of the mask the block needs.
  __attribute__((always_inline)) int mask_bits() const noexcept { return found == 0 ? 0 : 63 - __builtin_clzll(found); }

 private:
  __attribute__((always_inline)) std::int64_t up_to_last(std::uint64_t some) const noexcept {
    return some == 0 ? 0 : __builtin_popcountll(found & (~std::uint64_t{0} >> __builtin_clzll(some)));
  }
};

// The shape that needs the fewest bits, by what a block needs at least.
class ShapeChoice {
 public:
  ShapeChoice() noexcept {
    std::memset(chosen_, 255, sizeof chosen_);
    for (int i = 0; i < 255; ++i) {
      const BlockShape shape = kBlockShapes[i];
      chosen_[shape.mask][shape.halves][shape.bytes] = static_cast<std::uint8_t>(i);
    }
    // A block has no more bytes than bytes and half bytes, and no more of these than bits of its mask.
    for (int mask = 63; mask >= 0; --mask) {
      for (int halves = mask; halves >= 0; --halves) {
        for (int bytes = halves; bytes >= 0; --bytes) {
          std::uint8_t& chosen = chosen_[mask][halves][bytes];
          const auto prefer = [&chosen](std::uint8_t larger) {
            if (cost_of(larger) < cost_of(chosen)) chosen = larger;
          };
          prefer(chosen_[mask + 1][halves][bytes]);
          prefer(chosen_[mask][halves + 1][bytes]);
          prefer(chosen_[mask][halves][bytes + 1]);
        }
      }
    }
  }
  std::uint8_t of(int mask, int bytes, int halves) const noexcept { return chosen_[mask][halves][bytes]; }

 private:
  // Return the bits of a block of this shape, but those that it has in all shapes.
  static int cost_of(std::uint8_t shape) noexcept {
    return kBlockShapes[shape].mask + 4 * kBlockShapes[shape].bytes + 2 * kBlockShapes[shape].halves;
  }

  std::uint8_t chosen_[65][65][65];
};

// Made when the library is loaded: a child that is forked while a thread makes it would wait for that thread for ever.
const ShapeChoice kChoice;

template <typename T>
T read_as(const std::uint8_t* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Bits, the lowest first.
struct Words {
  alignas(32) std::uint64_t of[4];
};

// Where bits are written one after the other; up to 9 bytes are written behind them.
struct BitStream {
  std::uint8_t* begin;
  std::int64_t size;  // in bits
  std::uint8_t* end() const noexcept { return begin + (size + 7) / 8; }
};

// The streams of a row that is being written.
struct RowStreams {
  std::uint8_t* shapes;
  BitStream dc, masks;
  std::uint8_t* bytes;
  BitStream bits;
};

struct CoefficientKernels {
  // Read blocks first … first + count - 1 of a row that has `columns`, behind which kCoefficientSlack bytes can be
  // read.  Returns false where the row is damaged.
  bool (*read_row)(Bytes row, std::int32_t columns, std::int32_t first, std::int32_t count, std::int16_t* blocks);
  // Write the streams of a row of blocks, behind which up to 64 bytes are written.
  void (*write_row)(const std::int16_t* blocks, std::int64_t count, RowStreams* streams);
};

#define FASTPIPE_BODY "coefficients_kernels.inc"
#include "each_level.inc"
#undef FASTPIPE_BODY

// Where the table of rows begins.
std::size_t table_begin(int components, int step_size) noexcept {
  return sizeof(CoefficientHeader) + static_cast<std::size_t>(64 * components * step_size);
}

std::int64_t rows_of(const JpegFrame& frame) noexcept {
  std::int64_t rows = 0;
  for (int c = 0; c < frame.components; ++c) rows += frame.planes[c].rows;
  return rows;
}

// Appends the parts of an entry, and writes where each begins into the entry's table.
class EntryWriter {
 public:
  std::uint8_t* to;  // behind what was written

  EntryWriter(std::uint8_t* entry, std::uint8_t* table, std::size_t parts) noexcept
      : to(table + (parts + 1) * sizeof(std::uint32_t)), entry_(entry), next_(table) {}

  void note_begin() noexcept {
    const auto offset = static_cast<std::uint32_t>(to - entry_);
    std::memcpy(next_, &offset, sizeof offset);
    next_ += sizeof offset;
  }
  void append(const void* bytes, std::size_t size) noexcept {
    std::memcpy(to, bytes, size);
    to += size;
  }
  // End the entry.
  Bytes ended() noexcept {
    note_begin();
    std::memset(to, 0, static_cast<std::size_t>(kCoefficientSlack));
    return {entry_, static_cast<std::size_t>(to + kCoefficientSlack - entry_)};
  }

 private:
  std::uint8_t* const entry_;
  std::uint8_t* next_;  // in the table
};

}  // namespace

Status pack_coefficients(const JpegFrame& frame, CoefficientRows& rows, Arena& arena, Bytes* entry) noexcept {
  const CoefficientKernels& kernels = table_in_use();
  const std::int64_t count = rows_of(frame);
  std::int64_t blocks = 0;
  for (int c = 0; c < frame.components; ++c) blocks += std::int64_t{frame.planes[c].rows} * frame.planes[c].columns;
  int step_size = 1;
  for (int c = 0; c < frame.components; ++c) {
    for (const std::uint16_t step : frame.planes[c].steps) step_size = step > 255 ? 2 : step_size;
  }
  const auto head_size = static_cast<std::int64_t>(table_begin(frame.components, step_size)) + 4 * (count + 1);
  // A row has a byte before its shapes, and three of its streams end with a whole byte.
  const std::int64_t most = head_size + kMostOfBlock * blocks + 4 * count + kCoefficientSlack;
  if (most > kMostOfEntry) return Status::declined(Reason::too_large);
  const std::int64_t widest = frame.planes[0].columns;
  auto* const memory = arena.array<std::uint8_t>(static_cast<std::size_t>(most));
  auto* const streams =
      arena.array<std::uint8_t>(static_cast<std::size_t>(kMostOfBlock * widest + kStreams * kCoefficientSlack));
  if (memory == nullptr || streams == nullptr) return Status::declined(Reason::no_memory);
  std::int16_t* found[3] = {};
  std::int64_t pitches[3] = {};
  for (int c = 0; c < frame.components; ++c) {
    pitches[c] = std::int64_t{64} * frame.mcu_columns() * frame.planes[c].horizontal;
    found[c] = arena.array<std::int16_t>(static_cast<std::size_t>(pitches[c] * frame.planes[c].vertical));
    if (found[c] == nullptr) return Status::declined(Reason::no_memory);
  }
  CoefficientHeader header = {};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.height = frame.size.height;
  header.width = frame.size.width;
  header.components = frame.components;
  header.horizontal = frame.planes[0].horizontal;
  header.vertical = frame.planes[0].vertical;
  header.step_size = step_size;
  std::memcpy(memory, &header, sizeof header);
  std::uint8_t* next_step = memory + sizeof header;
  for (int c = 0; c < frame.components; ++c) {
    for (const std::uint16_t step : frame.planes[c].steps) {
      std::memcpy(next_step, &step, static_cast<std::size_t>(step_size));  // its lower byte comes first
      next_step += step_size;
    }
  }
  EntryWriter writer(memory, next_step, static_cast<std::size_t>(count));
  const bool dc_only[3] = {};
  for (std::int32_t row = 0; row < frame.mcu_rows(); ++row) {
    if (!rows.read(row, 0, frame.mcu_columns(), found, pitches, dc_only)) return Status::declined(Reason::damaged);
    for (int c = 0; c < frame.components; ++c) {
      const JpegPlane& plane = frame.planes[c];
      std::uint8_t* starts[kStreams];
      std::uint8_t* next = streams;
      for (int i = 0; i < kStreams; ++i) {
        starts[i] = next;
        next += kMostOfStream[i] * plane.columns + kCoefficientSlack;
      }
      for (std::int32_t v = 0; v < std::min(plane.vertical, plane.rows - row * plane.vertical); ++v) {
        RowStreams out{starts[0], {starts[1], 0}, {starts[2], 0}, starts[3], {starts[4], 0}};
        kernels.write_row(found[c] + v * pitches[c], plane.columns, &out);
        writer.note_begin();
        const std::uint8_t* const ends[] = {out.shapes, out.dc.end(), out.masks.end(), out.bytes, out.bits.end()};
        for (int i = 0; i < kStreams; ++i) writer.append(starts[i], static_cast<std::size_t>(ends[i] - starts[i]));
      }
    }
  }
  *entry = writer.ended();
  return Status::made();
}

bool KeptCoefficients::open(Bytes entry) noexcept {
  if (entry.size < sizeof(CoefficientHeader)) return false;
  const auto header = read_as<CoefficientHeader>(entry.data);
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) return false;
  frame_ = JpegFrame();
  frame_.size = {header.height, header.width};
  frame_.components = header.components;
  frame_.planes[0].horizontal = header.horizontal;
  frame_.planes[0].vertical = header.vertical;
  if (header.components < 1 || header.components > 3 || header.step_size < 1 || header.step_size > 2) return false;
  table_begin_ = table_begin(header.components, header.step_size);
  if (entry.size < table_begin_) return false;
  const std::uint8_t* next = entry.data + sizeof header;
  for (int c = 0; c < header.components; ++c) {
    for (std::uint16_t& step : frame_.planes[c].steps) {
      step = header.step_size == 1 ? *next : read_as<std::uint16_t>(next);
      next += header.step_size;
    }
  }
  if (!frame_.complete()) return false;
  entry_ = entry;
  const std::size_t table_size = (static_cast<std::size_t>(rows_of(frame_)) + 1) * sizeof(std::uint32_t);
  return entry.size >= table_begin_ + table_size + static_cast<std::size_t>(kCoefficientSlack);
}

bool KeptCoefficients::read(std::int32_t row, std::int32_t first, std::int32_t count, std::int16_t* const* blocks,
                            const std::int64_t* pitches, const bool*) noexcept {
  const CoefficientKernels& kernels = table_in_use();
  for (int c = 0; c < frame_.components; ++c) {
    const JpegPlane& plane = frame_.planes[c];
    if (blocks[c] == nullptr) continue;
    const std::int32_t left = first * plane.horizontal;
    const std::int32_t width = std::min(count * plane.horizontal, plane.columns - left);
    for (std::int32_t v = 0; v < plane.vertical; ++v) {
      const std::int32_t y = row * plane.vertical + v;
      if (y >= plane.rows) break;  // only fills the MCU
      const Bytes found = row_of(c, y);
      if (found.data == nullptr || !kernels.read_row(found, plane.columns, left, width, blocks[c] + v * pitches[c])) {
        return false;
      }
    }
  }
  return true;
}

// A row of blocks, behind which kCoefficientSlack bytes can be read; no bytes where the entry is damaged.
Bytes KeptCoefficients::row_of(int component, std::int32_t y) const noexcept {
  // Rows of MCUs above this one are whole: each has rows of all components.
  const std::int32_t vertical = frame_.planes[0].vertical, mcu_row = component == 0 ? y / vertical : y;
  const std::int32_t of_first = std::min(vertical, frame_.planes[0].rows - mcu_row * vertical);
  const std::int64_t above = std::int64_t{mcu_row} * (vertical + frame_.components - 1);
  const std::int64_t number = above + (component == 0 ? y % vertical : of_first + component - 1);
  const std::uint8_t* const table =
      entry_.data + table_begin_ + sizeof(std::uint32_t) * static_cast<std::size_t>(number);
  const std::size_t begin = read_as<std::uint32_t>(table), end = read_as<std::uint32_t>(table + sizeof(std::uint32_t));
  if (begin > end || end > entry_.size - static_cast<std::size_t>(kCoefficientSlack)) return {};
  return {entry_.data + begin, end - begin};
}

}  // namespace fastpipe
