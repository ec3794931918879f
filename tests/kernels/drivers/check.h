// What every driver of the emulator's tests needs: expectations that count, and kernels chosen by name.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

inline int failures = 0;
#define EXPECT(condition)                                                \
  do {                                                                   \
    if (!(condition)) {                                                  \
      ++failures;                                                        \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);        \
    }                                                                    \
  } while (0)

struct NamedRun {
  const char* name;
  bool (*run)();  // false: the result is wrong
};
// Runs one of `runs` and returns the exit status: 0 right, 1 wrong; the emulator itself ends a program with 3.
inline int run_by_name(const std::vector<NamedRun>& runs, const char* name) {
  for (const NamedRun& r : runs) {
    if (std::string(r.name) != name) continue;
    const bool right = r.run();
    std::printf("%s: %s\n", name, right ? "right" : "wrong values");
    return right ? 0 : 1;
  }
  std::printf("there is no run named %s\n", name);
  return 2;
}
