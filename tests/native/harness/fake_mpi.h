// What the harness says to the MPI of fake_mpi.cc.
#pragma once

#include <cstdint>
#include <vector>

constexpr int kRanks = 8;  // at most

namespace fake_mpi {

// A new job, with the ranks of each communicator.
void reset(const std::vector<std::vector<int>>& communicators);
// This thread is a rank. Its calls are delayed at random, and one of them fails (0: none).
void be_rank(int rank, uint64_t seed, int failing_call);
// All waiting calls return an error.
void abort();

}  // namespace fake_mpi
