#include "files.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

namespace fastpipe {
namespace {

constexpr std::int64_t kLargestFile = std::int64_t{1} << 31;
constexpr std::size_t kLargestRead = std::size_t{1} << 30;  // one call never gives more than 2 GiB
constexpr std::size_t kPadding = 64;                        // zeros behind a file's bytes

constexpr std::size_t kMostKept = 1024;  // files that stay open between two reads
constexpr int kMostWaits = 25;           // of 2 ms, for files that other threads have open

std::int64_t modified_at(const struct stat& facts) noexcept {
#ifdef __APPLE__
  const timespec& time = facts.st_mtimespec;
#else
  const timespec& time = facts.st_mtim;
#endif
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// Whether a descriptor that was just opened shows that not many are left: the system gives the lowest number, so all
// below it are in use, by whoever it may be.
bool is_tight(int descriptor) noexcept {
  struct rlimit limit;
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return false;
  return static_cast<rlim_t>(descriptor) >= limit.rlim_cur / 2;
}

}  // namespace

// The files of this process that stay open between two reads.
class OpenFiles {
 public:
  // Remember a file that is open.
  static void add(DataFile* file) noexcept {
    const std::lock_guard<std::mutex> guard(lock());
    if (files().size() >= kMostKept) close_oldest();
    try {
      files().push_back(file);
    } catch (const std::bad_alloc&) {  // then it stays open as long as it is there
    }
  }

  static void remove(DataFile* file) noexcept {
    const std::lock_guard<std::mutex> guard(lock());
    auto& all = files();
    const auto found = std::find(all.begin(), all.end(), file);
    if (found == all.end()) return;
    *found = all.back();
    all.pop_back();
  }

  // Close the file that was not used for longest; false where threads read from all.
  static bool close_one() noexcept {
    const std::lock_guard<std::mutex> guard(lock());
    return close_oldest();
  }

  static int descriptor_of(std::uint64_t kept) noexcept { return static_cast<int>(kept >> 32) - 1; }
  static std::uint32_t users_of(std::uint64_t kept) noexcept { return static_cast<std::uint32_t>(kept); }
  static std::uint64_t kept_of(int descriptor) noexcept { return (static_cast<std::uint64_t>(descriptor) + 1) << 32; }

  static std::uint64_t now() noexcept {
    static std::atomic<std::uint64_t> uses{0};
    return uses.fetch_add(1, std::memory_order_relaxed);
  }

 private:
  static bool close_oldest() noexcept {
    auto& all = files();
    for (;;) {
      DataFile* oldest = nullptr;
      for (DataFile* file : all) {
        if (users_of(file->kept_.load()) != 0) continue;
        if (oldest == nullptr || file->used_.load() < oldest->used_.load()) oldest = file;
      }
      if (oldest == nullptr) return false;
      std::uint64_t kept = oldest->kept_.load();
      if (users_of(kept) != 0 || !oldest->kept_.compare_exchange_strong(kept, 0)) continue;  // in use just now
      *std::find(all.begin(), all.end(), oldest) = all.back();
      all.pop_back();
      ::close(descriptor_of(kept));
      return true;
    }
  }

  // Never destroyed, as threads may read until the end; held across a fork, so that the child finds nothing half done.
  static std::mutex& lock() noexcept {
    static std::mutex* const made = [] {
      pthread_atfork([] { lock().lock(); }, [] { lock().unlock(); }, [] { lock().unlock(); });
      return new std::mutex;
    }();
    return *made;
  }
  static std::vector<DataFile*>& files() noexcept {
    static auto* const made = new std::vector<DataFile*>;
    return *made;
  }
};

int close_idle_files() noexcept {
  int closed = 0;
  while (OpenFiles::close_one()) ++closed;
  return closed;
}

Descriptor::~Descriptor() {
  if (number_ >= 0) ::close(number_);  // not again after EINTR: the number may be somebody else's by then
}

int open_for_reading(const char* path) noexcept {
  for (int waits = 0;;) {
    // O_NONBLOCK: opening a fifo without a writer must not wait
    const int number = ::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (number >= 0) return number;
    const int error = errno;
    if (error == EINTR) continue;
    if (error != EMFILE && error != ENFILE) return -1;
    if (close_idle_files() == 0) {
      if (++waits > kMostWaits) {
        errno = error;
        return -1;
      }
      const timespec moment{0, 2'000'000};
      ::nanosleep(&moment, nullptr);
    }
  }
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
  OpenFiles::remove(this);
  const int kept = OpenFiles::descriptor_of(kept_.load());
  if (kept >= 0) ::close(kept);
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

int DataFile::open(bool* is_kept) noexcept {
  std::uint64_t kept = kept_.load(std::memory_order_acquire);
  while (kept != 0) {
    if (!kept_.compare_exchange_weak(kept, kept + 1, std::memory_order_acquire)) continue;
    used_.store(OpenFiles::now(), std::memory_order_relaxed);
    const int descriptor = OpenFiles::descriptor_of(kept);
    if (is_as_it_was(descriptor)) {
      *is_kept = true;
      return descriptor;
    }
    kept_.fetch_sub(1, std::memory_order_release);
    errno = ESTALE;
    return -1;
  }
  const int descriptor = open_for_reading(path_.c_str());
  if (descriptor < 0) return -1;
  if (!is_as_it_was(descriptor)) {
    ::close(descriptor);
    errno = ESTALE;
    return -1;
  }
  if (is_tight(descriptor)) {
    OpenFiles::close_one();  // the next one gets its number
    return descriptor;
  }
  used_.store(OpenFiles::now(), std::memory_order_relaxed);
  std::uint64_t none = 0;
  if (!kept_.compare_exchange_strong(none, OpenFiles::kept_of(descriptor) + 1))
    return descriptor;  // another was faster
  *is_kept = true;
  OpenFiles::add(this);
  return descriptor;
}

void DataFile::let_go(int descriptor, bool is_kept) noexcept {
  if (is_kept) {
    kept_.fetch_sub(1, std::memory_order_release);
  } else if (descriptor >= 0) {
    ::close(descriptor);
  }
}

}  // namespace fastpipe
