#include "../engine.h"

#include <nanobind/stl/tuple.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "../notes.h"
#include "../simd.h"
#include "../simulate.h"
#include "arrays.h"

namespace fastpipe::bindings {

namespace {

Engine& running() {
  Engine* found = engine();
  if (found == nullptr) throw std::bad_alloc();
  return *found;
}

// Batches of jobs that are not done, and jobs that were done before somebody said what they keep.  Never destroyed, as
// the interpreter may be gone by then; forgotten in a forked child, where these jobs are not.
struct Kept {
  const pid_t process = getpid();
  std::mutex lock;  // free-threaded builds have no other
  std::unordered_map<std::int64_t, PyObject*> batches;
  std::unordered_set<std::int64_t> done;
};

Kept& kept() {
  static std::atomic<Kept*> all{nullptr};
  Kept* found = all.load();
  while (found == nullptr || found->process != getpid()) {
    auto made = std::make_unique<Kept>();
    if (all.compare_exchange_strong(found, made.get())) return *made.release();
  }
  return *found;
}

}  // namespace

void keep_until_done(std::int64_t job, nb::handle batch) {
  Kept& all = kept();
  const std::lock_guard<std::mutex> guard(all.lock);
  if (all.done.erase(job) == 0) all.batches.emplace(job, batch.inc_ref().ptr());
}

void let_go_of(std::int64_t job) {
  Kept& all = kept();
  PyObject* batch = nullptr;
  {
    const std::lock_guard<std::mutex> guard(all.lock);
    const auto found = all.batches.find(job);
    if (found == all.batches.end()) {
      all.done.insert(job);
      return;
    }
    batch = found->second;
    all.batches.erase(found);
  }
  Py_DECREF(batch);
}

void register_engine(nb::module_& m) {
  nb::class_<BoundChannel>(m, "Channel", "Bounds how many threads are busy with the jobs of one owner.")
      .def(
          "__init__", [](BoundChannel* self, int limit) { new (self) BoundChannel{std::make_shared<Channel>(limit)}; },
          nb::arg("limit"));

  nb::class_<BoundWork>(m, "Batch", "What the engine makes: a batch of images, of rows.");
  m.def(
      "submit",
      [](nb::object batch, const BoundChannel& channel, int threads) {
        std::shared_ptr<Work> work = nb::cast<BoundWork&>(batch).any;
        std::shared_ptr<Channel> bounded = channel.channel;
        std::int64_t job = 0;
        {
          nb::gil_scoped_release free;
          job = running().submit(std::move(work), std::move(bounded), threads);
        }
        if (job != 0) keep_until_done(job, batch);
        return job;
      },
      nb::sig("def submit(batch: Batch, channel: Channel, threads: int) -> int"), nb::arg("batch"), nb::arg("channel"),
      nb::arg("threads"), "Begin a batch in the process's threads; its number.  0: no thread can be had.");
  m.def(
      "run_here",
      [](BoundWork& batch) {
        std::shared_ptr<Work> work = batch.any;
        nb::gil_scoped_release free;
        run_here(*work);
      },
      nb::arg("batch"), "Make a batch in the calling thread.");
  m.def(
      "run_in_threads",
      [](BoundWork& batch, int threads) {
        std::shared_ptr<Work> work = batch.any;
        nb::gil_scoped_release free;
        run_in_threads(std::move(work), threads);
      },
      nb::arg("batch"), nb::arg("threads"),
      "Make a batch in so many threads, of which the calling one is one; it is made when this returns.");
  m.def(
      "cancel",
      [](std::int64_t job) {
        nb::gil_scoped_release free;
        running().cancel(job);
      },
      nb::arg("job"), "Begin no further item of a job.  Its event `done` comes when those that run are.");
  m.def(
      "watch_begun", [](std::int64_t job) { return running().watch_begun(job); }, nb::arg("job"),
      "Whether all items of a job are begun; where they are not, its event `begun` comes as soon as they are.");
  m.def(
      "next_event",
      [](int milliseconds) {
        Event event;
        {
          nb::gil_scoped_release free;
          event = running().next_event(milliseconds);
        }
        if (event.kind == Event::Kind::done) let_go_of(event.job);
        return std::make_tuple(event.job, static_cast<int>(event.kind));
      },
      nb::arg("milliseconds"),
      "Wait for an event: its job, and 0 for none yet, 1 where all items of a job that is watched are begun, 2 where "
      "the job is done, "
      "3 where the engine has stopped.");
  m.def(
      "stop",
      [](int milliseconds) {
        nb::gil_scoped_release free;
        return running().stop(milliseconds);
      },
      nb::arg("milliseconds"), "Cancel all jobs and end the threads; whether they have ended within that time.");
  m.def("threads", [] { return running().threads(); }, "The threads that there are.");
  m.def("set_niceness", &set_niceness, nb::arg("niceness"),
        "How much threads that start from now on step back for others, as of nice(2).");
  m.def(
      "note_in",
      [](Out<std::uint8_t, 2> lines) {
        if (lines.shape(1) == 0) throw nb::value_error("lines without room");
        nb::cast(lines).release();  // threads write there until the process ends
        note_in(lines.data(), static_cast<std::int32_t>(lines.shape(0)), lines.shape(1));
      },
      nb::arg("lines").noconvert(),
      "Have each thread note the path of the file that it is at in one of these lines, with a zero at its end.");
  m.def("simulate_decoding", &simulate_decoding, nb::arg("nanoseconds"),
        "For benchmarks: wait in the place of decoding; 0 decodes.");
  m.def("level", [] { return static_cast<int>(level()); }, "The instruction set in use: 0, 1 (AVX2), 2 (AVX-512).");
  m.def(
      "force_level", [](int wanted) { return force_level(static_cast<Level>(wanted)); }, nb::arg("level"),
      "For tests: use an instruction set from now on; whether the processor has it.");
}

}  // namespace fastpipe::bindings
