// Messages on the board: how many have gone each way between partners, and whether those of an
// operation can take place.
#pragma once

#include <vector>

#include "guard/board.h"

namespace mpigrad {

// A receive from anyone, or of any tag.
inline bool wild(const Part& p) { return p.peer < 0 || p.tag < 0; }

// This rank's counts of messages to and from `peer`, or nullptr where there is no more room: then
// nothing is proved about its messages any more.
Channel* my_channel(int64_t id, int64_t peer, int64_t tag);

// Whether an operation of messages can take place, seen from one rank of a communicator. Where a
// partner's message belongs to an operation that itself waits on the board, that one must be able
// to take place, too: else this rank would enter MPI and wait there for a message that is refused.
class Exchange {
 public:
  explicit Exchange(int64_t slot);
  bool possible(int64_t rank);

 private:
  // The operation that rank is in waits on the board, and has this part.
  bool waits(const Slot& s, const Part* parts, const Cell& count, int64_t peer, int64_t tag,
             int64_t ordinal) const;
  // The message that `rank` waits for has been handed over, and is what it expects.
  bool available(int64_t rank, const Part& p);
  // Some message has been handed over that a receive from anyone, or of any tag, takes; from one
  // sender it takes the oldest.
  bool any_available(int64_t rank, const Slot& receiver, const Part& p);
  // A long message of `rank` meets a receive.
  bool expected(int64_t rank, const Part& p);

  int64_t slot_, id_;
  std::vector<bool> seen_;
};

}  // namespace mpigrad
