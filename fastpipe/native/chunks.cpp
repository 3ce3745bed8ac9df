#include "chunks.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "clock.h"
#include "simulate.h"

namespace fastpipe {
namespace {

// Of rows that one task reads or copies: more than it costs to hand it to a thread, and no long time.
constexpr std::int64_t kLeastTask = std::int64_t{1} << 18, kMostTask = std::int64_t{1} << 22;
constexpr std::int64_t kShares = 4;          // tasks of each thread, if there is enough to do
constexpr std::int64_t kDecoding = 8;        // times as long a byte takes to decode as to copy
constexpr std::int64_t kOverhead = 1 << 12;  // bytes in whose time a row or chunk is found, and its file read
constexpr std::int64_t kMore = 1 << 12;      // bytes by which what is stored may exceed twice what it is made of
constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max() / 4;

// A product of numbers from 0; false where it is too large.
bool multiply(std::int64_t* product, std::int64_t by) noexcept {
  return !__builtin_mul_overflow(*product, by, product) && *product <= kLargest;
}

}  // namespace

// ---- where samples lie ---------------------------------------------------------------------------------------------

bool SampleGrid::set(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& chunk,
                     std::int64_t itemsize, int lead) noexcept {
  if (shape.empty() || shape.size() > kMostDims || chunk.size() != shape.size()) return false;
  lead_ = lead;
  dims_ = static_cast<int>(shape.size());
  if (lead < 1 || lead > dims_ || itemsize < 1) return false;
  itemsize_ = itemsize;
  count = groups = parts = 1;
  sample_nbytes = chunk_nbytes = row_nbytes_ = itemsize;
  bool fits = true;
  for (int dim = 0; dim < dims_; ++dim) {
    const std::int64_t size = shape[static_cast<std::size_t>(dim)], side = chunk[static_cast<std::size_t>(dim)];
    if (size < 0 || side < 1 || size > kLargest || side > kLargest) return false;
    shape_[dim] = size;
    chunk_[dim] = side;
    grid_[dim] = (size + side - 1) / side;
    const bool counts_samples = dim < lead;
    fits &= multiply(counts_samples ? &count : &sample_nbytes, size);
    fits &= multiply(counts_samples ? &groups : &parts, grid_[dim]);
    fits &= multiply(&chunk_nbytes, side);
    if (!counts_samples) fits &= multiply(&row_nbytes_, side);
  }
  std::int64_t chunks = groups;
  return fits && multiply(&chunks, std::max<std::int64_t>(parts, 1));
}

SampleGrid::Place SampleGrid::place(std::int64_t sample) const noexcept {
  if (lead_ == 1) return {sample / chunk_[0], sample % chunk_[0] * row_nbytes_};
  Place found;
  std::int64_t group_step = 1, at_step = row_nbytes_;
  for (int dim = lead_ - 1; dim >= 0; --dim) {
    const std::int64_t at = sample % shape_[dim];
    sample /= shape_[dim];
    found.group += at / chunk_[dim] * group_step;
    found.at += at % chunk_[dim] * at_step;
    group_step *= grid_[dim];
    at_step *= chunk_[dim];
  }
  return found;
}

std::int64_t SampleGrid::samples_in(std::int64_t group) const noexcept {
  std::int64_t samples = 1;
  for (int dim = lead_ - 1; dim >= 0; --dim) {
    const std::int64_t number = group % grid_[dim];
    group /= grid_[dim];
    samples *= std::min(chunk_[dim], shape_[dim] - number * chunk_[dim]);
  }
  return samples;
}

void SampleGrid::part(std::int64_t number, Part* part) const noexcept {
  std::int64_t corner[kMostDims], extent[kMostDims], sample_step[kMostDims], chunk_step[kMostDims];
  std::int64_t in_sample = itemsize_, in_chunk = itemsize_;
  for (int dim = dims_ - 1; dim >= lead_; --dim) {
    corner[dim] = number % grid_[dim] * chunk_[dim];
    number /= grid_[dim];
    extent[dim] = std::min(chunk_[dim], shape_[dim] - corner[dim]);
    sample_step[dim] = in_sample;
    chunk_step[dim] = in_chunk;
    in_sample *= shape_[dim];
    in_chunk *= chunk_[dim];
  }
  // The last dimensions that are whole in both are one run, and so is what the one before has of them.
  int dim = dims_ - 1;
  part->run = itemsize_;
  while (dim >= lead_) {
    const bool is_whole = extent[dim] == chunk_[dim] && extent[dim] == shape_[dim];
    part->run *= extent[dim--];
    if (!is_whole) break;
  }
  part->in_sample = 0;
  for (int each = lead_; each < dims_; ++each) part->in_sample += corner[each] * sample_step[each];
  part->dims = 0;
  part->nbytes = part->reach = part->run;
  for (int each = lead_; each <= dim; ++each) {
    part->counts[part->dims] = extent[each];
    part->chunk_steps[part->dims] = chunk_step[each];
    part->sample_steps[part->dims] = sample_step[each];
    part->nbytes *= extent[each];
    part->reach += (extent[each] - 1) * chunk_step[each];
    ++part->dims;
  }
}

namespace {

// Call a function for each run of a part: where it begins in the chunk and in the sample, from where the sample does.
template <typename Function>
bool for_runs(const SampleGrid::Part& part, Function&& function) {
  if (part.nbytes == 0) return true;
  std::int64_t index[SampleGrid::kMostDims] = {}, in_chunk = 0, in_sample = part.in_sample;
  while (true) {
    if (!function(in_chunk, in_sample)) return false;
    int dim = part.dims - 1;
    for (; dim >= 0; --dim) {
      in_chunk += part.chunk_steps[dim];
      in_sample += part.sample_steps[dim];
      if (++index[dim] < part.counts[dim]) break;
      in_chunk -= part.chunk_steps[dim] * part.counts[dim];
      in_sample -= part.sample_steps[dim] * part.counts[dim];
      index[dim] = 0;
    }
    if (dim < 0) return true;
  }
}

void copy_part(const SampleGrid::Part& part, const std::uint8_t* row, std::uint8_t* sample) noexcept {
  if (part.dims == 0) {
    std::memcpy(sample + part.in_sample, row, static_cast<std::size_t>(part.run));
    return;
  }
  for_runs(part, [&](std::int64_t in_chunk, std::int64_t in_sample) {
    std::memcpy(sample + in_sample, row + in_chunk, static_cast<std::size_t>(part.run));
    return true;
  });
}

void fill_part(const SampleGrid::Part& part, const std::vector<std::uint8_t>& fill, std::uint8_t* sample) noexcept {
  const auto item = static_cast<std::int64_t>(fill.size());
  const bool is_zero = std::all_of(fill.begin(), fill.end(), [](std::uint8_t byte) { return byte == 0; });
  for_runs(part, [&](std::int64_t, std::int64_t in_sample) {
    if (is_zero) {
      std::memset(sample + in_sample, 0, static_cast<std::size_t>(part.run));
    } else {
      for (std::int64_t at = 0; at < part.run; at += item) {
        std::memcpy(sample + in_sample + at, fill.data(), fill.size());
      }
    }
    return true;
  });
}

Status unreadable() { return Status::declined(Reason::unreadable, errno); }

}  // namespace

// ---- chunks --------------------------------------------------------------------------------------------------------

Status decode_chunk(const ChunkedDataset& dataset, int descriptor, std::int64_t chunk, Range wanted, std::uint8_t* out,
                    Scratch& scratch, RowTotals* totals) noexcept {
  const std::int64_t nbytes = dataset.grid.chunk_nbytes, size = dataset.sizes[chunk];
  if (size < 0 || size > 2 * nbytes + kMore) return Status::declined(Reason::too_large);
  if (dataset.offsets[chunk] > kLargest) return Status::declined(Reason::unreadable, EOVERFLOW);
  totals->decoded.fetch_add(nbytes, std::memory_order_relaxed);
  Watch watch;
  if (dataset.filters.empty()) {
    const std::int64_t there = std::min(size, nbytes);
    if (!read_at(descriptor, out, there, dataset.offsets[chunk])) return unreadable();
    std::memset(out + there, 0, static_cast<std::size_t>(nbytes - there));  // behind the dataset's end
    watch.add_to(totals->read);
    return Status::made();
  }
  auto* stored = scratch.arena.array<std::uint8_t>(static_cast<std::size_t>(size));
  if (stored == nullptr) return Status::declined(Reason::no_memory);
  if (!read_at(descriptor, stored, size, dataset.offsets[chunk])) return unreadable();
  watch.add_to(totals->read);
  std::int32_t step = 0;
  if (waited_in_place_of_decoding()) return Status::made();
  const Problem problem = undo_filters(dataset.filters, dataset.masks[chunk], {stored, static_cast<std::size_t>(size)},
                                       out, nbytes, wanted, scratch.arena, scratch.codecs, &step);
  watch.add_to(totals->decode);
  if (problem == Problem::none) return Status::made();
  if (problem == Problem::no_memory) return Status::declined(Reason::no_memory);
  return Status::declined(Reason::damaged, step * 256 + static_cast<std::int32_t>(problem));
}

void KeepChunk::Free::operator()(void* memory) const noexcept { std::free(memory); }

// ---- batches -------------------------------------------------------------------------------------------------------

// A group's chunk in a batch.
struct RowBatch::Chunk {
  const Source& source;
  std::int32_t number_of_source;
  const ChunkedDataset& dataset;
  const SampleGrid::Part& part;
  DataFile::Opened& file;
  std::int64_t number;    // among the dataset's chunks
  const Sample* samples;  // that are taken of it
  std::int64_t count;
  std::int64_t left;  // samples of the group that are not

  std::uint8_t* out(const Sample& sample) const {
    return source.out + (sample.row - source.first_row) * dataset.grid.sample_nbytes;
  }
  Range wanted() const {
    Range range{dataset.grid.chunk_nbytes, 0};
    for (std::int64_t i = 0; i < count; ++i) {
      range.begin = std::min(range.begin, samples[i].at);
      range.end = std::max(range.end, samples[i].at + part.reach);
    }
    return range;
  }
};

bool RowBatch::prepare() noexcept {
  try {
    std::int64_t rows = 0;
    sorted_.resize(sources.size());
    for (std::size_t number = 0; number < sources.size(); ++number) {
      const Source& source = sources[number];
      for (std::int64_t i = 0; i < source.count; ++i) {
        rows = std::max(rows, (source.rows == nullptr ? i : source.rows[i]) + 1);
      }
      sort(source, &sorted_[number]);
      if (source.dataset->reads_rows()) {
        plan_rows(static_cast<std::int32_t>(number));
      } else {
        plan_groups(static_cast<std::int32_t>(number));
      }
    }
    std::fill(statuses, statuses + rows, Status::made());
    return true;
  } catch (...) {
    return false;
  }
}

// Sort samples by their groups; those of a group stay in their order.
void RowBatch::sort(const Source& source, Sorted* sorted) const {
  const auto count = static_cast<std::size_t>(source.count);
  std::vector<Sample> given(count);
  std::int64_t largest = 0;
  bool is_sorted = true;
  for (std::size_t i = 0; i < count; ++i) {
    const SampleGrid::Place place = source.dataset->grid.place(source.samples[i]);
    given[i] = {place.group, place.at, source.rows == nullptr ? static_cast<std::int64_t>(i) : source.rows[i]};
    is_sorted &= i == 0 || given[i - 1].group <= place.group;
    largest = std::max(largest, place.group);
  }
  // By some bits of the group's number at a time, the lowest first.
  constexpr int kBits = 11;
  std::vector<Sample> next(is_sorted ? 0 : count);
  for (int shift = 0; !is_sorted && shift < 63 && largest >> shift > 0; shift += kBits) {
    std::size_t begins[std::size_t{1} << kBits] = {};
    constexpr std::int64_t kMask = (std::int64_t{1} << kBits) - 1;
    for (const Sample& sample : given) ++begins[sample.group >> shift & kMask];
    std::size_t begin = 0;
    for (std::size_t& each : begins) begin += std::exchange(each, begin);
    for (const Sample& sample : given) next[begins[sample.group >> shift & kMask]++] = sample;
    given.swap(next);
  }
  sorted->samples = std::move(given);
}

// Plan to read rows as they are in the file.
void RowBatch::plan_rows(std::int32_t number) {
  const Source& source = sources[static_cast<std::size_t>(number)];
  const std::int64_t each = source.dataset->grid.sample_nbytes + kOverhead;
  const std::int64_t wanted = std::clamp(source.count * each / (kShares * threads), kLeastTask, kMostTask);
  const std::int64_t step = std::max<std::int64_t>(1, wanted / each);
  for (std::int64_t first = 0; first < source.count; first += step) {
    tasks_.push_back({number, true, 0, first, std::min(first + step, source.count)});
  }
}

// Plan to copy rows from chunks: first from those that are there, perhaps wanted for the last time, so that there is
// room for others; last from those that somebody else is decoding.
void RowBatch::plan_groups(std::int32_t number) {
  const Source& source = sources[static_cast<std::size_t>(number)];
  const ChunkedDataset& dataset = *source.dataset;
  Sorted& sorted = sorted_[static_cast<std::size_t>(number)];
  const std::vector<Sample>& samples = sorted.samples;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    if (i == 0 || samples[i].group != samples[i - 1].group) {
      sorted.groups.push_back({samples[i].group, static_cast<std::int64_t>(i)});
    }
  }
  const auto count = static_cast<std::int64_t>(sorted.groups.size());
  sorted.groups.push_back({-1, static_cast<std::int64_t>(samples.size())});

  enum Kind : std::uint8_t { there, missing, coming };
  std::vector<std::uint8_t> kinds(static_cast<std::size_t>(count));
  for (std::int64_t part = 0; part < dataset.grid.parts; ++part) {
    SampleGrid::Part shape;
    dataset.grid.part(part, &shape);
    std::int64_t total = 0;
    const auto cost_of = [&](std::int64_t group) {
      const Group* at = &sorted.groups[static_cast<std::size_t>(group)];
      const std::int64_t rows = at[1].first - at[0].first, copied = rows * (shape.nbytes + 64) + kOverhead;
      return kinds[static_cast<std::size_t>(group)] == missing ? copied + kDecoding * dataset.grid.chunk_nbytes
                                                               : copied;
    };
    for (std::int64_t group = 0; group < count; ++group) {
      const std::int64_t chunk = sorted.groups[static_cast<std::size_t>(group)].number * dataset.grid.parts + part;
      std::uint8_t& kind = kinds[static_cast<std::size_t>(group)];
      kind = missing;
      if (dataset.inside != nullptr || dataset.offsets[chunk] < 0 ||
          (dataset.kept != nullptr && dataset.kept->has(chunk))) {
        kind = there;
      } else if (dataset.memory != nullptr) {
        const std::int64_t key = dataset.first_key + chunk;
        kind = dataset.memory->is_there(key) ? there : dataset.memory->is_coming(key) ? coming : missing;
      }
      total += cost_of(group);
    }
    const std::int64_t wanted = std::clamp(total / (kShares * threads), kLeastTask, kMostTask);
    const auto plan = [&](Kind kind, std::int64_t from, std::int64_t to) {
      std::int64_t first = from, cost = 0;
      for (std::int64_t group = from; group < to; ++group) {
        if (kinds[static_cast<std::size_t>(group)] != kind) {
          if (group > first) tasks_.push_back({number, false, part, first, group});
          first = group + 1;
          cost = 0;
          continue;
        }
        cost += cost_of(group);
        if (cost >= wanted) {
          tasks_.push_back({number, false, part, first, group + 1});
          first = group + 1;
          cost = 0;
        }
      }
      if (to > first) tasks_.push_back({number, false, part, first, to});
    };
    const auto begin = static_cast<std::int64_t>(turn * static_cast<double>(count));  // each process begins with others
    plan(there, 0, count);
    plan(missing, begin, count);
    plan(missing, 0, begin);
    plan(coming, 0, count);
  }
}

void RowBatch::run(std::int64_t item, Scratch& scratch) {
  const Task& task = tasks_[static_cast<std::size_t>(item)];
  if (task.reads_rows) {
    read_rows(task);
    done_.fetch_add(1);
    return;
  }
  const Source& source = sources[static_cast<std::size_t>(task.source)];
  const Sorted& sorted = sorted_[static_cast<std::size_t>(task.source)];
  const SampleGrid& grid = source.dataset->grid;
  SampleGrid::Part part;
  grid.part(task.part, &part);
  DataFile::Opened file(*source.dataset->file);
  const int error = file.descriptor() < 0 ? errno : 0;
  for (std::int64_t number = task.first; number < task.last; ++number) {
    const Group* group = &sorted.groups[static_cast<std::size_t>(number)];
    const std::int64_t count = group[1].first - group[0].first;
    const Chunk chunk{source,
                      task.source,
                      *source.dataset,
                      part,
                      file,
                      group->number * grid.parts + task.part,
                      &sorted.samples[static_cast<std::size_t>(group->first)],
                      count,
                      grid.samples_in(group->number) - count};
    if (error != 0) {
      fail(chunk, Status::declined(Reason::unreadable, error));
    } else {
      copy_group(chunk, scratch);
    }
    scratch.arena.reset();
  }
  done_.fetch_add(1);
}

void RowBatch::lost(std::int64_t item) noexcept {
  const Task& task = tasks_[static_cast<std::size_t>(item)];
  const Sorted& sorted = sorted_[static_cast<std::size_t>(task.source)];
  const std::int64_t first = task.reads_rows ? task.first : sorted.groups[static_cast<std::size_t>(task.first)].first;
  const std::int64_t last = task.reads_rows ? task.last : sorted.groups[static_cast<std::size_t>(task.last)].first;
  for (std::int64_t i = first; i < last; ++i) {
    set_status(sorted.samples[static_cast<std::size_t>(i)].row, Status::declined(Reason::internal));
  }
  done_.fetch_add(1);
}

// Several tasks may fail the same row: any of their reasons will do.
void RowBatch::set_status(std::int64_t row, Status status) noexcept {
  std::uint64_t word;
  std::memcpy(&word, &status, sizeof word);
  __atomic_store_n(reinterpret_cast<std::uint64_t*>(&statuses[row]), word, __ATOMIC_RELAXED);
}

void RowBatch::fail(const Chunk& chunk, Status status) noexcept {
  for (std::int64_t i = 0; i < chunk.count; ++i) set_status(chunk.samples[i].row, status);
}

// Read rows as they are in the file.
void RowBatch::read_rows(const Task& task) {
  Watch watch;
  const Source& source = sources[static_cast<std::size_t>(task.source)];
  const ChunkedDataset& dataset = *source.dataset;
  DataFile::Opened file(*dataset.file);
  const int error = file.descriptor() < 0 ? errno : 0;
  for (std::int64_t number = 0; number < dataset.grid.parts; ++number) {
    SampleGrid::Part part;
    dataset.grid.part(number, &part);
    for (std::int64_t i = task.first; i < task.last; ++i) {
      const Sample& sample = sorted_[static_cast<std::size_t>(task.source)].samples[static_cast<std::size_t>(i)];
      const Chunk chunk{source,  task.source, dataset, part, file, sample.group * dataset.grid.parts + number,
                        &sample, 1,           0};
      const std::int64_t offset = dataset.offsets[chunk.number];
      if (offset < 0) {
        fill_part(part, dataset.fill, chunk.out(sample));
      } else if (error != 0) {
        fail(chunk, Status::declined(Reason::unreadable, error));
      } else if (offset > kLargest) {
        fail(chunk, Status::declined(Reason::unreadable, EOVERFLOW));
      } else {
        const bool is_read = for_runs(part, [&](std::int64_t in_chunk, std::int64_t in_sample) {
          return read_at(file.descriptor(), chunk.out(sample) + in_sample, part.run, offset + sample.at + in_chunk);
        });
        if (!is_read) fail(chunk, unreadable());
      }
    }
  }
  watch.add_to(totals.read);
}

void RowBatch::copy_group(const Chunk& chunk, Scratch& scratch) {
  const ChunkedDataset& dataset = chunk.dataset;
  if (dataset.inside != nullptr) {
    copy_rows(chunk, dataset.inside);
  } else if (dataset.offsets[chunk.number] < 0) {
    for (std::int64_t i = 0; i < chunk.count; ++i) {
      fill_part(chunk.part, dataset.fill, chunk.out(chunk.samples[i]));
    }
  } else if (!copy_from_kept(chunk, scratch)) {
    totals.used.fetch_add(dataset.grid.chunk_nbytes / (chunk.count + chunk.left) * chunk.count,
                          std::memory_order_relaxed);
    // What is taken as a whole nobody else will want.
    if (dataset.memory == nullptr || chunk.left <= 0 || !copy_from_memory(chunk, scratch)) {
      const Status status = decode_alone(chunk, scratch);
      if (!status.is_made()) fail(chunk, status);
    }
  }
}

void RowBatch::copy_rows(const Chunk& chunk, const std::uint8_t* data) {
  Watch watch;
  for (std::int64_t i = 0; i < chunk.count; ++i) {
    copy_part(chunk.part, data + chunk.samples[i].at, chunk.out(chunk.samples[i]));
  }
  watch.add_to(totals.copy);
}

// Copy from a kept chunk; false where it is not kept.
bool RowBatch::copy_from_kept(const Chunk& chunk, Scratch& scratch) {
  KeptChunks* kept = chunk.dataset.kept.get();
  if (kept == nullptr) return false;
  const std::int64_t place = kept->find(chunk.number, scratch.arena);
  if (place < 0) return false;
  if (kept->store().memory != nullptr) {
    copy_rows(chunk, kept->store().memory + place);
    return true;
  }
  Watch watch;
  for (std::int64_t i = 0; i < chunk.count; ++i) {
    const Sample& sample = chunk.samples[i];
    const bool is_read = for_runs(chunk.part, [&](std::int64_t in_chunk, std::int64_t in_sample) {
      return read_at(kept->store().descriptor, chunk.out(sample) + in_sample, chunk.part.run,
                     place + sample.at + in_chunk);
    });
    if (!is_read) return false;  // whatever became of what was kept, the dataset's file has it
  }
  watch.add_to(totals.copy);
  return true;
}

// Copy from the memory of decoded chunks, decoded there if need be; false where that does not go.
bool RowBatch::copy_from_memory(const Chunk& chunk, Scratch& scratch) {
  UnitMemory& memory = *chunk.dataset.memory;
  const std::int64_t key = chunk.dataset.first_key + chunk.number;
  for (int waits = 0; waits < UnitMemory::kMostWaits; ++waits) {
    if (const UnitMemory::Found found = memory.find(key)) {
      copy_rows(chunk, found.data);
      if (memory.release(found)) {
        memory.used(key, chunk.count);
        return true;
      }
      continue;
    }
    const UnitMemory::Claim claim = memory.claim(key);
    if (claim) {
      const Status status = decode_chunk(chunk.dataset, chunk.file.descriptor(), chunk.number,
                                         {0, chunk.dataset.grid.chunk_nbytes}, claim.data, scratch, &totals);
      if (!status.is_made()) {
        memory.abandon(claim);
        fail(chunk, status);
        return true;
      }
      copy_rows(chunk, claim.data);
      KeepChunk kept = copied_to_keep(chunk, claim.data);
      if (!memory.publish(claim, chunk.left)) return false;  // another process may have written there, too
      keep(std::move(kept));
      return true;
    }
    if (memory.is_coming(key)) {
      memory.wait(key);
    } else if (!memory.is_there(key)) {
      return false;  // there is no room
    }
  }
  return false;
}

// Decode a chunk for this batch only.
Status RowBatch::decode_alone(const Chunk& chunk, Scratch& scratch) {
  const ChunkedDataset& dataset = chunk.dataset;
  const std::int64_t nbytes = dataset.grid.chunk_nbytes;
  const bool keeps = dataset.kept != nullptr && most_keep_nbytes > 0;
  // A chunk that is a row is decoded where that goes.
  const bool is_row = chunk.count == 1 && chunk.part.dims == 0 && chunk.part.run == nbytes;
  auto* data = is_row ? chunk.out(chunk.samples[0]) + chunk.part.in_sample
                      : scratch.arena.array<std::uint8_t>(static_cast<std::size_t>(nbytes));
  if (data == nullptr) return Status::declined(Reason::no_memory);
  const Range wanted = keeps ? Range{0, nbytes} : chunk.wanted();
  const Status status = decode_chunk(dataset, chunk.file.descriptor(), chunk.number, wanted, data, scratch, &totals);
  if (!status.is_made()) return status;
  if (keeps) keep(copied_to_keep(chunk, data));
  if (!is_row) copy_rows(chunk, data);
  return status;
}

// A copy of a chunk that is to be kept; without data where it is not, or where there is no memory for it.
KeepChunk RowBatch::copied_to_keep(const Chunk& chunk, const std::uint8_t* data) noexcept {
  KeepChunk made;
  KeptChunks* kept = chunk.dataset.kept.get();
  const std::int64_t nbytes = chunk.dataset.grid.chunk_nbytes;
  if (kept == nullptr || most_keep_nbytes <= 0 || !kept->wants(chunk.number)) return made;
  {
    const std::lock_guard<std::mutex> guard(keep_lock_);
    if (nbytes > most_keep_nbytes - keep_nbytes_) return made;
    keep_nbytes_ += nbytes;
  }
  made.data.reset(static_cast<std::uint8_t*>(std::malloc(static_cast<std::size_t>(nbytes))));
  if (made.data == nullptr) return made;
  std::memcpy(made.data.get(), data, static_cast<std::size_t>(nbytes));
  made.source = chunk.number_of_source;
  made.chunk = chunk.number;
  return made;
}

// Give the caller a chunk to keep.
void RowBatch::keep(KeepChunk chunk) noexcept {
  if (chunk.data == nullptr) return;
  const std::lock_guard<std::mutex> guard(keep_lock_);
  try {
    keep_.push_back(std::move(chunk));
  } catch (const std::bad_alloc&) {  // it is not kept
  }
}

}  // namespace fastpipe
