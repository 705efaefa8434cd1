#pragma once

#include "ffi.h"
#include "mpi/mpi_runtime.h"

namespace mpigrad {

constexpr int64_t kSum = 0;  // the first of REDUCTIONS in native.py

Handle reduction(int64_t op, xla::ffi::DataType type);

}  // namespace mpigrad
