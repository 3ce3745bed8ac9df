// Batches of images: read, decoded, resampled and converted, each into its place.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "augment.h"
#include "engine.h"
#include "geometry.h"
#include "jpeg.h"
#include "kept.h"
#include "png.h"
#include "resample.h"
#include "span.h"
#include "status.h"
#include "tensorflow.h"

namespace fastpipe {

struct ImageSource;

// What is done to each image of a batch: a compiled transform, and the options of decoding.  Immutable.
struct ImagePlan {
  std::vector<Step> steps;
  Conversion how;
  std::shared_ptr<const void> owner;  // of what `how` points to
  std::int32_t draws = 0;             // numbers in a row of parameters
  std::int64_t max_pixels = -1;       // images with more are declined; -1 for no limit
  bool turns = false;                 // images that EXIF turns are declined
  bool reads_png = false;             // otherwise only JPEGs are read
  bool scaled = false;                // decode at a part of the size where that loses no detail
  Parity parity = Parity::pillow;  // of TensorFlow `how` says the channels only, and samples are float32 before scaling
  Scaling scaling;                 // at last; samples are written before in interleaved pixels
  bool keeps_samples = false;      // what is kept is not images but samples, before scaling
  std::vector<Step> shrink;        // one resize of the shorter side, which larger images get first; or nothing
};

// Return whether samples are kept, scaled or TensorFlow's.
bool makes_samples(const ImagePlan& plan) noexcept;

// Bytes of an element of a sample, before and after scaling.
std::int32_t word_before(const ImagePlan& plan) noexcept;
std::int32_t word_after(const ImagePlan& plan) noexcept;

// Paths of files: slices of one piece of memory, in which their common beginning is not repeated.
struct Paths {
  Bytes prefix, arena;
  const std::int64_t* starts = nullptr;  // in the arena, of each sample
  const std::int64_t* ends = nullptr;
};

// An encoded image that is in memory already, or one that is left to Python.
struct ImageInput {
  bool is_left = false;
  const std::uint8_t* data = nullptr;  // null: the sample's path is read
  std::int64_t size = 0;               // bytes
};

// An image that a batch made, in memory of its own.
struct MadeImage {
  struct Free {
    void operator()(void* memory) const noexcept;
  };
  std::unique_ptr<std::uint8_t, Free> data;
  std::int64_t size = 0;               // bytes
  std::int32_t height = 0, width = 0;  // of it
};

// A whole image, its coefficients or its index, and which it is.
struct WholeImage {
  MadeImage image;
  Digest digest;
  FileState state;
  std::int64_t file_pixels = 0;  // that its file has
};

// Sums over a batch's samples: nanoseconds by stage; images whose size is known, their pixels, and about the bytes that
// their coefficients take.
struct Totals {
  std::atomic<std::int64_t> read{0}, decode{0}, transform{0}, images{0}, pixels{0}, coefficients{0};
};

// A batch.  Of samples that are kept, scaled or TensorFlow's `memory` and `sample_size` are given.  All pointers are
// the caller's, and are valid until the work is done.
class ImageBatch : public Work {
 public:
  std::shared_ptr<const ImagePlan> plan;
  std::int64_t count = 0;
  Paths paths;
  const ImageInput* inputs = nullptr;        // (count); null: all are read
  const double* parameters = nullptr;        // (count, plan->draws)
  std::uint8_t* memory = nullptr;            // where samples go; null: each into memory of its own
  const std::int64_t* places = nullptr;      // (count): where in it each begins
  Size sample_size;                          // of each, height and width, if `memory` is given: others are declined
  bool keeps_files = false;                  // keep the encoded bytes of those that are made into memory of their own
  std::shared_ptr<const KeptImages> kept;    // where images are looked for before their files are read; may be null
  const FileState* states = nullptr;         // (count): of images that are no files; null: their files are asked
  std::int64_t most_nbytes = 0;              // of whole images that the caller is to be given, to keep them; 0: of none
  std::shared_ptr<const AugmentBatch> then;  // changes each image of bytes, and says where it goes; or null
  Status* statuses = nullptr;                // (count), written
  Totals totals;

  // Allocate what the batch keeps of its own; false where there is no memory.
  bool prepare() noexcept;

  std::int64_t size() const noexcept override { return count; }
  void run(std::int64_t item, Scratch& scratch) override;
  void lost(std::int64_t item) noexcept override;

  // Images and files in memory of their own, once the work is done; each can be taken once.
  MadeImage take_image(std::int64_t item) noexcept;
  MadeImage take_file(std::int64_t item) noexcept;
  // A whole image that is to be kept, made smaller where the plan says so; no data for none.
  WholeImage take_whole(std::int64_t item) noexcept;
  bool has_whole(std::int64_t item) const noexcept;

 private:
  struct Opened;
  Status make(std::int64_t item, Scratch& scratch);
  Status open(std::int64_t item, Scratch& scratch, Opened* opened);
  Status find_path(std::int64_t item, Scratch& scratch, Opened* opened);
  Status read(Scratch& scratch, Opened* opened);
  Status read_header(Scratch& scratch, ImageSource* source);
  Status look_up(std::int64_t item, Scratch& scratch, Opened* opened);
  bool has_room(std::int64_t nbytes) noexcept;
  Bytes packed(Scratch& scratch, Opened* opened);
  void keep_entry(std::int64_t item, Bytes entry, std::int64_t file_pixels, const Opened& opened);
  Status make_whole(std::int64_t item, Scratch& scratch, Opened* opened);
  Status make_image(std::int64_t item, Scratch& scratch, Opened* opened);
  Status draw_image(std::int64_t item, Scratch& scratch, Opened* opened);
  Status make_changed(std::int64_t item, Scratch& scratch, const Region& region, const ImageSource& source);
  Status make_sample(std::int64_t item, Scratch& scratch, Opened* opened);
  std::uint8_t* place_for(std::int64_t item, const Region& region);

  std::vector<MadeImage> images_, files_;
  std::vector<WholeImage> whole_;
  std::atomic<std::int64_t> whole_nbytes_{0};
};

// What the pixels of an image are taken from: decoded ones, a kept image that is not in memory, coefficients, or a
// trusted file.
struct ImageSource {
  Size size;
  Bytes file;  // a JPEG, or a PNG if there is a header of one
  PngHeader png;
  Pixels pixels;                     // of the whole image; no data where they are not there
  const KeptImages* kept = nullptr;  // null where it is not there
  std::int64_t offset = 0;           // where in it
  KeptCoefficients* coefficients = nullptr;
  JpegIndex index;  // of the JPEG
  bool is_encoded() const { return pixels.data == nullptr && kept == nullptr && coefficients == nullptr; }
  bool is_jpeg() const { return is_encoded() && !png.is_png(); }
  // Return about the bytes of its coefficients; 0 if it is no JPEG.
  std::int64_t coefficient_bytes() const noexcept;
};

// Decode the part of an image that a region needs, or take it from where it is decoded, and resample it to `out`.
//
// totals: where the time is added; may be null.
Status draw(const Region& region, const ImageSource& source, const Conversion& how, bool scaled, Scratch& scratch,
            std::uint8_t* out, Totals* totals) noexcept;

// For benchmarks: read and decode only, which is what the rest is compared with.
void skip_resampling(bool skips) noexcept;

}  // namespace fastpipe
