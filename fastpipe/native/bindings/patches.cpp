#include "../patches.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>

#include "arrays.h"

namespace fastpipe::bindings {

namespace {

using StepTuple = std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int64_t>;
using StateTuple = std::tuple<std::uint64_t, std::uint64_t, std::int64_t, std::int64_t>;
using PieceTuple = std::tuple<nb::bytes, StateTuple, std::int64_t>;
using Sides = std::vector<std::int64_t>;

// What a source, and a volume, refers to: dropped with the lock held.
struct BoundSource {
  VolumeSource source;
  nb::object keep = nb::none();
};
struct BoundVolume {
  std::shared_ptr<const Volume> volume;
  nb::object keep;
};
struct BoundPatches : BoundWork {
  std::shared_ptr<PatchBatch> work;
};

// Sides with others of 1 in front.
Index index_of(const Sides& sides) {
  check(!sides.empty() && sides.size() <= std::size_t(kDims), "from one to five dimensions");
  Index index;
  index.fill(1);
  std::copy(sides.begin(), sides.end(), index.end() - static_cast<std::ptrdiff_t>(sides.size()));
  return index;
}

std::string path_of(const nb::bytes& path) {
  // A name with a zero in it ends there for the system, and is another file's.
  check(std::strlen(path.c_str()) == path.size(), "a path without a zero");
  return path.c_str();
}

std::shared_ptr<DataFile> file_of(const nb::bytes& path, const StateTuple& state) {
  const auto [device, inode, size, modified] = state;
  return std::make_shared<DataFile>(path_of(path), DataFile::State{device, inode, size, modified});
}

Grid grid_of(const Sides& shape, const Sides& part) {
  Grid grid;
  check(shape.size() == part.size() && Grid::make(index_of(shape), index_of(part), &grid),
        "a shape, and parts of as many sides, from 1");
  return grid;
}

std::string fill_of(const nb::bytes& fill, std::int64_t itemsize) {
  check(static_cast<std::int64_t>(fill.size()) == itemsize, "an element of which nothing was written");
  return {fill.c_str(), fill.size()};
}

VolumeSource::Codec codec_of(const std::string& name) {
  const char* const codecs[] = {"none", "blosc", "gzip", "zlib", "zstd"};
  const auto found = std::find(std::begin(codecs), std::end(codecs), name);
  check(found != std::end(codecs), "a codec");
  return static_cast<VolumeSource::Codec>(found - codecs);
}

VolumeSource::Number number_of(const std::string& name) {
  const char* const numbers[] = {"i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"};
  const auto found = std::find(std::begin(numbers), std::end(numbers), name);
  check(found != std::end(numbers), "integers or floats");
  return static_cast<VolumeSource::Number>(found - numbers + 1);
}

BoundSource in_memory(const nb::ndarray<nb::numpy, nb::ro, nb::device::cpu>& array) {
  BoundSource made;
  const std::size_t dims = array.ndim();
  check(dims >= 1 && dims <= std::size_t(kDims), "from one to five dimensions");
  made.source.kind = VolumeSource::Kind::memory;
  made.source.itemsize = static_cast<std::int64_t>(array.itemsize());
  made.source.data = static_cast<const std::uint8_t*>(array.data());
  for (std::size_t dim = 0; dim < dims; ++dim) {
    made.source.steps[kDims - dims + dim] = array.stride(dim) * made.source.itemsize;
  }
  made.source.dims = static_cast<int>(dims);
  made.keep = nb::cast(array);
  return made;
}

BoundSource in_file(const nb::bytes& path, const StateTuple& state, std::int64_t itemsize, std::int64_t offset,
                    const Sides& steps) {
  check(!steps.empty() && steps.size() <= std::size_t(kDims), "from one to five dimensions");
  BoundSource made;
  made.source.kind = VolumeSource::Kind::raw;
  made.source.file = file_of(path, state);
  made.source.itemsize = itemsize;
  made.source.offset = offset;
  std::copy(steps.begin(), steps.end(), made.source.steps.end() - static_cast<std::ptrdiff_t>(steps.size()));
  return made;
}

BoundSource in_pieces(const std::vector<PieceTuple>& pieces, std::int64_t piece_nbytes, std::int64_t itemsize,
                      const Sides& steps) {
  check(!steps.empty() && steps.size() <= std::size_t(kDims) && !pieces.empty(), "from one to five dimensions");
  BoundSource made;
  made.source.kind = VolumeSource::Kind::raw;
  for (const auto& [path, state, offset] : pieces) made.source.pieces.push_back({file_of(path, state), offset});
  made.source.piece_nbytes = piece_nbytes;
  made.source.itemsize = itemsize;
  std::copy(steps.begin(), steps.end(), made.source.steps.end() - static_cast<std::ptrdiff_t>(steps.size()));
  return made;
}

BoundSource in_files(const nb::bytes& folder, const nb::bytes& metadata, const std::string& prefix,
                     const std::string& separator, const Sides& shape, const Sides& chunk, std::int64_t itemsize,
                     const std::string& codec, const nb::bytes& fill) {
  BoundSource made;
  check(separator.size() == 1 && prefix.size() < 64, "names of chunks");
  made.source.kind = VolumeSource::Kind::files;
  made.source.folder = path_of(folder);
  made.source.metadata = path_of(metadata);
  made.source.prefix = prefix;
  made.source.separator = separator[0];
  made.source.chunks = grid_of(shape, chunk);
  made.source.dims = static_cast<int>(shape.size());
  made.source.itemsize = itemsize;
  made.source.codec = codec_of(codec);
  made.source.fill = fill_of(fill, itemsize);
  return made;
}

BoundSource in_segments(const nb::bytes& path, const StateTuple& state, const Sides& shape, const Sides& chunk,
                        std::int64_t itemsize, In<std::int64_t, 1> offsets, In<std::int64_t, 1> sizes,
                        const std::optional<In<std::uint32_t, 1>>& masks, const std::vector<StepTuple>& filters,
                        const nb::bytes& fill, bool is_clipped) {
  BoundSource made;
  VolumeSource& source = made.source;
  check(offsets.size() == sizes.size() && (!masks.has_value() || masks->size() == sizes.size()),
        "a number for each chunk");
  source.kind = VolumeSource::Kind::segments;
  source.file = file_of(path, state);
  source.chunks = grid_of(shape, chunk);
  source.dims = static_cast<int>(shape.size());
  source.itemsize = itemsize;
  source.offsets = offsets.data();
  source.sizes = sizes.data();
  source.masks = masks.has_value() ? masks->data() : nullptr;
  source.segments = static_cast<std::int64_t>(offsets.size());
  for (const auto& [filter, element, codec, block] : filters) {
    source.filters.push_back({static_cast<ChunkFilter>(filter), element, codec, block});
  }
  source.fill = fill_of(fill, itemsize);
  source.is_clipped = is_clipped;
  made.keep = nb::make_tuple(offsets, sizes, masks);
  return made;
}

BoundVolume make_volume(const Sides& shape, const Sides& unit, std::int64_t itemsize, const BoundSource& source,
                        nb::handle units, std::int64_t first_key) {
  auto made = std::make_shared<Volume>();
  made->units = grid_of(shape, unit);
  made->itemsize = itemsize;
  made->source = source.source;
  made->memory = units.is_none() ? nullptr : &nb::cast<UnitMemory&>(units);
  made->first_key = first_key;
  check(made->is_valid(), "a volume whose parts fit together");
  return {std::move(made), nb::make_tuple(source.keep, units)};
}

PatchKind make_kind(const Sides& size, int dims, std::int64_t itemsize, int padding, const nb::bytes& constant, int nan,
                    int word, const nb::bytes& number) {
  PatchKind kind;
  check(padding >= 0 && padding <= static_cast<int>(Padding::wrap) && nan >= 0 && nan <= 2, "a padding");
  kind.size = index_of(size);
  kind.dims = dims;
  kind.itemsize = itemsize;
  kind.padding = static_cast<Padding>(padding);
  kind.nan = static_cast<PatchKind::Nan>(nan);
  kind.word = word;
  check(kind.is_valid() && constant.size() == std::size_t(itemsize) && number.size() == std::size_t(itemsize),
        "a patch, and elements that are put into it");
  std::memcpy(kind.constant, constant.c_str(), constant.size());
  std::memcpy(kind.number, number.c_str(), number.size());
  return kind;
}

std::unique_ptr<BoundPatches> make_batch(const nb::typed<nb::list, nb::object>& kinds,
                                         const nb::typed<nb::list, nb::object>& outs,
                                         const nb::typed<nb::list, nb::object>& volumes, In<std::int64_t, 2> starts,
                                         In<std::int64_t, 1> rows, Out<std::uint8_t, 2> statuses) {
  const std::size_t patches = starts.shape(0);
  check(kinds.size() == outs.size() && kinds.size() > 0 && volumes.size() == patches * kinds.size(),
        "memory for each kind, and a volume, or None, for each patch of each");
  check(rows.size() == patches && statuses.shape(1) == sizeof(Status), "a row for each patch, and statuses");
  std::int64_t last = -1;
  for (std::size_t patch = 0; patch < patches; ++patch) {
    check(rows(patch) >= 0 && rows(patch) < static_cast<std::int64_t>(statuses.shape(0)), "a row outside of the batch");
    last = std::max(last, rows(patch));
  }
  auto bound = std::make_unique<BoundPatches>();
  bound->work = std::make_shared<PatchBatch>();
  bound->any = bound->work;
  PatchBatch& work = *bound->work;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    if (kinds[i].is_none()) {
      work.kinds.emplace_back();
      continue;
    }
    const auto& kind = nb::cast<PatchKind&>(kinds[i]);
    const auto out = nb::cast<Out<std::uint8_t, 2>>(outs[i], false);
    check(static_cast<std::int64_t>(out.shape(1)) == kind.nbytes() && starts.shape(1) == std::size_t(kind.dims),
          "memory of whole patches");
    check(last < static_cast<std::int64_t>(out.shape(0)), "a row outside of the memory");
    work.kinds.push_back({kind, out.data()});
  }
  work.items.reserve(volumes.size());
  std::size_t number = 0;
  for (nb::handle one : volumes) {
    const std::size_t kind = number % kinds.size();
    if (!one.is_none()) {
      check(work.kinds[kind].memory != nullptr, "the kind of what is read");
      std::shared_ptr<const Volume> volume = nb::cast<BoundVolume&>(one).volume;
      check(volume->itemsize == work.kinds[kind].kind.itemsize, "a volume of the kind's elements");
      work.items.push_back({static_cast<std::int64_t>(number / kinds.size()), kind, std::move(volume)});
    }
    ++number;
  }
  work.patches = static_cast<std::int64_t>(patches);
  work.starts = starts.data();
  work.rows = rows.data();
  work.statuses = reinterpret_cast<Status*>(statuses.data());
  if (!work.prepare()) throw std::bad_alloc();
  bound->keep = nb::make_tuple(outs, volumes, starts, rows, statuses);
  return bound;
}

}  // namespace

void register_patches(nb::module_& m) {
  nb::class_<BoundSource>(m, "VolumeSource", "Where the bytes of a volume are: see VolumeSource in volume.h.")
      .def(
          "swap",
          [](BoundSource& self, std::int32_t word) {
            self.source.swapped = word;
            return self;
          },
          nb::arg("word"), "The same with numbers of so many bytes turned around.")
      .def(
          "scale",
          [](BoundSource& self, const std::string& number, double slope, double intercept, const std::string& scaled,
             std::int32_t bits) {
            self.source.number = number_of(number);
            self.source.scaled = number_of(scaled);
            self.source.bits = bits;
            self.source.slope = slope;
            self.source.intercept = intercept;
            return self;
          },
          nb::arg("number"), nb::arg("slope"), nb::arg("intercept"), nb::arg("scaled") = "f8", nb::arg("bits") = 64,
          "The same with elements scaled to float64, or integers to others of up to 32 bits; types are as NumPy has "
          "them; bits: of an integer, how many count.")
      .def(
          "copy_of",
          [](BoundSource& self, const nb::bytes& path, const StateTuple& state) {
            self.source.copied = file_of(path, state);
            return self;
          },
          nb::arg("path"), nb::arg("state"), "The same as a copy of another file.");
  m.def("volume_in_memory", &in_memory, nb::sig("def volume_in_memory(array: object) -> VolumeSource"),
        nb::arg("array").noconvert(), "An array; the memory is kept.");
  m.def("volume_in_file", &in_file, nb::arg("path"), nb::arg("state"), nb::arg("itemsize"), nb::arg("offset"),
        nb::arg("steps"),
        "An array that lies in a file as it is; state: its device, inode, bytes and time of modification in ns; steps: "
        "bytes from one element to the next, below 0 where the order is reversed.");
  m.def("volume_in_pieces", &in_pieces, nb::arg("pieces"), nb::arg("piece_nbytes"), nb::arg("itemsize"),
        nb::arg("steps"),
        "An array that lies in several files as it is; pieces: path, state and first byte of each; piece_nbytes: bytes "
        "of it in each file.");
  m.def("volume_in_files", &in_files, nb::arg("folder"), nb::arg("metadata"), nb::arg("prefix"), nb::arg("separator"),
        nb::arg("shape"), nb::arg("chunk"), nb::arg("itemsize"), nb::arg("codec"), nb::arg("fill"),
        "An array each of whose chunks is a file.");
  m.def("volume_in_segments", &in_segments, nb::arg("path"), nb::arg("state"), nb::arg("shape"), nb::arg("chunk"),
        nb::arg("itemsize"), nb::arg("offsets").noconvert(), nb::arg("sizes").noconvert(),
        nb::arg("masks").noconvert().none(), nb::arg("filters"), nb::arg("fill"), nb::arg("is_clipped") = false,
        "An array whose chunks are parts of a file; filters: number, element, codec and block of each.");
  m.def(
      "decode_chunk",
      [](const std::string& codec, nb::handle stored, Out<std::uint8_t, 1> out) {
        const VolumeSource::Codec by = codec_of(codec);
        const Buffer buffer(stored);
        Scratch& scratch = own_scratch();
        scratch.chunk.reset();
        Problem problem = Problem::none;
        {
          nb::gil_scoped_release free;
          problem = decode_chunk(by, buffer.bytes(), out.data(), static_cast<std::int64_t>(out.size()), scratch);
        }
        return static_cast<int>(problem);
      },
      nb::arg("codec"), nb::arg("stored"), nb::arg("out").noconvert(),
      "Undo the codec of a whole chunk; 0, or the number of a Problem of codecs.h.");
  nb::class_<BoundVolume>(m, "Volume", "An array that is read in units: see volume.h.")
      .def(
          "__init__",
          [](BoundVolume* self, const Sides& shape, const Sides& unit, std::int64_t itemsize, const BoundSource& source,
             nb::handle units, std::int64_t first_key) {
            new (self) BoundVolume(make_volume(shape, unit, itemsize, source, units, first_key));
          },
          nb::arg("shape"), nb::arg("unit"), nb::arg("itemsize"), nb::arg("source"),
          nb::arg("units").sig("UnitMemory | None").none(), nb::arg("first_key"));
  nb::class_<PatchKind>(m, "PatchKind", "One of a sample's values, in all patches: see patches.h.")
      .def(
          "__init__",
          [](PatchKind* self, const Sides& size, int dims, std::int64_t itemsize, int padding,
             const nb::bytes& constant, int nan, int word, const nb::bytes& number) {
            new (self) PatchKind(make_kind(size, dims, itemsize, padding, constant, nan, word, number));
          },
          nb::arg("size"), nb::arg("dims"), nb::arg("itemsize"), nb::arg("padding"), nb::arg("constant"),
          nb::arg("nan"), nb::arg("word"), nb::arg("number"));
  nb::class_<BoundPatches, BoundWork>(m, "PatchBatch", "A batch of patches that is read.")
      .def_prop_ro(
          "is_complete", [](const BoundPatches& self) { return self.work->is_complete(); },
          "Whether all of it was done; False of one that was cancelled.")
      .def_prop_ro(
          "times",
          [](const BoundPatches& self) {
            const PatchTotals& totals = self.work->totals;
            return std::make_tuple(totals.decode.load(), totals.copy.load());
          },
          "Nanoseconds of decoding, with reading, and of copying, summed over patches.")
      .def_prop_ro(
          "nbytes",
          [](const BoundPatches& self) {
            const PatchTotals& totals = self.work->totals;
            return std::make_tuple(totals.decoded.load(), totals.copied.load());
          },
          "Bytes of units that were decoded, and of patches that were copied.");
  m.def("patch_batch", &make_batch, nb::arg("kinds"), nb::arg("outs"), nb::arg("volumes"),
        nb::arg("starts").noconvert(), nb::arg("rows").noconvert(), nb::arg("statuses").noconvert(),
        "A batch of patches: see PatchBatch in patches.h.  volumes: patch by patch, None where Python reads.");
}

}  // namespace fastpipe::bindings
