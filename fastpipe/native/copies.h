// Copies for decompressors: 8 or 16 bytes at a time, beyond the end of a run where the memory has room.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words repeat their first bytes as on little-endian processors"
#endif

namespace fastpipe {

// memcpy that accepts null pointers for no bytes.
inline void copy_bytes(const std::uint8_t* from, std::size_t size, std::uint8_t* to) noexcept {
  if (size != 0) std::memcpy(to, from, size);
}

inline void copy16(const std::uint8_t* from, std::uint8_t* to) noexcept {
  std::uint8_t block[16];
  std::memcpy(block, from, sizeof block);
  std::memcpy(to, block, sizeof block);
}

// Copy 1 to 32 bytes, which both memories hold before their ends.
inline void copy_run(const std::uint8_t* from, const std::uint8_t* from_end, std::size_t size, std::uint8_t* to,
                     const std::uint8_t* to_end) noexcept {
  if (from_end - from >= 32 && to_end - to >= 32) {
    copy16(from, to);
    copy16(from + 16, to + 16);
  } else {
    std::memcpy(to, from, size);
  }
}

// How to repeat 1 to 8 bytes in a word: multiply them by `repeats`.  The first `step` bytes of the product are a whole
// number of repetitions.
struct Repetition {
  std::uint64_t mask = 0, repeats = 0;
  std::size_t step = 0;
};
struct Repetitions {
  Repetition of[9];  // bytes
  constexpr Repetitions() : of() {
    for (std::size_t bytes = 1; bytes <= 8; ++bytes) {
      of[bytes].mask = ~std::uint64_t{0} >> (64 - 8 * bytes);
      for (std::size_t at = 0; at < 8; at += bytes) of[bytes].repeats |= std::uint64_t{1} << 8 * at;
      of[bytes].step = 8 / bytes * bytes;
    }
  }
};
constexpr Repetitions kRepetitions;

// Repeat `size` bytes that begin `back` before `to`, where `back` bytes were written and there is room for `size`.
inline void copy_match(std::uint8_t* to, std::size_t back, std::size_t size, const std::uint8_t* to_end) noexcept {
  const std::uint8_t* from = to - back;
  std::uint8_t* const end = to + size;
  if (static_cast<std::size_t>(to_end - to) < size + 16) {
    while (to < end) *to++ = *from++;
    return;
  }
  // Most matches end here: no branch has depended on their distance, which processors cannot predict.
  const Repetition& repetition = kRepetitions.of[back < 8 ? back : 8];
  std::uint64_t word;
  std::memcpy(&word, from, sizeof word);  // the mask clears bytes that are not written yet
  word = (word & repetition.mask) * repetition.repeats;
  std::memcpy(to, &word, sizeof word);
  if (size <= repetition.step) return;
  if (back >= 16) {
    for (; to < end; from += 16, to += 16) copy16(from, to);
  } else if (back >= 8) {
    for (from += 8, to += 8; to < end; from += 8, to += 8) {
      std::memcpy(&word, from, sizeof word);
      std::memcpy(to, &word, sizeof word);
    }
  } else {
    for (to += repetition.step; to < end; to += repetition.step) std::memcpy(to, &word, sizeof word);
  }
}

}  // namespace fastpipe
