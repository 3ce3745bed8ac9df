// Decodes Blosc's buffers, each block independently.
#include <algorithm>
#include <cstring>

#include "codecs.h"
#include "copies.h"
#include "kernels.h"

namespace fastpipe {
namespace {

constexpr std::uint8_t kShuffled = 0x01, kCopied = 0x02, kBitShuffled = 0x04, kReserved = 0x08, kNotSplit = 0x10;
constexpr int kCodecShift = 5;
enum Codec : std::uint8_t { blosclz = 0, lz4 = 1, zlib = 3, zstd = 4 };

constexpr std::int64_t kLargestBlock = (INT32_MAX - 255 * 4) / 3;
constexpr std::int64_t kMostSplits = 16, kSmallestSplit = 128;
constexpr std::int64_t kStart = 4;  // bytes of a number in the table, and before each split

std::int64_t number_at(const std::uint8_t* at) {
  return std::int64_t{at[0]} | std::int64_t{at[1]} << 8 | std::int64_t{at[2]} << 16 | std::int64_t{at[3]} << 24;
}

// Blosc's variant of FastLZ, level 2: distances that do not fit into 13 bits follow in 16 more bits, counted from the
// largest short one.
bool decompress_blosclz(Bytes stored, std::uint8_t* out, std::size_t size) {
  constexpr std::size_t far = 8191;
  const std::uint8_t* from = stored.data;
  const std::uint8_t* const from_end = from + stored.size;
  std::uint8_t* to = out;
  std::uint8_t* const to_end = out + size;
  bool is_first = true;  // the first control byte always begins a run of literals
  while (from < from_end) {
    const std::size_t control = is_first ? *from++ & 31u : *from++;
    is_first = false;
    if (control < 32) {
      const std::size_t run = control + 1;
      if (static_cast<std::size_t>(from_end - from) < run || static_cast<std::size_t>(to_end - to) < run) return false;
      copy_run(from, from_end, run, to, to_end);
      from += run;
      to += run;
      continue;
    }
    std::size_t length = (control >> 5) - 1;
    if (length == 6) {
      std::size_t more = 255;
      while (more == 255) {
        if (from == from_end) return false;
        more = *from++;
        length += more;
      }
    }
    length += 3;
    if (from == from_end) return false;
    std::size_t back = (control & 31) << 8;
    const std::size_t code = *from++;
    if (code == 255 && back == 31u << 8) {
      if (from_end - from < 2) return false;
      back = (std::size_t{from[0]} << 8 | from[1]) + far;
      from += 2;
    } else {
      back += code;
    }
    ++back;
    if (static_cast<std::size_t>(to - out) < back || static_cast<std::size_t>(to_end - to) < length) return false;
    copy_match(to, back, length, to_end);
    to += length;
  }
  return to == to_end;
}

Problem decode_split(std::uint8_t codec, Bytes stored, std::uint8_t* out, std::size_t size, CodecStates& states) {
  switch (codec) {
    case Codec::blosclz:
      return decompress_blosclz(stored, out, size) ? Problem::none : Problem::damaged;
    case Codec::lz4:
      return decompress_lz4(stored, out, size);
    case Codec::zlib:
      return inflate_zlib(stored, out, size, states);
    case Codec::zstd:
      return decompress_zstd(stored, out, size, states);
    default:
      return Problem::unknown;
  }
}

struct Block {
  std::int64_t size;  // of its content
  bool is_short;      // than the others: the last one
};

// Decode the splits of a block into `out`, one after the other; they stay shuffled.
Problem decode_splits(const BloscHeader& header, Block block, Bytes stored, std::uint8_t* out, CodecStates& states) {
  const bool is_split = (header.flags & kNotSplit) == 0 && header.element <= kMostSplits &&
                        block.size / header.element >= kSmallestSplit && !block.is_short;
  const std::int64_t splits = is_split ? header.element : 1, size = block.size / splits;
  if (size * splits != block.size) return Problem::blocks;
  for (std::int64_t split = 0; split < splits; ++split) {
    if (stored.size < kStart) return Problem::early;
    const std::int64_t nbytes = number_at(stored.data);
    stored = {stored.data + kStart, stored.size - kStart};
    if (nbytes > static_cast<std::int64_t>(stored.size)) return Problem::early;
    const Bytes part = {stored.data, static_cast<std::size_t>(nbytes)};
    if (nbytes == size) {  // not compressed
      copy_bytes(part.data, part.size, out);
    } else {
      const Problem problem = decode_split(header.codec, part, out, static_cast<std::size_t>(size), states);
      if (problem != Problem::none) return problem;
    }
    stored = {stored.data + part.size, stored.size - part.size};
    out += size;
  }
  return Problem::none;
}

// c-blosc does not shuffle the bits of blocks whose number of elements is not a multiple of 8.
void unshuffle_block_bits(const std::uint8_t* from, std::int64_t size, std::int32_t element, std::uint8_t* out) {
  const std::int64_t count = size / element, whole = count % 8 == 0 ? count * element : 0;
  if (whole > 0) kernels().unshuffle_bits(from, count / 8, element, out);
  copy_bytes(from + whole, static_cast<std::size_t>(size - whole), out + whole);
}

std::int64_t table_end(const BloscHeader& header) { return BloscHeader::kBytes + kStart * header.blocks; }

}  // namespace

Problem read_blosc_header(Bytes first, std::int64_t nbytes, std::int64_t stored, BloscHeader* header) noexcept {
  if (first.size < static_cast<std::size_t>(BloscHeader::kBytes)) return Problem::header;
  const std::uint8_t* const data = first.data;
  const int version = data[0], codec_version = data[1];
  BloscHeader found;
  found.flags = data[2];
  found.codec = static_cast<std::uint8_t>(found.flags >> kCodecShift);
  found.element = data[3];
  found.nbytes = number_at(data + 4);
  found.block = number_at(data + 8);
  found.stored = number_at(data + 12);
  found.is_copied = (found.flags & kCopied) != 0;
  if (version < 1 || version > 2 || (found.flags & kReserved) != 0) return Problem::header;
  if (found.nbytes != nbytes || found.stored > stored || found.stored < BloscHeader::kBytes) return Problem::size;
  if (nbytes > 0) {
    if (found.element < 1 || found.block < 1 || found.block > nbytes || found.block > kLargestBlock) {
      return Problem::blocks;
    }
    found.blocks = (nbytes + found.block - 1) / found.block;
    if (found.is_copied) {
      if (found.stored != BloscHeader::kBytes + nbytes) return Problem::size;
    } else {
      if (found.codec == 2 || found.codec > Codec::zstd || codec_version != 1) return Problem::unknown;
      if (table_end(found) > found.stored) return Problem::early;
    }
  }
  *header = found;
  return Problem::none;
}

Problem locate_blosc_blocks(const BloscHeader& header, const std::uint8_t* table, Range blocks, Range* bounds,
                            Arena& arena) noexcept {
  if (blocks.begin < 0 || blocks.end > header.blocks || blocks.begin > blocks.end) return Problem::blocks;
  if (header.is_copied) {
    for (std::int64_t block = blocks.begin; block < blocks.end; ++block) {
      const std::int64_t begin = block * header.block;
      *bounds++ = {BloscHeader::kBytes + begin, BloscHeader::kBytes + std::min(begin + header.block, header.nbytes)};
    }
    return Problem::none;
  }
  const auto start_of = [&](std::int64_t block) { return number_at(table + kStart * block); };
  bool is_in_order = true;
  std::int64_t before = -1;
  for (std::int64_t block = 0; block < header.blocks; ++block) {
    const std::int64_t start = start_of(block);
    if (start < table_end(header) || start >= header.stored) return Problem::early;
    is_in_order = is_in_order && start > before;
    before = start;
  }
  if (is_in_order) {
    for (std::int64_t block = blocks.begin; block < blocks.end; ++block) {
      *bounds++ = {start_of(block), block + 1 < header.blocks ? start_of(block + 1) : header.stored};
    }
    return Problem::none;
  }
  // A compressor with several threads stores blocks in any order.
  auto* const sorted = arena.array<std::uint32_t>(static_cast<std::size_t>(header.blocks));
  if (sorted == nullptr) return Problem::no_memory;
  for (std::int64_t block = 0; block < header.blocks; ++block) {
    sorted[block] = static_cast<std::uint32_t>(start_of(block));
  }
  std::sort(sorted, sorted + header.blocks);
  for (std::int64_t block = blocks.begin; block < blocks.end; ++block) {
    const std::int64_t start = start_of(block);
    const std::uint32_t* next = std::upper_bound(sorted, sorted + header.blocks, static_cast<std::uint32_t>(start));
    *bounds++ = {start, next == sorted + header.blocks ? header.stored : std::int64_t{*next}};
  }
  return Problem::none;
}

Problem decode_blosc_blocks(const BloscHeader& header, const std::uint8_t* buffer, Range blocks, std::uint8_t* out,
                            Arena& arena, CodecStates& states) noexcept {
  if (blocks.begin < 0 || blocks.end > header.blocks || blocks.begin > blocks.end) return Problem::blocks;
  if (blocks.begin == blocks.end) return Problem::none;
  const std::int64_t first = blocks.begin * header.block;
  if (header.is_copied) {
    const std::int64_t last = std::min(blocks.end * header.block, header.nbytes);
    copy_bytes(buffer + BloscHeader::kBytes + first, static_cast<std::size_t>(last - first), out);
    return Problem::none;
  }
  auto* const bounds = arena.array<Range>(static_cast<std::size_t>(blocks.end - blocks.begin));
  if (bounds == nullptr) return Problem::no_memory;
  const Problem located = locate_blosc_blocks(header, buffer + BloscHeader::kBytes, blocks, bounds, arena);
  if (located != Problem::none) return located;

  const bool is_shuffled = (header.flags & kShuffled) != 0 && header.element > 1;
  const bool has_shuffled_bits = !is_shuffled && (header.flags & kBitShuffled) != 0;
  std::uint8_t* shuffled = nullptr;
  if (is_shuffled || has_shuffled_bits) {
    shuffled = arena.array<std::uint8_t>(static_cast<std::size_t>(header.block));
    if (shuffled == nullptr) return Problem::no_memory;
  }
  for (std::int64_t number = blocks.begin; number < blocks.end; ++number) {
    const std::int64_t begin = number * header.block;
    const std::int64_t size = std::min(header.block, header.nbytes - begin);
    const Range found = bounds[number - blocks.begin];
    const Bytes stored = {buffer + found.begin, static_cast<std::size_t>(found.end - found.begin)};
    std::uint8_t* const to = out + (begin - first);
    // A block shorter than an element is not shuffled.
    const bool is_direct = shuffled == nullptr || (has_shuffled_bits && size < header.element);
    const Problem problem =
        decode_splits(header, {size, size < header.block}, stored, is_direct ? to : shuffled, states);
    if (problem != Problem::none) return problem;
    if (is_direct) continue;
    if (is_shuffled) {
      unshuffle(shuffled, size, header.element, {0, size}, to);
    } else {
      unshuffle_block_bits(shuffled, size, header.element, to);
    }
  }
  return Problem::none;
}

Problem decode_blosc(Bytes buffer, std::uint8_t* out, std::int64_t size, Arena& arena, CodecStates& states) noexcept {
  BloscHeader header;
  const Problem problem = read_blosc_header(buffer, size, static_cast<std::int64_t>(buffer.size), &header);
  if (problem != Problem::none) return problem;
  return decode_blosc_blocks(header, buffer.data, {0, header.blocks}, out, arena, states);
}

}  // namespace fastpipe
