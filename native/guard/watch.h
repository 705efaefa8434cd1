// What this rank is doing: one record, written around every blocking call, read by the watchdog.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

#include "guard/trace.h"

namespace mpigrad {

// Clocks take as long as all else that is noted of a small message: operations read them only for a
// trace, or where somebody asks how long communication takes. How long one waits already, the
// watchdog finds by looking again and again.
inline bool timed = false;

// What is noted of an operation. Less than all of it only in bench/guard_overhead.py, which measures what that
// costs: where each rank is and since when, and also what it has agreed, sent and received.
enum Noted : int { kNothing, kWhere, kAll };
inline int noted = kAll;

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

// Read from Python as five 64-bit integers, a string pointer and a bool.
struct Record {
  std::atomic<int64_t> start_ns{0};  // 0: in no operation; kUntimed: in one
  std::atomic<int64_t> site{0};
  std::atomic<int64_t> calls{0};
  std::atomic<int64_t> busy_ns{0};  // time spent inside operations while they are timed
  std::atomic<int64_t> bytes{0};    // bytes handed to MPI by this rank
  std::atomic<const char*> operation{nullptr};
  std::atomic<bool> unlimited{false};  // the time limit does not hold for this operation
};

extern Record record;
constexpr int64_t kUntimed = 1;

// How an operation stands to the one that is under way on this rank, if any: none is, it is part of
// that one, or it is refused, since that one is another thread's.
enum class Standing { first, within, refused };

// In the record as long as this lives. What an operation interrupts is shown again afterwards; one that
// is refused leaves no trace there: what the other thread waits for is watched on.
class Shown {
 public:
  Shown(Standing standing, const char* operation, int64_t site, int64_t start_ns)
      : standing_(noted == kNothing ? Standing::refused : standing) {
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

// The life of one operation. Only the thread that runs the operation writes the record.
class Watch {
 public:
  const int64_t start_ns;

  Watch(Standing standing, const char* operation, int64_t slot, int64_t site, int64_t bytes,
        int64_t peer)
      : start_ns(timed ? now_ns() : kUntimed),
        shown_(standing, operation, site, start_ns),
        bytes_(bytes),
        event_{operation, start_ns, 0, slot, site, bytes, peer} {}
  // A long operation gets on: what it waits for now, it waits for since now.
  void moves() { record.start_ns.store(now_ns(), std::memory_order_release); }
  // What an operation knows only afterwards.
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
