#include "augment_volumes.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

#include "engine.h"
#include "levels.h"
#include "scratch.h"

namespace fastpipe {

namespace {

struct Half {
  std::uint16_t bits;
};
struct BFloat {
  std::uint16_t bits;
};

// A channel whose voxels are found by adding multiples of these strides, in values; `first` is the least sum.
struct Grid {
  std::int32_t size[3];
  std::int32_t stride[3];
  std::int32_t first;
};

struct VolumeKernels {
  void (*load)(Number, const void*, std::int64_t, std::int64_t, float*);
  void (*store_half)(const float*, std::int64_t, bool, std::uint16_t*);
  void (*move)(int, const void*, std::int64_t, std::int64_t, void*);
  void (*swap_rows)(int, void*, void*, std::int64_t, bool);
  void (*moments)(const float*, std::int64_t, double*);
  void (*scale)(float*, std::int64_t, float);
  void (*rescale)(float*, std::int64_t, float, float, float);
  void (*rescale_within)(float*, std::int64_t, float, float, float, float, float);
  void (*raise)(float*, std::int64_t, float, float, float, float);
  void (*add_noise)(float*, std::int64_t, std::uint32_t, std::uint32_t, float);
  void (*blur_rows)(const float* const*, const float*, std::int64_t, std::int64_t, float*);
  void (*mix_rows)(const float*, const float*, float, float, std::int64_t, float*);
  void (*mix_places)(const float*, const std::int32_t*, const std::int32_t*, const float*, const float*, std::int64_t,
                     float*);
  void (*places)(float, float, std::int32_t, std::int32_t, float*);
  void (*add_scaled)(const float*, float, std::int32_t, float*);
  void (*between)(const float*, const std::int32_t*, const float*, std::int32_t, float*);
  void (*insides)(const Grid&, const float* const*, std::int32_t, std::uint8_t*);
  void (*linear)(const float*, const Grid&, const float* const*, std::int32_t, float*);
  void (*nearest)(const Grid&, const float* const*, std::int32_t, bool, std::int32_t*);
};

#define FASTPIPE_BODY "augment_volumes_kernels.inc"
#include "each_level.inc"
#undef FASTPIPE_BODY

using Kind = VolumeStep::Kind;

constexpr std::int64_t kPart = std::int64_t{1} << 15;  // voxels that a thread works on at a time, and small volumes
constexpr std::int64_t kColumns = 256;                 // lines side by side that are worked on at once
constexpr std::int64_t kBlock = 256;                   // places of a row that are worked on at once
constexpr std::int64_t kMostPoints = std::int64_t{1} << 20;
constexpr double kMostRadius = 1 << 16;
constexpr double kBlurred = 1e-3;               // voxels; less is no blur
constexpr double kTruncate = 3.0;               // standard deviations of a Gaussian
constexpr double kRounding = 1e-3;              // voxels, much more than float32 places differ by
constexpr double kLeast = 1e-7;                 // what numbers are divided by
constexpr std::uint32_t kGolden = 0x9E3779B9u;  // between the seeds of channels

// ---- memory ----------------------------------------------------------------------------------------------------

struct Free {
  void operator()(void* memory) const noexcept { std::free(memory); }
};
using Memory = std::unique_ptr<std::uint8_t, Free>;

// Memory of the last large volumes, for the next ones: fresh memory costs more time than most steps.
struct Spare {
  struct Block {
    Memory memory;
    std::size_t size = 0;
  };
  static constexpr std::size_t kMost = std::size_t{256} << 20;  // bytes of one that is kept
  std::atomic<Block*> blocks[2] = {};
};

Spare& spare() {
  static auto* const kept = new Spare;  // threads may need it while the process ends
  return *kept;
}

std::unique_ptr<Spare::Block> take_memory(std::size_t size) {
  for (auto& slot : spare().blocks) {
    std::unique_ptr<Spare::Block> found(slot.exchange(nullptr));
    if (found != nullptr && found->size >= size && found->size / 4 <= size) return found;
  }
  auto made = std::make_unique<Spare::Block>();
  made->memory.reset(static_cast<std::uint8_t*>(std::malloc(std::max<std::size_t>(size, 1))));
  made->size = size;
  return made->memory == nullptr ? nullptr : std::move(made);
}

void keep_memory(std::unique_ptr<Spare::Block> block) {
  if (block == nullptr || block->size > Spare::kMost) return;
  for (auto& slot : spare().blocks) {
    Spare::Block* empty = nullptr;
    if (slot.compare_exchange_strong(empty, block.get())) {
      block.release();
      return;
    }
  }
}

// ---- parts, in threads or here ---------------------------------------------------------------------------------

template <typename Do>
class Parts final : public Work {
 public:
  Parts(std::int64_t count, Do& part, std::atomic<bool>& failed) : count_(count), part_(part), failed_(failed) {}
  std::int64_t size() const noexcept override { return count_; }
  void run(std::int64_t item, Scratch& scratch) override {
    if (!part_(item, scratch)) failed_ = true;
  }
  void lost(std::int64_t) noexcept override { failed_ = true; }

 private:
  const std::int64_t count_;
  Do& part_;  // of whoever waits for all items
  std::atomic<bool>& failed_;
};

// Do a number of things, each of which returns whether there was memory for it; whether there was for all.
template <typename Do>
bool in_threads(std::int64_t count, int threads, Do part) {
  std::atomic<bool> failed{false};
  run_in_threads(std::make_shared<Parts<Do>>(count, part, failed), threads);
  return !failed;
}

// ---- a volume on its way ---------------------------------------------------------------------------------------

// Where a channel's voxels are.
struct View {
  const std::uint8_t* data = nullptr;
  std::int64_t stride[3] = {};  // bytes, from one plane, row and voxel to the next
  Number kind = Number::f32;
  int place = -1;           // the memory it is in: what was given (-1), the goal (0), or one of two others
  bool is_settled = false;  // whether it is all of its place, in order, and may be changed there
};

struct Statistics {
  double mean = 0, deviation = 0, low = 0, high = 0;
};

// A step with a volume's numbers.
struct Active {
  const VolumeStep* step;
  const double* numbers;
  bool flips[3];  // of a flip; of a warp, what comes after it
};

// Weighted sums along an axis.
struct Taps {
  bool is_there = false;
  std::int64_t radius = 0;            // of a blur
  std::vector<std::int32_t> index;    // of a blur, of places from -radius on; else of the first of two
  std::vector<std::int32_t> other;    // of the second of two; empty for a blur
  std::vector<float> weights, rests;  // of a blur from the middle on; else of both
};

Taps gaussian(std::int64_t length, double sigma) {
  Taps taps;
  taps.is_there = true;
  taps.radius = static_cast<std::int64_t>(std::min(kTruncate * sigma + 0.5, kMostRadius));
  const std::int64_t radius = taps.radius, period = 2 * (length - 1);
  std::vector<double> weights(static_cast<std::size_t>(radius) + 1);
  double sum = 0;
  for (std::int64_t k = 0; k <= radius; ++k) {
    const double at = static_cast<double>(k) / sigma;
    weights[static_cast<std::size_t>(k)] = std::exp(-0.5 * at * at);
    sum += (k == 0 ? 1 : 2) * weights[static_cast<std::size_t>(k)];
  }
  for (const double weight : weights) taps.weights.push_back(static_cast<float>(weight / sum));
  for (std::int64_t at = -radius; at < length + radius; ++at) {
    std::int64_t found = 0;
    if (period > 0) {  // mirrored about the voxels at the ends, as often as it takes
      found = (at + length - 1) % period;
      found = std::abs((found < 0 ? found + period : found) - (length - 1));
    }
    taps.index.push_back(static_cast<std::int32_t>(found));
  }
  return taps;
}

Taps lower_resolution(std::int64_t length, std::int64_t fewer) {
  Taps taps;
  taps.is_there = true;
  const double ratio = static_cast<double>(fewer) / static_cast<double>(length);
  const auto kept = [&](std::int64_t i) { return static_cast<std::int32_t>((2 * i + 1) * length / (2 * fewer)); };
  for (std::int64_t i = 0; i < length; ++i) {
    const double most = static_cast<double>(fewer - 1);
    const double at = std::min(std::max((static_cast<double>(i) + 0.5) * ratio - 0.5, 0.0), most);
    const std::int64_t below = static_cast<std::int64_t>(at);
    const float part = static_cast<float>(at - static_cast<double>(below));
    taps.index.push_back(kept(below));
    taps.other.push_back(kept(std::min(below + 1, fewer - 1)));
    taps.weights.push_back(1.0f - part);
    taps.rests.push_back(part);
  }
  return taps;
}

// How many of the voxels of a line are kept: all, if the part is no number.
std::int64_t fewer_of(std::int64_t length, double part) {
  const double found = std::nearbyint(static_cast<double>(length) * part);
  return found < static_cast<double>(length)
             ? std::max<std::int64_t>(1, static_cast<std::int64_t>(std::max(found, 1.0)))
             : length;
}

std::uint32_t seed_of(double number) {
  const double range = 4294967296.0, rest = std::fmod(std::trunc(number), range);
  if (!(std::fabs(rest) < range)) return 0;  // no number
  return static_cast<std::uint32_t>(static_cast<std::int64_t>(rest));
}

int turns_of(double number) {
  const double rest = std::fmod(std::trunc(number), 4.0);
  return std::fabs(rest) < 4.0 ? (static_cast<int>(rest) + 4) % 4 : 0;
}

// The bits of a fill, as values of this kind.
template <typename T>
std::uint64_t bits_as(T value) {
  std::uint64_t found = 0;
  std::memcpy(&found, &value, sizeof(value));
  return found;
}

template <typename T>
std::uint64_t whole_bits(double value) {  // what does not fit, the caller has refused
  const bool fits = value >= -9223372036854775808.0 && value < 18446744073709551616.0;
  if (!fits) return 0;
  return value < 0 ? bits_as(static_cast<T>(static_cast<std::int64_t>(value)))
                   : bits_as(static_cast<T>(static_cast<std::uint64_t>(value)));
}

std::uint64_t fill_bits(Number kind, double value) {
  const float rounded = static_cast<float>(value);
  std::uint16_t half = 0;
  switch (kind) {
    case Number::f64:
      return bits_as(value);
    case Number::f32:
      return bits_as(rounded);
    case Number::f16:
    case Number::bf16:
      baseline::store_half(&rounded, 1, kind == Number::bf16, &half);
      return half;
    case Number::u8:
      return whole_bits<std::uint8_t>(value);
    case Number::i8:
      return whole_bits<std::int8_t>(value);
    case Number::u16:
      return whole_bits<std::uint16_t>(value);
    case Number::i16:
      return whole_bits<std::int16_t>(value);
    case Number::u32:
      return whole_bits<std::uint32_t>(value);
    case Number::i32:
      return whole_bits<std::int32_t>(value);
    default:
      return whole_bits<std::uint64_t>(value);
  }
}

struct Line {
  float from[3], step[3];
};

struct Range {
  std::int64_t begin, end;
};

// The voxels of a row whose places are more than `low` and less than size + `high`; of none, where they are not sure to
// be (`is_sure`) or sure not to be.
Range between(const Line& line, const std::int64_t* size, std::int64_t count, double low, double high, bool is_sure) {
  double first = 0.0, last = static_cast<double>(count - 1);
  const double more = is_sure ? kRounding : -kRounding;
  for (int axis = 0; axis < 3; ++axis) {
    const double begin = line.from[axis], step = line.step[axis];
    const double least = low + more, most = static_cast<double>(size[axis]) + high - more;
    if (std::fabs(step) * static_cast<double>(count) < kRounding) {
      if (!(begin >= least + more && begin <= most - more)) return {0, 0};
      continue;
    }
    const double one = (least - begin) / step, other = (most - begin) / step;
    first = std::max(first, std::min(one, other));
    last = std::min(last, std::max(one, other));
  }
  if (!(first <= last)) return {0, 0};  // NaN neither; and what is far away is no whole number
  const auto begin = static_cast<std::int64_t>(std::ceil(first)), end = static_cast<std::int64_t>(std::floor(last)) + 1;
  return begin < end ? Range{begin, end} : Range{0, 0};
}

// A map of places, and how far voxels are moved before.
struct Map {
  double matrix[12];
  std::int64_t size[3], new_size[3];
  bool flips[3];
  bool has_edge;
  float fill;
  std::uint64_t bits;           // of the fill
  std::int64_t points[3] = {};  // 0: none
  std::vector<float> bends;     // (3, *points)
  std::vector<std::int32_t> below;
  std::vector<float> parts;

  // Where the first voxel of a row comes from, and the steps to the next.
  Line line(std::int64_t z, std::int64_t y) const {
    const double at[3] = {static_cast<double>(z) - 0.5 * static_cast<double>(new_size[0] - 1),
                          static_cast<double>(y) - 0.5 * static_cast<double>(new_size[1] - 1),
                          -0.5 * static_cast<double>(new_size[2] - 1)};
    Line found;
    for (int axis = 0; axis < 3; ++axis) {
      const double* m = matrix + 4 * axis;
      found.from[axis] = static_cast<float>(m[0] * at[0] + m[1] * at[1] + m[2] * at[2] + m[3] +
                                            0.5 * static_cast<double>(size[axis] - 1));
      found.step[axis] = static_cast<float>(m[2]);
    }
    return found;
  }
};

class Changed {
 public:
  Changed(const VolumePlan& plan, const VolumeBatch& batch, std::int64_t number, int threads, Scratch* own)
      : plan_(plan), batch_(batch), number_(number), threads_(threads), own_(own), kernels_(table_in_use()) {}
  ~Changed() {
    for (auto& block : blocks_) keep_memory(std::move(block));
  }
  Changed(const Changed&) = delete;
  Changed& operator=(const Changed&) = delete;

  // Return whether there was memory for it.
  bool run() {
    const double* row = batch_.table + number_ * batch_.columns;
    channels_ = plan_.shape[0];
    std::copy_n(plan_.shape + 1, 3, size_);
    work_kind_ = plan_.only_moves ? plan_.from : Number::f32;
    value_ = size_of(work_kind_);
    most_ = size_[0] * size_[1] * size_[2];  // no step makes a volume larger
    views_.resize(static_cast<std::size_t>(channels_));
    for (std::int64_t c = 0; c < channels_; ++c) {
      View& view = views_[static_cast<std::size_t>(c)];
      view.data = batch_.source + number_ * batch_.strides[0] + c * batch_.strides[1];
      std::copy_n(batch_.strides + 2, 3, view.stride);
      view.kind = plan_.from;
    }
    moments_.resize(static_cast<std::size_t>(channels_));
    choose(row);
    for (at_ = 0; at_ < active_.size(); ++at_) {
      if (!step(active_[at_])) return false;
    }
    return finish();
  }

 private:
  using Which = std::vector<std::int64_t>;

  // ---- what is done

  static bool commutes(Kind kind) {
    return kind == Kind::brightness || kind == Kind::contrast || kind == Kind::gamma || kind == Kind::blur;
  }

  static std::int64_t width_of(Kind kind) { return kind == Kind::blur ? 4 : 2; }

  // The steps that change something.  Mirroring comes before what it makes no difference to: then no pass over the
  // volume is needed for it alone.
  void choose(const double* row) {
    for (std::size_t i = 0; i < plan_.steps.size(); ++i) {
      const VolumeStep& step = plan_.steps[i];
      const double* numbers = row + step.column;
      Active one{&step, numbers, {}};
      switch (step.kind) {
        case Kind::skip:
          if (numbers[0] == 0) i += static_cast<std::size_t>(step.options[0]);
          continue;
        case Kind::flip: {
          bool is_any = false;
          for (std::size_t k = 0; k < step.options.size(); ++k) {
            const bool is_flipped = numbers[k] != 0;
            one.flips[step.options[k]] = is_flipped;
            is_any = is_any || is_flipped;
          }
          if (is_any) add_flip(one);
          continue;
        }
        case Kind::rotate90:
          if (turns_of(numbers[0]) == 0) continue;
          break;
        case Kind::noise:
          if (numbers[0] == 0) continue;
          break;
        case Kind::warp:
        case Kind::warp_nearest:
          break;
        default:
          if (changed_by(one).empty()) continue;
      }
      active_.push_back(one);
    }
  }

  void add_flip(const Active& flip) {
    std::size_t at = active_.size();
    while (at > 0 && commutes(active_[at - 1].step->kind)) --at;
    if (at > 0) {
      Active& before = active_[at - 1];
      const bool is_warp = before.step->kind == Kind::warp || before.step->kind == Kind::warp_nearest;
      if (is_warp && before.numbers[0] != 0) {
        for (int axis = 0; axis < 3; ++axis) before.flips[axis] = before.flips[axis] != flip.flips[axis];
        return;
      }
    }
    active_.insert(active_.begin() + static_cast<std::ptrdiff_t>(at), flip);
  }

  // The channels that a step with numbers for each of them changes.
  Which changed_by(const Active& one) const {
    Which found;
    const std::int64_t width = width_of(one.step->kind);
    for (std::int64_t c = 0; c < channels_; ++c) {
      if (one.numbers[c * width] != 0) found.push_back(c);
    }
    return found;
  }

  // Return whether the next step that changes a channel needs to know its statistics.
  bool is_asked_for(std::int64_t channel) const {
    for (std::size_t i = at_ + 1; i < active_.size(); ++i) {
      const Active& next = active_[i];
      switch (next.step->kind) {
        case Kind::flip:
        case Kind::rotate90:
          continue;
        case Kind::contrast:
        case Kind::gamma:
          if (next.numbers[2 * channel] != 0) return true;
          continue;
        case Kind::brightness:
        case Kind::blur:
        case Kind::low_resolution:
          if (next.numbers[channel * width_of(next.step->kind)] != 0) return false;
          continue;
        default:
          return false;
      }
    }
    return false;
  }

  bool step(const Active& one) {
    switch (one.step->kind) {
      case Kind::flip:
        return flip(one);
      case Kind::rotate90:
        return turn(one);
      case Kind::warp:
      case Kind::warp_nearest:
        return warp(one);
      case Kind::noise:
        return noise(one);
      case Kind::brightness:
        return brightness(one);
      case Kind::contrast:
        return contrast(one);
      case Kind::gamma:
        return gamma(one);
      case Kind::blur:
      case Kind::low_resolution:
        return along(one);
      default:
        return true;
    }
  }

  // ---- where voxels are

  View& view(std::int64_t channel) { return views_[static_cast<std::size_t>(channel)]; }
  std::vector<double>& moments(std::int64_t channel) { return moments_[static_cast<std::size_t>(channel)]; }
  std::int64_t voxels() const { return size_[0] * size_[1] * size_[2]; }
  std::int64_t rows() const { return size_[0] * size_[1]; }
  // Rows of a part: an even number, so that parts begin with an even voxel.
  std::int64_t part_rows() const { return std::max<std::int64_t>(2, kPart / size_[2] / 2 * 2); }
  std::int64_t parts() const { return (rows() + part_rows() - 1) / part_rows(); }

  const std::uint8_t* row_of(const View& from, std::int64_t row) const {
    return from.data + row / size_[1] * from.stride[0] + row % size_[1] * from.stride[1];
  }

  // Return whether the view is what `values` of a settled channel are, to read.
  bool is_plain(const View& from) const {
    return from.kind == work_kind_ && from.stride[2] == value_ && from.stride[1] == value_ * size_[2] &&
           from.stride[0] == value_ * size_[2] * size_[1];
  }

  bool goal_fits() const { return work_kind_ == plan_.to && std::equal(size_, size_ + 3, plan_.shape_after + 1); }

  // Memory for a channel that it is not in; null where there is none.
  std::uint8_t* other_place(std::int64_t channel, bool is_for_long, int* place) {
    const int taken = view(channel).place;
    int order[3] = {0, 1, 2};
    if (!is_for_long) std::swap(order[0], order[2]);
    for (const int one : order) {
      if (one == taken || (one == 0 && !goal_fits())) continue;
      *place = one;
      if (one == 0) return goal(channel);
      auto& memory = memories_[one - 1];
      if (memory == nullptr) {
        const auto size = static_cast<std::size_t>(channels_ * most_ * value_);
        if (own_ != nullptr) {
          memory = static_cast<std::uint8_t*>(own_->arena.allocate(size));
        } else {
          blocks_[one - 1] = take_memory(size);
          memory = blocks_[one - 1] == nullptr ? nullptr : blocks_[one - 1]->memory.get();
        }
        if (memory == nullptr) return nullptr;
      }
      return memory + channel * most_ * value_;
    }
    return nullptr;
  }

  std::uint8_t* goal(std::int64_t channel) const {
    const std::int64_t* to = plan_.shape_after;
    return batch_.goal + (number_ * channels_ + channel) * to[1] * to[2] * to[3] * size_of(plan_.to);
  }

  void settle(std::int64_t channel, std::uint8_t* data, int place) {
    view(channel) = {data, {value_ * size_[2] * size_[1], value_ * size_[2], value_}, work_kind_, place, true};
  }

  // Where values of a channel go that are changed voxel by voxel.
  struct Place {
    std::int64_t channel;
    View from;
    std::uint8_t* data;
    int place;
    float* values() const { return reinterpret_cast<float*>(data); }
  };

  bool places_for(const Which& which, bool is_for_long, std::vector<Place>* found) {
    for (const std::int64_t c : which) {
      Place one{c, view(c), nullptr, view(c).place};
      one.data =
          one.from.is_settled ? const_cast<std::uint8_t*>(one.from.data) : other_place(c, is_for_long, &one.place);
      if (one.data == nullptr) return false;
      found->push_back(one);
    }
    return true;
  }

  void read_row(const View& from, std::int64_t row, void* out) const {
    const std::int64_t stride = from.stride[2] / size_of(from.kind);
    if (from.kind == work_kind_) {
      kernels_.move(value_, row_of(from, row), stride, size_[2], out);
    } else {
      kernels_.load(from.kind, row_of(from, row), stride, size_[2], static_cast<float*>(out));
    }
  }

  void read_rows(const View& from, std::int64_t first, std::int64_t last, std::uint8_t* out) const {
    if (is_plain(from)) {
      std::memcpy(out, row_of(from, first), static_cast<std::size_t>((last - first) * size_[2] * value_));
      return;
    }
    for (std::int64_t row = first; row < last; ++row) read_row(from, row, out + (row - first) * size_[2] * value_);
  }

  // ---- passes over volumes

  template <typename Do>
  bool each(std::int64_t count, Do part) {
    if (own_ == nullptr) return in_threads(count, threads_, part);
    for (std::int64_t i = 0; i < count; ++i) {
      if (!part(i, *own_)) return false;
      own_->chunk.reset();
    }
    return true;
  }

  // Change channels voxel by voxel: `change` has the channel's number in `which`, and the voxels of a part, with the
  // number of the first.
  template <typename Do>
  bool change(const Which& which, bool with_moments, Do change) {
    std::vector<Place> to;
    if (!places_for(which, true, &to)) return false;
    std::vector<bool> is_wanted;
    for (const std::int64_t c : which) is_wanted.push_back(expect_moments(c, with_moments || is_asked_for(c)));
    const std::int64_t count = parts(), step = part_rows();
    const bool is_done = each(static_cast<std::int64_t>(which.size()) * count, [&](std::int64_t item, Scratch&) {
      const auto k = static_cast<std::size_t>(item / count);
      const std::int64_t part = item % count, first = part * step, last = std::min(first + step, rows());
      float* values = to[k].values() + first * size_[2];
      if (!to[k].from.is_settled) read_rows(to[k].from, first, last, reinterpret_cast<std::uint8_t*>(values));
      change(k, values, (last - first) * size_[2], first * size_[2]);
      if (is_wanted[k]) kernels_.moments(values, (last - first) * size_[2], moments_of(to[k].channel, part));
      return true;
    });
    for (const Place& one : to) settle(one.channel, one.data, one.place);
    return is_done;
  }

  double* moments_of(std::int64_t channel, std::int64_t part) { return moments(channel).data() + 5 * part; }

  // Forget a channel's moments, or make room for new ones; the answer is `is_wanted`.
  bool expect_moments(std::int64_t channel, bool is_wanted) {
    moments(channel).assign(is_wanted ? static_cast<std::size_t>(5 * parts()) : 0, 0.0);
    return is_wanted;
  }

  // Look at those channels whose statistics are not known.
  bool look(const Which& which) {
    Which unknown;
    for (const std::int64_t c : which) {
      if (moments(c).empty()) {
        unknown.push_back(c);
        expect_moments(c, true);
      }
    }
    const std::int64_t count = parts(), step = part_rows();
    return each(static_cast<std::int64_t>(unknown.size()) * count, [&](std::int64_t item, Scratch& scratch) {
      const std::int64_t c = unknown[static_cast<std::size_t>(item / count)], part = item % count;
      const std::int64_t first = part * step, last = std::min(first + step, rows()), n = (last - first) * size_[2];
      const View& from = view(c);
      const float* values = reinterpret_cast<const float*>(row_of(from, first));
      if (!is_plain(from)) {
        auto* read = scratch.chunk.array<float>(static_cast<std::size_t>(n));
        if (read == nullptr) return false;
        read_rows(from, first, last, reinterpret_cast<std::uint8_t*>(read));
        values = read;
      }
      kernels_.moments(values, n, moments_of(c, part));
      return true;
    });
  }

  // What was looked at; the parts are those of the volume as it is.
  Statistics statistics(std::int64_t channel) {
    const std::vector<double>& table = moments(channel);
    const std::int64_t count = static_cast<std::int64_t>(table.size()) / 5, step = part_rows() * size_[2];
    const double all = static_cast<double>(voxels());
    Statistics found;
    double sum = 0, low = table[3], high = table[4];
    bool is_number = true;
    const auto of_part = [&](std::int64_t part) { return static_cast<double>(std::min(step, voxels() - part * step)); };
    for (std::int64_t part = 0; part < count; ++part) {
      const double* one = table.data() + 5 * part;
      sum += of_part(part) * (one[0] + one[1] / of_part(part));
      low = one[3] < low ? one[3] : low;
      high = one[4] > high ? one[4] : high;
      is_number = is_number && one[1] == one[1];
    }
    found.mean = sum / all;
    double spread = 0;
    for (std::int64_t part = 0; part < count; ++part) {
      const double* one = table.data() + 5 * part;
      const double n = of_part(part), apart = one[0] + one[1] / n - found.mean;
      spread += one[2] - one[1] * one[1] / n + n * apart * apart;
    }
    found.deviation = std::sqrt((spread < 0 ? 0.0 : spread) / std::max(all - 1, 1.0));
    // Differences of NaN, or of infinities, are no numbers: then nothing of the values is.
    found.low = is_number ? low : std::numeric_limits<double>::quiet_NaN();
    found.high = is_number ? high : std::numeric_limits<double>::quiet_NaN();
    return found;
  }

  // ---- steps

  bool flip(const Active& one) {
    std::vector<Place> settled;
    for (std::int64_t c = 0; c < channels_; ++c) {
      View& from = view(c);
      if (from.is_settled) {
        settled.push_back({c, from, const_cast<std::uint8_t*>(from.data), from.place});
        continue;
      }
      for (int axis = 0; axis < 3; ++axis) {
        if (one.flips[axis]) mirror(&from, axis);
      }
    }
    const std::int64_t count = parts(), step = part_rows(), nbytes = size_[2] * value_;
    return each(static_cast<std::int64_t>(settled.size()) * count, [&](std::int64_t item, Scratch&) {
      std::uint8_t* data = settled[static_cast<std::size_t>(item / count)].data;
      const std::int64_t first = item % count * step, last = std::min(first + step, rows());
      for (std::int64_t row = first; row < last; ++row) {
        const std::int64_t z = row / size_[1], y = row % size_[1];
        const std::int64_t other =
            (one.flips[0] ? size_[0] - 1 - z : z) * size_[1] + (one.flips[1] ? size_[1] - 1 - y : y);
        if (row <= other) {
          kernels_.swap_rows(value_, data + row * nbytes, data + other * nbytes, size_[2], one.flips[2]);
        }
      }
      return true;
    });
  }

  void mirror(View* from, int axis) const {
    from->data += (size_[axis] - 1) * from->stride[axis];
    from->stride[axis] = -from->stride[axis];
    from->is_settled = false;
  }

  bool turn(const Active& one) {
    const int turns = turns_of(one.numbers[0]);
    const int a = static_cast<int>(one.step->options[0]), b = static_cast<int>(one.step->options[1]);
    for (View& from : views_) {
      from.is_settled = false;
      if (turns == 2) {
        mirror(&from, a);
        mirror(&from, b);
        continue;
      }
      mirror(&from, turns == 1 ? b : a);
      std::swap(from.stride[a], from.stride[b]);
    }
    return true;
  }

  bool noise(const Active& one) {
    const float std = static_cast<float>(one.numbers[0]);
    const std::uint32_t seed = seed_of(one.numbers[1]);
    return change(all(), false, [&](std::size_t k, float* values, std::int64_t n, std::int64_t first) {
      const std::uint32_t own = seed + static_cast<std::uint32_t>(k) * kGolden;
      kernels_.add_noise(values, n, static_cast<std::uint32_t>(first / 2), own, std);
    });
  }

  Which all() const {
    Which found;
    for (std::int64_t c = 0; c < channels_; ++c) found.push_back(c);
    return found;
  }

  bool brightness(const Active& one) {
    const Which which = changed_by(one);
    return change(which, false, [&](std::size_t k, float* values, std::int64_t n, std::int64_t) {
      kernels_.scale(values, n, static_cast<float>(one.numbers[2 * which[k] + 1]));
    });
  }

  bool contrast(const Active& one) {
    const Which which = changed_by(one);
    if (!look(which)) return false;
    std::vector<Statistics> before;
    for (const std::int64_t c : which) before.push_back(statistics(c));
    return change(which, false, [&](std::size_t k, float* values, std::int64_t n, std::int64_t) {
      const float factor = static_cast<float>(one.numbers[2 * which[k] + 1]);
      const float mean = static_cast<float>(before[k].mean);
      if (one.step->options[0] != 0) {
        kernels_.rescale_within(values, n, mean, factor, mean, static_cast<float>(before[k].low),
                                static_cast<float>(before[k].high));
      } else {
        kernels_.rescale(values, n, mean, factor, mean);
      }
    });
  }

  bool gamma(const Active& one) {
    const Which which = changed_by(one);
    if (!look(which)) return false;
    const bool is_inverted = one.step->options[0] != 0, keeps = one.step->options[1] != 0;
    std::vector<Statistics> before, after;
    for (const std::int64_t c : which) before.push_back(statistics(c));
    const bool is_raised = change(which, keeps, [&](std::size_t k, float* values, std::int64_t n, std::int64_t) {
      // Of negative values what is raised is (high - x) / extent, and what comes of it is subtracted.
      const Statistics& was = before[k];
      const double extent = was.high - was.low, sign = is_inverted ? -1.0 : 1.0;
      const double least = extent > kLeast || extent != extent ? extent : kLeast;
      const float base = static_cast<float>(is_inverted ? was.high : was.low);
      const float factor = static_cast<float>(sign / least), back = static_cast<float>(sign * extent);
      const float power = static_cast<float>(one.numbers[2 * which[k] + 1]);
      if (power > 0.0f && power < 64.0f) {
        kernels_.raise(values, n, base, factor, power, back);
      } else {
        for (std::int64_t i = 0; i < n; ++i) {
          values[i] = std::pow((values[i] - base) * factor, power) * back + base;
        }
      }
    });
    if (!is_raised || !keeps) return is_raised;
    for (const std::int64_t c : which) after.push_back(statistics(c));
    return change(which, false, [&](std::size_t k, float* values, std::int64_t n, std::int64_t) {
      const double now = after[k].deviation, least = now > kLeast || now != now ? now : kLeast;
      kernels_.rescale(values, n, static_cast<float>(after[k].mean), static_cast<float>(before[k].deviation / least),
                       static_cast<float>(before[k].mean));
    });
  }

  // ---- along axes

  Taps taps_for(const Active& one, std::int64_t channel, int axis) const {
    const double* numbers = one.numbers + channel * width_of(one.step->kind);
    if (one.step->kind == Kind::blur) {
      return numbers[1 + axis] > kBlurred ? gaussian(size_[axis], numbers[1 + axis]) : Taps{};
    }
    const auto& axes = one.step->options;
    const std::int64_t fewer = fewer_of(size_[axis], numbers[1]);
    const bool is_one = std::find(axes.begin(), axes.end(), axis) != axes.end();
    return is_one && fewer < size_[axis] ? lower_resolution(size_[axis], fewer) : Taps{};
  }

  // Sum lines side by side, of rows that begin so far apart; `rows` has room for those of a blur.
  void sum_rows(const Taps& taps, std::int64_t length, const float* from, std::int64_t stride, const float** rows,
                std::int64_t count, float* out, std::int64_t out_stride) const {
    for (std::int64_t i = 0; i < length; ++i) {
      float* to = out + i * out_stride;
      const std::int32_t* index = taps.index.data() + i;
      if (!taps.other.empty()) {
        const auto at = static_cast<std::size_t>(i);
        kernels_.mix_rows(from + index[0] * stride, from + taps.other[at] * stride, taps.weights[at], taps.rests[at],
                          count, to);
        continue;
      }
      for (std::int64_t k = 0; k <= 2 * taps.radius; ++k) rows[k] = from + index[k] * stride;
      kernels_.blur_rows(rows, taps.weights.data(), taps.radius, count, to);
    }
  }

  // Sum along a row; `line` has room for its ends mirrored.
  void sum_places(const Taps& taps, const float* from, float* line, const float** rows, float* out) const {
    const std::int64_t width = size_[2], radius = taps.radius;
    if (!taps.other.empty()) {
      kernels_.mix_places(from, taps.index.data(), taps.other.data(), taps.weights.data(), taps.rests.data(), width,
                          out);
      return;
    }
    for (std::int64_t k = 0; k < radius; ++k) {
      line[k] = from[taps.index[static_cast<std::size_t>(k)]];
      line[radius + width + k] = from[taps.index[static_cast<std::size_t>(radius + width + k)]];
    }
    std::memcpy(line + radius, from, static_cast<std::size_t>(width) * sizeof(float));
    for (std::int64_t k = 0; k <= 2 * radius; ++k) rows[k] = line + k;
    kernels_.blur_rows(rows, taps.weights.data(), radius, width, out);
  }

  bool along(const Active& one) {
    const Which which = changed_by(one);
    std::vector<Taps> taps[3];
    std::int64_t most = 1;
    Which in_planes, in_depth;
    for (const std::int64_t c : which) {
      for (int axis = 0; axis < 3; ++axis) {
        taps[axis].push_back(taps_for(one, c, axis));
        most = std::max(most, 2 * taps[axis].back().radius + 1);
      }
      const auto k = static_cast<std::int64_t>(taps[0].size()) - 1;
      const bool is_deep = taps[0].back().is_there, is_plane = taps[1].back().is_there || taps[2].back().is_there;
      if (is_plane || (is_deep && !view(c).is_settled)) in_planes.push_back(k);
      if (is_deep) in_depth.push_back(k);
    }
    const auto channel = [&](std::int64_t k) { return which[static_cast<std::size_t>(k)]; };
    std::vector<Place> to;
    Which planar;
    for (const std::int64_t k : in_planes) planar.push_back(channel(k));
    if (!places_for(planar, true, &to)) return false;
    const std::int64_t depth = size_[0], height = size_[1], width = size_[2], plane = height * width;
    const bool is_done = each(static_cast<std::int64_t>(to.size()) * depth, [&](std::int64_t item, Scratch& scratch) {
      const Place& place = to[static_cast<std::size_t>(item / depth)];
      const auto k = static_cast<std::size_t>(in_planes[static_cast<std::size_t>(item / depth)]);
      const std::int64_t z = item % depth;
      const Taps &of_height = taps[1][k], &of_width = taps[2][k];
      float* out = place.values() + z * plane;
      auto* row = scratch.chunk.array<float>(static_cast<std::size_t>(width));
      auto* line = scratch.chunk.array<float>(static_cast<std::size_t>(width + most));
      auto* rows = scratch.chunk.array<const float*>(static_cast<std::size_t>(most));
      auto* read = of_height.is_there ? scratch.chunk.array<float>(static_cast<std::size_t>(plane)) : out;
      if (row == nullptr || line == nullptr || rows == nullptr || read == nullptr) return false;
      for (std::int64_t y = 0; y < height; ++y) {
        if (!of_width.is_there) {
          if (read != out || !place.from.is_settled) read_row(place.from, z * height + y, read + y * width);
          continue;
        }
        read_row(place.from, z * height + y, row);
        sum_places(of_width, row, line, rows, read + y * width);
      }
      if (of_height.is_there) sum_rows(of_height, height, read, width, rows, width, out, width);
      return true;
    });
    for (const Place& place : to) settle(place.channel, place.data, place.place);
    for (const std::int64_t c : which) expect_moments(c, false);
    if (!is_done) return false;
    const std::int64_t blocks = (plane + kColumns - 1) / kColumns;
    return each(static_cast<std::int64_t>(in_depth.size()) * blocks, [&](std::int64_t item, Scratch& scratch) {
      const std::int64_t k = in_depth[static_cast<std::size_t>(item / blocks)], begin = item % blocks * kColumns;
      const std::int64_t count = std::min(kColumns, plane - begin);
      auto* values = reinterpret_cast<float*>(const_cast<std::uint8_t*>(view(channel(k)).data)) + begin;
      auto* read = scratch.chunk.array<float>(static_cast<std::size_t>(depth * kColumns));
      auto* rows = scratch.chunk.array<const float*>(static_cast<std::size_t>(most));
      if (read == nullptr || rows == nullptr) return false;
      for (std::int64_t z = 0; z < depth; ++z) {
        std::memcpy(read + z * kColumns, values + z * plane, static_cast<std::size_t>(count) * sizeof(float));
      }
      sum_rows(taps[0][static_cast<std::size_t>(k)], depth, read, kColumns, rows, count, values, plane);
      return true;
    });
  }

  // ---- maps

  void crop(const std::int64_t* size) {
    for (View& from : views_) {
      for (int axis = 0; axis < 3; ++axis) {
        from.data += (size_[axis] - size[axis]) / 2 * from.stride[axis];
        if (size_[axis] != size[axis]) from.is_settled = false;
      }
    }
    if (!std::equal(size, size + 3, size_)) {
      for (auto& known : moments_) known.clear();
    }
    std::copy_n(size, 3, size_);
  }

  Map map_of(const Active& one) const {
    const auto& options = one.step->options;
    Map map;
    std::copy_n(one.numbers + 1, 12, map.matrix);
    std::copy_n(size_, 3, map.size);
    std::copy_n(options.data(), 3, map.new_size);
    std::copy_n(one.flips, 3, map.flips);
    map.has_edge = options[3] != 0;
    map.fill = static_cast<float>(one.step->numbers[0]);
    map.bits = fill_bits(work_kind_, one.step->numbers[0]);
    if (options[4] == 0 || one.numbers[13] == 0) return map;
    std::copy_n(options.data() + 4, 3, map.points);
    const std::int64_t count = map.points[0] * map.points[1] * map.points[2];
    map.bends.assign(static_cast<std::size_t>(3 * count), 0.0f);
    kernels_.add_noise(map.bends.data(), 3 * count, 0, seed_of(one.numbers[14]), 1.0f);
    for (int axis = 0; axis < 3; ++axis) {
      kernels_.scale(map.bends.data() + axis * count, count,
                     static_cast<float>(one.step->numbers[static_cast<std::size_t>(1 + axis)]));
    }
    const std::int64_t width = map.new_size[2];
    const double step =
        static_cast<double>(map.points[2] - 1) / static_cast<double>(std::max<std::int64_t>(width - 1, 1));
    for (std::int64_t x = 0; x < width; ++x) {
      const double at = static_cast<double>(x) * step;
      const std::int64_t below = std::min(static_cast<std::int64_t>(at), map.points[2] - 2);
      map.below.push_back(static_cast<std::int32_t>(below));
      map.parts.push_back(static_cast<float>(at - static_cast<double>(below)));
    }
    return map;
  }

  // How far the voxels of a row are moved, along each axis.
  void bend(const Map& map, std::int64_t z, std::int64_t y, float* line, float* found) const {
    const std::int64_t at[2] = {z, y};
    std::int64_t below[2];
    float part[2];
    for (int axis = 0; axis < 2; ++axis) {
      const double place = static_cast<double>(at[axis] * (map.points[axis] - 1)) /
                           static_cast<double>(std::max<std::int64_t>(map.new_size[axis] - 1, 1));
      below[axis] = std::min(static_cast<std::int64_t>(place), map.points[axis] - 2);
      part[axis] = static_cast<float>(place - static_cast<double>(below[axis]));
    }
    const std::int64_t width = map.points[2], plane = map.points[1] * width;
    for (int axis = 0; axis < 3; ++axis) {
      const float* points = map.bends.data() + (axis * map.points[0] + below[0]) * plane + below[1] * width;
      for (std::int64_t x = 0; x < width; ++x) {
        const float above = points[x] * (1.0f - part[1]) + points[width + x] * part[1];
        const float beneath = points[plane + x] * (1.0f - part[1]) + points[plane + width + x] * part[1];
        line[x] = above * (1.0f - part[0]) + beneath * part[0];
      }
      kernels_.between(line, map.below.data(), map.parts.data(), static_cast<std::int32_t>(map.new_size[2]),
                       found + axis * map.new_size[2]);
    }
  }

  // Strides in values that numbers of 32 bits are enough for; false where there are none.
  bool grid_of(const View& from, Grid* grid) const {
    std::int64_t least = 0, most = 0;
    for (int axis = 0; axis < 3; ++axis) {
      const std::int64_t stride = from.stride[axis] / value_, span = (size_[axis] - 1) * stride;
      // Steps to a neighbour are taken from any voxel but the last.
      least += std::min<std::int64_t>(span, 0);
      most += std::max<std::int64_t>(span, 0);
      if (std::abs(stride) > INT32_MAX) return false;
      grid->size[axis] = static_cast<std::int32_t>(size_[axis]);
      grid->stride[axis] = static_cast<std::int32_t>(stride);
    }
    grid->first = static_cast<std::int32_t>(std::max<std::int64_t>(least, INT32_MIN));
    return most - least <= INT32_MAX;
  }

  bool warp(const Active& one) {
    const auto& options = one.step->options;
    if (one.numbers[0] == 0) {
      crop(options.data());
      return true;
    }
    // What the map cannot read as it is.
    std::vector<Grid> grids(static_cast<std::size_t>(channels_));
    Which unread;
    for (std::int64_t c = 0; c < channels_; ++c) {
      if (view(c).kind != work_kind_ || !grid_of(view(c), &grids[static_cast<std::size_t>(c)])) unread.push_back(c);
    }
    if (!read(unread)) return false;
    for (const std::int64_t c : unread) {
      if (!grid_of(view(c), &grids[static_cast<std::size_t>(c)])) return false;  // which the plan has made sure of
    }
    const Map map = map_of(one);
    std::vector<View> from = views_;
    std::copy_n(map.new_size, 3, size_);
    std::vector<std::uint8_t*> out(static_cast<std::size_t>(channels_));
    std::vector<int> where(static_cast<std::size_t>(channels_));
    std::vector<bool> is_wanted;
    for (std::int64_t c = 0; c < channels_; ++c) {
      const auto k = static_cast<std::size_t>(c);
      out[k] = other_place(c, true, &where[k]);
      if (out[k] == nullptr) return false;
      is_wanted.push_back(expect_moments(c, !plan_.only_moves && is_asked_for(c)));
    }
    const std::int64_t count = parts(), step = part_rows(), width = size_[2];
    const bool is_labels = one.step->kind == Kind::warp_nearest;
    const bool is_done = each(channels_ * count, [&](std::int64_t item, Scratch& scratch) {
      const auto k = static_cast<std::size_t>(item / count);
      const std::int64_t part = item % count, first = part * step, last = std::min(first + step, rows());
      float *bent = nullptr, *points = nullptr;
      if (!map.bends.empty()) {
        bent = scratch.chunk.array<float>(static_cast<std::size_t>(3 * width));
        points = scratch.chunk.array<float>(static_cast<std::size_t>(map.points[2]));
        if (bent == nullptr || points == nullptr) return false;
      }
      for (std::int64_t row = first; row < last; ++row) {
        std::int64_t z = row / size_[1], y = row % size_[1];
        z = map.flips[0] ? size_[0] - 1 - z : z;
        y = map.flips[1] ? size_[1] - 1 - y : y;
        if (bent != nullptr) bend(map, z, y, points, bent);
        std::uint8_t* to = out[k] + row * width * value_;
        if (is_labels) {
          nearest_row(map, from[k].data, grids[k], map.line(z, y), bent, to);
        } else {
          linear_row(map, reinterpret_cast<const float*>(from[k].data), grids[k], map.line(z, y), bent,
                     reinterpret_cast<float*>(to));
        }
        if (map.flips[2]) kernels_.swap_rows(value_, to, to, width, true);
      }
      if (is_wanted[k]) {
        kernels_.moments(reinterpret_cast<const float*>(out[k]) + first * width, (last - first) * width,
                         moments_of(item / count, part));
      }
      return true;
    });
    for (std::int64_t c = 0; c < channels_; ++c) {
      settle(c, out[static_cast<std::size_t>(c)], where[static_cast<std::size_t>(c)]);
    }
    return is_done;
  }

  // Places of a block of a row.
  void places_of(const Map& map, const Line& line, const float* bent, std::int64_t begin, std::int64_t count,
                 float (*p)[kBlock]) const {
    const auto n = static_cast<std::int32_t>(count);
    for (int axis = 0; axis < 3; ++axis) {
      kernels_.places(line.from[axis], line.step[axis], static_cast<std::int32_t>(begin), n, p[axis]);
      for (int by = 0; by < 3 && bent != nullptr; ++by) {
        kernels_.add_scaled(bent + by * map.new_size[2] + begin, static_cast<float>(map.matrix[4 * axis + by]), n,
                            p[axis]);
      }
    }
  }

  void linear_row(const Map& map, const float* values, const Grid& grid, const Line& line, const float* bent,
                  float* out) const {
    const std::int64_t width = map.new_size[2];
    const bool has_pairs = map.size[0] > 1 && map.size[1] > 1 && map.size[2] > 1;
    Range some{0, width}, sure{0, 0};
    if (map.has_edge && has_pairs) {
      sure = some;
    } else if (bent == nullptr && !map.has_edge) {
      some = between(line, map.size, width, -1.0, 0.0, false);
      sure = has_pairs ? between(line, map.size, width, 0.0, -1.0, true) : sure;
    }
    for (std::int64_t x = 0; x < some.begin; ++x) out[x] = map.fill;
    for (std::int64_t x = some.end; x < width; ++x) out[x] = map.fill;
    float p[3][kBlock];
    const float* const places[3] = {p[0], p[1], p[2]};
    std::uint8_t is_inside[kBlock];
    for (std::int64_t begin = some.begin; begin < some.end; begin += kBlock) {
      const std::int64_t count = std::min(kBlock, some.end - begin);
      const auto n = static_cast<std::int32_t>(count);
      places_of(map, line, bent, begin, count, p);
      if (has_pairs) kernels_.linear(values, grid, places, n, out + begin);
      const bool is_bent = bent != nullptr && !map.has_edge && has_pairs;
      if (is_bent) kernels_.insides(grid, places, n, is_inside);
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t x = begin + i;
        if (x >= sure.begin && x < sure.end) {
          i = std::min(count, sure.end - begin) - 1;
        } else if (!is_bent || is_inside[i] == 0) {
          out[x] = at_rim(map, values, grid, p[0][i], p[1][i], p[2][i]);
        }
      }
    }
  }

  // What is between a place's eight voxels, some of which are outside of the volume.
  float at_rim(const Map& map, const float* values, const Grid& grid, float z, float y, float x) const {
    const float place[3] = {z, y, x};
    std::int64_t first[3];
    float part[3];
    for (int axis = 0; axis < 3; ++axis) {
      float at = place[axis];
      if (map.has_edge) {
        const float most = static_cast<float>(grid.size[axis] - 1);
        at = at > 0.0f ? at : 0.0f;
        at = at < most ? at : most;
      }
      if (!(at > -1.0f && at < static_cast<float>(grid.size[axis]))) return map.fill;
      first[axis] = static_cast<std::int64_t>(std::floor(at));
      part[axis] = at - static_cast<float>(first[axis]);
    }
    float total = 0.0f;
    for (int corner = 0; corner < 8; ++corner) {
      float weight = 1.0f;
      std::int64_t at = 0;
      bool is_in = true;
      for (int axis = 0; axis < 3; ++axis) {
        const int is_next = (corner >> (2 - axis)) & 1;
        const std::int64_t index = first[axis] + is_next;
        weight *= is_next != 0 ? part[axis] : 1.0f - part[axis];
        is_in = is_in && index >= 0 && index < grid.size[axis];
        at += index * grid.stride[axis];
      }
      total += weight * (is_in ? values[at] : map.has_edge ? 0.0f : map.fill);
    }
    return total;
  }

  template <typename T>
  static void take(const std::uint8_t* from, const std::int32_t* index, std::int64_t count, std::uint64_t bits,
                   std::uint8_t* to) {
    const T* values = reinterpret_cast<const T*>(from);
    T* out = reinterpret_cast<T*>(to);
    const T fill = static_cast<T>(bits);
    for (std::int64_t i = 0; i < count; ++i) out[i] = index[i] < 0 ? fill : values[index[i]];
  }

  void nearest_row(const Map& map, const std::uint8_t* values, const Grid& grid, const Line& line, const float* bent,
                   std::uint8_t* out) const {
    const std::int64_t width = map.new_size[2];
    float p[3][kBlock];
    const float* const places[3] = {p[0], p[1], p[2]};
    std::int32_t index[kBlock];
    const std::uint8_t* first = values + std::int64_t{grid.first} * value_;
    for (std::int64_t begin = 0; begin < width; begin += kBlock) {
      const std::int64_t count = std::min(kBlock, width - begin);
      places_of(map, line, bent, begin, count, p);
      kernels_.nearest(grid, places, static_cast<std::int32_t>(count), map.has_edge, index);
      std::uint8_t* to = out + begin * value_;
      if (value_ == 1) {
        take<std::uint8_t>(first, index, count, map.bits, to);
      } else if (value_ == 2) {
        take<std::uint16_t>(first, index, count, map.bits, to);
      } else if (value_ == 4) {
        take<std::uint32_t>(first, index, count, map.bits, to);
      } else {
        take<std::uint64_t>(first, index, count, map.bits, to);
      }
    }
  }

  // Read channels to memory that is not the goal, if there is a choice.
  bool read(const Which& which) {
    std::vector<Place> to;
    if (!places_for(which, false, &to)) return false;
    const std::int64_t count = parts(), step = part_rows();
    const bool is_done = each(static_cast<std::int64_t>(to.size()) * count, [&](std::int64_t item, Scratch&) {
      const Place& one = to[static_cast<std::size_t>(item / count)];
      const std::int64_t first = item % count * step, last = std::min(first + step, rows());
      if (!one.from.is_settled) read_rows(one.from, first, last, one.data + first * size_[2] * value_);
      return true;
    });
    for (const Place& one : to) settle(one.channel, one.data, one.place);
    return is_done;
  }

  // Put the values where they go.
  bool finish() {
    Which within_goal, others;
    for (std::int64_t c = 0; c < channels_; ++c) {
      if (view(c).place == 0 && !view(c).is_settled) within_goal.push_back(c);
      if (view(c).place != 0 || !view(c).is_settled) others.push_back(c);
    }
    if (!read(within_goal)) return false;  // it is turned in its own memory
    const std::int64_t count = parts(), step = part_rows(), nbytes = size_[2] * size_of(plan_.to);
    return each(static_cast<std::int64_t>(others.size()) * count, [&](std::int64_t item, Scratch& scratch) {
      const std::int64_t c = others[static_cast<std::size_t>(item / count)];
      const View& from = view(c);
      const std::int64_t first = item % count * step, last = std::min(first + step, rows());
      std::uint8_t* out = goal(c) + first * nbytes;
      if (from.kind == plan_.to) {
        const bool is_whole = is_plain(from);
        const std::int64_t runs = is_whole ? 1 : last - first, n = is_whole ? (last - first) * size_[2] : size_[2];
        const int size = size_of(from.kind);
        for (std::int64_t i = 0; i < runs; ++i) {
          kernels_.move(size, row_of(from, first + i), from.stride[2] / size, n, out + i * nbytes);
        }
        return true;
      }
      if (plan_.to == Number::f32) {
        read_rows(from, first, last, out);
        return true;
      }
      auto* row = scratch.chunk.array<float>(static_cast<std::size_t>(size_[2]));
      if (row == nullptr) return false;
      for (std::int64_t i = first; i < last; ++i) {
        read_row(from, i, row);
        kernels_.store_half(row, size_[2], plan_.to == Number::bf16,
                            reinterpret_cast<std::uint16_t*>(out + (i - first) * nbytes));
      }
      return true;
    });
  }

  const VolumePlan& plan_;
  const VolumeBatch& batch_;
  const std::int64_t number_;
  const int threads_;
  Scratch* const own_;  // of the thread that does all of it; null where threads share it
  const VolumeKernels& kernels_;
  std::int64_t channels_ = 0, size_[3] = {}, most_ = 0;
  Number work_kind_ = Number::f32;
  int value_ = 4;  // bytes
  std::vector<View> views_;
  std::vector<std::vector<double>> moments_;  // of each channel's parts; empty where they are not known
  std::vector<Active> active_;
  std::size_t at_ = 0;
  std::uint8_t* memories_[2] = {};
  std::unique_ptr<Spare::Block> blocks_[2];
};

// ---- plans -----------------------------------------------------------------------------------------------------

struct Name {
  const char* name;
  Kind kind;
};
constexpr Name kNames[] = {{"skip", Kind::skip},
                           {"flip", Kind::flip},
                           {"rotate90", Kind::rotate90},
                           {"warp", Kind::warp},
                           {"warp_nearest", Kind::warp_nearest},
                           {"noise", Kind::noise},
                           {"brightness", Kind::brightness},
                           {"contrast", Kind::contrast},
                           {"gamma", Kind::gamma},
                           {"blur", Kind::blur},
                           {"low_resolution", Kind::low_resolution}};

bool is_axis(std::int64_t number) { return number >= 0 && number < 3; }

bool is_worked_on(Number kind) {
  switch (kind) {
    case Number::u32:
    case Number::i64:
    case Number::u64:
    case Number::f64:
      return false;
    default:
      return true;
  }
}

}  // namespace

int size_of(Number number) noexcept {
  switch (number) {
    case Number::u8:
    case Number::i8:
      return 1;
    case Number::i16:
    case Number::u16:
    case Number::f16:
    case Number::bf16:
      return 2;
    case Number::i32:
    case Number::u32:
    case Number::f32:
      return 4;
    default:
      return 8;
  }
}

bool kind_named(const std::string& name, VolumeStep::Kind* kind) {
  for (const Name& one : kNames) {
    if (name == one.name) {
      *kind = one.kind;
      return true;
    }
  }
  return false;
}

const char* VolumePlan::check() {
  constexpr std::int64_t kMostLength = std::int64_t{1} << 24;  // whole numbers of float32
  std::int64_t most = std::int64_t{1} << 56, size[3];
  for (const std::int64_t one : shape) {
    if (one < 1 || one > most) return "volumes of a size that there can be";
    most /= one;
  }
  std::copy_n(shape + 1, 3, size);
  columns = 0;
  only_moves = true;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const VolumeStep& step = steps[i];
    const auto& options = step.options;
    const auto has = [&](std::size_t more, std::size_t numbers) {
      return options.size() == more && step.numbers.size() == numbers;
    };
    std::int64_t width = 1;
    bool moves = false;
    switch (step.kind) {
      case Kind::skip:
        if (!has(1, 0) || options[0] < 0 || options[0] > static_cast<std::int64_t>(steps.size() - i - 1)) {
          return "a number of steps to skip that there are";
        }
        moves = true;
        break;
      case Kind::flip:
        width = static_cast<std::int64_t>(options.size());
        if (!has(options.size(), 0) || !std::all_of(options.begin(), options.end(), is_axis)) return "axes of 0, 1, 2";
        moves = true;
        break;
      case Kind::rotate90:
        if (!has(2, 0) || !is_axis(options[0]) || !is_axis(options[1]) || options[0] == options[1] ||
            size[options[0]] != size[options[1]]) {
          return "a plane that is as high as wide";
        }
        moves = true;
        break;
      case Kind::warp:
      case Kind::warp_nearest: {
        if (!has(7, 4)) return "size, edge and points; fill and deviations";
        for (std::size_t axis = 0; axis < 3; ++axis) {
          if (options[axis] < 1 || options[axis] > size[axis]) return "a size that is at most the volume's";
          if (size[axis] > kMostLength) return "volumes of less than 2**24 voxels along an axis, to be resampled";
          if (options[4 + axis] != 0 && (options[4 + axis] < 2 || options[4 + axis] > kMostPoints)) {
            return "points, of which there are at least 2";
          }
        }
        if (size[0] * size[1] > INT32_MAX / size[2]) return "volumes of less than 2**31 voxels, to be resampled";
        const bool is_bent = options[4] != 0;
        if (is_bent != (options[5] != 0) || is_bent != (options[6] != 0) ||
            (is_bent && options[4] * options[5] > kMostPoints / options[6])) {
          return "points along all axes, or none; and not too many";
        }
        width = is_bent ? 15 : 13;
        std::copy_n(options.begin(), 3, size);
        moves = step.kind == Kind::warp_nearest;
        break;
      }
      case Kind::noise:
        if (!has(0, 0)) return "no options";
        width = 2;
        break;
      case Kind::brightness:
      case Kind::contrast:
      case Kind::gamma:
      case Kind::blur:
      case Kind::low_resolution:
        if (step.kind == Kind::low_resolution) {
          if (!has(options.size(), 0) || !std::all_of(options.begin(), options.end(), is_axis))
            return "axes of 0, 1, 2";
        } else if (!has(step.kind == Kind::contrast ? 1 : step.kind == Kind::gamma ? 2 : 0, 0)) {
          return "as many options as the step has";
        }
        width = (step.kind == Kind::blur ? 4 : 2) * shape[0];
        break;
    }
    if (step.column < 0 || step.column > (std::int64_t{1} << 56)) return "columns of a table";
    columns = std::max(columns, step.column + width);
    only_moves = only_moves && moves;
  }
  for (const VolumeStep& step : steps) {
    if (step.kind == Kind::warp_nearest && !only_moves) return "labels, whose values do not change";
  }
  const bool is_half = from == Number::f16 || from == Number::bf16;
  if (only_moves ? to != from : !is_worked_on(from) || to != (is_half ? from : Number::f32)) {
    return "a kind that the result has";
  }
  shape_after[0] = shape[0];
  std::copy_n(size, 3, shape_after + 1);
  return nullptr;
}

bool augment_volumes(const VolumePlan& plan, const VolumeBatch& batch, int threads) {
  const std::int64_t* to = plan.shape_after;
  // Small volumes are not shared by threads, which have one each.
  if (to[0] * to[1] * to[2] * to[3] <= kPart) {
    return in_threads(batch.count, threads, [&](std::int64_t number, Scratch& scratch) {
      return Changed(plan, batch, number, 1, &scratch).run();
    });
  }
  for (std::int64_t number = 0; number < batch.count; ++number) {
    if (!Changed(plan, batch, number, threads, nullptr).run()) return false;
  }
  return true;
}

}  // namespace fastpipe
