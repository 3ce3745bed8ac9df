// JPEGs that libjpeg makes for tests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

// clang-format off: it needs the ones above
#include <jpeglib.h>
// clang-format on

#include "../span.h"

namespace fastpipe::tests {

using File = std::vector<std::uint8_t>;

// Memory of exactly a file's size, so that a sanitizer sees a read behind its end.
struct Exact {
  Exact(const File& file) : memory(new std::uint8_t[file.size()]), size(file.size()) {
    std::copy(file.begin(), file.end(), memory.get());
  }
  operator Bytes() const { return {memory.get(), size}; }
  std::unique_ptr<std::uint8_t[]> memory;
  std::size_t size;
};

inline std::uint32_t random_below(std::uint32_t below) {
  static std::uint32_t state = 12345;
  state = state * 1664525u + 1013904223u;
  return (state >> 8) % below;
}

inline std::int32_t random_up_to(std::int32_t most) {
  return static_cast<std::int32_t>(1 + random_below(static_cast<std::uint32_t>(most)));
}

// Small sizes, larger ones and those of several MCUs along each side, in turns.
inline Size random_size(int turn) {
  const std::int32_t most = turn % 3 == 0 ? 12 : turn % 3 == 1 ? 70 : 300;
  const std::int32_t height = random_up_to(most);
  return {height, random_up_to(most)};
}

inline Box random_box(Size size) {
  Box box;
  box.height = random_up_to(size.height);
  box.width = random_up_to(size.width);
  box.top = random_up_to(size.height - box.height + 1) - 1;
  box.left = random_up_to(size.width - box.width + 1) - 1;
  return box;
}

struct Kind {
  int components = 3;
  int horizontal = 2, vertical = 2;  // sampling factors of the first component
  bool progressive = false;
  int interval = 0;  // MCUs between restart markers
  bool is_rgb = false;
  int quality = 85;
  bool is_optimised = false;  // has Huffman tables of its own
};

// A picture with edges and noise, so that each pixel depends on its neighbours.
inline File encoded(Size size, const Kind& kind) {
  jpeg_compress_struct codec;
  jpeg_error_mgr errors;
  codec.err = jpeg_std_error(&errors);
  jpeg_create_compress(&codec);
  unsigned char* memory = nullptr;
  unsigned long length = 0;
  jpeg_mem_dest(&codec, &memory, &length);
  codec.image_height = static_cast<JDIMENSION>(size.height);
  codec.image_width = static_cast<JDIMENSION>(size.width);
  codec.input_components = kind.components;
  codec.in_color_space = kind.components == 1 ? JCS_GRAYSCALE : kind.components == 3 ? JCS_RGB : JCS_CMYK;
  jpeg_set_defaults(&codec);
  if (kind.is_rgb) jpeg_set_colorspace(&codec, JCS_RGB);
  jpeg_set_quality(&codec, kind.quality, TRUE);
  codec.comp_info[0].h_samp_factor = kind.horizontal;
  codec.comp_info[0].v_samp_factor = kind.vertical;
  codec.optimize_coding = kind.is_optimised ? TRUE : FALSE;
  if (kind.progressive) jpeg_simple_progression(&codec);
  codec.restart_interval = static_cast<unsigned int>(kind.interval);
  jpeg_start_compress(&codec, TRUE);
  File row(static_cast<std::size_t>(size.width) * static_cast<std::size_t>(kind.components));
  for (std::int32_t y = 0; y < size.height; ++y) {
    for (std::size_t x = 0; x < row.size(); ++x) {
      const std::size_t bright = (x / 19 + static_cast<std::size_t>(y) / 5) % 2 == 0 ? 40 : 190;
      row[x] = static_cast<std::uint8_t>(bright + random_below(50));
    }
    JSAMPROW line = row.data();
    jpeg_write_scanlines(&codec, &line, 1);
  }
  jpeg_finish_compress(&codec);
  jpeg_destroy_compress(&codec);
  File file(memory, memory + length);
  std::free(memory);
  return file;
}

}  // namespace fastpipe::tests
