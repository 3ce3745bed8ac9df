// Kept images: found by the state of their file, and never taken from outside the data file.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../files.h"
#include "../kept.h"
#include "check.h"
#include "folder.h"

using namespace fastpipe;
using namespace fastpipe::tests;

namespace {

constexpr std::int64_t kSize = 4096;

// A store of one image, 5 by 7, at offset 64, and what its record says.
struct Store {
  KeptImages kept;
  EntryRecord record;

  Store() {
    kept.table = std::make_shared<EntryTable>();
    kept.descriptor = ::memfd_create("kept", 0);
    kept.size = kSize;
    std::vector<std::uint8_t> bytes(kSize);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * 11);
    CHECK(::pwrite(kept.descriptor, bytes.data(), bytes.size(), 0) == kSize);
    record.digest = {1, 2};
    record.offset = 64;
    record.nbytes = 5 * 7 * 3;
    record.height = 5;
    record.width = 7;
    record.channels = 3;
    record.sum = sum_of({bytes.data() + 64, 5 * 7 * 3});
  }
  ~Store() { ::close(kept.descriptor); }
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Add the record with a check that is right, and look for it.
  Lookup find(std::int64_t most_pixels = -1, KeptImage* image = nullptr) {
    record.check = check_of(record);
    std::uint64_t end = 0;
    CHECK(kept.table->extend(&record, 1, &end));
    KeptImage found;
    return find_kept(kept, record.digest, 3, most_pixels, arena, image == nullptr ? &found : image);
  }
  Arena arena;
};

}  // namespace

TEST("kept: an image is found, and its bytes are read") {
  Store store;
  KeptImage image;
  CHECK(find_kept(store.kept, {1, 2}, 3, -1, store.arena, &image) == Lookup::missing);
  CHECK(store.find(-1, &image) == Lookup::found);
  CHECK((image.size == Size{5, 7}) && image.offset == 64);
  const std::uint8_t* bytes = read_kept(store.kept, image.offset, 5 * 7 * 3, store.arena);
  CHECK(bytes != nullptr && bytes[0] == static_cast<std::uint8_t>(64 * 11));
}

TEST("kept: a record that reaches outside the data file is not used") {
  constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  constexpr std::uint64_t nbytes = 5 * 7 * 3, last = kSize - nbytes;
  for (const std::uint64_t offset : {last + 1, std::uint64_t{kSize}, most / 2 + 1, most - nbytes + 1, most}) {
    Store store;
    store.record.offset = offset;
    CHECK(store.find() == Lookup::missing);
  }
  Store store;
  store.record.offset = last;
  CHECK(store.find() == Lookup::found);
}

TEST("kept: a record whose sizes do not agree is not used") {
  constexpr std::uint32_t most = std::numeric_limits<std::uint32_t>::max();
  const std::uint32_t shapes[][3] = {{0, 7, 3},       {5, 0, 3},    {5, 7, 1},          {5, 7, 4},       {5, 8, 3},
                                     {most, most, 3}, {most, 1, 3}, {1u << 24, 256, 3}, {1, 1u << 24, 3}};
  for (const auto& shape : shapes) {
    Store store;
    store.record.height = shape[0];
    store.record.width = shape[1];
    store.record.channels = shape[2];
    CHECK(store.find() == Lookup::missing);
  }
  // 2**31 by 2**31 by 3, which is 0 modulo 2**62, and sizes that are 0.
  for (const std::uint64_t nbytes : {std::uint64_t{0}, std::numeric_limits<std::uint64_t>::max()}) {
    Store store;
    store.record.height = store.record.width = 1u << 31;
    store.record.nbytes = nbytes;
    CHECK(store.find() == Lookup::missing);
  }
}

TEST("kept: a store that holds nothing yet has no image") {
  for (const std::int64_t size : {std::int64_t{0}, std::int64_t{-1}}) {
    Store store;
    store.kept.size = size;
    CHECK(store.find() == Lookup::missing);
  }
}

TEST("kept: an image of a file with too many pixels is not used") {
  for (const std::int64_t most_pixels : {99, 100}) {
    Store store;
    store.record.flags = 100 << 1;
    CHECK(store.find(most_pixels) == (most_pixels == 100 ? Lookup::found : Lookup::too_large));
  }
}

TEST("kept: bytes that changed are seen when they are first read") {
  for (const bool verifies : {true, false}) {
    Store store;
    store.kept.verifies = verifies;
    const std::uint8_t other = 1;
    CHECK(::pwrite(store.kept.descriptor, &other, 1, 70) == 1);
    CHECK(store.find() == (verifies ? Lookup::missing : Lookup::found));
    CHECK(!store.kept.table->is_verified(0));
  }
  Store store;
  store.kept.verifies = true;
  CHECK(store.find() == Lookup::found && store.kept.table->is_verified(0));
}

TEST("kept: a data file that is shorter than it was gives no bytes") {
  Store store;
  KeptImage image;
  CHECK(store.find(-1, &image) == Lookup::found);
  CHECK(::ftruncate(store.kept.descriptor, 100) == 0);
  CHECK(read_kept(store.kept, image.offset, 5 * 7 * 3, store.arena) == nullptr);
  store.kept.verifies = true;
  CHECK(store.find(-1, &image) == Lookup::missing);
}

TEST("kept: mapped bytes that the data file does not have are not touched") {
  for (const bool verifies : {true, false}) {
    Store store;
    store.kept.size = 4 * kSize;
    void* mapped = ::mmap(nullptr, 4 * kSize, PROT_READ, MAP_SHARED, store.kept.descriptor, 0);
    CHECK(mapped != MAP_FAILED);
    store.kept.memory = static_cast<const std::uint8_t*>(mapped);
    store.kept.verifies = verifies;
    CHECK(store.find() == Lookup::found);
    store.record.digest = {3, 4};
    store.record.offset = 2 * kSize;
    CHECK(store.find() == Lookup::missing);
    ::munmap(mapped, 4 * kSize);
  }
}

TEST("kept: a state tells versions of a file apart, and there is none without a file") {
  Folder folder;
  FileState one, other;
  CHECK(!state_of_file(folder.path("none").c_str(), &one));
  const std::string path = folder.write("a", {1, 2, 3});
  CHECK(state_of_file(path.c_str(), &one) && state_of_file(path.c_str(), &other));
  CHECK(std::equal(one.numbers, one.numbers + 5, other.numbers) && one.numbers[2] == 3);
  folder.write("a", {1, 2, 3, 4});
  CHECK(state_of_file(path.c_str(), &other) && other.numbers[2] == 4);
}

TEST("kept: each member of an archive has a state, and a path through a folder is a file's") {
  Folder folder;
  FileState archive, one, other;
  const std::string path = folder.write("a", {1, 2, 3});
  CHECK(state_of_file(path.c_str(), &archive));
  char version[12];
  std::snprintf(version, sizeof version, ".%08x/", version_of(3, static_cast<std::int64_t>(archive.numbers[3])));
  const std::string end = version + std::string("x");
  CHECK(state_of_file((path + "/@0+1" + end).c_str(), &one));
  for (const char* member : {"/@1+1", "/@0+2", "/@1+0"}) {
    CHECK(state_of_file((path + member + end).c_str(), &other));
    CHECK(!std::equal(one.numbers, one.numbers + 5, other.numbers));
    CHECK(!std::equal(archive.numbers, archive.numbers + 5, other.numbers));
  }
  CHECK(state_of_file((path + "/@0+1" + version + "y").c_str(), &other));
  CHECK(std::equal(one.numbers, one.numbers + 5, other.numbers));
  CHECK(!state_of_file((path + "/@0+1.01234567/x").c_str(), &other));  // of another version
  const std::string inner = folder.path("@1+2.01234567");
  CHECK(::mkdir(inner.c_str(), 0700) == 0);
  const std::string file = folder.write("@1+2.01234567/x", {1, 2, 3, 4, 5});
  CHECK(state_of_file(file.c_str(), &one) && one.numbers[2] == 5);
  CHECK(!state_of_file((folder.path("none") + "/@0+1.01234567/x").c_str(), &one));
}

TEST("kept: the second time a digest comes it is marked") {
  Store store;
  store.kept.marks = 16;
  const std::vector<std::uint8_t> zeros(16);
  CHECK(::pwrite(store.kept.descriptor, zeros.data(), zeros.size(), 0) == 16);
  CHECK(!mark(store.kept, {5, 0}) && mark(store.kept, {5, 0}));
  CHECK(!mark(store.kept, {std::numeric_limits<std::uint64_t>::max(), 0}));
}

// ---- chunks -------------------------------------------------------------------------------------------------------

namespace {

constexpr std::int64_t kChunk = 100;  // bytes

// A store of chunks; each begins at its number times 128.
struct ChunkStore {
  KeptStore store;
  std::unique_ptr<KeptChunks> chunks;
  Arena arena;

  explicit ChunkStore(bool verifies = false, std::int64_t marks = 0, bool is_mapped = false) {
    store.table = std::make_shared<EntryTable>();
    store.descriptor = ::memfd_create("kept", 0);
    store.size = kSize;
    store.verifies = verifies;
    store.marks = marks;
    store.tag = "a file and a dataset";
    CHECK(::ftruncate(store.descriptor, kSize) == 0);
    if (is_mapped) {
      store.memory = static_cast<const std::uint8_t*>(
          ::mmap(nullptr, static_cast<std::size_t>(kSize), PROT_READ, MAP_SHARED, store.descriptor, 0));
    }
    chunks = std::make_unique<KeptChunks>(store, 20, kChunk);
  }
  ~ChunkStore() {
    if (store.memory != nullptr) {
      ::munmap(const_cast<std::uint8_t*>(store.memory), static_cast<std::size_t>(kSize));
    }
    ::close(store.descriptor);
  }
  ChunkStore(const ChunkStore&) = delete;
  ChunkStore& operator=(const ChunkStore&) = delete;

  EntryRecord record(std::int64_t number, std::int64_t place) const {
    EntryRecord made;
    std::vector<std::uint8_t> bytes(kChunk, static_cast<std::uint8_t>(number + 1));
    made.digest = chunks->digest(number);
    made.offset = static_cast<std::uint64_t>(place);
    made.nbytes = kChunk;
    made.sum = sum_of({bytes.data(), bytes.size()});
    return made;
  }
  void add(EntryRecord record) {
    record.check = check_of(record);
    std::uint64_t end = 0;
    CHECK(store.table->extend(&record, 1, &end));
  }
  void keep(std::int64_t number, std::int64_t place) {
    const std::vector<std::uint8_t> bytes(kChunk, static_cast<std::uint8_t>(number + 1));
    CHECK(::pwrite(store.descriptor, bytes.data(), bytes.size(), static_cast<off_t>(place)) == kChunk);
    add(record(number, place));
  }
  std::int64_t find(std::int64_t number) {
    const std::int64_t found = chunks->find(number, arena);
    arena.reset();
    return found;
  }
};

}  // namespace

TEST("kept chunks: are found where they are, also those that were looked for before") {
  for (const bool verifies : {false, true}) {
    for (const bool is_mapped : {false, true}) {
      ChunkStore store(verifies, 0, is_mapped);
      for (int round = 0; round < 2; ++round) CHECK(store.find(7) == -1 && store.find(19) == -1);
      store.keep(7, 256);
      CHECK(store.find(7) == 256 && store.find(19) == -1);
      store.keep(19, 512);
      CHECK(store.find(19) == 512 && store.find(7) == 256 && store.find(0) == -1);
    }
  }
}

TEST("kept chunks: other files' and datasets' are not theirs") {
  ChunkStore store;
  KeptStore same = store.store, other = store.store;
  other.tag = "another file";
  KeptChunks again(same, 20, kChunk), theirs(other, 20, kChunk), longer(same, 20, kChunk + 1);
  store.keep(3, 128);
  CHECK(again.find(3, store.arena) == 128 && theirs.find(3, store.arena) == -1);
  CHECK(longer.find(3, store.arena) == -1);
}

TEST("kept chunks: a chunk that is known is not looked up, nor is one that is not while nothing is new") {
  ChunkStore store;
  store.keep(3, 128);
  CHECK(store.find(3) == 128 && store.find(4) == -1);
  store.store.table->forget(0);  // what is known of it stays: in memory nothing is overwritten
  CHECK(store.find(3) == 128);
  ChunkStore fresh;
  fresh.keep(3, 128);
  fresh.store.table->forget(0);
  CHECK(fresh.find(3) == -1);
}

TEST("kept chunks: records that reach outside the data file, or are of another size, are passed over") {
  constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  for (const std::uint64_t offset : {std::uint64_t{kSize} - kChunk + 1, std::uint64_t{kSize}, most / 2 + 1, most}) {
    ChunkStore store;
    EntryRecord record = store.record(3, 0);
    record.offset = offset;
    store.add(record);
    CHECK(store.find(3) == -1);
    store.keep(3, 640);  // another one with the same digest
    CHECK(store.find(3) == 640);
  }
  for (const std::uint64_t nbytes : {std::uint64_t{0}, std::uint64_t{99}, std::uint64_t{101}, most}) {
    ChunkStore store;
    EntryRecord record = store.record(3, 0);
    record.nbytes = nbytes;
    store.add(record);
    CHECK(store.find(3) == -1);
    store.keep(3, 640);
    CHECK(store.find(3) == 640);
  }
}

TEST("kept chunks: bytes that changed are seen when they are first read, and the next entry is taken") {
  ChunkStore store(true);
  store.keep(3, 128);
  const std::uint8_t other = 99;
  CHECK(::pwrite(store.store.descriptor, &other, 1, 200) == 1);
  CHECK(store.find(3) == -1);
  store.keep(3, 256);
  CHECK(store.find(3) == 256);
  ChunkStore trusting(false);
  trusting.keep(3, 128);
  CHECK(::pwrite(trusting.store.descriptor, &other, 1, 200) == 1 && trusting.find(3) == 128);
}

TEST("kept chunks: mapped bytes that the data file does not have are not pointed to") {
  for (const bool verifies : {false, true}) {
    ChunkStore store(verifies, 0, true);
    store.keep(3, 128);
    store.keep(4, 2048);
    CHECK(::ftruncate(store.store.descriptor, 300) == 0);
    CHECK(store.find(3) == 128 && store.find(4) == -1);
  }
}

TEST("kept chunks: with marks they are wanted from the second time on") {
  ChunkStore always, store(false, 64);
  for (int round = 0; round < 2; ++round) CHECK(always.chunks->wants(3));
  CHECK(!store.chunks->wants(3) && store.chunks->wants(3) && store.chunks->wants(3));
  const int read_only = ::open("/dev/null", O_RDONLY);
  KeptStore broken = store.store;
  broken.descriptor = read_only;
  KeptChunks chunks(broken, 20, kChunk);
  CHECK(!chunks.wants(3) && !chunks.wants(3));  // kept later, or never
  ::close(read_only);
}

TEST("kept chunks: threads that look while others keep find the right places") {
  ChunkStore store(true);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  std::atomic<bool> ends{false};
  for (int number = 0; number < 3; ++number) {
    threads.emplace_back([&] {
      Arena arena;
      while (!ends) {
        for (std::int64_t chunk = 0; chunk < 20; ++chunk) {
          const std::int64_t place = store.chunks->find(chunk, arena);
          wrong += place == -1 || place == chunk * 128 ? 0 : 1;
          arena.reset();
        }
      }
    });
  }
  for (std::int64_t chunk = 0; chunk < 20; ++chunk) store.keep(chunk, chunk * 128);
  ends = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  for (std::int64_t chunk = 0; chunk < 20; ++chunk) CHECK(store.find(chunk) == chunk * 128);
}
