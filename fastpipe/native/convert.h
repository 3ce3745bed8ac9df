// The last step: rows of bytes become what an output wants.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "resample.h"

namespace fastpipe {

// What a conversion needs, made once for a plan.
struct ConversionTables {
  // affine: the value of each byte, and factors that give the same without a division, if there are such.
  float values[3][256];
  bool has_factors = false;
  AffineFactors planes[3], interleaved;
  // table: words of two bytes.
  Words16 words[3];
};

// Prepare a conversion; `tables` may become its `tables`.
void make_tables(const Conversion& how, ConversionTables* tables) noexcept;

// Where rows go.
struct Output {
  const Conversion& how;
  const ConversionTables& tables;
  const Kernels& kernels;
  std::int32_t height, width;
  std::uint8_t* memory;   // as of resample()
  std::uint8_t* scratch;  // 3 * width bytes
  bool streams;           // see Kernels::affine
};

// Return whether an output of so many elements is written past the caches: a large one, by kernels that can.
bool is_streamed(const Conversion& how, const ConversionTables& tables, const Kernels& kernels,
                 std::int64_t elements) noexcept;

// Return whether bytes become floats without a table, in planes.
bool is_affine_by_factors(const Output& output) noexcept;

// Where row y of a channel begins, in planes.
std::uint8_t* row_of_plane(const Output& output, std::int32_t channel, std::int32_t y) noexcept;

// Begin to fetch the memory of row y, which will be written soon.
void prefetch_row(const Output& output, std::int32_t y) noexcept;

// Convert row y, given each channel's bytes.
void write_row(const Output& output, std::int32_t y, const std::uint8_t* const* planes) noexcept;

}  // namespace fastpipe
