#include "../augment_motion.h"

#include <nanobind/stl/optional.h>

#include <memory>
#include <optional>

#include "arrays.h"

namespace fastpipe::bindings {

namespace {

using Source = nb::ndarray<nb::ro, nb::ndim<4>, nb::device::cpu>;
using Target = nb::ndarray<nb::numpy, nb::ndim<4>, nb::c_contig, nb::device::cpu>;

MotionType type_of(int type) {
  check(type >= 0 && type <= 2, "no type of numbers");
  return static_cast<MotionType>(type);
}

void change_motion(const Source& source, int source_type, Target out, int out_type, In<double, 1> speeds,
                   In<double, 2> scales, In<double, 2> shifts, In<std::int64_t, 2> order,
                   std::optional<In<std::int64_t, 1>> lengths, Out<std::int64_t, 1> new_lengths, int threads) {
  const std::size_t count = source.shape(0), joints = source.shape(2), coordinates = source.shape(3);
  Motion motion;
  motion.source_type = type_of(source_type), motion.out_type = type_of(out_type);
  const std::int64_t word = bytes_of(motion.source_type), out_word = bytes_of(motion.out_type);
  const auto has_words = [](const auto& array, std::int64_t size) {
    return array.dtype().bits * array.dtype().lanes == 8 * size &&
           reinterpret_cast<std::uintptr_t>(array.data()) % std::size_t(size) == 0;
  };
  check(has_words(source, word) && has_words(out, out_word), "sequences of these types");
  for (std::size_t i = 0; i < 4; ++i) {
    check(source.shape(i) > 0 && out.shape(i) == source.shape(i), "memory for as many sequences, and one at least");
    motion.strides[i] = source.stride(i) * word;
  }
  check(speeds.shape(0) == count && scales.shape(0) == count && shifts.shape(0) == count && order.shape(0) == count &&
            new_lengths.shape(0) == count && (!lengths.has_value() || lengths->shape(0) == count),
        "a row for each sequence");
  check(scales.shape(1) == coordinates && shifts.shape(1) == coordinates && order.shape(1) == joints,
        "a number for each coordinate, and for each joint");
  motion.count = static_cast<std::int64_t>(count), motion.frames = static_cast<std::int64_t>(source.shape(1));
  motion.joints = static_cast<std::int64_t>(joints), motion.coordinates = static_cast<std::int64_t>(coordinates);
  for (std::size_t i = 0; i < order.size(); ++i) {
    check(order.data()[i] >= 0 && order.data()[i] < motion.joints, "a joint that is none");
  }
  motion.source = static_cast<const std::uint8_t*>(source.data()), motion.out = static_cast<std::uint8_t*>(out.data());
  motion.speeds = speeds.data(), motion.scales = scales.data(), motion.shifts = shifts.data();
  motion.order = order.data(), motion.lengths = lengths.has_value() ? lengths->data() : nullptr;
  motion.new_lengths = new_lengths.data();
  const auto batch = std::make_shared<MotionBatch>(motion);
  {
    nb::gil_scoped_release free;
    run_in_threads(batch, threads);
  }
  if (!batch->is_whole()) throw std::bad_alloc();
}

}  // namespace

void register_augment_motion(nb::module_& m) {
  m.def("change_motion", &change_motion,
        nb::sig("def change_motion(source: NDArray[numpy.generic], source_type: int, out: NDArray[numpy.generic], "
                "out_type: int, speeds: NDArray[numpy.float64], scales: NDArray[numpy.float64], "
                "shifts: NDArray[numpy.float64], order: NDArray[numpy.int64], lengths: NDArray[numpy.int64] | None, "
                "new_lengths: NDArray[numpy.int64], threads: int) -> None"),
        nb::arg("source").noconvert(), nb::arg("source_type"), nb::arg("out").noconvert(), nb::arg("out_type"),
        nb::arg("speeds").noconvert(), nb::arg("scales").noconvert(), nb::arg("shifts").noconvert(),
        nb::arg("order").noconvert(), nb::arg("lengths").noconvert().none(), nb::arg("new_lengths").noconvert(),
        nb::arg("threads"),
        "Play sequences at other speeds, and map their frames: see augment_motion.h.  Types are 0 for float32, 1 for "
        "float16 and 2 for bfloat16.");
}

}  // namespace fastpipe::bindings
