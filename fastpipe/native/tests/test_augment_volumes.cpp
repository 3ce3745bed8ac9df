// Chains of steps at every level that this processor has, equal bit for bit, whatever the numbers are and however many
// threads there are.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "../augment_volumes.h"
#include "../simd.h"
#include "check.h"
#include "random.h"

namespace {

using namespace fastpipe;
using tests::between;
using tests::random_number;
using tests::uniform;
using Kind = VolumeStep::Kind;

// Numbers that lead outside of memory where nobody looks.
double hostile() {
  const double inf = std::numeric_limits<double>::infinity();
  const double some[] = {0, 1, -1, 0.5, 1e-9, 1e9, -1e9, 1e300, -1e300, inf, -inf, std::nan(""), 2.7e9, 1.5};
  return some[between(0, 13)];
}

struct Case {
  VolumePlan plan;
  std::vector<double> table;
  std::vector<std::uint8_t> source;
  std::int64_t strides[5];
  std::int64_t count = 2;
  std::vector<std::uint8_t> run(int threads) const {
    const std::int64_t* to = plan.shape_after;
    const auto size = static_cast<std::size_t>(count * to[0] * to[1] * to[2] * to[3] * size_of(plan.to));
    std::vector<std::uint8_t> goal(size, 0xa5);
    VolumeBatch batch;
    batch.source = source.data();
    std::memcpy(batch.strides, strides, sizeof(strides));
    batch.count = count;
    batch.table = table.data();
    batch.columns = plan.columns;
    batch.goal = goal.data();
    CHECK(augment_volumes(plan, batch, threads));
    return goal;
  }
};

void add_step(Case* made, Kind kind, std::int64_t* size, bool is_hostile) {
  VolumeStep step;
  step.kind = kind;
  step.column = static_cast<std::int64_t>(made->table.size());
  std::vector<double> numbers;
  const std::int64_t channels = made->plan.shape[0];
  const auto flag = [] { return random_number() % 4 != 0 ? 1.0 : 0.0; };
  switch (kind) {
    case Kind::skip:
      return;
    case Kind::flip:
      step.options = {0, 1, 2};
      for (int i = 0; i < 3; ++i) numbers.push_back(static_cast<double>(random_number() & 1));
      break;
    case Kind::rotate90:
      if (size[1] != size[2]) return;
      step.options = {1, 2};
      numbers = {static_cast<double>(between(0, 3))};
      break;
    case Kind::warp:
    case Kind::warp_nearest: {
      const bool is_bent = (random_number() & 1) != 0;
      for (int axis = 0; axis < 3; ++axis) step.options.push_back(between((size[axis] + 1) / 2, size[axis]));
      step.options.push_back(random_number() & 1);
      for (int axis = 0; axis < 3; ++axis) step.options.push_back(is_bent ? between(2, 5) : 0);
      step.numbers = {1.0, 0.5, 1.0, 2.0};
      numbers.push_back(flag());
      for (int i = 0; i < 12; ++i) {
        const bool is_diagonal = i % 5 == 0;
        numbers.push_back(uniform(-0.4, 0.4) + (is_diagonal ? 1.0 : 0.0));
      }
      if (is_bent) {
        numbers.push_back(flag());
        numbers.push_back(static_cast<double>(random_number()));
      }
      for (int axis = 0; axis < 3; ++axis) size[axis] = step.options[static_cast<std::size_t>(axis)];
      break;
    }
    case Kind::noise:
      numbers = {uniform(0, 1), static_cast<double>(random_number())};
      break;
    default:
      if (kind == Kind::contrast) step.options = {static_cast<std::int64_t>(random_number() & 1)};
      if (kind == Kind::gamma) {
        step.options = {static_cast<std::int64_t>(random_number() & 1), static_cast<std::int64_t>(random_number() & 1)};
      }
      if (kind == Kind::low_resolution) step.options = {0, 1, 2};
      for (std::int64_t c = 0; c < channels; ++c) {
        numbers.push_back(flag());
        numbers.push_back(uniform(0.3, 1.5));
        for (int i = 0; i < 2 && kind == Kind::blur; ++i) numbers.push_back(uniform(0, 3.0));
      }
  }
  if (is_hostile) {
    for (double& one : numbers) one = random_number() % 2 == 0 ? hostile() : one;
    // A blur of a billion voxels is one, but takes its time.
    for (double& one : numbers) one = kind == Kind::blur && one > 40 ? 40 : one;
  }
  made->table.insert(made->table.end(), numbers.begin(), numbers.end());
  made->plan.steps.push_back(step);
}

// A chain for volumes, or for labels; their rows are apart, or run backwards.
Case make_case(bool is_labels, bool is_large, bool is_hostile) {
  const Number worked[] = {Number::f32, Number::f32, Number::u8,  Number::i8,  Number::i16,
                           Number::u16, Number::i32, Number::f16, Number::bf16};
  const Number labels[] = {Number::u8, Number::u16, Number::i32, Number::f64, Number::f32, Number::i64};
  Case made;
  VolumePlan& plan = made.plan;
  plan.from = is_labels ? labels[between(0, 5)] : worked[between(0, 8)];
  const bool is_half = plan.from == Number::f16 || plan.from == Number::bf16;
  plan.to = is_labels || is_half ? plan.from : Number::f32;
  plan.shape[0] = between(1, 2);
  const std::int64_t most = is_large ? 40 : 17, least = is_large ? 30 : 1;
  for (int axis = 1; axis < 4; ++axis) plan.shape[axis] = between(least, most);
  if (random_number() % 2 == 0) plan.shape[3] = plan.shape[2];
  std::int64_t size[3] = {plan.shape[1], plan.shape[2], plan.shape[3]};
  const Kind any[] = {Kind::flip,     Kind::rotate90, Kind::warp, Kind::noise, Kind::brightness,
                      Kind::contrast, Kind::gamma,    Kind::blur, Kind::flip,  Kind::low_resolution};
  const Kind moving[] = {Kind::flip, Kind::rotate90, Kind::warp_nearest};
  for (std::int64_t i = between(1, 6); i > 0; --i) {
    add_step(&made, is_labels ? moving[between(0, 2)] : any[between(0, 9)], size, is_hostile);
  }
  if (!is_labels) add_step(&made, Kind::brightness, size, false);
  CHECK(plan.check() == nullptr);
  const std::vector<double> row = made.table;
  made.table.insert(made.table.end(), row.begin(), row.end());
  // Sources with room between rows.
  const std::int64_t value = size_of(plan.from), gap = between(0, 3);
  made.strides[4] = value;
  made.strides[3] = value * (plan.shape[3] + gap);
  made.strides[2] = made.strides[3] * plan.shape[2];
  made.strides[1] = made.strides[2] * plan.shape[1];
  made.strides[0] = made.strides[1] * plan.shape[0];
  made.source.resize(static_cast<std::size_t>(made.strides[0] * made.count));
  for (auto& byte : made.source) byte = static_cast<std::uint8_t>(random_number());
  if (plan.from == Number::f32) {
    for (std::size_t i = 0; i + 4 <= made.source.size(); i += 4) {
      const float one = static_cast<float>(uniform(-3, 3));
      std::memcpy(made.source.data() + i, &one, sizeof(one));
    }
  }
  return made;
}

// Whether results are the same; of no number, any.
bool same(Number kind, const std::vector<std::uint8_t>& one, const std::vector<std::uint8_t>& other) {
  if (one == other) return true;
  if (one.size() != other.size()) return false;
  for (std::size_t i = 0; i < one.size(); i += static_cast<std::size_t>(size_of(kind))) {
    std::uint32_t a = 0, b = 0;
    std::memcpy(&a, one.data() + i, static_cast<std::size_t>(size_of(kind) == 2 ? 2 : 4));
    std::memcpy(&b, other.data() + i, static_cast<std::size_t>(size_of(kind) == 2 ? 2 : 4));
    const std::uint32_t infinity = kind == Number::f32 ? 0x7f800000 : kind == Number::f16 ? 0x7c00 : 0x7f80;
    const std::uint32_t rest = kind == Number::f32 ? 0x7fffffff : 0x7fff;
    if (a != b && ((a & rest) <= infinity || (b & rest) <= infinity)) return false;
  }
  return true;
}

void compare(const Case& one) {
  const Level before = level();
  CHECK(force_level(Level::baseline));
  const std::vector<std::uint8_t> wanted = one.run(1);
  CHECK(same(one.plan.to, one.run(3), wanted));
  for (const Level other : {Level::avx2, Level::avx512}) {
    if (force_level(other)) CHECK(same(one.plan.to, one.run(2), wanted));
  }
  CHECK(force_level(before));
}

TEST("augmented volumes are the same at each level, in any number of threads") {
  for (int i = 0; i < 150; ++i) compare(make_case(i % 4 == 0, i % 10 == 9, false));
}

TEST("numbers that no chain draws lead nowhere") {
  for (int i = 0; i < 300; ++i) compare(make_case(i % 4 == 0, i % 20 == 19, true));
}

TEST("plans that cannot be are refused") {
  const auto refused = [](VolumeStep step, Number from, Number to) {
    VolumePlan plan;
    plan.steps = {std::move(step)};
    const std::int64_t shape[4] = {1, 4, 5, 6};
    std::memcpy(plan.shape, shape, sizeof(shape));
    plan.from = from;
    plan.to = to;
    return plan.check() != nullptr;
  };
  const auto f32 = Number::f32;
  CHECK(!refused({Kind::flip, 0, {0, 2}, {}}, f32, f32));
  CHECK(refused({Kind::flip, 0, {3}, {}}, f32, f32));
  CHECK(refused({Kind::flip, -1, {0}, {}}, f32, f32));
  CHECK(refused({Kind::flip, 0, {0}, {}}, Number::u8, f32));
  CHECK(refused({Kind::skip, 0, {1}, {}}, f32, f32));
  CHECK(refused({Kind::rotate90, 0, {1, 2}, {}}, f32, f32));
  CHECK(!refused({Kind::warp, 0, {4, 5, 6, 0, 2, 2, 2}, {0, 1, 1, 1}}, f32, f32));
  CHECK(refused({Kind::warp, 0, {4, 5, 7, 0, 0, 0, 0}, {0, 1, 1, 1}}, f32, f32));
  CHECK(refused({Kind::warp, 0, {4, 5, 6, 0, 2, 0, 2}, {0, 1, 1, 1}}, f32, f32));
  CHECK(refused({Kind::warp, 0, {4, 5, 6, 0, 2, 1, 2}, {0, 1, 1, 1}}, f32, f32));
  CHECK(refused({Kind::warp, 0, {4, 5, 6, 0, 0, 0, 0}, {0}}, f32, f32));
  CHECK(refused({Kind::gamma, 0, {1}, {}}, f32, f32));
  CHECK(refused({Kind::noise, 0, {}, {}}, Number::f64, f32));
  CHECK(refused({Kind::noise, 0, {}, {}}, Number::u8, Number::u8));
  CHECK(refused({Kind::low_resolution, 0, {5}, {}}, f32, f32));
}

}  // namespace
