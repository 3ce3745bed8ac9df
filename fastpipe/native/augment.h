// Augmentations of images and spectrograms, each sample with numbers of its own: a plan of steps, and batches of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine.h"
#include "status.h"

namespace fastpipe {

// What an element of a batch is.
enum class Element : std::int32_t { uint8 = 0, float16 = 1, bfloat16 = 2, float32 = 3 };

std::int64_t bytes_of(Element element) noexcept;

// An image, (channels, height, width), in somebody's memory.  Strides are in bytes.
struct ImageView {
  const std::uint8_t* data = nullptr;
  Element element = Element::uint8;
  std::int64_t channels = 0, height = 0, width = 0;
  std::int64_t strides[3] = {0, 0, 0};

  // Return whether pixels follow each other, channel by channel.
  bool is_planar() const noexcept;
  // Return whether pixels follow each other, the channels of each together.
  bool is_interleaved() const noexcept;
};

// A change of each image.  Its numbers are those of the sample's row from `column` on, of which there are
// columns_of(kind); `options` and `numbers` are the same for all samples.
struct AugmentStep {
  enum class Kind : std::int32_t {
    skip,       // leave out the next options[0] steps where the number is 0
    flip,       // is_flipped: options[0] is 0 for left and right, 1 for top and bottom
    crop,       // top, left, height, width: to options[0] × options[1], by options[2]: 0 nearest, 1 linear, 2 cubic
    jitter,     // four factors, and the order of brightness, contrast, saturation and hue
    grey,       // is_grey: images of three channels
    blur,       // sigma: options are the sizes across and down; numbers[0] the least weight that counts, in 2**-30
    normalize,  // numbers are a mean and a deviation for each channel
    to_floats,  // bytes become numbers of 0 to 1
    to_bytes,   // and the reverse
    warp,       // six of a matrix: options are is_nearest, is_fused (geometry.py) and a size; numbers are the fill
    policy,     // a change, its magnitude, six of a matrix: options and numbers as of `warp`, without a size
    erase,      // top, left, height, width, seed: numbers fill the box, or noise where there are none
    place,      // six of a matrix and nine of a box (see fusing.py): to options[0] × options[1]; options[2] is_cubic
    colour,     // a map of 21 (see fusing.py); options[0]: gives 0 as before, 1 floats, 2 bytes; numbers bounds
    as_floats,  // what follows does not round, though the image is of bytes
    round,      // whole numbers, of bytes; ends `as_floats`
    mask,       // edges: options[0] masks of time, options[1] of frequency, options[2] whether they are filled with 0
    gain,       // a number: options[0] whether it is added; else multiplied by
    shift,      // frames: options[0] whether it rolls; numbers[0] what comes in else
    mix_up,     // kept: the part of the image that is kept, of the one before it the rest
    cut_mix,    // top, left, bottom, right, kept: the box that is taken from the one before it
  };
  static constexpr int kKinds = 21;

  Kind kind = Kind::skip;
  std::int32_t column = 0;
  std::vector<std::int32_t> options;
  std::vector<float> numbers;
};

// A chain of steps.  Immutable.
struct AugmentPlan {
  std::vector<AugmentStep> steps;
  std::int32_t columns = 0;  // of a row of numbers

  bool mixes() const noexcept {
    return !steps.empty() &&
           (steps[0].kind == AugmentStep::Kind::mix_up || steps[0].kind == AugmentStep::Kind::cut_mix);
  }
};

// What is wrong with a plan for images of a shape, or null; `shape` (channels, height, width) becomes that afterwards,
// and `element` what they are then.
const char* problem_of(const AugmentPlan& plan, std::int64_t shape[3], Element* element) noexcept;

// What came of an image.
enum class Change : std::int32_t {
  made = 0,
  no_memory = 1,
  outside = 2,  // its numbers are of pixels that it does not have
};

// Change one image.
//
// previous: the one before it, where the plan mixes.
// row: its numbers.
// streams: whether it is written past the caches, where it would not stay until it is used.
[[nodiscard]] Change augment(const AugmentPlan& plan, const ImageView& image, const ImageView* previous,
                             const double* row, const ImageView& out, bool streams, Arena& arena) noexcept;

// A batch.  All pointers are the caller's, and valid until the work is done.
class AugmentBatch : public Work {
 public:
  std::shared_ptr<const AugmentPlan> plan;
  std::int64_t count = 0;
  ImageView source, out;  // of the first image
  std::int64_t source_step = 0, out_step = 0;
  const std::int64_t* places = nullptr;  // (count): where images go in `out`, in bytes; null: one after the other
  const double* rows = nullptr;          // (count, plan->columns)
  // What went wrong with one of the images, and its number.
  std::atomic<Change> problem{Change::made};
  std::atomic<std::int64_t> problem_at{0};

  // Decide how it is done, once all of this is given: small images several as one item, as their beginning takes
  // longer.
  void prepare() noexcept;

  std::int64_t size() const noexcept override { return (count + part_ - 1) / part_; }
  void run(std::int64_t item, Scratch& scratch) override;
  void lost(std::int64_t item) noexcept override;

  // The shape and the element of an image that is given.
  const ImageView& shape() const noexcept { return source; }
  // Change one of the images, given in any memory of that shape and element.
  [[nodiscard]] Change change(std::int64_t number, const ImageView& image, Arena& arena) const noexcept;

 private:
  void note(std::int64_t number, Change change) noexcept;
  ImageView source_of(std::int64_t number) const noexcept;
  ImageView out_of(std::int64_t number) const noexcept;
  std::int64_t part_ = 1;
  bool streams_ = false;
};

}  // namespace fastpipe
