// Huffman codes of a sequential JPEG: tables, and decoding of blocks with them.
//
// The time goes into a chain of dependent steps: look the next bits up in a table, drop as many of them as the entry
// says, look up the next ones.  So one lookup decodes as much as possible: two coefficients, or, of blocks whose
// coefficients are not needed, as many symbols as there are in the bits.  An entry holds all that follows from its bits
// in a form that needs no branch; anything else (long codes, errors, a block that ends without its end marker) leaves
// the loop, and one symbol is decoded in the plain way.
//
// ITU-T T.81, annexes C and F.2.2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "jpeg_pixels.h"

namespace fastpipe::huffman {

#define FASTPIPE_INLINED inline __attribute__((always_inline))
#define FASTPIPE_LIKELY(condition) __builtin_expect(!!(condition), 1)

constexpr int kCoefficients = 64;  // of a block
constexpr int kLongestCode = 16;
constexpr int kMostBlockBits = kCoefficients * (kLongestCode + 15);
// How many bytes behind the last bit Bits reads, at most.
constexpr int kAhead = 24;

// Bits that one lookup takes.
constexpr int kDcBits = 9, kAcBits = 10, kSkipBits = 12;
// The most bits that an entry drops.  After three of them, the 64 bits of the buffer still hold those of a lookup.
constexpr int kMostBits = 17;
static_assert(64 - 3 * kMostBits >= kSkipBits && kSkipBits >= kAcBits && kAcBits >= kDcBits);

// Added to a coefficient's number at the end of a block.
constexpr int kEnd = 128;
// Added by entries that stand for no symbol, so that the number is none that a block can end with.
constexpr int kNone = 64;

// A DC coefficient's difference is the `bits` first bits, as a number, plus `base`, modulo 2^16.
struct DcEntry {
  std::uint8_t bits, shift;  // shift: 64 - bits
  std::uint16_t base;
};

// One coefficient that is not 0, or two, or the end of a block.
struct AcEntry {
  std::uint8_t bits;           // of all symbols
  std::uint8_t steps;          // to the number of the coefficient behind them
  std::uint8_t first, second;  // which coefficients, counted from the next one; the same if there is only one
  std::uint16_t base;          // of the first one: it is (the 64 next bits >> shift) + base, modulo 2^16
  std::uint8_t shift;
  std::int8_t value;  // the second one
};
static_assert(sizeof(AcEntry) == 8);

// As many symbols as there are: their bits, and in the higher byte the steps to the coefficient behind them.
using SkipEntry = std::uint16_t;

// A Huffman table of a file: how many codes there are of each length, and their symbols.
struct Codes {
  std::uint8_t counts[kLongestCode] = {};
  std::uint8_t symbols[256] = {};
  std::int32_t size = 0;
  // For each length, the first 16 bits that are neither such a code nor a shorter one.
  std::uint16_t limits[kLongestCode] = {};
  std::int32_t offsets[kLongestCode] = {};  // from codes of that length to the places of their symbols

  // Number the codes.  Returns false if these are more than there can be, without one of ones only, or none.
  bool number() noexcept;

  bool operator==(const Codes& other) const noexcept {
    return size == other.size && std::memcmp(counts, other.counts, sizeof(counts)) == 0 &&
           std::memcmp(symbols, other.symbols, static_cast<std::size_t>(size)) == 0;
  }
};

// A symbol that is decoded in the plain way.
struct Symbol {
  int bits = 0;  // of its code; 0 if there is no such code
  int size = 0;  // bits that follow it
  int run = 0;   // coefficients before the next one that are 0
};

// Decode the symbol at the top of these bits.
Symbol symbol_of(const Codes& codes, std::uint64_t bits) noexcept;

// Return what has to be added to a code and the `size` bits behind it, as a number, to make the coefficient of them.
FASTPIPE_INLINED std::uint16_t base_of(std::uint32_t code, int size, bool is_negative) noexcept {
  return static_cast<std::uint16_t>(0u - (code << size) - (is_negative ? (1u << size) - 1 : 0));
}

struct DcTable {
  Codes codes;
  alignas(64) DcEntry entries[1 << kDcBits];

  // Return whether all symbols are sizes that libjpeg takes.
  static bool takes(const Codes& codes) noexcept;
  // Fill `entries`, by `codes`.
  void build() noexcept;
};

struct AcTable {
  Codes codes;
  alignas(64) AcEntry entries[1 << kAcBits];
  alignas(64) SkipEntry skipped[1 << kSkipBits];
  bool has_skipped = false;  // `skipped` has been filled

  static bool takes(const Codes&) noexcept { return true; }
  // Fill `entries`, by `codes`.
  void build() noexcept;
  // Fill `skipped`, by `codes`.
  void build_skipped() noexcept;

 private:
  void add_second_symbols(std::uint32_t lengths) noexcept;
  void fill_skipped(SkipEntry* const* parts, int all) noexcept;
};

// The next bits, the first one at the top.
//
// Just after refill(), all 64 bits are valid.  Before the next one, at most three entries or one long code with its
// bits are dropped, so that those of a lookup are always left.  `unread` counts the bits from whole bytes before
// `next`; only its lowest 6 bits count.
struct Bits {
  std::uint64_t buffer = 0, unread = 0;
  const std::uint8_t* next = nullptr;

  FASTPIPE_INLINED void refill() noexcept {
    std::uint64_t more;
    std::memcpy(&more, next, sizeof(more));
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    more = __builtin_bswap64(more);
#endif
    buffer |= more >> (unread & 63);
    next += ~unread >> 3 & 7;
    unread |= 56;
  }
  FASTPIPE_INLINED void drop(std::uint64_t bits) noexcept {
    buffer <<= bits & 63;
    unread -= bits;
  }
  // Begin so many bits behind a byte.
  FASTPIPE_INLINED void start(const std::uint8_t* byte, std::int64_t bits) noexcept {
    next = byte + (bits >> 3);
    buffer = unread = 0;
    refill();
    drop(static_cast<std::uint64_t>(bits & 7));
  }
  // Take back the last bits that were dropped, before another refill().  57 bits are valid then.
  FASTPIPE_INLINED void take_back(std::uint64_t bits) noexcept {
    const std::uint64_t all = (unread & 63) + bits;
    start(next - (all + 7) / 8, static_cast<std::int64_t>((8 - all) & 7));
  }
  FASTPIPE_INLINED std::int64_t position(const std::uint8_t* byte) const noexcept {
    return 8 * (next - byte) - static_cast<std::int64_t>(unread & 63);
  }
};

// Decode a block's DC coefficient, and add it to the one before.  False if there is no such code.
FASTPIPE_INLINED bool read_dc(Bits& bits, const DcTable& table, std::uint16_t* sum) noexcept {
  const DcEntry entry = table.entries[bits.buffer >> (64 - kDcBits)];
  bits.refill();
  if (FASTPIPE_LIKELY(entry.bits != 0)) {
    *sum = static_cast<std::uint16_t>(*sum + (bits.buffer >> entry.shift) + entry.base);
    bits.drop(entry.bits);
    return true;
  }
  const Symbol symbol = symbol_of(table.codes, bits.buffer);
  if (symbol.bits == 0) return false;
  bits.drop(static_cast<std::uint64_t>(symbol.bits));
  if (symbol.size == 0) return true;
  const bool is_negative = bits.buffer >> 63 == 0;
  *sum = static_cast<std::uint16_t>(*sum + (bits.buffer >> (64 - symbol.size)) + base_of(0, symbol.size, is_negative));
  bits.drop(static_cast<std::uint64_t>(symbol.size));
  return true;
}

// Return whether a block may end with this number of its next coefficient.
FASTPIPE_INLINED bool is_end(std::uint64_t number) noexcept {
  return number - (kEnd + 1) < kCoefficients - 1 || number == kCoefficients;
}

// Decode one symbol of AC coefficients.  Returns the number of the next coefficient; 0 if the data are damaged.
FASTPIPE_INLINED std::uint64_t read_symbol(Bits& bits, const AcTable& table, std::uint64_t number,
                                           std::int16_t* block) noexcept {
  bits.refill();
  const AcEntry& entry = table.entries[bits.buffer >> (64 - kAcBits)];
  if (entry.steps == kEnd) {
    bits.drop(entry.bits);
    return number + kEnd;
  }
  if (entry.steps != kNone) {  // the first symbol of it
    number += entry.first;
    if (number >= kCoefficients) return 0;
    if (block != nullptr) {
      block[kZigzag[number]] = static_cast<std::int16_t>((bits.buffer >> entry.shift) + entry.base);
    }
    bits.drop(64u - entry.shift);
    return number + 1;
  }
  const Symbol symbol = symbol_of(table.codes, bits.buffer);
  if (symbol.bits == 0) return 0;
  bits.drop(static_cast<std::uint64_t>(symbol.bits));
  if (symbol.size == 0 && symbol.run != 15) return number + kEnd;
  number += static_cast<std::uint64_t>(symbol.run);
  if (number >= kCoefficients) return 0;
  if (symbol.size > 0) {
    if (block != nullptr) {
      const std::uint16_t base = base_of(0, symbol.size, bits.buffer >> 63 == 0);
      block[kZigzag[number]] = static_cast<std::int16_t>((bits.buffer >> (64 - symbol.size)) + base);
    }
    bits.drop(static_cast<std::uint64_t>(symbol.size));
  }
  return number + 1;
}

// Decode the AC coefficients of a block.
FASTPIPE_INLINED bool read_ac(Bits& bits, const AcTable& table, std::int16_t* block) noexcept {
  for (std::uint64_t number = 1;;) {
    const AcEntry* entry = table.entries + (bits.buffer >> (64 - kAcBits));
    // Apply an entry, and look up the next one.  Returns whether the block goes on.
    const auto apply = [&]() {
      const std::uint8_t* const places = kZigzag + number;
      // The second value first: where there is none, its place is the first one's.
      block[places[entry->second]] = entry->value;
      block[places[entry->first]] = static_cast<std::int16_t>((bits.buffer >> entry->shift) + entry->base);
      number += entry->steps;
      bits.drop(entry->bits);
      if (number >= kCoefficients) return false;
      entry = table.entries + (bits.buffer >> (64 - kAcBits));
      return true;
    };
    do {
      bits.refill();
    } while (apply() && apply() && apply());
    if (FASTPIPE_LIKELY(is_end(number))) return true;
    if (entry->bits > 0) bits.take_back(entry->bits);
    number = read_symbol(bits, table, number - entry->steps, block);
    if (number == 0) return false;
    if (number >= kCoefficients) return true;
  }
}

// Pass over the AC coefficients of a block.
FASTPIPE_INLINED bool skip_ac(Bits& bits, const AcTable& table) noexcept {
  for (std::uint64_t number = 1;;) {
    std::uint64_t entry = table.skipped[bits.buffer >> (64 - kSkipBits)];
    const auto apply = [&]() {
      number += entry >> 8;
      bits.drop(entry);
      if (number >= kCoefficients) return false;
      entry = table.skipped[bits.buffer >> (64 - kSkipBits)];
      return true;
    };
    do {
      bits.refill();
    } while (apply() && apply() && apply());
    if (FASTPIPE_LIKELY(is_end(number))) return true;
    if ((entry & 0xFF) > 0) bits.take_back(entry & 0xFF);
    number = read_symbol(bits, table, number - (entry >> 8), nullptr);
    if (number == 0) return false;
    if (number >= kCoefficients) return true;
  }
}

#undef FASTPIPE_INLINED
#undef FASTPIPE_LIKELY

}  // namespace fastpipe::huffman
