// What became of one sample: eight bytes of plain data.
#pragma once

#include <cstdint>

namespace fastpipe {

enum class Outcome : std::uint8_t {
  pending = 0,    // not begun, or the job was cancelled before it was
  made = 1,       // written to its destination
  declined = 2,   // Python makes it: by Pillow, or it finds out what is wrong with the file
  cancelled = 3,  // the job was given up
};

// Why a sample was declined; or how it was made.
enum class Reason : std::uint8_t {
  none = 0,
  unreadable = 1,      // the file cannot be opened or read; detail is errno, or 0
  unknown_format = 2,  // no JPEG and no PNG, or broken before its first scan
  untrusted = 3,       // a file of a kind that Pillow may decode otherwise, or one with parts missing
  too_large = 4,       // more pixels than the limit
  turned = 5,          // EXIF turns it, and the plan wants that
  damaged = 6,         // libjpeg warned or gave up, or a PNG's pixels are damaged
  not_folded = 7,      // the transform cannot be folded into one pass for an image of this size
  no_memory = 8,
  internal = 9,  // an exception where none is expected
  asked = 10,    // Python makes it in any case
  kept = 11,     // made: from a kept image
};

struct [[nodiscard]] Status {
  Outcome outcome = Outcome::pending;
  Reason reason = Reason::none;
  std::uint16_t unused = 0;
  std::int32_t detail = 0;

  static Status made() { return {Outcome::made, Reason::none, 0, 0}; }
  static Status declined(Reason reason, std::int32_t detail = 0) { return {Outcome::declined, reason, 0, detail}; }
  bool is_made() const { return outcome == Outcome::made; }
};
static_assert(sizeof(Status) == 8);

}  // namespace fastpipe
