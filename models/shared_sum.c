// The sum through shared memory in C, for GenMC, which knows the memory models of C++ (RC11) and of the
// processors (IMM: AArch64, POWER). A sum of 3 pieces on communicator 0, then sums on 1 and 0. The
// mutants are those of shared_sum.pml.
#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>

#ifndef MUTANT
#define MUTANT 0
#endif
#ifndef RANKS
#define RANKS 2
#endif
#ifndef SUMS
#define SUMS 5
#endif
#define COMMS 2
#define BUFFER(n) (MUTANT == 6 ? 0 : (n) % 2)

struct Progress {
  _Atomic long written, read;
};
struct Shared {
  struct Progress progress[COMMS];
  long piece[2];
} shared[RANKS];

static void await(_Atomic long* x, long n, int weak) {
  while (atomic_load_explicit(x, weak ? memory_order_relaxed : memory_order_acquire) < n)
    ;
}

static void sum(int me, int comm, long value, int* last) {
  if (comm != *last && MUTANT != 5) {
    const int before = MUTANT == 8 ? comm : *last;
    const long n = atomic_load_explicit(&shared[me].progress[before].written, memory_order_relaxed);
    for (int m = 0; m < RANKS; ++m)
      if (m != me) await(&shared[m].progress[before].read, n, MUTANT == 4);
  }
  *last = comm;
  struct Progress* mine = &shared[me].progress[comm];
  const long n = atomic_load_explicit(&mine->written, memory_order_relaxed) + 1;
  shared[me].piece[BUFFER(n)] = value;
  atomic_store_explicit(&mine->written, n, MUTANT == 1 ? memory_order_relaxed : memory_order_release);
  for (int m = 0; m < RANKS; ++m)
    if (m != me) await(&shared[m].progress[comm].written, n, MUTANT == 3);
  if (MUTANT == 7) atomic_store_explicit(&mine->read, n, memory_order_release);
  for (int m = 0; m < RANKS; ++m) assert(shared[m].piece[BUFFER(n)] == value);
  if (MUTANT != 7)
    atomic_store_explicit(&mine->read, n, MUTANT == 2 ? memory_order_relaxed : memory_order_release);
}

static void* rank(void* number) {
  const int me = (int)(long)number;
  int last = 0;
  static const int order[] = {0, 0, 0, 1, 0};
  for (int i = 0; i < SUMS; ++i) sum(me, order[i], i + 1, &last);
  return NULL;
}

int main(void) {
  pthread_t threads[RANKS];
  for (long r = 0; r < RANKS; ++r) pthread_create(&threads[r], NULL, rank, (void*)r);
  return 0;
}
