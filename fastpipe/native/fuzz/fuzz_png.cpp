// Fuzzes the PNG header, and the decoding of rows.
//
// Invariants, whatever the file: the first rows equal those of the whole image; a trusted file that has its rows also
// becomes RGB, unless a colour is missing in its palette; a wrong checksum makes no difference to memory safety, so all
// are repaired before.
#include <libdeflate.h>

#include <vector>

#include "../png.h"
#include "fuzz.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::fuzz;

std::uint32_t big_endian(const std::uint8_t* from) {
  return std::uint32_t{from[0]} << 24 | std::uint32_t{from[1]} << 16 | std::uint32_t{from[2]} << 8 | from[3];
}

// Write the checksum of each chunk.
void repair(std::vector<std::uint8_t>* file) {
  for (std::size_t at = 8; file->size() >= 12 && at <= file->size() - 12;) {
    std::uint8_t* chunk = file->data() + at;
    const std::size_t size = big_endian(chunk);
    if (size > file->size() - at - 12) return;
    const std::uint32_t checksum = libdeflate_crc32(0, chunk + 4, size + 4);
    for (int i = 0; i < 4; ++i) chunk[8 + size + static_cast<std::size_t>(i)] = std::uint8_t(checksum >> (24 - 8 * i));
    at += 12 + size;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Arena arena;
  static CodecStates states;
  arena.reset();
  std::vector<std::uint8_t> repaired(data, data + size);
  repair(&repaired);
  const Bytes file{repaired.data(), repaired.size()};
  const PngHeader header = read_png_header(file, arena, states);
  require(!header.trusted || header.is_png(), "a file that is trusted");
  if (!header.is_png() || std::int64_t{header.height} * header.width > kMostPixels) return 0;
  require(header.width > 0 && header.data > 0 && header.data < size, "the header");
  Choices choices(file);
  const std::int32_t count = 1 + choices.below(header.height);
  Pixels some, all, pixels;
  const Status of_some = decode_png_rows(file, header, count, arena, states, &some);
  const Status of_all = decode_png_rows(file, header, header.height, arena, states, &all);
  require(same(of_some, of_all), "the status of the first rows");
  if (!of_all.is_made()) return 0;
  require(all.height == header.height && some.height == count && some.width == all.width, "the size of the rows");
  for (std::int32_t y = 0; y < count; ++y) {
    require(std::memcmp(some.data + some.pitch * y, all.data + all.pitch * y, static_cast<std::size_t>(all.width)) == 0,
            "the first rows");
  }
  if (!header.trusted) return 0;
  const Status status = decode_png(file, header, {0, 0, count, header.width}, arena, states, &pixels);
  require(status.is_made() || header.colour == PngColour::palette, "the pixels of a trusted file");
  if (status.is_made()) require(pixels.height == count && pixels.width == header.width, "the size of the pixels");
  return 0;
}
