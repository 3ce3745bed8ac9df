#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "../units.h"
#include "check.h"

using namespace fastpipe;

namespace {

constexpr std::int64_t kNbytes = 4096;

// Memory of this process alone, or, with a file, of several.
struct Memory {
  UnitMemory::Shape shape;
  int descriptor = -1;
  std::uint8_t* bytes = nullptr;
  std::unique_ptr<UnitMemory> units;

  Memory(std::int64_t keys, std::int64_t slots, bool is_shared = false) : shape{keys, slots, kNbytes} {
    const auto size = static_cast<std::size_t>(shape.nbytes());
    if (is_shared) {
      descriptor = memfd_create("units", 0);
      CHECK(ftruncate(descriptor, shape.nbytes()) == 0);
    }
    const int kind = is_shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    bytes = static_cast<std::uint8_t*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, kind, descriptor, 0));
    units = std::make_unique<UnitMemory>(bytes, descriptor, shape);
  }
  ~Memory() {
    units.reset();
    munmap(bytes, static_cast<std::size_t>(shape.nbytes()));
    if (descriptor >= 0) close(descriptor);
  }
  UnitMemory* operator->() { return units.get(); }

  bool make(std::int64_t key, std::int64_t left = -1) {
    const UnitMemory::Claim claim = units->claim(key);
    if (!claim) return false;
    std::memset(claim.data, static_cast<int>(key % 251), kNbytes);
    return units->publish(claim, left);
  }
  // Whether a unit is there, with all of its bytes.
  bool holds(std::int64_t key) {
    const UnitMemory::Found found = units->find(key);
    if (!found) return false;
    bool is_right = true;
    for (std::int64_t i = 0; i < kNbytes; ++i) is_right &= found.data[i] == key % 251;
    return units->release(found) && is_right;
  }
};

}  // namespace

TEST("a unit is found once it was published") {
  Memory memory(10, 3);
  CHECK(!memory->find(4));
  const UnitMemory::Claim claim = memory->claim(4);
  CHECK(bool(claim) && !memory->find(4) && !memory->claim(4) && memory->is_coming(4));
  std::memset(claim.data, 4, kNbytes);
  CHECK(memory->publish(claim, -1));
  CHECK(memory.holds(4) && memory->is_there(4) && !memory->is_coming(4) && !memory->claim(4));
  CHECK(!memory->find(-1) && !memory->find(10) && !memory->claim(-1) && !memory->claim(10));
}

TEST("a unit that was given up can be claimed again") {
  Memory memory(10, 1);
  const UnitMemory::Claim claim = memory->claim(4);
  CHECK(!memory->claim(5));
  memory->abandon(claim);
  CHECK(!memory->find(4) && !memory->is_coming(4));
  CHECK(memory.make(5) && memory.holds(5));
}

TEST("the unit that was not used for the longest time makes room") {
  Memory memory(10, 3);
  for (int key : {0, 1, 2}) CHECK(memory.make(key));
  CHECK(memory.holds(0));
  CHECK(memory.make(3));
  CHECK(memory.holds(0) && !memory.holds(1) && memory.holds(2) && memory.holds(3));
}

TEST("a unit that will not be used again makes room first") {
  Memory memory(10, 3);
  CHECK(memory.make(0, 5) && memory.make(1, 2) && memory.make(2, 5));
  memory->used(1, 1);
  memory->used(1, 1);
  CHECK(memory.make(3) && !memory.holds(1) && memory.holds(0) && memory.holds(2));
}

TEST("a unit that is being read is not overwritten") {
  Memory memory(10, 1);
  CHECK(memory.make(0));
  const UnitMemory::Found found = memory->find(0);
  CHECK(bool(found) && !memory->claim(1));
  CHECK(memory->release(found) && memory.make(1));
}

TEST("expected uses count down, and the same ones add up") {
  Memory memory(4, 4);
  std::vector<std::int64_t> uses = {0, 1, 1};
  uses.insert(uses.end(), 100, 3);
  const auto count = static_cast<std::int64_t>(uses.size());
  CHECK(memory->expected() == 0);
  CHECK(memory->expect(7, uses.data(), count, false));
  CHECK(memory->expected() == 7 && !memory->is_over());
  for (int key = 0; key < 4; ++key) CHECK(memory.make(key));
  memory->used(3, 100);
  memory->used(1, 2);
  CHECK(memory->is_over());
  CHECK(memory->expect(7, uses.data(), count, false));
  CHECK(!memory->is_over());
  memory->used(0, 1);
  CHECK(!memory->is_over());
}

TEST("what is used last makes room first, where the order is known") {
  // The number of units decoded is the least possible: that of Belady's policy, here by looking at all that follow.
  std::minstd_rand random(7);
  for (int round = 0; round < 50; ++round) {
    const std::int64_t keys = 3 + static_cast<std::int64_t>(random() % 30);
    const std::int64_t slots = 1 + static_cast<std::int64_t>(random() % static_cast<unsigned>(keys));
    std::vector<std::int64_t> uses(200);
    for (std::int64_t& key : uses) key = static_cast<std::int64_t>(random() % static_cast<unsigned>(keys));
    Memory memory(keys, slots);
    CHECK(memory->expect(round + 1, uses.data(), 200, true));
    std::set<std::int64_t> there;
    int made = 0, least = 0;
    for (auto use = uses.begin(); use != uses.end(); ++use) {
      if (const UnitMemory::Found found = memory->find(*use)) {
        CHECK(memory->release(found));
      } else {
        CHECK(memory.make(*use));
        ++made;
      }
      memory->used(*use, 1);
      if (there.count(*use) == 0) {
        ++least;
        if (static_cast<std::int64_t>(there.size()) == slots) {
          there.erase(*std::max_element(there.begin(), there.end(), [&](std::int64_t a, std::int64_t b) {
            return std::find(use, uses.end(), a) < std::find(use, uses.end(), b);
          }));
        }
        there.insert(*use);
      }
    }
    CHECK(made == least && memory->is_over());
  }
}

TEST("a slot whose writer was killed can be had again") {
  Memory memory(10, 1, true);
  const pid_t child = fork();
  if (child == 0) {
    UnitMemory own(memory.bytes, memory.descriptor, memory.shape);
    _exit(bool(own.claim(4)) ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK(memory->is_coming(4));
  memory->wait(4);
  CHECK(memory.make(4) && memory.holds(4));
}

TEST("processes do not overwrite what others are writing") {
  Memory memory(10, 1, true);
  int to_child[2], to_parent[2];
  CHECK(pipe(to_child) == 0 && pipe(to_parent) == 0);
  const pid_t child = fork();
  char one = 0;
  if (child == 0) {
    UnitMemory own(memory.bytes, memory.descriptor, memory.shape);
    const UnitMemory::Claim claim = own.claim(4);
    bool ok = bool(claim) && write(to_parent[1], &one, 1) == 1 && read(to_child[0], &one, 1) == 1;
    std::memset(claim.data, 4, kNbytes);
    ok = ok && own.publish(claim, -1);
    _exit(ok ? 0 : 1);
  }
  CHECK(read(to_parent[0], &one, 1) == 1);
  CHECK(!memory->claim(4) && !memory->claim(5) && !memory->find(4));
  CHECK(write(to_child[1], &one, 1) == 1);
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK(memory.holds(4));
  for (int descriptor : {to_child[0], to_child[1], to_parent[0], to_parent[1]}) close(descriptor);
}

TEST("what another process has overwritten meanwhile is not taken for whole") {
  Memory memory(10, 1, true);
  CHECK(memory.make(4));
  const UnitMemory::Found found = memory->find(4);
  const pid_t child = fork();
  if (child == 0) {
    UnitMemory own(memory.bytes, memory.descriptor, memory.shape);
    const UnitMemory::Claim claim = own.claim(5);
    _exit(bool(claim) && own.publish(claim, -1) ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK(bool(found) && !memory->release(found));
}

TEST("numbers that another process has spoilt lead nowhere") {
  Memory memory(4, 2);
  std::memset(memory.bytes, 0x5a, static_cast<std::size_t>(memory.shape.table_nbytes()));
  for (int key = 0; key < 4; ++key) {
    CHECK(!memory->find(key));
    const UnitMemory::Claim claim = memory->claim(key);
    if (claim) memory->abandon(claim);
    memory->used(key, 1);
  }
}

TEST("threads that want the same units find whole ones") {
  Memory memory(40, 7);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&memory, &wrong, number] {
      for (int round = 0; round < 2000; ++round) {
        const std::int64_t key = (round * 7 + number * (round % 3)) % 40;
        if (const UnitMemory::Found found = memory->find(key)) {
          wrong += found.data[0] != key % 251 || found.data[kNbytes - 1] != key % 251;
          wrong += !memory->release(found);
          memory->used(key, 1);
        } else if (!memory.make(key, round % 4)) {
          memory->wait(key);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}
