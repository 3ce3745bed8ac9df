// Coefficients from a JPEG's scan: those of libjpeg, or none.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "../jpeg.h"
#include "../jpeg_scan.h"
#include "check.h"
#include "make_jpeg.h"
#include "read_coefficients.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::tests;

constexpr Kind kKinds[] = {
    {3, 1, 1, false, 0}, {3, 2, 1, false, 0}, {3, 2, 2, false, 0}, {3, 2, 1, false, 5}, {1, 1, 1, false, 0},
    {3, 2, 2, false, 1}, {3, 2, 1, false, 3}, {3, 1, 1, false, 7}, {1, 1, 1, false, 2}, {3, 2, 2, false, 40},
};

Coefficients coefficients_of(const File& file) {
  Coefficients coefficients;
  read_coefficients({file.data(), file.size()}, &coefficients);
  return coefficients;
}

std::int32_t below(std::int32_t count) {
  return static_cast<std::int32_t>(random_below(static_cast<std::uint32_t>(count)));
}

Kind random_kind() {
  Kind kind = kKinds[random_below(std::size(kKinds))];
  kind.quality = 1 + below(100);
  kind.is_optimised = below(2) == 1;
  return kind;
}

bool ends_well(const Exact& file, const ScanRows& rows) { return ends_after_scan(file, rows.position()); }

// Return whether all rows, as a whole, have libjpeg's coefficients.
bool is_whole(ScanRows& rows, const Coefficients& expected) {
  const JpegFrame frame = rows.frame();
  for (std::int32_t row = 0; row < frame.mcu_rows(); ++row) {
    McuRow mcus(frame, row, 0, frame.mcu_columns());
    if (!mcus.read(rows) || !mcus.equals(expected)) return false;
  }
  return true;
}

// Return whether some parts of some rows have.
bool has_parts(ScanRows& rows, const Coefficients& expected) {
  const JpegFrame frame = rows.frame();
  const std::int32_t first = below(frame.mcu_columns()), count = below(frame.mcu_columns() - first) + below(2);
  for (std::int32_t row = below(frame.mcu_rows()); row < frame.mcu_rows(); row += 1 + below(3) / 2) {
    McuRow mcus(frame, row, first, count);
    for (int c = 0; c < frame.components; ++c) {
      if (below(5) == 0) mcus.leave_out(c);
      if (below(5) == 0) mcus.take_dc_only(c);
    }
    if (!mcus.read(rows) || !mcus.equals(expected)) return false;
  }
  return true;
}

// The position of the first marker of a kind.
std::size_t marker_of(const File& file, int code) {
  std::size_t at = 2;
  while (file[at + 1] != code) at += 2 + static_cast<std::size_t>(file[at + 2] << 8 | file[at + 3]);
  return at;
}

File without(const File& file, int code) {
  const auto at = static_cast<std::ptrdiff_t>(marker_of(file, code));
  File result = file;
  result.erase(result.begin() + at,
               result.begin() + at + 2 + (file[marker_of(file, code) + 2] << 8) + file[marker_of(file, code) + 3]);
  return result;
}

File changed(const File& file, std::size_t at, int value) {
  File result = file;
  result[at] = static_cast<std::uint8_t>(value);
  return result;
}

}  // namespace

TEST("jpeg scan: files of many kinds, sizes and qualities") {
  ScanRows rows;
  Arena arena;
  int wrong = 0, declined = 0;
  for (int i = 0; i < 600; ++i) {
    const Size size = random_size(i);
    const Kind kind = random_kind();
    const File file = encoded(size, kind);
    const Exact exact(file);
    const Coefficients expected = coefficients_of(file);
    CHECK(expected.is_read);
    if (!rows.open(exact)) {
      CHECK(kind.horizontal == 2 && size.width <= 4);  // as JpegFrame::complete()
      ++declined;
      continue;
    }
    CHECK(rows.frame().size == size && rows.frame().components == kind.components);
    wrong += is_whole(rows, expected) ? 0 : 1;
    const auto end = static_cast<std::size_t>(rows.position());
    CHECK(end + 2 == file.size() && file[end] == 0xFF && file[end + 1] == 0xD9);
    CHECK(rows.open(exact));
    const Bytes index = index_of(rows, arena);
    CHECK(index.data != nullptr);
    CHECK(index.size < 4 + file.size() / 50 + 11);
    for (int k = 0; k < 9; ++k) {
      CHECK(rows.open(exact));
      if (k % 3 == 1) CHECK(rows.use_index(index));
      if (k % 3 == 2) rows.begin_index(arena);
      wrong += has_parts(rows, expected) && ends_well(exact, rows) ? 0 : 1;
      if (k % 3 < 2) continue;
      const Bytes other = rows.end_index();  // the same, whatever was read
      CHECK(other.size == index.size && std::memcmp(other.data, index.data, index.size) == 0);
      CHECK(ends_well(exact, rows) && !rows.read(0, 0, 0, nullptr, nullptr, nullptr));
    }
    arena.reset();
  }
  CHECK(wrong == 0);
  CHECK(declined < 100);
}

TEST("jpeg scan: rows that are asked for twice, or are not in the image") {
  ScanRows rows;
  const File file = encoded({40, 50}, kKinds[2]);
  const Exact exact(file);
  const std::int32_t parts[][3] = {{0, 0, 4}, {3, 0, 1}, {-1, 0, 1}, {1, -1, 2},
                                   {1, 4, 1}, {1, 3, 2}, {1, 0, 5},  {1, 0, -1}};
  for (const auto& part : parts) {
    CHECK(rows.open(exact));
    CHECK(McuRow(rows.frame(), 0, 0, 4).read(rows));
    std::int16_t* const nowhere[3] = {};
    const std::int64_t pitches[3] = {};
    const bool dc_only[3] = {};
    CHECK(!rows.read(part[0], part[1], part[2], nowhere, pitches, dc_only));
    CHECK(!rows.read(1, 0, 4, nowhere, pitches, dc_only));  // nothing is read after a failure
  }
}

TEST("jpeg scan: files that are left to libjpeg") {
  ScanRows rows;
  const File good = encoded({40, 50}, kKinds[2]);
  const auto opens = [&](const File& file) { return rows.open(Exact(file)); };
  CHECK(opens(good));
  CHECK(!opens({}));
  CHECK(!opens({0xFF, 0xD8}));
  for (const Kind& kind : {Kind{3, 2, 2, true}, Kind{4, 1, 1}, Kind{3, 4, 1}, Kind{1, 2, 2}}) {
    CHECK(!opens(encoded({40, 50}, kind)));
  }
  for (const int marker : {0xC0, 0xC4, 0xDB, 0xDA}) CHECK(!opens(without(good, marker)));
  CHECK(!opens(changed(good, marker_of(good, 0xE0) + 9, 2)));  // a version of JFIF of which libjpeg warns
  const std::size_t frame = marker_of(good, 0xC0);
  CHECK(opens(changed(good, frame + 1, 0xC1)));
  CHECK(!opens(changed(good, frame + 1, 0xC2)));
  CHECK(!opens(changed(good, frame + 1, 0xC9)));
  CHECK(!opens(changed(good, frame + 4, 12)));  // bits
  CHECK(!opens(changed(good, frame + 13, 1)));  // two components of one name
  CHECK(!opens(changed(good, frame + 14, 0x21)));
  CHECK(!opens(changed(good, frame + 15, 3)));  // no such table
  CHECK(!opens(changed(good, frame + 5, 0xFF)) || rows.frame().size.height <= 65500);
  const std::size_t scan = marker_of(good, 0xDA);
  CHECK(!opens(changed(good, scan + 5, 2)));  // another order of components
  CHECK(!opens(changed(good, scan + 6, 0x20)));
  CHECK(!opens(changed(good, scan + 6, 0x03)));
  CHECK(!opens(changed(good, scan + 11, 1)));  // not all coefficients
  const std::size_t codes = marker_of(good, 0xC4);
  CHECK(!opens(changed(good, codes + 5, 3)));    // more codes than there can be
  CHECK(!opens(changed(good, codes + 21, 16)));  // a size that libjpeg does not take
}

TEST("jpeg scan: quantisation tables of 16 bits") {
  ScanRows rows;
  const File good = encoded({40, 50}, kKinds[0]);
  const std::size_t at = marker_of(good, 0xDB);
  File file(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(at));
  file.insert(file.end(), {0xFF, 0xDB, 0, 131, 0x10});
  for (int i = 0; i < 64; ++i)
    file.insert(file.end(), {static_cast<std::uint8_t>(i), static_cast<std::uint8_t>(i + 1)});
  const auto rest = static_cast<std::ptrdiff_t>(at + 69);
  file.insert(file.end(), good.begin() + rest, good.end());
  CHECK(rows.open(Exact(file)));
  CHECK(rows.frame().planes[0].steps[0] == 1);
  CHECK(rows.frame().planes[0].steps[1] == 258);
  CHECK(rows.frame().planes[0].steps[8] == 2 * 256 + 3);
  CHECK(rows.frame().planes[0].steps[63] == 63 * 256 + 64);
}

TEST("jpeg scan: damage below the rows that are read does not matter, without an index it does above and beside") {
  ScanRows rows;
  Arena arena;
  const File good = encoded({160, 160}, kKinds[0]);
  const Coefficients expected = coefficients_of(good);
  File file = good;
  file.resize(good.size() / 2);
  file.insert(file.end(), {0xFF, 0xD9});
  const Exact exact(file);
  CHECK(rows.open(exact));
  std::int32_t made = 0;
  while (made < 20) {
    McuRow mcus(rows.frame(), made, 3, 5);
    if (!mcus.read(rows)) break;
    CHECK(mcus.equals(expected) && ends_well(exact, rows));
    ++made;
  }
  CHECK(made >= 8 && made <= 11);
  CHECK(coefficients_of(file).warned == made);
  CHECK(rows.open(exact));
  CHECK(index_of(rows, arena).data == nullptr);
  const Exact good_one(good);
  CHECK(rows.open(good_one));
  const Bytes index = index_of(rows, arena);
  CHECK(rows.open(exact) && rows.use_index(index));
  McuRow mcus(rows.frame(), made, 0, 1);
  CHECK(mcus.read(rows) && mcus.equals(expected));
}

TEST("jpeg scan: damaged files, and a good one after each") {
  ScanRows rows;
  int made = 0, failed = 0;
  for (int i = 0; i < 3000; ++i) {
    const Kind kind = random_kind();
    const File good = encoded({1 + below(60), 5 + below(60)}, kind);
    File file = good;
    const auto size = static_cast<std::int32_t>(good.size());
    if (i % 5 == 0) {
      file.resize(static_cast<std::size_t>(below(size)));
      file.insert(file.end(), {0xFF, 0xD9});
    }
    for (int k = below(4); k > 0; --k) {
      const std::int32_t from = i % 3 == 0 ? 0 : size * 3 / 4;
      const auto at = static_cast<std::size_t>(from + below(size - from));
      if (at < file.size()) file[at] = static_cast<std::uint8_t>(below(4) == 0 ? 0xFF : below(256));
    }
    const Exact exact(file);
    const JpegHeader header = read_jpeg_header(exact);
    if (std::int64_t{header.height} * header.width > 1 << 20) continue;
    if (rows.open(exact) && header.trusted) {
      const Coefficients expected = coefficients_of(file);
      const JpegFrame frame = rows.frame();
      std::int32_t row = 0;
      for (; row < frame.mcu_rows(); ++row) {
        McuRow mcus(frame, row, 0, frame.mcu_columns());
        if (!mcus.read(rows)) break;
        CHECK(row < expected.warned);
        if (expected.is_read) CHECK(mcus.equals(expected));
        if (ends_well(exact, rows)) CHECK(expected.is_read);
      }
      (row == frame.mcu_rows() ? made : failed) += 1;
    }
    const Coefficients expected = coefficients_of(good);
    const Exact good_one(good);
    CHECK(rows.open(good_one));
    CHECK(is_whole(rows, expected));
  }
  CHECK(made > 100 && failed > 100);
}

TEST("jpeg scan: indexes of which no byte is true") {
  ScanRows rows;
  Arena arena;
  for (const Kind& kind : {kKinds[0], kKinds[4], kKinds[6]}) {
    const File file = encoded({90, 130}, kind);
    const Exact exact(file);
    const Coefficients expected = coefficients_of(file);
    CHECK(rows.open(exact));
    const Bytes good = index_of(rows, arena);
    const File index(good.data, good.data + good.size);
    CHECK(rows.open(exact));
    CHECK(!rows.use_index({index.data(), index.size() - 1}));
    CHECK(!rows.use_index({index.data(), 3}));
    CHECK(!rows.use_index({}));
    CHECK(!rows.use_index(Exact(changed(index, 3, 0x80))));
    CHECK(!rows.use_index(Exact({0, 0, 0, 0})));
    CHECK(is_whole(rows, expected));  // those have not been used
    int opened = 0;
    for (int i = 0; i < 3000; ++i) {
      File other = index;
      for (int k = 1 + below(6); k > 0; --k) {
        const auto at = static_cast<std::size_t>(4 + below(static_cast<std::int32_t>(index.size()) - 4));
        other[at] = static_cast<std::uint8_t>(below(256));
      }
      const Exact wrong(other);
      CHECK(rows.open(exact));
      CHECK(rows.use_index(wrong));
      const JpegFrame frame = rows.frame();
      for (std::int32_t row = 0; row < frame.mcu_rows(); ++row) {
        const std::int32_t first = below(frame.mcu_columns());
        McuRow mcus(frame, row, first, below(frame.mcu_columns() - first));
        if (!mcus.read(rows)) break;
        ++opened;
      }
    }
    CHECK(opened > 1000);
  }
}

// ------------------------------------------------------------------------------------------------- unusual codes

namespace {

// Codes of one table: how many there are of each length from 1 on, and their symbols.
struct Table {
  std::vector<int> counts, symbols;
};

// A grey file with a row of blocks.
File with_tables(const Table& dc, const Table& ac, const std::vector<int>& data, int blocks = 1) {
  File file = {0xFF, 0xD8, 0xFF, 0xDB, 0, 67, 0};
  file.insert(file.end(), 64, 1);
  const auto append = [&file](const std::vector<int>& bytes) {
    for (const int byte : bytes) file.push_back(static_cast<std::uint8_t>(byte));
  };
  append({0xFF, 0xC0, 0, 11, 8, 0, 8, 0, 8 * blocks, 1, 1, 0x11, 0});
  for (const Table* table : {&dc, &ac}) {
    append({0xFF, 0xC4, 0, 19 + static_cast<int>(table->symbols.size()), table == &dc ? 0 : 0x10});
    append(table->counts);
    append(std::vector<int>(16 - table->counts.size()));
    append(table->symbols);
  }
  append({0xFF, 0xDA, 0, 8, 1, 1, 0, 0, 63, 0});
  append(data);
  append({0xFF, 0xD9});
  return file;
}

// Return whether all coefficients are read and equal; none, if `is_read` is false: neither are the blocks passed over.
bool agrees(const File& file, bool is_read) {
  ScanRows rows;
  Arena arena;
  const Exact exact(file);
  const bool is_found = rows.open(exact) && is_whole(rows, coefficients_of(file));
  const bool is_passed = rows.open(exact) && index_of(rows, arena).data != nullptr;
  return is_found == is_read && is_passed == is_read;
}

}  // namespace

TEST("jpeg scan: tables that libjpeg does not take") {
  const Table end{{0, 1}, {0}};
  CHECK(agrees(with_tables({{0, 1}, {0}}, end, {0}), true));
  CHECK(agrees(with_tables({{1, 1}, {0, 1}}, end, {0}), true));
  CHECK(agrees(with_tables({{2}, {0, 1}}, end, {0}), false));  // a code of ones only
  CHECK(agrees(with_tables({{1, 2}, {0, 1, 2}}, end, {0}), false));
  CHECK(agrees(with_tables({{}, {}}, end, {0}), false));
  CHECK(agrees(with_tables(end, {{1, 0, 4}, {0, 1, 2, 3, 4}}, {0}), false));
  CHECK(agrees(with_tables({{0, 1}, {15}}, end, {0, 0, 0}), true));
  CHECK(agrees(with_tables({{0, 1}, {16}}, end, {0, 0, 0}), false));
}

TEST("jpeg scan: runs of zeros up to the end of a block and beyond it") {
  const Table dc{{1, 1, 1, 1}, {0, 1, 2, 0}};
  // 0: 16 zeros; 10: the end; 110: 14 zeros and a 1 or -1.
  const Table ac{{1, 1, 1}, {0xF0, 0, 0xE1}};
  CHECK(agrees(with_tables(dc, ac, {0b00001011}), true));                 // three runs, and the end
  CHECK(agrees(with_tables(dc, ac, {0b00001101, 0b01011111}, 2), true));  // and the last coefficient; another block
  CHECK(agrees(with_tables(dc, ac, {0b00000101, 0b11111111}), false));    // four runs
  CHECK(agrees(with_tables(dc, ac, {0, 0b01110101}, 2), false));          // eight, and a block
  CHECK(agrees(with_tables(dc, {{1, 1, 1}, {0xF0, 0, 0xF1}}, {0b00001101, 0b01011111}, 2), false));
}

TEST("jpeg scan: restart markers of another order") {
  const File good = encoded({40, 40}, kKinds[5]);
  ScanRows rows;
  const Exact exact(good);
  CHECK(rows.open(exact) && is_whole(rows, coefficients_of(good)));
  for (std::size_t at = marker_of(good, 0xDA); at + 2 < good.size(); ++at) {
    if (good[at] != 0xFF || good[at + 1] < 0xD0) continue;
    if (good[at + 1] == 0xDA) continue;
    const Exact other(changed(good, at + 1, good[at + 1] ^ 1));
    CHECK(rows.open(other) && !McuRow(rows.frame(), 2, 2, 1).read(rows));
  }
}

namespace {

// Writes a file of random Huffman tables and random symbols, such as no encoder makes.
class RandomFile {
 public:
  explicit RandomFile(int components, int interval) {
    file_ = {0xFF, 0xD8, 0xFF, 0xDB, 0, 67, 0};
    file_.insert(file_.end(), 64, 1);
    append({0xFF, 0xC0, 0, 8 + 3 * components, 8, 0, 8 * kRows, 0, 8 * kColumns, components});
    for (int c = 0; c < components; ++c) append({c + 1, 0x11, 0});
    if (interval > 0) append({0xFF, 0xDD, 0, 4, 0, interval});
    for (const bool is_dc : {true, false}) {
      for (int number = 0; number < 2; ++number) add_table(is_dc, number);
    }
    append({0xFF, 0xDA, 0, 6 + 2 * components, components});
    for (int c = 0; c < components; ++c) append({c + 1, c % 2 * 0x11});
    append({0, 63, 0});
    for (int mcu = 0; mcu < kRows * kColumns; ++mcu) {
      if (interval > 0 && mcu > 0 && mcu % interval == 0) {
        flush();
        append({0xFF, 0xD0 + (mcu / interval - 1) % 8});
      }
      for (int c = 0; c < components; ++c) add_block(c % 2);
    }
    flush();
    append({0xFF, 0xD9});
  }
  const File& file() const { return file_; }

 private:
  static constexpr int kRows = 3, kColumns = 5;
  struct Coded {
    std::vector<int> symbols, codes, lengths;
  };

  void append(std::initializer_list<int> bytes) {
    for (const int byte : bytes) file_.push_back(static_cast<std::uint8_t>(byte));
  }

  // At each length some of the codes that are left are symbols, at least one is not.
  void add_table(bool is_dc, int number) {
    std::vector<int> symbols;
    const int all = is_dc ? 16 : 256, most = 1 + below(all);
    for (int symbol = 0; symbol < all; ++symbol) symbols.push_back(symbol);
    for (int i = all - 1; i > 0; --i)
      std::swap(symbols[static_cast<std::size_t>(i)], symbols[static_cast<std::size_t>(below(i + 1))]);
    Coded& table = tables_[is_dc ? 0 : 1][number];
    std::vector<int> counts;
    int code = 0;
    const int shortest = 1 + below(3);
    for (int length = 1; length <= 16; ++length, code <<= 1) {
      const int left = (1 << length) - 1 - code, rest = most - static_cast<int>(table.symbols.size());
      int count = length < shortest ? 0 : std::min(rest, length == 16 ? left : below(left / 2 + 2));
      count = std::min(count, left);
      counts.push_back(count);
      for (int i = 0; i < count; ++i) {
        table.codes.push_back(code++);
        table.lengths.push_back(length);
        table.symbols.push_back(symbols[table.symbols.size()]);
      }
    }
    append({0xFF, 0xC4, (19 + static_cast<int>(table.symbols.size())) >> 8,
            (19 + static_cast<int>(table.symbols.size())) & 255, (is_dc ? 0 : 0x10) + number});
    for (const int count : counts) append({count});
    for (const int symbol : table.symbols) append({symbol});
  }

  // `most`: the longest run of zeros, if there is such a symbol.
  int add_symbol(const Coded& table, int most) {
    std::uint32_t which = 0;
    for (int tries = 0; tries < 50; ++tries) {
      which = random_below(static_cast<std::uint32_t>(table.symbols.size()));
      if (table.symbols[which] >> 4 <= most) break;
    }
    put(table.codes[which], table.lengths[which]);
    const int size = table.symbols[which] & 15;
    put(below(1 << size), size);
    return table.symbols[which];
  }

  void add_block(int number) {
    add_symbol(tables_[0][number], 0);
    for (int k = 1; k < 64;) {
      const int symbol = add_symbol(tables_[1][number], 63 - k);
      if ((symbol & 15) == 0 && symbol != 0xF0) return;
      k += 1 + (symbol >> 4);
    }
  }

  void put(int value, int bits) {
    for (int i = bits - 1; i >= 0; --i) {
      byte_ = byte_ << 1 | (value >> i & 1);
      if (++filled_ == 8) put_byte();
    }
  }
  void flush() {
    while (filled_ > 0) put(1, 1);
  }
  void put_byte() {
    append({byte_ & 255});
    if ((byte_ & 255) == 255) append({0});
    byte_ = filled_ = 0;
  }

  File file_;
  Coded tables_[2][2];
  int byte_ = 0, filled_ = 0;
};

}  // namespace

TEST("jpeg scan: random codes and symbols") {
  ScanRows rows;
  Arena arena;
  int whole = 0, failed = 0;
  for (int i = 0; i < 4000; ++i) {
    const RandomFile made(i % 3 == 0 ? 1 : 3, i % 4 == 0 ? 1 + below(7) : 0);
    const Coefficients expected = coefficients_of(made.file());
    CHECK(expected.is_read);
    const Exact exact(made.file());
    CHECK(rows.open(exact));
    const JpegFrame frame = rows.frame();
    std::int32_t row = 0;
    for (; row < frame.mcu_rows(); ++row) {
      McuRow mcus(frame, row, 0, frame.mcu_columns());
      if (!mcus.read(rows)) break;
      CHECK(row < expected.warned && mcus.equals(expected));
    }
    if (row < frame.mcu_rows()) {  // coefficients behind the last one, which libjpeg does not look at
      ++failed;
      CHECK(rows.open(exact) && index_of(rows, arena).data == nullptr);
      continue;
    }
    ++whole;
    CHECK(rows.open(exact));
    const Bytes index = index_of(rows, arena);
    for (int k = 0; k < 4; ++k) {
      CHECK(rows.open(exact));
      if (k % 2 == 1) CHECK(rows.use_index(index));
      CHECK(has_parts(rows, expected));
    }
    arena.reset();
  }
  CHECK(whole > 300 && failed > 300);
}
