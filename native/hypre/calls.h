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
// What the communication library offers: the record that the watchdog reads, the beginning and end of an
// operation (native/guard/guard.cc), and a note that a solve has failed, so that messages may remain
// unreceived.
struct Guard {
  Record* record = nullptr;
  const char* (*begin)(const char* operation, int64_t slot, int64_t site, bool unlimited, bool* begun);
  void (*end)();
  void (*fail)();
};
inline Guard guard;

// A solve as an operation of this rank. Ranks meet at its start, where the watchdog limits the time of
// waiting. From then on a solve may take any time, unless another rank is stopped or its host is lost.
class SolveRecord {
 public:
  SolveRecord(int64_t slot, int64_t site) {
    if (guard.record) refusal_ = guard.begin("solve", slot, site, false, &begun_);
  }
  ~SolveRecord() {
    if (begun_) guard.end();
  }
  // Why the solve must not begin, or nullptr.
  const char* refusal() const { return refusal_; }
  // All ranks have come.
  void ranks_have_come() const {
    if (!begun_) return;
    guard.record->unlimited.store(true, std::memory_order_relaxed);
    guard.record->start_ns.store(now_ns(), std::memory_order_release);
  }
  SolveRecord(const SolveRecord&) = delete;
  SolveRecord& operator=(const SolveRecord&) = delete;

 private:
  const char* refusal_ = nullptr;
  bool begun_ = false;
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
