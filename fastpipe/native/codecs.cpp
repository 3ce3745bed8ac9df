#include "codecs.h"

#include <libdeflate.h>
#include <lz4.h>
#include <zstd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <new>

#include "copies.h"
#include "kernels.h"

// zstd calls these hooks if any library of the process defines them.  Hidden definitions keep it from foreign ones.
extern "C" {
unsigned long long ZSTD_trace_decompress_begin(const void*) { return 0; }  // 0: no trace
void ZSTD_trace_decompress_end(unsigned long long, const void*) {}
}

namespace fastpipe {

struct CodecStates::States {
  struct FreeInflater {
    void operator()(libdeflate_decompressor* one) const noexcept { libdeflate_free_decompressor(one); }
  };
  struct FreeZstd {
    void operator()(ZSTD_DCtx* one) const noexcept { ZSTD_freeDCtx(one); }
  };

  // Null where there is no memory.
  libdeflate_decompressor* inflater() noexcept {
    if (inflater_ == nullptr) inflater_.reset(libdeflate_alloc_decompressor());
    return inflater_.get();
  }
  ZSTD_DCtx* zstd() noexcept {
    if (zstd_ == nullptr) zstd_.reset(ZSTD_createDCtx());
    return zstd_.get();
  }

 private:
  std::unique_ptr<libdeflate_decompressor, FreeInflater> inflater_;
  std::unique_ptr<ZSTD_DCtx, FreeZstd> zstd_;
};

CodecStates::CodecStates() = default;
CodecStates::~CodecStates() = default;

CodecStates::States* CodecStates::get() noexcept {
  if (states_ == nullptr) states_.reset(new (std::nothrow) States);
  return states_.get();
}

namespace {

// Memory of no bytes may be a null pointer, on which some libraries do arithmetic.
std::uint8_t nothing[1];
const std::uint8_t* some(const std::uint8_t* memory) { return memory == nullptr ? nothing : memory; }
std::uint8_t* some(std::uint8_t* memory) { return memory == nullptr ? nothing : memory; }

libdeflate_decompressor* inflater_of(CodecStates& states) {
  CodecStates::States* all = states.get();
  return all == nullptr ? nullptr : all->inflater();
}

}  // namespace

Problem inflate_zlib(Bytes stored, std::uint8_t* out, std::size_t size, CodecStates& states) noexcept {
  libdeflate_decompressor* const inflater = inflater_of(states);
  if (inflater == nullptr) return Problem::no_memory;
  // Given no place for the number of bytes, libdeflate reports fewer bytes as an error, too.
  const libdeflate_result found =
      libdeflate_zlib_decompress(inflater, some(stored.data), stored.size, some(out), size, nullptr);
  return found == LIBDEFLATE_SUCCESS ? Problem::none : Problem::damaged;
}

bool inflates_to_at_most(Bytes stored, std::size_t most, Arena& arena, CodecStates& states) noexcept {
  libdeflate_decompressor* const inflater = inflater_of(states);
  auto* const out = arena.array<std::uint8_t>(most);
  if (inflater == nullptr || out == nullptr) return false;
  std::size_t made = 0;
  return libdeflate_zlib_decompress(inflater, some(stored.data), stored.size, out, most, &made) !=
         LIBDEFLATE_INSUFFICIENT_SPACE;
}

Problem inflate_gzip(Bytes stored, std::uint8_t* out, std::size_t size, CodecStates& states) noexcept {
  libdeflate_decompressor* const inflater = inflater_of(states);
  if (inflater == nullptr) return Problem::no_memory;
  const std::uint8_t* from = some(stored.data);
  std::uint8_t* to = some(out);
  while (stored.size > 0) {
    std::size_t used = 0, made = 0;
    const libdeflate_result found = libdeflate_gzip_decompress_ex(inflater, from, stored.size, to, size, &used, &made);
    if (found != LIBDEFLATE_SUCCESS || used == 0) return Problem::damaged;
    from += used;
    stored.size -= used;
    to += made;
    size -= made;
    while (stored.size > 0 && *from == 0) ++from, --stored.size;  // with which Python's gzip lets a file be filled up
  }
  return size == 0 ? Problem::none : Problem::damaged;
}

Problem decompress_zstd(Bytes stored, std::uint8_t* out, std::size_t size, CodecStates& states) noexcept {
  CodecStates::States* const all = states.get();
  ZSTD_DCtx* const context = all == nullptr ? nullptr : all->zstd();
  if (context == nullptr) return Problem::no_memory;
  // Error codes are larger than any size.
  const std::size_t made = ZSTD_decompressDCtx(context, some(out), size, some(stored.data), stored.size);
  return made == size ? Problem::none : Problem::damaged;
}

Problem decompress_lz4(Bytes block, std::uint8_t* out, std::size_t size) noexcept {
  if (block.size > INT_MAX || size > INT_MAX) return Problem::damaged;
  if (block.size == 0) return size == 0 ? Problem::none : Problem::damaged;
  const int made = LZ4_decompress_safe(reinterpret_cast<const char*>(block.data), reinterpret_cast<char*>(some(out)),
                                       static_cast<int>(block.size), static_cast<int>(size));
  return made >= 0 && static_cast<std::size_t>(made) == size ? Problem::none : Problem::damaged;
}

// LibLZF's format: a control byte below 32 is the length of a run of literals, minus 1.  In any other, the upper three
// bits are the length of a match, minus 2; if all three are set, the next byte is added to them.
Problem decompress_lzf(Bytes stored, std::uint8_t* out, std::size_t size) noexcept {
  const std::uint8_t* from = some(stored.data);
  const std::uint8_t* const from_end = from + stored.size;
  std::uint8_t* const begin = some(out);
  std::uint8_t* to = begin;
  std::uint8_t* const to_end = begin + size;
  while (from < from_end) {
    const std::size_t control = *from++;
    if (control < 32) {
      const std::size_t run = control + 1;
      if (static_cast<std::size_t>(from_end - from) < run || static_cast<std::size_t>(to_end - to) < run) {
        return Problem::damaged;
      }
      copy_run(from, from_end, run, to, to_end);
      from += run;
      to += run;
      continue;
    }
    std::size_t length = control >> 5;
    if (length == 7) {
      if (from == from_end) return Problem::damaged;
      length += *from++;
    }
    length += 2;
    if (from == from_end) return Problem::damaged;
    const std::size_t back = ((control & 31) << 8 | *from++) + 1;
    if (static_cast<std::size_t>(to - begin) < back || static_cast<std::size_t>(to_end - to) < length) {
      return Problem::damaged;
    }
    copy_match(to, back, length, to_end);
    to += length;
  }
  return to == to_end ? Problem::none : Problem::damaged;
}

namespace {

// Reduce a sum modulo 65535, but to 65535 instead of 0 if it is not 0, as HDF5's additions do.
std::uint64_t folded(std::uint64_t sum) {
  while (sum > 0xffff) sum = (sum & 0xffff) + (sum >> 16);
  return sum;
}

std::uint64_t word_at(const std::uint8_t* at) { return static_cast<std::uint64_t>(at[0] << 8 | at[1]); }

}  // namespace

std::uint32_t fletcher32(Bytes data) noexcept {
  constexpr std::size_t most = std::size_t{1} << 20;  // words; the sum of their sums stays below 2**57
  std::uint64_t low = 0, high = 0;
  const std::uint8_t* at = data.data;
  std::size_t words = data.size / 2;
  while (words > 0) {
    std::size_t count = std::min(words, most);
    words -= count;
    for (; count >= 4; count -= 4, at += 8) {
      const std::uint64_t a = word_at(at), b = word_at(at + 2), c = word_at(at + 4), d = word_at(at + 6);
      high += 4 * (low + a) + 3 * b + 2 * c + d;
      low += a + b + c + d;
    }
    for (; count > 0; --count, at += 2) {
      low += word_at(at);
      high += low;
    }
    low = folded(low);
    high = folded(high);
  }
  if (data.size % 2 != 0) {
    low += static_cast<std::uint64_t>(*at) << 8;
    high += low;
  }
  return static_cast<std::uint32_t>(folded(high) << 16 | folded(low));
}

void unshuffle(const std::uint8_t* from, std::int64_t size, std::int32_t element, Range wanted,
               std::uint8_t* out) noexcept {
  const std::int64_t begin = std::max(wanted.begin, std::int64_t{0}), end = std::min(wanted.end, size);
  if (begin >= end) return;
  const std::int64_t plane = element > 1 ? size / element : 0, whole = plane * element;
  const auto byte_at = [&](std::int64_t at) { return from[at % element * plane + at / element]; };
  std::int64_t at = begin;
  if (at < whole) {
    const std::int64_t limit = std::min(end, whole);
    // The kernel takes whole elements; both ends may be parts of one.
    for (; at < limit && at % element != 0; ++at) out[at] = byte_at(at);
    const std::int64_t count = (limit - at) / element;
    if (count > 0) kernels().unshuffle(from + at / element, plane, element, count, out + at);
    for (at += count * element; at < limit; ++at) out[at] = byte_at(at);
  }
  if (at < end) std::memcpy(out + at, from + at, static_cast<std::size_t>(end - at));
}

}  // namespace fastpipe
