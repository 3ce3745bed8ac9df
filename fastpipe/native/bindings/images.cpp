#include "../images.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <optional>
#include <tuple>

#include "../convert.h"
#include "../files.h"
#include "../jpeg.h"
#include "arrays.h"

namespace fastpipe::bindings {

namespace {

using Four = std::array<std::int32_t, 4>;
using Two = std::array<std::int32_t, 2>;
using AxisTuple = std::tuple<std::int32_t, std::int64_t, std::int64_t, std::int32_t, std::int32_t, std::int32_t, bool,
                             bool, std::int32_t, std::int32_t, std::int32_t>;

AxisTuple tuple_of(const Axis& axis) {
  return {axis.in_size, axis.start8,   axis.extent8, axis.out_size, axis.first, axis.length,
          axis.turned,  axis.mirrored, axis.low,     axis.high,     axis.pitch};
}

using HeaderTuple = std::tuple<std::int32_t, std::int32_t, bool, std::int32_t>;

HeaderTuple tuple_of(const JpegHeader& header) {
  return {header.height, header.width, header.trusted, header.orientation};
}

// Each step reads its numbers from a row of `draws`.
void check_draws(const std::vector<Step>& steps, std::size_t draws) {
  for (const Step& step : steps) {
    check(step.draw >= 0 && static_cast<std::size_t>(step.draw) + numbers_of(step.kind) <= draws,
          "a step's numbers outside the row");
  }
}

Axis axis_of(int filter, const AxisTuple& parts) {
  const auto& [in_size, start8, extent8, out_size, first, length, turned, mirrored, low, high, pitch] = parts;
  check(in_size > 0 && out_size > 0 && first >= 0 && length > 0 && first + length <= out_size && extent8 > 0,
        "no axis of a resize");
  // Of an axis that is turned, make_axis() takes the part as it is before.
  const std::int64_t part = turned ? std::int64_t{8} * in_size - start8 - extent8 : start8;
  const Axis axis = make_axis(filter, in_size, out_size, first, length, turned, mirrored, part, extent8);
  check(axis.low == low && axis.high == high && axis.pitch == pitch, "an axis that make_axis() does not make");
  return axis;
}

// A conversion with the memory of its tables.
struct OwnedConversion {
  Conversion how;
  std::vector<std::uint8_t> table;
  ConversionTables tables;
};

std::shared_ptr<OwnedConversion> make_conversion(int kind, int channels, bool interleaved, int word, bool divide,
                                                 const std::vector<float>& mean, const std::vector<float>& std,
                                                 const nb::bytes& table) {
  auto made = std::make_shared<OwnedConversion>();
  check(kind >= 0 && kind <= 2 && (channels == 1 || channels == 3), "no such conversion");
  check(word == 1 || word == 2 || word == 4 || word == 8, "elements of 1, 2, 4 or 8 bytes");
  made->how.kind = static_cast<Conversion::Kind>(kind);
  made->how.channels = channels;
  made->how.interleaved = interleaved;
  made->how.word = word;
  made->how.divide = divide;
  if (made->how.kind == Conversion::Kind::affine) {
    check(word == 4 && mean.size() == std::size_t(channels) && std.size() == std::size_t(channels),
          "a mean and a deviation for each channel, of float32");
    std::copy(mean.begin(), mean.end(), made->how.mean);
    std::copy(std.begin(), std.end(), made->how.std);
  } else if (made->how.kind == Conversion::Kind::table) {
    check(table.size() == std::size_t(256 * channels * word), "a table of 256 elements for each channel");
    const Bytes bytes = bytes_of(table);
    made->table.assign(bytes.data, bytes.data + bytes.size);
    made->how.table = made->table.data();
  } else {
    check(word == 1, "bytes are elements of 1 byte");
  }
  make_tables(made->how, &made->tables);
  made->how.tables = &made->tables;
  return made;
}

std::int64_t bytes_each(const Conversion& how, std::int64_t height, std::int64_t width) {
  return height * width * how.channels * how.word;
}

struct BoundBatch : BoundWork {
  std::shared_ptr<ImageBatch> work;
  std::vector<ImageInput> inputs;
  std::vector<FileState> states;
};

std::unique_ptr<BoundBatch> make_batch(ImagePlan& plan, nb::bytes prefix, nb::bytes arena, In<std::int64_t, 1> starts,
                                       In<std::int64_t, 1> ends, In<double, 2> parameters,
                                       std::optional<Out<std::uint8_t, 1>> memory, In<std::int64_t, 1> places, Two size,
                                       bool keeps_files, Out<std::uint8_t, 2> statuses,
                                       std::optional<nb::typed<nb::list, nb::object>> inputs, KeptImages* kept,
                                       std::optional<In<std::uint64_t, 2>> states, std::int64_t most_nbytes,
                                       BoundAugment* then) {
  const std::size_t count = starts.shape(0);
  check(ends.shape(0) == count && parameters.shape(0) == count && statuses.shape(0) == count &&
            statuses.shape(1) == sizeof(Status) && places.shape(0) == count,
        "starts, ends, parameters, places and statuses of as many samples");
  check(parameters.shape(1) == std::size_t(plan.draws), "as many parameters as the plan draws");
  for (std::size_t i = 0; i < count; ++i) {
    check(0 <= starts(i) && starts(i) <= ends(i) && std::size_t(ends(i)) <= arena.size(), "a path outside its memory");
  }
  auto bound = std::make_unique<BoundBatch>();
  bound->work = std::make_shared<ImageBatch>();
  bound->any = bound->work;
  ImageBatch& work = *bound->work;
  work.plan = lent(&plan);
  work.count = static_cast<std::int64_t>(count);
  work.paths = {bytes_of(prefix), bytes_of(arena), starts.data(), ends.data()};
  work.parameters = parameters.data();
  work.places = places.data();
  work.sample_size = {size[0], size[1]};
  work.keeps_files = keeps_files;
  work.statuses = reinterpret_cast<Status*>(statuses.data());
  if (memory.has_value()) {
    const std::int64_t each = std::int64_t{size[0]} * size[1] * plan.how.channels * word_after(plan);
    check(size[0] > 0 && size[1] > 0, "samples of a size");
    for (std::size_t i = 0; i < count; ++i) {
      check(places(i) >= 0 && places(i) + each <= std::int64_t(memory->size()), "a place outside the memory");
      check(
          (reinterpret_cast<std::uintptr_t>(memory->data()) + std::size_t(places(i))) % std::size_t(word_after(plan)) ==
              0,
          "a place that is not aligned");
    }
    work.memory = memory->data();
  }
  if (inputs.has_value()) {
    check(inputs->size() == count, "an input, or None, of each sample");
    bound->inputs.resize(count);
    std::size_t i = 0;
    for (nb::handle input : *inputs) {
      ImageInput& into = bound->inputs[i++];
      if (input.is_none()) continue;
      if (input.ptr() == Py_False) {
        into.is_left = true;
        continue;
      }
      check(nb::isinstance<nb::bytes>(input), "an input is an encoded file, None or False");
      const Bytes bytes = bytes_of(nb::borrow<nb::bytes>(input));
      into = {false, bytes.data, static_cast<std::int64_t>(bytes.size)};
    }
    work.inputs = bound->inputs.data();
  }
  check(memory.has_value() || !makes_samples(plan), "memory for samples that are kept, scaled or TensorFlow's");
  work.kept = lent(kept);
  check(work.kept == nullptr || work.kept->form == KeptForm::pixels || !makes_samples(plan),
        "samples are kept as they are, not as coefficients");
  if (states.has_value()) {
    check(states->shape(0) == count && states->shape(1) == 5, "a state of five numbers for each sample");
    bound->states.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t k = 0; k < 5; ++k) bound->states[i].numbers[k] = (*states)(i, k);
      bound->states[i].is_settled = true;
    }
    work.states = bound->states.data();
  }
  if (then != nullptr) {
    const ImageView& shape = then->work->shape();
    check(then->work->count == work.count && shape.element == Element::uint8 && shape.channels == plan.how.channels &&
              plan.how.kind == Conversion::Kind::bytes && !memory.has_value() && !makes_samples(plan),
          "images of bytes, as many as are changed then, without memory of their own");
    work.then = then->work;
  }
  check(most_nbytes >= 0 && (most_nbytes == 0 || kept != nullptr), "a store for images that are to be kept");
  work.most_nbytes = most_nbytes;
  if (!work.prepare()) throw std::bad_alloc();
  nb::list keep;
  for (const nb::object& one : {nb::find(plan), nb::object(prefix), nb::object(arena), nb::cast(starts), nb::cast(ends),
                                nb::cast(parameters), nb::cast(places), nb::cast(statuses)}) {
    keep.append(one);
  }
  if (memory.has_value()) keep.append(nb::cast(*memory));
  if (then != nullptr) keep.append(nb::find(then));
  if (kept != nullptr) keep.append(nb::find(kept));  // with the memory that is mapped
  if (inputs.has_value()) keep.append(*inputs);
  bound->keep = std::move(keep);
  return bound;
}

nb::object taken(MadeImage image, std::initializer_list<std::size_t> shape) {
  if (image.data == nullptr) return nb::none();
  return nb::cast(owned(image.data, shape));
}

nb::object pixels_copied(const Pixels& pixels) {
  const std::size_t row = std::size_t(pixels.width) * std::size_t(pixels.channels);
  auto* memory = static_cast<std::uint8_t*>(std::malloc(row * std::size_t(pixels.height)));
  if (memory == nullptr) throw std::bad_alloc();
  for (std::int32_t y = 0; y < pixels.height; ++y) {
    std::memcpy(memory + std::size_t(y) * row, pixels.data + y * pixels.pitch, row);
  }
  MadeImage made;
  made.data.reset(memory);
  return taken(std::move(made), {std::size_t(pixels.height), std::size_t(pixels.width), std::size_t(pixels.channels)});
}

nb::object decode(nb::handle file, std::int32_t top, std::int32_t left, std::int32_t height, std::int32_t width,
                  int kind) {
  const Buffer buffer(file);
  check(kind >= 0 && kind <= 2, "no such kind of pixels");
  Pixels pixels;
  Status status;
  Scratch& scratch = own_scratch();
  {
    nb::gil_scoped_release free;
    const JpegHeader header = read_jpeg_header(buffer.bytes());
    const bool fits = header.trusted && top >= 0 && left >= 0 && height > 0 && width > 0 &&
                      top <= header.height - height && left <= header.width - width;
    status = fits ? scratch.jpeg.decode(buffer.bytes(), {top, left, height, width}, scratch.arena, &pixels,
                                        static_cast<JpegPixels>(kind))
                  : Status::declined(Reason::untrusted);
  }
  if (!status.is_made()) return nb::none();
  return pixels_copied(pixels);
}

nb::object decode_reduced(nb::handle file, int factor, std::int32_t count) {
  const Buffer buffer(file);
  check(factor == 2 || factor == 4 || factor == 8, "a factor of 2, 4 or 8");
  Pixels pixels;
  Status status;
  Scratch& scratch = own_scratch();
  {
    nb::gil_scoped_release free;
    const JpegHeader header = read_jpeg_header(buffer.bytes());
    const std::int32_t height = (header.height + factor - 1) / factor, width = (header.width + factor - 1) / factor;
    const Box rows{0, 0, std::min(std::max(count, 1), height), width};
    status = header.trusted ? scratch.jpeg.decode_reduced(buffer.bytes(), factor, rows, scratch.arena, &pixels)
                            : Status::declined(Reason::untrusted);
  }
  if (!status.is_made()) return nb::none();
  return pixels_copied(pixels);
}

nb::object png_rows(nb::handle file) {
  const Buffer buffer(file);
  Pixels rows;
  Status status;
  Scratch& scratch = own_scratch();
  {
    nb::gil_scoped_release free;
    const PngHeader header = read_png_header(buffer.bytes(), scratch.arena, scratch.codecs);
    status = header.is_png()
                 ? decode_png_rows(buffer.bytes(), header, header.height, scratch.arena, scratch.codecs, &rows)
                 : Status::declined(Reason::unknown_format);
  }
  if (!status.is_made()) return nb::none();
  return pixels_copied(rows);
}

// Whether an encoded file may be decoded later: see JpegDecoder::probe().
int probe(nb::handle file) {
  const Buffer buffer(file);
  Status status;
  Scratch& scratch = own_scratch();
  {
    nb::gil_scoped_release free;
    status = read_jpeg_header(buffer.bytes()).trusted ? scratch.jpeg.probe(buffer.bytes())
                                                      : Status::declined(Reason::untrusted);
  }
  if (status.is_made()) return 1;
  return status.reason == Reason::asked ? 2 : 0;
}

nb::object draw_image(const ImageSource& source, const std::vector<Step>& steps, const In<double, 1>& parameters) {
  check_draws(steps, parameters.size());
  Conversion how;
  how.interleaved = true;
  MadeImage made;
  Status status;
  Scratch& scratch = own_scratch();
  Region region;
  {
    nb::gil_scoped_release free;
    if (fold(steps, source.size, parameters.data(), &region)) {
      made.size = bytes_each(how, region.window.height, region.window.width);
      made.data.reset(static_cast<std::uint8_t*>(std::malloc(std::size_t(made.size))));
      status = made.data == nullptr ? Status::declined(Reason::no_memory)
                                    : draw(region, source, how, false, scratch, made.data.get(), nullptr);
    }
  }
  if (!status.is_made()) return nb::none();
  return taken(std::move(made), {std::size_t(region.window.height), std::size_t(region.window.width), 3});
}

nb::object draw_file(nb::handle file, const std::vector<Step>& steps, const In<double, 1>& parameters) {
  const Buffer buffer(file);
  JpegHeader header;
  {
    nb::gil_scoped_release free;
    header = read_jpeg_header(buffer.bytes());
  }
  if (!header.trusted) return nb::none();
  ImageSource source;
  source.size = {header.height, header.width};
  source.file = buffer.bytes();
  return draw_image(source, steps, parameters);
}

nb::object draw_pixels(In<std::uint8_t, 3> pixels, const std::vector<Step>& steps, const In<double, 1>& parameters) {
  check(pixels.size() > 0 && pixels.shape(2) == 3, "pixels are (H, W, 3)");
  ImageSource source;
  source.size = {static_cast<std::int32_t>(pixels.shape(0)), static_cast<std::int32_t>(pixels.shape(1))};
  source.pixels = {pixels.data(), std::int64_t{3} * source.size.width, source.size.height, source.size.width, 3};
  return draw_image(source, steps, parameters);
}

void resample_array(nb::ndarray<const std::uint8_t, nb::numpy, nb::ndim<3>, nb::device::cpu> pixels, int filter,
                    const AxisTuple& x, const AxisTuple& y, bool vertical_first, int grey,
                    const std::shared_ptr<OwnedConversion>& how, Out<std::uint8_t, 1> out) {
  const Axis x_axis = axis_of(filter, x), y_axis = axis_of(filter, y);
  const std::int64_t channels = static_cast<std::int64_t>(pixels.shape(2));
  // Of a dimension of 1 the stride may be anything.
  const bool is_in_rows =
      (channels == 1 || pixels.stride(2) == 1) && (pixels.shape(1) == 1 || pixels.stride(1) == channels);
  check((channels == 1 || channels == 3) && is_in_rows && grey >= 0 && grey <= 2,
        "pixels are (H, W, 1 or 3), each row in one piece");
  check(std::int64_t(pixels.shape(0)) == y_axis.high - y_axis.low &&
            std::int64_t(pixels.shape(1)) == x_axis.high - x_axis.low,
        "pixels are those that the axes need");
  check(std::int64_t(out.size()) == bytes_each(how->how, y_axis.length, x_axis.length), "memory of the output's size");
  const Pixels source{pixels.data(), pixels.stride(0), static_cast<std::int32_t>(pixels.shape(0)),
                      static_cast<std::int32_t>(pixels.shape(1)), static_cast<std::int32_t>(channels)};
  std::uint8_t* to = out.data();
  Scratch& scratch = own_scratch();
  bool made = false;
  {
    nb::gil_scoped_release free;
    made =
        resample(source, filter, x_axis, y_axis, vertical_first, static_cast<Grey>(grey), how->how, scratch.arena, to);
  }
  if (!made) throw std::bad_alloc();
}

// Files of a few paths, and their headers; None in the place of one that cannot be read.
nb::list read_files(const nb::list& paths) {
  struct Found {
    nb::bytes path;
    MadeImage file;
    JpegHeader header;
  };
  std::vector<Found> all;
  for (nb::handle path : paths) all.push_back({nb::cast<nb::bytes>(path), {}, {}});
  {
    nb::gil_scoped_release free;
    Scratch* scratch = thread_scratch();
    for (Found& one : all) {
      if (scratch == nullptr) break;
      scratch->arena.reset();
      Bytes file;
      const Bytes path = bytes_of(one.path);
      // A name with a zero in it ends there for the system, and is another file's.
      if (std::strlen(one.path.c_str()) != path.size) continue;
      if (!read_file(one.path.c_str(), scratch->arena, &file).is_made()) continue;
      one.header = read_jpeg_header(file);
      one.file.data.reset(static_cast<std::uint8_t*>(std::malloc(file.size + 1)));
      if (one.file.data == nullptr) continue;
      std::memcpy(one.file.data.get(), file.data, file.size);
      one.file.size = static_cast<std::int64_t>(file.size);
    }
  }
  nb::list found;
  for (const Found& one : all) {
    if (one.file.data == nullptr) {
      found.append(nb::none());
      continue;
    }
    found.append(
        nb::make_tuple(nb::bytes(reinterpret_cast<const char*>(one.file.data.get()), std::size_t(one.file.size)),
                       tuple_of(one.header)));
  }
  return found;
}

using BoxTuple = std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t>;
using SizeTuple = std::tuple<std::int32_t, std::int32_t>;
using FlipTuple = std::tuple<bool, bool>;
using RegionTuple = std::tuple<BoxTuple, BoxTuple, SizeTuple, std::tuple<std::uint8_t, std::uint8_t, std::uint8_t>,
                               SizeTuple, int, bool, BoxTuple, FlipTuple, FlipTuple, int, std::int32_t>;

BoxTuple tuple_of(const Box& box) { return {box.top, box.left, box.height, box.width}; }
SizeTuple tuple_of(Size size) { return {size.height, size.width}; }

std::optional<RegionTuple> folded(const std::vector<Step>& steps, std::int32_t height, std::int32_t width,
                                  const In<double, 1>& parameters) {
  check_draws(steps, parameters.size());
  Region region;
  if (!fold(steps, {height, width}, parameters.data(), &region)) return std::nullopt;
  return RegionTuple{tuple_of(region.source),
                     tuple_of(region.placed),
                     tuple_of(region.canvas),
                     {region.fill[0], region.fill[1], region.fill[2]},
                     tuple_of(region.size),
                     region.filter,
                     region.vertical_first,
                     tuple_of(region.window),
                     {region.flip_before[0], region.flip_before[1]},
                     {region.flip_after[0], region.flip_after[1]},
                     static_cast<int>(region.grey),
                     region.grey_channels};
}

void register_step(nb::module_& m) {
  nb::class_<Step> step(m, "Step", "One step of a transform: see fastpipe/native/geometry.h.");
  step.def(nb::init<>())
      .def_prop_rw(
          "kind", [](const Step& s) { return static_cast<int>(s.kind); },
          [](Step& s, int kind) {
            check(kind >= 0 && kind <= 7, "no such kind of step");
            s.kind = static_cast<Step::Kind>(kind);
          })
      .def_rw("draw", &Step::draw)
      .def_prop_rw(
          "size", [](const Step& s) { return Two{s.size.height, s.size.width}; },
          [](Step& s, Two size) { s.size = {size[0], size[1]}; })
      .def_rw("filter", &Step::filter)
      .def_prop_rw(
          "order", [](const Step& s) { return static_cast<int>(s.order); },
          [](Step& s, int order) {
            check(order >= 0 && order <= 2, "no such order of passes");
            s.order = static_cast<PassOrder>(order);
          })
      .def_prop_rw(
          "scale", [](const Step& s) { return std::array<double, 2>{s.scale[0], s.scale[1]}; },
          [](Step& s, std::array<double, 2> v) { std::copy(v.begin(), v.end(), s.scale); })
      .def_prop_rw(
          "ratio", [](const Step& s) { return std::array<double, 2>{s.ratio[0], s.ratio[1]}; },
          [](Step& s, std::array<double, 2> v) { std::copy(v.begin(), v.end(), s.ratio); })
      .def_rw("max_size", &Step::max_size)
      .def_prop_rw(
          "padding", [](const Step& s) { return Four{s.padding[0], s.padding[1], s.padding[2], s.padding[3]}; },
          [](Step& s, Four v) { std::copy(v.begin(), v.end(), s.padding); })
      .def_rw("pad_if_needed", &Step::pad_if_needed)
      .def_rw("may_pad", &Step::may_pad)
      .def_rw("always_pads", &Step::always_pads)
      .def_rw("fill_by_channel", &Step::fill_by_channel)
      .def_rw("has_fill", &Step::has_fill)
      .def_prop_rw(
          "fill", [](const Step& s) { return std::array<std::uint8_t, 3>{s.fill[0], s.fill[1], s.fill[2]}; },
          [](Step& s, std::array<std::uint8_t, 3> v) { std::copy(v.begin(), v.end(), s.fill); })
      .def_rw("probability", &Step::probability)
      .def_rw("horizontal", &Step::horizontal)
      .def_rw("channels", &Step::channels)
      .def_rw("is_relative", &Step::is_relative)
      .def_rw("outside", &Step::outside)
      .def_rw("pads", &Step::pads);
}

}  // namespace

void register_images(nb::module_& m) {
  register_step(m);
  nb::class_<OwnedConversion>(m, "Conversion", "What becomes of an image's bytes: see fastpipe/native/resample.h.")
      .def("__init__", [](OwnedConversion*, int) { throw nb::type_error("made by conversion()"); });
  m.def("conversion", &make_conversion, nb::arg("kind"), nb::arg("channels"), nb::arg("interleaved"), nb::arg("word"),
        nb::arg("divide"), nb::arg("mean"), nb::arg("std"), nb::arg("table"),
        "A conversion: kind 0 leaves bytes, 1 computes float32, 2 looks up elements of `word` bytes.");
  nb::class_<ImagePlan>(m, "ImagePlan", "What is done to each image of a batch.")
      .def(
          "__init__",
          [](ImagePlan* self, const std::vector<Step>& steps, const std::shared_ptr<OwnedConversion>& how,
             std::int32_t draws, std::int64_t max_pixels, bool turns, bool scaled, const std::vector<Step>& shrink,
             int parity, const std::tuple<int, float, float>& scaling, bool keeps_samples, bool reads_png) {
            check(draws >= 0, "fewer than no numbers in a row");
            check_draws(steps, static_cast<std::size_t>(draws));
            check(shrink.empty() || (shrink.size() == 1 && shrink.front().kind == Step::Kind::resize &&
                                     shrink.front().size.height > 0 && shrink.front().size.width == 0),
                  "images are shrunk by a resize of their shorter side");
            new (self) ImagePlan;
            self->steps = steps;
            self->how = how->how;
            self->owner = how;
            self->draws = draws;
            self->max_pixels = max_pixels;
            self->turns = turns;
            self->scaled = scaled;
            self->shrink = shrink;
            check(parity >= 0 && parity <= 2, "no such parity");
            self->parity = static_cast<Parity>(parity);
            const int kind = std::get<0>(scaling);
            const bool makes_floats = self->parity != Parity::pillow;
            check(kind >= 0 && kind <= 3 && (kind == 0 || (kind >= 2) == makes_floats), "no such scaling");
            self->scaling = {static_cast<Scaling::Kind>(kind), std::get<1>(scaling), std::get<2>(scaling)};
            self->keeps_samples = keeps_samples;
            self->reads_png = reads_png;
            const bool is_plain = how->how.kind == Conversion::Kind::bytes && how->how.interleaved;
            check(is_plain || !makes_samples(*self), "samples of interleaved bytes before they are scaled");
            check(!reads_png || self->parity == Parity::pillow, "PNGs are decoded as by Pillow");
          },
          nb::arg("steps"), nb::arg("conversion"), nb::arg("draws"), nb::arg("max_pixels") = -1,
          nb::arg("turns") = false, nb::arg("scaled") = false, nb::arg("shrink") = std::vector<Step>(),
          nb::arg("parity") = 0, nb::arg("scaling") = std::make_tuple(0, 1.0f, 0.0f), nb::arg("keeps_samples") = false,
          nb::arg("reads_png") = false);
  nb::class_<BoundBatch, BoundWork>(m, "ImageBatch", "A batch of images that is made.")
      .def(
          "take_image",
          [](BoundBatch& self, std::int64_t item) {
            check(item >= 0 && item < self.work->count && self.work->memory == nullptr, "no such image");
            MadeImage image = self.work->take_image(item);
            const auto height = std::size_t(image.height), width = std::size_t(image.width);
            const auto size = std::size_t(image.size);
            return std::make_tuple(taken(std::move(image), {size}), height, width);
          },
          nb::sig("def take_image(self, item: int) -> tuple[NDArray[numpy.uint8], int, int]"), nb::arg("item"),
          "An image that was made into memory of its own, once: uint8 (bytes,), height, width.")
      .def(
          "take_file",
          [](BoundBatch& self, std::int64_t item) -> nb::object {
            check(item >= 0 && item < self.work->count && self.work->memory == nullptr && self.work->keeps_files,
                  "no such file");
            MadeImage file = self.work->take_file(item);
            if (file.data == nullptr) return nb::none();
            return nb::bytes(reinterpret_cast<const char*>(file.data.get()), std::size_t(file.size));
          },
          nb::sig("def take_file(self, item: int) -> bytes"), nb::arg("item"),
          "The encoded file of such an image, once.")
      .def_prop_ro(
          "times",
          [](const BoundBatch& self) {
            const Totals& totals = self.work->totals;
            return std::make_tuple(totals.read.load(), totals.decode.load(), totals.transform.load());
          },
          "Nanoseconds of reading, decoding and transforming, summed over samples.")
      .def_prop_ro(
          "seen",
          [](const BoundBatch& self) {
            const Totals& totals = self.work->totals;
            return std::make_tuple(totals.images.load(), totals.pixels.load(), totals.coefficients.load());
          },
          "Images whose sizes are known, their pixels in all, and about how many bytes their coefficients take.")
      .def_prop_ro(
          "whole",
          [](const BoundBatch& self) {
            std::vector<std::int64_t> found;
            for (std::int64_t i = 0; i < self.work->count; ++i) {
              if (self.work->has_whole(i)) found.push_back(i);
            }
            return found;
          },
          "The images whose whole pixels are to be kept.")
      .def(
          "take_whole",
          [](BoundBatch& self, std::int64_t item) {
            check(item >= 0 && item < self.work->count && self.work->has_whole(item), "no such image");
            WholeImage whole = self.work->take_whole(item);
            const auto height = std::size_t(whole.image.height), width = std::size_t(whole.image.width);
            const std::size_t pixel = std::size_t(whole.image.size) / (height * width);
            const Bytes state = whole.state.bytes();
            return nb::make_tuple(nb::bytes(reinterpret_cast<const char*>(&whole.digest), sizeof whole.digest),
                                  nb::bytes(reinterpret_cast<const char*>(state.data), state.size),
                                  taken(std::move(whole.image), {height, width, pixel}), whole.file_pixels);
          },
          nb::sig("def take_whole(self, item: int) -> tuple[bytes, bytes, NDArray[numpy.uint8], int]"), nb::arg("item"),
          "Such an image, once: its digest, its file's state, uint8 (H, W, bytes of a pixel), or an entry as "
          "(1, N, 1), and the pixels of its file.");
  m.def("fold", &folded, nb::arg("steps"), nb::arg("height"), nb::arg("width"), nb::arg("parameters").noconvert(),
        "The region that steps come to: the fields of fastpipe/native/geometry.h in their order, boxes and sizes as "
        "tuples; None where fold() gives false.");
  m.def("image_batch", &make_batch, nb::arg("plan"), nb::arg("prefix"), nb::arg("arena"), nb::arg("starts").noconvert(),
        nb::arg("ends").noconvert(), nb::arg("parameters").noconvert(), nb::arg("memory").noconvert().none(),
        nb::arg("places").noconvert(), nb::arg("size"), nb::arg("keeps_files"), nb::arg("statuses").noconvert(),
        nb::arg("inputs").none(), nb::arg("kept").none() = nb::none(), nb::arg("states").noconvert() = nb::none(),
        nb::arg("most_nbytes") = 0, nb::arg("then") = nb::none(),
        "A batch of images: see ImageBatch in fastpipe/native/images.h.");
  m.def(
      "read_jpeg_header",
      [](nb::handle file) {
        const Buffer buffer(file);
        JpegHeader header;
        {
          nb::gil_scoped_release free;
          header = read_jpeg_header(buffer.bytes());
        }
        return tuple_of(header);
      },
      nb::arg("file"), "Height, width, whether it is trusted, orientation.");
  m.def("decode", &decode,
        nb::sig("def decode(file: object, top: int, left: int, height: int, width: int, kind: int = 0) -> "
                "NDArray[numpy.uint8] | None"),
        nb::arg("file"), nb::arg("top"), nb::arg("left"), nb::arg("height"), nb::arg("width"), nb::arg("kind") = 0,
        "A part of a trusted JPEG, uint8 (height, width, C); None where it is declined.  Kind 0: Pillow's RGB, "
        "1: TensorFlow's, 2: TensorFlow's grey.");
  m.def(
      "resize_as_tensorflow",
      [](In<std::uint8_t, 3> pixels, int parity, Out<float, 3> out) {
        check(parity == 1 || parity == 2, "1: bilinear, 2: nearest");
        check(pixels.size() > 0 && out.size() > 0 && pixels.shape(2) == out.shape(2), "images of as many channels");
        const auto width = static_cast<std::int32_t>(pixels.shape(1)),
                   channels = static_cast<std::int32_t>(pixels.shape(2));
        const Pixels source{pixels.data(), std::int64_t{width} * channels, static_cast<std::int32_t>(pixels.shape(0)),
                            width, channels};
        const Size to{static_cast<std::int32_t>(out.shape(0)), static_cast<std::int32_t>(out.shape(1))};
        Scratch& scratch = own_scratch();
        bool made = false;
        {
          nb::gil_scoped_release free;
          made = resize_as_tensorflow(source, static_cast<Parity>(parity), to, scratch.arena, out.data());
        }
        if (!made) throw std::bad_alloc();
      },
      nb::arg("pixels").noconvert(), nb::arg("parity"), nb::arg("out").noconvert(),
      "tf.image.resize() without antialiasing: uint8 (h, w, C) to float32 (H, W, C).");
  m.def("decode_reduced", &decode_reduced,
        nb::sig("def decode_reduced(file: object, factor: int, count: int) -> NDArray[numpy.uint8] | None"),
        nb::arg("file"), nb::arg("factor"), nb::arg("count"),
        "At least so many rows of a trusted JPEG at a part of its size; None where it is declined.");
  m.def(
      "make_axis",
      [](int filter, std::int32_t in_size, std::int32_t out_size, std::int32_t first, std::int32_t length, bool turned,
         bool mirrored, std::int64_t start8, std::int64_t extent8) {
        check(in_size > 0 && out_size > 0 && first >= 0 && length > 0 && length <= out_size - first && extent8 > 0,
              "no axis of a resize");
        return tuple_of(make_axis(filter, in_size, out_size, first, length, turned, mirrored, start8, extent8));
      },
      nb::arg("filter"), nb::arg("in_size"), nb::arg("out_size"), nb::arg("first"), nb::arg("length"),
      nb::arg("turned"), nb::arg("mirrored"), nb::arg("start8"), nb::arg("extent8"),
      "An axis of a resize: the fields of Axis.");
  m.def(
      "axis_table",
      [](int filter, const AxisTuple& parts, Out<std::int32_t, 1> table) {
        const Axis axis = axis_of(filter, parts);
        check(table.size() == std::size_t(axis.length) * std::size_t(axis.pitch + 2),
              "a table of length * (pitch + 2)");
        std::vector<double> exact(static_cast<std::size_t>(axis.pitch));
        axis_table(filter, axis, table.data(), exact.data());
      },
      nb::arg("filter"), nb::arg("axis"), nb::arg("table").noconvert(), "Write starts, taps and weights of an axis.");
  m.def("png_rows", &png_rows, nb::arg("file"), nb::sig("def png_rows(file: object) -> NDArray[numpy.uint8] | None"),
        "The rows of a PNG as it stores them, (H, bytes, 1); None if it is not a complete, still, not interlaced PNG.");
  m.def("probe_jpeg", &probe, nb::arg("file"),
        "1 if a trusted JPEG can be decoded later without an error, 2 if that depends on its scans, which have to be "
        "read, 0 if it is declined.");
  m.def("draw_jpeg", &draw_file,
        nb::sig("def draw_jpeg(file: object, steps: Sequence[Step], parameters: NDArray[numpy.float64]) -> "
                "NDArray[numpy.uint8] | None"),
        nb::arg("file"), nb::arg("steps"), nb::arg("parameters").noconvert(),
        "What steps make of a trusted JPEG, uint8 (H, W, 3); None where it is declined.");
  m.def("draw_pixels", &draw_pixels,
        nb::sig("def draw_pixels(pixels: NDArray[numpy.uint8], steps: Sequence[Step], parameters: "
                "NDArray[numpy.float64]) -> NDArray[numpy.uint8] | None"),
        nb::arg("pixels").noconvert(), nb::arg("steps"), nb::arg("parameters").noconvert(),
        "What steps make of an image, uint8 (H, W, 3), likewise.");
  m.def("resample", &resample_array, nb::arg("pixels").noconvert(), nb::arg("filter"), nb::arg("x"), nb::arg("y"),
        nb::arg("vertical_first"), nb::arg("grey"), nb::arg("conversion"), nb::arg("out").noconvert(),
        "Resample and convert pixels into memory.");
  nb::class_<OpenArchives>(m, "OpenArchives", "While there is one, archives stay open: see fastpipe/native/files.h.")
      .def(nb::init<>());
  m.def(
      "read_files", &read_files,
      nb::sig("def read_files(paths: list[bytes]) -> list[tuple[bytes, tuple[int, int, bool, int]] | None]"),
      nb::arg("paths"),
      "Of each file, by its encoded path, its content and what read_jpeg_header() gives; None where it is unreadable.");
  m.def("jpeg_version", &jpeg_version, "The version of libjpeg-turbo.");
  m.def(
      "coefficients_version", [] { return kCoefficientsVersion; },
      "The version of the form in which coefficients are kept: see fastpipe/native/coefficients.h.");
  m.def("skip_resampling", &skip_resampling, nb::arg("skips"), "For benchmarks: images are read and decoded only.");
}

}  // namespace fastpipe::bindings
