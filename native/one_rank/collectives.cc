// Collectives of one rank, which copy, their forms that return a request, and what is not there.
#include "one_rank/mpi.h"

using namespace one_rank;

namespace {

// What collectives do on one rank. `in` and `out` may be MPI_IN_PLACE.
int copy(const void* in, Aint n, int in_type, void* out, Aint m, int out_type, int comm) {
  Lock hold(lock);
  if (!has_comm(comm)) return kComm;
  if (in == kInPlace || out == kInPlace) return kSuccess;
  const Shared from = type_of(in_type), to = type_of(out_type);
  if (!from || !to) return kType;
  if (from->is_dense() && to->is_dense() && n * from->size <= m * to->size) {
    if (n > 0 && from->size > 0) std::memmove(out, in, n * from->size);
    return kSuccess;
  }
  return unpack(pack(in, n, *from), out, m, *to) ? kSuccess : kTruncate;
}
char* at(const void* buffer, Aint offset, int type) {
  Lock hold(lock);
  const Shared t = type_of(type);
  const bool moves = buffer != kInPlace && t;
  return const_cast<char*>(static_cast<const char*>(buffer)) + (moves ? offset * t->extent() : 0);
}

}  // namespace

// UNPACKED removes the parentheses around a list.
#define UNPACKED(...) __VA_ARGS__
#define MPI_COLLECTIVE(name, small, parameters, arguments, body)                \
  MPI_FUNCTION int MPI_##name(UNPACKED parameters) { return body; }             \
  MPI_FUNCTION int MPI_I##small(UNPACKED parameters, int* request) {            \
    return done_request(MPI_##name arguments, request);                         \
  }

MPI_COLLECTIVE(Barrier, barrier, (int comm), (comm), check_comm(comm))
MPI_COLLECTIVE(Bcast, bcast, (void* x, int n, int t, int root, int comm), (x, n, t, root, comm),
               (void(x), void(n), void(t), check_comm(comm, root)))
MPI_COLLECTIVE(Gather, gather,
               (const void* x, int n, int t, void* y, int m, int u, int root, int comm),
               (x, n, t, y, m, u, root, comm),
               root ? kRoot : copy(x, n, t, y, m, u, comm))
MPI_COLLECTIVE(Gatherv, gatherv,
               (const void* x, int n, int t, void* y, const int* counts, const int* starts, int u,
                int root, int comm),
               (x, n, t, y, counts, starts, u, root, comm),
               root ? kRoot : copy(x, n, t, at(y, starts[0], u), counts[0], u, comm))
MPI_COLLECTIVE(Scatter, scatter,
               (const void* x, int n, int t, void* y, int m, int u, int root, int comm),
               (x, n, t, y, m, u, root, comm),
               root ? kRoot : copy(x, n, t, y, m, u, comm))
MPI_COLLECTIVE(Scatterv, scatterv,
               (const void* x, const int* counts, const int* starts, int t, void* y, int m, int u,
                int root, int comm),
               (x, counts, starts, t, y, m, u, root, comm),
               root ? kRoot : copy(at(x, starts[0], t), counts[0], t, y, m, u, comm))
MPI_COLLECTIVE(Allgather, allgather,
               (const void* x, int n, int t, void* y, int m, int u, int comm),
               (x, n, t, y, m, u, comm), copy(x, n, t, y, m, u, comm))
MPI_COLLECTIVE(Allgatherv, allgatherv,
               (const void* x, int n, int t, void* y, const int* counts, const int* starts, int u,
                int comm),
               (x, n, t, y, counts, starts, u, comm),
               copy(x, n, t, at(y, starts[0], u), counts[0], u, comm))
MPI_COLLECTIVE(Alltoall, alltoall,
               (const void* x, int n, int t, void* y, int m, int u, int comm),
               (x, n, t, y, m, u, comm), copy(x, n, t, y, m, u, comm))
MPI_COLLECTIVE(Alltoallv, alltoallv,
               (const void* x, const int* n, const int* starts, int t, void* y, const int* m,
                const int* places, int u, int comm),
               (x, n, starts, t, y, m, places, u, comm),
               x == kInPlace
                   ? check_comm(comm)
                   : copy(at(x, starts[0], t), n[0], t, at(y, places[0], u), m[0], u, comm))
MPI_COLLECTIVE(Alltoallw, alltoallw,
               (const void* x, const int* n, const int* starts, const int* t, void* y,
                const int* m, const int* places, const int* u, int comm),
               (x, n, starts, t, y, m, places, u, comm),
               x == kInPlace ? check_comm(comm)
                             : copy(static_cast<const char*>(x) + starts[0], n[0], t[0],
                                    static_cast<char*>(y) + places[0], m[0], u[0], comm))
MPI_COLLECTIVE(Reduce, reduce, (const void* x, void* y, int n, int t, int op, int root, int comm),
               (x, y, n, t, op, root, comm),
               (void(op), root ? kRoot : copy(x, n, t, y, n, t, comm)))
MPI_COLLECTIVE(Allreduce, allreduce, (const void* x, void* y, int n, int t, int op, int comm),
               (x, y, n, t, op, comm), (void(op), copy(x, n, t, y, n, t, comm)))
MPI_COLLECTIVE(Reduce_scatter, reduce_scatter,
               (const void* x, void* y, const int* counts, int t, int op, int comm),
               (x, y, counts, t, op, comm),
               (void(op), copy(x, counts[0], t, y, counts[0], t, comm)))
MPI_COLLECTIVE(Reduce_scatter_block, reduce_scatter_block,
               (const void* x, void* y, int n, int t, int op, int comm), (x, y, n, t, op, comm),
               (void(op), copy(x, n, t, y, n, t, comm)))
MPI_COLLECTIVE(Scan, scan, (const void* x, void* y, int n, int t, int op, int comm),
               (x, y, n, t, op, comm), (void(op), copy(x, n, t, y, n, t, comm)))
// The first rank gets nothing.
MPI_COLLECTIVE(Exscan, exscan, (const void* x, void* y, int n, int t, int op, int comm),
               (x, y, n, t, op, comm),
               (void(x), void(y), void(n), void(t), void(op), check_comm(comm)))

// ---- What one rank does without ----

int empty_list;
MPI_FUNCTION int* const MPI_UNWEIGHTED = &empty_list;
MPI_FUNCTION int* const MPI_WEIGHTS_EMPTY = &empty_list;

#define MPI_UNSUPPORTED(name) \
  MPI_FUNCTION int MPI_##name() { return kUnsupported; }
#include "one_rank/unsupported.def"
