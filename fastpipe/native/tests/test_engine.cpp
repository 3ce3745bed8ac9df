#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "../engine.h"
#include "check.h"

using namespace fastpipe;

namespace {

void sleep_ms(int milliseconds) {
  timespec left{milliseconds / 1000, (milliseconds % 1000) * 1000000L};
  nanosleep(&left, nullptr);
}

// Counts its items; what one does is a function's.
struct Counted : Work {
  std::int64_t count;
  void (*what)(Counted&, std::int64_t);
  std::atomic<std::int64_t> done{0}, lost_items{0}, running{0}, most{0};
  std::atomic<bool> is_open{true};

  explicit Counted(std::int64_t n, void (*f)(Counted&, std::int64_t) = nullptr) : count(n), what(f) {}
  std::int64_t size() const noexcept override { return count; }
  void run(std::int64_t item, Scratch&) override {
    const std::int64_t now = ++running;
    std::int64_t seen = most.load();
    while (now > seen && !most.compare_exchange_weak(seen, now)) {
    }
    if (what != nullptr) what(*this, item);
    --running;
    ++done;
  }
  void lost(std::int64_t) noexcept override {
    --running;
    ++lost_items;
  }
};

void wait_until_open(Counted& work, std::int64_t) {
  while (!work.is_open.load()) sleep_ms(1);
}

// Events until all of these jobs are done, in their order.
std::vector<Event> until_done(std::set<std::int64_t> jobs) {
  std::vector<Event> heard;
  while (!jobs.empty()) {
    const Event event = engine()->next_event(5000);
    CHECK(event.kind == Event::Kind::begun || event.kind == Event::Kind::done);
    if (event.kind == Event::Kind::none) break;
    heard.push_back(event);
    if (event.kind == Event::Kind::done) jobs.erase(event.job);
  }
  return heard;
}

std::shared_ptr<Channel> wide() { return std::make_shared<Channel>(64); }

}  // namespace

TEST("engine: every item is done once, and of a job that is watched all are said to be begun before that") {
  auto work = std::make_shared<Counted>(1000, wait_until_open);
  work->is_open = false;
  const std::int64_t job = engine()->submit(work, wide(), 4);
  CHECK(job > 0);
  CHECK(!engine()->watch_begun(job));
  work->is_open = true;
  const std::vector<Event> heard = until_done({job});
  CHECK(heard.size() == 2 && heard[0].kind == Event::Kind::begun && heard[1].kind == Event::Kind::done);
  CHECK(engine()->watch_begun(job));
  CHECK(until_done({engine()->submit(std::make_shared<Counted>(10), wide(), 4)}).size() == 1);
  CHECK(work->done == 1000);
  CHECK(engine()->threads() >= 4);
}

TEST("engine: ten thousand jobs, some of them empty") {
  std::set<std::int64_t> jobs;
  std::vector<std::shared_ptr<Counted>> all;
  for (int i = 0; i < 10000; ++i) {
    all.push_back(std::make_shared<Counted>(i % 4));
    jobs.insert(engine()->submit(all.back(), wide(), 4));
  }
  CHECK(jobs.size() == 10000);
  CHECK(until_done(jobs).size() == 10000);
  for (const auto& work : all) CHECK(work->done == work->count);
}

TEST("engine: a slow item holds up its own job only") {
  auto slow = std::make_shared<Counted>(1, wait_until_open);
  slow->is_open = false;
  const std::int64_t first = engine()->submit(slow, wide(), 4);
  auto quick = std::make_shared<Counted>(100);
  const std::int64_t second = engine()->submit(quick, wide(), 4);
  until_done({second});
  CHECK(slow->done == 0 && quick->done == 100);
  slow->is_open = true;
  until_done({first});
  CHECK(slow->done == 1);
}

TEST("engine: items are begun in the order of jobs") {
  static std::atomic<int> turn;
  static std::atomic<bool> in_order;
  turn = 0;
  in_order = true;
  std::set<std::int64_t> jobs;
  auto alone = std::make_shared<Channel>(1);
  for (int i = 0; i < 50; ++i) {
    struct Numbered : Counted {
      int number;
      explicit Numbered(int n) : Counted(3), number(n) {}
      void run(std::int64_t item, Scratch& scratch) override {
        if (turn.fetch_add(1) != number * 3 + item) in_order = false;
        Counted::run(item, scratch);
      }
    };
    jobs.insert(engine()->submit(std::make_shared<Numbered>(i), alone, 4));
  }
  until_done(jobs);
  CHECK(in_order);
}

TEST("engine: a channel bounds how many threads are at its jobs") {
  auto narrow = std::make_shared<Channel>(2);
  auto one = std::make_shared<Counted>(40, [](Counted&, std::int64_t) { sleep_ms(1); });
  auto other = std::make_shared<Counted>(40);
  const std::int64_t a = engine()->submit(one, narrow, 6), b = engine()->submit(other, wide(), 6);
  until_done({a, b});
  CHECK(one->most <= 2 && one->done == 40 && other->done == 40);
}

TEST("engine: what is cancelled begins no further item, and is done when those that run are") {
  auto work = std::make_shared<Counted>(1000, wait_until_open);
  work->is_open = false;
  const std::int64_t job = engine()->submit(work, wide(), 4);
  while (work->running == 0) sleep_ms(1);
  CHECK(!engine()->watch_begun(job));
  engine()->cancel(job);
  CHECK(engine()->watch_begun(job));
  CHECK(engine()->next_event(5000).kind == Event::Kind::begun);
  CHECK(engine()->next_event(20).kind == Event::Kind::none);  // items still run
  work->is_open = true;
  CHECK(engine()->next_event(5000).kind == Event::Kind::done);
  CHECK(work->done > 0 && work->done < 1000);
  engine()->cancel(job);  // of a job that is over: nothing
  engine()->cancel(123456789);
  CHECK(engine()->next_event(1).kind == Event::Kind::none);
}

TEST("engine: an exception is an item that is lost, and nothing else") {
  auto work = std::make_shared<Counted>(10, [](Counted&, std::int64_t item) {
    if (item % 2 == 0) throw std::runtime_error("unexpected");
  });
  until_done({engine()->submit(work, wide(), 4)});
  CHECK(work->done == 5 && work->lost_items == 5);
}

TEST("engine: threads compute as usual, whatever the one that started them does") {
  fenv_t before;
  fegetenv(&before);
  fesetround(FE_DOWNWARD);
#if defined(__SSE2__)
  _mm_setcsr(_mm_getcsr() | 0x8040);  // flush to zero, denormals are zero
#endif
  static std::atomic<int> wrong;
  wrong = 0;
  const int threads = engine()->threads() + 4;  // four of which start now
  auto work = std::make_shared<Counted>(threads, [](Counted& counted, std::int64_t item) {
    wait_until_open(counted, item);
    volatile float small = 1e-40f, one = 1;
    wrong += fegetround() != FE_TONEAREST || small * one == 0 ? 1 : 0;
  });
  work->is_open = false;
  const std::int64_t job = engine()->submit(work, std::make_shared<Channel>(threads), threads);
  while (work->running < threads) sleep_ms(1);  // each thread has an item
  work->is_open = true;
  until_done({job});
  CHECK(fegetround() == FE_DOWNWARD);
  fesetenv(&before);
  CHECK(work->done == threads && wrong == 0);
}

TEST("engine: the work is given back with the event") {
  auto work = std::make_shared<Counted>(3);
  std::weak_ptr<Counted> left = work;
  const std::int64_t job = engine()->submit(std::move(work), wide(), 4);
  until_done({job});
  for (int i = 0; i < 1000 && !left.expired(); ++i) sleep_ms(1);  // its last thread may still hold it
  CHECK(left.expired());
}

TEST("engine: a job that the caller joins is done when run() returns, each item once, and has no event") {
  for (const int threads : {1, 2, 4}) {
    for (const std::int64_t count : {0, 1, 2, 1000}) {
      auto work = std::make_shared<Counted>(count);
      run_in_threads(work, threads);
      CHECK(work->done == count);
      CHECK(work->running == 0);
      CHECK(work->most <= threads);
    }
  }
  CHECK(engine()->next_event(1).kind == Event::Kind::none);
}

TEST("engine: who joins a job does all of it while other threads are busy, or throw") {
  const int threads = std::max(2, engine()->threads());
  auto busy = std::make_shared<Counted>(threads, wait_until_open);
  busy->is_open = false;
  const std::int64_t job = engine()->submit(busy, std::make_shared<Channel>(threads), threads);
  while (busy->running < threads) sleep_ms(1);
  auto work = std::make_shared<Counted>(100, [](Counted&, std::int64_t item) {
    if (item == 50) throw std::runtime_error("an item that fails");
  });
  run_in_threads(work, 2);
  CHECK(work->done == 99);
  CHECK(work->lost_items == 1);
  busy->is_open = true;
  until_done({job});
}

TEST("engine: many threads join jobs of their own") {
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int caller = 0; caller < 8; ++caller) {
    callers.emplace_back([&wrong] {
      for (int round = 0; round < 200; ++round) {
        auto work = std::make_shared<Counted>(7);
        run_in_threads(work, 4);
        if (work->done != 7 || work->running != 0) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0);
}

TEST("engine: run_here does all in the calling thread") {
  Counted work(7);
  run_here(work);
  CHECK(work.done == 7 && work.most == 1);
}

#if !defined(__SANITIZE_THREAD__)  // which refuses threads in a forked child
TEST("engine: a forked child makes its own, the parent goes on") {
  auto before = std::make_shared<Counted>(200, [](Counted&, std::int64_t) { sleep_ms(1); });
  const std::int64_t job = engine()->submit(before, wide(), 4);
  const pid_t child = fork();
  if (child == 0) {
    auto work = std::make_shared<Counted>(100);
    const std::int64_t mine = engine()->submit(work, std::make_shared<Channel>(2), 2);
    bool is_done = false;
    while (!is_done) {
      const Event event = engine()->next_event(5000);
      if (event.kind == Event::Kind::none) _exit(2);
      is_done = event.kind == Event::Kind::done && event.job == mine;
    }
    _exit(work->done == 100 ? 0 : 3);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  until_done({job});
  CHECK(before->done == 200);
}

#if !defined(__SANITIZE_ADDRESS__)
TEST("engine: without threads to be had, submit says so") {
  const pid_t child = fork();
  if (child == 0) {
    rlimit limit{};
    getrlimit(RLIMIT_AS, &limit);
    limit.rlim_cur = 64 << 20;  // no room for another thread's stack after these
    setrlimit(RLIMIT_AS, &limit);
    auto work = std::make_shared<Counted>(10);
    const std::int64_t job = engine()->submit(work, wide(), 100000);
    _exit(job == 0 || engine()->threads() < 100000 ? 0 : 4);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#endif

TEST("engine: stop cancels what is queued, and ends the threads") {
  const pid_t child = fork();  // as the engine of this process is needed on
  if (child == 0) {
    auto work = std::make_shared<Counted>(100000, [](Counted&, std::int64_t) { sleep_ms(1); });
    const std::int64_t job = engine()->submit(work, wide(), 4);
    sleep_ms(10);
    if (!engine()->stop(5000)) _exit(2);
    if (engine()->threads() != 0) _exit(3);
    bool is_done = false;
    for (Event event = engine()->next_event(10); event.kind != Event::Kind::stopped; event = engine()->next_event(10)) {
      if (event.kind == Event::Kind::none) _exit(4);
      is_done = is_done || (event.kind == Event::Kind::done && event.job == job);
    }
    if (engine()->submit(work, wide(), 4) != 0) _exit(5);
    _exit(is_done && work->done < 100000 ? 0 : 6);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#endif
