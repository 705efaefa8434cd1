#include "guard/watch.h"

#include "mpi/mpi_runtime.h"

namespace mpigrad {

bool timed = false;
int recording = kRecordAll;
Record record;

}  // namespace mpigrad

MPIGRAD_EXPORT const void* mpigrad_record() { return &mpigrad::record; }

MPIGRAD_EXPORT void mpigrad_set_recording(int what) { mpigrad::recording = what; }

// Time operations exactly from now on.
MPIGRAD_EXPORT void mpigrad_time_exactly() { mpigrad::timed = true; }
