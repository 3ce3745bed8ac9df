// Measures what the stages of decoding a JPEG take, and what its coefficients
// would take in other forms, with libjpeg's public functions: see
// jpeg_stages.py.
//
// Reads lines "LEFT TOP WIDTH HEIGHT PATH".  Prints for each, in microseconds:
// decoding of the whole image, and its entropy decoding; decoding of the
// region, its entropy decoding, and that above the region; inflation and
// expansion of the coefficients in the region's rows.  Then in bytes: the file;
// its coefficients as streams; these compressed as a whole; and in strips of
// four rows of MCUs.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

// clang-format off: it needs the ones above
#include <jpeglib.h>
// clang-format on
#include <zstd.h>

namespace {

using Bytes = std::vector<unsigned char>;
using Clock = std::chrono::steady_clock;

constexpr int kRepetitions = 5;
constexpr JDIMENSION kStrip = 4; // rows of MCUs that are compressed together
constexpr int kZigzag[64] = {0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18,
                             11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20,
                             13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43,
                             36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45,
                             38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

struct Region {
  JDIMENSION left, top, width, height;
};

struct Decoder {
  jpeg_decompress_struct codec;
  jpeg_error_mgr errors;
  explicit Decoder(const Bytes &file) {
    codec.err = jpeg_std_error(&errors);
    jpeg_create_decompress(&codec);
    jpeg_mem_src(&codec, file.data(), static_cast<unsigned long>(file.size()));
    jpeg_read_header(&codec, TRUE);
    codec.out_color_space = JCS_RGB;
  }
  ~Decoder() { jpeg_destroy_decompress(&codec); }
};

// The coefficients of a strip.  Of each block: the number of bytes of its mask,
// the mask of its coefficients that are not 0, and these in the file's order,
// the first as a difference; a number beyond a byte follows a mark.
struct Strip {
  Bytes counts, masks, values, packed;
  std::size_t blocks = 0;

  Bytes joined() const {
    Bytes all(counts);
    all.insert(all.end(), masks.begin(), masks.end());
    all.insert(all.end(), values.begin(), values.end());
    return all;
  }
  void add(int value) {
    if (value > -128 && value < 128) {
      values.push_back(static_cast<unsigned char>(value));
    } else {
      values.insert(values.end(), {0x80, static_cast<unsigned char>(value),
                                   static_cast<unsigned char>(value >> 8)});
    }
  }
  void add_row(const JBLOCK *row, JDIMENSION count) {
    int before = 0;
    for (JDIMENSION i = 0; i < count; ++i) {
      std::uint64_t mask = 0;
      for (int k = 1; k < 64; ++k)
        mask |= std::uint64_t{row[i][kZigzag[k]] != 0} << (k - 1);
      unsigned char bytes = 0;
      while (bytes < 8 && mask >> (8 * bytes) != 0)
        ++bytes;
      counts.push_back(bytes);
      for (int b = 0; b < bytes; ++b)
        masks.push_back(static_cast<unsigned char>(mask >> (8 * b)));
      add(row[i][0] - before);
      before = row[i][0];
      for (int k = 1; k < 64; ++k) {
        if (row[i][kZigzag[k]] != 0)
          add(row[i][kZigzag[k]]);
      }
    }
    blocks += count;
  }
};

Bytes compressed(const Bytes &bytes) {
  Bytes packed(ZSTD_compressBound(bytes.size()));
  packed.resize(ZSTD_compress(packed.data(), packed.size(), bytes.data(),
                              bytes.size(), 1));
  return packed;
}

std::vector<Strip> strips_of(const Bytes &file) {
  Decoder decoder(file);
  jpeg_decompress_struct &codec = decoder.codec;
  jvirt_barray_ptr *arrays = jpeg_read_coefficients(&codec);
  const JDIMENSION rows = (codec.total_iMCU_rows + kStrip - 1) / kStrip;
  std::vector<Strip> strips(rows);
  for (int c = 0; c < codec.num_components; ++c) {
    const jpeg_component_info &part = codec.comp_info[c];
    for (JDIMENSION y = 0; y < part.height_in_blocks; ++y) {
      JBLOCKARRAY row = codec.mem->access_virt_barray(
          reinterpret_cast<j_common_ptr>(&codec), arrays[c], y, 1, FALSE);
      strips[y / static_cast<JDIMENSION>(part.v_samp_factor) / kStrip].add_row(
          row[0], part.width_in_blocks);
    }
  }
  for (Strip &strip : strips)
    strip.packed = compressed(strip.joined());
  return strips;
}

// Expand a strip's streams to coefficients.
void expand(const Strip &strip, std::vector<std::int16_t> *to) {
  to->assign(64 * strip.blocks, 0);
  const unsigned char *masks = strip.masks.data(),
                      *values = strip.values.data();
  const auto next = [&values] {
    const int value = static_cast<signed char>(*values++);
    if (value != -128)
      return value;
    const int wide = static_cast<std::int16_t>(values[0] | values[1] << 8);
    values += 2;
    return wide;
  };
  std::int16_t *block = to->data();
  for (std::size_t i = 0; i < strip.blocks; ++i, block += 64) {
    block[0] = static_cast<std::int16_t>(next());
    std::uint64_t mask = 0;
    std::memcpy(&mask, masks, strip.counts[i]);
    masks += strip.counts[i];
    for (; mask != 0; mask &= mask - 1)
      block[kZigzag[__builtin_ctzll(mask) + 1]] =
          static_cast<std::int16_t>(next());
  }
}

void read_rows(jpeg_decompress_struct *codec, JDIMENSION end) {
  static Bytes line;
  line.resize(3 * static_cast<std::size_t>(codec->output_width) + 64);
  for (JSAMPROW row = line.data(); codec->output_scanline < end;)
    jpeg_read_scanlines(codec, &row, 1);
}

void decode(const Bytes &file) {
  Decoder decoder(file);
  jpeg_start_decompress(&decoder.codec);
  read_rows(&decoder.codec, decoder.codec.output_height);
}

void decode_entropy(const Bytes &file) {
  Decoder decoder(file);
  jpeg_read_coefficients(&decoder.codec);
}

void decode(const Bytes &file, const Region &region) {
  Decoder decoder(file);
  jpeg_start_decompress(&decoder.codec);
  JDIMENSION left = region.left > 0 ? region.left - 1 : 0;
  JDIMENSION width =
      std::min(region.width + 2, decoder.codec.output_width - left);
  jpeg_crop_scanline(&decoder.codec, &left, &width);
  if (region.top > 1)
    jpeg_skip_scanlines(&decoder.codec, region.top - 1);
  read_rows(&decoder.codec, region.top + region.height);
}

// Rows that are skipped are entropy-decoded, and nothing else.
void skip_rows(const Bytes &file, JDIMENSION count) {
  Decoder decoder(file);
  jpeg_start_decompress(&decoder.codec);
  if (count > 0)
    jpeg_skip_scanlines(&decoder.codec, count);
}

template <typename Work> double fastest_us(Work work) {
  double best = 1e12;
  for (int i = 0; i < kRepetitions; ++i) {
    const auto begin = Clock::now();
    work();
    best = std::min(
        best, std::chrono::duration<double, std::micro>(Clock::now() - begin)
                  .count());
  }
  return best;
}

void measure(const Bytes &file, const Region &region) {
  const std::vector<Strip> strips = strips_of(file);
  std::size_t raw = 0, in_strips = 0;
  Bytes everything;
  for (const Strip &strip : strips) {
    const Bytes bytes = strip.joined();
    raw += bytes.size();
    in_strips += strip.packed.size();
    everything.insert(everything.end(), bytes.begin(), bytes.end());
  }
  Decoder decoder(file);
  const JDIMENSION rows =
      8 * static_cast<JDIMENSION>(decoder.codec.max_v_samp_factor) * kStrip;
  const JDIMENSION first = region.top / rows,
                   last = (region.top + region.height - 1) / rows;
  ZSTD_DCtx *const context = ZSTD_createDCtx();
  Bytes inflated(raw);
  std::vector<std::int16_t> blocks;
  std::printf("%.1f %.1f ", fastest_us([&] { decode(file); }),
              fastest_us([&] { decode_entropy(file); }));
  std::printf("%.1f ", fastest_us([&] { decode(file, region); }));
  std::printf("%.1f ",
              fastest_us([&] { skip_rows(file, region.top + region.height); }));
  std::printf("%.1f ", fastest_us([&] { skip_rows(file, region.top); }));
  std::printf("%.1f ", fastest_us([&] {
                for (JDIMENSION y = first; y <= last; ++y) {
                  const Bytes &packed = strips[y].packed;
                  ZSTD_decompressDCtx(context, inflated.data(), raw,
                                      packed.data(), packed.size());
                }
              }));
  std::printf("%.1f ", fastest_us([&] {
                for (JDIMENSION y = first; y <= last; ++y)
                  expand(strips[y], &blocks);
              }));
  ZSTD_freeDCtx(context);
  std::printf("%zu %zu %zu %zu\n", file.size(), raw,
              compressed(everything).size(), in_strips);
}

} // namespace

int main() {
  Region region;
  std::string path;
  while (std::cin >> region.left >> region.top >> region.width >>
             region.height &&
         std::getline(std::cin >> std::ws, path)) {
    std::ifstream stream(path, std::ios::binary);
    measure(Bytes((std::istreambuf_iterator<char>(stream)), {}), region);
  }
}
