// Pending messages: posted, with their own memory, and not yet completed.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "guard/labels.h"

namespace mpigrad {

struct Pending {
  const char* operation;
  int64_t slot, site, peer;
  std::unique_ptr<char[]> memory;
  Words words;
  Request request;
  bool receives = false;
  int64_t tag = 0, number = 0;  // for the guard, when the message is waited for
  int64_t order = 0;            // position in the order of all posts
  bool overtaken = false;       // a message that was posted later has already ended
  bool from_anyone = false;     // a wildcard receive, whose sender or tag is not known yet
  bool posted = true;           // false: the tangent of a wildcard receive, received by its wait
  // The senders and tags of messages that were received, or whose receives were posted, since then.
  std::set<std::pair<int64_t, int64_t>> since;

  Pending(const Call& c, int64_t peer, const Words& like)
      : operation(c.operation),
        slot(c.slot),
        site(c.site),
        peer(peer),
        memory(new char[like.count * like.width + 1]),
        words(memory.get(), like.count * like.width, like.width) {}
  Pending(Pending&&) = default;
  // MPI may still use the memory, after an error or at the end of the process: then it is not freed.
  ~Pending() {
    if (request.under_way) static_cast<void>(memory.release());
  }

  int post_send(const Words& x, int64_t tag) {
    advise_huge_pages(words.data, words.count * words.width);
    copy_bytes(words.data, x.data, words.count * words.width);
    return mpigrad::post_send(request, words.data, words.count, words.width, peer, tag,
                              communicator(slot).handle);
  }
  int post_receive(int64_t tag) {
    receives = true;
    if (peer == runtime.proc_null) std::memset(words.data, 0, words.count * words.width);
    return mpigrad::post_receive(request, words.data, words.count, words.width, peer, tag,
                                 communicator(slot).handle);
  }
};

// A message with `peer` has ended: pending messages of the same kind that were posted before
// `order` have been overtaken.
void has_ended(int64_t slot, int64_t peer, int64_t tag, bool receives, int64_t order = INT64_MAX);

// The rank and tag of a message: its sender, or its destination.
using Envelope = ffi::Buffer<ffi::S32>;
inline void write(ffi::Result<Envelope>& envelope, const Status& status) {
  envelope->typed_data()[0] = status_source(status);
  envelope->typed_data()[1] = status_tag(status);
}

// Receives y. `mail` may have wildcards.
ffi::Error receive_mail(const Call& c, const Mail& mail, const Words& y, Status& status,
                        int64_t order = INT64_MAX);

// Free the memory of messages from this rank to itself that have been received.
void free_received_from_self();

}  // namespace mpigrad
