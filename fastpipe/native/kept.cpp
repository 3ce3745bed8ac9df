#include "kept.h"

#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace fastpipe {
namespace {

// Longer than a tick of the clock of Linux's file systems; and than what others count in, which shows in the zeros at
// the end.
constexpr std::int64_t kStep = 20'000'000, kCoarseStep = 2'100'000'000;

std::int64_t nanoseconds_of(const timespec& time) { return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec; }

bool read_at(int descriptor, std::uint8_t* out, std::int64_t size, std::int64_t offset) {
  while (size > 0) {
    const ssize_t count = ::pread(descriptor, out, static_cast<std::size_t>(size), offset);
    if (count > 0) {
      out += count;
      size -= count;
      offset += count;
    } else if (count == 0 || errno != EINTR) {
      return false;
    }
  }
  return true;
}

bool is_whole(const KeptImages& kept, const EntryRecord& record, std::int64_t number, Arena& arena) {
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

}  // namespace

bool state_of_file(const char* path, FileState* state) noexcept {
  timespec now;
  struct stat facts;
  ::clock_gettime(CLOCK_REALTIME, &now);
  if (::stat(path, &facts) != 0) return false;
#ifdef __APPLE__
  const timespec modified_at = facts.st_mtimespec, changed_at = facts.st_ctimespec;
#else
  const timespec modified_at = facts.st_mtim, changed_at = facts.st_ctim;
#endif
  const std::int64_t modified = nanoseconds_of(modified_at), changed = nanoseconds_of(changed_at);
  state->numbers[0] = static_cast<std::uint64_t>(facts.st_dev);
  state->numbers[1] = static_cast<std::uint64_t>(facts.st_ino);
  state->numbers[2] = static_cast<std::uint64_t>(facts.st_size);
  state->numbers[3] = static_cast<std::uint64_t>(modified);
  state->numbers[4] = static_cast<std::uint64_t>(changed);
  state->is_settled = nanoseconds_of(now) - changed > (changed % 1'000'000 != 0 ? kStep : kCoarseStep);
  return true;
}

Lookup find_kept(const KeptImages& kept, Digest digest, std::int32_t channels, std::int64_t most_pixels, Arena& arena,
                 KeptImage* image) noexcept {
  EntryRecord record;
  const std::int64_t number = kept.table->find(digest, &record);
  if (number < 0) return Lookup::missing;
  if (most_pixels >= 0 && std::int64_t{record.flags >> 1} > most_pixels) return Lookup::unusable;
  // Records are other processes': what one says of itself is not relied on.
  const std::uint64_t largest = static_cast<std::uint64_t>(std::max<std::int64_t>(kept.size, 0));
  const bool fits = record.offset <= largest && record.nbytes <= largest - record.offset;
  const bool is_image = record.channels == static_cast<std::uint32_t>(channels) && record.height > 0 &&
                        record.width > 0 && record.height < 1u << 24 && record.width < 1u << 24 &&
                        std::uint64_t{record.height} * record.width * record.channels == record.nbytes;
  if (!fits || !is_image || !is_whole(kept, record, number, arena)) return Lookup::unusable;
  image->size = {static_cast<std::int32_t>(record.height), static_cast<std::int32_t>(record.width)};
  image->offset = static_cast<std::int64_t>(record.offset);
  return Lookup::found;
}

std::uint8_t* read_kept(const KeptImages& kept, std::int64_t offset, std::int64_t nbytes, Arena& arena) noexcept {
  auto* bytes = arena.array<std::uint8_t>(static_cast<std::size_t>(nbytes));
  if (bytes == nullptr || !read_at(kept.descriptor, bytes, nbytes, offset)) return nullptr;
  return bytes;
}

bool mark(const KeptImages& kept, Digest digest) noexcept {
  const auto place = static_cast<std::int64_t>(digest.low % static_cast<std::uint64_t>(kept.marks));
  std::uint8_t is_marked = 0;
  if (read_at(kept.descriptor, &is_marked, 1, place) && is_marked == 1) return true;
  is_marked = 1;
  // Where that fails, the image is kept later.
  static_cast<void>(::pwrite(kept.descriptor, &is_marked, 1, place) + 1);
  return false;
}

}  // namespace fastpipe
