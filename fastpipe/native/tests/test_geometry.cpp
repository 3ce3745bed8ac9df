#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "../geometry.h"
#include "check.h"

namespace {

using fastpipe::Axis;
using fastpipe::Box;
using fastpipe::fold;
using fastpipe::Grey;
using fastpipe::kBilinear;
using fastpipe::kNearest;
using fastpipe::PassOrder;
using fastpipe::Region;
using fastpipe::Size;
using fastpipe::Step;

const double kAlmostOne = 1 - std::ldexp(1.0, -53);

Step step_of(Step::Kind kind, Size size = {}) {
  Step step;
  step.kind = kind;
  step.size = size;
  step.filter = kBilinear;
  return step;
}

Step resize_to(Size size) { return step_of(Step::Kind::resize, size); }
Step resize_edge(std::int32_t edge, std::int32_t max_size = 0) {
  Step step = step_of(Step::Kind::resize, {edge, 0});
  step.max_size = max_size;
  return step;
}
Step center_crop(Size size) { return step_of(Step::Kind::center_crop, size); }
Step random_crop(Size size, std::int32_t draw = 0) {
  Step step = step_of(Step::Kind::random_crop, size);
  step.draw = draw;
  return step;
}
Step padded_crop(Size size, std::int32_t padding, std::int32_t draw = 0) {
  Step step = random_crop(size, draw);
  for (std::int32_t& side : step.padding) side = padding;
  return step;
}
Step filled(Step step, int red, int green, int blue) {
  const int fill[] = {red, green, blue};
  for (int c = 0; c < 3; ++c) step.fill[c] = static_cast<std::uint8_t>(fill[c]);
  return step;
}
Step flip(bool horizontal, std::int32_t draw = 0, double probability = 1) {
  Step step = step_of(Step::Kind::flip);
  step.horizontal = horizontal;
  step.draw = draw;
  step.probability = probability;
  return step;
}
Step grey(std::int32_t channels) {
  Step step = step_of(Step::Kind::grey);
  step.channels = channels;
  return step;
}
Step random_resized_crop(Size size, double scale_low, double scale_high, double ratio_low, double ratio_high) {
  Step step = step_of(Step::Kind::random_resized_crop, size);
  step.scale[0] = scale_low;
  step.scale[1] = scale_high;
  step.ratio[0] = ratio_low;
  step.ratio[1] = ratio_high;
  return step;
}

// Whether steps can be folded for numbers that are all the same.
bool folds(const std::vector<Step>& steps, Size image, Region* region = nullptr, double number = 0.5) {
  const std::vector<double> parameters(64, number);
  Region unused;
  return fold(steps, image, parameters.data(), region != nullptr ? region : &unused);
}

Size size_after(const std::vector<Step>& steps, Size image) {
  Region region;
  return folds(steps, image, &region) ? Size{region.window.height, region.window.width} : Size{-1, -1};
}

Box source_of(const std::vector<Step>& steps, Size image, double number) {
  Region region;
  return folds(steps, image, &region, number) ? region.source : Box{-1, -1, -1, -1};
}

// ---- a model: images whose pixels are the places that they come from -----------------------

struct Place {
  std::int64_t y, x;
  int fill;  // -1: a pixel of the image; else the colour that it was filled with
  friend bool operator==(const Place& a, const Place& b) {
    return a.fill == b.fill && (a.fill >= 0 || (a.y == b.y && a.x == b.x));
  }
};

struct Image {
  Size size;
  std::vector<Place> pixels;
  explicit Image(Size size_)
      : size(size_), pixels(static_cast<std::size_t>(size_.height) * static_cast<std::size_t>(size_.width)) {
    for (std::int32_t y = 0; y < size.height; ++y) {
      for (std::int32_t x = 0; x < size.width; ++x) at(y, x) = {y, x, -1};
    }
  }
  Place& at(std::int64_t y, std::int64_t x) { return pixels[static_cast<std::size_t>(y * size.width + x)]; }
};

Image cropped(Image& image, std::int64_t top, std::int64_t left, Size size, int fill) {
  Image made(size);
  for (std::int32_t y = 0; y < size.height; ++y) {
    for (std::int32_t x = 0; x < size.width; ++x) {
      const std::int64_t from_y = top + y, from_x = left + x;
      const bool is_inside = from_y >= 0 && from_x >= 0 && from_y < image.size.height && from_x < image.size.width;
      made.at(y, x) = is_inside ? image.at(from_y, from_x) : Place{0, 0, fill};
    }
  }
  return made;
}

Image flipped(Image& image, bool horizontal, bool vertical) {
  Image made(image.size);
  for (std::int32_t y = 0; y < image.size.height; ++y) {
    for (std::int32_t x = 0; x < image.size.width; ++x) {
      made.at(y, x) = image.at(vertical ? image.size.height - 1 - y : y, horizontal ? image.size.width - 1 - x : x);
    }
  }
  return made;
}

// What a region says about the pixels before its resize, and about those after it.
Image canvas_of(const Region& region) {
  Image canvas(region.canvas);
  for (std::int32_t y = 0; y < region.canvas.height; ++y) {
    for (std::int32_t x = 0; x < region.canvas.width; ++x) {
      const Box& placed = region.placed;
      const bool is_there = y >= placed.top && x >= placed.left && y < placed.bottom() && x < placed.right();
      canvas.at(y, x) = is_there ? Place{region.source.top + y - placed.top, region.source.left + x - placed.left, -1}
                                 : Place{0, 0, region.fill[0]};
    }
  }
  return flipped(canvas, region.flip_before[0], region.flip_before[1]);
}

Image output_of(const Region& region) {
  Image resized(region.size);
  Image window =
      cropped(resized, region.window.top, region.window.left, {region.window.height, region.window.width}, 0);
  return flipped(window, region.flip_after[0], region.flip_after[1]);
}

std::uint32_t next_random(std::uint32_t* state, std::uint32_t count) {
  *state = *state * 1664525u + 1013904223u;
  return (*state >> 8) % count;
}

}  // namespace

TEST("geometry: crops, paddings and flips before a resize move pixels as they do one by one") {
  std::uint32_t random = 1;
  int folded = 0;
  for (int round = 0; round < 4'000; ++round) {
    const Size start{static_cast<std::int32_t>(1 + next_random(&random, 12)),
                     static_cast<std::int32_t>(1 + next_random(&random, 12))};
    std::vector<Step> steps;
    std::vector<double> numbers;
    Image model(start);
    bool is_possible = true;
    for (std::uint32_t left = next_random(&random, 6); left > 0 && is_possible; --left) {
      const auto draw = static_cast<std::int32_t>(numbers.size());
      if (next_random(&random, 2) == 0) {
        const bool horizontal = next_random(&random, 2) == 0;
        steps.push_back(flip(horizontal, draw, 0.5));
        numbers.push_back(next_random(&random, 2) == 0 ? 0.25 : 0.75);
        if (numbers.back() < 0.5) model = flipped(model, horizontal, !horizontal);
        continue;
      }
      const Size size{static_cast<std::int32_t>(1 + next_random(&random, 12)),
                      static_cast<std::int32_t>(1 + next_random(&random, 12))};
      const auto padding = static_cast<std::int32_t>(next_random(&random, 4));
      const int fill = static_cast<int>(next_random(&random, 2)) * 9;
      steps.push_back(filled(padded_crop(size, padding, draw), fill, fill, fill));
      const std::int64_t spare_y = model.size.height + 2 * padding - size.height;
      const std::int64_t spare_x = model.size.width + 2 * padding - size.width;
      is_possible = spare_y >= 0 && spare_x >= 0;
      if (!is_possible) break;
      const auto y = static_cast<std::int64_t>(next_random(&random, static_cast<std::uint32_t>(spare_y + 1)));
      const auto x = static_cast<std::int64_t>(next_random(&random, static_cast<std::uint32_t>(spare_x + 1)));
      numbers.push_back((static_cast<double>(y) + 0.5) / static_cast<double>(spare_y + 1));
      numbers.push_back((static_cast<double>(x) + 0.5) / static_cast<double>(spare_x + 1));
      model = cropped(model, y - padding, x - padding, size, fill);
    }
    Region region;
    numbers.push_back(0);
    numbers.push_back(0);
    if (!fold(steps, start, numbers.data(), &region)) continue;
    CHECK(is_possible);
    CHECK(region.filter == -1 && region.size == region.canvas);
    CHECK(canvas_of(region).pixels == model.pixels);
    CHECK((Size{region.window.height, region.window.width}) == model.size);
    ++folded;
  }
  CHECK(folded > 1'500);
}

TEST("geometry: crops and flips after a resize move pixels as they do one by one") {
  std::uint32_t random = 2;
  for (int round = 0; round < 2'000; ++round) {
    const Size to{static_cast<std::int32_t>(3 + next_random(&random, 9)),
                  static_cast<std::int32_t>(3 + next_random(&random, 9))};
    std::vector<Step> steps{resize_to(to)};
    Image model(to);
    for (int i = 0; i < 4; ++i) {
      if (next_random(&random, 2) == 0) {
        const bool horizontal = next_random(&random, 2) == 0;
        steps.push_back(flip(horizontal));
        model = flipped(model, horizontal, !horizontal);
      } else {
        const Size size{std::max(1, model.size.height - 2), std::max(1, model.size.width - 1)};
        steps.push_back(random_crop(size));  // of numbers that are 0.5
        model =
            cropped(model, (model.size.height - size.height + 1) / 2, (model.size.width - size.width + 1) / 2, size, 0);
      }
    }
    Region region;
    CHECK(folds(steps, {20, 20}, &region));
    CHECK(region.filter == kBilinear && region.canvas == (Size{20, 20}) && region.size == to);
    CHECK(!region.flip_before[0] && !region.flip_before[1]);
    CHECK(output_of(region).pixels == model.pixels);
  }
}

TEST("geometry: no steps give the whole image") {
  Region region;
  CHECK(fold({}, {7, 9}, nullptr, &region));
  CHECK(region.source == (Box{0, 0, 7, 9}) && region.placed == region.source && region.window == region.source);
  CHECK(region.canvas == (Size{7, 9}) && region.size == (Size{7, 9}) && region.filter == -1);
  CHECK(region.grey == Grey::none && !region.vertical_first);
  for (const Size size : {Size{0, 5}, Size{5, 0}, Size{-1, 5}}) CHECK(!fold({}, size, nullptr, &region));
}

TEST("geometry: the boxes of RandomResizedCrop") {
  const std::vector<Step> usual{random_resized_crop({224, 224}, 0.08, 1, 3. / 4, 4. / 3)};
  CHECK(source_of(usual, {375, 500}, 0) == (Box{0, 0, 141, 106}));
  CHECK(source_of(usual, {375, 500}, 0.25) == (Box{29, 69, 259, 224}));
  CHECK(source_of(usual, {375, 500}, 0.5) == (Box{29, 91, 318, 318}));
  CHECK(source_of(usual, {500, 375}, 0.25) == (Box{60, 38, 259, 224}));
  CHECK(source_of(usual, {65535, 65535}, 0.25) == (Box{6581, 7895, 39209, 33956}));
  CHECK(source_of(usual, {375, 500}, kAlmostOne) == (Box{0, 0, 375, 500}));
  for (const double number : {0., 0.25, kAlmostOne}) {
    CHECK(source_of(usual, {1, 1}, number) == (Box{0, 0, 1, 1}));
    CHECK(source_of(usual, {1, 5000}, number) == (Box{0, 2499, 1, 1}));
    CHECK(source_of(usual, {60000, 3}, number) == (Box{29998, 0, 4, 3}));
  }
  double numbers[22];
  for (int i = 0; i < 22; ++i) numbers[i] = i * 7 % 22 / 22.0;
  Region region;
  CHECK(fold(usual, {3024, 4032}, numbers, &region) && region.source == (Box{721, 2110, 1041, 937}));
  CHECK(fold(usual, {33, 17}, numbers, &region) && region.source == (Box{9, 8, 7, 6}));
  CHECK(region.size == (Size{224, 224}) && region.filter == kBilinear);
}

TEST("geometry: RandomResizedCrop takes the central box where ten tries were too large") {
  CHECK(source_of({random_resized_crop({8, 8}, 0.9, 1, 3, 4)}, {100, 200}, 0.5) == (Box{16, 0, 67, 200}));
  CHECK(source_of({random_resized_crop({8, 8}, 2, 3, 0.5, 1)}, {100, 200}, 0.5) == (Box{0, 50, 100, 100}));
  CHECK(source_of({random_resized_crop({8, 8}, 2, 3, 0.75, 4. / 3)}, {200, 100}, 0.5) == (Box{33, 0, 133, 100}));
  CHECK(source_of({random_resized_crop({8, 8}, 2, 3, 0.75, 4. / 3)}, {101, 102}, 0.5) == (Box{0, 0, 101, 102}));
  CHECK(source_of({random_resized_crop({8, 8}, 2, 3, 0.4, 0.4)}, {7, 1}, 0.5) == (Box{2, 0, 2, 1}));  // 2.5
  CHECK(!folds({random_resized_crop({8, 8}, 2, 3, 3, 4)}, {5000, 1}));                                // of no height
}

TEST("geometry: numbers that Python's mathematics refuses") {
  const double infinity = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  CHECK(!folds({random_resized_crop({8, 8}, -1, -0.5, 1, 1)}, {50, 50}));
  CHECK(!folds({random_resized_crop({8, 8}, 0.1, 1, 0, 1)}, {50, 50}));
  CHECK(!folds({random_resized_crop({8, 8}, 0.1, 1, -1, 1)}, {50, 50}));
  CHECK(!folds({random_resized_crop({8, 8}, 0.1, 1, 1, infinity)}, {50, 50}));
  CHECK(!folds({random_resized_crop({8, 8}, 0.1, 1, nan, 1)}, {50, 50}));
  CHECK(!folds({random_resized_crop({8, 8}, nan, 1, 1, 1)}, {50, 50}));
  CHECK(!folds({random_resized_crop({8, 8}, 0.1, infinity, 1, 1)}, {50, 50}));
  for (const double number : {nan, infinity, -infinity, 1e300, -3., 1.}) {  // no drawn number, but no fault either
    Region region;
    if (folds({random_crop({5, 5})}, {9, 9}, &region, number)) {
      CHECK(region.source.top >= 0 && region.source.left >= 0 && region.source.bottom() <= 9);
    }
    folds({random_resized_crop({8, 8}, 0.1, 1, 0.5, 2)}, {50, 50}, nullptr, number);
  }
}

TEST("geometry: the sizes of Resize") {
  CHECK(size_after({resize_edge(256)}, {375, 500}) == (Size{256, 341}));
  CHECK(size_after({resize_edge(256)}, {500, 375}) == (Size{341, 256}));
  CHECK(size_after({resize_edge(256)}, {256, 256}) == (Size{256, 256}));
  CHECK(size_after({resize_edge(5)}, {60000, 3}) == (Size{100000, 5}));
  CHECK(size_after({resize_edge(256, 300)}, {375, 500}) == (Size{225, 300}));
  CHECK(size_after({resize_edge(256, 400)}, {375, 500}) == (Size{256, 341}));
  CHECK(size_after({resize_edge(0, 300)}, {375, 500}) == (Size{225, 300}));
  CHECK(size_after({resize_to({10, 20})}, {375, 500}) == (Size{10, 20}));
  Region region;
  CHECK(folds({resize_edge(256)}, {256, 300}, &region) && region.filter == -1);  // as large as it is
  CHECK(!folds({resize_edge(0, 300)}, {1, 500}));                                // of no height
  CHECK(!folds({resize_edge(100'000)}, {1, 60'000}));                            // beyond 32 bits
  CHECK(!folds({resize_edge(2'147'483'647)}, {2'147'483'646, 2'147'483'647}));
  CHECK(!folds({resize_edge(0)}, {5, 5}) && !folds({resize_edge(-3)}, {5, 5}) && !folds({resize_edge(0, -3)}, {5, 5}));
  CHECK(!folds({resize_to({0, 5})}, {5, 5}) && !folds({resize_to({-1, 5})}, {5, 5}));
}

TEST("geometry: CenterCrop rounds halves to even, and pads the odd pixel after the image") {
  CHECK(source_of({center_crop({4, 4})}, {5, 7}, 0) == (Box{0, 2, 4, 4}));  // 0.5 and 1.5
  CHECK(source_of({center_crop({4, 4})}, {9, 11}, 0) == (Box{2, 4, 4, 4}));
  CHECK(source_of({center_crop({224, 224})}, {256, 341}, 0) == (Box{16, 58, 224, 224}));
  Region region;
  CHECK(folds({center_crop({8, 9})}, {5, 5}, &region));
  CHECK(region.placed == (Box{1, 2, 5, 5}) && region.canvas == (Size{8, 9}));
  Step without_fill = center_crop({8, 9});
  without_fill.has_fill = false;
  CHECK(!folds({without_fill}, {5, 5}) && folds({without_fill}, {9, 9}));
  CHECK(!folds({center_crop({0, 5})}, {9, 9}));
}

TEST("geometry: RandomCrop pads if needed, on both sides by what is missing") {
  Step step = random_crop({10, 20});
  CHECK(!folds({step}, {12, 15}));
  step.pad_if_needed = true;
  Region region;
  CHECK(folds({step}, {12, 15}, &region, 0));
  CHECK(region.placed == (Box{0, 5, 10, 15}) && region.source == (Box{0, 0, 10, 15}));
  CHECK(folds({step}, {12, 15}, &region, kAlmostOne));
  CHECK(region.placed == (Box{0, 0, 10, 15}) && region.source == (Box{2, 0, 10, 15}));
  step.may_pad = false;
  CHECK(!folds({step}, {12, 15}) && folds({step}, {12, 20}));
  Step huge = padded_crop({2'147'483'647, 2'147'483'647}, 2'147'483'647);
  CHECK(folds({huge}, {9, 9}, &region) && region.canvas == huge.size && region.source == (Box{0, 0, 9, 9}));
  CHECK(!folds({huge}, {9, 9}, nullptr, 0));  // nothing of the image is left
}

TEST("geometry: what is filled twice has one colour, and grey images have grey fills") {
  const Step red = filled(padded_crop({12, 12}, 3), 200, 0, 0), grey_fill = filled(padded_crop({14, 14}, 3), 7, 7, 7);
  CHECK(folds({red}, {9, 9}) && folds({red, red}, {9, 9}) && !folds({red, grey_fill}, {9, 9}));
  CHECK(!folds({grey(3), red}, {9, 9}) && folds({grey(3), grey_fill}, {9, 9}));
  Step by_channel = grey_fill;
  by_channel.fill_by_channel = true;
  CHECK(folds({grey(3), by_channel}, {9, 9}) && !folds({grey(1), by_channel}, {9, 9}));
  Step at_zero = random_crop({5, 5});
  at_zero.fill_by_channel = true;
  CHECK(folds({grey(1), at_zero}, {9, 9}));
  at_zero.always_pads = true;
  CHECK(!folds({grey(1), at_zero}, {9, 9}) && folds({grey(3), at_zero}, {9, 9}));
}

TEST("geometry: one resize, one grey, and no filling after a resize") {
  CHECK(!folds({resize_to({5, 5}), resize_to({6, 6})}, {9, 9}));
  CHECK(folds({resize_to({5, 5}), resize_to({5, 5})}, {9, 9}));
  CHECK(!folds({resize_to({5, 5}), center_crop({6, 5})}, {9, 9}));
  CHECK(!folds({grey(1), grey(3)}, {9, 9}));
  Region region;
  CHECK(folds({grey(1), resize_to({5, 5})}, {9, 9}, &region) && region.grey == Grey::before &&
        region.grey_channels == 1);
  CHECK(folds({resize_to({5, 5}), grey(3)}, {9, 9}, &region) && region.grey == Grey::after &&
        region.grey_channels == 3);
}

TEST("geometry: a box in pixels or in parts, rounded to even; what reaches outside is declined, clipped or filled") {
  Step step = step_of(Step::Kind::box);
  Region region;
  const double inside[] = {1.5, 2.5, 6.5, 7.4};  // left, top, right, bottom
  CHECK(fold({step}, {10, 8}, inside, &region) && region.source == (Box{2, 2, 5, 4}));
  const double parts[] = {0.25, 0.5, 1, 1};
  step.is_relative = true;
  CHECK(fold({step}, {10, 8}, parts, &region) && region.source == (Box{5, 2, 5, 6}));
  step.is_relative = false;
  const double outside[] = {-3, -1, 4, 20};
  CHECK(!fold({step}, {10, 8}, outside, &region));
  step.outside = 1;
  CHECK(fold({step}, {10, 8}, outside, &region) && region.source == (Box{0, 0, 10, 4}));
  step.outside = 2;
  CHECK(fold({step}, {10, 8}, outside, &region) && region.canvas == (Size{21, 7}));
  CHECK(region.placed == (Box{1, 3, 10, 4}) && region.source == (Box{0, 0, 10, 4}));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double bad : {nan, 1e300, -1e300}) {
    const double numbers[] = {0, 0, bad, 4};
    CHECK(!fold({step}, {10, 8}, numbers, &region));
  }
  const double empty[] = {3, 3, 3, 9}, apart[] = {8, 0, 12, 5};
  CHECK(!fold({step}, {10, 8}, empty, &region) && !fold({step}, {10, 8}, apart, &region));
}

TEST("geometry: a part, or a canvas, with the proportions of a size") {
  Step step = step_of(Step::Kind::proportion, {32, 64});
  Region region;
  CHECK(fold({step}, {100, 101}, nullptr, &region) && region.source == (Box{25, 0, 50, 101}));
  step.pads = true;
  CHECK(fold({step}, {100, 101}, nullptr, &region) && region.canvas == (Size{100, 200}));
  CHECK(region.placed == (Box{0, 50, 100, 101}));  // Python's division rounds down
  step.size = {1, 2000};
  step.pads = false;
  CHECK(fold({step}, {9, 9}, nullptr, &region) && region.source == (Box{4, 0, 1, 9}));
}

TEST("geometry: a flip is drawn, and twice is none") {
  Region region;
  for (const double number : {0., 0.49, 0.5, kAlmostOne}) {
    CHECK(folds({flip(true, 0, 0.5)}, {9, 9}, &region, number));
    CHECK(region.flip_before[0] == (number < 0.5) && !region.flip_before[1]);
  }
  CHECK(folds({flip(false), resize_to({5, 5}), flip(false), flip(true), flip(true)}, {9, 9}, &region));
  CHECK(!region.flip_before[0] && region.flip_before[1] && !region.flip_after[0] && region.flip_after[1]);
  CHECK(folds({flip(true, 0, 0)}, {9, 9}, &region, 0) && !region.flip_before[0]);
}

TEST("geometry: which pass comes first") {
  const auto begins_with_columns = [](PassOrder order, Size from, Size to) {
    Step step = resize_to(to);
    step.order = order;
    Region region;
    return folds({step}, from, &region) && region.vertical_first;
  };
  CHECK(begins_with_columns(PassOrder::by_size, {192, 24}, {36, 30}));
  CHECK(begins_with_columns(PassOrder::by_size, {101, 50}, {60, 30}));
  CHECK(!begins_with_columns(PassOrder::by_size, {100, 50}, {60, 30}));
  CHECK(!begins_with_columns(PassOrder::by_size, {24, 192}, {30, 36}));
  CHECK(begins_with_columns(PassOrder::by_shape, {404, 4}, {5, 3}));
  CHECK(!begins_with_columns(PassOrder::by_shape, {400, 4}, {5, 3}));
  CHECK(!begins_with_columns(PassOrder::by_shape, {404, 4}, {404, 3}));
  CHECK(!begins_with_columns(PassOrder::rows, {404, 4}, {5, 3}));
}

TEST("geometry: when to decode at a part of the size") {
  const Size photo{3024, 4032};
  const auto factor_of = [&](Step crop, Step to) {
    Region region;
    return folds({crop, to}, photo, &region, 0) ? fastpipe::reduction(region, photo) : -1;
  };
  const Step to = resize_to({224, 224});
  const auto corner = [](std::int32_t edge) { return random_crop({edge, edge}); };
  CHECK(factor_of(corner(300), to) == 1);
  CHECK(factor_of(corner(1000), to) == 4);
  CHECK(factor_of(corner(2000), to) == 8);
  CHECK(factor_of(corner(500), to) == 1);  // halves are dear
  Step nearest = to;
  nearest.filter = kNearest;
  CHECK(factor_of(corner(2000), nearest) == 1);
  CHECK(factor_of(padded_crop({3025, 4032}, 1), to) == 1);  // filled
  CHECK(factor_of(corner(2000), flip(true)) == 1);          // not resampled
  Region region;
  CHECK(folds({resize_to({2'147'483'647, 1})}, {65'535, 65'535}, &region) &&
        fastpipe::reduction(region, {65'535, 65'535}) == 1);
}

TEST("geometry: the axes of a region") {
  Region region;
  Axis x, y;
  CHECK(folds({center_crop({30, 40}), flip(true), resize_to({20, 25}), center_crop({10, 12}), flip(false)}, {90, 80},
              &region));
  fastpipe::axes_of(region, &x, &y);
  CHECK(x.in_size == 40 && x.out_size == 25 && x.first == 6 && x.length == 12 && x.turned && !x.mirrored);
  CHECK(y.in_size == 30 && y.out_size == 20 && y.first == 5 && y.length == 10 && !y.turned && y.mirrored);
  CHECK(x.start8 == 0 && x.extent8 == 320 && y.start8 == 0 && y.extent8 == 240);
  CHECK(folds({center_crop({30, 40})}, {90, 80}, &region));
  fastpipe::axes_of(region, &x, &y);
  CHECK(x.in_size == 40 && x.out_size == 40 && x.length == 40 && y.in_size == 30 && y.out_size == 30 && y.length == 30);
}
