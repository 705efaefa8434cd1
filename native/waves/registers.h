// Loops over the cells of a row in whole registers.
#pragma once

#include <cstdint>
#include <type_traits>

#define MPIGRAD_INLINE inline __attribute__((always_inline))

namespace mpigrad::waves {

// The cells of a register of 256 bits in float32. In float64 they are two registers.
constexpr int64_t kRegister = 8;

constexpr int64_t whole_registers(int64_t cells) {
  return (cells + kRegister - 1) / kRegister * kRegister;
}

// f(j, n) for n cells from j on, with a constant n: a loop over them becomes one vector operation for
// each of its lines. Rows near layers have many short loops, and the remainders and alignment of loops of
// unknown lengths would take more time than the cells.
template <class F>
MPIGRAD_INLINE void in_registers(int64_t begin, int64_t end, const F& f) {
  int64_t j = begin;
  for (; j + kRegister <= end; j += kRegister) f(j, std::integral_constant<int64_t, kRegister>{});
  for (; j < end; ++j) f(j, std::integral_constant<int64_t, 1>{});
}

}  // namespace mpigrad::waves
