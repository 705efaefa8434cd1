// Loops over the cells of a half row: the arithmetic of the multigrid cycle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace mpigrad::multigrid {

constexpr int kMaxTerms = 27;

// A sum of products of neighbouring numbers: the places of both factors, relative to a cell.
struct Terms {
  int size = 0;
  int64_t factor[kMaxTerms], number[kMaxTerms];
  void add(int64_t f, int64_t n) {
    factor[size] = f;
    number[size++] = n;
  }
};

// GCC does not unroll long loops before it vectorizes, so the sum is written as one expression.
template <size_t... s>
__attribute__((always_inline)) inline float sum(const float* a, const float* x, const int64_t* f, const int64_t* n, int64_t k,
                 std::index_sequence<s...>) {
  return ((a[k + f[s]] * x[k + n[s]]) + ...);
}

enum RowTask { kRelax, kResidual, kAdd };

// y may be the same array as x: the cells that are written are not read.
template <RowTask task, int S>
void run_row(const Terms& terms, const float* a, const float* x, const float* b, float* y,
             int64_t begin, int64_t end) {
#pragma GCC ivdep
  for (int64_t k = begin; k < end; ++k) {
    const float total = sum(a, x, terms.factor, terms.number, k, std::make_index_sequence<S>());
    if constexpr (task == kRelax) y[k] = (b[k] - total) * a[k];
    if constexpr (task == kResidual) y[k] = -total;
    if constexpr (task == kAdd) y[k] = b[k] + total;
  }
}

template <RowTask task>
void run_row(const Terms& terms, const float* a, const float* x, const float* b, float* y,
             int64_t begin, int64_t end) {
  switch (terms.size) {
#define MPIGRAD_TERMS(S) \
  case S:                \
    return run_row<task, S>(terms, a, x, b, y, begin, end);
    MPIGRAD_TERMS(1) MPIGRAD_TERMS(2) MPIGRAD_TERMS(3) MPIGRAD_TERMS(4) MPIGRAD_TERMS(5)
    MPIGRAD_TERMS(6) MPIGRAD_TERMS(7) MPIGRAD_TERMS(8) MPIGRAD_TERMS(9) MPIGRAD_TERMS(12)
    MPIGRAD_TERMS(17)
    MPIGRAD_TERMS(18) MPIGRAD_TERMS(20) MPIGRAD_TERMS(24) MPIGRAD_TERMS(26)
#undef MPIGRAD_TERMS
    case 0:
#pragma GCC ivdep
      for (int64_t k = begin; k < end; ++k) {
        if constexpr (task == kRelax) y[k] = b[k] * a[k];
        if constexpr (task == kResidual) y[k] = 0;
        if constexpr (task == kAdd) y[k] = b[k];
      }
      return;
  }
  // Other sizes: term by term.
  for (int64_t k = begin; k < end; ++k) {
    float total = 0;
    for (int s = 0; s < terms.size; ++s) total += a[k + terms.factor[s]] * x[k + terms.number[s]];
    if constexpr (task == kRelax) y[k] = (b[k] - total) * a[k];
    if constexpr (task == kResidual) y[k] = -total;
    if constexpr (task == kAdd) y[k] = b[k] + total;
  }
}

}  // namespace mpigrad::multigrid
