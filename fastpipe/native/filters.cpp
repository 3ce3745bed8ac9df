// Undoes the filters of an HDF5 dataset, one after the other.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>

#include "codecs.h"
#include "copies.h"
#include "kernels.h"
#include "reader.h"

namespace fastpipe {
namespace {

constexpr std::int64_t kSum = 4;      // bytes that Fletcher32 appends
constexpr std::int64_t kHeader = 12;  // of the LZ4 filter, and of bitshuffle where it compresses
constexpr std::int64_t kLargestBlock = std::int64_t{1} << 30;

std::int64_t size_of(Bytes bytes) { return static_cast<std::int64_t>(bytes.size); }

// Memory for what a filter was applied to, and the part of it that is needed.
struct Target {
  std::uint8_t* data;
  std::int64_t size;
  Range wanted;

  bool wants(std::int64_t begin, std::int64_t end) const { return begin < wanted.end && end > wanted.begin; }
};

// Read the header of the LZ4 filter, which bitshuffle has too: the size of all, and that of a block.
Problem read_block_size(Bytes stored, std::int64_t size, std::int64_t* block) {
  const Reader reader(stored);
  if (reader.size() < kHeader) return Problem::header;
  *block = reader.big(8, 4, kHeader);
  // Numbers of 2**63 and more become negative, and differ from all sizes.
  return reader.big(0, 8, kHeader) != size || *block < 1 ? Problem::size : Problem::none;
}

// Take the next block, which follows its size, from the front of the stored bytes.
bool take_block(Bytes* stored, Bytes* block) {
  if (stored->size < 4) return false;
  const auto nbytes = static_cast<std::size_t>(Reader(*stored).big(0, 4, 4));
  if (nbytes > stored->size - 4) return false;
  *block = {stored->data + 4, nbytes};
  *stored = {stored->data + 4 + nbytes, stored->size - 4 - nbytes};
  return true;
}

Problem undo_lz4(Bytes stored, const Target& out) {
  std::int64_t block = 0;
  const Problem problem = read_block_size(stored, out.size, &block);
  if (problem != Problem::none) return problem;
  stored = {stored.data + kHeader, stored.size - kHeader};
  for (std::int64_t begin = 0; begin < out.size; begin += block) {
    const std::int64_t end = std::min(begin + block, out.size);
    const auto size = static_cast<std::size_t>(end - begin);
    Bytes part;
    if (!take_block(&stored, &part)) return Problem::early;
    if (!out.wants(begin, end)) continue;
    if (part.size == size) {  // not compressed
      std::memcpy(out.data + begin, part.data, size);
    } else if (decompress_lz4(part, out.data + begin, size) != Problem::none) {
      return Problem::damaged;
    }
  }
  return Problem::none;
}

// The last elements, fewer than 8, are stored as they are.
Problem undo_bitshuffle(const FilterStep& step, Bytes stored, const Target& out, Arena& arena, CodecStates& states) {
  constexpr std::int32_t plain = 0, with_lz4 = 2, with_zstd = 3;
  const std::int64_t element = step.element;
  if (element < 1 || out.size % element != 0) return Problem::blocks;
  if (step.codec != plain && step.codec != with_lz4 && step.codec != with_zstd) return Problem::unknown;
  std::int64_t elements = step.block;
  if (step.codec != plain) {
    std::int64_t block = 0;
    const Problem problem = read_block_size(stored, out.size, &block);
    if (problem != Problem::none) return problem;
    elements = block / element;
    stored = {stored.data + kHeader, stored.size - kHeader};
  } else {
    if (size_of(stored) != out.size) return Problem::size;
    if (elements == 0) elements = std::max(8192 / element / 8 * 8, std::int64_t{128});
  }
  if (elements < 8 || elements % 8 != 0 || elements > kLargestBlock / element) return Problem::blocks;
  const std::int64_t whole = out.size - out.size / element % 8 * element;
  const std::int64_t block = std::min(elements * element, whole);
  std::uint8_t* const bits = arena.array<std::uint8_t>(static_cast<std::size_t>(block));
  if (bits == nullptr) return Problem::no_memory;
  for (std::int64_t begin = 0; begin < whole; begin += block) {
    const std::int64_t end = std::min(begin + block, whole), row = (end - begin) / element / 8;
    const auto size = static_cast<std::size_t>(end - begin);
    Bytes part;
    if (step.codec == plain) {
      part = {stored.data, size};
      stored = {stored.data + size, stored.size - size};
    } else if (!take_block(&stored, &part)) {
      return Problem::early;
    }
    if (!out.wants(begin, end)) continue;
    Problem problem = Problem::none;
    if (step.codec == plain) {
      // The kernel reads all rows of bits side by side, which takes twice as long outside the first cache.
      std::memcpy(bits, part.data, size);
    } else if (step.codec == with_lz4) {
      problem = decompress_lz4(part, bits, size);
    } else {
      problem = decompress_zstd(part, bits, size, states);
    }
    if (problem != Problem::none) return problem;
    kernels().unshuffle_bits(bits, row, step.element, out.data + begin);
  }
  if (size_of(stored) < out.size - whole) return Problem::early;
  copy_bytes(stored.data, static_cast<std::size_t>(out.size - whole), out.data + whole);
  return Problem::none;
}

Problem undo_blosc(Bytes stored, const Target& out, Arena& arena, CodecStates& states) {
  BloscHeader header;
  const Problem problem = read_blosc_header(stored, out.size, size_of(stored), &header);
  if (problem != Problem::none || header.blocks == 0 || out.wanted.begin >= out.wanted.end) return problem;
  const Range blocks = {out.wanted.begin / header.block, (out.wanted.end + header.block - 1) / header.block};
  return decode_blosc_blocks(header, stored.data, blocks, out.data + blocks.begin * header.block, arena, states);
}

// Written once, before has_blosc2 becomes true.
Blosc2Functions blosc2;
std::once_flag is_handed_over;
std::atomic<bool> has_blosc2{false};

Problem undo_blosc2(Bytes stored, const Target& out) {
  if (!has_blosc2.load(std::memory_order_acquire)) return Problem::unknown;
  if (!Reader(stored).begins(2, size_of(stored), "b2frame\0")) return Problem::header;
  if (out.size < 1) return Problem::size;
  void* const frame = blosc2.schunk_from_buffer(const_cast<std::uint8_t*>(stored.data), size_of(stored), false);
  if (frame == nullptr) return Problem::damaged;
  void* array = nullptr;
  if (blosc2.array_from_schunk(frame, &array) == 0) {
    // The function reports content that is too large for the memory, but not content that is too small.
    const bool is_larger = blosc2.array_to_buffer(array, out.data, out.size - 1) != 0;
    const bool is_whole = is_larger && blosc2.array_to_buffer(array, out.data, out.size) == 0;
    blosc2.array_free(array);  // which frees the frame, too
    return is_whole ? Problem::none : Problem::size;
  }
  if (out.size > std::numeric_limits<std::int32_t>::max()) {
    blosc2.schunk_free(frame);
    return Problem::size;
  }
  const int made = blosc2.decompress_chunk(frame, 0, out.data, static_cast<std::int32_t>(out.size));
  blosc2.schunk_free(frame);
  return made == out.size ? Problem::none : Problem::size;
}

Problem undo(const FilterStep& step, Bytes stored, const Target& out, Arena& arena, CodecStates& states) {
  const auto size = static_cast<std::size_t>(out.size);
  switch (step.filter) {
    case ChunkFilter::deflate:
      return inflate_zlib(stored, out.data, size, states);
    case ChunkFilter::shuffle:
      if (step.element < 1) return Problem::blocks;
      unshuffle(stored.data, out.size, step.element, out.wanted, out.data);
      return Problem::none;
    case ChunkFilter::lzf:
      return decompress_lzf(stored, out.data, size);
    case ChunkFilter::blosc:
      return undo_blosc(stored, out, arena, states);
    case ChunkFilter::lz4:
      return undo_lz4(stored, out);
    case ChunkFilter::bitshuffle:
      return undo_bitshuffle(step, stored, out, arena, states);
    case ChunkFilter::zstd:
      return decompress_zstd(stored, out.data, size, states);
    case ChunkFilter::blosc2:
      return undo_blosc2(stored, out);
    default:
      return Problem::unknown;
  }
}

// Compare the checksum at the end of the data with theirs, and remove it.
Problem check_sum(Bytes* data) {
  if (size_of(*data) < kSum) return Problem::early;
  data->size -= kSum;
  const auto found = static_cast<std::uint32_t>(Reader({data->data + data->size, kSum}).little(0, 4, 4));
  const std::uint32_t sum = fletcher32(*data);
  // HDF5 before 1.6.3 swapped the bytes of both halves on some machines.
  const std::uint32_t swapped = (sum & 0x00ff00ffu) << 8 | (sum >> 8 & 0x00ff00ffu);
  return found == sum || found == swapped ? Problem::none : Problem::checksum;
}

}  // namespace

void use_blosc2(const Blosc2Functions& functions) noexcept {
  std::call_once(is_handed_over, [&] {
    blosc2 = functions;
    has_blosc2.store(true, std::memory_order_release);
  });
}

Problem undo_filters(const std::vector<FilterStep>& steps, std::uint32_t mask, Bytes stored, std::uint8_t* out,
                     std::int64_t size, Range wanted, Arena& arena, CodecStates& states, std::int32_t* step) noexcept {
  *step = -1;
  if (size < 0 || size > std::numeric_limits<std::int64_t>::max() / 2) return Problem::size;
  wanted = {std::max(wanted.begin, std::int64_t{0}), std::min(wanted.end, size)};
  const auto applies = [&](std::size_t number) {
    if (number < 32 && (mask >> number & 1) != 0) return false;
    return steps[number].filter != ChunkFilter::shuffle || steps[number].element != 1;
  };
  std::int64_t sums = 0, left = 0;  // checksums and filters that are still to be undone
  for (std::size_t number = 0; number < steps.size(); ++number) {
    left += applies(number) ? 1 : 0;
    sums += applies(number) && steps[number].filter == ChunkFilter::fletcher32 ? 1 : 0;
  }
  Bytes data = stored;
  for (std::size_t number = steps.size(); number-- > 0;) {
    if (!applies(number)) continue;
    *step = static_cast<std::int32_t>(number);
    --left;
    if (steps[number].filter == ChunkFilter::fletcher32) {
      --sums;
      const Problem problem = check_sum(&data);
      if (problem != Problem::none) return problem;
      continue;
    }
    Target target = {out, size + kSum * sums, wanted};
    if (steps[number].filter == ChunkFilter::shuffle) target.size = size_of(data);
    if (left > 0) {
      target.data = arena.array<std::uint8_t>(static_cast<std::size_t>(target.size));
      if (target.data == nullptr) return Problem::no_memory;
      target.wanted = {0, target.size};
    } else if (target.size != size) {
      *step = -1;
      return Problem::size;
    }
    const Problem problem = undo(steps[number], data, target, arena, states);
    if (problem != Problem::none) return problem;
    data = {target.data, static_cast<std::size_t>(target.size)};
  }
  *step = -1;
  if (size_of(data) != size) return Problem::size;
  if (data.data != out && wanted.begin < wanted.end) {
    std::memcpy(out + wanted.begin, data.data + wanted.begin, static_cast<std::size_t>(wanted.end - wanted.begin));
  }
  return Problem::none;
}

}  // namespace fastpipe
