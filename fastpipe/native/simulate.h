// For benchmarks: decoding is replaced by waiting, so that n threads act like n cores that decode.
#pragma once

#include <cstdint>

namespace fastpipe {

// Wait for so long in the place of decoding; 0 decodes.
void simulate_decoding(std::int64_t nanoseconds) noexcept;

// Wait, where decoding is replaced; whether it is.
bool waited_in_place_of_decoding() noexcept;

}  // namespace fastpipe
