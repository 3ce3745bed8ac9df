// Patches of volumes: whatever holds the bytes, they are those of the array; what is unusual is declined.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "../patches.h"
#include "check.h"
#include "folder.h"
#include "make_volume.h"

using namespace fastpipe;
using namespace fastpipe::tests;

namespace {

std::shared_ptr<const Volume> volume_of(const VolumeSource& source, const Index& shape, const Index& unit,
                                        std::int64_t itemsize, UnitMemory* memory = nullptr, std::int64_t first = 0) {
  auto made = std::make_shared<Volume>();
  CHECK(Grid::make(shape, unit, &made->units));
  made->itemsize = itemsize;
  made->source = source;
  made->memory = memory;
  made->first_key = first;
  CHECK(made->is_valid());
  return made;
}

VolumeSource memory_source(Array& array) {
  VolumeSource source;
  source.itemsize = array.itemsize;
  source.data = array.content.data();
  std::int64_t step = array.itemsize;
  for (int dim = kDims; dim-- > 0;) {
    source.steps[dim] = step;
    step *= array.shape[dim];
  }
  return source;
}

BloscOptions small_blocks() {
  BloscOptions options;
  options.block = 256;
  return options;
}

// A folder of chunks, each of which is a file.
struct ChunkFiles {
  Folder folder;
  VolumeSource source;

  ChunkFiles(Array& array, const Index& chunk, int dims, VolumeSource::Codec codec,
             const BloscOptions& options = small_blocks()) {
    source.kind = VolumeSource::Kind::files;
    CHECK(Grid::make(array.shape, chunk, &source.chunks));
    source.dims = dims;
    source.itemsize = array.itemsize;
    source.codec = codec;
    source.folder = folder.path("");
    source.metadata = folder.write("zarr.json", {1});
    source.prefix = "c";
    source.separator = '.';
    source.fill.assign(static_cast<std::size_t>(array.itemsize), '\7');
    Index place{};
    do {
      const Content content = chunk_of(array, source.chunks, place);
      switch (codec) {
        case VolumeSource::Codec::none:
          write(place, content);
          break;
        case VolumeSource::Codec::blosc:
          write(place, blosc_of(content, options));
          break;
        case VolumeSource::Codec::gzip:
          write(place, gzip_of(content));
          break;
        case VolumeSource::Codec::zlib:
          write(place, zlib_of(content));
          break;
        case VolumeSource::Codec::zstd:
          write(place, zstd_of(content));
          break;
      }
    } while (next_place(&place, source.chunks.counts));
  }
  std::string name(const Index& place) const {
    std::string name = "c";
    for (int dim = kDims - source.dims; dim < kDims; ++dim) name += "." + std::to_string(place[dim]);
    return name;
  }
  void write(const Index& place, const Content& stored) { folder.write(name(place).c_str(), stored); }
};

// A batch of one patch of one volume.
struct One {
  PatchBatch batch;
  std::vector<std::int64_t> starts, rows{0};
  Content out;
  Status status;

  One(std::shared_ptr<const Volume> volume, const Index& size, int dims, const std::vector<std::int64_t>& start,
      Padding padding = Padding::error, PatchKind kind = {})
      : starts(start) {
    kind.dims = dims;
    kind.size = size;
    kind.itemsize = volume->itemsize;
    kind.padding = padding;
    CHECK(kind.is_valid());
    out.assign(static_cast<std::size_t>(kind.nbytes()), 0xEE);
    batch.kinds.push_back({kind, out.data()});
    batch.items.push_back({0, 0, std::move(volume)});
    batch.patches = 1;
    batch.starts = starts.data();
    batch.rows = rows.data();
    batch.statuses = &status;
    CHECK(batch.prepare());
    run_here(batch);
    CHECK(batch.is_complete());
  }
  bool is_made() const { return status.is_made(); }
};

// What a patch of an array is, padded.
Content expected_of(Array& array, const Index& size, int dims, const std::vector<std::int64_t>& start, Padding padding,
                    std::uint8_t constant = 0) {
  Content made;
  Index at{};
  do {
    Index place{};
    bool is_there = true;
    for (int dim = 0; dim < kDims; ++dim) {
      const int along = dim - (kDims - dims);
      place[dim] =
          padded_index(at[dim] + (along < 0 ? 0 : start[static_cast<std::size_t>(along)]), array.shape[dim], padding);
      is_there = is_there && place[dim] >= 0;
    }
    if (is_there) {
      made.insert(made.end(), array.at(place), array.at(place) + array.itemsize);
    } else {
      made.insert(made.end(), static_cast<std::size_t>(array.itemsize), constant);
    }
  } while (next_place(&at, size));
  return made;
}

// Patches anywhere are those of the array.
void check_patches(std::shared_ptr<const Volume> volume, Array& array, int dims, unsigned seed, int count = 40) {
  std::mt19937 random(seed);
  for (int round = 0; round < count; ++round) {
    Index size = array.shape;
    std::vector<std::int64_t> start;
    const auto padding = static_cast<Padding>(random() % 6);
    for (int dim = kDims - dims; dim < kDims; ++dim) {
      const auto length = static_cast<int>(array.shape[dim]);
      if (padding == Padding::error) {
        size[dim] = 1 + static_cast<int>(random()) % length;
        size[dim] = std::max<std::int64_t>(1, std::min<std::int64_t>(size[dim], length));
        start.push_back(static_cast<std::int64_t>(random() % static_cast<unsigned>(length - size[dim] + 1)));
      } else {
        size[dim] = 1 + random() % 9;
        start.push_back(static_cast<std::int64_t>(random() % static_cast<unsigned>(length + size[dim] - 1)) -
                        size[dim] + 1);
      }
    }
    PatchKind kind;
    std::memset(kind.constant, 9, sizeof kind.constant);
    const One one(volume, size, dims, start, padding, kind);
    CHECK(one.is_made());
    CHECK(one.out == expected_of(array, size, dims, start, padding, 9));
  }
}

}  // namespace

TEST("patches: places beyond the ends are those of numpy.pad") {
  const auto row = [](Padding padding) {
    std::vector<std::int64_t> found;
    for (std::int64_t at = -4; at < 8; ++at) found.push_back(padded_index(at, 3, padding));
    return found;
  };
  using Row = std::vector<std::int64_t>;
  CHECK((row(Padding::constant) == Row{-1, -1, -1, -1, 0, 1, 2, -1, -1, -1, -1, -1}));
  CHECK((row(Padding::edge) == Row{0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2}));
  CHECK((row(Padding::reflect) == Row{0, 1, 2, 1, 0, 1, 2, 1, 0, 1, 2, 1}));
  CHECK((row(Padding::symmetric) == Row{2, 2, 1, 0, 0, 1, 2, 2, 1, 0, 0, 1}));
  CHECK((row(Padding::wrap) == Row{2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1}));
  for (const Padding padding : {Padding::edge, Padding::reflect, Padding::symmetric, Padding::wrap}) {
    CHECK(padded_index(-5, 1, padding) == 0 && padded_index(3, 1, padding) == 0);
  }
}

TEST("patches: arrays in memory, in any order of dimensions and bytes") {
  for (const std::int64_t itemsize : {1, 2, 3, 4, 8, 16}) {
    Array array(sides({2, 7, 9, 11}), itemsize);
    VolumeSource source = memory_source(array);
    check_patches(volume_of(source, array.shape, sides({1, 4, 4, 4}), itemsize), array, 3, 1);
    Array turned(sides({2, 11, 9, 7}), itemsize);  // the same memory, its last three dimensions turned around
    Index place{};
    std::swap(source.steps[2], source.steps[4]);
    do {
      const Index other{place[0], place[1], place[4], place[3], place[2]};
      std::memcpy(turned.at(place), array.at(other), static_cast<std::size_t>(itemsize));
    } while (next_place(&place, turned.shape));
    check_patches(volume_of(source, turned.shape, sides({1, 4, 4, 4}), itemsize), turned, 3, 2);
    if (itemsize != 2 && itemsize != 4 && itemsize != 8) continue;
    source = memory_source(array);
    source.swapped = static_cast<std::int32_t>(itemsize);
    Array swapped = array;
    swap_bytes(swapped.content.data(), static_cast<std::int64_t>(swapped.content.size()), source.swapped);
    check_patches(volume_of(source, array.shape, sides({1, 4, 4, 4}), itemsize), swapped, 3, 3);
  }
}

TEST("patches: chunks that are files, whole, in slabs and some together") {
  using Codec = VolumeSource::Codec;
  Array array(sides({13, 17, 19}), 2);
  const std::vector<Index> units = {sides({8, 8, 8}), sides({2, 8, 8}), sides({16, 8, 16})};
  for (const Codec codec : {Codec::none, Codec::blosc, Codec::gzip, Codec::zlib, Codec::zstd}) {
    const ChunkFiles files(array, sides({8, 8, 8}), 3, codec);
    for (const Index& unit : units) {
      if (unit[2] == 2 && codec != Codec::none && codec != Codec::blosc) continue;
      check_patches(volume_of(files.source, array.shape, unit, 2), array, 3, 4);
      for (const std::int64_t slots : {1, 3, 200}) {
        OwnUnits memory(300, slots, 16 * 8 * 16 * 2);
        check_patches(volume_of(files.source, array.shape, unit, 2, memory.get(), 7), array, 3, 5);
      }
    }
  }
}

TEST("patches: a slab that ends within Blosc's blocks, and blocks in any order") {
  Array array(sides({8, 6, 10}), 4);
  for (const std::size_t block : {40, 100, 236}) {
    BloscOptions options;
    options.block = block;
    options.is_reversed = block == 100;
    const ChunkFiles files(array, sides({8, 6, 10}), 3, VolumeSource::Codec::blosc, options);
    check_patches(volume_of(files.source, array.shape, sides({1, 6, 10}), 4), array, 3, 6);
    check_patches(volume_of(files.source, array.shape, sides({4, 6, 10}), 4), array, 3, 7);
  }
}

TEST("patches: a chunk that is not there is filled, as long as the metadata are") {
  Array array(sides({8, 8}), 2);
  ChunkFiles files(array, sides({4, 4}), 2, VolumeSource::Codec::zstd);
  files.source.fill = std::string("\1\2", 2);
  std::remove((files.source.folder + "c.1.0").c_str());
  const auto volume = volume_of(files.source, array.shape, sides({4, 4}), 2);
  const One one(volume, sides({2, 2}), 2, {5, 1});
  CHECK(one.is_made() && one.out == Content({1, 2, 1, 2, 1, 2, 1, 2}));
  std::remove(files.source.metadata.c_str());
  CHECK(!One(volume, sides({2, 2}), 2, {5, 1}).is_made());
  CHECK(One(volume, sides({2, 2}), 2, {1, 1}).is_made());
}

TEST("patches: damaged, cut off and oversized chunks are declined, and nothing is left behind") {
  using Codec = VolumeSource::Codec;
  Array array(sides({8, 8}), 2);
  for (const Codec codec : {Codec::none, Codec::blosc, Codec::gzip, Codec::zlib, Codec::zstd}) {
    BloscOptions whole;
    whole.block = 32;
    ChunkFiles files(array, sides({4, 4}), 2, codec, whole);
    OwnUnits memory(4, 4, 64);
    const auto volume = volume_of(files.source, array.shape, sides({4, 4}), 2, memory.get());
    for (const Content& bad : {Content{}, Content{1, 2, 3}, Content(1 << 17, 1), Content(33, 0)}) {
      files.write(Index{0, 0, 0, 1, 1}, bad);
      CHECK(!One(volume, sides({8, 8}), 2, {0, 0}).is_made());
      CHECK(One(volume, sides({8, 4}), 2, {0, 0}).is_made());
      CHECK(!memory.get()->is_coming(3) && !memory.get()->is_there(3));
    }
  }
}

TEST("patches: an array in a file as it is, in C and in Fortran's order, and backwards") {
  for (const std::int64_t itemsize : {1, 2, 4, 8, 16}) {
    Array array(sides({5, 9, 14}), itemsize), turned(sides({14, 9, 5}), itemsize);
    Index place{};
    do {
      std::memcpy(turned.at(Index{0, 0, place[4], place[3], place[2]}), array.at(place),
                  static_cast<std::size_t>(itemsize));
    } while (next_place(&place, array.shape));
    Array mirrored(array.shape, itemsize);
    place = Index{};
    do {
      std::memcpy(mirrored.at(Index{0, 0, place[2], 8 - place[3], 13 - place[4]}), array.at(place),
                  static_cast<std::size_t>(itemsize));
    } while (next_place(&place, array.shape));
    const Index steps = steps_in_c_order(array.shape, itemsize);
    const Index fortran{0, 0, itemsize, 5 * itemsize, 45 * itemsize}, back{0, 0, steps[2], -steps[3], -steps[4]};
    for (const auto& [content_of, order] : {std::pair{&array, steps}, {&turned, fortran}, {&mirrored, back}}) {
      Folder folder;
      Content content(11, 3);
      append(&content, content_of->content);
      const std::string path = folder.write("raw", content);
      VolumeSource source;
      source.kind = VolumeSource::Kind::raw;
      source.file = std::make_shared<DataFile>(path, state_of(path));
      source.itemsize = itemsize;
      source.offset = 11;
      source.steps = order;
      for (const Index& unit : {sides({1, 4, 14}), sides({2, 3, 4}), sides({5, 9, 14})}) {
        check_patches(volume_of(source, array.shape, unit, itemsize), array, 3, 8);
        OwnUnits memory(100, 5, product_of(unit) * itemsize);
        check_patches(volume_of(source, array.shape, unit, itemsize, memory.get()), array, 3, 9);
      }
      // Changed, or cut off: declined, also where all of it is remembered.
      OwnUnits memory(1, 1, product_of(array.shape) * itemsize);
      const auto volume = volume_of(source, array.shape, array.shape, itemsize, memory.get());
      CHECK(One(volume, sides({2, 2, 2}), 3, {0, 0, 0}).is_made());
      content.pop_back();
      folder.write("raw", content);
      CHECK(!One(volume, sides({2, 2, 2}), 3, {0, 0, 0}).is_made());
      source.file = std::make_shared<DataFile>(path, state_of(path));
      CHECK(!One(volume_of(source, array.shape, array.shape, itemsize), sides({2, 2, 2}), 3, {0, 0, 0}).is_made());
    }
  }
}

TEST("patches: an array whose planes are in files of their own") {
  Array array(sides({6, 5, 7}), 2);
  constexpr std::size_t plane = 5 * 7 * 2;
  Folder folder;
  VolumeSource source;
  source.kind = VolumeSource::Kind::raw;
  source.itemsize = 2;
  source.piece_nbytes = plane;
  source.steps = steps_in_c_order(array.shape, 2);
  std::string path;
  for (std::size_t i = 0; i < 6; ++i) {
    Content content(3 * i, 9);  // each begins elsewhere
    content.insert(content.end(), array.content.begin() + static_cast<std::ptrdiff_t>(i * plane),
                   array.content.begin() + static_cast<std::ptrdiff_t>((i + 1) * plane));
    path = folder.write(std::to_string(i).c_str(), content);
    source.pieces.push_back({std::make_shared<DataFile>(path, state_of(path)), static_cast<std::int64_t>(3 * i)});
  }
  for (const Index& unit : {sides({1, 5, 7}), sides({1, 2, 3}), sides({4, 5, 7}), sides({6, 1, 7})}) {
    check_patches(volume_of(source, array.shape, unit, 2), array, 3, 4);
  }
  Array turned(sides({5, 6, 7}), 2);  // reversed along the planes, which are the second dimension
  Index place{};
  do {
    std::memcpy(turned.at(Index{0, 0, place[3], 5 - place[2], place[4]}), array.at(place), 2);
  } while (next_place(&place, array.shape));
  VolumeSource other = source;
  other.steps = Index{0, 0, source.steps[3], -source.steps[2], source.steps[4]};
  check_patches(volume_of(other, turned.shape, sides({5, 1, 7}), 2), turned, 3, 4);
  // The sizes of all must be those of the array; a file that has changed is left to Python.
  Volume wrong = *volume_of(source, array.shape, array.shape, 2);
  CHECK(wrong.is_valid());
  wrong.source.pieces.pop_back();
  CHECK(!wrong.is_valid());
  wrong.source.pieces.push_back({nullptr, 0});
  CHECK(!wrong.is_valid());
  const auto volume = volume_of(source, array.shape, sides({1, 5, 7}), 2);
  folder.write("5", Content(4, 0));
  CHECK(One(volume, sides({5, 5, 7}), 3, {0, 0, 0}).is_made());
  CHECK(!One(volume, sides({1, 5, 7}), 3, {5, 0, 0}).is_made());
}

TEST("patches: an array in any order of its dimensions, each forwards or backwards") {
  std::mt19937 random(17);
  for (int round = 0; round < 200; ++round) {
    const int dims = 3 + static_cast<int>(random() % 3);
    const std::int64_t itemsize = std::int64_t{1} << random() % 5;
    Index shape = sides({1}), unit = shape;
    for (int dim = kDims - dims; dim < kDims; ++dim) {
      shape[dim] = 1 + random() % (dim < 2 ? 3 : 9);
      unit[dim] = 1 + random() % static_cast<std::uint32_t>(shape[dim] + 1);
    }
    Array array(shape, itemsize);
    std::array<int, kDims> order{0, 1, 2, 3, 4};  // the last dimension lies closest
    std::shuffle(order.begin(), order.end(), random);
    VolumeSource source;
    source.itemsize = itemsize;
    std::int64_t step = itemsize, first = 0;  // of the array's first element
    for (int at = kDims; at-- > 0;) {
      const int dim = order[static_cast<std::size_t>(at)];
      const bool is_backwards = random() % 2 == 0;
      source.steps[dim] = is_backwards ? -step : step;
      if (is_backwards) first += (shape[dim] - 1) * step;
      step *= shape[dim];
    }
    Content stored(array.content.size());
    Index place{};
    do {
      std::int64_t to = first;
      for (int dim = 0; dim < kDims; ++dim) to += place[dim] * source.steps[dim];
      std::memcpy(&stored[static_cast<std::size_t>(to)], array.at(place), static_cast<std::size_t>(itemsize));
    } while (next_place(&place, array.shape));
    source.data = stored.data() + first;
    check_patches(volume_of(source, shape, unit, itemsize), array, 3, 18);
    Folder folder;
    Content content(7, 3);
    append(&content, stored);
    const std::string path = folder.write("raw", content);
    source.kind = VolumeSource::Kind::raw;
    source.file = std::make_shared<DataFile>(path, state_of(path));
    source.offset = 7;
    check_patches(volume_of(source, shape, unit, itemsize), array, 3, 19);
    VolumeSource cut = source;  // at the dimension that comes first in the file
    cut.file = nullptr;
    cut.offset = 0;
    const auto pieces = static_cast<std::size_t>(shape[order[0]]), nbytes = stored.size() / pieces;
    cut.piece_nbytes = static_cast<std::int64_t>(nbytes);
    for (std::size_t i = 0; i < pieces; ++i) {
      Content piece(i % 3, 9);
      append(&piece, slice(stored, i * nbytes, (i + 1) * nbytes));
      const std::string file = folder.write(std::to_string(i).c_str(), piece);
      cut.pieces.push_back({std::make_shared<DataFile>(file, state_of(file)), static_cast<std::int64_t>(i % 3)});
    }
    check_patches(volume_of(cut, shape, unit, itemsize), array, 3, 20);
    // An array with gaps does not lie in a file as it is.
    const int dim = order[0];
    if (shape[dim] == 1) continue;
    Volume other = *volume_of(source, shape, unit, itemsize);
    other.source.steps[dim] += other.source.steps[dim] > 0 ? itemsize : -itemsize;
    CHECK(!other.is_valid());
  }
}

TEST("patches: chunks that are parts of a file") {
  Array array(sides({10, 12, 9}), 4);
  const Index chunk = sides({4, 5, 9});
  Grid grid;
  CHECK(Grid::make(array.shape, chunk, &grid));
  Folder folder;
  Content content(5, 0);
  std::vector<std::int64_t> offsets, sizes;
  std::vector<std::uint32_t> masks;
  Index place{};
  int number = 0;
  do {
    Content stored = chunk_of(array, grid, place);
    const bool is_plain = number++ % 3 == 2;
    if (!is_plain) stored = zlib_of(shuffled(stored, 4));
    offsets.push_back(static_cast<std::int64_t>(content.size()));
    sizes.push_back(static_cast<std::int64_t>(stored.size()));
    masks.push_back(is_plain ? 3 : 0);
    append(&content, stored);
  } while (next_place(&place, grid.counts));
  const std::string path = folder.write("chunks", content);
  VolumeSource source;
  source.kind = VolumeSource::Kind::segments;
  source.file = std::make_shared<DataFile>(path, state_of(path));
  source.itemsize = 4;
  source.chunks = grid;
  source.dims = 3;
  source.offsets = offsets.data();
  source.sizes = sizes.data();
  source.masks = masks.data();
  source.segments = static_cast<std::int64_t>(offsets.size());
  source.filters = {{ChunkFilter::shuffle, 4}, {ChunkFilter::deflate}};
  source.fill.assign(4, '\0');
  check_patches(volume_of(source, array.shape, chunk, 4), array, 3, 10);
  check_patches(volume_of(source, array.shape, sides({4, 10, 18}), 4), array, 3, 11);
  // One that was never written, and one whose bytes are not there.
  offsets[0] = -1;
  const One filled(volume_of(source, array.shape, chunk, 4), sides({1, 1, 1}), 3, {0, 0, 0});
  CHECK(filled.is_made() && filled.out == Content(4, 0));
  offsets[1] = static_cast<std::int64_t>(content.size()) - 1;
  CHECK(!One(volume_of(source, array.shape, chunk, 4), sides({1, 1, 1}), 3, {0, 5, 0}).is_made());
}

// An array in a file as it is.
VolumeSource source_in_file(Folder* folder, const Array& array, std::int64_t itemsize) {
  const std::string path = folder->write("raw", array.content);
  VolumeSource source;
  source.kind = VolumeSource::Kind::raw;
  source.file = std::make_shared<DataFile>(path, state_of(path));
  source.itemsize = itemsize;
  source.steps = steps_in_c_order(array.shape, itemsize);
  return source;
}

TEST("patches: elements that are scaled are what nibabel makes of them") {
  Array array(sides({4, 5}), 2);
  Folder folder;
  VolumeSource source = source_in_file(&folder, array, 2);
  source.number = VolumeSource::Number::i16;
  source.slope = 0.1;
  source.intercept = -3.5;
  const One one(volume_of(source, array.shape, sides({2, 5}), 8), sides({4, 5}), 2, {0, 0});
  CHECK(one.is_made());
  for (std::size_t i = 0; i < 20; ++i) {
    std::int16_t stored;
    double value;
    std::memcpy(&stored, array.content.data() + 2 * i, 2);
    std::memcpy(&value, one.out.data() + 8 * i, 8);
    CHECK(value == static_cast<double>(stored) * 0.1 + -3.5);
  }
}

TEST("patches: integers that are scaled to integers") {
  Array array(sides({4, 50}), 2);
  Folder folder;
  VolumeSource source = source_in_file(&folder, array, 2);
  source.slope = -3.0;
  source.intercept = 1000.0;
  source.scaled = VolumeSource::Number::i32;
  for (const std::int32_t bits : {1, 12, 16, 64}) {
    source.bits = bits;
    for (const bool is_signed : {false, true}) {
      source.number = is_signed ? VolumeSource::Number::i16 : VolumeSource::Number::u16;
      const One one(volume_of(source, array.shape, sides({2, 50}), 4), sides({4, 50}), 2, {0, 0});
      CHECK(one.is_made());
      for (std::size_t i = 0; i < 200; ++i) {
        std::uint16_t stored;
        std::int32_t value;
        std::memcpy(&stored, array.content.data() + 2 * i, 2);
        std::memcpy(&value, one.out.data() + 4 * i, 4);
        const int range = 1 << std::min(bits, 16);
        int wanted = stored % range;
        if (is_signed && wanted >= range / 2) wanted -= range;
        CHECK(value == wanted * -3 + 1000);
      }
    }
  }
  Volume wrong = *volume_of(source, array.shape, array.shape, 4);
  wrong.source.slope = 0.5;
  CHECK(!wrong.is_valid());
  wrong.source.slope = 2.0;
  CHECK(wrong.is_valid());
  wrong.itemsize = 8;
  CHECK(!wrong.is_valid());
}

TEST("patches: elements that are no number are kept, replaced, or left to Python") {
  for (const std::int32_t word : {2, 4, 8}) {
    Array array(sides({3, 40}), word);
    std::fill(array.content.begin(), array.content.end(), 0);
    const auto nan = [&](std::int64_t i) {
      std::memset(array.content.data() + i * word, 0xFF, static_cast<std::size_t>(word));
    };
    const auto volume = volume_of(memory_source(array), array.shape, array.shape, word);
    PatchKind kind;
    kind.word = word;
    std::memset(kind.number, 1, sizeof kind.number);
    for (const bool has_nan : {false, true}) {
      if (has_nan) nan(0), nan(77);
      kind.nan = PatchKind::Nan::keep;
      CHECK(One(volume, array.shape, 2, {0, 0}, Padding::error, kind).out == array.content);
      kind.nan = PatchKind::Nan::decline;
      CHECK(One(volume, array.shape, 2, {0, 0}, Padding::error, kind).is_made() == !has_nan);
      kind.nan = PatchKind::Nan::replace;
      const One replaced(volume, array.shape, 2, {0, 0}, Padding::error, kind);
      Content expected = array.content;
      for (const std::size_t i : {0, 77}) {
        if (has_nan)
          std::memset(expected.data() + i * static_cast<std::size_t>(word), 1, static_cast<std::size_t>(word));
      }
      CHECK(replaced.is_made() && replaced.out == expected);
    }
  }
}

TEST("patches: what does not fit together is refused") {
  Array array(sides({8, 8}), 2);
  ChunkFiles files(array, sides({4, 4}), 2, VolumeSource::Codec::zstd);
  const auto is_valid = [&](const Index& unit, std::int64_t itemsize, std::int32_t swapped = 0) {
    Volume volume;
    CHECK(Grid::make(array.shape, unit, &volume.units));
    volume.itemsize = itemsize;
    volume.source = files.source;
    volume.source.swapped = swapped;
    return volume.is_valid();
  };
  CHECK(is_valid(sides({4, 4}), 2) && is_valid(sides({8, 8}), 2) && is_valid(sides({4, 4}), 2, 2));
  CHECK(!is_valid(sides({2, 4}), 2) && !is_valid(sides({4, 2}), 2));  // parts of what is decoded as a whole
  CHECK(!is_valid(sides({3, 4}), 2) && !is_valid(sides({4, 4}), 4) && !is_valid(sides({4, 4}), 2, 8));
  Grid grid;
  const std::int64_t large = std::int64_t{1} << 40;
  CHECK(!Grid::make(sides({0, 4}), sides({1, 1}), &grid) && !Grid::make(sides({4, 4}), sides({1, 0}), &grid));
  CHECK(!Grid::make(sides({4, 4}), sides({large, large}), &grid));
  CHECK(!Grid::make(sides({large, large}), sides({1, 1}), &grid));
}

TEST("patches: threads with one memory, which is too small, copy what is there") {
  Array array(sides({24, 24, 24}), 2);
  ChunkFiles files(array, sides({8, 8, 8}), 3, VolumeSource::Codec::blosc);
  for (const std::int64_t slots : {1, 4, 27}) {
    OwnUnits memory(27, slots, 8 * 8 * 8 * 2);
    const auto volume = volume_of(files.source, array.shape, sides({8, 8, 8}), 2, memory.get());
    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < 16; ++thread) {
      threads.emplace_back([&, thread] { check_patches(volume, array, 3, 100 + thread, 25); });
    }
    for (std::thread& thread : threads) thread.join();
    for (std::int64_t key = 0; key < 27; ++key) CHECK(!memory.get()->is_coming(key));
  }
}
