#include "resample.h"

#include <algorithm>
#include <cstring>

#include "convert.h"
#include "kernels.h"

namespace fastpipe {
namespace {

constexpr std::int32_t kOne = 1 << 22;
constexpr int kMostRows = 64;  // that any kernel resamples at once

std::int64_t rounded_up(std::int64_t size, std::int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

std::uint8_t* bytes_of(Arena& arena, std::int64_t size) {
  return arena.array<std::uint8_t>(static_cast<std::size_t>(size));
}

// Which pixels make each output of an axis.
struct Taps {
  std::int32_t count = 0;  // outputs
  std::int32_t pitch = 0;
  std::int32_t most = 0;           // inputs of any output
  bool ascends = true;             // later outputs have later inputs, else earlier ones
  bool copies = false;             // each output is one input as it is: the one at `starts`
  std::int32_t* starts = nullptr;  // from the first pixel that is there
  std::int32_t* taps = nullptr;
  std::int32_t* weights = nullptr;

  // The output that comes so far in the order of the inputs.
  std::int32_t in_order(std::int32_t number) const { return ascends ? number : count - 1 - number; }
};

// Where the one input is that an output copies; -1 where there is more to do.
std::int32_t copied_input(const Taps& taps, std::int32_t output) {
  const std::int32_t* weights = taps.weights + std::int64_t{output} * taps.pitch;
  std::int32_t found = -1;
  for (std::int32_t k = 0; k < taps.taps[output]; ++k) {
    if (weights[k] == 0) continue;
    if (weights[k] != kOne || found >= 0) return -1;
    found = taps.starts[output] + k;
  }
  return found;
}

// Return whether all outputs copy one input each, in the order of the inputs.
bool are_copies(const Taps& taps) {
  const bool ascends = copied_input(taps, 0) <= copied_input(taps, taps.count - 1);
  std::int32_t before = 0;
  for (std::int32_t number = 0; number < taps.count; ++number) {
    const std::int32_t input = copied_input(taps, ascends ? number : taps.count - 1 - number);
    if (input < before) return false;
    before = input;
  }
  return true;
}

// Count inputs from the first that is there, and find their order; false where some are not there.
bool place_inputs(const Axis& axis, std::int32_t available, Taps* taps) {
  const std::int32_t back = taps->count - 1;
  taps->ascends =
      std::int64_t{2} * taps->starts[0] + taps->taps[0] <= std::int64_t{2} * taps->starts[back] + taps->taps[back];
  std::int64_t start = 0, end = 0;
  for (std::int32_t number = 0; number < taps->count; ++number) {
    const std::int32_t i = taps->in_order(number);
    const std::int64_t first = std::int64_t{taps->starts[i]} - axis.low, last = first + taps->taps[i];
    if (taps->taps[i] < 1 || first < start || last < end || last > available) return false;
    start = first;
    end = last;
    taps->starts[i] = static_cast<std::int32_t>(first);
    taps->most = std::max(taps->most, taps->taps[i]);
  }
  return true;
}

// Compute an axis; false where there is no memory, or it does not fit the pixels that are there.
bool make_taps(int filter, const Axis& axis, std::int32_t available, Arena& arena, Taps* taps) {
  const std::int64_t each = std::int64_t{axis.pitch} + 2;
  if (axis.pitch < 1 || each > (std::int64_t{1} << 40) / axis.length) return false;
  auto* table = arena.array<std::int32_t>(static_cast<std::size_t>(each * axis.length));
  auto* exact = arena.array<double>(static_cast<std::size_t>(axis.pitch));
  if (table == nullptr || exact == nullptr) return false;
  axis_table(filter, axis, table, exact);
  taps->count = axis.length;
  taps->pitch = axis.pitch;
  taps->starts = table;
  taps->taps = table + axis.length;
  taps->weights = table + std::int64_t{2} * axis.length;
  if (!place_inputs(axis, available, taps)) return false;
  taps->copies = are_copies(*taps);
  if (!taps->copies) return true;
  for (std::int32_t i = 0; i < taps->count; ++i) {
    taps->starts[i] = copied_input(*taps, i);
    taps->weights[std::int64_t{i} * taps->pitch] = kOne;
    taps->taps[i] = taps->most = 1;
  }
  taps->ascends = taps->starts[0] <= taps->starts[taps->count - 1];
  return true;
}

// The pass along the rows: rows of pixels become rows of planes.
class RowResampler {
 public:
  bool prepare(const Kernels& kernels, const Taps& x, std::int32_t width, std::int32_t channels, Arena& arena) {
    kernels_ = &kernels;
    x_ = &x;
    columns_.channels = channels;
    columns_.width = width;
    columns_.count = x.count;
    columns_.pitch = x.pitch;
    columns_.starts = x.starts;
    columns_.taps = x.taps;
    columns_.weights = x.weights;
    columns_.plane = rounded_up(x.count, kernels.tile);
    copies_ = x.copies;
    for (std::int32_t i = 1; i < x.count && copies_; ++i) {
      copies_ = x.starts[i] - x.starts[i - 1] == (x.ascends ? 1 : -1);
    }
    const std::int64_t size = copies_ ? row_bytes() : static_cast<std::int64_t>(kernels.columns_memory(columns_));
    columns_.memory = bytes_of(arena, size);
    if (columns_.memory == nullptr) return false;
    if (!copies_) kernels.prepare_columns(columns_);
    return true;
  }

  // Return whether pixels that lie beside each other are copied, in their order or turned around.
  bool copies() const { return copies_; }
  bool tiles() const { return !copies_ && kernels_->untile != nullptr; }
  int rows_at_once() const { return copies_ ? 1 : kernels_->rows_at_once(columns_); }
  std::int64_t plane() const { return columns_.plane; }
  std::int64_t row_bytes() const { return rounded_up(columns_.channels * columns_.plane, 64); }

  void run(const std::uint8_t* const* rows, int number, std::uint8_t* const* out) const {
    if (!copies_) {
      kernels_->resample_columns(columns_, rows, number, out);
    } else if (x_->ascends) {
      separate(rows[0] + std::int64_t{x_->starts[0]} * columns_.channels, out[0]);
    } else {
      separate(rows[0] + std::int64_t{x_->starts[x_->count - 1]} * columns_.channels, columns_.memory);
      for (std::int32_t channel = 0; channel < columns_.channels; ++channel) {
        kernels_->reverse(columns_.memory + channel * plane(), x_->count, out[0] + channel * plane());
      }
    }
  }

 private:
  void separate(const std::uint8_t* pixels, std::uint8_t* out) const {
    if (columns_.channels == 3) {
      kernels_->split(pixels, x_->count, out, plane());
    } else {
      std::memcpy(out, pixels, static_cast<std::size_t>(x_->count));
    }
  }

  const Kernels* kernels_ = nullptr;
  const Taps* x_ = nullptr;
  Columns columns_;
  bool copies_ = false;
};

// What is done to resampled rows: the columns' pass, luma, and the conversion.
class Finish {
 public:
  Finish(const Output& output, const Taps& y, const RowResampler& rows, std::int32_t channels, bool makes_grey)
      : output_(output), y_(y), rows_(rows), channels_(channels), makes_grey_(makes_grey) {}

  bool prepare(Arena& arena) {
    made_ = bytes_of(arena, rows_.row_bytes());
    untiled_ = bytes_of(arena, rows_.row_bytes());
    grey_ = bytes_of(arena, output_.width);
    return made_ != nullptr && untiled_ != nullptr && grey_ != nullptr;
  }

  // A row of the output from resampled rows that are still to be weighted.
  void weigh(std::int32_t y, const std::uint8_t* const* rows) const {
    const Kernels& kernels = output_.kernels;
    const std::int32_t* weights = y_.weights + std::int64_t{y} * y_.pitch;
    const std::int64_t plane = rows_.plane();
    if (rows_.tiles() && kernels.weighted_rows_affine != nullptr && !makes_grey_ && is_affine_by_factors(output_)) {
      RowsOfFloats out{output_.how.channels, channels_ == 3 ? plane : 0, output_.width, output_.tables.planes, {},
                       output_.streams};
      for (std::int32_t channel = 0; channel < output_.how.channels; ++channel) {
        out.to[channel] = reinterpret_cast<float*>(row_of_plane(output_, channel, y));
      }
      kernels.weighted_rows_affine(rows, weights, y_.taps[y], out);
      return;
    }
    if (!output_.streams) prefetch_row(output_, y);
    kernels.weighted_rows(rows, weights, y_.taps[y], channels_ * plane, made_);
    write(y, made_);
  }

  // A row of the output from one that is resampled.
  void write(std::int32_t y, const std::uint8_t* row) const {
    if (rows_.tiles()) {
      output_.kernels.untile(row, channels_ * rows_.plane(), untiled_);
      row = untiled_;
    }
    const std::uint8_t* planes[3] = {row, row, row};  // of one channel, all three are copies
    if (channels_ == 3) {
      planes[1] = row + rows_.plane();
      planes[2] = row + 2 * rows_.plane();
    }
    if (makes_grey_) {
      output_.kernels.luma(planes, output_.width, grey_);
      planes[0] = planes[1] = planes[2] = grey_;
    }
    write_row(output_, y, planes);
  }

 private:
  const Output& output_;
  const Taps& y_;
  const RowResampler& rows_;
  std::int32_t channels_;
  bool makes_grey_;
  std::uint8_t *made_ = nullptr, *untiled_ = nullptr, *grey_ = nullptr;
};

// Rows that are needed, each once, in the order of the image.
class NeededRows {
 public:
  explicit NeededRows(const Taps& y) : y_(y) {}

  // The next row; -1 after the last.
  std::int32_t next() {
    for (; number_ < y_.count; ++number_) {
      const std::int32_t i = y_.in_order(number_);
      const std::int32_t row = std::max(y_.starts[i], row_);
      if (row < y_.starts[i] + y_.taps[i]) {
        row_ = row + 1;
        return row;
      }
    }
    return -1;
  }

 private:
  const Taps& y_;
  std::int32_t number_ = 0, row_ = 0;
};

// Rows first: resampled rows are kept in a ring for as long as outputs need them.
bool rows_then_columns(const Pixels& source, const Taps& y, const RowResampler& rows, const Finish& finish,
                       Arena& arena) {
  const std::int64_t slots = std::int64_t{y.most} + rows.rows_at_once();
  std::uint8_t* const ring = bytes_of(arena, slots * rows.row_bytes());
  auto* const taken = arena.array<const std::uint8_t*>(static_cast<std::size_t>(y.most));
  if (ring == nullptr || taken == nullptr) return false;
  NeededRows needed(y);
  std::int64_t resampled = 0;  // rows that are or were in the ring
  std::int64_t next_slot = 0;  // where the next one goes
  std::int64_t wanted = 0;     // rows that are needed up to the present output; they end in
  std::int32_t end = 0;        // this row of the image
  for (std::int32_t number = 0; number < y.count; ++number) {
    const std::int32_t i = y.in_order(number);
    const std::int32_t last = y.starts[i] + y.taps[i];
    const std::int64_t first = wanted - std::max(end - y.starts[i], 0);
    wanted += last - std::max(end, y.starts[i]);
    end = last;
    while (resampled < wanted) {
      const std::uint8_t* from[kMostRows];
      std::uint8_t* to[kMostRows];
      int count = 0;
      for (; count < rows.rows_at_once(); ++count) {
        const std::int32_t row = needed.next();
        if (row < 0) break;
        from[count] = source.data + row * source.pitch;
        to[count] = ring + next_slot * rows.row_bytes();
        next_slot = next_slot + 1 == slots ? 0 : next_slot + 1;
      }
      if (count == 0) return false;  // cannot be: all rows that are wanted are needed
      rows.run(from, count, to);
      resampled += count;
    }
    // At most a whole ring behind the next one.
    std::int64_t slot = next_slot - (resampled - first);
    if (slot < 0) slot += slots;
    for (std::int32_t k = 0; k < y.taps[i]; ++k) {
      taken[k] = ring + slot * rows.row_bytes();
      slot = slot + 1 == slots ? 0 : slot + 1;
    }
    if (y.copies) {
      finish.write(i, taken[0]);
    } else {
      finish.weigh(i, taken);
    }
  }
  return true;
}

bool columns_then_rows(const Kernels& kernels, const Pixels& source, const Taps& y, const RowResampler& rows,
                       const Finish& finish, Arena& arena) {
  const std::int64_t size = std::int64_t{source.width} * source.channels;
  const std::int64_t pitch = rounded_up(size, 64);
  std::uint8_t* const between = bytes_of(arena, rows.rows_at_once() * pitch);
  std::uint8_t* const made = bytes_of(arena, rows.rows_at_once() * rows.row_bytes());
  auto* const taken = arena.array<const std::uint8_t*>(static_cast<std::size_t>(y.most));
  if (between == nullptr || made == nullptr || taken == nullptr) return false;
  for (std::int32_t done = 0; done < y.count; done += rows.rows_at_once()) {
    const int count = std::min(rows.rows_at_once(), y.count - done);
    const std::uint8_t* from[kMostRows];
    std::uint8_t* to[kMostRows];
    for (int row = 0; row < count; ++row) {
      const std::int32_t i = done + row;
      for (std::int32_t k = 0; k < y.taps[i]; ++k) taken[k] = source.data + (y.starts[i] + k) * source.pitch;
      kernels.weighted_rows(taken, y.weights + std::int64_t{i} * y.pitch, y.taps[i], size, between + row * pitch);
      from[row] = between + row * pitch;
      to[row] = made + row * rows.row_bytes();
    }
    rows.run(from, count, to);
    for (int row = 0; row < count; ++row) finish.write(done + row, to[row]);
  }
  return true;
}

// Replace a coloured image by its luma.
bool make_grey(const Kernels& kernels, Arena& arena, Pixels* pixels) {
  const std::int64_t width = pixels->width, plane = rounded_up(width, 64);
  std::uint8_t* const grey = bytes_of(arena, width * pixels->height);
  std::uint8_t* const colours = bytes_of(arena, 3 * plane);
  if (grey == nullptr || colours == nullptr) return false;
  const std::uint8_t* const planes[3] = {colours, colours + plane, colours + 2 * plane};
  for (std::int32_t y = 0; y < pixels->height; ++y) {
    kernels.split(pixels->data + y * pixels->pitch, width, colours, plane);
    kernels.luma(planes, width, grey + y * width);
  }
  *pixels = {grey, width, pixels->height, pixels->width, 1};
  return true;
}

}  // namespace

bool resample(const Pixels& source, int filter, const Axis& x, const Axis& y, bool vertical_first, Grey grey,
              const Conversion& how, Arena& arena, std::uint8_t* out) noexcept {
  if (x.length < 1 || y.length < 1) return true;
  const Kernels& kernels = fastpipe::kernels();
  const ConversionTables* tables = how.tables;
  if (tables == nullptr) {
    auto* made = arena.array<ConversionTables>(1);
    if (made == nullptr) return false;
    make_tables(how, made);
    tables = made;
  }
  Pixels pixels = source;
  if (grey == Grey::before && source.channels == 3 && !make_grey(kernels, arena, &pixels)) return false;
  const bool is_grey_after = grey == Grey::after && pixels.channels == 3;
  if (pixels.channels == 3 && !is_grey_after && how.channels != 3) return false;
  Taps columns, lines;
  if (!make_taps(filter, x, pixels.width, arena, &columns) || !make_taps(filter, y, pixels.height, arena, &lines)) {
    return false;
  }
  RowResampler rows;
  if (!rows.prepare(kernels, columns, pixels.width, pixels.channels, arena)) return false;
  std::uint8_t* const scratch = bytes_of(arena, std::int64_t{3} * x.length);
  if (scratch == nullptr) return false;
  const bool streams = is_streamed(how, *tables, kernels, std::int64_t{x.length} * y.length * how.channels);
  const Output output{how, *tables, kernels, y.length, x.length, out, scratch, streams};
  Finish finish(output, lines, rows, pixels.channels, is_grey_after);
  if (!finish.prepare(arena)) return false;
  // Where one pass copies, their order does not matter.
  const bool made = vertical_first && !rows.copies() && !lines.copies
                        ? columns_then_rows(kernels, pixels, lines, rows, finish, arena)
                        : rows_then_columns(pixels, lines, rows, finish, arena);
  if (streams) kernels.end_streaming();
  return made;
}

}  // namespace fastpipe
