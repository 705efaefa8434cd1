// Labels, for MPIGRAD_GUARD=1 between hosts. Receiver and sender do not share a board, so the
// message itself carries a label in front of its data.
#pragma once

#include <vector>

#include "mpi/handler.h"

namespace mpigrad {

// The length of the label of a message on this communicator, usually 0.
size_t label_bytes(int64_t slot);

// A message as MPI sends or receives it: `words` point into `memory` if the message has a label.
struct Parcel {
  std::vector<char> memory;
  Words words;

  // For sending x, which `mail` describes.
  Parcel(const Call& c, const Mail& mail, const Words& x);
  // For receiving into y.
  Parcel(const Call& c, const Words& y);
};

// After all messages of an exchange with several partners: compare those that are new with what the
// senders have announced.
ffi::Error compare_all(const Call& c, const std::vector<Mail>& received);

// After a receive of `words` from `source`: copy the data to y if they are as `mail` describes,
// else return an error with what was received. `code` is the return code of MPI.
ffi::Error unpack(const Call& c, const Mail& mail, int code, Status& status, int source,
                  const Words& words, const Words& y);

}  // namespace mpigrad
