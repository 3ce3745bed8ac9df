// All coefficients of a JPEG, as libjpeg reads them: what ScanRows is compared with.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

// clang-format off: these need the ones above
#include <jpeglib.h>
#include <jerror.h>
#include <setjmp.h>
// clang-format on

#include "../jpeg_scan.h"
#include "../span.h"

namespace fastpipe::tests {

// Return the index of a file that has just been opened.
inline Bytes index_of(ScanRows& rows, Arena& arena) {
  rows.begin_index(arena);
  return rows.end_index();
}

// Blocks of all components, those that only fill MCUs included.
struct Coefficients {
  struct Plane {
    std::int64_t columns = 0;  // blocks in a row
    std::vector<std::int16_t> values;
    const std::int16_t* block(std::int64_t row, std::int64_t column) const {
      return values.data() + (row * columns + column) * DCTSIZE2;
    }
  };
  bool is_read = false;                                            // libjpeg reached the end of the file
  std::int32_t warned = std::numeric_limits<std::int32_t>::max();  // the first row of MCUs with a warning
  std::vector<Plane> planes;
};

struct CoefficientErrors {
  jpeg_error_mgr callbacks;  // the first member, so that its address is this structure's
  jmp_buf jump;
  Coefficients* coefficients;
};

[[noreturn]] inline void end_reading(j_common_ptr codec) {
  longjmp(reinterpret_cast<CoefficientErrors*>(codec->err)->jump, 1);
}

inline void note_warning(j_common_ptr codec, int level) {
  if (level >= 0) return;
  const auto decoder = reinterpret_cast<j_decompress_ptr>(codec);
  Coefficients& coefficients = *reinterpret_cast<CoefficientErrors*>(codec->err)->coefficients;
  const JDIMENSION row = decoder->input_iMCU_row;
  // What is left behind the last row is not looked at if rows are decoded.
  if (codec->err->msg_code == JWRN_EXTRANEOUS_DATA && row > 0 && row == decoder->total_iMCU_rows) return;
  coefficients.warned = std::min(coefficients.warned, static_cast<std::int32_t>(row));
}

inline void copy_blocks(j_decompress_ptr codec, jvirt_barray_ptr* arrays, Coefficients* coefficients) {
  coefficients->planes.resize(static_cast<std::size_t>(codec->num_components));
  for (int c = 0; c < codec->num_components; ++c) {
    const jpeg_component_info& info = codec->comp_info[c];
    const auto up = [](JDIMENSION count, int factor) {
      return (static_cast<std::int64_t>(count) + factor - 1) / factor * factor;
    };
    Coefficients::Plane& plane = coefficients->planes[static_cast<std::size_t>(c)];
    const std::int64_t rows = up(info.height_in_blocks, info.v_samp_factor);
    plane.columns = up(info.width_in_blocks, info.h_samp_factor);
    plane.values.resize(static_cast<std::size_t>(rows * plane.columns * DCTSIZE2));
    for (std::int64_t y = 0; y < rows; ++y) {
      JBLOCKARRAY row = codec->mem->access_virt_barray(reinterpret_cast<j_common_ptr>(codec), arrays[c],
                                                       static_cast<JDIMENSION>(y), 1, FALSE);
      std::memcpy(plane.values.data() + y * plane.columns * DCTSIZE2, row[0],
                  static_cast<std::size_t>(plane.columns) * sizeof(JBLOCK));
    }
  }
}

inline void read_coefficients(Bytes file, Coefficients* coefficients) {
  jpeg_decompress_struct codec;
  CoefficientErrors errors;
  codec.err = jpeg_std_error(&errors.callbacks);
  errors.callbacks.error_exit = end_reading;
  errors.callbacks.emit_message = note_warning;
  errors.coefficients = coefficients;
  jpeg_create_decompress(&codec);
  if (setjmp(errors.jump) == 0) {
    jpeg_mem_src(&codec, file.data, static_cast<unsigned long>(file.size));
    jpeg_read_header(&codec, TRUE);
    copy_blocks(&codec, jpeg_read_coefficients(&codec), coefficients);
    coefficients->is_read = true;
  }
  jpeg_destroy_decompress(&codec);
}

// Some MCUs of a row, as ScanRows is asked for them.
class McuRow {
 public:
  McuRow(const JpegFrame& frame, std::int32_t row, std::int32_t first, std::int32_t count)
      : frame_(frame), row_(row), first_(first), count_(count) {
    for (int c = 0; c < frame.components; ++c) {
      const JpegPlane& plane = frame.planes[c];
      pitches_[c] = DCTSIZE2 * (static_cast<std::int64_t>(count) * plane.horizontal + c);
      memory_[c].assign(static_cast<std::size_t>(pitches_[c] * plane.vertical), kUntouched);
      blocks_[c] = memory_[c].data();
    }
  }
  void leave_out(int component) { blocks_[component] = nullptr; }
  void take_dc_only(int component) { dc_only_[component] = true; }
  bool read(ScanRows& rows) { return rows.read(row_, first_, count_, blocks_, pitches_, dc_only_); }
  // Return whether they are those of libjpeg, and nothing was written to blocks that hold no samples.
  bool equals(const Coefficients& coefficients) const {
    for (int c = 0; c < frame_.components; ++c) {
      if (blocks_[c] == nullptr) continue;
      const JpegPlane& plane = frame_.planes[c];
      for (std::int64_t y = 0; y < plane.vertical; ++y) {
        for (std::int64_t x = 0; x < std::int64_t{count_} * plane.horizontal; ++x) {
          const std::int64_t row = row_ * plane.vertical + y, column = first_ * plane.horizontal + x;
          const std::int16_t* const block = blocks_[c] + y * pitches_[c] + DCTSIZE2 * x;
          const bool has_samples = row < plane.rows && column < plane.columns;
          const std::int16_t* const expected = coefficients.planes[static_cast<std::size_t>(c)].block(row, column);
          const std::size_t size = dc_only_[c] ? sizeof(*block) : sizeof(JBLOCK);
          const bool is_equal = has_samples ? std::memcmp(block, expected, size) == 0
                                            : std::count(block, block + DCTSIZE2, kUntouched) == DCTSIZE2;
          if (!is_equal) return false;
        }
      }
    }
    return true;
  }

 private:
  static constexpr std::int16_t kUntouched = 0x5A5A;
  const JpegFrame frame_;
  const std::int32_t row_, first_, count_;
  std::vector<std::int16_t> memory_[3];
  std::int16_t* blocks_[3] = {};
  std::int64_t pitches_[3] = {};
  bool dc_only_[3] = {};
};

}  // namespace fastpipe::tests
