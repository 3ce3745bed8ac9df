// All pixels of a JPEG, as libjpeg decodes them: what JpegDecoder is compared with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

// clang-format off: these need the ones above
#include <jpeglib.h>
#include <setjmp.h>
// clang-format on

#include "../jpeg.h"
#include "../span.h"

namespace fastpipe::tests {

struct Image {
  Size size;
  std::int32_t channels = 3;
  std::vector<std::uint8_t> memory;
  Pixels pixels() const {
    return {memory.data(), std::int64_t{channels} * size.width, size.height, size.width, channels};
  }
};

struct PixelErrors {
  jpeg_error_mgr callbacks;  // the first member, so that its address is this structure's
  jmp_buf jump;
};

[[noreturn]] inline void end_pixels(j_common_ptr codec) {
  longjmp(reinterpret_cast<PixelErrors*>(codec->err)->jump, 1);
}

inline void end_pixels_at_warning(j_common_ptr codec, int level) {
  if (level < 0) end_pixels(codec);
}

// Decode a whole image at 1 / factor of its size.  False at an error or a warning; what is left behind the last row is
// not looked at.
inline bool read_pixels(Bytes file, int factor, JpegPixels kind, Image* image) {
  jpeg_decompress_struct codec;
  PixelErrors errors;
  codec.err = jpeg_std_error(&errors.callbacks);
  errors.callbacks.error_exit = end_pixels;
  errors.callbacks.emit_message = end_pixels_at_warning;
  jpeg_create_decompress(&codec);
  if (setjmp(errors.jump) != 0) {
    jpeg_destroy_decompress(&codec);
    return false;
  }
  jpeg_mem_src(&codec, file.data, static_cast<unsigned long>(file.size));
  jpeg_read_header(&codec, TRUE);
  codec.out_color_space = kind == JpegPixels::tensorflow_grey ? JCS_GRAYSCALE : JCS_RGB;
  codec.dct_method = kind == JpegPixels::pillow ? JDCT_ISLOW : JDCT_IFAST;
  codec.scale_denom = static_cast<unsigned int>(factor);
  jpeg_start_decompress(&codec);
  image->channels = codec.output_components;
  image->size = {static_cast<std::int32_t>(codec.output_height), static_cast<std::int32_t>(codec.output_width)};
  const std::size_t pitch = static_cast<std::size_t>(image->channels) * codec.output_width;
  image->memory.resize(pitch * codec.output_height);
  while (codec.output_scanline < codec.output_height) {
    JSAMPROW line = image->memory.data() + pitch * codec.output_scanline;
    jpeg_read_scanlines(&codec, &line, 1);
  }
  jpeg_destroy_decompress(&codec);
  return true;
}

// Return whether `part` equals the pixels of `whole` that begin at a row and a column.
inline bool is_part(const Pixels& part, const Pixels& whole, std::int32_t top, std::int32_t left) {
  if (part.channels != whole.channels) return false;
  if (top + part.height > whole.height || left + part.width > whole.width) return false;
  for (std::int32_t y = 0; y < part.height; ++y) {
    const std::uint8_t* const expected = whole.data + whole.pitch * (top + y) + std::int64_t{whole.channels} * left;
    const auto bytes = static_cast<std::size_t>(std::int64_t{part.channels} * part.width);
    if (std::memcmp(part.data + part.pitch * y, expected, bytes) != 0) return false;
  }
  return true;
}

}  // namespace fastpipe::tests
