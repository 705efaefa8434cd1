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
  Cell took[2];  // nanoseconds of this rank's last trial, at the beginning of the next
  alignas(64) Cell read;
};

// The communicators, by slot, whose sums may go through shared memory.
constexpr int kSummed = 1024;

// The memory for sums of one rank, which the other ranks of its host read.
struct alignas(4096) Shared {
  Progress progress[kSummed];
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

// The way of the next sum of this length on a communicator. It is the same on all members.
enum class Way {  // the numbers of mpigrad_way_of_sum
  kMPI,
  kShared,
  kTrial,  // SumTrial decides
};
Way way_of_sum(int64_t slot, size_t bytes);

// A sum whose time is measured, to choose between MPI and shared memory. Two members get the same
// bits both ways, because a + b = b + a.
//
// The members meet first. So they find a mismatch before they enter MPI, begin at the same time,
// and all know how long the slowest member's last trial took.
class SumTrial {
 public:
  SumTrial(int64_t slot, const Summand& x);
  ~SumTrial();
  std::string error;
  Way way = Way::kMPI;

 private:
  int64_t slot_, begin_ns_ = 0;
  size_t bytes_;
};

// Clears this rank's counts of a communicator that all members have freed.
void forget_sums(int64_t slot);

// Sum with the same bits on every member: ranks are added in order. Returns "", or an error text.
std::string shared_sum(int64_t slot, const Summand& x);

}  // namespace mpigrad
