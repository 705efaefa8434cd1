#include "watch.h"

#include "mpi_runtime.h"

namespace mpigrad {

Record record;

}  // namespace mpigrad

MPIGRAD_EXPORT const void* mpigrad_record() { return &mpigrad::record; }
