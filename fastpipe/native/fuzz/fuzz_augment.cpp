// Fuzzes augmentation: a plan, its numbers and an image, all of a few bytes.
//
// Invariants: a plan that is accepted makes an image or says what it lacks, and writes all of the image and nothing
// else; every instruction set and every layout gives the same, bit for bit; a plan whose parts are changed is refused
// or harmless.
#include <cstring>
#include <vector>

#include "../augment.h"
#include "../simd.h"
#include "../tests/make_augment.h"
#include "fuzz.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::fuzz;
using namespace fastpipe::tests;

constexpr std::int64_t kMostNumbers = std::int64_t{1} << 18;

// Choices that are the input's bytes, one after the other, and behind them depend on all of these.
class OfBytes : public Draws {
 public:
  explicit OfBytes(Bytes from) : from_(from), behind_(from) {}

 protected:
  std::uint32_t next() override {
    if (at_ + 2 > from_.size) return static_cast<std::uint32_t>(behind_.below(1 << 30));
    at_ += 2;
    return static_cast<std::uint32_t>(from_.data[at_ - 2] << 8 | from_.data[at_ - 1]);
  }

 private:
  Bytes from_;
  Choices behind_;
  std::size_t at_ = 0;
};

struct Input {
  AugmentPlan plan;
  std::vector<double> row;
  std::int64_t shape[3], after[3];
  Element element, element_after;
  std::vector<float> values;

  bool is_accepted() {
    std::copy(shape, shape + 3, after);
    element_after = element;
    return problem_of(plan, after, &element_after) == nullptr;
  }
  bool is_small() const {
    return after[1] <= 1024 && after[2] <= 1024 && after[0] * after[1] * after[2] <= kMostNumbers;
  }
};

// What becomes of the image in memory of some layouts: its numbers, or none where something lacks.
std::vector<float> made(const Input& input, Draws& draws) {
  Memory from(input.shape[0], input.shape[1], input.shape[2], input.element, draws.layout(), draws.chance(50));
  Memory previous(input.shape[0], input.shape[1], input.shape[2], input.element, Layout::planar);
  Memory to(input.after[0], input.after[1], input.after[2], input.element_after, draws.layout(), draws.chance(50));
  from.fill(input.values);
  previous.fill(input.values);
  static Arena arena;
  arena.reset();
  const Change change =
      augment(input.plan, from.view(), &previous.view(), input.row.data(), to.view(), draws.chance(50), arena);
  require(change == Change::made || change == Change::outside, "an image that is made, or lacks pixels");
  require(from.is_intact() && to.is_intact(), "nothing beside the image");
  return change == Change::made ? to.values() : std::vector<float>{};
}

void check(const Input& input, Draws& draws) {
  std::vector<float> expected;
  for (int at = 0; at < 2 * (static_cast<int>(best_level()) + 1); ++at) {
    require(force_level(static_cast<Level>(at / 2)), "a level that the processor has");
    const std::vector<float> found = made(input, draws);
    if (at == 0) expected = found;
    require(found.size() == expected.size() &&
                (found.empty() || std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0),
            "the same each time, at each level, in each layout");
  }
}

// Another number somewhere in the plan: what is accepted nevertheless does no harm.
void damage(Input& input, Draws& draws) {
  if (input.plan.steps.empty()) return;
  AugmentStep& step =
      input.plan
          .steps[static_cast<std::size_t>(draws.between(0, static_cast<std::int32_t>(input.plan.steps.size()) - 1))];
  const std::int32_t number = draws.between(-4, 70);
  switch (draws.between(0, 4)) {
    case 0:
      step.kind = static_cast<AugmentStep::Kind>(number);
      break;
    case 1:
      step.column = number;
      break;
    case 2:
      if (!step.options.empty()) {
        step.options[static_cast<std::size_t>(draws.between(0, static_cast<std::int32_t>(step.options.size()) - 1))] =
            number;
      }
      break;
    case 3:
      step.numbers.resize(static_cast<std::size_t>(number + 4));
      break;
    default:
      step.options.resize(static_cast<std::size_t>(number + 4));
      break;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  OfBytes draws({data, size});
  Input input;
  input.element = static_cast<Element>(draws.between(0, 3));
  input.shape[0] = draws.chance(60) ? 3 : draws.between(1, 5);
  input.shape[1] = draws.between(1, 40);
  input.shape[2] = draws.between(1, 70);
  input.plan = random_plan(draws, input.shape, input.element, &input.row);
  require(input.is_accepted(), "a plan that is one");
  Random pixels(draws.between(0, 1 << 16));
  for (std::int64_t at = 0; at < input.shape[0] * input.shape[1] * input.shape[2]; ++at) {
    input.values.push_back(pixels.number(input.element));
  }
  // What is in between may be as large as a side of the plan's.
  if (!input.is_small()) return 0;
  check(input, pixels);
  damage(input, draws);
  if (input.is_accepted() && input.is_small()) check(input, pixels);
  return 0;
}
