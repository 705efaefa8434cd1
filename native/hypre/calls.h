// Calls of hypre that may fail on one rank alone, and the state that all systems share.
#pragma once

#include <HYPRE.h>
#include <HYPRE_utilities.h>
#include <mpi.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

#include "guard/watch.h"

namespace mpigrad::hypre {

struct Totals {
  double setup_seconds = 0, solve_seconds = 0;
  int64_t setups = 0, solves = 0;
};

// Sums over all systems of this process.
inline Totals totals;
inline bool initialized = false;
// The communication library's record, which the watchdog reads.
inline Record* watched = nullptr;
// Tells the guard that a solve has failed, so that messages may remain unreceived.
inline void (*failed)() = nullptr;

// A solve in the record. Ranks meet at its start, where the watchdog limits the time of waiting. From
// then on a solve may take any time, unless the process of another rank is stopped meanwhile.
class SolveRecord {
 public:
  explicit SolveRecord(int64_t site) {
    int64_t none = 0;  // otherwise another thread waits, and is watched
    if (!watched || !watched->start_ns.compare_exchange_strong(none, now_ns())) return;
    writes_ = true;
    watched->operation.store("solve", std::memory_order_relaxed);
    watched->site.store(site, std::memory_order_relaxed);
  }
  // All ranks have come.
  void begins() {
    if (!writes_) return;
    watched->unlimited.store(true, std::memory_order_relaxed);
    watched->start_ns.store(now_ns(), std::memory_order_release);
  }
  ~SolveRecord() {
    if (!writes_) return;
    watched->start_ns.store(0, std::memory_order_release);
    watched->unlimited.store(false, std::memory_order_release);
  }
  SolveRecord(const SolveRecord&) = delete;
  SolveRecord& operator=(const SolveRecord&) = delete;

 private:
  bool writes_ = false;
};

// Keeps the first failing call of hypre and skips the calls after it. A rank that fails alone skips
// alone, so `agree` precedes everything that ranks do together.
class Calls {
 public:
  explicit Calls(MPI_Comm comm) : comm_(comm) { HYPRE_ClearAllErrors(); }

  template <class F>
  void operator()(const char* name, F&& call) {
    if (failed()) return;
    const HYPRE_Int code = call() & ~HYPRE_ERROR_CONV;  // the residual decides about convergence
    if (!code) return;
    char text[512] = "";
    HYPRE_DescribeError(code, text);
    fail(std::string(name) + " failed: " + (text[0] ? text : "error " + std::to_string(code)));
  }

  void fail(std::string message) {
    if (!failed()) message_ = std::move(message);
  }
  bool failed() const { return !message_.empty(); }
  const std::string& message() const { return message_; }

  // Collective. A failure on any rank fails all ranks, with the message of the last rank that failed.
  bool agree() {
    HYPRE_ClearAllErrors();
    int rank = 0, worst = 0;
    MPI_Comm_rank(comm_, &rank);
    int mine = failed() && !agreed_ ? rank + 1 : 0;
    MPI_Allreduce(&mine, &worst, 1, MPI_INT, MPI_MAX, comm_);
    if (!worst) return !failed();
    char text[512] = "";
    if (rank + 1 == worst) std::snprintf(text, sizeof text, "%s", message_.c_str());
    MPI_Bcast(text, sizeof text, MPI_CHAR, worst - 1, comm_);
    message_ = "on rank " + std::to_string(worst - 1) + " " + text;
    agreed_ = true;
    return false;
  }

 private:
  MPI_Comm comm_;
  std::string message_;
  bool agreed_ = false;  // all ranks have the message
};

}  // namespace mpigrad::hypre
