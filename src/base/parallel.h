#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

namespace fulgur {

/// Threads that `parallel_for` uses: `threads`, or OpenMP's choice when 0.
inline int thread_count(int threads) { return threads > 0 ? threads : omp_get_max_threads(); }

/// The calling thread's number inside a `parallel_for`, 0 outside.
inline int thread_index() { return omp_get_thread_num(); }

/// Calls body(i) for every i of [0, n), handed out one by one in order, on `threads` threads.
/// The first exception thrown by a body is rethrown here once all threads are done; one thread
/// stops there.
template <class Body>
void parallel_for(int64_t n, int threads, const Body& body) {
  const int used = static_cast<int>(std::clamp<int64_t>(n, 1, thread_count(threads)));
  // An OpenMP team of one thread costs as much as a small call: memory and a system call. It is
  // needed inside a parallel region of the caller, whose thread numbers are those of its own team.
  if (used == 1 && omp_in_parallel() == 0) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  std::exception_ptr error;
  // Instead of a critical section, whose lock may stay taken in a child of fork().
  std::atomic<bool> failed = false;
#pragma omp parallel for schedule(dynamic, 1) num_threads(used) if (used > 1)
  for (int64_t i = 0; i < n; ++i) {
    try {
      body(i);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace fulgur
