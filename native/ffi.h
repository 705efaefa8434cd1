// XLA's FFI, at the oldest version that mpigrad supports.
//
// A jaxlib rejects handlers that were compiled with newer headers than its own. mpigrad uses
// nothing newer than version 0.2 (jaxlib 0.8), whatever headers it is built with, so its handlers
// declare that version. One build then runs with every jaxlib from 0.8 on.

#ifndef MPIGRAD_FFI_H_
#define MPIGRAD_FFI_H_

#include "xla/ffi/api/c_api.h"

static_assert(XLA_FFI_API_MAJOR == 0 && XLA_FFI_API_MINOR >= 2, "build with jax>=0.8");
#undef XLA_FFI_API_MINOR
#define XLA_FFI_API_MINOR 2

#include "xla/ffi/api/ffi.h"

#endif  // MPIGRAD_FFI_H_
