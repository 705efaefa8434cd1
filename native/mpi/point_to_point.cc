// Messages between two ranks, and packed exchanges with neighbours.
#include <string>
#include <string_view>

#include "mpi/handler.h"
#include "mpi/pending.h"

namespace mpigrad {
namespace {

std::list<Pending> to_self;

}  // namespace

void free_received_from_self() {
  for (auto message = to_self.begin(); message != to_self.end();) {
    Status status;
    int complete = 0;
    const int code = call(runtime.mpi.Test, message->request.address(), &complete,
                          static_cast<void*>(status.bytes));
    if (code) return;
    message->request.under_way = !complete;
    message = complete ? to_self.erase(message) : std::next(message);
  }
}

namespace {

// A blocking send. A send to this rank itself is buffered, so that its receive may follow.
ffi::Error send_mail(const Call& c, const Mail& mail, const Words& x) {
  if (ffi::Error e = c.messages({mail}, {}); e.failure()) return e;
  const Parcel parcel(c, mail, x);
  const Words& out = parcel.words;
  has_ended(c.slot, mail.peer, mail.tag, false);
  if (mail.peer == c.comm.rank) {
    free_received_from_self();
    to_self.emplace_back(c, mail.peer, out);
    return c.done(to_self.back().post_send(out, mail.tag));
  }
  const Items items(out.count, out.width);
  return c.done(call(runtime.mpi.Send, static_cast<const void*>(out.data), items.n, items.type,
                     static_cast<int>(mail.peer), static_cast<int>(mail.tag), c.comm.handle));
}

}  // namespace

ffi::Error receive_mail(const Call& c, const Mail& mail, const Words& y, Status& status,
                        int64_t order) {
  if (ffi::Error e = c.messages({}, {mail}); e.failure()) return e;
  const Parcel parcel(c, y);
  const Words& out = parcel.words;
  advise_huge_pages(out.data, out.count * out.width);
  // The status of a failed receive need not have a source and a tag.
  set_status_field(status, runtime.source_offset, mail.peer);
  set_status_field(status, runtime.tag_offset, mail.tag);
  const Items items(out.count, out.width);
  const int code = receive(out.data, items.n, items.type, static_cast<int>(mail.peer),
                           static_cast<int>(mail.tag), c.comm.handle, status);
  if (code == kStopped) return c.done(code);
  const int sender = status_source(status);
  has_ended(c.slot, sender, status_tag(status), true, order);
  if (!to_self.empty() && sender == c.comm.rank) free_received_from_self();
  return unpack(c, mail, code, status, sender, out, y);
}

namespace {

ffi::Error send(Token, Buffer x, TokenOut, int64_t comm, int64_t site, int64_t dest, int64_t tag) {
  const Call c("send", comm, site, x.size_bytes(), dest);
  return send_mail(c, mail(dest, c.tag(tag), x), Words(x));
}

ffi::Error recv(Token, TokenOut, BufferOut y, int64_t comm, int64_t site, int64_t source,
                int64_t tag) {
  const Call c("recv", comm, site, 0, source);
  const Words out(y);
  if (source == runtime.proc_null) {
    if (ffi::Error e = c.messages({}, {mail(source, c.tag(tag), *y)}); e.failure()) return e;
    clear_bytes(out.data, y->size_bytes());
    return ffi::Error::Success();
  }
  Status status;
  return receive_mail(c, mail(source, c.tag(tag), *y), out, status);
}

// `source` and `tag` may be wildcards.
ffi::Error recv_any(Token, TokenOut, BufferOut y, ffi::Result<Envelope> envelope, int64_t comm,
                    int64_t site, int64_t source, int64_t tag) {
  const Call c("recv", comm, site, 0, source);
  Status status;
  ffi::Error error = receive_mail(c, mail(source, tag, *y), Words(y), status);
  if (error.failure()) return error;
  c.post.matched(0, status_source(status), status_tag(status));
  write(envelope, status);
  return error;
}

ffi::Error recv_from(Token, Envelope envelope, TokenOut, BufferOut y, int64_t comm, int64_t site) {
  const int32_t* partner = envelope.typed_data();
  const Call c("recv", comm, site, 0, partner[0]);
  Status status;
  return receive_mail(c, mail(partner[0], c.tag(partner[1]), *y), Words(y), status);
}

ffi::Error send_to(Token, Envelope envelope, Buffer x, TokenOut, int64_t comm, int64_t site) {
  const int32_t* partner = envelope.typed_data();
  const Call c("send", comm, site, x.size_bytes(), partner[0]);
  return send_mail(c, mail(partner[0], c.tag(partner[1]), x), Words(x));
}

ffi::Error sendrecv(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                    int64_t dest, int64_t sendtag, int64_t source, int64_t recvtag) {
  const Call c("sendrecv", comm, site, x.size_bytes(), source);
  sendtag = c.tag(sendtag);
  recvtag = c.tag(recvtag);
  const Mail going = mail(dest, sendtag, x), coming = mail(source, recvtag, *y);
  if (ffi::Error e = c.messages({going}, {coming}); e.failure()) return e;
  const Words result(y);
  const Parcel leaving(c, going, Words(x)), arriving(c, result);
  const Words &in = leaving.words, &out = arriving.words;
  advise_huge_pages(out.data, out.count * out.width);
  Status status;
  const int to = static_cast<int>(dest), from = static_cast<int>(source);
  const int tag = static_cast<int>(recvtag);
  const Items items(out.count, out.width);
  int code;
  if (dest == c.comm.rank && runtime.alone) {
    // It sends what it receives, or else it receives an earlier message first: if that wait is
    // stopped, nothing was sent.
    const bool answers = recvtag == sendtag || recvtag < 0;
    Requests coming(1);
    code = post_receive(coming[0], out.data, out.count, out.width, from, tag, c.comm.handle);
    if (!code && !answers) code = await_request(coming[0], status);
    if (!code) {
      free_received_from_self();
      to_self.emplace_back(c, dest, in);
      code = to_self.back().post_send(in, sendtag);
    }
    if (ffi::Error e = c.handed_over(); e.failure()) return e;
    if (!code && answers) code = await_request(coming[0], status);
    if (code == kStopped) return c.done(code);
  } else if (dest == c.comm.rank && !to_self.empty()) {
    // It may receive an earlier message of this rank to itself, so this one is buffered, as by
    // send.
    free_received_from_self();
    to_self.emplace_back(c, dest, in);
    code = to_self.back().post_send(in, sendtag);
    if (ffi::Error e = c.handed_over(); e.failure()) return e;
    if (!code)
      code = receive(out.data, items.n, items.type, from, tag, c.comm.handle, status);
  } else if (c.post.needed() || runtime.alone) {
    Requests both(2);
    code = post_receive(both[0], out.data, out.count, out.width, from, tag, c.comm.handle);
    if (!code) code = post_send(both[1], in.data, in.count, in.width, to, sendtag, c.comm.handle);
    if (!code) {
      if (ffi::Error e = c.handed_over(); e.failure()) return e;
      Status sent;
      code = await_request(both[0], status);
      const int last = await_request(both[1], sent);
      code = code ? code : last;
    }
  } else {
    const Items leaving_items(in.count, in.width);
    code = call(runtime.mpi.Sendrecv, static_cast<const void*>(in.data), leaving_items.n,
                leaving_items.type, to, static_cast<int>(sendtag), out.data, items.n, items.type,
                from, tag, c.comm.handle, static_cast<void*>(status.bytes));
  }
  has_ended(c.slot, dest, sendtag, false);
  has_ended(c.slot, source, recvtag, true);
  if (source == runtime.proc_null && !code) {
    clear_bytes(result.data, y->size_bytes());
    return ffi::Error::Success();
  }
  return unpack(c, coming, code, status, static_cast<int>(source), out, result);
}

// One message to and from each neighbour. x and y are packed by neighbour along axis 0. Reports and
// traces show it as `operation`, for example as a halo exchange.
ffi::Error neighbor_alltoallv(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                              int64_t tag, Integers neighbors, Integers sendcounts,
                              Integers recvcounts, int64_t row_words,
                              std::string_view operation) {
  const Call c(interned(operation), comm, site, x.size_bytes());
  tag = c.tag(tag);
  std::vector<Mail> to_neighbors, from_neighbors;
  for (size_t i = 0; i < neighbors.size(); ++i) {
    if (sendcounts[i]) to_neighbors.push_back(mail(neighbors[i], tag, x, sendcounts[i]));
    if (recvcounts[i]) from_neighbors.push_back(mail(neighbors[i], tag, *y, recvcounts[i]));
  }
  for (Mail& m : to_neighbors) m.same_step = true;
  for (Mail& m : from_neighbors) m.same_step = true;
  if (ffi::Error e = c.messages(to_neighbors, from_neighbors); e.failure()) return e;
  const Words in(x), out(y);
  const size_t n = neighbors.size();
  Requests receives(n), sends(n);
  std::vector<Words> parts(n, out);
  char* to = static_cast<char*>(out.data);
  char* from = static_cast<char*>(in.data);
  int code = 0;
  for (size_t i = 0; i < n && !code; ++i) {
    parts[i].data = to;
    parts[i].count = recvcounts[i] * row_words;
    to += parts[i].count * out.width;
    if (parts[i].count == 0) continue;
    code = post_receive(receives[i], parts[i].data, parts[i].count, out.width, neighbors[i], tag,
                        c.comm.handle);
  }
  for (size_t i = 0; i < n && !code; ++i) {
    const int64_t count = sendcounts[i] * row_words;
    if (count)
      code = post_send(sends[i], from, count, in.width, neighbors[i], tag, c.comm.handle);
    from += count * in.width;
  }
  if (code) return c.done(code);
  if (ffi::Error e = c.handed_over(); e.failure()) return e;
  for (size_t i = 0; i < n; ++i) {
    if (sendcounts[i]) has_ended(c.slot, neighbors[i], tag, false);
    if (recvcounts[i]) has_ended(c.slot, neighbors[i], tag, true);
  }
  ffi::Error first = ffi::Error::Success();
  for (size_t i = 0; i < n; ++i) {
    if (!receives[i].under_way) continue;
    Status status;
    const int rc = await_request(receives[i], status);
    if (rc == kStopped) return c.done(rc);
    ffi::Error e = received(c, rc, status, parts[i], static_cast<int>(neighbors[i]));
    if (first.success() && !e.success()) first = e;
  }
  for (size_t i = 0; i < n; ++i) {
    if (!sends[i].under_way) continue;
    Status status;
    const int rc = await_request(sends[i], status);
    if (first.success() && rc) first = c.done(rc);
  }
  if (first.success()) return compare_all(c, from_neighbors);
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
MPIGRAD_HANDLER(mpigrad_recv_any, recv_any,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_OUT MPIGRAD_Y.Ret<mpigrad::Envelope>() MPIGRAD_WHERE
                    MPIGRAD_ATTR(source) MPIGRAD_ATTR(tag));
MPIGRAD_HANDLER(mpigrad_recv_from, recv_from,
                MPIGRAD_BIND MPIGRAD_IN.Arg<mpigrad::Envelope>() MPIGRAD_OUT MPIGRAD_Y
                    MPIGRAD_WHERE);
MPIGRAD_HANDLER(mpigrad_send_to, send_to,
                MPIGRAD_BIND MPIGRAD_IN.Arg<mpigrad::Envelope>() MPIGRAD_X MPIGRAD_OUT
                    MPIGRAD_WHERE);
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
                            MPIGRAD_ATTR(row_words).Attr<std::string_view>("operation"));
