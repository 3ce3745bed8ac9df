#include "notes.h"

#include <atomic>
#include <cstring>

namespace fastpipe {

namespace {

std::atomic<std::uint8_t*> lines{nullptr};
std::atomic<std::int32_t> line_count{0};
std::atomic<std::size_t> line_size{0};
std::atomic<std::int32_t> threads{0};

// The calling thread's line; null where it has none.
std::uint8_t* own_line() noexcept {
  std::uint8_t* const first = lines.load(std::memory_order_acquire);
  if (first == nullptr) return nullptr;
  thread_local const std::int32_t number = threads.fetch_add(1, std::memory_order_relaxed);
  return number < line_count.load() ? first + static_cast<std::size_t>(number) * line_size.load() : nullptr;
}

}  // namespace

void note_in(std::uint8_t* memory, std::int32_t count, std::size_t size) noexcept {
  line_count.store(count);
  line_size.store(size);
  lines.store(memory, std::memory_order_release);
}

void note(const char* text) noexcept {
  std::uint8_t* const line = own_line();
  if (line == nullptr) return;
  const std::size_t length = strnlen(text, line_size.load() - 1);
  line[length] = 0;
  std::memcpy(line, text, length);
}

void note_nothing() noexcept {
  std::uint8_t* const line = own_line();
  if (line != nullptr) line[0] = 0;
}

}  // namespace fastpipe
