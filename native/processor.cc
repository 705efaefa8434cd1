#include "processor.h"

#include "visibility.h"

// The best variant that this processor runs: 0 (all of its kind), 1 (x86-64-v3), 2 (x86-64-v4).
MPIGRAD_EXPORT int mpigrad_best_variant() { return mpigrad::best_variant(); }

// jaxlib's builds for x86-64 need AVX.
MPIGRAD_EXPORT int mpigrad_has_avx() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx") != 0;
#else
  return 1;
#endif
}
