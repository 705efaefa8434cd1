// Threads of a rank.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

#include "waves/tile.h"

namespace mpigrad::waves {

// Splits rows among threads, or cells of the middle axis if there are few rows. One thread runs without
// overhead.
template <class F>
void in_parallel(int64_t threads, const Box& box, const F& work) {
#ifdef _OPENMP
  const int64_t rows = box.i1 - box.i0, middle = box.m1 - box.m0;
  if (threads > 1 && (rows >= threads || middle >= threads)) {
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
      const int64_t n = omp_get_num_threads(), k = omp_get_thread_num();
      Box part = box;
      if (rows >= threads) {
        part.i0 = box.i0 + rows * k / n, part.i1 = box.i0 + rows * (k + 1) / n;
      } else {
        part.m0 = box.m0 + middle * k / n, part.m1 = box.m0 + middle * (k + 1) / n;
      }
      work(part);
    }
    return;
  }
#endif
  (void)threads;
  work(box);
}

}  // namespace mpigrad::waves
