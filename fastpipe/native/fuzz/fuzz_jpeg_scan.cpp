// Fuzzes the decoder of scans, with and without an index.
//
// Invariants, whatever the file: of a trusted file, rows have the coefficients that libjpeg reads without a warning; an
// index of a file changes no coefficient, and a wrong one harms nothing; a good file after this one is decoded as
// before.
#include "../arena.h"
#include "../jpeg.h"
#include "../jpeg_scan.h"
#include "../tests/make_jpeg.h"
#include "../tests/read_coefficients.h"
#include "fuzz.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::fuzz;
using tests::Coefficients;
using tests::McuRow;

// A file and its coefficients.
class Good {
 public:
  Good() : file_(tests::encoded({19, 37}, {})) { tests::read_coefficients(bytes(), &coefficients_); }
  void check(ScanRows& rows) const {
    require(rows.open(bytes()), "a good file after this one");
    const JpegFrame frame = rows.frame();
    for (std::int32_t row = 0; row < frame.mcu_rows(); ++row) {
      McuRow mcus(frame, row, 0, frame.mcu_columns());
      require(mcus.read(rows) && mcus.equals(coefficients_), "the coefficients of a good file after this one");
    }
  }

 private:
  Bytes bytes() const { return {file_.data(), file_.size()}; }
  const tests::File file_;
  Coefficients coefficients_;
};

// Read parts of rows, and return how many rows were read.
std::int32_t read_parts(ScanRows& rows, Choices& choices, const Coefficients* expected) {
  const JpegFrame frame = rows.frame();
  const std::int32_t begin = choices.below(frame.mcu_rows());
  std::int32_t row = begin;
  for (; row < frame.mcu_rows(); ++row) {
    const std::int32_t first = choices.below(frame.mcu_columns());
    McuRow mcus(frame, row, first, choices.below(frame.mcu_columns() - first + 1));
    if (choices.below(4) == 0) mcus.leave_out(choices.below(frame.components));
    if (choices.below(4) == 0) mcus.take_dc_only(choices.below(frame.components));
    if (!mcus.read(rows)) break;
    if (expected != nullptr) require(row < expected->warned && mcus.equals(*expected), "the coefficients of a part");
  }
  return row - begin;
}

void check_scan(Bytes file, bool is_trusted, Choices& choices, ScanRows& rows, Arena& arena) {
  Coefficients coefficients;
  tests::read_coefficients(file, &coefficients);
  const JpegFrame frame = rows.frame();
  bool is_whole = true, is_known = coefficients.is_read && is_trusted;
  for (std::int32_t row = 0; is_whole && row < frame.mcu_rows(); ++row) {
    McuRow mcus(frame, row, 0, frame.mcu_columns());
    is_whole = mcus.read(rows);
    if (!is_whole || !is_trusted) continue;
    require(row < coefficients.warned, "no warning");
    require(coefficients.is_read || !ends_after_scan(file, rows.position()), "a file that libjpeg reads");
    require(!is_known || mcus.equals(coefficients), "the coefficients of a row");
  }
  require(rows.open(file), "a file that was opened before");
  read_parts(rows, choices, is_known ? &coefficients : nullptr);

  require(rows.open(file), "a file that was opened before");
  const Bytes index = tests::index_of(rows, arena);
  require((index.data != nullptr) == is_whole, "an index of a file whose rows can be read");
  require(rows.open(file), "a file that was opened before");
  if (index.data == nullptr) return;
  rows.begin_index(arena);
  read_parts(rows, choices, nullptr);
  const Bytes other = rows.end_index();
  require(other.size == index.size && std::memcmp(other.data, index.data, index.size) == 0,
          "the same index, whatever was read");
  require(rows.open(file), "a file that was opened before");
  require(rows.use_index(index), "an index of this file");
  read_parts(rows, choices, is_known ? &coefficients : nullptr);

  auto* const wrong = arena.array<std::uint8_t>(index.size);
  require(wrong != nullptr, "memory");
  std::memcpy(wrong, index.data, index.size);
  for (int i = choices.below(8); i >= 0; --i) {
    wrong[choices.below(static_cast<std::int32_t>(index.size))] = static_cast<std::uint8_t>(choices.below(256));
  }
  require(rows.open(file), "a file that was opened before");
  if (rows.use_index({wrong, index.size})) read_parts(rows, choices, nullptr);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static ScanRows rows;  // the same one for all inputs
  static Arena arena;
  static const Good good;
  const Bytes file{data, size};
  const JpegHeader header = read_jpeg_header(file);
  if (std::int64_t{header.height} * header.width > kMostPixels) return 0;
  Choices choices(file);
  if (rows.open(file)) {
    const JpegFrame& frame = rows.frame();
    if (std::int64_t{frame.size.height} * frame.size.width > kMostPixels) return 0;
    check_scan(file, header.trusted, choices, rows, arena);
  }
  good.check(rows);
  arena.reset();
  return 0;
}
