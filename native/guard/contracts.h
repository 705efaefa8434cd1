// Contracts: the arguments of a collective operation that must be the same on all members. They are
// written on the board and compared.
#pragma once

#include "guard/board.h"
#include "guard/guard.h"

namespace mpigrad {

void copy_layout(const Layout& from, int64_t& dtype, int64_t& rank, int64_t* dims);
// Whether dtype and shape are equal, except for the leading `free_dims` dimensions.
bool same_layout(int64_t dtype, int64_t rank, const int64_t* dims, int64_t dtype2, int64_t rank2,
                 const int64_t* dims2, int64_t free_dims = 0);

// Whether the contract already has these contents, as it does in a loop.
bool repeats(const Contract& c, int64_t site, const char* operation, const Agreement& a);
void write(Contract& c, int64_t site, const char* operation, const char* text, const Agreement& a);
bool agree(const Contract& a, const Contract& b);
// Whether each rank expects the counts that the others send to it. Every rank compares all pairs.
bool pairs_agree(int64_t slot, int64_t sequence);

}  // namespace mpigrad
