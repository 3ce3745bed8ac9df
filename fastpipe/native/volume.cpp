#include "volume.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "simulate.h"

namespace fastpipe {
namespace {

constexpr std::int64_t kMostElements = std::int64_t{1} << 62;
constexpr std::int64_t kMostChunk = (std::int64_t{1} << 31) - 1;  // bytes of a chunk, or of a unit
constexpr std::int64_t kOverhead = 1 << 16;  // that a stored chunk may be larger than twice its content
constexpr std::int64_t kFirstRead = 4096;    // of a Blosc buffer, of which some blocks are needed
constexpr std::int64_t kTile = 32;           // elements along a side of what is transposed at once

// The product of counts from 0; false where it is beyond `most`.
bool multiply(std::int64_t a, std::int64_t b, std::int64_t most, std::int64_t* product) noexcept {
  if (a < 0 || b < 0 || (b > 0 && a > most / b)) return false;
  *product = a * b;
  return true;
}

// The dimensions in the order of the file: the one whose elements are farthest from each other comes first, after those
// that the array does not have itself.
std::array<int, kDims> order_in_file(const Index& steps) noexcept {
  std::array<int, kDims> order{};
  for (int dim = 0; dim < kDims; ++dim) order[dim] = dim;
  const auto distance = [&](int dim) { return steps[dim] == 0 ? INT64_MAX : std::abs(steps[dim]); };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return distance(a) > distance(b); });
  return order;
}

// Return whether the elements of an array of this shape lie in the file without gaps.
bool is_dense(const Index& shape, const Index& steps, std::int64_t itemsize) noexcept {
  const std::array<int, kDims> order = order_in_file(steps);
  std::int64_t step = itemsize;
  for (int at = kDims; at-- > 0;) {
    const int dim = order[at];
    if (shape[dim] > 1 && steps[dim] != step && steps[dim] != -step) return false;
    step *= shape[dim];
  }
  return true;
}

void fill_with(const std::string& element, std::uint8_t* out, std::int64_t nbytes) noexcept {
  const auto size = static_cast<std::int64_t>(element.size());
  if (std::all_of(element.begin(), element.end(), [&](char byte) { return byte == element[0]; })) {
    std::memset(out, static_cast<unsigned char>(element[0]), static_cast<std::size_t>(nbytes));
    return;
  }
  // Of what is filled already as much again.
  std::int64_t done = std::min(size, nbytes);
  std::memcpy(out, element.data(), static_cast<std::size_t>(done));
  for (; done < nbytes; done *= 2) {
    std::memcpy(out + done, out, static_cast<std::size_t>(std::min(done, nbytes - done)));
  }
}

// Part of a chunk's content, and the memory that it fills.
struct Part {
  Range range;
  std::uint8_t* out = nullptr;
};

bool fill_parts(const std::string& element, const Part* parts, std::int64_t count) noexcept {
  for (std::int64_t i = 0; i < count; ++i) {
    fill_with(element, parts[i].out, parts[i].range.end - parts[i].range.begin);
  }
  return true;
}

// ---- chunks that are files ---------------------------------------------------------------------------------------

// The path of a chunk, in the arena.
char* path_of(const VolumeSource& source, const Index& place, Arena& arena) noexcept {
  const std::size_t fixed = source.folder.size() + source.prefix.size();
  char* path = arena.array<char>(fixed + 21 * kDims + 2);
  if (path == nullptr) return nullptr;
  char* end = std::copy(source.folder.begin(), source.folder.end(), path);
  end = std::copy(source.prefix.begin(), source.prefix.end(), end);
  for (int dim = kDims - source.dims; dim < kDims; ++dim) {
    if (dim > kDims - source.dims || !source.prefix.empty()) *end++ = source.separator;
    char digits[20];
    int count = 0;
    std::int64_t left = place[dim];
    do {
      digits[count++] = static_cast<char>('0' + left % 10);
      left /= 10;
    } while (left > 0);
    while (count > 0) *end++ = digits[--count];
  }
  *end = '\0';
  return path;
}

// Read the bytes of some blocks of a Blosc buffer in a file; the table of starts is in the buffer already.
bool read_blocks(int descriptor, const BloscHeader& header, Range blocks, std::uint8_t* buffer, Arena& arena) noexcept {
  const std::int64_t count = blocks.end - blocks.begin;
  auto* bounds = arena.array<Range>(static_cast<std::size_t>(count));
  if (bounds == nullptr ||
      locate_blosc_blocks(header, buffer + BloscHeader::kBytes, blocks, bounds, arena) != Problem::none) {
    return false;
  }
  for (std::int64_t first = 0; first < count;) {
    std::int64_t end = bounds[first].end, next = first + 1;
    while (next < count && bounds[next].begin == end) end = bounds[next++].end;
    if (!read_at(descriptor, buffer + bounds[first].begin, end - bounds[first].begin, bounds[first].begin))
      return false;
    first = next;
  }
  return true;
}

Range blocks_of(const BloscHeader& header, Range range) noexcept {
  return {range.begin / header.block, (range.end + header.block - 1) / header.block};
}

bool decode_part(const BloscHeader& header, const std::uint8_t* buffer, const Part& part, Scratch& scratch) noexcept {
  const Range blocks = blocks_of(header, part.range);
  const std::int64_t begin = blocks.begin * header.block, end = std::min(blocks.end * header.block, header.nbytes);
  CodecStates& states = scratch.codecs;
  if (begin == part.range.begin && end == part.range.end) {
    return decode_blosc_blocks(header, buffer, blocks, part.out, scratch.chunk, states) == Problem::none;
  }
  auto* whole = scratch.chunk.array<std::uint8_t>(static_cast<std::size_t>(end - begin));
  if (whole == nullptr) return false;
  if (decode_blosc_blocks(header, buffer, blocks, whole, scratch.chunk, states) != Problem::none) return false;
  std::memcpy(part.out, whole + (part.range.begin - begin),
              static_cast<std::size_t>(part.range.end - part.range.begin));
  return true;
}

// Parts of the content that a file compressed by Blosc has: only the blocks that these need are read and decoded.
bool read_blosc(int descriptor, std::int64_t size, std::int64_t nbytes, const Part* parts, std::int64_t count,
                Scratch& scratch) noexcept {
  std::int64_t wanted = 0;
  for (std::int64_t i = 0; i < count; ++i) wanted += parts[i].range.end - parts[i].range.begin;
  const bool is_whole = wanted == nbytes;
  auto* buffer = scratch.chunk.array<std::uint8_t>(static_cast<std::size_t>(size));
  if (buffer == nullptr) return false;
  const std::int64_t first = is_whole ? size : std::min(size, kFirstRead);
  if (!read_at(descriptor, buffer, first, 0)) return false;
  BloscHeader header;
  if (read_blosc_header({buffer, static_cast<std::size_t>(first)}, nbytes, size, &header) != Problem::none) {
    return false;
  }
  if (!is_whole && header.is_copied) {
    for (std::int64_t i = 0; i < count; ++i) {
      const Range range = parts[i].range;
      if (!read_at(descriptor, parts[i].out, range.end - range.begin, BloscHeader::kBytes + range.begin)) return false;
    }
    return true;
  }
  if (!is_whole) {
    const std::int64_t table = BloscHeader::kBytes + 4 * header.blocks;
    if (table > size || (table > first && !read_at(descriptor, buffer + first, table - first, first))) return false;
    for (std::int64_t i = 0; i < count; ++i) {
      if (!read_blocks(descriptor, header, blocks_of(header, parts[i].range), buffer, scratch.chunk)) return false;
    }
  }
  if (waited_in_place_of_decoding()) return true;
  for (std::int64_t i = 0; i < count; ++i) {
    if (!decode_part(header, buffer, parts[i], scratch)) return false;
  }
  return true;
}

bool read_file_chunk(const VolumeSource& source, std::int64_t nbytes, const Index& place, const Part* parts,
                     std::int64_t count, Scratch& scratch) noexcept {
  const char* path = path_of(source, place, scratch.chunk);
  if (path == nullptr) return false;
  const Descriptor file(open_for_reading(path));
  if (file.number() < 0) {
    // A chunk that is not there was never written, unless all of the array is gone.
    struct stat facts;
    return errno == ENOENT && ::stat(source.metadata.c_str(), &facts) == 0 && fill_parts(source.fill, parts, count);
  }
  struct stat facts;
  if (::fstat(file.number(), &facts) != 0 || !S_ISREG(facts.st_mode)) return false;
  const std::int64_t size = facts.st_size;
  if (source.codec == VolumeSource::Codec::none) {
    if (size != nbytes) return false;
    for (std::int64_t i = 0; i < count; ++i) {
      if (!read_at(file.number(), parts[i].out, parts[i].range.end - parts[i].range.begin, parts[i].range.begin)) {
        return false;
      }
    }
    return true;
  }
  if (size > 2 * nbytes + kOverhead) return false;
  if (source.codec == VolumeSource::Codec::blosc) {
    return read_blosc(file.number(), size, nbytes, parts, count, scratch);
  }
  auto* stored = scratch.chunk.array<std::uint8_t>(static_cast<std::size_t>(size));
  if (count != 1 || parts[0].range.end - parts[0].range.begin != nbytes || stored == nullptr ||
      !read_at(file.number(), stored, size, 0)) {
    return false;
  }
  const Bytes bytes{stored, static_cast<std::size_t>(size)};
  if (waited_in_place_of_decoding()) return true;
  return decode_chunk(source.codec, bytes, parts[0].out, nbytes, scratch) == Problem::none;
}

// ---- chunks that are parts of a file -----------------------------------------------------------------------------

bool read_segment(const VolumeSource& source, int descriptor, std::int64_t nbytes, const Index& place,
                  std::uint8_t* out, Scratch& scratch) noexcept {
  const std::int64_t number = source.chunks.number(place);
  if (source.is_clipped) {  // along the first dimension that a chunk has more of than one
    int axis = 0;
    while (axis + 1 < kDims && source.chunks.part[axis] == 1) ++axis;
    const std::int64_t side = source.chunks.part[axis];
    nbytes = nbytes / side * std::min(side, source.chunks.shape[axis] - place[axis] * side);
  }
  const std::int64_t offset = source.offsets[number], size = source.sizes[number];
  if (offset < 0) {
    fill_with(source.fill, out, nbytes);
    return true;
  }
  const std::uint32_t mask = source.masks == nullptr ? 0 : source.masks[number];
  if (source.filters.empty()) return size == nbytes && read_at(descriptor, out, size, offset);
  if (size < 0 || size > 2 * nbytes + kOverhead || offset > kMostElements) return false;
  auto* stored = scratch.chunk.array<std::uint8_t>(static_cast<std::size_t>(size));
  if (stored == nullptr || !read_at(descriptor, stored, size, offset)) return false;
  if (waited_in_place_of_decoding()) return true;
  std::int32_t step = 0;
  return undo_filters(source.filters, mask, {stored, static_cast<std::size_t>(size)}, out, nbytes, {0, nbytes},
                      scratch.chunk, scratch.codecs, &step) == Problem::none;
}

// ---- arrays that lie in a file as they are -----------------------------------------------------------------------

// Read successive bytes of an array.
bool read_run(const VolumeSource& source, int descriptor, std::uint8_t* out, std::int64_t size,
              std::int64_t at) noexcept {
  if (source.pieces.empty()) return read_at(descriptor, out, size, at);
  while (size > 0) {
    const VolumeSource::Piece& piece = source.pieces[static_cast<std::size_t>(at / source.piece_nbytes)];
    const std::int64_t skipped = at % source.piece_nbytes, some = std::min(size, source.piece_nbytes - skipped);
    const DataFile::Opened file(*piece.file);
    if (file.descriptor() < 0 || !read_at(file.descriptor(), out, some, piece.offset + skipped)) return false;
    out += some;
    at += some;
    size -= some;
  }
  return true;
}

// Read the part of the array that a unit is, as far as it is there; `out` is of the unit's shape.
bool read_raw(const VolumeSource& source, int descriptor, const Grid& units, const Index& place, std::uint8_t* out,
              Scratch& scratch) noexcept {
  // The box in the array, and the same in the order of the file.
  Index box{}, start{}, sizes{}, shape{};
  const std::array<int, kDims> order = order_in_file(source.steps);
  bool is_packed = true;
  for (int at = 0; at < kDims; ++at) {
    const int dim = order[at];
    const std::int64_t begin = place[dim] * units.part[dim];
    shape[at] = units.shape[dim];
    box[dim] = sizes[at] = std::min(units.part[dim], shape[at] - begin);
    start[at] = source.steps[dim] < 0 ? shape[at] - begin - sizes[at] : begin;
    is_packed =
        is_packed && (units.part[dim] == 1 || (dim == at && source.steps[dim] > 0 && box[dim] == units.part[dim]));
  }
  const std::int64_t nbytes = units.elements() * source.itemsize;
  std::uint8_t* packed = is_packed ? out : scratch.chunk.array<std::uint8_t>(static_cast<std::size_t>(nbytes));
  if (packed == nullptr) return false;
  // From the last dimension on that is not taken as a whole, elements lie together.
  int lead = kDims;
  while (lead > 1 && sizes[lead - 1] == shape[lead - 1]) --lead;
  --lead;
  std::int64_t run = source.itemsize, runs = 1;
  for (int dim = lead; dim < kDims; ++dim) run *= sizes[dim];
  for (int dim = 0; dim < lead; ++dim) runs *= sizes[dim];
  const Index steps = steps_in_c_order(shape, source.itemsize);
  std::int64_t first = source.offset;
  for (int dim = 0; dim < kDims; ++dim) first += start[dim] * steps[dim];
  for (std::int64_t number = 0; number < runs; ++number) {
    std::int64_t at = first, left = number;
    for (int dim = lead; dim-- > 0;) {
      at += left % sizes[dim] * steps[dim];
      left /= sizes[dim];
    }
    if (!read_run(source, descriptor, packed + number * run, run, at)) return false;
  }
  if (is_packed) return true;
  const Index packed_steps = steps_in_c_order(sizes, source.itemsize);
  const std::uint8_t* from = packed;
  Index from_steps{};
  for (int at = 0; at < kDims; ++at) {
    const bool is_reversed = source.steps[order[at]] < 0;
    from_steps[order[at]] = is_reversed ? -packed_steps[at] : packed_steps[at];
    if (is_reversed) from += (sizes[at] - 1) * packed_steps[at];
  }
  copy_elements(from, from_steps, out, steps_in_c_order(units.part, source.itemsize), box, source.itemsize);
  return true;
}

// ---- what is done to elements ------------------------------------------------------------------------------------

// The lowest bits of an integer, with the sign that the highest of these has.
template <typename T>
T lowest_bits(T value, std::int32_t bits) noexcept {
  using Bits = std::make_unsigned_t<T>;
  const int unused = static_cast<int>(8 * sizeof(T)) - bits;
  if (unused <= 0) return value;
  return static_cast<T>(static_cast<T>(static_cast<Bits>(static_cast<Bits>(value) << unused)) >> unused);
}

template <typename T, typename Scaled>
void scale(const VolumeSource& source, const std::uint8_t* from, std::uint8_t* to, std::int64_t count) noexcept {
  const double slope = source.slope, intercept = source.intercept;
  // Unsigned numbers wrap instead of overflowing.  Python has checked that all results fit the type.
  const auto whole = [](double value) {
    return std::is_integral_v<Scaled> ? static_cast<std::uint64_t>(static_cast<std::int64_t>(value)) : 0;
  };
  const std::uint64_t factor = whole(slope), sum = whole(intercept);
  for (std::int64_t i = 0; i < count; ++i) {
    T stored;
    std::memcpy(&stored, from + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    if constexpr (std::is_integral_v<T>) stored = lowest_bits(stored, source.bits);
    Scaled made;
    if constexpr (std::is_integral_v<Scaled>) {
      made = static_cast<Scaled>(static_cast<std::uint64_t>(static_cast<std::int64_t>(stored)) * factor + sum);
    } else {
      // In the order in which nibabel does it, which leaves out what changes nothing.
      made = static_cast<double>(stored);
      if (slope != 1.0) made *= slope;
      if (intercept != 0.0) made += intercept;
    }
    std::memcpy(to + i * static_cast<std::int64_t>(sizeof(Scaled)), &made, sizeof(Scaled));
  }
}

// Call a function with a number of a type.
template <typename Function>
void with_number(VolumeSource::Number number, const Function& function) noexcept {
  switch (number) {
    case VolumeSource::Number::i8:
      return function(std::int8_t{});
    case VolumeSource::Number::u8:
      return function(std::uint8_t{});
    case VolumeSource::Number::i16:
      return function(std::int16_t{});
    case VolumeSource::Number::u16:
      return function(std::uint16_t{});
    case VolumeSource::Number::i32:
      return function(std::int32_t{});
    case VolumeSource::Number::u32:
      return function(std::uint32_t{});
    case VolumeSource::Number::i64:
      return function(std::int64_t{});
    case VolumeSource::Number::u64:
      return function(std::uint64_t{});
    case VolumeSource::Number::f32:
      return function(float{});
    case VolumeSource::Number::f64:
      return function(double{});
    case VolumeSource::Number::none:
      return;
  }
}

template <typename T>
constexpr bool is_small = std::is_integral_v<T> && sizeof(T) <= 4;

bool is_small_number(VolumeSource::Number number) noexcept {
  bool found = false;
  with_number(number, [&](auto value) { found = is_small<decltype(value)>; });
  return found;
}

void scale_elements(const VolumeSource& source, const std::uint8_t* from, std::uint8_t* out,
                    std::int64_t count) noexcept {
  with_number(source.number, [&](auto stored) {
    using Stored = decltype(stored);
    if (source.scaled == VolumeSource::Number::f64) return scale<Stored, double>(source, from, out, count);
    with_number(source.scaled, [&](auto made) {
      using Made = decltype(made);
      if constexpr (is_small<Stored> && is_small<Made>) scale<Stored, Made>(source, from, out, count);
    });
  });
}

std::int64_t size_of(VolumeSource::Number number) noexcept {
  constexpr std::int64_t sizes[] = {0, 1, 1, 2, 2, 4, 4, 8, 8, 4, 8};
  return sizes[static_cast<int>(number)];
}

template <typename Word>
void transpose(const std::uint8_t* from, std::int64_t row_step, std::int64_t column_step, std::uint8_t* to,
               std::int64_t to_row, std::int64_t rows, std::int64_t columns) noexcept {
  for (std::int64_t top = 0; top < rows; top += kTile) {
    for (std::int64_t left = 0; left < columns; left += kTile) {
      const std::int64_t bottom = std::min(rows, top + kTile), right = std::min(columns, left + kTile);
      for (std::int64_t row = top; row < bottom; ++row) {
        const std::uint8_t* source = from + row * row_step;
        std::uint8_t* target = to + row * to_row;
        for (std::int64_t column = left; column < right; ++column) {
          std::memcpy(target + column * static_cast<std::int64_t>(sizeof(Word)), source + column * column_step,
                      sizeof(Word));
        }
      }
    }
  }
}

struct Sixteen {
  std::uint8_t bytes[16];
};

}  // namespace

Index steps_in_c_order(const Index& shape, std::int64_t itemsize) noexcept {
  Index steps{};
  std::int64_t step = itemsize;
  for (int dim = kDims; dim-- > 0;) {
    steps[dim] = step;
    step *= shape[dim];
  }
  return steps;
}

Problem decode_chunk(VolumeSource::Codec codec, Bytes stored, std::uint8_t* out, std::int64_t size,
                     Scratch& scratch) noexcept {
  const auto wanted = static_cast<std::size_t>(size);
  switch (codec) {
    case VolumeSource::Codec::none:
      if (stored.size != wanted) return Problem::size;
      if (wanted > 0) std::memcpy(out, stored.data, wanted);
      return Problem::none;
    case VolumeSource::Codec::blosc:
      return decode_blosc(stored, out, size, scratch.chunk, scratch.codecs);
    case VolumeSource::Codec::gzip:
      return inflate_gzip(stored, out, wanted, scratch.codecs);
    case VolumeSource::Codec::zlib:
      return inflate_zlib(stored, out, wanted, scratch.codecs);
    case VolumeSource::Codec::zstd:
      return decompress_zstd(stored, out, wanted, scratch.codecs);
  }
  return Problem::unknown;
}

// ---- grids -------------------------------------------------------------------------------------------------------

bool Grid::make(const Index& shape, const Index& part, Grid* grid) noexcept {
  std::int64_t inside = 1, all = 1;
  for (int dim = 0; dim < kDims; ++dim) {
    if (shape[dim] < 1 || part[dim] < 1 || shape[dim] > kMostElements || part[dim] > kMostElements) return false;
    grid->counts[dim] = (shape[dim] - 1) / part[dim] + 1;
    if (!multiply(inside, part[dim], kMostElements, &inside)) return false;
    if (!multiply(all, grid->counts[dim], kMostElements, &all)) return false;
  }
  grid->shape = shape;
  grid->part = part;
  return multiply(inside, all, kMostElements, &all);
}

std::int64_t Grid::number(const Index& place) const noexcept {
  std::int64_t number = 0;
  for (int dim = 0; dim < kDims; ++dim) number = number * counts[dim] + place[dim];
  return number;
}

Index Grid::place(std::int64_t number) const noexcept {
  Index place{};
  for (int dim = kDims; dim-- > 0;) {
    place[dim] = number % counts[dim];
    number /= counts[dim];
  }
  return place;
}

std::int64_t Grid::elements() const noexcept {
  std::int64_t product = 1;
  for (const std::int64_t side : part) product *= side;
  return product;
}

bool Volume::is_valid() const noexcept {
  std::int64_t nbytes = 0, total = 0, count = 1;
  for (const std::int64_t along : units.counts) count *= along;
  if (itemsize < 1 || source.itemsize < 1 || !multiply(units.elements(), itemsize, kMostChunk, &nbytes) ||
      !multiply(units.elements(), source.itemsize, kMostChunk, &nbytes) ||
      !multiply(nbytes, count, kMostElements, &total)) {
    return false;
  }
  if (source.swapped != 0 &&
      ((source.swapped != 2 && source.swapped != 4 && source.swapped != 8) || source.itemsize % source.swapped != 0)) {
    return false;
  }
  if (source.number == VolumeSource::Number::none) {
    if (source.itemsize != itemsize) return false;
  } else {
    // Integers become integers by integers.
    const auto is_whole = [](double value) { return value == std::trunc(value) && std::abs(value) < 4294967296.0; };
    const bool is_right = source.scaled == VolumeSource::Number::f64 ||
                          (is_small_number(source.number) && is_small_number(source.scaled) && is_whole(source.slope) &&
                           is_whole(source.intercept));
    if (!is_right || source.bits < 1 || itemsize != size_of(source.scaled) || source.itemsize != size_of(source.number))
      return false;
  }
  if (memory != nullptr && (first_key < 0 || first_key > memory->shape().keys - count ||
                            memory->shape().slot_nbytes < units.elements() * itemsize)) {
    return false;
  }
  if (source.kind == VolumeSource::Kind::memory) return source.number == VolumeSource::Number::none;
  if (source.kind == VolumeSource::Kind::raw && !source.pieces.empty()) {
    std::int64_t stored = 0;
    for (const VolumeSource::Piece& piece : source.pieces) {
      if (piece.file == nullptr || piece.offset < 0 || piece.offset > kMostElements / 2) return false;
    }
    const auto pieces = static_cast<std::int64_t>(source.pieces.size());
    if (source.file != nullptr || source.offset != 0 || source.piece_nbytes < 1 ||
        !multiply(pieces, source.piece_nbytes, kMostElements, &stored)) {
      return false;
    }
    for (const std::int64_t side : units.shape) {
      if (stored % side != 0) return false;
      stored /= side;
    }
    if (stored != source.itemsize) return false;
  } else if (source.kind != VolumeSource::Kind::files && source.file == nullptr) {
    return false;
  }
  if (source.kind == VolumeSource::Kind::raw) {
    return source.offset >= 0 && source.offset <= kMostElements / 2 && source.dims >= 1 && source.dims <= kDims &&
           is_dense(units.shape, source.steps, source.itemsize);
  }
  // Units are whole chunks, or slabs of one along its first dimension of more than one element.
  bool is_slab = false;
  const Index& chunk = source.chunks.part;
  if (source.chunks.shape != units.shape || source.dims < 1 || source.dims > kDims) return false;
  for (int dim = 0; dim < kDims; ++dim) {
    if (units.part[dim] % chunk[dim] == 0 && !is_slab) continue;
    if (units.part[dim] == chunk[dim]) continue;
    if (is_slab || chunk[dim] % units.part[dim] != 0) return false;
    for (int before = 0; before < dim; ++before) {
      if (chunk[before] != 1 || units.part[before] != 1) return false;
    }
    is_slab = true;
  }
  if (!multiply(source.chunks.elements(), source.itemsize, kMostChunk, &nbytes)) return false;
  if (static_cast<std::int64_t>(source.fill.size()) != source.itemsize) return false;
  if (source.kind == VolumeSource::Kind::files) {
    const bool has_parts = source.codec == VolumeSource::Codec::none || source.codec == VolumeSource::Codec::blosc;
    return has_parts || !is_slab;
  }
  std::int64_t chunks = 1;
  for (const std::int64_t along : source.chunks.counts) chunks *= along;
  return !is_slab && source.segments == chunks;
}

namespace {

// Along which dimension units are parts of a chunk, and how many; -1 for none.
int slab_axis(const Volume& volume) noexcept {
  for (int dim = 0; dim < kDims; ++dim) {
    if (volume.units.part[dim] < volume.source.chunks.part[dim]) return dim;
  }
  return -1;
}

Index chunk_of(const Volume& volume, const Index& unit) noexcept {
  Index place = unit;
  const int axis = slab_axis(volume);
  if (axis >= 0) place[axis] /= volume.source.chunks.part[axis] / volume.units.part[axis];
  return place;
}

bool has_chunks(const Volume& volume) noexcept {
  return volume.source.kind == VolumeSource::Kind::files || volume.source.kind == VolumeSource::Kind::segments;
}

bool read_chunk(const VolumeSource& source, int descriptor, const Index& place, const Part* parts, std::int64_t count,
                Scratch& scratch) noexcept {
  const std::int64_t nbytes = source.chunks.elements() * source.itemsize;
  if (source.kind == VolumeSource::Kind::files) {
    return read_file_chunk(source, nbytes, place, parts, count, scratch);
  }
  return count == 1 && read_segment(source, descriptor, nbytes, place, parts[0].out, scratch);
}

// A unit of several chunks.
bool read_group(const Volume& volume, int descriptor, const Index& unit, std::uint8_t* out, Scratch& scratch) noexcept {
  const VolumeSource& source = volume.source;
  const std::int64_t nbytes = source.chunks.elements() * source.itemsize;
  const Index to_steps = steps_in_c_order(volume.units.part, source.itemsize),
              from_steps = steps_in_c_order(source.chunks.part, source.itemsize);
  Index first{}, counts{};
  std::int64_t count = 1;
  for (int dim = 0; dim < kDims; ++dim) {
    const std::int64_t each = volume.units.part[dim] / source.chunks.part[dim];
    first[dim] = unit[dim] * each;
    counts[dim] = std::min(each, source.chunks.counts[dim] - first[dim]);
    count *= counts[dim];
  }
  for (std::int64_t number = 0; number < count; ++number) {
    scratch.chunk.reset();
    auto* chunk = scratch.chunk.array<std::uint8_t>(static_cast<std::size_t>(nbytes));
    if (chunk == nullptr) return false;
    Index place{}, sizes{};
    std::int64_t left = number;
    std::uint8_t* to = out;
    for (int dim = kDims; dim-- > 0;) {
      const std::int64_t at = left % counts[dim], side = source.chunks.part[dim];
      left /= counts[dim];
      place[dim] = first[dim] + at;
      sizes[dim] = std::min(side, volume.units.shape[dim] - place[dim] * side);
      to += at * side * to_steps[dim];
    }
    const Part part{{0, nbytes}, chunk};
    if (!read_chunk(source, descriptor, place, &part, 1, scratch)) return false;
    copy_elements(chunk, from_steps, to, to_steps, sizes, source.itemsize);
  }
  return true;
}

bool read_stored(const Volume& volume, int descriptor, const UnitOut* units, std::int64_t count,
                 Scratch& scratch) noexcept {
  const VolumeSource& source = volume.source;
  const std::int64_t nbytes = volume.units.elements() * source.itemsize;
  if (source.kind == VolumeSource::Kind::memory) return false;
  if (!has_chunks(volume)) {
    for (std::int64_t i = 0; i < count; ++i) {
      scratch.chunk.reset();
      if (!read_raw(source, descriptor, volume.units, units[i].place, units[i].out, scratch)) return false;
    }
    return true;
  }
  const int axis = slab_axis(volume);
  if (axis < 0 && volume.units.part != source.chunks.part) {
    for (std::int64_t i = 0; i < count; ++i) {
      if (!read_group(volume, descriptor, units[i].place, units[i].out, scratch)) return false;
    }
    return true;
  }
  const std::int64_t pieces = axis < 0 ? 1 : source.chunks.part[axis] / volume.units.part[axis];
  scratch.chunk.reset();
  auto* parts = scratch.chunk.array<Part>(static_cast<std::size_t>(count));
  if (parts == nullptr) return false;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t begin = (axis < 0 ? 0 : units[i].place[axis] % pieces) * nbytes;
    parts[i] = {{begin, begin + nbytes}, units[i].out};
  }
  return read_chunk(source, descriptor, chunk_of(volume, units[0].place), parts, count, scratch);
}

}  // namespace

std::int64_t Volume::group(const Index& unit) const noexcept {
  return has_chunks(*this) && slab_axis(*this) >= 0 ? source.chunks.number(chunk_of(*this, unit)) : units.number(unit);
}

bool read_units(const Volume& volume, int descriptor, const UnitOut* units, std::int64_t count,
                Scratch& scratch) noexcept {
  const VolumeSource& source = volume.source;
  const std::int64_t nbytes = volume.units.elements() * source.itemsize;
  if (source.number == VolumeSource::Number::none) {
    if (!read_stored(volume, descriptor, units, count, scratch)) return false;
    if (source.swapped != 0) {
      for (std::int64_t i = 0; i < count; ++i) swap_bytes(units[i].out, nbytes, source.swapped);
    }
    return true;
  }
  auto* stored = scratch.arena.array<std::uint8_t>(static_cast<std::size_t>(nbytes));
  if (stored == nullptr) return false;
  for (std::int64_t i = 0; i < count; ++i) {
    const UnitOut one{units[i].place, stored};
    if (!read_stored(volume, descriptor, &one, 1, scratch)) return false;
    if (source.swapped != 0) swap_bytes(stored, nbytes, source.swapped);
    scale_elements(source, stored, units[i].out, volume.units.elements());
  }
  return true;
}

void copy_elements(const std::uint8_t* from, const Index& from_steps, std::uint8_t* to, const Index& to_steps,
                   const Index& sizes, std::int64_t itemsize) noexcept {
  const bool is_in_rows = from_steps[4] == itemsize && to_steps[4] == itemsize;
  // The dimension along which the source lies closest: it is gone through beside the last one.
  int near = 3;
  if (!is_in_rows) {
    for (int dim = 3; dim-- > 0;) {
      const bool is_closer = std::abs(from_steps[dim]) < std::abs(from_steps[near]);
      if (sizes[dim] > 1 && (sizes[near] == 1 || is_closer)) near = dim;
    }
  }
  int outer[3], filled = 0;
  for (int dim = 0; dim < 4; ++dim) {
    if (dim != near) outer[filled++] = dim;
  }
  const std::int64_t rows = sizes[near], columns = sizes[4];
  std::int64_t run = columns * itemsize, count = rows;
  // Rows without gaps are one.
  if (is_in_rows && from_steps[3] == run && to_steps[3] == run) {
    run *= rows;
    count = 1;
  }
  for (std::int64_t a = 0; a < sizes[outer[0]]; ++a) {
    for (std::int64_t b = 0; b < sizes[outer[1]]; ++b) {
      for (std::int64_t c = 0; c < sizes[outer[2]]; ++c) {
        const std::uint8_t* source =
            from + a * from_steps[outer[0]] + b * from_steps[outer[1]] + c * from_steps[outer[2]];
        std::uint8_t* target = to + a * to_steps[outer[0]] + b * to_steps[outer[1]] + c * to_steps[outer[2]];
        if (is_in_rows) {
          for (std::int64_t row = 0; row < count; ++row) {
            std::memcpy(target + row * to_steps[near], source + row * from_steps[near], static_cast<std::size_t>(run));
          }
          continue;
        }
        const std::int64_t row_step = from_steps[near], column_step = from_steps[4], to_row = to_steps[near];
        if (to_steps[4] == itemsize && itemsize == 1) {
          transpose<std::uint8_t>(source, row_step, column_step, target, to_row, rows, columns);
        } else if (to_steps[4] == itemsize && itemsize == 2) {
          transpose<std::uint16_t>(source, row_step, column_step, target, to_row, rows, columns);
        } else if (to_steps[4] == itemsize && itemsize == 4) {
          transpose<std::uint32_t>(source, row_step, column_step, target, to_row, rows, columns);
        } else if (to_steps[4] == itemsize && itemsize == 8) {
          transpose<std::uint64_t>(source, row_step, column_step, target, to_row, rows, columns);
        } else if (to_steps[4] == itemsize && itemsize == 16) {
          transpose<Sixteen>(source, row_step, column_step, target, to_row, rows, columns);
        } else {
          for (std::int64_t row = 0; row < rows; ++row) {
            for (std::int64_t column = 0; column < columns; ++column) {
              std::memcpy(target + row * to_row + column * to_steps[4], source + row * row_step + column * column_step,
                          static_cast<std::size_t>(itemsize));
            }
          }
        }
      }
    }
  }
}

namespace {

template <typename Word>
void swap_words(std::uint8_t* data, std::int64_t nbytes) noexcept {
  for (std::int64_t at = 0; at + static_cast<std::int64_t>(sizeof(Word)) <= nbytes;
       at += static_cast<std::int64_t>(sizeof(Word))) {
    Word word;
    std::memcpy(&word, data + at, sizeof word);
    if constexpr (sizeof(Word) == 2) word = __builtin_bswap16(word);
    if constexpr (sizeof(Word) == 4) word = __builtin_bswap32(word);
    if constexpr (sizeof(Word) == 8) word = __builtin_bswap64(word);
    std::memcpy(data + at, &word, sizeof word);
  }
}

}  // namespace

void swap_bytes(std::uint8_t* data, std::int64_t nbytes, std::int32_t word) noexcept {
  if (word == 2) swap_words<std::uint16_t>(data, nbytes);
  if (word == 4) swap_words<std::uint32_t>(data, nbytes);
  if (word == 8) swap_words<std::uint64_t>(data, nbytes);
}

}  // namespace fastpipe
