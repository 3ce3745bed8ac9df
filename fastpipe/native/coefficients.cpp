#include "coefficients.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "levels.h"

namespace fastpipe {
namespace {

constexpr char kMagic[8] = {'f', 'p', 'c', 'o', 'e', 'f', '1', '\n'};
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
    int x = 0, y = 0;
    for (int i = 0; i < 64; ++i) {
      in_rows[i] = static_cast<std::uint16_t>(8 * y + x);
      in_zigzag[8 * y + x] = static_cast<std::uint8_t>(i);
      const bool is_up = (x + y) % 2 == 0;
      int& along = is_up ? x : y;
      int& back = is_up ? y : x;
      if (along == 7) {
        ++back;
      } else {
        ++along;
        if (back > 0) --back;
      }
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

}  // namespace

Bytes pack_coefficients(const JpegCoefficients& coefficients, Arena& arena) noexcept {
  const JpegFrame& frame = coefficients.frame;
  const CoefficientKernels& kernels = table_in_use();
  const std::int64_t rows = rows_of(frame);
  std::int64_t blocks = 0, widest = 0;
  for (int c = 0; c < frame.components; ++c) {
    const std::int64_t columns = frame.planes[c].columns;
    blocks += frame.planes[c].rows * columns;
    widest = columns > widest ? columns : widest;
  }
  const auto head_size = static_cast<std::int64_t>(sizeof(CoefficientHeader) + sizeof(std::uint32_t) * (rows + 1));
  const std::int64_t most = head_size + kMostOfBlock * blocks + kCoefficientSlack;
  if (most > std::numeric_limits<std::uint32_t>::max()) return {};
  auto* const entry = arena.array<std::uint8_t>(static_cast<std::size_t>(most));
  auto* const streams = arena.array<std::uint8_t>(static_cast<std::size_t>(kMostOfBlock * widest + kCoefficientSlack));
  if (entry == nullptr || streams == nullptr) return {};
  CoefficientHeader header = {};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.height = frame.size.height;
  header.width = frame.size.width;
  header.components = frame.components;
  header.horizontal = frame.planes[0].horizontal;
  header.vertical = frame.planes[0].vertical;
  for (int c = 0; c < frame.components; ++c)
    std::memcpy(header.steps[c], frame.planes[c].steps, sizeof header.steps[c]);
  std::memcpy(entry, &header, sizeof header);
  std::uint8_t* begin = entry + sizeof header;  // of the next row, in the table
  std::uint8_t* to = entry + head_size;
  const auto note_begin = [&] {
    const auto offset = static_cast<std::uint32_t>(to - entry);
    std::memcpy(begin, &offset, sizeof offset);
    begin += sizeof offset;
  };
  for (int c = 0; c < frame.components; ++c) {
    const std::int64_t columns = frame.planes[c].columns;
    std::uint8_t* const starts[] = {streams, streams + columns, streams + 2 * columns, streams + 4 * columns,
                                    streams + 12 * columns + 8};
    for (std::int32_t y = 0; y < frame.planes[c].rows; ++y) {
      RowStreams row{starts[0], starts[1], starts[2], starts[3], starts[4]};
      kernels.write_row(coefficients.rows[c][y], columns, &row);
      note_begin();
      const std::uint8_t* const ends[] = {row.heads, row.counts, row.dc, row.masks, row.values};
      for (int i = 0; i < 5; ++i) {
        std::memcpy(to, starts[i], static_cast<std::size_t>(ends[i] - starts[i]));
        to += ends[i] - starts[i];
      }
    }
  }
  note_begin();
  std::memset(to, 0, static_cast<std::size_t>(kCoefficientSlack));
  const std::int64_t size = to + kCoefficientSlack - entry;
  if (size > kMostOfEntry) return {};
  return {entry, static_cast<std::size_t>(size)};
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
  for (int c = 0; c < 3; ++c) std::memcpy(frame_.planes[c].steps, header.steps[c], sizeof header.steps[c]);
  if (!frame_.complete()) return false;
  const auto rows = static_cast<std::size_t>(rows_of(frame_));
  entry_ = entry;
  return entry.size >= sizeof header + (rows + 1) * sizeof(std::uint32_t) + kCoefficientSlack;
}

bool KeptCoefficients::read(std::int32_t row, std::int32_t first, std::int32_t count, std::int16_t* const* blocks,
                            const std::int64_t* pitches) noexcept {
  std::int64_t above = 0;  // rows of the components before
  for (int c = 0; c < frame_.components; above += frame_.planes[c].rows, ++c) {
    const JpegPlane& plane = frame_.planes[c];
    if (blocks[c] == nullptr) continue;
    const std::int32_t left = first * plane.horizontal;
    const std::int32_t width = std::min(count * plane.horizontal, plane.columns - left);
    for (std::int32_t v = 0; v < plane.vertical; ++v) {
      const std::int32_t y = row * plane.vertical + v;
      if (y >= plane.rows) break;  // only fills the MCU
      if (!read_row(above + y, plane.columns, left, width, blocks[c] + v * pitches[c])) return false;
    }
  }
  return true;
}

// Read blocks of a row, by its number among all.
bool KeptCoefficients::read_row(std::int64_t number, std::int32_t columns, std::int32_t first, std::int32_t count,
                                std::int16_t* blocks) const noexcept {
  const std::uint8_t* const table = entry_.data + sizeof(CoefficientHeader) + sizeof(std::uint32_t) * number;
  const std::size_t begin = read_as<std::uint32_t>(table), end = read_as<std::uint32_t>(table + sizeof(std::uint32_t));
  // A block has at least three bytes.
  if (begin > end || end > entry_.size - kCoefficientSlack || end - begin < std::size_t{3} * columns) return false;
  return table_in_use().read_row(entry_.data + begin, entry_.data + end, columns, first, count, blocks);
}

}  // namespace fastpipe
