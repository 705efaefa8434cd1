// MPI operations as XLA FFI handlers. Each takes and returns a token, which keeps messages in
// program order; each is a linear map whose transpose is another handler of this file.
#include <sys/mman.h>

#include <climits>
#include <cstring>
#include <vector>

#include "mpi_runtime.h"
#include "watch.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace mpigrad {

Record record;

namespace {

using Token = ffi::Token;
using TokenOut = ffi::Result<ffi::Token>;
using Buffer = ffi::AnyBuffer;
using BufferOut = ffi::Result<ffi::AnyBuffer>;
using Integers = ffi::Span<const int64_t>;

// Data that only moves, as words of MPI: any dtype, bfloat16 and bool included.
struct Words {
  void* data;
  int64_t count;
  Handle type;
  size_t width;
  Words(void* data, size_t bytes, size_t element_bytes)
      : data(data), width(element_bytes > 8 ? 8 : element_bytes ? element_bytes : 1) {
    count = bytes / width;
    type = word_type(width);
  }
  explicit Words(const Buffer& x)
      : Words(x.untyped_data(), x.size_bytes(),
              x.element_count() ? x.size_bytes() / x.element_count() : 1) {}
};

struct Call {
  const char* operation;
  const Communicator& comm;
  int64_t site;

  ffi::Error fail(const std::string& what) const {
    return ffi::Error(ffi::ErrorCode::kInternal,
                      "mpigrad: rank " + std::to_string(comm.rank) + " of " +
                          std::to_string(comm.size) + ": " + operation + " at " + call_site(site) +
                          ": " + what);
  }
  ffi::Error done(int code) const {
    return code ? fail(error_text(code)) : ffi::Error::Success();
  }
};

// Page-sized faults cost more than the message: ask for huge pages before the first touch.
void advise_huge_pages(void* data, size_t bytes) {
  constexpr uintptr_t page = 2u << 20;
  if (bytes < 2 * page) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) & ~(page - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(page - 1);
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

std::string unexpected_length(int64_t got_words, int64_t expected_words, size_t width, int source) {
  return "rank " + std::to_string(source) + " sent " + std::to_string(got_words * width) +
         " bytes where " + std::to_string(expected_words * width) +
         " were expected; give the receiver the shape and dtype that the sender sends";
}

// After a receive: MPI accepts a shorter message silently, a wrong program does not deserve that.
ffi::Error received(const Call& c, int code, Status& status, const Words& w, int source) {
  if (code) {
    const std::string text = error_text(code);
    const bool truncated = text.find("TRUNC") != std::string::npos ||
                           text.find("trunc") != std::string::npos;
    return c.fail(text + (truncated ? "; rank " + std::to_string(source) +
                                          " sent more than the " +
                                          std::to_string(w.count * w.width) +
                                          " bytes that were expected: give the receiver the shape "
                                          "and dtype that the sender sends"
                                    : ""));
  }
  int count = 0;
  code = call(runtime.mpi.Get_count, static_cast<const void*>(status.bytes), w.type, &count);
  if (code) return c.done(code);
  if (count != w.count) return c.fail(unexpected_length(count, w.count, w.width, source));
  return ffi::Error::Success();
}

// ---- collectives ----

ffi::Error barrier(Token, TokenOut, int64_t comm, int64_t site) {
  const Call c{"barrier", communicator(comm), site};
  Watch watch(c.operation, site, 0);
  return c.done(call(runtime.mpi.Barrier, c.comm.handle));
}

ffi::Error bcast(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site, int64_t root) {
  const Call c{"bcast", communicator(comm), site};
  Watch watch(c.operation, site, c.comm.rank == root ? x.size_bytes() : 0);
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
  const Call c{"allreduce", communicator(comm), site};
  Watch watch(c.operation, site, x.size_bytes());
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
  const Call c{"reduce", communicator(comm), site};
  Watch watch(c.operation, site, x.size_bytes());
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
  const Call c{"gather", communicator(comm), site};
  Watch watch(c.operation, site, x.size_bytes());
  const Words in(x);
  if (c.comm.rank != root) std::memset(y->untyped_data(), 0, y->size_bytes());
  const int count = static_cast<int>(in.count);
  return c.done(call(runtime.mpi.Gather, static_cast<const void*>(in.data), count, in.type,
                     y->untyped_data(), count, in.type, static_cast<int>(root), c.comm.handle));
}

ffi::Error scatter(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                   int64_t root) {
  const Call c{"scatter", communicator(comm), site};
  Watch watch(c.operation, site, c.comm.rank == root ? x.size_bytes() : 0);
  const Words out(*y);
  const int count = static_cast<int>(out.count);
  return c.done(call(runtime.mpi.Scatter, static_cast<const void*>(x.untyped_data()), count,
                     out.type, out.data, count, out.type, static_cast<int>(root), c.comm.handle));
}

// ---- point to point ----

ffi::Error send(Token, Buffer x, TokenOut, int64_t comm, int64_t site, int64_t dest, int64_t tag) {
  const Call c{"send", communicator(comm), site};
  Watch watch(c.operation, site, x.size_bytes());
  const Words in(x);
  return c.done(call(runtime.mpi.Send, static_cast<const void*>(in.data),
                     static_cast<int>(in.count), in.type, static_cast<int>(dest),
                     static_cast<int>(tag), c.comm.handle));
}

ffi::Error recv(Token, TokenOut, BufferOut y, int64_t comm, int64_t site, int64_t source,
                int64_t tag) {
  const Call c{"recv", communicator(comm), site};
  Watch watch(c.operation, site, 0);
  const Words out(*y);
  if (source == runtime.proc_null) {
    std::memset(out.data, 0, y->size_bytes());
    return ffi::Error::Success();
  }
  advise_huge_pages(out.data, y->size_bytes());
  Status status;
  const int code = call(runtime.mpi.Recv, out.data, static_cast<int>(out.count), out.type,
                        static_cast<int>(source), static_cast<int>(tag), c.comm.handle,
                        static_cast<void*>(status.bytes));
  return received(c, code, status, out, static_cast<int>(source));
}

ffi::Error sendrecv(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                    int64_t dest, int64_t sendtag, int64_t source, int64_t recvtag) {
  const Call c{"sendrecv", communicator(comm), site};
  Watch watch(c.operation, site, x.size_bytes());
  const Words in(x), out(*y);
  advise_huge_pages(out.data, y->size_bytes());
  Status status;
  const int code =
      call(runtime.mpi.Sendrecv, static_cast<const void*>(in.data), static_cast<int>(in.count),
           in.type, static_cast<int>(dest), static_cast<int>(sendtag), out.data,
           static_cast<int>(out.count), out.type, static_cast<int>(source),
           static_cast<int>(recvtag), c.comm.handle, static_cast<void*>(status.bytes));
  if (source == runtime.proc_null && !code) {
    std::memset(out.data, 0, y->size_bytes());
    return ffi::Error::Success();
  }
  return received(c, code, status, out, static_cast<int>(source));
}

// One message to and from each neighbour; x and y are packed by neighbour along axis 0.
ffi::Error neighbor_alltoallv(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                              int64_t tag, Integers neighbors, Integers sendcounts,
                              Integers recvcounts, int64_t row_words) {
  const Call c{"neighbor_alltoallv", communicator(comm), site};
  Watch watch(c.operation, site, x.size_bytes());
  const Words in(x), out(*y);
  const size_t n = neighbors.size();
  std::vector<Request> receives(n), sends(n);
  std::vector<Words> parts(n, out);
  char* to = static_cast<char*>(out.data);
  char* from = static_cast<char*>(in.data);
  int code = 0;
  // After an error in posting the program ends: messages that are under way are not waited for.
  size_t posted_receives = 0, posted_sends = 0;
  for (size_t i = 0; i < n && !code; ++i) {
    parts[i].data = to;
    parts[i].count = recvcounts[i] * row_words;
    to += parts[i].count * out.width;
    if (parts[i].count == 0) continue;
    code = call(runtime.mpi.Irecv, parts[i].data, static_cast<int>(parts[i].count), out.type,
                static_cast<int>(neighbors[i]), static_cast<int>(tag), c.comm.handle,
                receives[i].address());
    if (!code) posted_receives = i + 1;
  }
  for (size_t i = 0; i < n && !code; ++i) {
    const int64_t count = sendcounts[i] * row_words;
    if (count)
      code = call(runtime.mpi.Isend, static_cast<const void*>(from), static_cast<int>(count),
                  in.type, static_cast<int>(neighbors[i]), static_cast<int>(tag), c.comm.handle,
                  sends[i].address());
    if (!code) posted_sends = i + 1;
    from += count * in.width;
  }
  if (code) return c.done(code);
  ffi::Error first = ffi::Error::Success();
  for (size_t i = 0; i < posted_receives; ++i) {
    if (parts[i].count == 0) continue;
    Status status;
    const int rc = call(runtime.mpi.Wait, receives[i].address(), static_cast<void*>(status.bytes));
    ffi::Error e = received(c, rc, status, parts[i], static_cast<int>(neighbors[i]));
    if (first.success() && !e.success()) first = e;
  }
  for (size_t i = 0; i < posted_sends; ++i) {
    if (sendcounts[i] == 0) continue;
    Status status;
    const int rc = call(runtime.mpi.Wait, sends[i].address(), static_cast<void*>(status.bytes));
    if (first.success() && rc) first = c.done(rc);
  }
  return first;
}

// ---- decisions and order ----

// Ends the program with a message where `ok` is false. `values` fill the braces of the message.
ffi::Error require(Token, ffi::Buffer<ffi::PRED> ok, ffi::Buffer<ffi::F64> values, TokenOut,
                   int64_t comm, int64_t site, std::string_view message) {
  if (ok.typed_data()[0]) return ffi::Error::Success();
  const Call c{"check", communicator(comm), site};
  std::string text;
  size_t next = 0;
  for (size_t i = 0; i < message.size(); ++i) {
    if (message[i] == '{' && i + 1 < message.size() && message[i + 1] == '}' &&
        next < values.element_count()) {
      char number[40];
      std::snprintf(number, sizeof number, "%.6g", values.typed_data()[next++]);
      text += number;
      ++i;
    } else {
      text += message[i];
    }
  }
  return c.fail(text);
}

// A program's messages are ordered by tokens inside it, and by a one-byte array between programs:
// it goes in here and comes out there.
ffi::Error enter(Buffer, TokenOut) { return ffi::Error::Success(); }
ffi::Error leave(Token, ffi::Result<ffi::Buffer<ffi::U8>> turn) {
  turn->typed_data()[0] = 0;
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mpigrad

#define MPIGRAD_ATTR(name) .Attr<int64_t>(#name)
#define MPIGRAD_BIND xla::ffi::Ffi::Bind()
#define MPIGRAD_IN .Arg<xla::ffi::Token>()
#define MPIGRAD_OUT .Ret<xla::ffi::Token>()
#define MPIGRAD_X .Arg<xla::ffi::AnyBuffer>()
#define MPIGRAD_Y .Ret<xla::ffi::AnyBuffer>()
#define MPIGRAD_WHERE MPIGRAD_ATTR(comm) MPIGRAD_ATTR(site)
#define MPIGRAD_HANDLER(symbol, function, binding)             \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* symbol(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, mpigrad::function, binding)

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
MPIGRAD_HANDLER(mpigrad_send, send,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_WHERE MPIGRAD_ATTR(dest)
                    MPIGRAD_ATTR(tag));
MPIGRAD_HANDLER(mpigrad_recv, recv,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE MPIGRAD_ATTR(source)
                    MPIGRAD_ATTR(tag));
MPIGRAD_HANDLER(mpigrad_sendrecv, sendrecv,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(dest) MPIGRAD_ATTR(sendtag) MPIGRAD_ATTR(source)
                        MPIGRAD_ATTR(recvtag));
MPIGRAD_HANDLER(mpigrad_neighbor_alltoallv, neighbor_alltoallv,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(tag)
                        .Attr<xla::ffi::Span<const int64_t>>("neighbors")
                        .Attr<xla::ffi::Span<const int64_t>>("sendcounts")
                        .Attr<xla::ffi::Span<const int64_t>>("recvcounts")
                            MPIGRAD_ATTR(row_words));
MPIGRAD_HANDLER(mpigrad_require, require,
                MPIGRAD_BIND MPIGRAD_IN.Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                    .Arg<xla::ffi::Buffer<xla::ffi::F64>>() MPIGRAD_OUT MPIGRAD_WHERE
                    .Attr<std::string_view>("message"));
MPIGRAD_HANDLER(mpigrad_enter, enter, MPIGRAD_BIND MPIGRAD_X MPIGRAD_OUT);
MPIGRAD_HANDLER(mpigrad_leave, leave,
                MPIGRAD_BIND MPIGRAD_IN.Ret<xla::ffi::Buffer<xla::ffi::U8>>());

MPIGRAD_EXPORT const void* mpigrad_record() { return &mpigrad::record; }
