// A scan's data are copied to a small window, without stuffed zeros, up to the next marker, and decoded there.
#include "jpeg_scan.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "jpeg_huffman.h"
#include "reader.h"

namespace fastpipe {
namespace {

using namespace huffman;

constexpr int kTables = 4, kMostComponents = 3, kMostBlocks = 6;  // of a file, a frame, an MCU
constexpr int kLargestSide = 65500;                               // libjpeg's limit, in pixels
constexpr std::ptrdiff_t kMostMcuBytes = (kMostBlocks * kMostBlockBits + 7) / 8;
constexpr std::ptrdiff_t kWindow = 4096;
constexpr std::int64_t kIndexHead = 4;    // bytes of an index before its entries
constexpr std::int64_t kIndexShare = 50;  // an index has at most this part of the file's bytes, or little more

// The next bytes of coded data, without stuffed zeros.
struct Window {
  std::uint8_t bytes[kWindow + kMostMcuBytes + kAhead];  // behind `size` lie bytes that mean nothing
  std::ptrdiff_t size = 0;
  std::int64_t begin = 0;  // where reading goes on, in bits
  std::int64_t next = 0;   // where the next byte to copy is in the file
  bool is_last = false;    // a marker comes next, or the end of the file
  // Where in the window the bytes are that have a stuffed zero behind them in the file.
  std::uint16_t stuffed[kWindow + 1];
  std::ptrdiff_t stuffed_count = 0;

  // Begin anew, at a bit of the file.
  void start(Bytes file, std::int64_t position) noexcept {
    size = 0;
    begin = position & 7;
    next = position >> 3;
    is_last = false;
    stuffed_count = 0;
    fill(file);
  }

  // Drop what has been read, and copy more.
  void advance(Bytes file) noexcept {
    const std::ptrdiff_t read = std::min<std::ptrdiff_t>(begin >> 3, size);
    std::memmove(bytes, bytes + read, static_cast<std::size_t>(size - read));
    size -= read;
    begin -= std::int64_t{8} * read;
    const std::ptrdiff_t kept = stuffed_from(read), dropped = stuffed_count - kept;
    for (std::ptrdiff_t i = 0; i < kept; ++i) stuffed[i] = static_cast<std::uint16_t>(stuffed[dropped + i] - read);
    stuffed_count = kept;
    fill(file);
  }

  // Return where in the file the byte is that the window has at `place`.
  std::int64_t position(std::ptrdiff_t place) const noexcept { return next - (size - place) - stuffed_from(place); }

 private:
  // Count the stuffed zeros from a place in the window on.
  std::ptrdiff_t stuffed_from(std::ptrdiff_t place) const noexcept {
    const std::uint16_t* const end = stuffed + stuffed_count;
    return end - std::lower_bound(stuffed, end, place);
  }

  void fill(Bytes file) noexcept {
    const auto end = static_cast<std::int64_t>(file.size);
    while (size < kWindow) {
      const auto most = static_cast<std::size_t>(std::min<std::int64_t>(end - next, kWindow - size));
      if (most == 0) {
        is_last = true;
        return;
      }
      const std::uint8_t* const from = file.data + next;
      const void* const found = std::memchr(from, 0xFF, most);
      const auto count =
          found == nullptr ? most : static_cast<std::size_t>(static_cast<const std::uint8_t*>(found) - from);
      std::memcpy(bytes + size, from, count);
      size += static_cast<std::ptrdiff_t>(count);
      next += static_cast<std::int64_t>(count);
      if (found == nullptr) continue;
      if (next + 1 >= end || file.data[next + 1] != 0) {
        is_last = true;
        return;
      }
      stuffed[stuffed_count++] = static_cast<std::uint16_t>(size);
      bytes[size++] = 0xFF;
      next += 2;
    }
  }
};

}  // namespace

// ------------------------------------------------------------------------------------------------------ the scan

struct ScanRows::State {
  Bytes file;
  JpegFrame frame;
  bool is_open = false;  // and nothing damaged has been found

  bool open() noexcept;
  bool read(std::int32_t row, std::int32_t first, std::int32_t mcus, std::int16_t* const* to,
            const std::int64_t* pitches, const bool* dc_only) noexcept;
  void begin_index(Arena& arena) noexcept;
  Bytes end_index() noexcept;
  bool use_index(Bytes made) noexcept;
  std::int64_t position() const noexcept {
    return window.position(static_cast<std::ptrdiff_t>((window.begin + 7) / 8));
  }

 private:
  // A block of an MCU.
  struct Block {
    int component = 0, row = 0, column = 0;
    const DcTable* dc = nullptr;
    AcTable* ac = nullptr;
  };

  bool read_segments() noexcept;
  bool is_grey_or_ycbcr() const noexcept;
  bool read_frame(std::int64_t body, std::int64_t end) noexcept;
  bool read_steps(std::int64_t body, std::int64_t end) noexcept;
  bool read_codes(std::int64_t body, std::int64_t end) noexcept;
  bool read_scan(std::int64_t body, std::int64_t end) noexcept;
  template <typename Table>
  bool prepare(Table& table, std::int64_t definition) noexcept;

  // Where coefficients of a block go, and how far that is from there for the next MCU; null if they are not needed.
  struct Target {
    std::int16_t* block = nullptr;
    std::ptrdiff_t step = 0;
    bool dc_only = false;
    bool skips_ac() const noexcept { return block == nullptr || dc_only; }
  };

  std::int64_t mcus() const noexcept { return std::int64_t{frame.mcu_rows()} * frame.mcu_columns(); }
  bool pass_over(std::int64_t mcus) noexcept;
  bool run(std::int64_t mcus, Target* to) noexcept;
  bool run_part(std::int64_t mcus, Target* to) noexcept;
  bool restart() noexcept;

  std::int64_t entry_bytes() const noexcept { return 5 + 2 * frame.components; }
  std::int64_t entry_begin(std::int64_t number) const noexcept { return kIndexHead + (number - 1) * entry_bytes(); }
  std::int64_t index_bytes() const noexcept { return entry_begin((mcus() - 1) / apart + 1); }
  void write_entry() noexcept;
  void go_to_entry(std::int64_t number) noexcept;

  // The header.
  bool has_jfif = false;
  int adobe = -1;  // the transform that Adobe's segment names; -1: there is none
  std::uint8_t names[kMostComponents] = {};
  std::uint8_t step_tables[kMostComponents] = {};    // their numbers
  std::uint16_t steps[kTables][kCoefficients] = {};  // in the zigzag order
  bool has_steps[kTables] = {};
  std::int64_t definitions[2][kTables] = {};  // where the Huffman tables of DC and AC are in the file; 0: nowhere
  DcTable dc_tables[kTables];
  AcTable ac_tables[kTables];
  Block blocks[kMostBlocks];
  int count = 0;              // blocks of an MCU
  std::int64_t interval = 0;  // MCUs between restart markers; 0: there are none
  std::int64_t scan = 0;      // where the coded data begin

  // The index in use, or the one that is written; and how many MCUs one of its entries stands for.
  Bytes index;
  std::uint8_t* written = nullptr;
  std::int64_t apart = 0;

  // What is decoded next.
  std::int64_t mcu = 0;
  std::uint16_t sums[kMostComponents] = {};  // the DC coefficients of the blocks before
  Window window;
};

bool ScanRows::State::open() noexcept {
  frame = JpegFrame();
  std::fill_n(has_steps, kTables, false);
  std::memset(definitions, 0, sizeof(definitions));
  interval = 0;
  has_jfif = false;
  adobe = -1;
  index = {};
  written = nullptr;
  mcu = 0;
  std::fill_n(sums, kMostComponents, std::uint16_t{0});
  if (!read_segments()) return false;
  window.start(file, 8 * scan);
  return true;
}

// Read all segments up to the scan's.
bool ScanRows::State::read_segments() noexcept {
  const Reader reader(file);
  if (!reader.begins(0, reader.size(), "\xFF\xD8")) return false;
  for (std::int64_t position = 2;;) {
    if (position + 4 > reader.size() || reader[position] != 0xFF) return false;
    const int code = reader[position + 1];
    if (code == 0xFF) {
      ++position;
      continue;
    }
    const std::int64_t body = position + 4, end = position + 2 + reader.big(position + 2, 2, reader.size());
    if (end < body || end > reader.size()) return false;
    position = end;
    switch (code) {
      case 0xC0:
      case 0xC1:
        if (!read_frame(body, end)) return false;
        break;
      case 0xC4:
        if (!read_codes(body, end)) return false;
        break;
      case 0xDA:
        return is_grey_or_ycbcr() && read_scan(body, end);
      case 0xDB:
        if (!read_steps(body, end)) return false;
        break;
      case 0xDD:
        if (end - body != 2) return false;
        interval = reader.big(body, 2, end);
        break;
      case 0xE0:
        // libjpeg warns of other versions than 1.
        if (end - body >= 14 && reader.begins(body, end, "JFIF\0")) {
          if (reader[body + 5] != 1) return false;
          has_jfif = true;
        }
        break;
      case 0xEE:
        if (end - body >= 12 && reader.begins(body, end, "Adobe")) adobe = reader[body + 11];
        break;
      default:
        if (code != 0xFE && (code < 0xE0 || code > 0xEF)) return false;
    }
  }
}

// As read_jpeg_header() decides, for callers that did not ask it.
bool ScanRows::State::is_grey_or_ycbcr() const noexcept {
  if (frame.components == 1 || adobe >= 0) return frame.components == 1 || adobe == 1;
  return has_jfif || (names[0] == 1 && names[1] == 2 && names[2] == 3);
}

bool ScanRows::State::read_frame(std::int64_t body, std::int64_t end) noexcept {
  const Reader reader(file);
  const int components = reader[body + 5];
  if (frame.components != 0 || end - body != 6 + 3 * components || reader[body] != 8) return false;
  if (components != 1 && components != kMostComponents) return false;
  frame.size = {static_cast<std::int32_t>(reader.big(body + 1, 2, end)),
                static_cast<std::int32_t>(reader.big(body + 3, 2, end))};
  if (frame.size.height > kLargestSide || frame.size.width > kLargestSide) return false;
  frame.components = components;
  for (int c = 0; c < components; ++c) {
    const std::int64_t at = body + 6 + 3 * c;
    names[c] = reader[at];
    if (std::find(names, names + c, names[c]) != names + c) return false;
    frame.planes[c].horizontal = reader[at + 1] >> 4;
    frame.planes[c].vertical = reader[at + 1] & 15;
    step_tables[c] = reader[at + 2];
    if (step_tables[c] >= kTables) return false;
  }
  return true;
}

// Read quantisation tables.
bool ScanRows::State::read_steps(std::int64_t body, std::int64_t end) noexcept {
  const Reader reader(file);
  while (body < end) {
    const int number = reader[body] & 15, bytes = reader[body] >> 4 != 0 ? 2 : 1;
    if (number >= kTables || end - body < 1 + bytes * kCoefficients) return false;
    for (int k = 0; k < kCoefficients; ++k) {
      steps[number][k] = static_cast<std::uint16_t>(reader.big(body + 1 + bytes * k, bytes, end));
    }
    has_steps[number] = true;
    body += 1 + bytes * kCoefficients;
  }
  return true;
}

// Take note of Huffman tables.
bool ScanRows::State::read_codes(std::int64_t body, std::int64_t end) noexcept {
  const Reader reader(file);
  while (body < end) {
    const int kind = reader[body] >> 4, number = reader[body] & 15;
    std::int64_t size = 0;
    for (int length = 1; length <= kLongestCode; ++length) size += reader[body + length];
    if (kind > 1 || number >= kTables || size > 256 || end - body < 1 + kLongestCode + size) return false;
    definitions[kind][number] = body + 1;
    body += 1 + kLongestCode + size;
  }
  return true;
}

// Build a table, unless it is the one that is there.
template <typename Table>
bool ScanRows::State::prepare(Table& table, std::int64_t definition) noexcept {
  if (definition == 0) return false;
  Codes codes;
  std::memcpy(codes.counts, file.data + definition, kLongestCode);
  for (const std::uint8_t some : codes.counts) codes.size += some;
  std::memcpy(codes.symbols, file.data + definition + kLongestCode, static_cast<std::size_t>(codes.size));
  if (codes == table.codes) return codes.size > 0;
  table.codes = {};
  if (!codes.number() || !Table::takes(codes)) return false;
  table.codes = codes;
  table.build();
  return true;
}

bool ScanRows::State::read_scan(std::int64_t body, std::int64_t end) noexcept {
  const Reader reader(file);
  const int components = frame.components;
  if (components == 0 || reader[body] != components || end - body != 4 + 2 * components) return false;
  if (reader.big(end - 3, 3, end) != 0x003F00) return false;  // not all of the coefficients
  for (int c = 0; c < components; ++c) {
    const int number = step_tables[c];
    if (!has_steps[number]) return false;
    for (int k = 0; k < kCoefficients; ++k) frame.planes[c].steps[kZigzag[k]] = steps[number][k];
  }
  if (!frame.complete()) return false;
  count = 0;
  for (int c = 0; c < components; ++c) {
    const JpegPlane& plane = frame.planes[c];
    const std::int64_t at = body + 1 + 2 * c;
    const int dc = reader[at + 1] >> 4, ac = reader[at + 1] & 15;
    if (reader[at] != names[c] || dc >= kTables || ac >= kTables) return false;
    if (!prepare(dc_tables[dc], definitions[0][dc]) || !prepare(ac_tables[ac], definitions[1][ac])) return false;
    if (count + plane.vertical * plane.horizontal > kMostBlocks) return false;
    for (int row = 0; row < plane.vertical; ++row) {
      for (int column = 0; column < plane.horizontal; ++column) {
        blocks[count++] = {c, row, column, &dc_tables[dc], &ac_tables[ac]};
      }
    }
  }
  scan = end;
  return true;
}

// Go on behind a restart marker.
bool ScanRows::State::restart() noexcept {
  if (!window.is_last) window.advance(file);
  // libjpeg warns of bytes that are left.
  if (!window.is_last || 8 * window.size - window.begin >= 8) return false;
  const Reader reader(file);
  std::int64_t at = window.next;
  while (reader[at] == 0xFF && reader[at + 1] == 0xFF) ++at;
  if (reader[at] != 0xFF || reader[at + 1] != 0xD0 + (mcu / interval - 1) % 8) return false;
  window.start(file, 8 * (at + 2));
  std::fill_n(sums, kMostComponents, std::uint16_t{0});
  return true;
}

// Decode MCUs.
//
// to: for each block of the next MCU; of the one behind the last afterwards.
bool ScanRows::State::run(std::int64_t mcus, Target* to) noexcept {
  if (mcus == 0) return true;
  for (int i = 0; i < count; ++i) {
    if (to[i].skips_ac() && !blocks[i].ac->has_skipped) blocks[i].ac->build_skipped();
  }
  if (written == nullptr) return run_part(mcus, to);
  for (const std::int64_t end = mcu + mcus; mcu < end;) {
    if (!run_part(std::min(end - mcu, apart - mcu % apart), to)) return false;
    if (mcu % apart == 0 && mcu < this->mcus()) write_entry();
  }
  return true;
}

// As run(), without an entry of an index in between.
bool ScanRows::State::run_part(std::int64_t mcus, Target* to) noexcept {
  Bits bits;
  bits.start(window.bytes, window.begin);
  for (const std::int64_t end = mcu + mcus; mcu < end; ++mcu) {
    if (interval > 0 && mcu > 0 && mcu % interval == 0) {
      window.begin = bits.position(window.bytes);
      if (!restart()) return false;
      bits.start(window.bytes, window.begin);
    }
    if (bits.next + kMostMcuBytes > window.bytes + window.size && !window.is_last) {
      window.begin = bits.position(window.bytes);
      window.advance(file);
      bits.start(window.bytes, window.begin);
    }
    for (int i = 0; i < count; ++i) {
      const Block& block = blocks[i];
      std::uint16_t& sum = sums[block.component];
      if (!read_dc(bits, *block.dc, &sum)) return false;
      std::int16_t* const out = to[i].block;
      if (!to[i].skips_ac()) {
        std::memset(out, 0, kCoefficients * sizeof(*out));
        out[0] = static_cast<std::int16_t>(sum);
        if (!read_ac(bits, *block.ac, out)) return false;
        to[i].block += to[i].step;
        continue;
      }
      if (!skip_ac(bits, *block.ac)) return false;
      if (out != nullptr) {
        out[0] = static_cast<std::int16_t>(sum);
        to[i].block += to[i].step;
      }
    }
    if (bits.position(window.bytes) > 8 * window.size) return false;  // the data end within the MCU
  }
  window.begin = bits.position(window.bytes);
  return true;
}

bool ScanRows::State::pass_over(std::int64_t mcus) noexcept {
  Target nowhere[kMostBlocks];
  return run(mcus, nowhere);
}

bool ScanRows::State::read(std::int32_t row, std::int32_t first, std::int32_t mcus, std::int16_t* const* to,
                           const std::int64_t* pitches, const bool* dc_only) noexcept {
  const std::int64_t columns = frame.mcu_columns(), target = row * columns + first;
  if (row < 0 || row >= frame.mcu_rows() || first < 0 || mcus < 0 || first + std::int64_t{mcus} > columns) return false;
  if (index.data != nullptr && target / apart * apart > mcu) go_to_entry(target / apart);
  if (target < mcu || !pass_over(target - mcu)) return false;
  std::int16_t unused[kCoefficients];  // of blocks that hold no samples
  Target targets[kMostBlocks];
  for (int i = 0; i < count; ++i) {
    const Block& block = blocks[i];
    const JpegPlane& plane = frame.planes[block.component];
    std::int16_t* const begin = to[block.component];
    if (begin == nullptr) continue;
    if (row * plane.vertical + block.row >= plane.rows) {
      targets[i] = {unused, 0, dc_only[block.component]};
    } else {
      targets[i] = {begin + block.row * pitches[block.component] + kCoefficients * block.column,
                    std::ptrdiff_t{kCoefficients} * plane.horizontal, dc_only[block.component]};
    }
  }
  const int last = mcus > 0 && first + mcus == columns ? 1 : 0;
  if (!run(mcus - last, targets)) return false;
  for (int i = 0; i < count; ++i) {
    const JpegPlane& plane = frame.planes[blocks[i].component];
    const bool is_needed = targets[i].block != nullptr;
    if (is_needed && (columns - 1) * plane.horizontal + blocks[i].column >= plane.columns) {
      targets[i] = {unused, 0, targets[i].dc_only};
    }
  }
  return run(last, targets) && (index.data != nullptr || pass_over(columns - first - mcus));
}

// -------------------------------------------------------------------------------------------------------- index

namespace {

void put(std::uint8_t* to, std::int64_t number, int bytes) noexcept {
  for (int i = 0; i < bytes; ++i) to[i] = static_cast<std::uint8_t>(number >> 8 * i);
}

}  // namespace

void ScanRows::State::begin_index(Arena& arena) noexcept {
  const auto length = static_cast<std::int64_t>(file.size);
  apart = (mcus() * entry_bytes() * kIndexShare + length - 1) / length;
  written = arena.array<std::uint8_t>(static_cast<std::size_t>(index_bytes()));
  if (written != nullptr) put(written, apart, kIndexHead);
}

Bytes ScanRows::State::end_index() noexcept {
  if (written == nullptr || !pass_over(mcus() - mcu)) return {};
  return {written, static_cast<std::size_t>(index_bytes())};
}

// Write where the next MCU begins.
void ScanRows::State::write_entry() noexcept {
  std::uint8_t* const to = written + entry_begin(mcu / apart);
  put(to, 8 * window.position(static_cast<std::ptrdiff_t>(window.begin / 8)) + window.begin % 8, 5);
  for (int c = 0; c < frame.components; ++c) put(to + 5 + 2 * c, sums[c], 2);
}

bool ScanRows::State::use_index(Bytes made) noexcept {
  const Reader reader(made);
  const std::int64_t spacing = reader.little(0, kIndexHead, reader.size());
  if (reader.size() < kIndexHead || spacing < 1) return false;
  apart = spacing;
  if (reader.size() != index_bytes()) return false;
  index = made;
  return true;
}

// Go on with the MCU of an entry.
void ScanRows::State::go_to_entry(std::int64_t number) noexcept {
  const Reader reader(index);
  const std::int64_t at = entry_begin(number), end = reader.size();
  const std::int64_t bit = reader.little(at, 4, end) | reader.little(at + 4, 1, end) << 32;
  window.start(file, std::min(std::max(bit, 8 * scan), 8 * static_cast<std::int64_t>(file.size)));
  mcu = number * apart;
  for (int c = 0; c < frame.components; ++c)
    sums[c] = static_cast<std::uint16_t>(reader.little(at + 5 + 2 * c, 2, end));
}

// ----------------------------------------------------------------------------------------------------- ScanRows

ScanRows::ScanRows() noexcept : state_(new (std::nothrow) State()) {}
ScanRows::~ScanRows() = default;

bool ScanRows::open(Bytes file) noexcept {
  if (state_ == nullptr) return false;
  state_->file = file;
  state_->is_open = state_->open();
  return state_->is_open;
}

const JpegFrame& ScanRows::frame() const noexcept { return state_->frame; }

bool ScanRows::read(std::int32_t row, std::int32_t first, std::int32_t count, std::int16_t* const* blocks,
                    const std::int64_t* pitches, const bool* dc_only) noexcept {
  if (state_ == nullptr || !state_->is_open) return false;
  state_->is_open = state_->read(row, first, count, blocks, pitches, dc_only);
  return state_->is_open;
}

std::int64_t ScanRows::position() const noexcept { return state_->position(); }

void ScanRows::begin_index(Arena& arena) noexcept {
  if (state_ != nullptr && state_->is_open) state_->begin_index(arena);
}

Bytes ScanRows::end_index() noexcept {
  if (state_ == nullptr || !state_->is_open) return {};
  state_->is_open = false;
  return state_->end_index();
}

bool ScanRows::use_index(Bytes index) noexcept {
  return state_ != nullptr && state_->is_open && state_->use_index(index);
}

}  // namespace fastpipe
