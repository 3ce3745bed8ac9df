#include "../tours.h"

#include <nanobind/stl/tuple.h>

#include <cstdlib>
#include <memory>
#include <tuple>

#include "arrays.h"

namespace fastpipe::bindings {

namespace {

using Numbers = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

struct Free {
  void operator()(void* memory) const noexcept { std::free(memory); }
};
using Memory = std::unique_ptr<std::int64_t, Free>;

Memory numbers(std::size_t count) {
  Memory made(static_cast<std::int64_t*>(std::calloc(count > 0 ? count : 1, sizeof(std::int64_t))));
  if (made == nullptr) throw std::bad_alloc();
  return made;
}

Numbers array_of(Memory memory, std::size_t count) {
  std::int64_t* data = memory.release();
  const nb::capsule owner(data, [](void* pointer) noexcept { std::free(pointer); });
  return Numbers(data, {count}, owner);
}

std::tuple<Numbers, Numbers> touched(In<std::int64_t, 1> firsts, In<std::int64_t, 2> lows, In<std::int64_t, 2> counts,
                                     In<std::int64_t, 2> steps) {
  const std::size_t patches = firsts.shape(0), dims = lows.shape(1);
  for (const auto* table : {&lows, &counts, &steps}) {
    if (table->shape(0) != patches || table->shape(1) != dims) throw nb::value_error("tables of one shape");
  }
  const TouchedBoxes boxes{static_cast<std::int64_t>(patches),
                           static_cast<std::int64_t>(dims),
                           firsts.data(),
                           lows.data(),
                           counts.data(),
                           steps.data()};
  Memory ends = numbers(patches), units;
  std::int64_t total = 0;
  {
    nb::gil_scoped_release free;
    total = touched_ends(boxes, ends.get());
    if (total >= 0) {
      units = numbers(static_cast<std::size_t>(total));
      touched_units(boxes, units.get());
    }
  }
  if (total < 0) throw nb::value_error("counts from 0, of no more units than there can be");
  return {array_of(std::move(units), static_cast<std::size_t>(total)), array_of(std::move(ends), patches)};
}

std::int64_t decoded(In<std::int64_t, 1> units, In<std::int64_t, 1> ends, In<std::int64_t, 1> visits, std::int64_t held,
                     std::int64_t most) {
  const UnitUses uses{units.data(), ends.data(), static_cast<std::int64_t>(ends.size()), visits.data(),
                      static_cast<std::int64_t>(visits.size())};
  bool is_right = true;
  std::int64_t made = 0;
  {
    nb::gil_scoped_release free;
    for (std::size_t i = 0; i < units.size(); ++i) is_right &= units.data()[i] >= 0 && units.data()[i] < uses.kinds;
    std::int64_t before = 0;
    for (std::size_t i = 0; i < ends.size(); ++i) {
      is_right &= before <= ends.data()[i] && ends.data()[i] <= static_cast<std::int64_t>(units.size());
      before = ends.data()[i];
    }
    if (is_right) made = decoded_units(uses, held, most);
  }
  if (!is_right) throw nb::value_error("units of which there are visits, and ends among them");
  if (made < 0) throw std::bad_alloc();
  return made;
}

}  // namespace

void register_tours(nb::module_& m) {
  m.def("touched_units", &touched,
        nb::sig("def touched_units(firsts: NDArray[numpy.int64], lows: NDArray[numpy.int64], "
                "counts: NDArray[numpy.int64], steps: NDArray[numpy.int64]) "
                "-> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]"),
        nb::arg("firsts").noconvert(), nb::arg("lows").noconvert(), nb::arg("counts").noconvert(),
        nb::arg("steps").noconvert(),
        "The units that patches touch, patch after patch, and where each patch's end: see tours.h.");
  m.def("decoded_units", &decoded, nb::arg("units").noconvert(), nb::arg("ends").noconvert(),
        nb::arg("visits").noconvert(), nb::arg("held"), nb::arg("most"),
        "How many units are decoded for patches that come one after the other: see tours.h.");
}

}  // namespace fastpipe::bindings
