// Batches of patches of volumes: copied from units that are decoded once, as long as they are remembered.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine.h"
#include "status.h"
#include "volume.h"

namespace fastpipe {

// A box of an array, and where it goes.
struct BoxOut {
  Index start{}, stop{};
  std::uint8_t* to = nullptr;
  Index steps{};  // bytes from one element to the next, along each dimension; the last one's is an element's size
};

// Copy what a box has of a unit.
//
// place: of the unit in the grid.
void copy_from_unit(const std::uint8_t* unit, const Index& place, const Grid& units, std::int64_t itemsize,
                    const BoxOut& box) noexcept;

// What is beyond the ends of a volume.
enum class Padding : std::uint8_t { error = 0, constant = 1, edge = 2, reflect = 3, symmetric = 4, wrap = 5 };

// Of which element of a dimension a place beyond its ends is made, as numpy.pad has it; -1: the constant goes there.
std::int64_t padded_index(std::int64_t at, std::int64_t length, Padding padding) noexcept;

// One of a sample's values, in all patches.
struct PatchKind {
  enum class Nan : std::uint8_t { keep, decline, replace };

  int dims = 3;               // along which patches are cut: the last ones
  Index size{};               // of a patch, with the dimensions in front of these
  std::int64_t itemsize = 1;  // bytes of an element
  Padding padding = Padding::error;
  std::uint8_t constant[16]{};  // an element that is beyond
  Nan nan = Nan::keep;          // what is done about elements that are no number
  std::int32_t word = 0;        // bytes of a float, of which an element has one or two
  std::uint8_t number[16]{};    // the element in their place

  bool is_valid() const noexcept;
  std::int64_t nbytes() const noexcept;  // of a patch
};

// Sums over a batch: nanoseconds by stage, and bytes of units that were decoded and of patches that were copied.
struct PatchTotals {
  std::atomic<std::int64_t> decode{0}, copy{0}, decoded{0}, copied{0};
};

// A batch.  All pointers are the caller's, and are valid until the work is done.
class PatchBatch : public Work {
 public:
  struct Kind {
    PatchKind kind;
    std::uint8_t* memory = nullptr;  // of the batch
  };
  struct Item {
    std::int64_t patch = 0;
    std::size_t kind = 0;
    std::shared_ptr<const Volume> volume;
  };
  std::vector<Kind> kinds;
  std::vector<Item> items;  // what is read, patch by patch
  std::int64_t patches = 0;
  const std::int64_t* starts = nullptr;  // (patches, dims): where each begins, perhaps beyond its volume's ends
  const std::int64_t* rows = nullptr;    // (patches): which row of the batch each is
  Status* statuses = nullptr;            // of each row, written: made where all of a patch's items are
  PatchTotals totals;

  // Allocate what the batch keeps of its own; false where there is no memory.
  [[nodiscard]] bool prepare() noexcept;

  std::int64_t size() const noexcept override { return static_cast<std::int64_t>(items.size()); }
  void run(std::int64_t item, Scratch& scratch) override;
  void lost(std::int64_t item) noexcept override;

  // Return whether all of its items were done.
  bool is_complete() const noexcept { return done_.load() == size(); }

 private:
  // What has become of a patch so far.
  struct Patch {
    std::atomic<std::int32_t> left{0};       // items
    std::atomic<std::uint64_t> declined{0};  // the bytes of a Status; 0 while there is none
  };
  void finish(std::int64_t item, const Status& status) noexcept;
  Status make(const Item& item, Scratch& scratch);
  bool read_box(const Volume& volume, int descriptor, const BoxOut& box, Scratch& scratch);
  bool read_remembered(const Volume& volume, int descriptor, const BoxOut& box, Scratch& scratch);

  std::unique_ptr<Patch[]> made_;
  std::atomic<std::int64_t> done_{0};
};

}  // namespace fastpipe
