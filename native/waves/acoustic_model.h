// The velocity of acoustic waves: its values that are refused, and their texts.
#pragma once

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "waves/tile.h"

namespace mpigrad::waves {

// The smallest velocity times -1, the largest one, and whether there are values that are not finite.
template <class T>
std::vector<double> velocity_extremes(const T* velocity, int64_t cells) {
  T least = std::numeric_limits<T>::infinity(), most = -least;
  int bad = 0;
#pragma omp simd reduction(min : least) reduction(max : most) reduction(| : bad)
  for (int64_t i = 0; i < cells; ++i) {
    const T v = velocity[i];
    bad |= !(v - v == 0);
    least = v < least ? v : least;
    most = v > most ? v : most;
  }
  return {-static_cast<double>(least), static_cast<double>(most), bad ? 1.0 : 0.0};
}

// The error of the largest extremes of all ranks, or nothing.
inline std::string velocity_fault(const double* most, const Setup& setup) {
  const auto text = [](double x) {
    char number[40];
    std::snprintf(number, sizeof number, "%.6g", x);
    return std::string(number);
  };
  if (most[2] > 0)
    return "the velocity is NaN or infinite in some cells. Look for a division by zero or an "
           "overflow in the code that computes it.";
  if (-most[0] <= 0)
    return "the velocity must be positive, and its smallest value is " + text(-most[0]) +
           ". Check the model.";
  const double limit = setup.stable_length / most[1];
  if (setup.dt > limit * (1 + 1e-6))
    return "the time step " + text(setup.dt) + " is not stable: the largest stable one is " +
           text(limit) + " for velocities up to " + text(most[1]) +
           ". Use that time step and more steps, or a coarser grid.";
  return "";
}

}  // namespace mpigrad::waves
