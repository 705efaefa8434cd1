// Sums among a few ranks of one host, through memory that all of them see: MPI's own go through
// messages, which cost a copy more, and more waiting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "guard/board.h"

namespace mpigrad {

constexpr size_t kPiece = 1 << 16;

// What a rank adds, in pieces: the next one is written while another rank still reads this one.
struct alignas(64) Piece {
  char data[kPiece];
};

// The pieces that a rank has written in sums of one communicator, and those of others that it has read.
struct Progress {
  alignas(64) Cell written;
  Cell arrays[2];  // what the last two pieces are of, for the others to compare
  Cell sequences[2];  // and of which collective operation of that rank
  alignas(64) Cell read;
};

// What a rank shows to those of its host, beside its slot of the board.
struct alignas(4096) Shared {
  Progress progress[kEntries];
  Piece piece[2];
};

// An array of real numbers (a complex one is twice as long), and the place of the sum: the same, or
// another.
struct Summand {
  const void* data;
  void* sum;
  size_t bytes;
  bool wide;  // float64, not float32
  int64_t kind() const { return static_cast<int64_t>(bytes) * 2 + wide; }
};

// Whether the members of this communicator sum so many bytes here; it is the same on all of them.
bool shares_sums(int64_t slot, size_t bytes);

// The same bits on every member: ranks are added in their order. Returns "", or what is wrong.
std::string shared_sum(int64_t slot, const Summand& x);

}  // namespace mpigrad
