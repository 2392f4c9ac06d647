#pragma once

#include <Python.h>
#include <pthread.h>
#include <unistd.h>

namespace fulgur::python {

/// Lets other threads have the interpreter for a scope. Where the interpreter ends before the scope
/// does, a daemon thread stays here for the rest of the process: CPython before 3.14 would end the
/// thread by unwinding its stack, and C++ aborts the process where a destructor is unwound.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() { restore(state_); }

 private:
  /// A function of its own: in a destructor, which may not throw, the compiler leaves out the
  /// handler.
  [[gnu::noinline]] static void restore(PyThreadState* state) {
    pthread_cleanup_push(stay, nullptr);
    PyEval_RestoreThread(state);
    pthread_cleanup_pop(0);
  }
  static void stay(void*) {
    for (;;) pause();
  }

  PyThreadState* state_;
};

}  // namespace fulgur::python
