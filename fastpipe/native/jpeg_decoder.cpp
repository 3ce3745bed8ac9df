// Decoding with our own decoder, and with libjpeg-turbo.  No other file of the core includes its headers or setjmp.h.
//
// libjpeg reports an error by calling a function that must not return, so ours jumps.  The jump skips frames of libjpeg
// and of the steps below, none of which may hold an object with a destructor.  The only frame that is jumped to is
// step_is_done(), which holds nothing.  All input and output of the steps is in State.
//
// A warning ends decoding like an error: libjpeg warns when data is damaged, and goes on with pixels that it made up.
// Pillow then decides whether the file is an error.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>

#include "entries.h"
#include "jpeg.h"
#include "jpeg_scan.h"

// clang-format off: these need the ones above
#include <jpeglib.h>
#include <jerror.h>
#include <setjmp.h>
// clang-format on

namespace fastpipe {
namespace {

// The most pixels of a file whose coefficients libjpeg keeps, which are up to 3 GiB: one with several scans, or one
// that is packed.
constexpr std::int64_t kMostPixelsKept = std::int64_t{1} << 29;

// The fewest columns to decode, or the whole width of a narrower image.  libjpeg upsamples the colours differently in
// a part that is only a few columns wide.
constexpr std::int32_t kFewestColumns = 32;

struct ErrorManager {
  jpeg_error_mgr callbacks;  // the first member, so that its address is this structure's
  jmp_buf jump;
};

[[noreturn]] void give_up(j_common_ptr codec) { longjmp(reinterpret_cast<ErrorManager*>(codec->err)->jump, 1); }

[[noreturn]] void give_up_with(j_decompress_ptr codec, int code) {
  codec->err->msg_code = code;
  give_up(reinterpret_cast<j_common_ptr>(codec));
}

void on_message(j_common_ptr codec, int level) {
  if (level < 0) give_up(codec);  // a warning; other levels are traces
}

void on_output(j_common_ptr) {}  // prints nothing
void on_format(j_common_ptr, char* text) { text[0] = 0; }
void on_reset(j_common_ptr codec) { codec->err->msg_code = 0; }

// The whole file is in memory.  Asking for more is an error: no end marker is made up.
void on_source_begin(j_decompress_ptr) {}
void on_source_end(j_decompress_ptr) {}

boolean on_more_data(j_decompress_ptr codec) { give_up_with(codec, JERR_INPUT_EOF); }

void on_skip(j_decompress_ptr codec, long count) {
  if (count <= 0) return;
  const auto skipped = static_cast<std::size_t>(count);
  if (skipped > codec->src->bytes_in_buffer) give_up_with(codec, JERR_INPUT_EOF);
  codec->src->next_input_byte += skipped;
  codec->src->bytes_in_buffer -= skipped;
}

}  // namespace

struct JpegDecoder::State {
  using Step = void (*)(State&);
  class Blocks;

  ScanRows scan;  // our own decoder; the rest is libjpeg's

  jpeg_decompress_struct codec;
  ErrorManager errors;
  jpeg_source_mgr source;
  bool is_made = false;  // `codec` has been created

  // The part to decode, in pixels of the image at 1 / factor of its size.
  Bytes file;
  int factor = 1;
  JpegPixels kind = JpegPixels::pillow;
  Box box;
  bool is_probed = false;  // nothing is decoded
  bool is_packed = false;  // coefficients are read, not pixels

  // The columns and rows that are decoded: the box and a margin.
  JDIMENSION left = 0, width = 0, top = 0, rows = 0;
  JSAMPARRAY lines = nullptr;  // memory of each of those rows

  // All coefficients, if they have been read.
  JpegFrame frame;
  jvirt_barray_ptr* arrays = nullptr;
  JBLOCKROW* block_rows[3] = {};  // of each component, its rows of blocks

  Reason reason = Reason::none;  // why a step gave up, if it was not libjpeg that did

  State() noexcept;
  ~State();
  void set(Bytes the_file, int the_factor, Box the_box, JpegPixels the_kind) noexcept;
  Status decode_box(JpegIndex index, Arena& arena, Pixels* pixels) noexcept;
  bool decode_scan(JpegIndex index, Arena& arena, Pixels* pixels) noexcept;
  Bytes ended_index(Arena& arena) noexcept;
  Status decode(Arena& arena, Pixels* pixels) noexcept;
  Status pack(Arena& arena, Bytes* entry) noexcept;
  Status begun(Step step) noexcept;
  static void begin(State& state);

 private:
  bool step_is_done(Step step) noexcept;
  Status declined() noexcept;

  static void make(State& state);
  static void forget_tables(State& state);
  static void read_header(State& state);
  static void check_kind(State& state);
  static void check(State& state);
  static void choose_part(State& state);
  static void read_rows(State& state);
  static void read_blocks(State& state);
  static void find_rows(State& state);
  static void check_end(State& state);
  static void abort(State& state) { jpeg_abort_decompress(&state.codec); }
  static void destroy(State& state) { jpeg_destroy_decompress(&state.codec); }
};

JpegDecoder::State::State() noexcept : codec(), errors(), source() {
  // Not jpeg_std_error(): its functions print, and end the process.  Without it they are not even linked.
  codec.err = &errors.callbacks;
  errors.callbacks.error_exit = give_up;
  errors.callbacks.emit_message = on_message;
  errors.callbacks.output_message = on_output;
  errors.callbacks.format_message = on_format;
  errors.callbacks.reset_error_mgr = on_reset;
  source.init_source = on_source_begin;
  source.fill_input_buffer = on_more_data;
  source.skip_input_data = on_skip;
  source.resync_to_restart = jpeg_resync_to_restart;
  source.term_source = on_source_end;
}

JpegDecoder::State::~State() {
  if (is_made) step_is_done(destroy);
}

// Run a step, whose variables must be trivial.  False if libjpeg, or the step, gave up.
bool JpegDecoder::State::step_is_done(Step step) noexcept {
  if (setjmp(errors.jump) != 0) return false;
  step(*this);
  return true;
}

Status JpegDecoder::State::declined() noexcept {
  const int code = errors.callbacks.msg_code;
  // After an error the only safe thing to do with libjpeg's structures is to destroy them.
  is_made = false;
  step_is_done(destroy);
  if (reason != Reason::none) return Status::declined(reason);
  return Status::declined(code == JERR_OUT_OF_MEMORY ? Reason::no_memory : Reason::damaged);
}

void JpegDecoder::State::make(State& state) {
  jpeg_create_decompress(&state.codec);
  state.codec.src = &state.source;
  const auto common = reinterpret_cast<j_common_ptr>(&state.codec);
  for (JQUANT_TBL*& table : state.codec.quant_tbl_ptrs) table = jpeg_alloc_quant_table(common);
  for (JHUFF_TBL*& table : state.codec.dc_huff_tbl_ptrs) table = jpeg_alloc_huff_table(common);
  for (JHUFF_TBL*& table : state.codec.ac_huff_tbl_ptrs) table = jpeg_alloc_huff_table(common);
}

// libjpeg keeps tables from image to image, for files that have none.  Make the old ones unusable: the result for a
// file must not depend on the file before.
void JpegDecoder::State::forget_tables(State& state) {
  for (JQUANT_TBL* table : state.codec.quant_tbl_ptrs) table->quantval[0] = 0;  // check() looks for it
  // Three codes of one bit are an error.
  for (JHUFF_TBL* table : state.codec.dc_huff_tbl_ptrs) table->bits[1] = 3;
  for (JHUFF_TBL* table : state.codec.ac_huff_tbl_ptrs) table->bits[1] = 3;
}

// Check that the file is of a kind that is decoded here.  read_jpeg_header() trusts no other kinds; this is for callers
// that did not ask it.
void JpegDecoder::State::check_kind(State& state) {
  j_decompress_ptr codec = &state.codec;
  const bool is_colour = codec->num_components == 3 && codec->jpeg_color_space == JCS_YCbCr;
  const bool is_grey = codec->num_components == 1 && codec->jpeg_color_space == JCS_GRAYSCALE &&
                       codec->comp_info[0].h_samp_factor == 1 && codec->comp_info[0].v_samp_factor == 1;
  if (codec->arith_code || codec->data_precision != 8 || !(is_colour || is_grey)) state.reason = Reason::untrusted;
  const std::int64_t pixels = std::int64_t{codec->image_height} * codec->image_width;
  const bool keeps_all = state.is_packed || jpeg_has_multiple_scans(codec);
  if (keeps_all && pixels > kMostPixelsKept) state.reason = Reason::too_large;
  if (state.reason != Reason::none) give_up(reinterpret_cast<j_common_ptr>(codec));
}

void JpegDecoder::State::read_header(State& state) {
  forget_tables(state);
  state.source.next_input_byte = state.file.data;
  state.source.bytes_in_buffer = state.file.size;
  jpeg_read_header(&state.codec, TRUE);
  check_kind(state);
}

void JpegDecoder::State::begin(State& state) {
  j_decompress_ptr codec = &state.codec;
  read_header(state);
  if (state.is_probed && jpeg_has_multiple_scans(codec)) {
    state.reason = Reason::asked;
    give_up(reinterpret_cast<j_common_ptr>(codec));
  }

  codec->out_color_space = state.kind == JpegPixels::tensorflow_grey ? JCS_GRAYSCALE : JCS_RGB;
  codec->scale_num = 1;
  codec->scale_denom = static_cast<unsigned int>(state.factor);
  codec->dct_method = state.kind == JpegPixels::pillow ? JDCT_ISLOW : JDCT_IFAST;
  codec->do_fancy_upsampling = TRUE;
  jpeg_start_decompress(codec);  // reads all scans, if there are several
  check(state);
  choose_part(state);
}

// Check that the file has all tables, and the box is inside the image.
void JpegDecoder::State::check(State& state) {
  j_decompress_ptr codec = &state.codec;
  const Box& box = state.box;
  bool fits = codec->output_components == (state.kind == JpegPixels::tensorflow_grey ? 1 : 3);
  for (int i = 0; i < codec->num_components; ++i) {
    const JQUANT_TBL* table = codec->comp_info[i].quant_table;
    fits = fits && table != nullptr && table->quantval[0] != 0;  // 0: see forget_tables()
  }
  const std::int64_t width = codec->output_width, height = codec->output_height;
  fits = fits && box.left >= 0 && box.top >= 0 && box.width > 0 && box.height > 0;
  fits = fits && std::int64_t{box.left} + box.width <= width && std::int64_t{box.top} + box.height <= height;
  if (!fits) give_up_with(codec, JERR_BAD_CROP_SPEC);
}

// Leave out the columns and rows around the box, except a margin: libjpeg upsamples the colours of the first and last
// column that it decodes as if they were the image's.
void JpegDecoder::State::choose_part(State& state) {
  j_decompress_ptr codec = &state.codec;
  const Box& box = state.box;
  const auto width = static_cast<std::int32_t>(codec->output_width);
  std::int32_t left = std::max(0, box.left - 1), right = std::min(width, box.right() + 1);
  if (state.factor > 1) {  // libjpeg takes part of the columns, and passes over rows, right at the full size only
    left = 0;
    right = width;
  }
  if (right - left < kFewestColumns) {
    right = std::min(width, left + kFewestColumns);
    left = std::max(0, right - kFewestColumns);
  }
  state.left = static_cast<JDIMENSION>(left);
  state.width = static_cast<JDIMENSION>(right - left);
  // Moves `left` to the beginning of a block.  Does nothing for the whole width.
  jpeg_crop_scanline(codec, &state.left, &state.width);
  // Rows below the box are never read, so they need no margin.
  state.top = static_cast<JDIMENSION>(state.factor > 1 ? 0 : std::max(0, box.top - 1));
  state.rows = static_cast<JDIMENSION>(box.bottom()) - state.top;
}

void JpegDecoder::State::read_rows(State& state) {
  j_decompress_ptr codec = &state.codec;
  if (state.top > 0) jpeg_skip_scanlines(codec, state.top);
  for (JDIMENSION done = 0; done < state.rows;) {
    const JDIMENSION read = jpeg_read_scanlines(codec, state.lines + done, state.rows - done);
    if (read == 0) give_up_with(codec, JERR_CANT_SUSPEND);
    done += read;
  }
  check_end(state);
}

// Check what follows the last scan, which libjpeg does not read.
void JpegDecoder::State::check_end(State& state) {
  j_decompress_ptr codec = &state.codec;
  if (jpeg_has_multiple_scans(codec)) return;  // then all of the file has been read
  // libjpeg is still in the scan, or behind the marker that follows it.
  const std::ptrdiff_t position = state.source.next_input_byte - state.file.data - (codec->unread_marker != 0 ? 2 : 0);
  if (!ends_after_scan(state.file, position)) give_up_with(codec, JERR_UNKNOWN_MARKER);
}

// Read all coefficients, and describe the file.
void JpegDecoder::State::read_blocks(State& state) {
  j_decompress_ptr codec = &state.codec;
  read_header(state);
  state.arrays = jpeg_read_coefficients(codec);
  JpegFrame& frame = state.frame;
  frame = JpegFrame();
  frame.size = {static_cast<std::int32_t>(codec->image_height), static_cast<std::int32_t>(codec->image_width)};
  frame.components = codec->num_components;
  for (int c = 0; c < frame.components; ++c) {
    const jpeg_component_info& info = codec->comp_info[c];
    if (info.quant_table == nullptr) give_up_with(codec, JERR_NO_QUANT_TABLE);
    JpegPlane& plane = frame.planes[c];
    plane.horizontal = info.h_samp_factor;
    plane.vertical = info.v_samp_factor;
    for (int i = 0; i < DCTSIZE2; ++i) plane.steps[i] = info.quant_table->quantval[i];
  }
  if (!frame.complete()) {
    state.reason = Reason::untrusted;
    give_up(reinterpret_cast<j_common_ptr>(codec));
  }
}

void JpegDecoder::State::find_rows(State& state) {
  j_decompress_ptr codec = &state.codec;
  for (int c = 0; c < codec->num_components; ++c) {
    for (std::int32_t y = 0; y < state.frame.planes[c].rows; ++y) {
      // All of an array is in memory, and stays where it is.
      state.block_rows[c][y] = codec->mem->access_virt_barray(reinterpret_cast<j_common_ptr>(codec), state.arrays[c],
                                                              static_cast<JDIMENSION>(y), 1, FALSE)[0];
    }
  }
}

// Coefficients that libjpeg has read.
class JpegDecoder::State::Blocks : public CoefficientRows {
 public:
  explicit Blocks(const State& state) noexcept : state_(state) {}
  bool read(std::int32_t row, std::int32_t first, std::int32_t count, std::int16_t* const* blocks,
            const std::int64_t* pitches, const bool*) noexcept override {
    for (int c = 0; c < state_.frame.components; ++c) {
      const JpegPlane& plane = state_.frame.planes[c];
      if (blocks[c] == nullptr) continue;
      const std::int32_t left = first * plane.horizontal;
      const std::int32_t width = std::min(count * plane.horizontal, plane.columns - left);
      for (std::int32_t v = 0; v < std::min(plane.vertical, plane.rows - row * plane.vertical); ++v) {
        std::memcpy(blocks[c] + v * pitches[c], state_.block_rows[c][row * plane.vertical + v] + left,
                    static_cast<std::size_t>(width) * sizeof(JBLOCK));
      }
    }
    return true;
  }

 private:
  const State& state_;
};

Status JpegDecoder::State::pack(Arena& arena, Bytes* entry) noexcept {
  const Status status = begun(read_blocks);
  if (!status.is_made()) return status;
  for (int c = 0; c < frame.components; ++c) {
    block_rows[c] = arena.array<JBLOCKROW>(static_cast<std::size_t>(frame.planes[c].rows));
    if (block_rows[c] == nullptr) reason = Reason::no_memory;
  }
  if (reason != Reason::none || !step_is_done(find_rows)) return declined();
  Blocks blocks(*this);
  const Status packed = pack_coefficients(frame, blocks, arena, entry);
  return step_is_done(abort) ? packed : declined();
}

// Read the header and the tables, and what `step` reads of the rest.
Status JpegDecoder::State::begun(Step step) noexcept {
  errors.callbacks.msg_code = 0;
  reason = Reason::none;
  if (!is_made && !step_is_done(make)) return declined();
  is_made = true;
  if (!step_is_done(step)) return declined();
  if (is_probed && (!step_is_done(check_end) || !step_is_done(abort))) return declined();
  return Status::made();
}

Status JpegDecoder::State::decode(Arena& arena, Pixels* pixels) noexcept {
  const Status status = begun(begin);
  if (!status.is_made()) return status;

  // libjpeg-turbo writes rows that begin at a multiple of 16 or 32 bytes around the caches.  That makes decoding and
  // resampling a tenth slower, so each row begins one byte behind such an address.
  constexpr std::int64_t granule = 32;
  const int channels = kind == JpegPixels::tensorflow_grey ? 1 : 3;
  const std::int64_t pitch = (channels * std::int64_t{width} + granule - 1) / granule * granule;
  auto* memory = arena.array<std::uint8_t>(static_cast<std::size_t>(pitch * rows + 1));
  lines = arena.array<JSAMPROW>(rows);
  if (memory == nullptr || lines == nullptr) {
    reason = Reason::no_memory;
    return declined();
  }
  for (JDIMENSION row = 0; row < rows; ++row) lines[row] = memory + 1 + pitch * row;

  if (!step_is_done(read_rows) || !step_is_done(abort)) return declined();
  pixels->data = lines[static_cast<JDIMENSION>(box.top) - top] +
                 static_cast<JDIMENSION>(channels) * (static_cast<JDIMENSION>(box.left) - left);
  pixels->pitch = pitch;
  pixels->height = box.height;
  pixels->width = box.width;
  pixels->channels = channels;
  return Status::made();
}

// Decode without libjpeg; false where it has to decide, as about whatever is unusual.
bool JpegDecoder::State::decode_scan(JpegIndex index, Arena& arena, Pixels* pixels) noexcept {
  if (index.made != nullptr) *index.made = {};
  if (!scan.open(file)) return false;
  std::uint64_t sum = 0;
  bool has_index = false;  // which is made only where all of the file is as it should be
  if (index.known.size > sizeof sum) {
    std::memcpy(&sum, index.known.data, sizeof sum);
    has_index = sum == sum_of(file) && scan.use_index({index.known.data + sizeof sum, index.known.size - sizeof sum});
  } else if (index.made != nullptr) {
    scan.begin_index(arena);
  }
  const Size size = scan.frame().reduced(factor);
  const bool is_inside =
      box.top >= 0 && box.left >= 0 && box.height <= size.height - box.top && box.width <= size.width - box.left;
  if (!is_inside || !decode_pixels(scan.frame(), scan, factor, box, arena, pixels, kind).is_made()) return false;
  if (!has_index && !ends_after_scan(file, scan.position())) return false;
  if (index.made != nullptr) *index.made = ended_index(arena);
  return true;
}

// Return the index that was begun; no bytes where some of the file is not as it should be.
Bytes JpegDecoder::State::ended_index(Arena& arena) noexcept {
  const Bytes index = scan.end_index();
  if (index.data == nullptr || !ends_after_scan(file, scan.position())) return {};
  const std::uint64_t sum = sum_of(file);
  auto* const made = arena.array<std::uint8_t>(index.size + sizeof sum);
  if (made == nullptr) return {};
  std::memcpy(made, &sum, sizeof sum);
  std::memcpy(made + sizeof sum, index.data, index.size);
  return {made, index.size + sizeof sum};
}

// Say what to decode.
void JpegDecoder::State::set(Bytes the_file, int the_factor, Box the_box, JpegPixels the_kind) noexcept {
  file = the_file;
  factor = the_factor;
  box = the_box;
  kind = the_kind;
  is_probed = false;
  is_packed = false;
}

Status JpegDecoder::State::decode_box(JpegIndex index, Arena& arena, Pixels* pixels) noexcept {
  if (box.width <= 0 || box.height <= 0) return Status::declined(Reason::damaged);
  return decode_scan(index, arena, pixels) ? Status::made() : decode(arena, pixels);
}

JpegDecoder::JpegDecoder() noexcept : state_(new (std::nothrow) State()) {}
JpegDecoder::~JpegDecoder() = default;

Status JpegDecoder::decode(Bytes file, Box box, Arena& arena, Pixels* pixels, JpegPixels kind,
                           JpegIndex index) noexcept {
  if (state_ == nullptr) return Status::declined(Reason::no_memory);
  state_->set(file, 1, box, kind);
  return state_->decode_box(index, arena, pixels);
}

Status JpegDecoder::decode_reduced(Bytes file, int factor, Box box, Arena& arena, Pixels* pixels,
                                   JpegIndex index) noexcept {
  if (state_ == nullptr) return Status::declined(Reason::no_memory);
  if (factor != 2 && factor != 4 && factor != 8) return Status::declined(Reason::internal);
  state_->set(file, factor, box, JpegPixels::pillow);
  return state_->decode_box(index, arena, pixels);
}

Status JpegDecoder::probe(Bytes file) noexcept {
  if (state_ == nullptr) return Status::declined(Reason::no_memory);
  state_->set(file, 1, {0, 0, 1, 1}, JpegPixels::pillow);
  state_->is_probed = true;
  return state_->begun(State::begin);
}

Status JpegDecoder::pack(Bytes file, Arena& arena, Bytes* entry) noexcept {
  if (state_ == nullptr) return Status::declined(Reason::no_memory);
  if (state_->scan.open(file)) {
    const Status status = pack_coefficients(state_->scan.frame(), state_->scan, arena, entry);
    if (status.is_made() && ends_after_scan(file, state_->scan.position())) return status;
    if (!status.is_made() && status.reason != Reason::damaged) return status;
  }
  state_->set(file, 1, {}, JpegPixels::pillow);
  state_->is_packed = true;
  return state_->pack(arena, entry);
}

#define FASTPIPE_TEXT_(version) #version
#define FASTPIPE_TEXT(version) FASTPIPE_TEXT_(version)
const char* jpeg_version() noexcept { return FASTPIPE_TEXT(LIBJPEG_TURBO_VERSION); }

}  // namespace fastpipe
