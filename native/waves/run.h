// A run of one physics as a handler sees it: operands in, the time loop, results out.
#pragma once

#include "mpi/handler.h"
#include "waves/tile.h"

namespace mpigrad::waves {

using Arguments = ffi::RemainingArgs;
using Results = ffi::RemainingRets;

enum Kind { kForward, kTangent, kAdjoint };

// Each is in its own file, because they take the longest to compile.
using Run = ffi::Error(Kind kind, Call& c, const Setup& setup, Arguments& in, Results& out,
                       bool rest, bool save);
Run run_acoustic, run_acoustic3d, run_acoustic3d_density;
Run run_elastic, run_elastic_order8, run_elastic3d, run_elastic3d_order8;

}  // namespace mpigrad::waves
