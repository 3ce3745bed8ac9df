// Images and chunks that are kept: found by the state of the file that they come from.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "arena.h"
#include "entries.h"
#include "files.h"
#include "span.h"

namespace fastpipe {

// A store of decoded things.  Immutable but for what the table learns.
struct KeptStore {
  std::shared_ptr<EntryTable> table;
  int descriptor = -1;                   // of the data file
  const std::uint8_t* memory = nullptr;  // its bytes, where they are mapped; else they are read
  std::int64_t size = 0;                 // of the data file: no entry reaches beyond
  bool verifies = false;                 // compare an entry with its sum when it is first read, and note sums
  std::int64_t marks = 0;                // > 0: keep a thing when it comes for the second time; bytes of marks, with
                                         // which the data file begins
  std::string tag;                       // 64 bytes at most, of which digests are made: see below
};

// What is kept of an image: its pixels; or one row of bytes, which is an entry of coefficients.h, or an index of
// JpegDecoder.
enum class KeptForm : std::int32_t { pixels = 0, coefficients = 1, index = 2 };

// Images in a store.  The tag is all but the file that decides what an image's pixels are, and the form.
struct KeptImages : KeptStore {
  KeptForm form = KeptForm::pixels;
};

// Decoded chunks of one dataset in a store.  The tag is the file's state and the dataset's name.
class KeptChunks {
 public:
  // chunks: how many there are.  nbytes: of each.
  KeptChunks(KeptStore store, std::int64_t chunks, std::int64_t nbytes);
  KeptChunks(const KeptChunks&) = delete;
  KeptChunks& operator=(const KeptChunks&) = delete;

  const KeptStore& store() const noexcept { return store_; }
  // Return whether a chunk seems to be kept; its bytes are not looked at.
  bool has(std::int64_t chunk) const noexcept;
  // Where a chunk begins in the data file; -1 where it is not kept.
  std::int64_t find(std::int64_t chunk, Arena& arena) noexcept;
  // Return whether a chunk that was just decoded is to be kept.
  bool wants(std::int64_t chunk) noexcept;
  Digest digest(std::int64_t chunk) const noexcept;

 private:
  const KeptStore store_;
  const std::int64_t nbytes_;
  // (chunks): where each begins; else, below -1, -2 minus the entries among which it was looked for.
  std::vector<std::atomic<std::int64_t>> places_;
};

// A kept image.
struct KeptImage {
  Size size;
  std::int64_t offset = 0;  // in the data file, of its uint8 (height, width, channels)
};

enum class Lookup { found, missing, too_large };

// Find an image.
//
// channels: bytes of a pixel.
// most_pixels: of larger files (as the entry's flags say) the image is not used, as they may be errors now; -1 for no
// limit.
// An entry is forgotten if its bytes changed or are not there.
Lookup find_kept(const KeptImages& kept, Digest digest, std::int32_t channels, std::int64_t most_pixels, Arena& arena,
                 KeptImage* image) noexcept;

// Read bytes of the data file into the arena; null where they are not there, or there is no memory.
std::uint8_t* read_kept(const KeptStore& kept, std::int64_t offset, std::int64_t nbytes, Arena& arena) noexcept;

// Whether a digest was marked before; it is now.  Another with the same mark makes the answer wrong now and then.
bool mark(const KeptStore& kept, Digest digest) noexcept;

}  // namespace fastpipe
