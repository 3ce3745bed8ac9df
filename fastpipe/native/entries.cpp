#include "entries.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace fastpipe {
namespace {

constexpr std::int64_t kFewestSlots = 1 << 10;
constexpr std::size_t kWords = sizeof(EntryRecord) / 4 - 1;  // that the check is of

enum : std::uint8_t { kUnknown = 0, kVerified = 1, kForgotten = 2 };

}  // namespace

// Slots of a hash table, -1 for a free one, and room for half as many records.
struct EntryTable::Arrays {
  std::int64_t slot_count = 0;
  std::unique_ptr<std::atomic<std::int32_t>[]> slots;
  std::unique_ptr<EntryRecord[]> records;
  std::unique_ptr<std::atomic<std::uint8_t>[]> states;

  explicit Arrays(std::int64_t count)
      : slot_count(count),
        slots(new std::atomic<std::int32_t>[static_cast<std::size_t>(count)]),
        records(new EntryRecord[static_cast<std::size_t>(count / 2)]),
        states(new std::atomic<std::uint8_t>[static_cast<std::size_t>(count / 2)]) {
    for (std::int64_t i = 0; i < count; ++i) slots[static_cast<std::size_t>(i)].store(-1, std::memory_order_relaxed);
    for (std::int64_t i = 0; i < count / 2; ++i) state(i).store(kUnknown, std::memory_order_relaxed);
  }

  std::atomic<std::uint8_t>& state(std::int64_t number) const { return states[static_cast<std::size_t>(number)]; }
  EntryRecord& record(std::int64_t number) const { return records[static_cast<std::size_t>(number)]; }
  std::atomic<std::int32_t>& slot(std::uint64_t place) const {
    return slots[static_cast<std::size_t>(place & static_cast<std::uint64_t>(slot_count - 1))];
  }

  void insert(std::int64_t number) const {
    std::uint64_t place = record(number).digest.low;
    while (slot(place).load(std::memory_order_relaxed) >= 0) ++place;
    slot(place).store(static_cast<std::int32_t>(number), std::memory_order_release);
  }
};

std::uint32_t check_of(const EntryRecord& record) noexcept {
  std::uint32_t words[kWords], check = 1;
  std::memcpy(words, &record, sizeof words);
  for (std::size_t i = 0; i < kWords; ++i) {
    check += words[i] * (static_cast<std::uint32_t>(i + 1) * 0x9E3779B1u | 1u);
  }
  return check;
}

std::uint64_t sum_of(Bytes bytes) noexcept {
  const std::size_t whole = bytes.size / 8 * 8;
  std::uint64_t total = 0, rest = 0;
  for (std::size_t at = 0; at < whole; at += 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes.data + at, 8);
    total += word;
  }
  for (std::size_t at = whole; at < bytes.size; ++at) rest += bytes.data[at];
  // Shifted, so that bytes moved to the end count differently.
  return total + (rest << 8) + bytes.size;
}

EntryTable::EntryTable() {
  all_.push_back(std::make_unique<Arrays>(kFewestSlots));
  now_.store(all_.back().get());
}

EntryTable::~EntryTable() = default;

std::int64_t EntryTable::find(Digest digest, EntryRecord* record) const noexcept {
  const Arrays& arrays = *now_.load(std::memory_order_acquire);
  for (std::uint64_t place = digest.low;; ++place) {
    const std::int32_t number = arrays.slot(place).load(std::memory_order_acquire);
    if (number < 0) return -1;
    const EntryRecord& found = arrays.record(number);
    if (found.digest.low != digest.low || found.digest.high != digest.high) continue;
    if (arrays.state(number).load(std::memory_order_acquire) == kForgotten) continue;
    *record = found;
    return number;
  }
}

bool EntryTable::grow(std::int64_t count) noexcept {
  const Arrays* old = now_.load(std::memory_order_relaxed);
  std::int64_t slots = old->slot_count;
  while (slots < 2 * count) slots *= 2;
  try {
    auto made = std::make_unique<Arrays>(slots);
    for (std::int64_t i = 0; i < size(); ++i) {
      made->record(i) = old->record(i);
      made->state(i).store(old->state(i).load(std::memory_order_acquire), std::memory_order_relaxed);
      if (check_of(made->record(i)) == made->record(i).check) made->insert(i);
    }
    all_.push_back(std::move(made));
  } catch (const std::bad_alloc&) {
    return false;
  }
  now_.store(all_.back().get(), std::memory_order_release);
  return true;
}

bool EntryTable::extend(const EntryRecord* records, std::int64_t count, std::uint64_t* end) noexcept {
  const std::int64_t before = size();
  *end = 0;
  if (2 * (before + count) > now_.load()->slot_count && !grow(before + count)) return false;
  const Arrays& arrays = *now_.load(std::memory_order_relaxed);
  for (std::int64_t i = 0; i < count; ++i) {
    const EntryRecord& record = arrays.record(before + i) = records[i];
    if (check_of(record) != record.check) continue;
    *end = std::max(*end, record.offset + record.nbytes + record.note);
    arrays.insert(before + i);
  }
  size_.store(before + count, std::memory_order_release);
  return true;
}

void EntryTable::forget(std::int64_t number) noexcept {
  now_.load(std::memory_order_acquire)->state(number).store(kForgotten, std::memory_order_release);
}

bool EntryTable::is_verified(std::int64_t number) const noexcept {
  return now_.load(std::memory_order_acquire)->state(number).load(std::memory_order_acquire) == kVerified;
}

void EntryTable::note_verified(std::int64_t number) noexcept {
  std::uint8_t before = kUnknown;
  now_.load(std::memory_order_acquire)->state(number).compare_exchange_strong(before, kVerified);
}

bool EntryTable::record(std::int64_t number, EntryRecord* record) const noexcept {
  const Arrays& arrays = *now_.load(std::memory_order_acquire);
  *record = arrays.record(number);
  return check_of(*record) == record->check && arrays.state(number).load(std::memory_order_acquire) != kForgotten;
}

}  // namespace fastpipe
