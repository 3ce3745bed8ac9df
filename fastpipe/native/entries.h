// What a cache holds: records of a log that only grows, found by digests.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "digest.h"
#include "span.h"

namespace fastpipe {

// A record of the log, which several processes share.
struct EntryRecord {
  Digest digest;
  std::uint64_t offset = 0, nbytes = 0;  // in the data file
  std::uint64_t sum = 0;                 // of the bytes there; 0 where nobody compares it
  std::uint32_t height = 0, width = 0, channels = 0;
  std::uint32_t note = 0;  // bytes of a note behind the entry's own
  std::uint32_t flags = 0;
  std::uint32_t check = 0;  // of all that is above: see check_of()
};
static_assert(sizeof(EntryRecord) == 64 && alignof(EntryRecord) == 8);

// A checksum in which a word that is lost, or in another's place, shows.
std::uint32_t check_of(const EntryRecord& record) noexcept;

// The sum of an entry's bytes, eight at a time, modulo 2**64, and of the last ones and their number.  It shows bytes
// that have changed, and pages that never reached the disk.
std::uint64_t sum_of(Bytes bytes) noexcept;

// The records that this process knows of, and a hash table over them.
//
// Any thread may look something up, without a lock, also beside the one that adds records; whoever adds has the lock of
// the store that this belongs to.  A record is never changed: it may be forgotten.
class EntryTable {
 public:
  EntryTable();
  ~EntryTable();
  EntryTable(const EntryTable&) = delete;
  EntryTable& operator=(const EntryTable&) = delete;

  // Find an entry: its number, and its record; -1 where there is none.
  std::int64_t find(Digest digest, EntryRecord* record) const noexcept;

  // Add the records that follow in the log; those whose check is wrong count, and are never found.
  //
  // end: the first byte of the data file that none of these entries has.
  // Returns false where there is no memory; then nothing was added.
  [[nodiscard]] bool extend(const EntryRecord* records, std::int64_t count, std::uint64_t* end) noexcept;

  // Never find this entry again: its bytes are not what they were.
  void forget(std::int64_t number) noexcept;

  // Return whether an entry's bytes have been compared with their sum in this process; and to note that they have.
  bool is_verified(std::int64_t number) const noexcept;
  void note_verified(std::int64_t number) noexcept;

  std::int64_t size() const noexcept { return size_.load(std::memory_order_acquire); }

  // The record of a number below size(); whether it can be found.
  bool record(std::int64_t number, EntryRecord* record) const noexcept;

 private:
  struct Arrays;
  bool grow(std::int64_t count) noexcept;

  std::atomic<std::int64_t> size_{0};
  std::atomic<Arrays*> now_{nullptr};
  std::vector<std::unique_ptr<Arrays>> all_;  // those before, which somebody may still be reading
};

}  // namespace fastpipe
