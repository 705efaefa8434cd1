// Contracts: the arguments of a collective operation that must be the same on all members. They are
// written on the board and compared.
#pragma once

#include <array>

#include "guard/board.h"
#include "guard/guard.h"

namespace mpigrad {

void copy_layout(const Layout& from, int64_t& dtype, int64_t& rank, int64_t* dims);
// Whether dtype and shape are equal, except for the leading `free_dims` dimensions.
bool same_layout(int64_t dtype, int64_t rank, const int64_t* dims, int64_t dtype2, int64_t rank2,
                 const int64_t* dims2, int64_t free_dims = 0);

// Whether a message fits its receive. jax.jacrev of a number batches the adjoint that is sent, by one,
// and not the one that is expected.
bool same_message(Part sent, Part expected, bool adjoint);

// Whether the contract already has these contents, as it does in a loop.
bool repeats(const Contract& c, int64_t site, const char* operation, const Agreement& a);
void write(Contract& c, int64_t site, const char* operation, const char* text, const Agreement& a);
bool agree(const Contract& a, const Contract& b);

// Odd constants (the finaliser of splitmix64 of 1, 2, …).
constexpr std::array<uint64_t, 64> factors = [] {
  std::array<uint64_t, 64> all{};
  for (uint64_t i = 0; i < all.size(); ++i) {
    uint64_t z = (i + 1) * UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    all[i] = (z ^ (z >> 31)) | 1;
  }
  return all;
}();

// A number for a row of words: a sum of products, which do not wait for each other.
struct Mixed {
  uint64_t sum = 0;
  size_t words = 0;
  void operator()(int64_t word) {
    sum += (static_cast<uint64_t>(word) + 1) * factors[words++ % factors.size()];
  }
};

// A number of a contract: equal for contracts that agree, except in the counts of pairs.
uint64_t digest(const Contract& c);
// Whether an operation with this number is the first one of this process.
bool is_new(uint64_t key);
// What `is_new` and `Ledger` know of a communicator is forgotten: another one takes its slot.
void forget_agreements(int64_t slot);

// The collectives of a communicator whose members are on several hosts. Every rank sums up its
// contracts, and the members compare the sums before the operations 1, 2, 4, 8, ….
struct Ledger {
  uint64_t sum = 0;
  bool known = true;  // false: a pytree of this rank has no number
  void add(const Contract& c);
};
Ledger& ledger(int64_t slot);

// Whether each rank expects the counts that the others send to it. Every rank compares all pairs.
bool pairs_agree(int64_t slot, int64_t sequence);

}  // namespace mpigrad
