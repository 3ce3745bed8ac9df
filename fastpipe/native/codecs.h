// Decoders for stored chunks: the filters of HDF5, the codecs of Zarr and N5.
//
// The stored bytes are hostile.  A function fills exactly the memory that it is given, or returns a Problem; it never
// reads or writes outside, and never allocates a size that the bytes declare.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "arena.h"
#include "span.h"

namespace fastpipe {

// Why a chunk could not be decoded.
enum class Problem : std::uint8_t {
  none = 0,
  header = 1,    // its header is cut off, or is none
  size = 2,      // its header does not say the bytes that are expected
  blocks = 3,    // blocks of a size that there is not
  early = 4,     // the data end too early
  damaged = 5,   // damaged data, or more or fewer bytes than expected
  checksum = 6,  // a checksum is not that of the data
  unknown = 7,   // a codec that is not here, such as Snappy inside Blosc
  no_memory = 8,
};

// What the libraries keep from call to call, for one thread: libdeflate's decompressor, zstd's context.
class CodecStates {
 public:
  CodecStates();
  ~CodecStates();
  CodecStates(const CodecStates&) = delete;
  CodecStates& operator=(const CodecStates&) = delete;

  struct States;
  States* get() noexcept;  // made when first needed; null where there is no memory

 private:
  std::unique_ptr<States> states_;
};

// Part of a chunk, in bytes of its content.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// Each of these undoes one codec: from stored bytes to `size` bytes of content, all of which it fills.
[[nodiscard]] Problem inflate_zlib(Bytes stored, std::uint8_t* out, std::size_t size, CodecStates& states) noexcept;
// Return whether zlib's stream has at most so many bytes of content, if it is one at all.
[[nodiscard]] bool inflates_to_at_most(Bytes stored, std::size_t most, Arena& arena, CodecStates& states) noexcept;
// Members of gzip, one after the other.
[[nodiscard]] Problem inflate_gzip(Bytes stored, std::uint8_t* out, std::size_t size, CodecStates& states) noexcept;
[[nodiscard]] Problem decompress_zstd(Bytes stored, std::uint8_t* out, std::size_t size, CodecStates& states) noexcept;
[[nodiscard]] Problem decompress_lz4(Bytes block, std::uint8_t* out, std::size_t size) noexcept;
[[nodiscard]] Problem decompress_lzf(Bytes stored, std::uint8_t* out, std::size_t size) noexcept;

// The checksum that HDF5's filter Fletcher32 appends.
std::uint32_t fletcher32(Bytes data) noexcept;

// HDF5's shuffle, undone: all first bytes of the elements, then all second ones, and so on; what is left behind the
// last whole element stays as it is.  Only the bytes of `wanted` are written.
void unshuffle(const std::uint8_t* from, std::int64_t size, std::int32_t element, Range wanted,
               std::uint8_t* out) noexcept;

// ---- Blosc: c-blosc's README_CHUNK_FORMAT.rst --------------------------------------------------------------------

// What a buffer says of itself, checked.
struct BloscHeader {
  static constexpr std::int64_t kBytes = 16;
  std::int32_t element = 1;  // bytes
  std::int64_t nbytes = 0;   // of its content
  std::int64_t block = 0;    // of that, in each block
  std::int64_t stored = 0;   // bytes of the buffer
  std::int64_t blocks = 0;
  std::uint8_t flags = 0, codec = 0;
  bool is_copied = false;  // the content is in it as it is
};

// Read a header from a buffer's first bytes.
//
// nbytes: that its content must have.
// stored: bytes that the buffer must have.
[[nodiscard]] Problem read_blosc_header(Bytes first, std::int64_t nbytes, std::int64_t stored,
                                        BloscHeader* header) noexcept;

// Locate the bytes of blocks in a buffer: each ends where another one begins.
//
// table: of starts, behind the header.
// bounds: (blocks)
[[nodiscard]] Problem locate_blosc_blocks(const BloscHeader& header, const std::uint8_t* table, Range blocks,
                                          Range* bounds, Arena& arena) noexcept;

// Decode blocks of a buffer, whose bytes are given as far as these need them (the header and the table of starts
// always).
//
// blocks: from and to which.
// out: where the first of them begins.
[[nodiscard]] Problem decode_blosc_blocks(const BloscHeader& header, const std::uint8_t* buffer, Range blocks,
                                          std::uint8_t* out, Arena& arena, CodecStates& states) noexcept;

// Decode a whole buffer.
[[nodiscard]] Problem decode_blosc(Bytes buffer, std::uint8_t* out, std::int64_t size, Arena& arena,
                                   CodecStates& states) noexcept;

// ---- the filters of an HDF5 dataset --------------------------------------------------------------------------------

// The numbers that HDF5 and The HDF Group's list give filters.
enum class ChunkFilter : std::int32_t {
  deflate = 1,
  shuffle = 2,
  fletcher32 = 3,
  lzf = 32000,
  blosc = 32001,
  lz4 = 32004,
  bitshuffle = 32008,
  zstd = 32015,
  blosc2 = 32026,
};

struct FilterStep {
  ChunkFilter filter;
  std::int32_t element = 1;  // of shuffle and bitshuffle: bytes of an element
  std::int32_t codec = 0;    // of bitshuffle: 0 none, 2 LZ4, 3 zstd
  std::int64_t block = 0;    // of bitshuffle without a codec: elements of a block; 0: as many as by default
};

// Undo the filters of a chunk.
//
// steps: the dataset's, in the order of writing.
// mask: bit i says that filter i was left out for this chunk.
// out: (size); the memory of the chunk's content.
// wanted: the part of the content that is needed; the other bytes of `out` may be left as they are, or be written.
// step: the number of the step that failed; -1 if none did, but the content has another size than expected.
[[nodiscard]] Problem undo_filters(const std::vector<FilterStep>& steps, std::uint32_t mask, Bytes stored,
                                   std::uint8_t* out, std::int64_t size, Range wanted, Arena& arena,
                                   CodecStates& states, std::int32_t* step) noexcept;

// Functions of c-blosc2, handed over: only a wheel has a library of it that is new enough.
struct Blosc2Functions {
  void* (*schunk_from_buffer)(std::uint8_t*, std::int64_t, bool);
  int (*array_from_schunk)(void*, void**);
  int (*array_to_buffer)(void*, void*, std::int64_t);
  int (*array_free)(void*);
  int (*decompress_chunk)(void*, std::int64_t, void*, std::int32_t);
  int (*schunk_free)(void*);
};
// Use these functions from now on.  Only the first call has an effect.
void use_blosc2(const Blosc2Functions& functions) noexcept;

}  // namespace fastpipe
