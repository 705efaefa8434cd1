// The record of this rank's current operation, written around every blocking call and read by the
// watchdog.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

#include "guard/trace.h"

namespace mpigrad {

// Reading a clock takes as long as recording all else about a small message. Operations therefore
// read it only for a trace, or if the program asks for communication times. The watchdog finds how
// long an operation has waited by looking at it repeatedly.
MPIGRAD_SHARED extern bool timed;

// How much is recorded of an operation: nothing, the state of the rank (its operation and start),
// or also its contracts and messages. Only bench/guard_overhead.py, which measures the cost,
// records less than everything.
enum Recording : int { kRecordNothing, kRecordState, kRecordAll };
MPIGRAD_SHARED extern int recording;

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

// Read from Python as five 64-bit integers, a string pointer and a bool.
struct Record {
  std::atomic<int64_t> start_ns{0};  // 0: outside operations. kUntimed: in one, start not read
  std::atomic<int64_t> site{0};
  std::atomic<int64_t> calls{0};
  std::atomic<int64_t> busy_ns{0};  // time spent inside operations while they are timed
  std::atomic<int64_t> bytes{0};    // bytes handed to MPI by this rank
  std::atomic<const char*> operation{nullptr};
  std::atomic<bool> unlimited{false};  // the time limit does not apply
};

MPIGRAD_SHARED extern Record record;
constexpr int64_t kUntimed = 1;

// The relation of a new operation to the one in progress on this rank: none exists, the new one
// is part of it, or the new one is refused because the other belongs to another thread.
enum class Standing { first, within, refused };

// Shows an operation in the record while this object lives, then shows the interrupted operation
// again. A refused operation does not change the record: the other thread's stays watched.
class Shown {
 public:
  Shown(Standing standing, const char* operation, int64_t site, int64_t start_ns)
      : standing_(recording == kRecordNothing ? Standing::refused : standing) {
    if (standing_ == Standing::refused) return;
    if (standing_ == Standing::within) {
      operation_ = record.operation.load(std::memory_order_relaxed);
      site_ = record.site.load(std::memory_order_relaxed);
    }
    show(operation, site, start_ns);
  }
  ~Shown() {
    if (standing_ == Standing::first) record.start_ns.store(0, std::memory_order_release);
    if (standing_ == Standing::within) show(operation_, site_, now_ns());
  }
  Shown(const Shown&) = delete;
  Shown& operator=(const Shown&) = delete;
  bool refused() const { return standing_ == Standing::refused; }

 private:
  static void show(const char* operation, int64_t site, int64_t start_ns) {
    record.operation.store(operation, std::memory_order_relaxed);
    record.site.store(site, std::memory_order_relaxed);
    record.start_ns.store(start_ns, std::memory_order_release);
  }
  const Standing standing_;
  const char* operation_ = nullptr;
  int64_t site_ = 0;
};

// The lifetime of one operation. Only the thread that runs the operation writes the record.
class Watch {
 public:
  const int64_t start_ns;

  Watch(Standing standing, const char* operation, int64_t slot, int64_t site, int64_t bytes,
        int64_t peer)
      : start_ns(timed ? now_ns() : kUntimed),
        shown_(standing, operation, site, start_ns),
        bytes_(bytes),
        event_{operation, start_ns, 0, slot, site, bytes, peer} {}
  // A long operation makes progress: its waiting time starts again.
  void moves() { record.start_ns.store(now_ns(), std::memory_order_release); }
  // Sets the number of bytes, for operations that know it only at their end.
  void sent(int64_t bytes) { event_.bytes = bytes_ += bytes; }
  ~Watch() {
    if (shown_.refused()) return;
    if (start_ns != kUntimed) {
      event_.end_ns = now_ns();
      add(record.busy_ns, event_.end_ns - start_ns);
      if (trace_on) trace_event(event_);
    }
    add(record.calls, 1);
    add(record.bytes, bytes_);
  }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  static void add(std::atomic<int64_t>& a, int64_t n) {
    a.store(a.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
  const Shown shown_;
  int64_t bytes_;
  TraceEvent event_;
};

}  // namespace mpigrad
