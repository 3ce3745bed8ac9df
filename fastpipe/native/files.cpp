#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace fastpipe {
namespace {

constexpr std::int64_t kLargestFile = std::int64_t{1} << 31;
constexpr std::size_t kLargestRead = std::size_t{1} << 30;  // one call never gives more than 2 GiB
constexpr std::size_t kPadding = 64;                        // zeros behind a file's bytes

// Files that stay open between two reads, of the descriptors that a process may have: often 1,024, by default 256 on
// macOS.  Others are opened each time.
constexpr int kMostKept = 128;
std::atomic<int> kept_open{0};

std::int64_t modified_at(const struct stat& facts) noexcept {
#ifdef __APPLE__
  const timespec& time = facts.st_mtimespec;
#else
  const timespec& time = facts.st_mtim;
#endif
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) ::close(number_);  // not again after EINTR: the number may be somebody else's by then
}

int open_for_reading(const char* path) noexcept {
  int number;
  do {  // O_NONBLOCK: opening a fifo without a writer must not wait
    number = ::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  } while (number < 0 && errno == EINTR);
  return number;
}

std::int64_t read_full(int descriptor, std::uint8_t* out, std::size_t size, std::size_t most_at_once) noexcept {
  std::size_t got = 0;
  while (got < size) {
    const ssize_t count = ::read(descriptor, out + got, std::min(size - got, most_at_once));
    if (count == 0) break;
    if (count > 0) {
      got += static_cast<std::size_t>(count);
    } else if (errno != EINTR) {
      return -1;
    }
  }
  return static_cast<std::int64_t>(got);
}

Status read_file(const char* path, Arena& arena, Bytes* file) noexcept {
  const Descriptor descriptor(open_for_reading(path));
  if (descriptor.number() < 0) return Status::declined(Reason::unreadable, errno);
  struct stat facts;
  if (::fstat(descriptor.number(), &facts) != 0) return Status::declined(Reason::unreadable, errno);
  if (S_ISDIR(facts.st_mode)) return Status::declined(Reason::unreadable, EISDIR);
  if (!S_ISREG(facts.st_mode) || facts.st_size < 0) return Status::declined(Reason::unreadable, 0);
  if (facts.st_size > kLargestFile) return Status::declined(Reason::unreadable, EFBIG);

  const auto size = static_cast<std::size_t>(facts.st_size);
  auto* data = arena.array<std::uint8_t>(size + kPadding);
  if (data == nullptr) return Status::declined(Reason::no_memory);
  // One byte more than there should be shows that the file has grown; it goes where the padding will be.
  const std::int64_t got = read_full(descriptor.number(), data, size + 1, kLargestRead);
  if (got < 0) return Status::declined(Reason::unreadable, errno);
  if (got != facts.st_size) return Status::declined(Reason::unreadable, 0);
  std::memset(data + size, 0, kPadding);
  *file = Bytes{data, size};
  return Status::made();
}

bool read_at(int descriptor, std::uint8_t* out, std::int64_t size, std::int64_t offset) noexcept {
  while (size > 0) {
    const std::size_t some = std::min(static_cast<std::size_t>(size), kLargestRead);
    const ssize_t count = ::pread(descriptor, out, some, static_cast<off_t>(offset));
    if (count > 0) {
      out += count;
      size -= count;
      offset += count;
    } else if (count == 0) {
      errno = 0;
      return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

DataFile::~DataFile() {
  const int kept = kept_.load();
  if (kept >= 0) {
    ::close(kept);
    kept_open.fetch_sub(1);
  }
}

bool DataFile::is_as_it_was(int descriptor) const noexcept {
  struct stat facts;
  if ((descriptor < 0 ? ::stat(path_.c_str(), &facts) : ::fstat(descriptor, &facts)) != 0) return false;
  const bool is_same = static_cast<std::uint64_t>(facts.st_dev) == state_.device &&
                       static_cast<std::uint64_t>(facts.st_ino) == state_.inode && facts.st_size == state_.size &&
                       modified_at(facts) == state_.modified;
  if (!is_same) errno = ESTALE;
  return is_same;
}

int DataFile::open() noexcept {
  const int kept = kept_.load(std::memory_order_acquire);
  if (kept >= 0) return is_as_it_was(kept) ? kept : -1;
  const int descriptor = open_for_reading(path_.c_str());
  if (descriptor < 0) return -1;
  if (!is_as_it_was(descriptor)) {
    ::close(descriptor);
    errno = ESTALE;
    return -1;
  }
  if (kept_open.fetch_add(1) >= kMostKept) {
    kept_open.fetch_sub(1);
    return descriptor;
  }
  int none = -1;
  if (!kept_.compare_exchange_strong(none, descriptor)) kept_open.fetch_sub(1);  // another thread was faster
  return descriptor;
}

void DataFile::let_go(int descriptor) noexcept {
  if (descriptor >= 0 && descriptor != kept_.load()) ::close(descriptor);
}

}  // namespace fastpipe
