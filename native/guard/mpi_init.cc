// While MPI starts, Python stands still: mpi4py holds its lock. Where a rank has ended before, MPI
// waits for it for ever; a thread that needs neither ends this rank, and so the job. The same when
// MPI ends, after Python.
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

// Never destroyed: the thread may outlive what ends with the process.
std::mutex& lock = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
int turn = 0;  // of the limit that holds, or of none

}  // namespace

MPIGRAD_EXPORT void mpigrad_joining(double seconds, const char* text) {
  // A clock counts in 64 bits: a limit that is as good as none must not overflow it.
  const std::chrono::duration<double> limit(std::min(seconds, 1e8));
  const std::lock_guard<std::mutex> setting(lock);
  const int mine = ++turn;
  try {
    std::thread([limit, mine, said = std::string(text)] {
      std::unique_lock<std::mutex> held(lock);
      if (changed.wait_for(held, limit, [mine] { return turn != mine; })) return;
      [[maybe_unused]] const auto written = write(STDERR_FILENO, said.data(), said.size());
      _exit(1);
    }).detach();
  } catch (const std::system_error&) {  // no threads left: no limit
  }
}

MPIGRAD_EXPORT void mpigrad_joined() {
  const std::lock_guard<std::mutex> held(lock);
  ++turn;
  changed.notify_all();
}
