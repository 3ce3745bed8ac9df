// Batches of images: in threads, from files and from memory; what is declined, and why.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "../images.h"
#include "check.h"
#include "folder.h"
#include "make_jpeg.h"
#include "record_of.h"

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

ImageInput input_of(const File& file) { return {false, file.data(), static_cast<std::int64_t>(file.size())}; }

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
  CHECK(batch.statuses[2].reason == Reason::unknown_format);
  CHECK(batch.statuses[3].reason == Reason::too_large);
  CHECK(batch.statuses[4].reason == Reason::asked);
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

namespace {

// A store with one image file, whose whole pixels a batch gives to be kept.
struct Store {
  Folder folder;
  std::string data = folder.write("data", {});
  std::shared_ptr<KeptImages> kept = std::make_shared<KeptImages>();

  Store() {
    kept->table = std::make_shared<EntryTable>();
    kept->descriptor = ::open(data.c_str(), O_RDWR | O_CLOEXEC);
    kept->tag = "pixels";
    kept->verifies = true;
  }
  ~Store() { ::close(kept->descriptor); }

  void put(const WholeImage& whole) {
    const std::int64_t offset = kept->size;
    CHECK(::pwrite(kept->descriptor, whole.image.data.get(), static_cast<std::size_t>(whole.image.size), offset) ==
          whole.image.size);
    kept->size += whole.image.size;
    const EntryRecord record = record_of(whole, static_cast<std::uint64_t>(offset));
    std::uint64_t end = 0;
    CHECK(kept->table->extend(&record, 1, &end));
  }
};

void age(const std::string& path) {  // a state is settled some time after it was made
  FileState state;
  do {
    CHECK(state_of_file(path.c_str(), &state));
    ::usleep(1000);
  } while (!state.is_settled);
}

}  // namespace

TEST("images: a kept image gives what its file gives, made smaller first or not") {
  for (const std::int32_t side : {0, 40}) {
    Store store;
    const std::string path = store.folder.write("a.jpg", encoded({90, 70}, Kind{}));
    age(path);
    auto plan = training_plan();
    if (side > 0) {
      Step shrink;
      shrink.kind = Step::Kind::resize;
      shrink.filter = kBilinear;
      shrink.size = {side, 0};
      plan->shrink = {shrink};
    }
    std::vector<std::vector<std::uint8_t>> made;
    for (int round = 0; round < 3; ++round) {
      Made batch(1, plan);
      batch.parameters.assign(kNumbers, 0.4);
      batch.path(0, path);
      if (round > 0) {
        batch.work->kept = store.kept;
        batch.work->most_nbytes = 1 << 20;
      }
      batch.run();
      CHECK(batch.statuses[0].is_made());
      CHECK((batch.statuses[0].reason == Reason::kept) == (round == 2));
      CHECK(batch.work->has_whole(0) == (round == 1));
      if (round == 1) {
        const WholeImage whole = batch.work->take_whole(0);
        CHECK(whole.file_pixels == 90 * 70 && whole.image.width == (side > 0 ? side : 70));
        store.put(whole);
      }
      made.push_back(batch.memory);
    }
    CHECK(made[0] == made[1] && made[1] == made[2]);
  }
}

TEST("images: what a store says of an image is not relied on") {
  Store store;
  const std::string path = store.folder.write("a.jpg", encoded({50, 60}, Kind{}));
  age(path);
  const auto looked = [&](std::int64_t most_pixels) {
    auto plan = training_plan();
    plan->max_pixels = most_pixels;
    Made batch(1, plan);
    batch.path(0, path);
    batch.work->kept = store.kept;
    batch.work->most_nbytes = 1 << 20;
    batch.run();
    if (batch.work->has_whole(0)) store.put(batch.work->take_whole(0));
    return batch.statuses[0];
  };
  CHECK(looked(-1).is_made());
  CHECK(looked(-1).reason == Reason::kept);
  CHECK(looked(50 * 60 - 1).reason == Reason::asked);  // its file has more
  const std::int64_t size = store.kept->size;
  store.kept->size = size - 1;
  CHECK(looked(-1).reason == Reason::none);  // it reaches beyond the data, and is kept once more
  CHECK(looked(-1).reason == Reason::kept);
  CHECK(::ftruncate(store.kept->descriptor, size) == 0);
  CHECK(looked(-1).reason == Reason::asked);  // its bytes are not there
}

namespace {

// A grey JPEG of one block, whose DC coefficient is larger than decode_pixels() takes.
File with_large_dc() {
  File file{0xFF, 0xD8};
  const auto segment = [&file](std::uint8_t marker, const File& body) {
    file.insert(file.end(), {0xFF, marker, 0, static_cast<std::uint8_t>(body.size() + 2)});
    file.insert(file.end(), body.begin(), body.end());
  };
  File steps(65, 1), codes(18, 0);
  steps[0] = 0;
  codes[1] = 1;  // one code, of one bit
  segment(0xDB, steps);
  segment(0xC0, {8, 0, 8, 0, 8, 1, 1, 0x11, 0});
  codes[17] = 12;  // of a DC difference of 12 bits
  segment(0xC4, codes);
  codes[0] = 0x10;
  codes[17] = 0;  // of a block's end
  segment(0xC4, codes);
  segment(0xDA, {1, 1, 0, 0, 63, 0});
  file.insert(file.end(), {0x5D, 0xC3, 0xFF, 0xD9});  // 3000
  return file;
}

}  // namespace

TEST("images: coefficients that libjpeg has to decode are not kept") {
  Store store;
  store.kept->form = KeptForm::coefficients;
  const std::string path = store.folder.write("a.jpg", with_large_dc());
  age(path);
  std::vector<std::uint8_t> expected;
  for (const bool is_kept : {false, true, true}) {
    Made batch(1);
    batch.parameters.assign(kNumbers, 0.4);
    batch.path(0, path);
    if (is_kept) {
      batch.work->kept = store.kept;
      batch.work->most_nbytes = 1 << 20;
    }
    batch.run();
    CHECK(batch.statuses[0].is_made() && batch.statuses[0].reason == Reason::none);
    CHECK(!batch.work->has_whole(0));
    CHECK(expected.empty() || batch.memory == expected);
    expected = batch.memory;
  }
}

TEST("images: a damaged entry is kept once more, in each form") {
  for (const KeptForm form : {KeptForm::pixels, KeptForm::coefficients, KeptForm::index}) {
    Store store;
    store.kept->form = form;
    const std::string path = store.folder.write("a.jpg", encoded({90, 70}, Kind{}));
    age(path);
    std::vector<std::uint8_t> expected;
    for (int round = 0; round < 3; ++round) {
      Made batch(1);
      batch.parameters.assign(kNumbers, 0.4);
      batch.path(0, path);
      batch.work->kept = store.kept;
      batch.work->most_nbytes = 1 << 20;
      batch.run();
      CHECK(batch.statuses[0].is_made());
      CHECK((batch.statuses[0].reason == Reason::kept) == (round == 2));
      CHECK(batch.work->has_whole(0) == (round < 2));
      if (round < 2) store.put(batch.work->take_whole(0));
      const std::uint8_t spoilt[4] = {1, 2, 3, 4};
      if (round == 0) CHECK(::pwrite(store.kept->descriptor, spoilt, sizeof spoilt, 8) == sizeof spoilt);
      CHECK(round == 0 || batch.memory == expected);
      expected = batch.memory;
    }
  }
}

TEST("images: at a part of the size, from a file, its index and its coefficients") {
  Scratch scratch;
  const auto plan = training_plan();
  int reduced = 0;
  for (int i = 0; i < 60; ++i) {
    const File file = encoded({300 + 7 * i, 500 - 3 * i}, Kind{});
    const Bytes bytes{file.data(), file.size()};
    double numbers[kNumbers];
    for (double& number : numbers) number = random_below(1000) / 1000.0;
    ImageSource source;
    source.size = {300 + 7 * i, 500 - 3 * i};
    source.file = bytes;
    Region region;
    CHECK(fold(plan->steps, source.size, numbers, &region));
    reduced += reduction(region, source.size) > 1 ? 1 : 0;
    Bytes entry;
    CHECK(scratch.jpeg.pack(bytes, scratch.arena, &entry).is_made());
    KeptCoefficients coefficients;
    CHECK(coefficients.open(entry));
    ImageSource indexed = source, kept = source;
    source.index.made = &indexed.index.known;
    kept.file = {};
    kept.coefficients = &coefficients;
    const std::size_t nbytes = sizeof(float) * 3 * kSide * kSide;
    std::vector<std::uint8_t> expected(nbytes), found(nbytes);
    CHECK(draw(region, source, plan->how, true, scratch, expected.data(), nullptr).is_made());
    CHECK(indexed.index.known.data != nullptr);
    for (const ImageSource* other : {&indexed, &kept}) {
      CHECK(draw(region, *other, plan->how, true, scratch, found.data(), nullptr).is_made());
      CHECK(found == expected);
    }
    scratch.arena.reset();
  }
  CHECK(reduced > 20);
}

TEST("images: TensorFlow's samples are scaled, kept as they are before, and found so") {
  Store store;
  const std::string path = store.folder.write("a.jpg", encoded({90, 70}, Kind{}));
  age(path);
  for (const Parity parity : {Parity::pillow, Parity::tensorflow_bilinear}) {
    auto plan = std::make_shared<ImagePlan>();
    Step resize;
    resize.kind = Step::Kind::resize;
    resize.size = {kSide, kSide};
    resize.filter = kBilinear;
    Step box;
    box.kind = Step::Kind::box;
    plan->steps = {box, resize};
    plan->how.interleaved = true;
    plan->draws = 4;
    plan->parity = parity;
    plan->keeps_samples = true;
    const bool is_pillow = parity == Parity::pillow;
    store.kept->tag = is_pillow ? "Pillow's" : "TensorFlow's";
    plan->scaling = {is_pillow ? Scaling::Kind::bytes_to_floats : Scaling::Kind::floats_to_floats, 1.0f / 255.0f, 0};
    CHECK(word_before(*plan) == (is_pillow ? 1 : 4) && word_after(*plan) == 4);
    std::vector<std::vector<std::uint8_t>> made;
    for (int round = 0; round < 3; ++round) {
      Made batch(2, plan);
      batch.parameters = {3, 4, 60, 80, 3, 4, 61, 80};  // two boxes of the same file
      batch.memory.assign(std::size_t{2} * kSide * kSide * 3 * 4, 0);
      batch.places = {0, kSide * kSide * 3 * 4};
      batch.work->memory = batch.memory.data();
      batch.path(0, path);
      batch.path(1, path);
      if (round > 0) {
        batch.work->kept = store.kept;
        batch.work->most_nbytes = 1 << 20;
      }
      batch.run();
      for (std::size_t i = 0; i < 2; ++i) {
        CHECK(batch.statuses[i].is_made());
        CHECK((batch.statuses[i].reason == Reason::kept) == (round == 2));
        if (round == 1) store.put(batch.work->take_whole(static_cast<std::int64_t>(i)));
      }
      made.push_back(batch.memory);
    }
    CHECK(made[0] == made[1] && made[1] == made[2]);
    CHECK(std::memcmp(made[0].data(), made[0].data() + kSide * kSide * 3 * 4, kSide * kSide * 3 * 4) != 0);
  }
}
