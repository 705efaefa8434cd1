// The maximum or minimum over ranks, and a mask of the elements for which this rank has it.
//
// MPI's MAX and MIN may lose a NaN, depending on the rank that has it. Here the result is NaN, as
// in JAX and NumPy, so that a failure on one rank shows on all ranks.
#include "mpi/handler.h"

namespace mpigrad {
namespace {

template <class T, bool largest>
void combine(void* theirs, void* result, int* count, void*) {
  const T* a = static_cast<const T*>(theirs);
  T* b = static_cast<T*>(result);
  for (int i = 0; i < *count; ++i) {
    const bool better = largest ? a[i] > b[i] : a[i] < b[i], nan = a[i] != a[i];
    b[i] = better | nan ? a[i] : b[i];
  }
}

template <class T, bool largest>
Handle operation() {
  static const Handle made = [] {
    Handle op;
    call(runtime.mpi.Op_create, &combine<T, largest>, 1, static_cast<void*>(&op.value));
    return op;
  }();
  return made;
}

template <class T>
int reduce_and_compare(const Call& c, const Buffer& x, BufferOut& y, bool* own, bool largest) {
  const T* sent = static_cast<const T*>(place(x));
  T* result = static_cast<T*>(place(y));
  bool known;
  const Handle type = arithmetic_type(static_cast<int>(x.element_type()), known);
  const Handle op = largest ? operation<T, true>() : operation<T, false>();
  const int code = in_pieces(x.element_count(), [&](int64_t at, int n) {
    return call(runtime.mpi.Allreduce, static_cast<const void*>(sent + at),
                static_cast<void*>(result + at), n, type, op, c.comm.handle);
  });
  if (code) return code;
  for (size_t i = 0; i < x.element_count(); ++i) own[i] = sent[i] == result[i];
  return 0;
}

ffi::Error extremum(Token, Buffer x, TokenOut, BufferOut y, ffi::Result<ffi::Buffer<ffi::PRED>> own,
                    int64_t comm, int64_t site, int64_t op, int64_t root, int64_t largest) {
  const Call c("allreduce", comm, site, x.size_bytes());
  if (ffi::Error e = c.collective(x, {{"op", op}, {"root", root}}); e.failure()) return e;
  advise_huge_pages(y->untyped_data(), y->size_bytes());
  const auto run =
      x.element_type() == ffi::F32 ? reduce_and_compare<float> : reduce_and_compare<double>;
  return c.done(run(c, x, y, own->typed_data(), largest));
}

}  // namespace
}  // namespace mpigrad

MPIGRAD_HANDLER(mpigrad_extremum, extremum,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y
                    .Ret<xla::ffi::Buffer<xla::ffi::PRED>>() MPIGRAD_WHERE
                    MPIGRAD_ATTR(op) MPIGRAD_ATTR(root) MPIGRAD_ATTR(largest));
