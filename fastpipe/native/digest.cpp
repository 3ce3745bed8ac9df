#include "digest.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace fastpipe {
namespace {

constexpr std::size_t kBlock = 128;
constexpr std::uint64_t kInitial[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};
constexpr std::uint8_t kOrder[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

using State = std::array<std::uint64_t, 8>;

std::uint64_t rotated(std::uint64_t word, int by) { return word >> by | word << (64 - by); }

std::uint64_t little(const std::uint8_t* bytes) {
  std::uint64_t word = 0;
  for (int i = 7; i >= 0; --i) word = word << 8 | bytes[i];
  return word;
}

void mix(std::uint64_t* v, int a, int b, int c, int d, std::uint64_t x, std::uint64_t y) {
  v[a] += v[b] + x;
  v[d] = rotated(v[d] ^ v[a], 32);
  v[c] += v[d];
  v[b] = rotated(v[b] ^ v[c], 24);
  v[a] += v[b] + y;
  v[d] = rotated(v[d] ^ v[a], 16);
  v[c] += v[d];
  v[b] = rotated(v[b] ^ v[c], 63);
}

// The compression function F of RFC 7693, 3.2; `end` is the number of bytes so far.
void compress(State& state, const std::uint8_t* block, std::uint64_t end, bool is_last) {
  std::uint64_t m[16], v[16];
  for (int i = 0; i < 16; ++i) m[i] = little(block + 8 * i);
  for (int i = 0; i < 8; ++i) {
    v[i] = state[static_cast<std::size_t>(i)];
    v[i + 8] = kInitial[i];
  }
  v[12] ^= end;
  if (is_last) v[14] = ~v[14];
  for (int round = 0; round < 12; ++round) {
    const std::uint8_t* s = kOrder[round % 10];
    mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
    mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
    mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
    mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
    mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
    mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
    mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
    mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
  }
  for (std::size_t i = 0; i < 8; ++i) state[i] ^= v[i] ^ v[i + 8];
}

}  // namespace

Digest blake2b(Bytes message, Bytes key) noexcept {
  constexpr std::uint64_t size = 16;
  State state;
  std::copy(std::begin(kInitial), std::end(kInitial), state.begin());
  state[0] ^= 0x01010000 ^ static_cast<std::uint64_t>(key.size) << 8 ^ size;
  std::uint64_t done = 0;
  if (key.size > 0) {
    std::uint8_t block[kBlock] = {};
    std::memcpy(block, key.data, std::min(key.size, std::size_t{64}));
    done = kBlock;
    compress(state, block, done, message.size == 0);
    if (message.size == 0) return {state[0], state[1]};
  }
  std::size_t at = 0;
  for (; message.size - at > kBlock; at += kBlock) compress(state, message.data + at, done += kBlock, false);
  std::uint8_t last[kBlock] = {};
  if (message.size > at) std::memcpy(last, message.data + at, message.size - at);
  compress(state, last, done + (message.size - at), true);
  return {state[0], state[1]};
}

}  // namespace fastpipe
