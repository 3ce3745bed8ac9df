#include "engine.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cfenv>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>
#include <new>
#include <unordered_map>

namespace fastpipe {

namespace {

// libjpeg and the kernels need little; musl's default of 128 KiB would be too little.
constexpr std::size_t kStackBytes = std::size_t{2} << 20;

std::atomic<int> niceness{0};

struct Running {
  std::int64_t number = 0;
  std::shared_ptr<Work> work;
  std::shared_ptr<Channel> channel;
  std::int64_t count = 0;
  std::int64_t next = 0;     // the first item that nobody has begun
  std::int64_t running = 0;  // items that threads are at
  bool is_watched = false;   // whether somebody wants to hear that all items are begun
  bool is_joined = false;    // whether a thread that is none of the engine's does items too, and waits for the others
};

void do_item(Work& work, std::int64_t item, Scratch& scratch) noexcept {
  try {
    work.run(item, scratch);
  } catch (...) {
    work.lost(item);
  }
  // Not when the next one begins: a thread with nothing to do keeps no memory of an enormous one.
  scratch.arena.reset();
  scratch.chunk.reset();
}

}  // namespace

namespace {

// The engine's own threads round, and keep small numbers, as C++ has it; so do others while they do its items.
class DefaultArithmetic {
 public:
  DefaultArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { std::fesetenv(&before_); }
  DefaultArithmetic(const DefaultArithmetic&) = delete;
  DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace

void set_niceness(int value) { niceness.store(value, std::memory_order_relaxed); }

Scratch* thread_scratch() noexcept {
  thread_local std::unique_ptr<Scratch> own;
  if (!own) own.reset(new (std::nothrow) Scratch);
  return own.get();
}

struct Engine::State {
  // Guards everything below; held across a fork, so that the child finds nothing half done.
  std::mutex lock;
  pthread_cond_t work_there;   // for threads: a job was submitted, or a channel has room again, or the end
  pthread_cond_t event_there;  // for the watcher
  pthread_cond_t joined_done;  // for threads that joined a job: the last item of one is done
  std::deque<std::shared_ptr<Running>> queue;                       // with items that nobody has begun, in order
  std::unordered_map<std::int64_t, std::shared_ptr<Running>> jobs;  // that are not done
  std::deque<Event> events;
  std::int64_t last = 0;
  int threads = 0, idle = 0;  // of them, those that wait for work
  bool stopping = false;

  State() {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&work_there, &attributes);
    pthread_cond_init(&event_there, &attributes);
    pthread_cond_init(&joined_done, &attributes);
    pthread_condattr_destroy(&attributes);
  }

  void tell(std::int64_t job, Event::Kind kind) {
    events.push_back({job, kind});
    pthread_cond_signal(&event_there);
  }

  // All items of a job are begun.
  void tell_begun(const Running& job) {
    if (job.is_watched) tell(job.number, Event::Kind::begun);
  }

  // A job with no item that runs or will: forget it.
  void finish(const std::shared_ptr<Running>& job) {
    if (job->is_joined) {
      pthread_cond_broadcast(&joined_done);
      return;
    }
    jobs.erase(job->number);
    tell(job->number, Event::Kind::done);
  }

  // The first job with an item for a thread that is free, or null.
  std::shared_ptr<Running> next_job() {
    for (const auto& job : queue) {
      if (job->channel->running_ < job->channel->limit()) return job;
    }
    return nullptr;
  }

  void drop_from_queue(const std::shared_ptr<Running>& job) {
    for (auto at = queue.begin(); at != queue.end(); ++at) {
      if (*at == job) {
        queue.erase(at);
        return;
      }
    }
  }

  void work_until_stopped(std::unique_lock<std::mutex>& guard, Scratch& scratch) {
    while (!stopping) {
      std::shared_ptr<Running> job = next_job();
      if (job == nullptr) {
        ++idle;
        pthread_cond_wait(&work_there, guard.mutex()->native_handle());
        --idle;
        continue;
      }
      const std::int64_t item = job->next++;
      ++job->running;
      ++job->channel->running_;
      if (job->next == job->count) {
        drop_from_queue(job);
        tell_begun(*job);
      }
      guard.unlock();
      do_item(*job->work, item, scratch);
      guard.lock();
      --job->running;
      --job->channel->running_;  // nobody has to be woken for that: this thread looks again itself
      if (job->running == 0 && job->next == job->count) finish(job);
      if (job.use_count() == 1) {  // the work's memory is given back without the lock
        guard.unlock();
        job.reset();
        guard.lock();
      }
    }
  }

  void thread_main() noexcept {
    Scratch scratch;
    std::unique_lock<std::mutex> guard(lock);
    work_until_stopped(guard, scratch);
    --threads;
    pthread_cond_broadcast(&event_there);
  }

  static void* enter(void* state) noexcept {
    // A thread begins with the rounding, and the flushing of small numbers, of the one that starts it.
    std::fesetenv(FE_DFL_ENV);
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "fastpipe");
    const int value = niceness.load(std::memory_order_relaxed);
    if (value > 0) setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), value);
#endif
    static_cast<State*>(state)->thread_main();
    return nullptr;
  }

  // Start threads until there are so many; called with the lock held.
  void grow(int wanted) {
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0) return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    sigset_t all, before;  // signals are for the script's threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (threads < wanted) {
      pthread_t thread;
      if (pthread_create(&thread, &attributes, enter, this) != 0) break;  // fewer will do, but not none
      ++threads;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
  }
};

namespace {

timespec in_milliseconds(int milliseconds) {
  timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += milliseconds / 1000;
  until.tv_nsec += (milliseconds % 1000) * 1000000L;
  if (until.tv_nsec >= 1000000000L) {
    until.tv_nsec -= 1000000000L;
    ++until.tv_sec;
  }
  return until;
}

}  // namespace

std::int64_t Engine::submit(std::shared_ptr<Work> work, std::shared_ptr<Channel> channel, int threads) {
  auto job = std::make_shared<Running>();
  job->count = work->size();
  job->work = std::move(work);
  job->channel = std::move(channel);
  std::unique_lock<std::mutex> guard(state_->lock);
  if (state_->stopping) return 0;
  if (state_->threads < threads) state_->grow(threads);
  if (state_->threads == 0) return 0;
  job->number = ++state_->last;
  if (job->count == 0) {
    state_->tell(job->number, Event::Kind::done);
    return job->number;
  }
  state_->jobs.emplace(job->number, job);
  state_->queue.push_back(job);
  // Not all threads: of 64 that wake up for a job of one item, 63 take the lock for nothing.
  const std::int64_t most = std::min<std::int64_t>(job->channel->limit(), state_->idle);
  for (std::int64_t woken = 0; woken < std::min(job->count, most); ++woken) pthread_cond_signal(&state_->work_there);
  return job->number;
}

void Engine::run(std::shared_ptr<Work> work, int threads) {
  auto job = std::make_shared<Running>();
  job->count = work->size();
  job->channel = std::make_shared<Channel>(threads - 1);
  job->is_joined = true;
  job->work = std::move(work);
  Scratch* scratch = thread_scratch();
  const DefaultArithmetic arithmetic;
  std::unique_lock<std::mutex> guard(state_->lock);
  if (threads > 1 && job->count > 1 && !state_->stopping) {
    if (state_->threads < threads - 1) state_->grow(threads - 1);
    state_->queue.push_front(job);
    const std::int64_t most = std::min({job->count - 1, std::int64_t{threads} - 1, std::int64_t{state_->idle}});
    for (std::int64_t woken = 0; woken < most; ++woken) pthread_cond_signal(&state_->work_there);
  }
  while (job->next < job->count) {
    const std::int64_t item = job->next++;
    if (job->next == job->count) state_->drop_from_queue(job);
    guard.unlock();
    if (scratch == nullptr) {
      job->work->lost(item);
    } else {
      do_item(*job->work, item, *scratch);
    }
    guard.lock();
  }
  while (job->running > 0) pthread_cond_wait(&state_->joined_done, state_->lock.native_handle());
}

void Engine::cancel(std::int64_t number) {
  std::unique_lock<std::mutex> guard(state_->lock);
  const auto found = state_->jobs.find(number);
  if (found == state_->jobs.end()) return;
  const std::shared_ptr<Running> job = found->second;
  if (job->next < job->count) {
    job->next = job->count;
    state_->drop_from_queue(job);
    state_->tell_begun(*job);
  }
  if (job->running == 0) state_->finish(job);
}

bool Engine::watch_begun(std::int64_t number) {
  std::unique_lock<std::mutex> guard(state_->lock);
  const auto found = state_->jobs.find(number);
  if (found == state_->jobs.end() || found->second->next == found->second->count) return true;
  found->second->is_watched = true;
  return false;
}

Event Engine::next_event(int milliseconds) {
  const timespec until = in_milliseconds(milliseconds);
  std::unique_lock<std::mutex> guard(state_->lock);
  while (state_->events.empty()) {
    if (state_->stopping && state_->threads == 0) return {0, Event::Kind::stopped};
    if (pthread_cond_timedwait(&state_->event_there, state_->lock.native_handle(), &until) != 0) return {};
  }
  const Event event = state_->events.front();
  state_->events.pop_front();
  return event;
}

bool Engine::stop(int milliseconds) {
  const timespec until = in_milliseconds(milliseconds);
  std::unique_lock<std::mutex> guard(state_->lock);
  state_->stopping = true;
  std::deque<std::shared_ptr<Running>> left;
  left.swap(state_->queue);
  for (const auto& job : left) {
    if (job->is_joined) continue;  // its other thread does what is left
    job->next = job->count;
    state_->tell_begun(*job);
    if (job->running == 0) state_->finish(job);
  }
  pthread_cond_broadcast(&state_->work_there);
  pthread_cond_broadcast(&state_->event_there);
  while (state_->threads > 0) {
    if (pthread_cond_timedwait(&state_->event_there, state_->lock.native_handle(), &until) != 0) return false;
  }
  return true;
}

int Engine::threads() const {
  std::unique_lock<std::mutex> guard(state_->lock);
  return state_->threads;
}

namespace {

std::mutex making;                      // guards `current`; held across a fork
std::atomic<Engine*> current{nullptr};  // never destroyed: its threads may outlive everything
Engine::State* locked_for_fork = nullptr;

}  // namespace

// The child has none of the parent's threads, and so forgets the engine with all its memory and makes its own when it
// first needs one.  Locks are held across the fork, so that the child finds nothing half done.
struct ForkHandlers {
  static void before() {
    making.lock();
    Engine* engine = current.load();
    locked_for_fork = engine == nullptr ? nullptr : engine->state_;
    if (locked_for_fork != nullptr) locked_for_fork->lock.lock();
  }
  static void in_parent() {
    if (locked_for_fork != nullptr) locked_for_fork->lock.unlock();
    making.unlock();
  }
  static void in_child() {
    if (locked_for_fork != nullptr) locked_for_fork->lock.unlock();
    current.store(nullptr);
    making.unlock();
  }
};

Engine* engine() {
  Engine* found = current.load();
  if (found != nullptr) return found;
  std::unique_lock<std::mutex> guard(making);
  found = current.load();
  if (found != nullptr) return found;
  static bool registered = false;
  if (!registered) {
    registered = true;
    pthread_atfork(ForkHandlers::before, ForkHandlers::in_parent, ForkHandlers::in_child);
  }
  found = new (std::nothrow) Engine;
  if (found == nullptr) return nullptr;
  found->state_ = new (std::nothrow) Engine::State;
  if (found->state_ == nullptr) {
    delete found;
    return nullptr;
  }
  current.store(found);
  return found;
}

void run_here(Work& work) {
  const DefaultArithmetic arithmetic;
  Scratch* scratch = thread_scratch();
  for (std::int64_t item = 0; item < work.size(); ++item) {
    if (scratch == nullptr) {
      work.lost(item);
    } else {
      do_item(work, item, *scratch);
    }
  }
}

void run_in_threads(std::shared_ptr<Work> work, int threads) {
  Engine* const found = threads > 1 && work->size() > 1 ? engine() : nullptr;
  if (found == nullptr) {
    run_here(*work);
  } else {
    found->run(std::move(work), threads);
  }
}

}  // namespace fastpipe
