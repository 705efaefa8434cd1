// Collectives.
#include "handler.h"

namespace mpigrad {
namespace {

ffi::Error barrier(Token, TokenOut, int64_t comm, int64_t site) {
  const Call c("barrier", comm, site, 0);
  if (ffi::Error e = c.collective(); e.failure()) return e;
  return c.done(call(runtime.mpi.Barrier, c.comm.handle));
}

ffi::Error bcast(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site, int64_t root) {
  const Call c("bcast", comm, site, communicator(comm).rank == root ? x.size_bytes() : 0, root);
  if (ffi::Error e = c.collective(x, {{"root", root}}); e.failure()) return e;
  const Words out(*y);
  if (out.data != x.untyped_data()) {
    advise_huge_pages(out.data, y->size_bytes());
    if (c.comm.rank == root) std::memcpy(out.data, x.untyped_data(), x.size_bytes());
  }
  return c.done(call(runtime.mpi.Bcast, out.data, static_cast<int>(out.count), out.type,
                     static_cast<int>(root), c.comm.handle));
}

ffi::Error allreduce(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                     int64_t op) {
  const Call c("allreduce", comm, site, x.size_bytes());
  if (ffi::Error e = c.collective(x, {{"op", op}}); e.failure()) return e;
  bool known;
  const Handle type = arithmetic_type(static_cast<int>(x.element_type()), known);
  if (!known) return c.fail("MPI has no arithmetic for this dtype");
  void* out = y->untyped_data();
  const void* in = x.untyped_data() == out ? runtime.in_place : x.untyped_data();
  advise_huge_pages(out, y->size_bytes());
  return c.done(call(runtime.mpi.Allreduce, in, out, static_cast<int>(x.element_count()), type,
                     reduction(op), c.comm.handle));
}

ffi::Error reduce(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site, int64_t op,
                  int64_t root) {
  const Call c("reduce", comm, site, x.size_bytes(), root);
  if (ffi::Error e = c.collective(x, {{"root", root}, {"op", op}}); e.failure()) return e;
  bool known;
  const Handle type = arithmetic_type(static_cast<int>(x.element_type()), known);
  if (!known) return c.fail("MPI has no arithmetic for this dtype");
  // Off the root MPI leaves the result undefined; here it is zero.
  if (c.comm.rank != root) std::memset(y->untyped_data(), 0, y->size_bytes());
  return c.done(call(runtime.mpi.Reduce, static_cast<const void*>(x.untyped_data()),
                     y->untyped_data(), static_cast<int>(x.element_count()), type, reduction(op),
                     static_cast<int>(root), c.comm.handle));
}

ffi::Error gather(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                  int64_t root) {
  const Call c("gather", comm, site, x.size_bytes(), root);
  if (ffi::Error e = c.collective(x, {{"root", root}}); e.failure()) return e;
  const Words in(x);
  if (c.comm.rank != root) std::memset(y->untyped_data(), 0, y->size_bytes());
  const int count = static_cast<int>(in.count);
  return c.done(call(runtime.mpi.Gather, static_cast<const void*>(in.data), count, in.type,
                     y->untyped_data(), count, in.type, static_cast<int>(root), c.comm.handle));
}

ffi::Error scatter(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                   int64_t root) {
  const Call c("scatter", comm, site, communicator(comm).rank == root ? x.size_bytes() : 0, root);
  if (ffi::Error e = c.collective(x, {{"root", root}}); e.failure()) return e;
  const Words out(*y);
  const int count = static_cast<int>(out.count);
  return c.done(call(runtime.mpi.Scatter, static_cast<const void*>(x.untyped_data()), count,
                     out.type, out.data, count, out.type, static_cast<int>(root), c.comm.handle));
}

}  // namespace
}  // namespace mpigrad

MPIGRAD_HANDLER(mpigrad_barrier, barrier, MPIGRAD_BIND MPIGRAD_IN MPIGRAD_OUT MPIGRAD_WHERE);
MPIGRAD_HANDLER(mpigrad_bcast, bcast,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(root));
MPIGRAD_HANDLER(mpigrad_allreduce, allreduce,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(op));
MPIGRAD_HANDLER(mpigrad_reduce, reduce,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(op) MPIGRAD_ATTR(root));
MPIGRAD_HANDLER(mpigrad_gather, gather,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(root));
MPIGRAD_HANDLER(mpigrad_scatter, scatter,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(root));
