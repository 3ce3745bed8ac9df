// What each thread is at, in memory that outlives this process: a parent reads there what a worker died of.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastpipe {

// Note from now on in these lines, one for each thread: `count` of `size` bytes each, which stay valid for ever.
// Threads beyond that note nothing.  To be called while no thread is at anything, but again with the same lines at any
// time; null ends it.
void note_in(std::uint8_t* lines, std::int32_t count, std::size_t size) noexcept;

// The calling thread is at this: a text that ends with a zero, cut to a line.
void note(const char* text) noexcept;

// It is at nothing any more.
void note_nothing() noexcept;

}  // namespace fastpipe
