#pragma once

#include "mpi_runtime.h"
#include "ffi.h"

namespace mpigrad {

constexpr int64_t kSum = 0;  // REDUCTIONS (native.py) begin with it

Handle reduction(int64_t op, xla::ffi::DataType type);

}  // namespace mpigrad
