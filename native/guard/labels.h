// With MPIGRAD_GUARD=1, between hosts: no board tells a receiver what its sender sends, so the
// message itself does, by a label in front of its data.
#pragma once

#include <vector>

#include "mpi/handler.h"

namespace mpigrad {

// The bytes in front of a message of `data` bytes on this communicator; mostly none. (With a label MPI
// counts bytes: the longest messages have none.)
size_t label_bytes(int64_t slot, size_t data);

// A message as it travels: `words` are what MPI sends, or receives, in `memory` where it has a label.
struct Parcel {
  std::vector<char> memory;
  Words words;

  // To be sent: x, which `mail` describes.
  Parcel(const Call& c, const Mail& mail, const Words& x);
  // To be received into y.
  Parcel(const Call& c, const Words& y);
};

// After a receive of `words` from `source`: y has the data that `mail` describes, or the error says
// what has come in its place. `code` is what MPI has said.
ffi::Error unpack(const Call& c, const Mail& mail, int code, Status& status, int source,
                  const Words& words, const Words& y);

}  // namespace mpigrad
