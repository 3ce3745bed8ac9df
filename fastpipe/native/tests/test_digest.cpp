// BLAKE2b against Python's hashlib.
#include <memory>

#include "../digest.h"
#include "check.h"

using namespace fastpipe;

namespace {

// hashlib.blake2b(bytes((7 * i + 1) % 256 for i in range(message)), digest_size=16,
//                 key=bytes((5 * i + 3) % 256 for i in range(key))).digest()
constexpr struct {
  std::size_t message, key;
  std::uint64_t low, high;
} kKnown[] = {
    // clang-format off
    {0, 0, 0x40bdefd94169e6ca, 0x7076a68e75884d4e},
    {1, 0, 0xadf6438d9b6f9e4a, 0xe2de2919298c8f00},
    {40, 0, 0xfd51e0ede8ff3958, 0x5bcca71fd4aeb6dd},
    {127, 0, 0xacaf047847d06e4a, 0x140c7facab0951b3},
    {128, 0, 0xa64b9f0546759810, 0xa233ee3a93f414e1},
    {129, 0, 0x7998f2306615bd25, 0x8c62e4848ad29239},
    {256, 0, 0x98c885db670d48b9, 0x191eada4bbc14fe3},
    {1000, 0, 0xcd23ff71f76d5381, 0x4abb7530c5a99db8},
    {0, 1, 0x30188017da402529, 0x44f7dcee2a485b78},
    {1, 1, 0x2f7bdcfeea6cddef, 0x889db50cdba60706},
    {40, 1, 0x1e3ef316b9809966, 0xf99c2a87bc7d21ba},
    {127, 1, 0x15f6faaaab22cb87, 0x5352274a41056d8e},
    {128, 1, 0xb4b8a1ec3944bc4d, 0xc139c96446e867b0},
    {129, 1, 0x04a34e2bbc1f8e28, 0xd23234dca7e9b311},
    {256, 1, 0x3266b5580e7d8bc9, 0xbb1ba38fb7cfdca5},
    {1000, 1, 0x0280185584ba7657, 0xe0e230d72f023e7b},
    {0, 32, 0x3fcbf19771b66a49, 0xe73388a607164e46},
    {1, 32, 0x88ac2c3efc0ead65, 0x77e15b2cdae609ab},
    {40, 32, 0x15eb58d443b1dc28, 0x302a6b70ef7563c9},
    {127, 32, 0x401e29f82be13d78, 0xc027103b01281bdf},
    {128, 32, 0x7a208442dabcfa94, 0x29a4b06a42446413},
    {129, 32, 0xc55d7228eec22b32, 0xfedfc6662286a724},
    {256, 32, 0x883491579598b61b, 0x42d0962e9af15158},
    {1000, 32, 0x9d93775caaf593a5, 0xcb0824e055c2f873},
    {0, 64, 0xd488db9653a3fdd1, 0xc5213c538de1c02f},
    {1, 64, 0x722c028f9c45399a, 0xc2cb21b7ce1209a6},
    {40, 64, 0x32d41a88db3ade13, 0x604433f4b9d9204d},
    {127, 64, 0xb2e180e604f8a10d, 0x73837db86134751f},
    {128, 64, 0xba83e49d22cf75f5, 0x470db90ae3cd2dc2},
    {129, 64, 0x58860f492856af3a, 0x161b63f578c83a4b},
    {256, 64, 0x346c254d6a0317f0, 0xe1183c287d49ac4b},
    {1000, 64, 0x0260af8b463b54fa, 0x3af423ce23fa0394},
    // clang-format on
};

// Memory of exactly that size, in which a sanitizer sees a read past the end.
std::unique_ptr<std::uint8_t[]> counting(std::size_t size, int factor, int first) {
  std::unique_ptr<std::uint8_t[]> bytes(new std::uint8_t[size]);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(factor * static_cast<int>(i) + first);
  return bytes;
}

}  // namespace

TEST("blake2b: as hashlib's, for messages and keys of many lengths") {
  for (const auto& known : kKnown) {
    const auto message = counting(known.message, 7, 1), key = counting(known.key, 5, 3);
    const Digest digest = blake2b({message.get(), known.message}, {key.get(), known.key});
    CHECK(digest.low == known.low && digest.high == known.high);
  }
}

TEST("blake2b: no memory at all is an empty message, and an empty key") {
  const Digest digest = blake2b({}, {});
  CHECK(digest.low == kKnown[0].low && digest.high == kKnown[0].high);
}
