// Which of two ways computes the sums of one length faster: shared memory or MPI. The program's own
// first sums are the measurement.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace mpigrad {

class SumTrials {
 public:
  bool over() const { return next_ == kTrials; }
  // Whether the next sum goes through shared memory.
  bool shares() const { return over() ? best_[1] < best_[0] : next_ / kRun % 2; }
  // Takes the nanoseconds of the last trial, on the slowest member, and goes on to the next one.
  void add(int64_t ns) {
    int64_t& best = best_[shares()];
    if (next_ % kRun >= kFirst) best = std::min(best, ns);
    ++next_;
  }

 private:
  // Two runs of each way. The first sums of a run find in the caches what the other way left there,
  // so they are not counted. The best of six is hardly disturbed by other programs.
  static constexpr int kRun = 5, kFirst = 2, kTrials = 4 * kRun;
  int next_ = 0;
  int64_t best_[2] = {std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::max()};
};

}  // namespace mpigrad
