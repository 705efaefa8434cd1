// MPI without linking MPI: the functions are looked up at run time in the library that mpi4py has
// loaded. One build works with every implementation, whether its handles are pointers (Open MPI) or
// 32-bit integers (MPICH and its derivatives).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "visibility.h"

namespace mpigrad {

// An MPI handle of either layout, as mpi4py's `.handle` gives it.
struct Handle {
  int64_t value = 0;
};

// An MPI_Status, large enough for every implementation.
struct Status {
  alignas(16) char bytes[256];
};

// One pointer for each function MPI_<name>.
#define MPIGRAD_MPI_FUNCTIONS(X) \
  X(Allgather) X(Allgatherv) X(Allreduce) X(Alltoall) X(Alltoallv) X(Barrier) \
  X(Bcast) X(Cancel) X(Error_string) X(Exscan) X(Gather) X(Gatherv) X(Get_elements_x) \
  X(Iprobe) X(Irecv) X(Isend) X(Op_create) X(Recv) X(Reduce) X(Reduce_scatter) \
  X(Reduce_scatter_block) X(Scan) X(Scatter) X(Scatterv) X(Send) X(Sendrecv) \
  X(Test) X(Type_commit) X(Type_create_hindexed) X(Type_free) X(Wait)

struct Functions {
#define MPIGRAD_DECLARE(name) void* name;
  MPIGRAD_MPI_FUNCTIONS(MPIGRAD_DECLARE)
#undef MPIGRAD_DECLARE
};

struct Communicator {
  Handle handle;
  Handle reversed;  // the same ranks in reversed order, for the adjoints of scans
  int rank = 0, size = 1;
};

struct Runtime {
  Functions mpi{};
  bool pointer_handles = false;
  bool alone = false;  // the world has one rank
  void* in_place = nullptr;
  int proc_null = 0;
  int source_offset = 0, tag_offset = 0;  // offsets of these fields in a status, in bytes
  int64_t derivative_spaces = 1;          // number of kinds of derivatives with separate tags
  int64_t largest_count = 1 << 30;        // the most items in one call of MPI, at most INT_MAX
};

MPIGRAD_SHARED extern Runtime runtime;

constexpr int kCommunicators = 1 << 14, kReductions = 64;

// Compiled programs refer to communicators, reductions and call sites by slot numbers, so that a
// program contains no handle or address of one process.
MPIGRAD_SHARED const Communicator& communicator(int64_t slot);
// A space holds the slot of a communicator in its lowest 16 bits, the kind of derivative in the next 16,
// and above them how many communicators of this slot were freed before.
inline int64_t slot_of(int64_t space) { return space & 0xffff; }
inline int64_t derivative_of(int64_t space) { return space >> 16 & 0xffff; }
// Whether the communicator of a space has been freed, and the error text.
MPIGRAD_SHARED bool is_freed(int64_t space);
std::string freed_text(int64_t space);
inline const Communicator& members_of(int64_t space) { return communicator(slot_of(space)); }
MPIGRAD_SHARED Handle reduction(int64_t slot);
// The MPI type that reductions use for XLA's element type. `known` is false if MPI lacks the type.
MPIGRAD_SHARED Handle arithmetic_type(int xla_type, bool& known);
// The unsigned integer type of 1, 2, 4 or 8 bytes that moves data as words.
MPIGRAD_SHARED Handle word_type(size_t bytes);
// "prog.py:12", or "the adjoint of prog.py:12" for a negative number.
MPIGRAD_SHARED std::string call_site(int64_t site);
void set_call_site(int64_t site, const char* text);
MPIGRAD_SHARED std::string error_text(int code);

template <class H, class T>
auto as_native(T x) {
  if constexpr (!std::is_same_v<T, Handle>)
    return x;
  else if constexpr (std::is_pointer_v<H>)
    return reinterpret_cast<H>(x.value);
  else
    return static_cast<H>(x.value);
}

template <class H, class... Args>
int call_as(void* function, Args... args) {
  using Signature = int (*)(decltype(as_native<H>(args))...);
  return reinterpret_cast<Signature>(function)(as_native<H>(args)...);
}

// Calls an MPI function. Arguments of type Handle are passed in the layout of the library.
template <class... Args>
int call(void* function, Args... args) {
  return runtime.pointer_handles ? call_as<void*>(function, args...)
                                 : call_as<int>(function, args...);
}

inline int status_field(const Status& status, int offset) {
  return *reinterpret_cast<const int*>(status.bytes + offset);
}
inline void set_status_field(Status& status, int offset, int64_t value) {
  *reinterpret_cast<int*>(status.bytes + offset) = static_cast<int>(value);
}
inline int status_source(const Status& s) { return status_field(s, runtime.source_offset); }
inline int status_tag(const Status& s) { return status_field(s, runtime.tag_offset); }

// The request of a pending message, in the layout of the library.
struct Request {
  int64_t storage = 0;
  bool under_way = false;  // MPI uses the memory of the message
  void* address() { return &storage; }
};

// Notes that a message was posted, if `code` is success.
inline int note_post(Request& request, int code) {
  request.under_way = !code;
  return code;
}

// Waits of a rank that is alone in its world (alone.cc). They return kStopped after Ctrl-C, or after
// a call of mpigrad_stop_waits. The request is then cancelled, if it is a receive, or `keeps`.
constexpr int kStopped = -1;
enum class Stopped { cancels, keeps };
MPIGRAD_SHARED int await_alone(Request& request, Status& status, Stopped stopped);
MPIGRAD_SHARED void begin_waits();  // of an operation
std::string stop_text();

inline int await_request(Request& request, Status& status, Stopped stopped = Stopped::cancels) {
  request.under_way = false;
  if (runtime.alone) return await_alone(request, status, stopped);
  return call(runtime.mpi.Wait, request.address(), static_cast<void*>(status.bytes));
}

// A blocking receive.
inline int receive(void* data, int count, Handle type, int source, int tag, Handle comm,
                   Status& status) {
  if (!runtime.alone)
    return call(runtime.mpi.Recv, data, count, type, source, tag, comm,
                static_cast<void*>(status.bytes));
  Request request;
  const int code = call(runtime.mpi.Irecv, data, count, type, source, tag, comm, request.address());
  return code ? code : await_request(request, status);
}

// Ends a message whose memory will be freed, after an error of MPI.
inline void cancel_request(Request& request) {
  if (!request.under_way) return;
  Status status;
  request.under_way = false;
  call(runtime.mpi.Cancel, request.address());
  call(runtime.mpi.Wait, request.address(), static_cast<void*>(status.bytes));
}

}  // namespace mpigrad
