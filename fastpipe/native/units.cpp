#include "units.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "clock.h"

namespace fastpipe {
namespace {

constexpr std::int64_t kFields = 3;             // of a slot
constexpr std::int64_t kPage = 4096;            // at whose multiples slots begin
constexpr std::int64_t kLookedAt = 256;         // slots among which the one to be used again is chosen
constexpr std::int64_t kStride = 61;            // by which these move on
constexpr int kTries = 8;                       // of them that are tried, where other processes have locked some
constexpr std::int64_t kOver = 64;              // expected uses of which one is left when they are over
constexpr std::int64_t kPatience = 50'000'000;  // nanoseconds to wait at most
constexpr std::int64_t kSoonest = INT64_MAX;    // the rank of what is used first of all
constexpr std::int64_t kStep = 500'000;         // nanoseconds between two looks at another process's slot

timespec at(std::int64_t nanoseconds) noexcept {
  timespec time;
  time.tv_sec = static_cast<time_t>(nanoseconds / 1'000'000'000);
  time.tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000);
  return time;
}

// Lock a slot for this process, unless another one has it locked; or let go of it.
bool lock_place(int descriptor, std::int64_t place, short how) noexcept {
  if (descriptor < 0) return true;
  struct flock range{};
  range.l_type = how;
  range.l_whence = SEEK_SET;
  range.l_start = static_cast<off_t>(place);
  range.l_len = 1;
  int done = 0;
  do {
    done = ::fcntl(descriptor, F_SETLK, &range);
  } while (done != 0 && errno == EINTR);
  return done == 0;
}

bool try_to_lock(int descriptor, std::int64_t slot) noexcept { return lock_place(descriptor, slot, F_WRLCK); }
void unlock(int descriptor, std::int64_t slot) noexcept { static_cast<void>(lock_place(descriptor, slot, F_UNLCK)); }

}  // namespace

// At the beginning of the memory: numbers that are zero when it is new.
struct UnitMemory::Table {
  std::atomic<std::int64_t> expected, decoded, copied, uses_left, uses;
  std::int64_t unused[3];
};

std::int64_t UnitMemory::Shape::table_nbytes() const noexcept {
  const std::int64_t nbytes = 64 + kFields * 8 * slots + 2 * 4 * keys;
  return (nbytes + kPage - 1) / kPage * kPage;
}

UnitMemory::UnitMemory(std::uint8_t* memory, int descriptor, const Shape& shape)
    : shape_(shape),
      memory_(memory),
      descriptor_(descriptor),
      mine_(static_cast<std::size_t>(shape.slots)),
      holds_(static_cast<std::size_t>(shape.slots)) {
  static_assert(sizeof(Table) == 64 && sizeof(std::atomic<std::int64_t>) == 8 &&
                sizeof(std::atomic<std::int32_t>) == 4);
  static_assert(std::atomic<std::int64_t>::is_always_lock_free && std::atomic<std::int32_t>::is_always_lock_free);
  table_ = reinterpret_cast<Table*>(memory);
  keys_ = reinterpret_cast<std::atomic<std::int64_t>*>(memory + sizeof(Table));
  versions_ = keys_ + shape.slots;
  ranks_ = versions_ + shape.slots;
  slots_ = reinterpret_cast<std::atomic<std::int32_t>*>(ranks_ + shape.slots);
  left_ = slots_ + shape.keys;
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  for (pthread_cond_t& one : ended_) pthread_cond_init(&one, &attributes);
  pthread_condattr_destroy(&attributes);
}

std::uint8_t* UnitMemory::slot_data(std::int64_t slot) const noexcept {
  return memory_ + shape_.table_nbytes() + slot * shape_.slot_nbytes;
}

// The slot that a unit is in, or is to be in; -1 where there is none.  Other processes' numbers are not relied on.
std::int64_t UnitMemory::slot_of(std::int64_t key) const noexcept {
  if (key < 0 || key >= shape_.keys) return -1;
  const std::int64_t slot = std::int64_t{slots_[key].load(std::memory_order_acquire)} - 1;
  if (slot < 0 || slot >= shape_.slots || keys_[slot].load(std::memory_order_acquire) != key + 1) return -1;
  return slot;
}

// How much a unit is wanted, with the lock held: the slot of the lowest makes room first.  0: not any more.  Where it
// is known when it will be used next, more the sooner that is; else the time now, which is less than all of these.
std::int64_t UnitMemory::rank(std::int64_t key) const noexcept {
  if (ordered_ == 0 || ordered_ != table_->expected.load(std::memory_order_relaxed)) return now_ns();
  const std::int64_t first = firsts_[static_cast<std::size_t>(key)];
  const std::int64_t uses = firsts_[static_cast<std::size_t>(key) + 1] - first;
  const std::int64_t left = left_[key].load(std::memory_order_relaxed);
  if (left <= 0) return 0;
  if (left > uses) return kSoonest;  // some of those before are still to come
  return kSoonest - when_[static_cast<std::size_t>(first + uses - left)];
}

UnitMemory::Found UnitMemory::find(std::int64_t key) noexcept {
  const std::lock_guard<std::mutex> guard(lock_);
  const std::int64_t slot = slot_of(key);
  if (slot < 0) return {};
  const std::int64_t version = versions_[slot].load(std::memory_order_acquire);
  if (version % 2 != 0 || keys_[slot].load(std::memory_order_acquire) != key + 1 || holds_[slot] == UINT16_MAX) {
    return {};
  }
  ++holds_[slot];
  ranks_[slot].store(rank(key), std::memory_order_relaxed);
  return {key, slot, version, slot_data(slot)};
}

bool UnitMemory::release(const Found& found) noexcept {
  const std::lock_guard<std::mutex> guard(lock_);
  --holds_[found.slot];
  return versions_[found.slot].fetch_add(0) == found.version;  // which nothing that was copied comes after
}

UnitMemory::Claim UnitMemory::claim(std::int64_t key) noexcept {
  if (key < 0 || key >= shape_.keys) return {};
  const std::lock_guard<std::mutex> guard(lock_);
  const std::int64_t there = slot_of(key);
  if (there >= 0) {
    // One in which somebody had begun to decode it can be had if that process is gone.
    if (versions_[there].load(std::memory_order_acquire) % 2 == 0 || mine_[there] != 0 || holds_[there] != 0) return {};
    return take(there, key);
  }
  // Of so many the lowest is low enough.
  const std::int64_t count = std::min(shape_.slots, kLookedAt);
  std::int64_t tried[kTries];
  for (int tries = 0; tries < kTries; ++tries) {
    std::int64_t best = -1, best_rank = 0;
    for (std::int64_t place = 0; place < count; ++place) {
      const std::int64_t slot = (hand_ + place) % shape_.slots;
      if (mine_[slot] != 0 || holds_[slot] != 0 || std::find(tried, tried + tries, slot) != tried + tries) continue;
      const std::int64_t rank = ranks_[slot].load(std::memory_order_relaxed);
      if (best >= 0 && rank >= best_rank) continue;
      best = slot;
      best_rank = rank;
      if (rank == 0) break;  // nobody wants what is there
    }
    if (best < 0) return {};
    if (const Claim made = take(best, key)) {
      if (shape_.slots > kLookedAt) hand_ = (hand_ + kStride) % shape_.slots;
      return made;
    }
    tried[tries] = best;
  }
  return {};
}

// Take a slot for a unit, with the lock held; none where another process has it.
UnitMemory::Claim UnitMemory::take(std::int64_t slot, std::int64_t key) noexcept {
  const std::int64_t seen = versions_[slot].load(std::memory_order_acquire);
  if (!try_to_lock(descriptor_, slot)) return {};
  if (versions_[slot].load(std::memory_order_acquire) != seen) {  // another process has just written it
    unlock(descriptor_, slot);
    return {};
  }
  const std::int64_t version = (seen | 1) + 2;  // odd, and never that of another who writes
  mine_[slot] = 1;
  versions_[slot].exchange(version);  // which nothing that is written comes before
  const std::int64_t before = keys_[slot].load(std::memory_order_relaxed) - 1;
  if (before >= 0 && before < shape_.keys && slots_[before].load(std::memory_order_relaxed) == slot + 1) {
    slots_[before].store(0, std::memory_order_relaxed);
  }
  keys_[slot].store(key + 1, std::memory_order_release);
  slots_[key].store(static_cast<std::int32_t>(slot + 1), std::memory_order_release);
  ranks_[slot].store(rank(key), std::memory_order_relaxed);
  return {key, slot, version, slot_data(slot)};
}

void UnitMemory::end(const Claim& claim, bool is_made, std::int64_t left, bool* was_mine) noexcept {
  const std::lock_guard<std::mutex> guard(lock_);
  *was_mine = versions_[claim.slot].load(std::memory_order_relaxed) == claim.version;
  if (*was_mine) {
    if (is_made) {
      if (left >= 0) left_[claim.key].store(static_cast<std::int32_t>(std::min<std::int64_t>(left, INT32_MAX)));
      ranks_[claim.slot].store(left == 0 ? 0 : rank(claim.key), std::memory_order_relaxed);
    } else {
      if (slots_[claim.key].load(std::memory_order_relaxed) == claim.slot + 1) slots_[claim.key].store(0);
      keys_[claim.slot].store(0);
      ranks_[claim.slot].store(0, std::memory_order_relaxed);
    }
    versions_[claim.slot].store(claim.version + 1, std::memory_order_release);
  }
  mine_[claim.slot] = 0;
  unlock(descriptor_, claim.slot);
  pthread_cond_broadcast(&gate(claim.slot));
}

bool UnitMemory::publish(const Claim& claim, std::int64_t left) noexcept {
  bool was_mine = false;
  end(claim, true, left, &was_mine);
  return was_mine;
}

void UnitMemory::abandon(const Claim& claim) noexcept {
  bool was_mine = false;
  end(claim, false, -1, &was_mine);
}

bool UnitMemory::is_there(std::int64_t key) const noexcept {
  const std::int64_t slot = slot_of(key);
  return slot >= 0 && versions_[slot].load(std::memory_order_acquire) % 2 == 0;
}

bool UnitMemory::is_coming(std::int64_t key) const noexcept {
  const std::int64_t slot = slot_of(key);
  return slot >= 0 && versions_[slot].load(std::memory_order_acquire) % 2 != 0;
}

void UnitMemory::wait(std::int64_t key) noexcept {
  const std::int64_t slot = slot_of(key);
  if (slot < 0) return;
  const std::int64_t until = now_ns() + kPatience;
  std::unique_lock<std::mutex> guard(lock_);
  if (mine_[slot] != 0) {
    const timespec end = at(until);
    while (mine_[slot] != 0 && is_coming(key)) {
      if (pthread_cond_timedwait(&gate(slot), lock_.native_handle(), &end) == ETIMEDOUT) return;
    }
    return;
  }
  // Not by waiting for the lock, which takes no limit.
  while (is_coming(key) && now_ns() < until) {
    if (mine_[slot] == 0 && try_to_lock(descriptor_, slot)) {
      unlock(descriptor_, slot);  // who was decoding it is gone
      return;
    }
    guard.unlock();
    const timespec step = at(kStep);
    nanosleep(&step, nullptr);
    guard.lock();
  }
}

void UnitMemory::used(std::int64_t key, std::int64_t times) noexcept {
  if (key < 0 || key >= shape_.keys || times <= 0) return;
  if (table_->expected.load(std::memory_order_relaxed) != 0) {
    table_->uses_left.fetch_sub(times, std::memory_order_relaxed);
  }
  // Of those that are used more often than was expected nothing is known.
  std::int32_t left = left_[key].load(std::memory_order_relaxed), after = 0;
  do {
    if (left <= 0) return;
    after = static_cast<std::int32_t>(left - std::min<std::int64_t>(left, times));
  } while (!left_[key].compare_exchange_weak(left, after, std::memory_order_relaxed));
  const std::lock_guard<std::mutex> guard(lock_);
  const std::int64_t slot = slot_of(key);
  if (slot < 0) return;
  if (after == 0) {
    ranks_[slot].store(0, std::memory_order_relaxed);
  } else if (ordered_ != 0) {
    ranks_[slot].store(rank(key), std::memory_order_relaxed);
  }
}

bool UnitMemory::expect(std::int64_t what, const std::int64_t* keys, std::int64_t count, bool is_in_order) noexcept {
  const std::lock_guard<std::mutex> guard(lock_);
  ordered_ = 0;
  if (count > INT32_MAX) return false;
  try {
    firsts_.assign(static_cast<std::size_t>(shape_.keys) + 1, 0);
    when_.resize(is_in_order ? static_cast<std::size_t>(count) : 0);
  } catch (const std::bad_alloc&) {
    return false;
  }
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (keys[i] < 0 || keys[i] >= shape_.keys) continue;
    ++firsts_[static_cast<std::size_t>(keys[i]) + 1];
    ++total;
  }
  // The same ones again: the last of those before are still to come.
  const bool adds = table_->expected.load() == what;
  for (std::int64_t key = 0; key < shape_.keys; ++key) {
    const std::int64_t before = adds ? std::max(left_[key].load(std::memory_order_relaxed), 0) : 0;
    const std::int64_t sum = before + firsts_[static_cast<std::size_t>(key) + 1];
    left_[key].store(static_cast<std::int32_t>(std::min<std::int64_t>(sum, INT32_MAX)), std::memory_order_relaxed);
  }
  const std::int64_t before = adds ? std::max<std::int64_t>(table_->uses_left.load(), 0) : 0;
  table_->uses_left.store(before + total);
  table_->uses.store(total);
  table_->expected.store(what);
  if (!is_in_order) return true;
  for (std::size_t key = 0; key < static_cast<std::size_t>(shape_.keys); ++key) firsts_[key + 1] += firsts_[key];
  // Each unit's uses, in order; `firsts_` is moved to where they end, and back.
  for (std::int64_t i = 0; i < count; ++i) {
    if (keys[i] < 0 || keys[i] >= shape_.keys) continue;
    when_[static_cast<std::size_t>(firsts_[static_cast<std::size_t>(keys[i])]++)] = static_cast<std::int32_t>(i);
  }
  for (auto key = static_cast<std::size_t>(shape_.keys); key > 0; --key) firsts_[key] = firsts_[key - 1];
  firsts_[0] = 0;
  ordered_ = what;
  for (std::int64_t slot = 0; slot < shape_.slots; ++slot) {
    const std::int64_t key = keys_[slot].load(std::memory_order_relaxed) - 1;
    if (key >= 0 && key < shape_.keys) ranks_[slot].store(rank(key), std::memory_order_relaxed);
  }
  return true;
}

std::int64_t UnitMemory::expected() const noexcept { return table_->expected.load(); }

bool UnitMemory::is_over() const noexcept {
  // Processes may lose some of those that they count.
  return table_->uses_left.load() * kOver <= table_->uses.load();
}

void UnitMemory::count(std::int64_t decoded, std::int64_t copied) noexcept {
  table_->decoded.fetch_add(decoded, std::memory_order_relaxed);
  table_->copied.fetch_add(copied, std::memory_order_relaxed);
}

std::int64_t UnitMemory::decoded() const noexcept { return table_->decoded.load(std::memory_order_relaxed); }
std::int64_t UnitMemory::copied() const noexcept { return table_->copied.load(std::memory_order_relaxed); }

}  // namespace fastpipe
