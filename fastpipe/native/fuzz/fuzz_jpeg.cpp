// Fuzzes the JPEG header, and the decoding of parts of an image and of reduced images: Pillow's pixels and
// TensorFlow's.
//
// Invariants, whatever the file: a whole image has the pixels that libjpeg decodes without a warning; a part equals the
// same part of the whole image; a decoder that has seen other files gives what a new one gives; a good file after this
// one is decoded as before.
#include "../arena.h"
#include "../jpeg.h"
#include "../simd.h"
#include "../tests/make_jpeg.h"
#include "../tests/read_pixels.h"
#include "fuzz.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::fuzz;
using tests::is_part;

// A file and its pixels.
class Good {
 public:
  Good() : file_(tests::encoded({19, 37}, {})) { require(decode(decoder_, arena_, &pixels_), "a good file"); }
  void check(JpegDecoder& decoder, Arena& arena) const {
    Pixels again;
    require(decode(decoder, arena, &again) && is_part(again, pixels_, 0, 0), "a good file after this one");
  }

 private:
  bool decode(JpegDecoder& decoder, Arena& arena, Pixels* pixels) const {
    return decoder.decode({file_.data(), file_.size()}, {0, 0, 19, 37}, arena, pixels).is_made();
  }
  const tests::File file_;
  JpegDecoder decoder_;
  Arena arena_;
  Pixels pixels_;
};

void check_parts(Bytes file, const JpegHeader& header, Choices& choices, JpegDecoder& decoder, Arena& arena) {
  const Box everything{0, 0, header.height, header.width};
  Pixels part, whole, anew;
  const Box box = box_inside(choices, {header.height, header.width});
  const auto kind = static_cast<JpegPixels>(choices.below(3));
  const Status of_part = decoder.decode(file, box, arena, &part, kind);
  const Status of_whole = decoder.decode(file, everything, arena, &whole, kind);
  require(same(of_whole, JpegDecoder().decode(file, everything, arena, &anew, kind)), "the status of a new decoder");
  if (of_part.is_made()) require(part.height == box.height && part.width == box.width, "the size of a part");
  if (!of_whole.is_made()) return;
  require(is_part(anew, whole, 0, 0), "the pixels of a new decoder");
  if (!header.trusted) return;
  require(of_part.is_made(), "a part of an image that can be decoded");
  require(is_part(part, whole, box.top, box.left), "the pixels of a part");
  Bytes index;
  require(decoder.decode(file, box, arena, &part, kind, {{}, &index}).is_made(), "a part, and an index");
  require(is_part(part, whole, box.top, box.left), "the pixels of a part beside an index");
  if (index.data != nullptr) {
    require(decoder.decode(file, box, arena, &part, kind, {index}).is_made(), "a part by an index");
    require(is_part(part, whole, box.top, box.left), "the pixels of a part by an index");
  }
  tests::Image expected;
  require(tests::read_pixels(file, 1, kind, &expected), "no warning");
  require(is_part(whole, expected.pixels(), 0, 0), "libjpeg's pixels");
  const Status probed = decoder.probe(file);
  require(probed.is_made() || probed.reason == Reason::asked, "a file that can be decoded may be decoded later");
}

void check_reduced(Bytes file, const JpegHeader& header, Choices& choices, JpegDecoder& decoder, Arena& arena) {
  const int factor = 2 << choices.below(3);
  Pixels some, all;
  const Size size{(header.height + factor - 1) / factor, (header.width + factor - 1) / factor};
  const Box box = box_inside(choices, size);
  const Status of_some = decoder.decode_reduced(file, factor, box, arena, &some);
  const Status of_all = decoder.decode_reduced(file, factor, {0, 0, size.height, size.width}, arena, &all);
  if (!of_all.is_made()) return;
  require(all.height == size.height && all.width == size.width, "the size of a reduced image");
  if (!header.trusted) return;
  require(of_some.is_made(), "a part of a reduced image that can be decoded");
  require(is_part(some, all, box.top, box.left), "the pixels of a part of a reduced image");
  tests::Image expected;
  require(tests::read_pixels(file, factor, JpegPixels::pillow, &expected), "no warning of a reduced image");
  require(is_part(all, expected.pixels(), 0, 0), "libjpeg's pixels of a reduced image");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static JpegDecoder decoder;  // the same one for all inputs
  static Arena arena;
  static const Good good;
  const Bytes file{data, size};
  const JpegHeader header = read_jpeg_header(file);
  require(header.orientation >= 0 && header.orientation <= 8, "the orientation");
  if (!header.is_jpeg() || std::int64_t{header.height} * header.width > kMostPixels) return 0;
  require(header.width > 0 && header.frame > 0 && header.frame < static_cast<std::int64_t>(size), "the header");
  Choices choices(file);
  force_level(static_cast<Level>(choices.below(static_cast<int>(best_level()) + 1)));
  check_parts(file, header, choices, decoder, arena);
  check_reduced(file, header, choices, decoder, arena);
  good.check(decoder, arena);
  arena.reset();
  return 0;
}
