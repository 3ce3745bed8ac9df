#include "coefficients.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "levels.h"

namespace fastpipe {
namespace {

constexpr char kMagic[8] = {'f', 'p', 'c', 'o', 'e', 'f', '1', '\n'};
constexpr char kMagicCompressed[8] = {'f', 'p', 'c', 'o', 'e', 'f', 'z', '\n'};
constexpr std::int32_t kStripRows = 32;  // that are compressed together
constexpr std::int64_t kMostOfEntry = std::numeric_limits<std::int32_t>::max();
constexpr int kStreams = 5;                                              // of a row
constexpr std::uint8_t kMaskBytes = 15, kWideDc = 16, kWideValues = 32;  // of a head
constexpr std::int64_t kMostOfBlock = 2 + 2 + 8 + 2 * 63;                // bytes

struct CoefficientHeader {
  char magic[8];
  std::int32_t height, width, components;
  std::int32_t horizontal, vertical;  // the first component's sampling factors
  std::int32_t unused;
  std::uint16_t steps[3][64];
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

// What of a mask is there, by the number of its bytes that a head has.
constexpr std::uint64_t kFirstBytes[16] = {
    0, 0xFF, 0xFFFF, 0xFFFFFF, 0xFFFFFFFF, 0xFFFFFFFFFF, 0xFFFFFFFFFFFF, 0xFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF};

template <typename T>
T read_as(const std::uint8_t* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// The streams of a row that is being written.
struct RowStreams {
  std::uint8_t *heads, *counts, *dc, *masks, *values;
};

struct CoefficientKernels {
  // Read blocks first … first + count - 1 of a row that has `columns`, and lies from `begin` to `end`;
  // kCoefficientSlack bytes follow.  Returns false where the row is damaged.
  bool (*read_row)(const std::uint8_t* begin, const std::uint8_t* end, std::int32_t columns, std::int32_t first,
                   std::int32_t count, std::int16_t* blocks);
  // Append blocks to the streams of their row, behind which up to 160 bytes are written.
  void (*write_row)(const std::int16_t* blocks, std::int64_t count, RowStreams* streams);
};

#define FASTPIPE_BODY "coefficients_kernels.inc"
#include "each_level.inc"
#undef FASTPIPE_BODY

std::int64_t rows_of(const JpegFrame& frame) noexcept {
  std::int64_t rows = 0;
  for (int c = 0; c < frame.components; ++c) rows += frame.planes[c].rows;
  return rows;
}

std::int64_t strips_of(const JpegPlane& plane) noexcept { return (plane.rows + kStripRows - 1) / kStripRows; }

// Where each of the streams of a row ends, counted from its beginning; false where the row is too short for them.
bool find_streams(Bytes row, std::int32_t columns, std::size_t* ends) noexcept {
  // A block has at least three bytes.
  if (row.size < std::size_t{3} * static_cast<std::size_t>(columns)) return false;
  std::size_t wide_dc = 0, mask_bytes = 0;
  for (std::int32_t x = 0; x < columns; ++x) {
    wide_dc += (row.data[x] & kWideDc) / kWideDc;
    mask_bytes += row.data[x] & kMaskBytes;
  }
  ends[0] = static_cast<std::size_t>(columns);
  ends[1] = 2 * ends[0];
  ends[2] = 3 * ends[0] + wide_dc;
  ends[3] = ends[2] + mask_bytes;
  ends[4] = row.size;
  return ends[3] <= row.size;
}

// Appends the parts of an entry, and writes where each begins into the entry's table.
class EntryWriter {
 public:
  std::uint8_t* to;  // behind what was written

  EntryWriter(std::uint8_t* entry, std::size_t parts) noexcept
      : to(entry + sizeof(CoefficientHeader) + (parts + 1) * sizeof(std::uint32_t)),
        entry_(entry),
        next_(entry + sizeof(CoefficientHeader)) {}

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
  const auto head_size = static_cast<std::int64_t>(sizeof(CoefficientHeader)) + 4 * (count + 1);
  const std::int64_t most = head_size + kMostOfBlock * blocks + kCoefficientSlack;
  if (most > kMostOfEntry) return Status::declined(Reason::too_large);
  const std::int64_t widest = frame.planes[0].columns;
  auto* const memory = arena.array<std::uint8_t>(static_cast<std::size_t>(most));
  auto* const streams = arena.array<std::uint8_t>(static_cast<std::size_t>(kMostOfBlock * widest + kCoefficientSlack));
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
  for (int c = 0; c < frame.components; ++c) {
    std::memcpy(header.steps[c], frame.planes[c].steps, sizeof header.steps[c]);
  }
  std::memcpy(memory, &header, sizeof header);
  EntryWriter writer(memory, static_cast<std::size_t>(count));
  const bool dc_only[3] = {};
  for (std::int32_t row = 0; row < frame.mcu_rows(); ++row) {
    if (!rows.read(row, 0, frame.mcu_columns(), found, pitches, dc_only)) return Status::declined(Reason::damaged);
    for (int c = 0; c < frame.components; ++c) {
      const JpegPlane& plane = frame.planes[c];
      const std::int64_t columns = plane.columns;
      std::uint8_t* const starts[] = {streams, streams + columns, streams + 2 * columns, streams + 4 * columns,
                                      streams + 12 * columns + 8};
      for (std::int32_t v = 0; v < std::min(plane.vertical, plane.rows - row * plane.vertical); ++v) {
        RowStreams out{starts[0], starts[1], starts[2], starts[3], starts[4]};
        kernels.write_row(found[c] + v * pitches[c], columns, &out);
        writer.note_begin();
        const std::uint8_t* const ends[] = {out.heads, out.counts, out.dc, out.masks, out.values};
        for (int i = 0; i < kStreams; ++i) writer.append(starts[i], static_cast<std::size_t>(ends[i] - starts[i]));
      }
    }
  }
  *entry = writer.ended();
  return Status::made();
}

Bytes compress_coefficients(Bytes entry, Arena& arena, CodecStates& codecs) noexcept {
  KeptCoefficients rows;
  if (!rows.open(entry, arena, codecs)) return {};
  const JpegFrame& frame = rows.frame();
  std::size_t strips = 0;
  for (int c = 0; c < frame.components; ++c) strips += static_cast<std::size_t>(strips_of(frame.planes[c]));
  const std::size_t head_size = kStripRows * 3 * sizeof(std::uint32_t) + kStreams * sizeof(std::uint32_t);
  // Each stream of a strip may become larger than it is, by a little.
  const std::size_t most = compressed_most(entry.size) + strips * (head_size + kStreams * compressed_most(0));
  auto* const memory = arena.array<std::uint8_t>(2 * most + sizeof(CoefficientHeader));
  auto* const stream = arena.array<std::uint8_t>(entry.size);
  if (memory == nullptr || stream == nullptr) return {};
  auto header = read_as<CoefficientHeader>(entry.data);
  std::memcpy(header.magic, kMagicCompressed, sizeof kMagicCompressed);
  std::memcpy(memory, &header, sizeof header);
  EntryWriter writer(memory, strips);
  for (int c = 0; c < frame.components; ++c) {
    const JpegPlane& plane = frame.planes[c];
    for (std::int32_t top = 0; top < plane.rows; top += kStripRows) {
      writer.note_begin();
      const std::int32_t count = std::min(kStripRows, plane.rows - top);
      std::size_t ends[kStripRows][kStreams];
      for (std::int32_t i = 0; i < count; ++i) {
        if (!find_streams(rows.row_of(c, top + i), plane.columns, ends[i])) return {};
        for (int k = 2; k < kStreams; ++k) {
          const std::size_t size = ends[i][k] - ends[i][k - 1];
          const auto noted = static_cast<std::uint32_t>(size);
          writer.append(&noted, sizeof noted);
        }
      }
      std::uint8_t* const sizes = writer.to;
      writer.to += kStreams * sizeof(std::uint32_t);
      for (int k = 0; k < kStreams; ++k) {
        std::size_t size = 0;
        for (std::int32_t i = 0; i < count; ++i) {
          const std::size_t begin = k == 0 ? 0 : ends[i][k - 1];
          std::memcpy(stream + size, rows.row_of(c, top + i).data + begin, ends[i][k] - begin);
          size += ends[i][k] - begin;
        }
        const auto compressed = static_cast<std::uint32_t>(compress_zstd({stream, size}, writer.to, codecs));
        if (compressed == 0) return {};
        std::memcpy(sizes + k * sizeof compressed, &compressed, sizeof compressed);
        writer.to += compressed;
      }
    }
  }
  return writer.ended();
}

bool KeptCoefficients::open(Bytes entry, Arena& arena, CodecStates& codecs) noexcept {
  if (entry.size < sizeof(CoefficientHeader)) return false;
  const auto header = read_as<CoefficientHeader>(entry.data);
  is_compressed_ = std::memcmp(header.magic, kMagicCompressed, sizeof kMagic) == 0;
  if (!is_compressed_ && std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) return false;
  frame_ = JpegFrame();
  frame_.size = {header.height, header.width};
  frame_.components = header.components;
  frame_.planes[0].horizontal = header.horizontal;
  frame_.planes[0].vertical = header.vertical;
  for (int c = 0; c < 3; ++c) std::memcpy(frame_.planes[c].steps, header.steps[c], sizeof header.steps[c]);
  if (!frame_.complete()) return false;
  std::int64_t parts = 0;
  for (int c = 0; c < frame_.components; ++c) {
    above_[c] = parts;
    parts += is_compressed_ ? strips_of(frame_.planes[c]) : frame_.planes[c].rows;
    strips_[c] = Strip();
  }
  entry_ = entry;
  arena_ = &arena;
  codecs_ = &codecs;
  const std::size_t table = (static_cast<std::size_t>(parts) + 1) * sizeof(std::uint32_t);
  return entry.size >= sizeof header + table + static_cast<std::size_t>(kCoefficientSlack);
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
      std::int16_t* const to = blocks[c] + v * pitches[c];
      // A block has at least three bytes.
      if (found.data == nullptr || found.size < std::size_t{3} * static_cast<std::size_t>(plane.columns) ||
          !kernels.read_row(found.data, found.data + found.size, plane.columns, left, width, to)) {
        return false;
      }
    }
  }
  return true;
}

// A part of the entry by its number in the table; no bytes where the table is damaged.
Bytes KeptCoefficients::part(std::int64_t number) const noexcept {
  const std::uint8_t* const table = entry_.data + sizeof(CoefficientHeader) + sizeof(std::uint32_t) * number;
  const std::size_t begin = read_as<std::uint32_t>(table), end = read_as<std::uint32_t>(table + sizeof(std::uint32_t));
  if (begin > end || end > entry_.size - static_cast<std::size_t>(kCoefficientSlack)) return {};
  return {entry_.data + begin, end - begin};
}

// A row of blocks, behind which kCoefficientSlack bytes can be read; no bytes where the entry is damaged.
Bytes KeptCoefficients::row_of(int component, std::int32_t y) noexcept {
  if (!is_compressed_) {
    // Rows of MCUs above this one are whole: each has rows of all components.
    const std::int32_t vertical = frame_.planes[0].vertical, mcu_row = component == 0 ? y / vertical : y;
    const std::int32_t of_first = std::min(vertical, frame_.planes[0].rows - mcu_row * vertical);
    const std::int64_t above = std::int64_t{mcu_row} * (vertical + frame_.components - 1);
    return part(above + (component == 0 ? y % vertical : of_first + component - 1));
  }
  Strip& strip = strips_[component];
  if (strip.number != y / kStripRows && !inflate(component, y / kStripRows)) return {};
  const std::uint32_t* const begin = strip.begins + y % kStripRows;
  return {strip.rows + begin[0], begin[1] - begin[0]};
}

// Inflate a strip, and put the streams of each of its rows together.
bool KeptCoefficients::inflate(int component, std::int32_t number) noexcept {
  const JpegPlane& plane = frame_.planes[component];
  const auto count = static_cast<std::size_t>(std::min(kStripRows, plane.rows - number * kStripRows));
  const auto columns = static_cast<std::size_t>(plane.columns);
  const Bytes stored = part(above_[component] + number);
  const std::size_t head_size = count * 3 * sizeof(std::uint32_t) + kStreams * sizeof(std::uint32_t);
  if (stored.data == nullptr || stored.size < head_size) return false;
  std::size_t sizes[kStripRows][kStreams], totals[kStreams] = {}, total = 0;
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t k = 0; k < kStreams; ++k) {
      sizes[i][k] = k < 2 ? columns : read_as<std::uint32_t>(stored.data + (3 * i + k - 2) * sizeof(std::uint32_t));
      if (sizes[i][k] > static_cast<std::size_t>(kMostOfBlock) * columns) return false;
      totals[k] += sizes[i][k];
      total += sizes[i][k];
    }
  }
  const auto slack = static_cast<std::size_t>(kCoefficientSlack);
  auto* const streams = arena_->array<std::uint8_t>(total);
  auto* const rows = arena_->array<std::uint8_t>(total + slack);
  auto* const begins = arena_->array<std::uint32_t>(count + 1);
  if (streams == nullptr || rows == nullptr || begins == nullptr) return false;
  Bytes rest{stored.data + head_size, stored.size - head_size};
  std::uint8_t* from[kStreams];
  std::uint8_t* next = streams;
  for (std::size_t k = 0; k < kStreams; ++k) {
    const std::size_t size = read_as<std::uint32_t>(stored.data + head_size - (kStreams - k) * sizeof(std::uint32_t));
    if (size > rest.size) return false;
    if (decompress_zstd({rest.data, size}, next, totals[k], *codecs_) != Problem::none) return false;
    rest = {rest.data + size, rest.size - size};
    from[k] = next;
    next += totals[k];
  }
  std::uint8_t* to = rows;
  for (std::size_t i = 0; i < count; ++i) {
    begins[i] = static_cast<std::uint32_t>(to - rows);
    for (std::size_t k = 0; k < kStreams; ++k) {
      std::memcpy(to, from[k], sizes[i][k]);
      from[k] += sizes[i][k];
      to += sizes[i][k];
    }
  }
  begins[count] = static_cast<std::uint32_t>(to - rows);
  std::memset(to, 0, slack);
  strips_[component] = {number, rows, begins};
  return true;
}

}  // namespace fastpipe
