// Collectives of arrays that MPI cannot count, as messages between all ranks (mpi/transfers.h).
#pragma once

#include <vector>

#include "mpi/handler.h"

namespace mpigrad {

// Part of an array.
struct Block {
  char* data = nullptr;
  int64_t words = 0;
};
using Blocks = std::vector<Block>;  // one for each rank

// The blocks of an array, one after the other, of rows[r] rows with `row` words.
Blocks blocks(void* data, size_t width, Integers rows, int64_t row);
// The same with `words` words in each block.
Blocks equal_blocks(void* data, size_t width, int64_t words, int ranks);

// Sends sends[r] to rank r, which receives it in its receives[this rank]. Returns MPI's code.
int exchange(const Call& c, size_t width, const Blocks& sends, const Blocks& receives);

// MPI's counts and displacements of consecutive blocks, if all blocks together are not large.
struct Parts {
  std::vector<int> counts, displacements;
  int64_t total = 0;  // words
  Parts(Integers rows, int64_t row);
  const int* n() const { return counts.data(); }
  const int* at() const { return displacements.data(); }
};

// An alltoallv of arrays of any length. `in` and `out` are the blocks of all ranks, one after the
// other.
int alltoall_blocks(const Call& c, size_t width, int64_t row, void* in, Integers sends, void* out,
                    Integers receives);

}  // namespace mpigrad
