#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <limits>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#define FASTPIPE_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FASTPIPE_ADDRESS_SANITIZER 1
#endif
#endif

#ifdef FASTPIPE_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#endif

namespace fastpipe {
namespace {

// Blocks are mapped, not taken from malloc: they neither split its heaps nor change its thresholds, and pages
// that were never written cost nothing.
constexpr std::size_t kSmallestBlock = std::size_t{256} << 10;
constexpr std::size_t kGranule = std::size_t{64} << 10;  // a multiple of every usual page size
constexpr std::size_t kLargest = static_cast<std::size_t>(std::numeric_limits<std::ptrdiff_t>::max()) / 2;

std::size_t rounded_up(std::size_t size, std::size_t multiple) { return (size + multiple - 1) / multiple * multiple; }

#ifdef FASTPIPE_ADDRESS_SANITIZER
// The sanitizer then sees accesses past an allocation's end, and those after reset().
constexpr std::size_t kGap = Arena::alignment;
void forbid(const void* memory, std::size_t size) { __asan_poison_memory_region(memory, size); }
void allow(const void* memory, std::size_t size) { __asan_unpoison_memory_region(memory, size); }
#else
constexpr std::size_t kGap = 0;
void forbid(const void*, std::size_t) {}
void allow(const void*, std::size_t) {}
#endif

}  // namespace

struct Arena::Block {
  Block* older;
  std::size_t size;  // of the whole mapping, this header included

  static constexpr std::size_t header = Arena::alignment;
  std::uint8_t* begin() { return reinterpret_cast<std::uint8_t*>(this) + header; }
  std::uint8_t* end() { return reinterpret_cast<std::uint8_t*>(this) + size; }

  static Block* map(std::size_t size, Block* older) {
    void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    static_assert(sizeof(Block) <= header);
    Block* block = new (memory) Block{older, size};
    forbid(block->begin(), size - header);
    return block;
  }

  static void unmap(Block* block) {
    const std::size_t size = block->size;
    allow(block, size);
    ::munmap(block, size);
  }
};

Arena::~Arena() {
  while (first_ != nullptr) {
    Block* block = first_;
    first_ = block->older;
    Block::unmap(block);
  }
}

void* Arena::allocate(std::size_t size) noexcept {
  if (size > kLargest) return nullptr;
  const std::size_t taken = rounded_up(std::max<std::size_t>(size, 1), alignment) + kGap;
  std::uint8_t* memory = next_;
  if (static_cast<std::size_t>(end_ - next_) >= taken) {
    next_ += taken;
  } else {
    memory = allocate_in_new_block(taken);
    if (memory == nullptr) return nullptr;
  }
  used_ += taken;
  allow(memory, size);
  return memory;
}

std::uint8_t* Arena::allocate_in_new_block(std::size_t taken) noexcept {
  const std::size_t least = rounded_up(taken + Block::header, kGranule);
  const std::size_t twice = first_ == nullptr ? 0 : std::min(2 * first_->size, keep_);
  const std::size_t usual = rounded_up(std::max({next_block_, twice, kSmallestBlock}), kGranule);
  Block* block = Block::map(std::max(least, usual), first_);
  if (block == nullptr && least < usual) block = Block::map(least, first_);
  if (block == nullptr) return nullptr;
  first_ = block;
  std::uint8_t* memory = block->begin();
  // Go on in the block with more room: a large allocation must not waste the rest of the old block.
  if (block->end() - (memory + taken) >= end_ - next_) {
    next_ = memory + taken;
    end_ = block->end();
  }
  return memory;
}

void Arena::reset() noexcept {
  if (first_ == nullptr) return;
  const std::size_t keep = std::max(keep_, kSmallestBlock);
  if (first_->older == nullptr && first_->size <= keep) {
    forbid(first_->begin(), first_->size - Block::header);
    next_ = first_->begin();
    end_ = first_->end();
  } else {
    // One block that holds all of such a sample will be made when the next one begins.  It grows by half at
    // least, so that samples that slowly become larger do not each need a new one.
    std::size_t largest = 0;
    while (first_ != nullptr) {
      Block* block = first_;
      first_ = block->older;
      if (block->size <= keep) largest = std::max(largest, block->size);
      Block::unmap(block);
    }
    next_ = end_ = nullptr;
    const std::size_t wanted = std::max(used_ + Block::header, largest + largest / 2);
    next_block_ = std::min(wanted, keep / kGranule * kGranule);
  }
  used_ = 0;
}

}  // namespace fastpipe
