// The request to a system, and its answer.
#pragma once

#include <HYPRE.h>
#include <mpi.h>

#include <cstdint>

#include "hypre/calls.h"
#include "hypre/krylov.h"
#include "stencil/verdict.h"

namespace mpigrad::hypre {

using namespace stencil;  // Answer and its outcomes

struct Request {
  Method method;
  int64_t restart;  // GMRES: the number of its vectors
  double tolerance;
  int64_t max_steps;
  const SolveRecord& record;
  RequestText text;
};

// A rank's part of a sparsity structure, as Python passes it: columns in row order, and the position
// of each entry among the caller's values (null: in row order, too).
struct Structure {
  MPI_Comm comm;
  int64_t first, n;
  const int64_t *row_starts, *columns, *order;

  int64_t entries() const { return row_starts[n]; }
};

}  // namespace mpigrad::hypre
