#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../files.h"
#include "check.h"
#include "folder.h"

namespace {

using fastpipe::Arena;
using fastpipe::Bytes;
using fastpipe::Outcome;
using fastpipe::read_file;
using fastpipe::read_full;
using fastpipe::Reason;
using fastpipe::Status;
using fastpipe::tests::Folder;

std::vector<std::uint8_t> some_bytes(std::size_t count) {
  std::vector<std::uint8_t> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::uint8_t>((i * 2654435761u) >> 13);
  return bytes;
}

bool holds(const Bytes& file, const std::vector<std::uint8_t>& bytes) {
  if (file.size != bytes.size()) return false;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (file.data[i] != bytes[i]) return false;
  }
  for (std::size_t i = 0; i < 64; ++i) {
    if (file.data[bytes.size() + i] != 0) return false;
  }
  return true;
}

bool is_unreadable(const std::string& path, int detail) {
  Arena arena;
  Bytes file;
  const Status status = read_file(path.c_str(), arena, &file);
  return status.outcome == Outcome::declined && status.reason == Reason::unreadable && status.detail == detail &&
         file.data == nullptr && file.size == 0;
}

int count_descriptors() {
  DIR* folder = ::opendir("/proc/self/fd");
  if (folder == nullptr) return -1;
  int count = 0;
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

// A child that writes pieces into a pipe, with pauses; returns the end to read.
int slow_pipe(const std::vector<std::uint8_t>& bytes, std::size_t piece, pid_t* child) {
  int ends[2];
  if (::pipe(ends) != 0) std::abort();
  *child = ::fork();
  if (*child == 0) {
    for (std::size_t i = 0; i < bytes.size(); i += piece) {
      ::usleep(3'000);
      const std::size_t count = piece < bytes.size() - i ? piece : bytes.size() - i;
      if (::write(ends[1], bytes.data() + i, count) < 0) ::_exit(1);
    }
    ::_exit(0);
  }
  ::close(ends[1]);
  return ends[0];
}

void ignore_alarm(int) {}

}  // namespace

TEST("files: the bytes of files of many sizes, followed by zeros") {
  Folder folder;
  Arena arena;
  for (const std::size_t size : {0, 1, 63, 64, 65, 4095, 4096, 4097, 100'000, 3'000'001}) {
    const std::vector<std::uint8_t> bytes = some_bytes(size);
    const std::string path = folder.write("file", bytes);
    Bytes file;
    CHECK(read_file(path.c_str(), arena, &file).is_made());
    CHECK(file.data != nullptr && holds(file, bytes));
    arena.reset();
  }
}

TEST("files: two files of one sample do not touch each other") {
  Folder folder;
  Arena arena;
  const std::vector<std::uint8_t> first = some_bytes(70'000), second = some_bytes(500'000);
  Bytes one, other;
  CHECK(read_file(folder.write("first", first).c_str(), arena, &one).is_made());
  CHECK(read_file(folder.write("second", second).c_str(), arena, &other).is_made());
  CHECK(holds(one, first) && holds(other, second));
}

TEST("files: a link to a file is the file, one to nothing is missing") {
  Folder folder;
  Arena arena;
  const std::vector<std::uint8_t> bytes = some_bytes(100);
  const std::string path = folder.write("file", bytes), link = folder.path("link"), broken = folder.path("broken");
  CHECK(::symlink(path.c_str(), link.c_str()) == 0);
  CHECK(::symlink("nowhere", broken.c_str()) == 0);
  Bytes file;
  CHECK(read_file(link.c_str(), arena, &file).is_made());
  CHECK(holds(file, bytes));
  CHECK(is_unreadable(broken, ENOENT));
}

TEST("files: what is no readable file is declined, and says why") {
  Folder folder;
  const std::string inner = folder.path("folder"), locked = folder.write("locked", some_bytes(10));
  CHECK(::mkdir(inner.c_str(), 0700) == 0);
  CHECK(is_unreadable(inner, EISDIR));
  CHECK(is_unreadable(folder.path("missing"), ENOENT));
  CHECK(is_unreadable("", ENOENT));
  CHECK(is_unreadable(locked + "/inside", ENOTDIR));
  CHECK(is_unreadable(std::string(5'000, 'a'), ENAMETOOLONG));
  CHECK(is_unreadable("/dev/zero", 0));
  if (::geteuid() != 0) {  // who may read everything
    CHECK(::chmod(locked.c_str(), 0) == 0);
    CHECK(is_unreadable(locked, EACCES));
  }
}

TEST("files: a fifo without a writer does not block") {
  Folder folder;
  const std::string path = folder.path("fifo");
  CHECK(::mkfifo(path.c_str(), 0600) == 0);
  CHECK(is_unreadable(path, 0));
}

TEST("files: a file of more than 2 GiB is declined before it is read") {
  Folder folder;
  const std::string path = folder.write("large", {});
  const off_t size = (off_t{1} << 31) + 1;
  if (::truncate(path.c_str(), size) != 0) return;  // a file system without sparse files
  CHECK(is_unreadable(path, EFBIG));
}

TEST("files: a file with more or less in it than its size says is declined") {
  // Linux has such files: the first says 0, the second 4096.
  for (const char* path : {"/proc/self/maps", "/sys/kernel/mm/transparent_hugepage/enabled"}) {
    const int descriptor = ::open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) continue;
    std::uint8_t bytes[5'000];
    struct stat facts;
    const bool is_false = ::fstat(descriptor, &facts) == 0 && ::read(descriptor, bytes, 5'000) != facts.st_size;
    ::close(descriptor);
    if (is_false) CHECK(is_unreadable(path, 0));
  }
}

TEST("files: no descriptor is left open") {
  Folder folder;
  Arena arena;
  const std::string path = folder.write("file", some_bytes(1'000)), fifo = folder.path("fifo");
  CHECK(::mkfifo(fifo.c_str(), 0600) == 0);
  const int before = count_descriptors();
  for (int i = 0; i < 50; ++i) {
    Bytes file;
    CHECK(read_file(path.c_str(), arena, &file).is_made());
    CHECK(!read_file(fifo.c_str(), arena, &file).is_made());
    CHECK(!read_file("/", arena, &file).is_made());
    CHECK(!read_file("/no such file", arena, &file).is_made());
    arena.reset();
  }
  CHECK(count_descriptors() == before);
}

TEST("read_full: by calls for a few bytes each") {
  Folder folder;
  const std::vector<std::uint8_t> bytes = some_bytes(100);
  const std::string path = folder.write("file", bytes);
  for (const std::size_t most : {1, 7, 50, 99, 100, 101, 1'000}) {
    for (const std::size_t wanted : {0, 1, 7, 99, 100, 101, 200}) {
      const int descriptor = ::open(path.c_str(), O_RDONLY);
      std::vector<std::uint8_t> out(wanted + 1, 0xEE);
      const std::size_t expected = wanted < 100 ? wanted : 100;
      CHECK(read_full(descriptor, out.data(), wanted, most) == static_cast<std::int64_t>(expected));
      for (std::size_t i = 0; i < expected; ++i) CHECK(out[i] == bytes[i]);
      CHECK(out[expected] == 0xEE);
      ::close(descriptor);
    }
  }
}

TEST("read_full: short reads and signals are no end") {
  struct sigaction action = {}, before;
  action.sa_handler = ignore_alarm;  // without SA_RESTART: read() fails with EINTR
  CHECK(::sigaction(SIGALRM, &action, &before) == 0);
  const std::vector<std::uint8_t> bytes = some_bytes(20'000);
  pid_t child;
  const int descriptor = slow_pipe(bytes, 900, &child);
  const itimerval often = {{0, 700}, {0, 700}}, never = {};
  ::setitimer(ITIMER_REAL, &often, nullptr);
  std::vector<std::uint8_t> out(bytes.size() + 1);
  const std::int64_t got = read_full(descriptor, out.data(), out.size(), 1 << 20);
  ::setitimer(ITIMER_REAL, &never, nullptr);
  ::sigaction(SIGALRM, &before, nullptr);
  ::close(descriptor);
  int result = 1;
  while (::waitpid(child, &result, 0) < 0 && errno == EINTR) {
  }
  CHECK(result == 0);
  CHECK(got == static_cast<std::int64_t>(bytes.size()));
  out.pop_back();
  CHECK(out == bytes);
}

TEST("read_full: an error is one") {
  std::uint8_t out[10];
  errno = 0;
  CHECK(read_full(-1, out, 10, 10) == -1);
  CHECK(errno == EBADF);
}
