// Messages on the board: counts of messages between partners, and the test whether the messages of
// an operation can take place.
#pragma once

#include <vector>

#include "guard/board.h"

namespace mpigrad {

// Whether this is a wildcard receive: from any source, or of any tag.
inline bool wild(const Part& p) { return relaxed(p.peer) < 0 || relaxed(p.tag) < 0; }

// This rank's counts of messages to and from `peer`, or nullptr if the table is full: then nothing
// is proved about its messages any more.
Channel* my_channel(int64_t id, int64_t peer, int64_t tag);

// Whether the messages of an operation can take place, seen from one rank of a communicator. If a
// partner's message belongs to an operation that itself waits on the board, that operation must be
// able to take place too. Otherwise this rank would enter MPI and wait for a refused message.
class Exchange {
 public:
  explicit Exchange(int64_t slot);
  bool possible(int64_t rank);
  // Whether the operation of a partner can end as soon as this rank hands its messages to MPI, and this
  // rank's own operation cannot end before: its partner is in another operation, or has not come to
  // this one although it is `late`. In MPI, an operation with several messages, like sendrecv, hands each
  // of them over by itself.
  bool needed(int64_t rank, bool late);
 private:
  bool partners_possible(int64_t rank);
  // Whether the operation of `other` needs a message of `rank` that is in `parts`, and no other one.
  bool waits_for(int64_t other, int64_t rank, const Part* parts, const Cell& count, bool receives);
  // Whether one of these messages has no partner yet. If it is not `late`, the partner must be in another
  // operation.
  bool lacks(const Part* parts, const Cell& count, int64_t rank, bool receives, bool late) const;
  // Whether the rank is in an operation with messages on this communicator.
  bool in_messages(const Slot& s) const;
  // Whether the current operation of the rank waits on the board, with all its messages, and has this part.
  bool waits(const Slot& s, const Part* parts, const Cell& count, int64_t peer, int64_t tag,
             int64_t ordinal) const;
  // Whether the message that `rank` waits for was sent and is what the rank expects.
  bool available(int64_t rank, const Part& p);
  // Whether some message was sent that this wildcard receive takes. It takes the oldest message of
  // a sender.
  bool any_available(int64_t rank, const Slot& receiver, const Part& p);
  // Whether a long message of `rank` has a matching receive.
  bool expected(int64_t rank, const Part& p);

  int64_t slot_, id_;
  // For each rank 0 (not looked at), n > 0 (the n-th that was found or is assumed to be possible), or
  // kImpossible.
  std::vector<int64_t> seen_;
  int64_t looks_ = 0;
  static constexpr int64_t kImpossible = -1;
};

}  // namespace mpigrad
