// Every kernel at every level that this processor has, equal bit for bit; and none touches memory beside its
// own.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../convert.h"
#include "../kernels.h"
#include "../resample.h"
#include "../simd.h"
#include "check.h"
#include "random.h"

namespace {

using namespace fastpipe;
using tests::random_number;

std::int32_t between(std::int32_t low, std::int32_t high) {
  return low + static_cast<std::int32_t>(random_number() % static_cast<std::uint32_t>(high - low + 1));
}

// Memory that ends where the next page must not be touched, or begins behind such a page.
class Fenced {
 public:
  Fenced(std::int64_t size, bool at_end) : size_(size) {
    const std::int64_t page = ::sysconf(_SC_PAGESIZE);
    pages_ = (size + page - 1) / page * page;
    mapping_ =
        ::mmap(nullptr, static_cast<std::size_t>(pages_ + 2 * page), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    begin_ = static_cast<std::uint8_t*>(mapping_) + page;
    ::mprotect(begin_, static_cast<std::size_t>(pages_), PROT_READ | PROT_WRITE);
    mapped_ = static_cast<std::size_t>(pages_ + 2 * page);
    if (at_end) begin_ += pages_ - size;
  }
  ~Fenced() { ::munmap(mapping_, mapped_); }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;

  std::uint8_t* data() { return begin_; }
  std::vector<std::uint8_t> bytes() const { return {begin_, begin_ + size_}; }
  void randomise() {
    const int kind = between(0, 3);
    for (std::int64_t i = 0; i < size_; ++i) {
      begin_[i] = static_cast<std::uint8_t>(kind == 0   ? 255
                                            : kind == 1 ? (random_number() & 1) * 255
                                                        : random_number());
    }
  }

 private:
  std::int64_t size_, pages_ = 0;
  std::size_t mapped_ = 0;
  void* mapping_ = nullptr;
  std::uint8_t* begin_ = nullptr;
};

std::vector<Level> levels() {
  std::vector<Level> found;
  for (int i = 0; i <= static_cast<int>(best_level()); ++i) found.push_back(static_cast<Level>(i));
  return found;
}

const Kernels& kernels_of(Level level) {
  CHECK(force_level(level));
  const Kernels& found = kernels();
  CHECK(fastpipe::level() == level);
  CHECK(force_level(best_level()));
  return found;
}

// What each level makes, given a function that runs a kernel into memory of so many bytes.
template <typename Run>
bool agree(std::int64_t size, Run run) {
  std::vector<std::uint8_t> expected;
  bool is_equal = true;
  for (Level level : levels()) {
    for (bool at_end : {true, false}) {
      Fenced out(size, at_end);
      run(kernels_of(level), out.data());
      if (expected.empty()) expected = out.bytes();
      is_equal = is_equal && out.bytes() == expected;
    }
  }
  return is_equal;
}

std::int32_t a_count() { return between(0, 3) == 0 ? between(1, 8) : between(1, 300); }

// Weights like those of filters: mostly between 0 and 1, a few below and above, that add up to about 1.
std::vector<std::int32_t> some_weights(std::int32_t taps) {
  std::vector<std::int32_t> weights;
  const bool positive = between(0, 1) == 0;
  std::int32_t left = 1 << 22;
  for (std::int32_t k = 0; k + 1 < taps; ++k) {
    weights.push_back(positive ? between(0, left / 2) : between(-(1 << 22) / taps / 2, (1 << 22) / taps));
    left -= weights.back();
  }
  weights.push_back(left);
  return weights;
}

}  // namespace

TEST("levels") {
  CHECK(!force_level(static_cast<Level>(static_cast<int>(best_level()) + 1)));
  CHECK(!force_level(static_cast<Level>(-1)));
  CHECK(level() == best_level());
  std::printf("      best level: %d\n", static_cast<int>(best_level()));
}

TEST("kernels: colours") {
  for (int i = 0; i < 300; ++i) {
    const std::int32_t count = a_count();
    Fenced pixels(3 * count, i % 2 == 0);
    pixels.randomise();
    std::uint8_t* const p = pixels.data();
    const std::uint8_t* const planes[3] = {p, p + count, p + 2 * count};
    CHECK(agree(3 * count, [&](const Kernels& k, std::uint8_t* out) { k.split(p, count, out, count); }));
    CHECK(agree(3 * count, [&](const Kernels& k, std::uint8_t* out) { k.interleave(planes, count, out); }));
    CHECK(agree(count, [&](const Kernels& k, std::uint8_t* out) { k.reverse(p, count, out); }));
    CHECK(agree(count, [&](const Kernels& k, std::uint8_t* out) { k.luma(planes, count, out); }));
    // And they are what they should be.
    Fenced out(3 * count, true);
    const Kernels& best = kernels();
    best.split(p, count, out.data(), count);
    for (std::int32_t x = 0; x < 3 * count; ++x) CHECK(out.data()[x % 3 * count + x / 3] == p[x]);
    best.reverse(p, count, out.data());
    for (std::int32_t x = 0; x < count; ++x) CHECK(out.data()[x] == p[count - 1 - x]);
  }
}

TEST("kernels: shuffles") {
  for (int i = 0; i < 600; ++i) {
    const std::int32_t element = i % 17 + 1, row = i % 5 == 0 ? between(120, 300) : between(0, 70);
    const std::int32_t count = i % 3 == 0 ? between(0, 9) : 8 * row, plane = count + between(0, 3);
    Fenced bytes(std::int64_t{plane} * element, i % 2 == 0);
    bytes.randomise();
    const std::uint8_t* const from = bytes.data();
    const auto unshuffled = [&](const Kernels& k, std::uint8_t* out) {
      k.unshuffle(from, plane, element, count - (plane - count), out);
    };
    const std::int64_t used = std::max(2 * count - plane, 0);
    if (2 * count >= plane) CHECK(agree(used * element, unshuffled));
    Fenced out(used * element, true);
    if (2 * count >= plane) unshuffled(kernels(), out.data());
    for (std::int64_t k = 0; k < used * element; ++k) {
      CHECK(out.data()[k] == from[k % element * plane + k / element]);
    }

    const std::int64_t size = std::int64_t{8} * row * element;
    Fenced bits(size, i % 2 == 0);
    bits.randomise();
    const std::uint8_t* const rows = bits.data();
    CHECK(agree(size, [&](const Kernels& k, std::uint8_t* to) { k.unshuffle_bits(rows, row, element, to); }));
    Fenced whole(size, true);
    kernels().unshuffle_bits(rows, row, element, whole.data());
    bool is_right = true;
    for (std::int64_t k = 0; k < size; ++k) {
      std::uint32_t value = 0;
      for (std::int64_t bit = 0; bit < 8; ++bit) {
        const std::int64_t number = k / element;
        value |= (rows[(k % element * 8 + bit) * row + number / 8] >> number % 8 & 1u) << bit;
      }
      is_right = is_right && whole.data()[k] == value;
    }
    CHECK(is_right);
  }
}

TEST("kernels: rows") {
  for (int i = 0; i < 400; ++i) {
    const std::int32_t size = a_count(), taps = i % 8 == 0 ? between(1, 200) : between(1, 12);
    const std::vector<std::int32_t> weights = some_weights(taps);
    Fenced memory(std::int64_t{size} * taps, i % 2 == 0);
    memory.randomise();
    std::vector<const std::uint8_t*> rows;
    for (std::int32_t k = 0; k < taps; ++k) rows.push_back(memory.data() + std::int64_t{k} * size);
    CHECK(agree(size, [&](const Kernels& k, std::uint8_t* out) {
      k.weighted_rows(rows.data(), weights.data(), taps, size, out);
    }));
    Fenced out(size, true);
    kernels().weighted_rows(rows.data(), weights.data(), taps, size, out.data());
    bool is_right = true;
    for (std::int32_t x = 0; x < size; ++x) {
      std::int64_t total = 1 << 21;
      for (std::int32_t k = 0; k < taps; ++k) {
        total += std::int64_t{weights[static_cast<std::size_t>(k)]} * rows[static_cast<std::size_t>(k)][x];
      }
      total >>= 22;
      is_right = is_right && out.data()[x] == (total < 0 ? 0 : total > 255 ? 255 : total);
    }
    CHECK(is_right);
  }
}

namespace {

// Resample rows by the kernels of a level, to planes that lie one behind the other.
std::vector<std::uint8_t> resampled(const Kernels& k, Columns c, const std::vector<const std::uint8_t*>& rows) {
  c.plane = (c.count + k.tile - 1) / k.tile * k.tile;
  Arena arena;
  c.memory = arena.array<std::uint8_t>(k.columns_memory(c));
  k.prepare_columns(c);
  const int at_once = k.rows_at_once(c);
  const std::int64_t size = c.channels * c.plane;
  std::vector<std::uint8_t> made;
  for (std::size_t done = 0; done < rows.size(); done += static_cast<std::size_t>(at_once)) {
    const int number = std::min(at_once, static_cast<int>(rows.size() - done));
    std::vector<std::uint8_t*> out;
    for (int i = 0; i < number; ++i) out.push_back(arena.array<std::uint8_t>(static_cast<std::size_t>(size)));
    k.resample_columns(c, rows.data() + done, number, out.data());
    for (std::uint8_t* row : out) {
      std::vector<std::uint8_t> ordered(row, row + size);
      if (k.untile != nullptr) k.untile(row, size, ordered.data());
      for (int channel = 0; channel < c.channels; ++channel) {
        made.insert(made.end(), ordered.begin() + channel * c.plane, ordered.begin() + channel * c.plane + c.count);
      }
    }
  }
  return made;
}

}  // namespace

TEST("kernels: columns") {
  for (int i = 0; i < 400; ++i) {
    const int filter = i % 9;
    const std::int32_t in = i % 25 == 0 ? between(1000, 5000) : a_count();
    const std::int32_t out = i % 25 == 0 ? between(1, 9) : a_count();
    const Axis axis = make_axis(filter, in, out, 0, out, between(0, 1) == 1, between(0, 1) == 1);
    std::vector<std::int32_t> table(static_cast<std::size_t>(out) * static_cast<std::size_t>(axis.pitch + 2));
    std::vector<double> exact(static_cast<std::size_t>(axis.pitch));
    axis_table(filter, axis, table.data(), exact.data());
    for (std::int32_t k = 0; k < out; ++k) table[static_cast<std::size_t>(k)] -= axis.low;
    Columns c;
    c.channels = between(0, 3) == 0 ? 1 : 3;
    c.width = axis.high - axis.low;
    c.count = out;
    c.pitch = axis.pitch;
    c.starts = table.data();
    c.taps = c.starts + out;
    c.weights = c.taps + out;
    const std::int32_t height = between(1, 40), pitch = c.width * c.channels;
    Fenced source(std::int64_t{pitch} * height, i % 2 == 0);
    source.randomise();
    std::vector<const std::uint8_t*> rows;
    for (std::int32_t y = 0; y < height; ++y) rows.push_back(source.data() + std::int64_t{y} * pitch);
    std::vector<std::uint8_t> expected;
    for (std::int32_t y = 0; y < height; ++y) {
      for (std::int32_t channel = 0; channel < c.channels; ++channel) {
        for (std::int32_t x = 0; x < out; ++x) {
          std::int64_t total = 1 << 21;
          for (std::int32_t k = 0; k < c.taps[x]; ++k) {
            total += std::int64_t{c.weights[x * c.pitch + k]} *
                     rows[static_cast<std::size_t>(y)][(c.starts[x] + k) * c.channels + channel];
          }
          total >>= 22;
          expected.push_back(static_cast<std::uint8_t>(total < 0 ? 0 : total > 255 ? 255 : total));
        }
      }
    }
    for (Level level : levels()) CHECK(resampled(kernels_of(level), c, rows) == expected);
  }
}

TEST("kernels: conversion") {
  for (int i = 0; i < 200; ++i) {
    const std::int32_t count = a_count();
    const bool is_at_end = i % 4 < 2;  // else at the beginning of a page, where stores may go past the caches
    Fenced bytes(3 * count, i % 2 == 0);
    bytes.randomise();
    if (i % 3 == 0) {
      for (std::int32_t x = 0; x < 3 * count; ++x) bytes.data()[x] = static_cast<std::uint8_t>(x + i);
    }
    const std::uint8_t* const planes[3] = {bytes.data(), bytes.data() + count, bytes.data() + 2 * count};
    std::vector<std::uint16_t> words(3 * 256);
    for (auto& word : words) word = static_cast<std::uint16_t>(random_number());
    Conversion affine, table;
    affine.kind = Conversion::Kind::affine;
    affine.divide = i % 2 == 0;
    for (int c = 0; c < 3; ++c) {
      affine.mean[c] = static_cast<float>(between(0, 1000)) / 1000.0f;
      affine.std[c] = static_cast<float>(between(1, 1000)) / 1000.0f;
    }
    table.kind = Conversion::Kind::table;
    table.word = 2;
    table.table = reinterpret_cast<const std::uint8_t*>(words.data());
    ConversionTables floats, shorts;
    make_tables(affine, &floats);
    make_tables(table, &shorts);
    for (Level level : levels()) {
      const Kernels& k = kernels_of(level);
      bool is_equal = true;
      if (k.affine != nullptr && floats.has_factors) {
        for (bool interleaved : {false, true}) {
          const std::int32_t size = interleaved ? 3 * count : count;
          Fenced out(4 * size, is_at_end);
          k.affine(bytes.data(), size, interleaved ? floats.interleaved : floats.planes[1],
                   reinterpret_cast<float*>(out.data()), true);
          for (std::int32_t x = 0; x < size; ++x) {
            const float* expected = &floats.values[interleaved ? x % 3 : 1][bytes.data()[x]];
            is_equal = is_equal && std::memcmp(expected, out.data() + 4 * x, 4) == 0;
          }
        }
      }
      if (k.lookup16 != nullptr) {
        Fenced out(2 * count, is_at_end);
        k.lookup16(bytes.data(), count, shorts.words[2], reinterpret_cast<std::uint16_t*>(out.data()), true);
        for (std::int32_t x = 0; x < count; ++x) {
          is_equal = is_equal && std::memcmp(&words[512u + bytes.data()[x]], out.data() + 2 * x, 2) == 0;
        }
      }
      if (k.lookup16_interleaved != nullptr) {
        Fenced out(6 * count, is_at_end);
        k.lookup16_interleaved(planes, count, shorts.words, reinterpret_cast<std::uint16_t*>(out.data()), true);
        for (std::int32_t x = 0; x < 3 * count; ++x) {
          const std::size_t value = planes[x % 3][x / 3];
          is_equal =
              is_equal && std::memcmp(&words[256u * static_cast<unsigned>(x % 3) + value], out.data() + 2 * x, 2) == 0;
        }
      }
      CHECK(is_equal);
    }
  }
}

TEST("whole images are the same at all levels") {
  for (int i = 0; i < 300; ++i) {
    const int filter = i % 9 | (i % 4 == 0 && i % 9 != kNearest && i % 9 != kNearestFloor ? kNarrow : 0);
    const Size size{a_count(), a_count()};
    // Some are large enough to be written past the caches.
    const Size to = i % 10 == 0 ? Size{between(180, 240), 32 * between(6, 9)} : Size{a_count(), a_count()};
    const Axis x = make_axis(filter, size.width, to.width, 0, to.width, i % 3 == 0, i % 5 == 0);
    const Axis y = make_axis(filter, size.height, to.height, 0, to.height, i % 7 == 0, i % 2 == 0);
    Conversion how;
    how.kind = static_cast<Conversion::Kind>(i % 3);
    how.word = how.kind == Conversion::Kind::affine ? 4 : how.kind == Conversion::Kind::bytes ? 1 : 2;
    how.interleaved = between(0, 1) == 1;
    std::vector<std::uint8_t> table(3 * 256 * 2);
    for (auto& byte : table) byte = static_cast<std::uint8_t>(random_number());
    how.table = table.data();
    for (int c = 0; c < 3; ++c) how.std[c] = static_cast<float>(between(1, 1000)) / 1000.0f;
    const std::int32_t height = y.high - y.low, width = x.high - x.low;
    Fenced source(std::int64_t{3} * height * width, true);
    source.randomise();
    const Pixels pixels{source.data(), std::int64_t{3} * width, height, width, 3};
    const bool vertical_first = between(0, 1) == 1;
    const auto grey = static_cast<Grey>(between(0, 2));
    std::vector<std::uint8_t> expected;
    for (Level level : levels()) {
      Arena arena;
      Fenced out(std::int64_t{3} * how.word * to.height * to.width, i % 20 != 0);
      CHECK(force_level(level));
      CHECK(resample(pixels, filter, x, y, vertical_first, grey, how, arena, out.data()));
      if (expected.empty()) expected = out.bytes();
      CHECK(out.bytes() == expected);
    }
    CHECK(force_level(best_level()));
  }
}
