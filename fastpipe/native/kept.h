// Decoded images that are kept: found by the state of the file that they were decoded from.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "arena.h"
#include "entries.h"
#include "span.h"

namespace fastpipe {

// What tells one version of a file from all others: device, inode, size, and times of modification and change.
struct FileState {
  std::uint64_t numbers[5] = {};
  // A change from now on makes another state.  Times are written in steps: a file that changes twice within one may
  // look as after the first.
  bool is_settled = false;
  Bytes bytes() const { return {reinterpret_cast<const std::uint8_t*>(numbers), sizeof numbers}; }
};

// The present state of the file at a path; false where there is none.
bool state_of_file(const char* path, FileState* state) noexcept;

// A store of images, and how this dataset looks for its own in it.  Immutable but for what the table learns.
struct KeptImages {
  std::shared_ptr<EntryTable> table;
  int descriptor = -1;                   // of the data file
  const std::uint8_t* memory = nullptr;  // its bytes, where they are mapped; else they are read
  std::int64_t size = 0;                 // of the data file: no entry reaches beyond
  std::string tag;                       // all but the file that decides what an image's pixels are; 64 bytes at most
  bool verifies = false;                 // compare an entry with its sum when it is first read, and note sums
  std::int64_t marks = 0;                // > 0: keep an image when it comes for the second time; bytes of marks, with
                                         // which the data file begins
};

// A kept image.
struct KeptImage {
  Size size;
  std::int64_t offset = 0;  // in the data file, of its uint8 (height, width, channels)
};

enum class Lookup { found, missing, unusable };

// Find an image.
//
// channels: bytes of a pixel.
// most_pixels: of larger files (as its flags say) the image is not used; -1 for no limit.
// unusable: it is there, and cannot be taken: its bytes changed or are not there, or its file may be an error now.
Lookup find_kept(const KeptImages& kept, Digest digest, std::int32_t channels, std::int64_t most_pixels, Arena& arena,
                 KeptImage* image) noexcept;

// Read bytes of the data file into the arena; null where they are not there, or there is no memory.
std::uint8_t* read_kept(const KeptImages& kept, std::int64_t offset, std::int64_t nbytes, Arena& arena) noexcept;

// Whether a digest was marked before; it is now.  Another with the same mark makes the answer wrong now and then.
bool mark(const KeptImages& kept, Digest digest) noexcept;

}  // namespace fastpipe
