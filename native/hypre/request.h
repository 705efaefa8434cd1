// What is asked of a system, and what it answers.
#pragma once

#include <HYPRE.h>
#include <mpi.h>

#include <cstdint>

#include "hypre/krylov.h"

namespace mpigrad::hypre {

// What came of a solve; the same numbers as mpigrad.sparse.Result.
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
  int64_t restart;  // GMRES: its vectors
  double tolerance;
  int64_t max_steps;
  int64_t site;  // number of the source line that asks
  int identity;  // of all that ranks must ask for alike, positive
};

struct Answer {
  Outcome outcome = kConverged;
  int rank = -1;  // the rank at fault, where there is one
  HYPRE_Int iterations = 0;
  double residual = 0;  // |b - Ax| / |b|
};

// A rank's part of a sparsity structure, as Python hands it over: columns in the order of the rows,
// and where each stands among the caller's values (null: there, too).
struct Structure {
  MPI_Comm comm;
  int64_t first, n;
  const int64_t *row_starts, *columns, *order;

  int64_t entries() const { return row_starts[n]; }
};

// A number in (-1, 1) that depends on the global row alone, so that a verdict is the same for any
// number of ranks (the finalizer of splitmix64).
inline double noise(int64_t row, uint64_t seed) {
  uint64_t z = static_cast<uint64_t>(row) * 0x9E3779B97F4A7C15ull + seed;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return static_cast<double>(static_cast<int64_t>(z ^ (z >> 31))) * 0x1p-63;
}

}  // namespace mpigrad::hypre
