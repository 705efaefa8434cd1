// Code for newer processors, chosen at run time: MPIGRAD_CPU or the best that this processor runs.
// All other code is for every x86-64 (docs/decisions/0061-chosen-at-run-time.md).
#pragma once

#include <cstdlib>
#include <cstring>

namespace mpigrad {

// The levels of x86-64 with code of their own.
enum Variant { kBaseline, kV3, kV4 };

inline Variant best_variant() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v4")) return kV4;
  if (__builtin_cpu_supports("x86-64-v3")) return kV3;
#endif
  return kBaseline;
}

// Never more than the processor runs. Python reports a wrong value of MPIGRAD_CPU
// (mpigrad/runtime/processor.py).
inline Variant chosen_variant() {
  static const Variant chosen = [] {
    const Variant best = best_variant();
    const char* name = std::getenv("MPIGRAD_CPU");
    if (!name || !*name) return best;
    const Variant wanted = !std::strcmp(name, "x86-64-v4")   ? kV4
                           : !std::strcmp(name, "x86-64-v3") ? kV3
                                                             : kBaseline;
    return wanted < best ? wanted : best;
  }();
  return chosen;
}

// A loop, compiled for each variant. `flatten` compiles all that it calls for the same processor.
// tests/native/test_portable.py allows newer instructions in functions with these names only.
#if defined(__x86_64__)
template <class Loop>
__attribute__((target("avx2,bmi,bmi2"), flatten, noinline)) void run_x86_64_v3(const Loop& loop) {
  loop();
}
template <class Loop>
__attribute__((target("avx2,bmi,bmi2,avx512f,avx512bw,avx512cd,avx512dq,avx512vl"), flatten,
               noinline)) void
run_x86_64_v4(const Loop& loop) {
  loop();
}
#endif

template <class Loop>
void run_on_this_processor(const Loop& loop) {
#if defined(__x86_64__)
  if (chosen_variant() == kV4) return run_x86_64_v4(loop);
  if (chosen_variant() == kV3) return run_x86_64_v3(loop);
#endif
  loop();
}

}  // namespace mpigrad
