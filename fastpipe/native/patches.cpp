#include "patches.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <optional>

#include "clock.h"

namespace fastpipe {
namespace {

constexpr std::int64_t kMostUnits = std::int64_t{1} << 20;  // that a patch may touch

std::int64_t product(const Index& sizes) noexcept {
  std::int64_t found = 1;
  for (const std::int64_t size : sizes) found *= size;
  return found;
}

// A unit that a box touches.
struct Touched {
  std::int64_t group = 0;
  Index place{};
  std::int64_t number = 0;
};

// The units that a box touches, those that are read together side by side; null where they are too many.
Touched* touched_units(const Volume& volume, const BoxOut& box, Arena& arena, std::int64_t* count) noexcept {
  Index first{}, counts{};
  std::int64_t total = 1;
  for (int dim = 0; dim < kDims; ++dim) {
    const std::int64_t side = volume.units.part[dim];
    first[dim] = box.start[dim] / side;
    counts[dim] = (box.stop[dim] - 1) / side - first[dim] + 1;
    if (counts[dim] > kMostUnits / total) return nullptr;
    total *= counts[dim];
  }
  auto* found = arena.array<Touched>(static_cast<std::size_t>(total));
  if (found == nullptr) return nullptr;
  bool is_in_order = true;
  for (std::int64_t i = 0; i < total; ++i) {
    std::int64_t left = i;
    for (int dim = kDims; dim-- > 0;) {
      found[i].place[dim] = first[dim] + left % counts[dim];
      left /= counts[dim];
    }
    found[i].number = volume.units.number(found[i].place);
    found[i].group = volume.group(found[i].place);
    is_in_order = is_in_order && (i == 0 || found[i - 1].group <= found[i].group);
  }
  if (!is_in_order) {
    std::sort(found, found + total, [](const Touched& a, const Touched& b) {
      return a.group != b.group ? a.group < b.group : a.number < b.number;
    });
  }
  *count = total;
  return found;
}

// Where those of a group end that begin at `first`.
std::int64_t end_of_group(const Touched* touched, std::int64_t first, std::int64_t count) noexcept {
  std::int64_t end = first + 1;
  while (end < count && touched[end].group == touched[first].group) ++end;
  return end;
}

// Slots that are written; those that were not published are given back.
class Claims {
 public:
  Claims(UnitMemory& memory, UnitMemory::Claim* claims) : memory_(memory), claims_(claims) {}
  ~Claims() {
    for (std::int64_t i = 0; i < count_; ++i) memory_.abandon(claims_[i]);
  }
  Claims(const Claims&) = delete;
  Claims& operator=(const Claims&) = delete;

  void add(const UnitMemory::Claim& claim) { claims_[count_++] = claim; }
  std::int64_t size() const { return count_; }
  // Let others see them; whether all were this thread's all the time.
  bool publish() {
    bool were_mine = true;
    for (std::int64_t i = 0; i < count_; ++i) were_mine = memory_.publish(claims_[i], -1) && were_mine;
    count_ = 0;
    return were_mine;
  }

 private:
  UnitMemory& memory_;
  UnitMemory::Claim* claims_;
  std::int64_t count_ = 0;
};

template <typename Word>
bool has_nan(const std::uint8_t* data, std::int64_t words, Word largest) noexcept {
  constexpr Word magnitude = static_cast<Word>(static_cast<Word>(~Word{0}) >> 1);
  bool found = false;
  for (std::int64_t i = 0; i < words; ++i) {
    Word word;
    std::memcpy(&word, data + i * static_cast<std::int64_t>(sizeof word), sizeof word);
    found |= static_cast<Word>(word & magnitude) > largest;
  }
  return found;
}

// Return whether some of the floats of so many bytes each are no numbers.
bool has_nan(const std::uint8_t* data, std::int64_t nbytes, std::int32_t word) noexcept {
  switch (word) {
    case 2:
      return has_nan<std::uint16_t>(data, nbytes / 2, 0x7C00);
    case 4:
      return has_nan<std::uint32_t>(data, nbytes / 4, 0x7F800000);
    case 8:
      return has_nan<std::uint64_t>(data, nbytes / 8, 0x7FF0000000000000);
    default:
      return false;
  }
}

// Do what is asked for about elements that are no number; false where Python has to.
bool settle_nan(const PatchKind& kind, std::uint8_t* data) noexcept {
  const std::int64_t nbytes = kind.nbytes(), step = std::int64_t{1} << 12;
  for (std::int64_t at = 0; at < nbytes; at += step) {
    const std::int64_t end = std::min(nbytes, at + step);
    if (!has_nan(data + at, end - at, kind.word)) continue;
    if (kind.nan == PatchKind::Nan::decline) return false;
    for (std::int64_t element = at; element < end; element += kind.itemsize) {
      if (has_nan(data + element, kind.itemsize, kind.word)) {
        std::memcpy(data + element, kind.number, static_cast<std::size_t>(kind.itemsize));
      }
    }
  }
  return true;
}

// A patch along one dimension: which parts of the volume it needs, and which element of these each of its own is.
struct Along {
  std::int64_t runs = 0;
  Range run[2];                    // of the volume, in ascending order
  std::int64_t begin[2] = {0, 0};  // where each begins among all that are needed
  std::int64_t needed = 0;
  std::int64_t* taken = nullptr;  // (size): -1 for the constant
};

bool look_along(std::int64_t start, std::int64_t size, std::int64_t length, Padding padding, Arena& arena,
                Along* along) noexcept {
  along->taken = arena.array<std::int64_t>(static_cast<std::size_t>(size));
  if (along->taken == nullptr) return false;
  // Each mode goes through the elements forth or back one by one, so that what is needed is one range; or, where it
  // jumps from an end to the other, the parts at both ends.
  std::int64_t low = length, high = -1, left_high = -1, right_low = length, before = -1;
  bool has_jumped = false;
  for (std::int64_t i = 0; i < size; ++i) {
    const std::int64_t at = padded_index(start + i, length, padding);
    along->taken[i] = at;
    if (at < 0) continue;
    low = std::min(low, at);
    high = std::max(high, at);
    if (before >= 0 && at < before - 1) has_jumped = true;
    if (has_jumped) {
      left_high = std::max(left_high, at);
    } else {
      right_low = std::min(right_low, at);
    }
    before = at;
  }
  if (high < 0) return false;  // there must be something to pad
  if (has_jumped && left_high + 1 < right_low) {
    along->runs = 2;
    along->run[0] = {low, left_high + 1};
    along->run[1] = {right_low, high + 1};
  } else {
    along->runs = 1;
    along->run[0] = {low, high + 1};
  }
  for (std::int64_t run = 0; run < along->runs; ++run) {
    along->begin[run] = along->needed;
    along->needed += along->run[run].end - along->run[run].begin;
  }
  for (std::int64_t i = 0; i < size; ++i) {
    std::int64_t& at = along->taken[i];
    if (at < 0) continue;
    const int run = along->runs == 2 && at >= along->run[1].begin ? 1 : 0;
    at += along->begin[run] - along->run[run].begin;
  }
  return true;
}

// Put elements where they belong: from a box, by what is taken of it along each dimension.
//
// beyond: a row of constants.
void take_elements(const std::uint8_t* box, const Index& box_sizes, const Along* along, const PatchKind& kind,
                   const std::uint8_t* beyond, std::uint8_t* out) noexcept {
  const std::int64_t itemsize = kind.itemsize, columns = kind.size[4];
  const std::int64_t rows = product(kind.size) / columns;
  const std::int64_t* taken = along[4].taken;
  for (std::int64_t row = 0; row < rows; ++row, out += columns * itemsize) {
    std::int64_t left = row, source = 0, step = box_sizes[4];
    bool is_beyond = false;
    for (int dim = 4; dim-- > 0;) {
      const std::int64_t at = along[dim].taken[left % kind.size[dim]];
      left /= kind.size[dim];
      is_beyond |= at < 0;
      source += at * step;
      step *= box_sizes[dim];
    }
    if (is_beyond) {
      std::memcpy(out, beyond, static_cast<std::size_t>(columns * itemsize));
      continue;
    }
    for (std::int64_t column = 0, end = 0; column < columns; column = end) {
      const bool is_there = taken[column] >= 0;
      end = column + 1;
      while (end < columns && taken[end] == (is_there ? taken[end - 1] + 1 : -1)) ++end;
      std::memcpy(out + column * itemsize, is_there ? box + (source + taken[column]) * itemsize : beyond,
                  static_cast<std::size_t>((end - column) * itemsize));
    }
  }
}

}  // namespace

void copy_from_unit(const std::uint8_t* unit, const Index& place, const Grid& units, std::int64_t itemsize,
                    const BoxOut& box) noexcept {
  // What the box takes of this unit, in the unit's own coordinates, and where that goes.
  const Index steps = steps_in_c_order(units.part, itemsize);
  Index sizes{};
  std::uint8_t* to = box.to;
  for (int dim = 0; dim < kDims; ++dim) {
    const std::int64_t corner = place[dim] * units.part[dim];
    const std::int64_t low = std::max(box.start[dim] - corner, std::int64_t{0});
    sizes[dim] = std::min(box.stop[dim] - corner, units.part[dim]) - low;
    if (sizes[dim] <= 0) return;
    unit += low * steps[dim];
    to += (corner + low - box.start[dim]) * box.steps[dim];
  }
  copy_elements(unit, steps, to, box.steps, sizes, itemsize);
}

std::int64_t padded_index(std::int64_t at, std::int64_t length, Padding padding) noexcept {
  if (at >= 0 && at < length) return at;
  if (padding == Padding::error || padding == Padding::constant) return -1;
  if (padding == Padding::edge || length == 1) return at < 0 ? 0 : length - 1;
  const std::int64_t period = padding == Padding::wrap      ? length
                              : padding == Padding::reflect ? 2 * length - 2
                                                            : 2 * length;
  at %= period;
  if (at < 0) at += period;
  if (at < length) return at;
  return padding == Padding::reflect ? period - at : period - 1 - at;
}

bool PatchKind::is_valid() const noexcept {
  std::int64_t total = itemsize;
  if (itemsize < 1 || itemsize > 16 || dims < 1 || dims > kDims) return false;
  for (const std::int64_t side : size) {
    if (side < 1 || side > (std::int64_t{1} << 60) / total) return false;
    total *= side;
  }
  const bool is_float = word == 2 || word == 4 || word == 8;
  return nan == Nan::keep || (is_float && (itemsize == word || itemsize == 2 * word));
}

std::int64_t PatchKind::nbytes() const noexcept { return product(size) * itemsize; }

bool PatchBatch::prepare() noexcept {
  made_.reset(new (std::nothrow) Patch[static_cast<std::size_t>(patches)]);
  if (made_ == nullptr) return false;
  for (const Item& item : items) made_[static_cast<std::size_t>(item.patch)].left.fetch_add(1);
  for (std::int64_t patch = 0; patch < patches; ++patch) {
    if (made_[static_cast<std::size_t>(patch)].left.load() == 0) statuses[rows[patch]] = Status::made();
  }
  return true;
}

void PatchBatch::finish(std::int64_t item, const Status& status) noexcept {
  // Files are closed when whoever described the volume lets go of it, and not when a thread forgets the batch.
  items[static_cast<std::size_t>(item)].volume.reset();
  const std::int64_t number = items[static_cast<std::size_t>(item)].patch;
  Patch& patch = made_[static_cast<std::size_t>(number)];
  if (!status.is_made()) {
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, &status, sizeof status);
    patch.declined.store(bytes);
  }
  if (patch.left.fetch_sub(1) == 1) {
    const std::uint64_t bytes = patch.declined.load();
    Status found = Status::made();
    if (bytes != 0) std::memcpy(static_cast<void*>(&found), &bytes, sizeof found);
    statuses[rows[number]] = found;
  }
  done_.fetch_add(1);
}

void PatchBatch::run(std::int64_t item, Scratch& scratch) {
  finish(item, make(items[static_cast<std::size_t>(item)], scratch));
}

void PatchBatch::lost(std::int64_t item) noexcept { finish(item, Status::declined(Reason::internal)); }

Status PatchBatch::make(const Item& item, Scratch& scratch) {
  const Volume* volume = item.volume.get();
  const std::int64_t patch = item.patch;
  const PatchKind& kind = kinds[item.kind].kind;
  std::uint8_t* out = kinds[item.kind].memory + rows[patch] * kind.nbytes();
  BoxOut box;
  bool is_inside = true;
  for (int dim = 0; dim < kDims; ++dim) {
    const int place = dim - (kDims - kind.dims);
    box.start[dim] = place < 0 ? 0 : starts[patch * kind.dims + place];
    if (box.start[dim] > INT64_MAX / 4 || box.start[dim] < INT64_MIN / 4) return Status::declined(Reason::asked);
    box.stop[dim] = box.start[dim] + kind.size[dim];
    is_inside = is_inside && box.start[dim] >= 0 && box.stop[dim] <= volume->units.shape[dim];
  }
  const VolumeSource& source = volume->source;
  std::optional<DataFile::Opened> file;
  if (source.file != nullptr) file.emplace(*source.file);
  const int descriptor = file.has_value() ? file->descriptor() : -1;
  const bool is_there = (!file.has_value() || descriptor >= 0) && (!source.copied || source.copied->is_as_it_was());
  if (!is_there) return Status::declined(Reason::unreadable, errno);
  if (is_inside) {
    box.to = out;
    box.steps = steps_in_c_order(kind.size, kind.itemsize);
    if (!read_box(*volume, descriptor, box, scratch)) return Status::declined(Reason::damaged);
  } else {
    if (kind.padding == Padding::error) return Status::declined(Reason::asked);
    Along along[kDims];
    Index sizes{};
    std::int64_t boxes = 1;
    for (int dim = 0; dim < kDims; ++dim) {
      if (!look_along(box.start[dim], kind.size[dim], volume->units.shape[dim], kind.padding, scratch.arena,
                      &along[dim])) {
        return Status::declined(Reason::asked);
      }
      sizes[dim] = along[dim].needed;
      boxes *= along[dim].runs;
    }
    auto* whole = scratch.arena.array<std::uint8_t>(static_cast<std::size_t>(product(sizes) * kind.itemsize));
    auto* beyond = scratch.arena.array<std::uint8_t>(static_cast<std::size_t>(kind.size[4] * kind.itemsize));
    if (whole == nullptr || beyond == nullptr) return Status::declined(Reason::no_memory);
    for (std::int64_t i = 0; i < kind.size[4]; ++i) {
      std::memcpy(beyond + i * kind.itemsize, kind.constant, static_cast<std::size_t>(kind.itemsize));
    }
    for (std::int64_t number = 0; number < boxes; ++number) {
      BoxOut some;
      some.steps = steps_in_c_order(sizes, kind.itemsize);
      some.to = whole;
      std::int64_t left = number;
      for (int dim = 0; dim < kDims; ++dim) {
        const std::int64_t run = left % along[dim].runs;
        left /= along[dim].runs;
        some.start[dim] = along[dim].run[run].begin;
        some.stop[dim] = along[dim].run[run].end;
        some.to += along[dim].begin[run] * some.steps[dim];
      }
      if (!read_box(*volume, descriptor, some, scratch)) return Status::declined(Reason::damaged);
    }
    Watch watch;
    take_elements(whole, sizes, along, kind, beyond, out);
    watch.add_to(totals.copy);
  }
  if (kind.nan != PatchKind::Nan::keep && !settle_nan(kind, out)) return Status::declined(Reason::damaged);
  return Status::made();
}

bool PatchBatch::read_box(const Volume& volume, int descriptor, const BoxOut& box, Scratch& scratch) {
  Index sizes{};
  for (int dim = 0; dim < kDims; ++dim) sizes[dim] = box.stop[dim] - box.start[dim];
  if (volume.source.kind == VolumeSource::Kind::memory) {
    Watch watch;
    const std::uint8_t* from = volume.source.data;
    for (int dim = 0; dim < kDims; ++dim) from += box.start[dim] * volume.source.steps[dim];
    copy_elements(from, volume.source.steps, box.to, box.steps, sizes, volume.itemsize);
    if (volume.source.swapped != 0) {
      const std::int64_t rows = product(sizes) / sizes[4];
      for (std::int64_t row = 0; row < rows; ++row) {
        std::int64_t left = row;
        std::uint8_t* to = box.to;
        for (int dim = 4; dim-- > 0;) {
          to += left % sizes[dim] * box.steps[dim];
          left /= sizes[dim];
        }
        swap_bytes(to, sizes[4] * volume.itemsize, volume.source.swapped);
      }
    }
    watch.add_to(totals.copy);
  } else if (volume.memory != nullptr) {
    if (!read_remembered(volume, descriptor, box, scratch)) return false;
  } else {
    std::int64_t count = 0, room = 0;
    const Touched* touched = touched_units(volume, box, scratch.arena, &count);
    if (touched == nullptr) return false;
    const std::int64_t step = (volume.unit_nbytes() + 63) / 64 * 64;
    std::uint8_t* memory = nullptr;
    for (std::int64_t first = 0, end = 0; first < count; first = end) {
      end = end_of_group(touched, first, count);
      auto* units = scratch.arena.array<UnitOut>(static_cast<std::size_t>(end - first));
      if (end - first > room) {
        memory = scratch.arena.array<std::uint8_t>(static_cast<std::size_t>((end - first) * step));
        room = end - first;
      }
      if (units == nullptr || memory == nullptr) return false;
      for (std::int64_t i = first; i < end; ++i) units[i - first] = {touched[i].place, memory + (i - first) * step};
      Watch watch;
      if (!read_units(volume, descriptor, units, end - first, scratch)) return false;
      watch.add_to(totals.decode);
      totals.decoded.fetch_add((end - first) * volume.unit_nbytes(), std::memory_order_relaxed);
      for (std::int64_t i = first; i < end; ++i) {
        copy_from_unit(units[i - first].out, touched[i].place, volume.units, volume.itemsize, box);
      }
      watch.add_to(totals.copy);
    }
  }
  totals.copied.fetch_add(product(sizes) * volume.itemsize, std::memory_order_relaxed);
  return true;
}

// Copy from units that are remembered, decode those that nobody decodes, and wait for others only when there is nothing
// else to do.
bool PatchBatch::read_remembered(const Volume& volume, int descriptor, const BoxOut& box, Scratch& scratch) {
  UnitMemory& memory = *volume.memory;
  std::int64_t left = 0;
  Touched* touched = touched_units(volume, box, scratch.arena, &left);
  if (touched == nullptr) return false;
  const std::int64_t count = left;
  auto* keys = scratch.arena.array<std::int64_t>(static_cast<std::size_t>(count));
  auto* claimed = scratch.arena.array<UnitMemory::Claim>(static_cast<std::size_t>(count));
  auto* units = scratch.arena.array<UnitOut>(static_cast<std::size_t>(count));
  if (keys == nullptr || claimed == nullptr || units == nullptr) return false;
  for (std::int64_t i = 0; i < count; ++i) keys[i] = volume.first_key + touched[i].number;
  std::uint8_t* alone = nullptr;
  const auto copy = [&](const std::uint8_t* unit, const Index& place) {
    Watch watch;
    copy_from_unit(unit, place, volume.units, volume.itemsize, box);
    watch.add_to(totals.copy);
  };
  const auto decode = [&](std::int64_t many) {
    Watch watch;
    if (!read_units(volume, descriptor, units, many, scratch)) return false;
    watch.add_to(totals.decode);
    totals.decoded.fetch_add(many * volume.unit_nbytes(), std::memory_order_relaxed);
    return true;
  };
  int waits = 0;
  while (left > 0) {
    std::int64_t still = 0;  // units that are left after this round
    for (std::int64_t first = 0, end = 0; first < left; first = end) {
      end = end_of_group(touched, first, left);
      Claims claims(memory, claimed);
      for (std::int64_t i = first; i < end; ++i) {
        const Touched unit = touched[i];
        const std::int64_t key = volume.first_key + unit.number;
        if (const UnitMemory::Found found = memory.find(key)) {
          copy(found.data, unit.place);
          if (memory.release(found)) continue;
        } else if (const UnitMemory::Claim claim = memory.claim(key)) {
          units[claims.size()] = {unit.place, claim.data};
          claims.add(claim);
          continue;
        }
        touched[still++] = unit;
      }
      if (claims.size() == 0) continue;
      const std::int64_t many = claims.size();
      if (!decode(many)) return false;
      for (std::int64_t i = 0; i < many; ++i) copy(units[i].out, units[i].place);
      if (!claims.publish()) return false;  // another process may have written there, too: Python reads the patch
    }
    if (still < left) {
      left = still;
      waits = 0;
      continue;
    }
    // Somebody else is decoding all that is left, has just done so, or there is no room.
    const std::int64_t key = volume.first_key + touched[0].number;
    if (memory.is_there(key)) continue;
    if (memory.is_coming(key) && waits < UnitMemory::kMostWaits) {
      ++waits;
      memory.wait(key);
      continue;
    }
    waits = 0;
    if (alone == nullptr) {
      alone = scratch.arena.array<std::uint8_t>(static_cast<std::size_t>(volume.unit_nbytes()));
      if (alone == nullptr) return false;
    }
    units[0] = {touched[0].place, alone};
    if (!decode(1)) return false;
    copy(alone, touched[0].place);
    touched[0] = touched[--left];
    std::sort(touched, touched + left, [](const Touched& a, const Touched& b) { return a.group < b.group; });
  }
  for (std::int64_t i = 0; i < count; ++i) memory.used(keys[i], 1);
  return true;
}

}  // namespace fastpipe
