#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "../entries.h"
#include "../kept.h"
#include "arrays.h"

namespace fastpipe::bindings {

namespace {

using Shape = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>;

Digest digest_of(const nb::bytes& object) {
  if (object.size() != sizeof(Digest)) throw nb::value_error("a digest has 16 bytes");
  Digest digest;
  std::memcpy(&digest, object.c_str(), sizeof digest);
  return digest;
}

nb::tuple tuple_of(std::int64_t number, const EntryRecord& record) {
  return nb::make_tuple(number, record.offset, record.nbytes,
                        nb::make_tuple(record.height, record.width, record.channels), record.flags, record.sum,
                        record.note);
}

nb::object find(const EntryTable& table, const nb::bytes& digest) {
  EntryRecord record;
  const std::int64_t number = table.find(digest_of(digest), &record);
  if (number < 0) return nb::none();
  return tuple_of(number, record);
}

std::uint64_t extend(EntryTable& table, const nb::bytes& log) {
  if (log.size() % sizeof(EntryRecord) != 0) throw nb::value_error("a log of whole records");
  std::vector<EntryRecord> records(log.size() / sizeof(EntryRecord));
  if (!records.empty()) std::memcpy(static_cast<void*>(records.data()), log.c_str(), log.size());
  std::uint64_t end = 0;
  if (!table.extend(records.data(), static_cast<std::int64_t>(records.size()), &end)) throw std::bad_alloc();
  return end;
}

void check_number(const EntryTable& table, std::int64_t number) {
  if (number < 0 || number >= table.size()) throw nb::index_error("no such entry");
}

nb::list entries(const EntryTable& table) {
  nb::list found;
  for (std::int64_t number = 0; number < table.size(); ++number) {
    EntryRecord record;
    if (table.record(number, &record)) found.append(tuple_of(number, record));
  }
  return found;
}

nb::bytes pack_records(const nb::bytes& digests, std::uint64_t offset, std::uint64_t step, std::uint64_t nbytes,
                       const Shape& shape, std::uint32_t flags, const std::vector<std::uint64_t>& sums,
                       std::uint32_t note) {
  if (digests.size() != sums.size() * sizeof(Digest)) throw nb::value_error("a digest of 16 bytes for each sum");
  std::vector<EntryRecord> records(sums.size());
  for (std::size_t i = 0; i < records.size(); ++i) {
    EntryRecord& record = records[i];
    std::memcpy(&record.digest, digests.c_str() + i * sizeof(Digest), sizeof(Digest));
    record.offset = offset + i * step;
    record.nbytes = nbytes;
    record.sum = sums[i];
    std::tie(record.height, record.width, record.channels) = shape;
    record.note = note;
    record.flags = flags;
    record.check = check_of(record);
  }
  return nb::bytes(reinterpret_cast<const char*>(records.data()), records.size() * sizeof(EntryRecord));
}

KeptStore store_of(std::shared_ptr<EntryTable> table, int descriptor, const std::optional<In<std::uint8_t, 1>>& memory,
                   std::int64_t size, const nb::bytes& tag, bool verifies, std::int64_t marks) {
  check(tag.size() <= 64 && size >= 0 && marks >= 0, "a tag of at most 64 bytes, and sizes");
  check(!memory.has_value() || static_cast<std::int64_t>(memory->size()) >= size, "memory of all entries");
  KeptStore store;
  store.table = std::move(table);
  store.descriptor = descriptor;
  store.memory = memory.has_value() ? memory->data() : nullptr;
  store.size = size;
  store.tag.assign(tag.c_str(), tag.size());
  store.verifies = verifies;
  store.marks = marks;
  return store;
}

std::shared_ptr<KeptChunks> make_kept_chunks(std::shared_ptr<EntryTable> table, int descriptor,
                                             std::optional<In<std::uint8_t, 1>> memory, std::int64_t size,
                                             const nb::bytes& tag, bool verifies, std::int64_t marks,
                                             std::int64_t chunks, std::int64_t nbytes, const nb::object&) {
  check(chunks >= 0 && nbytes >= 0, "chunks and their bytes");
  return std::make_shared<KeptChunks>(store_of(std::move(table), descriptor, memory, size, tag, verifies, marks),
                                      chunks, nbytes);
}

}  // namespace

void register_cache(nb::module_& m) {
  nb::class_<EntryTable>(m, "EntryTable", "The records of a cache's log: see fastpipe/native/entries.h.")
      .def(nb::init<>())
      .def("__len__", &EntryTable::size)
      .def("find", &find,
           nb::sig("def find(self, digest: bytes) -> tuple[int, int, int, tuple[int, int, int], int, int, int] | None"),
           nb::arg("digest"), "An entry's number, offset, bytes, shape, flags, sum, and bytes of its note.")
      .def("extend", &extend, nb::arg("log"),
           "Add the records that follow; the first byte of the data file that none of them has.")
      .def(
          "forget",
          [](EntryTable& table, std::int64_t number) {
            check_number(table, number);
            table.forget(number);
          },
          nb::arg("number"), "Never find an entry again.")
      .def(
          "is_verified",
          [](const EntryTable& table, std::int64_t number) {
            check_number(table, number);
            return table.is_verified(number);
          },
          nb::arg("number"), "Whether an entry's bytes have been compared with their sum.")
      .def(
          "note_verified",
          [](EntryTable& table, std::int64_t number) {
            check_number(table, number);
            table.note_verified(number);
          },
          nb::arg("number"), "Note that they have.")
      .def("entries", &entries,
           nb::sig("def entries(self) -> list[tuple[int, int, int, tuple[int, int, int], int, int, int]]"),
           "All entries, as of ``find``.");
  m.def("pack_records", &pack_records, nb::arg("digests"), nb::arg("offset"), nb::arg("step"), nb::arg("nbytes"),
        nb::arg("shape"), nb::arg("flags"), nb::arg("sums"), nb::arg("note"),
        "Records of entries of the same shape, the first at `offset`, each `step` bytes behind the one before.");
  m.def(
      "sum_of",
      [](In<std::uint8_t, 1> bytes) {
        const Bytes all{bytes.data(), bytes.size()};
        nb::gil_scoped_release free;
        return sum_of(all);
      },
      nb::arg("bytes").noconvert(), "The sum by which bytes are compared with those that were kept.");
  // A batch that was given up may still read and mark entries: the owner of the descriptor must not close it.
  m.def(
      "kept_chunks", &make_kept_chunks, nb::keep_alive<0, 3>(), nb::keep_alive<0, 10>(), nb::arg("table"),
      nb::arg("descriptor"), nb::arg("memory").noconvert().none(), nb::arg("size"), nb::arg("tag"), nb::arg("verifies"),
      nb::arg("marks"), nb::arg("chunks"), nb::arg("nbytes"), nb::arg("owner"),
      "Where decoded chunks of a dataset are kept; nbytes: of each; owner: lives as long, and closes the descriptor.");
  nb::class_<KeptImages>(m, "KeptImages", "Where a batch looks for decoded images: see fastpipe/native/kept.h.")
      .def(
          "__init__",
          [](KeptImages* self, std::shared_ptr<EntryTable> table, int descriptor,
             std::optional<In<std::uint8_t, 1>> memory, std::int64_t size, const nb::bytes& tag, bool verifies,
             std::int64_t marks, int form, const nb::object&) {
            check(form >= 0 && form <= 2, "no such form");
            new (self) KeptImages{store_of(std::move(table), descriptor, memory, size, tag, verifies, marks),
                                  static_cast<KeptForm>(form)};
          },
          nb::keep_alive<1, 4>(), nb::keep_alive<1, 10>(), nb::arg("table"), nb::arg("descriptor"),
          nb::arg("memory").noconvert().none(), nb::arg("size"), nb::arg("tag"), nb::arg("verifies"), nb::arg("marks"),
          nb::arg("form"), nb::arg("owner"),
          "form: of KeptForm; owner: lives as long as this, and closes the descriptor.")
      .def(
          "have",
          [](const KeptImages& kept, In<std::uint64_t, 2> states) {
            if (states.shape(1) != 5) throw nb::value_error("states of five numbers");
            std::vector<bool> found(states.shape(0));
            const Bytes tag{reinterpret_cast<const std::uint8_t*>(kept.tag.data()), kept.tag.size()};
            nb::gil_scoped_release free;
            for (std::size_t i = 0; i < found.size(); ++i) {
              const Bytes state{reinterpret_cast<const std::uint8_t*>(&states(i, 0)), 5 * sizeof(std::uint64_t)};
              EntryRecord record;
              // An index is used with its file.
              found[i] = kept.form != KeptForm::index && kept.table->find(blake2b(state, tag), &record) >= 0;
            }
            return found;
          },
          nb::arg("states").noconvert(),
          "Whether the images of objects in these states, uint64 (N, 5), can be made without their files.");
}

}  // namespace fastpipe::bindings
