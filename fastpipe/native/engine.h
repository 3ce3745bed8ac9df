// The threads of this process, and the jobs that they work through.
//
// A job is a number of items, finished when all are done.  Items are begun in the order in which jobs were submitted; a
// thread that finds a job's items all begun goes on with the next job, so that a slow item holds up its own job only.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "scratch.h"

namespace fastpipe {

// What a job does.  Items are independent of each other.
class Work {
 public:
  virtual ~Work() = default;
  virtual std::int64_t size() const noexcept = 0;
  // Do one item, in any thread; what became of it the work keeps for itself.  Does not throw on purpose: what it
  // throws is taken for lost, and `lost` is called.
  virtual void run(std::int64_t item, Scratch& scratch) = 0;
  virtual void lost(std::int64_t item) noexcept = 0;
};

struct ForkHandlers;

// Bounds how many threads are busy with the jobs of one owner, such as a dataset.
class Channel {
 public:
  explicit Channel(int limit) : limit_(limit) {}
  int limit() const { return limit_; }

 private:
  friend class Engine;
  const int limit_;
  int running_ = 0;  // guarded by the engine's lock
};

// What a thread that watches jobs hears.
struct Event {
  enum class Kind : std::int32_t { none = 0, begun = 1, done = 2, stopped = 3 };
  std::int64_t job = 0;
  Kind kind = Kind::none;  // begun: the last item was, of a job that is watched; done: no item runs, nor ever will
};

// One for a process: see engine().  Its threads know nothing of Python, and are never destroyed.
class Engine {
 public:
  // Begin a job; its number, from 1; 0 where no thread can be had or the engine has stopped.
  //
  // work: owned by the engine until the job's event `done` was handed out, and by whoever shares it.
  // threads: that there are to be in the process, at least.
  std::int64_t submit(std::shared_ptr<Work> work, std::shared_ptr<Channel> channel, int threads);

  // Do all of a job here and in other threads, and return when it is done.
  //
  // The calling thread does items as well, so that the job goes on while all others are busy; those that are free do it
  // before what was submitted, as somebody waits for it.  It has no event.
  // threads: that do it, the calling one among them, and that there are to be in the process besides.
  void run(std::shared_ptr<Work> work, int threads);

  // Begin no further item of a job.  It is done when those that run are.
  void cancel(std::int64_t job);

  // Return whether all items of a job are begun; where they are not, its event `begun` comes as soon as they are.
  bool watch_begun(std::int64_t job);

  // Wait for the next event, for at most so long; kind none where none came.
  Event next_event(int milliseconds);

  // Cancel all jobs and end the threads, waiting for at most so long; whether all have ended.
  bool stop(int milliseconds);

  int threads() const;

  struct State;

 private:
  friend Engine* engine();
  friend struct ForkHandlers;
  Engine() = default;
  State* state_ = nullptr;
};

// This process's engine, made when it is first asked for, and made anew in a forked child, where the threads and jobs
// of the parent are not.  Null where there is no memory.
Engine* engine();

// Run all items in the calling thread.
void run_here(Work& work);

// Run all items in this thread and in those of the process's engine, as of Engine::run(); here alone where there is
// none.
void run_in_threads(std::shared_ptr<Work> work, int threads);

// How much the threads of an engine step back for others, as of nice(2); for those that start from now on.
void set_niceness(int niceness);

}  // namespace fastpipe
