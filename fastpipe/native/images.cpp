#include "images.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#include "clock.h"
#include "files.h"
#include "notes.h"
#include "simulate.h"

namespace fastpipe {

namespace {

std::atomic<bool> skips_resampling{false};

constexpr std::int64_t kMostWhole = std::int64_t{128} << 20;  // bytes of a batch's images that are to be kept

// The part of the image that lies in a part of the canvas; false where it has none there.
bool placed_part(const Region& region, const Box& needed, Box* part) noexcept {
  const std::int32_t top = std::max(needed.top, region.placed.top);
  const std::int32_t left = std::max(needed.left, region.placed.left);
  const std::int32_t bottom = std::min(needed.bottom(), region.placed.bottom());
  const std::int32_t right = std::min(needed.right(), region.placed.right());
  if (bottom <= top || right <= left) return false;
  *part = {region.source.top + top - region.placed.top, region.source.left + left - region.placed.left, bottom - top,
           right - left};
  return true;
}

// Pixels inside others.
Pixels inside(const Pixels& whole, const Box& box) noexcept {
  return {whole.data + box.top * whole.pitch + std::int64_t{box.left} * whole.channels, whole.pitch, box.height,
          box.width, whole.channels};
}

Status decode_part(const ImageSource& source, const Box& part, Scratch& scratch, Pixels* pixels) noexcept {
  if (source.pixels.data != nullptr) {
    *pixels = inside(source.pixels, part);
    return Status::made();
  }
  if (source.kept != nullptr) {
    const std::int64_t row = std::int64_t{3} * source.size.width;
    const std::uint8_t* rows =
        read_kept(*source.kept, source.offset + row * part.top, row * part.height, scratch.arena);
    if (rows == nullptr) return Status::declined(Reason::asked);
    *pixels = inside({rows, row, part.height, source.size.width, 3}, {0, part.left, part.height, part.width});
    return Status::made();
  }
  if (source.coefficients != nullptr) {
    return decode_pixels(source.coefficients->frame(), *source.coefficients, 1, part, scratch.arena, pixels);
  }
  if (source.png.is_png()) {
    return decode_png(source.file, source.png, part, scratch.arena, scratch.codecs, pixels);
  }
  if (!waited_in_place_of_decoding()) {
    return scratch.jpeg.decode(source.file, part, scratch.arena, pixels, JpegPixels::pillow, source.index);
  }
  const std::size_t pitch = std::size_t{3} * static_cast<std::size_t>(part.width);
  auto* memory = scratch.arena.array<std::uint8_t>(pitch * static_cast<std::size_t>(part.height));
  if (memory == nullptr) return Status::declined(Reason::no_memory);
  *pixels = {memory, static_cast<std::int64_t>(pitch), part.height, part.width, 3};
  return Status::made();
}

// The needed part of the canvas: decoded, and filled where the image does not reach.
Status canvas_of(const Region& region, const ImageSource& source, const Box& needed, Scratch& scratch,
                 Pixels* pixels) noexcept {
  Box part;
  const bool is_there = placed_part(region, needed, &part);
  if (is_there && part.height == needed.height && part.width == needed.width) {
    return decode_part(source, part, scratch, pixels);
  }
  const std::size_t pitch = std::size_t{3} * static_cast<std::size_t>(needed.width);
  auto* canvas = scratch.arena.array<std::uint8_t>(pitch * static_cast<std::size_t>(needed.height));
  if (canvas == nullptr) return Status::declined(Reason::no_memory);
  for (std::int32_t x = 0; x < needed.width; ++x) std::memcpy(canvas + 3 * x, region.fill, 3);
  for (std::int32_t y = 1; y < needed.height; ++y)
    std::memcpy(canvas + static_cast<std::size_t>(y) * pitch, canvas, pitch);
  if (is_there) {
    Pixels found;
    const Status status = decode_part(source, part, scratch, &found);
    if (!status.is_made()) return status;
    const std::int32_t top = region.placed.top + part.top - region.source.top - needed.top;
    const std::int32_t left = region.placed.left + part.left - region.source.left - needed.left;
    for (std::int32_t y = 0; y < part.height; ++y) {
      std::memcpy(canvas + static_cast<std::size_t>(top + y) * pitch + std::size_t{3} * static_cast<std::size_t>(left),
                  found.data + y * found.pitch, std::size_t{3} * static_cast<std::size_t>(part.width));
    }
  }
  *pixels = {canvas, static_cast<std::int64_t>(pitch), needed.height, needed.width, 3};
  return Status::made();
}

// The image at a part of its size, and the axes along which it is resampled.
Status reduced_source(const Region& region, const ImageSource& source, int factor, Scratch& scratch, Axis* x, Axis* y,
                      Pixels* pixels) noexcept {
  const Size image = source.size;
  const Size reduced{(image.height + factor - 1) / factor, (image.width + factor - 1) / factor};
  const std::int64_t eighths = 8 / factor;
  *x = make_axis(region.filter, reduced.width, region.size.width, region.window.left, region.window.width,
                 region.flip_before[0], region.flip_after[0], eighths * region.source.left,
                 eighths * region.source.width);
  *y = make_axis(region.filter, reduced.height, region.size.height, region.window.top, region.window.height,
                 region.flip_before[1], region.flip_after[1], eighths * region.source.top,
                 eighths * region.source.height);
  const Box needed{y->low, x->low, y->high - y->low, x->high - x->low};
  if (source.coefficients != nullptr) {
    return decode_pixels(source.coefficients->frame(), *source.coefficients, factor, needed, scratch.arena, pixels);
  }
  return scratch.jpeg.decode_reduced(source.file, factor, needed, scratch.arena, pixels, source.index);
}

MadeImage allocated(std::size_t size, std::int32_t height, std::int32_t width) noexcept {
  MadeImage made;
  made.data.reset(static_cast<std::uint8_t*>(std::malloc(size > 0 ? size : 1)));
  made.size = static_cast<std::int64_t>(size);
  made.height = height;
  made.width = width;
  return made;
}

}  // namespace

std::int64_t ImageSource::coefficient_bytes() const noexcept {
  if (coefficients != nullptr) return static_cast<std::int64_t>(coefficients->nbytes());
  return is_jpeg() ? static_cast<std::int64_t>(file.size + file.size / 6) : 0;
}

void skip_resampling(bool skips) noexcept { skips_resampling.store(skips); }

void MadeImage::Free::operator()(void* memory) const noexcept { std::free(memory); }

Status draw(const Region& region, const ImageSource& source, const Conversion& how, bool scaled, Scratch& scratch,
            std::uint8_t* out, Totals* totals) noexcept {
  const std::int64_t begun = now_ns();
  const int filter = region.filter < 0 ? static_cast<int>(kNearestFloor) : region.filter;
  const bool has_coefficients = source.is_jpeg() || source.coefficients != nullptr;
  const int factor = scaled && has_coefficients ? reduction(region, source.size) : 1;
  Axis x, y;
  Pixels pixels;
  Status status;
  if (factor > 1) {
    status = reduced_source(region, source, factor, scratch, &x, &y, &pixels);
  } else {
    axes_of(region, &x, &y);
    const Box needed{y.low, x.low, y.high - y.low, x.high - x.low};
    status = canvas_of(region, source, needed, scratch, &pixels);
  }
  const std::int64_t decoded_at = now_ns();
  if (totals != nullptr) totals->decode.fetch_add(decoded_at - begun, std::memory_order_relaxed);
  if (!status.is_made() || skips_resampling.load(std::memory_order_relaxed)) return status;
  if (!resample(pixels, filter, x, y, region.vertical_first, region.grey, how, scratch.arena, out)) {
    return Status::declined(Reason::no_memory);
  }
  if (totals != nullptr) totals->transform.fetch_add(now_ns() - decoded_at, std::memory_order_relaxed);
  return Status::made();
}

bool makes_samples(const ImagePlan& plan) noexcept {
  return plan.keeps_samples || plan.parity != Parity::pillow || plan.scaling.kind != Scaling::Kind::none;
}

std::int32_t word_before(const ImagePlan& plan) noexcept {
  return plan.parity == Parity::pillow ? plan.how.word : std::int32_t{sizeof(float)};
}

std::int32_t word_after(const ImagePlan& plan) noexcept {
  switch (plan.scaling.kind) {
    case Scaling::Kind::none:
      return word_before(plan);
    case Scaling::Kind::floats_to_bytes:
      return 1;
    default:
      return std::int32_t{sizeof(float)};
  }
}

namespace {

// What draw() does, for TensorFlow's pixels: float32.
Status draw_as_tensorflow(const Region& region, const ImageSource& source, const ImagePlan& plan, Scratch& scratch,
                          std::uint8_t* out, Totals* totals) noexcept {
  const std::int64_t begun = now_ns();
  if (!(region.placed == Box{0, 0, region.canvas.height, region.canvas.width})) {
    return Status::declined(Reason::not_folded);
  }
  const JpegPixels kind = plan.how.channels == 1 ? JpegPixels::tensorflow_grey : JpegPixels::tensorflow;
  Pixels pixels;
  const Status status = scratch.jpeg.decode(source.file, region.source, scratch.arena, &pixels, kind);
  const std::int64_t decoded_at = now_ns();
  totals->decode.fetch_add(decoded_at - begun, std::memory_order_relaxed);
  if (!status.is_made()) return status;
  const bool is_done =
      resize_as_tensorflow(pixels, plan.parity, region.size, scratch.arena, reinterpret_cast<float*>(out));
  totals->transform.fetch_add(now_ns() - decoded_at, std::memory_order_relaxed);
  return is_done ? Status::made() : Status::declined(Reason::no_memory);
}

}  // namespace

bool ImageBatch::prepare() noexcept {
  try {
    if (most_nbytes > 0) whole_.resize(static_cast<std::size_t>(count));
    if (memory != nullptr) return true;
    images_.resize(static_cast<std::size_t>(count));
    if (keeps_files) files_.resize(static_cast<std::size_t>(count));
  } catch (...) {
    return false;
  }
  return true;
}

void ImageBatch::run(std::int64_t item, Scratch& scratch) {
  statuses[item] = make(item, scratch);
  note_nothing();
}

void ImageBatch::lost(std::int64_t item) noexcept { statuses[item] = Status::declined(Reason::internal); }

MadeImage ImageBatch::take_image(std::int64_t item) noexcept {
  return std::move(images_[static_cast<std::size_t>(item)]);
}

MadeImage ImageBatch::take_file(std::int64_t item) noexcept {
  return std::move(files_[static_cast<std::size_t>(item)]);
}

WholeImage ImageBatch::take_whole(std::int64_t item) noexcept {
  return std::move(whole_[static_cast<std::size_t>(item)]);
}

bool ImageBatch::has_whole(std::int64_t item) const noexcept {
  return !whole_.empty() && whole_[static_cast<std::size_t>(item)].image.data != nullptr;
}

// What there is of a sample before it is made.
struct ImageBatch::Opened {
  ImageSource source;
  const char* path = nullptr;  // null of an image that is in memory
  bool is_kept = false;        // it was found where it is kept
  bool is_to_be_kept = false;
  FileState state;
  Digest digest;
  KeptCoefficients coefficients;  // which `source` refers to, if there are some

  // Use an entry that is kept; false where it is none.
  bool takes(KeptForm form, Bytes entry) noexcept {
    if (form == KeptForm::index) {
      source.index.known = entry;
      return true;
    }
    if (!coefficients.open(entry)) return false;
    source.coefficients = &coefficients;
    source.size = coefficients.frame().size;
    return true;
  }
};

// Look for an image where it is kept.  Made where it is there, or where it is to be made from its file.
Status ImageBatch::look_up(std::int64_t item, Scratch& scratch, Opened* opened) {
  if (states != nullptr) {
    opened->state = states[item];
  } else if (!state_of_file(opened->path, &opened->state)) {
    return Status::made();  // whoever reads it says what is wrong
  }
  std::uint8_t tag[64];
  std::size_t tag_size = std::min(kept->tag.size(), sizeof tag);
  std::memcpy(tag, kept->tag.data(), tag_size);
  if (plan->keeps_samples && plan->draws > 0) {  // which depend on them
    const std::size_t more = std::min(static_cast<std::size_t>(plan->draws) * sizeof(double), sizeof tag - tag_size);
    std::memcpy(tag + tag_size, parameters + item * plan->draws, more);
    tag_size += more;
  }
  opened->digest = blake2b(opened->state.bytes(), {tag, tag_size});
  KeptImage found;
  const bool of_pixels = kept->form == KeptForm::pixels;
  const std::int32_t channels = !of_pixels ? 1 : plan->keeps_samples ? plan->how.channels * word_before(*plan) : 3;
  const Lookup looked = find_kept(*kept, opened->digest, channels, plan->max_pixels, scratch.arena, &found);
  if (!of_pixels && looked == Lookup::found) {
    const std::int64_t nbytes = found.size.width;
    const std::uint8_t* const entry =
        kept->memory != nullptr ? kept->memory + found.offset : read_kept(*kept, found.offset, nbytes, scratch.arena);
    opened->is_kept = entry != nullptr && opened->takes(kept->form, {entry, static_cast<std::size_t>(nbytes)});
    return Status::made();  // from its file, if the entry cannot be used
  }
  if (looked == Lookup::found) {
    if (memory == nullptr && then == nullptr)
      return Status::declined(Reason::asked);  // an image takes more from its file than pixels
    opened->source.size = found.size;
    opened->is_kept = true;
    if (kept->memory != nullptr) {
      opened->source.pixels = {kept->memory + found.offset, std::int64_t{3} * found.size.width, found.size.height,
                               found.size.width, 3};
    } else {
      opened->source.kept = kept.get();
      opened->source.offset = found.offset;
    }
    return Status::made();
  }
  if (looked == Lookup::too_large) return of_pixels ? Status::declined(Reason::asked) : Status::made();
  const bool may_be_kept = most_nbytes > 0 && opened->state.is_settled;
  opened->is_to_be_kept = may_be_kept && (kept->marks == 0 || mark(*kept, opened->digest));
  return Status::made();
}

// Look at a sample's file, or at what there is in its place: its size is known then.
Status ImageBatch::open(std::int64_t item, Scratch& scratch, Opened* opened) {
  const ImageInput input = inputs == nullptr ? ImageInput{} : inputs[item];
  ImageSource& source = opened->source;
  if (input.is_left) return Status::declined(Reason::asked);
  const std::int64_t begun = now_ns();
  Status status = Status::made();
  if (input.data != nullptr) {
    source.file = {input.data, static_cast<std::size_t>(input.size)};
    if (kept != nullptr && states != nullptr) status = look_up(item, scratch, opened);
  } else {
    status = find_path(item, scratch, opened);
    if (status.is_made() && kept != nullptr) status = look_up(item, scratch, opened);
    const bool takes_file = keeps_files && memory == nullptr && source.coefficients != nullptr;
    if (status.is_made() && (source.is_encoded() || takes_file)) status = read(scratch, opened);
  }
  totals.read.fetch_add(now_ns() - begun, std::memory_order_relaxed);
  return status.is_made() && source.is_encoded() ? read_header(scratch, &source) : status;
}

Status ImageBatch::find_path(std::int64_t item, Scratch& scratch, Opened* opened) {
  const auto length = static_cast<std::size_t>(paths.ends[item] - paths.starts[item]);
  auto* path = scratch.arena.array<char>(paths.prefix.size + length + 1);
  if (path == nullptr) return Status::declined(Reason::no_memory);
  if (paths.prefix.size > 0) std::memcpy(path, paths.prefix.data, paths.prefix.size);
  if (length > 0) std::memcpy(path + paths.prefix.size, paths.arena.data + paths.starts[item], length);
  path[paths.prefix.size + length] = '\0';
  // A name with a zero in it ends there for the system, and is another file's.
  if (std::strlen(path) != paths.prefix.size + length) return Status::declined(Reason::unreadable);
  note(path);
  opened->path = path;
  return Status::made();
}

// Read the file of a sample.
Status ImageBatch::read(Scratch& scratch, Opened* opened) {
  if (!opened->is_to_be_kept || states != nullptr) return read_file(opened->path, scratch.arena, &opened->source.file);
  FileState state;
  const Status status = read_file(opened->path, scratch.arena, &opened->source.file, &state);
  // Another file may have taken the place of the one whose state is known.
  if (!(state == opened->state)) opened->is_to_be_kept = false;
  return status;
}

// Find out whether an encoded image is decoded here, and its size.
Status ImageBatch::read_header(Scratch& scratch, ImageSource* source) {
  const JpegHeader header = read_jpeg_header(source->file);
  bool trusted = header.trusted, may_turn = header.orientation != 1;
  source->size = {header.height, header.width};
  if (!header.is_jpeg() && plan->reads_png) {
    source->png = read_png_header(source->file, scratch.arena, scratch.codecs);
    trusted = source->png.trusted;
    may_turn = source->png.may_turn;
    source->size = {source->png.height, source->png.width};
  }
  if (source->size.height == 0) return Status::declined(Reason::unknown_format);
  if (!trusted) return Status::declined(Reason::untrusted);
  if (plan->turns && may_turn) return Status::declined(Reason::turned);
  if (plan->max_pixels >= 0 && std::int64_t{source->size.height} * source->size.width > plan->max_pixels) {
    return Status::declined(Reason::too_large);
  }
  return Status::made();
}

// Count the bytes of a whole image or an entry that is to be kept.  Returns whether there is room for it.
bool ImageBatch::has_room(std::int64_t nbytes) noexcept {
  if (nbytes > most_nbytes) return false;
  if (whole_nbytes_.fetch_add(nbytes) + nbytes <= kMostWhole) return true;
  whole_nbytes_.fetch_sub(nbytes);
  return false;
}

// Take the coefficients of an image from its file; what is done to it then begins from them.  Returns their entry, in
// the arena; no bytes of a file that has none, or without room for it.
Bytes ImageBatch::packed(Scratch& scratch, Opened* opened) {
  const ImageSource& source = opened->source;
  const auto least = static_cast<std::int64_t>(source.file.size);  // about as many bytes as its entry has
  if (!source.is_jpeg() || least > most_nbytes || whole_nbytes_.load() + least > kMostWhole) return {};
  const std::int64_t begun = now_ns();
  Bytes entry;
  const bool is_packed = scratch.jpeg.pack(source.file, scratch.arena, &entry).is_made();
  totals.decode.fetch_add(now_ns() - begun, std::memory_order_relaxed);
  return is_packed && opened->takes(KeptForm::coefficients, entry) ? entry : Bytes{};
}

// Keep an entry, if there is room for it.
void ImageBatch::keep_entry(std::int64_t item, Bytes entry, std::int64_t file_pixels, const Opened& opened) {
  const auto nbytes = static_cast<std::int64_t>(entry.size);
  if (!has_room(nbytes)) return;
  MadeImage made = allocated(entry.size, 1, static_cast<std::int32_t>(nbytes));
  if (made.data == nullptr) return;
  std::memcpy(made.data.get(), entry.data, entry.size);
  whole_[static_cast<std::size_t>(item)] = {std::move(made), opened.digest, opened.state, file_pixels};
}

// Decode all of an image, make it smaller where the plan says so, and keep it where that is wanted; what is done to it
// then begins from these pixels.
Status ImageBatch::make_whole(std::int64_t item, Scratch& scratch, Opened* opened) {
  Conversion as_it_is;
  as_it_is.interleaved = true;
  ImageSource& source = opened->source;
  const Size before = source.size;
  Region whole;
  const bool is_smaller =
      !plan->shrink.empty() && std::min(before.height, before.width) > plan->shrink.front().size.height;
  if (!is_smaller && !opened->is_to_be_kept) return Status::made();
  if (!fold(is_smaller ? plan->shrink : std::vector<Step>(), before, nullptr, &whole)) {
    return Status::declined(Reason::not_folded);
  }
  const Size to{whole.window.height, whole.window.width};
  const std::int64_t row = std::int64_t{3} * to.width;
  const std::int64_t nbytes = row * to.height;
  const bool is_kept = opened->is_to_be_kept && nbytes <= most_nbytes;
  if (!is_smaller && !is_kept) return Status::made();
  // Large ones are kept one by one, by Python: whole batches of them would fill the memory.
  if (is_kept && !has_room(nbytes)) return Status::declined(Reason::asked);
  MadeImage made;
  std::uint8_t* pixels = nullptr;
  if (is_kept) {
    made = allocated(static_cast<std::size_t>(nbytes), to.height, to.width);
    pixels = made.data.get();
  } else {
    pixels = scratch.arena.array<std::uint8_t>(static_cast<std::size_t>(nbytes));
  }
  if (pixels == nullptr) return Status::declined(Reason::no_memory);
  const Status status = draw(whole, source, as_it_is, plan->scaled, scratch, pixels, &totals);
  if (!status.is_made()) return status;
  source = {to, source.file, {}, {pixels, row, to.height, to.width, 3}, nullptr, 0, nullptr, {}};
  if (is_kept) {
    whole_[static_cast<std::size_t>(item)] = {std::move(made), opened->digest, opened->state,
                                              std::int64_t{before.height} * before.width};
  }
  return Status::made();
}

// Where a sample goes; null where there is no memory.
std::uint8_t* ImageBatch::place_for(std::int64_t item, const Region& region) {
  if (memory != nullptr) return memory + places[item];
  const std::int64_t pixels = std::int64_t{region.window.height} * region.window.width;
  const std::int64_t each = std::int64_t{plan->how.channels} * plan->how.word;
  if (pixels > std::numeric_limits<std::int64_t>::max() / each) return nullptr;
  MadeImage& image = images_[static_cast<std::size_t>(item)];
  image = allocated(static_cast<std::size_t>(pixels * each), region.window.height, region.window.width);
  return image.data.get();
}

// Make a sample as it is before scaling, keep it where that is wanted, and scale it; or scale one that was kept.
Status ImageBatch::make_sample(std::int64_t item, Scratch& scratch, Opened* opened) {
  ImageSource& source = opened->source;
  const std::int64_t count = std::int64_t{sample_size.height} * sample_size.width * plan->how.channels;
  const std::int64_t nbytes = count * word_before(*plan);
  const bool scales = plan->scaling.kind != Scaling::Kind::none;
  std::uint8_t* out = memory + places[item];
  const std::uint8_t* before = nullptr;
  MadeImage made;
  if (opened->is_kept) {
    if (!(source.size == sample_size)) return Status::declined(Reason::asked);
    before =
        source.pixels.data != nullptr ? source.pixels.data : read_kept(*kept, source.offset, nbytes, scratch.arena);
    if (before == nullptr) return Status::declined(Reason::asked);
  } else {
    Region region;
    if (!fold(plan->steps, source.size, parameters + item * plan->draws, &region) ||
        !(Size{region.window.height, region.window.width} == sample_size)) {
      return Status::declined(Reason::not_folded);
    }
    const bool is_to_be_kept = opened->is_to_be_kept && has_room(nbytes);
    std::uint8_t* into = out;
    if (is_to_be_kept) {
      made = allocated(static_cast<std::size_t>(nbytes), sample_size.height, sample_size.width);
      into = made.data.get();
    } else if (scales) {
      into = scratch.arena.array<std::uint8_t>(static_cast<std::size_t>(nbytes));
    }
    if (into == nullptr) return Status::declined(Reason::no_memory);
    const Status status = plan->parity == Parity::pillow
                              ? draw(region, source, plan->how, plan->scaled, scratch, into, &totals)
                              : draw_as_tensorflow(region, source, *plan, scratch, into, &totals);
    if (!status.is_made()) return status;
    before = into;
    if (is_to_be_kept) {
      whole_[static_cast<std::size_t>(item)] = {std::move(made), opened->digest, opened->state,
                                                std::int64_t{source.size.height} * source.size.width};
    }
  }
  const std::int64_t begun = now_ns();
  if (scales) {
    scale(before, count, plan->scaling, out);
  } else if (before != out) {
    std::memcpy(out, before, static_cast<std::size_t>(nbytes));
  }
  totals.transform.fetch_add(now_ns() - begun, std::memory_order_relaxed);
  return Status::made();
}

Status ImageBatch::make(std::int64_t item, Scratch& scratch) {
  Opened opened;
  Status status = open(item, scratch, &opened);
  if (!status.is_made()) return status;
  status = makes_samples(*plan) ? make_sample(item, scratch, &opened) : make_image(item, scratch, &opened);
  if (status.is_made() && opened.is_kept) status.reason = Reason::kept;
  return status;
}

// Make an image, and keep an entry of it where that is wanted.
Status ImageBatch::make_image(std::int64_t item, Scratch& scratch, Opened* opened) {
  ImageSource& source = opened->source;
  const Size size = source.size;
  Bytes entry;
  if (opened->is_to_be_kept && kept->form != KeptForm::pixels) {
    opened->is_to_be_kept = false;
    if (kept->form == KeptForm::index) {
      source.index.made = &entry;
    } else {
      entry = packed(scratch, opened);
    }
  }
  Status status = draw_image(item, scratch, opened);
  if (status.reason == Reason::damaged && source.coefficients != nullptr) {
    // Either the entry is damaged, or libjpeg-turbo has to decode the file: see decode_pixels().
    source.coefficients = nullptr;
    opened->is_kept = false;
    entry = {};
    status = source.file.data == nullptr ? read(scratch, opened) : Status::made();
    if (status.is_made()) status = read_header(scratch, &source);
    if (status.is_made()) status = draw_image(item, scratch, opened);
  }
  if (status.is_made() && entry.data != nullptr) {
    keep_entry(item, entry, std::int64_t{size.height} * size.width, *opened);
  }
  return status;
}

Status ImageBatch::draw_image(std::int64_t item, Scratch& scratch, Opened* opened) {
  ImageSource& source = opened->source;
  Status status = Status::made();
  const std::int64_t coefficients = source.coefficient_bytes();
  if (source.is_encoded() || source.coefficients != nullptr) status = make_whole(item, scratch, opened);
  if (!status.is_made()) return status;
  totals.images.fetch_add(1, std::memory_order_relaxed);
  totals.pixels.fetch_add(std::int64_t{source.size.height} * source.size.width, std::memory_order_relaxed);
  totals.coefficients.fetch_add(coefficients, std::memory_order_relaxed);
  Region region;
  const double* numbers = parameters == nullptr ? nullptr : parameters + item * plan->draws;
  if (!fold(plan->steps, source.size, numbers, &region)) return Status::declined(Reason::not_folded);
  if (memory != nullptr && !(Size{region.window.height, region.window.width} == sample_size)) {
    return Status::declined(Reason::not_folded);
  }
  if (then != nullptr) return make_changed(item, scratch, region, source);
  std::uint8_t* out = place_for(item, region);
  if (out == nullptr) return Status::declined(Reason::no_memory);
  status = draw(region, source, plan->how, plan->scaled, scratch, out, &totals);
  if (status.is_made() && keeps_files && memory == nullptr && source.file.data != nullptr) {
    MadeImage& kept_file = files_[static_cast<std::size_t>(item)];
    kept_file = allocated(source.file.size, 0, 0);
    if (kept_file.data == nullptr) return Status::declined(Reason::no_memory);
    std::memcpy(kept_file.data.get(), source.file.data, source.file.size);
  }
  return status;
}

// Make an image of bytes, and change it while it is in cache.
Status ImageBatch::make_changed(std::int64_t item, Scratch& scratch, const Region& region, const ImageSource& source) {
  ImageView view = then->shape();
  if (region.window.height != view.height || region.window.width != view.width) {
    return Status::declined(Reason::not_folded);
  }
  auto* const pixels =
      scratch.arena.array<std::uint8_t>(static_cast<std::size_t>(view.channels * view.height * view.width));
  if (pixels == nullptr) return Status::declined(Reason::no_memory);
  const Status status = draw(region, source, plan->how, plan->scaled, scratch, pixels, &totals);
  if (!status.is_made()) return status;
  view.data = pixels;
  if (plan->how.interleaved) {
    view.strides[0] = 1;
    view.strides[1] = view.channels * view.width;
    view.strides[2] = view.channels;
  } else {
    view.strides[0] = view.height * view.width;
    view.strides[1] = view.width;
    view.strides[2] = 1;
  }
  const std::int64_t begun = now_ns();
  const Change change = then->change(item, view, scratch.arena);
  totals.transform.fetch_add(now_ns() - begun, std::memory_order_relaxed);
  // Python does it again where something is wrong, and says so.
  return change == Change::made ? status : Status::declined(Reason::asked);
}

}  // namespace fastpipe
