// Reading whole files, and parts of files that stay open: a fifo does not hang, a directory does not confuse, a file
// that shrinks is an error.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "arena.h"
#include "span.h"
#include "status.h"

namespace fastpipe {

// Where the bytes of a file lie in an archive, such as a tar file.  The path of such a file says it:
// ARCHIVE/@OFFSET+NBYTES.VERSION/NAME, or ARCHIVE/@OFFSET+NBYTES:SIZE.VERSION/NAME where they are compressed with
// raw deflate.  No other file has such a path, as long as ARCHIVE is no folder.  core/archive_paths.py makes the paths.
struct Member {
  std::size_t archive = 0;  // characters of the path
  std::int64_t offset = 0, nbytes = 0;
  std::int64_t size = -1;     // bytes after they are inflated; -1 where they are stored as they are
  std::uint32_t version = 0;  // `version_of` the archive when it was listed
};

// Return whether a path has the form of a member's.
bool find_member(const char* path, Member* member) noexcept;

// A number that nearly always changes when a file is written again.  modified: in nanoseconds.
std::uint32_t version_of(std::int64_t size, std::int64_t modified) noexcept;

// What tells one version of a file from all others: device, inode, size, and times of modification and change.
struct FileState {
  std::uint64_t numbers[5] = {};
  // A change from now on makes another state.  Times are written in steps: a file that changes twice within one may
  // look as after the first.
  bool is_settled = false;
  Bytes bytes() const { return {reinterpret_cast<const std::uint8_t*>(numbers), sizeof numbers}; }
  bool operator==(const FileState& other) const { return std::memcmp(numbers, other.numbers, sizeof numbers) == 0; }
};

// Find the present state of the file at a path, or of a member of an archive; false if there is none.
bool state_of_file(const char* path, FileState* state) noexcept;

// While there is one, archives stay open between two reads (as `DataFile`s).
class OpenArchives {
 public:
  OpenArchives() noexcept;
  ~OpenArchives();
  OpenArchives(const OpenArchives&) = delete;
  OpenArchives& operator=(const OpenArchives&) = delete;
};

// Read a regular file, or a member of an archive, into the arena.
//
// path: as the operating system takes it, with a zero at its end.
// file: its bytes, which 64 zeros follow; untouched where the file was declined.
// state: of the file that was read, which may not be the one that was at the path before; may be null.
// Returns made, or declined: unreadable with errno (0: no regular file, or it changed while it was read;
// EISDIR: a folder; EFBIG: more than 2 GiB; ESTALE: the archive has changed since it was listed), no_memory.
Status read_file(const char* path, Arena& arena, Bytes* file, FileState* state = nullptr) noexcept;

// An open file, or none.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

// Open a file; -1 with errno where that fails.  A fifo without a writer is not waited for.  Where the process has no
// descriptor left, files that are kept open are closed, and others that are open for a moment are waited for.
int open_for_reading(const char* path) noexcept;

// Close the files that are open only to be read again (`DataFile`); how many there were.
int close_idle_files() noexcept;

// Read up to `size` bytes, in calls for at most `most_at_once`, until the end of the file; short reads and
// signals are no end.  Returns how many there were, or -1 with errno.
std::int64_t read_full(int descriptor, std::uint8_t* out, std::size_t size, std::size_t most_at_once) noexcept;

// Fill memory from a place of a file; false where the file ends before (errno is 0) or cannot be read.
bool read_at(int descriptor, std::uint8_t* out, std::int64_t size, std::int64_t offset) noexcept;

// A file of which parts are read, in the state in which it was described.  For threads at once.
//
// It stays open between two reads, as long as the process has descriptors enough: a new one whose number is in the
// upper half of what the process may have now closes the file that was not used for longest, whoever has the others.
class DataFile {
 public:
  struct State {
    std::uint64_t device = 0, inode = 0;
    std::int64_t size = 0, modified = 0;  // bytes; nanoseconds
  };
  // path: as the operating system takes it.
  DataFile(std::string path, const State& state) : path_(std::move(path)), state_(state) {}
  ~DataFile();
  DataFile(const DataFile&) = delete;
  DataFile& operator=(const DataFile&) = delete;

  // Return whether what is at the path is in that state; it is not opened.
  bool is_as_it_was() const noexcept { return is_as_it_was(-1); }

  // The file in one thread's hands.
  class Opened {
   public:
    explicit Opened(DataFile& file) noexcept : file_(file), descriptor_(file.open(&is_kept_)) {}
    ~Opened() { file_.let_go(descriptor_, is_kept_); }
    Opened(const Opened&) = delete;
    Opened& operator=(const Opened&) = delete;
    // For pread(); -1 where it cannot be opened, or (errno is ESTALE) is not the file that it was.
    int descriptor() const noexcept { return descriptor_; }

   private:
    DataFile& file_;
    bool is_kept_ = false;  // before the descriptor, which sets it
    const int descriptor_;
  };

 private:
  friend class OpenFiles;
  int open(bool* is_kept) noexcept;
  void let_go(int descriptor, bool is_kept) noexcept;
  bool is_as_it_was(int descriptor) const noexcept;

  const std::string path_;
  const State state_;
  // A descriptor that stays open, plus 1, in the upper half; in the lower, how many threads read from it.
  std::atomic<std::uint64_t> kept_{0};
  std::atomic<std::uint64_t> used_{0};  // when, in uses of any file
};

}  // namespace fastpipe
