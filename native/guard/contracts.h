// What the members of a communicator agree on in a collective operation: written on the board, and
// compared.
#pragma once

#include "guard/board.h"
#include "guard/guard.h"

namespace mpigrad {

void copy_layout(const Layout& from, int64_t& dtype, int64_t& rank, int64_t* dims);
// Of the same dtype and shape, but for the leading dimensions that may differ.
bool same_layout(int64_t dtype, int64_t rank, const int64_t* dims, int64_t dtype2, int64_t rank2,
                 const int64_t* dims2, int64_t free_dims = 0);

// Whether the contract says all of this already, as it does in a loop.
bool repeats(const Contract& c, int64_t site, const char* operation, const Agreement& a);
void write(Contract& c, int64_t site, const char* operation, const char* text, const Agreement& a);
bool agree(const Contract& a, const Contract& b);
// What each rank sends to each other is what that one receives; all look at all.
bool pairs_agree(int64_t slot, int64_t sequence);

}  // namespace mpigrad
