#include "png.h"

#include <libdeflate.h>

#include <cstring>

#include "levels.h"

namespace fastpipe {

namespace {

constexpr std::uint8_t kSignature[8] = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
constexpr std::size_t kFrame = 12;                       // bytes of a chunk beside its content: size, name, checksum
constexpr std::size_t kMostText = std::size_t{1} << 20;  // bytes: Pillow may refuse longer texts and colour profiles
constexpr std::size_t kMostInflated = 1032;              // bytes that deflate makes of one
constexpr std::size_t kSlack = 16;                       // bytes that are read behind a row, and not used

std::uint32_t big_endian(const std::uint8_t* from) {
  return std::uint32_t{from[0]} << 24 | std::uint32_t{from[1]} << 16 | std::uint32_t{from[2]} << 8 | from[3];
}

struct Chunk {
  const std::uint8_t* name = nullptr;  // 4 letters
  Bytes content;
  bool is(const char* other) const { return std::memcmp(name, other, 4) == 0; }
};

// Find the chunk at a position, and move the position behind it; false where none is complete.
bool find_chunk(Bytes file, std::size_t* position, Chunk* chunk) {
  if (file.size - *position < kFrame) return false;
  const std::uint8_t* begin = file.data + *position;
  const std::size_t size = big_endian(begin);
  if (size > file.size - *position - kFrame) return false;
  *chunk = {begin + 4, {begin + 8, size}};
  *position += kFrame + size;
  return true;
}

// The same, and false where its name is none of Pillow's pattern, or its checksum is wrong.
bool read_chunk(Bytes file, std::size_t* position, Chunk* chunk) {
  if (!find_chunk(file, position, chunk)) return false;
  for (int i = 0; i < 4; ++i) {
    const std::uint8_t c = chunk->name[i], letter = c | 0x20;
    if (!(letter >= 'a' && letter <= 'z') && !(c >= '0' && c <= '9') && c != '_') return false;
  }
  const std::size_t size = chunk->content.size;
  return libdeflate_crc32(0, chunk->name, size + 4) == big_endian(chunk->content.data + size);
}

bool begins_with(Bytes text, const char* name) {
  const std::size_t size = std::strlen(name);
  return text.size >= size && std::memcmp(text.data, name, size) == 0;
}

// Whether Pillow adds a text to `Image.info` without an effect on the pixels.  It keeps facts under these names, too.
bool is_plain_text(Bytes text) {
  if (text.size > kMostText) return false;
  for (const char* name : {"transparency", "interlace", "bbox"}) {
    const std::size_t size = std::strlen(name);
    if (begins_with(text, name) && (text.size == size || text.data[size] == 0)) return false;
  }
  return true;
}

// Return whether Pillow inflates a colour profile, or ignores it: it refuses large ones.
bool is_plain_profile(Bytes chunk, Arena& arena, CodecStates& states) {
  const auto* end = chunk.size > 0 ? static_cast<const std::uint8_t*>(std::memchr(chunk.data, 0, chunk.size)) : nullptr;
  if (end == nullptr) return false;
  const std::size_t used = static_cast<std::size_t>(end - chunk.data) + 2;
  if (used > chunk.size || end[1] != 0) return false;
  const Bytes stored{chunk.data + used, chunk.size - used};
  return stored.size < kMostText / kMostInflated || inflates_to_at_most(stored, kMostText - 1, arena, states);
}

// Return whether Pillow reads a chunk beside the header, the palette and the pixels without an error.
bool is_plain(const Chunk& chunk, Arena& arena, CodecStates& states) {
  const std::size_t size = chunk.content.size;
  for (const char* name : {"sBIT", "bKGD", "hIST", "tIME", "sPLT", "oFFs", "eXIf"}) {
    if (chunk.is(name)) return true;
  }
  if (chunk.is("gAMA")) return size >= 4;
  if (chunk.is("cHRM")) return size >= 32;
  if (chunk.is("sRGB")) return size >= 1;
  if (chunk.is("pHYs")) return size >= 9;
  if (chunk.is("tEXt")) return is_plain_text(chunk.content);
  if (chunk.is("iTXt")) {  // its name, a zero, a flag that says whether the text is compressed
    const auto* end = size > 0 ? static_cast<const std::uint8_t*>(std::memchr(chunk.content.data, 0, size)) : nullptr;
    const bool is_compressed = end == nullptr || end + 1 == chunk.content.data + size || end[1] != 0;
    return !is_compressed && is_plain_text(chunk.content);
  }
  if (chunk.is("iCCP")) return is_plain_profile(chunk.content, arena, states);
  return false;
}

// Return whether Pillow looks for an EXIF orientation in a chunk.
bool has_orientation(const Chunk& chunk) {
  if (chunk.is("eXIf") || chunk.is("iTXt")) return true;
  if (!chunk.is("tEXt")) return false;
  for (const char* name : {"exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp"}) {
    if (begins_with(chunk.content, name)) return true;
  }
  return false;
}

// Read the first chunk; false if Pillow has no mode for such pixels, or this reader does not decode them.
bool read_first_chunk(const Chunk& chunk, PngHeader* header) {
  if (!chunk.is("IHDR") || chunk.content.size != 13) return false;
  const std::uint8_t* facts = chunk.content.data;
  const std::uint32_t width = big_endian(facts), height = big_endian(facts + 4);
  if (width == 0 || height == 0 || (width | height) >> 31 != 0) return false;
  const int bits = facts[8], colour = facts[9];
  const bool is_byte_or_word = bits == 8 || bits == 16;
  const bool is_packed = bits == 1 || bits == 2 || bits == 4;
  const bool is_known = (colour == 0 && (is_byte_or_word || is_packed)) || (colour == 3 && (bits == 8 || is_packed)) ||
                        ((colour == 2 || colour == 4 || colour == 6) && is_byte_or_word);
  // Afterwards come the numbers of the compression, of the kind of filters, and of interlacing.
  if (!is_known || facts[10] != 0 || facts[11] != 0 || facts[12] != 0) return false;
  header->height = static_cast<std::int32_t>(height);
  header->width = static_cast<std::int32_t>(width);
  header->bits = bits;
  header->colour = static_cast<PngColour>(colour);
  return true;
}

std::size_t bytes_of_row(const PngHeader& header) {
  const auto bits = static_cast<std::size_t>(header.channels()) * static_cast<std::size_t>(header.bits);
  return (static_cast<std::size_t>(header.width) * bits + 7) / 8;
}

// ---- filters of rows: PNG specification, section 9 ------------------------------------------------------------------

typedef std::uint8_t Vector __attribute__((vector_size(16)));
typedef std::int16_t Words __attribute__((vector_size(16)));

// The four bytes at a place as words.
inline Words load_words(const std::uint8_t* from) {
  std::uint32_t value;
  std::memcpy(&value, from, sizeof value);
  typedef std::uint32_t Ints __attribute__((vector_size(16)));
  const Ints first = {value, 0, 0, 0};
  const Vector zero = {};
  return reinterpret_cast<Words>(__builtin_shufflevector(reinterpret_cast<Vector>(first), zero, 0, 16, 1, 17, 2, 18, 3,
                                                         19, 4, 20, 5, 21, 6, 22, 7, 23));
}

// Store the first words, each below 256, as bytes.
template <int bytes>
inline void store_words(Words words, std::uint8_t* to) {
  std::uint64_t value;  // compilers make little of a shuffle by which every second byte is taken
  std::memcpy(&value, &words, sizeof value);
  value = (value | value >> 8) & 0x0000ffff0000ffffu;
  value |= value >> 16;
  std::memcpy(to, &value, bytes);
}

inline Words magnitude(Words words) {
  const Words sign = words >> 15;
  return (words ^ sign) - sign;
}

// Which of the left, the upper and the upper left neighbour is closest to left + upper - upper left.
inline Words paeth(Words left, Words upper, Words corner) {
  const Words to_left = upper - corner, to_upper = left - corner;
  const Words from_left = magnitude(to_left), from_upper = magnitude(to_upper);
  const Words from_corner = magnitude(to_left + to_upper);
  const Words is_left = (from_left <= from_upper) & (from_left <= from_corner);
  const Words is_upper = (from_upper <= from_corner) & ~is_left;
  return (left & is_left) | (upper & is_upper) | (corner & ~(is_left | is_upper));
}

inline int paeth(int left, int upper, int corner) {
  const int from_left = upper > corner ? upper - corner : corner - upper;
  const int from_upper = left > corner ? left - corner : corner - left;
  const int sum = left + upper - 2 * corner;
  const int from_corner = sum < 0 ? -sum : sum;
  const int nearer = from_upper <= from_corner ? upper : corner;
  return from_left <= from_upper && from_left <= from_corner ? left : nearer;
}

void add_row(std::uint8_t* row, const std::uint8_t* above, std::size_t size) {
  std::size_t i = 0;
  for (; i + sizeof(Vector) <= size; i += sizeof(Vector)) {
    Vector one, other;
    std::memcpy(&one, row + i, sizeof one);
    std::memcpy(&other, above + i, sizeof other);
    one += other;
    std::memcpy(row + i, &one, sizeof one);
  }
  for (; i < size; ++i) row[i] = static_cast<std::uint8_t>(row[i] + above[i]);
}

// Undo filter 1, 3 or 4 of pixels of 3 or 4 bytes.
template <int bytes, int filter>
void add_pixels(std::uint8_t* row, const std::uint8_t* above, std::size_t size) {
  const Words low = Words{} + 255;
  Words left = {}, corner = {};
  for (std::size_t i = 0; i < size; i += bytes) {
    const Words upper = filter == 1 ? Words{} : load_words(above + i);
    const Words expected = filter == 1 ? left : filter == 3 ? (left + upper) >> 1 : paeth(left, upper, corner);
    left = (load_words(row + i) + expected) & low;
    corner = upper;
    store_words<bytes>(left, row + i);
  }
}

// The same for pixels of any size; those of less than a byte count as a byte.
template <int bytes, int filter>
void add_bytes(std::uint8_t* row, const std::uint8_t* above, std::size_t size) {
  int left[bytes] = {}, corner[bytes] = {};
  for (std::size_t i = 0; i < size; i += bytes) {
    FASTPIPE_UNROLLED
    for (int k = 0; k < bytes; ++k) {
      const int upper = above[i + k];
      const int expected = filter == 1   ? left[k]
                           : filter == 3 ? (left[k] + upper) >> 1
                                         : paeth(left[k], upper, corner[k]);
      left[k] = (row[i + k] + expected) & 255;
      corner[k] = upper;
      row[i + k] = static_cast<std::uint8_t>(left[k]);
    }
  }
}

template <int bytes>
bool undo_filter(int filter, std::uint8_t* row, const std::uint8_t* above, std::size_t size) {
  constexpr bool has_vectors = bytes == 3 || bytes == 4;
  switch (filter) {
    case 0:
      return true;
    case 1:
      has_vectors ? add_pixels<bytes, 1>(row, above, size) : add_bytes<bytes, 1>(row, above, size);
      return true;
    case 2:
      add_row(row, above, size);
      return true;
    case 3:
      has_vectors ? add_pixels<bytes, 3>(row, above, size) : add_bytes<bytes, 3>(row, above, size);
      return true;
    case 4:
      has_vectors ? add_pixels<bytes, 4>(row, above, size) : add_bytes<bytes, 4>(row, above, size);
      return true;
    default:
      return false;
  }
}

using UndoFilter = bool (*)(int, std::uint8_t*, const std::uint8_t*, std::size_t);

UndoFilter undo_filter_of(const PngHeader& header) {
  switch (header.channels() * header.bits / 8) {
    case 2:
      return undo_filter<2>;
    case 3:
      return undo_filter<3>;
    case 4:
      return undo_filter<4>;
    case 6:
      return undo_filter<6>;
    case 8:
      return undo_filter<8>;
    default:
      return undo_filter<1>;
  }
}

// All pixels of a file in one piece, compressed.  Of several chunks they are copied; false where there is no memory.
bool gather(Bytes file, const PngHeader& header, Arena& arena, Bytes* stored) {
  std::size_t position = header.data, total = 0, count = 0;
  Chunk chunk;
  while (find_chunk(file, &position, &chunk) && chunk.is("IDAT")) {
    total += chunk.content.size;
    ++count;
    *stored = chunk.content;
  }
  if (count == 1) return true;
  auto* memory = arena.array<std::uint8_t>(total);
  if (memory == nullptr) return false;
  *stored = {memory, total};
  position = header.data;
  while (find_chunk(file, &position, &chunk) && chunk.is("IDAT")) {
    if (chunk.content.size == 0) continue;
    std::memcpy(memory, chunk.content.data, chunk.content.size);
    memory += chunk.content.size;
  }
  return true;
}

bool copy_to_rgb(const PngHeader& header, const std::uint8_t* from, std::int32_t pixels, std::uint8_t* to) {
  const auto width = static_cast<std::size_t>(pixels);
  switch (header.colour) {
    case PngColour::grey:
    case PngColour::grey_alpha: {
      const std::size_t step = header.colour == PngColour::grey ? 1 : 2;
      for (std::size_t x = 0; x < width; ++x) std::memset(to + 3 * x, from[step * x], 3);
      return true;
    }
    case PngColour::palette: {
      bool is_known = true;
      for (std::size_t x = 0; x < width; ++x) {
        const std::size_t entry = std::size_t{3} * from[x];
        if (entry >= header.palette.size) {
          is_known = false;
        } else {
          std::memcpy(to + 3 * x, header.palette.data + entry, 3);
        }
      }
      return is_known;
    }
    default:
      for (std::size_t x = 0; x < width; ++x) std::memcpy(to + 3 * x, from + 4 * x, 3);
      return true;
  }
}

}  // namespace

std::int32_t PngHeader::channels() const {
  switch (colour) {
    case PngColour::rgb:
      return 3;
    case PngColour::grey_alpha:
      return 2;
    case PngColour::rgba:
      return 4;
    default:
      return 1;
  }
}

PngHeader read_png_header(Bytes file, Arena& arena, CodecStates& states) noexcept {
  const PngHeader none;
  PngHeader header;
  if (file.size < sizeof kSignature || std::memcmp(file.data, kSignature, sizeof kSignature) != 0) return none;
  std::size_t position = sizeof kSignature;
  Chunk chunk;
  if (!read_chunk(file, &position, &chunk) || !read_first_chunk(chunk, &header)) return none;
  header.trusted = header.bits == 8;
  bool is_behind = false;  // the pixels
  for (;;) {
    const std::size_t begin = position;
    const bool was_data = chunk.is("IDAT");
    if (!read_chunk(file, &position, &chunk)) return none;
    if (chunk.is("IEND")) break;
    if (chunk.is("IDAT")) {
      if (is_behind) return none;
      if (header.data == 0) header.data = begin;
      continue;
    }
    is_behind = is_behind || was_data;
    if (chunk.is("IHDR") || chunk.is("acTL") || chunk.is("fcTL") || chunk.is("fdAT") || chunk.is("DDAT")) return none;
    if (chunk.is("PLTE") && header.palette.size == 0 && header.data == 0) {
      header.palette = chunk.content;
      header.trusted = header.trusted && chunk.content.size % 3 == 0 && chunk.content.size <= 768;
    } else {
      header.trusted = header.trusted && is_plain(chunk, arena, states);
      header.may_turn = header.may_turn || has_orientation(chunk);
    }
  }
  return header.data == 0 ? none : header;
}

Status decode_png_rows(Bytes file, const PngHeader& header, std::int32_t count, Arena& arena, CodecStates& states,
                       Pixels* rows) noexcept {
  Bytes stored;
  if (!gather(file, header, arena, &stored)) return Status::declined(Reason::no_memory);
  const std::size_t size = bytes_of_row(header), pitch = size + 1;  // the number of a row's filter precedes it
  const auto height = static_cast<std::size_t>(header.height);
  if (pitch > (stored.size * kMostInflated) / height) return Status::declined(Reason::damaged);
  auto* memory = arena.array<std::uint8_t>(pitch * height + kSlack);
  auto* nothing = arena.array<std::uint8_t>(size + kSlack);
  if (memory == nullptr || nothing == nullptr) return Status::declined(Reason::no_memory);
  const Problem problem = inflate_zlib(stored, memory, pitch * height, states);
  if (problem == Problem::no_memory) return Status::declined(Reason::no_memory);
  if (problem != Problem::none) return Status::declined(Reason::damaged);
  std::memset(memory + pitch * height, 0, kSlack);
  std::memset(nothing, 0, size + kSlack);
  const UndoFilter undo = undo_filter_of(header);
  const std::uint8_t* above = nothing;
  for (std::int32_t y = 0; y < header.height; ++y) {
    std::uint8_t* row = memory + pitch * static_cast<std::size_t>(y);
    // Pillow reads the numbers of all filters.
    if (y < count ? !undo(row[0], row + 1, above, size) : row[0] > 4) return Status::declined(Reason::damaged);
    above = row + 1;
  }
  *rows = {memory + 1, static_cast<std::int64_t>(pitch), count, static_cast<std::int32_t>(size), 1};
  return Status::made();
}

Status decode_png(Bytes file, const PngHeader& header, const Box& box, Arena& arena, CodecStates& states,
                  Pixels* pixels) noexcept {
  Pixels rows;
  const Status status = decode_png_rows(file, header, box.bottom(), arena, states, &rows);
  if (!status.is_made()) return status;
  const std::uint8_t* first = rows.data + box.top * rows.pitch + std::int64_t{box.left} * header.channels();
  if (header.colour == PngColour::rgb) {
    *pixels = {first, rows.pitch, box.height, box.width, 3};
    return status;
  }
  const std::int64_t pitch = std::int64_t{3} * box.width;
  auto* memory = arena.array<std::uint8_t>(static_cast<std::size_t>(pitch) * static_cast<std::size_t>(box.height));
  if (memory == nullptr) return Status::declined(Reason::no_memory);
  for (std::int32_t y = 0; y < box.height; ++y) {
    if (!copy_to_rgb(header, first + y * rows.pitch, box.width, memory + y * pitch)) {
      return Status::declined(Reason::damaged);
    }
  }
  *pixels = {memory, pitch, box.height, box.width, 3};
  return status;
}

}  // namespace fastpipe
