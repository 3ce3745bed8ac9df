// Reading whole files: a fifo does not hang, a directory does not confuse, a file that shrinks is an error.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arena.h"
#include "span.h"
#include "status.h"

namespace fastpipe {

// Read a regular file into the arena.
//
// path: as the operating system takes it, with a zero at its end.
// file: its bytes, which 64 zeros follow; untouched where the file was declined.
// Returns made, or declined: unreadable with errno (0: no regular file, or it changed while it was read;
// EISDIR: a folder; EFBIG: more than 2 GiB), no_memory.
Status read_file(const char* path, Arena& arena, Bytes* file) noexcept;

// Read up to `size` bytes, in calls for at most `most_at_once`, until the end of the file; short reads and
// signals are no end.  Returns how many there were, or -1 with errno.
std::int64_t read_full(int descriptor, std::uint8_t* out, std::size_t size, std::size_t most_at_once) noexcept;

}  // namespace fastpipe
