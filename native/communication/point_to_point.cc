// Messages between two ranks, and packed exchanges with neighbours.
#include "handler.h"

namespace mpigrad {
namespace {

ffi::Error send(Token, Buffer x, TokenOut, int64_t comm, int64_t site, int64_t dest, int64_t tag) {
  const Call c("send", comm, site, x.size_bytes(), dest);
  if (ffi::Error e = c.messages({mail(dest, tag, x)}, {}); e.failure()) return e;
  const Words in(x);
  return c.done(call(runtime.mpi.Send, static_cast<const void*>(in.data),
                     static_cast<int>(in.count), in.type, static_cast<int>(dest),
                     static_cast<int>(tag), c.comm.handle));
}

ffi::Error recv(Token, TokenOut, BufferOut y, int64_t comm, int64_t site, int64_t source,
                int64_t tag) {
  const Call c("recv", comm, site, 0, source);
  if (ffi::Error e = c.messages({}, {mail(source, tag, *y)}); e.failure()) return e;
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
  const Call c("sendrecv", comm, site, x.size_bytes(), source);
  if (ffi::Error e = c.messages({mail(dest, sendtag, x)}, {mail(source, recvtag, *y)});
      e.failure())
    return e;
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
  const Call c("neighbor_alltoallv", comm, site, x.size_bytes());
  std::vector<Mail> to_neighbors, from_neighbors;
  for (size_t i = 0; i < neighbors.size(); ++i) {
    if (sendcounts[i]) to_neighbors.push_back(mail(neighbors[i], tag, x, sendcounts[i]));
    if (recvcounts[i]) from_neighbors.push_back(mail(neighbors[i], tag, *y, recvcounts[i]));
  }
  if (ffi::Error e = c.messages(to_neighbors, from_neighbors); e.failure()) return e;
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

}  // namespace
}  // namespace mpigrad

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
