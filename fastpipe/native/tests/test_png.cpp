// PNG headers and rows, on files that are filtered and compressed here.
#include <libdeflate.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../arena.h"
#include "../codecs.h"
#include "../png.h"
#include "check.h"

namespace {

using namespace fastpipe;
using File = std::vector<std::uint8_t>;

struct Picture {
  std::int32_t height, width, bits;
  PngColour colour;
  std::size_t pitch;  // bytes of a row
  File rows;
};

std::uint32_t below(std::uint32_t count) {
  static std::uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return (state >> 8) % count;
}

Picture picture(std::int32_t height, std::int32_t width, std::int32_t bits, PngColour colour) {
  PngHeader header;
  header.colour = colour;
  const auto samples = static_cast<std::size_t>(width) * static_cast<std::size_t>(header.channels());
  Picture made{height, width, bits, colour, (samples * static_cast<std::size_t>(bits) + 7) / 8, {}};
  made.rows.resize(made.pitch * static_cast<std::size_t>(height));
  for (auto& byte : made.rows) byte = static_cast<std::uint8_t>(below(256));
  return made;
}

void add_number(File* file, std::uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) file->push_back(static_cast<std::uint8_t>(value >> shift));
}

void add_chunk(File* file, const char* name, const File& content) {
  add_number(file, static_cast<std::uint32_t>(content.size()));
  const std::size_t begin = file->size();
  file->insert(file->end(), name, name + 4);
  file->insert(file->end(), content.begin(), content.end());
  add_number(file, libdeflate_crc32(0, file->data() + begin, 4 + content.size()));
}

// What the definition of the filters subtracts from a byte.
int expected(int filter, int left, int upper, int corner) {
  const int estimate = left + upper - corner;
  const int to_left = std::abs(estimate - left), to_upper = std::abs(estimate - upper);
  const int to_corner = std::abs(estimate - corner);
  switch (filter) {
    case 1:
      return left;
    case 2:
      return upper;
    case 3:
      return (left + upper) / 2;
    case 4:
      return to_left <= to_upper && to_left <= to_corner ? left : to_upper <= to_corner ? upper : corner;
    default:
      return 0;
  }
}

File compressed(const Picture& image, int last_filter = 4) {
  PngHeader header;
  header.colour = image.colour;
  const std::size_t pixel = std::max<std::size_t>(1, static_cast<std::size_t>(header.channels() * image.bits) / 8);
  File raw;
  for (std::size_t y = 0; y < static_cast<std::size_t>(image.height); ++y) {
    const int filter = y + 1 == static_cast<std::size_t>(image.height) ? last_filter : static_cast<int>(below(5));
    raw.push_back(static_cast<std::uint8_t>(filter));
    const std::uint8_t* row = image.rows.data() + y * image.pitch;
    for (std::size_t x = 0; x < image.pitch; ++x) {
      const int left = x < pixel ? 0 : row[x - pixel], upper = y == 0 ? 0 : row[x - image.pitch];
      const int corner = x < pixel || y == 0 ? 0 : *(row + x - image.pitch - pixel);
      raw.push_back(static_cast<std::uint8_t>(row[x] - expected(filter, left, upper, corner)));
    }
  }
  libdeflate_compressor* compressor = libdeflate_alloc_compressor(1);
  File stored(libdeflate_zlib_compress_bound(compressor, raw.size()));
  stored.resize(libdeflate_zlib_compress(compressor, raw.data(), raw.size(), stored.data(), stored.size()));
  libdeflate_free_compressor(compressor);
  return stored;
}

File beginning(const Picture& image) {
  File file{0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'}, header;
  add_number(&header, static_cast<std::uint32_t>(image.width));
  add_number(&header, static_cast<std::uint32_t>(image.height));
  header.push_back(static_cast<std::uint8_t>(image.bits));
  header.push_back(static_cast<std::uint8_t>(image.colour));
  header.resize(13);
  add_chunk(&file, "IHDR", header);
  return file;
}

File encoded(const Picture& image, std::size_t piece = 50, int last_filter = 4) {
  File file = beginning(image);
  const File stored = compressed(image, last_filter);
  for (std::size_t at = 0; at < stored.size(); at += piece) {
    const std::size_t end = std::min(stored.size(), at + piece);
    add_chunk(&file, "IDAT", File(stored.begin() + std::ptrdiff_t(at), stored.begin() + std::ptrdiff_t(end)));
  }
  add_chunk(&file, "IEND", {});
  return file;
}

struct Reader {
  Arena arena;
  CodecStates states;
  PngHeader header(const File& file) { return read_png_header({file.data(), file.size()}, arena, states); }
  Status rows(const File& file, std::int32_t count, Pixels* rows) {
    return decode_png_rows({file.data(), file.size()}, header(file), count, arena, states, rows);
  }
};

TEST("png: rows are those that were filtered") {
  struct Kind {
    std::int32_t bits;
    PngColour colour;
  };
  for (const Kind kind : {Kind{1, PngColour::grey},
                          {2, PngColour::palette},
                          {4, PngColour::grey},
                          {8, PngColour::grey},
                          {16, PngColour::grey},
                          {8, PngColour::rgb},
                          {16, PngColour::rgb},
                          {8, PngColour::palette},
                          {8, PngColour::grey_alpha},
                          {16, PngColour::grey_alpha},
                          {8, PngColour::rgba},
                          {16, PngColour::rgba}}) {
    for (const std::int32_t width : {1, 2, 3, 17, 100}) {
      const Picture image = picture(9, width, kind.bits, kind.colour);
      const File file = encoded(image);
      Reader reader;
      const PngHeader header = reader.header(file);
      CHECK(header.height == 9 && header.width == width && header.trusted == (kind.bits == 8));
      for (const std::int32_t count : {1, 4, 9}) {
        Pixels rows;
        CHECK(reader.rows(file, count, &rows).is_made() && rows.height == count);
        CHECK(static_cast<std::size_t>(rows.width) == image.pitch);
        for (std::int32_t y = 0; y < count; ++y) {
          const std::uint8_t* row = image.rows.data() + static_cast<std::size_t>(y) * image.pitch;
          CHECK(std::memcmp(rows.data + y * rows.pitch, row, image.pitch) == 0);
        }
      }
    }
  }
}

TEST("png: files that end anywhere are none") {
  const File file = encoded(picture(5, 7, 8, PngColour::rgb));
  Reader reader;
  for (std::size_t size = 0; size < file.size(); ++size) {
    CHECK(!reader.header(File(file.begin(), file.begin() + std::ptrdiff_t(size))).is_png());
  }
  CHECK(reader.header(file).trusted);
}

TEST("png: files with a wrong byte are none") {
  const File file = encoded(picture(5, 7, 8, PngColour::rgb));
  Reader reader;
  for (std::size_t at = 0; at < file.size(); ++at) {
    File other = file;
    other[at] = static_cast<std::uint8_t>(other[at] ^ (1 + below(255)));
    CHECK(!reader.header(other).is_png());
  }
}

TEST("png: pixels that are not as many are damaged") {
  const Picture image = picture(5, 7, 8, PngColour::rgb);
  Reader reader;
  Pixels rows;
  CHECK(reader.rows(encoded(image, 50, 5), 5, &rows).reason == Reason::damaged);
  CHECK(reader.rows(encoded(image, 50, 5), 1, &rows).reason == Reason::damaged);
  for (const std::int32_t height : {4, 6, 1 << 30}) {
    Picture other = image;
    other.height = height;
    File file = beginning(other);
    add_chunk(&file, "IDAT", compressed(image));
    add_chunk(&file, "IEND", {});
    CHECK(reader.header(file).height == height);
    CHECK(reader.rows(file, 1, &rows).reason == Reason::damaged);
  }
}

TEST("png: colours that are not in the palette are damaged") {
  const Picture image = picture(5, 7, 8, PngColour::palette);
  for (const std::size_t size : {std::size_t{0}, std::size_t{30}, std::size_t{768}}) {
    File file = beginning(image), palette(size);
    for (auto& byte : palette) byte = static_cast<std::uint8_t>(below(256));
    if (size > 0) add_chunk(&file, "PLTE", palette);
    add_chunk(&file, "IDAT", compressed(image));
    add_chunk(&file, "IEND", {});
    Reader reader;
    Pixels pixels;
    const PngHeader header = reader.header(file);
    const Status status =
        decode_png({file.data(), file.size()}, header, {0, 0, 5, 7}, reader.arena, reader.states, &pixels);
    CHECK(header.trusted && status.is_made() == (size == 768));
    if (status.is_made()) CHECK(std::memcmp(pixels.data, palette.data() + 3 * image.rows[0], 3) == 0);
  }
}

}  // namespace
