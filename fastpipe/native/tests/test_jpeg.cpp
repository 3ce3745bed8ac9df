// JPEG headers and decoding, on files that libjpeg makes here; the expected pixels are its own of whole images.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

// clang-format off: it needs the ones above
#include <jpeglib.h>
// clang-format on

#include "../arena.h"
#include "../jpeg.h"
#include "../simd.h"
#include "check.h"
#include "make_jpeg.h"
#include "read_pixels.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::tests;

constexpr Kind kKinds[] = {
    {3, 1, 1, false, 0, false}, {3, 2, 1, false, 0, false}, {3, 2, 2, false, 0, false}, {1, 1, 1, false, 0, false},
    {3, 1, 1, true, 0, false},  {3, 2, 1, true, 0, false},  {3, 2, 2, true, 0, false},  {1, 1, 1, true, 0, false},
    {3, 2, 2, false, 1, false}, {3, 2, 1, false, 3, false}, {3, 2, 2, true, 5, false},  {1, 1, 1, false, 2, false},
};

Image decoded(const File& file, int factor = 1, JpegPixels kind = JpegPixels::pillow) {
  Image image;
  CHECK(read_pixels({file.data(), file.size()}, factor, kind, &image));
  return image;
}

// The file with one more segment, at a place; a length other than -1 is a lie.
File with_segment(const File& file, int marker, const std::string& body, std::size_t place = 2, int length = -1) {
  const int size = length >= 0 ? length : static_cast<int>(body.size()) + 2;
  File segment{0xFF, static_cast<std::uint8_t>(marker), static_cast<std::uint8_t>(size >> 8),
               static_cast<std::uint8_t>(size & 255)};
  segment.insert(segment.end(), body.begin(), body.end());
  File result = file;
  result.insert(result.begin() + static_cast<std::ptrdiff_t>(place), segment.begin(), segment.end());
  return result;
}

template <std::size_t length>
std::string text(const char (&literal)[length]) {  // zeros included
  return std::string(literal, length - 1);
}

File without_segments(const File& file, int marker) {
  File result(file.begin(), file.begin() + 2);
  std::size_t at = 2;
  for (;;) {
    const std::size_t next = at + 2 + static_cast<std::size_t>(file[at + 2] << 8 | file[at + 3]);
    if (file[at + 1] == 0xDA) break;
    if (file[at + 1] != marker) {
      result.insert(result.end(), file.begin() + static_cast<std::ptrdiff_t>(at),
                    file.begin() + static_cast<std::ptrdiff_t>(next));
    }
    at = next;
  }
  result.insert(result.end(), file.begin() + static_cast<std::ptrdiff_t>(at), file.end());
  return result;
}

JpegHeader header_of(const File& file) { return read_jpeg_header(Exact(file)); }

// ------------------------------------------------------------------------------------------------ comparing

bool is_part(const Pixels& part, const Image& image, Box box) {
  return part.height == box.height && part.width == box.width &&
         tests::is_part(part, image.pixels(), box.top, box.left);
}

struct Decoder {
  JpegDecoder decoder;
  Arena arena;

  bool gives(const Exact& file, const Image& image, Box box, JpegPixels kind = JpegPixels::pillow) {
    Pixels pixels;
    const bool same = decoder.decode(file, box, arena, &pixels, kind).is_made() && is_part(pixels, image, box);
    arena.reset();
    return same;
  }
  Status decode(const File& file, Box box) {
    Pixels pixels;
    const Status status = decoder.decode(Exact(file), box, arena, &pixels);
    arena.reset();
    return status;
  }
};

bool is_damaged(const Status& status) {
  return status.outcome == Outcome::declined && status.reason == Reason::damaged;
}

}  // namespace

// ------------------------------------------------------------------------------------------------ headers

TEST("jpeg header: size and kind") {
  for (const Kind& kind : kKinds) {
    const JpegHeader header = header_of(encoded({45, 67}, kind));
    CHECK(header.is_jpeg() && header.height == 45 && header.width == 67);
    CHECK(header.trusted);
    CHECK(header.orientation == 1);
  }
}

TEST("jpeg header: kinds that are left to Pillow") {
  const Kind others[] = {{3, 4, 1, false, 0, false},
                         {3, 1, 2, false, 0, false},
                         {4, 1, 1, false, 0, false},
                         {3, 1, 1, false, 0, true},
                         {1, 2, 2, false, 0, false}};
  for (const Kind& kind : others) {
    const JpegHeader header = header_of(encoded({20, 30}, kind));
    CHECK(header.height == 20 && header.width == 30);
    CHECK(!header.trusted);
  }
}

TEST("jpeg header: not a JPEG, or cut off") {
  CHECK(!header_of({}).is_jpeg());
  CHECK(!header_of({0xFF}).is_jpeg());
  CHECK(!header_of({0xFF, 0xD8, 0xFF}).is_jpeg());
  CHECK(!header_of({'G', 'I', 'F', '8', '9', 'a', 0, 0}).is_jpeg());
  for (const Kind& kind : {kKinds[2], kKinds[6]}) {
    const File file = encoded({19, 23}, kind);
    int jpegs = 0;
    for (std::size_t size = 0; size < file.size(); ++size) {
      const JpegHeader header = header_of(File(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(size)));
      CHECK(!header.trusted);
      jpegs += header.is_jpeg() ? 1 : 0;
    }
    CHECK(jpegs > 0);
  }
  File longer = encoded({19, 23}, kKinds[2]);
  longer.insert(longer.end(), {0xFF, 0xD8, 0, 1});
  CHECK(header_of(longer).trusted);
}

TEST("jpeg header: EXIF orientation") {
  const File file = encoded({20, 30}, kKinds[2]);
  const std::string big = text("Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0");
  const std::string little = text("Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x03\0\0\0\0\0\0\0");
  const std::string none = text("Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0");
  const auto with = [&](const std::string& body) { return header_of(with_segment(file, 0xE1, body)); };
  CHECK(with(big).orientation == 6 && with(big).trusted);
  CHECK(with(little).orientation == 3 && with(little).trusted);
  CHECK(with(none).orientation == 1 && with(none).trusted);
  std::string odd = big;
  odd[25] = 9;  // no such orientation
  CHECK(with(odd).orientation == 0 && with(odd).trusted);
  // Pillow may not open these, and joins two segments.
  CHECK(!with(big.substr(0, 20)).trusted);
  CHECK(!with(text("Exif\0\0??*\0\0\0\0\0")).trusted);
  CHECK(!with(text("Exif\0\0MM\0*\xFF\xFF\xFF\xFF")).trusted);
  CHECK(header_of(with_segment(with_segment(file, 0xE1, little), 0xE1, big)).orientation == 0);
  CHECK(with("http://ns.adobe.com/xap/1.0/ tiff:Orientation").orientation == 0);
}

TEST("jpeg header: EXIF of which Pillow warns") {
  const File file = encoded({20, 30}, kKinds[2]);
  // A text of eight bytes, behind the next directory's place.
  const std::string whole = text("Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x0F\0\x02\0\0\0\x08\0\0\0\x1A\0\0\0\0twoparts");
  const auto is_trusted = [&](const std::string& body) { return header_of(with_segment(file, 0xE1, body)).trusted; };
  CHECK(is_trusted(whole));
  CHECK(!is_trusted(whole.substr(0, whole.size() - 1)));
  CHECK(!is_trusted(whole.substr(0, 29)));
  for (std::size_t at = 20; at < 28; ++at) {  // its length and its place
    std::string body = whole;
    body[at] = '\xFF';
    CHECK(!is_trusted(body));
  }
  std::string unknown = whole;
  unknown[19] = 14;  // a type that Pillow does not read
  unknown[20] = '\xFF';
  CHECK(is_trusted(unknown));
}

TEST("jpeg header: segments that Pillow reads") {
  const File file = encoded({20, 30}, kKinds[2]);
  const auto trusted = [&](int marker, const std::string& body, int length = -1) {
    return header_of(with_segment(file, marker, body, 2, length)).trusted;
  };
  CHECK(trusted(0xFE, "a comment"));
  CHECK(trusted(0xFE, ""));
  CHECK(!trusted(0xFE, "", 1));
  CHECK(!trusted(0xFE, "", 0xFFFF));
  CHECK(!trusted(0xE0, text("JFIF\0\1")));
  CHECK(trusted(0xE2, text("ICC_PROFILE\0\1\1")));
  CHECK(!trusted(0xE2, text("ICC_PROFILE\0\1")));
  CHECK(trusted(0xEE, text("Adobe\0\x64\0\0\0\0\1")));
  CHECK(!trusted(0xEE, text("Adobe\0\x64\0\0\0\0\0")));
  CHECK(!trusted(0xEE, "Adobe"));
  CHECK(trusted(0xED, text("Photoshop 3.0\0008BIM\4\4\0\0\0\0\0\2ab")));
  CHECK(!trusted(0xED, text("Photoshop 3.0\0008BIM\4\4")));
  CHECK(!trusted(0xDB, std::string(30, 0)));
  CHECK(!trusted(0xDD, std::string(3, 0)));
  CHECK(!trusted(0x7F, "?"));
  File filled = file;
  filled.insert(filled.begin() + 2, {0xFF, 0xFF});
  CHECK(header_of(filled).trusted);
  filled.insert(filled.begin() + 2, {0xFF, 0xD0});
  CHECK(header_of(filled).is_jpeg() && !header_of(filled).trusted);
}

TEST("jpeg header: markers in coded data, at every place of a block") {
  const File file = encoded({8, 8}, {1, 1, 1, false, 0, false});
  const JpegHeader whole = header_of(file);
  CHECK(whole.trusted);
  std::size_t scan = 0;
  while (file[scan] != 0xFF || file[scan + 1] != 0xDA) ++scan;
  const std::ptrdiff_t begin = static_cast<std::ptrdiff_t>(scan) + 2 + file[scan + 3];
  for (std::size_t place = 0; place < 200; ++place) {
    File padded(file.begin(), file.begin() + begin);
    padded.insert(padded.end(), place, 0x55);
    padded.insert(padded.end(), {0xFF, 0x00, 0xFF, 0xFF, 0xD9, 0x55});
    CHECK(header_of(padded).trusted);
    padded.insert(padded.end(), 130, 0x55);
    CHECK(header_of(padded).trusted);
    padded[static_cast<std::size_t>(begin) + place + 4] = 0xD3;  // a restart marker that does not belong there
    CHECK(!header_of(padded).trusted);
    padded[static_cast<std::size_t>(begin) + place + 4] = 0x00;  // no end
    CHECK(!header_of(padded).trusted);
  }
}

TEST("jpeg header: restart markers and scans") {
  const File file = encoded({40, 40}, kKinds[8]);
  int markers = 0;
  for (std::size_t at = 2; at + 1 < file.size(); ++at) {
    if (file[at] != 0xFF || file[at + 1] < 0xD0 || file[at + 1] > 0xD7) continue;
    ++markers;
    File other = file;
    other[at + 1] ^= 1;
    CHECK(!header_of(other).trusted);
    other[at + 1] = 0;
    CHECK(!header_of(other).trusted);
  }
  CHECK(markers == 8);
  const File progressive = encoded({40, 40}, kKinds[6]);
  std::size_t last = progressive.size();
  while (progressive[last - 2] != 0xFF || progressive[last - 1] != 0xDA) --last;
  File shorter(progressive.begin(), progressive.begin() + static_cast<std::ptrdiff_t>(last) - 2);
  shorter.insert(shorter.end(), {0xFF, 0xD9});
  CHECK(header_of(shorter).is_jpeg() && !header_of(shorter).trusted);
}

// ------------------------------------------------------------------------------------------------ decoding

TEST("jpeg decode: all columns and all rows of small images") {
  Decoder decoder;
  for (const Kind& kind : kKinds) {
    for (const Size size : {Size{9, 35}, Size{17, 49}, Size{35, 33}}) {
      const File file = encoded(size, kind);
      const Exact exact(file);
      const Image image = decoded(file);
      int wrong = 0;
      for (std::int32_t left = 0; left < size.width; ++left) {
        for (std::int32_t right = left + 1; right <= size.width; ++right) {
          Box box = random_box(size);
          box.left = left;
          box.width = right - left;
          wrong += decoder.gives(exact, image, box) ? 0 : 1;
        }
      }
      for (std::int32_t top = 0; top < size.height; ++top) {
        for (std::int32_t bottom = top + 1; bottom <= size.height; ++bottom) {
          Box box = random_box(size);
          box.top = top;
          box.height = bottom - top;
          wrong += decoder.gives(exact, image, box) ? 0 : 1;
        }
      }
      CHECK(wrong == 0);
    }
  }
}

TEST("jpeg decode: parts of images of many sizes") {
  Decoder decoder;
  for (int i = 0; i < 150; ++i) {
    const Size size = random_size(i);
    const File file = encoded(size, kKinds[random_below(std::size(kKinds))]);
    const Exact exact(file);
    const Image image = decoded(file);
    CHECK(decoder.gives(exact, image, {0, 0, size.height, size.width}));
    int wrong = 0;
    for (int k = 0; k < 12; ++k) wrong += decoder.gives(exact, image, random_box(size)) ? 0 : 1;
    CHECK(wrong == 0);
  }
}

TEST("jpeg decode: parts of images of many sizes, kinds and qualities with TensorFlow's pixels, at each level") {
  Decoder decoder;
  for (int level = 0; level <= static_cast<int>(best_level()); ++level) {
    CHECK(force_level(static_cast<Level>(level)));
    int wrong = 0;
    for (int i = 0; i < 200; ++i) {
      const Size size = random_size(i);
      Kind look = kKinds[random_below(std::size(kKinds))];
      look.quality = static_cast<int>(1 + random_below(100));
      const File file = encoded(size, look);
      const Exact exact(file);
      for (const JpegPixels kind : {JpegPixels::tensorflow, JpegPixels::tensorflow_grey}) {
        const Image image = decoded(file, 1, kind);
        wrong += decoder.gives(exact, image, {0, 0, size.height, size.width}, kind) ? 0 : 1;
        for (int k = 0; k < 6; ++k) wrong += decoder.gives(exact, image, random_box(size), kind) ? 0 : 1;
      }
    }
    CHECK(wrong == 0);
  }
  CHECK(force_level(best_level()));
}

TEST("jpeg decode: rows begin where libjpeg-turbo writes into the caches") {
  JpegDecoder decoder;
  Arena arena;
  Pixels pixels;
  const Exact file(encoded({64, 200}, kKinds[6]));
  CHECK(decoder.decode(file, {0, 0, 64, 200}, arena, &pixels).is_made());
  CHECK(reinterpret_cast<std::uintptr_t>(pixels.data) % 16 != 0 && pixels.pitch % 32 == 0);
}

TEST("jpeg decode: at a part of the size, at each level") {
  JpegDecoder decoder;
  Arena arena;
  for (int level = 0; level <= static_cast<int>(best_level()); ++level) {
    CHECK(force_level(static_cast<Level>(level)));
    int wrong = 0;
    for (int i = 0; i < 300; ++i) {
      const Size size = random_size(i);
      Kind kind = kKinds[random_below(std::size(kKinds))];
      kind.quality = static_cast<int>(1 + random_below(100));
      const File file = encoded(size, kind);
      const Exact exact(file);
      for (const int factor : {2, 4, 8}) {
        const Image image = decoded(file, factor);
        CHECK(image.size.height == (size.height + factor - 1) / factor);
        CHECK(image.size.width == (size.width + factor - 1) / factor);
        Bytes index;
        for (int k = 0; k < 8; ++k) {
          const Box box = k == 0 ? Box{0, 0, image.size.height, image.size.width} : random_box(image.size);
          Pixels pixels;
          // Without an index, with one that is written meanwhile, and with that one.
          const JpegIndex how{index, i % 2 == 0 && index.data == nullptr ? &index : nullptr};
          const Status status = decoder.decode_reduced(exact, factor, box, arena, &pixels, how);
          wrong += status.is_made() && is_part(pixels, image, box) ? 0 : 1;
        }
        arena.reset();
      }
    }
    CHECK(wrong == 0);
  }
  CHECK(force_level(best_level()));
}

TEST("jpeg decode: at a part of the size, what cannot be") {
  JpegDecoder decoder;
  Arena arena;
  Pixels pixels;
  for (const Kind& kind : {kKinds[2], kKinds[6]}) {
    const Exact file(encoded({45, 67}, kind));
    for (const int factor : {-1, 0, 1, 3, 16}) {
      CHECK(!decoder.decode_reduced(file, factor, {0, 0, 1, 1}, arena, &pixels).is_made());
    }
    for (const Box box : {Box{0, 0, 24, 34}, Box{0, 0, 23, 35}, Box{-1, 0, 2, 2}, Box{0, -1, 2, 2}, Box{0, 0, 0, 34},
                          Box{0, 0, 23, 0}, Box{23, 0, 1, 1}, Box{0, 34, 1, 1}}) {
      CHECK(is_damaged(decoder.decode_reduced(file, 2, box, arena, &pixels)));
    }
    CHECK(decoder.decode_reduced(file, 2, {22, 33, 1, 1}, arena, &pixels).is_made());
  }
}

TEST("jpeg decode: boxes that are not inside the image") {
  Decoder decoder;
  const File file = encoded({20, 40}, kKinds[2]);
  constexpr std::int32_t most = 0x7FFFFFFF;
  const Box boxes[] = {{0, 0, 21, 40},  {0, 0, 20, 41},  {20, 0, 1, 1},      {0, 40, 1, 1},       {-1, 0, 2, 2},
                       {0, -1, 2, 2},   {0, 0, 0, 5},    {0, 0, 5, 0},       {0, 0, -1, 5},       {0, 0, 5, -1},
                       {1, 1, most, 1}, {1, 1, 1, most}, {most, most, 1, 1}, {most, 0, most, 40}, {0, most, 1, most}};
  for (const Box box : boxes) CHECK(is_damaged(decoder.decode(file, box)));
  CHECK(decoder.decode(file, {19, 39, 1, 1}).is_made());
}

TEST("jpeg decode: files cut off") {
  Decoder decoder;
  for (const Kind& kind : {kKinds[2], kKinds[6], kKinds[8]}) {
    const File file = encoded({40, 50}, kind);
    for (std::size_t size = 0; size + 1 < file.size(); ++size) {
      const File cut(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(size));
      CHECK(is_damaged(decoder.decode(cut, {0, 0, 40, 50})));
    }
    CHECK(decoder.decode(file, {0, 0, 40, 50}).is_made());
  }
}

TEST("jpeg decode: damaged data, and a good file after it") {
  Decoder decoder;
  for (const Kind& kind : kKinds) {
    const File good = encoded({48, 64}, kind);
    const Image image = decoded(good);
    for (int i = 0; i < 60; ++i) {
      File file = good;
      for (int k = 0; k < 4; ++k) {
        file[file.size() - 2 - random_below(static_cast<std::uint32_t>(file.size() / 2))] =
            static_cast<std::uint8_t>(random_below(256));
      }
      const Status status = decoder.decode(file, {0, 0, 48, 64});
      CHECK(status.is_made() || is_damaged(status));
      CHECK(decoder.gives(Exact(good), image, random_box(image.size)));
    }
  }
}

TEST("jpeg decode: damage below the part that is needed does not matter") {
  Decoder decoder;
  const File good = encoded({160, 160}, kKinds[0]);
  File file = good;
  file.resize(good.size() / 2);
  file.insert(file.end(), {0xFF, 0xD9});
  CHECK(decoder.gives(Exact(file), decoded(good), {0, 20, 32, 100}));
  CHECK(is_damaged(decoder.decode(file, {100, 0, 60, 160})));
}

TEST("jpeg decode: tables of the file before are not used") {
  Decoder decoder;
  for (const Kind& kind : kKinds) {
    const File good = encoded({20, 30}, kind);
    for (const int marker : {0xC4, 0xDB}) {
      const File file = without_segments(good, marker);
      CHECK(is_damaged(Decoder().decode(file, {0, 0, 20, 30})));
      CHECK(decoder.decode(good, {0, 0, 20, 30}).is_made());
      CHECK(decoder.decode(file, {0, 0, 20, 30}).outcome == Decoder().decode(file, {0, 0, 20, 30}).outcome);
    }
  }
}

TEST("jpeg decode: tables behind the scan, which Pillow would read") {
  Decoder decoder;
  const File file = encoded({40, 50}, kKinds[8]);
  const std::size_t end = file.size() - 2;
  for (const Box box : {Box{0, 0, 40, 50}, Box{0, 0, 1, 1}, Box{39, 49, 1, 1}}) {
    CHECK(decoder.decode(with_segment(file, 0xFE, "text", end), box).is_made());
    CHECK(decoder.decode(with_segment(with_segment(file, 0xE1, "", end), 0xEF, "x", end), box).is_made());
    CHECK(is_damaged(decoder.decode(with_segment(file, 0xC4, text("\0\0"), end), box)));
    CHECK(is_damaged(decoder.decode(with_segment(file, 0xDB, "\5", end), box)));
    CHECK(is_damaged(decoder.decode(with_segment(with_segment(file, 0xDD, "a", end), 0xFE, "x", end), box)));
  }
}

TEST("jpeg index: made of files that end as they should") {
  JpegDecoder decoder;
  Arena arena;
  const auto index_of = [&](const File& file, Box box) {
    Bytes index{file.data(), file.size()};
    Pixels pixels;
    const JpegIndex how{{}, &index};
    const bool is_made =
        decoder.decode({file.data(), file.size()}, box, arena, &pixels, JpegPixels::pillow, how).is_made();
    return is_made ? index : Bytes{};
  };
  const auto is_made = [&](const File& file) { return index_of(file, {0, 0, 1, 1}).data != nullptr; };
  const File file = encoded({40, 50}, kKinds[0]);
  const Bytes expected = index_of(file, {0, 0, 1, 1});
  for (const Box box : {Box{0, 0, 40, 50}, Box{39, 49, 1, 1}, Box{20, 0, 7, 50}}) {
    const Bytes index = index_of(file, box);
    CHECK(index.size == expected.size && std::memcmp(index.data, expected.data, index.size) == 0);
  }
  const std::size_t end = file.size() - 2;
  CHECK(is_made(file) && is_made(with_segment(file, 0xFE, "text", end)));
  CHECK(!is_made(with_segment(file, 0xDB, "\5", end)));
  for (std::size_t size = 0; size + 1 < file.size(); ++size) {
    CHECK(!is_made(File(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(size))));
  }
}

TEST("jpeg probe: files that may be decoded later without an error") {
  JpegDecoder decoder;
  const auto probed = [&](const File& file) { return decoder.probe({file.data(), file.size()}); };
  for (const Kind& kind : kKinds) {
    const File good = encoded({20, 30}, kind);
    const Status status = probed(good);
    CHECK(kind.progressive ? status.reason == Reason::asked : status.is_made());
    if (kind.progressive) continue;
    CHECK(is_damaged(probed(without_segments(good, 0xC4))));
    CHECK(is_damaged(probed(without_segments(good, 0xDB))));
    CHECK(is_damaged(probed(with_segment(good, 0xDB, "\5", good.size() - 2))));
    CHECK(probed(with_segment(good, 0xFE, "text", good.size() - 2)).is_made());
    Arena arena;
    Pixels pixels;
    CHECK(decoder.decode({good.data(), good.size()}, {0, 0, 20, 30}, arena, &pixels).is_made());
  }
}

TEST("jpeg decode: files that no header trusts") {
  Decoder decoder;
  const Kind others[] = {{4, 1, 1, false, 0, false}, {3, 1, 1, false, 0, true}, {1, 2, 2, false, 0, false}};
  for (const Kind& kind : others) {
    const Status status = decoder.decode(encoded({20, 30}, kind), {0, 0, 20, 30});
    CHECK(status.outcome == Outcome::declined && status.reason == Reason::untrusted);
  }
  CHECK(is_damaged(decoder.decode({}, {0, 0, 1, 1})));
  CHECK(is_damaged(decoder.decode({'n', 'o', ' ', 'J', 'P', 'E', 'G'}, {0, 0, 1, 1})));
}

TEST("jpeg decode: a progressive file that says it is enormous") {
  Decoder decoder;
  File file = encoded({40, 50}, kKinds[6]);
  const std::size_t frame = static_cast<std::size_t>(header_of(file).frame);
  file[frame + 1] = file[frame + 3] = 0xFF;
  const Status status = decoder.decode(file, {0, 0, 1, 1});
  CHECK(status.outcome == Outcome::declined && status.reason == Reason::too_large);
}
