// A time limit for MPI_Init and MPI_Finalize. During MPI_Init mpi4py holds Python's lock, and MPI
// waits without end for a rank that has already ended. A thread that needs neither Python nor MPI
// then ends this rank, and with it the job. The same holds for MPI_Finalize, when Python is gone.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "mpi/mpi_runtime.h"

namespace {

// Never destroyed: the thread may outlive the static objects of the process.
std::mutex& lock = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
int generation = 0;  // changes when a limit starts or stops

}  // namespace

MPIGRAD_EXPORT void mpigrad_start_time_limit(double seconds, const char* text) {
  // The clock counts in 64 bits: a very long limit must not overflow it.
  const std::chrono::duration<double> limit(std::min(seconds, 1e8));
  const std::lock_guard<std::mutex> setting(lock);
  const int own = ++generation;
  try {
    std::thread([limit, own, message = std::string(text)] {
      std::unique_lock<std::mutex> held(lock);
      if (changed.wait_for(held, limit, [own] { return generation != own; })) return;
      [[maybe_unused]] const auto written = write(STDERR_FILENO, message.data(), message.size());
      _exit(1);
    }).detach();
  } catch (const std::system_error&) {  // no threads left: no limit
  }
}

MPIGRAD_EXPORT void mpigrad_stop_time_limit() {
  const std::lock_guard<std::mutex> held(lock);
  ++generation;
  changed.notify_all();
}
