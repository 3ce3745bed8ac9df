// Volumes: arrays somewhere, which are read in units.
//
// A unit is what is decoded, and remembered, at once: a chunk of the file, as little of one as can be decoded alone, or
// several small ones.  What is unusual or damaged is not read here: Python reads it, or says what is wrong.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "codecs.h"
#include "files.h"
#include "scratch.h"
#include "units.h"

namespace fastpipe {

constexpr int kDims = 5;  // of an array; one with fewer has others of size 1 in front of these

using Index = std::array<std::int64_t, kDims>;

// Bytes from one element to the next along each dimension of an array in C order.
Index steps_in_c_order(const Index& shape, std::int64_t itemsize) noexcept;

// An array cut into parts of one shape; those at its ends reach beyond it.
struct Grid {
  Index shape{}, part{}, counts{};

  // False where a size is below 1, or there are more than 2^62 elements in the parts together.
  [[nodiscard]] static bool make(const Index& shape, const Index& part, Grid* grid) noexcept;
  std::int64_t number(const Index& place) const noexcept;
  Index place(std::int64_t number) const noexcept;
  std::int64_t elements() const noexcept;  // of a part
};

// Where the bytes of an array are, and what they went through.
struct VolumeSource {
  enum class Kind : std::uint8_t {
    memory,    // they are in memory
    raw,       // a file, or several, in which they lie in order
    files,     // each chunk is a file of its own in a folder
    segments,  // each chunk is a part of one file
  };
  enum class Codec : std::uint8_t { none, blosc, gzip, zlib, zstd };
  enum class Number : std::uint8_t { none, i8, u8, i16, u16, i32, u32, i64, u64, f32, f64 };
  struct Piece {
    std::shared_ptr<DataFile> file;
    std::int64_t offset = 0;  // of its first byte in the file
  };

  Kind kind = Kind::memory;
  std::int64_t itemsize = 1;  // bytes of an element, as it is stored
  Grid chunks;                // of files and segments: what is stored together
  int dims = kDims;           // that the array has itself

  const std::uint8_t* data = nullptr;  // memory: of the first element
  Index steps{};  // memory, raw: bytes from one element to the next; below 0 where the order is reversed

  std::shared_ptr<DataFile> file;    // raw, segments
  std::shared_ptr<DataFile> copied;  // raw: what the file is a copy of; null where it is none
  std::int64_t offset = 0;           // raw: of the element that comes first in the file
  std::vector<Piece> pieces;         // raw: of equal size, each in a file of its own; empty where there is one file
  std::int64_t piece_nbytes = 0;

  std::string folder;         // files: with a slash at its end
  std::string prefix;         // files: in front of a chunk's place
  char separator = '/';       // files: between the numbers of a place
  std::string metadata;       // files: what is there as long as the array is
  Codec codec = Codec::none;  // files
  std::string fill;           // files, segments: an element of which nothing was written, as it is stored

  // Segments: of each chunk in C order where it begins in the file, -1 where nothing was written; bytes there; which
  // filters were left out, null for none.
  const std::int64_t *offsets = nullptr, *sizes = nullptr;
  const std::uint32_t* masks = nullptr;
  std::int64_t segments = 0;        // how many
  std::vector<FilterStep> filters;  // segments: in the order of writing
  bool is_clipped = false;          // segments: the last chunks end where the array does

  std::int32_t swapped = 0;      // bytes of a number that are turned around; 0: none
  Number number = Number::none;  // of elements that are scaled: what they are
  Number scaled = Number::f64;   // what they become: f64, or an integer of up to 32 bits
  std::int32_t bits = 64;        // of integers that are scaled to these: how many count, from the lowest
  double slope = 1.0, intercept = 0.0;
};

// An array that is read in units.
struct Volume {
  Grid units;
  std::int64_t itemsize = 1;  // bytes of an element, as it is read
  VolumeSource source;
  UnitMemory* memory = nullptr;  // where units are remembered; null for nowhere
  std::int64_t first_key = 0;    // of its first unit there

  // Return whether all of it fits together, and sizes are such that none overflows.
  bool is_valid() const noexcept;
  std::int64_t unit_nbytes() const noexcept { return units.elements() * itemsize; }
  // What is read together with a unit has the same number.
  std::int64_t group(const Index& unit) const noexcept;
};

// Undo the codec of a whole chunk.
//
// Returns Problem::none, or what is wrong with the stored bytes.
[[nodiscard]] Problem decode_chunk(VolumeSource::Codec codec, Bytes stored, std::uint8_t* out, std::int64_t size,
                                   Scratch& scratch) noexcept;

// A unit, and the memory that it fills.
struct UnitOut {
  Index place{};
  std::uint8_t* out = nullptr;
};

// Read units of one group; what lies beyond the array's ends is arbitrary.  False where Python has to.
//
// descriptor: of the volume's file, if it has one.
[[nodiscard]] bool read_units(const Volume& volume, int descriptor, const UnitOut* units, std::int64_t count,
                              Scratch& scratch) noexcept;

// Copy elements from one memory to another.
//
// steps: bytes from one element to the next, along each dimension.
void copy_elements(const std::uint8_t* from, const Index& from_steps, std::uint8_t* to, const Index& to_steps,
                   const Index& sizes, std::int64_t itemsize) noexcept;

// Turn around the bytes of numbers.
//
// word: of a number, 2, 4 or 8.
void swap_bytes(std::uint8_t* data, std::int64_t nbytes, std::int32_t word) noexcept;

}  // namespace fastpipe
