// Random plans of augmentations with numbers for them, and images in memory of any layout whose surroundings are
// watched.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "../augment.h"

namespace fastpipe::tests {

enum class Layout { planar, interleaved, rows, spread };  // rows: pixels of a row follow each other

// Where choices come from.
class Draws {
 public:
  virtual ~Draws() = default;
  bool is_wild = true;  // whether numbers may be of no image

  std::int32_t between(std::int32_t low, std::int32_t high) {
    return low + static_cast<std::int32_t>(next() % static_cast<std::uint32_t>(high - low + 1));
  }
  bool chance(int percent) { return between(0, 99) < percent; }
  double uniform() { return between(0, 1 << 20) / static_cast<double>(1 << 20); }
  std::int32_t side() { return chance(5) ? between(41, 300) : chance(50) ? between(1, 9) : between(1, 40); }
  Layout layout() { return static_cast<Layout>(between(0, 3)); }
  // A value of an image, which each type of floats has.
  float number(Element element) {
    if (element == Element::uint8) return static_cast<float>(between(0, 255));
    if (is_wild && chance(2)) return static_cast<float>(odd());
    return static_cast<float>(between(0, 128)) / 128.0f;
  }
  // A number of a row, from one range, or anything.
  double row_number(double low, double high) { return is_wild && chance(4) ? odd() : low + (high - low) * uniform(); }
  double row_whole(std::int64_t low, std::int64_t high) {
    return is_wild && chance(3) ? odd() : between(static_cast<std::int32_t>(low), static_cast<std::int32_t>(high));
  }

 protected:
  virtual std::uint32_t next() = 0;

 private:
  double odd() {
    constexpr double infinite = std::numeric_limits<double>::infinity();
    const double all[] = {std::nan(""), infinite, -infinite, -1,    0,       -0.5, 0.5,
                          1.5,          1e10,     -1e10,     1e300, 0x1p-14, 300,  4};
    return all[between(0, 13)];
  }
};

class Random : public Draws {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}

 protected:
  std::uint32_t next() override {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<std::uint32_t>(state_ >> 32);
  }

 private:
  std::uint64_t state_;
};

// ---- images ------------------------------------------------------------------------------------

inline std::uint16_t half_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
  const float size = std::fabs(value);
  if (value != value) return sign | 0x7e00u;
  if (size >= 65520.0f) return sign | 0x7c00u;
  if (size < 0x1p-14f) return static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>(size * 0x1p24f));
  return static_cast<std::uint16_t>(sign | ((bits & 0x7fffffffu) - 0x38000000u) >> 13);
}

inline float of_half(std::uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const float sign = (half & 0x8000u) != 0 ? -1.0f : 1.0f;
  if (exponent == 31) {
    return mantissa != 0 ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  }
  return sign * (exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                               : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25));
}

inline ImageView planar_view(std::uint8_t* data, const std::int64_t shape[3], Element element) {
  const std::int64_t word = bytes_of(element);
  return {data, element, shape[0], shape[1], shape[2], {word * shape[1] * shape[2], word * shape[2], word}};
}

// An image, and bytes between and around its elements that must stay as they are.
class Memory {
 public:
  // is_exact: its memory ends with it, so that a sanitizer sees what is read behind it, and is aligned to 64; else it
  // begins at an odd address.
  Memory(std::int64_t channels, std::int64_t height, std::int64_t width, Element element, Layout layout,
         bool is_exact = true) {
    const std::int64_t word = bytes_of(element);
    view_ = {nullptr, element, channels, height, width, {word * height * width, word * width, word}};
    std::int64_t* const strides = view_.strides;
    if (layout == Layout::interleaved) {
      strides[0] = word;
      strides[2] = word * channels;
      strides[1] = strides[2] * width;
    } else if (layout != Layout::planar) {
      strides[2] = layout == Layout::rows ? word : 2 * word;
      strides[1] = strides[2] * width + 3 * word;
      strides[0] = strides[1] * height + 5 * word;
    }
    const std::int64_t last = (channels - 1) * strides[0] + (height - 1) * strides[1] + (width - 1) * strides[2];
    const std::size_t around = is_exact ? 0 : 65;
    size_ = static_cast<std::size_t>(last + word) + 2 * around;
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, size_) != 0) std::abort();
    memory_.reset(static_cast<std::uint8_t*>(memory));
    std::memset(memory, kUntouched, size_);
    view_.data = memory_.get() + around;
  }

  const ImageView& view() const { return view_; }

  void fill(const std::vector<float>& values) {
    std::size_t at = 0;
    each([&](std::uint8_t* to) {
      const float value = values[at++];
      std::uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      const std::uint16_t high =
          view_.element == Element::float16 ? half_of(value) : static_cast<std::uint16_t>(bits >> 16);
      if (view_.element == Element::uint8)
        *to = static_cast<std::uint8_t>(value);
      else if (view_.element == Element::float32)
        std::memcpy(to, &value, sizeof value);
      else
        std::memcpy(to, &high, sizeof high);
    });
  }

  // Numbers, channel by channel; all that are NaN are the same.
  std::vector<float> values() {
    std::vector<float> found;
    each([&](const std::uint8_t* from) {
      float value = *from;
      std::uint16_t half;
      std::memcpy(&half, from, std::min<std::size_t>(sizeof half, static_cast<std::size_t>(bytes_of(view_.element))));
      const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
      if (view_.element == Element::float32 || view_.element == Element::bfloat16) {
        std::memcpy(&value, view_.element == Element::float32 ? static_cast<const void*>(from) : &bits, sizeof value);
      }
      if (view_.element == Element::float16) value = of_half(half);
      found.push_back(value != value ? std::numeric_limits<float>::quiet_NaN() : value);
    });
    return found;
  }

  // Whether no byte was touched that is none of the image's.
  bool is_intact() {
    std::uint8_t* const bytes = memory_.get();
    const std::vector<std::uint8_t> before(bytes, bytes + size_);
    each([&](std::uint8_t* to) { std::memset(to, kUntouched, static_cast<std::size_t>(bytes_of(view_.element))); });
    const bool found = std::all_of(bytes, bytes + size_, [](std::uint8_t byte) { return byte == kUntouched; });
    std::copy(before.begin(), before.end(), bytes);
    return found;
  }

 private:
  static constexpr std::uint8_t kUntouched = 0xA5;

  template <typename Do>
  void each(Do act) {
    auto* const data = const_cast<std::uint8_t*>(view_.data);
    for (std::int64_t c = 0; c < view_.channels; ++c) {
      for (std::int64_t y = 0; y < view_.height; ++y) {
        for (std::int64_t x = 0; x < view_.width; ++x) {
          act(data + c * view_.strides[0] + y * view_.strides[1] + x * view_.strides[2]);
        }
      }
    }
  }

  struct Free {
    void operator()(std::uint8_t* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::uint8_t[], Free> memory_;
  std::size_t size_ = 0;
  ImageView view_;
};

// ---- plans -------------------------------------------------------------------------------------

// Add a step that images of this shape and element can take; they become what they are afterwards.  In the place of one
// that they cannot take there is a flip.
inline void add_step(Draws& draws, AugmentStep::Kind kind, std::int64_t shape[3], Element* element, AugmentPlan* plan,
                     std::vector<double>* row) {
  using Kind = AugmentStep::Kind;
  const bool is_colour = shape[0] == 3 || shape[0] == 1, of_bytes = *element == Element::uint8;
  const bool needs_colour = kind == Kind::jitter || kind == Kind::grey || kind == Kind::policy || kind == Kind::colour;
  const bool needs_floats = kind == Kind::normalize || kind == Kind::mask || kind == Kind::gain ||
                            kind == Kind::shift || kind == Kind::mix_up;
  const bool mixes = kind == Kind::mix_up || kind == Kind::cut_mix;
  if ((needs_colour && !is_colour) || (needs_floats && of_bytes) || (mixes && !plan->steps.empty())) kind = Kind::flip;
  AugmentStep step;
  step.kind = kind;
  step.column = static_cast<std::int32_t>(row->size());
  const auto whole = [&](std::int64_t low, std::int64_t high) { row->push_back(draws.row_whole(low, high)); };
  const auto real = [&](double low, double high) { row->push_back(draws.row_number(low, high)); };
  const auto matrix = [&] {
    for (int at = 0; at < 6; ++at) {
      if (at % 3 == 2)
        real(-10, 10);
      else
        real(at % 4 == 0 ? 0.5 : -0.4, at % 4 == 0 ? 2 : 0.4);
    }
  };
  const auto fill = [&](bool may_be_none) {
    const std::int64_t count = may_be_none && draws.chance(30) ? 0 : draws.chance(50) ? 1 : shape[0];
    for (std::int64_t at = 0; at < count; ++at) {
      step.numbers.push_back(static_cast<float>(draws.row_number(0, of_bytes ? 255 : 1)));
    }
  };
  const auto size = [&] {
    if (draws.chance(60)) {
      shape[1] = draws.side();
      shape[2] = draws.side();
    }
    return std::vector<std::int32_t>{static_cast<std::int32_t>(shape[1]), static_cast<std::int32_t>(shape[2])};
  };
  switch (kind) {
    case Kind::skip:
      step.options = {0};
      whole(0, 1);
      break;
    case Kind::flip:
      step.options = {draws.between(0, 1)};
      whole(0, 1);
      break;
    case Kind::crop: {
      const std::int32_t top = draws.between(0, static_cast<std::int32_t>(shape[1]) - 1);
      const std::int32_t left = draws.between(0, static_cast<std::int32_t>(shape[2]) - 1);
      whole(top, top);
      whole(left, left);
      whole(1, shape[1] - top);
      whole(1, shape[2] - left);
      step.options = size();
      step.options.push_back(draws.between(0, 2));
      break;
    }
    case Kind::jitter: {
      for (int at = 0; at < 3; ++at) draws.chance(20) ? row->push_back(1) : real(0, 2);
      real(-0.5, 0.5);
      const std::int32_t first = draws.between(0, 3);
      for (int at = 0; at < 4; ++at) whole((first + at) % 4, (first + at) % 4);
      break;
    }
    case Kind::grey:
      whole(0, 1);
      break;
    case Kind::blur:
      for (int at : {2, 1}) {
        const auto most = static_cast<std::int32_t>(std::min<std::int64_t>(shape[at] - 1, 12));
        step.options.push_back(2 * draws.between(0, most) + 1);
      }
      step.numbers = {draws.chance(50) ? 1.0f : 0x1p19f};
      real(0.1, 4);
      break;
    case Kind::normalize: {
      const std::int64_t count = draws.chance(50) ? 1 : shape[0];
      for (std::int64_t at = 0; at < 2 * count; ++at)
        step.numbers.push_back(static_cast<float>(draws.row_number(0.1, 1)));
      break;
    }
    case Kind::to_floats:
      if (of_bytes) *element = Element::float32;
      break;
    case Kind::to_bytes:
      *element = Element::uint8;
      break;
    case Kind::as_floats:
    case Kind::round:
      break;
    case Kind::warp:
      fill(true);
      step.options = {draws.between(0, 1), draws.between(0, 1)};
      for (std::int32_t side : size()) step.options.push_back(side);
      matrix();
      break;
    case Kind::policy:
      fill(true);
      step.options = {draws.between(0, 1), draws.between(0, 1)};
      whole(0, 13);
      draws.chance(50) ? whole(0, 8) : real(-0.9, 1);
      matrix();
      break;
    case Kind::erase: {
      fill(!of_bytes);
      const std::int32_t top = draws.between(0, static_cast<std::int32_t>(shape[1]));
      const std::int32_t left = draws.between(0, static_cast<std::int32_t>(shape[2]));
      whole(top, top);
      whole(left, left);
      whole(0, shape[1] - top);
      whole(0, shape[2] - left);
      whole(0, 1 << 24);
      break;
    }
    case Kind::place: {
      fill(true);
      matrix();
      whole(0, 1);
      for (int at : {1, 2}) {
        const double begin = draws.uniform() * static_cast<double>(shape[at] - 1);
        row->push_back(begin);
        real(0.1, static_cast<double>(shape[at]) - begin);
        whole(0, 1);
      }
      step.options = size();
      for (std::int32_t side : step.options) whole(side, side);
      step.options.push_back(draws.between(0, 1));
      break;
    }
    case Kind::colour:
      for (int at = 0; at < 21; ++at) draws.chance(30) ? row->push_back(0) : real(-1, 1);
      for (int at = 0; at < 6; ++at)
        step.numbers.push_back(static_cast<float>(draws.row_number(at < 3 ? -1 : 0, at < 3 ? 0 : 1)));
      step.options = {draws.between(0, 2)};
      if (step.options[0] == 1 && of_bytes) *element = Element::float32;
      if (step.options[0] == 2) *element = Element::uint8;
      break;
    case Kind::mask:
      step.options = {draws.between(0, 3), draws.between(0, 3), draws.between(0, 1)};
      for (int at = 0; at < step.options[0] + step.options[1]; ++at) {
        whole(0, shape[2]);
        whole(0, shape[2]);
      }
      break;
    case Kind::gain:
      step.options = {draws.between(0, 1)};
      real(-2, 2);
      break;
    case Kind::shift:
      step.options = {draws.between(0, 1)};
      step.numbers = {static_cast<float>(draws.row_number(0, 1))};
      whole(-shape[2], shape[2]);
      break;
    case Kind::mix_up:
      real(0, 1);
      break;
    case Kind::cut_mix:
      for (int end : {0, 1}) {
        for (int at : {1, 2}) whole(end == 0 ? 0 : shape[at] / 2, end == 0 ? shape[at] / 2 : shape[at]);
      }
      real(0, 1);
      break;
  }
  plan->steps.push_back(step);
  plan->columns = static_cast<std::int32_t>(row->size());
}

// A plan of up to seven steps, and a row of numbers.
inline AugmentPlan random_plan(Draws& draws, const std::int64_t given[3], Element element, std::vector<double>* row) {
  AugmentPlan plan;
  std::int64_t shape[3] = {given[0], given[1], given[2]};
  const int count = draws.between(0, 7);
  for (int at = 0; at < count; ++at) {
    const std::int64_t before[3] = {shape[0], shape[1], shape[2]};
    const Element element_before = element;
    // What keeps the shape may be left out.
    const bool may_skip = at > 0 && draws.chance(25);
    const std::size_t skip = plan.steps.size();
    if (may_skip) add_step(draws, AugmentStep::Kind::skip, shape, &element, &plan, row);
    add_step(draws, static_cast<AugmentStep::Kind>(draws.between(0, AugmentStep::kKinds - 1)), shape, &element, &plan,
             row);
    const bool is_kept = std::equal(before, before + 3, shape) && element_before == element;
    if (may_skip && is_kept) plan.steps[skip].options[0] = 1;
  }
  if (row->empty()) row->push_back(0);  // so that there is memory
  return plan;
}

// Columns of a kind of step, as of `usual_plan`.
inline std::int32_t columns_of(AugmentStep::Kind kind) {
  constexpr std::int32_t columns[AugmentStep::kKinds] = {1, 1,  4,  8, 1, 1, 0, 0, 0, 6, 8,
                                                         5, 15, 21, 0, 0, 4, 1, 1, 1, 5};
  return columns[static_cast<std::size_t>(kind)];
}

// A plan of one step that images of three channels and 8 × 8 pixels can take.
inline AugmentPlan usual_plan(AugmentStep::Kind kind) {
  using Kind = AugmentStep::Kind;
  AugmentStep step;
  step.kind = kind;
  if (kind == Kind::skip || kind == Kind::flip || kind == Kind::gain || kind == Kind::shift || kind == Kind::colour) {
    step.options = {0};
  }
  if (kind == Kind::crop) step.options = {4, 4, 1};
  if (kind == Kind::blur) step.options = {3, 5};
  if (kind == Kind::warp) step.options = {0, 0, 8, 8};
  if (kind == Kind::policy) step.options = {1, 1};
  if (kind == Kind::place) step.options = {4, 4, 0};
  if (kind == Kind::mask) step.options = {1, 1, 0};
  if (kind == Kind::normalize) step.numbers = {0.5f, 0.5f, 0.5f, 0.2f, 0.2f, 0.2f};
  if (kind == Kind::colour) step.numbers = {0, 0, 0, 1, 1, 1};
  if (kind == Kind::blur || kind == Kind::shift) step.numbers = {1};
  AugmentPlan plan;
  plan.steps = {step};
  plan.columns = 32;
  return plan;
}

}  // namespace fastpipe::tests
