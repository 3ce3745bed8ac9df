// Random numbers of tests, the same in each run.
#pragma once

#include <cstdint>

namespace fastpipe::tests {

inline std::uint64_t random_state = 88172645463325252u;

inline std::uint32_t random_number() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<std::uint32_t>(random_state >> 32);
}

inline std::int64_t between(std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(random_number() % static_cast<std::uint32_t>(high - low + 1));
}

inline double uniform(double low, double high) { return low + (high - low) * random_number() / 4294967296.0; }

}  // namespace fastpipe::tests
