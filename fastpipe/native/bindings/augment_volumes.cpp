#include "../augment_volumes.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "arrays.h"

namespace fastpipe::bindings {

namespace {

using Steps = std::vector<std::tuple<std::string, std::int64_t, std::vector<std::int64_t>, std::vector<double>>>;
using Shape = std::vector<std::int64_t>;
using Given = nb::ndarray<nb::ro, nb::numpy, nb::ndim<5>, nb::device::cpu>;
using Made = nb::ndarray<nb::numpy, nb::ndim<5>, nb::c_contig, nb::device::cpu>;

Number number_named(const std::string& name) {
  const struct {
    const char* name;
    Number number;
  } known[] = {{"bool", Number::u8},    {"uint8", Number::u8},    {"int8", Number::i8},       {"int16", Number::i16},
               {"uint16", Number::u16}, {"int32", Number::i32},   {"uint32", Number::u32},    {"int64", Number::i64},
               {"uint64", Number::u64}, {"float16", Number::f16}, {"bfloat16", Number::bf16}, {"float32", Number::f32},
               {"float64", Number::f64}};
  for (const auto& one : known) {
    if (name == one.name) return one.number;
  }
  throw nb::value_error("a dtype that volumes can have");
}

// Whether an array has values of a kind; NumPy has no bfloat16, of which int16 has the bits.
bool has(Number number, nb::dlpack::dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto code = static_cast<Code>(dtype.code);
  if (dtype.lanes != 1 || dtype.bits != 8 * size_of(number)) return false;
  switch (number) {
    case Number::f16:
    case Number::f32:
    case Number::f64:
      return code == Code::Float;
    case Number::u8:
      return code == Code::UInt || code == Code::Bool;
    case Number::u16:
    case Number::u32:
    case Number::u64:
      return code == Code::UInt;
    default:
      return code == Code::Int;
  }
}

}  // namespace

void register_augment_volumes(nb::module_& m) {
  nb::class_<VolumePlan>(m, "VolumePlan", "What is done with volumes of a shape and a dtype: see Step.")
      .def(
          "__init__",
          [](VolumePlan* self, const Steps& steps, const Shape& shape, const std::string& from, const std::string& to) {
            auto plan = std::make_unique<VolumePlan>();
            for (const auto& [name, column, options, numbers] : steps) {
              VolumeStep step;
              check(kind_named(name, &step.kind), "a step that volumes have");
              step.column = column;
              step.options = options;
              step.numbers = numbers;
              plan->steps.push_back(std::move(step));
            }
            check(shape.size() == 4, "channels, depth, height and width");
            std::copy(shape.begin(), shape.end(), plan->shape);
            plan->from = number_named(from);
            plan->to = number_named(to);
            const char* wanted = plan->check();
            check(wanted == nullptr, wanted);
            new (self) VolumePlan(std::move(*plan));
          },
          nb::arg("steps"), nb::arg("shape"), nb::arg("dtype"), nb::arg("dtype_after"));
  m.def(
      "augment_volumes",
      [](const VolumePlan& plan, Given source, In<double, 2> table, Made goal, int threads) {
        check(has(plan.from, source.dtype()) && has(plan.to, goal.dtype()), "volumes of the plan's dtypes");
        const std::size_t count = source.shape(0);
        check(goal.shape(0) == count && table.shape(0) == count, "as many results and rows as volumes");
        for (std::size_t axis = 0; axis < 4; ++axis) {
          check(static_cast<std::int64_t>(source.shape(axis + 1)) == plan.shape[axis] &&
                    static_cast<std::int64_t>(goal.shape(axis + 1)) == plan.shape_after[axis],
                "volumes of the plan's shapes");
        }
        check(static_cast<std::int64_t>(table.shape(1)) >= plan.columns, "a table with all of the plan's columns");
        const auto address = reinterpret_cast<std::uintptr_t>(source.data());
        check(address % static_cast<std::uintptr_t>(size_of(plan.from)) == 0, "volumes that begin where values may");
        VolumeBatch batch;
        batch.source = static_cast<const std::uint8_t*>(source.data());
        for (std::size_t axis = 0; axis < 5; ++axis) batch.strides[axis] = source.stride(axis) * size_of(plan.from);
        batch.count = static_cast<std::int64_t>(count);
        batch.table = table.data();
        batch.columns = static_cast<std::int64_t>(table.shape(1));
        batch.goal = static_cast<std::uint8_t*>(goal.data());
        bool is_done = false;
        {
          nb::gil_scoped_release free;
          is_done = augment_volumes(plan, batch, threads);
        }
        if (!is_done) throw std::bad_alloc();
      },
      nb::sig("def augment_volumes(plan: VolumePlan, source: NDArray[numpy.generic], "
              "table: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu', "
              "writable=False)], "
              "goal: NDArray[numpy.generic], threads: int) -> None"),
      nb::arg("plan"), nb::arg("source").noconvert(), nb::arg("table").noconvert(), nb::arg("goal").noconvert(),
      nb::arg("threads"),
      "Change volumes by a table with the numbers of each, in so many threads.  bfloat16 is given as int16.");
}

}  // namespace fastpipe::bindings
