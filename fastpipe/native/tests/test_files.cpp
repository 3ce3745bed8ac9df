#include <dirent.h>
#include <fcntl.h>
#include <libdeflate.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../files.h"
#include "check.h"
#include "folder.h"

namespace {

using fastpipe::Arena;
using fastpipe::Bytes;
using fastpipe::FileState;
using fastpipe::find_member;
using fastpipe::Member;
using fastpipe::Outcome;
using fastpipe::read_file;
using fastpipe::read_full;
using fastpipe::Reason;
using fastpipe::state_of_file;
using fastpipe::Status;
using fastpipe::version_of;
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

// The path of a member of an archive in its present state.  size: as in a path, after a colon, or nothing.
std::string member_path(const std::string& archive, std::size_t offset, std::size_t nbytes, const std::string& size) {
  struct stat facts;
  if (::stat(archive.c_str(), &facts) != 0) std::abort();
  const std::int64_t modified = std::int64_t{facts.st_mtim.tv_sec} * 1'000'000'000 + facts.st_mtim.tv_nsec;
  char version[9];
  std::snprintf(version, sizeof version, "%08x", version_of(facts.st_size, modified));
  return archive + "/@" + std::to_string(offset) + "+" + std::to_string(nbytes) + size + "." + version + "/a/1.jpg";
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

TEST("files: the state is that of the file that was read") {
  Folder folder;
  Arena arena;
  const std::string link = folder.path("link");
  const std::vector<std::uint8_t> bytes = some_bytes(100);
  FileState before, found;
  for (const char* name : {"one", "other"}) {
    ::unlink(link.c_str());
    CHECK(::symlink(folder.write(name, bytes).c_str(), link.c_str()) == 0);
    Bytes file;
    CHECK(read_file(link.c_str(), arena, &file, &found).is_made() && !(found == before));
    CHECK(state_of_file(link.c_str(), &before) && found == before);
  }
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

// ---- parts of files -----------------------------------------------------------------------------------------------

namespace {

using fastpipe::DataFile;
using fastpipe::read_at;

DataFile::State state_of(const std::string& path) {
  struct stat facts;
  CHECK(::stat(path.c_str(), &facts) == 0);
  return {static_cast<std::uint64_t>(facts.st_dev), static_cast<std::uint64_t>(facts.st_ino), facts.st_size,
          std::int64_t{facts.st_mtim.tv_sec} * 1'000'000'000 + facts.st_mtim.tv_nsec};
}

// The first byte of a file; -1 where it cannot be opened, -2 where it cannot be read.
int first_byte(DataFile& file) {
  const DataFile::Opened opened(file);
  std::uint8_t byte = 0;
  if (opened.descriptor() < 0) return -1;
  return read_at(opened.descriptor(), &byte, 1, 0) ? byte : -2;
}

}  // namespace

TEST("read_at: parts of a file, and none behind its end") {
  Folder folder;
  const std::vector<std::uint8_t> bytes = some_bytes(100);
  const int descriptor = ::open(folder.write("file", bytes).c_str(), O_RDONLY);
  std::vector<std::uint8_t> out(101, 0xEE);
  for (const std::int64_t offset : {0, 1, 50, 99, 100}) {
    const std::int64_t size = 100 - offset;
    CHECK(read_at(descriptor, out.data(), size, offset));
    CHECK(std::equal(out.begin(), out.begin() + size, bytes.begin() + offset) && out[100] == 0xEE);
    errno = EBADF;
    CHECK(!read_at(descriptor, out.data(), size + 1, offset) && errno == 0);
  }
  CHECK(read_at(descriptor, out.data(), 0, std::int64_t{1} << 40));
  CHECK(!read_at(descriptor, out.data(), 1, std::int64_t{1} << 40) && errno == 0);
  CHECK(!read_at(descriptor, out.data(), 1, -1) && errno == EINVAL);
  ::close(descriptor);
  CHECK(!read_at(-1, out.data(), 1, 0) && errno == EBADF);
}

TEST("data files: one descriptor stays open, and is closed in the end") {
  Folder folder;
  const std::string path = folder.write("file", some_bytes(100));
  const int before = count_descriptors();
  {
    DataFile file(path, state_of(path));
    CHECK(count_descriptors() == before);
    for (int i = 0; i < 10; ++i) CHECK(first_byte(file) == some_bytes(1)[0]);
    CHECK(count_descriptors() == before + 1);
    const DataFile::Opened one(file), other(file);
    CHECK(one.descriptor() == other.descriptor() && count_descriptors() == before + 1);
  }
  CHECK(count_descriptors() == before);
}

// The most descriptors that this process may have, until it goes.
class Limit {
 public:
  explicit Limit(int most) {
    CHECK(::getrlimit(RLIMIT_NOFILE, &before_) == 0);
    struct rlimit now = before_;
    now.rlim_cur = static_cast<rlim_t>(most);
    CHECK(::setrlimit(RLIMIT_NOFILE, &now) == 0);
  }
  ~Limit() { CHECK(::setrlimit(RLIMIT_NOFILE, &before_) == 0); }

 private:
  struct rlimit before_;
};

TEST("data files: of many only some stay open, and all can be read") {
  Folder folder;
  const int before = count_descriptors();
  const Limit limit(2 * (before + 50));
  std::vector<std::unique_ptr<DataFile>> files;
  for (int i = 0; i < 200; ++i) {
    const std::string path = folder.write(std::to_string(i).c_str(), {static_cast<std::uint8_t>(i)});
    files.push_back(std::make_unique<DataFile>(path, state_of(path)));
  }
  const auto are_some_open = [&] { return count_descriptors() > before + 30 && count_descriptors() <= before + 60; };
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 200; ++i) CHECK(first_byte(*files[static_cast<std::size_t>(i)]) == i);
    CHECK(are_some_open());
  }
  files.erase(files.begin() + 150, files.end());  // which makes room for others
  CHECK(count_descriptors() < before + 40);
  for (int i = 0; i < 150; ++i) CHECK(first_byte(*files[static_cast<std::size_t>(i)]) == i);
  CHECK(are_some_open());
  files.clear();
  CHECK(count_descriptors() == before);
}

TEST("data files: those that are idle are closed where there is no descriptor left") {
  Folder folder;
  const int before = count_descriptors();
  std::vector<std::unique_ptr<DataFile>> files;
  for (int i = 0; i < 20; ++i) {
    const std::string path = folder.write(std::to_string(i).c_str(), {static_cast<std::uint8_t>(i)});
    files.push_back(std::make_unique<DataFile>(path, state_of(path)));
    if (i < 19) CHECK(first_byte(*files.back()) == i);
  }
  CHECK(count_descriptors() == before + 19);
  {
    const DataFile::Opened used(*files[3]);
    const int next = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    ::close(next);
    const Limit limit(next);  // below it all are in use
    CHECK(first_byte(*files[19]) == 19 && count_descriptors() <= before + 2);
    CHECK(used.descriptor() >= 0 && first_byte(*files[3]) == 3);
  }
  {
    const Limit limit(1);
    CHECK(first_byte(*files[5]) == -1 && errno == EMFILE);
  }
  for (int i = 0; i < 20; ++i) CHECK(first_byte(*files[static_cast<std::size_t>(i)]) == i);
  CHECK(fastpipe::close_idle_files() == 20 && count_descriptors() == before);
}

TEST("data files: threads that open the same files leave no descriptor behind") {
  Folder folder;
  const int before = count_descriptors();
  const Limit limit(2 * (before + 50));
  for (int round = 0; round < 20; ++round) {
    std::vector<std::unique_ptr<DataFile>> files;
    for (int i = 0; i < 140; ++i) {
      const std::string name = std::to_string(i);
      const std::string path =
          round == 0 ? folder.write(name.c_str(), {static_cast<std::uint8_t>(i)}) : folder.path(name.c_str());
      files.push_back(std::make_unique<DataFile>(path, state_of(path)));
    }
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int number = 0; number < 8; ++number) {
      threads.emplace_back([&] {
        for (int i = 0; i < 140; ++i) wrong += first_byte(*files[static_cast<std::size_t>(i)]) == i ? 0 : 1;
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0 && count_descriptors() <= before + 68);  // of each thread one may be beyond the half
    files.clear();
    CHECK(count_descriptors() == before);
  }
}

TEST("data files: a file that is not what it was is not read, and leaves nothing open") {
  Folder folder;
  const int before = count_descriptors();
  for (const bool is_open : {false, true}) {
    const std::string path = folder.write("file", some_bytes(100));
    DataFile written(path, state_of(path)), cut(path, state_of(path)), touched(path, state_of(path));
    if (is_open) CHECK(first_byte(written) >= 0 && first_byte(cut) >= 0 && first_byte(touched) >= 0);
    const timespec times[] = {{0, UTIME_OMIT}, {1'000'000'000, 5}};
    CHECK(::utimensat(AT_FDCWD, path.c_str(), times, 0) == 0);
    errno = 0;
    CHECK(first_byte(touched) == -1 && errno == ESTALE);
    CHECK(::truncate(path.c_str(), 50) == 0);
    CHECK(first_byte(cut) == -1 && errno == ESTALE);
    folder.write("file", some_bytes(100));  // of the same size
    CHECK(first_byte(written) == -1 && errno == ESTALE);
    DataFile replaced(path, state_of(path));
    if (is_open) CHECK(first_byte(replaced) >= 0);
    CHECK(::rename(folder.write("other", some_bytes(100)).c_str(), path.c_str()) == 0);
    CHECK(first_byte(replaced) == (is_open ? some_bytes(1)[0] : -1));  // what is open is what it was
    ::unlink(path.c_str());
    CHECK(first_byte(replaced) == (is_open ? some_bytes(1)[0] : -1) && (is_open || errno == ENOENT));
    if (!is_open) CHECK(count_descriptors() == before);
  }
  CHECK(count_descriptors() == before);
}

TEST("data files: a fifo does not block, and a folder is no file") {
  Folder folder;
  const std::string path = folder.path("fifo");
  CHECK(::mkfifo(path.c_str(), 0600) == 0);
  DataFile fifo(path, state_of(path)), directory("/", state_of("/"));
  CHECK(first_byte(fifo) == -2 && first_byte(directory) == -2);
}

TEST("files: the path of a member of an archive") {
  Member member;
  for (const char* path :
       {"a.tar/@5+7.0123abcd/x", "a.tar/@5+7.0123abcd/", "a.tar/@1/@x/@5+7.0123abcd/@8+9.01234567/x"}) {
    CHECK(find_member(path, &member) && member.offset == 5 && member.nbytes == 7 && member.size == -1);
    CHECK(member.version == 0x0123abcd && std::string(path).substr(member.archive, 4) == "/@5+");
  }
  CHECK(find_member("a/@5+7:90.0123abcd/x", &member) && member.size == 90 && member.archive == 1);
  CHECK(find_member("a/@999999999999999999+0.0123abcd/x", &member) && member.offset == 999999999999999999);
  for (const char* path :
       {"", "a", "/@", "a/@", "a/@5", "a/@5+", "a/@5+7", "a/@5+7.", "a/@5+7.0123abc/x", "a/@5+7.0123abcd",
        "a/@+7.0123abcd/x", "a/@5+.0123abcd/x", "a/@-5+7.0123abcd/x", "a/@5+7.0123ABCD/x", "a/@5+7.0123abcde/x",
        "a/@5+7:.0123abcd/x", "a@5+7.0123abcd/x", "/@5+7.0123abcd/x", "a/@1000000000000000000+7.0123abcd/x"}) {
    CHECK(!find_member(path, &member));
  }
}

TEST("files: the bytes of an archive's members, stored and deflated") {
  Folder folder;
  Arena arena;
  std::vector<std::uint8_t> bytes = some_bytes(10'000);
  libdeflate_compressor* const compressor = libdeflate_alloc_compressor(6);
  std::vector<std::uint8_t> packed(20'000);
  packed.resize(libdeflate_deflate_compress(compressor, bytes.data(), bytes.size(), packed.data(), packed.size()));
  libdeflate_free_compressor(compressor);
  std::vector<std::uint8_t> all = bytes;
  all.insert(all.end(), packed.begin(), packed.end());
  const std::string archive = folder.write("archive", all);
  const int before = count_descriptors();
  for (const std::size_t offset : {0, 1, 4'000, 10'000}) {
    const std::unique_ptr<fastpipe::OpenArchives> stays(offset == 0 ? nullptr : new fastpipe::OpenArchives);
    Bytes file;
    const std::vector<std::uint8_t> part(bytes.begin() + static_cast<std::ptrdiff_t>(offset), bytes.end());
    CHECK(read_file(member_path(archive, offset, part.size(), "").c_str(), arena, &file).is_made());
    CHECK(holds(file, part) && count_descriptors() == before + (offset != 0));
  }
  CHECK(count_descriptors() == before);
  Bytes file;
  CHECK(read_file(member_path(archive, bytes.size(), packed.size(), ":10000").c_str(), arena, &file).is_made());
  CHECK(holds(file, bytes));
  for (const char* size : {":9999", ":10001", ":0", ":99999999"}) {  // not what it is inflated to
    CHECK(is_unreadable(member_path(archive, bytes.size(), packed.size(), size), 0));
  }
  CHECK(is_unreadable(member_path(archive, 0, packed.size(), ":10000"), 0));
  CHECK(is_unreadable(member_path(archive, 1, all.size(), ""), 0));  // beyond the archive's end
  CHECK(is_unreadable(member_path(archive, 0, std::size_t{1} << 40, ""), EFBIG));
  const std::string path = member_path(archive, 0, 4, "");
  CHECK(is_unreadable(folder.path("none") + path.substr(archive.size()), ENOENT));
}

TEST("files: an archive that has changed has no members of what it was; one that was replaced may be open still") {
  Folder folder;
  Arena arena;
  const std::vector<std::uint8_t> bytes = some_bytes(100);
  const std::string archive = folder.write("archive", bytes);
  const fastpipe::OpenArchives stays;
  const std::string path = member_path(archive, 0, 100, "");
  Bytes file;
  CHECK(read_file(path.c_str(), arena, &file).is_made() && holds(file, bytes));
  const std::string other = folder.write("other", some_bytes(200));
  CHECK(::rename(other.c_str(), archive.c_str()) == 0);
  CHECK(read_file(path.c_str(), arena, &file).is_made() && holds(file, bytes));
  CHECK(read_file(member_path(archive, 10, 20, "").c_str(), arena, &file).is_made() && file.size == 20);
  CHECK(is_unreadable(path, ESTALE));
  folder.write("archive", some_bytes(300));
  CHECK(is_unreadable(path, ESTALE));
  CHECK(read_file(member_path(archive, 0, 300, "").c_str(), arena, &file).is_made() && file.size == 300);
}

TEST("files: a path through a folder is an ordinary file's, whatever its form") {
  Folder folder;
  Arena arena;
  Bytes file;
  const std::string inner = folder.path("@1+2.01234567");
  CHECK(::mkdir(inner.c_str(), 0700) == 0);
  const std::vector<std::uint8_t> bytes = some_bytes(50);
  const std::string path = folder.write("@1+2.01234567/file", bytes);
  CHECK(read_file(path.c_str(), arena, &file).is_made() && holds(file, bytes));
  ::unlink(path.c_str());
  CHECK(is_unreadable(path, ENOENT));
}
