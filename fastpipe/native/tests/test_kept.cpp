// Kept images: found by the state of their file, and never taken from outside the data file.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <vector>

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
    CHECK(store.find() == Lookup::unusable);
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
    CHECK(store.find() == Lookup::unusable);
  }
  // 2**31 by 2**31 by 3, which is 0 modulo 2**62, and sizes that are 0.
  for (const std::uint64_t nbytes : {std::uint64_t{0}, std::numeric_limits<std::uint64_t>::max()}) {
    Store store;
    store.record.height = store.record.width = 1u << 31;
    store.record.nbytes = nbytes;
    CHECK(store.find() == Lookup::unusable);
  }
}

TEST("kept: a store that holds nothing yet has no image") {
  for (const std::int64_t size : {std::int64_t{0}, std::int64_t{-1}}) {
    Store store;
    store.kept.size = size;
    CHECK(store.find() == Lookup::unusable);
  }
}

TEST("kept: an image of a file with too many pixels is not used") {
  for (const std::int64_t most_pixels : {99, 100}) {
    Store store;
    store.record.flags = 100 << 1;
    CHECK(store.find(most_pixels) == (most_pixels == 100 ? Lookup::found : Lookup::unusable));
  }
}

TEST("kept: bytes that changed are seen when they are first read") {
  for (const bool verifies : {true, false}) {
    Store store;
    store.kept.verifies = verifies;
    const std::uint8_t other = 1;
    CHECK(::pwrite(store.kept.descriptor, &other, 1, 70) == 1);
    CHECK(store.find() == (verifies ? Lookup::unusable : Lookup::found));
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
  CHECK(store.find(-1, &image) == Lookup::unusable);
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
    CHECK(store.find() == Lookup::unusable);
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

TEST("kept: the second time a digest comes it is marked") {
  Store store;
  store.kept.marks = 16;
  const std::vector<std::uint8_t> zeros(16);
  CHECK(::pwrite(store.kept.descriptor, zeros.data(), zeros.size(), 0) == 16);
  CHECK(!mark(store.kept, {5, 0}) && mark(store.kept, {5, 0}));
  CHECK(!mark(store.kept, {std::numeric_limits<std::uint64_t>::max(), 0}));
}
