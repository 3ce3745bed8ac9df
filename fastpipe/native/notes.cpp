#include "notes.h"

#include <atomic>
#include <cstring>
#include <new>

namespace fastpipe {

namespace {

struct Lines {
  std::uint8_t* memory;
  std::int32_t count;
  std::size_t size;
};

std::atomic<const Lines*> lines{nullptr};  // never freed: a thread may be about to write
std::atomic<std::int32_t> threads{0};

// The calling thread's line; null where it has none.
std::uint8_t* own_line(const Lines& all) noexcept {
  thread_local const std::int32_t number = threads.fetch_add(1, std::memory_order_relaxed);
  return number < all.count ? all.memory + static_cast<std::size_t>(number) * all.size : nullptr;
}

}  // namespace

void note_in(std::uint8_t* memory, std::int32_t count, std::size_t size) noexcept {
  lines.store(size == 0 ? nullptr : new (std::nothrow) Lines{memory, count, size});
}

void note(const char* text) noexcept {
  const Lines* all = lines.load(std::memory_order_acquire);
  if (all == nullptr) return;
  std::uint8_t* line = own_line(*all);
  if (line == nullptr) return;
  const std::size_t length = strnlen(text, all->size - 1);
  line[length] = 0;
  std::memcpy(line, text, length);
}

void note_nothing() noexcept {
  const Lines* all = lines.load(std::memory_order_acquire);
  std::uint8_t* line = all == nullptr ? nullptr : own_line(*all);
  if (line != nullptr) line[0] = 0;
}

}  // namespace fastpipe
