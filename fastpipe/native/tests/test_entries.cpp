// The table of a cache's records: what is found, what is not, and threads that look while others add.
#include <atomic>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "../entries.h"
#include "check.h"

using namespace fastpipe;

namespace {

EntryRecord record_of(std::uint64_t low, std::uint64_t offset = 0, std::uint64_t nbytes = 0) {
  EntryRecord record;
  record.digest = {low, ~low};
  record.offset = offset;
  record.nbytes = nbytes;
  record.check = check_of(record);
  return record;
}

// The end that extend() reports, or -1 if it fails.
std::int64_t add(EntryTable& table, const std::vector<EntryRecord>& records) {
  std::uint64_t end = 0;
  const bool added = table.extend(records.data(), static_cast<std::int64_t>(records.size()), &end);
  return added ? static_cast<std::int64_t>(end) : -1;
}

std::int64_t number_of(const EntryTable& table, std::uint64_t low) {
  EntryRecord record;
  return table.find({low, ~low}, &record);
}

}  // namespace

TEST("entries: a record is found by all of its digest") {
  EntryTable table;
  CHECK(table.size() == 0 && number_of(table, 5) == -1);
  CHECK(add(table, {record_of(5, 100, 20), record_of(6, 64, 10)}) == 120);
  CHECK(table.size() == 2 && number_of(table, 5) == 0 && number_of(table, 6) == 1);
  EntryRecord found;
  CHECK(table.find({5, 5}, &found) == -1);
  CHECK(table.find({5, ~std::uint64_t{5}}, &found) == 0 && found.offset == 100 && found.nbytes == 20);
}

TEST("entries: records whose digests begin alike stand side by side") {
  EntryTable table;
  std::vector<EntryRecord> records(300, record_of(std::numeric_limits<std::uint64_t>::max()));
  for (std::size_t i = 0; i < records.size(); ++i) {
    records[i].digest.high = i;
    records[i].check = check_of(records[i]);
  }
  CHECK(add(table, records) == 0);
  EntryRecord found;
  for (std::size_t i = 0; i < records.size(); ++i) {
    CHECK(table.find(records[i].digest, &found) == static_cast<std::int64_t>(i));
  }
  CHECK(table.find({std::numeric_limits<std::uint64_t>::max(), 300}, &found) == -1);
}

TEST("entries: a bit that is wrong anywhere in a record hides it, but it counts") {
  for (std::size_t bit = 0; bit < 8 * sizeof(EntryRecord); ++bit) {
    EntryRecord record = record_of(77, 64, 128);
    std::uint8_t bytes[sizeof record];
    std::memcpy(bytes, &record, sizeof record);
    bytes[bit / 8] = static_cast<std::uint8_t>(bytes[bit / 8] ^ (1u << bit % 8));
    std::memcpy(static_cast<void*>(&record), bytes, sizeof record);
    EntryTable table;
    CHECK(add(table, {record}) == 0);
    EntryRecord found;
    CHECK(table.size() == 1 && table.find(record.digest, &found) == -1 && !table.record(0, &found));
  }
}

TEST("entries: zeros, as a hole in the log leaves, are no record") {
  EntryTable table;
  CHECK(add(table, std::vector<EntryRecord>(10)) == 0);
  EntryRecord found;
  CHECK(table.size() == 10 && table.find({}, &found) == -1);
}

TEST("entries: what is forgotten is not found, and its newer record is") {
  EntryTable table;
  add(table, {record_of(1), record_of(2)});
  table.note_verified(0);
  CHECK(table.is_verified(0) && !table.is_verified(1));
  table.forget(0);
  table.note_verified(0);
  CHECK(!table.is_verified(0) && number_of(table, 1) == -1 && number_of(table, 2) == 1);
  add(table, {record_of(1)});
  CHECK(number_of(table, 1) == 2);
}

TEST("entries: a table that grows keeps what it knows") {
  EntryTable table;
  constexpr std::uint64_t count = 5000;
  for (std::uint64_t i = 0; i < count; ++i) {
    add(table, {record_of(i)});
    if (i == 100) table.forget(7);
    if (i == 100) table.note_verified(8);
  }
  CHECK(table.size() == count && table.is_verified(8));
  int wrong = 0;
  for (std::uint64_t i = 0; i < count; ++i) wrong += (number_of(table, i) == static_cast<std::int64_t>(i)) != (i != 7);
  CHECK(wrong == 0 && number_of(table, count) == -1);
}

TEST("entries: sums show bytes that have changed, moved or are missing") {
  std::vector<std::uint8_t> bytes(43, 9);
  bytes[3] = 1;
  const std::uint64_t sum = sum_of({bytes.data(), bytes.size()});
  CHECK(sum_of({bytes.data(), 42}) != sum && sum_of({nullptr, 0}) == 0);
  for (std::uint8_t& byte : bytes) {
    byte ^= 0x80;
    CHECK(sum_of({bytes.data(), bytes.size()}) != sum);
    byte ^= 0x80;
  }
  CHECK(sum_of({bytes.data(), bytes.size()}) == sum);
}

TEST("entries: threads look up, verify and forget while one adds") {
  EntryTable table;
  constexpr std::uint64_t count = 64 * 300;
  std::atomic<std::uint64_t> added{0};
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (std::uint64_t mine = 0; mine < 4; ++mine) {
    threads.emplace_back([&, mine] {
      std::uint64_t at = mine;
      for (std::uint64_t known = 0; known < count;) {
        known = added.load();
        if (known == 0) continue;
        at = (at * 31 + 7) % known;
        EntryRecord record;
        const std::int64_t number = table.find({at, ~at}, &record);
        if (at % 64 == 63) continue;  // another thread may have forgotten it
        if (number != static_cast<std::int64_t>(at) || record.offset != 64 * at) ++wrong;
        if (number < 0) continue;
        table.note_verified(number);
        table.forget(number | 63);
      }
    });
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    add(table, {record_of(i, 64 * i, 64)});
    if (i % 64 == 63) added.store(i + 1);  // so that every number that is forgotten is there
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0 && table.size() == count);
}
