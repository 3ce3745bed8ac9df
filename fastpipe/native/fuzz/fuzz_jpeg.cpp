// Fuzzes the JPEG header and the decoding of parts of an image.
//
// Beside what sanitizers find, a part must equal the same part of the whole image, whatever the file.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../arena.h"
#include "../jpeg.h"

namespace {

using namespace fastpipe;

constexpr std::int64_t kMostPixels = std::int64_t{1} << 20;

volatile std::uint64_t sink;

// Read every byte, so that a sanitizer sees those that nobody wrote.
void touch(const Pixels& pixels) {
  std::uint64_t sum = 0;
  for (std::int32_t y = 0; y < pixels.height; ++y) {
    const std::uint8_t* row = pixels.data + pixels.pitch * y;
    for (std::int32_t x = 0; x < pixels.width * pixels.channels; ++x) sum += row[x];
  }
  sink = sum;
}

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

bool is_part(const Pixels& part, const Pixels& whole, Box box) {
  for (std::int32_t y = 0; y < part.height; ++y) {
    const std::uint8_t* expected = whole.data + whole.pitch * (box.top + y) + 3 * box.left;
    if (std::memcmp(part.data + part.pitch * y, expected, 3 * static_cast<std::size_t>(part.width)) != 0) return false;
  }
  return true;
}

// A box inside the image, from a number that depends on all of the file.
Box box_from(std::uint64_t number, const JpegHeader& header) {
  const auto next = [&number](std::int32_t below) {
    number = number * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::int32_t>((number >> 33) % static_cast<std::uint32_t>(below));
  };
  Box box;
  box.top = next(header.height);
  box.left = next(header.width);
  box.height = 1 + next(header.height - box.top);
  box.width = 1 + next(header.width - box.left);
  return box;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static JpegDecoder decoder;  // the same for all, as what is left of one file must not change the next
  static Arena arena;
  const Bytes file{data, size};
  const JpegHeader header = read_jpeg_header(file);
  if (!header.trusted || std::int64_t{header.height} * header.width > kMostPixels) return 0;
  require(header.is_jpeg() && header.frame > 0 && header.frame < static_cast<std::int64_t>(size), "header");
  require(header.orientation >= 0 && header.orientation <= 8, "orientation");

  std::uint64_t number = size;
  for (std::size_t i = 0; i < size; ++i) number = (number ^ data[i]) * 1099511628211u;
  const Box box = box_from(number, header), everything{0, 0, header.height, header.width};
  Pixels part, whole, reduced;
  const Status status = decoder.decode(file, box, arena, &part);
  const Status of_whole = decoder.decode(file, everything, arena, &whole);
  if (status.is_made()) {
    require(part.height == box.height && part.width == box.width, "size of a part");
    touch(part);
  }
  if (of_whole.is_made()) {
    touch(whole);
    require(status.is_made(), "a part of an image that can be decoded");
    require(is_part(part, whole, box), "pixels of a part");
  }
  const int factor = 2 << number % 3;
  const auto count = static_cast<std::int32_t>(1 + number % static_cast<std::uint64_t>(header.height));
  if (decoder.decode_reduced(file, factor, count, arena, &reduced).is_made()) touch(reduced);
  arena.reset();
  return 0;
}
