// A thread that gets no signals: they are for the threads of the program.
#pragma once

#include <system_error>
#include <thread>
#include <utility>

#include <pthread.h>
#include <signal.h>

namespace mpigrad::storage {

// A thread that is not joinable if none can be started.
template <class F>
std::thread start_quiet_thread(F work) {
  std::thread started;
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  try {
    started = std::thread(std::move(work));
  } catch (const std::system_error&) {
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  return started;
}

}  // namespace mpigrad::storage
