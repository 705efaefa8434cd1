// Checks and sums of the numbers of a matrix or a vector.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>

#include "processor.h"

namespace mpigrad::stencil {

// Sums over arrays have several lanes: a single sum would wait for the result of each addition.
constexpr int kLanes = 32;

inline bool all_finite(const double* v, size_t size) {
  double spoilt[kLanes] = {};  // x - x is 0, or NaN for infinities and NaN
  run_on_this_processor([v, size, &spoilt] {
    size_t k = 0;
    for (; k + kLanes <= size; k += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) spoilt[lane] += v[k + lane] - v[k + lane];
    }
    for (; k < size; ++k) spoilt[0] += v[k] - v[k];
  });
  return std::all_of(spoilt, spoilt + kLanes, [](double s) { return s == 0; });
}

inline double sum_of_squares(const double* v, size_t size) {
  double sums[kLanes] = {};
  run_on_this_processor([v, size, &sums] {
    size_t k = 0;
    for (; k + kLanes <= size; k += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) sums[lane] += v[k + lane] * v[k + lane];
    }
    for (; k < size; ++k) sums[0] += v[k] * v[k];
  });
  return std::accumulate(sums, sums + kLanes, 0.0);
}

// A value in (-1, 1) that depends on the global row alone, so that a verdict is the same for any
// number of ranks (the finalizer of splitmix64).
inline double noise(int64_t row, uint64_t seed) {
  uint64_t z = static_cast<uint64_t>(row) * 0x9E3779B97F4A7C15ull + seed;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return static_cast<double>(static_cast<int64_t>(z ^ (z >> 31))) * 0x1p-63;
}

}  // namespace mpigrad::stencil
