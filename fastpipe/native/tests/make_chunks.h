// Encoders, for tests: what filters and Blosc make of bytes.
#pragma once

#include <libdeflate.h>
#include <lz4.h>
#include <zstd.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../codecs.h"

namespace fastpipe::tests {

using Content = std::vector<std::uint8_t>;

inline Bytes bytes_of(const Content& content) { return {content.data(), content.size()}; }

inline void append(Content* to, const Content& more) { to->insert(to->end(), more.begin(), more.end()); }

inline void append_number(Content* to, std::uint64_t value, int bytes, bool is_big) {
  for (int i = 0; i < bytes; ++i) {
    to->push_back(static_cast<std::uint8_t>(value >> 8 * (is_big ? bytes - 1 - i : i)));
  }
}

inline Content slice(const Content& of, std::size_t begin, std::size_t end) {
  return {of.begin() + static_cast<std::ptrdiff_t>(begin), of.begin() + static_cast<std::ptrdiff_t>(end)};
}

inline Content shuffled(const Content& content, std::size_t element) {
  const std::size_t count = content.size() / element;
  Content made = content;
  for (std::size_t k = 0; k < count * element; ++k) made[k % element * count + k / element] = content[k];
  return made;
}

// Of a multiple of 8 elements.
inline Content bit_shuffled(const Content& content, std::size_t element) {
  const std::size_t count = content.size() / element;
  Content made(content.size());
  for (std::size_t k = 0; k < content.size(); ++k) {
    for (std::size_t bit = 0; bit < 8; ++bit) {
      const std::size_t row = k % element * 8 + bit, number = k / element;
      made[row * (count / 8) + number / 8] |= static_cast<std::uint8_t>((content[k] >> bit & 1) << number % 8);
    }
  }
  return made;
}

inline Content zlib_of(const Content& content, int level = 4) {
  libdeflate_compressor* compressor = libdeflate_alloc_compressor(level);
  Content made(libdeflate_zlib_compress_bound(compressor, content.size()));
  made.resize(libdeflate_zlib_compress(compressor, content.data(), content.size(), made.data(), made.size()));
  libdeflate_free_compressor(compressor);
  return made;
}

inline Content gzip_of(const Content& content) {
  libdeflate_compressor* compressor = libdeflate_alloc_compressor(6);
  Content made(libdeflate_gzip_compress_bound(compressor, content.size()));
  made.resize(libdeflate_gzip_compress(compressor, content.data(), content.size(), made.data(), made.size()));
  libdeflate_free_compressor(compressor);
  return made;
}

inline Content zstd_of(const Content& content) {
  Content made(ZSTD_compressBound(content.size()));
  made.resize(ZSTD_compress(made.data(), made.size(), content.data(), content.size(), 3));
  return made;
}

inline Content lz4_of(const Content& content) {
  const int size = static_cast<int>(content.size());
  Content made(static_cast<std::size_t>(LZ4_compressBound(size)));
  const int count = LZ4_compress_default(reinterpret_cast<const char*>(content.data()),
                                         reinterpret_cast<char*>(made.data()), size, static_cast<int>(made.size()));
  made.resize(static_cast<std::size_t>(count));
  return made;
}

// The longest match of what follows, at most `most` bytes, that begins up to `farthest` bytes before.
struct Match {
  std::size_t back = 0, length = 0;
};
inline Match longest_match(const Content& content, std::size_t at, std::size_t farthest, std::size_t most) {
  Match best;
  for (std::size_t back = 1; back <= std::min(at, farthest); ++back) {
    std::size_t length = 0;
    while (length < most && at + length < content.size() && content[at + length] == content[at + length - back]) {
      ++length;
    }
    if (length > best.length) best = {back, length};
  }
  return best;
}

inline void append_literals(Content* to, Content* literals) {
  for (std::size_t begin = 0; begin < literals->size(); begin += 32) {
    const std::size_t end = std::min(begin + 32, literals->size());
    to->push_back(static_cast<std::uint8_t>(end - begin - 1));
    append(to, slice(*literals, begin, end));
  }
  literals->clear();
}

inline Content lzf_of(const Content& content) {
  Content made, literals;
  for (std::size_t at = 0; at < content.size();) {
    const Match match = longest_match(content, at, 8192, 264);
    if (match.length < 3) {
      literals.push_back(content[at++]);
      continue;
    }
    append_literals(&made, &literals);
    const std::size_t length = match.length - 2, back = match.back - 1;
    made.push_back(static_cast<std::uint8_t>(std::min<std::size_t>(length, 7) << 5 | back >> 8));
    if (length >= 7) made.push_back(static_cast<std::uint8_t>(length - 7));
    made.push_back(static_cast<std::uint8_t>(back));
    at += match.length;
  }
  append_literals(&made, &literals);
  return made;
}

inline Content blosclz_of(const Content& content) {
  Content made, literals;
  for (std::size_t at = 0; at < content.size();) {
    Match match = longest_match(content, at, 60000, 2000);
    // It begins and ends with literals.
    if (match.length + at == content.size() && match.length > 0) --match.length;
    if (match.length < 6 || at == 0) {
      literals.push_back(content[at++]);
      continue;
    }
    append_literals(&made, &literals);
    std::size_t length = match.length - 2, back = match.back - 1;
    const bool is_far = back >= 8191;
    const std::size_t near = is_far ? 8191 : back;
    made.push_back(static_cast<std::uint8_t>(std::min<std::size_t>(length, 7) << 5 | near >> 8));
    if (length >= 7) {
      for (length -= 7; length >= 255; length -= 255) made.push_back(255);
      made.push_back(static_cast<std::uint8_t>(length));
    }
    made.push_back(static_cast<std::uint8_t>(near));
    if (is_far) append_number(&made, back - 8191, 2, true);
    at += match.length;
  }
  append_literals(&made, &literals);
  return made;
}

// What a Blosc buffer is made by.
struct BloscOptions {
  std::size_t element = 1, block = 0;
  int codec = 1;             // 0 blosclz, 1 LZ4, 3 zlib, 4 zstd
  int shuffle = 0;           // 1 bytes, 2 bits
  bool is_split = true;      // where the format splits blocks
  bool is_copied = false;    // the content as it is
  bool is_reversed = false;  // the last block comes first
};

inline Content blosc_block(const Content& content, const BloscOptions& options, bool is_short) {
  const std::size_t element = options.element, count = content.size() / element;
  Content filtered = content;
  if (options.shuffle == 1) filtered = shuffled(content, element);
  if (options.shuffle == 2 && content.size() >= element && count % 8 == 0) {
    filtered = bit_shuffled(slice(content, 0, count * element), element);
    append(&filtered, slice(content, count * element, content.size()));
  }
  const bool is_split = options.is_split && element <= 16 && count >= 128 && !is_short;
  const std::size_t splits = is_split ? element : 1, size = content.size() / splits;
  Content made;
  for (std::size_t begin = 0; begin < splits * size; begin += size) {
    const Content part = slice(filtered, begin, begin + size);
    Content stored = options.codec == 0   ? blosclz_of(part)
                     : options.codec == 1 ? lz4_of(part)
                     : options.codec == 3 ? zlib_of(part)
                                          : zstd_of(part);
    if (stored.size() >= part.size()) stored = part;
    append_number(&made, stored.size(), 4, false);
    append(&made, stored);
  }
  return made;
}

inline Content blosc_of(const Content& content, const BloscOptions& options) {
  const std::size_t block = options.block, blocks = (content.size() + block - 1) / block;
  const int shuffle = options.shuffle == 1 ? 1 : options.shuffle == 2 ? 4 : 0;
  const int flags = shuffle | (options.is_copied ? 2 : 0) | (options.is_split ? 0 : 16) | options.codec << 5;
  std::vector<Content> parts;
  for (std::size_t begin = 0; begin < content.size(); begin += block) {
    const std::size_t end = std::min(begin + block, content.size());
    parts.push_back(blosc_block(slice(content, begin, end), options, end - begin < block));
  }
  Content body, table(4 * blocks);
  for (std::size_t i = 0; i < blocks; ++i) {
    const std::size_t number = options.is_reversed ? blocks - 1 - i : i;
    const std::size_t start = 16 + table.size() + body.size();
    for (std::size_t k = 0; k < 4; ++k) table[4 * number + k] = static_cast<std::uint8_t>(start >> 8 * k);
    append(&body, parts[number]);
  }
  if (options.is_copied) table.clear(), body = content;
  Content made = {2, 1, static_cast<std::uint8_t>(flags), static_cast<std::uint8_t>(options.element)};
  append_number(&made, content.size(), 4, false);
  append_number(&made, block, 4, false);
  append_number(&made, 16 + table.size() + body.size(), 4, false);
  append(&made, table);
  append(&made, body);
  return made;
}

// HDF5's LZ4 filter.
inline Content lz4_filtered(const Content& content, std::size_t block) {
  Content made;
  append_number(&made, content.size(), 8, true);
  append_number(&made, block, 4, true);
  for (std::size_t begin = 0; begin < content.size(); begin += block) {
    const Content part = slice(content, begin, std::min(begin + block, content.size()));
    Content stored = lz4_of(part);
    if (stored.size() >= part.size()) stored = part;
    append_number(&made, stored.size(), 4, true);
    append(&made, stored);
  }
  return made;
}

// HDF5's bitshuffle; elements: of a block.
inline Content bitshuffle_filtered(const Content& content, std::size_t element, int codec, std::size_t elements) {
  const std::size_t whole = content.size() - content.size() / element % 8 * element, block = elements * element;
  Content made;
  if (codec != 0) {
    append_number(&made, content.size(), 8, true);
    append_number(&made, block, 4, true);
  }
  for (std::size_t begin = 0; begin < whole; begin += block) {
    const Content bits = bit_shuffled(slice(content, begin, std::min(begin + block, whole)), element);
    const Content stored = codec == 0 ? bits : codec == 2 ? lz4_of(bits) : zstd_of(bits);
    if (codec != 0) append_number(&made, stored.size(), 4, true);
    append(&made, stored);
  }
  append(&made, slice(content, whole, content.size()));
  return made;
}

// The same as fletcher32(), as HDF5 computes it.
inline std::uint32_t fletcher32_of(const Content& content) {
  std::uint32_t low = 0, high = 0;
  for (std::size_t at = 0; at < content.size(); at += 2) {
    const std::uint32_t second = at + 1 < content.size() ? content[at + 1] : 0u;
    low += static_cast<std::uint32_t>(content[at]) << 8 | second;
    low = (low & 0xffff) + (low >> 16);
    high += low;
    high = (high & 0xffff) + (high >> 16);
  }
  return high << 16 | low;
}

inline Content filtered(const Content& content, const FilterStep& step) {
  const auto element = static_cast<std::size_t>(step.element);
  Content made = content;
  switch (step.filter) {
    case ChunkFilter::deflate:
      return zlib_of(content);
    case ChunkFilter::shuffle:
      return shuffled(content, element);
    case ChunkFilter::fletcher32:
      append_number(&made, fletcher32_of(content), 4, false);
      return made;
    case ChunkFilter::lzf:
      return lzf_of(content);
    case ChunkFilter::zstd:
      return zstd_of(content);
    case ChunkFilter::lz4:
      return lz4_filtered(content, 100);
    case ChunkFilter::bitshuffle:
      return bitshuffle_filtered(content, element, step.codec,
                                 step.block > 0 ? static_cast<std::size_t>(step.block) : 64);
    default: {
      BloscOptions options;
      options.element = element;
      options.block = std::max<std::size_t>(std::min<std::size_t>(content.size(), 256 * element), 1);
      options.shuffle = 1;
      return blosc_of(content, options);
    }
  }
}

}  // namespace fastpipe::tests
