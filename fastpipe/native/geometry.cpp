#include "geometry.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace fastpipe {
namespace {

constexpr std::int64_t kLargestSide = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kExactInDouble = std::int64_t{1} << 53;

// A Box in which no sum of sizes and paddings overflows.
struct WideBox {
  std::int64_t top, left, height, width;
  std::int64_t bottom() const { return top + height; }
  std::int64_t right() const { return left + width; }
};

Size current_size(const Region& region) { return {region.window.height, region.window.width}; }

Box whole_of(Size size) { return {0, 0, size.height, size.width}; }

bool is_valid(Size size) { return size.height > 0 && size.width > 0; }

bool lies_inside(const WideBox& box, Size size) {
  return box.top >= 0 && box.left >= 0 && box.bottom() <= size.height && box.right() <= size.width;
}

// ---- numbers, as Python computes them -------------------------------------------------------

// A uniform integer in 0 … count - 1, whatever the number is.
std::int64_t integer_of(double uniform, std::int64_t count) {
  const double scaled = uniform * static_cast<double>(count);
  if (!(scaled >= 0)) return 0;
  return scaled < static_cast<double>(count - 1) ? static_cast<std::int64_t>(scaled) : count - 1;
}

// Python's round(): halves to even.  False where the result is no size: Python raises, or nothing fits it.
bool round_to_size(double value, std::int64_t* rounded) {
  const double whole = std::nearbyint(value);
  if (!(whole >= 0 && whole <= static_cast<double>(kLargestSide))) return false;  // NaN, too
  *rounded = static_cast<std::int64_t>(whole);
  return true;
}

// int(factor * side / by), where Python multiplies integers and divides them with one rounding.
bool scaled_side(std::int64_t factor, std::int64_t side, std::int64_t by, std::int64_t* scaled) {
  const std::int64_t product = factor * side;  // of two that fit into 32 bits
  if (product > kExactInDouble) return false;
  *scaled = static_cast<std::int64_t>(static_cast<double>(product) / static_cast<double>(by));
  return true;
}

// Where a central crop begins along one side: torchvision pads the odd pixel after the image, and rounds
// halves to even.
std::int64_t central_start(std::int64_t have, std::int64_t want) {
  if (want > have) return -((want - have) / 2);
  const std::int64_t half = (have - want) / 2;
  return half + ((have - want) % 2 != 0 && half % 2 != 0 ? 1 : 0);
}

// ---- what each step asks for ----------------------------------------------------------------

// torchvision's RandomResizedCrop.get_params: ten tries, each with an area and an aspect ratio, then the
// position.
bool random_resized_crop_box(const Step& step, Size image, const double* u, WideBox* box) {
  const std::int64_t height = image.height, width = image.width;
  const double area = static_cast<double>(height * width);
  const double low = std::log(step.ratio[0]), high = std::log(step.ratio[1]);
  for (int attempt = 0; attempt < 10; ++attempt) {
    const double target = area * (step.scale[0] + u[2 * attempt] * (step.scale[1] - step.scale[0]));
    const double aspect = std::exp(low + u[2 * attempt + 1] * (high - low));
    const double w = std::nearbyint(std::sqrt(target * aspect));
    const double h = std::nearbyint(std::sqrt(target / aspect));
    if (!std::isfinite(w) || !std::isfinite(h)) return false;
    if (0 < w && w <= static_cast<double>(width) && 0 < h && h <= static_cast<double>(height)) {
      const auto wide = static_cast<std::int64_t>(w), tall = static_cast<std::int64_t>(h);
      *box = {integer_of(u[20], height - tall + 1), integer_of(u[21], width - wide + 1), tall, wide};
      return true;
    }
  }
  // All were too large: the largest central box that fits.
  const double in_ratio = static_cast<double>(width) / static_cast<double>(height);
  const double least = std::min(step.ratio[0], step.ratio[1]), most = std::max(step.ratio[0], step.ratio[1]);
  std::int64_t w = width, h = height;
  if (in_ratio < least) {
    if (!round_to_size(static_cast<double>(width) / least, &h)) return false;
  } else if (in_ratio > most) {
    if (!round_to_size(static_cast<double>(height) * most, &w)) return false;
  }
  if (w > width || h > height) return false;
  *box = {(height - h) / 2, (width - w) / 2, h, w};
  return true;
}

// The size that Resize gives an image.
bool resized_size(const Step& step, Size image, Size* size) {
  if (step.size.height > 0 && step.size.width > 0) {
    *size = step.size;
    return true;
  }
  const std::int64_t shorter = std::min(image.height, image.width);
  const std::int64_t longer = std::max(image.height, image.width);
  const std::int64_t edge = step.size.height, limit = step.max_size;
  if (edge < 0 || step.size.width != 0 || limit < 0 || (edge == 0 && limit == 0)) return false;
  std::int64_t new_shorter = edge, new_longer = limit;
  if (edge == 0) {
    if (!scaled_side(limit, shorter, longer, &new_shorter)) return false;
  } else {
    if (!scaled_side(edge, longer, shorter, &new_longer)) return false;
    if (limit > 0 && new_longer > limit) {
      if (!scaled_side(limit, edge, new_longer, &new_shorter)) return false;
      new_longer = limit;
    }
  }
  if (new_shorter <= 0 || new_longer > kLargestSide) return false;
  const auto a = static_cast<std::int32_t>(new_shorter), b = static_cast<std::int32_t>(new_longer);
  *size = image.width <= image.height ? Size{b, a} : Size{a, b};
  return true;
}

// The box that RandomCrop cuts, in the image's coordinates, and whether it pads the image before.
bool random_crop_box(const Step& step, Size image, const double* u, WideBox* box, bool* pads) {
  std::int64_t left = step.padding[0], top = step.padding[1], right = step.padding[2], bottom = step.padding[3];
  const std::int64_t target_height = step.size.height, target_width = step.size.width;
  if (step.pad_if_needed) {
    const std::int64_t more_x = std::max<std::int64_t>(target_width - (image.width + left + right), 0);
    const std::int64_t more_y = std::max<std::int64_t>(target_height - (image.height + top + bottom), 0);
    left += more_x;
    right += more_x;
    top += more_y;
    bottom += more_y;
  }
  const std::int64_t height = image.height + top + bottom, width = image.width + left + right;
  if (height < target_height || width < target_width) return false;  // torchvision raises an error
  *box = {integer_of(u[0], height - target_height + 1) - top, integer_of(u[1], width - target_width + 1) - left,
          target_height, target_width};
  *pads = step.always_pads || left != 0 || top != 0 || right != 0 || bottom != 0;
  return true;
}

// A box in whole pixels, rounded as PIL.Image.crop() does.
bool box_of(const Step& step, Size image, const double* numbers, WideBox* box) {
  std::int64_t edges[4];
  for (int i = 0; i < 4; ++i) {
    const double side = i % 2 == 0 ? image.width : image.height;
    const double edge = std::nearbyint(step.is_relative ? numbers[i] * side : numbers[i]);
    if (!(std::fabs(edge) <= static_cast<double>(kLargestSide))) return false;  // NaN, too
    edges[i] = static_cast<std::int64_t>(edge);
  }
  auto [left, top, right, bottom] = edges;
  if (step.outside == 1) {
    left = std::max<std::int64_t>(left, 0);
    top = std::max<std::int64_t>(top, 0);
    right = std::min<std::int64_t>(right, image.width);
    bottom = std::min<std::int64_t>(bottom, image.height);
  }
  if (right <= left || bottom <= top) return false;
  *box = {top, left, bottom - top, right - left};
  return step.outside != 0 || lies_inside(*box, image);
}

// A box made smaller, or larger, around its centre to have the proportions of a size, as Keras computes it.
WideBox proportioned(const Step& step, const WideBox& box) {
  const auto height = static_cast<float>(step.size.height), width = static_cast<float>(step.size.width);
  const std::int64_t by_width = box.width * step.size.height, by_height = box.height * step.size.width;
  auto tall = static_cast<std::int64_t>(static_cast<float>(by_width) / width);
  auto wide = static_cast<std::int64_t>(static_cast<float>(by_height) / height);
  if (step.pads) {
    tall = std::max(box.height, tall);
    wide = std::max(box.width, wide);
  } else {
    tall = std::max<std::int64_t>(std::min(box.height, tall), 1);
    wide = std::max<std::int64_t>(std::min(box.width, wide), 1);
  }
  // Python's division rounds down.
  const auto half = [](std::int64_t number) { return number >= 0 ? number / 2 : -((1 - number) / 2); };
  return {box.top + half(box.height - tall), box.left + half(box.width - wide), tall, wide};
}

bool begins_with_columns(PassOrder order, Size from, Size to) {
  const std::int64_t rows_less = std::int64_t{from.height} - to.height;
  switch (order) {
    case PassOrder::by_size:  // rows that go count once, columns that go count twice
      return rows_less > 2 * std::max<std::int64_t>(std::int64_t{from.width} - to.width, 0);
    case PassOrder::by_shape:
      return from.height > std::int64_t{100} * from.width && rows_less > 0;
    case PassOrder::rows:
      break;
  }
  return false;
}

// ---- folding --------------------------------------------------------------------------------

// A box of a mirrored image, in the coordinates of the image that is not mirrored.
WideBox mirrored(WideBox box, Size size, const bool flip[2]) {
  if (flip[0]) box.left = size.width - box.right();
  if (flip[1]) box.top = size.height - box.bottom();
  return box;
}

// Crop before the resize: the crop becomes the canvas.
bool crop_canvas(const Step& step, const WideBox& wanted, Region* region) {
  const WideBox box = mirrored(wanted, region->canvas, region->flip_before);
  const Box placed = region->placed;
  if (!lies_inside(box, region->canvas)) {
    const bool is_covered = placed == whole_of(region->canvas);
    const std::uint8_t* fill = step.fill;
    if (!step.has_fill || (!is_covered && std::memcmp(fill, region->fill, 3) != 0)) return false;
    if (region->grey != Grey::none && (fill[0] != fill[1] || fill[1] != fill[2])) return false;
    std::memcpy(region->fill, fill, 3);
  }
  const std::int64_t top = std::max<std::int64_t>(box.top, placed.top);
  const std::int64_t left = std::max<std::int64_t>(box.left, placed.left);
  const std::int64_t height = std::min<std::int64_t>(box.bottom(), placed.bottom()) - top;
  const std::int64_t width = std::min<std::int64_t>(box.right(), placed.right()) - left;
  if (height <= 0 || width <= 0) return false;  // nothing of the image is left
  const auto tall = static_cast<std::int32_t>(height), wide = static_cast<std::int32_t>(width);
  region->source = {static_cast<std::int32_t>(region->source.top + top - placed.top),
                    static_cast<std::int32_t>(region->source.left + left - placed.left), tall, wide};
  region->placed = {static_cast<std::int32_t>(top - box.top), static_cast<std::int32_t>(left - box.left), tall, wide};
  region->canvas = {static_cast<std::int32_t>(box.height), static_cast<std::int32_t>(box.width)};
  region->size = region->canvas;
  region->window = whole_of(region->canvas);
  return true;
}

// Crop after the resize: the output is a smaller part of the resampled canvas.
bool crop_window(const WideBox& wanted, Region* region) {
  const WideBox box = mirrored(wanted, current_size(*region), region->flip_after);
  if (!lies_inside(box, current_size(*region))) return false;
  region->window = {static_cast<std::int32_t>(region->window.top + box.top),
                    static_cast<std::int32_t>(region->window.left + box.left), static_cast<std::int32_t>(box.height),
                    static_cast<std::int32_t>(box.width)};
  return true;
}

bool crop(const Step& step, const WideBox& box, Region* region) {
  return region->filter < 0 ? crop_canvas(step, box, region) : crop_window(box, region);
}

bool resize(const Step& step, Size to, Region* region) {
  if (!is_valid(to)) return false;
  const Size from = current_size(*region);
  if (to == from) return true;  // every library returns the image as it is
  if (region->filter >= 0) return false;
  region->size = to;
  region->filter = step.filter;
  region->vertical_first = begins_with_columns(step.order, from, to);
  region->window = whole_of(to);
  return true;
}

bool apply(const Step& step, const double* u, Region* region) {
  const Size size = current_size(*region);
  WideBox box{};
  switch (step.kind) {
    case Step::Kind::random_resized_crop:
      return random_resized_crop_box(step, size, u, &box) && crop(step, box, region) && resize(step, step.size, region);
    case Step::Kind::resize: {
      Size to;
      return resized_size(step, size, &to) && resize(step, to, region);
    }
    case Step::Kind::center_crop:
      if (!is_valid(step.size)) return false;
      box = {central_start(size.height, step.size.height), central_start(size.width, step.size.width), step.size.height,
             step.size.width};
      return crop(step, box, region);
    case Step::Kind::random_crop: {
      bool pads = false;
      if (!is_valid(step.size) || !random_crop_box(step, size, u, &box, &pads)) return false;
      if (pads && (!step.may_pad || (step.fill_by_channel && region->grey_channels == 1))) return false;
      return crop(step, box, region);
    }
    case Step::Kind::flip:
      if (u[0] < step.probability) {
        bool* flips = region->filter < 0 ? region->flip_before : region->flip_after;
        bool& flip = flips[step.horizontal ? 0 : 1];
        flip = !flip;
      }
      return true;
    case Step::Kind::box:
    case Step::Kind::proportion:
      box = {0, 0, size.height, size.width};
      if (step.kind == Step::Kind::box && !box_of(step, size, u, &box)) return false;
      if (is_valid(step.size)) box = proportioned(step, box);
      return box.height <= kLargestSide && box.width <= kLargestSide && crop(step, box, region);
    case Step::Kind::grey:
      if (region->grey != Grey::none) return false;
      region->grey = region->filter < 0 ? Grey::before : Grey::after;
      region->grey_channels = step.channels;
      return true;
  }
  return false;
}

}  // namespace

std::int32_t numbers_of(Step::Kind kind) noexcept {
  switch (kind) {
    case Step::Kind::random_resized_crop:
      return 22;
    case Step::Kind::random_crop:
      return 2;
    case Step::Kind::flip:
      return 1;
    case Step::Kind::box:
      return 4;
    default:
      return 0;
  }
}

bool fold(const std::vector<Step>& steps, Size image, const double* parameters, Region* region) noexcept {
  if (!is_valid(image)) return false;
  *region = Region();
  region->source = region->placed = region->window = whole_of(image);
  region->canvas = region->size = image;
  for (const Step& step : steps) {
    const double* u = parameters == nullptr ? nullptr : parameters + step.draw;
    if (!apply(step, u, region)) return false;
  }
  return true;
}

int reduction(const Region& region, Size image) noexcept {
  // What decoding a pixel costs at 1 / factor of the size, beyond reading its bits, which is always done; in
  // units of the same at full size.  Measured on photographs of 12 megapixels: libjpeg-turbo has no vector
  // code for a half.
  static constexpr struct {
    int factor;
    double cost;
  } kCosts[] = {{8, 0.11}, {4, 0.41}, {2, 1.6}};
  constexpr double kResampling = 0.93;  // the same unit: resampling a pixel

  const Box source = region.source;
  const bool is_antialiased = region.filter >= 0 && (region.filter & 15) <= kLanczos;
  // Filled somewhere, or not antialiased: to leave out detail would show.
  if (!is_antialiased || !(region.placed == whole_of(region.canvas))) return 1;
  for (const auto& [factor, cost] : kCosts) {
    if (source.height < std::int64_t{factor} * region.size.height) continue;
    if (source.width < std::int64_t{factor} * region.size.width) continue;
    const double exact = source.height * (image.width + kResampling * source.width);
    const double rows = static_cast<double>(std::int64_t{source.top} + source.height);
    return cost * rows * image.width < exact ? factor : 1;
  }
  return 1;
}

void axes_of(const Region& region, Axis* x, Axis* y) noexcept {
  const int filter = region.filter < 0 ? static_cast<int>(kNearestFloor) : region.filter;
  const Box window = region.window;
  *x = make_axis(filter, region.canvas.width, region.size.width, window.left, window.width, region.flip_before[0],
                 region.flip_after[0]);
  *y = make_axis(filter, region.canvas.height, region.size.height, window.top, window.height, region.flip_before[1],
                 region.flip_after[1]);
}

}  // namespace fastpipe
