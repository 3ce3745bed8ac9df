// The record of a whole image, as Python makes it.
#pragma once

#include "../images.h"

namespace fastpipe::tests {

inline Bytes bytes_of(const WholeImage& whole) {
  return {whole.image.data.get(), static_cast<std::size_t>(whole.image.size)};
}

// offset: in the data file, of the image's bytes.
inline EntryRecord record_of(const WholeImage& whole, std::uint64_t offset) {
  const auto height = static_cast<std::uint32_t>(whole.image.height);
  const auto width = static_cast<std::uint32_t>(whole.image.width);
  EntryRecord record;
  record.digest = whole.digest;
  record.offset = offset;
  record.nbytes = static_cast<std::uint64_t>(whole.image.size);
  record.sum = sum_of(bytes_of(whole));
  record.height = height;
  record.width = width;
  record.channels = static_cast<std::uint32_t>(record.nbytes / (std::uint64_t{height} * width));
  record.flags = static_cast<std::uint32_t>(whole.file_pixels << 1);
  record.check = check_of(record);
  return record;
}

}  // namespace fastpipe::tests
