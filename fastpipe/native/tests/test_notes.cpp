#include <cstring>
#include <string>
#include <thread>

#include "../notes.h"
#include "check.h"

namespace {

std::uint8_t lines[2][8];

std::string line(int number) { return reinterpret_cast<const char*>(lines[number]); }

}  // namespace

TEST("notes: each thread has a line, and the last one has none") {
  std::memset(lines, 0, sizeof lines);
  fastpipe::note("before there are lines");
  fastpipe::note_in(lines[0], 2, 8);
  std::thread([] {
    fastpipe::note("short");
    std::thread([] {
      fastpipe::note("longer than a line");
      std::thread([] { fastpipe::note("one too many"); }).join();
    }).join();
  }).join();
  CHECK(line(0) == "short" && line(1) == "longer ");
  fastpipe::note_in(nullptr, 0, 0);
  fastpipe::note("after");
  CHECK(line(0) == "short");
}
