#include "augment.h"

#include <algorithm>

namespace fastpipe {

namespace {

using Kind = AugmentStep::Kind;

constexpr std::int64_t kMostSide = std::int64_t{1} << 24;    // pixels whose places float32 knows
constexpr std::int64_t kMostPixels = std::int64_t{1} << 30;  // of a plane: places are 32-bit numbers
constexpr std::int64_t kMost = std::int64_t{1} << 40;        // numbers of an image, and of a side
constexpr std::int64_t kPart = std::int64_t{1} << 19;        // bytes of small images that are worked on together
// Bytes of a batch that is larger than the nearest caches.
constexpr std::int64_t kLargeBatch = std::int64_t{4} << 20;

// The numbers of options and of columns of a kind of step.
struct Form {
  std::size_t options;
  std::int32_t columns;
};

Form form_of(const AugmentStep& step) noexcept {
  switch (step.kind) {
    case Kind::skip:
    case Kind::flip:
      return {1, 1};
    case Kind::crop:
      return {3, 4};
    case Kind::jitter:
      return {0, 8};
    case Kind::grey:
      return {0, 1};
    case Kind::blur:
      return {2, 1};
    case Kind::normalize:
    case Kind::to_floats:
    case Kind::to_bytes:
    case Kind::as_floats:
    case Kind::round:
      return {0, 0};
    case Kind::warp:
      return {4, 6};
    case Kind::policy:
      return {2, 8};
    case Kind::erase:
      return {0, 5};
    case Kind::place:
      return {3, 15};
    case Kind::colour:
      return {1, 21};
    case Kind::mask:
      return {3, 0};  // two for each mask
    case Kind::gain:
    case Kind::shift:
      return {1, 1};
    case Kind::mix_up:
      return {0, 1};
    case Kind::cut_mix:
      return {0, 5};
  }
  return {0, 0};
}

bool is_size(std::int64_t height, std::int64_t width) noexcept {
  return height >= 1 && width >= 1 && height <= kMostSide && width <= kMostSide && height <= kMostPixels / width;
}

// Return whether sides, and memory to work in, can be counted.
bool is_countable(const std::int64_t shape[3]) noexcept {
  std::int64_t count = 1;
  for (int at = 0; at < 3; ++at) {
    if (shape[at] < 1 || shape[at] > kMost / count) return false;
    count *= shape[at];
  }
  return true;
}

// A fill of one number, of one for each channel, or of none.
bool is_fill(const std::vector<float>& numbers, std::int64_t channels) noexcept {
  return numbers.size() <= 1 || numbers.size() == static_cast<std::size_t>(channels);
}

// Bytes stay whole numbers of 0 to 255, which this step does not see to.
const char* of_floats(Element element) noexcept { return element == Element::uint8 ? "floats" : nullptr; }

const char* problem_of(const AugmentStep& step, std::int64_t shape[3], Element* element) noexcept {
  const std::int64_t channels = shape[0];
  const bool is_colour = channels == 3 || channels == 1;
  const bool is_resampled =
      step.kind == Kind::crop || step.kind == Kind::place || step.kind == Kind::warp || step.kind == Kind::policy;
  if (is_resampled && !is_size(shape[1], shape[2])) return "images of at most 2**24 pixels a side and 2**30 in all";
  switch (step.kind) {
    case Kind::crop:
    case Kind::place:
      if (!is_size(step.options[0], step.options[1])) return "a size of at least one pixel";
      if (step.kind == Kind::crop && (step.options[2] < 0 || step.options[2] > 2)) return "an interpolation";
      if (step.kind == Kind::place && !is_fill(step.numbers, channels)) return "a fill for each channel";
      shape[1] = step.options[0];
      shape[2] = step.options[1];
      return nullptr;
    case Kind::warp:
      if (!is_size(step.options[2], step.options[3])) return "a size of at least one pixel";
      if (!is_fill(step.numbers, channels)) return "a fill for each channel";
      shape[1] = step.options[2];
      shape[2] = step.options[3];
      return nullptr;
    case Kind::policy:
      if (!is_colour) return "images of 3 channels or 1";
      return is_fill(step.numbers, channels) ? nullptr : "a fill for each channel";
    case Kind::jitter:
    case Kind::grey:
      return is_colour ? nullptr : "images of 3 channels or 1";
    case Kind::blur:
      if (step.numbers.size() != 1) return "a least weight";
      if (step.options[0] < 1 || step.options[1] < 1 || step.options[0] % 2 == 0 || step.options[1] % 2 == 0 ||
          step.options[0] / 2 >= shape[2] || step.options[1] / 2 >= shape[1]) {
        return "odd sizes of a blur, less than twice the image's";
      }
      return nullptr;
    case Kind::normalize:
      if (step.numbers.size() != 2 && step.numbers.size() != static_cast<std::size_t>(2 * channels)) {
        return "a mean and a deviation for each channel";
      }
      return of_floats(*element);
    case Kind::to_floats:
      if (*element == Element::uint8) *element = Element::float32;
      return nullptr;
    case Kind::to_bytes:
      *element = Element::uint8;
      return nullptr;
    case Kind::colour:
      if (!is_colour || step.numbers.size() != 6) return "images of 3 channels or 1, and bounds";
      if (step.options[0] < 0 || step.options[0] > 2) return "what colours become";
      if (step.options[0] == 1 && *element == Element::uint8) *element = Element::float32;
      if (step.options[0] == 2) *element = Element::uint8;
      return nullptr;
    case Kind::erase:
      if (!is_fill(step.numbers, channels)) return "a fill for each channel";
      return step.numbers.empty() ? of_floats(*element) : nullptr;
    case Kind::mask:
      return step.options[0] >= 0 && step.options[1] >= 0 ? of_floats(*element) : "numbers of masks";
    case Kind::shift:
      return step.numbers.size() == 1 ? of_floats(*element) : "a fill";
    case Kind::gain:
    case Kind::mix_up:
      return of_floats(*element);
    case Kind::flip:
      return step.options[0] == 0 || step.options[0] == 1 ? nullptr : "an axis";
    default:
      return nullptr;
  }
}

}  // namespace

const char* problem_of(const AugmentPlan& plan, std::int64_t shape[3], Element* element) noexcept {
  const std::size_t count = plan.steps.size();
  if (!is_countable(shape)) return "images of at least one pixel, and of at most 2**40 numbers";
  std::size_t kept = 0;  // steps before this one may be left out, and must not change the shape
  for (std::size_t at = 0; at < count; ++at) {
    const AugmentStep& step = plan.steps[at];
    const auto kind = static_cast<std::int32_t>(step.kind);
    if (kind < 0 || kind >= AugmentStep::kKinds) return "a kind of step";
    const Form form = form_of(step);
    if (step.options.size() != form.options) return "as many options as a step has";
    std::int64_t columns = form.columns;
    if (step.kind == Kind::mask) columns = 2 * (std::int64_t{step.options[0]} + step.options[1]);
    if (step.column < 0 || step.column + columns > plan.columns) return "a step's numbers within the row";
    if (step.kind == Kind::skip) {
      if (step.options[0] < 0 || static_cast<std::size_t>(step.options[0]) >= count - at) return "steps to skip";
      kept = std::max(kept, at + 1 + static_cast<std::size_t>(step.options[0]));
    }
    if ((step.kind == Kind::mix_up || step.kind == Kind::cut_mix) && at > 0) return "what mixes first";
    const std::int64_t before[3] = {shape[0], shape[1], shape[2]};
    const Element element_before = *element;
    if (const char* problem = problem_of(step, shape, element)) return problem;
    if (!is_countable(shape)) return "images of at most 2**40 numbers";
    const bool is_kept = std::equal(before, before + 3, shape) && element_before == *element;
    if (at < kept && !is_kept) return "the same shape and type also where steps are left out";
  }
  return nullptr;
}

void AugmentBatch::prepare() noexcept {
  const std::int64_t pixels = std::max(source.height * source.width, out.height * out.width);
  const std::int64_t bytes = std::max<std::int64_t>(pixels * source.channels * std::int64_t{sizeof(float)}, 1);
  part_ = std::max<std::int64_t>(1, kPart / bytes);
  streams_ = count * out.channels * out.height * out.width * bytes_of(out.element) >= kLargeBatch;
}

ImageView AugmentBatch::source_of(std::int64_t number) const noexcept {
  ImageView view = source;
  view.data += number * source_step;
  return view;
}

ImageView AugmentBatch::out_of(std::int64_t number) const noexcept {
  ImageView view = out;
  view.data += places == nullptr ? number * out_step : places[number];
  return view;
}

Change AugmentBatch::change(std::int64_t number, const ImageView& image, Arena& arena) const noexcept {
  return augment(*plan, image, nullptr, rows + number * plan->columns, out_of(number), streams_, arena);
}

void AugmentBatch::note(std::int64_t number, Change change) noexcept {
  Change none = Change::made;
  if (change != Change::made && problem.compare_exchange_strong(none, change)) problem_at.store(number);
}

void AugmentBatch::run(std::int64_t item, Scratch& scratch) {
  const std::int64_t end = std::min(count, (item + 1) * part_);
  for (std::int64_t number = item * part_; number < end; ++number) {
    const ImageView previous = source_of(number == 0 ? count - 1 : number - 1);
    scratch.arena.reset();
    note(number, augment(*plan, source_of(number), &previous, rows + number * plan->columns, out_of(number), streams_,
                         scratch.arena));
  }
}

void AugmentBatch::lost(std::int64_t item) noexcept { note(item * part_, Change::no_memory); }

}  // namespace fastpipe
