#include "augment_motion.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "levels.h"
#include "scratch.h"

namespace fastpipe {

namespace {

constexpr std::int64_t kLanes = 16;             // floats of the widest vectors: patterns are of as many frames' joints
constexpr std::int64_t kItemBytes = 1 << 19;    // of sequences: an item costs its thread a microsecond besides
constexpr std::int64_t kBlockFloats = 1 << 11;  // of frames that are worked on together: they stay in the nearest cache

struct MotionKernels {
  void (*map)(const float* from, const float* scale, const float* shift, float* to, std::int64_t count,
              std::int64_t coordinates);
  void (*mix)(const float* from, const float* next, float rest, float part, const float* scale, const float* shift,
              float* to, std::int64_t count, std::int64_t coordinates);
  void (*read_float16)(const std::uint16_t* from, float* to, std::int64_t count);
  void (*write_float16)(const float* from, std::uint16_t* to, std::int64_t count);
  void (*read_bfloat16)(const std::uint16_t* from, float* to, std::int64_t count);
  void (*write_bfloat16)(const float* from, std::uint16_t* to, std::int64_t count);
};

#define FASTPIPE_BODY "augment_motion_kernels.inc"
#include "each_level.inc"
#undef FASTPIPE_BODY

void read_numbers(const std::uint16_t* from, MotionType type, float* to, std::int64_t count) noexcept {
  (type == MotionType::float16 ? table_in_use().read_float16 : table_in_use().read_bfloat16)(from, to, count);
}

void write_numbers(const float* from, MotionType type, std::uint8_t* to, std::int64_t count) noexcept {
  const auto write = type == MotionType::float16 ? table_in_use().write_float16 : table_in_use().write_bfloat16;
  write(from, reinterpret_cast<std::uint16_t*>(to), count);
}

template <typename Word, std::int64_t known>
void pack_words(const std::uint8_t* from, const Motion& m, Word* to) noexcept {
  const std::int64_t joints = m.joints, coordinates = known > 0 ? known : m.coordinates;
  const std::int64_t by_joint = m.strides[2] / std::int64_t{sizeof(Word)};
  const std::int64_t by_coordinate = m.strides[3] / std::int64_t{sizeof(Word)};
  const Word* const words = reinterpret_cast<const Word*>(from);
  for (std::int64_t j = 0; j < joints; ++j) {
    for (std::int64_t c = 0; c < coordinates; ++c) {
      to[j * coordinates + c] = words[j * by_joint + c * by_coordinate];
    }
  }
}

// Copy a frame, without its gaps.
template <typename Word>
void pack(const std::uint8_t* from, const Motion& m, Word* to) noexcept {
  (m.coordinates == 3 ? pack_words<Word, 3> : pack_words<Word, 0>)(from, m, to);
}

template <std::int64_t coordinates, std::int64_t copied>
void arrange_frame(const float* from, const std::int64_t* order, std::int64_t joints, float* to) noexcept {
  const std::int64_t last = joints - 1;
  for (std::int64_t j = 0; j < last; ++j) {
    std::memcpy(to + coordinates * j, from + coordinates * order[j], sizeof(float) * copied);
  }
  std::memcpy(to + coordinates * last, from + coordinates * order[last], sizeof(float) * coordinates);
}

// Put the joints of a frame in another order.  One float behind `from` is read, too, as it takes less time to copy four
// than three: the next joint is written afterwards.
void arrange(const float* from, const std::int64_t* order, std::int64_t joints, std::int64_t coordinates,
             float* to) noexcept {
  switch (coordinates) {
    case 1:
      return arrange_frame<1, 1>(from, order, joints, to);
    case 2:
      return arrange_frame<2, 2>(from, order, joints, to);
    case 3:
      return arrange_frame<3, 4>(from, order, joints, to);
    default:
      for (std::int64_t j = 0; j < joints; ++j) {
        std::memcpy(to + coordinates * j, from + coordinates * order[j],
                    sizeof(float) * static_cast<std::size_t>(coordinates));
      }
  }
}

bool has_no_gaps(const Motion& m) noexcept {
  const std::int64_t word = bytes_of(m.source_type);
  return (m.coordinates == 1 || m.strides[3] == word) && (m.joints == 1 || m.strides[2] == word * m.coordinates);
}

}  // namespace

std::int64_t played_length(std::int64_t length, double speed, std::int64_t frames) noexcept {
  if (speed == 1.0) return length;
  const double last = static_cast<double>(length - 1) / speed;
  // Compared so that it is right of what is no number, too.
  if (last >= static_cast<double>(frames)) return frames;
  return last > 0 ? std::min(static_cast<std::int64_t>(last) + 1, frames) : 1;
}

// Memory of an item's.
struct MotionBatch::Buffers {
  std::uint16_t* raw;     // a frame without its gaps
  float *frame, *next;    // frames as floats
  float *scale, *shift;   // patterns: of each coordinate, again and again
  float *mapped, *moved;  // blocks of frames
};

MotionBatch::MotionBatch(const Motion& motion)
    : motion_(motion),
      width_(motion.joints * motion.coordinates),
      each_(std::max<std::int64_t>(kItemBytes / (motion.frames * width_ * bytes_of(motion.out_type)), 1)),
      is_packed_(has_no_gaps(motion)),
      is_dense_(is_packed_ && motion.source_type == MotionType::float32 &&
                motion.strides[1] == width_ * bytes_of(motion.source_type)) {}

std::int64_t MotionBatch::size() const noexcept { return (motion_.count + each_ - 1) / each_; }

void MotionBatch::lost(std::int64_t) noexcept { is_lost_.store(true); }

void MotionBatch::run(std::int64_t item, Scratch& scratch) {
  scratch.arena.reset();
  const std::int64_t block = std::max(kBlockFloats, width_);
  const auto floats = [&](std::int64_t count) {
    float* const found = scratch.arena.array<float>(static_cast<std::size_t>(count + kLanes));
    if (found == nullptr) throw std::bad_alloc();
    return found;
  };
  Buffers buffers{};
  buffers.raw = reinterpret_cast<std::uint16_t*>(floats(width_));
  buffers.frame = floats(width_), buffers.next = floats(width_);
  buffers.scale = floats(kLanes * motion_.coordinates), buffers.shift = floats(kLanes * motion_.coordinates);
  buffers.mapped = floats(block), buffers.moved = floats(block);
  const std::int64_t end = std::min((item + 1) * each_, motion_.count);
  for (std::int64_t number = item * each_; number < end; ++number) change(number, buffers);
}

void MotionBatch::change(std::int64_t number, const Buffers& buffers) const noexcept {
  // Read once: it may be the script's, which another of its threads may write to.
  const std::int64_t given = motion_.lengths == nullptr ? motion_.frames : motion_.lengths[number];
  const std::int64_t length = std::min(std::max<std::int64_t>(given, 1), motion_.frames);
  for (std::int64_t i = 0; i < kLanes * motion_.coordinates; ++i) {
    const std::int64_t at = number * motion_.coordinates + i % motion_.coordinates;
    buffers.scale[i] = static_cast<float>(motion_.scales[at]);
    buffers.shift[i] = static_cast<float>(motion_.shifts[at]);
  }
  motion_.new_lengths[number] = played_length(length, motion_.speeds[number], motion_.frames);
  move_frames(number, length, buffers);
  end_sequence(number, motion_.new_lengths[number], buffers);
}

// The frames of a sequence of this length that are motion afterwards.
void MotionBatch::move_frames(std::int64_t number, std::int64_t length, const Buffers& buffers) const noexcept {
  const auto& kernels = table_in_use();
  const std::int64_t* const order = motion_.order + number * motion_.joints;
  const std::int64_t coordinates = motion_.coordinates, word = bytes_of(motion_.out_type);
  const std::int64_t new_length = motion_.new_lengths[number], last = length - 1;
  std::uint8_t* const out = motion_.out + number * motion_.frames * width_ * word;
  const double speed = motion_.speeds[number];
  const bool are_floats = motion_.out_type == MotionType::float32;
  bool is_moved = false;
  for (std::int64_t j = 0; j < motion_.joints; ++j) is_moved |= order[j] != j;
  const std::int64_t block = std::max<std::int64_t>(kBlockFloats / width_, 1);
  for (std::int64_t t = 0; t < new_length; t += block) {
    const std::int64_t frames = std::min(block, new_length - t);
    std::uint8_t* const place = out + t * width_ * word;
    float* const goal = are_floats ? reinterpret_cast<float*>(place) : buffers.moved;
    float* const mapped = is_moved ? buffers.mapped : goal;
    if (speed == 1.0 && is_dense_) {
      kernels.map(read(number, t, buffers, nullptr), buffers.scale, buffers.shift, mapped, frames * width_,
                  coordinates);
    } else {
      for (std::int64_t i = 0; i < frames; ++i) {
        const double at = static_cast<double>(t + i) * speed;
        const std::int64_t first = at < static_cast<double>(last) ? (at > 0 ? static_cast<std::int64_t>(at) : 0) : last;
        const float part = static_cast<float>(at - static_cast<double>(first)), rest = 1.0f - part;
        const std::int64_t next = part > 0 ? std::min(first + 1, last) : first;
        float* const to = mapped + i * width_;
        // A frame that has no part in this one may be anything: it is not read.
        if (part == 0.0f || rest == 0.0f) {
          const float* const only = read(number, part == 0.0f ? first : next, buffers, buffers.frame);
          kernels.map(only, buffers.scale, buffers.shift, to, width_, coordinates);
        } else {
          kernels.mix(read(number, first, buffers, buffers.frame), read(number, next, buffers, buffers.next), rest,
                      part, buffers.scale, buffers.shift, to, width_, coordinates);
        }
      }
    }
    if (is_moved) {
      for (std::int64_t i = 0; i < frames; ++i) {
        arrange(mapped + i * width_, order, motion_.joints, coordinates, goal + i * width_);
      }
    }
    if (!are_floats) write_numbers(goal, motion_.out_type, place, frames * width_);
  }
}

// The frames behind.
void MotionBatch::end_sequence(std::int64_t number, std::int64_t length, const Buffers& buffers) const noexcept {
  const std::int64_t row = width_ * bytes_of(motion_.out_type);
  std::uint8_t* const out = motion_.out + number * motion_.frames * row;
  const bool is_played = motion_.speeds[number] != 1.0;
  if (is_played && motion_.lengths != nullptr) {
    std::memset(out + length * row, 0, static_cast<std::size_t>((motion_.frames - length) * row));
    return;
  }
  for (std::int64_t t = length; t < motion_.frames; ++t) {
    std::uint8_t* const to = out + t * row;
    if (is_played) {
      std::memcpy(to, to - row, static_cast<std::size_t>(row));
    } else if (motion_.source_type == motion_.out_type && is_packed_) {
      std::memcpy(to, frame(number, t), static_cast<std::size_t>(row));
    } else if (motion_.source_type == motion_.out_type && motion_.out_type != MotionType::float32) {
      pack(frame(number, t), motion_, reinterpret_cast<std::uint16_t*>(to));
    } else if (motion_.out_type == MotionType::float32) {
      read(number, t, buffers, reinterpret_cast<float*>(to));  // is written there: it has gaps, or is no float
    } else {
      write_numbers(read(number, t, buffers, buffers.frame), motion_.out_type, to, width_);
    }
  }
}

// A frame of the source, as it is.
const std::uint8_t* MotionBatch::frame(std::int64_t number, std::int64_t at) const noexcept {
  return motion_.source + number * motion_.strides[0] + at * motion_.strides[1];
}

// A frame of the source as floats without gaps: where it is if it is that, else in `memory`.
const float* MotionBatch::read(std::int64_t number, std::int64_t at, const Buffers& buffers,
                               float* memory) const noexcept {
  const std::uint8_t* const from = frame(number, at);
  if (motion_.source_type == MotionType::float32) {
    if (is_packed_) return reinterpret_cast<const float*>(from);
    pack(from, motion_, memory);
    return memory;
  }
  if (!is_packed_) pack(from, motion_, buffers.raw);
  const auto* const numbers = is_packed_ ? reinterpret_cast<const std::uint16_t*>(from) : buffers.raw;
  read_numbers(numbers, motion_.source_type, memory, width_);
  return memory;
}

}  // namespace fastpipe
