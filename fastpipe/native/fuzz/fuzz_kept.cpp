// Fuzzes what a cache shared by processes says of itself: the records of its log, and a data file that does not fit.
//
// The input: a byte of options, then records of 64 bytes, of which every second one gets a check that is right.
// Invariants: what is found lies inside the data file; only records whose check is right are found; a record that was
// forgotten is not; and reading gives all of an image or nothing.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "../kept.h"
#include "fuzz.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::fuzz;

constexpr std::int64_t kSize = 3 << 12;  // of the data file

std::vector<EntryRecord> records_of(Bytes input) {
  std::vector<EntryRecord> records(input.size / sizeof(EntryRecord));
  for (std::size_t i = 0; i < records.size(); ++i) {
    EntryRecord& record = records[i];
    std::memcpy(static_cast<void*>(&record), input.data + i * sizeof record, sizeof record);
    if (i % 2 != 0) continue;
    // Most random numbers would be beyond all bounds: half of these are near them.
    if (record.flags & 2) record.offset %= kSize + 2;
    if (record.flags & 4) {
      record.height = record.height % 40, record.width = record.width % 40, record.channels = 3;
      record.nbytes = std::uint64_t{3} * record.height * record.width;
    }
    record.check = check_of(record);
  }
  return records;
}

void check_found(const KeptImages& kept, const KeptImage& image, const EntryRecord& record, bool is_short) {
  const std::int64_t nbytes = std::int64_t{3} * image.size.height * image.size.width;
  require(image.size.height > 0 && image.size.width > 0, "the size of an image");
  require(image.offset >= 0 && nbytes <= kept.size && image.offset <= kept.size - nbytes, "inside the data file");
  require(check_of(record) == record.check, "a record whose check is wrong");
  Arena arena;
  const std::uint8_t* bytes = read_kept(kept, image.offset, nbytes, arena);
  require(bytes != nullptr || (is_short && kept.memory == nullptr), "its bytes");
  if (bytes == nullptr || kept.memory == nullptr) return;
  require(std::memcmp(bytes, kept.memory + image.offset, static_cast<std::size_t>(nbytes)) == 0, "the same bytes");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const int descriptor = ::memfd_create("fuzz", 0);
  static void* const mapped = ::mmap(nullptr, kSize, PROT_READ, MAP_SHARED, descriptor, 0);
  static const std::vector<std::uint8_t> content(static_cast<std::size_t>(kSize), 7);
  if (size < 1) return 0;
  const int options = data[0];
  const std::vector<EntryRecord> records = records_of({data + 1, size - 1});
  const bool is_short = (options & 1) != 0;  // the file is not as long as it will become
  require(::ftruncate(descriptor, 0) == 0, "an empty file");
  require(::pwrite(descriptor, content.data(), content.size() / (is_short ? 3 : 1), 0) > 0, "a data file");

  KeptImages kept;
  kept.table = std::make_shared<EntryTable>();
  kept.descriptor = descriptor;
  kept.memory = (options & 2) != 0 ? static_cast<const std::uint8_t*>(mapped) : nullptr;
  kept.size = (options & 4) != 0 ? kSize : kSize / 4;
  kept.verifies = (options & 8) != 0;
  const std::int64_t most_pixels = (options & 16) != 0 ? 100 : -1;

  // Added in two parts.
  const std::size_t first = records.size() * static_cast<std::size_t>(options >> 5) / 8;
  std::uint64_t end = 0;
  require(kept.table->extend(records.data(), static_cast<std::int64_t>(first), &end), "memory");
  const auto rest = static_cast<std::int64_t>(records.size() - first);
  require(kept.table->extend(records.data() + first, rest, &end), "memory");
  require(kept.table->size() == static_cast<std::int64_t>(records.size()), "the number of records");

  EntryRecord record;
  for (const EntryRecord& wanted : records) {
    if (check_of(wanted) == wanted.check) require(kept.table->find(wanted.digest, &record) >= 0, "a record");
  }
  Arena arena;
  for (const EntryRecord& wanted : records) {
    KeptImage image;
    const Lookup lookup = find_kept(kept, wanted.digest, 3, most_pixels, arena, &image);
    // What cannot be used has been forgotten.
    const std::int64_t number = kept.table->find(wanted.digest, &record);
    require((number < 0) == (lookup == Lookup::missing), "missing where it is not found");
    if (number < 0) continue;
    require(record.digest.low == wanted.digest.low && record.digest.high == wanted.digest.high, "its digest");
    if (lookup == Lookup::found) check_found(kept, image, record, is_short);
    arena.reset();
  }
  for (std::int64_t number = 0; number < kept.table->size(); ++number) {
    EntryRecord found;
    if (!kept.table->record(number, &record)) continue;
    kept.table->forget(number);
    require(kept.table->find(record.digest, &found) != number, "a record that was forgotten");
    require(!kept.table->record(number, &found), "the record of a forgotten number");
  }
  return 0;
}
