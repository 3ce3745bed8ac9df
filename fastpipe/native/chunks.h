// Rows of HDF5 datasets, read from the chunks that they lie in.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "codecs.h"
#include "engine.h"
#include "files.h"
#include "kept.h"
#include "span.h"
#include "status.h"
#include "units.h"

namespace fastpipe {

// Where the samples of a dataset lie in its chunks.
//
// Samples are the dataset's elements along its first dimensions, counted in C order.  A *group* is the samples that
// share their chunks, and a *part* one of the chunks that hold a sample: chunk = group * parts + part.
class SampleGrid {
 public:
  static constexpr int kMostDims = 32;  // that HDF5 has

  // shape, chunk: of the dataset, a chunk's sides at least 1; itemsize: bytes of an element; lead: dimensions that
  // count samples.  False where numbers are too large.
  [[nodiscard]] bool set(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& chunk,
                         std::int64_t itemsize, int lead) noexcept;

  std::int64_t count = 0;  // samples
  std::int64_t groups = 0, parts = 0;
  std::int64_t sample_nbytes = 0;  // of each
  std::int64_t chunk_nbytes = 0;   // of a decoded chunk

  // Where a sample is: its group, and the bytes before it in a chunk.
  struct Place {
    std::int64_t group = 0, at = 0;
  };
  Place place(std::int64_t sample) const noexcept;
  // How many samples a group has: at the dataset's ends fewer than elsewhere.
  std::int64_t samples_in(std::int64_t group) const noexcept;

  // The part of a sample that is in one of its chunks: runs of bytes of equal length.
  struct Part {
    std::int64_t in_sample = 0;  // where the first run begins
    std::int64_t run = 0;        // bytes of each
    std::int64_t nbytes = 0;     // of all
    std::int64_t reach = 0;      // bytes behind a sample's beginning in the chunk, up to the last run's end
    int dims = 0;                // along which there are several
    std::int64_t counts[kMostDims], chunk_steps[kMostDims], sample_steps[kMostDims];
  };
  void part(std::int64_t number, Part* part) const noexcept;

 private:
  int lead_ = 0, dims_ = 0;
  std::int64_t itemsize_ = 0, row_nbytes_ = 0;
  std::int64_t shape_[kMostDims], chunk_[kMostDims], grid_[kMostDims];
};

// A dataset of a file.  Immutable, but for what is remembered and kept.
struct ChunkedDataset {
  std::shared_ptr<DataFile> file;
  SampleGrid grid;
  // Of each chunk, in C order of their grid: where it begins in the file, -1 where nothing was written; bytes there;
  // which filters were left out.
  const std::int64_t *offsets = nullptr, *sizes = nullptr;
  const std::uint32_t* masks = nullptr;
  std::int64_t chunks = 0;
  std::vector<FilterStep> filters;       // in the order of writing
  std::vector<std::uint8_t> fill;        // an element of which nothing was written
  const std::uint8_t* inside = nullptr;  // all data, where they are in memory
  std::shared_ptr<UnitMemory> memory;    // of decoded chunks that other batches will want soon; may be null
  std::int64_t first_key = 0;            // of its chunks there
  std::shared_ptr<KeptChunks> kept;      // decoded chunks that are kept; may be null

  // Return whether rows are read from the file by themselves, as nothing has to be decoded nor kept.
  bool reads_rows() const noexcept { return filters.empty() && inside == nullptr && kept == nullptr; }
};

// Sums over a batch's items: nanoseconds by stage; bytes of chunks that were decoded, and of rows that were taken of
// them.
struct RowTotals {
  std::atomic<std::int64_t> read{0}, decode{0}, copy{0}, decoded{0}, used{0};
};

// Read a chunk and undo its filters.
//
// out: (grid.chunk_nbytes).
// wanted: the bytes of it that are needed.
// Returns made, or declined: unreadable with errno (0: the file ends within it), damaged with the problem and the step,
// too_large, no_memory.
Status decode_chunk(const ChunkedDataset& dataset, int descriptor, std::int64_t chunk, Range wanted, std::uint8_t* out,
                    Scratch& scratch, RowTotals* totals) noexcept;

// A chunk that is to be kept, in memory of its own.
struct KeepChunk {
  struct Free {
    void operator()(void* memory) const noexcept;
  };
  std::int64_t source = 0, chunk = 0;
  std::unique_ptr<std::uint8_t, Free> data;
};

// A batch of rows of some datasets.  All pointers are the caller's, and are valid until the work is done.
class RowBatch : public Work {
 public:
  // Samples of one dataset, and where they go.
  struct Source {
    std::shared_ptr<const ChunkedDataset> dataset;
    const std::int64_t* samples = nullptr;  // (count), below dataset->grid.count
    const std::int64_t* rows = nullptr;     // (count): of the batch; null: the first ones in their order
    std::int64_t count = 0;
    std::uint8_t* out = nullptr;  // (rows of the batch from first_row, sample_nbytes)
    std::int64_t first_row = 0;   // at most any of rows
  };
  std::vector<Source> sources;
  Status* statuses = nullptr;         // (rows of the batch), written: made unless something is wrong
  int threads = 1;                    // that share the work
  double turn = 0;                    // from 0 to 1: where among its chunks it begins, as processes begin with others
  std::int64_t most_keep_nbytes = 0;  // of chunks that the caller is given to keep
  RowTotals totals;

  // Find out what there is to do; false where there is no memory.
  [[nodiscard]] bool prepare() noexcept;

  std::int64_t size() const noexcept override { return static_cast<std::int64_t>(tasks_.size()); }
  void run(std::int64_t item, Scratch& scratch) override;
  void lost(std::int64_t item) noexcept override;

  // Return whether all of its items were done.
  bool is_complete() const noexcept { return done_.load() == size(); }
  // Chunks to be kept, once the work is done.
  bool has_chunks() const noexcept { return !keep_.empty(); }
  std::vector<KeepChunk> take_chunks() noexcept { return std::move(keep_); }

 private:
  struct Group {
    std::int64_t number, first;  // its first sample, in the order of samples_
  };
  struct Sample {
    std::int64_t group, at, row;
  };
  struct Sorted {
    std::vector<Group> groups;  // and one that ends them
    std::vector<Sample> samples;
  };
  struct Task {
    std::int32_t source;
    bool reads_rows;
    std::int64_t part, first, last;  // groups, or samples where rows are read
  };
  struct Chunk;

  void sort(const Source& source, Sorted* sorted) const;
  void plan_rows(std::int32_t source);
  void plan_groups(std::int32_t source);
  void read_rows(const Task& task);
  void copy_group(const Chunk& chunk, Scratch& scratch);
  bool copy_from_kept(const Chunk& chunk, Scratch& scratch);
  bool copy_from_memory(const Chunk& chunk, Scratch& scratch);
  Status decode_alone(const Chunk& chunk, Scratch& scratch);
  void copy_rows(const Chunk& chunk, const std::uint8_t* data);
  KeepChunk copied_to_keep(const Chunk& chunk, const std::uint8_t* data) noexcept;
  void keep(KeepChunk chunk) noexcept;
  void set_status(std::int64_t row, Status status) noexcept;
  void fail(const Chunk& chunk, Status status) noexcept;

  std::vector<Sorted> sorted_;  // of each source
  std::vector<Task> tasks_;
  std::vector<KeepChunk> keep_;
  std::int64_t keep_nbytes_ = 0;
  std::mutex keep_lock_;
  std::atomic<std::int64_t> done_{0};
};

}  // namespace fastpipe
