// Rows of datasets: where samples lie, and what a batch makes of files that are whole, damaged, changed or gone.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../chunks.h"
#include "check.h"
#include "folder.h"
#include "make_chunks.h"

using namespace fastpipe;
using namespace fastpipe::tests;

namespace {

using Numbers = std::vector<std::int64_t>;
constexpr std::uint8_t kUntouched = 0xE7;

std::int64_t product(const Numbers& numbers, std::size_t from = 0) {
  return std::accumulate(numbers.begin() + static_cast<std::ptrdiff_t>(from), numbers.end(), std::int64_t{1},
                         std::multiplies<>());
}

Numbers index_of(std::int64_t number, const Numbers& shape) {
  Numbers index(shape.size());
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    index[dim] = number % shape[dim];
    number /= shape[dim];
  }
  return index;
}

std::int64_t number_of(const Numbers& index, const Numbers& shape) {
  std::int64_t number = 0;
  for (std::size_t dim = 0; dim < shape.size(); ++dim) number = number * shape[dim] + index[dim];
  return number;
}

// An array, and the chunks that it is made of: a naive computation.
struct Array {
  Numbers shape, chunk, grid;
  std::int64_t itemsize = 1;
  Content bytes;

  Array(Numbers shape_, Numbers chunk_, std::int64_t itemsize_, std::uint32_t seed = 1)
      : shape(std::move(shape_)), chunk(std::move(chunk_)), itemsize(itemsize_) {
    for (std::size_t dim = 0; dim < shape.size(); ++dim) grid.push_back((shape[dim] + chunk[dim] - 1) / chunk[dim]);
    std::mt19937 random(seed);
    bytes.resize(static_cast<std::size_t>(product(shape) * itemsize));
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random() % 5 * 51);
  }
  std::int64_t chunk_nbytes() const { return product(chunk) * itemsize; }
  // Decoded, with other bytes behind the array's ends.
  Content chunk_of(std::int64_t number) const {
    Content made(static_cast<std::size_t>(chunk_nbytes()), std::uint8_t{0x99});
    const Numbers corner = index_of(number, grid);
    for (std::int64_t i = 0; i < product(chunk); ++i) {
      Numbers index = index_of(i, chunk);
      bool is_inside = true;
      for (std::size_t dim = 0; dim < shape.size(); ++dim) {
        index[dim] += corner[dim] * chunk[dim];
        is_inside &= index[dim] < shape[dim];
      }
      if (!is_inside) continue;
      const auto size = static_cast<std::size_t>(itemsize);
      std::memcpy(&made[static_cast<std::size_t>(i) * size],
                  &bytes[static_cast<std::size_t>(number_of(index, shape)) * size], size);
    }
    return made;
  }
  // Fill the elements of a chunk.
  void fill_chunk(std::int64_t number, const Content& with) {
    const Numbers corner = index_of(number, grid);
    for (std::int64_t i = 0; i < product(shape); ++i) {
      const Numbers index = index_of(i, shape);
      bool is_there = true;
      for (std::size_t dim = 0; dim < shape.size(); ++dim) is_there &= index[dim] / chunk[dim] == corner[dim];
      if (is_there) std::memcpy(&bytes[static_cast<std::size_t>(i * itemsize)], with.data(), with.size());
    }
  }
};

DataFile::State state_of(const std::string& path) {
  struct stat facts;
  CHECK(::stat(path.c_str(), &facts) == 0);
  return {static_cast<std::uint64_t>(facts.st_dev), static_cast<std::uint64_t>(facts.st_ino), facts.st_size,
          std::int64_t{facts.st_mtim.tv_sec} * 1'000'000'000 + facts.st_mtim.tv_nsec};
}

// A dataset in a file of a test's.
struct Dataset {
  Folder folder;
  Array array;
  std::shared_ptr<ChunkedDataset> set = std::make_shared<ChunkedDataset>();
  std::string path;
  Numbers offsets, sizes;
  std::vector<std::uint32_t> masks;
  Content data;
  int lead;

  // holes: of so many chunks every one, the first excepted, was never written; 0 for none.
  Dataset(Array array_, int lead_, std::vector<FilterStep> steps = {}, std::int64_t holes = 0)
      : array(std::move(array_)), lead(lead_) {
    CHECK(set->grid.set(array.shape, array.chunk, array.itemsize, lead));
    const std::int64_t chunks = set->grid.groups * set->grid.parts;
    for (std::int64_t i = 0; i < array.itemsize; ++i) set->fill.push_back(static_cast<std::uint8_t>(i + 3));
    Content file(100, std::uint8_t{0x11});
    for (std::int64_t number = 0; number < chunks; ++number) {
      masks.push_back(0);
      if (holes > 0 && number % holes == holes - 1) {
        array.fill_chunk(number, set->fill);
        offsets.push_back(-1);
        sizes.push_back(0);
        continue;
      }
      Content stored = array.chunk_of(number);
      for (std::size_t step = 0; step < steps.size(); ++step) {
        if (number % 5 == 4) {
          masks.back() |= 1u << step;  // left out of this chunk
        } else {
          stored = filtered(stored, steps[step]);
        }
      }
      offsets.push_back(static_cast<std::int64_t>(file.size()));
      sizes.push_back(static_cast<std::int64_t>(stored.size()));
      append(&file, stored);
      file.insert(file.end(), static_cast<std::size_t>(number % 7), std::uint8_t{0x22});
    }
    path = folder.write("data", file);
    set->filters = std::move(steps);
    set->offsets = offsets.data();
    set->sizes = sizes.data();
    set->masks = masks.data();
    set->chunks = chunks;
    reopen();
  }
  void reopen() { set->file = std::make_shared<DataFile>(path, state_of(path)); }
  const std::uint8_t* sample(std::int64_t number) const {
    return array.bytes.data() + number * set->grid.sample_nbytes;
  }
};

// Memory of decoded chunks.
struct Memory {
  std::vector<std::uint8_t> bytes;
  std::shared_ptr<UnitMemory> units;
  Memory(std::int64_t keys, std::int64_t slots, std::int64_t nbytes) {
    const UnitMemory::Shape shape{keys, slots, (nbytes + 63) / 64 * 64};
    bytes.resize(static_cast<std::size_t>(shape.nbytes() + 64));
    auto* aligned = bytes.data() + (64 - reinterpret_cast<std::uintptr_t>(bytes.data()) % 64) % 64;
    units = std::make_shared<UnitMemory>(aligned, -1, shape);
  }
};

// A batch of some samples of datasets, each in memory with a margin.
struct Batch {
  std::shared_ptr<RowBatch> work = std::make_shared<RowBatch>();
  std::vector<const Dataset*> sets;
  std::vector<Numbers> samples, rows;
  Numbers firsts;  // rows with which memory begins
  std::vector<Content> outs;
  std::vector<Status> statuses;
  std::int64_t size;

  explicit Batch(std::int64_t rows_of_batch, int threads = 1) : statuses(static_cast<std::size_t>(rows_of_batch)) {
    size = rows_of_batch;
    work->threads = threads;
    work->statuses = statuses.data();
    for (Status& status : statuses) std::memset(static_cast<void*>(&status), 0xEE, sizeof status);
    samples.reserve(8), rows.reserve(8), outs.reserve(8);
  }
  void add(const Dataset& set, Numbers of, Numbers to = {}, std::int64_t first = 0) {
    sets.push_back(&set);
    firsts.push_back(first);
    samples.push_back(std::move(of));
    rows.push_back(std::move(to));
    outs.emplace_back(static_cast<std::size_t>((size - first) * set.set->grid.sample_nbytes + 128), kUntouched);
    RowBatch::Source source;
    source.dataset = set.set;
    source.samples = samples.back().data();
    source.rows = rows.back().empty() ? nullptr : rows.back().data();
    source.count = static_cast<std::int64_t>(samples.back().size());
    source.out = outs.back().data() + 64;
    source.first_row = first;
    work->sources.push_back(source);
  }
  void run() {
    CHECK(work->prepare());
    run_here(*work);
    CHECK(work->is_complete());
  }
  std::int64_t row(std::size_t source, std::size_t i) const {
    return rows[source].empty() ? static_cast<std::int64_t>(i) : rows[source][i];
  }
  // Whether each row that was made is right, no byte of other memory was written, and how many rows were made.
  std::int64_t made() const {
    std::int64_t count = 0;
    for (const Status& status : statuses) count += status.is_made() ? 1 : 0;
    for (std::size_t s = 0; s < sets.size(); ++s) {
      const std::int64_t nbytes = sets[s]->set->grid.sample_nbytes;
      std::vector<bool> is_wanted(static_cast<std::size_t>(size));
      for (std::size_t i = 0; i < samples[s].size(); ++i) {
        const auto at = static_cast<std::size_t>(row(s, i));
        is_wanted[at] = true;
        const std::uint8_t* out = outs[s].data() + 64 + (row(s, i) - firsts[s]) * nbytes;
        if (nbytes > 0 && statuses[at].is_made() &&
            std::memcmp(out, sets[s]->sample(samples[s][i]), static_cast<std::size_t>(nbytes)) != 0) {
          return -1;
        }
      }
      const auto is_untouched = [](std::uint8_t byte) { return byte == kUntouched; };
      const auto begin = outs[s].begin() + 64;
      if (!std::all_of(outs[s].begin(), begin, is_untouched) ||
          !std::all_of(outs[s].end() - 64, outs[s].end(), is_untouched)) {
        return -2;
      }
      for (auto at = static_cast<std::size_t>(firsts[s]); at < is_wanted.size(); ++at) {
        const auto first = begin + (static_cast<std::ptrdiff_t>(at) - firsts[s]) * nbytes;
        if (!is_wanted[at] && !std::all_of(first, first + nbytes, is_untouched)) return -3;
      }
    }
    return count;
  }
  bool are_declined(Reason reason, int detail) const {
    return std::all_of(statuses.begin(), statuses.end(), [=](const Status& status) {
      return status.outcome == Outcome::declined && status.reason == reason && status.detail == detail;
    });
  }
};

Numbers some_samples(std::mt19937& random, std::int64_t count, std::size_t size) {
  Numbers found(size);
  for (std::int64_t& sample : found) sample = static_cast<std::int64_t>(random() % static_cast<std::uint32_t>(count));
  return found;
}

Numbers all_samples(const Dataset& set) {
  Numbers found(static_cast<std::size_t>(set.set->grid.count));
  std::iota(found.begin(), found.end(), 0);
  return found;
}

const std::vector<FilterStep> kDeflated = {{ChunkFilter::shuffle, 4}, {ChunkFilter::deflate}};

// Submit a batch to the engine and wait; false where it was not begun.
bool run_in_threads(const Batch& batch, int threads) {
  if (!batch.work->prepare()) return false;
  const std::int64_t job = engine()->submit(batch.work, std::make_shared<Channel>(threads), threads);
  while (job > 0) {
    const Event event = engine()->next_event(60'000);
    if (event.kind == Event::Kind::none) return false;
    if (event.job == job && event.kind == Event::Kind::done) return true;
  }
  return false;
}

// Random shapes of up to four dimensions, with chunks that may be larger than they are.
struct Form {
  Numbers shape, chunk;
  int lead;
  explicit Form(std::mt19937& random) {
    const std::size_t dims = 1 + random() % 4;
    for (std::size_t dim = 0; dim < dims; ++dim) {
      shape.push_back(random() % 9 == 0 ? 0 : 1 + random() % (dims < 3 ? 20 : 6));
      chunk.push_back(random() % 3 == 0 ? std::max<std::int64_t>(shape.back(), 1) : 1 + random() % 7);
    }
    lead = 1 + static_cast<int>(random() % dims);
  }
};

}  // namespace

TEST("a grid: samples, groups and parts are those of a naive computation") {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    const Form form(random);
    const std::int64_t itemsize = 1 + random() % 9;
    const auto lead = static_cast<std::size_t>(form.lead);
    const Array array(form.shape, form.chunk, itemsize);
    SampleGrid grid;
    CHECK(grid.set(form.shape, form.chunk, itemsize, form.lead));
    const Numbers lead_shape(form.shape.begin(), form.shape.begin() + form.lead);
    const Numbers lead_chunk(form.chunk.begin(), form.chunk.begin() + form.lead);
    const Numbers lead_grid(array.grid.begin(), array.grid.begin() + form.lead);
    CHECK(grid.count == product(lead_shape) && grid.groups == product(lead_grid));
    CHECK(grid.parts == product(array.grid, lead) && grid.sample_nbytes == product(form.shape, lead) * itemsize);
    CHECK(grid.chunk_nbytes == array.chunk_nbytes());
    Numbers members(static_cast<std::size_t>(grid.groups));
    for (std::int64_t sample = 0; sample < grid.count; ++sample) {
      const Numbers index = index_of(sample, lead_shape);
      Numbers group(lead), inside(lead);
      for (std::size_t dim = 0; dim < lead; ++dim) {
        group[dim] = index[dim] / form.chunk[dim];
        inside[dim] = index[dim] % form.chunk[dim];
      }
      const SampleGrid::Place place = grid.place(sample);
      CHECK(place.group == number_of(group, lead_grid));
      CHECK(place.at == number_of(inside, lead_chunk) * product(form.chunk, lead) * itemsize);
      ++members[static_cast<std::size_t>(place.group)];
    }
    for (std::int64_t group = 0; group < grid.groups; ++group) {
      CHECK(grid.samples_in(group) == members[static_cast<std::size_t>(group)] || grid.count == 0);
    }
  }
}

TEST("a grid: copying all parts of a sample puts it together") {
  std::mt19937 random(2);
  for (int round = 0; round < 1000; ++round) {
    const Form form(random);
    const std::int64_t itemsize = 1 + random() % 9;
    const Array array(form.shape, form.chunk, itemsize, random());
    SampleGrid grid;
    CHECK(grid.set(form.shape, form.chunk, itemsize, form.lead));
    if (grid.count == 0) continue;
    const std::int64_t sample = random() % static_cast<std::uint32_t>(grid.count);
    const SampleGrid::Place place = grid.place(sample);
    Content made(static_cast<std::size_t>(grid.sample_nbytes), kUntouched);
    std::vector<int> written(made.size());
    for (std::int64_t number = 0; number < grid.parts; ++number) {
      SampleGrid::Part part;
      grid.part(number, &part);
      const Content chunk = array.chunk_of(place.group * grid.parts + number);
      std::int64_t runs = 1;
      for (int dim = 0; dim < part.dims; ++dim) runs *= part.counts[dim];
      CHECK(runs * part.run == part.nbytes);
      for (std::int64_t i = 0; i < runs; ++i) {
        const Numbers index = index_of(i, Numbers(part.counts, part.counts + part.dims));
        std::int64_t from = 0, to = part.in_sample;
        for (std::size_t dim = 0; dim < index.size(); ++dim) {
          from += index[dim] * part.chunk_steps[dim];
          to += index[dim] * part.sample_steps[dim];
        }
        CHECK(from + part.run <= part.reach && place.at + part.reach <= grid.chunk_nbytes);
        CHECK(to >= 0 && to + part.run <= grid.sample_nbytes);
        for (std::int64_t k = 0; k < part.run; ++k) {
          made[static_cast<std::size_t>(to + k)] = chunk[static_cast<std::size_t>(place.at + from + k)];
          ++written[static_cast<std::size_t>(to + k)];
        }
      }
    }
    CHECK(std::all_of(written.begin(), written.end(), [](int times) { return times == 1; }));
    CHECK(made.empty() || std::memcmp(made.data(), array.bytes.data() + sample * grid.sample_nbytes, made.size()) == 0);
  }
}

TEST("a grid: runs are as long as they can be") {
  SampleGrid grid;
  SampleGrid::Part part;
  CHECK(grid.set({100, 6, 10}, {8, 6, 10}, 4, 1));
  grid.part(0, &part);
  CHECK(part.dims == 0 && part.run == 240 && part.reach == 240);
  CHECK(grid.set({100, 6, 10}, {8, 4, 10}, 4, 1));  // rows of the second dimension are one run
  grid.part(1, &part);
  CHECK(part.dims == 0 && part.run == 80 && part.in_sample == 160);
  CHECK(grid.set({100, 6, 10}, {8, 6, 7}, 4, 1));
  grid.part(1, &part);
  CHECK(part.dims == 1 && part.run == 12 && part.counts[0] == 6 && part.chunk_steps[0] == 28);
}

TEST("a grid: numbers that are too large, or that there are not, are refused") {
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  SampleGrid grid;
  CHECK(!grid.set({}, {}, 1, 1));
  CHECK(!grid.set({5}, {5, 5}, 1, 1));
  CHECK(!grid.set({5}, {0}, 1, 1) && !grid.set({5}, {-1}, 1, 1) && !grid.set({-5}, {1}, 1, 1));
  CHECK(!grid.set({5}, {5}, 0, 1) && !grid.set({5}, {5}, -1, 1));
  CHECK(!grid.set({5}, {5}, 1, 0) && !grid.set({5}, {5}, 1, 2));
  CHECK(!grid.set(Numbers(33, 1), Numbers(33, 1), 1, 1) && grid.set(Numbers(32, 1), Numbers(32, 1), 1, 32));
  CHECK(!grid.set({most}, {1}, 1, 1) && !grid.set({1}, {most}, 1, 1) && !grid.set({1}, {1}, most, 1));
  CHECK(!grid.set({most / 4 - 1}, {1}, most / 4, 1) || grid.sample_nbytes == most / 4);
  CHECK(!grid.set({std::int64_t{1} << 31, std::int64_t{1} << 31, 2}, {1, 1, 1}, 1, 3));
  CHECK(!grid.set({1, 1}, {std::int64_t{1} << 31, std::int64_t{1} << 31}, 1, 1));
  CHECK(!grid.set({std::int64_t{1} << 40, std::int64_t{1} << 40}, {1, 1}, 1, 1));  // chunks
}

TEST("rows: any dataset gives the bytes that it was made of") {
  std::mt19937 random(3);
  const std::vector<std::vector<FilterStep>> filters = {{},
                                                        kDeflated,
                                                        {{ChunkFilter::deflate}, {ChunkFilter::fletcher32}},
                                                        {{ChunkFilter::lzf}},
                                                        {{ChunkFilter::shuffle, 3}, {ChunkFilter::lz4}},
                                                        {{ChunkFilter::fletcher32}, {ChunkFilter::zstd}}};
  for (int round = 0; round < 150; ++round) {
    Form form(random);
    for (std::int64_t& size : form.shape) size = std::max<std::int64_t>(size, 1);
    const Dataset set(Array(form.shape, form.chunk, 1 + random() % 5, random()), form.lead,
                      filters[random() % filters.size()], random() % 4);
    const std::int64_t chunks = set.set->chunks;
    const Memory large(chunks, chunks, set.array.chunk_nbytes()), small(chunks + 5, 1, set.array.chunk_nbytes());
    for (const auto& memory : {std::shared_ptr<UnitMemory>(), large.units, large.units, small.units}) {
      set.set->memory = memory;
      set.set->first_key = memory == small.units ? 5 : 0;
      for (const int threads : {0, 3}) {
        const std::size_t size = 1 + random() % 20;
        Batch batch(static_cast<std::int64_t>(size), std::max(threads, 1));
        batch.work->turn = static_cast<double>(random() % 11) / 10;
        batch.add(set, some_samples(random, set.set->grid.count, size));
        if (threads == 0) batch.run();
        if (threads > 0) CHECK(run_in_threads(batch, threads) && batch.work->is_complete());
        CHECK(batch.made() == static_cast<std::int64_t>(size));
      }
    }
  }
}

TEST("rows: of several datasets, to rows in any order") {
  const Dataset one(Array({30, 8}, {4, 5}, 4), 1, kDeflated), plain(Array({17, 3}, {17, 3}, 2), 1);
  Batch batch(9);
  batch.add(one, {29, 0, 5, 5}, {8, 1, 0, 3});
  batch.add(plain, {16, 2, 0}, {8, 2, 5});
  batch.run();
  CHECK(batch.made() == 9);  // rows that no source has are made as well
}

TEST("rows: each dataset has memory that begins with the first of its rows") {
  std::mt19937 random(5);
  for (int round = 0; round < 60; ++round) {
    // Read from the file, decoded, decoded into memory, kept as a whole in memory, and never written.
    const Dataset plain(Array({17, 3}, {17, 3}, 2), 1), packed(Array({30, 8}, {4, 5}, 4), 1, kDeflated),
        remembered(Array({9, 4}, {2, 4}, 1), 1, kDeflated), holes(Array({9, 4}, {2, 4}, 1), 1, kDeflated, 1);
    Dataset inside(Array({20, 7}, {20, 7}, 3), 1);
    inside.set->inside = inside.array.bytes.data();
    const Memory memory(5, 5, remembered.array.chunk_nbytes());
    remembered.set->memory = memory.units;
    const int threads = static_cast<int>(random() % 3);
    Batch batch(25, std::max(threads, 1));
    std::int64_t first = 0;
    for (const Dataset* set : {&plain, &packed, &remembered, &holes, static_cast<const Dataset*>(&inside)}) {
      const std::int64_t count = 1 + random() % 5;
      Numbers rows(static_cast<std::size_t>(count));
      std::iota(rows.begin(), rows.end(), first);
      std::shuffle(rows.begin(), rows.end(), random);
      batch.add(*set, some_samples(random, set->set->grid.count, rows.size()), rows, first);
      first += count;
    }
    if (threads == 0) batch.run();
    if (threads > 0) CHECK(run_in_threads(batch, threads) && batch.work->is_complete());
    CHECK(batch.made() == first);
  }
}

TEST("rows: data inside the file's records, and where nothing was written") {
  std::mt19937 random(4);
  Dataset set(Array({20, 7}, {20, 7}, 3), 1);
  set.set->inside = set.array.bytes.data();
  set.set->file = std::make_shared<DataFile>(set.path, state_of(set.path));
  Batch batch(12);
  batch.add(set, some_samples(random, 20, 12));
  batch.run();
  CHECK(batch.made() == 12);
  Dataset empty(Array({20, 7}, {4, 7}, 3), 1, kDeflated, 1);
  Batch filled(12);
  filled.add(empty, some_samples(random, 20, 12));
  filled.run();
  CHECK(filled.made() == 12);
}

TEST("rows: none, and samples without bytes") {
  const Dataset set(Array({20, 7}, {4, 7}, 3), 1, kDeflated);
  Batch none(0);
  none.add(set, {});
  none.run();
  CHECK(none.work->size() == 0);
  for (const std::vector<FilterStep>& filters : {std::vector<FilterStep>(), kDeflated}) {
    const Dataset nothing(Array({3, 0}, {1, 1}, 4), 1, filters);
    Batch batch(3);
    batch.add(nothing, {2, 0, 1});
    batch.run();
    CHECK(batch.made() == 3);
  }
}

TEST("rows: a batch is divided among threads where that is worth it") {
  for (const bool is_packed : {false, true}) {
    const Dataset set(Array({128, 1 << 16}, {1, 1 << 16}, 1), 1, is_packed ? kDeflated : std::vector<FilterStep>());
    const auto tasks = [&](std::int64_t rows, int threads) {
      Batch batch(rows, threads);
      Numbers samples = all_samples(set);
      samples.resize(static_cast<std::size_t>(rows));
      batch.add(set, samples);
      CHECK(batch.work->prepare());
      return batch.work->size();
    };
    CHECK(tasks(1, 8) == 1);
    CHECK(tasks(128, 1) >= 2 && tasks(128, 1) <= (is_packed ? 32 : 4));  // of at most some megabytes
    CHECK(tasks(128, 4) >= tasks(128, 1) + (is_packed ? 0 : 1) && tasks(128, 4) <= 32);
    CHECK(tasks(128, 64) <= 128);
  }
}

TEST("rows: what is there comes first, what is being decoded last") {
  const Dataset set(Array({8, 1 << 18}, {1, 1 << 18}, 1), 1, {{ChunkFilter::deflate}});
  const Memory memory(8, 8, 1 << 18);
  set.set->memory = memory.units;
  const auto put = [&](std::int64_t key) {
    const UnitMemory::Claim claim = memory.units->claim(key);
    std::memcpy(claim.data, set.sample(key), 1 << 18);
    return claim;
  };
  CHECK(memory.units->publish(put(6), 5));
  const UnitMemory::Claim coming = put(2);
  Batch batch(4, 8);
  batch.add(set, {1, 2, 4, 6});
  CHECK(batch.work->prepare() && batch.work->size() == 4);
  Scratch scratch;
  const auto is_written = [&](std::size_t row) { return batch.outs[0][64 + (row << 18)] != kUntouched; };
  batch.work->run(0, scratch);
  CHECK(is_written(3) && !is_written(0) && !is_written(1) && !is_written(2));
  batch.work->run(1, scratch);
  batch.work->run(2, scratch);
  CHECK(is_written(0) && is_written(2) && !is_written(1));
  CHECK(memory.units->publish(coming, 5));
  batch.work->run(3, scratch);
  CHECK(batch.made() == 4 && batch.work->is_complete());
}

TEST("rows: each chunk is decoded once, however many threads want it") {
  const Dataset set(Array({64, 500}, {8, 500}, 4), 1, kDeflated);
  for (int round = 0; round < 20; ++round) {
    const Memory memory(8, 8, 8 * 500 * 4);
    set.set->memory = memory.units;
    std::vector<std::thread> threads;
    std::atomic<std::int64_t> decoded{0};
    for (int number = 0; number < 4; ++number) {
      threads.emplace_back([&, number] {
        Numbers samples;
        for (std::int64_t chunk = 0; chunk < 8; ++chunk) {
          samples.push_back((chunk * (2 * number + 1) + number) % 8 * 8 + number);
        }
        Batch batch(8);
        batch.add(set, samples);
        batch.run();
        CHECK(batch.made() == 8);
        decoded += batch.work->totals.decoded.load();
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(decoded == 8 * 8 * 500 * 4);
  }
}

TEST("rows: bytes that are decoded and used are counted") {
  const Dataset set(Array({64, 500}, {8, 500}, 4), 1, kDeflated);
  Batch batch(3);
  batch.add(set, {0, 1, 60});
  batch.run();
  CHECK(batch.work->totals.decoded == 2 * 16000 && batch.work->totals.used == 3 * 2000);
}

TEST("rows: damaged chunks are declined, with the problem and the step, and others are made") {
  for (const bool is_remembered : {false, true}) {
    Dataset set(Array({40, 50}, {4, 50}, 4), 1, kDeflated);
    const Memory memory(10, 4, 800);
    if (is_remembered) set.set->memory = memory.units;
    const int descriptor = ::open(set.path.c_str(), O_WRONLY);
    const std::uint8_t wrong[8] = {255, 255, 255, 255, 255, 255, 255, 255};
    CHECK(::pwrite(descriptor, wrong, 8, set.offsets[3] + 5) == 8);
    ::close(descriptor);
    set.reopen();
    for (int round = 0; round < 3; ++round) {
      Batch batch(4);
      batch.add(set, {0, 13, 14, 39});
      batch.run();
      CHECK(batch.made() == 2);
      for (const std::size_t row : {1u, 2u}) {
        CHECK(batch.statuses[row].reason == Reason::damaged && batch.statuses[row].detail >> 8 == 1);
        CHECK((batch.statuses[row].detail & 255) == static_cast<int>(Problem::damaged));
      }
    }
    CHECK(!memory.units->is_coming(3) && !memory.units->is_there(3));
  }
}

TEST("rows: offsets and sizes that there are not are declined") {
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  // Behind the file's end, and beyond every file's: what is read there would end past the largest offset.
  const std::pair<std::int64_t, int> offsets[] = {{std::int64_t{1} << 40, 0}, {most / 4, 0},
                                                  {most / 4 + 1, EOVERFLOW},  {most / 2 + 1, EOVERFLOW},
                                                  {most - 100, EOVERFLOW},    {most, EOVERFLOW}};
  for (const bool is_packed : {true, false}) {
    for (const auto& [offset, detail] : offsets) {
      Dataset set(Array({12, 50}, {4, 50}, 4), 1, is_packed ? kDeflated : std::vector<FilterStep>());
      set.offsets[1] = offset;
      Batch batch(3);
      batch.add(set, {0, 7, 11});
      batch.run();
      CHECK(batch.made() == 2 && batch.statuses[1].reason == Reason::unreadable);
      CHECK(batch.statuses[1].detail == detail);
    }
  }
  for (const std::int64_t size : {std::int64_t{-1}, most, -most, std::int64_t{1} << 32}) {
    Dataset set(Array({12, 50}, {4, 50}, 4), 1, kDeflated);
    set.sizes[1] = size;
    Batch batch(3);
    batch.add(set, {0, 7, 11});
    batch.run();
    CHECK(batch.made() == 2 && batch.statuses[1].reason == Reason::too_large);
  }
  Dataset set(Array({12, 50}, {4, 50}, 4), 1, kDeflated);
  set.sizes[2] += 1000;  // behind the file's end
  Batch batch(1);
  batch.add(set, {11});
  batch.run();
  CHECK(batch.are_declined(Reason::unreadable, 0));
}

TEST("rows: a file that is missing, changed or another one is declined, with errno") {
  for (const bool is_packed : {true, false}) {
    const std::vector<FilterStep> filters = is_packed ? kDeflated : std::vector<FilterStep>();
    const auto run = [](const Dataset& set) {
      Batch batch(4, 2);
      batch.add(set, {0, 5, 11, 11});
      batch.run();
      return batch;
    };
    {
      Dataset missing(Array({12, 50}, {4, 50}, 4), 1, filters);
      ::unlink(missing.path.c_str());
      CHECK(run(missing).are_declined(Reason::unreadable, ENOENT));
      CHECK(run(missing).made() == 0);
    }
    {
      Dataset cut(Array({12, 50}, {4, 50}, 4), 1, filters);
      CHECK(run(cut).made() == 4);
      CHECK(::truncate(cut.path.c_str(), 50) == 0);
      CHECK(run(cut).are_declined(Reason::unreadable, ESTALE));
      cut.reopen();  // as it is now
      CHECK(run(cut).are_declined(Reason::unreadable, 0));
    }
    {
      Dataset replaced(Array({12, 50}, {4, 50}, 4), 1, filters);
      const std::string other = replaced.folder.write("other", Content(5000));
      CHECK(::rename(other.c_str(), replaced.path.c_str()) == 0);
      CHECK(run(replaced).are_declined(Reason::unreadable, ESTALE));
    }
    {
      Dataset open(Array({12, 50}, {4, 50}, 4), 1, filters);
      CHECK(run(open).made() == 4);
      ::unlink(open.path.c_str());
      CHECK(run(open).made() == 4);  // what is open is what it was
    }
    {
      Dataset folder(Array({12, 50}, {4, 50}, 4), 1, filters);
      folder.set->file = std::make_shared<DataFile>("/", state_of("/"));
      CHECK(run(folder).are_declined(Reason::unreadable, EISDIR));
    }
  }
  // Where nothing was written no file is needed.
  Dataset hole(Array({12, 50}, {4, 50}, 4), 1, {}, 1);
  ::unlink(hole.path.c_str());
  Batch batch(2);
  batch.add(hole, {0, 11});
  batch.run();
  CHECK(batch.made() == 2);
}

TEST("rows: a job that is cancelled writes nothing more, and is not complete") {
  const Dataset set(Array({64, 5000}, {1, 5000}, 4), 1, kDeflated);
  const auto channel = std::make_shared<Channel>(2);
  for (int round = 0; round < 40; ++round) {
    const auto batch = std::make_unique<Batch>(64, 64);
    batch->add(set, all_samples(set));
    CHECK(batch->work->prepare());
    const std::int64_t job = engine()->submit(batch->work, channel, 2);
    for (int i = 0; i < round; ++i) std::this_thread::yield();
    engine()->cancel(job);
    Event event;
    do event = engine()->next_event(60'000);
    while (event.kind != Event::Kind::none && !(event.job == job && event.kind == Event::Kind::done));
    CHECK(event.kind == Event::Kind::done);
    std::int64_t written = 0;
    for (std::size_t row = 0; row < 64; ++row) {
      const std::uint8_t* out = batch->outs[0].data() + 64 + row * 20000;
      if (std::all_of(out, out + 20000, [](std::uint8_t byte) { return byte == kUntouched; })) continue;
      written += std::memcmp(out, set.sample(static_cast<std::int64_t>(row)), 20000) == 0 ? 1 : 1000;
    }
    CHECK(written <= 64 && batch->work->is_complete() == (written == 64));
  }
}

TEST("rows: an item that is lost declines its rows") {
  for (const bool is_packed : {true, false}) {
    const Dataset set(Array({40, 50}, {4, 50}, 4), 1, is_packed ? kDeflated : std::vector<FilterStep>());
    Batch batch(3);
    batch.add(set, {0, 5, 39});
    CHECK(batch.work->prepare() && batch.work->size() == 1);
    batch.work->lost(0);
    CHECK(batch.are_declined(Reason::internal, 0) && batch.work->is_complete());
  }
}

TEST("rows: threads that share little memory make the right rows") {
  std::mt19937 random(5);
  const Dataset one(Array({200, 300}, {8, 170}, 4), 1, kDeflated, 9),
      other(Array({200, 70}, {16, 70}, 8), 1, kDeflated);
  const std::int64_t nbytes = std::max(one.array.chunk_nbytes(), other.array.chunk_nbytes());
  for (const std::int64_t slots : {1, 3, 40}) {
    const Memory memory(one.set->chunks + other.set->chunks, slots, nbytes);
    one.set->memory = other.set->memory = memory.units;
    other.set->first_key = one.set->chunks;
    for (int round = 0; round < 30; ++round) {
      Batch batch(60, 4);
      batch.add(one, some_samples(random, 200, 60));
      batch.add(other, some_samples(random, 200, 60));
      CHECK(run_in_threads(batch, 4) && batch.made() == 60);
    }
  }
}

TEST("rows: processes that share memory make the right rows") {
  const Dataset set(Array({200, 300}, {8, 170}, 4), 1, kDeflated);
  const UnitMemory::Shape shape{set.set->chunks, 4, (set.array.chunk_nbytes() + 63) / 64 * 64};
  const int descriptor = ::memfd_create("units", 0);
  CHECK(::ftruncate(descriptor, shape.nbytes()) == 0);
  void* const mapped =
      ::mmap(nullptr, static_cast<std::size_t>(shape.nbytes()), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  const auto work = [&](std::uint32_t seed) {
    std::mt19937 random(seed);
    set.set->memory = std::make_shared<UnitMemory>(static_cast<std::uint8_t*>(mapped), descriptor, shape);
    bool is_right = true;
    for (int round = 0; round < 40; ++round) {
      Batch batch(20);
      batch.add(set, some_samples(random, 200, 20));
      batch.run();
      is_right &= batch.made() == 20;
    }
    return is_right;
  };
  std::vector<pid_t> children;
  for (std::uint32_t seed = 0; seed < 3; ++seed) {
    children.push_back(::fork());
    if (children.back() == 0) ::_exit(work(seed) ? 0 : 1);
  }
  CHECK(work(9));
  for (const pid_t child : children) {
    int status = 1;
    CHECK(::waitpid(child, &status, 0) == child && status == 0);
  }
  set.set->memory.reset();
  ::munmap(mapped, static_cast<std::size_t>(shape.nbytes()));
  ::close(descriptor);
}

// ---- chunks that are kept -----------------------------------------------------------------------------------------

namespace {

struct Store {
  int descriptor = ::memfd_create("kept", 0);
  KeptStore store;
  std::uint64_t end = 4096;
  void* mapped = nullptr;

  explicit Store(bool is_mapped, bool is_verified = false, std::int64_t marks = 0) {
    CHECK(::ftruncate(descriptor, 1 << 22) == 0);
    store.table = std::make_shared<EntryTable>();
    store.descriptor = descriptor;
    store.size = 1 << 22;
    store.marks = marks;
    store.verifies = is_verified;
    store.tag = "a file";
    if (is_mapped) {
      mapped = ::mmap(nullptr, 1 << 22, PROT_READ, MAP_SHARED, descriptor, 0);
      store.memory = static_cast<const std::uint8_t*>(mapped);
    }
  }
  ~Store() {
    if (mapped != nullptr) ::munmap(mapped, 1 << 22);
    ::close(descriptor);
  }
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  // As Python does it; the offset of the entry.
  std::int64_t keep(Digest digest, const std::uint8_t* data, std::int64_t nbytes) {
    CHECK(::pwrite(descriptor, data, static_cast<std::size_t>(nbytes), static_cast<off_t>(end)) == nbytes);
    EntryRecord record;
    record.digest = digest;
    record.offset = end;
    record.nbytes = static_cast<std::uint64_t>(nbytes);
    record.sum = sum_of({data, static_cast<std::size_t>(nbytes)});
    record.check = check_of(record);
    end += (static_cast<std::uint64_t>(nbytes) + 63) / 64 * 64;
    std::uint64_t after = 0;
    CHECK(store.table->extend(&record, 1, &after));
    return static_cast<std::int64_t>(record.offset);
  }
  void keep_all(Batch& batch, KeptChunks& kept, std::int64_t nbytes) {
    for (KeepChunk& one : batch.work->take_chunks()) keep(kept.digest(one.chunk), one.data.get(), nbytes);
  }
};

}  // namespace

TEST("rows: chunks that are kept are not decoded again") {
  for (const bool is_mapped : {true, false}) {
    for (const bool is_remembered : {true, false}) {
      for (const bool is_packed : {true, false}) {
        const Dataset set(Array({40, 51}, {4, 30}, 4), 1, is_packed ? kDeflated : std::vector<FilterStep>());
        const std::int64_t nbytes = set.array.chunk_nbytes();
        Store store(is_mapped, true);
        const Memory memory(set.set->chunks, 3, nbytes);
        if (is_remembered) set.set->memory = memory.units;
        set.set->kept = std::make_shared<KeptChunks>(store.store, set.set->chunks, nbytes);
        CHECK(!set.set->reads_rows());
        for (int round = 0; round < 3; ++round) {
          Batch batch(40);
          batch.work->most_keep_nbytes = 1 << 20;
          batch.add(set, all_samples(set));
          batch.run();
          CHECK(batch.made() == 40);
          CHECK(batch.work->has_chunks() == (round == 0));
          CHECK(batch.work->totals.decoded == (round == 0 ? set.set->chunks * nbytes : 0));
          store.keep_all(batch, *set.set->kept, nbytes);
          CHECK(!batch.work->has_chunks());
        }
        set.set->memory.reset();
        // Without its bytes each is decoded again; those that are mapped are known to be there.
        if (is_mapped) continue;
        CHECK(::ftruncate(store.descriptor, 4096) == 0);
        Batch again(40);
        again.add(set, all_samples(set));
        again.run();
        CHECK(again.made() == 40 && again.work->totals.decoded == set.set->chunks * nbytes);
      }
    }
  }
}

TEST("rows: of chunks to keep, no more are handed over than said") {
  const Dataset set(Array({40, 50}, {4, 50}, 4), 1, kDeflated);
  Store store(false);
  set.set->kept = std::make_shared<KeptChunks>(store.store, set.set->chunks, 800);
  for (const std::int64_t most : {0, 799, 800, 2400, 100'000}) {
    Batch batch(40, 4);
    batch.work->most_keep_nbytes = most;
    batch.add(set, all_samples(set));
    CHECK(run_in_threads(batch, 3) && batch.made() == 40);
    const std::vector<KeepChunk> chunks = batch.work->take_chunks();
    CHECK(chunks.size() == static_cast<std::size_t>(std::min<std::int64_t>(most / 800, 10)));
    for (const KeepChunk& one : chunks) {
      CHECK(std::memcmp(one.data.get(), set.array.chunk_of(one.chunk).data(), 800) == 0);
    }
  }
}

TEST("rows: with marks, a chunk is handed over when it is decoded for the second time") {
  const Dataset set(Array({40, 50}, {4, 50}, 4), 1, kDeflated);
  Store store(false, false, 4096);
  set.set->kept = std::make_shared<KeptChunks>(store.store, set.set->chunks, 800);
  for (int round = 0; round < 2; ++round) {
    Batch batch(2);
    batch.work->most_keep_nbytes = 1 << 20;
    batch.add(set, {0, 39});
    batch.run();
    CHECK(batch.made() == 2 && batch.work->take_chunks().size() == (round == 0 ? 0u : 2u));
  }
}
