// Augmentation of images: steps by values that were computed by hand or one pixel at a time; plans at each level, equal
// bit for bit, with no byte written beside the images; plans that are refused; many threads at one batch.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "../augment.h"
#include "../engine.h"
#include "../simd.h"
#include "check.h"
#include "make_augment.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::tests;
using Kind = AugmentStep::Kind;
using Numbers = std::vector<float>;
using Row = std::vector<double>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kInfinite = std::numeric_limits<double>::infinity();

// A plan of one step.
AugmentPlan plan_of(Kind kind, std::vector<std::int32_t> options = {}, Numbers numbers = {},
                    std::int32_t columns = 32) {
  AugmentPlan plan;
  plan.steps = {{kind, 0, std::move(options), std::move(numbers)}};
  plan.columns = columns;
  return plan;
}

// A plan of two.
AugmentPlan both(const AugmentPlan& first, const AugmentPlan& second, std::int32_t column) {
  AugmentPlan plan = first;
  plan.steps.push_back(second.steps[0]);
  plan.steps[1].column = column;
  return plan;
}

struct Planes {
  std::int64_t channels, height, width;
  Numbers values;
};

// What a plan makes of an image, whose elements are numbers of float32 here; bytes are rounded as they are saved.
Planes made(const AugmentPlan& plan, const Planes& image, Row row, Element element = Element::float32,
            Change wanted = Change::made, const Planes* previous = nullptr) {
  std::int64_t shape[3] = {image.channels, image.height, image.width};
  Element after = element;
  CHECK(problem_of(plan, shape, &after) == nullptr);
  row.resize(static_cast<std::size_t>(plan.columns));
  Memory from(image.channels, image.height, image.width, element, Layout::planar);
  Memory to(shape[0], shape[1], shape[2], after, Layout::planar);
  Memory other(image.channels, image.height, image.width, element, Layout::planar);
  from.fill(image.values);
  other.fill(previous != nullptr ? previous->values : image.values);
  Arena arena;
  CHECK(augment(plan, from.view(), &other.view(), row.data(), to.view(), false, arena) == wanted);
  return {shape[0], shape[1], shape[2], wanted == Change::made ? to.values() : Numbers{}};
}

Planes ramp(std::int64_t channels, std::int64_t height, std::int64_t width, float step = 1.0f) {
  Planes made{channels, height, width, {}};
  for (std::int64_t i = 0; i < channels * height * width; ++i) made.values.push_back(static_cast<float>(i) * step);
  return made;
}

bool is_near(const Numbers& one, const Numbers& other, float apart) {
  if (one.size() != other.size()) return false;
  for (std::size_t i = 0; i < one.size(); ++i) {
    if (!(std::fabs(one[i] - other[i]) <= apart)) return false;
  }
  return true;
}

// ---- steps, one by one -------------------------------------------------------------------------

TEST("augment: flips") {
  const Planes image = ramp(1, 2, 3);
  CHECK(made(plan_of(Kind::flip, {0}), image, {1}).values == Numbers({2, 1, 0, 5, 4, 3}));
  CHECK(made(plan_of(Kind::flip, {1}), image, {1}).values == Numbers({3, 4, 5, 0, 1, 2}));
  CHECK(made(plan_of(Kind::flip, {1}), image, {0}).values == image.values);
  for (std::int64_t width = 1; width < 70; ++width) {
    const Planes row = ramp(1, 1, width);
    Numbers wanted(row.values.rbegin(), row.values.rend());
    CHECK(made(plan_of(Kind::flip, {0}), row, {1}).values == wanted);
  }
}

TEST("augment: a step that is skipped, with those in it") {
  AugmentPlan plan = both(plan_of(Kind::skip, {2}), plan_of(Kind::flip, {0}), 1);
  plan.steps.push_back({Kind::gain, 2, {0}, {}});
  plan.steps.push_back({Kind::gain, 3, {1}, {}});
  CHECK(made(plan, ramp(1, 1, 3), {0, 1, 10, 5}).values == Numbers({5, 6, 7}));
  CHECK(made(plan, ramp(1, 1, 3), {1, 1, 10, 5}).values == Numbers({25, 15, 5}));
}

TEST("augment: crops of whole pixels, and by the nearest one") {
  const Planes image = ramp(2, 4, 5);
  const Numbers wanted = {6, 7, 8, 11, 12, 13, 26, 27, 28, 31, 32, 33};
  for (std::int32_t interpolation : {0, 1, 2}) {
    CHECK(is_near(made(plan_of(Kind::crop, {2, 3, interpolation}), image, {1, 1, 2, 3}).values, wanted, 1e-4f));
    CHECK(made(plan_of(Kind::crop, {2, 3, interpolation}), image, {1, 1, 2, 3}, Element::uint8).values == wanted);
  }
  CHECK(made(plan_of(Kind::crop, {1, 4, 0}), ramp(1, 1, 2), {0, 0, 1, 2}).values == Numbers({0, 0, 1, 1}));
  CHECK(made(plan_of(Kind::crop, {1, 2, 0}), ramp(1, 1, 4), {0, 0, 1, 4}).values == Numbers({0, 2}));
  // Half as large: a triangle over four pixels of weights 1, 3, 3, 1, cut off at the border.
  const Planes line{1, 1, 4, {0, 8, 16, 24}};
  CHECK(is_near(made(plan_of(Kind::crop, {1, 2, 1}), line, {0, 0, 1, 4}).values, {40.0f / 7, 128.0f / 7}, 1e-5f));
  CHECK(made(plan_of(Kind::crop, {1, 2, 1}), line, {0, 0, 1, 4}, Element::uint8).values == Numbers({6, 18}));
}

TEST("augment: a flip behind a crop is one of its result") {
  for (std::int32_t interpolation : {0, 1, 2}) {
    for (std::int32_t axis : {0, 1}) {
      const AugmentPlan crop = plan_of(Kind::crop, {7, 19, interpolation});
      const Planes image = ramp(3, 12, 31, 0.01f);
      Row row(32);
      const double box[] = {2, 3, 9, 26};
      std::copy(box, box + 4, row.begin());
      row[4] = 1;
      const Planes found = made(both(crop, plan_of(Kind::flip, {axis}), 4), image, row);
      CHECK(found.values == made(plan_of(Kind::flip, {axis}), made(crop, image, row), {1}).values);
    }
  }
}

TEST("augment: colours") {
  const Planes pixel{3, 1, 1, {0.2f, 0.4f, 0.8f}}, bytes{3, 1, 1, {50, 100, 200}};
  const AugmentPlan jitter = plan_of(Kind::jitter);
  const auto only = [](double kind, double factor) {
    Row row = {1, 1, 1, 0, kind, kind, kind, kind};
    for (int place = 5; place < 8; ++place) row[static_cast<std::size_t>(place)] = -1;  // none
    row[static_cast<std::size_t>(kind)] = factor;
    return row;
  };
  CHECK(is_near(made(jitter, pixel, only(0, 1.5)).values, {0.3f, 0.6f, 1.0f}, 1e-6f));
  CHECK(made(jitter, bytes, only(0, 1.5), Element::uint8).values == Numbers({75, 150, 255}));
  const float grey = 0.2f * 0.2989f + 0.4f * 0.587f + 0.8f * 0.114f;
  CHECK(is_near(made(jitter, pixel, only(1, 0)).values, {grey, grey, grey}, 1e-6f));
  CHECK(is_near(made(jitter, pixel, only(2, 0.5)).values, {(0.2f + grey) / 2, (0.4f + grey) / 2, (0.8f + grey) / 2},
                1e-6f));
  CHECK(is_near(made(jitter, pixel, only(3, 1.0 / 3)).values, {0.8f, 0.2f, 0.4f}, 1e-6f));
  CHECK(made(plan_of(Kind::grey), bytes, {1}, Element::uint8).values == Numbers({96, 96, 96}));
  CHECK(made(plan_of(Kind::grey), bytes, {0}, Element::uint8).values == bytes.values);
  CHECK(is_near(made(plan_of(Kind::normalize, {}, {0.2f, 0.3f, 0.4f, 2, 0.5f, 0.25f}), pixel, {}).values,
                {0, 0.2f, 1.6f}, 1e-6f));
}

TEST("augment: conversions are torch's, also of what is no byte") {
  const Planes image{1, 1, 8, {0, 1, 0.5f, -0.1f, 1.1f, kNan, static_cast<float>(kInfinite), -1}};
  // -25.6 and 281.6 of 255.999ths are cut off to whole numbers, of which a byte has the last eight bits.
  const Numbers wanted = {0, 255, 127, 231, 25, 0, 0, 1};
  CHECK(made(plan_of(Kind::to_bytes), image, {}).values == wanted);
  const AugmentPlan flipped = both(plan_of(Kind::to_bytes), plan_of(Kind::flip, {0}), 0);
  CHECK(made(flipped, image, {1}).values == Numbers(wanted.rbegin(), wanted.rend()));
  CHECK(is_near(made(plan_of(Kind::to_floats), {1, 1, 2, {0, 255}}, {}, Element::uint8).values, {0, 1}, 1e-6f));
  for (Element element : {Element::float16, Element::bfloat16}) {
    const Planes halves{1, 1, 6, {0, -1.5f, 65280, 0x1p-14f, 1.0f + 0x1p-7f, static_cast<float>(kInfinite)}};
    CHECK(made(AugmentPlan{}, halves, {}, element).values == halves.values);
  }
  CHECK(made(plan_of(Kind::gain, {1}), {1, 1, 2, {1, 0}}, {0x1p-25}, Element::float16).values == Numbers({1, 0}));
  CHECK(std::isinf(made(plan_of(Kind::gain, {0}), {1, 1, 1, {65504}}, {1.001}, Element::float16).values[0]));
}

TEST("augment: blur keeps what is even, and is symmetric") {
  const Planes even{1, 5, 6, Numbers(30, 7)};
  CHECK(is_near(made(plan_of(Kind::blur, {5, 3}, {1}), even, {1.3}).values, even.values, 1e-5f));
  Planes point{1, 5, 5, Numbers(25, 0)};
  point.values[12] = 1;
  const Numbers found = made(plan_of(Kind::blur, {3, 3}, {1}), point, {1}).values;
  const double weight = std::exp(-0.5), total = 1 + 2 * weight;
  for (int y = 0; y < 5; ++y) {
    for (int x = 0; x < 5; ++x) {
      const auto at = [&](int place) { return std::abs(place - 2) > 1 ? 0.0 : (place == 2 ? 1.0 : weight) / total; };
      CHECK(std::fabs(found[static_cast<std::size_t>(5 * y + x)] - at(y) * at(x)) < 1e-6);
    }
  }
  // Mirrored at the border: what is one pixel outside is what is one pixel inside.
  const Numbers line = made(plan_of(Kind::blur, {3, 1}, {1}), {1, 1, 3, {0, 1, 0}}, {1}).values;
  CHECK(std::fabs(line[0] - 2 * weight / total) < 1e-6);
}

TEST("augment: affine maps take the nearest pixel, or weigh four") {
  const Planes image = ramp(1, 3, 3);
  // One pixel to the right: places come from one to the left.
  const Row shift = {1, 0, -1, 0, 1, 0};
  CHECK(made(plan_of(Kind::warp, {1, 0, 3, 3}, {9}), image, shift).values == Numbers({9, 0, 1, 9, 3, 4, 9, 6, 7}));
  CHECK(is_near(made(plan_of(Kind::warp, {0, 0, 3, 3}, {9}), image, shift).values, {9, 0, 1, 9, 3, 4, 9, 6, 7}, 1e-5f));
  const Row half = {1, 0, -0.5, 0, 1, 0};
  CHECK(is_near(made(plan_of(Kind::warp, {0, 0, 3, 3}), image, half).values,
                {0, 0.5f, 1.5f, 1.5f, 3.5f, 4.5f, 3, 6.5f, 7.5f}, 1e-5f));
  for (double no_place : {double{kNan}, kInfinite, -kInfinite, 1e30, -1e300}) {
    for (std::int32_t is_nearest : {0, 1}) {
      CHECK(made(plan_of(Kind::warp, {is_nearest, 1, 3, 3}, {9}), image, {1, 0, no_place, 0, 1, no_place}).values ==
            Numbers(9, 9));
    }
  }
}

TEST("augment: the last place before the border is inside, where next to nothing is left of the last pixel") {
  // One pixel further on it would be rounded up to what is behind the border, if there are a power of two of them.
  for (std::int64_t size : {2, 4, 8, 32, 256}) {
    const auto side = static_cast<std::int32_t>(size);
    const Planes image{1, 1, size, Numbers(static_cast<std::size_t>(size), 1)};
    const double step = 0.7, half = 0.5 * static_cast<double>(size), last = std::nextafter(double(size), 0.0);
    double shift = last - step * (half - 0.5) + 0.5 - half;
    bool is_reached = false;
    for (int ulp = -40; ulp < 40; ++ulp) shift = ulp < 0 ? std::nextafter(shift, -1e9) : shift;
    for (int ulp = 0; ulp < 80; ++ulp, shift = std::nextafter(shift, 1e9)) {
      // As it is computed from the left.
      const double begin = (0.5 - half) * step + shift + half - 0.5;
      is_reached = is_reached || begin + static_cast<double>(size - 1) * step == last;
      Row row = {step, 0, shift, 0, 1, 0};
      row.resize(15);
      const Numbers found = made(plan_of(Kind::place, {1, side, 0}, {0}), image, row).values;
      CHECK(found.back() >= 0 && found.back() < 1e-3f);
    }
    CHECK(is_reached);
  }
  for (std::int64_t size : {1, 2, 3, 4, 7, 8, 31, 32, 63, 64, 255, 256}) {
    const auto side = static_cast<std::int32_t>(size);
    const Planes image{1, 1, size, Numbers(static_cast<std::size_t>(size), 1)};
    const double ulp = double(std::nextafter(static_cast<float>(size), 1e9f)) - double(size);
    for (int quarter = 0; quarter < 64; ++quarter) {
      const Row row = {1, 0, 1 - 0.25 * quarter * ulp, 0, 1, 0};
      const Numbers found = made(plan_of(Kind::warp, {0, 0, 1, side}), image, row).values;
      CHECK(found.back() >= 0 && found.back() < 1e-3f);
    }
  }
}

TEST("augment: fills of bytes are bytes") {
  const Planes image{1, 2, 2, {10, 20, 30, 40}};
  const Row away = {1, 0, 50, 0, 1, 0};
  const struct {
    float fill, wanted;
  } cases[] = {{300, 44}, {-1, 255}, {7.5f, 8}, {kNan, 0}, {1e30f, 0}, {-1e30f, 0}};
  for (const auto& one : cases) {
    for (std::int32_t is_nearest : {0, 1}) {
      // Resized next, which computes with whole numbers of bytes.
      AugmentPlan plan =
          both(plan_of(Kind::warp, {is_nearest, 0, 2, 2}, {one.fill}), plan_of(Kind::crop, {2, 2, 1}), 6);
      Row row = away;
      row.insert(row.end(), {0, 0, 2, 2});
      CHECK(made(plan, image, row, Element::uint8).values == Numbers(4, one.wanted));
    }
    AugmentPlan plan = both(plan_of(Kind::erase, {}, {one.fill}), plan_of(Kind::crop, {2, 2, 1}), 5);
    CHECK(made(plan, image, {0, 0, 2, 2, 0, 0, 0, 2, 2}, Element::uint8).values ==
          Numbers(4, one.fill == 7.5f ? 7 : one.wanted));
  }
}

TEST("augment: erasing, and noise that depends on the seed and the place alone") {
  const Planes image = ramp(1, 3, 3);
  CHECK(made(plan_of(Kind::erase, {}, {-5}), image, {1, 1, 2, 2, 0}).values ==
        Numbers({0, 1, 2, 3, -5, -5, 6, -5, -5}));
  const AugmentPlan noise = plan_of(Kind::erase);
  const Numbers whole = made(noise, image, {0, 0, 3, 3, 77}).values;
  const Numbers corner = made(noise, image, {2, 2, 1, 1, 77}).values;
  CHECK(whole[8] == corner[8] && whole[0] != made(noise, image, {0, 0, 3, 3, 78}).values[0]);
  CHECK(std::all_of(whole.begin(), whole.end(), [](float v) { return std::fabs(v) < 6; }));
}

TEST("augment: a policy's own changes") {
  const auto policy = [](double change, double magnitude, const Planes& image, Element element) {
    return made(plan_of(Kind::policy, {1, 0}), image, {change, magnitude, 1, 0, 0, 0, 1, 0}, element).values;
  };
  const Planes image{1, 2, 3, {0, 31, 32, 128, 200, 255}};
  CHECK(policy(0, 9, image, Element::uint8) == image.values);
  CHECK(policy(10, 3, image, Element::uint8) == Numbers({0, 0, 32, 128, 192, 224}));
  CHECK(policy(11, 0.5, image, Element::uint8) == Numbers({0, 31, 32, 127, 55, 0}));
  CHECK(policy(12, 0, {1, 1, 3, {0, 50, 255}}, Element::uint8) == Numbers({0, 50, 255}));
  CHECK(policy(12, 0, {1, 1, 3, {0.25f, 0.5f, 0.75f}}, Element::float32) == Numbers({0, 0.5f, 1}));
  CHECK(policy(12, 0, {1, 1, 2, {9, 9}}, Element::uint8) == Numbers({9, 9}));
  for (std::size_t at : {0u, 5u, 17u, 33u}) {  // NaN wherever it is
    Planes row{1, 1, 34, Numbers(34, 0.5f)};
    row.values[1] = 0.25f;
    row.values[at] = kNan;
    const Numbers found = policy(12, 0, row, Element::float32);
    CHECK(std::all_of(found.begin(), found.end(), [](float v) { return v != v; }));
  }
  for (double nothing : {double{kNan}, -1.0, 14.0, kInfinite}) {
    CHECK(policy(nothing, nothing, image, Element::uint8) == image.values);
  }
  Planes sharp{1, 3, 3, Numbers(9, 26)};
  sharp.values[4] = 52;  // the mean around it is (8 * 26 + 5 * 52) / 13 = 36
  CHECK(policy(9, -1, sharp, Element::uint8)[4] == 36 && policy(9, 1, sharp, Element::uint8)[4] == 68);
  // All of 512 values evenly: two of each.
  Planes values{1, 2, 256, {}};
  for (int i = 0; i < 512; ++i) values.values.push_back(static_cast<float>(i / 2));
  CHECK(policy(13, 0, values, Element::uint8) == values.values);
  CHECK(policy(13, 0, {1, 1, 3, {kNan, 0.5f, -9}}, Element::float32).size() == 3);
}

TEST("augment: maps of colours") {
  Row map(21);
  map[1] = 1;          // red becomes green
  map[7 + 3] = 0.5;    // green half the mean of red
  map[14 + 6] = 0.25;  // blue a quarter
  const Planes image{3, 1, 2, {0.2f, 0.4f, 0.6f, 2.0f, 0, 0}};
  CHECK(is_near(made(plan_of(Kind::colour, {0}, {0, 0, 0, 1, 1, 1}), image, map).values,
                {0.6f, 1, 0.15f, 0.15f, 0.25f, 0.25f}, 1e-6f));
  const Planes bytes{3, 1, 1, {51, 102, 0}};
  CHECK(is_near(made(plan_of(Kind::colour, {1}, {0, 0, 0, 1, 1, 1}), bytes, map, Element::uint8).values,
                {0.4f, 0.1f, 0.25f}, 1e-6f));
}

TEST("augment: what is worked on as floats is rounded to bytes in the end") {
  AugmentPlan plan = plan_of(Kind::as_floats);
  plan.steps.push_back({Kind::colour, 0, {0}, {-9, -9, -9, 9, 9, 9}});
  plan.steps.push_back({Kind::round, 0, {}, {}});
  plan.steps.push_back({Kind::crop, 21, {1, 4, 1}, {}});
  const Planes image{1, 1, 4, {0, 50, 100, 200}};
  const auto with = [&](double factor, double added) {
    Row row(32);
    row[0] = row[8] = row[16] = factor / 3;
    row[6] = row[13] = row[20] = added / 255;
    row[21] = row[22] = 0, row[23] = 1, row[24] = 4;
    return made(plan, image, row, Element::uint8).values;
  };
  CHECK(with(0.0, 30.4) == Numbers({30, 30, 30, 30}) && with(0.0, 900) == Numbers({255, 255, 255, 255}));
  CHECK(with(0.0, -30) == Numbers({0, 0, 0, 0}) && with(double{kNan}, 0) == Numbers({0, 0, 0, 0}));
}

TEST("augment: boxes are resized, mirrored, and filled in where they are outside") {
  const Planes image = ramp(1, 4, 4);
  Row row(15);
  const double box[] = {1, 1, 2, 0, 1, 2, 1, 2, 2};  // two rows and columns from the first on, mirrored across
  std::copy(box, box + 9, row.begin() + 6);
  CHECK(is_near(made(plan_of(Kind::place, {2, 2, 0}, {0}), image, row).values, {6, 5, 10, 9}, 1e-5f));
  Row matrix = {1, 0, 1, 0, 1, 0};
  matrix.resize(15);
  CHECK(is_near(made(plan_of(Kind::place, {4, 4, 0}, {-1}), image, matrix).values,
                {1, 2, 3, -1, 5, 6, 7, -1, 9, 10, 11, -1, 13, 14, 15, -1}, 1e-5f));
}

TEST("augment: spectrograms") {
  const Planes image = ramp(1, 2, 4);
  CHECK(made(plan_of(Kind::mask, {1, 1, 1}), image, {1, 2, 0, 1}).values == Numbers({0, 0, 0, 0, 4, 0, 6, 7}));
  CHECK(made(plan_of(Kind::mask, {1, 0, 0}), image, {1, 3}).values == Numbers({0, 3.5f, 3.5f, 3, 4, 3.5f, 3.5f, 7}));
  CHECK(made(plan_of(Kind::mask, {1, 0, 1}), image, {1.5, 2.5}).values == Numbers({0, 1, 0, 3, 4, 5, 0, 7}));
  for (double end : {99.0, kInfinite}) {
    CHECK(made(plan_of(Kind::mask, {1, 0, 1}), image, {-5, end}).values == Numbers(8, 0));
  }
  CHECK(made(plan_of(Kind::mask, {1, 0, 1}), image, {2, double{kNan}}).values == image.values);
  CHECK(made(plan_of(Kind::shift, {0}, {-1}), image, {1}).values == Numbers({-1, 0, 1, 2, -1, 4, 5, 6}));
  CHECK(made(plan_of(Kind::shift, {0}, {-1}), image, {-3}).values == Numbers({3, -1, -1, -1, 7, -1, -1, -1}));
  CHECK(made(plan_of(Kind::shift, {0}, {-1}), image, {1e18}).values == Numbers(8, -1));
  for (double by : {1.0, 5.0, -3.0, 401.0}) {
    CHECK(made(plan_of(Kind::shift, {1}, {0}), image, {by}).values == Numbers({3, 0, 1, 2, 7, 4, 5, 6}));
  }
  for (double by : {double{kNan}, kInfinite, -4.0}) {
    CHECK(made(plan_of(Kind::shift, {1}, {0}), image, {by}).values == image.values);
  }
  CHECK(made(plan_of(Kind::gain, {0}), {1, 1, 2, {1, -2}}, {2.5}).values == Numbers({2.5f, -5}));
  CHECK(made(plan_of(Kind::gain, {1}), {1, 1, 2, {1, -2}}, {2.5}).values == Numbers({3.5f, 0.5f}));
}

TEST("augment: mixing with the image before") {
  const Planes image{1, 2, 2, {1, 2, 3, 4}}, other{1, 2, 2, {10, 20, 30, 40}};
  CHECK(is_near(made(plan_of(Kind::mix_up), image, {0.75}, Element::float32, Change::made, &other).values,
                {3.25f, 6.5f, 9.75f, 13}, 1e-6f));
  CHECK(made(plan_of(Kind::cut_mix), image, {0, 1, 2, 2, 0.5}, Element::uint8, Change::made, &other).values ==
        Numbers({1, 20, 3, 40}));
  for (double wrong : {double{kNan}, -1.0, kInfinite}) {  // no box
    CHECK(made(plan_of(Kind::cut_mix), image, {0, 0, wrong, 2, 0.5}, Element::uint8, Change::made, &other).values ==
          image.values);
  }
}

// ---- what is refused ---------------------------------------------------------------------------

TEST("augment: numbers of pixels that an image does not have") {
  const Planes image = ramp(1, 4, 5);
  const double wrong[] = {-1, 99, double{kNan}, kInfinite, -kInfinite, 1e300};
  for (double one : wrong) {
    for (std::size_t at = 0; at < 4; ++at) {
      for (std::int32_t interpolation : {0, 1, 2}) {
        Row row = {0, 0, 4, 5};
        row[at] = one;
        made(plan_of(Kind::crop, {2, 2, interpolation}), image, row, Element::float32, Change::outside);
        made(plan_of(Kind::crop, {2, 2, interpolation}), image, row, Element::uint8, Change::outside);
      }
      Row row = {1, 1, 2, 2, 0};
      row[at] = one;
      made(plan_of(Kind::erase, {}, {0}), image, row, Element::float32, Change::outside);
    }
    Row row(15);
    const double box[] = {1, 0, 4, 0, 0, 5, 0, 4, 5};
    std::copy(box, box + 9, row.begin() + 6);
    for (std::size_t at : {7u, 8u, 10u, 11u}) {
      Row other = row;
      other[at] = one;
      made(plan_of(Kind::place, {2, 2, 0}, {0}), image, other, Element::float32, Change::outside);
    }
  }
  made(plan_of(Kind::crop, {2, 2, 1}), image, {3, 0, 2, 5}, Element::float32, Change::outside);
  made(plan_of(Kind::crop, {2, 2, 1}), image, {0, 0, 0, 5}, Element::float32, Change::outside);
}

bool is_refused(const AugmentPlan& plan, std::int64_t channels = 3, std::int64_t height = 8, std::int64_t width = 8,
                Element element = Element::float32) {
  std::int64_t shape[3] = {channels, height, width};
  return problem_of(plan, shape, &element) != nullptr;
}

TEST("augment: plans that are no plans") {
  const Kind kinds[] = {Kind::skip,      Kind::flip,      Kind::crop,      Kind::jitter, Kind::grey,   Kind::blur,
                        Kind::normalize, Kind::to_floats, Kind::warp,      Kind::erase,  Kind::policy, Kind::place,
                        Kind::colour,    Kind::to_bytes,  Kind::as_floats, Kind::round,  Kind::mask,   Kind::gain,
                        Kind::shift,     Kind::mix_up,    Kind::cut_mix};
  for (Kind kind : kinds) {
    const AugmentPlan right = usual_plan(kind);
    CHECK(!is_refused(right));
    AugmentPlan more = right, fewer = right, behind = right, before = right, narrow = right;
    more.steps[0].options.push_back(1);
    CHECK(is_refused(more));
    if (!right.steps[0].options.empty()) {
      fewer.steps[0].options.pop_back();
      CHECK(is_refused(fewer));
    }
    before.steps[0].column = -1;
    behind.steps[0].column = std::numeric_limits<std::int32_t>::max();
    CHECK(is_refused(before) && is_refused(behind));
    narrow.columns = columns_of(kind) - 1;
    CHECK(columns_of(kind) == 0 || is_refused(narrow));
    AugmentPlan unknown = right;
    for (std::int32_t number : {-1, AugmentStep::kKinds, std::numeric_limits<std::int32_t>::max()}) {
      unknown.steps[0].kind = static_cast<Kind>(number);
      CHECK(is_refused(unknown));
    }
  }
  CHECK(!is_refused(AugmentPlan{}));
  for (const std::int64_t wrong : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{1} << 41, std::int64_t{1} << 62}) {
    CHECK(is_refused({}, wrong) && is_refused({}, 1, wrong) && is_refused({}, 1, 1, wrong));
  }
  CHECK(is_refused({}, 1 << 20, 1 << 20, 1 << 20));
  CHECK(!is_refused(plan_of(Kind::gain, {0}), 1, 1, std::int64_t{1} << 26));  // a long waveform
  CHECK(is_refused(plan_of(Kind::crop, {4, 4, 1}), 1, 1, std::int64_t{1} << 26));
  CHECK(is_refused(plan_of(Kind::crop, {1 << 16, 1 << 16, 1})) && is_refused(plan_of(Kind::crop, {0, 4, 1})));
  CHECK(is_refused(plan_of(Kind::crop, {4, -4, 1})) && is_refused(plan_of(Kind::crop, {4, 4, 3})));
  CHECK(is_refused(plan_of(Kind::warp, {0, 0, 0, 4})) && is_refused(plan_of(Kind::place, {1, 0, 0}, {0})));
  CHECK(is_refused(plan_of(Kind::flip, {2})) && is_refused(plan_of(Kind::colour, {3}, Numbers(6, 0))));
  CHECK(is_refused(plan_of(Kind::blur, {4, 3}, {1})) && is_refused(plan_of(Kind::blur, {17, 3}, {1})));
  CHECK(is_refused(plan_of(Kind::blur, {3, 3})) && is_refused(plan_of(Kind::blur, {-1, 3}, {1})));
  CHECK(is_refused(plan_of(Kind::mask, {-1, 2, 0})) && is_refused(plan_of(Kind::mask, {17, 0, 0})));
  CHECK(is_refused(plan_of(Kind::mask, {0x7fffffff, 0x7fffffff, 0})));
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{5}}) {
    CHECK(is_refused(plan_of(Kind::normalize, {}, Numbers(count))) &&
          is_refused(plan_of(Kind::colour, {0}, Numbers(count))));
  }
  CHECK(is_refused(plan_of(Kind::erase, {}, {1, 2})) && is_refused(plan_of(Kind::warp, {0, 0, 8, 8}, {1, 2})));
  CHECK(is_refused(plan_of(Kind::jitter), 2) && is_refused(plan_of(Kind::grey), 4) &&
        is_refused(usual_plan(Kind::policy), 2));
  for (Kind kind : {Kind::normalize, Kind::mask, Kind::gain, Kind::shift, Kind::mix_up}) {
    CHECK(is_refused(usual_plan(kind), 3, 8, 8, Element::uint8));
  }
  CHECK(is_refused(plan_of(Kind::erase), 3, 8, 8, Element::uint8));
  CHECK(is_refused(both(plan_of(Kind::flip, {0}), plan_of(Kind::mix_up), 1)));
  // What may be left out keeps the shape and the element; and there is as much to leave out.
  CHECK(is_refused(plan_of(Kind::skip, {1})) && is_refused(plan_of(Kind::skip, {-1})));
  CHECK(is_refused(both(plan_of(Kind::skip, {1}), plan_of(Kind::crop, {4, 8, 1}), 1)));
  CHECK(!is_refused(both(plan_of(Kind::skip, {1}), plan_of(Kind::crop, {8, 8, 1}), 1)));
  CHECK(!is_refused(both(plan_of(Kind::skip, {0}), plan_of(Kind::crop, {4, 8, 1}), 1)));
  CHECK(is_refused(both(plan_of(Kind::skip, {1}), plan_of(Kind::to_floats), 1), 3, 8, 8, Element::uint8));
  CHECK(is_refused(both(plan_of(Kind::skip, {1}), plan_of(Kind::to_bytes), 1)));
}

TEST("augment: without memory an image is not made, and nothing else happens") {
  // As many numbers as fit into 2**40, to which no memory is added; nothing of the image is touched.
  AugmentPlan plan = plan_of(Kind::blur, {3, 3}, {1});
  std::uint8_t pixel[4] = {};
  ImageView image{pixel, Element::float32, 1, std::int64_t{1} << 19, std::int64_t{1} << 19, {0, 0, 0}};
  std::int64_t shape[3] = {image.channels, image.height, image.width};
  Element element = Element::float32;
  CHECK(problem_of(plan, shape, &element) == nullptr);
  ImageView out = image;
  out.element = Element::uint8;                                   // not of planes that could be worked in
  if (Arena().allocate(std::size_t{1} << 40) != nullptr) return;  // a system that promises any memory
  Arena arena;
  const double row[] = {1};
  CHECK(augment(plan, image, nullptr, row, out, false, arena) == Change::no_memory);
}

// ---- levels, memory, threads -------------------------------------------------------------------

// Work a plan off at each level, in all layouts: equal bit for bit, and no byte is touched beside the image.
void compare_levels(const AugmentPlan& plan, const std::vector<double>& row, const std::int64_t given[3],
                    Element element, Random& random) {
  std::int64_t shape[3] = {given[0], given[1], given[2]};
  Element after = element;
  CHECK(problem_of(plan, shape, &after) == nullptr);
  if (after != Element::uint8) after = static_cast<Element>(random.between(1, 3));
  Numbers values, wanted;
  for (std::int64_t i = 0; i < given[0] * given[1] * given[2]; ++i) values.push_back(random.number(element));
  bool is_first = true;
  Change change = Change::made;
  Arena arena;
  for (int at = 0; at <= static_cast<int>(best_level()); ++at) {
    CHECK(force_level(static_cast<Level>(at)));
    for (Layout layout : {Layout::planar, Layout::interleaved, Layout::spread}) {
      Memory from(given[0], given[1], given[2], element, layout, random.between(0, 1) == 0);
      Memory other(given[0], given[1], given[2], element, layout);
      Memory to(shape[0], shape[1], shape[2], after, random.layout(), random.between(0, 1) == 0);
      from.fill(values);
      other.fill(values);
      arena.reset();
      const Change found = augment(plan, from.view(), &other.view(), row.data(), to.view(), random.chance(50), arena);
      const Numbers made = found == Change::made ? to.values() : Numbers{};
      if (is_first) wanted = made, change = found;
      is_first = false;
      CHECK(found == change && made.size() == wanted.size());
      CHECK(made.empty() || std::memcmp(made.data(), wanted.data(), made.size() * sizeof(float)) == 0);
      CHECK(from.is_intact() && to.is_intact());
    }
  }
  CHECK(force_level(best_level()));
}

TEST("augment: random plans at all levels, in all layouts") {
  Random random(1);
  for (int round = 0; round < 600; ++round) {
    const Element element = static_cast<Element>(random.between(0, 3));
    const std::int64_t channels = round % 3 == 0 ? random.between(1, 13) : random.between(0, 3) == 0 ? 1 : 3;
    const std::int64_t shape[3] = {channels, random.side(), random.side()};
    std::vector<double> row;
    const AugmentPlan plan = random_plan(random, shape, element, &row);
    compare_levels(plan, row, shape, element, random);
  }
}

TEST("augment: each kind alone, of each size to 40") {
  Random random(2);
  for (std::int64_t size = 1; size <= 40; ++size) {
    for (std::int32_t kind = 0; kind < AugmentStep::kKinds; ++kind) {
      const std::int64_t shape[3] = {3, size % 7 + 1, size};
      AugmentPlan plan;
      std::vector<double> row;
      std::int64_t now[3] = {shape[0], shape[1], shape[2]};
      Element element = Element::float32;
      add_step(random, static_cast<Kind>(kind), now, &element, &plan, &row);
      compare_levels(plan, row, shape, Element::float32, random);
    }
  }
}

// A batch whose images are of different rows; each is what it is alone, in however many threads, and in memory of any
// order.
TEST("augment: 64 threads at one batch") {
  Random random(3);
  random.is_wild = false;
  for (int round = 0; round < 8; ++round) {
    const std::int64_t shape[3] = {3, 9 + 7 * round, 13};
    constexpr std::int64_t kCount = 200;
    const Element element = round % 2 == 0 ? Element::uint8 : Element::float32;
    std::vector<double> row;
    auto plan = std::make_shared<AugmentPlan>(random_plan(random, shape, element, &row));
    std::int64_t after[3] = {shape[0], shape[1], shape[2]};
    Element end = element;
    CHECK(problem_of(*plan, after, &end) == nullptr);
    const auto given = static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * bytes_of(element));
    const auto each = static_cast<std::size_t>(after[0] * after[1] * after[2] * bytes_of(end));
    std::vector<std::uint8_t> images(given * kCount), expected;
    for (std::size_t at = 0; at < images.size(); at += static_cast<std::size_t>(bytes_of(element))) {
      const float value = random.number(element);
      if (element == Element::uint8)
        images[at] = static_cast<std::uint8_t>(value);
      else
        std::memcpy(images.data() + at, &value, sizeof value);
    }
    std::vector<double> rows;
    for (std::int64_t at = 0; at < kCount; ++at) rows.insert(rows.end(), row.begin(), row.end());
    for (int threads : {1, 2, 64}) {
      std::vector<std::uint8_t> out(each * kCount, 0xA5);
      auto work = std::make_shared<AugmentBatch>();
      work->plan = plan;
      work->count = kCount;
      work->source = planar_view(images.data(), shape, element);
      work->out = planar_view(out.data(), after, end);
      work->source_step = static_cast<std::int64_t>(given);
      work->out_step = static_cast<std::int64_t>(each);
      work->rows = rows.data();
      work->prepare();
      run_in_threads(work, threads);
      if (expected.empty()) expected = out;
      CHECK(out == expected && work->problem.load() == Change::made);
    }
    std::vector<std::uint8_t> turned(each * kCount);
    std::vector<std::int64_t> places;
    for (std::int64_t at = 0; at < kCount; ++at) places.push_back((kCount - 1 - at) * static_cast<std::int64_t>(each));
    auto work = std::make_shared<AugmentBatch>();
    work->plan = plan;
    work->count = kCount;
    work->source = planar_view(images.data(), shape, element);
    work->out = planar_view(turned.data(), after, end);
    work->source_step = static_cast<std::int64_t>(given);
    work->places = places.data();
    work->rows = rows.data();
    run_here(*work);
    for (std::size_t at = 0; at < static_cast<std::size_t>(kCount); ++at) {
      CHECK(std::memcmp(turned.data() + (kCount - 1 - at) * each, expected.data() + at * each, each) == 0);
    }
  }
}

TEST("augment: an image that has not the pixels is named, and those beside it are made") {
  auto plan = std::make_shared<AugmentPlan>(plan_of(Kind::crop, {2, 2, 1}, {}, 4));
  const std::int64_t shape[3] = {1, 4, 4}, after[3] = {1, 2, 2};
  std::vector<float> images(5 * 16, 3.0f), out(5 * 4, -1.0f);
  std::vector<double> rows;
  for (int at = 0; at < 5; ++at) rows.insert(rows.end(), {0, 0, at == 3 ? 9.0 : 4.0, 4});
  auto work = std::make_shared<AugmentBatch>();
  work->plan = plan;
  work->count = 5;
  work->source = planar_view(reinterpret_cast<std::uint8_t*>(images.data()), shape, Element::float32);
  work->out = planar_view(reinterpret_cast<std::uint8_t*>(out.data()), after, Element::float32);
  work->source_step = 64;
  work->out_step = 16;
  work->rows = rows.data();
  work->prepare();
  run_in_threads(work, 4);
  CHECK(work->problem.load() == Change::outside && work->problem_at.load() == 3);
  for (std::size_t at = 0; at < 20; ++at) CHECK(out[at] == (at / 4 == 3 ? -1.0f : 3.0f));
}

}  // namespace
