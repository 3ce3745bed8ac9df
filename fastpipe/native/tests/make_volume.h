// Volumes for tests: an array, and what holds its chunks.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../patches.h"
#include "make_chunks.h"

namespace fastpipe::tests {

// Memory for units, of this process alone.
class OwnUnits {
 public:
  OwnUnits(std::int64_t keys, std::int64_t slots, std::int64_t nbytes)
      : shape_{keys, slots, (nbytes + 63) / 64 * 64},
        memory_(::mmap(nullptr, static_cast<std::size_t>(shape_.nbytes()), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
        units_(static_cast<std::uint8_t*>(memory_), -1, shape_) {}
  ~OwnUnits() { ::munmap(memory_, static_cast<std::size_t>(shape_.nbytes())); }
  OwnUnits(const OwnUnits&) = delete;
  OwnUnits& operator=(const OwnUnits&) = delete;
  UnitMemory* get() { return &units_; }

 private:
  UnitMemory::Shape shape_;
  void* memory_;
  UnitMemory units_;
};

// Sides with others of 1 in front.
inline Index sides(const std::vector<std::int64_t>& given) {
  Index index;
  index.fill(1);
  std::copy(given.begin(), given.end(), index.end() - static_cast<std::ptrdiff_t>(given.size()));
  return index;
}

inline std::int64_t product_of(const Index& index) {
  std::int64_t product = 1;
  for (const std::int64_t side : index) product *= side;
  return product;
}

// An array in C order.
struct Array {
  Index shape{};
  std::int64_t itemsize = 1;
  Content content;

  Array(const Index& shape_, std::int64_t itemsize_) : shape(shape_), itemsize(itemsize_) {
    content.resize(static_cast<std::size_t>(product_of(shape) * itemsize));
    for (std::size_t i = 0; i < content.size(); ++i) content[i] = static_cast<std::uint8_t>(i * 7 + i / 50);
  }
  std::uint8_t* at(const Index& place) {
    std::int64_t number = 0;
    for (int dim = 0; dim < kDims; ++dim) number = number * shape[dim] + place[dim];
    return content.data() + number * itemsize;
  }
};

// Whether a place is within; the next one in C order.
inline bool next_place(Index* place, const Index& counts) {
  for (int dim = kDims; dim-- > 0;) {
    if (++(*place)[dim] < counts[dim]) return true;
    (*place)[dim] = 0;
  }
  return false;
}

// A chunk of an array, beyond whose ends are zeros.
inline Content chunk_of(Array& array, const Grid& grid, const Index& chunk) {
  Content made(static_cast<std::size_t>(grid.elements() * array.itemsize));
  Index at{};
  std::size_t to = 0;
  do {
    Index place{};
    bool is_inside = true;
    for (int dim = 0; dim < kDims; ++dim) {
      place[dim] = chunk[dim] * grid.part[dim] + at[dim];
      is_inside = is_inside && place[dim] < array.shape[dim];
    }
    if (is_inside) std::memcpy(made.data() + to, array.at(place), static_cast<std::size_t>(array.itemsize));
    to += static_cast<std::size_t>(array.itemsize);
  } while (next_place(&at, grid.part));
  return made;
}

inline DataFile::State state_of(const std::string& path) {
  struct stat facts;
  if (::stat(path.c_str(), &facts) != 0) std::abort();
#ifdef __APPLE__
  const timespec time = facts.st_mtimespec;
#else
  const timespec time = facts.st_mtim;
#endif
  return {static_cast<std::uint64_t>(facts.st_dev), static_cast<std::uint64_t>(facts.st_ino), facts.st_size,
          std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec};
}

}  // namespace fastpipe::tests
