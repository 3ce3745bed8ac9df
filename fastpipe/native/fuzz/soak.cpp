// A soak of the engine: 64 threads make small batches of files that are rewritten, cut and removed meanwhile; batches
// are cancelled, waited for and dropped at random, and images are kept and found again.  core_soak [seconds]
//
// Each image that is made is that of one version of its file, and what was cancelled is not written.
#include <sys/mman.h>
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

#include "../images.h"
#include "../tests/folder.h"
#include "../tests/make_jpeg.h"
#include "../tests/record_of.h"
#include "fuzz.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::fuzz;
using Memory = std::vector<std::uint8_t>;

constexpr int kThreads = 64, kSubmitters = 4, kFiles = 24, kVersions = 2, kUnderWay = 12;
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

// A batch and all that it points to, which is given back when the batch is done, however that came.
struct Batch {
  std::shared_ptr<ImageBatch> work = std::make_shared<ImageBatch>();
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
    const int number = choices.below(kFiles), version = choices.below(kVersions);
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

class Soak {
 public:
  void run(std::int64_t seconds) {
    std::vector<std::thread> threads;
    threads.emplace_back([this] {
      Choices choices({});
      while (!ends_.load()) files_.change_one(choices);
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

  void submit_until_the_end(Choices choices) {
    while (!ends_.load()) {
      const auto batch = described(choices);
      std::unique_lock<std::mutex> guard(lock_);
      changed_.wait(guard, [this] { return under_way_.size() < kUnderWay; });
      const std::int64_t job = engine()->submit(batch->work, channel_, kThreads);
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

  void check(Batch& batch) {
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
  Store store_;
  std::atomic<bool> ends_{false};
  std::mutex lock_;  // guards all below
  std::condition_variable changed_;
  std::map<std::int64_t, std::shared_ptr<Batch>> under_way_;
  int ended_ = 0;
  std::int64_t batches_ = 0, cancelled_ = 0, made_ = 0, found_ = 0, declined_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  Soak().run(argc > 1 ? std::atoi(argv[1]) : 60);
  return 0;
}
