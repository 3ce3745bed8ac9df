// Reads numbers and text from bytes that have not been checked.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "span.h"

namespace fastpipe {

// Positions count from the first byte.  They may be negative or behind the end: no byte outside is ever read.
class Reader {
 public:
  explicit Reader(Bytes bytes) noexcept : data_(bytes.data), size_(static_cast<std::int64_t>(bytes.size)) {}

  std::int64_t size() const noexcept { return size_; }

  // The byte at a position; 0 outside.
  std::uint8_t operator[](std::int64_t at) const noexcept {
    return at >= 0 && at < size_ ? data_[at] : std::uint8_t{0};
  }

  // A number of up to four bytes, the most significant first.  Bytes from `end` on are left out.
  std::int64_t big(std::int64_t first, int bytes, std::int64_t end) const noexcept {
    std::int64_t number = 0;
    for (std::int64_t at = first; at < std::min(first + bytes, end); ++at) number = number << 8 | (*this)[at];
    return number;
  }

  // The same, the least significant first.
  std::int64_t little(std::int64_t first, int bytes, std::int64_t end) const noexcept {
    std::int64_t number = 0;
    for (std::int64_t at = std::min(first + bytes, end) - 1; at >= first; --at) number = number << 8 | (*this)[at];
    return number;
  }

  // Return whether the bytes from `first` to `end` begin with a text.
  template <std::size_t length>
  bool begins(std::int64_t first, std::int64_t end, const char (&text)[length]) const noexcept {
    constexpr auto count = static_cast<std::int64_t>(length) - 1;  // without the zero that ends it
    if (first < 0 || std::min(end, size_) - first < count) return false;
    return std::memcmp(data_ + first, text, length - 1) == 0;
  }

  // Return whether a text is among the bytes from `first` to `end`.
  template <std::size_t length>
  bool has(std::int64_t first, std::int64_t end, const char (&text)[length]) const noexcept {
    constexpr auto count = static_cast<std::int64_t>(length) - 1;
    end = std::min(end, size_);
    first = std::max(first, std::int64_t{0});
    while (end - first >= count) {
      const void* found = std::memchr(data_ + first, text[0], static_cast<std::size_t>(end - first - count + 1));
      if (found == nullptr) return false;
      first = static_cast<const std::uint8_t*>(found) - data_;
      if (begins(first, end, text)) return true;
      ++first;
    }
    return false;
  }

 private:
  const std::uint8_t* data_;
  std::int64_t size_;
};

}  // namespace fastpipe
