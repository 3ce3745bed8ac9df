// One image on its way through a chain of augmentations.
#pragma once

#include <cstdint>

#include "arena.h"
#include "augment.h"

namespace fastpipe {

// A change of each pixel by itself.
struct PixelChange {
  enum class Kind : std::int32_t {
    multiply,    // by a[0], cut off at 0 and `bound`
    blend_mean,  // a[0] * v + a[1] * a[2], cut off
    saturate,    // a[0] * v + a[1] * luminance, cut off
    turn_hue,    // by a[0]
    grey,        // the luminance in all channels
    normalize,   // (v - numbers[2c]) / numbers[2c + 1]
    scale,       // v * a[0]
    add,         // v + a[0]
    to_bytes,    // v * 255.999 as a byte
    round,       // rint(v), cut off at 0 and 255
    posterize,   // min(max(floor(v * a[0]), 0), a[1]) * a[2]
    solarize,    // a[1] - v where v >= a[0]
    contrast,    // (v - numbers[2c]) / numbers[2c + 1], cut off
    linear,      // numbers: 12 of a matrix, three rows of four, and six bounds
  };
  Kind kind = Kind::multiply;
  bool of_bytes = false;  // whether the range is 0 to 255, of whole numbers
  float a[3] = {0, 0, 0};
  const float* numbers = nullptr;
};

// Planes of an image, and memory to work in.
//
// The image is read when its planes are first needed: a change of geometry that comes first reads the part that it
// needs.  Changes of pixels wait until something needs the pixels, and are then done together, in pieces that stay in
// the nearest cache; the last ones write to where the image goes.  Once `problem` is set nothing is changed any more.
class Canvas {
 public:
  // streams: have the image written past the caches, which it would not stay in.
  Canvas(const ImageView& image, const ImageView& out, bool streams, Arena& arena);

  std::int64_t channels, height, width;
  bool of_bytes;                 // whether the image is of bytes at this point of the chain
  bool keeps_fractions = false;  // whether its numbers are not rounded meanwhile
  Change problem = Change::made;

  std::int64_t pixels() const noexcept { return height * width; }
  bool rounds() const noexcept { return of_bytes && !keeps_fractions; }

  // Have pixels changed, later.
  void change(const PixelChange& change) noexcept;

  // Planes, (channels, height * width), to be changed in place; whole numbers of 0 to 255 while `rounds`.  Null where
  // there is no memory.
  float* planes() noexcept;
  float* plane(std::int64_t channel) noexcept { return planes() + channel * pixels(); }

  // A part of the image to read only, (channels, height, width): `plane` and `row` are how far it is from one to the
  // next.  It is read where it was given, if that is possible, and else no more of it than this.
  const float* part(std::int64_t top, std::int64_t left, std::int64_t height, std::int64_t width, std::int64_t* plane,
                    std::int64_t* row) noexcept;

  // Memory for planes of another size, which are not these.
  float* empty(std::int64_t height, std::int64_t width) noexcept;

  // Go on with other planes.
  void replace(float* planes, std::int64_t height, std::int64_t width) noexcept;

  // Mean of a plane.
  float mean_of(std::int64_t channel) noexcept;
  // Mean of the luminance of three channels, or of the one that there is.
  float mean_of_luminance() noexcept;
  // Mean of all numbers.
  float mean() noexcept;

  // Put the image where it goes.
  void end() noexcept;

  // Memory to work in, of so many numbers.
  template <typename T>
  T* scratch(std::int64_t count) noexcept {
    T* const found = arena_.array<T>(static_cast<std::size_t>(count));
    if (found == nullptr) problem = Change::no_memory;
    return found;
  }

 private:
  void flush(bool to_out) noexcept;
  bool prepare_pieces() noexcept;
  void load(const ImageView& view, std::int64_t begin, std::int64_t count, float* const* to) noexcept;
  void save(std::int64_t begin, std::int64_t count, float* const* from) noexcept;
  void change_piece(float* const* piece, std::int64_t count) noexcept;
  float* place(std::int64_t height, std::int64_t width, const float* taken) noexcept;

  static constexpr int kMostWaiting = 16;
  ImageView image_, out_;
  Arena& arena_;
  float* planes_ = nullptr;
  float* goal_ = nullptr;  // where the image goes, if that is planes of float32
  bool streams_ = false;
  float* buffers_[2] = {nullptr, nullptr};
  std::int64_t sizes_[2] = {0, 0};
  PixelChange waiting_[kMostWaiting];
  int waiting_count_ = 0;
  float* grey_ = nullptr;    // of a piece
  float** piece_ = nullptr;  // of each channel: where one is in memory of its own, and where it is worked on
  float** at_ = nullptr;
  bool sums_ = false;  // add up the luminance, or the one plane, of what is changed
  double sum_ = 0;
};

// Steps of spectrograms: planes are (frequency, time).
void mask(Canvas& canvas, const AugmentStep& step, const double* row) noexcept;
void shift(Canvas& canvas, const AugmentStep& step, const double* row) noexcept;

}  // namespace fastpipe
