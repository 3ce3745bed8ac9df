// What one thread keeps from sample to sample.
#pragma once

#include "arena.h"
#include "codecs.h"
#include "jpeg.h"

namespace fastpipe {

struct Scratch {
  Arena arena;
  Arena chunk;  // reset after each chunk of a sample that has several
  JpegDecoder jpeg;
  CodecStates codecs;
};

// The calling thread's own, for work that it does itself; null where there is no memory.
Scratch* thread_scratch() noexcept;

}  // namespace fastpipe
