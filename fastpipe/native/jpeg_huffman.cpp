#include "jpeg_huffman.h"

#include <algorithm>

namespace fastpipe::huffman {
namespace {

// Call `use(length, code, symbol)` for all codes of at most so many bits.
template <typename Use>
void for_each_code(const Codes& codes, int most_bits, const Use& use) noexcept {
  std::uint32_t code = 0;
  int place = 0;
  for (int length = 1; length <= most_bits; ++length, code <<= 1) {
    for (int i = 0; i < codes.counts[length - 1]; ++i, ++code, ++place) use(length, code, codes.symbols[place]);
  }
}

bool is_end_of_block(int run, int size) noexcept { return size == 0 && run != 15; }

// Write an entry to all places of a table whose index begins with a code, as it is if the bit behind the code is 0 and
// as it is if it is 1.  This bit is the sign, if bits follow the code.
template <typename Entry>
void fill(Entry* entries, int count, const Entry& if_0, const Entry& if_1) noexcept {
  std::fill_n(entries, (count + 1) / 2, if_0);
  std::fill_n(entries + (count + 1) / 2, count / 2, if_1);
}

// Increase all fields of entries, none of which becomes too large, at once.
void increase(AcEntry* entries, const std::uint64_t* by, int count) noexcept {
  for (int i = 0; i < count; ++i) {
    std::uint64_t entry;
    std::memcpy(&entry, entries + i, sizeof(entry));
    entry += by[i];
    std::memcpy(entries + i, &entry, sizeof(entry));
  }
}

}  // namespace

bool Codes::number() noexcept {
  std::uint32_t code = 0;
  std::int32_t place = 0;
  for (int i = 0; i < kLongestCode; ++i, code <<= 1) {
    offsets[i] = place - static_cast<std::int32_t>(code);
    code += counts[i];
    place += counts[i];
    if (code >= 2u << i) return false;
    limits[i] = static_cast<std::uint16_t>(code << (kLongestCode - 1 - i));
  }
  return size > 0;
}

Symbol symbol_of(const Codes& codes, std::uint64_t bits) noexcept {
  const auto begin = static_cast<std::uint16_t>(bits >> (64 - kLongestCode));
  std::uint16_t shorter =
      0;  // lengths that are less than the code's; a loop without a branch, of which vectors are made
  for (const std::uint16_t limit : codes.limits)
    shorter = static_cast<std::uint16_t>(shorter + (begin >= limit ? 1 : 0));
  if (shorter == kLongestCode) return {};
  const std::int32_t code = begin >> (kLongestCode - 1 - shorter);
  const std::uint8_t symbol = codes.symbols[(code + codes.offsets[shorter]) & 255];
  return {shorter + 1, symbol & 15, symbol >> 4};
}

// ----------------------------------------------------------------------------------------------------- DC tables

bool DcTable::takes(const Codes& codes) noexcept {
  return std::all_of(codes.symbols, codes.symbols + codes.size, [](std::uint8_t size) { return size < 16; });
}

void DcTable::build() noexcept {
  std::fill_n(entries, 1 << kDcBits, DcEntry{0, 0, 0});
  for_each_code(codes, kDcBits, [this](int length, std::uint32_t code, std::uint8_t size) {
    if (size > 0 && length == kDcBits) return;  // the sign is not among the bits
    const auto bits = static_cast<std::uint8_t>(length + size), shift = static_cast<std::uint8_t>(64 - bits);
    fill(entries + (code << (kDcBits - length)), 1 << (kDcBits - length),
         DcEntry{bits, shift, base_of(code, size, size > 0)}, DcEntry{bits, shift, base_of(code, size, false)});
  });
}

// ----------------------------------------------------------------------------------------------------- AC tables

void AcTable::build() noexcept {
  has_skipped = false;
  // Entries without a symbol write a 0 to a place that nothing has been written to.
  fill(entries, 1 << kAcBits, AcEntry{0, kNone, 0, 0, 0, 63, 0}, AcEntry{0, kNone, 0, 0, 0xFFFF, 63, 0});
  std::uint32_t lengths = 0;  // bit n: there is a symbol of n bits that another one may follow
  for_each_code(codes, kAcBits, [&](int length, std::uint32_t code, std::uint8_t symbol) {
    const int run = symbol >> 4, size = symbol & 15, all = length + size;
    if (all > kMostBits || (size > 0 && length == kAcBits)) return;
    const bool ends = is_end_of_block(run, size);
    AcEntry entry{};
    entry.bits = static_cast<std::uint8_t>(all);
    entry.shift = static_cast<std::uint8_t>(64 - all);
    entry.steps = static_cast<std::uint8_t>(ends ? kEnd : run + 1);
    entry.first = entry.second = static_cast<std::uint8_t>(ends ? 0 : run);
    entry.base = base_of(code, size, size > 0);
    AcEntry positive = entry;
    positive.base = base_of(code, size, false);
    fill(entries + (code << (kAcBits - length)), 1 << (kAcBits - length), entry, positive);
    if (!ends && all < kAcBits) lengths |= 1u << all;
  });
  add_second_symbols(lengths);
}

// Add what follows the first symbol of an entry, if it is among the entry's bits.
//
// lengths: bit n, if there is an entry of n bits that another symbol may follow.
void AcTable::add_second_symbols(std::uint32_t lengths) noexcept {
  // For each number of bits that are left behind a first symbol, and all values of them, what the entry is increased
  // by.
  std::uint64_t memory[1 << kAcBits];
  for (int left = 1; left < kAcBits; ++left) {
    if ((lengths >> (kAcBits - left) & 1) == 0) continue;
    for (std::uint32_t behind = 0; behind < 1u << left; ++behind) {
      const AcEntry& second = entries[behind << (kAcBits - left)];
      AcEntry more{};
      if (second.bits > 0 && second.bits <= left) {
        const auto value = static_cast<std::int8_t>((behind >> (left - second.bits)) + second.base);
        more.bits = second.bits;
        more.steps = second.steps;
        more.second = static_cast<std::uint8_t>(value != 0 ? second.first + 1 : 0);
        more.value = value;
      }
      std::memcpy(&memory[(1u << left) + behind], &more, sizeof(more));
    }
  }
  for_each_code(codes, kAcBits - 1, [&](int length, std::uint32_t code, std::uint8_t symbol) {
    const int size = symbol & 15, left = kAcBits - length - size;
    if (left < 1 || is_end_of_block(symbol >> 4, size)) return;
    AcEntry* at = entries + (code << (kAcBits - length));
    for (int i = 0; i < 1 << size; ++i, at += std::ptrdiff_t{1} << left) increase(at, memory + (1 << left), 1 << left);
  });
}

void AcTable::build_skipped() noexcept {
  has_skipped = true;
  // For each number of bits, and all values of them, the symbols in them.
  SkipEntry memory[1 << kSkipBits];
  SkipEntry* parts[kSkipBits + 1];
  for (int bits = 0; bits < kSkipBits; ++bits) parts[bits] = memory + (1 << bits);
  parts[kSkipBits] = skipped;
  parts[0][0] = 0;
  for (int bits = 1; bits <= kSkipBits; ++bits) fill_skipped(parts, bits);
  for (SkipEntry& entry : skipped) {
    if (entry == 0) entry = kNone << 8;
  }
}

// Fill the part of so many bits, by those of fewer.
void AcTable::fill_skipped(SkipEntry* const* parts, int all) noexcept {
  std::fill_n(parts[all], 1 << all, SkipEntry{0});
  for_each_code(codes, all, [&](int length, std::uint32_t code, std::uint8_t symbol) {
    const int run = symbol >> 4, size = symbol & 15, bits = length + size;
    if (bits > kMostBits) return;
    const bool ends = is_end_of_block(run, size);
    const auto entry = static_cast<SkipEntry>(bits | (ends ? kEnd : run + 1) << 8);
    SkipEntry* const to = parts[all] + (code << (all - length));
    if (ends || bits >= all) {
      std::fill_n(to, 1 << (all - length), entry);
      return;
    }
    const SkipEntry* const more = parts[all - bits];
    const int count = 1 << (all - bits);
    for (int i = 0; i < count; ++i) {
      const auto sum = static_cast<SkipEntry>(more[i] + entry);
      const bool fits = (sum & 0xFF) <= kMostBits && (sum & (kEnd - 1) << 8) < kCoefficients << 8;
      to[i] = fits ? sum : entry;
    }
    for (int done = count; done < count << size; done *= 2) std::copy_n(to, done, to + done);
  });
}

}  // namespace fastpipe::huffman
