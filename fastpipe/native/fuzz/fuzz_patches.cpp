// Fuzzes the reading of volumes: a chunk of hostile bytes in the place of one that was written.
//
// The input is the stored bytes of one chunk of four.  Codec, units, padding and place depend on all of it.
// Invariants: nothing around a patch is written; a patch that does not touch the chunk is right; one that was made is
// the same when it is made again, with and without memory for units; and one that was declined leaves no unit behind.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "../patches.h"
#include "fuzz.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::fuzz;

using Content = std::vector<std::uint8_t>;

constexpr std::int64_t kSide = 24, kAround = 64;
constexpr std::uint8_t kCanary = 0xA5;

// A folder with one chunk, removed at exit.
class Folder {
 public:
  Folder() {
    const char* parent = std::getenv("TMPDIR");
    path_ = std::string(parent != nullptr ? parent : "/tmp") + "/fastpipe_fuzz_XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr) std::abort();
    write("meta", {nullptr, 0});
  }
  ~Folder() {
    ::unlink((path_ + "/meta").c_str());
    ::unlink((path_ + "/0.1").c_str());
    ::rmdir(path_.c_str());
  }
  const std::string& path() const { return path_; }
  void write(const char* name, Bytes bytes) const {
    std::FILE* file = std::fopen((path_ + "/" + name).c_str(), "wb");
    if (file == nullptr) std::abort();
    if (bytes.size > 0 && std::fwrite(bytes.data, 1, bytes.size, file) != bytes.size) std::abort();
    std::fclose(file);
  }

 private:
  std::string path_;
};

Index sides(std::int64_t rows, std::int64_t columns) { return {1, 1, 1, rows, columns}; }

struct Made {
  Status status;
  Content content;
};

Made make(const std::shared_ptr<const Volume>& volume, const Index& size, const std::int64_t* starts, Padding padding) {
  PatchKind kind;
  kind.dims = 2;
  kind.size = size;
  kind.itemsize = volume->itemsize;
  kind.padding = padding;
  require(kind.is_valid(), "a patch");
  Content memory(static_cast<std::size_t>(kind.nbytes() + 2 * kAround), kCanary);
  PatchBatch batch;
  Made made;
  const std::int64_t row = 0;
  batch.kinds.push_back({kind, memory.data() + kAround});
  batch.items.push_back({0, 0, volume});
  batch.patches = 1;
  batch.starts = starts;
  batch.rows = &row;
  batch.statuses = &made.status;
  require(batch.prepare(), "memory");
  run_here(batch);
  for (std::int64_t i = 0; i < kAround; ++i) {
    require(memory[static_cast<std::size_t>(i)] == kCanary, "the memory in front of a patch");
    require(memory[memory.size() - 1 - static_cast<std::size_t>(i)] == kCanary, "the memory behind a patch");
  }
  made.content.assign(memory.begin() + kAround, memory.end() - kAround);
  return made;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Folder folder;
  Choices choices({data, size});
  folder.write("0.1", {data, size});

  Volume volume;
  const std::int64_t itemsize = std::int64_t{1} << choices.below(3);
  VolumeSource& source = volume.source;
  source.kind = VolumeSource::Kind::files;
  source.dims = 2;
  source.folder = folder.path() + "/";
  source.metadata = source.folder + "meta";
  source.separator = '.';
  source.itemsize = volume.itemsize = itemsize;
  source.fill.assign(static_cast<std::size_t>(itemsize), '\3');
  source.codec = static_cast<VolumeSource::Codec>(choices.below(5));
  source.swapped = itemsize > 1 && choices.flip() ? static_cast<std::int32_t>(itemsize) : 0;
  require(Grid::make(sides(2 * kSide, 2 * kSide), sides(kSide, kSide), &source.chunks), "chunks");
  const bool has_slabs = source.codec == VolumeSource::Codec::none || source.codec == VolumeSource::Codec::blosc;
  const int units = choices.below(has_slabs ? 3 : 2);
  const Index unit = units == 0 ? sides(kSide, kSide) : units == 1 ? sides(2 * kSide, kSide) : sides(kSide / 4, kSide);
  require(Grid::make(sides(2 * kSide, 2 * kSide), unit, &volume.units), "units");

  UnitMemory::Shape shape{64, 1 + choices.below(8), (volume.unit_nbytes() + 63) / 64 * 64};
  void* const memory = ::mmap(nullptr, static_cast<std::size_t>(shape.nbytes()), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  require(memory != MAP_FAILED, "memory");
  {
    UnitMemory remembered(static_cast<std::uint8_t*>(memory), -1, shape);
    const auto alone = std::make_shared<Volume>(volume);
    volume.memory = &remembered;
    const auto shared = std::make_shared<Volume>(volume);
    require(alone->is_valid() && shared->is_valid(), "a volume");
    const auto padding = static_cast<Padding>(1 + choices.below(5));
    const Index patch = sides(1 + choices.below(40), 1 + choices.below(40));
    const std::int64_t starts[] = {choices.below(60) - 8, choices.below(60) - 8};
    const Made first = make(alone, patch, starts, padding), second = make(shared, patch, starts, padding),
               third = make(shared, patch, starts, padding);
    require(first.status.outcome == second.status.outcome && second.status.outcome == third.status.outcome,
            "the same outcome with memory");
    for (std::int64_t key = 0; key < shape.keys; ++key) require(!remembered.is_coming(key), "a unit is left behind");
    if (first.status.is_made()) {
      require(first.content == second.content && second.content == third.content, "the same patch with memory");
    }
    const std::int64_t elsewhere[] = {3, 2};
    if (units != 1) {
      const Made other = make(shared, sides(kSide, kSide - 4), elsewhere, Padding::error);
      require(other.status.is_made(), "a patch that does not touch the chunk");
      for (const std::uint8_t byte : other.content) require(byte == 3, "what was never written");
    }
  }
  ::munmap(memory, static_cast<std::size_t>(shape.nbytes()));
  return 0;
}
