// Copies that decompressors make: 16 bytes at a time, more than asked for where there is room behind.
#pragma once

#include <cstdint>
#include <cstring>

namespace fastpipe {

// memcpy, which must not be given null even for no bytes.
inline void copy_bytes(const std::uint8_t* from, std::size_t size, std::uint8_t* to) noexcept {
  if (size != 0) std::memcpy(to, from, size);
}

inline void copy16(const std::uint8_t* from, std::uint8_t* to) noexcept {
  std::uint8_t block[16];
  std::memcpy(block, from, sizeof block);
  std::memcpy(to, block, sizeof block);
}

// Copy 1 to 32 bytes; both memories have that many up to their ends.
inline void copy_run(const std::uint8_t* from, const std::uint8_t* from_end, std::size_t size, std::uint8_t* to,
                     const std::uint8_t* to_end) noexcept {
  if (from_end - from >= 32 && to_end - to >= 32) {
    copy16(from, to);
    copy16(from + 16, to + 16);
  } else {
    std::memcpy(to, from, size);
  }
}

// Repeat `size` bytes that begin `back` before `to`, where `back` bytes were written and there is room for `size`.
inline void copy_match(std::uint8_t* to, std::size_t back, std::size_t size, const std::uint8_t* to_end) noexcept {
  const std::uint8_t* from = to - back;
  std::uint8_t* const end = to + size;
  if (static_cast<std::size_t>(to_end - to) < size + 16) {
    while (to < end) *to++ = *from++;
    return;
  }
  if (back == 1) {
    std::memset(to, *from, size);
    return;
  }
  if (back < 16) {
    for (int i = 0; i < 16; ++i) to[i] = from[i];
    // The same bytes repeat at each multiple of `back`; at one of 16 or more, copies do not overlap.
    to += 16;
    from = to - (15 + back) / back * back;
  }
  while (to < end) {
    copy16(from, to);
    from += 16;
    to += 16;
  }
}

}  // namespace fastpipe
