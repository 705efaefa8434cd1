// Non-blocking messages. A post returns a request token, a number that stands for the request. The
// token is a value of the program, so it reaches its wait in derivatives too.
#include "mpi/pending.h"

namespace mpigrad {
namespace {

std::map<int, Pending> posted;

int next_token() {
  static int last = 0;
  do {  // tokens travel as float32, which represents these integers exactly
    last = last % 0xffffff + 1;
  } while (posted.count(last));
  return last;
}

// Every element holds the same token, because a batch is sent as one message.
int read(const Buffer& token) {
  if (token.element_count() == 0) return 0;
  return token.element_type() == ffi::S32 ? token.typed_data<int32_t>()[0]
                                           : static_cast<int>(token.typed_data<float>()[0]);
}

void write(Buffer& token, int number) {
  for (size_t i = 0; i < token.element_count(); ++i) {
    if (token.element_type() == ffi::S32)
      token.typed_data<int32_t>()[i] = number;
    else
      token.typed_data<float>()[i] = static_cast<float>(number);
  }
}

// Note in all pending wildcard receives that a message of this sender and tag was received since.
// Returns whether there are any.
bool note_in_wildcards(int64_t slot, int64_t peer, int64_t tag) {
  bool any = false;
  for (auto& [token, message] : posted) {
    if (!message.from_anyone || message.slot != slot) continue;
    message.since.insert({peer, tag});
    any = true;
  }
  return any;
}

ffi::Error keep(const Call& c, int code, Pending&& message, BufferOut& token) {
  if (code) return c.done(code);
  static int64_t posts = 0;
  message.order = ++posts;
  const int number = next_token();
  posted.emplace(number, std::move(message));
  write(*token, number);
  return ffi::Error::Success();
}

ffi::Error post_send(const Call& c, const Buffer& x, int64_t dest, int64_t tag, BufferOut& token) {
  const Mail going = mail(dest, tag, x);
  if (ffi::Error e = c.posts({going}, {}); e.failure()) return e;
  const Parcel parcel(c, going, Words(x));
  Pending message(c, dest, parcel.words);
  message.tag = tag;
  message.number = c.post.number_sent();
  const int code = message.post_send(parcel.words, tag);
  return keep(c, code, std::move(message), token);
}

ffi::Error isend(Token, Buffer x, TokenOut, BufferOut token, int64_t comm, int64_t site,
                 int64_t dest, int64_t tag) {
  const Call c("isend", comm, site, x.size_bytes(), dest);
  return post_send(c, x, dest, c.tag(tag), token);
}

// Send to the sender of a message.
ffi::Error isend_to(Token, Envelope envelope, Buffer x, TokenOut, BufferOut token, int64_t comm,
                    int64_t site) {
  const int32_t* partner = envelope.typed_data();
  const Call c("isend", comm, site, x.size_bytes(), partner[0]);
  return post_send(c, x, partner[0], c.tag(partner[1]), token);
}

// `source` and `tag` may be wildcards.
ffi::Error irecv(Token, TokenOut, BufferOut token, int64_t comm, int64_t site, int64_t source,
                 int64_t tag, int64_t bytes, int64_t element_bytes) {
  const Call c("irecv", comm, site, 0, source);
  tag = c.tag(tag);
  if (ffi::Error e = c.posts({}, {{source, tag, {}}}); e.failure()) return e;
  const size_t label = label_bytes(c.slot);
  Pending message(c, source, Words(nullptr, label + bytes, label ? 1 : element_bytes));
  std::memset(message.words.data, 0, label);
  message.tag = tag;
  message.number = c.post.number_received();
  message.from_anyone = source != runtime.proc_null && (source < 0 || tag < 0);
  if (message.from_anyone)
    c.post.from_anyone(1);
  else if (note_in_wildcards(c.slot, source, tag) && message.number)
    message.number = -1;  // unknown: a wildcard receive may take the message first
  const int code = message.post_receive(tag);
  return keep(c, code, std::move(message), token);
}

// The tangent of a wildcard receive: nothing is posted, but later receives are noted in it.
ffi::Error open(Token, TokenOut, BufferOut token, int64_t comm, int64_t site) {
  const Call c("irecv", comm, site, 0);
  if (ffi::Error e = c.posts({}, {}); e.failure()) return e;
  Pending message(c, -1, Words(nullptr, 0, 1));
  message.receives = message.from_anyone = true;
  message.posted = false;
  return keep(c, 0, std::move(message), token);
}

// Remove and return the message of a token. `error` is set if it does not exist, or if another thread
// is in an operation and may be reading the list.
std::map<int, Pending>::node_type take(const Call& c, const Buffer& token, bool receives,
                                       ffi::Error& error) {
  if (!c.post.allowed()) {
    error = c.done(c.post.refusal);
    return {};
  }
  auto found = posted.find(read(token));
  if (found == posted.end() || found->second.receives != receives) {
    error = c.posts({}, {});  // nothing was sent, so what the board has of messages stays true
    if (error.failure()) return {};
    error = c.fail(
        "no message is pending for this request. It was already waited for, or it was never waited "
        "for (so its adjoint was not posted), or it was posted outside the differentiated "
        "function. Wait for each request exactly once, in the function that posts it.");
    return {};
  }
  return posted.extract(found);
}

// Put back a message whose wait was refused: MPI still uses its memory.
ffi::Error give_back(std::map<int, Pending>::node_type&& node, ffi::Error&& error) {
  posted.insert(std::move(node));
  return std::move(error);
}

// Adjoints go from the wait to the post: the partner takes the adjoint of the last post first. If
// the program waited in another order, adjoints would be exchanged.
ffi::Error check_order(const Call& c, const Pending& message) {
  has_ended(message.slot, message.peer, message.tag, message.receives, message.order);
  if (c.site >= 0 || !message.overtaken) return ffi::Error::Success();
  const std::string peer = std::to_string(message.peer);
  const std::string tag = std::to_string(c.given_tag(message.tag));
  return c.fail("two messages between this rank and rank " + peer + " with tag " + tag +
                " were completed in another order than they were posted, so their adjoints could "
                "be exchanged. Give each message its own tag, or wait in the order of the posts "
                "(as waitall does) before other messages of this rank and tag are sent or received.");
}

// Waits for a receive, which `mail` describes, and copies its data to y.
ffi::Error finish(const Call& c, Pending& message, const Mail& mail, BufferOut& y,
                  Status& status) {
  const int64_t source = mail.peer;
  const int code = await_request(message.request, status, Stopped::keeps);
  if (code == kStopped) return c.done(code);
  const Words data(y);
  const size_t bytes = data.count * data.width;
  if (message.words.count * message.words.width != label_bytes(c.slot) + bytes)
    return c.fail("the request was posted outside the vmap in which it is waited for. Post it and "
                  "wait for it in the same function.");
  advise_huge_pages(data.data, bytes);
  if (source == runtime.proc_null) {
    std::memset(data.data, 0, bytes);
    return ffi::Error::Success();
  }
  // The status of a failed receive need not have a source.
  const int sender = source >= 0 ? source : code ? -1 : status_source(status);
  if (sender == c.comm.rank) free_received_from_self();
  return unpack(c, mail, code, status, sender, message.words, data);
}

// Completes a receive.
ffi::Error arrive(Token, Buffer token, TokenOut, BufferOut y, int64_t comm, int64_t site,
                  int64_t source) {
  const Call c("wait", comm, site, 0, source);
  ffi::Error error = ffi::Error::Success();
  auto node = take(c, token, true, error);
  if (node.empty()) return error;
  Pending& message = node.mapped();
  const Mail expected{source, message.tag, layout_of(*y), -1, message.number};
  error = c.messages({}, {expected});
  if (error.success()) error = check_order(c, message);
  if (error.failure()) return give_back(std::move(node), std::move(error));
  Status status;
  error = finish(c, message, expected, y, status);
  // A wait that was stopped: the message may come later.
  return message.request.under_way ? give_back(std::move(node), std::move(error)) : error;
}

// Completes a wildcard receive.
ffi::Error arrive_any(Token, Buffer token, TokenOut, BufferOut y, ffi::Result<Envelope> envelope,
                      int64_t comm, int64_t site, int64_t source) {
  const Call c("wait", comm, site, 0, source);
  ffi::Error error = ffi::Error::Success();
  auto node = take(c, token, true, error);
  if (node.empty()) return error;
  Pending& message = node.mapped();
  // If nothing was received since the post, it takes what a receive that begins now would take.
  const bool certain = message.since.empty();
  if (certain) c.post.from_anyone(-1);
  const Mail expected{source, message.tag, layout_of(*y)};
  error = c.messages({}, {expected});
  if (error.failure()) {
    if (certain) c.post.from_anyone(1);
    return give_back(std::move(node), std::move(error));
  }
  Status status;
  error = finish(c, message, expected, y, status);
  if (message.request.under_way) {
    if (certain) c.post.from_anyone(1);
    return give_back(std::move(node), std::move(error));
  }
  if (error.failure()) return error;
  const int sender = status_source(status), tag = status_tag(status);
  c.post.matched(0, sender, tag);
  if (!certain) c.post.from_anyone(-1);
  has_ended(message.slot, sender, tag, true, message.order);
  write(envelope, status);
  return error;
}

// Receives a tangent from the sender of its message.
ffi::Error arrive_from(Token, Envelope envelope, Buffer token, TokenOut, BufferOut y,
                       int64_t comm, int64_t site) {
  const int64_t source = envelope.typed_data()[0];
  const Call c("wait", comm, site, 0, source);
  const int64_t tag = c.tag(envelope.typed_data()[1]);
  ffi::Error error = ffi::Error::Success();
  auto node = take(c, token, true, error);
  if (node.empty()) return error;
  const Pending& message = node.mapped();
  if (message.since.count({source, tag}))
    return c.fail("the message of a wildcard irecv came from rank " + std::to_string(source) +
                  " with tag " + std::to_string(c.given_tag(tag)) +
                  ", but another derivative from this rank and tag was received (or its receive "
                  "was posted) before this wait, so tangents could be exchanged. Wait for this "
                  "request first, or give the messages different tags.");
  Status status;
  return receive_mail(c, mail(source, tag, *y), Words(y), status, message.order);
}

// Completes a send.
ffi::Error sent(Token, Buffer token, TokenOut, int64_t comm, int64_t site, int64_t dest) {
  const Call c("wait", comm, site, 0, dest);
  ffi::Error error = ffi::Error::Success();
  auto node = take(c, token, false, error);
  if (node.empty()) return error;
  const Pending& message = node.mapped();
  const auto length = static_cast<int64_t>(message.words.count * message.words.width);
  const Layout bytes{0, nullptr, 0, length};
  error = c.messages({{message.peer, message.tag, bytes, -1, message.number}}, {});
  if (error.success()) error = check_order(c, message);
  if (error.failure()) return give_back(std::move(node), std::move(error));
  Status status;
  error = c.done(await_request(node.mapped().request, status, Stopped::keeps));
  return message.request.under_way ? give_back(std::move(node), std::move(error)) : error;
}

}  // namespace

void has_ended(int64_t slot, int64_t peer, int64_t tag, bool receives, int64_t order) {
  if (posted.empty() || peer == runtime.proc_null) return;
  for (auto& [token, message] : posted) {
    if (message.slot != slot || message.receives != receives || message.order > order) continue;
    if (message.from_anyone)
      message.since.insert({peer, tag});
    else if (message.peer == peer && message.tag == tag)
      message.overtaken = true;
  }
}

}  // namespace mpigrad

// The requests that were never waited for, one per line, for the end of the process.
MPIGRAD_EXPORT const char* mpigrad_pending_requests() {
  static std::string text;
  text.clear();
  for (const auto& [token, message] : mpigrad::posted)
    if (message.posted)
      text += std::string(message.operation) + " at " + mpigrad::call_site(message.site) + "\n";
  return text.c_str();
}

MPIGRAD_HANDLER(mpigrad_isend, isend,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(dest) MPIGRAD_ATTR(tag));
MPIGRAD_HANDLER(mpigrad_irecv, irecv,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE MPIGRAD_ATTR(source)
                    MPIGRAD_ATTR(tag) MPIGRAD_ATTR(bytes) MPIGRAD_ATTR(element_bytes));
MPIGRAD_HANDLER(mpigrad_arrive, arrive,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(source));
MPIGRAD_HANDLER(mpigrad_isend_to, isend_to,
                MPIGRAD_BIND MPIGRAD_IN.Arg<mpigrad::Envelope>() MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y
                    MPIGRAD_WHERE);
MPIGRAD_HANDLER(mpigrad_open, open, MPIGRAD_BIND MPIGRAD_IN MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE);
MPIGRAD_HANDLER(mpigrad_arrive_any, arrive_any,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y.Ret<mpigrad::Envelope>()
                    MPIGRAD_WHERE MPIGRAD_ATTR(source));
MPIGRAD_HANDLER(mpigrad_arrive_from, arrive_from,
                MPIGRAD_BIND MPIGRAD_IN.Arg<mpigrad::Envelope>() MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y
                    MPIGRAD_WHERE);
MPIGRAD_HANDLER(mpigrad_sent, sent,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_WHERE MPIGRAD_ATTR(dest));
