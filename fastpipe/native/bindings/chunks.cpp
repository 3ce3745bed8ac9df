#include "../chunks.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <tuple>

#include "arrays.h"

namespace fastpipe::bindings {

namespace {

using StepTuple = std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int64_t>;
using StateTuple = std::tuple<std::uint64_t, std::uint64_t, std::int64_t, std::int64_t>;

struct BoundDataset {
  std::shared_ptr<ChunkedDataset> dataset;
  nb::object keep;
};

// A file that is open, in Python's hands.
struct LentFile {
  std::shared_ptr<DataFile> file;
  std::optional<DataFile::Opened> opened;
};

std::unique_ptr<LentFile> lend(DataFile& file) {
  auto made = std::make_unique<LentFile>();
  made->file = lent(&file);
  int error = 0;
  {
    nb::gil_scoped_release free;
    made->opened.emplace(file);
    error = errno;
  }
  if (made->opened->descriptor() < 0) {
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  return made;
}

struct BoundRows : BoundWork {
  std::shared_ptr<RowBatch> work;
};

std::shared_ptr<DataFile> make_file(const nb::bytes& path, const StateTuple& state) {
  // A name with a zero in it ends there for the system, and is another file's.
  check(std::strlen(path.c_str()) == path.size(), "a path without a zero");
  const auto [device, inode, size, modified] = state;
  return std::make_shared<DataFile>(path.c_str(), DataFile::State{device, inode, size, modified});
}

std::vector<FilterStep> steps_of(const std::vector<StepTuple>& filters) {
  std::vector<FilterStep> steps;
  for (const auto& [filter, element, codec, block] : filters) {
    steps.push_back({static_cast<ChunkFilter>(filter), element, codec, block});
  }
  return steps;
}

void make_dataset(BoundDataset* self, DataFile& file, const std::vector<std::int64_t>& shape,
                  const std::vector<std::int64_t>& chunk, std::int64_t itemsize, int sample_dims,
                  const std::vector<StepTuple>& filters, In<std::int64_t, 1> offsets, In<std::int64_t, 1> sizes,
                  In<std::uint32_t, 1> masks, const nb::bytes& fill, std::optional<nb::bytes> inside,
                  UnitMemory* memory, std::int64_t first_key, KeptChunks* kept) {
  auto made = std::make_shared<ChunkedDataset>();
  check(made->grid.set(shape, chunk, itemsize, sample_dims), "a shape, and a chunk of as many sides from 1");
  made->chunks = made->grid.groups * made->grid.parts;
  const auto chunks = static_cast<std::size_t>(made->chunks);
  check(offsets.size() == chunks && sizes.size() == chunks && masks.size() == chunks, "a number for each chunk");
  check(fill.size() == static_cast<std::size_t>(itemsize), "an element of which nothing was written");
  check(memory == nullptr || (memory->shape().slot_nbytes >= made->grid.chunk_nbytes && first_key >= 0 &&
                              first_key <= memory->shape().keys - made->chunks),
        "memory for all of the chunks");
  made->file = lent(&file);
  made->offsets = offsets.data();
  made->sizes = sizes.data();
  made->masks = masks.data();
  made->filters = steps_of(filters);
  made->fill.assign(fill.c_str(), fill.c_str() + fill.size());
  if (inside.has_value()) {
    check(static_cast<std::int64_t>(inside->size()) >= made->grid.chunk_nbytes && made->chunks == 1, "all of the data");
    made->inside = reinterpret_cast<const std::uint8_t*>(inside->c_str());
  }
  made->memory = lent(memory);
  made->first_key = first_key;
  made->kept = lent(kept);
  nb::list keep;
  for (const nb::object& one : {nb::find(file), nb::cast(offsets), nb::cast(sizes), nb::cast(masks)}) keep.append(one);
  if (inside.has_value()) keep.append(*inside);
  if (memory != nullptr) keep.append(nb::find(memory));
  if (kept != nullptr) keep.append(nb::find(kept));
  new (self) BoundDataset{std::move(made), std::move(keep)};
}

std::unique_ptr<BoundRows> make_batch(const nb::typed<nb::list, nb::object>& sources, Out<std::uint8_t, 2> statuses,
                                      int threads, double turn, std::int64_t most_keep_nbytes) {
  check(statuses.shape(1) == sizeof(Status) && threads > 0 && turn >= 0 && turn <= 1, "a status of each row, threads");
  auto bound = std::make_unique<BoundRows>();
  bound->work = std::make_shared<RowBatch>();
  bound->any = bound->work;
  RowBatch& work = *bound->work;
  nb::list keep;
  keep.append(nb::cast(statuses));
  const auto rows = static_cast<std::int64_t>(statuses.shape(0));
  for (nb::handle each : sources) {
    const auto given = nb::cast<nb::tuple>(each);
    check(given.size() == 5, "a dataset, samples, rows, memory and the row with which the memory begins");
    const auto& dataset = nb::cast<BoundDataset&>(given[0]);
    const auto samples = nb::cast<In<std::int64_t, 1>>(given[1], false);
    RowBatch::Source source;
    source.dataset = dataset.dataset;
    source.samples = samples.data();
    source.count = static_cast<std::int64_t>(samples.size());
    source.first_row = nb::cast<std::int64_t>(given[4]);
    check(source.first_row >= 0 && (source.first_row == 0 || !given[2].is_none()), "rows from the first one");
    std::int64_t last = source.count - 1;
    if (!given[2].is_none()) {
      const auto of = nb::cast<In<std::int64_t, 1>>(given[2], false);
      check(of.size() == samples.size(), "a row for each sample");
      source.rows = of.data();
      for (std::int64_t i = 0; i < source.count; ++i) {
        check(source.rows[i] >= source.first_row, "rows from the first one");
        last = i == 0 ? source.rows[i] : std::max(last, source.rows[i]);
      }
    }
    const SampleGrid& grid = source.dataset->grid;
    for (std::int64_t i = 0; i < source.count; ++i) {
      check(source.samples[i] >= 0 && source.samples[i] < grid.count, "a sample outside the dataset");
    }
    const auto out = nb::cast<Out<std::uint8_t, 1>>(given[3], false);
    check(last < rows && (grid.sample_nbytes == 0 ||
                          last - source.first_row < static_cast<std::int64_t>(out.size()) / grid.sample_nbytes),
          "memory and a status for each row");
    source.out = out.data();
    work.sources.push_back(std::move(source));
    keep.append(given);
  }
  work.statuses = reinterpret_cast<Status*>(statuses.data());
  work.threads = threads;
  work.turn = turn;
  work.most_keep_nbytes = most_keep_nbytes;
  bool is_prepared = false;
  {
    nb::gil_scoped_release free;
    is_prepared = work.prepare();
  }
  if (!is_prepared) throw std::bad_alloc();
  bound->keep = std::move(keep);
  return bound;
}

// Chunks that are to be kept: the number of their source, their own, and uint8 (nbytes,).
nb::list take_chunks(BoundRows& self) {
  nb::list found;
  for (KeepChunk& one : self.work->take_chunks()) {
    const SampleGrid& grid = self.work->sources[static_cast<std::size_t>(one.source)].dataset->grid;
    found.append(nb::make_tuple(one.source, one.chunk,
                                nb::cast(owned(one.data, {static_cast<std::size_t>(grid.chunk_nbytes)}))));
  }
  return found;
}

// Decode chunks into memory; the number of those before the first that is declined.
std::size_t decode(const BoundDataset& self, In<std::int64_t, 1> numbers, Out<std::uint8_t, 2> out) {
  const ChunkedDataset& dataset = *self.dataset;
  const std::int64_t nbytes = dataset.grid.chunk_nbytes;
  check(out.shape(0) == numbers.size() && static_cast<std::int64_t>(out.shape(1)) == nbytes, "memory for each chunk");
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    check(numbers(i) >= 0 && numbers(i) < dataset.chunks && dataset.offsets[numbers(i)] >= 0,
          "chunks that were written");
  }
  Scratch& scratch = own_scratch();
  std::size_t done = 0;
  nb::gil_scoped_release free;
  DataFile::Opened file(*dataset.file);
  if (file.descriptor() < 0) return 0;
  RowTotals totals;
  for (; done < numbers.size(); ++done) {
    if (!decode_chunk(dataset, file.descriptor(), numbers(done), {0, nbytes}, &out(done, 0), scratch, &totals)
             .is_made()) {
      break;
    }
    scratch.arena.reset();
  }
  return done;
}

// The bytes of a chunk without one of its filters; None where they are damaged.
nb::object undo_filter(const StepTuple& step, const nb::bytes& stored, std::int64_t nbytes) {
  check(nbytes >= 0, "bytes of a chunk");
  Scratch& scratch = own_scratch();
  std::int32_t which = 0;
  std::unique_ptr<std::uint8_t, KeepChunk::Free> made(static_cast<std::uint8_t*>(std::malloc(std::size_t(nbytes) + 1)));
  if (made == nullptr) throw std::bad_alloc();
  const std::vector<FilterStep> steps = steps_of({step});
  const Bytes bytes = bytes_of(stored);
  Problem problem = Problem::none;
  {
    nb::gil_scoped_release free;
    problem = undo_filters(steps, 0, bytes, made.get(), nbytes, {0, nbytes}, scratch.arena, scratch.codecs, &which);
    scratch.arena.reset();
  }
  if (problem == Problem::no_memory) throw std::bad_alloc();
  if (problem != Problem::none) return nb::cast(static_cast<int>(problem));
  return nb::cast(owned(made, {static_cast<std::size_t>(nbytes)}));
}

}  // namespace

void register_chunks(nb::module_& m) {
  nb::class_<LentFile>(m, "LentFile", "A file that is open until it is given back.")
      .def_prop_ro(
          "descriptor",
          [](const LentFile& self) {
            if (!self.opened.has_value()) throw nb::value_error("this file was given back");
            return self.opened->descriptor();
          },
          "Its descriptor, for ``os.pread``.")
      .def("give_back", [](LentFile& self) { self.opened.reset(); }, "Let it be closed.");
  nb::class_<DataFile>(m, "DataFile", "A file of which parts are read: see fastpipe/native/files.h.")
      .def("lend", &lend, "The file, open; an OSError where it is not to be opened, ESTALE where it has changed.");
  m.def("close_idle_files", &close_idle_files, "Close files that are open only to be read again; how many.");
  m.def("data_file", &make_file, nb::arg("path"), nb::arg("state"),
        "A file by its encoded path, in a state: device, inode, bytes, nanoseconds of its modification.");
  nb::class_<KeptChunks>(m, "KeptChunks", "Where decoded chunks of a dataset are kept: see fastpipe/native/kept.h.")
      .def(
          "find", [](KeptChunks& self, std::int64_t chunk) { return self.find(chunk, own_scratch().arena); },
          nb::arg("chunk"), "Where a chunk begins in the store's data file; -1 where it is not kept.");
  nb::class_<BoundDataset>(m, "ChunkedDataset", "A dataset of an HDF5 file: see fastpipe/native/chunks.h.")
      .def("__init__", &make_dataset, nb::arg("file"), nb::arg("shape"), nb::arg("chunk"), nb::arg("itemsize"),
           nb::arg("sample_dims"), nb::arg("filters"), nb::arg("offsets").noconvert(), nb::arg("sizes").noconvert(),
           nb::arg("masks").noconvert(), nb::arg("fill"), nb::arg("inside").none() = nb::none(),
           nb::arg("memory").none() = nb::none(), nb::arg("first_key") = 0, nb::arg("kept").none() = nb::none())
      .def("decode", &decode, nb::arg("numbers").noconvert(), nb::arg("out").noconvert(),
           "Read and decode chunks into uint8 (N, bytes of a chunk); how many, before the first that is declined.");
  nb::class_<BoundRows, BoundWork>(m, "RowBatch", "A batch of rows that is read.")
      .def_prop_ro(
          "times",
          [](const BoundRows& self) {
            const RowTotals& totals = self.work->totals;
            return std::make_tuple(totals.read.load(), totals.decode.load(), totals.copy.load());
          },
          "Nanoseconds of reading, decoding and copying, summed over its tasks.")
      .def_prop_ro(
          "counted",
          [](const BoundRows& self) {
            return std::make_tuple(self.work->totals.decoded.load(), self.work->totals.used.load());
          },
          "Bytes of chunks that were decoded, and of those the share whose rows were taken.")
      .def_prop_ro(
          "is_complete", [](const BoundRows& self) { return self.work->is_complete(); },
          "Whether all of its tasks were done.")
      .def_prop_ro(
          "has_chunks", [](const BoundRows& self) { return self.work->has_chunks(); },
          "Whether there are chunks that are to be kept.")
      .def("take_chunks", &take_chunks, nb::sig("def take_chunks(self) -> list[tuple[int, int, NDArray[numpy.uint8]]]"),
           "Chunks that are to be kept, once: the number of their source, their own, and uint8 (N,).");
  m.def("row_batch", &make_batch, nb::arg("sources"), nb::arg("statuses").noconvert(), nb::arg("threads"),
        nb::arg("turn") = 0.0, nb::arg("most_keep_nbytes") = 0,
        "A batch of rows: of each source a dataset, samples, their rows or None, memory, uint8 (N,), and the row "
        "with which it begins.");
  m.def(
      "use_blosc2",
      [](const std::vector<std::uintptr_t>& calls) {
        check(calls.size() == 6, "the six functions of Blosc2Functions");
        Blosc2Functions functions;
        static_assert(sizeof functions == 6 * sizeof(void*));
        std::memcpy(static_cast<void*>(&functions), calls.data(), sizeof functions);
        use_blosc2(functions);
      },
      nb::arg("calls"), "Hand over the addresses of c-blosc2's functions: see fastpipe/native/codecs.h.");
  m.def("undo_filter", &undo_filter,
        nb::sig("def undo_filter(step: tuple[int, int, int, int], stored: bytes, nbytes: int) -> "
                "NDArray[numpy.uint8] | int"),
        nb::arg("step"), nb::arg("stored"), nb::arg("nbytes"),
        "The bytes of a chunk without one of its filters, uint8 (nbytes,); or the number of what is wrong with them.");
}

}  // namespace fastpipe::bindings
