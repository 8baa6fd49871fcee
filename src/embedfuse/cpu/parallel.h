// Threads: OpenMP where it is, else one thread. No result may depend on their number.
#pragma once

#include "buffer.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace embedfuse {
namespace {

// The threads that run one `parallel` body together.
struct Team {
  int thread, threads;

  // Waits for all of them. A team of one must not ask OpenMP, which would wait for a caller's own team.
  void wait() const {
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp barrier
    }
#endif
  }
  // This thread's share of `count` things.
  int64_t first(int64_t count) const { return count * thread / threads; }
  int64_t last(int64_t count) const { return count * (thread + 1) / threads; }
};

// Runs `body(team)` in each thread.
template <class Body>
void parallel(int threads, const Body& body) {
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    body(Team{omp_get_thread_num(), omp_get_num_threads()});
    return;
  }
#endif
  (void)threads;
  body(Team{0, 1});
}

// The threads worth waking for `work` units, each of which takes some nanoseconds.
inline int threads_for(int64_t work, int threads) {
  constexpr int64_t WORTH_A_THREAD = 8192;
  return static_cast<int>(smaller<int64_t>(larger(threads, 1), 1 + work / WORTH_A_THREAD));
}

// Runs `body(task, thread)` for each of `count` tasks, in any order.
template <class Body>
void parallel_tasks(int64_t count, int threads, const Body& body) {
  int64_t next = 0;
  parallel(static_cast<int>(smaller<int64_t>(threads, count)), [&](const Team& team) {
    for (;;) {
      const int64_t task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (task >= count) return;
      body(task, team.thread);
    }
  });
}

// Runs `body(first, last, thread)` for ranges that make up 0 .. count, all but the last `at_once` long.
template <class Body>
void parallel_ranges(int64_t count, int64_t at_once, int threads, const Body& body) {
  parallel_tasks(ceil_div(count, at_once), threads, [&](int64_t task, int thread) {
    body(task * at_once, smaller(count, (task + 1) * at_once), thread);
  });
}

// Lowers a number that several threads lower.
inline void atomic_min(int64_t* target, int64_t value) {
  int64_t seen = __atomic_load_n(target, __ATOMIC_RELAXED);
  while (value < seen && !__atomic_compare_exchange_n(target, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

}  // namespace
}  // namespace embedfuse
