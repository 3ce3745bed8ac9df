// Decoded parts of arrays that are remembered: chunks of HDF5 datasets, units of volumes.
//
// They lie in slots of memory of a fixed size, which threads and, where the memory is a file's, processes share.  What
// nobody will want any more makes room, where that is known; then what is wanted last, in an order that is known (L. A.
// Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5, 1966), else what
// was not used for the longest time.  Of those who want the same at once one decodes it, and the others wait.
//
// Among processes, a slot is written by who has its lock, a lock of the file, which ends with the process that has it,
// however that ends.  Who copies from a slot takes no such lock but looks, before and behind, at the slot's version,
// which is odd while somebody writes: a sequence lock.  So nobody who is killed or stopped spoils anything.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace fastpipe {

class UnitMemory {
 public:
  static constexpr int kMostWaits = 40;  // in a row: a process that decodes may be stopped

  struct Shape {
    std::int64_t keys = 0;                       // units that there are
    std::int64_t slots = 0;                      // units that there is room for
    std::int64_t slot_nbytes = 0;                // of each, a multiple of 64
    std::int64_t table_nbytes() const noexcept;  // in front of the first slot
    std::int64_t nbytes() const noexcept { return table_nbytes() + slots * slot_nbytes; }
  };

  // memory: of shape.nbytes() bytes, zeros when it is new; it is the caller's.
  // descriptor: of the file that it is; -1 where it is this process's alone.
  UnitMemory(std::uint8_t* memory, int descriptor, const Shape& shape);
  UnitMemory(const UnitMemory&) = delete;
  UnitMemory& operator=(const UnitMemory&) = delete;

  const Shape& shape() const noexcept { return shape_; }

  // A unit that is there.
  struct Found {
    std::int64_t key = 0, slot = -1, version = 0;
    const std::uint8_t* data = nullptr;
    explicit operator bool() const noexcept { return slot >= 0; }
  };
  // Look for a unit.  No thread of this process overwrites what is found until it is released.
  Found find(std::int64_t key) noexcept;
  // Say that one has copied from it; whether it was what it should be all the time.
  [[nodiscard]] bool release(const Found& found) noexcept;

  // A slot to decode a unit into.
  struct Claim {
    std::int64_t key = 0, slot = -1, version = 0;
    std::uint8_t* data = nullptr;
    explicit operator bool() const noexcept { return slot >= 0; }
  };
  // Take a slot; none where somebody is decoding the unit, or has just done so, or there is no room.
  Claim claim(std::int64_t key) noexcept;
  // Let others see a unit.
  //
  // left: how often it will be used yet; -1 where that was said already, or is not known.
  // Returns whether the slot was this thread's all the time.
  bool publish(const Claim& claim, std::int64_t left) noexcept;
  // Give a slot back that was not filled.
  void abandon(const Claim& claim) noexcept;

  bool is_there(std::int64_t key) const noexcept;
  // Return whether somebody is decoding a unit, or was when the process ended that did so.
  bool is_coming(std::int64_t key) const noexcept;
  // Wait while somebody is decoding a unit, for at most a twentieth of a second.
  void wait(std::int64_t key) noexcept;

  // Hear that a unit was used so often: one that will not be used again makes room first.
  void used(std::int64_t key, std::int64_t times) noexcept;
  // Hear which units will be used, each as often as it is there.
  //
  // what: a number from 1 that says which uses these are, such as an epoch's; the same as before adds to them.
  // is_in_order: whether this process will use them one after the other, nearly.
  // Returns false where there is no memory.
  bool expect(std::int64_t what, const std::int64_t* keys, std::int64_t count, bool is_in_order) noexcept;
  std::int64_t expected() const noexcept;  // what was said last; 0 for nothing
  bool is_over() const noexcept;           // whether nearly all of the uses that were expected have been

  // Count bytes of units that were decoded, and bytes of samples that were copied of them, for all processes.
  void count(std::int64_t decoded, std::int64_t used) noexcept;
  std::int64_t decoded() const noexcept;
  std::int64_t copied() const noexcept;

 private:
  struct Table;
  std::uint8_t* slot_data(std::int64_t slot) const noexcept;
  std::int64_t slot_of(std::int64_t key) const noexcept;
  Claim take(std::int64_t slot, std::int64_t key) noexcept;
  std::int64_t rank(std::int64_t key) const noexcept;
  void end(const Claim& claim, bool is_made, std::int64_t left, bool* was_mine) noexcept;

  const Shape shape_;
  std::uint8_t* const memory_;
  const int descriptor_;
  Table* table_;
  std::atomic<std::int64_t>*keys_, *versions_, *ranks_;  // (slots): of what is in each, plus 1; odd: written; see rank
  std::atomic<std::int32_t>*slots_, *left_;              // (keys): where each is, plus 1; how often it will be used

  std::mutex lock_;  // guards what follows, and who claims
  static constexpr int kGates = 16;
  pthread_cond_t& gate(std::int64_t slot) noexcept { return ended_[slot % kGates]; }
  pthread_cond_t
      ended_[kGates];  // of slots; never destroyed: in a forked child that would wait for the parent's threads
  std::vector<std::uint8_t> mine_;    // (slots): that threads of this process write
  std::vector<std::uint16_t> holds_;  // (slots): threads of this process that read them
  std::int64_t hand_ = 0;             // from where the next slot is looked for
  std::int64_t ordered_ = 0;          // of which uses the order is known; 0 for none
  std::vector<std::int32_t> firsts_;  // (keys + 1): where those of a unit begin in
  std::vector<std::int32_t> when_;    // their places in the order
};

}  // namespace fastpipe
