// A JPEG's segments and scans, walked without decoding anything.
//
// Pillow decides which files are images, and whether a damaged one is an error.  A file is `trusted` if libjpeg-turbo
// comes to the same result.  Two things are checked for that:
//   - Pillow parses segments that no pixel depends on, and does not open a file in which one of them ends too soon
//     (PIL/JpegImagePlugin.py, 13.0).  libjpeg skips those segments.
//   - Decoders differ if a scan stops early, has a marker in the middle, or if the last scans of a progressive file are
//     missing; parts of an image then differ, too.  All of that shows without decoding: coded data has no byte 0xFF
//     except before a zero, a restart marker whose number is known, or the next segment.
//
// Markers, segments and scans: ITU-T T.81, annexes B and F.1.2.3.  Adobe's segment: ITU-T T.872, section 6.5.3.
// EXIF: CIPA DC-008.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "jpeg.h"
#include "reader.h"

namespace fastpipe {
namespace {

// Markers: the byte behind 0xFF.
enum Marker : std::int64_t {
  kTEM = 0x01,
  kSOF0 = 0xC0,  // baseline; 1: extended sequential, 2: progressive
  kSOF2 = 0xC2,
  kDHT = 0xC4,
  kJPG = 0xC8,
  kDAC = 0xCC,
  kSOF15 = 0xCF,
  kRST0 = 0xD0,
  kEOI = 0xD9,
  kSOS = 0xDA,
  kDQT = 0xDB,
  kDRI = 0xDD,
  kAPP0 = 0xE0,
  kAPP1 = 0xE1,
  kAPP2 = 0xE2,
  kAPP13 = 0xED,
  kAPP14 = 0xEE,
  kAPP15 = 0xEF,
  kCOM = 0xFE,
  kFill = 0xFF,
};

constexpr int kCoefficients = 64;
constexpr int kMostComponents = 3;         // of a frame that is trusted
constexpr std::uint8_t kNothingSent = 16;  // more bits than a coefficient can have

// ---------------------------------------------------------------------------------------------------- scans

// Find the first 0xFF at or behind `position` that is followed by neither 0 nor 0xFF.  Return `last` if there is none
// before it.  data[last] is read.
std::int64_t find_marker(const std::uint8_t* data, std::int64_t position, std::int64_t last) noexcept {
  using Lane = std::uint8_t __attribute__((vector_size(16)));
  constexpr std::int64_t block = 4 * sizeof(Lane);
  for (; position + block <= last; position += block) {
    // Nearly all blocks hold no marker.
    Lane found = {};
    for (std::int64_t k = 0; k < block; k += sizeof(Lane)) {
      Lane here, next;
      std::memcpy(&here, data + position + k, sizeof(here));
      std::memcpy(&next, data + position + k + 1, sizeof(next));
      // Adding one turns 0xFF and 0, which may follow, into 0 and 1, and all others into more.
      found |= reinterpret_cast<Lane>(here == 0xFF) & (next + 1);
    }
    std::uint64_t halves[2];
    std::memcpy(halves, &found, sizeof(found));
    if (((halves[0] | halves[1]) & 0xFEFEFEFEFEFEFEFE) != 0) break;
  }
  while (position < last && (data[position] != 0xFF || data[position + 1] == 0 || data[position + 1] == 0xFF)) {
    ++position;
  }
  return position;
}

// Return the position of a marker's last 0xFF: there may be several.
std::int64_t skip_fill(const Reader& reader, std::int64_t position) noexcept {
  while (position + 1 < reader.size() && reader[position] == 0xFF && reader[position + 1] == 0xFF) ++position;
  return position;
}

bool is_application_or_comment(std::int64_t code) noexcept { return code == kCOM || (code >= kAPP0 && code <= kAPP15); }

// Return the position of the marker behind coded data with so many restart markers; -1 if there is no marker, or one of
// the restart markers is missing.
std::int64_t end_of_scan(Bytes file, std::int64_t position, std::int64_t restarts) noexcept {
  const std::int64_t last = static_cast<std::int64_t>(file.size) - 1;
  for (std::int64_t passed = 0;; ++passed, ++position) {
    if (position < last) position = find_marker(file.data, position, last);
    if (position >= last) return -1;
    if (passed == restarts) return position;
    if (file.data[position + 1] != kRST0 + passed % 8) return -1;
  }
}

// A component of the frame, and which bits of its coefficients are still missing.
struct Component {
  std::uint8_t name = 0;
  std::int64_t vertical = 0, horizontal = 0;  // sampling factors
  // Bits of each coefficient that no scan has sent; in sequential files the first stands for all.
  std::uint8_t missing[kCoefficients];
};

// Follows the scans of a trusted frame.
class Scans {
 public:
  Scans(const Reader& reader, Bytes file, std::int64_t frame) noexcept
      : reader_(reader), file_(file), frame_(frame), progressive_(reader[frame - 3] == kSOF2) {
    const int sent = std::min<int>(reader_[frame_ + 5], kMostComponents);
    for (int i = 0; i < sent; ++i) {
      // If a name comes twice, the last one counts.
      const std::uint8_t name = reader_[frame_ + 6 + 3 * i], factors = reader_[frame_ + 7 + 3 * i];
      int place = place_of(name);
      if (place == count_) ++count_;
      Component& component = components_[place];
      component.name = name;
      component.vertical = factors & 15;
      component.horizontal = factors >> 4;
      std::fill_n(component.missing, kCoefficients, kNothingSent);
    }
  }

  // Return whether each scan ends where a segment begins and has its restart markers in order, up to the end marker,
  // and all bits of all coefficients have been sent.
  //
  // position: of the first scan's marker.
  // interval: MCUs between restart markers, as set before the first scan; 0 for none.
  bool are_whole(std::int64_t position, std::int64_t interval) noexcept {
    const std::int64_t size = reader_.size();
    for (;;) {
      const std::int64_t code = reader_[position + 1], length = reader_.big(position + 2, 2, size);
      if (code == kEOI) return nothing_is_missing();
      const std::int64_t end = position + 2 + length;
      if (length < 2 || end + 2 > size) return false;
      if (code == kDRI) interval = reader_.big(position + 4, 2, size);
      if (code == kSOS) {
        const std::int64_t restarts = note_scan(position, length, interval);
        position = restarts < 0 ? -1 : end_of_scan(file_, end, restarts);
        if (position < 0) return false;
      } else if (code == kDHT || code == kDQT || code == kDRI || is_application_or_comment(code)) {
        position = end;
      } else {
        return false;
      }
      position = skip_fill(reader_, position);
      if (reader_[position] != 0xFF || position + 2 > size) return false;
    }
  }

 private:
  // Return the index of the component with that name; count_ if there is none.
  int place_of(std::uint8_t name) const noexcept {
    int place = 0;
    while (place < count_ && components_[place].name != name) ++place;
    return place;
  }

  bool nothing_is_missing() const noexcept {
    for (int place = 0; place < count_; ++place) {
      for (int k = 0; k < (progressive_ ? kCoefficients : 1); ++k) {
        if (components_[place].missing[k] != 0) return false;
      }
    }
    return true;
  }

  // Take note of a scan.  Return how many restart markers it has, or -1 if it is malformed.
  std::int64_t note_scan(std::int64_t position, std::int64_t length, std::int64_t interval) noexcept {
    const std::int64_t sent = (length - 6) / 2;
    if (sent < 1 || length != 6 + 2 * sent || reader_[position + 4] != sent) return -1;
    const std::int64_t behind = position + 5 + 2 * sent;
    int start = reader_[behind], stop = reader_[behind + 1];
    const int bits = reader_[behind + 2];
    if (!progressive_) {  // a scan sends all of a coefficient
      if (start != 0 || stop != kCoefficients - 1 || bits != 0) return -1;
      stop = 0;
    }
    if (start > stop || stop >= kCoefficients) return -1;
    const int before = bits >> 4 != 0 ? bits >> 4 : kNothingSent, after = bits & 15;
    int first = -1;
    for (std::int64_t i = 0; i < sent; ++i) {
      const int place = place_of(reader_[position + 5 + 2 * i]);
      if (place == count_) return -1;
      if (i == 0) first = place;
      for (int k = start; k <= stop; ++k) {
        if (components_[place].missing[k] != before) return -1;  // sent already, or another bit is next
        components_[place].missing[k] = static_cast<std::uint8_t>(after);
      }
    }
    return interval == 0 ? 0 : (units(sent, components_[first]) - 1) / interval;
  }

  // Return how many MCUs a scan has.  An MCU is one block if the scan has a single component.
  std::int64_t units(std::int64_t sent, const Component& only) const noexcept {
    std::int64_t rows = 1, columns = 1;  // the largest sampling factors
    for (int place = 0; place < count_; ++place) {
      rows = std::max(rows, components_[place].vertical);
      columns = std::max(columns, components_[place].horizontal);
    }
    const std::int64_t height = reader_.big(frame_ + 1, 2, reader_.size());
    const std::int64_t width = reader_.big(frame_ + 3, 2, reader_.size());
    if (sent > 1) return divide_up(height, 8 * rows) * divide_up(width, 8 * columns);
    return divide_up(divide_up(height * only.vertical, rows), 8) *
           divide_up(divide_up(width * only.horizontal, columns), 8);
  }

  static std::int64_t divide_up(std::int64_t number, std::int64_t by) noexcept { return (number + by - 1) / by; }

  const Reader& reader_;
  const Bytes file_;
  const std::int64_t frame_;
  const bool progressive_;
  Component components_[kMostComponents];
  int count_ = 0;  // different names
};

// -------------------------------------------------------------------------------------- segments before the scans

constexpr std::int32_t kMayNotOpen = -1;

// Bytes of one value of each type of EXIF; 0 for types that Pillow skips.
constexpr std::uint8_t kValueBytes[] = {0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8};

// Return the orientation in the first directory of EXIF data; 1 if it has none, 0 if it is unclear.
//
// kMayNotOpen if Pillow may not open the file, or warns: it also reads the resolution, and fails if that is a text or
// bytes; and it warns if a value, or the place of the next directory, is not in the data.
std::int32_t exif_orientation(const Reader& reader, std::int64_t tiff, std::int64_t end) noexcept {
  constexpr std::int64_t orientation_tag = 0x0112, resolution_tag = 0x011A, most_tags = 1000;
  constexpr std::int64_t of_bytes = 1, of_text = 2, of_short = 3, undefined = 7;  // types of values
  const bool is_big = reader.begins(tiff, end, "MM\0*");
  const auto number = [&](std::int64_t first, int bytes) {
    return is_big ? reader.big(first, bytes, end) : reader.little(first, bytes, end);
  };
  if (end - tiff < 8 || !(is_big || reader.begins(tiff, end, "II*\0"))) return kMayNotOpen;  // Pillow reads more
  const std::int64_t directory = tiff + number(tiff + 4, 4), count = number(directory, 2);
  std::int64_t entry = directory + 2;
  if (count > most_tags || entry + 12 * count + 4 > end) return kMayNotOpen;  // it may go on in another segment
  std::int64_t sum = 0;  // of the values that do not fit into their entries
  std::int32_t orientation = 0;
  bool has_orientation = false;
  for (std::int64_t i = 0; i < count; ++i, entry += 12) {
    const std::int64_t tag = number(entry, 2), type = number(entry + 2, 2), length = number(entry + 4, 4);
    const std::int64_t size = type < std::int64_t{sizeof kValueBytes} ? kValueBytes[type] * length : 0;
    if (size > 4) {
      sum += size;
      if (sum > end - tiff || number(entry + 8, 4) + size > end - tiff) return kMayNotOpen;
    }
    if (tag == resolution_tag && length <= 2 && (type == of_bytes || type == of_text || type == undefined)) {
      return kMayNotOpen;
    }
    if (tag == orientation_tag && !has_orientation) {
      has_orientation = true;
      const std::int64_t value = number(entry + 8, 2);
      if (type == of_short && length == 1 && value >= 1 && value <= 8) {
        orientation = static_cast<std::int32_t>(value);
      }
    }
  }
  return has_orientation ? orientation : 1;
}

// Return whether the heads of Photoshop's resources are whole: signature, code, name, size.
bool resources_fit(const Reader& reader, std::int64_t body, std::int64_t end) noexcept {
  std::int64_t at = body + 14;
  while (reader.begins(at, end, "8BIM")) {
    const std::int64_t name = at + 6;
    if (name >= end) return false;
    std::int64_t size = name + 1 + reader[name];
    size += (size - body) & 1;  // both are padded to an even place
    if (size + 4 > end) return false;
    at = size + 4 + reader.big(size, 4, end);
    at += (at - body) & 1;
  }
  return true;
}

// Return whether a segment is made of whole quantisation tables with numbers from 0 to 3.
bool tables_fit(const Reader& reader, std::int64_t body, std::int64_t end) noexcept {
  std::int64_t at = body;
  while (at < end) {
    const int head = reader[at];
    if ((head & 15) > 3) return false;
    at += 1 + kCoefficients * (head < 16 ? 1 : 2);  // entries of one or two bytes
  }
  return at == end;
}

// Facts from the segments before the first scan, other than the frame.
struct Notes {
  std::int32_t orientation = 1;
  int adobe = -1;  // its transform; -1: no such segment
  bool has_jfif = false;
  bool has_exif = false;
  std::int64_t interval = 0;  // MCUs between restart markers; 0 for none
};

// Take note of an application segment.  Return false if Pillow may not open a file with such a segment.
bool note_application(const Reader& reader, std::int64_t code, std::int64_t body, std::int64_t end,
                      Notes* notes) noexcept {
  if (code == kAPP0 && reader.begins(body, end, "JFIF")) {  // for Pillow, even without a zero behind it
    notes->has_jfif = true;
    // For libjpeg it is no JFIF if it is shorter or has no zero; Pillow fails below 7 bytes.
    return end - body >= 14 && reader[body + 4] == 0;
  }
  if (code == kAPP1 && reader.begins(body, end, "Exif\0\0")) {
    // Pillow joins several EXIF segments; 0 asks Pillow.
    const std::int32_t orientation = notes->has_exif ? 0 : exif_orientation(reader, body + 6, end);
    notes->has_exif = true;
    notes->orientation = notes->orientation == 1 ? std::max(orientation, 0) : 0;
    return orientation != kMayNotOpen;
  }
  if (code == kAPP1 && reader.has(body, end, "rientation")) notes->orientation = 0;  // XMP: ask Pillow
  if (code == kAPP2 && reader.begins(body, end, "ICC_PROFILE\0")) {
    return end - body >= 14;  // with a part's number, and how many there are
  }
  if (code == kAPP13 && reader.begins(body, end, "Photoshop 3.0\0")) return resources_fit(reader, body, end);
  if (code == kAPP14 && reader.begins(body, end, "Adobe")) {
    if (end - body < 12) return false;
    notes->adobe = reader[body + 11];
  }
  return true;
}

// Take note of any segment other than a frame's or a scan's.  Return what note_application() does.
bool note_segment(const Reader& reader, std::int64_t code, std::int64_t body, std::int64_t end, Notes* notes) noexcept {
  if (code >= kAPP0 && code <= kAPP14) return note_application(reader, code, body, end, notes);
  if (code == kDQT) return tables_fit(reader, body, end);
  if (code == kDRI) {
    notes->interval = reader.big(body, 2, end);
    return end - body == 2;
  }
  return code == kDHT || code == kCOM || code == kAPP15;
}

// Return whether libjpeg-turbo has been compared with Pillow for such a frame: Huffman coding, 8 bits, grey or three
// components sampled 4:4:4, 4:2:2 or 4:2:0.
bool frame_is_trusted(const Reader& reader, std::int64_t body, std::int64_t length, std::int64_t code) noexcept {
  if (code > kSOF2 || reader[body] != 8) return false;
  const int components = reader[body + 5], first = reader[body + 7];
  if (length != 8 + 3 * components) return false;
  if (components == 1) return first == 0x11;
  if (components != 3 || (first != 0x11 && first != 0x21 && first != 0x22)) return false;
  return reader[body + 10] == 0x11 && reader[body + 13] == 0x11;
}

// Return whether all decoders agree on the colours of the components.
//
// libjpeg takes three components for YCbCr if there is a JFIF segment, else as the Adobe segment says, else if they are
// numbered 1, 2, 3.  Files in which those disagree are left to Pillow.
bool is_grey_or_ycbcr(const Reader& reader, std::int64_t body, const Notes& notes) noexcept {
  if (reader[body + 5] == 1) return true;
  if (notes.adobe >= 0) return notes.adobe == 1;
  return notes.has_jfif || (reader[body + 6] == 1 && reader[body + 9] == 2 && reader[body + 12] == 3);
}

}  // namespace

JpegHeader read_jpeg_header(Bytes file) noexcept {
  const Reader reader(file);
  const std::int64_t end = reader.size();
  if (!reader.begins(0, end, "\xFF\xD8\xFF")) return {};
  JpegHeader header;
  Notes notes;
  bool opens = true;  // Pillow opens the file, as far as the segments tell
  std::int64_t position = 2;
  for (;;) {
    if (position + 4 > end || reader[position] != 0xFF) return {};
    const std::int64_t code = reader[position + 1];
    if (code == kFill || code == kTEM || (code >= kRST0 && code < kEOI)) {  // no segment begins here
      position += code == kFill ? 1 : 2;
      if (code != kFill) opens = false;  // some of those markers are errors, and none is usual here
      continue;
    }
    const std::int64_t length = reader.big(position + 2, 2, end);
    const std::int64_t body = position + 4, after = position + 2 + length;
    if (length < 2 || after > end) return {};
    if (code >= kSOF0 && code <= kSOF15 && code != kDHT && code != kJPG && code != kDAC) {
      if (header.frame != 0 || length < 8) return {};
      header.frame = body;
      header.height = static_cast<std::int32_t>(reader.big(body + 1, 2, end));
      header.width = static_cast<std::int32_t>(reader.big(body + 3, 2, end));
      header.trusted = frame_is_trusted(reader, body, length, code);
    } else if (code == kSOS) {
      break;
    } else if (!note_segment(reader, code, body, after, &notes)) {
      opens = false;
    }
    position = after;
  }
  if (header.frame == 0 || header.height == 0 || header.width == 0) return {};
  header.orientation = notes.orientation;
  header.trusted = header.trusted && opens && is_grey_or_ycbcr(reader, header.frame, notes) &&
                   Scans(reader, file, header.frame).are_whole(position, notes.interval);
  return header;
}

bool ends_after_scan(Bytes file, std::int64_t position) noexcept {
  const Reader reader(file);
  const std::int64_t size = reader.size();
  while (position < size - 1) {
    position = find_marker(file.data, position, size - 1);
    if (reader[position + 1] < kRST0 || reader[position + 1] >= kEOI) break;
    position += 2;
  }
  while (is_application_or_comment(reader[position + 1])) {
    position = skip_fill(reader, position + 2 + reader.big(position + 2, 2, size));
  }
  return reader[position] == 0xFF && reader[position + 1] == kEOI;
}

}  // namespace fastpipe
