// Augments volumes: a plan of steps, and a table with the numbers of each volume.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fastpipe {

// What the values of volumes and labels are.
enum class Number : std::uint8_t { u8, i8, i16, u16, i32, u32, i64, u64, f16, bf16, f32, f64 };

int size_of(Number number) noexcept;

// A change of each volume.  Its numbers begin at `column` of the volume's row of the table.
//
// flip            a flag for each axis of `options`: mirror along it.
// rotate90        how many quarter turns; `options` has the plane's two axes, from the first to the second.
// warp            whether anything changes, 12 numbers of a matrix from places about the centre of the result, (depth,
//                 height, width, 1), to places about the centre of the volume; where there are control points also
//                 whether they are moved, and the seed of their moves.  `options`: depth, height and width of the
//                 result, whether the nearest voxel is outside of the volume, and how many control points there are
//                 along each axis (0: none).  `numbers`: what else is outside, and standard deviations of the moves in
//                 voxels.  Values are linear between voxels.
// warp_nearest    the same, with the value of the nearest voxel, of any kind.
// noise           standard deviation and seed.
// brightness      for each channel a flag and a factor.
// contrast        for each channel a flag and a factor; `options`: whether the range is kept.
// gamma           for each channel a flag and an exponent; `options`: whether inverted, whether mean and deviation are
//                 kept.
// blur            for each channel a flag and the standard deviations along depth, height and width.
// low_resolution  for each channel a flag and the part of the voxels that is kept; `options` are the axes.
// skip            a flag; where it is 0, the next `options[0]` steps are left out.
struct VolumeStep {
  enum class Kind : std::uint8_t {
    skip,
    flip,
    rotate90,
    warp,
    warp_nearest,
    noise,
    brightness,
    contrast,
    gamma,
    blur,
    low_resolution
  };
  Kind kind = Kind::skip;
  std::int64_t column = 0;
  std::vector<std::int64_t> options;
  std::vector<double> numbers;
};

// Return the kind of this name; false if there is none.
bool kind_named(const std::string& name, VolumeStep::Kind* kind);

// Steps for volumes of a shape, checked.
struct VolumePlan {
  std::vector<VolumeStep> steps;
  std::int64_t shape[4] = {};        // channels, depth, height, width of a volume
  std::int64_t shape_after[4] = {};  // of the result
  Number from = Number::f32, to = Number::f32;
  std::int64_t columns = 0;  // that a row of the table has at least
  bool only_moves = true;    // values stay as they are, of whatever kind

  // Return why this cannot be done; null if it can.
  const char* check();
};

// Volumes of a plan's shape.
struct VolumeBatch {
  const std::uint8_t* source = nullptr;
  std::int64_t strides[5] = {};  // bytes, multiples of a value's size
  std::int64_t count = 0;
  const double* table = nullptr;
  std::int64_t columns = 0;      // of the table
  std::uint8_t* goal = nullptr;  // contiguous; memory that the source has no part of
};

// Change volumes in so many threads; false where there is no memory for it.  Half precision is worked on as float32.
bool augment_volumes(const VolumePlan& plan, const VolumeBatch& batch, int threads);

}  // namespace fastpipe
