// Fuzzes rows of a dataset: a file's bytes, and what its records say of where chunks are, how long they are, which
// filters they went through and what is left out.
//
// The input: 24 bytes of options (see read_options); for each chunk 8 bytes: where it is, how long, its mask; then the
// file.  Invariants: nothing outside the batch's memory is written; a row is made or declined; what is made is the same
// in one thread and in several, with and without memory that is shared, whatever was in the batch's memory before; the
// rows of a batch are those of other batches; and where a whole chunk can be decoded, its rows are made of it.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "../chunks.h"
#include "filters.h"
#include "fuzz.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::fuzz;

constexpr std::size_t kOptions = 24, kEntry = 8;
constexpr std::int64_t kMostChunks = 64, kMostSamples = 24, kLargestChunk = 1 << 14;

// Bytes that are none may be nowhere.
bool are_equal(const std::uint8_t* one, const std::uint8_t* other, std::int64_t nbytes) {
  return nbytes == 0 || std::memcmp(one, other, static_cast<std::size_t>(nbytes)) == 0;
}

// A file in memory, found by a path as any other.
class File {
 public:
  File() : descriptor_(::memfd_create("fuzz", 0)) {}
  std::shared_ptr<DataFile> write(Bytes bytes) const {
    require(::ftruncate(descriptor_, 0) == 0, "an empty file");
    require(bytes.size == 0 || ::pwrite(descriptor_, bytes.data, bytes.size, 0) > 0, "a file");
    struct stat facts;
    require(::fstat(descriptor_, &facts) == 0, "its state");
    const DataFile::State state{static_cast<std::uint64_t>(facts.st_dev), static_cast<std::uint64_t>(facts.st_ino),
                                facts.st_size,
                                std::int64_t{facts.st_mtim.tv_sec} * 1'000'000'000 + facts.st_mtim.tv_nsec};
    return std::make_shared<DataFile>("/proc/self/fd/" + std::to_string(descriptor_), state);
  }

 private:
  int descriptor_;
};

struct Input {
  std::shared_ptr<ChunkedDataset> set = std::make_shared<ChunkedDataset>();
  std::vector<std::int64_t> offsets, sizes;
  std::vector<std::uint32_t> masks;
};

// Bytes 0 to 2: dimensions, those that count samples, an element's bytes.  3 to 10: sides of the dataset and of its
// chunks.  11: how many filters, from 12 (see read_steps).  20: bitshuffle's blocks.  21: how far chunks are apart.
bool read_options(Bytes input, const File& file, Input* made) {
  constexpr ChunkFilter filters[] = {ChunkFilter::deflate, ChunkFilter::shuffle,   ChunkFilter::fletcher32,
                                     ChunkFilter::lzf,     ChunkFilter::blosc,     ChunkFilter::lz4,
                                     ChunkFilter::zstd,    ChunkFilter::bitshuffle};
  const std::uint8_t* const data = input.data;
  const std::size_t dims = 1 + data[0] % 4u;
  std::vector<std::int64_t> shape, chunk;
  for (std::size_t dim = 0; dim < dims; ++dim) {
    shape.push_back(data[3 + dim] % 41);
    chunk.push_back(1 + data[7 + dim] % 41);
  }
  ChunkedDataset& set = *made->set;
  if (!set.grid.set(shape, chunk, 1 + data[2] % 16, 1 + static_cast<int>(data[1] % dims))) return false;
  const std::int64_t chunks = set.grid.groups * set.grid.parts;
  if (chunks > kMostChunks || set.grid.chunk_nbytes > kLargestChunk || set.grid.sample_nbytes > kLargestChunk) {
    return false;
  }
  set.filters = read_steps(data + 12, data[11] % 5u, filters, data[20]);
  for (std::int64_t i = 0; i < data[2] % 16 + 1; ++i) set.fill.push_back(static_cast<std::uint8_t>(data[22] + i));
  const auto table = static_cast<std::size_t>(chunks) * kEntry;
  const std::size_t listed = std::min(table, (input.size - kOptions) / kEntry * kEntry);
  for (std::int64_t i = 0; i < chunks; ++i) {
    const std::size_t at = kOptions + static_cast<std::size_t>(i) * kEntry;
    std::int64_t offset = i * data[21], size = 64, mask = 0;
    if (at + kEntry <= input.size) {
      const std::uint8_t* const entry = data + at;
      offset = (entry[0] | entry[1] << 8) - 1;
      size = entry[3] | entry[4] << 8;
      mask = entry[6];
      // Numbers that lead nowhere.
      if (entry[2] == 1) offset += std::int64_t{1} << 40;
      if (entry[2] == 2) offset = std::numeric_limits<std::int64_t>::max() - entry[0];
      if (entry[2] == 3) offset = -2 - entry[0];
      if (entry[5] == 1) size = -1 - entry[3];
      if (entry[5] == 2) size = std::numeric_limits<std::int64_t>::max() - entry[3];
    }
    made->offsets.push_back(offset);
    made->sizes.push_back(size);
    made->masks.push_back(static_cast<std::uint32_t>(mask));
  }
  set.offsets = made->offsets.data();
  set.sizes = made->sizes.data();
  set.masks = made->masks.data();
  set.chunks = chunks;
  set.file = file.write({data + kOptions + listed, input.size - kOptions - listed});
  return true;
}

class Memory {
 public:
  Memory(std::int64_t keys, std::int64_t slots, std::int64_t nbytes) {
    const UnitMemory::Shape shape{keys, slots, (nbytes + 63) / 64 * 64};
    bytes_.resize(static_cast<std::size_t>(shape.nbytes() + 64));
    auto* aligned = bytes_.data() + (64 - reinterpret_cast<std::uintptr_t>(bytes_.data()) % 64) % 64;
    units_ = std::make_shared<UnitMemory>(aligned, -1, shape);
  }
  std::shared_ptr<UnitMemory> units() const { return units_; }

 private:
  std::vector<std::uint8_t> bytes_;
  std::shared_ptr<UnitMemory> units_;
};

struct Rows {
  std::vector<std::uint8_t> out;
  std::vector<Status> statuses;
};

bool run_in_threads(const std::shared_ptr<RowBatch>& work) {
  static const auto channel = std::make_shared<Channel>(3);
  const std::int64_t job = engine()->submit(work, channel, 3);
  for (;;) {
    const Event event = engine()->next_event(20'000);
    if (event.kind == Event::Kind::none) return false;
    if (event.job == job && event.kind == Event::Kind::done) return true;
  }
}

Rows rows_of(const Input& input, const std::vector<std::int64_t>& samples, std::uint8_t before, int threads,
             std::int64_t most_keep) {
  constexpr std::int64_t margin = 64;
  const std::int64_t nbytes = input.set->grid.sample_nbytes, size = nbytes * static_cast<std::int64_t>(samples.size());
  Rows rows;
  std::vector<std::uint8_t> memory(static_cast<std::size_t>(size + 2 * margin), before);
  rows.statuses.resize(samples.size());
  const auto work = std::make_shared<RowBatch>();
  RowBatch::Source source;
  source.dataset = input.set;
  source.samples = samples.data();
  source.count = static_cast<std::int64_t>(samples.size());
  source.out = memory.data() + margin;
  work->sources.push_back(source);
  work->statuses = rows.statuses.data();
  work->threads = std::max(threads, 1);
  work->turn = threads > 0 ? 0.6 : 0;
  work->most_keep_nbytes = most_keep;
  require(work->prepare(), "memory");
  if (threads > 0) {
    require(run_in_threads(work), "the end of a batch");
  } else {
    run_here(*work);
  }
  require(work->is_complete(), "all of a batch");
  for (const Status& status : rows.statuses) {
    require(status.is_made() || status.outcome == Outcome::declined, "a status");
    require(status.reason != Reason::internal && status.reason != Reason::no_memory, "a reason");
  }
  const auto is_before = [=](std::uint8_t byte) { return byte == before; };
  require(std::all_of(memory.begin(), memory.begin() + margin, is_before) &&
              std::all_of(memory.end() - margin, memory.end(), is_before),
          "what is outside the memory");
  rows.out.assign(memory.begin() + margin, memory.end() - margin);
  return rows;
}

// Compare the rows that both have made; those of one must be made where they are in the other.
void require_same(const Rows& one, const Rows& other, std::int64_t nbytes, bool are_all, const char* what) {
  for (std::size_t row = 0; row < one.statuses.size(); ++row) {
    const bool is_made = one.statuses[row].is_made(), is_too = other.statuses[row].is_made();
    require(!are_all || is_made == is_too, what);
    if (!is_made || !is_too) continue;
    const std::size_t at = row * static_cast<std::size_t>(nbytes);
    require(are_equal(one.out.data() + at, other.out.data() + at, nbytes), what);
  }
}

// Rows that are put together from chunks as decode_chunk gives them.
void check_chunks(const Input& input, const std::vector<std::int64_t>& samples, const Rows& rows) {
  const ChunkedDataset& set = *input.set;
  const SampleGrid& grid = set.grid;
  Scratch scratch;
  RowTotals totals;
  DataFile::Opened file(*set.file);
  require(file.descriptor() >= 0, "the file");
  std::vector<std::vector<std::uint8_t>> decoded(static_cast<std::size_t>(set.chunks));
  for (std::int64_t chunk = 0; chunk < set.chunks; ++chunk) {
    if (set.offsets[chunk] < 0) continue;
    std::vector<std::uint8_t> out(static_cast<std::size_t>(grid.chunk_nbytes));
    const Status status =
        decode_chunk(set, file.descriptor(), chunk, {0, grid.chunk_nbytes}, out.data(), scratch, &totals);
    scratch.arena.reset();
    if (status.is_made()) decoded[static_cast<std::size_t>(chunk)] = std::move(out);
  }
  for (std::size_t row = 0; row < samples.size(); ++row) {
    if (!rows.statuses[row].is_made()) continue;
    const SampleGrid::Place place = grid.place(samples[row]);
    for (std::int64_t number = 0; number < grid.parts; ++number) {
      SampleGrid::Part part;
      grid.part(number, &part);
      const std::int64_t chunk = place.group * grid.parts + number;
      const std::vector<std::uint8_t>& data = decoded[static_cast<std::size_t>(chunk)];
      const std::uint8_t* const out =
          rows.out.data() + static_cast<std::int64_t>(row) * grid.sample_nbytes + part.in_sample;
      if (part.nbytes == 0) continue;
      if (set.offsets[chunk] < 0) {
        require(are_equal(out, set.fill.data(), static_cast<std::int64_t>(set.fill.size())), "what was never written");
      } else if (!data.empty() && !set.reads_rows()) {  // rows are read where a chunk says that it is shorter
        require(are_equal(out, data.data() + place.at, part.run), "a chunk's first run");
      }
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const File file;
  if (size < kOptions) return 0;
  Input input;
  if (!read_options({data, size}, file, &input)) return 0;
  const SampleGrid& grid = input.set->grid;
  if (grid.count == 0) return 0;
  Choices choices({data, size});
  std::vector<std::int64_t> samples(1 + static_cast<std::size_t>(choices.below(kMostSamples)));
  for (std::int64_t& sample : samples) sample = choices.below(static_cast<std::int32_t>(grid.count));

  const Rows rows = rows_of(input, samples, 0xA5, 0, 0);
  check_chunks(input, samples, rows);
  require_same(rows_of(input, samples, 0x5A, 0, 0), rows, grid.sample_nbytes, true, "the same in other memory");
  require_same(rows_of(input, samples, 0x5A, 3, 0), rows, grid.sample_nbytes, true, "the same in threads");
  // Where all of a chunk is decoded, blocks that are damaged decline rows that need others of them.
  const Memory much(input.set->chunks, input.set->chunks, grid.chunk_nbytes),
      little(input.set->chunks, 1, grid.chunk_nbytes);
  for (const Memory* memory : {&much, &little}) {
    input.set->memory = memory->units();
    for (const int threads : {0, 3}) {
      require_same(rows_of(input, samples, 0x77, threads, 0), rows, grid.sample_nbytes, false, "the same from memory");
    }
    for (std::int64_t chunk = 0; chunk < input.set->chunks; ++chunk) {
      require(!input.set->memory->is_coming(chunk), "a chunk that nobody decodes");
    }
  }
  input.set->memory.reset();
  for (std::size_t row = 0; row < samples.size(); ++row) {
    const Rows one = rows_of(input, {samples[row]}, 0x33, 0, 0);
    require(!rows.statuses[row].is_made() || one.statuses[0].is_made(), "a row by itself");
    if (!rows.statuses[row].is_made()) continue;
    const std::size_t at = row * static_cast<std::size_t>(grid.sample_nbytes);
    require(are_equal(one.out.data(), rows.out.data() + at, grid.sample_nbytes), "the same row by itself");
  }
  return 0;
}
