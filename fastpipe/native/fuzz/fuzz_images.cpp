// Fuzzes an item of a batch: a file that is read or lies in memory, and a random plan.
//
// Invariants: an item is made or declined, the same each time; one that is made writes all of its place and nothing
// else; from pixels, and from where it is kept, it gives what it gives from the file; items beside it do not depend on
// it.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "../convert.h"
#include "../images.h"
#include "../tests/make_jpeg.h"
#include "../tests/record_of.h"
#include "fuzz.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::fuzz;

constexpr std::size_t kDraws = 23 * 4;  // numbers of up to four steps

Step random_step(Choices& choices, std::int32_t draw) {
  Step step;
  step.kind = static_cast<Step::Kind>(choices.below(6));
  step.draw = draw;
  step.size = {1 + choices.below(60), 1 + choices.below(60)};
  step.filter = choices.below(9) + (choices.below(4) == 0 ? kNarrow : 0);
  step.order = static_cast<PassOrder>(choices.below(3));
  step.scale[0] = 0.05 + 0.9 * choices.uniform();
  step.ratio[0] = 0.5;
  step.ratio[1] = 2;
  if (step.kind == Step::Kind::resize && choices.flip()) {
    step.size.width = 0;
    step.max_size = choices.flip() ? 40 : 0;
  }
  for (std::int32_t& side : step.padding) side = choices.below(4) == 0 ? choices.below(30) : 0;
  step.pad_if_needed = choices.flip();
  step.fill[1] = 77;
  step.probability = 0.5;
  step.horizontal = choices.flip();
  step.channels = choices.flip() ? 1 : 3;
  return step;
}

std::shared_ptr<ImagePlan> random_plan(Choices& choices, ConversionTables* tables) {
  static std::uint8_t table[256 * 3 * 8];
  auto plan = std::make_shared<ImagePlan>();
  const std::int32_t count = choices.below(5);
  bool is_grey = false;
  for (std::int32_t i = 0; i < count; ++i) {
    plan->steps.push_back(random_step(choices, 23 * i));
    const Step& step = plan->steps.back();
    is_grey = is_grey || (step.kind == Step::Kind::grey && step.channels == 1);
  }
  plan->how.kind = static_cast<Conversion::Kind>(choices.below(3));
  plan->how.channels = is_grey ? 1 : 3;
  plan->how.interleaved = choices.flip();
  plan->how.divide = choices.flip();
  if (plan->how.kind == Conversion::Kind::affine) plan->how.word = 4;
  if (plan->how.kind == Conversion::Kind::table) plan->how.word = 1 << choices.below(4);
  plan->how.table = table;
  make_tables(plan->how, tables);
  plan->how.tables = tables;
  plan->draws = static_cast<std::int32_t>(kDraws);
  plan->turns = choices.flip();
  plan->scaled = choices.below(4) == 0;
  plan->max_pixels = choices.below(4) == 0 ? 5000 : kMostPixels;
  if (choices.below(4) == 0) {
    Step shrink;
    shrink.size = {8 + choices.below(60), 0};
    shrink.filter = kBilinear;
    plan->shrink = {shrink};
  }
  return plan;
}

// A batch of one item or of several, which the calling thread makes.
struct Batch {
  ImageBatch work;
  std::vector<std::int64_t> starts, ends, places;
  std::vector<Status> statuses;

  Batch(const std::shared_ptr<ImagePlan>& plan, std::vector<ImageInput>& inputs, const std::vector<double>& numbers,
        const std::string& path)
      : starts(inputs.size()), ends(inputs.size(), static_cast<std::int64_t>(path.size())), statuses(inputs.size()) {
    work.plan = plan;
    work.count = static_cast<std::int64_t>(inputs.size());
    work.paths = {{}, {reinterpret_cast<const std::uint8_t*>(path.data()), path.size()}, starts.data(), ends.data()};
    work.inputs = inputs.data();
    work.parameters = numbers.data();
    work.statuses = statuses.data();
  }
  void into(std::vector<std::uint8_t>& memory, Size size) {
    for (std::size_t i = 0; i < statuses.size(); ++i) {
      places.push_back(static_cast<std::int64_t>(memory.size() / statuses.size() * i));
    }
    work.places = places.data();
    work.memory = memory.data();
    work.sample_size = size;
  }
  void run() {
    require(work.prepare(), "memory");
    run_here(work);
    for (const Status& status : statuses) {
      require(status.outcome == Outcome::made || status.outcome == Outcome::declined, "an outcome");
      require(status.reason != Reason::internal &&
                  status.is_made() == (status.reason == Reason::none || status.reason == Reason::kept),
              "a reason");
    }
  }
};

using Memory = std::vector<std::uint8_t>;

bool is_filled_with(const Memory& memory, std::uint8_t byte) {
  return std::all_of(memory.begin(), memory.end(), [byte](std::uint8_t one) { return one == byte; });
}

const tests::File& good_file() {
  static const tests::File file = tests::encoded({41, 52}, {});
  return file;
}

ImageInput input_of(Bytes file) { return {false, file.data, static_cast<std::int64_t>(file.size)}; }

// All that decides what becomes of an item.
struct Item {
  Bytes file;
  JpegHeader header;
  std::shared_ptr<ImagePlan> plan;
  std::vector<double> numbers;  // the same for each item of a batch
  std::string path;             // holds the file's bytes
  bool by_path;
  ImageInput input() const { return by_path ? ImageInput{} : input_of(file); }
};

bool same_image(const MadeImage& one, const MadeImage& other) {
  if (one.size != other.size || one.height != other.height || one.width != other.width) return false;
  return one.size == 0 || std::memcmp(one.data.get(), other.data.get(), static_cast<std::size_t>(one.size)) == 0;
}

// What is made of a good file is the same alone, and before and after this one.
void check_neighbours(const Item& item, const Status& status) {
  const tests::File& file = good_file();
  const ImageInput good = input_of({file.data(), file.size()});
  std::vector<ImageInput> one{good}, three{good, item.input(), good};
  Batch alone(item.plan, one, item.numbers, item.path), beside(item.plan, three, item.numbers, item.path);
  alone.run();
  beside.run();
  require(same(beside.statuses[1], status), "the status of the same file");
  const MadeImage expected = alone.work.take_image(0);
  for (const int place : {0, 2}) {
    require(same(beside.statuses[static_cast<std::size_t>(place)], alone.statuses[0]), "a neighbour's status");
    if (alone.statuses[0].is_made()) require(same_image(beside.work.take_image(place), expected), "a neighbour");
  }
}

// A place is written completely, whatever was there, or not at all if its size is another.
void check_places(const Item& item, Size size, const Memory& expected) {
  std::vector<ImageInput> inputs{item.input()};
  for (const std::uint8_t before : {std::uint8_t{0x55}, std::uint8_t{0xAA}}) {
    Memory memory(expected.size(), before), untouched(expected.size(), before);
    Batch placed(item.plan, inputs, item.numbers, item.path), other(item.plan, inputs, item.numbers, item.path);
    placed.into(memory, size);
    placed.run();
    require(placed.statuses[0].is_made() && memory == expected, "the same in its place");
    other.into(untouched, {size.height + 1, size.width});
    other.run();
    require(other.statuses[0].reason == Reason::not_folded && is_filled_with(untouched, before), "another size");
  }
}

// A whole image that is kept, and found again, gives the same as the file.
void check_kept(const Item& item, Size size, const Memory& expected) {
  static const int descriptor = ::memfd_create("kept", 0);
  auto kept = std::make_shared<KeptImages>();
  kept->table = std::make_shared<EntryTable>();
  kept->descriptor = descriptor;
  kept->size = 3 * kMostPixels;
  kept->verifies = true;
  std::vector<ImageInput> inputs{{}};
  FileState state;
  state.is_settled = true;
  for (const bool is_there : {false, true}) {
    Memory memory(expected.size());
    Batch batch(item.plan, inputs, item.numbers, item.path);
    batch.into(memory, size);
    batch.work.kept = kept;
    batch.work.states = &state;
    batch.work.most_nbytes = kept->size;
    batch.run();
    // All of the image is decoded then, and damage may lie where nothing was needed.
    if (!is_there && batch.statuses[0].reason == Reason::damaged) return;
    require(batch.statuses[0].is_made() && memory == expected, "the same where images are kept");
    require((batch.statuses[0].reason == Reason::kept) == is_there, "kept the first time, found the second time");
    require(batch.work.has_whole(0) != is_there, "a whole image to be kept");
    if (is_there) return;
    const WholeImage whole = batch.work.take_whole(0);
    const Bytes bytes = tests::bytes_of(whole);
    require(bytes.size == std::size_t{3} * static_cast<std::size_t>(whole.image.height * whole.image.width), "a size");
    const EntryRecord record = tests::record_of(whole, 0);
    require(::pwrite(descriptor, bytes.data, bytes.size, 0) == static_cast<ssize_t>(bytes.size), "room for an image");
    std::uint64_t end;
    require(kept->table->extend(&record, 1, &end), "memory for a record");
  }
}

// A resize of the shorter side makes an enormous image of one that is long and thin.
bool is_small(const Item& item) {
  for (const Size size : {Size{item.header.height, item.header.width}, Size{41, 52}}) {
    Region region;
    if (!fold(item.plan->steps, size, item.numbers.data(), &region)) continue;
    if (std::int64_t{region.window.height} * region.window.width > kMostPixels) return false;
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const int descriptor = ::memfd_create("fuzz", 0);
  static ConversionTables tables;
  Item item{{data, size}, read_jpeg_header({data, size}), nullptr, {}, "", false};
  if (std::int64_t{item.header.height} * item.header.width > kMostPixels) return 0;
  Choices choices(item.file);
  item.plan = random_plan(choices, &tables);
  for (std::size_t i = 0; i < 3 * kDraws; ++i) {  // the same for each of up to three items
    item.numbers.push_back(i < kDraws ? choices.uniform() : item.numbers[i - kDraws]);
  }
  item.path = "/proc/self/fd/" + std::to_string(descriptor);
  item.by_path = choices.flip();
  if (!is_small(item)) return 0;
  if (item.by_path) {
    require(::ftruncate(descriptor, 0) == 0, "an empty file");
    require(::pwrite(descriptor, data, size, 0) == static_cast<ssize_t>(size), "a file");
  }

  std::vector<ImageInput> inputs{item.input()};
  Batch batch(item.plan, inputs, item.numbers, item.path);
  batch.work.keeps_files = choices.flip();
  batch.run();
  const Status status = batch.statuses[0];
  const MadeImage image = batch.work.take_image(0);
  check_neighbours(item, status);
  if (!status.is_made()) return 0;
  require(item.header.trusted, "an image of a file that is not trusted");
  const std::int64_t each = std::int64_t{item.plan->how.channels} * item.plan->how.word;
  require(image.size == image.height * image.width * each, "the size of an image");
  if (batch.work.keeps_files) {
    const MadeImage file = batch.work.take_file(0);
    require(static_cast<std::size_t>(file.size) == size && std::memcmp(file.data.get(), data, size) == 0, "its file");
  }
  const Memory expected(image.data.get(), image.data.get() + image.size);
  check_places(item, {image.height, image.width}, expected);
  if (item.by_path && !item.plan->scaled) check_kept(item, {image.height, image.width}, expected);
  return 0;
}
