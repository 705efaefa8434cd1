// The request to a system, and its answer.
#pragma once

#include <HYPRE.h>
#include <mpi.h>

#include <cstdint>

#include "hypre/krylov.h"

namespace mpigrad::hypre {

// The end of a solve, with the numbers of mpigrad.solution.Result.
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

struct Request {
  Method method;
  int64_t restart;  // GMRES: the number of its vectors
  double tolerance;
  int64_t max_steps;
  int64_t site;  // id of the user's source line
  int identity;  // hash of the settings that must be the same on all ranks, positive
};

struct Answer {
  Outcome outcome = kConverged;
  int rank = -1;  // the rank at fault, or -1
  HYPRE_Int iterations = 0;
  double residual = 0;  // |b - Ax| / |b|
};

// A rank's part of a sparsity structure, as Python passes it: columns in row order, and the position
// of each entry among the caller's values (null: in row order, too).
struct Structure {
  MPI_Comm comm;
  int64_t first, n;
  const int64_t *row_starts, *columns, *order;

  int64_t entries() const { return row_starts[n]; }
};

// A value in (-1, 1) that depends on the global row alone, so that a verdict is the same for any
// number of ranks (the finalizer of splitmix64).
inline double noise(int64_t row, uint64_t seed) {
  uint64_t z = static_cast<uint64_t>(row) * 0x9E3779B97F4A7C15ull + seed;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return static_cast<double>(static_cast<int64_t>(z ^ (z >> 31))) * 0x1p-63;
}

}  // namespace mpigrad::hypre
