// A soak of the engine: 64 threads make small batches of files that are rewritten, cut and removed meanwhile; batches
// are cancelled, waited for and dropped at random, and images are kept and found again.  core_soak [seconds]
//
// Each image that is made is that of one version of its file, and what was cancelled is not written.
//
// Other batches are rows of chunks, all of which decode into one small memory, and keep and find chunks in a store;
// files of chunks are replaced meanwhile.  Each row that is made is that of the file that it was described by.
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../chunks.h"
#include "../images.h"
#include "../tests/folder.h"
#include "../tests/make_chunks.h"
#include "../tests/make_jpeg.h"
#include "../tests/record_of.h"
#include "fuzz.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::fuzz;
using Memory = std::vector<std::uint8_t>;

constexpr int kThreads = 64, kSubmitters = 4, kFiles = 24, kVersions = 2, kUnderWay = 12;
constexpr int kChanging = 20;  // of the files; the others can be found where they are kept
constexpr std::int32_t kSide = 24;
constexpr std::size_t kBytes = std::size_t{3} * kSide * kSide;
constexpr std::uint8_t kUntouched = 0xEE;

std::shared_ptr<const ImagePlan> resizing_plan() {
  auto plan = std::make_shared<ImagePlan>();
  Step step;
  step.size = {kSide, kSide};
  step.filter = kBilinear;
  plan->steps = {step};
  plan->how.interleaved = true;
  return plan;
}

// A batch and all that it points to, which is given back when the batch is done, however that came: of images, or
// of rows.
struct Batch {
  std::shared_ptr<ImageBatch> work = std::make_shared<ImageBatch>();
  std::shared_ptr<RowBatch> rows_work;
  std::vector<std::int64_t> samples;
  std::string names;
  std::vector<int> files;
  std::vector<std::int64_t> starts, ends, places;
  std::vector<Status> statuses;
  Memory memory;
};

// The files, and what is made of each of their versions.
class Files {
 public:
  Files() {
    for (int i = 0; i < kFiles; ++i) {
      paths_.push_back(folder_.path(std::to_string(i).c_str()));
      for (int version = 0; version < kVersions; ++version) {
        tests::Kind kind;
        kind.progressive = i % 3 == 0;
        // Of less than a page, and of different lengths: no read gives bytes of two versions.
        encoded_.push_back(tests::encoded({20 + i, 40 - i + 9 * version}, kind));
        made_.push_back(made(encoded_.back()));
      }
      write(i, 0, encoded_[index(i, 0)].size());
    }
  }
  const std::string& path(int number) const { return paths_[static_cast<std::size_t>(number)]; }
  bool is_one_of(int number, const std::uint8_t* image) const {
    for (int version = 0; version < kVersions; ++version) {
      if (std::memcmp(made_[index(number, version)].data(), image, kBytes) == 0) return true;
    }
    return false;
  }

  void change_one(Choices& choices) const {
    const int number = choices.below(kChanging), version = choices.below(kVersions);
    const std::size_t size = encoded_[index(number, version)].size();
    switch (choices.below(4)) {
      case 0:
        return static_cast<void>(::unlink(path(number).c_str()));
      case 1:
        return static_cast<void>(::truncate(path(number).c_str(), choices.below(900)) + 1);
      default:
        return write(number, version, size);
    }
  }

 private:
  static std::size_t index(int number, int version) { return static_cast<std::size_t>(number * kVersions + version); }
  static Memory made(const tests::File& file) {
    ImageBatch work;
    ImageInput input{false, file.data(), static_cast<std::int64_t>(file.size())};
    Memory memory(kBytes);
    const std::int64_t place = 0;
    Status status;
    work.plan = resizing_plan();
    work.count = 1;
    work.inputs = &input;
    work.memory = memory.data();
    work.places = &place;
    work.sample_size = {kSide, kSide};
    work.statuses = &status;
    require(work.prepare(), "memory");
    run_here(work);
    require(status.is_made(), "a good file");
    return memory;
  }
  void write(int number, int version, std::size_t size) const {
    std::FILE* file = std::fopen(path(number).c_str(), "wb");
    require(file != nullptr, "a file");
    const tests::File& bytes = encoded_[index(number, version)];
    require(std::fwrite(bytes.data(), 1, size, file) == size, "its bytes");
    std::fclose(file);
  }

  tests::Folder folder_;
  std::vector<std::string> paths_;
  std::vector<tests::File> encoded_;
  std::vector<Memory> made_;
};

// Images that are kept, as Python keeps them.
class Store {
 public:
  Store() {
    kept_ = std::make_shared<KeptImages>();
    kept_->table = std::make_shared<EntryTable>();
    kept_->descriptor = ::memfd_create("soak", 0);
    kept_->size = std::int64_t{1} << 40;
    kept_->tag = "soak";
    kept_->verifies = true;
  }
  std::shared_ptr<const KeptImages> kept() const { return kept_; }
  void keep(const WholeImage& whole) {
    const std::lock_guard<std::mutex> guard(lock_);
    const Bytes bytes = tests::bytes_of(whole);
    const EntryRecord record = tests::record_of(whole, end_);
    require(::pwrite(kept_->descriptor, bytes.data, bytes.size, static_cast<off_t>(end_)) ==
                static_cast<ssize_t>(bytes.size),
            "room for an image");
    end_ += bytes.size;
    std::uint64_t end = 0;
    require(kept_->table->extend(&record, 1, &end) && end == end_, "memory for a record");
  }

 private:
  std::mutex lock_;
  std::shared_ptr<KeptImages> kept_;
  std::uint64_t end_ = 0;
};

constexpr std::int64_t kChunkFiles = 3, kRows = 48, kInChunk = 8, kSlots = 4;
constexpr std::int64_t kRowBytes = 600, kChunkBytes = kInChunk * kRowBytes, kChunks = kRows / kInChunk;

// Datasets in chunks, in files that are replaced by others of the same content, or by nothing.
class ChunkFiles {
 public:
  ChunkFiles() {
    const UnitMemory::Shape shape{kChunkFiles * kChunks, kSlots, (kChunkBytes + 63) / 64 * 64};
    memory_.resize(static_cast<std::size_t>(shape.nbytes() + 64));
    units_ = std::make_shared<UnitMemory>(
        memory_.data() + (64 - reinterpret_cast<std::uintptr_t>(memory_.data()) % 64) % 64, -1, shape);
    store_.table = std::make_shared<EntryTable>();
    store_.descriptor = ::memfd_create("soak chunks", 0);
    store_.size = std::int64_t{1} << 40;
    store_.tag = "soak";
    store_.verifies = true;
    for (std::int64_t number = 0; number < kChunkFiles; ++number) {
      paths_.push_back(folder_.path(("chunks " + std::to_string(number)).c_str()));
      contents_.emplace_back();
      for (std::int64_t i = 0; i < kRows * kRowBytes; ++i) {
        contents_.back().push_back(static_cast<std::uint8_t>(i / kRowBytes * 7 + i % 5 + number));
      }
      replace(number);
      describe(number);
    }
  }
  // The dataset as it was described at last; its file may be another one by now.
  std::shared_ptr<const ChunkedDataset> dataset(std::int64_t number) const {
    const std::lock_guard<std::mutex> guard(lock_);
    const std::shared_ptr<Described>& found = datasets_.at(static_cast<std::size_t>(number));
    return {found, &found->set};  // which lives as long as its numbers
  }
  const std::uint8_t* row(std::int64_t number, std::int64_t sample) const {
    return contents_[static_cast<std::size_t>(number)].data() + sample * kRowBytes;
  }
  void change_one(Choices& choices) {
    const std::int64_t number = choices.below(kChunkFiles);
    const std::string& path = paths_[static_cast<std::size_t>(number)];
    switch (choices.below(4)) {
      case 0:
        return static_cast<void>(::unlink(path.c_str()));
      case 1:
        return replace(number);
      default:
        replace(number);
        return describe(number);
    }
  }
  void keep(KeepChunk chunk) {
    const std::lock_guard<std::mutex> guard(lock_);
    const std::int64_t number = chunk.source;
    EntryRecord record;
    record.digest = datasets_.at(static_cast<std::size_t>(number))->set.kept->digest(chunk.chunk);
    record.offset = end_;
    record.nbytes = kChunkBytes;
    record.sum = sum_of({chunk.data.get(), kChunkBytes});
    record.check = check_of(record);
    require(::pwrite(store_.descriptor, chunk.data.get(), kChunkBytes, static_cast<off_t>(end_)) == kChunkBytes,
            "room for a chunk");
    end_ += kChunkBytes;
    std::uint64_t end = 0;
    require(store_.table->extend(&record, 1, &end), "memory for a record");
  }

 private:
  struct Described {
    std::vector<std::int64_t> offsets, sizes;
    std::vector<std::uint32_t> masks;
    ChunkedDataset set;
  };
  static const std::vector<FilterStep>& steps() {
    static const std::vector<FilterStep> steps = {{ChunkFilter::shuffle, 4}, {ChunkFilter::deflate}};
    return steps;
  }
  std::vector<tests::Content> stored(std::int64_t number) const {
    std::vector<tests::Content> chunks;
    for (std::int64_t chunk = 0; chunk < kChunks; ++chunk) {
      const std::uint8_t* begin = row(number, chunk * kInChunk);
      tests::Content content(begin, begin + kChunkBytes);
      for (const FilterStep& step : steps()) content = tests::filtered(content, step);
      chunks.push_back(std::move(content));
    }
    return chunks;
  }
  // By another file, as a script does that writes a new version.
  void replace(std::int64_t number) {
    const std::string path = paths_[static_cast<std::size_t>(number)], beside = path + " new";
    std::FILE* file = std::fopen(beside.c_str(), "wb");
    require(file != nullptr, "a file");
    for (const tests::Content& chunk : stored(number)) {
      require(std::fwrite(chunk.data(), 1, chunk.size(), file) == chunk.size(), "its bytes");
    }
    std::fclose(file);
    require(::rename(beside.c_str(), path.c_str()) == 0, "a new name");
  }
  void describe(std::int64_t number) {
    const auto index = static_cast<std::size_t>(number);
    auto made = std::make_shared<Described>();
    std::int64_t offset = 0;
    for (const tests::Content& chunk : stored(number)) {
      made->offsets.push_back(offset);
      made->sizes.push_back(static_cast<std::int64_t>(chunk.size()));
      made->masks.push_back(0);
      offset += made->sizes.back();
    }
    struct stat facts;
    require(::stat(paths_[index].c_str(), &facts) == 0, "the state of a file");
    ChunkedDataset& set = made->set;
    require(set.grid.set({kRows, kRowBytes / 4}, {kInChunk, kRowBytes / 4}, 4, 1), "a grid");
    set.file = std::make_shared<DataFile>(
        paths_[index],
        DataFile::State{static_cast<std::uint64_t>(facts.st_dev), static_cast<std::uint64_t>(facts.st_ino),
                        facts.st_size, std::int64_t{facts.st_mtim.tv_sec} * 1'000'000'000 + facts.st_mtim.tv_nsec});
    set.offsets = made->offsets.data();
    set.sizes = made->sizes.data();
    set.masks = made->masks.data();
    set.chunks = kChunks;
    set.filters = steps();
    set.fill.assign(4, 0);
    set.memory = units_;
    set.first_key = number * kChunks;
    if (number == 0) {
      KeptStore store = store_;
      set.kept = std::make_shared<KeptChunks>(store, kChunks, kChunkBytes);
    }
    const std::lock_guard<std::mutex> guard(lock_);
    if (datasets_.size() <= index) datasets_.resize(index + 1);
    datasets_[index] = made;
  }

  tests::Folder folder_;
  std::vector<std::string> paths_;
  std::vector<tests::Content> contents_;
  Memory memory_;
  std::shared_ptr<UnitMemory> units_;
  KeptStore store_;
  mutable std::mutex lock_;  // guards what follows
  std::vector<std::shared_ptr<Described>> datasets_;
  std::uint64_t end_ = 0;
};

class Soak {
 public:
  void run(std::int64_t seconds) {
    std::vector<std::thread> threads;
    threads.emplace_back([this] {
      Choices choices({});
      while (!ends_.load()) files_.change_one(choices);
    });
    threads.emplace_back([this] {
      Choices choices({});
      while (!ends_.load()) {
        chunk_files_.change_one(choices);
        timespec moment{0, 2'000'000};
        ::nanosleep(&moment, nullptr);
      }
    });
    threads.emplace_back([this] { watch(); });
    for (std::uint8_t i = 0; i < kSubmitters; ++i) {
      threads.emplace_back([this, i] {
        const std::uint8_t seed[2] = {i, 1};
        submit_until_the_end(Choices({seed, 2}));
      });
    }
    timespec left{static_cast<time_t>(seconds), 0};
    ::nanosleep(&left, nullptr);
    ends_.store(true);
    for (std::thread& thread : threads) thread.join();
    std::printf("%lld batches, %lld cancelled; images: %lld made, %lld of them kept before, %lld declined\n",
                static_cast<long long>(batches_), static_cast<long long>(cancelled_), static_cast<long long>(made_),
                static_cast<long long>(found_), static_cast<long long>(declined_));
    std::printf("rows: %lld made, %lld declined; chunks: %lld kept\n", static_cast<long long>(rows_made_),
                static_cast<long long>(rows_declined_), static_cast<long long>(chunks_kept_));
    require(rows_made_ > 0 && rows_declined_ > 0 && chunks_kept_ > 0, "some of each");
    require(made_ > 0 && found_ > 0 && declined_ > 0 && cancelled_ > 0, "some of each");
    require(engine()->stop(10000), "the end of all threads");
  }

 private:
  std::shared_ptr<Batch> described(Choices& choices) {
    auto batch = std::make_shared<Batch>();
    const std::size_t count = 1 + static_cast<std::size_t>(choices.below(8));
    for (std::size_t i = 0; i < count; ++i) {
      batch->files.push_back(choices.below(kFiles));
      batch->starts.push_back(static_cast<std::int64_t>(batch->names.size()));
      batch->names += files_.path(batch->files.back());
      batch->ends.push_back(static_cast<std::int64_t>(batch->names.size()));
      batch->places.push_back(static_cast<std::int64_t>(i * kBytes));
    }
    batch->statuses.resize(count);
    batch->memory.assign(count * kBytes, kUntouched);
    ImageBatch& work = *batch->work;
    work.plan = plan_;
    work.count = static_cast<std::int64_t>(count);
    work.paths = {{},
                  {reinterpret_cast<const std::uint8_t*>(batch->names.data()), batch->names.size()},
                  batch->starts.data(),
                  batch->ends.data()};
    work.memory = batch->memory.data();
    work.places = batch->places.data();
    work.sample_size = {kSide, kSide};
    work.statuses = batch->statuses.data();
    if (choices.flip()) {
      work.kept = store_.kept();
      work.most_nbytes = 1 << 20;
    }
    require(work.prepare(), "memory");
    return batch;
  }

  // Rows of all files, each of which is a source.
  std::shared_ptr<Batch> described_rows(Choices& choices) {
    auto batch = std::make_shared<Batch>();
    const std::int64_t count = 1 + choices.below(24);
    batch->rows_work = std::make_shared<RowBatch>();
    batch->statuses.resize(static_cast<std::size_t>(count));
    batch->memory.assign(static_cast<std::size_t>(kChunkFiles * count * kRowBytes), kUntouched);
    for (std::int64_t i = 0; i < kChunkFiles * count; ++i) batch->samples.push_back(choices.below(kRows));
    RowBatch& work = *batch->rows_work;
    for (std::int64_t number = 0; number < kChunkFiles; ++number) {
      RowBatch::Source source;
      source.dataset = chunk_files_.dataset(number);
      source.samples = batch->samples.data() + number * count;
      source.count = count;
      source.out = batch->memory.data() + number * count * kRowBytes;
      work.sources.push_back(std::move(source));
    }
    work.statuses = batch->statuses.data();
    work.threads = kThreads;
    work.turn = choices.uniform();
    work.most_keep_nbytes = choices.flip() ? 3 * kChunkBytes : 0;
    require(work.prepare(), "memory");
    return batch;
  }

  void submit_until_the_end(Choices choices) {
    while (!ends_.load()) {
      const auto batch = choices.flip() ? described_rows(choices) : described(choices);
      std::shared_ptr<Work> work = batch->work;
      if (batch->rows_work != nullptr) work = batch->rows_work;
      std::unique_lock<std::mutex> guard(lock_);
      changed_.wait(guard, [this] { return under_way_.size() < kUnderWay; });
      const std::int64_t job = engine()->submit(std::move(work), channel_, kThreads);
      require(job > 0, "a job");
      under_way_[job] = batch;
      ++batches_;
      const int what = choices.below(4);
      if (what == 0) ++cancelled_;
      if (what == 1) changed_.wait(guard, [this, job] { return under_way_.count(job) == 0; });
      guard.unlock();
      if (what == 0) engine()->cancel(job);
    }
    const std::lock_guard<std::mutex> guard(lock_);
    ++ended_;
  }

  // Finish what is done; its memory goes at once.
  void watch() {
    for (;;) {
      const Event event = engine()->next_event(100);
      std::unique_lock<std::mutex> guard(lock_);
      if (event.kind == Event::Kind::none && ended_ == kSubmitters && under_way_.empty()) return;
      if (event.kind != Event::Kind::done) continue;
      const auto found = under_way_.find(event.job);
      require(found != under_way_.end(), "a job that is known");
      const std::shared_ptr<Batch> batch = std::move(found->second);
      under_way_.erase(found);
      check(*batch);
      changed_.notify_all();
    }
  }

  void check_rows(Batch& batch) {
    const auto count = static_cast<std::int64_t>(batch.statuses.size());
    RowBatch& work = *batch.rows_work;
    for (std::int64_t i = 0; work.is_complete() && i < count; ++i) {
      const Status status = batch.statuses[static_cast<std::size_t>(i)];
      require(status.is_made() || status.reason == Reason::unreadable, "a reason");
      (status.is_made() ? rows_made_ : rows_declined_) += 1;
      for (std::int64_t number = 0; status.is_made() && number < kChunkFiles; ++number) {
        const std::int64_t place = number * count + i;
        const std::uint8_t* expected = chunk_files_.row(number, batch.samples[static_cast<std::size_t>(place)]);
        require(std::memcmp(batch.memory.data() + place * kRowBytes, expected, kRowBytes) == 0, "a row");
      }
    }
    for (KeepChunk& chunk : work.take_chunks()) {
      require(chunk.source == 0, "a dataset whose chunks are kept");
      chunk_files_.keep(std::move(chunk));
      ++chunks_kept_;
    }
  }

  void check(Batch& batch) {
    if (batch.rows_work != nullptr) return check_rows(batch);
    for (std::size_t i = 0; i < batch.statuses.size(); ++i) {
      const Status status = batch.statuses[i];
      const std::uint8_t* image = batch.memory.data() + i * kBytes;
      require(status.reason != Reason::internal && status.reason != Reason::no_memory, "a reason");
      made_ += status.is_made() ? 1 : 0;
      found_ += status.reason == Reason::kept ? 1 : 0;
      declined_ += status.outcome == Outcome::declined ? 1 : 0;
      if (status.is_made()) {
        require(files_.is_one_of(batch.files[i], image), "an image of one version of its file");
      } else {
        require(std::count(image, image + kBytes, kUntouched) == static_cast<std::ptrdiff_t>(kBytes), "an empty place");
      }
      const auto item = static_cast<std::int64_t>(i);
      if (batch.work->has_whole(item)) store_.keep(batch.work->take_whole(item));
    }
  }

  const std::shared_ptr<const ImagePlan> plan_ = resizing_plan();
  const std::shared_ptr<Channel> channel_ = std::make_shared<Channel>(kThreads);
  Files files_;
  ChunkFiles chunk_files_;
  Store store_;
  std::atomic<bool> ends_{false};
  std::mutex lock_;  // guards all below
  std::condition_variable changed_;
  std::map<std::int64_t, std::shared_ptr<Batch>> under_way_;
  int ended_ = 0;
  std::int64_t batches_ = 0, cancelled_ = 0, made_ = 0, found_ = 0, declined_ = 0;
  std::int64_t rows_made_ = 0, rows_declined_ = 0, chunks_kept_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  Soak().run(argc > 1 ? std::atoi(argv[1]) : 60);
  return 0;
}
