#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "../arena.h"
#include "check.h"

namespace {

using fastpipe::Arena;

struct Piece {
  std::uint8_t* data;
  std::size_t size;
  std::uint8_t value;
};

bool is_aligned(const void* memory) { return reinterpret_cast<std::uintptr_t>(memory) % Arena::alignment == 0; }

std::uint32_t next_random(std::uint32_t* state) {
  *state = *state * 1664525u + 1013904223u;
  return *state >> 8;
}

// Allocate and fill one piece, and remember it.
bool add_piece(Arena& arena, std::size_t size, std::vector<Piece>* pieces) {
  auto* data = static_cast<std::uint8_t*>(arena.allocate(size));
  if (data == nullptr || !is_aligned(data)) return false;
  const auto value = static_cast<std::uint8_t>(pieces->size() * 37 + 11);
  std::memset(data, value, size);
  pieces->push_back({data, size, value});
  return true;
}

bool are_intact(const std::vector<Piece>& pieces) {
  for (const Piece& piece : pieces) {
    for (std::size_t i = 0; i < piece.size; ++i) {
      if (piece.data[i] != piece.value) return false;
    }
  }
  return true;
}

}  // namespace

TEST("arena: allocations are aligned and do not overlap") {
  Arena arena(std::size_t{2} << 20);
  std::uint32_t random = 1;
  for (int sample = 0; sample < 60; ++sample) {
    std::vector<Piece> pieces;
    for (int i = 0; i < 50; ++i) {
      const std::size_t limit = i % 10 == 0 ? 400'000 : 2'000;
      CHECK(add_piece(arena, next_random(&random) % limit, &pieces));
    }
    CHECK(are_intact(pieces));
    arena.reset();
  }
}

TEST("arena: an empty allocation is memory, too") {
  Arena arena;
  void* first = arena.allocate(0);
  void* second = arena.allocate(0);
  CHECK(first != nullptr && second != nullptr && first != second);
}

TEST("arena: after two samples one block serves all, at the same addresses") {
  Arena arena;
  const std::size_t sizes[] = {100, 3'000'000, 5'000'000, 1, 64, 4'000'000, 700'000};
  std::vector<void*> before;
  for (int sample = 0; sample < 6; ++sample) {
    std::vector<void*> now;
    for (const std::size_t size : sizes) now.push_back(arena.allocate(size));
    for (std::size_t i = 0; i < now.size(); ++i) {
      CHECK(now[i] != nullptr && is_aligned(now[i]));
      if (sample > 0 && i > 0) CHECK(static_cast<std::uint8_t*>(now[i]) > static_cast<std::uint8_t*>(now[i - 1]));
      if (sample > 1) CHECK(now[i] == before[i]);
    }
    before = now;
    arena.reset();
  }
}

TEST("arena: a block is kept for smaller samples") {
  Arena arena;
  CHECK(arena.allocate(10'000'000) != nullptr);
  arena.reset();
  void* large = arena.allocate(10'000'000);
  CHECK(large != nullptr);
  for (int sample = 0; sample < 5; ++sample) {
    arena.reset();
    CHECK(arena.allocate(1'000) == large);
  }
}

TEST("arena: samples that grow slowly seldom need a new block") {
  Arena arena;
  int moves = 0;
  void* before = nullptr;
  for (std::size_t size = 300'000; size < 30'000'000; size += 100'000) {
    void* memory = arena.allocate(size);
    CHECK(memory != nullptr);
    if (memory != before) ++moves;
    before = memory;
    arena.reset();
  }
  CHECK(moves <= 40);
}

TEST("arena: samples beyond the limit work, and smaller ones after them") {
  Arena arena(std::size_t{1} << 20);
  for (int sample = 0; sample < 4; ++sample) {
    std::vector<Piece> pieces;
    CHECK(add_piece(arena, 1'000, &pieces));
    CHECK(add_piece(arena, 20'000'000, &pieces));
    CHECK(add_piece(arena, 1'000, &pieces));
    CHECK(add_piece(arena, 900'000, &pieces));
    CHECK(are_intact(pieces));
    arena.reset();
    pieces.clear();
    CHECK(add_piece(arena, 500'000, &pieces));
    CHECK(are_intact(pieces));
    arena.reset();
  }
  Arena nothing(0);
  for (int sample = 0; sample < 3; ++sample) {
    CHECK(nothing.allocate(1'000) != nullptr);
    CHECK(nothing.allocate(1'000'000) != nullptr);
    nothing.reset();
  }
}

TEST("arena: what cannot be had is null, and the arena can be used further") {
  Arena arena;
  const std::size_t most = std::numeric_limits<std::size_t>::max();
  std::vector<Piece> pieces;
  CHECK(add_piece(arena, 1'000, &pieces));
  for (const std::size_t size :
       {most, most - 1, most - 63, most - 64, most / 2 + 1, most / 2, most / 4, most / 4 + 1}) {
    CHECK(arena.allocate(size) == nullptr);
  }
  CHECK(arena.array<std::uint64_t>(most / 8) == nullptr);
  CHECK(arena.array<std::uint64_t>(most / 4) == nullptr);
  CHECK(arena.array<std::uint8_t>(most) == nullptr);
  CHECK(add_piece(arena, 1'000'000, &pieces));
  CHECK(are_intact(pieces));
  arena.reset();
  CHECK(arena.array<std::int32_t>(1'000) != nullptr);
}

TEST("arena: reset at once, twice, and no use at all") {
  Arena unused;
  Arena arena;
  arena.reset();
  arena.reset();
  CHECK(arena.allocate(1) != nullptr);
  arena.reset();
  arena.reset();
  CHECK(arena.allocate(1) != nullptr);
}
