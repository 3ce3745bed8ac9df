// Every codec and filter undone: of odd sizes and elements, in parts, and of damaged bytes.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "../codecs.h"
#include "check.h"
#include "make_chunks.h"

namespace {

using namespace fastpipe;
using namespace fastpipe::tests;

std::uint32_t random_state = 2463534242u;
std::uint32_t random_number() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  random_state ^= random_state << 5;
  return random_state;
}

// Bytes that compress somewhat: numbers that change slowly, runs, repetitions and noise.
Content some_content(std::size_t size) {
  Content made(size);
  const std::uint32_t kind = random_number() % 4;
  std::uint32_t value = random_number();
  for (std::size_t i = 0; i < size; ++i) {
    if (kind == 0) made[i] = static_cast<std::uint8_t>(i % 4 == 3 ? 66 : i % 4 == 2 ? i / 64 : random_number() >> 9);
    if (kind == 1) made[i] = static_cast<std::uint8_t>(value += random_number() % 40 == 0);
    if (kind == 2)
      made[i] = i < 40 || random_number() % 50 == 0 ? static_cast<std::uint8_t>(random_number()) : made[i - 13];
    if (kind == 3) made[i] = static_cast<std::uint8_t>(random_number() >> 11);
  }
  return made;
}

constexpr std::uint8_t kUntouched = 0xA5;

// Memory with a margin on both sides that must stay as it is.
class Guarded {
 public:
  explicit Guarded(std::size_t size) : size_(size), memory_(size + 2 * kMargin, kUntouched) {}
  std::uint8_t* data() { return memory_.data() + kMargin; }
  Content content() const { return slice(memory_, kMargin, kMargin + size_); }
  bool is_intact() const {
    const auto is_untouched = [](std::uint8_t byte) { return byte == kUntouched; };
    const auto begin = memory_.begin(), end = memory_.end();
    return std::all_of(begin, begin + kMargin, is_untouched) && std::all_of(end - kMargin, end, is_untouched);
  }

 private:
  static constexpr std::ptrdiff_t kMargin = 80;
  std::size_t size_;
  Content memory_;
};

// Stored bytes at the end of memory of their own, behind which a sanitizer sees every access.
class Exact {
 public:
  explicit Exact(const Content& content) : memory_(new std::uint8_t[content.size()]), size_(content.size()) {
    std::copy(content.begin(), content.end(), memory_.get());
  }
  operator Bytes() const { return {memory_.get(), size_}; }

 private:
  std::unique_ptr<std::uint8_t[]> memory_;
  std::size_t size_;
};

struct Thread {
  Arena arena;
  CodecStates states;
};

// Check that a codec's stored bytes decode to the content and to nothing else, and that no damage reaches beyond the
// memory.
template <typename Decode>
void check_codec(const Content& content, const Content& stored, Decode decode) {
  const auto decoded = [&](const Content& from, std::size_t size, Content* made) {
    Guarded out(size);
    const Exact exact(from);
    const Problem problem = decode(exact, out.data(), size);
    CHECK(out.is_intact());
    if (made != nullptr) *made = out.content();
    return problem;
  };
  Content made;
  CHECK(decoded(stored, content.size(), &made) == Problem::none);
  CHECK(made == content);
  CHECK(decoded(stored, content.size() + 1, nullptr) != Problem::none);
  if (!content.empty()) CHECK(decoded(stored, content.size() - 1, nullptr) != Problem::none);
  for (std::size_t size = 0; size < stored.size(); ++size) {
    // Literals alone, cut off between two runs, are less than is expected.
    CHECK(decoded(slice(stored, 0, size), content.size(), nullptr) != Problem::none || content.empty());
  }
  for (int i = 0; i < 200 && !stored.empty(); ++i) {
    Content damaged = stored;
    for (std::uint32_t k = random_number() % 4 + 1; k > 0; --k) {
      damaged[random_number() % damaged.size()] = static_cast<std::uint8_t>(random_number());
    }
    Content first, second;
    const Problem problem = decoded(damaged, content.size(), &first);
    CHECK(decoded(damaged, content.size(), &second) == problem && first == second);
  }
}

constexpr std::size_t kSizes[] = {0, 1, 2, 7, 16, 17, 63, 200, 1000, 3001};

}  // namespace

TEST("codecs: streams and blocks") {
  Thread thread;
  for (std::size_t size : kSizes) {
    const Content content = some_content(size);
    check_codec(content, zlib_of(content), [&](Bytes stored, std::uint8_t* out, std::size_t n) {
      return inflate_zlib(stored, out, n, thread.states);
    });
    check_codec(content, gzip_of(content), [&](Bytes stored, std::uint8_t* out, std::size_t n) {
      return inflate_gzip(stored, out, n, thread.states);
    });
    check_codec(content, zstd_of(content), [&](Bytes stored, std::uint8_t* out, std::size_t n) {
      return decompress_zstd(stored, out, n, thread.states);
    });
    check_codec(content, lz4_of(content),
                [&](Bytes stored, std::uint8_t* out, std::size_t n) { return decompress_lz4(stored, out, n); });
    check_codec(content, lzf_of(content),
                [&](Bytes stored, std::uint8_t* out, std::size_t n) { return decompress_lzf(stored, out, n); });
  }
}

TEST("codecs: members of gzip") {
  Thread thread;
  const Content one = some_content(300), two = some_content(0), three = some_content(5000);
  Content content = one, stored = gzip_of(one);
  append(&content, three);
  append(&stored, gzip_of(two));
  append(&stored, gzip_of(three));
  Guarded out(content.size());
  CHECK(inflate_gzip(bytes_of(stored), out.data(), content.size(), thread.states) == Problem::none);
  CHECK(out.content() == content && out.is_intact());
  stored.push_back(0);  // with which members are filled up
  append(&stored, gzip_of(two));
  CHECK(inflate_gzip(bytes_of(stored), out.data(), content.size(), thread.states) == Problem::none);
  stored.push_back(1);  // is no member
  CHECK(inflate_gzip(bytes_of(stored), out.data(), content.size(), thread.states) == Problem::damaged);
}

TEST("codecs: matches at every distance") {
  for (std::size_t back = 1; back < 80; ++back) {
    for (std::size_t length : {3u, 8u, 9u, 15u, 16u, 17u, 40u, 264u}) {
      for (std::size_t behind : {0u, 1u, 15u, 16u, 40u}) {
        Content content = some_content(back), stored;
        Content literals = content;
        append_literals(&stored, &literals);
        for (std::size_t k = 0; k < length; ++k) content.push_back(content[content.size() - back]);
        const std::size_t code = length - 2;
        stored.push_back(static_cast<std::uint8_t>(std::min<std::size_t>(code, 7) << 5));
        if (code >= 7) stored.push_back(static_cast<std::uint8_t>(code - 7));
        stored.push_back(static_cast<std::uint8_t>(back - 1));
        literals = some_content(behind);
        append(&content, literals);
        append_literals(&stored, &literals);
        Guarded out(content.size());
        CHECK(decompress_lzf(Exact(stored), out.data(), content.size()) == Problem::none);
        CHECK(out.content() == content && out.is_intact());
      }
    }
  }
}

TEST("codecs: checksums") {
  for (std::size_t size : {0u, 1u, 2u, 3u, 8u, 9u, 721u, 40000u}) {
    const Content content = some_content(size);
    CHECK(fletcher32(Exact(content)) == fletcher32_of(content));
  }
  for (std::uint8_t value : {0, 255}) {  // where sums are a multiple of 65535
    for (std::size_t size : {2u, 720u, 5000000u}) {
      const Content content(size, value);
      CHECK(fletcher32(bytes_of(content)) == fletcher32_of(content));
    }
  }
}

TEST("codecs: unshuffled parts") {
  for (std::int32_t element = 1; element <= 17; ++element) {
    for (std::size_t size : {0u, 1u, 5u, 33u, 100u, 257u, 1100u}) {
      const Content content = some_content(size), stored = shuffled(content, static_cast<std::size_t>(element));
      const auto count = static_cast<std::int64_t>(size);
      for (int i = 0; i < 60; ++i) {
        Range wanted = {0, count};
        if (i > 0 && size > 0) {
          wanted.begin = static_cast<std::int64_t>(random_number() % size);
          wanted.end = wanted.begin +
                       static_cast<std::int64_t>(random_number() % (size - static_cast<std::size_t>(wanted.begin) + 1));
        }
        Guarded out(size);
        const Exact exact(stored);
        unshuffle(Bytes(exact).data, count, element, wanted, out.data());
        Content expected(size, kUntouched);
        std::copy(content.begin() + wanted.begin, content.begin() + wanted.end, expected.begin() + wanted.begin);
        CHECK(out.content() == expected && out.is_intact());
      }
    }
  }
}

namespace {

void check_blosc(const Content& content, const BloscOptions& options) {
  Thread thread;
  const Content stored = blosc_of(content, options);
  const auto size = static_cast<std::int64_t>(content.size());
  const Exact exact(stored);
  Guarded whole(content.size());
  CHECK(decode_blosc(exact, whole.data(), size, thread.arena, thread.states) == Problem::none);
  CHECK(whole.content() == content && whole.is_intact());

  BloscHeader header;
  const auto nbytes = static_cast<std::int64_t>(stored.size());
  CHECK(read_blosc_header(exact, size, nbytes, &header) == Problem::none);
  for (std::int64_t first = 0; first < header.blocks; ++first) {
    for (std::int64_t last = first; last <= header.blocks; ++last) {
      // Of other blocks' bytes nothing is needed.
      std::vector<Range> bounds(static_cast<std::size_t>(last - first));
      CHECK(locate_blosc_blocks(header, stored.data() + BloscHeader::kBytes, {first, last}, bounds.data(),
                                thread.arena) == Problem::none);
      Content alone(stored.size(), 0xff);
      const auto table = static_cast<std::ptrdiff_t>(16 + (options.is_copied ? 0 : 4 * header.blocks));
      std::copy(stored.begin(), stored.begin() + table, alone.begin());
      for (const Range& part : bounds) {
        CHECK(part.begin >= table && part.begin <= part.end && part.end <= nbytes);
        std::copy(stored.begin() + part.begin, stored.begin() + part.end, alone.begin() + part.begin);
      }
      const std::int64_t begin = first * header.block, end = std::min(last * header.block, size);
      Guarded out(static_cast<std::size_t>(end - begin));
      CHECK(decode_blosc_blocks(header, alone.data(), {first, last}, out.data(), thread.arena, thread.states) ==
            Problem::none);
      CHECK(out.content() == slice(content, static_cast<std::size_t>(begin), static_cast<std::size_t>(end)));
      CHECK(out.is_intact());
    }
  }
}

}  // namespace

TEST("blosc: buffers and their blocks") {
  for (int codec : {0, 1, 3, 4}) {
    for (int shuffle = 0; shuffle < 3; ++shuffle) {
      for (std::size_t element : {1u, 2u, 3u, 4u, 8u, 12u, 16u, 17u}) {
        BloscOptions options;
        options.codec = codec;
        options.shuffle = shuffle;
        options.element = element;
        options.is_split = random_number() % 3 != 0;
        options.is_reversed = random_number() % 2 == 0;
        options.block = element * (random_number() % 2 == 0 ? 128 : 56);
        check_blosc(some_content(3 * options.block + element * 5 + 3), options);
        options.block += 1;  // no whole number of elements
        options.is_split = false;
        check_blosc(some_content(2 * options.block + 8 * element), options);
      }
    }
  }
  BloscOptions copied;
  copied.is_copied = true;
  copied.element = 4;
  copied.block = 64;
  check_blosc(some_content(333), copied);
  BloscOptions far;  // matches beyond 13 bits
  far.codec = 0;
  far.block = 20000;
  far.is_split = false;
  Content noise(9000);
  for (std::uint8_t& byte : noise) byte = static_cast<std::uint8_t>(random_number() >> 7);
  Content twice = noise;
  append(&twice, noise);
  append(&twice, Content(2000, 9));
  check_blosc(twice, far);
}

TEST("blosc: headers that do not fit") {
  Thread thread;
  BloscOptions options;
  options.element = 2;
  options.block = 256;
  const Content content = some_content(700), stored = blosc_of(content, options);
  const auto problem_with = [&](std::size_t at, std::uint8_t value) {
    Content changed = stored;
    changed[at] = value;
    Guarded out(content.size());
    const Problem problem = decode_blosc(Exact(changed), out.data(), 700, thread.arena, thread.states);
    CHECK(out.is_intact());
    return problem;
  };
  CHECK(problem_with(0, 1) == Problem::none);
  Content longer = stored;
  longer.push_back(7);  // behind what the header speaks of
  Guarded whole(content.size());
  CHECK(decode_blosc(Exact(longer), whole.data(), 700, thread.arena, thread.states) == Problem::none);
  CHECK(whole.content() == content);
  CHECK(problem_with(0, 3) == Problem::header);
  CHECK(problem_with(0, 0) == Problem::header);
  CHECK(problem_with(1, 2) == Problem::unknown);
  CHECK(problem_with(2, 2 << 5) == Problem::unknown);
  CHECK(problem_with(2, 7 << 5) == Problem::unknown);
  CHECK(problem_with(2, 8 | 1 << 5) == Problem::header);
  CHECK(problem_with(2, 2 | 1 << 5) == Problem::size);
  CHECK(problem_with(3, 0) == Problem::blocks);
  CHECK(problem_with(4, 0) == Problem::size);
  CHECK(problem_with(12, static_cast<std::uint8_t>(stored[12] + 1)) == Problem::size);
  CHECK(problem_with(9, 0) == Problem::blocks);      // a block of nothing
  CHECK(problem_with(11, 0x7f) == Problem::blocks);  // more than the content
  CHECK(problem_with(16, 3) == Problem::early);      // a start inside the header
  CHECK(problem_with(19, 0x7f) == Problem::early);   // and behind the end
  for (std::size_t size = 0; size < stored.size(); ++size) {
    Guarded out(content.size());
    const Content cut = slice(stored, 0, size);
    CHECK(decode_blosc(Exact(cut), out.data(), 700, thread.arena, thread.states) != Problem::none);
    CHECK(out.is_intact());
  }
  BloscHeader header;
  CHECK(read_blosc_header(bytes_of(stored), 700, static_cast<std::int64_t>(stored.size()), &header) == Problem::none);
  CHECK(header.element == 2 && header.block == 256 && header.blocks == 3 && header.codec == 1 && !header.is_copied);
  Guarded out(content.size());
  const auto decoded = [&](Range blocks) {
    return decode_blosc_blocks(header, stored.data(), blocks, out.data(), thread.arena, thread.states);
  };
  CHECK(decoded({-1, 2}) == Problem::blocks && decoded({0, 4}) == Problem::blocks &&
        decoded({2, 1}) == Problem::blocks);
  CHECK(decoded({1, 1}) == Problem::none);
  const Content nothing = {2, 1, 33, 2, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0};
  CHECK(decode_blosc(bytes_of(nothing), nullptr, 0, thread.arena, thread.states) == Problem::none);
}

namespace {

struct Undone {
  Problem problem = Problem::none;
  std::int32_t step = -2;
  Content content;
};

Undone undone(const std::vector<FilterStep>& steps, std::uint32_t mask, const Content& stored, std::size_t size,
              Range wanted) {
  Thread thread;
  Guarded out(size);
  const Exact exact(stored);
  Undone made;
  made.problem = undo_filters(steps, mask, exact, out.data(), static_cast<std::int64_t>(size), wanted, thread.arena,
                              thread.states, &made.step);
  made.content = out.content();
  CHECK(out.is_intact());
  return made;
}

Content stored_by(const std::vector<FilterStep>& steps, std::uint32_t mask, const Content& content) {
  Content made = content;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if ((mask >> i & 1) == 0) made = filtered(made, steps[i]);
  }
  return made;
}

// A step with elements that a filter before it in the list leaves whole.
FilterStep step_of(ChunkFilter filter, std::int32_t element = 1, std::int32_t codec = 0, std::int64_t block = 0) {
  FilterStep step;
  step.filter = filter;
  step.element = element;
  step.codec = codec;
  step.block = block;
  return step;
}

void check_filters(const std::vector<FilterStep>& steps, std::size_t size) {
  const Content content = some_content(size);
  for (std::uint32_t mask = 0; mask < 1u << steps.size(); ++mask) {
    const Content stored = stored_by(steps, mask, content);
    const auto count = static_cast<std::int64_t>(size);
    const Undone whole = undone(steps, mask, stored, size, {0, count});
    CHECK(whole.problem == Problem::none && whole.step == -1);
    CHECK(whole.content == content);
    for (int i = 0; i < 24 && size > 0; ++i) {
      // Half of them begin and end near a multiple of 8, where blocks do.
      std::size_t begin = random_number() % (size + 1), end = random_number() % (size + 1);
      if (i % 2 == 0) begin = begin / 8 * 8, end = end / 8 * 8;
      if (begin > end) std::swap(begin, end);
      const Undone part =
          undone(steps, mask, stored, size, {static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end)});
      CHECK(part.problem == Problem::none);
      CHECK(slice(part.content, begin, end) == slice(content, begin, end));
    }
    if (size > 1500) continue;
    CHECK(undone(steps, mask, stored, size + 1, {0, count + 1}).problem != Problem::none);
    if (size > 0) CHECK(undone(steps, mask, stored, size - 1, {0, count - 1}).problem != Problem::none);
    for (std::size_t cut = 0; cut < stored.size() && size > 0; ++cut) {
      CHECK(undone(steps, mask, slice(stored, 0, cut), size, {0, count}).problem != Problem::none);
    }
    for (int i = 0; i < 30 && !stored.empty(); ++i) {
      Content damaged = stored;
      damaged[random_number() % damaged.size()] ^= static_cast<std::uint8_t>(1u << random_number() % 8);
      const Undone first = undone(steps, mask, damaged, size, {0, count});
      const bool is_summed = std::any_of(steps.begin(), steps.end(), [&](const FilterStep& step) {
        return step.filter == ChunkFilter::fletcher32 && (mask >> (&step - steps.data()) & 1) == 0;
      });
      if (is_summed) CHECK(first.problem != Problem::none || first.content == content);
    }
  }
}

}  // namespace

TEST("filters: each alone, and after a shuffle") {
  for (std::size_t size : {0u, 1u, 16u, 240u, 1201u, 2640u}) {
    for (ChunkFilter filter :
         {ChunkFilter::deflate, ChunkFilter::lzf, ChunkFilter::zstd, ChunkFilter::lz4, ChunkFilter::blosc}) {
      check_filters({step_of(filter)}, size);
      for (std::int32_t element : {1, 2, 4, 6, 8})
        check_filters({step_of(ChunkFilter::shuffle, element), step_of(filter)}, size);
    }
    check_filters({step_of(ChunkFilter::fletcher32)}, size);
    check_filters({step_of(ChunkFilter::shuffle, 4), step_of(ChunkFilter::fletcher32)}, size);
  }
  check_filters({}, 33);
}

TEST("filters: bitshuffle") {
  for (std::int32_t element : {1, 2, 3, 4, 8, 12, 16, 17}) {
    for (std::int32_t codec : {0, 2, 3}) {
      for (std::size_t count : {0u, 3u, 8u, 64u, 67u, 200u, 261u}) {
        check_filters({step_of(ChunkFilter::bitshuffle, element, codec, 64)},
                      count * static_cast<std::size_t>(element));
      }
    }
  }
  // The block that bitshuffle chooses itself.
  const Content content = some_content(40000);
  for (std::size_t element : {2u, 8u}) {
    const Content stored = bitshuffle_filtered(content, element, 0, 8192 / element);
    const Undone made =
        undone({step_of(ChunkFilter::bitshuffle, static_cast<std::int32_t>(element))}, 0, stored, 40000, {0, 40000});
    CHECK(made.problem == Problem::none && made.content == content);
  }
}

TEST("filters: checksums before and after") {
  const FilterStep shuffle = step_of(ChunkFilter::shuffle, 4), sum = step_of(ChunkFilter::fletcher32);
  for (ChunkFilter filter : {ChunkFilter::deflate, ChunkFilter::lzf, ChunkFilter::zstd}) {
    const FilterStep step = step_of(filter);
    for (std::size_t size : {0u, 5u, 400u, 1601u}) {
      check_filters({step, sum}, size);
      check_filters({sum, step}, size);
      check_filters({shuffle, step, sum}, size);
      check_filters({shuffle, sum, step}, size);
      check_filters({sum, shuffle, step}, size);
      check_filters({sum, step, sum}, size);
      check_filters({step, shuffle}, size);
    }
  }
  // Halves in the order of old releases.
  const Content content = some_content(100);
  Content stored = content;
  const std::uint32_t value = fletcher32_of(content);
  append_number(&stored, (value & 0x00ff00ffu) << 8 | (value >> 8 & 0x00ff00ffu), 4, false);
  CHECK(undone({sum}, 0, stored, 100, {0, 100}).problem == Problem::none);
  stored.back() ^= 1;
  const Undone wrong = undone({shuffle, sum}, 0, stored, 100, {0, 100});
  CHECK(wrong.problem == Problem::checksum && wrong.step == 1);
}

TEST("filters: that cannot be undone") {
  const Content content = some_content(64);
  const auto problem_of = [&](const FilterStep& step) {
    const Undone made = undone({step}, 0, content, 64, {0, 64});
    CHECK(made.step == 0);
    return made.problem;
  };
  CHECK(problem_of(step_of(ChunkFilter::blosc2)) == Problem::unknown);
  CHECK(problem_of(step_of(static_cast<ChunkFilter>(4))) == Problem::unknown);
  CHECK(problem_of(step_of(ChunkFilter::shuffle, 0)) == Problem::blocks);
  CHECK(problem_of(step_of(ChunkFilter::shuffle, -4)) == Problem::blocks);
  CHECK(problem_of(step_of(ChunkFilter::bitshuffle, 0)) == Problem::blocks);
  CHECK(problem_of(step_of(ChunkFilter::bitshuffle, 3)) == Problem::blocks);
  CHECK(problem_of(step_of(ChunkFilter::bitshuffle, 2, 1)) == Problem::unknown);
  CHECK(problem_of(step_of(ChunkFilter::bitshuffle, 2, 0, 12)) == Problem::blocks);
  CHECK(problem_of(step_of(ChunkFilter::bitshuffle, 2, 0, std::int64_t{1} << 62)) == Problem::blocks);
  CHECK(undone({}, 0, content, 63, {0, 63}).problem == Problem::size);
}

namespace {

// What stands in for c-blosc2: frames of a magic number, a kind, and content.
struct FakeBlosc2 {
  int frames = 0, arrays = 0;  // that are not freed
  const std::uint8_t* content = nullptr;
  std::int64_t size = 0;
  bool is_array = false;
};
FakeBlosc2 fake;

void* fake_frame(std::uint8_t* frame, std::int64_t size, bool copies) {
  CHECK(!copies);
  if (frame[10] == 'x') return nullptr;
  ++fake.frames;
  fake.is_array = frame[10] == 'a';
  fake.content = frame + 11;
  fake.size = size - 11;
  return &fake;
}
int fake_array(void* frame, void** array) {
  if (!fake.is_array) return -1;
  ++fake.arrays;
  *array = frame;
  return 0;
}
int fake_content(void*, void* out, std::int64_t size) {
  if (fake.size > size) return -1;
  std::memcpy(out, fake.content, static_cast<std::size_t>(fake.size));
  return 0;
}
int fake_array_end(void*) {
  --fake.arrays;
  --fake.frames;
  return 0;
}
int fake_chunk(void*, std::int64_t, void* out, std::int32_t size) {
  if (fake.size > size) return -1;
  std::memcpy(out, fake.content, static_cast<std::size_t>(fake.size));
  return static_cast<int>(fake.size);
}
int fake_frame_end(void*) {
  --fake.frames;
  return 0;
}

}  // namespace

TEST("filters: Blosc2 by functions that are handed over") {
  use_blosc2({fake_frame, fake_array, fake_content, fake_array_end, fake_chunk, fake_frame_end});
  const std::vector<FilterStep> steps = {step_of(ChunkFilter::blosc2)};
  const Content content = some_content(50);
  for (std::uint8_t kind : {'a', 'p', 'x'}) {
    Content stored = {1, 2, 'b', '2', 'f', 'r', 'a', 'm', 'e', 0, kind};
    append(&stored, content);
    const Undone made = undone(steps, 0, stored, 50, {0, 50});
    CHECK(made.problem == (kind == 'x' ? Problem::damaged : Problem::none));
    if (kind != 'x') CHECK(made.content == content);
    if (kind != 'x') CHECK(undone(steps, 0, stored, 49, {0, 49}).problem == Problem::size);
    if (kind != 'x') CHECK(undone(steps, 0, stored, 51, {0, 51}).problem == Problem::size);
    CHECK(undone(steps, 0, stored, 0, {0, 0}).problem != Problem::none);
    stored[5] = 'R';
    CHECK(undone(steps, 0, stored, 50, {0, 50}).problem == Problem::header);
    CHECK(undone(steps, 0, slice(stored, 0, 9), 50, {0, 50}).problem == Problem::header);
  }
  CHECK(fake.frames == 0 && fake.arrays == 0);
}
