// Pixels from coefficients that are kept: those of libjpeg, bit for bit.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "../coefficients.h"
#include "../jpeg.h"
#include "../simd.h"
#include "check.h"
#include "make_jpeg.h"
#include "read_pixels.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::tests;

Bytes bytes_of(const File& file) { return {file.data(), file.size()}; }

// An entry in memory of its exact size, so that a sanitizer sees a read beyond it.
struct Entry {
  std::unique_ptr<std::uint8_t[]> memory;
  std::size_t size = 0;
  Bytes bytes() const { return {memory.get(), size}; }
};

Entry packed(const File& file) {
  Arena arena;
  JpegDecoder decoder;
  Bytes bytes;
  Entry entry;
  if (!decoder.pack(bytes_of(file), arena, &bytes).is_made()) return entry;
  entry.memory.reset(new std::uint8_t[bytes.size]);
  entry.size = bytes.size;
  std::memcpy(entry.memory.get(), bytes.data, bytes.size);
  return entry;
}

// The image that libjpeg decodes.
Image decoded(const File& file, int factor, JpegPixels kind = JpegPixels::pillow) {
  Image image;
  CHECK(read_pixels(bytes_of(file), factor, kind, &image));
  return image;
}

class Reader {
 public:
  // Return whether a box of an entry, at 1 / factor of the size, has the pixels of an image.
  bool agrees(const Image& image, const Entry& entry, Box box, int factor = 1, JpegPixels kind = JpegPixels::pillow) {
    arena_.reset();
    Pixels found;
    return reads(entry.bytes(), box, &found, factor, kind) && is_part(found, image.pixels(), box.top, box.left);
  }
  bool reads(Bytes entry, Box box, Pixels* pixels, int factor = 1, JpegPixels kind = JpegPixels::pillow) {
    KeptCoefficients rows;
    return rows.open(entry) && decode_pixels(rows.frame(), rows, factor, box, arena_, pixels, kind).is_made();
  }
  Arena& arena() { return arena_; }

 private:
  Arena arena_;
};

constexpr Kind kKinds[] = {
    {3, 1, 1, false, 0, false}, {3, 2, 1, false, 0, false}, {3, 2, 2, false, 0, false},
    {1, 1, 1, false, 0, false}, {3, 2, 2, true, 0, false},  {3, 2, 2, false, 3, false},
};

TEST("coefficients: parts of images of many sizes, kinds and qualities, at each level") {
  for (int level = 0; level <= static_cast<int>(best_level()); ++level) {
    CHECK(force_level(static_cast<Level>(level)));
    Reader reader;
    int wrong = 0, declined = 0;
    for (int i = 0; i < 400; ++i) {
      const Size size = random_size(i);
      Kind kind = kKinds[random_below(std::size(kKinds))];
      kind.quality = static_cast<int>(1 + random_below(100));
      const File file = encoded(size, kind);
      const Entry entry = packed(file);
      if (entry.size == 0) {
        // Chroma of one or two columns is upsampled in another way.
        CHECK(kind.horizontal == 2 && size.width <= 4);
        ++declined;
        continue;
      }
      for (const int factor : {1, 2, 4, 8}) {
        const Image image = decoded(file, factor);
        wrong += reader.agrees(image, entry, {0, 0, image.size.height, image.size.width}, factor) ? 0 : 1;
        for (int k = 0; k < 6; ++k) wrong += reader.agrees(image, entry, random_box(image.size), factor) ? 0 : 1;
      }
    }
    CHECK(wrong == 0);
    CHECK(declined < 100);
  }
  CHECK(force_level(best_level()));
}

// A file of `rows` x `columns` blocks of each component: value(component, row, column, i) is coefficient i of a block,
// row by row, to be multiplied by 1.  Its scans are such as libjpeg decodes.
template <typename Value>
File with_blocks(int rows, int columns, int components, const Value& value) {
  jpeg_compress_struct codec;
  jpeg_error_mgr errors;
  codec.err = jpeg_std_error(&errors);
  jpeg_create_compress(&codec);
  unsigned char* memory = nullptr;
  unsigned long length = 0;
  jpeg_mem_dest(&codec, &memory, &length);
  codec.image_height = static_cast<JDIMENSION>(8 * rows);
  codec.image_width = static_cast<JDIMENSION>(8 * columns);
  codec.input_components = components;
  codec.in_color_space = components == 1 ? JCS_GRAYSCALE : JCS_RGB;
  jpeg_set_defaults(&codec);
  jpeg_set_quality(&codec, 100, TRUE);
  jpeg_simple_progression(&codec);
  codec.comp_info[0].h_samp_factor = codec.comp_info[0].v_samp_factor = 1;
  auto common = reinterpret_cast<j_common_ptr>(&codec);
  jvirt_barray_ptr arrays[3];
  for (int c = 0; c < components; ++c) {
    arrays[c] = codec.mem->request_virt_barray(common, JPOOL_IMAGE, TRUE, static_cast<JDIMENSION>(columns),
                                               static_cast<JDIMENSION>(rows), 1);
  }
  jpeg_write_coefficients(&codec, arrays);
  for (int c = 0; c < components; ++c) {
    for (int y = 0; y < rows; ++y) {
      JBLOCKARRAY row = codec.mem->access_virt_barray(common, arrays[c], static_cast<JDIMENSION>(y), 1, TRUE);
      for (int x = 0; x < columns; ++x) {
        for (int i = 0; i < 64; ++i) row[0][x][i] = static_cast<JCOEF>(value(c, y, x, i));
      }
    }
  }
  jpeg_finish_compress(&codec);
  jpeg_destroy_compress(&codec);
  File file(memory, memory + length);
  std::free(memory);
  return file;
}

File with_block(const std::vector<int>& block) {
  return with_blocks(1, 1, 1, [&](int, int, int, int i) { return block[static_cast<std::size_t>(i)]; });
}

TEST("coefficients: all colours of chroma, at each level") {
  // Samples of a block that are all alike are an eighth of its first coefficient.
  const File file = with_blocks(256, 256, 3, [](int c, int y, int x, int i) {
    const int sample = c == 0 ? 37 * y + 101 * x : c == 1 ? x : y;
    return i == 0 ? 8 * (sample % 256 - 128) : 0;
  });
  const Image image = decoded(file, 1);
  Reader reader;
  for (int level = 0; level <= static_cast<int>(best_level()); ++level) {
    CHECK(force_level(static_cast<Level>(level)));
    CHECK(reader.agrees(image, packed(file), {0, 0, 2048, 2048}));
  }
  CHECK(force_level(best_level()));
}

TEST("coefficients: the largest that are decoded, and larger ones") {
  Reader reader;
  for (int level = 0; level <= static_cast<int>(best_level()); ++level) {
    CHECK(force_level(static_cast<Level>(level)));
    int wrong = 0, made = 0, declined = 0;
    for (int i = 0; i < 3000; ++i) {
      std::vector<int> block(64);
      const int most = i % 3 == 0 ? 1023 : i % 3 == 1 ? 250 : 400;
      for (int& value : block) {
        if (i % 5 > 1 || random_below(8) == 0) {
          value = static_cast<int>(random_below(static_cast<std::uint32_t>(2 * most + 1))) - most;
        }
      }
      const File file = with_block(block);
      const Entry entry = packed(file);
      reader.arena().reset();
      Pixels pixels;
      int largest = 0, total = 0;
      for (int x = 0; x < 8; ++x) {
        int sum = 0;
        for (int y = 0; y < 8; ++y) sum += std::abs(block[static_cast<std::size_t>(8 * y + x)]);
        largest = std::max(largest, sum);
        total += sum;
      }
      // Each coefficient adds at most 1.93 / 8 of itself to a sample, and up to 511 are decoded.
      const bool is_small = total < 2100;
      for (const int factor : {1, 2, 4, 8}) {
        const Box all{0, 0, 8 / factor, 8 / factor};
        const bool is_made = reader.reads(entry.bytes(), all, &pixels, factor);
        wrong += is_small && !is_made ? 1 : 0;
        wrong += factor == 1 && largest > 2900 && is_made ? 1 : 0;
        wrong += is_made && !reader.agrees(decoded(file, factor), entry, all, factor) ? 1 : 0;
        if (factor == 1) ++(is_made ? made : declined);
      }
    }
    CHECK(wrong == 0);
    CHECK(made > 300 && declined > 300);
  }
  CHECK(force_level(best_level()));
}

TEST("coefficients: the largest that the fast transform takes, and larger ones") {
  Reader reader;
  const Box all{0, 0, 8, 8};
  int wrong = 0, made = 0, declined = 0;
  for (int i = 0; i < 18000; ++i) {
    std::vector<int> block(64);
    const int most = i % 4 == 0 ? 1023 : i % 4 == 1 ? 250 : i % 4 == 2 ? 400 : 40;
    const std::uint32_t rarity = 1 + random_below(24);
    const bool is_line = i % 3 == 0;  // a row or a column: few coefficients, and large ones
    for (std::size_t k = 0; k < block.size(); ++k) {
      if (random_below(rarity) != 0 || (is_line && k % 8 != 0 && k / 8 != 0)) continue;
      block[k] = static_cast<int>(random_below(static_cast<std::uint32_t>(2 * most + 1))) - most;
    }
    if (i % 7 == 0) block[0] = static_cast<int>(random_below(2 * 3500)) - 3500;
    int total = 0;
    for (const int value : block) total += std::abs(value);
    const Entry entry = packed(with_block(block));
    const Image image = decoded(with_block(block), 1, JpegPixels::tensorflow);
    int levels = 0;  // that take the block
    for (int level = 0; level <= static_cast<int>(best_level()); ++level) {
      CHECK(force_level(static_cast<Level>(level)));
      reader.arena().reset();
      Pixels pixels;
      if (!reader.reads(entry.bytes(), all, &pixels, 1, JpegPixels::tensorflow)) continue;
      ++levels;
      wrong += is_part(pixels, image.pixels(), 0, 0) ? 0 : 1;
    }
    // Each is multiplied by at most 4 x 1.93, and may be in each sum of the second pass.
    wrong += total < 500 && levels == 0 ? 1 : 0;
    wrong += levels != 0 && levels != static_cast<int>(best_level()) + 1 ? 1 : 0;
    ++(levels > 0 ? made : declined);
  }
  CHECK(wrong == 0);
  CHECK(made > 3000 && declined > 900);
  CHECK(force_level(best_level()));
}

TEST("coefficients: entries of all levels are the same") {
  for (int i = 0; i < 60; ++i) {
    const int most = i % 3 == 0 ? 9 : i % 3 == 1 ? 130 : 1023;
    const std::uint32_t rarity = 1 + random_below(20);
    const File file = with_blocks(5, 7, 3, [&](int, int, int, int) {
      const bool is_there = random_below(rarity) == 0;
      return is_there ? static_cast<int>(random_below(static_cast<std::uint32_t>(2 * most + 1))) - most : 0;
    });
    CHECK(force_level(Level::baseline));
    const Entry expected = packed(file);
    CHECK(expected.size > 0);
    for (int level = 1; level <= static_cast<int>(best_level()); ++level) {
      CHECK(force_level(static_cast<Level>(level)));
      const Entry found = packed(file);
      CHECK(found.size == expected.size && std::memcmp(found.memory.get(), expected.memory.get(), found.size) == 0);
    }
  }
  CHECK(force_level(best_level()));
}

TEST("coefficients: of a file for which libjpeg would take too much memory") {
  File file = encoded({8, 8}, kKinds[3]);
  const auto frame = static_cast<std::size_t>(read_jpeg_header(bytes_of(file)).frame);
  for (const std::size_t side : {1, 3}) {  // 23,552 pixels
    file[frame + side] = 0x5C;
    file[frame + side + 1] = 0;
  }
  Arena arena;
  Bytes entry;
  CHECK(JpegDecoder().pack(bytes_of(file), arena, &entry).reason == Reason::too_large);
}

TEST("coefficients: damaged entries") {
  Reader reader;
  Kind kind = kKinds[2];
  kind.quality = 97;
  const Entry entries[] = {packed(encoded({60, 90}, kind)), packed(encoded({300, 50}, kind))};
  int opened = 0;
  for (int i = 0; i < 20000; ++i) {
    if (i % 100 == 0) CHECK(force_level(static_cast<Level>(i / 100 % (static_cast<int>(best_level()) + 1))));
    const Entry& good = entries[i % 3 / 2];
    Entry entry;
    entry.size = i % 4 == 0 ? random_below(static_cast<std::uint32_t>(good.size) + 1) : good.size;
    entry.memory.reset(new std::uint8_t[entry.size]);
    std::memcpy(entry.memory.get(), good.memory.get(), entry.size);
    const std::uint32_t below =
        static_cast<std::uint32_t>(i % 2 == 0 ? entry.size : std::min<std::size_t>(entry.size, 600));
    for (std::uint32_t k = random_below(4); k > 0 && below > 0; --k) {
      entry.memory[random_below(below)] = static_cast<std::uint8_t>(random_below(256));
    }
    KeptCoefficients rows;
    if (!rows.open(entry.bytes())) continue;
    ++opened;
    reader.arena().reset();
    const Size size = rows.frame().size;
    Pixels pixels;
    const int factor = 1 << random_below(4);
    const Box box = random_box(
        {std::min((size.height + factor - 1) / factor, 200), std::min((size.width + factor - 1) / factor, 200)});
    static_cast<void>(decode_pixels(rows.frame(), rows, factor, box, reader.arena(), &pixels).is_made());
  }
  CHECK(opened > 1000);
  CHECK(force_level(best_level()));
}

}  // namespace
