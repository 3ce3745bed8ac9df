#include "coefficients.h"

#include <algorithm>
#include <cstdlib>
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

struct CoefficientKernels {
  // Write the coefficients of a block but the first, which becomes 0.  `bytes` of its values are bytes.  96 bytes are
  // read behind those.
  void (*expand)(std::uint64_t mask, std::int64_t bytes, const std::uint8_t* values, std::int16_t* block);
  // The opposite.  Returns the number of bytes of the values, of which 64 may be written; -1 if one needs more than a
  // byte.
  std::int64_t (*shorten)(const std::int16_t* block, std::uint64_t* mask, std::int64_t* bytes, std::uint8_t* to);
};

#define FASTPIPE_BODY "coefficients_kernels.inc"
#include "each_level.inc"
#undef FASTPIPE_BODY

std::int64_t rows_of(const JpegFrame& frame) noexcept {
  std::int64_t rows = 0;
  for (int c = 0; c < frame.components; ++c) rows += frame.planes[c].rows;
  return rows;
}

template <typename T>
T read_as(const std::uint8_t* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// The same as CoefficientKernels::shorten, of values of 16 bits in the place of bytes.
std::int64_t shorten_wide(const std::int16_t* block, std::uint64_t* mask, std::int64_t* words,
                          std::uint8_t* to) noexcept {
  int last = 0;  // of those that are no half bytes
  for (int i = 1; i < 64; ++i) {
    if (std::abs(block[kPlaces.in_rows[i]]) > 8) last = i;
  }
  const std::uint8_t* const begin = to;
  int shift = 0;
  for (int i = 1; i < 64; ++i) {
    const std::int16_t value = block[kPlaces.in_rows[i]];
    if (value == 0) continue;
    *mask |= std::uint64_t{1} << (i - 1);
    if (i <= last) {
      std::memcpy(to, &value, sizeof value);
      to += sizeof value;
      ++*words;
      continue;
    }
    const int code = value + (value < 0 ? 8 : 7);
    *to = static_cast<std::uint8_t>(shift == 0 ? code : *to | code << 4);
    to += shift >> 2;
    shift ^= 4;
  }
  return to - begin + (shift >> 2);
}

// The streams of a row that is being written.
struct RowWriter {
  std::uint8_t *heads, *counts, *dc, *masks, *values;
  std::int32_t before = 0;

  void add(const std::int16_t* block, const CoefficientKernels& kernels) noexcept {
    std::uint8_t head = 0;
    const std::int32_t difference = block[0] - before;
    before = block[0];
    *dc++ = static_cast<std::uint8_t>(difference);
    if (difference < -128 || difference > 127) {
      head |= kWideDc;
      *dc++ = static_cast<std::uint8_t>(difference >> 8);
    }
    std::uint64_t mask = 0;
    std::int64_t bytes = 0, size = kernels.shorten(block, &mask, &bytes, values);
    if (size < 0) {
      head |= kWideValues;
      size = shorten_wide(block, &mask, &bytes, values);
    }
    values += size;
    const int mask_bytes = mask == 0 ? 0 : (71 - __builtin_clzll(mask)) / 8;
    std::memcpy(masks, &mask, sizeof mask);
    masks += mask_bytes;
    *heads++ = static_cast<std::uint8_t>(head | mask_bytes);
    *counts++ = static_cast<std::uint8_t>(bytes);
  }
};

// The same as CoefficientKernels::expand, of values of 16 bits in the place of bytes.
void expand_wide(std::uint64_t mask, std::int64_t words, const std::uint8_t* values, const CoefficientKernels& kernels,
                 std::int16_t* block) noexcept {
  std::uint64_t rest = mask;
  for (std::int64_t i = 0; i < words && rest != 0; ++i) rest &= rest - 1;
  kernels.expand(rest, 0, values + 2 * words, block);
  for (std::int64_t i = 0; i < words && mask != 0; ++i, mask &= mask - 1) {
    block[kPlaces.in_rows[__builtin_ctzll(mask) + 1]] = read_as<std::int16_t>(values + 2 * i);
  }
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
      RowWriter row{starts[0], starts[1], starts[2], starts[3], starts[4]};
      for (std::int64_t x = 0; x < columns; ++x) row.add(coefficients.rows[c][y] + 64 * x, kernels);
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
  const std::uint8_t *heads = entry_.data + begin, *counts = heads + columns, *dc = counts + columns;
  std::int64_t wide_dc = 0, mask_bytes = 0;
  for (std::int32_t x = 0; x < columns; ++x) {
    wide_dc += (heads[x] & kWideDc) / kWideDc;
    mask_bytes += heads[x] & kMaskBytes;
  }
  const std::uint8_t* const row_end = entry_.data + end;
  if (columns + wide_dc + mask_bytes > row_end - dc) return false;
  const std::uint8_t *masks = dc + columns + wide_dc, *values = masks + mask_bytes;
  const CoefficientKernels& kernels = table_in_use();
  std::int32_t direct = 0;  // the DC coefficient
  for (std::int32_t x = 0; x < first + count; ++x) {
    const std::uint8_t head = heads[x];
    const std::int64_t size = head & kMaskBytes, bytes = counts[x];
    if ((head & kWideDc) != 0) {
      direct += read_as<std::int16_t>(dc++);
      ++dc;
    } else {
      direct += static_cast<std::int8_t>(*dc++);
    }
    if (size > 8) return false;
    const std::uint64_t mask = size == 0 ? 0 : read_as<std::uint64_t>(masks) & ~std::uint64_t{0} >> 8 * (8 - size);
    masks += size;
    const std::int64_t halves = __builtin_popcountll(mask) - bytes;
    const bool is_wide = (head & kWideValues) != 0;
    const std::uint8_t* const next = values + (is_wide ? 2 * bytes : bytes) + (halves + 1) / 2;
    if (mask >> 63 != 0 || halves < 0 || next > row_end) return false;
    if (x >= first) {
      if (is_wide) {
        expand_wide(mask, bytes, values, kernels, blocks);
      } else if (mask != 0) {
        kernels.expand(mask, bytes, values, blocks);
      }
      blocks[0] = static_cast<std::int16_t>(direct);
      blocks += 64;
    }
    values = next;
  }
  return true;
}

}  // namespace fastpipe
