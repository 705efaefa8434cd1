#include "watch.h"

#include "mpi_runtime.h"

namespace mpigrad {

Record record;

}  // namespace mpigrad

MPIGRAD_EXPORT const void* mpigrad_record() { return &mpigrad::record; }

MPIGRAD_EXPORT void mpigrad_set_watched(int on) { mpigrad::watched = on; }

// From now on operations are timed exactly.
MPIGRAD_EXPORT void mpigrad_time_exactly() { mpigrad::timed = true; }
