// Resampling against a plain re-implementation, one pixel at a time, and against what Pillow made.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../convert.h"
#include "../resample.h"
#include "check.h"

namespace {

using namespace fastpipe;

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  std::uint32_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<std::uint32_t>(state_ >> 32);
  }
  std::int32_t between(std::int32_t low, std::int32_t high) {
    return low + static_cast<std::int32_t>(next() % static_cast<std::uint32_t>(high - low + 1));
  }
  bool chance(int percent) { return between(0, 99) < percent; }

 private:
  std::uint64_t state_;
};

// ---- the oracle: weights

double filter_at(int mode, double x) {
  const auto sinc = [](double v) { return v == 0 ? 1.0 : std::sin(v * M_PI) / (v * M_PI); };
  switch (mode) {
    case kBox:
      return x > -0.5 && x <= 0.5 ? 1 : 0;
    case kLanczos:
      return x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0;
    default:
      break;
  }
  x = std::fabs(x);
  if (mode == kBilinear || mode == kSharpBilinear) return x < 1 ? 1 - x : 0;
  if (mode == kHamming) {
    if (x == 0) return 1;
    return x >= 1 ? 0 : sinc(x) * (double{0.54f} + double{0.46f} * std::cos(x * M_PI));
  }
  const double a = mode == kSharpBicubic ? -0.75 : -0.5;
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  if (x < 2) return (((x - 5) * x + 8) * x - 4) * a;
  return 0;
}

// Inputs of one output, beginning with pixel `first`.
struct Inputs {
  int first = 0;
  std::vector<double> exact;
  std::vector<std::int64_t> weights;
};

struct Resize {
  int filter, in_size, out_size;
  double start, extent;
};

Inputs inputs_of(const Resize& r, int output) {
  const int mode = r.filter & 15;
  const double support[] = {0.5, 1, 1, 2, 3, 0.5, 0.5, 1, 2};
  const double scale = r.extent / r.out_size;
  Inputs found;
  if (mode == kNearest || mode == kNearestFloor) {
    double place = 0.5 * scale;
    for (int i = 0; i < output; ++i) place += scale;
    found.first = std::min(static_cast<int>(mode == kNearest ? place : output * scale), r.in_size - 1);
    found.exact = {1};
    return found;
  }
  const double center = r.start + (output + 0.5) * scale;
  if (mode == kSharpBilinear || mode == kSharpBicubic) {
    const int reach = static_cast<int>(support[mode]);
    const int left = static_cast<int>(std::floor(center - 0.5)) - reach + 1;
    found.first = std::min(std::max(left, 0), r.in_size - 1);
    for (int x = left; x < left + 2 * reach; ++x) {
      const auto place = static_cast<std::size_t>(std::min(std::max(x, 0), r.in_size - 1) - found.first);
      if (found.exact.size() <= place) found.exact.resize(place + 1);
      found.exact[place] += filter_at(mode, x + 0.5 - center);
    }
    return found;
  }
  const double stretch = std::max(scale, 1.0), reach = support[mode] * stretch;
  found.first = std::max(static_cast<int>(center - reach + 0.5), 0);
  const int end = std::min(static_cast<int>(center + reach + 0.5), r.in_size);
  double total = 0;
  for (int x = found.first; x < end; ++x) {
    found.exact.push_back(filter_at(mode, (x - center + 0.5) * (1 / stretch)));
    total += found.exact.back();
  }
  if (total != 0) {
    for (double& weight : found.exact) weight /= total;
  }
  return found;
}

// What an Axis describes.
struct AxisCase {
  int filter = 0;
  std::int32_t in_size = 1, out_size = 1, first = 0, length = 1;
  bool turned = false, mirrored = false;
  std::int64_t start8 = 0, extent8 = 8;

  Axis axis() const { return make_axis(filter, in_size, out_size, first, length, turned, mirrored, start8, extent8); }
};

std::vector<Inputs> oracle_inputs(const AxisCase& a) {
  const std::int64_t start8 = a.turned ? std::int64_t{8} * a.in_size - a.start8 - a.extent8 : a.start8;
  const Resize r{a.filter, a.in_size, a.out_size, static_cast<double>(start8) / 8, static_cast<double>(a.extent8) / 8};
  int bits = 22;
  if (a.filter >= kNarrow && (a.filter & 15) != kNearest && (a.filter & 15) != kNearestFloor) {
    double largest = 0;
    for (int i = 0; i < a.out_size; ++i) {
      for (double weight : inputs_of(r, i).exact) largest = std::max(largest, weight);
    }
    for (bits = 0; bits < 22 && static_cast<int>(0.5 + largest * (1 << (bits + 1))) < (1 << 15);) ++bits;
  }
  std::vector<Inputs> all;
  for (int i = 0; i < a.length; ++i) {
    Inputs found = inputs_of(r, a.first + (a.mirrored ? a.length - 1 - i : i));
    for (double weight : found.exact) {
      const double scaled = weight * (1 << bits);
      found.weights.push_back(static_cast<std::int64_t>(scaled < 0 ? scaled - 0.5 : scaled + 0.5) * (1 << (22 - bits)));
    }
    if (a.turned) {
      found.first = a.in_size - found.first - static_cast<int>(found.weights.size());
      std::reverse(found.weights.begin(), found.weights.end());
    }
    all.push_back(found);
  }
  return all;
}

// ---- the oracle: pixels

// Channels of rows of pixels, as numbers, with the coordinates of the image.
struct Image {
  int height = 0, width = 0, channels = 0;
  std::vector<std::uint8_t> data;
  Image(int h, int w, int c) : height(h), width(w), channels(c), data(static_cast<std::size_t>(h) * w * c) {}
  std::uint8_t& at(int y, int x, int c) { return data[(static_cast<std::size_t>(y) * width + x) * channels + c]; }
};

std::uint8_t clipped(std::int64_t total) {
  return static_cast<std::uint8_t>(std::min<std::int64_t>(std::max<std::int64_t>(total >> 22, 0), 255));
}

Image along_rows(Image& image, const std::vector<Inputs>& inputs) {
  Image made(image.height, static_cast<int>(inputs.size()), image.channels);
  for (int y = 0; y < made.height; ++y) {
    for (int x = 0; x < made.width; ++x) {
      const Inputs& from = inputs[static_cast<std::size_t>(x)];
      for (int c = 0; c < made.channels; ++c) {
        std::int64_t total = 1 << 21;
        for (std::size_t k = 0; k < from.weights.size(); ++k) {
          if (from.weights[k] != 0) total += from.weights[k] * image.at(y, from.first + static_cast<int>(k), c);
        }
        made.at(y, x, c) = clipped(total);
      }
    }
  }
  return made;
}

Image transposed(Image& image) {
  Image made(image.width, image.height, image.channels);
  for (int y = 0; y < image.height; ++y) {
    for (int x = 0; x < image.width; ++x) {
      for (int c = 0; c < image.channels; ++c) made.at(x, y, c) = image.at(y, x, c);
    }
  }
  return made;
}

Image along_columns(Image& image, const std::vector<Inputs>& inputs) {
  Image turned = transposed(image);
  Image made = along_rows(turned, inputs);
  return transposed(made);
}

Image luma(Image& image) {
  Image made(image.height, image.width, 1);
  for (int y = 0; y < image.height; ++y) {
    for (int x = 0; x < image.width; ++x) {
      const int sum = image.at(y, x, 0) * 19595 + image.at(y, x, 1) * 38470 + image.at(y, x, 2) * 7471 + 0x8000;
      made.at(y, x, 0) = static_cast<std::uint8_t>(sum >> 16);
    }
  }
  return made;
}

std::vector<std::uint8_t> converted(Image& image, const Conversion& how) {
  const std::size_t word = static_cast<std::size_t>(how.word);
  std::vector<std::uint8_t> made(static_cast<std::size_t>(how.channels) * image.height * image.width * word);
  for (int c = 0; c < how.channels; ++c) {
    for (int y = 0; y < image.height; ++y) {
      for (int x = 0; x < image.width; ++x) {
        const std::uint8_t value = image.at(y, x, image.channels == 1 ? 0 : c);
        const std::size_t at = how.interleaved ? (static_cast<std::size_t>(y) * image.width + x) * how.channels + c
                                               : (static_cast<std::size_t>(c) * image.height + y) * image.width + x;
        if (how.kind == Conversion::Kind::bytes) {
          made[at] = value;
        } else if (how.kind == Conversion::Kind::table) {
          std::memcpy(&made[at * word], how.table + (static_cast<std::size_t>(c) * 256 + value) * word, word);
        } else {
          const float v = value, unit = how.divide ? v / 255.0f : v * (1.0f / 255.0f);
          const float normal = (unit - how.mean[c]) / how.std[c];
          std::memcpy(&made[at * 4], &normal, 4);
        }
      }
    }
  }
  return made;
}

// ---- cases

std::int32_t a_size(Random& random, int most) {
  const int kind = random.between(0, 9);
  return random.between(1, kind < 2 ? 4 : kind < 6 ? std::min(40, most) : most);
}

AxisCase an_axis(Random& random, int filter, int most) {
  AxisCase a;
  a.filter = filter;
  a.in_size = a_size(random, most);
  a.out_size = random.chance(8) ? a.in_size : a_size(random, most);
  if (random.chance(4)) {
    a.in_size = 20 * most;
    a.out_size = random.between(1, 6);
  }
  a.first = random.chance(50) ? 0 : random.between(0, a.out_size - 1);
  a.length = random.chance(50) ? a.out_size - a.first : random.between(1, a.out_size - a.first);
  a.turned = random.chance(30);
  a.mirrored = random.chance(30);
  a.extent8 = std::int64_t{8} * a.in_size;
  if (random.chance(30) && (filter & 15) != kNearest && (filter & 15) != kNearestFloor) {
    a.extent8 = random.between(1, 8 * a.in_size);
    a.start8 = random.between(0, 8 * a.in_size - static_cast<std::int32_t>(a.extent8));
  }
  return a;
}

int a_filter(Random& random) {
  const int mode = random.between(0, 8);
  if (mode == kNearest || mode == kNearestFloor) return mode;
  return random.chance(mode >= kSharpBilinear ? 80 : 35) ? mode | kNarrow : mode;
}

// A table's bytes must outlive the conversion.
Conversion a_conversion(Random& random, int channels, std::vector<std::uint8_t>* table) {
  Conversion how;
  how.channels = channels;
  how.interleaved = random.chance(40);
  how.kind = static_cast<Conversion::Kind>(random.between(0, 2));
  if (how.kind == Conversion::Kind::affine) {
    how.word = 4;
    how.divide = random.chance(60);
    for (int c = 0; c < 3; ++c) {
      how.mean[c] = static_cast<float>(random.between(0, 1000)) / 1000.0f;
      how.std[c] = static_cast<float>(random.between(1, 1000)) / 1000.0f;
    }
  } else if (how.kind == Conversion::Kind::table) {
    how.word = 1 << random.between(0, 3);
    table->resize(static_cast<std::size_t>(channels) * 256 * static_cast<std::size_t>(how.word));
    for (auto& byte : *table) byte = static_cast<std::uint8_t>(random.next());
    how.table = table->data();
  }
  return how;
}

// Run one case in memory of exactly the size that may be read and written, and compare.
bool is_equal(Random& random, int most) {
  const int filter = a_filter(random);
  const AxisCase x = an_axis(random, filter, most), y = an_axis(random, filter, most);
  const Axis columns = x.axis(), rows = y.axis();
  const int channels = random.chance(80) ? 3 : 1;
  const int height = rows.high - rows.low, width = columns.high - columns.low;
  const int pitch = width * channels + (random.chance(50) ? random.between(1, 40) : 0);
  const bool vertical_first = random.chance(40);
  const Grey grey = channels == 3 && random.chance(30) ? static_cast<Grey>(random.between(1, 2)) : Grey::none;
  const bool is_grey = channels == 1 || grey != Grey::none;
  std::vector<std::uint8_t> table;
  Conversion how = a_conversion(random, is_grey && random.chance(50) ? 1 : 3, &table);
  ConversionTables tables;
  if (random.chance(60)) {
    make_tables(how, &tables);
    how.tables = &tables;
  }
  std::vector<std::uint8_t> source(static_cast<std::size_t>(height - 1) * pitch + width * channels);
  const int kind = random.between(0, 3);
  for (auto& byte : source) {
    byte = static_cast<std::uint8_t>(kind == 0 ? 255 : kind == 1 ? (random.next() & 1) * 255 : random.next());
  }
  source.shrink_to_fit();

  Image image(y.in_size, x.in_size, channels);
  for (int row = 0; row < height; ++row) {
    std::copy_n(&source[static_cast<std::size_t>(row) * pitch], width * channels,
                &image.at(rows.low + row, columns.low, 0));
  }
  if (grey == Grey::before) image = luma(image);
  const std::vector<Inputs> x_inputs = oracle_inputs(x), y_inputs = oracle_inputs(y);
  if (vertical_first) image = along_columns(image, y_inputs);
  image = along_rows(image, x_inputs);
  if (!vertical_first) image = along_columns(image, y_inputs);
  if (grey == Grey::after) image = luma(image);
  const std::vector<std::uint8_t> expected = converted(image, how);

  Arena arena;
  std::vector<std::uint8_t> made(expected.size(), 0xa5);
  made.shrink_to_fit();
  const Pixels pixels{source.data(), pitch, height, width, channels};
  return resample(pixels, filter, columns, rows, vertical_first, grey, how, arena, made.data()) && made == expected;
}

}  // namespace

TEST("axes equal a plain computation") {
  Random random(1);
  for (int i = 0; i < 2000; ++i) {
    const AxisCase a = an_axis(random, a_filter(random), 120);
    const Axis axis = a.axis();
    const std::vector<Inputs> expected = oracle_inputs(a);
    std::vector<std::int32_t> table(static_cast<std::size_t>(axis.length) * static_cast<std::size_t>(axis.pitch + 2));
    std::vector<double> exact(static_cast<std::size_t>(axis.pitch));
    axis_table(a.filter, axis, table.data(), exact.data());
    const std::int32_t *starts = table.data(), *taps = starts + axis.length, *weights = taps + axis.length;
    std::int32_t low = a.in_size, high = 0;
    bool is_equal = true;
    for (std::int32_t k = 0; k < axis.length; ++k) {
      const Inputs& one = expected[static_cast<std::size_t>(k)];
      const auto count = static_cast<std::int32_t>(one.exact.size());
      is_equal = is_equal && starts[k] == one.first && taps[k] == count && count <= axis.pitch;
      if (!is_equal) break;
      for (std::int32_t tap = 0; tap < count; ++tap) {
        is_equal = is_equal && weights[k * axis.pitch + tap] == one.weights[static_cast<std::size_t>(tap)];
      }
      low = std::min(low, starts[k]);
      high = std::max(high, starts[k] + count);
    }
    CHECK(is_equal);
    CHECK(axis.low == low && axis.high == high);
  }
}

TEST("images equal a plain computation") {
  Random random(2);
  int equal = 0;
  for (int i = 0; i < 1500; ++i) equal += is_equal(random, 24);
  CHECK(equal == 1500);
  equal = 0;
  for (int i = 0; i < 120; ++i) equal += is_equal(random, 130);
  CHECK(equal == 120);
}

namespace {

std::uint64_t hash_of(const std::vector<std::uint8_t>& bytes) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (std::uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3u;
  return hash;
}

std::vector<std::uint8_t> a_picture(int height, int width) {
  std::vector<std::uint8_t> pixels;
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      for (int c = 0; c < 3; ++c) pixels.push_back(static_cast<std::uint8_t>(x * 23 + y * 37 + c * 71 + x * y * 5));
    }
  }
  return pixels;
}

}  // namespace

TEST("images equal Pillow's") {
  // Of Image.resize of Pillow 13, along the rows and then along the columns.
  const struct {
    int filter;
    Size size, to;
    std::uint64_t hash;
  } cases[] = {
      {kBox, {41, 53}, {17, 19}, 0x1f6a1a913e7eb009u},      {kBox, {13, 11}, {30, 47}, 0x6e161334a65524b9u},
      {kBox, {40, 9}, {8, 33}, 0x341d5e7623f61fd4u},        {kBilinear, {41, 53}, {17, 19}, 0x427fc91dc7cc042cu},
      {kBilinear, {13, 11}, {30, 47}, 0x59282fbbac94cc4cu}, {kBilinear, {40, 9}, {8, 33}, 0x5ccdc0f5c53a9e83u},
      {kHamming, {41, 53}, {17, 19}, 0x770b546817350578u},  {kHamming, {13, 11}, {30, 47}, 0x38682c20b1bb8f65u},
      {kHamming, {40, 9}, {8, 33}, 0x743f11960a3e9d36u},    {kBicubic, {41, 53}, {17, 19}, 0xfd0a3400a4647833u},
      {kBicubic, {13, 11}, {30, 47}, 0x57d54858135d249fu},  {kBicubic, {40, 9}, {8, 33}, 0xe70e9f7b32e4f74eu},
      {kLanczos, {41, 53}, {17, 19}, 0x4ca37e718ee783aau},  {kLanczos, {13, 11}, {30, 47}, 0x9a61919eab64306au},
      {kLanczos, {40, 9}, {8, 33}, 0x3f345310ddb8ec1au},    {kNearest, {41, 53}, {17, 19}, 0x95bbf1d71092c09au},
      {kNearest, {13, 11}, {30, 47}, 0x6e161334a65524b9u},  {kNearest, {40, 9}, {8, 33}, 0x2e7cb1ae3f092a0du},
  };
  Conversion how;
  how.interleaved = true;
  Arena arena;
  for (const auto& c : cases) {
    const std::vector<std::uint8_t> source = a_picture(c.size.height, c.size.width);
    std::vector<std::uint8_t> made(static_cast<std::size_t>(3 * c.to.height * c.to.width));
    const Axis x = make_axis(c.filter, c.size.width, c.to.width, 0, c.to.width, false, false);
    const Axis y = make_axis(c.filter, c.size.height, c.to.height, 0, c.to.height, false, false);
    const std::int32_t pitch = 3 * c.size.width;
    const Pixels pixels{source.data() + y.low * pitch + 3 * x.low, pitch, y.high - y.low, x.high - x.low, 3};
    CHECK(resample(pixels, c.filter, x, y, false, Grey::none, how, arena, made.data()));
    CHECK(hash_of(made) == c.hash);
  }
  // And of convert("L").
  const std::vector<std::uint8_t> source = a_picture(41, 53);
  std::vector<std::uint8_t> made(41 * 53);
  how.channels = 1;
  CHECK(resample({source.data(), 3 * 53, 41, 53, 3}, kNearestFloor,
                 make_axis(kNearestFloor, 53, 53, 0, 53, false, false),
                 make_axis(kNearestFloor, 41, 41, 0, 41, false, false), false, Grey::before, how, arena, made.data()));
  CHECK(hash_of(made) == 0x711aee077b16961fu);
}

TEST("usual normalisations need no division") {
  const float means[][3] = {{0.485f, 0.456f, 0.406f},
                            {0.5f, 0.5f, 0.5f},
                            {0, 0, 0},
                            {0.4914f, 0.4822f, 0.4465f},
                            {0.48145466f, 0.4578275f, 0.40821073f}};
  const float deviations[][3] = {{0.229f, 0.224f, 0.225f},
                                 {0.5f, 0.5f, 0.5f},
                                 {1, 1, 1},
                                 {0.2023f, 0.1994f, 0.2010f},
                                 {0.26862954f, 0.26130258f, 0.27577711f}};
  for (bool divide : {true, false}) {
    for (int i = 0; i < 5; ++i) {
      Conversion how;
      how.kind = Conversion::Kind::affine;
      how.word = 4;
      how.divide = divide;
      std::copy_n(means[i], 3, how.mean);
      std::copy_n(deviations[i], 3, how.std);
      ConversionTables tables;
      make_tables(how, &tables);
      CHECK(tables.has_factors);
    }
  }
}

TEST("numbers that no factors give are looked up") {
  Conversion how;
  how.kind = Conversion::Kind::affine;
  how.word = 4;
  how.std[1] = 0;  // infinities, and a NaN
  how.mean[2] = 1e30f;
  ConversionTables tables;
  make_tables(how, &tables);
  how.tables = &tables;
  const std::vector<std::uint8_t> source = a_picture(9, 40);
  std::vector<std::uint8_t> made(9 * 40 * 12);
  Arena arena;
  CHECK(resample({source.data(), 120, 9, 40, 3}, kNearest, make_axis(kNearest, 40, 40, 0, 40, false, false),
                 make_axis(kNearest, 9, 9, 0, 9, false, false), false, Grey::none, how, arena, made.data()));
  Image image(9, 40, 3);
  image.data = source;
  std::vector<std::uint8_t> expected = converted(image, how);
  for (std::size_t i = 0; i < made.size(); i += 4) {
    float a, b;
    std::memcpy(&a, &made[i], 4);
    std::memcpy(&b, &expected[i], 4);
    CHECK(a == b || (a != a && b != b));
  }
}

TEST("what does not fit is refused") {
  std::uint8_t pixel[3] = {1, 2, 3}, out[3 * 16];
  Conversion how;
  Arena arena;
  const Axis axis = make_axis(kBilinear, 8, 4, 0, 4, false, false);
  // Fewer pixels than the axes need.
  CHECK(!resample({pixel, 3, 1, 1, 3}, kBilinear, axis, axis, false, Grey::none, how, arena, out));
  // Colours where one channel is wanted.
  how.channels = 1;
  const Axis one = make_axis(kBilinear, 1, 1, 0, 1, false, false);
  CHECK(!resample({pixel, 3, 1, 1, 3}, kBilinear, one, one, false, Grey::none, how, arena, out));
  // An axis whose weights fill all memory.
  Axis huge = make_axis(kLanczos, 2000000000, 1, 0, 1, false, false);
  CHECK(huge.pitch > 0);
  huge.length = 2000000000;
  CHECK(!resample({pixel, 3, 1, 1, 3}, kLanczos, huge, one, false, Grey::none, how, arena, out));
}
