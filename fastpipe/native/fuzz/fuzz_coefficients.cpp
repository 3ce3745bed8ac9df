// Fuzzes coefficients that are kept: those of files, and entries that are damaged.
//
// Invariants, whatever the file: a part has the pixels that libjpeg decodes, or is declined; an entry that is damaged
// is declined, or gives some pixels, and nothing outside of it is read.
#include <cstring>
#include <memory>

#include "../arena.h"
#include "../coefficients.h"
#include "../jpeg.h"
#include "../simd.h"
#include "../tests/read_pixels.h"
#include "fuzz.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::fuzz;

constexpr int kSpoilt = 8;  // entries that are made of a good one

bool decode(Bytes entry, Choices& choices, int factor, Box* box, Arena& arena, Pixels* pixels) {
  KeptCoefficients rows;
  if (!rows.open(entry)) return false;
  const Size size = rows.frame().size;
  if (std::int64_t{size.height} * size.width > kMostPixels) return false;
  *box = box_inside(choices, rows.frame().reduced(factor));
  return decode_pixels(rows.frame(), rows, factor, *box, arena, pixels).is_made();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static JpegDecoder decoder;  // the same one for all inputs
  static Arena arena;
  const Bytes file{data, size};
  const JpegHeader header = read_jpeg_header(file);
  if (!header.trusted || std::int64_t{header.height} * header.width > kMostPixels) return 0;
  Choices choices(file);
  force_level(static_cast<Level>(choices.below(static_cast<int>(best_level()) + 1)));
  Bytes entry;
  if (decoder.pack(file, arena, &entry).is_made()) {
    Box box;
    Pixels found;
    const int factor = 1 << choices.below(4);
    if (decode(entry, choices, factor, &box, arena, &found)) {
      tests::Image expected;
      require(tests::read_pixels(file, factor, JpegPixels::pillow, &expected), "a file whose coefficients are kept");
      require(tests::is_part(found, expected.pixels(), box.top, box.left), "the pixels of kept coefficients");
    }
    for (int i = 0; i < kSpoilt; ++i) {
      // In memory of its own, so that a sanitizer sees what is read beyond it.
      const std::size_t length =
          choices.flip() ? entry.size
                         : static_cast<std::size_t>(choices.below(static_cast<std::int32_t>(entry.size) + 1));
      const std::unique_ptr<std::uint8_t[]> spoilt(new std::uint8_t[length]);
      std::memcpy(spoilt.get(), entry.data, length);
      for (int edits = choices.below(6); edits > 0 && length > 0; --edits) {
        spoilt[static_cast<std::size_t>(choices.below(static_cast<std::int32_t>(length)))] =
            static_cast<std::uint8_t>(choices.below(256));
      }
      static_cast<void>(decode({spoilt.get(), length}, choices, factor, &box, arena, &found));
    }
  }
  arena.reset();
  return 0;
}
