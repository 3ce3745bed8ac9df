// Views of memory that somebody else owns.  Strides are in bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastpipe {

// Encoded bytes, such as a file's.
struct Bytes {
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;
};

struct Size {
  std::int32_t height = 0;
  std::int32_t width = 0;
  friend bool operator==(const Size& a, const Size& b) { return a.height == b.height && a.width == b.width; }
};

// A rectangle in pixels; it may reach outside the image that it refers to.
struct Box {
  std::int32_t top = 0;
  std::int32_t left = 0;
  std::int32_t height = 0;
  std::int32_t width = 0;
  std::int32_t bottom() const { return top + height; }
  std::int32_t right() const { return left + width; }
  friend bool operator==(const Box& a, const Box& b) {
    return a.top == b.top && a.left == b.left && a.height == b.height && a.width == b.width;
  }
};

// Interleaved pixels of 8 bits: 1 or 3 channels.
struct Pixels {
  const std::uint8_t* data = nullptr;  // of the first row
  std::int64_t pitch = 0;              // bytes from one row to the next
  std::int32_t height = 0;
  std::int32_t width = 0;
  std::int32_t channels = 3;
};

}  // namespace fastpipe
