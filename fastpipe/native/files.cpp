#include "files.h"

#include <fcntl.h>
#include <libdeflate.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fastpipe {
namespace {

constexpr std::int64_t kLargestFile = std::int64_t{1} << 31;
constexpr std::size_t kLargestRead = std::size_t{1} << 30;  // one call never gives more than 2 GiB
constexpr std::size_t kPadding = 64;                        // zeros behind a file's bytes

constexpr std::int64_t kMostInflated = 1032;  // bytes that deflate makes of one
constexpr std::size_t kMostArchives = 4096;   // that are remembered

constexpr std::size_t kMostKept = 1024;  // files that stay open between two reads
constexpr int kMostWaits = 25;           // of 2 ms, for files that other threads have open

// Longer than a tick of the clock of Linux's file systems; and than what others count in, which shows in the zeros at
// the end.
constexpr std::int64_t kStep = 20'000'000, kCoarseStep = 2'100'000'000;
constexpr std::size_t kLongestPath = 4096;  // that Linux opens

std::int64_t nanoseconds_of(const timespec& time) noexcept {
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

#ifdef __APPLE__
std::int64_t modified_at(const struct stat& facts) noexcept { return nanoseconds_of(facts.st_mtimespec); }
std::int64_t changed_at(const struct stat& facts) noexcept { return nanoseconds_of(facts.st_ctimespec); }
#else
std::int64_t modified_at(const struct stat& facts) noexcept { return nanoseconds_of(facts.st_mtim); }
std::int64_t changed_at(const struct stat& facts) noexcept { return nanoseconds_of(facts.st_ctim); }
#endif

FileState state_of(const struct stat& facts, const timespec& now) noexcept {
  const std::int64_t changed = changed_at(facts);
  FileState state;
  state.numbers[0] = static_cast<std::uint64_t>(facts.st_dev);
  state.numbers[1] = static_cast<std::uint64_t>(facts.st_ino);
  state.numbers[2] = static_cast<std::uint64_t>(facts.st_size);
  state.numbers[3] = static_cast<std::uint64_t>(modified_at(facts));
  state.numbers[4] = static_cast<std::uint64_t>(changed);
  state.is_settled = nanoseconds_of(now) - changed > (changed % 1'000'000 != 0 ? kStep : kCoarseStep);
  return state;
}

std::uint64_t turned(std::uint64_t value, int bits) noexcept { return value << bits | value >> (64 - bits); }

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

namespace {

// Read decimal digits; null where there are none, or more than an int64 may have.
const char* read_number(const char* at, std::int64_t* number) noexcept {
  const char* const begin = at;
  std::int64_t value = 0;
  while (*at >= '0' && *at <= '9' && at - begin < 18) value = value * 10 + (*at++ - '0');
  *number = value;
  return at == begin || (*at >= '0' && *at <= '9') ? nullptr : at;
}

// Read what follows "/@"; false where it is another name.
bool read_place(const char* at, Member* member) noexcept {
  at = read_number(at, &member->offset);
  if (at == nullptr || *at++ != '+') return false;
  at = read_number(at, &member->nbytes);
  member->size = -1;
  if (at != nullptr && *at == ':') at = read_number(at + 1, &member->size);
  if (at == nullptr || *at++ != '.') return false;
  std::uint32_t version = 0;
  for (int digit = 0; digit < 8; ++digit, ++at) {
    const bool is_digit = *at >= '0' && *at <= '9', is_letter = *at >= 'a' && *at <= 'f';
    if (!is_digit && !is_letter) return false;
    version = version * 16 + static_cast<std::uint32_t>(is_digit ? *at - '0' : *at - 'a' + 10);
  }
  member->version = version;
  return *at == '/';
}

// An archive in the state in which it was first seen.
struct Archive {
  Archive(const std::string& path, const DataFile::State& found) : state(found), file(path, found) {}
  const DataFile::State state;
  DataFile file;
};

// The archives of this process that members were read from, as long as somebody wants them to stay open.
class Archives {
 public:
  // The archive at a path; null with errno where there is none (EISDIR: a folder).  is_new: forget what it was.
  static std::shared_ptr<Archive> at(const std::string& path, bool is_new) {
    Map dropped;  // freed after the lock: closing files takes theirs, and a fork takes that one first
    std::shared_ptr<Archive> replaced;
    const std::lock_guard<std::mutex> guard(lock());
    auto& all = archives();
    const auto found = all.find(path);
    if (found != all.end() && !is_new) return found->second;
    struct stat facts;
    if (::stat(path.c_str(), &facts) != 0) return nullptr;
    errno = S_ISDIR(facts.st_mode) ? EISDIR : 0;
    if (!S_ISREG(facts.st_mode)) return nullptr;
    if (all.size() >= kMostArchives) all.swap(dropped);
    const DataFile::State state{static_cast<std::uint64_t>(facts.st_dev), static_cast<std::uint64_t>(facts.st_ino),
                                facts.st_size, modified_at(facts)};
    const auto archive = std::make_shared<Archive>(path, state);
    if (users() > 0) replaced = std::exchange(all[path], archive);
    return archive;
  }

  static void count_user(int more) noexcept {
    Map dropped;
    const std::lock_guard<std::mutex> guard(lock());
    users() += more;
    if (users() == 0) archives().swap(dropped);
  }

 private:
  using Map = std::unordered_map<std::string, std::shared_ptr<Archive>>;

  static int& users() noexcept {
    static int count = 0;
    return count;
  }
  // Never destroyed, and held across a fork, as OpenFiles are.
  static std::mutex& lock() noexcept {
    static std::mutex* const made = [] {
      pthread_atfork([] { lock().lock(); }, [] { lock().unlock(); }, [] { lock().unlock(); });
      return new std::mutex;
    }();
    return *made;
  }
  static Map& archives() {
    static auto* const made = new Map;
    return *made;
  }
};

Status inflate(const Bytes& stored, std::int64_t size, Arena& arena, Bytes* file) noexcept {
  struct Free {
    void operator()(libdeflate_decompressor* one) const noexcept { libdeflate_free_decompressor(one); }
  };
  const auto bytes = static_cast<std::size_t>(size);
  auto* data = arena.array<std::uint8_t>(bytes + kPadding);
  const std::unique_ptr<libdeflate_decompressor, Free> inflater(libdeflate_alloc_decompressor());
  if (data == nullptr || inflater == nullptr) return Status::declined(Reason::no_memory);
  // Given no place for the number of bytes, libdeflate reports fewer bytes as an error, too.
  if (libdeflate_deflate_decompress(inflater.get(), stored.data, stored.size, data, bytes, nullptr) !=
      LIBDEFLATE_SUCCESS) {
    return Status::declined(Reason::unreadable, 0);
  }
  std::memset(data + bytes, 0, kPadding);
  *file = Bytes{data, bytes};
  return Status::made();
}

Status read_member(Archive& archive, const Member& member, Arena& arena, Bytes* file) noexcept {
  const auto& state = archive.state;
  if (version_of(state.size, state.modified) != member.version) return Status::declined(Reason::unreadable, ESTALE);
  if (member.nbytes > kLargestFile || member.size > kLargestFile) return Status::declined(Reason::unreadable, EFBIG);
  if (member.offset > state.size - member.nbytes || member.size > member.nbytes * kMostInflated) {
    return Status::declined(Reason::unreadable, 0);
  }
  const DataFile::Opened opened(archive.file);
  if (opened.descriptor() < 0) return Status::declined(Reason::unreadable, errno);
  const auto size = static_cast<std::size_t>(member.nbytes);
  auto* data = arena.array<std::uint8_t>(size + kPadding);
  if (data == nullptr) return Status::declined(Reason::no_memory);
  if (!read_at(opened.descriptor(), data, member.nbytes, member.offset)) {
    return Status::declined(Reason::unreadable, errno);
  }
  std::memset(data + size, 0, kPadding);
  if (member.size >= 0) return inflate({data, size}, member.size, arena, file);
  *file = Bytes{data, size};
  return Status::made();
}

// Read a member; false where its archive is a folder, so that the path is an ordinary file's.
bool read_from_archive(const char* path, const Member& member, Arena& arena, Bytes* file, Status* status) noexcept {
  try {
    const std::string name(path, member.archive);
    for (const bool is_new : {false, true}) {
      const std::shared_ptr<Archive> archive = Archives::at(name, is_new);
      if (archive == nullptr && errno == EISDIR) return false;
      *status =
          archive == nullptr ? Status::declined(Reason::unreadable, errno) : read_member(*archive, member, arena, file);
      if (archive == nullptr || status->detail != ESTALE) break;  // it may have been replaced
    }
  } catch (const std::bad_alloc&) {
    *status = Status::declined(Reason::no_memory);
  }
  return true;
}

}  // namespace

OpenArchives::OpenArchives() noexcept { Archives::count_user(1); }
OpenArchives::~OpenArchives() { Archives::count_user(-1); }

bool find_member(const char* path, Member* member) noexcept {
  for (const char* at = path; (at = std::strstr(at, "/@")) != nullptr; ++at) {
    if (at == path || !read_place(at + 2, member)) continue;
    member->archive = static_cast<std::size_t>(at - path);
    return true;
  }
  return false;
}

std::uint32_t version_of(std::int64_t size, std::int64_t modified) noexcept {
  const std::uint64_t mixed = static_cast<std::uint64_t>(size) * 0x9E3779B97F4A7C15u;
  return static_cast<std::uint32_t>(((mixed + static_cast<std::uint64_t>(modified)) * 0xBF58476D1CE4E5B9u) >> 32);
}

bool state_of_file(const char* path, FileState* state) noexcept {
  timespec now;
  struct stat facts;
  ::clock_gettime(CLOCK_REALTIME, &now);
  Member member;
  bool is_member = find_member(path, &member) && member.archive < kLongestPath;
  if (is_member) {
    char archive[kLongestPath] = {};
    std::memcpy(archive, path, member.archive);
    is_member = ::stat(archive, &facts) == 0 && !S_ISDIR(facts.st_mode);
  }
  if (!is_member && ::stat(path, &facts) != 0) return false;
  *state = state_of(facts, now);
  if (is_member) {  // each has a state of its own; those of an archive that has changed have none
    if (version_of(facts.st_size, modified_at(facts)) != member.version) return false;
    state->numbers[1] ^= turned(static_cast<std::uint64_t>(member.nbytes), 32);
    state->numbers[2] ^= turned(static_cast<std::uint64_t>(member.offset), 24);
  }
  return true;
}

Status read_file(const char* path, Arena& arena, Bytes* file, FileState* state) noexcept {
  Member member;
  Status status;
  if (find_member(path, &member) && read_from_archive(path, member, arena, file, &status)) {
    if (state != nullptr && !state_of_file(path, state)) *state = {};
    return status;
  }
  timespec now;
  ::clock_gettime(CLOCK_REALTIME, &now);
  const Descriptor descriptor(open_for_reading(path));
  if (descriptor.number() < 0) return Status::declined(Reason::unreadable, errno);
  struct stat facts;
  if (::fstat(descriptor.number(), &facts) != 0) return Status::declined(Reason::unreadable, errno);
  if (S_ISDIR(facts.st_mode)) return Status::declined(Reason::unreadable, EISDIR);
  if (!S_ISREG(facts.st_mode) || facts.st_size < 0) return Status::declined(Reason::unreadable, 0);
  if (facts.st_size > kLargestFile) return Status::declined(Reason::unreadable, EFBIG);
  if (state != nullptr) *state = state_of(facts, now);

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
