// Collectives.
#include <optional>

#include "mpi/blocks.h"
#include "mpi/reductions.h"
#include "mpi/shared_sum.h"

namespace mpigrad {
namespace {

// Data that MPI reduces.
struct Numbers {
  const char* data;
  int64_t count;
  bool known;
  ffi::DataType element;
  Handle type;
  explicit Numbers(const Buffer& x)
      : data(static_cast<char*>(place(x))),
        count(x.element_count()),
        element(x.element_type()),
        type(arithmetic_type(static_cast<int>(element), known)) {}
  Handle reduction(int64_t op) const { return mpigrad::reduction(op, element); }
  // Calls reduce(input, output, count) for pieces of `n` numbers from `first` on.
  template <class Reduce>
  int reduce_pieces(int64_t first, int64_t n, void* result, Reduce&& reduce) const {
    const size_t width = ffi::ByteWidth(element);
    return in_pieces(n, [&](int64_t at, int count) {
      return reduce(static_cast<const void*>(data + (first + at) * width),
                    static_cast<void*>(static_cast<char*>(result) + at * width), count);
    });
  }
  template <class Reduce>
  int reduce_pieces(void* result, Reduce&& reduce) const {
    return reduce_pieces(0, count, result, reduce);
  }
};
constexpr char kNoArithmetic[] = 
    "MPI has no reduction for this dtype. Convert the array first, for example to float32.";

ffi::Error barrier(Token, TokenOut, int64_t comm, int64_t site) {
  const Call c("barrier", comm, site, 0);
  if (ffi::Error e = c.collective(); e.failure()) return e;
  return c.done(call(runtime.mpi.Barrier, c.comm.handle));
}

ffi::Error bcast(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site, int64_t root) {
  const Call c("bcast", comm, site, members_of(comm).rank == root ? x.size_bytes() : 0, root);
  if (ffi::Error e = c.collective(x, {{"root", root}}); e.failure()) return e;
  const Words out(y);
  if (out.data != x.untyped_data()) {
    advise_huge_pages(out.data, y->size_bytes());
    if (c.comm.rank == root) copy_bytes(out.data, x.untyped_data(), x.size_bytes());
  }
  return c.done(in_pieces(out.count, [&](int64_t at, int n) {
    void* piece = static_cast<char*>(out.data) + at * out.width;
    return call(runtime.mpi.Bcast, piece, n, out.type, static_cast<int>(root), c.comm.handle);
  }));
}

// `root` is the only rank that needs the result, or -1. All members must pass the same.
ffi::Error allreduce(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site, int64_t op,
                     int64_t root) {
  const Call c("allreduce", comm, site, x.size_bytes());
  if (ffi::Error e = c.collective(x, {{"op", op}, {"root", root}}); e.failure()) return e;
  const Numbers in(x);
  if (!in.known) return c.fail(kNoArithmetic);
  void* out = place(y);
  const bool wide = in.element == ffi::F64 || in.element == ffi::C128;
  const bool real = wide || in.element == ffi::F32 || in.element == ffi::C64;
  const Summand summand{in.data, out, x.size_bytes(), wide};
  Way way = op == kSum && real ? way_of_sum(c.slot, summand.bytes) : Way::kMPI;
  std::optional<SumTrial> trial;
  if (way == Way::kTrial) {
    trial.emplace(c.slot, summand);
    if (!trial->error.empty()) return c.done(trial->error);
    way = trial->way;
  }
  advise_huge_pages(out, y->size_bytes());
  if (way == Way::kShared) return c.done(shared_sum(c.slot, summand));
  return c.done(in.reduce_pieces(out, [&](const void* from, void* to, int n) {
    return call(runtime.mpi.Allreduce, from == to ? runtime.in_place : from, to, n, in.type,
                in.reduction(op), c.comm.handle);
  }));
}

ffi::Error reduce(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site, int64_t op,
                  int64_t root) {
  const Call c("reduce", comm, site, x.size_bytes(), root);
  if (ffi::Error e = c.collective(x, {{"root", root}, {"op", op}}); e.failure()) return e;
  const Numbers in(x);
  if (!in.known) return c.fail(kNoArithmetic);
  const int code = in.reduce_pieces(place(y), [&](const void* from, void* to, int n) {
    return call(runtime.mpi.Reduce, from, to, n, in.type, in.reduction(op),
                static_cast<int>(root), c.comm.handle);
  });
  // Off the root MPI leaves the result undefined. Here it is zero, written while the root still
  // adds.
  if (c.comm.rank != root) clear_bytes(y->untyped_data(), y->size_bytes());
  return c.done(code);
}

// `op` is a reduction that MPI does not compute itself and for which the values are gathered, or
// -1. All members must pass the same.
ffi::Error gather(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site, int64_t op,
                  int64_t root) {
  const Call c("gather", comm, site, x.size_bytes(), root);
  if (ffi::Error e = c.collective(x, {{"root", root}, {"op", op}}); e.failure()) return e;
  const Words in(x);
  int code;
  if (is_large(in.count * c.comm.size)) {
    Blocks sends(c.comm.size), receives(c.comm.size);
    sends[root] = {static_cast<char*>(in.data), in.count};
    if (c.comm.rank == root) receives = equal_blocks(place(y), in.width, in.count, c.comm.size);
    code = exchange(c, in.width, sends, receives);
  } else {
    const int count = static_cast<int>(in.count);
    code = call(runtime.mpi.Gather, static_cast<const void*>(in.data), count, in.type, place(y),
                count, in.type, static_cast<int>(root), c.comm.handle);
  }
  if (c.comm.rank != root) clear_bytes(y->untyped_data(), y->size_bytes());
  return c.done(code);
}

ffi::Error scatter(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                   int64_t root) {
  const Call c("scatter", comm, site, members_of(comm).rank == root ? x.size_bytes() : 0, root);
  if (ffi::Error e = c.collective(x, {{"root", root}}); e.failure()) return e;
  const Words out(y);
  if (is_large(out.count * c.comm.size)) {
    Blocks sends(c.comm.size), receives(c.comm.size);
    if (c.comm.rank == root)
      sends = equal_blocks(x.untyped_data(), out.width, out.count, c.comm.size);
    receives[root] = {static_cast<char*>(out.data), out.count};
    return c.done(exchange(c, out.width, sends, receives));
  }
  const int count = static_cast<int>(out.count);
  return c.done(call(runtime.mpi.Scatter, static_cast<const void*>(x.untyped_data()), count,
                     out.type, out.data, count, out.type, static_cast<int>(root), c.comm.handle));
}

ffi::Error allgather(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                     int64_t op) {
  const Call c("allgather", comm, site, x.size_bytes());
  if (ffi::Error e = c.collective(x, {{"op", op}}); e.failure()) return e;
  const Words in(x);
  advise_huge_pages(y->untyped_data(), y->size_bytes());
  if (is_large(in.count * c.comm.size)) {
    const Blocks sends(c.comm.size, {static_cast<char*>(in.data), in.count});
    return c.done(
        exchange(c, in.width, sends, equal_blocks(place(y), in.width, in.count, c.comm.size)));
  }
  const int count = static_cast<int>(in.count);
  return c.done(call(runtime.mpi.Allgather, static_cast<const void*>(in.data), count, in.type,
                     place(y), count, in.type, c.comm.handle));
}

ffi::Error alltoall(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                    int64_t op) {
  const Call c("alltoall", comm, site, x.size_bytes());
  if (ffi::Error e = c.collective(x, {{"op", op}}); e.failure()) return e;
  const Words in(x);
  advise_huge_pages(y->untyped_data(), y->size_bytes());
  if (is_large(in.count)) {
    const int64_t words = in.count / c.comm.size;
    return c.done(exchange(c, in.width, equal_blocks(in.data, in.width, words, c.comm.size),
                           equal_blocks(place(y), in.width, words, c.comm.size)));
  }
  const int count = static_cast<int>(in.count / c.comm.size);
  return c.done(call(runtime.mpi.Alltoall, static_cast<const void*>(in.data), count, in.type,
                     place(y), count, in.type, c.comm.handle));
}

// The reduction of the numbers from `first` on, `n` of them, with the result on one rank.
int reduce_to(const Call& c, const Numbers& in, int64_t first, int64_t n, int64_t op, int rank,
              void* result) {
  return in.reduce_pieces(first, n, result, [&](const void* from, void* to, int count) {
    return call(runtime.mpi.Reduce, from, to, count, in.type, in.reduction(op), rank,
                c.comm.handle);
  });
}

ffi::Error reduce_scatter(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                          int64_t op) {
  const Call c("reduce_scatter", comm, site, x.size_bytes());
  if (ffi::Error e = c.collective(x, {{"op", op}}); e.failure()) return e;
  const Numbers in(x);
  if (!in.known) return c.fail(kNoArithmetic);
  const int64_t n = in.count / c.comm.size;
  int code = 0;
  if (is_large(in.count)) {
    for (int rank = 0; rank < c.comm.size && !code; ++rank)
      code = reduce_to(c, in, rank * n, n, op, rank, place(y));
  } else {
    code = call(runtime.mpi.Reduce_scatter_block, static_cast<const void*>(in.data), place(y),
                static_cast<int>(n), in.type, in.reduction(op), c.comm.handle);
  }
  return c.done(code);
}

// From rank 0 to the last rank or, if `backward`, from the last rank to rank 0 as in the adjoint.
ffi::Error scan(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site, int64_t op,
                int64_t backward) {
  const Call c("scan", comm, site, x.size_bytes());
  if (ffi::Error e = c.collective(x, {{"op", op}, {"back", backward}}); e.failure()) return e;
  const Numbers in(x);
  if (!in.known) return c.fail(kNoArithmetic);
  return c.done(in.reduce_pieces(place(y), [&](const void* from, void* to, int n) {
    return call(runtime.mpi.Scan, from, to, n, in.type, in.reduction(op),
                backward ? c.comm.reversed : c.comm.handle);
  }));
}

ffi::Error exscan(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site, int64_t op,
                  int64_t backward) {
  const Call c("exscan", comm, site, x.size_bytes());
  if (ffi::Error e = c.collective(x, {{"op", op}, {"back", backward}}); e.failure()) return e;
  const Numbers in(x);
  if (!in.known) return c.fail(kNoArithmetic);
  const int code = in.reduce_pieces(place(y), [&](const void* from, void* to, int n) {
    return call(runtime.mpi.Exscan, from, to, n, in.type, in.reduction(op),
                backward ? c.comm.reversed : c.comm.handle);
  });
  // On the first rank MPI leaves the result undefined. Here it is zero.
  if (c.comm.rank == (backward ? c.comm.size - 1 : 0))
    clear_bytes(y->untyped_data(), y->size_bytes());
  return c.done(code);
}

ffi::Error gatherv(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                   int64_t root, Integers counts, int64_t row) {
  const Call c("gatherv", comm, site, x.size_bytes(), root);
  if (ffi::Error e = c.collective(x, {{"root", root}}, counts); e.failure()) return e;
  const Words in(x), out(y);
  const Parts parts(counts, row);
  if (c.comm.rank != root) clear_bytes(out.data, y->size_bytes());
  if (is_large(parts.total)) {
    Blocks sends(c.comm.size), receives(c.comm.size);
    sends[root] = {static_cast<char*>(in.data), in.count};
    if (c.comm.rank == root) receives = blocks(out.data, out.width, counts, row);
    return c.done(exchange(c, in.width, sends, receives));
  }
  return c.done(call(runtime.mpi.Gatherv, static_cast<const void*>(in.data),
                     static_cast<int>(in.count), in.type, out.data, parts.n(), parts.at(),
                     out.type, static_cast<int>(root), c.comm.handle));
}

ffi::Error scatterv(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                    int64_t root, Integers counts, int64_t row) {
  const Call c("scatterv", comm, site, members_of(comm).rank == root ? x.size_bytes() : 0, root);
  if (ffi::Error e = c.collective(x, {{"root", root}}, counts); e.failure()) return e;
  const Words in(x), out(y);
  const Parts parts(counts, row);
  if (is_large(parts.total)) {
    Blocks sends(c.comm.size), receives(c.comm.size);
    if (c.comm.rank == root) sends = blocks(in.data, in.width, counts, row);
    receives[root] = {static_cast<char*>(out.data), out.count};
    return c.done(exchange(c, in.width, sends, receives));
  }
  return c.done(call(runtime.mpi.Scatterv, static_cast<const void*>(in.data), parts.n(),
                     parts.at(), in.type, out.data, static_cast<int>(out.count), out.type,
                     static_cast<int>(root), c.comm.handle));
}

ffi::Error allgatherv(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                      Integers counts, int64_t row) {
  const Call c("allgatherv", comm, site, x.size_bytes());
  if (ffi::Error e = c.collective(x, {}, counts); e.failure()) return e;
  const Words in(x), out(y);
  const Parts parts(counts, row);
  advise_huge_pages(out.data, y->size_bytes());
  if (is_large(parts.total)) {
    const Blocks sends(c.comm.size, {static_cast<char*>(in.data), in.count});
    return c.done(exchange(c, in.width, sends, blocks(out.data, out.width, counts, row)));
  }
  return c.done(call(runtime.mpi.Allgatherv, static_cast<const void*>(in.data),
                     static_cast<int>(in.count), in.type, out.data, parts.n(), parts.at(),
                     out.type, c.comm.handle));
}

ffi::Error reduce_scatterv(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                           int64_t op, Integers counts, int64_t row) {
  const Call c("reduce_scatterv", comm, site, x.size_bytes());
  if (ffi::Error e = c.collective(x, {{"op", op}}, counts); e.failure()) return e;
  const Numbers in(x);
  if (!in.known) return c.fail(kNoArithmetic);
  const Parts parts(counts, row);
  int code = 0;
  if (is_large(parts.total)) {
    int64_t first = 0;
    for (int rank = 0; rank < c.comm.size && !code; ++rank) {
      const int64_t n = counts[rank] * row;
      code = reduce_to(c, in, first, n, op, rank, place(y));
      first += n;
    }
  } else {
    code = call(runtime.mpi.Reduce_scatter, static_cast<const void*>(in.data), place(y), parts.n(),
                in.type, in.reduction(op), c.comm.handle);
  }
  return c.done(code);
}

ffi::Error alltoallv(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                     int64_t op, Integers sendcounts, Integers recvcounts, int64_t row) {
  const Call c("alltoallv", comm, site, x.size_bytes());
  if (ffi::Error e = c.collective(x, {{"op", op}}, sendcounts, recvcounts); e.failure()) return e;
  const Words in(x), out(y);
  advise_huge_pages(out.data, y->size_bytes());
  return c.done(alltoall_blocks(c, in.width, row, in.data, sendcounts, out.data, recvcounts));
}

}  // namespace
}  // namespace mpigrad

MPIGRAD_HANDLER(mpigrad_barrier, barrier, MPIGRAD_BIND MPIGRAD_IN MPIGRAD_OUT MPIGRAD_WHERE);
MPIGRAD_HANDLER(mpigrad_bcast, bcast,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(root));
MPIGRAD_HANDLER(mpigrad_allreduce, allreduce,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(op) MPIGRAD_ATTR(root));
MPIGRAD_HANDLER(mpigrad_reduce, reduce,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(op) MPIGRAD_ATTR(root));
MPIGRAD_HANDLER(mpigrad_gather, gather,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(op) MPIGRAD_ATTR(root));
MPIGRAD_HANDLER(mpigrad_scatter, scatter,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(root));
MPIGRAD_HANDLER(mpigrad_allgather, allgather,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(op));
MPIGRAD_HANDLER(mpigrad_alltoall, alltoall,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(op));
MPIGRAD_HANDLER(mpigrad_reduce_scatter, reduce_scatter,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(op));
MPIGRAD_HANDLER(mpigrad_scan, scan,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(op) MPIGRAD_ATTR(backward));
MPIGRAD_HANDLER(mpigrad_exscan, exscan,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(op) MPIGRAD_ATTR(backward));
MPIGRAD_HANDLER(mpigrad_gatherv, gatherv,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(root) MPIGRAD_ATTRS(counts) MPIGRAD_ATTR(row));
MPIGRAD_HANDLER(mpigrad_scatterv, scatterv,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(root) MPIGRAD_ATTRS(counts) MPIGRAD_ATTR(row));
MPIGRAD_HANDLER(mpigrad_allgatherv, allgatherv,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTRS(counts) MPIGRAD_ATTR(row));
MPIGRAD_HANDLER(mpigrad_reduce_scatterv, reduce_scatterv,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(op) MPIGRAD_ATTRS(counts) MPIGRAD_ATTR(row));
MPIGRAD_HANDLER(mpigrad_alltoallv, alltoallv,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(op) MPIGRAD_ATTRS(sendcounts) MPIGRAD_ATTRS(recvcounts)
                        MPIGRAD_ATTR(row));
