// BLAKE2b, by which kept things are found.
#pragma once

#include <cstdint>

#include "span.h"

namespace fastpipe {

// 16 bytes, as two numbers whose least significant byte comes first.
struct Digest {
  std::uint64_t low = 0, high = 0;
};

// The keyed BLAKE2b digest (RFC 7693) of 16 bytes: what hashlib.blake2b(message, digest_size=16, key=key) gives.
//
// key: at most 64 bytes.
Digest blake2b(Bytes message, Bytes key) noexcept;

}  // namespace fastpipe
