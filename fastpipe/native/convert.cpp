#include "convert.h"

#include <cmath>
#include <cstring>

namespace fastpipe {
namespace {

// Look bytes up; an element of the output begins `step` bytes after the one before.
template <int size>
void look_up(const std::uint8_t* from, std::int64_t count, const std::uint8_t* table, std::int64_t step,
             std::uint8_t* to) {
  for (; count >= 8; count -= 8, from += 8, to += 8 * step) {
    std::memcpy(to, table + from[0] * size, size);
    std::memcpy(to + step, table + from[1] * size, size);
    std::memcpy(to + 2 * step, table + from[2] * size, size);
    std::memcpy(to + 3 * step, table + from[3] * size, size);
    std::memcpy(to + 4 * step, table + from[4] * size, size);
    std::memcpy(to + 5 * step, table + from[5] * size, size);
    std::memcpy(to + 6 * step, table + from[6] * size, size);
    std::memcpy(to + 7 * step, table + from[7] * size, size);
  }
  for (std::int64_t x = 0; x < count; ++x) std::memcpy(to + x * step, table + from[x] * size, size);
}

void look_up(const std::uint8_t* from, std::int64_t count, const std::uint8_t* table, std::int32_t word,
             std::int64_t step, std::uint8_t* to) {
  switch (word) {
    case 1:
      return look_up<1>(from, count, table, step, to);
    case 2:
      return look_up<2>(from, count, table, step, to);
    case 4:
      return look_up<4>(from, count, table, step, to);
    default:
      return look_up<8>(from, count, table, step, to);
  }
}

const std::uint8_t* table_of(const Output& output, int channel) {
  const bool is_affine = output.how.kind == Conversion::Kind::affine;
  return is_affine ? reinterpret_cast<const std::uint8_t*>(output.tables.values[channel])
                   : output.how.table + std::int64_t{channel} * 256 * output.how.word;
}

bool has_factors(const Output& output) {
  return output.how.kind == Conversion::Kind::affine && output.tables.has_factors && output.kernels.affine != nullptr;
}

void write_plane(const Output& output, int channel, const std::uint8_t* from, std::uint8_t* to) {
  const std::int64_t count = output.width;
  const bool is_16_bits = output.how.kind == Conversion::Kind::table && output.how.word == 2;
  if (output.how.kind == Conversion::Kind::bytes) {
    std::memcpy(to, from, static_cast<std::size_t>(count));
  } else if (has_factors(output)) {
    output.kernels.affine(from, count, output.tables.planes[channel], reinterpret_cast<float*>(to), output.streams);
  } else if (is_16_bits && output.kernels.lookup16 != nullptr) {
    output.kernels.lookup16(from, count, output.tables.words[channel], reinterpret_cast<std::uint16_t*>(to),
                            output.streams);
  } else {
    look_up(from, count, table_of(output, channel), output.how.word, output.how.word, to);
  }
}

void write_interleaved(const Output& output, const std::uint8_t* const* planes, std::uint8_t* to) {
  const std::int64_t count = output.width;
  const bool is_16_bits = output.how.kind == Conversion::Kind::table && output.how.word == 2;
  if (output.how.kind == Conversion::Kind::bytes) {
    output.kernels.interleave(planes, count, to);
  } else if (has_factors(output)) {
    output.kernels.interleave(planes, count, output.scratch);
    output.kernels.affine(output.scratch, 3 * count, output.tables.interleaved, reinterpret_cast<float*>(to),
                          output.streams);
  } else if (is_16_bits && output.kernels.lookup16_interleaved != nullptr) {
    output.kernels.lookup16_interleaved(planes, count, output.tables.words, reinterpret_cast<std::uint16_t*>(to),
                                        output.streams);
  } else {
    const std::int64_t word = output.how.word;
    for (int channel = 0; channel < 3; ++channel) {
      look_up(planes[channel], count, table_of(output, channel), output.how.word, 3 * word, to + channel * word);
    }
  }
}

float float_of(const Conversion& how, int channel, int value) {
  const auto v = static_cast<float>(value);
  const float unit = how.divide ? v / 255.0f : v * (1.0f / 255.0f);
  return (unit - how.mean[channel]) / how.std[channel];
}

// A number's inverse in two parts, of which the second has what the first cannot hold.
void invert(float number, float* high, float* low) {
  const double inverse = 1.0 / static_cast<double>(number);
  *high = static_cast<float>(inverse);
  *low = static_cast<float>(inverse - static_cast<double>(*high));
}

void make_factors(const Conversion& how, ConversionTables* tables) {
  AffineFactors& all = tables->interleaved;
  all.inverse_high = 1.0f / 255.0f;
  all.inverse_low = 0;
  if (how.divide) invert(255.0f, &all.inverse_high, &all.inverse_low);
  for (int i = 0; i < AffineFactors::kLanes; ++i) {
    const int channel = how.channels == 3 ? i % 3 : 0;
    all.mean[i] = how.mean[channel];
    invert(how.std[channel], &all.high[i], &all.low[i]);
  }
  for (int channel = 0; channel < 3; ++channel) {
    AffineFactors& one = tables->planes[channel];
    one = all;
    for (int i = 0; i < AffineFactors::kLanes; ++i) {
      one.mean[i] = all.mean[channel];
      one.high[i] = all.high[channel];
      one.low[i] = all.low[channel];
    }
  }
}

// Return whether factors give the same bits as division, for all values that there are.
bool equals_division(const Conversion& how, const ConversionTables& tables) {
  for (int channel = 0; channel < how.channels; ++channel) {
    const AffineFactors& f = tables.planes[channel];
    for (int value = 0; value < 256; ++value) {
      const auto v = static_cast<float>(value);
      const float unit = std::fmaf(v, f.inverse_high, v * f.inverse_low) - f.mean[0];
      const float made = std::fmaf(unit, f.high[0], unit * f.low[0]);
      if (std::memcmp(&made, &tables.values[channel][value], sizeof made) != 0) return false;
    }
  }
  return true;
}

}  // namespace

void make_tables(const Conversion& how, ConversionTables* tables) noexcept {
  tables->has_factors = false;
  if (how.kind == Conversion::Kind::affine) {
    for (int channel = 0; channel < how.channels; ++channel) {
      for (int value = 0; value < 256; ++value) tables->values[channel][value] = float_of(how, channel, value);
    }
    make_factors(how, tables);
    tables->has_factors = equals_division(how, *tables);
  } else if (how.kind == Conversion::Kind::table && how.word == 2) {
    for (int channel = 0; channel < how.channels; ++channel) {
      for (int value = 0; value < 256; ++value) {
        std::uint16_t word;
        std::memcpy(&word, how.table + (channel * 256 + value) * 2, 2);
        tables->words[channel].bytes[0][value] = static_cast<std::uint8_t>(word);
        tables->words[channel].bytes[1][value] = static_cast<std::uint8_t>(word >> 8);
      }
    }
  }
}

bool is_streamed(const Conversion& how, const ConversionTables& tables, const Kernels& kernels,
                 std::int64_t elements) noexcept {
  const bool is_affine = how.kind == Conversion::Kind::affine && tables.has_factors;
  const bool is_16_bits = how.kind == Conversion::Kind::table && how.word == 2;
  return kernels.end_streaming != nullptr && (is_affine || is_16_bits) && elements * how.word >= std::int64_t{1} << 17;
}

bool is_affine_by_factors(const Output& output) noexcept {
  return has_factors(output) && !(output.how.interleaved && output.how.channels == 3);
}

std::uint8_t* row_of_plane(const Output& output, std::int32_t channel, std::int32_t y) noexcept {
  const std::int64_t row = std::int64_t{output.width} * output.how.word;
  return output.memory + (std::int64_t{channel} * output.height + y) * row;
}

void prefetch_row(const Output& output, std::int32_t y) noexcept {
  const std::int64_t row = std::int64_t{output.width} * output.how.word;
  const bool is_interleaved = output.how.interleaved && output.how.channels == 3;
  for (int channel = 0; channel < (is_interleaved ? 1 : output.how.channels); ++channel) {
    const std::uint8_t* begin = is_interleaved ? output.memory + 3 * row * y : row_of_plane(output, channel, y);
    for (std::int64_t x = 0; x < (is_interleaved ? 3 * row : row); x += 64) __builtin_prefetch(begin + x, 1);
  }
}

void write_row(const Output& output, std::int32_t y, const std::uint8_t* const* planes) noexcept {
  if (output.how.interleaved && output.how.channels == 3) {
    const std::int64_t row = std::int64_t{output.width} * output.how.word;
    write_interleaved(output, planes, output.memory + 3 * row * y);
    return;
  }
  for (int channel = 0; channel < output.how.channels; ++channel) {
    write_plane(output, channel, planes[channel], row_of_plane(output, channel, y));
  }
}

}  // namespace fastpipe
