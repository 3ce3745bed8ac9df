// Fuzzes the filters of chunks, and Blosc's blocks by themselves.
//
// The input: 16 bytes of options (see read_options), then what is stored.  Invariants: nothing outside the memory is
// written; what is made depends on the input alone, not on what a thread decoded before nor on the level of
// instructions; a part of a chunk equals that of the whole; what the whole needs to be right, a part needs, too, but
// for other blocks where they are independent.
#include <algorithm>
#include <memory>
#include <vector>

#include "../codecs.h"
#include "../simd.h"
#include "filters.h"
#include "fuzz.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::fuzz;

constexpr std::size_t kOptions = 16;
constexpr std::int64_t kLargest = std::int64_t{1} << 17;

struct Chunk {
  std::vector<FilterStep> steps;
  std::uint32_t mask = 0;
  std::int64_t size = 0;
  std::vector<std::uint8_t> stored;
};

// Bytes 0 and 1: how many steps, and the mask.  Eight for the steps (see read_steps), three for the size, one for
// bitshuffle's blocks, one for whether a checksum is made right.
Chunk read_options(Bytes input) {
  constexpr ChunkFilter filters[] = {
      ChunkFilter::deflate, ChunkFilter::shuffle,    ChunkFilter::fletcher32, ChunkFilter::lzf,    ChunkFilter::blosc,
      ChunkFilter::lz4,     ChunkFilter::bitshuffle, ChunkFilter::zstd,       ChunkFilter::blosc2, ChunkFilter{4}};
  const std::uint8_t* const data = input.data;
  Chunk chunk;
  chunk.mask = data[1];
  chunk.steps = read_steps(data + 2, data[0] % 5u, filters, data[13]);
  chunk.size = (data[10] | data[11] << 8 | data[12] << 16) % (kLargest + 1);
  chunk.stored.assign(data + kOptions, data + input.size);
  bool is_summed = false;
  for (std::size_t i = 0; i < chunk.steps.size(); ++i) {
    if ((chunk.mask >> i & 1) == 0) is_summed = chunk.steps[i].filter == ChunkFilter::fletcher32;
  }
  if (is_summed && (data[14] & 1) != 0 && chunk.stored.size() >= 4) {
    const std::size_t end = chunk.stored.size() - 4;
    const std::uint32_t sum = fletcher32({chunk.stored.data(), end});
    for (std::size_t i = 0; i < 4; ++i) chunk.stored[end + i] = static_cast<std::uint8_t>(sum >> 8 * i);
  }
  return chunk;
}

// Memory with a margin on both sides that must stay as it is.
class Guarded {
 public:
  explicit Guarded(std::int64_t size) : size_(size), memory_(static_cast<std::size_t>(size + 2 * kMargin), kFill) {}
  std::uint8_t* data() { return memory_.data() + kMargin; }
  void check() const {
    for (std::int64_t i = 0; i < kMargin; ++i) {
      require(at(i) == kFill && at(kMargin + size_ + i) == kFill, "what is outside the memory");
    }
  }

 private:
  static constexpr std::int64_t kMargin = 64;
  static constexpr std::uint8_t kFill = 0xA5;
  std::uint8_t at(std::int64_t i) const { return memory_[static_cast<std::size_t>(i)]; }
  std::int64_t size_;
  std::vector<std::uint8_t> memory_;
};

struct Undone {
  Problem problem;
  std::int32_t step;
  std::unique_ptr<Guarded> out;
};

Undone undone(const Chunk& chunk, Range wanted, Arena& arena, CodecStates& states) {
  Undone made = {Problem::none, 0, std::make_unique<Guarded>(chunk.size)};
  // Memory of exactly that size: a sanitizer sees a read behind its end.
  const auto exact = std::make_unique<std::uint8_t[]>(chunk.stored.size());
  std::copy(chunk.stored.begin(), chunk.stored.end(), exact.get());
  made.problem = undo_filters(chunk.steps, chunk.mask, {exact.get(), chunk.stored.size()}, made.out->data(), chunk.size,
                              wanted, arena, states, &made.step);
  arena.reset();
  made.out->check();
  return made;
}

void require_same(const Undone& one, const Undone& other, Range part, const char* what) {
  require(one.problem == other.problem && one.step == other.step, what);
  if (one.problem != Problem::none || part.begin >= part.end) return;
  const auto size = static_cast<std::size_t>(part.end - part.begin);
  require(std::memcmp(one.out->data() + part.begin, other.out->data() + part.begin, size) == 0, what);
}

Range some_part(Choices& choices, Range of) {
  const auto length = static_cast<std::int32_t>(of.end - of.begin);
  std::int64_t begin = choices.below(length + 1), end = choices.below(length + 1);
  if (choices.flip()) begin = begin / 64 * 64;
  if (choices.flip()) end = end / 64 * 64;
  return {of.begin + std::min(begin, end), of.begin + std::max(begin, end)};
}

// Whether the step that is undone last has blocks that are decoded by themselves.
bool has_blocks(const Chunk& chunk) {
  for (std::size_t i = 0; i < chunk.steps.size(); ++i) {
    const FilterStep& step = chunk.steps[i];
    if ((chunk.mask >> i & 1) != 0 || (step.filter == ChunkFilter::shuffle && step.element == 1)) continue;
    return step.filter == ChunkFilter::blosc || step.filter == ChunkFilter::lz4 ||
           step.filter == ChunkFilter::bitshuffle;
  }
  return false;
}

void check_parts(const Chunk& chunk, const Undone& whole, Choices& choices, Arena& arena, CodecStates& states) {
  for (int i = 0; i < 3; ++i) {
    const Range outer = some_part(choices, {0, chunk.size}), inner = some_part(choices, outer);
    const Undone one = undone(chunk, outer, arena, states);
    if (whole.problem == Problem::none || !has_blocks(chunk)) require_same(one, whole, outer, "a part of the whole");
    if (one.problem == Problem::none) {
      require_same(undone(chunk, inner, arena, states), one, inner, "a part of a part");
    }
  }
}

// Each block of a buffer, with nothing but its own bytes.
void check_blosc(const Chunk& chunk, Arena& arena, CodecStates& states) {
  const Bytes buffer = {chunk.stored.data(), chunk.stored.size()};
  BloscHeader header;
  const auto nbytes = static_cast<std::int64_t>(buffer.size);
  Guarded whole(chunk.size);
  const Problem problem = decode_blosc(buffer, whole.data(), chunk.size, arena, states);
  whole.check();
  arena.reset();
  if (read_blosc_header(buffer, chunk.size, nbytes, &header) != Problem::none || header.blocks > 200) return;
  const std::int64_t table = BloscHeader::kBytes + (header.is_copied ? 0 : 4 * header.blocks);
  require(table <= nbytes && header.blocks * header.block >= chunk.size, "a header");
  bool are_decoded = true;
  for (std::int64_t block = 0; block < header.blocks; ++block) {
    Range bounds;
    const Problem located =
        locate_blosc_blocks(header, buffer.data + BloscHeader::kBytes, {block, block + 1}, &bounds, arena);
    if (located != Problem::none) {
      require(problem == located, "a table");
      return;
    }
    require(table <= bounds.begin && bounds.begin <= bounds.end && bounds.end <= nbytes, "where a block is");
    std::vector<std::uint8_t> alone(buffer.size, std::uint8_t{7});
    std::copy(buffer.data, buffer.data + table, alone.begin());
    std::copy(buffer.data + bounds.begin, buffer.data + bounds.end, alone.begin() + bounds.begin);
    const std::int64_t begin = block * header.block, end = std::min(begin + header.block, chunk.size);
    Guarded out(end - begin);
    const Problem found = decode_blosc_blocks(header, alone.data(), {block, block + 1}, out.data(), arena, states);
    out.check();
    arena.reset();
    are_decoded = are_decoded && found == Problem::none;
    if (problem != Problem::none || end == begin) continue;
    require(std::memcmp(out.data(), whole.data() + begin, static_cast<std::size_t>(end - begin)) == 0, "a block");
  }
  require(are_decoded == (problem == Problem::none), "all blocks");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < kOptions) return 0;
  static CodecStates used;  // by all inputs before
  static Arena dirty;
  const Chunk chunk = read_options({data, size});
  Choices choices({data, size});
  const Range all = {0, chunk.size};
  const Undone whole = undone(chunk, all, dirty, used);
  {
    CodecStates states;
    Arena arena;
    require_same(undone(chunk, all, arena, states), whole, all, "the same in another thread");
  }
  for (int level = 0; level < static_cast<int>(best_level()); ++level) {
    require(force_level(static_cast<Level>(level)), "a level");
    require_same(undone(chunk, all, dirty, used), whole, all, "the same at all levels");
  }
  require(force_level(best_level()), "the best level");
  check_parts(chunk, whole, choices, dirty, used);
  if (!chunk.steps.empty() && chunk.steps[0].filter == ChunkFilter::blosc) check_blosc(chunk, dirty, used);
  std::vector<std::uint8_t> member(static_cast<std::size_t>(chunk.size));
  if (inflate_gzip({chunk.stored.data(), chunk.stored.size()}, member.data(), member.size(), used) == Problem::none) {
    require(chunk.size == 0 || !chunk.stored.empty(), "gzip");
  }
  return 0;
}
