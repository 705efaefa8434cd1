// The MPI operation of a reduction, with the results of JAX and NumPy.
//
// Sums of 8-bit and 16-bit integers wrap around modulo 2^8 and 2^16. On processors with AVX, Open
// MPI 4 saturates at the largest value instead, for some array lengths only.
#include "mpi/reductions.h"

#include "ffi.h"

namespace mpigrad {
namespace {

template <class T>
void add(void* theirs, void* sum, int* count, void*) {
  const T* a = static_cast<const T*>(theirs);
  T* b = static_cast<T*>(sum);
  for (int i = 0; i < *count; ++i) b[i] = static_cast<T>(b[i] + a[i]);
}

template <class T>
Handle sum_of() {
  static const Handle made = [] {
    Handle op;
    call(runtime.mpi.Op_create, &add<T>, 1, static_cast<void*>(&op.value));
    return op;
  }();
  return made;
}

}  // namespace

Handle reduction(int64_t op, xla::ffi::DataType type) {
  using xla::ffi::DataType;
  if (op == kSum && (type == DataType::S8 || type == DataType::U8)) return sum_of<uint8_t>();
  if (op == kSum && (type == DataType::S16 || type == DataType::U16)) return sum_of<uint16_t>();
  return reduction(op);
}

}  // namespace mpigrad
