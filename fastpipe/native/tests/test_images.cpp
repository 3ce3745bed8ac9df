// Batches of images: in threads, from files and from memory; what is declined, and why.
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "../images.h"
#include "check.h"
#include "folder.h"
#include "make_jpeg.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::tests;

constexpr std::int32_t kSide = 32;
constexpr std::int64_t kNumbers = 23;  // that a sample of the plan below draws

std::shared_ptr<ImagePlan> training_plan() {
  auto plan = std::make_shared<ImagePlan>();
  Step crop, flip;
  crop.kind = Step::Kind::random_resized_crop;
  crop.size = {kSide, kSide};
  crop.filter = kBilinear;
  crop.scale[0] = 0.08;
  crop.ratio[0] = 0.75;
  crop.ratio[1] = 4.0 / 3;
  flip.kind = Step::Kind::flip;
  flip.draw = 22;
  flip.probability = 0.5;
  plan->steps = {crop, flip};
  plan->how.kind = Conversion::Kind::affine;
  plan->how.word = 4;
  plan->draws = kNumbers;
  return plan;
}

// A batch with all that it points to.
struct Made {
  std::shared_ptr<ImageBatch> work = std::make_shared<ImageBatch>();
  std::vector<ImageInput> inputs;
  std::vector<double> parameters;
  std::vector<std::uint8_t> memory;
  std::vector<std::int64_t> places, starts, ends;
  std::vector<Status> statuses;
  std::string arena;

  explicit Made(std::size_t count, std::shared_ptr<ImagePlan> plan = training_plan(), bool has_memory = true) {
    const std::size_t each = std::size_t{kSide} * kSide * 3 * static_cast<std::size_t>(plan->how.word);
    inputs.resize(count);
    for (std::size_t i = 0; i < count * kNumbers; ++i) parameters.push_back(random_below(1000) / 1000.0);
    for (std::size_t i = 0; i < count; ++i) places.push_back(static_cast<std::int64_t>(i * each));
    memory.resize(has_memory ? count * each : 0);
    starts.resize(count);
    ends.resize(count);
    statuses.resize(count);
    work->plan = std::move(plan);
    work->count = static_cast<std::int64_t>(count);
    work->parameters = parameters.data();
    work->places = places.data();
    work->memory = has_memory ? memory.data() : nullptr;
    work->sample_size = {kSide, kSide};
    work->statuses = statuses.data();
    work->inputs = inputs.data();
  }

  void path(std::size_t item, const std::string& path) {
    starts[item] = static_cast<std::int64_t>(arena.size());
    arena += path;
    ends[item] = static_cast<std::int64_t>(arena.size());
  }

  void begin() {
    work->paths = {{}, {reinterpret_cast<const std::uint8_t*>(arena.data()), arena.size()}, starts.data(), ends.data()};
    CHECK(work->prepare());
  }

  void run() {
    begin();
    run_here(*work);
  }
};

ImageInput input_of(const File& file) { return {false, file.data(), static_cast<std::int64_t>(file.size()), 0, 0}; }

void wait_for(std::set<std::int64_t> jobs) {
  while (!jobs.empty()) {
    const Event event = engine()->next_event(10000);
    CHECK(event.kind != Event::Kind::none);
    if (event.kind == Event::Kind::none) return;
    if (event.kind == Event::Kind::done) jobs.erase(event.job);
  }
}

}  // namespace

TEST("images: threads make what one thread makes, in batches under way at once") {
  std::vector<File> files;
  for (int i = 0; i < 8; ++i) files.push_back(encoded({60 + 13 * i, 90 - 7 * i}, Kind{}));
  std::vector<std::unique_ptr<Made>> batches;
  std::set<std::int64_t> jobs;
  auto channel = std::make_shared<Channel>(4);
  for (int number = 0; number < 6; ++number) {
    batches.push_back(std::make_unique<Made>(20));
    Made& batch = *batches.back();
    for (std::size_t i = 0; i < 20; ++i) batch.inputs[i] = input_of(files[i % files.size()]);
    batch.begin();
    jobs.insert(engine()->submit(batch.work, channel, 4));
  }
  wait_for(jobs);
  for (const auto& batch : batches) {
    for (const Status& status : batch->statuses) CHECK(status.is_made());
    const std::vector<std::uint8_t> by_threads = batch->memory;
    std::memset(batch->memory.data(), 0, batch->memory.size());
    run_here(*batch->work);
    CHECK(by_threads == batch->memory);
    CHECK(batch->work->totals.images == 40);
  }
}

TEST("images: a file is read by its path, with the common beginning or without") {
  const File file = encoded({70, 80}, Kind{});
  Folder folder;
  const std::string path = folder.write("a.jpg", file);
  Made batch(5);
  std::copy(batch.parameters.begin(), batch.parameters.begin() + kNumbers, batch.parameters.begin() + kNumbers);
  batch.path(0, path);
  batch.inputs[1] = input_of(file);
  batch.path(2, folder.path("none.jpg"));
  batch.path(3, folder.path("."));
  batch.path(4, path + std::string(1, '\0') + "x");
  batch.run();
  const std::size_t each = batch.memory.size() / 5;
  CHECK(batch.statuses[0].is_made() && batch.statuses[1].is_made());
  CHECK(std::memcmp(batch.memory.data(), batch.memory.data() + each, each) == 0);
  for (std::size_t i : {2u, 3u, 4u}) {
    CHECK(batch.statuses[i].outcome == Outcome::declined && batch.statuses[i].reason == Reason::unreadable);
  }
}

TEST("images: what is declined says why, and nothing else of the batch suffers") {
  const File good = encoded({50, 50}, Kind{});
  File cut = good, text = {'n', 'o', ' ', 'i', 'm', 'a', 'g', 'e'};
  cut.resize(cut.size() / 2);
  auto plan = training_plan();
  plan->max_pixels = 50 * 50;
  const File large = encoded({51, 50}, Kind{});
  Made batch(6, plan);
  batch.inputs[0] = input_of(good);
  batch.inputs[1] = input_of(cut);
  batch.inputs[2] = input_of(text);
  batch.inputs[3] = input_of(large);
  batch.inputs[4].is_left = true;
  batch.inputs[5] = input_of(good);
  batch.run();
  CHECK(batch.statuses[0].is_made() && batch.statuses[5].is_made());
  CHECK(batch.statuses[1].reason == Reason::untrusted);
  CHECK(batch.statuses[2].reason == Reason::not_jpeg);
  CHECK(batch.statuses[3].reason == Reason::too_large);
  CHECK(batch.statuses[4].reason == Reason::asked);
}

TEST("images: pixels that are in memory are resampled as those of a file") {
  const Size size{64, 48};
  std::vector<std::uint8_t> pixels(static_cast<std::size_t>(size.height * size.width * 3));
  for (std::uint8_t& byte : pixels) byte = static_cast<std::uint8_t>(random_below(256));
  Made batch(2);
  std::copy(batch.parameters.begin(), batch.parameters.begin() + kNumbers, batch.parameters.begin() + kNumbers);
  for (ImageInput& input : batch.inputs) input = {false, pixels.data(), 0, size.height, size.width};
  batch.run();
  const std::size_t each = batch.memory.size() / 2;
  CHECK(batch.statuses[0].is_made() && batch.statuses[1].is_made());
  CHECK(std::memcmp(batch.memory.data(), batch.memory.data() + each, each) == 0);
}

TEST("images: of no fixed size, each lies in memory of its own, with its file") {
  auto plan = std::make_shared<ImagePlan>();
  plan->how.interleaved = true;
  plan->draws = kNumbers;
  const File one = encoded({33, 21}, Kind{}), other = encoded({5, 64}, Kind{});
  Made batch(3, plan, false);
  batch.inputs[0] = input_of(one);
  batch.inputs[1] = input_of(other);
  batch.inputs[2].is_left = true;
  batch.work->keeps_files = true;
  batch.run();
  MadeImage image = batch.work->take_image(0), file = batch.work->take_file(1);
  CHECK(image.height == 33 && image.width == 21 && image.size == 33 * 21 * 3 && image.data != nullptr);
  CHECK(static_cast<std::size_t>(file.size) == other.size());
  CHECK(file.data != nullptr && std::memcmp(file.data.get(), other.data(), other.size()) == 0);
  CHECK(batch.work->take_image(0).data == nullptr);  // once
  CHECK(batch.work->take_image(2).data == nullptr);  // declined
}

TEST("images: one that folds to another size than the batch's is declined") {
  auto plan = std::make_shared<ImagePlan>();
  plan->how.kind = Conversion::Kind::affine;
  plan->how.word = 4;
  plan->draws = kNumbers;
  const File as_is = encoded({kSide, kSide}, Kind{}), larger = encoded({kSide, kSide + 1}, Kind{});
  Made batch(2, plan);
  batch.inputs[0] = input_of(as_is);
  batch.inputs[1] = input_of(larger);
  batch.run();
  CHECK(batch.statuses[0].is_made());
  CHECK(batch.statuses[1].reason == Reason::not_folded);
}
