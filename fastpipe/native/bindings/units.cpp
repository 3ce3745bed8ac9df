#include "../units.h"

#include <nanobind/stl/unique_ptr.h>
#include <unistd.h>

#include <memory>

#include "arrays.h"

namespace fastpipe::bindings {

namespace {

using Bytes1 = nb::ndarray<nb::numpy, std::uint8_t>;

Bytes1 view(nb::handle owner, const UnitMemory& units, const std::uint8_t* data) {
  return Bytes1(const_cast<std::uint8_t*>(data), {static_cast<std::size_t>(units.shape().slot_nbytes)}, owner);
}

// A unit that is being read, or written, by one thread; on the way out it is let go of.  In a forked child it stays the
// parent's: there, the lock may be one that nobody opens.
template <typename Held>
struct Lent {
  UnitMemory& units;
  Held held;
  bool is_over = false;
  const pid_t process = getpid();
  Lent(UnitMemory& units_, const Held& held_) : units(units_), held(held_) {}
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;
  ~Lent();
};
template <>
Lent<UnitMemory::Found>::~Lent() {
  if (!is_over && process == getpid()) static_cast<void>(units.release(held));
}
template <>
Lent<UnitMemory::Claim>::~Lent() {
  if (!is_over && process == getpid()) units.abandon(held);
}
using FoundUnit = Lent<UnitMemory::Found>;
using ClaimedUnit = Lent<UnitMemory::Claim>;

void end(bool* is_over) {
  if (*is_over) throw nb::value_error("this unit was let go of");
  *is_over = true;
}

// The shape of memory that there can be, whose size does not overflow.
UnitMemory::Shape shape_of(std::int64_t keys, std::int64_t slots, std::int64_t slot_nbytes) {
  constexpr std::int64_t kMost = std::int64_t{1} << 60;
  check(keys >= 0 && keys <= kMost / 8 && slots >= 1 && slots < INT32_MAX, "memory of a size that there can be");
  check(slot_nbytes >= 0 && slot_nbytes <= kMost / slots && slot_nbytes % 64 == 0, "slots of a multiple of 64 bytes");
  return {keys, slots, slot_nbytes};
}

nb::ndarray<nb::numpy, bool> are_there(const UnitMemory& units, In<std::int64_t, 1> keys, bool or_coming) {
  auto* found = new bool[keys.size()];
  nb::capsule owner(found, [](void* memory) noexcept { delete[] static_cast<bool*>(memory); });
  for (std::size_t i = 0; i < keys.size(); ++i) {
    found[i] = units.is_there(keys(i)) || (or_coming && units.is_coming(keys(i)));
  }
  return nb::ndarray<nb::numpy, bool>(found, {keys.size()}, owner);
}

}  // namespace

void register_units(nb::module_& m) {
  nb::class_<FoundUnit>(m, "FoundUnit", "A unit that is there; nothing overwrites it until it is released.")
      .def_prop_ro(
          "memory",
          [](nb::pointer_and_handle<FoundUnit> self) { return view(self.h, self.p->units, self.p->held.data); },
          "uint8 (slot_nbytes,); to be read only.")
      .def(
          "release",
          [](FoundUnit& self) {
            end(&self.is_over);
            return self.units.release(self.held);
          },
          "Let go of it; whether it was what it should be all the time.");
  nb::class_<ClaimedUnit>(m, "ClaimedUnit", "A slot to decode a unit into; given back with this object.")
      .def_prop_ro(
          "memory",
          [](nb::pointer_and_handle<ClaimedUnit> self) { return view(self.h, self.p->units, self.p->held.data); },
          "uint8 (slot_nbytes,), aligned to 64.")
      .def(
          "publish",
          [](ClaimedUnit& self, std::int64_t left) {
            end(&self.is_over);
            return self.units.publish(self.held, left);
          },
          nb::arg("left") = -1, "Let others see the unit, which will be used so often yet; -1: not known.")
      .def(
          "abandon",
          [](ClaimedUnit& self) {
            end(&self.is_over);
            self.units.abandon(self.held);
          },
          "Give the slot back.");
  nb::class_<UnitMemory>(m, "UnitMemory", nb::is_weak_referenceable(),
                         "Decoded parts of arrays that are remembered: see fastpipe/native/units.h.")
      .def(
          "__init__",
          [](UnitMemory* self, Out<std::uint8_t, 1> memory, int descriptor, std::int64_t keys, std::int64_t slots,
             std::int64_t slot_nbytes) {
            const UnitMemory::Shape shape = shape_of(keys, slots, slot_nbytes);
            check(static_cast<std::int64_t>(memory.size()) >= shape.nbytes() &&
                      reinterpret_cast<std::uintptr_t>(memory.data()) % 64 == 0,
                  "memory of all slots, aligned to 64");
            new (self) UnitMemory(memory.data(), descriptor, shape);
          },
          nb::keep_alive<1, 2>(), nb::arg("memory").noconvert(), nb::arg("descriptor"), nb::arg("keys"),
          nb::arg("slots"), nb::arg("slot_nbytes"))
      .def_static(
          "nbytes",
          [](std::int64_t keys, std::int64_t slots, std::int64_t slot_nbytes) {
            return shape_of(keys, slots, slot_nbytes).nbytes();
          },
          nb::arg("keys"), nb::arg("slots"), nb::arg("slot_nbytes"), "Bytes of the memory that it takes.")
      .def_prop_ro(
          "slot_nbytes", [](const UnitMemory& self) { return self.shape().slot_nbytes; }, "Of each slot.")
      .def_prop_ro(
          "slots", [](const UnitMemory& self) { return self.shape().slots; }, "How many there are.")
      .def(
          "find",
          [](UnitMemory& self, std::int64_t key) -> std::unique_ptr<FoundUnit> {
            const UnitMemory::Found found = self.find(key);
            return found ? std::make_unique<FoundUnit>(self, found) : nullptr;
          },
          nb::keep_alive<0, 1>(), nb::sig("def find(self, key: int) -> FoundUnit | None"), nb::arg("key"),
          "Look for a unit.")
      .def(
          "claim",
          [](UnitMemory& self, std::int64_t key) -> std::unique_ptr<ClaimedUnit> {
            const UnitMemory::Claim claim = self.claim(key);
            return claim ? std::make_unique<ClaimedUnit>(self, claim) : nullptr;
          },
          nb::keep_alive<0, 1>(), nb::sig("def claim(self, key: int) -> ClaimedUnit | None"), nb::arg("key"),
          "A slot to decode a unit into; None where somebody decodes it, or has just done so, or there is no room.")
      .def("are_there", &are_there, nb::arg("keys").noconvert(), nb::arg("or_coming") = false,
           "Whether each of some units, int64 (N,), is there, or is being decoded: bool (N,).")
      .def("is_coming", &UnitMemory::is_coming, nb::arg("key"),
           "Whether somebody is decoding a unit, or was when the process ended that did so.")
      .def(
          "wait",
          [](UnitMemory& self, std::int64_t key) {
            nb::gil_scoped_release free;
            self.wait(key);
          },
          nb::arg("key"), "Wait while somebody is decoding a unit, but not for long.")
      .def(
          "used",
          [](UnitMemory& self, In<std::int64_t, 1> keys) {
            for (std::size_t i = 0; i < keys.size(); ++i) self.used(keys(i), 1);
          },
          nb::arg("keys").noconvert(), "Hear that units were used: those that will not be again make room first.")
      .def(
          "expect",
          [](UnitMemory& self, std::int64_t what, In<std::int64_t, 1> keys, bool is_in_order) {
            nb::gil_scoped_release free;
            if (!self.expect(what, keys.data(), static_cast<std::int64_t>(keys.size()), is_in_order)) {
              throw std::bad_alloc();
            }
          },
          nb::arg("what"), nb::arg("keys").noconvert(), nb::arg("is_in_order") = false,
          "Hear which units will be used, int64 (N,), each as often as it is there; what: a number from 1 for these "
          "uses, such as an epoch's; is_in_order: whether this process uses them one after the other.")
      .def_prop_ro("expected", &UnitMemory::expected, "What was said last; 0 for nothing.")
      .def_prop_ro("is_over", &UnitMemory::is_over, "Whether nearly all of the expected uses have been.")
      .def("count", &UnitMemory::count, nb::arg("decoded"), nb::arg("copied"),
           "Count bytes that were decoded, and bytes that were copied of them, for all processes.")
      .def_prop_ro("decoded", &UnitMemory::decoded, "Bytes that were decoded so far, in all processes.")
      .def_prop_ro("copied", &UnitMemory::copied, "Bytes that were copied of them.");
}

}  // namespace fastpipe::bindings
