// The arithmetic is that of libjpeg-turbo, as its sources document it: the inverse DCT of C. Loeffler, A. Ligtenberg
// and G. Moschytz, "Practical Fast 1-D DCT Algorithms with 11 Multiplications" (ICASSP 1989) with constants of 13 bits,
// here as the sums of products that it is equal to; "triangle" upsampling, which weighs the nearer chroma sample by
// 3/4; and the conversion of JFIF with factors of 16 bits.
//
// At a part of the size, the inverse DCT makes 4 x 4, 2 x 2 or 1 sample of a block: the same transform, of whose
// samples the means are taken, without the coefficients that have the least share in these.  Chroma that has fewer
// samples than the luma along both sides gets a larger transform in place of upsampling.
//
// TensorFlow decodes by the fast inverse DCT of Y. Arai, T. Agui and M. Nakajima, "A Fast DCT-SQ Scheme for Images"
// (1988), in numbers of 16 bits: a part of its products is made with the steps.
#include "jpeg_pixels.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels.h"
#include "levels.h"

namespace fastpipe {
namespace {

// The most that the absolute values of a block's column of multiplied coefficients add up to.  Up to here no number of
// the transform needs more than 16 bits between its passes, and no variant of libjpeg-turbo loses one.  Nor does it at
// a part of the size: the first pass makes at most 20995 / 4096 as much, and all sums of the second are below 2**31.
constexpr int kMostOfColumn = 2900;

// Samples, before 128 is added, are from -kMostBelow to kMostBelow - 1: libjpeg-turbo without vectors takes others
// modulo 1,024.
constexpr int kMostBelow = 512;

// Bits that each pass rounds off.
constexpr int kShiftOfColumns = 11, kShiftOfRows = 18;

// The fast transform's factors, of 2**8.
constexpr int kFastOf2 = 362, kFastShared = 473, kFastOfB = 277, kFastOfD = 669;
constexpr int kFastBits = 2;                 // of its numbers, behind the point
constexpr int kShiftOfFast = kFastBits + 3;  // and those of a block's size

// Limits for the absolute values of a column or a row.  Within them, no variant of libjpeg-turbo loses a bit of a
// number that it multiplies (2**13), or of one that it makes (2**15: at most 5.03 times number 7, 2.42 times 6, 1.77
// times the others).
constexpr int kMostOfFastFactors = 8191;  // of the sum of numbers 1, 3, 5 and 7, and of 2 and 6, which are multiplied
constexpr int kMostOfFastColumn = 11500;  // of the sum of all eight
constexpr int kMostOfFastLast = 2047;     // of number 7

// The fast transform's steps contain these factors of their row and column; and both together, of 2**14, as
// libjpeg-turbo rounds them.
constexpr double kFastScale[8] = {1.0, 1.387039845, 1.306562965, 1.175875602,
                                  1.0, 0.785694958, 0.541196100, 0.275899379};
constexpr int kFastScaleBits = 14;
struct FastScales {
  std::int64_t of[64] = {};
  constexpr FastScales() {
    for (int i = 0; i < 64; ++i) {
      of[i] = static_cast<std::int64_t>(kFastScale[i / 8] * kFastScale[i % 8] * (1 << kFastScaleBits) + 0.5);
    }
  }
};
constexpr FastScales kFastScales;

// Of 2**16: how much a colour has of a chroma sample.
constexpr int kRedOfRed = 91881, kGreenOfBlue = 22554, kGreenOfRed = 46802, kBlueOfBlue = 116130;

constexpr std::int32_t kMostPixels = 0xFFFF;  // along each side of a JPEG

// Kernels read and write up to kSlack bytes behind a row.
constexpr std::int64_t kSlack = 64;

struct PixelKernels {
  // Transform blocks, which lie side by side, to rows of samples: 1, 2, 4 or 8 along each side of a block.  Blocks are
  // read, and rows are written, up to a multiple of kBlocks.  Returns false where a block has coefficients that no
  // encoder makes of 8 bits.
  bool (*inverse_dct[4])(const std::int16_t* blocks, std::int64_t count, const std::uint16_t* steps, std::uint8_t* out,
                         std::int64_t pitch);
  // The fast one to 8 samples, by steps of its own.
  bool (*inverse_dct_fast)(const std::int16_t* blocks, std::int64_t count, const std::uint16_t* steps,
                           std::uint8_t* out, std::int64_t pitch);
  // Convert YCbCr to three planes.
  void (*to_rgb)(const std::uint8_t* luma, const std::uint8_t* blue, const std::uint8_t* red, std::int64_t count,
                 std::uint8_t* const* to);
  // Make two columns of each, which lie side by side in a word; or do so for a row between two rows.  The samples
  // before the first and behind the last are read.  sums: memory for count + 2.
  void (*upsample_columns)(const std::uint8_t* from, std::int64_t count, std::uint16_t* to);
  void (*upsample_both)(const std::uint8_t* near, const std::uint8_t* far, std::int64_t count, std::uint16_t* sums,
                        std::uint16_t* to);
  // Make two columns of each without those beside it.
  void (*repeat_columns)(const std::uint8_t* from, std::int64_t count, std::uint16_t* to);
};

constexpr std::int64_t kBlocks = 4;

#define FASTPIPE_BODY "jpeg_pixels_kernels.inc"
#include "each_level.inc"
#undef FASTPIPE_BODY

// A range of rows or columns.
struct Range {
  std::int32_t begin = 0, end = 0;
  std::int32_t size() const noexcept { return end - begin; }
};

Range joined(Range a, Range b) noexcept { return {std::min(a.begin, b.begin), std::max(a.end, b.end)}; }

// The MCUs that hold samples, of which each has so many.
Range mcus_of(Range samples, std::int32_t each) noexcept {
  return {samples.begin / each, (samples.end - 1) / each + 1};
}

// The chroma samples along one side from which those of `luma` are made.  count: of all.
Range chroma_of(Range luma, bool is_half, std::int32_t count) noexcept {
  if (!is_half) return luma;
  // The first of two is made with the sample before, too, and the second with the one behind.
  return {std::max(0, (luma.begin + 1) / 2 - 1), std::min(count, luma.end / 2 + 1)};
}

// The samples of a component in the last two rows of MCUs that were decoded.
struct Plane {
  std::uint8_t* samples = nullptr;
  std::int64_t pitch = 0;
  std::int32_t rows = 0;           // a power of two
  std::int32_t top = 0, left = 0;  // of the first sample, in the whole component

  std::uint8_t* at(std::int32_t y, std::int32_t x) const noexcept {
    return samples + ((y - top) & (rows - 1)) * pitch + (x - left);
  }
};

class Decoding {
 public:
  Decoding(const JpegFrame& frame, CoefficientRows& rows, int factor, const Box& box, JpegPixels kind) noexcept
      : frame_(frame),
        rows_(rows),
        box_(box),
        size_(frame.reduced(factor)),
        is_fast_(kind != JpegPixels::pillow),
        channels_(kind == JpegPixels::tensorflow_grey ? 1 : 3),
        components_(channels_ == 1 ? 1 : frame.components) {
    const JpegPlane& luma = frame.planes[0];
    sides_[0] = 8 / factor;
    const bool is_larger = factor > 1 && luma.horizontal == 2 && luma.vertical == 2;
    sides_[1] = sides_[2] = is_larger ? 2 * sides_[0] : sides_[0];
    half_rows_ = luma.vertical == 2 && components_ == 3 && !is_larger;
    half_columns_ = luma.horizontal == 2 && components_ == 3 && !is_larger;
    is_smooth_ = sides_[0] > 1 && (!half_columns_ || chroma_size().width > 2);
    const Range x{box.left, box.right()}, y{box.top, box.bottom()};
    luma_ = mcus_of(y, sides_[0] * luma.vertical);
    columns_ = mcus_of(x, sides_[0] * luma.horizontal);
    mcus_ = luma_;
    if (components_ == 3) {
      chroma_ = mcus_of(chroma_of(y, half_rows_, chroma_size().height), sides_[1]);
      columns_ = joined(columns_, mcus_of(chroma_of(x, half_columns_, chroma_size().width), sides_[1]));
      mcus_ = joined(luma_, chroma_);
    }
  }

  Status run(Arena& arena, Pixels* pixels) noexcept {
    if (!allocate(arena)) return Status::declined(Reason::no_memory);
    if (is_fast_ && !make_fast_steps()) return Status::declined(Reason::damaged);
    std::int32_t done = box_.top;
    for (std::int32_t row = mcus_.begin; row < mcus_.end; ++row) {
      if (!transform(row)) return Status::declined(Reason::damaged);
      // The last row of chroma is needed for the row of pixels below it.
      const std::int32_t complete = sides_[0] * frame_.planes[0].vertical * (row + 1) - (half_rows_ ? 1 : 0);
      const std::int32_t end = row + 1 == mcus_.end ? box_.bottom() : std::min(complete, box_.bottom());
      for (; done < end; ++done) convert(done);
    }
    *pixels = {pixels_, pitch_, box_.height, box_.width, channels_};
    return Status::made();
  }

 private:
  // Chroma samples of the whole image.
  Size chroma_size() const noexcept {
    return {half_rows_ ? (size_.height + 1) / 2 : size_.height, half_columns_ ? (size_.width + 1) / 2 : size_.width};
  }

  // Returns false where one has more than 15 bits.
  bool make_fast_steps() noexcept {
    for (int c = 0; c < components_; ++c) {
      for (int i = 0; i < 64; ++i) {
        constexpr int bits = kFastScaleBits - kFastBits;
        const std::int64_t step = (frame_.planes[c].steps[i] * kFastScales.of[i] + (1 << (bits - 1))) >> bits;
        if (step > 0x7FFF) return false;
        fast_steps_[c][i] = static_cast<std::uint16_t>(step);
      }
    }
    return true;
  }

  bool allocate(Arena& arena) noexcept {
    for (int c = 0; c < components_; ++c) {
      const JpegPlane& plane = frame_.planes[c];
      const std::int64_t blocks = rounded(std::int64_t{columns_.size()} * plane.horizontal, kBlocks);
      counts_[c] = 64 * blocks;
      blocks_[c] = arena.array<std::int16_t>(static_cast<std::size_t>(counts_[c] * plane.vertical));
      const std::int32_t side = sides_[c];
      const std::int64_t pitch = side * blocks + 2 * kSlack;
      const std::int32_t rows = 2 * side * plane.vertical;
      auto* memory = arena.array<std::uint8_t>(static_cast<std::size_t>(pitch * rows));
      if (blocks_[c] == nullptr || memory == nullptr) return false;
      // Some blocks only fill an MCU, or a vector.
      std::memset(blocks_[c], 0, static_cast<std::size_t>(counts_[c] * plane.vertical) * sizeof(std::int16_t));
      planes_[c] = {memory + kSlack, pitch, rows, side * plane.vertical * mcus_.begin,
                    side * plane.horizontal * columns_.begin};
    }
    const std::int64_t width = rounded(std::int64_t{box_.width} + 2, kSlack) + kSlack;
    for (std::uint8_t*& line : lines_) line = arena.array<std::uint8_t>(static_cast<std::size_t>(width));
    for (std::uint8_t*& line : chroma_lines_) line = arena.array<std::uint8_t>(static_cast<std::size_t>(width));
    sums_ = arena.array<std::uint16_t>(static_cast<std::size_t>(width));
    pitch_ = rounded(std::int64_t{channels_} * box_.width, kSlack);
    pixels_ = arena.array<std::uint8_t>(static_cast<std::size_t>(pitch_ * box_.height));
    return lines_[2] != nullptr && lines_[0] != nullptr && lines_[1] != nullptr && chroma_lines_[0] != nullptr &&
           chroma_lines_[1] != nullptr && sums_ != nullptr && pixels_ != nullptr;
  }

  // Decode a row of MCUs to samples.
  bool transform(std::int32_t row) noexcept {
    std::int16_t* blocks[3] = {};
    bool dc_only[3] = {};
    for (int c = 0; c < components_; ++c) {
      dc_only[c] = sides_[c] == 1;
      const Range& needed = c == 0 ? luma_ : chroma_;
      if (row < needed.begin || row >= needed.end) continue;
      blocks[c] = blocks_[c];
    }
    if (!rows_.read(row, columns_.begin, columns_.size(), blocks, counts_, dc_only)) return false;
    for (int c = 0; c < components_; ++c) {
      if (blocks[c] == nullptr) continue;
      const JpegPlane& plane = frame_.planes[c];
      const std::int32_t side = sides_[c];
      const auto inverse_dct = is_fast_ ? kernels_.inverse_dct_fast : kernels_.inverse_dct[side == 8 ? 3 : side / 2];
      const std::uint16_t* const steps = is_fast_ ? fast_steps_[c] : plane.steps;
      for (std::int32_t v = 0; v < plane.vertical; ++v) {
        const std::int32_t y = side * (plane.vertical * row + v);
        std::uint8_t* const to = planes_[c].at(y, planes_[c].left);
        const std::int64_t count = std::int64_t{columns_.size()} * plane.horizontal;
        if (!inverse_dct(blocks[c] + v * counts_[c], count, steps, to, planes_[c].pitch)) return false;
        if (c > 0 && half_columns_) repeat_edges(planes_[c], y);
      }
    }
    return true;
  }

  // Repeat the image's first and last samples of a row of chroma blocks.
  void repeat_edges(const Plane& plane, std::int32_t y) const noexcept {
    const std::int32_t width = chroma_size().width;
    for (std::int32_t i = y; i < y + sides_[1]; ++i) {
      if (columns_.begin == 0) *plane.at(i, -1) = *plane.at(i, 0);
      if (sides_[1] * columns_.end >= width) *plane.at(i, width) = *plane.at(i, width - 1);
    }
  }

  // Make a row of pixels.
  void convert(std::int32_t y) noexcept {
    std::uint8_t* const to = pixels_ + std::int64_t{y - box_.top} * pitch_;
    const std::uint8_t* const luma = planes_[0].at(y, box_.left);
    if (channels_ == 1) {
      std::memcpy(to, luma, static_cast<std::size_t>(box_.width));
      return;
    }
    if (components_ == 1) {
      const std::uint8_t* const planes[3] = {luma, luma, luma};
      return fastpipe::kernels().interleave(planes, box_.width, to);
    }
    const std::uint8_t* chroma[2];
    for (int i = 0; i < 2; ++i) chroma[i] = upsampled(planes_[i + 1], y, chroma_lines_[i]);
    kernels_.to_rgb(luma, chroma[0], chroma[1], box_.width, lines_);
    fastpipe::kernels().interleave(lines_, box_.width, to);
  }

  // Return a row of chroma samples, one for each pixel of the box.
  const std::uint8_t* upsampled(const Plane& plane, std::int32_t y, std::uint8_t* line) noexcept {
    const std::int32_t here = half_rows_ ? y / 2 : y;
    const bool is_first = y % 2 == 0;  // of the two rows that a row of chroma makes
    const std::int32_t beside = is_first ? std::max(0, here - 1) : std::min(chroma_size().height - 1, here + 1);
    const std::int32_t left = half_columns_ ? box_.left / 2 : box_.left;
    const std::uint8_t* const near = plane.at(here, left);
    const std::uint8_t* const far = plane.at(half_rows_ ? beside : here, left);
    if (!half_columns_) return near;
    const std::int32_t count = (box_.right() - 1) / 2 + 1 - left;
    auto* const pairs = reinterpret_cast<std::uint16_t*>(line);
    if (!is_smooth_) {
      kernels_.repeat_columns(near, count, pairs);
    } else if (half_rows_) {
      kernels_.upsample_both(near, far, count, sums_, pairs);
    } else {
      kernels_.upsample_columns(near, count, pairs);
    }
    return line + box_.left % 2;
  }

  static std::int64_t rounded(std::int64_t value, std::int64_t to) noexcept { return (value + to - 1) / to * to; }

  const JpegFrame& frame_;
  CoefficientRows& rows_;
  const Box box_;
  const Size size_;  // of the image, at a part of its size
  const bool is_fast_;
  const int channels_, components_;  // of the pixels, and that are decoded
  std::uint16_t fast_steps_[3][64];
  std::int32_t sides_[3] = {};                     // of each component, samples along a side of a block
  bool half_rows_ = false, half_columns_ = false;  // chroma has half of the luma's
  bool is_smooth_ = true;                          // which is upsampled with those beside
  const PixelKernels& kernels_ = table_in_use();
  Range luma_, chroma_, mcus_;  // rows of MCUs of which luma, chroma, either is needed
  Range columns_;               // of MCUs
  Plane planes_[3];
  std::int16_t* blocks_[3] = {};  // coefficients of a row of MCUs
  std::int64_t counts_[3] = {};   // coefficients in a row of blocks
  std::uint8_t* lines_[3] = {};   // a row of each colour
  std::uint8_t* chroma_lines_[2] = {};
  std::uint16_t* sums_ = nullptr;
  std::uint8_t* pixels_ = nullptr;
  std::int64_t pitch_ = 0;  // of the pixels
};

}  // namespace

bool JpegFrame::complete() noexcept {
  if (size.height <= 0 || size.width <= 0 || size.height > kMostPixels || size.width > kMostPixels) return false;
  if (components != 1 && components != 3) return false;
  const std::int32_t horizontal = planes[0].horizontal, vertical = planes[0].vertical;
  if (horizontal < 1 || horizontal > 2 || vertical < 1 || vertical > horizontal) return false;
  if (components == 1 && (horizontal != 1 || vertical != 1)) return false;
  for (int c = 0; c < components; ++c) {
    JpegPlane& plane = planes[c];
    if (c > 0 && (plane.horizontal != 1 || plane.vertical != 1)) return false;
    const std::int32_t width = (size.width * plane.horizontal + horizontal - 1) / horizontal;
    const std::int32_t height = (size.height * plane.vertical + vertical - 1) / vertical;
    if (c > 0 && horizontal == 2 && width <= 2) return false;
    plane.columns = (width + 7) / 8;
    plane.rows = (height + 7) / 8;
    for (const std::uint16_t step : plane.steps) {
      if (step == 0 || step > 0x7FFF) return false;
    }
  }
  return true;
}

Status decode_pixels(const JpegFrame& frame, CoefficientRows& rows, int factor, Box box, Arena& arena, Pixels* pixels,
                     JpegPixels kind) noexcept {
  return Decoding(frame, rows, factor, box, kind).run(arena, pixels);
}

}  // namespace fastpipe
