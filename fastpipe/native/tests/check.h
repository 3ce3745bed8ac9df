// The smallest test harness that does: TEST cases register themselves, CHECK counts failures and goes on.
#pragma once

#include <cstdio>
#include <cstring>
#include <vector>

namespace fastpipe::tests {

struct Case {
  const char* name;
  void (*run)();
};
inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
inline int& failures() {
  static int count = 0;
  return count;
}
struct Registered {
  Registered(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

// Run all cases, or those whose names contain `only`; the exit code.
inline int run_all(const char* only) {
  int ran = 0;
  for (const Case& one : cases()) {
    if (only != nullptr && std::strstr(one.name, only) == nullptr) continue;
    const int before = failures();
    one.run();
    ++ran;
    std::printf("%s  %s\n", failures() == before ? "ok    " : "FAILED", one.name);
    std::fflush(stdout);
  }
  std::printf("%d cases, %d failed checks\n", ran, failures());
  return failures() == 0 && ran > 0 ? 0 : 1;
}

}  // namespace fastpipe::tests

#define FASTPIPE_JOIN_(a, b) a##b
#define FASTPIPE_JOIN(a, b) FASTPIPE_JOIN_(a, b)
#define TEST(name)                                                                                                 \
  static void FASTPIPE_JOIN(test_, __LINE__)();                                                                    \
  static const ::fastpipe::tests::Registered FASTPIPE_JOIN(registered_, __LINE__)(name,                            \
                                                                                  FASTPIPE_JOIN(test_, __LINE__)); \
  static void FASTPIPE_JOIN(test_, __LINE__)()
#define CHECK(expression)                                                        \
  do {                                                                           \
    if (!(expression)) {                                                         \
      ++::fastpipe::tests::failures();                                           \
      std::printf("%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #expression); \
    }                                                                            \
  } while (false)
