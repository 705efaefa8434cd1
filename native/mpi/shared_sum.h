// Sums over a few ranks of one host, through shared memory. MPI's allreduce sends messages, which
// need one more copy and more waiting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "guard/board.h"

namespace mpigrad {

constexpr size_t kPiece = 1 << 16;

// One piece of a rank's summand. The rank writes the next piece while others still read this one.
struct alignas(64) Piece {
  char data[kPiece];
};

// How many pieces a rank has written and read in sums of one communicator.
struct Progress {
  alignas(64) Cell written;
  Cell arrays[2];  // Summand::kind of the last two pieces, for the others to compare
  Cell sequences[2];  // the sequence number of the collective of each
  alignas(64) Cell read;
};

// The memory for sums of one rank, which the other ranks of its host read.
struct alignas(4096) Shared {
  Progress progress[kEntries];
  Piece piece[2];
};

// An array of real numbers (a complex array has twice as many), and the address of the sum, which
// may be the same.
struct Summand {
  const void* data;
  void* sum;
  size_t bytes;
  bool wide;  // float64, not float32
  int64_t kind() const { return static_cast<int64_t>(bytes) * 2 + wide; }
};

// Whether sums of this length on this communicator use shared memory. The same on all members.
bool shares_sums(int64_t slot, size_t bytes);

// Sum with the same bits on every member: ranks are added in order. Returns "", or an error text.
std::string shared_sum(int64_t slot, const Summand& x);

}  // namespace mpigrad
