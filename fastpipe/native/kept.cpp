#include "kept.h"

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace fastpipe {
namespace {

bool is_whole(const KeptStore& kept, const EntryRecord& record, std::int64_t number, Arena& arena) {
  if (!(kept.verifies || kept.memory != nullptr) || kept.table->is_verified(number)) return true;
  const auto nbytes = static_cast<std::int64_t>(record.nbytes);
  if (!kept.verifies) {
    // Reading mapped bytes that the file does not have ends the process: it may be shorter than it will become.
    std::uint8_t last;
    if (!read_at(kept.descriptor, &last, 1, static_cast<std::int64_t>(record.offset) + nbytes - 1)) return false;
    kept.table->note_verified(number);
    return true;
  }
  const std::uint8_t* bytes = read_kept(kept, static_cast<std::int64_t>(record.offset), nbytes, arena);
  if (bytes == nullptr || sum_of({bytes, static_cast<std::size_t>(nbytes)}) != record.sum) return false;
  kept.table->note_verified(number);
  return true;
}

bool fits(const KeptStore& kept, const EntryRecord& record) noexcept {
  // Records are other processes': what one says of itself is not relied on.
  const auto largest = static_cast<std::uint64_t>(std::max<std::int64_t>(kept.size, 0));
  return record.offset <= largest && record.nbytes <= largest - record.offset;
}

}  // namespace

Lookup find_kept(const KeptImages& kept, Digest digest, std::int32_t channels, std::int64_t most_pixels, Arena& arena,
                 KeptImage* image) noexcept {
  const std::uint32_t widest = kept.form == KeptForm::pixels ? 1u << 24 : 1u << 31;
  for (;;) {
    EntryRecord record;
    const std::int64_t number = kept.table->find(digest, &record);
    if (number < 0) return Lookup::missing;
    if (most_pixels >= 0 && std::int64_t{record.flags >> 1} > most_pixels) return Lookup::too_large;
    const bool is_image = record.channels == static_cast<std::uint32_t>(channels) && record.height > 0 &&
                          record.width > 0 && record.height < 1u << 24 && record.width < widest &&
                          std::uint64_t{record.height} * record.width * record.channels == record.nbytes;
    if (fits(kept, record) && is_image && is_whole(kept, record, number, arena)) {
      image->size = {static_cast<std::int32_t>(record.height), static_cast<std::int32_t>(record.width)};
      image->offset = static_cast<std::int64_t>(record.offset);
      return Lookup::found;
    }
    kept.table->forget(number);  // without this one there may be another
  }
}

std::uint8_t* read_kept(const KeptStore& kept, std::int64_t offset, std::int64_t nbytes, Arena& arena) noexcept {
  auto* bytes = arena.array<std::uint8_t>(static_cast<std::size_t>(nbytes));
  if (bytes == nullptr || !read_at(kept.descriptor, bytes, nbytes, offset)) return nullptr;
  return bytes;
}

bool mark(const KeptStore& kept, Digest digest) noexcept {
  const auto place = static_cast<std::int64_t>(digest.low % static_cast<std::uint64_t>(kept.marks));
  std::uint8_t is_marked = 0;
  if (read_at(kept.descriptor, &is_marked, 1, place) && is_marked == 1) return true;
  is_marked = 1;
  // If that fails, the image is kept at a later use.
  [[maybe_unused]] const auto written = ::pwrite(kept.descriptor, &is_marked, 1, place);
  return false;
}

KeptChunks::KeptChunks(KeptStore store, std::int64_t chunks, std::int64_t nbytes)
    : store_(std::move(store)), nbytes_(nbytes), places_(static_cast<std::size_t>(chunks)) {
  for (auto& place : places_) place.store(-1, std::memory_order_relaxed);
}

Digest KeptChunks::digest(std::int64_t chunk) const noexcept {
  std::uint8_t number[8];
  for (int i = 0; i < 8; ++i) number[i] = static_cast<std::uint8_t>(static_cast<std::uint64_t>(chunk) >> 8 * i);
  const Bytes tag{reinterpret_cast<const std::uint8_t*>(store_.tag.data()), store_.tag.size()};
  return blake2b({number, sizeof number}, tag);
}

bool KeptChunks::has(std::int64_t chunk) const noexcept {
  const std::int64_t known = places_[static_cast<std::size_t>(chunk)].load(std::memory_order_relaxed);
  if (known >= 0 || known == -2 - store_.table->size()) return known >= 0;
  EntryRecord record;
  return store_.table->find(digest(chunk), &record) >= 0;
}

std::int64_t KeptChunks::find(std::int64_t chunk, Arena& arena) noexcept {
  std::atomic<std::int64_t>& place = places_[static_cast<std::size_t>(chunk)];
  const std::int64_t known = place.load(std::memory_order_relaxed);
  const std::int64_t entries = store_.table->size();
  if (known >= 0 || known == -2 - entries) return std::max<std::int64_t>(known, -1);
  EntryRecord record;
  std::int64_t found = -2 - entries;
  std::int64_t number = store_.table->find(digest(chunk), &record);
  while (number >= 0) {
    const bool is_chunk = record.nbytes == static_cast<std::uint64_t>(nbytes_) && fits(store_, record);
    if (is_chunk && is_whole(store_, record, number, arena)) {
      found = static_cast<std::int64_t>(record.offset);
      break;
    }
    store_.table->forget(number);  // without this one there may be another
    number = store_.table->find(digest(chunk), &record);
  }
  place.store(found, std::memory_order_relaxed);
  return std::max<std::int64_t>(found, -1);
}

bool KeptChunks::wants(std::int64_t chunk) noexcept { return store_.marks <= 0 || mark(store_, digest(chunk)); }

}  // namespace fastpipe
