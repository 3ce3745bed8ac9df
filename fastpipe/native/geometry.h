// A chain of crops, one resize, flips and more crops, folded into one region of an image.
#pragma once

#include <cstdint>
#include <vector>

#include "resample.h"
#include "span.h"

namespace fastpipe {

// Which pass of a resize comes first, by the rules of the installed Pillow.
enum class PassOrder : std::int32_t {
  rows = 0,      // always the rows
  by_size = 1,   // columns where that leaves less to do (Pillow 13)
  by_shape = 2,  // columns of images that are more than a hundred times as tall as wide
};

// One step of a transform, as Python describes it.
struct Step {
  enum class Kind : std::int32_t {
    random_resized_crop = 0,
    resize = 1,
    center_crop = 2,
    random_crop = 3,
    flip = 4,
    grey = 5,
    box = 6,  // left, top, right, bottom: numbers of the sample; with the proportions of `size`, if that is given
    proportion = 7,  // the same of the whole image
  };
  Kind kind = Kind::resize;
  std::int32_t draw = 0;  // the first of its numbers in the sample's row of parameters
  Size size;              // of the crop or the output; of a resize of the shorter edge {edge, 0}
  int filter = 0;         // a Filter, with kNarrow
  PassOrder order = PassOrder::rows;
  // random_resized_crop
  double scale[2] = {1, 1}, ratio[2] = {1, 1};
  // resize: of the longer edge, 0 for none.  {0, 0} with max_size alone: the longer edge becomes max_size.
  std::int32_t max_size = 0;
  // random_crop
  std::int32_t padding[4] = {0, 0, 0, 0};  // left, top, right, bottom
  bool pad_if_needed = false;
  bool may_pad = true;           // false: where it pads, torchvision has to be asked
  bool always_pads = false;      // its fill matters also where the padding is 0
  bool fill_by_channel = false;  // torchvision refuses that on an image of one channel
  bool has_fill = true;          // false: a fill would have to be converted as well
  std::uint8_t fill[3] = {0, 0, 0};
  // flip
  double probability = 0;
  bool horizontal = true;
  // grey
  std::int32_t channels = 1;
  // box: in parts of the image, not pixels; what becomes of one that reaches outside: 0 it is declined, 1 it is
  // clipped, 2 filled
  bool is_relative = false;
  std::int32_t outside = 0;
  bool pads = false;  // it is made larger to have these proportions, not smaller
};

// How many numbers of its row a step reads, from `draw` on.
std::int32_t numbers_of(Step::Kind kind) noexcept;

// What to decode, and how to get from there to the output.
struct Region {
  Box source;   // the part of the image that is used; it lies inside the image
  Box placed;   // where it lies on the canvas, which is what is resampled
  Size canvas;  // where `source` does not cover it, it is filled
  std::uint8_t fill[3] = {0, 0, 0};
  Size size;        // to which the canvas is resampled
  int filter = -1;  // -1: nothing is resampled
  bool vertical_first = false;
  Box window;  // the part of the resampled canvas that is the output
  bool flip_before[2] = {false, false}, flip_after[2] = {false, false};  // horizontal, vertical
  Grey grey = Grey::none;
  std::int32_t grey_channels = 0;
};

// Fold steps for an image of a size; false where one pass cannot give the same pixels, or torchvision has to
// be asked, or raises an error, or a size is beyond 32 bits.
//
// parameters: the sample's uniform numbers in [0, 1); from `draw` on, a random_resized_crop uses 22 of them
// (an area and an aspect ratio for each of ten tries, top, left), a random_crop 2 (top, left), a flip 1, a box 4 of any
// value; may be null if no step uses any.
//
// region: what the steps come to; meaningless where false is returned.
[[nodiscard]] bool fold(const std::vector<Step>& steps, Size image, const double* parameters, Region* region) noexcept;

// By what to divide the size of an image while it is decoded: 8, 4 or 2, or 1 for not at all.
int reduction(const Region& region, Size image) noexcept;

// Columns and rows along which a region's canvas is resampled.
void axes_of(const Region& region, Axis* x, Axis* y) noexcept;

}  // namespace fastpipe
