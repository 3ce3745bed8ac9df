// Memory of one thread that is reset after each sample.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastpipe {

// Hands out aligned memory from blocks that are used again.  Never throws: null where there is no memory.
// reset() keeps one block of at most `keep` bytes, large enough for the samples before if that is possible,
// so that after a few samples nothing is allocated any more, and one enormous image does not cost memory for
// ever.
class Arena {
 public:
  static constexpr std::size_t alignment = 64;

  explicit Arena(std::size_t keep = std::size_t{64} << 20) : keep_(keep) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Return `size` bytes, uninitialised, aligned to a cache line, that are valid until reset().
  [[nodiscard]] void* allocate(std::size_t size) noexcept;

  template <typename T>
  [[nodiscard]] T* array(std::size_t count) noexcept {
    if (count > static_cast<std::size_t>(-1) / sizeof(T) - alignment) return nullptr;
    return static_cast<T*>(allocate(count * sizeof(T)));
  }

  // Make all memory that was handed out free again.
  void reset() noexcept;

 private:
  struct Block;
  std::uint8_t* allocate_in_new_block(std::size_t taken) noexcept;

  Block* first_ = nullptr;        // all blocks, the newest first
  std::uint8_t* next_ = nullptr;  // free memory of one of them
  std::uint8_t* end_ = nullptr;
  std::size_t used_ = 0;        // bytes allocated since the last reset
  std::size_t next_block_ = 0;  // size of the next block, if that is enough
  std::size_t keep_;
};

}  // namespace fastpipe
