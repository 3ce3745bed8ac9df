#include <algorithm>
#include <cmath>
#include <cstring>

#include "canvas.h"
#include "kernels.h"
#include "levels.h"

namespace fastpipe {

namespace {

// Which pixels make each one of a line, by which weights.
struct ResizeAxis {
  const std::int64_t* first;  // (count)
  const float* weights;       // (count, taps)
  std::int64_t count, taps;
  int precision;  // of weights that are whole numbers, for bytes: bits of their fractions; 0: they are not
};

// An affine map from the pixels of a result to coordinates of an image, as torch computes it from torchvision's grid:
// in float32, in this order, so that the nearest pixel is the same one.
struct WarpMap {
  float xx, xy, x1, yx, yy, y1;
  float half_height, half_width, out_height, out_width;
  bool is_fused;
};

// The four pixels around each of a row of places: -1 for those outside.
struct Corners {
  std::int32_t* index[4];
  float* weight[4];
};

struct ImageKernels {
  // Elements of other types, whole rows.
  void (*from_bytes)(const std::uint8_t*, std::int64_t count, float* to);
  void (*from_half)(const std::uint16_t*, std::int64_t count, float* to);
  void (*from_bfloat)(const std::uint16_t*, std::int64_t count, float* to);
  void (*to_bytes)(const float*, std::int64_t count, std::uint8_t* to);
  void (*to_half)(const float*, std::int64_t count, std::uint16_t* to);
  void (*to_bfloat)(const float*, std::int64_t count, std::uint16_t* to);
  // Three channels apart, and together.
  void (*split)(const float* from, std::int64_t count, float* red, float* green, float* blue);
  void (*join)(const float* red, const float* green, const float* blue, std::int64_t count, float* to);
  // Copy to memory that is aligned to 64, past the caches where that can be; and have it seen by other threads.
  void (*stream)(const float* from, std::int64_t count, float* to);
  void (*end_streaming)();
  void (*reverse)(float* row, std::int64_t count);

  // As of PixelChange; `rounds` down, as torchvision does with bytes.
  void (*luminance)(const float* red, const float* green, const float* blue, std::int64_t count, bool rounds,
                    float* out);
  void (*blend_number)(float* row, std::int64_t count, float number, float factor, float rest, float bound,
                       bool rounds);
  void (*blend_row)(float* row, const float* other, std::int64_t count, float factor, float rest, float bound,
                    bool rounds);
  void (*turn_hue)(float* red, float* green, float* blue, std::int64_t count, float turn, bool rounds);
  void (*normalize)(float* row, std::int64_t count, float mean, float deviation);
  void (*multiply)(float* row, std::int64_t count, float factor);
  void (*add)(float* row, std::int64_t count, float number);
  void (*multiply_to_bytes)(float* row, std::int64_t count, float factor);
  void (*round_to_bytes)(float* row, std::int64_t count);
  void (*posterize)(float* row, std::int64_t count, float scale, float top, float step);
  void (*solarize)(float* row, std::int64_t count, float threshold, float bound);
  // Whole numbers of 0 to 255 of row * unit, rounded down.
  void (*levels)(const float* row, std::int64_t count, float unit, std::uint8_t* to);
  void (*stretch)(float* row, std::int64_t count, float low, float unit, float bound, bool rounds);
  void (*linear)(float* red, float* green, float* blue, std::int64_t count, const float* numbers);
  void (*linear_one)(float* row, std::int64_t count, float factor, float added, float low, float high);

  float (*sum)(const float* row, std::int64_t count);
  void (*limits)(const float* row, std::int64_t count, float* least, float* greatest);

  // out[i] = sum over j of weights[j] * source[i + j * step], of an odd number of weights that are the same from both
  // ends.
  void (*weighted)(const float* source, std::int64_t step, const float* weights, std::int64_t taps, std::int64_t count,
                   float* out);
  // Blend pixels with the mean around them, in which they count five times; rows begin one pixel to the left.
  void (*sharpen)(const float* above, const float* here, const float* below, std::int64_t count, float rest,
                  float bound, bool rounds, float* out);

  // Weighted means along rows of `width` pixels; memory is of 16 * (width + 4 + axis.count) numbers.
  void (*resize_rows)(const float* source, std::int64_t pitch, std::int64_t rows, std::int64_t width, const ResizeAxis&,
                      float* memory, float* out);
  // And along columns.
  void (*resize_columns)(const float* source, std::int64_t pitch, std::int64_t width, const ResizeAxis&, float* out);

  // Where pixels of a row come from.
  void (*places)(const WarpMap&, float row, std::int64_t count, float* xs, float* ys);
  void (*steps_along)(double x, double y, double step_x, double step_y, std::int64_t count, double* xs, double* ys);
  void (*nearest)(const float* xs, const float* ys, std::int64_t count, std::int32_t height, std::int32_t width,
                  std::int32_t* index);
  void (*take)(const float* plane, const std::int32_t* index, std::int64_t count, float outside, float* out);
  // The pixels around places, which it may change.
  void (*corners)(float* xs, float* ys, std::int64_t count, std::int32_t height, std::int32_t width, const Corners&);
  void (*corners_of_doubles)(double* xs, double* ys, std::int64_t count, std::int32_t height, std::int32_t width,
                             const Corners&);
  void (*between)(const float* plane, const Corners&, std::int64_t count, float* out);
  // The same of three channels that lie together, with a fourth number that is not used: a corner is read at once,
  // which takes a quarter of the time.  The pixel before the first is 0, which those outside are.
  void (*to_quads)(const float* red, const float* green, const float* blue, std::int64_t count, float* quads);
  void (*between_quads)(const float* quads, const Corners&, std::int64_t count, float* red, float* green, float* blue);
  void (*inside)(const Corners&, std::int64_t count, float* out);
  void (*fill_weighted)(float* row, const float* part, std::int64_t count, float fill);
  void (*add_row)(float* row, const float* other, std::int64_t count);
  void (*fill_rest)(float* row, const float* inside, std::int64_t count, float part, float fill);

  void (*mix)(const float* image, const float* other, std::int64_t count, float kept, float rest, float* out);
  void (*noise)(std::uint32_t first, std::uint32_t seed, std::int64_t count, float* out);
};

#define FASTPIPE_BODY "augment_images_kernels.inc"
#include "each_level.inc"
#undef FASTPIPE_BODY

constexpr std::int64_t kPiece = 1024;  // pixels that changes are done to together, of all channels
constexpr std::int64_t kBlock = 512;   // numbers that are added up as float32
constexpr std::int64_t kTurned = 16;   // rows that are resized together

// A whole number of a table; `otherwise` where it is none of the range, or no number.
std::int64_t whole(double value, std::int64_t low, std::int64_t high, std::int64_t otherwise) noexcept {
  return value >= static_cast<double>(low) && value < static_cast<double>(high) + 1.0 ? static_cast<std::int64_t>(value)
                                                                                      : otherwise;
}

double sum_in_blocks(const ImageKernels& kernels, const float* row, std::int64_t count) noexcept {
  double total = 0;
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    total += static_cast<double>(kernels.sum(row + begin, std::min(kBlock, count - begin)));
  }
  return total;
}

}  // namespace

// ---- views -----------------------------------------------------------------------------------

std::int64_t bytes_of(Element element) noexcept {
  switch (element) {
    case Element::uint8:
      return 1;
    case Element::float32:
      return 4;
    default:
      return 2;
  }
}

bool ImageView::is_planar() const noexcept {
  const std::int64_t word = bytes_of(element);
  return (width == 1 || strides[2] == word) && (height == 1 || strides[1] == word * width) &&
         (channels == 1 || strides[0] == word * width * height);
}

bool ImageView::is_interleaved() const noexcept {
  const std::int64_t word = bytes_of(element);
  return (channels == 1 || strides[0] == word) && (width == 1 || strides[2] == word * channels) &&
         (height == 1 || strides[1] == word * channels * width);
}

namespace {

void load_row(const ImageKernels& kernels, const ImageView& view, const std::uint8_t* from, std::int64_t count,
              float* to) noexcept {
  const std::int64_t step = view.strides[2];
  const bool is_dense = step == bytes_of(view.element);
  switch (view.element) {
    case Element::uint8:
      if (is_dense) return kernels.from_bytes(from, count, to);
      for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i * step]);
      return;
    case Element::float32:
      if (is_dense) {
        std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
        return;
      }
      for (std::int64_t i = 0; i < count; ++i) std::memcpy(to + i, from + i * step, sizeof(float));
      return;
    default:
      break;
  }
  const auto convert = view.element == Element::float16 ? kernels.from_half : kernels.from_bfloat;
  std::uint16_t words[256];
  for (std::int64_t begin = 0; begin < count; begin += 256) {
    const std::int64_t number = std::min<std::int64_t>(256, count - begin);
    for (std::int64_t i = 0; i < number; ++i) std::memcpy(words + i, from + (begin + i) * step, sizeof words[0]);
    convert(words, number, to + begin);
  }
}

void save_row(const ImageKernels& kernels, const ImageView& view, const float* from, std::int64_t count,
              std::uint8_t* to) noexcept {
  const std::int64_t step = view.strides[2];
  switch (view.element) {
    case Element::float32:
      if (step == sizeof(float)) {
        std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
        return;
      }
      for (std::int64_t i = 0; i < count; ++i) std::memcpy(to + i * step, from + i, sizeof(float));
      return;
    case Element::uint8: {
      if (step == 1) return kernels.to_bytes(from, count, to);
      std::uint8_t bytes[256];
      for (std::int64_t begin = 0; begin < count; begin += 256) {
        const std::int64_t number = std::min<std::int64_t>(256, count - begin);
        kernels.to_bytes(from + begin, number, bytes);
        for (std::int64_t i = 0; i < number; ++i) to[(begin + i) * step] = bytes[i];
      }
      return;
    }
    default:
      break;
  }
  const auto convert = view.element == Element::float16 ? kernels.to_half : kernels.to_bfloat;
  std::uint16_t words[256];
  for (std::int64_t begin = 0; begin < count; begin += 256) {
    const std::int64_t number = std::min<std::int64_t>(256, count - begin);
    convert(from + begin, number, words);
    for (std::int64_t i = 0; i < number; ++i) std::memcpy(to + (begin + i) * step, words + i, sizeof words[0]);
  }
}

bool is_aligned(const void* memory) noexcept { return reinterpret_cast<std::uintptr_t>(memory) % alignof(float) == 0; }

// Rows of float32, which may be read where they are.
bool has_rows_of_floats(const ImageView& view) noexcept {
  constexpr std::int64_t word = sizeof(float);
  return view.element == Element::float32 && is_aligned(view.data) && (view.width == 1 || view.strides[2] == word) &&
         view.strides[1] % word == 0 && view.strides[0] % word == 0;
}

}  // namespace

// ---- the canvas --------------------------------------------------------------------------------

Canvas::Canvas(const ImageView& image, const ImageView& out, bool streams, Arena& arena)
    : channels(image.channels),
      height(image.height),
      width(image.width),
      of_bytes(image.element == Element::uint8),
      image_(image),
      out_(out),
      arena_(arena) {
  if (out.element == Element::float32 && out.is_planar() && is_aligned(out.data)) {
    goal_ = reinterpret_cast<float*>(const_cast<std::uint8_t*>(out.data));
    const std::int64_t plane = out.height * out.width;
    streams_ = streams && reinterpret_cast<std::uintptr_t>(goal_) % 64 == 0 && (plane % 16 == 0 || channels == 1);
  }
}

void Canvas::change(const PixelChange& change) noexcept {
  if (waiting_count_ == kMostWaiting) flush(false);
  waiting_[waiting_count_++] = change;
}

float* Canvas::place(std::int64_t new_height, std::int64_t new_width, const float* taken) noexcept {
  const std::int64_t count = channels * new_height * new_width;
  const int which = taken != nullptr && taken == buffers_[0] ? 1 : 0;
  if (sizes_[which] < count) {
    buffers_[which] = scratch<float>(count);
    sizes_[which] = buffers_[which] == nullptr ? 0 : count;
  }
  return buffers_[which];
}

float* Canvas::empty(std::int64_t new_height, std::int64_t new_width) noexcept {
  return place(new_height, new_width, planes_);
}

void Canvas::replace(float* planes, std::int64_t new_height, std::int64_t new_width) noexcept {
  planes_ = planes;
  height = new_height;
  width = new_width;
}

float* Canvas::planes() noexcept {
  if (planes_ == nullptr || waiting_count_ > 0) flush(false);
  return planes_;
}

const float* Canvas::part(std::int64_t top, std::int64_t left, std::int64_t rows, std::int64_t columns,
                          std::int64_t* plane, std::int64_t* row) noexcept {
  const bool is_unread = planes_ == nullptr && waiting_count_ == 0;
  const std::uint8_t* const begin = image_.data + top * image_.strides[1] + left * image_.strides[2];
  if (is_unread && has_rows_of_floats(image_)) {
    *plane = image_.strides[0] / std::int64_t{sizeof(float)};
    *row = image_.strides[1] / std::int64_t{sizeof(float)};
    return reinterpret_cast<const float*>(begin);
  }
  if (is_unread) {
    auto* const memory = scratch<float>(channels * rows * columns);
    if (memory == nullptr) return nullptr;
    const ImageKernels& kernels = table_in_use();
    *plane = rows * columns;
    *row = columns;
    for (std::int64_t c = 0; c < channels; ++c) {
      for (std::int64_t y = 0; y < rows; ++y) {
        const std::uint8_t* const from = begin + c * image_.strides[0] + y * image_.strides[1];
        load_row(kernels, image_, from, columns, memory + c * *plane + y * columns);
      }
    }
    return memory;
  }
  *plane = pixels();
  *row = width;
  const float* const found = planes();
  return found == nullptr ? nullptr : found + top * width + left;
}

// Pixels from `begin` on, in the order of rows.
void Canvas::load(const ImageView& view, std::int64_t begin, std::int64_t count, float* const* to) noexcept {
  const ImageKernels& kernels = table_in_use();
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t y = (begin + done) / view.width, x = (begin + done) % view.width;
    const std::int64_t number = std::min(view.width - x, count - done);
    const std::uint8_t* const from = view.data + y * view.strides[1] + x * view.strides[2];
    if (channels == 3 && view.element == Element::float32 && view.is_interleaved() && is_aligned(from)) {
      kernels.split(reinterpret_cast<const float*>(from), number, to[0] + done, to[1] + done, to[2] + done);
    } else {
      for (std::int64_t c = 0; c < channels; ++c) {
        load_row(kernels, view, from + c * view.strides[0], number, to[c] + done);
      }
    }
    done += number;
  }
}

void Canvas::save(std::int64_t begin, std::int64_t count, float* const* from) noexcept {
  const ImageKernels& kernels = table_in_use();
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t y = (begin + done) / out_.width, x = (begin + done) % out_.width;
    const std::int64_t number = std::min(out_.width - x, count - done);
    auto* const to = const_cast<std::uint8_t*>(out_.data) + y * out_.strides[1] + x * out_.strides[2];
    if (channels == 3 && out_.element == Element::float32 && out_.is_interleaved() && is_aligned(to)) {
      kernels.join(from[0] + done, from[1] + done, from[2] + done, number, reinterpret_cast<float*>(to));
    } else {
      for (std::int64_t c = 0; c < channels; ++c) {
        save_row(kernels, out_, from[c] + done, number, to + c * out_.strides[0]);
      }
    }
    done += number;
  }
}

bool Canvas::prepare_pieces() noexcept {
  if (grey_ != nullptr) return true;
  auto* const memory = scratch<float>(kPiece * (channels + 1));
  piece_ = scratch<float*>(channels);
  at_ = scratch<float*>(channels);
  if (problem != Change::made) return false;
  grey_ = memory + channels * kPiece;
  for (std::int64_t c = 0; c < channels; ++c) piece_[c] = memory + c * kPiece;
  return true;
}

void Canvas::change_piece(float* const* piece, std::int64_t count) noexcept {
  const ImageKernels& kernels = table_in_use();
  const bool is_colour = channels == 3;
  for (int at = 0; at < waiting_count_; ++at) {
    const PixelChange& one = waiting_[at];
    const bool rounds = one.of_bytes;
    const float bound = rounds ? 255.0f : 1.0f;
    switch (one.kind) {
      case PixelChange::Kind::turn_hue:
        kernels.turn_hue(piece[0], piece[1], piece[2], count, one.a[0], rounds);
        continue;
      case PixelChange::Kind::grey:
        kernels.luminance(piece[0], piece[1], piece[2], count, rounds, piece[0]);
        std::memcpy(piece[1], piece[0], static_cast<std::size_t>(count) * sizeof(float));
        std::memcpy(piece[2], piece[0], static_cast<std::size_t>(count) * sizeof(float));
        continue;
      case PixelChange::Kind::saturate:
        kernels.luminance(piece[0], piece[1], piece[2], count, rounds, grey_);
        break;
      case PixelChange::Kind::linear:
        if (is_colour) {
          kernels.linear(piece[0], piece[1], piece[2], count, one.numbers);
        } else {  // all three colours are what it is
          kernels.linear_one(piece[0], count, one.numbers[0] + one.numbers[1] + one.numbers[2], one.numbers[3],
                             one.numbers[12], one.numbers[15]);
        }
        continue;
      default:
        break;
    }
    for (std::int64_t c = 0; c < channels; ++c) {
      float* const row = piece[c];
      switch (one.kind) {
        case PixelChange::Kind::multiply:
          kernels.blend_number(row, count, 0.0f, one.a[0], one.a[1], bound, rounds);
          break;
        case PixelChange::Kind::blend_mean:
          kernels.blend_number(row, count, one.a[2], one.a[0], one.a[1], bound, rounds);
          break;
        case PixelChange::Kind::saturate:
          kernels.blend_row(row, grey_, count, one.a[0], one.a[1], bound, rounds);
          break;
        case PixelChange::Kind::normalize:
          kernels.normalize(row, count, one.numbers[2 * c], one.numbers[2 * c + 1]);
          break;
        case PixelChange::Kind::scale:
          kernels.multiply(row, count, one.a[0]);
          break;
        case PixelChange::Kind::add:
          kernels.add(row, count, one.a[0]);
          break;
        case PixelChange::Kind::to_bytes:
          kernels.multiply_to_bytes(row, count, 255.999f);
          break;
        case PixelChange::Kind::round:
          kernels.round_to_bytes(row, count);
          break;
        case PixelChange::Kind::posterize:
          kernels.posterize(row, count, one.a[0], one.a[1], one.a[2]);
          break;
        case PixelChange::Kind::solarize:
          kernels.solarize(row, count, one.a[0], one.a[1]);
          break;
        case PixelChange::Kind::contrast:
          kernels.stretch(row, count, one.numbers[2 * c], one.numbers[2 * c + 1], bound, rounds);
          break;
        default:
          break;
      }
    }
  }
  if (sums_) {
    const float* row = piece[0];
    if (is_colour) {
      kernels.luminance(piece[0], piece[1], piece[2], count, rounds(), grey_);
      row = grey_;
    }
    sum_ += sum_in_blocks(kernels, row, count);
  }
}

// Do what waits: in planes, or on the way to where the image goes.
void Canvas::flush(bool to_out) noexcept {
  if (problem != Change::made || !prepare_pieces()) return;
  const ImageKernels& kernels = table_in_use();
  const std::int64_t all = pixels();
  float* const planes = to_out ? planes_ : planes_ != nullptr ? planes_ : place(height, width, nullptr);
  if (planes == nullptr && !to_out) return;
  for (std::int64_t begin = 0; begin < all; begin += kPiece) {
    const std::int64_t count = std::min(kPiece, all - begin);
    for (std::int64_t c = 0; c < channels; ++c) {
      // Planes are changed in place, or read the last time.
      at_[c] = planes == nullptr ? piece_[c] : planes + c * all + begin;
      if (planes_ == nullptr && goal_ != nullptr && to_out && !streams_) at_[c] = goal_ + c * all + begin;
    }
    if (planes_ == nullptr) load(image_, begin, count, at_);
    change_piece(at_, count);
    if (!to_out) continue;
    if (goal_ == nullptr) {
      save(begin, count, at_);
      continue;
    }
    for (std::int64_t c = 0; c < channels; ++c) {
      float* const to = goal_ + c * all + begin;
      if (streams_) {
        kernels.stream(at_[c], count, to);
      } else if (at_[c] != to) {
        std::memcpy(to, at_[c], static_cast<std::size_t>(count) * sizeof(float));
      }
    }
  }
  if (to_out && streams_) kernels.end_streaming();
  waiting_count_ = 0;
  planes_ = planes;
}

float Canvas::mean_of(std::int64_t channel) noexcept {
  const float* const found = planes();
  if (found == nullptr || pixels() == 0) return 0;
  const double total = sum_in_blocks(table_in_use(), found + channel * pixels(), pixels());
  return static_cast<float>(total / static_cast<double>(pixels()));
}

float Canvas::mean() noexcept {
  const float* const found = planes();
  const std::int64_t count = channels * pixels();
  if (found == nullptr || count == 0) return 0;
  return static_cast<float>(sum_in_blocks(table_in_use(), found, count) / static_cast<double>(count));
}

float Canvas::mean_of_luminance() noexcept {
  sums_ = true;
  sum_ = 0;
  flush(false);
  sums_ = false;
  return static_cast<float>(sum_ / static_cast<double>(std::max<std::int64_t>(pixels(), 1)));
}

void Canvas::end() noexcept { flush(true); }

// ---- resizing ----------------------------------------------------------------------------------

namespace {

// The triangle, or Keys's cubic with a = -1/2.
template <typename Number>
Number filter_of(Number distance, bool is_cubic) noexcept {
  distance = std::abs(distance);
  if (!is_cubic) return std::max(Number{1} - distance, Number{0});
  if (distance < 1) return (Number(1.5) * distance - Number(2.5)) * distance * distance + Number{1};
  if (distance < 2) return ((Number(-0.5) * distance + Number(2.5)) * distance - Number{4}) * distance + Number{2};
  return 0;
}

// Where a line is resized from.
struct Line {
  double begin = 0, extent = 0;  // in pixels
  bool is_mirrored = false;      // the last comes first
  std::int64_t size = 0;         // pixels that there are
};

std::int64_t most_taps(double stretch, std::int64_t size, bool is_cubic) noexcept {
  return std::min(size, static_cast<std::int64_t>(2.0 * std::max(stretch, 1.0) * (is_cubic ? 2 : 1)) + 3);
}

// The axis of torch.nn.functional.interpolate with antialias=True, which computes it in float32.
bool make_axis(Canvas& canvas, const Line& line, std::int64_t wanted, bool is_cubic, ResizeAxis* axis) noexcept {
  const auto step = static_cast<float>(line.extent / static_cast<double>(wanted));
  const std::int64_t room = most_taps(static_cast<double>(step), line.size, is_cubic);
  auto* const first = canvas.scratch<std::int64_t>(wanted);
  auto* const weights = canvas.scratch<float>(wanted * room);
  if (first == nullptr || weights == nullptr) return false;
  const float stretch = std::max(step, 1.0f), reach = stretch * (is_cubic ? 2.0f : 1.0f), inverse = 1.0f / stretch;
  std::int64_t most = 1;
  for (std::int64_t number = 0; number < wanted; ++number) {
    const std::int64_t at = line.is_mirrored ? wanted - 1 - number : number;
    float* const own = weights + at * room;
    const float centre = static_cast<float>(line.begin) + step * static_cast<float>(static_cast<double>(number) + 0.5);
    const std::int64_t start =
        std::clamp<std::int64_t>(static_cast<std::int64_t>(centre - reach + 0.5f), 0, line.size - 1);
    const std::int64_t end = std::min(static_cast<std::int64_t>(centre + reach + 0.5f), line.size);
    const std::int64_t count = std::clamp<std::int64_t>(end - start, 0, room);
    float total = 0;
    for (std::int64_t k = 0; k < count; ++k) {
      own[k] = filter_of((static_cast<float>(start + k) - centre + 0.5f) * inverse, is_cubic);
      total += own[k];
    }
    for (std::int64_t k = 0; k < room; ++k) own[k] = k < count ? own[k] / total : 0;
    first[at] = start;
    most = std::max(most, count);
  }
  // As many taps for all: those of the last ones begin earlier.
  for (std::int64_t at = 0; at < wanted; ++at) {
    float *const to = weights + at * most, *const from = weights + at * room;
    const std::int64_t move = std::max<std::int64_t>(first[at] + most - line.size, 0);
    std::memmove(to, from, static_cast<std::size_t>(most) * sizeof(float));
    if (move > 0) {
      for (std::int64_t k = most - 1; k >= 0; --k) to[k] = k >= move ? to[k - move] : 0;
      first[at] -= move;
    }
  }
  *axis = {first, weights, wanted, most, 0};
  return true;
}

// The same for bytes, whose weights torch computes in float64 and rounds to 16 bits.
bool make_axis_of_bytes(Canvas& canvas, std::int64_t size, std::int64_t wanted, bool is_cubic,
                        ResizeAxis* axis) noexcept {
  const double scale = static_cast<double>(size) / static_cast<double>(wanted);
  const double support = (is_cubic ? 2.0 : 1.0) * std::max(scale, 1.0), inverse = 1.0 / std::max(scale, 1.0);
  const std::int64_t room = most_taps(scale, size, is_cubic);
  auto* const first = canvas.scratch<std::int64_t>(wanted);
  auto* const weights = canvas.scratch<float>(wanted * room);
  auto* const exact = canvas.scratch<double>(wanted * room);
  if (first == nullptr || weights == nullptr || exact == nullptr) return false;
  double greatest = 0;
  for (std::int64_t at = 0; at < wanted; ++at) {
    double* const own = exact + at * room;
    const double centre = scale * (static_cast<double>(at) + 0.5);
    const std::int64_t start = std::clamp<std::int64_t>(static_cast<std::int64_t>(centre - support + 0.5), 0, size - 1);
    const std::int64_t end = std::min(static_cast<std::int64_t>(centre + support + 0.5), size);
    const std::int64_t count = std::clamp<std::int64_t>(end - start, 0, room);
    double total = 0;
    for (std::int64_t k = 0; k < count; ++k) {
      own[k] = filter_of((static_cast<double>(start + k) - centre + 0.5) * inverse, is_cubic);
      total += own[k];
    }
    for (std::int64_t k = 0; k < room; ++k) {
      own[k] = k < count ? (total != 0 ? own[k] / total : own[k]) : 0;
      greatest = std::max(greatest, own[k]);
    }
    // As many taps for all.
    const std::int64_t move = std::max<std::int64_t>(start + room - size, 0);
    for (std::int64_t k = room - 1; k >= 0 && move > 0; --k) own[k] = k >= move ? own[k - move] : 0;
    first[at] = start - move;
  }
  int precision = 0;
  while (precision < 22 && static_cast<int>(0.5 + greatest * (1 << (precision + 1))) < (1 << 15)) ++precision;
  const double unit = 1 << precision;
  for (std::int64_t at = 0; at < wanted * room; ++at) {
    weights[at] = static_cast<float>(static_cast<int>((exact[at] < 0 ? -0.5 : 0.5) + exact[at] * unit));
  }
  *axis = {first, weights, wanted, room, precision};
  return true;
}

// Go on with a part of the image at another size.
void resize(Canvas& canvas, std::int64_t top, std::int64_t left, const ResizeAxis& down, std::int64_t rows,
            const ResizeAxis& across, std::int64_t columns) noexcept {
  const ImageKernels& kernels = table_in_use();
  std::int64_t plane = 0, pitch = 0;
  const float* const source = canvas.part(top, left, rows, columns, &plane, &pitch);
  // Along rows the work is slower, with as few of them as there are before or after; but torch has bytes rounded in
  // between.
  const bool rows_first = rows <= down.count || across.precision > 0;
  float* const between = canvas.scratch<float>(rows_first ? rows * across.count : down.count * columns);
  float* const memory = canvas.scratch<float>(kTurned * (columns + 4 + across.count));
  float* const out = canvas.empty(down.count, across.count);
  if (canvas.problem != Change::made) return;
  for (std::int64_t c = 0; c < canvas.channels; ++c) {
    float* const to = out + c * down.count * across.count;
    if (rows_first) {
      kernels.resize_rows(source + c * plane, pitch, rows, columns, across, memory, between);
      kernels.resize_columns(between, across.count, across.count, down, to);
    } else {
      kernels.resize_columns(source + c * plane, pitch, columns, down, between);
      kernels.resize_rows(between, columns, down.count, columns, across, memory, to);
    }
  }
  canvas.replace(out, down.count, across.count);
}

void crop_nearest(Canvas& canvas, const Box& box, std::int64_t height, std::int64_t width) noexcept {
  std::int64_t plane = 0, pitch = 0;
  const float* const source = canvas.part(box.top, box.left, box.height, box.width, &plane, &pitch);
  float* const out = canvas.empty(height, width);
  auto* const index = canvas.scratch<std::int32_t>(width);
  if (canvas.problem != Change::made) return;
  const auto at = [](std::int64_t number, std::int64_t size, std::int64_t wanted) {
    const float scale = static_cast<float>(size) / static_cast<float>(wanted);
    return std::min(static_cast<std::int64_t>(std::floor(static_cast<float>(number) * scale)), size - 1);
  };
  for (std::int64_t x = 0; x < width; ++x) index[x] = static_cast<std::int32_t>(at(x, box.width, width));
  for (std::int64_t c = 0; c < canvas.channels; ++c) {
    for (std::int64_t y = 0; y < height; ++y) {
      table_in_use().take(source + c * plane + at(y, box.height, height) * pitch, index, width, 0.0f,
                          out + (c * height + y) * width);
    }
  }
  canvas.replace(out, height, width);
}

// ---- steps of images ---------------------------------------------------------------------------

void crop(Canvas& canvas, const AugmentStep& step, const double* row, bool flips_x, bool flips_y) noexcept {
  const std::int64_t height = step.options[0], width = step.options[1];
  const bool is_cubic = step.options[2] == 2;
  Box box;
  box.top = static_cast<std::int32_t>(whole(row[0], 0, canvas.height - 1, -1));
  box.left = static_cast<std::int32_t>(whole(row[1], 0, canvas.width - 1, -1));
  box.height = static_cast<std::int32_t>(whole(row[2], 1, canvas.height - box.top, -1));
  box.width = static_cast<std::int32_t>(whole(row[3], 1, canvas.width - box.left, -1));
  if (box.top < 0 || box.left < 0 || box.height < 0 || box.width < 0) {
    canvas.problem = Change::outside;
    return;
  }
  if (step.options[2] == 0) return crop_nearest(canvas, box, height, width);
  ResizeAxis down, across;
  const bool has_axes =
      canvas.rounds() ? make_axis_of_bytes(canvas, box.height, height, is_cubic, &down) &&
                            make_axis_of_bytes(canvas, box.width, width, is_cubic, &across)
                      : make_axis(canvas, {0, double(box.height), flips_y, box.height}, height, is_cubic, &down) &&
                            make_axis(canvas, {0, double(box.width), flips_x, box.width}, width, is_cubic, &across);
  if (has_axes) resize(canvas, box.top, box.left, down, box.height, across, box.width);
}

void flip(Canvas& canvas, const AugmentStep& step, const double* row) noexcept {
  if (row[0] == 0) return;
  float* const planes = canvas.planes();
  if (planes == nullptr) return;
  const ImageKernels& kernels = table_in_use();
  const std::int64_t height = canvas.height, width = canvas.width;
  if (step.options[0] == 0) {
    for (std::int64_t line = 0; line < canvas.channels * height; ++line) kernels.reverse(planes + line * width, width);
    return;
  }
  for (std::int64_t c = 0; c < canvas.channels; ++c) {
    float* const plane = canvas.plane(c);
    for (std::int64_t y = 0; y < height / 2; ++y) {
      std::swap_ranges(plane + y * width, plane + (y + 1) * width, plane + (height - 1 - y) * width);
    }
  }
}

void blend(Canvas& canvas, int kind, double factor) noexcept {
  const bool rounds = canvas.rounds(), is_colour = canvas.channels == 3;
  const auto own = static_cast<float>(factor), rest = static_cast<float>(1.0 - factor);
  if (kind == 0 && own != 1.0f) {
    canvas.change({PixelChange::Kind::multiply, rounds, {own, rest, 0}});
  } else if (kind == 1 && own != 1.0f) {
    const float mean = canvas.mean_of_luminance();
    canvas.change({PixelChange::Kind::blend_mean, rounds, {own, rest, mean}});
  } else if (kind == 2 && own != 1.0f && is_colour) {
    canvas.change({PixelChange::Kind::saturate, rounds, {own, rest, 0}});
  } else if (kind == 3 && own != 0.0f && is_colour) {
    canvas.change({PixelChange::Kind::turn_hue, rounds, {own, 0, 0}});
  }
}

void jitter(Canvas& canvas, const double* row) noexcept {
  for (int place = 4; place < 8; ++place) {
    const std::int64_t kind = whole(row[place], 0, 3, -1);
    if (kind >= 0) blend(canvas, static_cast<int>(kind), row[kind]);
  }
}

// A Gaussian's weights, but for those at both ends that are too small to count.
const float* gaussian(Canvas& canvas, std::int64_t size, double sigma, double least, std::int64_t* taps) noexcept {
  auto* const powers = canvas.scratch<double>(size);
  auto* const weights = canvas.scratch<float>(size);
  if (powers == nullptr || weights == nullptr) return nullptr;
  const std::int64_t half = size / 2;
  double total = 0;
  for (std::int64_t at = 0; at < size; ++at) {
    const auto apart = static_cast<double>(at - half);
    powers[at] = std::exp(-(apart * apart) / (2 * sigma * sigma));
    total += powers[at];
  }
  std::int64_t small = 0;
  while (small < half && powers[small] < total * least) ++small;
  total = 0;
  for (std::int64_t at = small; at < size - small; ++at) total += powers[at];
  *taps = size - 2 * small;
  for (std::int64_t at = 0; at < *taps; ++at) weights[at] = static_cast<float>(powers[at + small] / total);
  return weights;
}

// Weighted means of neighbours, along rows and then along columns; images are mirrored at their borders.
//
// Rows are kept with their mirrored ends, and worked on as one long row: what is computed where one ends and the next
// begins is left out in the end.
void blur(Canvas& canvas, const AugmentStep& step, const double* row) noexcept {
  const ImageKernels& kernels = table_in_use();
  const double least = static_cast<double>(step.numbers[0]) * 0x1p-30;
  std::int64_t taps_x = 0, taps_y = 0;
  const float* const across = gaussian(canvas, step.options[0], row[0], least, &taps_x);
  const float* const down = gaussian(canvas, step.options[1], row[0], least, &taps_y);
  const std::int64_t half_x = taps_x / 2, half_y = taps_y / 2, height = canvas.height, width = canvas.width;
  const std::int64_t stride = width + 2 * half_x;
  auto* const first = canvas.scratch<float>((height + 2 * half_y) * stride);
  auto* const second = canvas.scratch<float>((height + 2 * half_y) * stride);
  float* const planes = canvas.planes();
  if (planes == nullptr || canvas.problem != Change::made) return;
  if (half_x >= width || half_y >= height) {
    canvas.problem = Change::outside;
    return;
  }
  for (std::int64_t c = 0; c < canvas.channels; ++c) {
    float* const plane = planes + c * height * width;
    for (std::int64_t y = 0; y < height; ++y) {
      const float* const line = plane + y * width;
      float* const padded = first + y * stride;
      std::memcpy(padded + half_x, line, static_cast<std::size_t>(width) * sizeof(float));
      for (std::int64_t i = 0; i < half_x; ++i) {
        padded[half_x - 1 - i] = line[i + 1];
        padded[half_x + width + i] = line[width - 2 - i];
      }
    }
    const std::int64_t count = height * stride - 2 * half_x;
    kernels.weighted(first, 1, across, taps_x, count, second + half_y * stride);
    const auto bytes = static_cast<std::size_t>(width) * sizeof(float);
    for (std::int64_t i = 0; i < half_y; ++i) {
      std::memcpy(second + (half_y - 1 - i) * stride, second + (half_y + 1 + i) * stride, bytes);
      std::memcpy(second + (half_y + height + i) * stride, second + (half_y + height - 2 - i) * stride, bytes);
    }
    kernels.weighted(second, stride, down, taps_y, count, first);
    for (std::int64_t y = 0; y < height; ++y) std::memcpy(plane + y * width, first + y * stride, bytes);
  }
  if (canvas.rounds()) canvas.change({PixelChange::Kind::round, true, {0, 0, 0}});
}

// ---- affine maps -------------------------------------------------------------------------------

bool make_corners(Canvas& canvas, std::int64_t count, Corners* corners) noexcept {
  for (int k = 0; k < 4; ++k) {
    corners->index[k] = canvas.scratch<std::int32_t>(count);
    corners->weight[k] = canvas.scratch<float>(count);
  }
  return canvas.problem == Change::made;
}

// What becomes of a number that is put where bytes are.
float byte_of(float number) noexcept {
  std::uint8_t byte = 0;
  table_in_use().to_bytes(&number, 1, &byte);
  return static_cast<float>(byte);
}

// Numbers of a step's fill, for a channel.
float fill_of(const std::vector<float>& fill, std::int64_t channel) noexcept {
  if (fill.empty()) return 0;
  return fill[fill.size() == 1 ? 0 : static_cast<std::size_t>(channel)];
}

// The planes of three channels as quads, with a pixel of zeros before them.
const float* quads_of(Canvas& canvas, const float* planes) noexcept {
  const std::int64_t count = canvas.pixels();
  auto* const memory = canvas.scratch<float>(4 * (count + 1));
  if (memory == nullptr) return nullptr;
  std::fill_n(memory, 4, 0.0f);
  table_in_use().to_quads(planes, planes + count, planes + 2 * count, count, memory + 4);
  return memory + 4;
}

void warp(Canvas& canvas, const double* matrix, std::int64_t height, std::int64_t width, bool is_nearest, bool is_fused,
          const std::vector<float>& fill) noexcept {
  const ImageKernels& kernels = table_in_use();
  const std::int64_t channels = canvas.channels;
  std::int64_t plane = 0, pitch = 0;
  const float* const source = canvas.planes();
  plane = canvas.pixels();
  pitch = canvas.width;
  float* const out = canvas.empty(height, width);
  auto* const xs = canvas.scratch<float>(width);
  auto* const ys = canvas.scratch<float>(width);
  auto* const parts = canvas.scratch<float>(width);
  Corners corners;
  if (source == nullptr || !make_corners(canvas, width, &corners)) return;
  const float* const quads = channels == 3 && !is_nearest ? quads_of(canvas, source) : nullptr;
  if (canvas.problem != Change::made) return;
  WarpMap map;
  map.half_height = static_cast<float>(0.5 * static_cast<double>(canvas.height));
  map.half_width = static_cast<float>(0.5 * static_cast<double>(canvas.width));
  map.out_height = static_cast<float>(height);
  map.out_width = static_cast<float>(width);
  map.xx = static_cast<float>(matrix[0]) / map.half_width;
  map.xy = static_cast<float>(matrix[1]) / map.half_width;
  map.x1 = static_cast<float>(matrix[2]) / map.half_width;
  map.yx = static_cast<float>(matrix[3]) / map.half_height;
  map.yy = static_cast<float>(matrix[4]) / map.half_height;
  map.y1 = static_cast<float>(matrix[5]) / map.half_height;
  map.is_fused = is_fused;
  const auto rows = static_cast<std::int32_t>(canvas.height), columns = static_cast<std::int32_t>(pitch);
  const bool rounds = canvas.rounds();
  for (std::int64_t y = 0; y < height; ++y) {
    kernels.places(map, static_cast<float>(y), width, xs, ys);
    if (is_nearest) {
      kernels.nearest(xs, ys, width, rows, columns, corners.index[0]);
    } else {
      kernels.corners(xs, ys, width, rows, columns, corners);
      if (!fill.empty()) kernels.inside(corners, width, parts);
      if (quads != nullptr) {
        float* const to = out + y * width;
        kernels.between_quads(quads, corners, width, to, to + height * width, to + 2 * height * width);
      }
    }
    for (std::int64_t c = 0; c < channels; ++c) {
      float* const to = out + (c * height + y) * width;
      const float outside = fill_of(fill, c);
      if (is_nearest) {
        kernels.take(source + c * plane, corners.index[0], width, rounds ? byte_of(std::nearbyint(outside)) : outside,
                     to);
        continue;
      }
      if (quads == nullptr) kernels.between(source + c * plane, corners, width, to);
      if (!fill.empty()) kernels.fill_weighted(to, parts, width, outside);
      if (rounds && outside >= 0.0f && outside <= 255.0f) {
        kernels.round_to_bytes(to, width);
      } else if (rounds) {
        for (std::int64_t x = 0; x < width; ++x) to[x] = byte_of(std::nearbyint(to[x]));
      }
    }
  }
  canvas.replace(out, height, width);
}

int samples_of(double size, double wanted) noexcept {
  constexpr double kMostTaps = 16;  // along each side of a pixel
  const double count = std::ceil(size / wanted - 1e-9);
  return count >= 1 ? static_cast<int>(std::min(count, kMostTaps)) : 1;  // also of NaN
}

// Take each pixel from where it comes from: the mean of bilinear samples spread over it.
void sample(Canvas& canvas, const double* matrix, std::int64_t height, std::int64_t width,
            const std::vector<float>& fill) noexcept {
  const ImageKernels& kernels = table_in_use();
  const int taps_y =
      std::min(samples_of(std::hypot(matrix[1], matrix[4]), 1), samples_of(double(canvas.height), double(height)));
  const int taps_x =
      std::min(samples_of(std::hypot(matrix[0], matrix[3]), 1), samples_of(double(canvas.width), double(width)));
  const float* const source = canvas.planes();
  const std::int64_t plane = canvas.pixels();
  float* const out = canvas.empty(height, width);
  auto* const xs = canvas.scratch<double>(width);
  auto* const ys = canvas.scratch<double>(width);
  auto* const parts = canvas.scratch<float>(width);
  auto* const inside = canvas.scratch<float>(width);
  auto* const values = canvas.scratch<float>(width);
  Corners corners;
  if (source == nullptr || !make_corners(canvas, width, &corners)) return;
  const auto part = static_cast<float>(1.0 / (taps_x * taps_y));
  const auto rows = static_cast<std::int32_t>(canvas.height), columns = static_cast<std::int32_t>(canvas.width);
  for (std::int64_t y = 0; y < height; ++y) {
    std::fill_n(inside, width, 0.0f);
    for (std::int64_t c = 0; c < canvas.channels; ++c) std::fill_n(out + (c * height + y) * width, width, 0.0f);
    for (int tap = 0; tap < taps_x * taps_y; ++tap) {
      const double from_x = (tap % taps_x + 0.5) / taps_x - 0.5 * double(width);
      const double from_y = double(y) + (tap / taps_x + 0.5) / taps_y - 0.5 * double(height);
      const double x = from_x * matrix[0] + from_y * matrix[1] + matrix[2] + 0.5 * double(canvas.width) - 0.5;
      const double at_y = from_x * matrix[3] + from_y * matrix[4] + matrix[5] + 0.5 * double(canvas.height) - 0.5;
      kernels.steps_along(x, at_y, matrix[0], matrix[3], width, xs, ys);
      kernels.corners_of_doubles(xs, ys, width, rows, columns, corners);
      kernels.inside(corners, width, parts);
      kernels.add_row(inside, parts, width);
      for (std::int64_t c = 0; c < canvas.channels; ++c) {
        kernels.between(source + c * plane, corners, width, values);
        kernels.add_row(out + (c * height + y) * width, values, width);
      }
    }
    for (std::int64_t c = 0; c < canvas.channels; ++c) {
      kernels.fill_rest(out + (c * height + y) * width, inside, width, part, fill_of(fill, c));
    }
  }
  canvas.replace(out, height, width);
}

// A resampling by a matrix, or, where that is a box without rotation or shear, a resizing.
void place(Canvas& canvas, const AugmentStep& step, const double* row) noexcept {
  const std::int64_t height = step.options[0], width = step.options[1];
  const bool is_cubic = step.options[2] != 0;
  const double* const box = row + 6;
  if (box[0] == 0) return sample(canvas, row, height, width, step.numbers);
  const std::int64_t top = whole(std::floor(box[1]), 0, canvas.height - 1, -1);
  const std::int64_t left = whole(std::floor(box[4]), 0, canvas.width - 1, -1);
  const std::int64_t bottom = whole(std::ceil(box[1] + box[2]), top + 1, canvas.height, -1);
  const std::int64_t right = whole(std::ceil(box[4] + box[5]), left + 1, canvas.width, -1);
  if (top < 0 || left < 0 || bottom < 0 || right < 0) {
    canvas.problem = Change::outside;
    return;
  }
  ResizeAxis down, across;
  const Line lines[2] = {{box[1] - double(top), box[2], box[3] != 0, bottom - top},
                         {box[4] - double(left), box[5], box[6] != 0, right - left}};
  if (!make_axis(canvas, lines[0], height, is_cubic, &down) || !make_axis(canvas, lines[1], width, is_cubic, &across)) {
    return;
  }
  resize(canvas, top, left, down, bottom - top, across, right - left);
  float* const planes = canvas.planes();
  if (is_cubic && canvas.of_bytes && planes != nullptr) {
    const std::int64_t count = canvas.channels * canvas.pixels();
    for (std::int64_t i = 0; i < count; ++i) planes[i] = std::min(std::max(planes[i], 0.0f), 255.0f);
  }
}

// A linear change of colours: maps are rows of [A | B | c] for red, green and blue, see fusing.py.
void colour(Canvas& canvas, const AugmentStep& step, const double* maps) noexcept {
  const double unit = canvas.of_bytes ? 255.0 : 1.0;
  if (step.options[0] != 0) canvas.of_bytes = step.options[0] == 2;
  const double new_unit = canvas.of_bytes ? 255.0 : 1.0;
  double means[3] = {0, 0, 0};
  bool needs_means = false;
  for (int at = 0; at < 3; ++at) {
    for (int c = 3; c < 6; ++c) needs_means = needs_means || maps[7 * at + c] != 0;
  }
  for (int c = 0; c < 3 && needs_means; ++c) {
    means[c] = static_cast<double>(canvas.mean_of(std::min<std::int64_t>(c, canvas.channels - 1)));
  }
  auto* const numbers = canvas.scratch<float>(18);
  if (numbers == nullptr) return;
  for (int at = 0; at < 3; ++at) {
    double added = maps[7 * at + 6] * new_unit;
    for (int c = 0; c < 3; ++c) {
      numbers[4 * at + c] = static_cast<float>(maps[7 * at + c] * (new_unit / unit));
      added += maps[7 * at + 3 + c] * means[c] * (new_unit / unit);
    }
    numbers[4 * at + 3] = static_cast<float>(added);
    const auto low = static_cast<std::size_t>(at), high = static_cast<std::size_t>(3 + at);
    numbers[12 + at] = static_cast<float>(static_cast<double>(step.numbers[low]) * new_unit);
    numbers[15 + at] = static_cast<float>(static_cast<double>(step.numbers[high]) * new_unit);
  }
  canvas.change({PixelChange::Kind::linear, false, {0, 0, 0}, numbers});
}

// ---- a policy's own changes --------------------------------------------------------------------

void sharpen(Canvas& canvas, float factor) noexcept {
  const std::int64_t height = canvas.height, width = canvas.width;
  if (height <= 2 || width <= 2) return;
  const ImageKernels& kernels = table_in_use();
  const bool rounds = canvas.rounds();
  float* const planes = canvas.planes();
  // The two rows above as they were, in turn.
  auto* const memory = canvas.scratch<float>(2 * width);
  auto* const made = canvas.scratch<float>(width);
  if (planes == nullptr || canvas.problem != Change::made) return;
  const float bound = rounds ? 255.0f : 1.0f;
  const auto bytes = static_cast<std::size_t>(width) * sizeof(float);
  for (std::int64_t c = 0; c < canvas.channels; ++c) {
    float* const plane = planes + c * height * width;
    std::memcpy(memory, plane, bytes);
    for (std::int64_t y = 1; y < height - 1; ++y) {
      float* const here = plane + y * width;
      float *const above = memory + (y - 1) % 2 * width, *const own = memory + y % 2 * width;
      std::memcpy(own, here, bytes);
      kernels.sharpen(above, own, here + width, width - 2, 1.0f - factor, bound, rounds, made);
      std::memcpy(here + 1, made, bytes - 2 * sizeof(float));
      // The border is only cut off.
      kernels.blend_number(here, 1, 0, 1, 0, bound, rounds);
      kernels.blend_number(here + width - 1, 1, 0, 1, 0, bound, rounds);
    }
    kernels.blend_number(plane, width, 0, 1, 0, bound, rounds);
    kernels.blend_number(plane + (height - 1) * width, width, 0, 1, 0, bound, rounds);
  }
}

void posterize(Canvas& canvas, std::int64_t bits) noexcept {
  const auto levels = static_cast<float>(1 << bits);
  const float step = canvas.rounds() ? static_cast<float>(1 << (8 - bits)) : 1.0f / levels;
  const float scale = canvas.rounds() ? 1.0f / step : levels, top = canvas.rounds() ? 255.0f : levels - 1.0f;
  canvas.change({PixelChange::Kind::posterize, canvas.rounds(), {scale, top, step}});
}

void contrast(Canvas& canvas) noexcept {
  const float* const planes = canvas.planes();
  auto* const numbers = canvas.scratch<float>(2 * canvas.channels);
  if (planes == nullptr || numbers == nullptr || canvas.pixels() == 0) return;
  const float bound = canvas.rounds() ? 255.0f : 1.0f;
  for (std::int64_t c = 0; c < canvas.channels; ++c) {
    float low = 0, high = 0;
    table_in_use().limits(planes + c * canvas.pixels(), canvas.pixels(), &low, &high);
    const bool is_flat = low == high;
    numbers[2 * c] = is_flat ? 0.0f : low;
    numbers[2 * c + 1] = is_flat ? 1.0f : (high - low) * (1.0f / bound);
  }
  canvas.change({PixelChange::Kind::contrast, canvas.rounds(), {0, 0, 0}, numbers});
}

// Spread the values of each channel evenly over all bytes, as Pillow does; floats become bytes for it.
void equalize(Canvas& canvas) noexcept {
  float* const planes = canvas.planes();
  auto* const bytes = canvas.scratch<std::uint8_t>(canvas.pixels());
  if (planes == nullptr || bytes == nullptr || canvas.pixels() == 0) return;
  const bool of_bytes = canvas.rounds();
  const std::int64_t count = canvas.pixels();
  for (std::int64_t c = 0; c < canvas.channels; ++c) {
    float* const plane = planes + c * count;
    std::int64_t counts[4][256] = {};
    table_in_use().levels(plane, count, of_bytes ? 1.0f : 255.999f, bytes);
    std::int64_t at = 0;
    for (; at + 4 <= count; at += 4) {  // side by side, as the same number often comes again
      for (int k = 0; k < 4; ++k) ++counts[k][bytes[at + k]];
    }
    for (; at < count; ++at) ++counts[0][bytes[at]];
    for (int value = 0; value < 256; ++value) {
      counts[0][value] += counts[1][value] + counts[2][value] + counts[3][value];
    }
    int last = 255;
    while (counts[0][last] == 0) --last;
    const std::int64_t step = (count - counts[0][last]) / 255;
    const float unit = of_bytes ? 1.0f : 1.0f / 255.0f;
    float table[256];
    std::int64_t total = 0;
    for (int value = 0; value < 256; ++value) {
      const std::int64_t made = step != 0 ? std::min<std::int64_t>((total + step / 2) / step, 255) : value;
      table[value] = static_cast<float>(made) * unit;
      total += counts[0][value];
    }
    for (std::int64_t i = 0; i < count; ++i) plane[i] = table[bytes[i]];
  }
}

// torchvision's list, in its order.
enum class Policy : std::int64_t {
  identity,
  shear_x,
  shear_y,
  translate_x,
  translate_y,
  rotate,
  brightness,
  color,
  contrast,
  sharpness,
  posterize,
  solarize,
  auto_contrast,
  equalize,
};

void policy(Canvas& canvas, const AugmentStep& step, const double* row) noexcept {
  const double magnitude = row[1];
  const std::int64_t change = whole(row[0], 0, 13, 0);
  switch (static_cast<Policy>(change)) {
    case Policy::identity:
      return;
    case Policy::brightness:
      return blend(canvas, 0, 1.0 + magnitude);
    case Policy::contrast:
      return blend(canvas, 1, 1.0 + magnitude);
    case Policy::color:
      return blend(canvas, 2, 1.0 + magnitude);
    case Policy::sharpness:
      return sharpen(canvas, static_cast<float>(1.0 + magnitude));
    case Policy::posterize:
      return posterize(canvas, whole(magnitude, 0, 8, 8));
    case Policy::solarize: {
      const bool of_bytes = canvas.rounds();
      const auto threshold = static_cast<float>(magnitude * (of_bytes ? 255 : 1));
      return canvas.change({PixelChange::Kind::solarize, of_bytes, {threshold, of_bytes ? 255.0f : 1.0f, 0}});
    }
    case Policy::auto_contrast:
      return contrast(canvas);
    case Policy::equalize:
      return equalize(canvas);
    default:
      return warp(canvas, row + 2, canvas.height, canvas.width, step.options[0] != 0, step.options[1] != 0,
                  step.numbers);
  }
}

void erase(Canvas& canvas, const AugmentStep& step, const double* row) noexcept {
  const std::int64_t top = whole(row[0], 0, canvas.height, -1), left = whole(row[1], 0, canvas.width, -1);
  const std::int64_t height = whole(row[2], 0, canvas.height - top, -1);
  const std::int64_t width = whole(row[3], 0, canvas.width - left, -1);
  if (height == 0) return;
  if (top < 0 || left < 0 || height < 0 || width < 0) {
    canvas.problem = Change::outside;
    return;
  }
  float* const planes = canvas.planes();
  if (planes == nullptr) return;
  const auto seed = static_cast<std::uint32_t>(whole(row[4], 0, 0xFFFFFFFF, 0));
  for (std::int64_t c = 0; c < canvas.channels; ++c) {
    const float number = step.numbers.empty() ? 0 : fill_of(step.numbers, c);
    const float value = canvas.rounds() ? byte_of(number) : number;
    for (std::int64_t y = top; y < top + height; ++y) {
      const std::int64_t at = c * canvas.pixels() + y * canvas.width + left;
      if (step.numbers.empty()) {
        table_in_use().noise(static_cast<std::uint32_t>(at), seed, width, planes + at);
      } else {
        std::fill_n(planes + at, width, value);
      }
    }
  }
}

// Begin with two images: float32 planes of both, and what is made of them.
void mix(Canvas& canvas, const AugmentStep& step, const ImageView& previous, const double* row) noexcept {
  float* const planes = canvas.planes();
  auto* const other = canvas.scratch<float>(canvas.channels * canvas.pixels());
  if (planes == nullptr || other == nullptr) return;
  for (std::int64_t c = 0; c < canvas.channels; ++c) {
    for (std::int64_t y = 0; y < canvas.height; ++y) {
      load_row(table_in_use(), previous, previous.data + c * previous.strides[0] + y * previous.strides[1],
               canvas.width, other + (c * canvas.height + y) * canvas.width);
    }
  }
  if (step.kind == AugmentStep::Kind::mix_up) {
    const auto kept = static_cast<float>(row[0]), rest = static_cast<float>(1.0 - row[0]);
    float* const out = canvas.empty(canvas.height, canvas.width);
    if (out == nullptr) return;
    table_in_use().mix(planes, other, canvas.channels * canvas.pixels(), kept, rest, out);
    return canvas.replace(out, canvas.height, canvas.width);
  }
  const std::int64_t top = whole(row[0], 0, canvas.height, 0), left = whole(row[1], 0, canvas.width, 0);
  const std::int64_t bottom = whole(row[2], top, canvas.height, top);
  const std::int64_t right = whole(row[3], left, canvas.width, left);
  for (std::int64_t c = 0; c < canvas.channels; ++c) {
    for (std::int64_t y = top; y < bottom; ++y) {
      const std::int64_t at = (c * canvas.height + y) * canvas.width;
      std::copy(other + at + left, other + at + right, planes + at + left);
    }
  }
}

void normalize(Canvas& canvas, const AugmentStep& step) noexcept {
  auto* const numbers = canvas.scratch<float>(2 * canvas.channels);
  if (numbers == nullptr) return;
  const std::size_t count = step.numbers.size() / 2;
  for (std::int64_t c = 0; c < canvas.channels; ++c) {
    const std::size_t at = count == 1 ? 0 : static_cast<std::size_t>(c);
    numbers[2 * c] = step.numbers[at];
    numbers[2 * c + 1] = step.numbers[count + at];
  }
  canvas.change({PixelChange::Kind::normalize, false, {0, 0, 0}, numbers});
}

bool is_flip(const AugmentPlan& plan, std::size_t at, const double* row, int axis) noexcept {
  if (at >= plan.steps.size()) return false;
  const AugmentStep& step = plan.steps[at];
  return step.kind == AugmentStep::Kind::flip && step.options[0] == axis && row[step.column] != 0;
}

// Steps behind a crop that only mirror its result: it is resized so at once, which gives the same numbers.
std::size_t flips_behind(const AugmentPlan& plan, std::size_t at, const double* row, bool* x, bool* y) noexcept {
  std::size_t count = 0;
  for (; at + count < plan.steps.size() && plan.steps[at + count].kind == AugmentStep::Kind::flip; ++count) {
    *x = *x != is_flip(plan, at + count, row, 0);
    *y = *y != is_flip(plan, at + count, row, 1);
  }
  return count;
}

}  // namespace

Change augment(const AugmentPlan& plan, const ImageView& image, const ImageView* previous, const double* row,
               const ImageView& out, bool streams, Arena& arena) noexcept {
  Canvas canvas(image, out, streams, arena);
  using Kind = AugmentStep::Kind;
  for (std::size_t at = 0; at < plan.steps.size() && canvas.problem == Change::made; ++at) {
    const AugmentStep& step = plan.steps[at];
    const double* const own = row + step.column;
    switch (step.kind) {
      case Kind::skip:
        if (own[0] == 0) at += static_cast<std::size_t>(step.options[0]);
        break;
      case Kind::flip:
        flip(canvas, step, own);
        break;
      case Kind::crop: {
        bool x = false, y = false;
        if (step.options[2] != 0 && !canvas.rounds()) at += flips_behind(plan, at + 1, row, &x, &y);
        crop(canvas, step, own, x, y);
        break;
      }
      case Kind::jitter:
        jitter(canvas, own);
        break;
      case Kind::grey:
        if (own[0] != 0 && canvas.channels == 3) {
          canvas.change({PixelChange::Kind::grey, canvas.rounds(), {0, 0, 0}});
        }
        break;
      case Kind::blur:
        blur(canvas, step, own);
        break;
      case Kind::normalize:
        normalize(canvas, step);
        break;
      case Kind::to_floats:
        if (canvas.of_bytes) canvas.change({PixelChange::Kind::scale, false, {1.0f / 255.0f, 0, 0}});
        canvas.of_bytes = false;
        break;
      case Kind::to_bytes:
        if (!canvas.of_bytes) canvas.change({PixelChange::Kind::to_bytes, true, {0, 0, 0}});
        canvas.of_bytes = true;
        break;
      case Kind::warp:
        warp(canvas, own, step.options[2], step.options[3], step.options[0] != 0, step.options[1] != 0, step.numbers);
        break;
      case Kind::policy:
        policy(canvas, step, own);
        break;
      case Kind::erase:
        erase(canvas, step, own);
        break;
      case Kind::place:
        place(canvas, step, own);
        break;
      case Kind::colour:
        colour(canvas, step, own);
        break;
      case Kind::as_floats:
        canvas.keeps_fractions = true;
        break;
      case Kind::round:
        canvas.keeps_fractions = false;
        if (canvas.of_bytes) canvas.change({PixelChange::Kind::round, true, {0, 0, 0}});
        break;
      case Kind::mask:
        mask(canvas, step, own);
        break;
      case Kind::gain:
        canvas.change({step.options[0] != 0 ? PixelChange::Kind::add : PixelChange::Kind::scale,
                       false,
                       {static_cast<float>(own[0]), 0, 0}});
        break;
      case Kind::shift:
        shift(canvas, step, own);
        break;
      case Kind::mix_up:
      case Kind::cut_mix:
        mix(canvas, step, *previous, own);
        break;
    }
  }
  if (canvas.problem == Change::made) canvas.end();
  return canvas.problem;
}

}  // namespace fastpipe
