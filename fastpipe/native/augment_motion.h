// A batch of sequences of motion played at other speeds, and their frames mapped and their joints rearranged.
#pragma once

#include <atomic>
#include <cstdint>

#include "engine.h"

namespace fastpipe {

// Numbers that sequences are made of.
enum class MotionType : int { float32 = 0, float16 = 1, bfloat16 = 2 };

inline std::int64_t bytes_of(MotionType type) { return type == MotionType::float32 ? 4 : 2; }

// The sequences, (count, frames, joints, coordinates), and what becomes of each.  Whoever makes it checks that joints
// of `order` are among those that there are; all other numbers may be any, and lengths that there are not become the
// nearest ones.
struct Motion {
  std::int64_t count = 0, frames = 0, joints = 0, coordinates = 0;
  const std::uint8_t* source = nullptr;
  MotionType source_type = MotionType::float32;
  std::int64_t strides[4] = {};  // bytes, of source
  std::uint8_t* out = nullptr;   // packed
  MotionType out_type = MotionType::float32;
  const double* speeds = nullptr;         // (count,): frames of the source for a new one, linearly between two
  const double* scales = nullptr;         // (count, coordinates): what coordinates are multiplied by,
  const double* shifts = nullptr;         // (count, coordinates): and what is added
  const std::int64_t* order = nullptr;    // (count, joints): the joint that each becomes, after that
  const std::int64_t* lengths = nullptr;  // (count,); null: all frames are motion, and have to be afterwards
  std::int64_t* new_lengths = nullptr;    // (count,), which are written
};

// How many frames a sequence has that is played at a speed: from 1 to `frames`.
std::int64_t played_length(std::int64_t length, double speed, std::int64_t frames) noexcept;

// An item is a few sequences.  Frames behind a sequence's new length are what they were, at a speed of 1; else zeros,
// or the last frame again if there are no lengths.
class MotionBatch : public Work {
 public:
  explicit MotionBatch(const Motion& motion);
  std::int64_t size() const noexcept override;
  void run(std::int64_t item, Scratch& scratch) override;
  void lost(std::int64_t item) noexcept override;
  bool is_whole() const noexcept { return !is_lost_.load(); }  // there was memory for all of them

 private:
  struct Buffers;
  void change(std::int64_t number, const Buffers& buffers) const noexcept;
  void move_frames(std::int64_t number, std::int64_t length, const Buffers& buffers) const noexcept;
  void end_sequence(std::int64_t number, std::int64_t length, const Buffers& buffers) const noexcept;
  const std::uint8_t* frame(std::int64_t number, std::int64_t at) const noexcept;
  const float* read(std::int64_t number, std::int64_t at, const Buffers& buffers, float* memory) const noexcept;

  const Motion motion_;
  const std::int64_t width_;         // numbers of a frame
  const std::int64_t each_;          // sequences of an item
  const bool is_packed_, is_dense_;  // frames have no gaps; and there are none between them
  std::atomic<bool> is_lost_{false};
};

}  // namespace fastpipe
