#include "../augment.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "arrays.h"

namespace fastpipe::bindings {

namespace {

using StepTuple = std::tuple<std::string, std::int32_t, std::vector<std::int32_t>, std::vector<float>>;
using Images = nb::ndarray<nb::numpy, nb::ro, nb::ndim<4>, nb::device::cpu>;
using Image = nb::ndarray<nb::numpy, nb::ro, nb::ndim<3>, nb::device::cpu>;
using Shape = std::array<std::int64_t, 3>;
using WritableImages = nb::ndarray<nb::numpy, nb::ndim<4>, nb::device::cpu>;

constexpr const char* kKindNames[AugmentStep::kKinds] = {
    "skip",  "flip",  "crop",   "jitter",    "grey",  "blur", "normalize", "to_floats", "to_bytes", "warp",    "policy",
    "erase", "place", "colour", "as_floats", "round", "mask", "gain",      "shift",     "mix_up",   "cut_mix",
};
constexpr const char* kElementNames[] = {"uint8", "float16", "bfloat16", "float32"};

Element element_of(const std::string& name) {
  const auto found = std::find(std::begin(kElementNames), std::end(kElementNames), name);
  check(found != std::end(kElementNames), "elements are uint8, float16, bfloat16 or float32");
  return static_cast<Element>(found - kElementNames);
}

std::unique_ptr<AugmentPlan> make_plan(const std::vector<StepTuple>& steps, std::int32_t columns) {
  auto plan = std::make_unique<AugmentPlan>();
  plan->columns = columns;
  for (const auto& [kind, column, options, numbers] : steps) {
    const auto found = std::find(std::begin(kKindNames), std::end(kKindNames), kind);
    check(found != std::end(kKindNames), "a kind of step");
    plan->steps.push_back({static_cast<AugmentStep::Kind>(found - kKindNames), column, options, numbers});
  }
  return plan;
}

// A view of one of the images of an array; the strides of a side of 1 may be anything.
template <typename Array>
ImageView view_of(const Array& array, std::size_t first, Element element) {
  ImageView view;
  view.data = static_cast<const std::uint8_t*>(array.data());
  view.element = element;
  const std::int64_t word = bytes_of(element);
  check(static_cast<std::int64_t>(array.itemsize()) == word, "an array whose elements are of that size");
  const auto side = [&](std::size_t at) { return static_cast<std::int64_t>(array.shape(first + at)); };
  view.channels = side(0);
  view.height = side(1);
  view.width = side(2);
  for (std::size_t at = 0; at < 3; ++at) view.strides[at] = array.stride(first + at) * word;
  return view;
}

// One image of a batch, changed in the calling thread with the engine's arithmetic.
class OneImage : public Work {
 public:
  OneImage(const AugmentBatch& batch, std::int64_t number, const ImageView& image)
      : batch_(batch), number_(number), image_(image) {}
  Change problem = Change::no_memory;

  std::int64_t size() const noexcept override { return 1; }
  void run(std::int64_t, Scratch& scratch) override { problem = batch_.change(number_, image_, scratch.arena); }
  void lost(std::int64_t) noexcept override {}

 private:
  const AugmentBatch& batch_;
  const std::int64_t number_;
  const ImageView image_;
};

std::unique_ptr<BoundAugment> make_batch(AugmentPlan& plan, In<double, 2> rows, std::optional<Images> source,
                                         const std::string& element, WritableImages out, const std::string& out_element,
                                         const Shape& given, std::optional<In<std::int64_t, 1>> numbers) {
  auto bound = std::make_unique<BoundAugment>();
  bound->work = std::make_shared<AugmentBatch>();
  bound->any = bound->work;
  AugmentBatch& work = *bound->work;
  const Element from = element_of(element), to = element_of(out_element);
  work.plan = lent(&plan);
  work.count = static_cast<std::int64_t>(rows.shape(0));
  work.rows = rows.data();
  check(rows.shape(1) == static_cast<std::size_t>(plan.columns), "a row of the plan's columns for each image");
  if (source.has_value()) {
    check(source->shape(0) == rows.shape(0), "as many images as rows");
    work.source = view_of(*source, 1, from);
    work.source_step = source->stride(0) * bytes_of(from);
  } else {
    work.source.element = from;
    work.source.channels = given[0];
    work.source.height = given[1];
    work.source.width = given[2];
    check(!plan.mixes(), "images at once for a plan that mixes them");
  }
  std::int64_t shape[3] = {work.source.channels, work.source.height, work.source.width};
  Element found = from;
  if (const char* problem = problem_of(plan, shape, &found)) check(false, problem);
  work.out = view_of(out, 1, to);
  work.out_step = out.stride(0) * bytes_of(to);
  check(work.out.channels == shape[0] && work.out.height == shape[1] && work.out.width == shape[2],
        "memory of the shape that images have afterwards");
  check((found == Element::uint8) == (to == Element::uint8), "memory for bytes where images are of bytes afterwards");
  nb::list keep;
  if (numbers.has_value()) {
    check(numbers->shape(0) == rows.shape(0), "a place for each image");
    for (std::size_t i = 0; i < rows.shape(0); ++i) {
      const std::int64_t number = (*numbers)(i);
      check(number >= 0 && number < static_cast<std::int64_t>(out.shape(0)), "a place outside the memory");
      bound->places.push_back(number * work.out_step);
    }
    work.places = bound->places.data();
  } else {
    check(out.shape(0) == rows.shape(0), "as many places as rows");
  }
  work.prepare();
  keep.append(nb::find(plan));
  keep.append(nb::cast(rows));
  if (source.has_value()) keep.append(nb::cast(*source));
  keep.append(nb::cast(out));
  bound->keep = std::move(keep);
  return bound;
}

}  // namespace

void register_augment(nb::module_& m) {
  nb::class_<AugmentPlan>(m, "AugmentPlan",
                          "A chain of augmentations of images or spectrograms: AugmentPlan in augment.h.")
      .def(
          "__init__",
          [](AugmentPlan* self, const std::vector<StepTuple>& steps, std::int32_t columns) {
            new (self) AugmentPlan(std::move(*make_plan(steps, columns)));
          },
          nb::arg("steps"), nb::arg("columns"));

  nb::class_<BoundAugment, BoundWork>(m, "AugmentBatch", "Images that a plan changes, each by a row of numbers.")
      .def_prop_ro(
          "problem",
          [](const BoundAugment& self) {
            return std::make_tuple(static_cast<int>(self.work->problem.load()), self.work->problem_at.load());
          },
          "What went wrong with one of the images, and its number: 0 nothing, 1 there is no memory, 2 its numbers are "
          "of "
          "pixels that it does not have.")
      .def(
          "change",
          [](BoundAugment& self, std::int64_t number, Image image) {
            const ImageView& wanted = self.work->source;
            const ImageView view = view_of(image, 0, wanted.element);
            check(number >= 0 && number < self.work->count, "the number of an image");
            check(view.channels == wanted.channels && view.height == wanted.height && view.width == wanted.width,
                  "an image of the batch's shape");
            check(!self.work->plan->mixes(), "images at once for a plan that mixes them");
            OneImage one(*self.work, number, view);
            nb::gil_scoped_release free;
            run_here(one);
            return static_cast<int>(one.problem);
          },
          nb::sig("def change(self, number: int, image: NDArray[numpy.generic]) -> int"), nb::arg("number"),
          nb::arg("image"), "Change one of the images, given here; as of `problem`.");

  m.def(
      "augment_batch", &make_batch,
      nb::sig(
          "def augment_batch(plan: AugmentPlan, rows: NDArray[numpy.float64], source: NDArray[numpy.generic] | None, "
          "element: str, out: NDArray[numpy.generic], out_element: str, shape: Sequence[int] = (0, 0, 0), "
          "places: NDArray[numpy.int64] | None = None) -> AugmentBatch"),
      nb::arg("plan"), nb::arg("rows").noconvert(), nb::arg("source").noconvert().none(), nb::arg("element"),
      nb::arg("out").noconvert(), nb::arg("out_element"), nb::arg("shape") = Shape{0, 0, 0},
      nb::arg("places").noconvert().none() = nb::none(),
      "A batch (N, C, H, W) to be changed.  rows: (N, columns).  source: None where images of `shape` are given one by "
      "one.  places: which of `out` each image becomes.");
}

}  // namespace fastpipe::bindings
