// The end of a solve, and the error that tells of it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace mpigrad::stencil {

// The numbers of mpigrad.solution.Result.
enum Outcome {
  kConverged = 0,
  kMaxSteps = 1,
  kNotFinite = 2,
  kNotPositive = 3,
  kNotSymmetric = 4,
  kBreakdown = 5,
  kStagnated = 6,
  kZeroDiagonal = 7
};

struct Answer {
  Outcome outcome = kConverged;
  int rank = -1;  // the rank at fault, or -1
  int64_t iterations = 0;
  double residual = 0;  // |b - Ax| / |b|
};

}  // namespace mpigrad::stencil
