/* Two threads begin and end calls of mpigrad as fast as they can. Returns how many were allowed, or -1
 * if both threads were in a call at once. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef const char* Begin(const char*, int64_t, int64_t, bool, bool*);
typedef void End(void);

static Begin* begin;
static End* end;
static int turns;
static atomic_int inside, allowed;
static atomic_bool both;

static void* work(void* unused) {
  for (int i = 0; i < turns; ++i) {
    bool begun = false;
    begin("test", -1, 0, true, &begun);
    if (!begun) continue;
    if (atomic_fetch_add(&inside, 1)) atomic_store(&both, true);
    atomic_fetch_add(&allowed, 1);
    atomic_fetch_sub(&inside, 1);
    end();
  }
  return unused;
}

int two_threads(Begin* given_begin, End* given_end, int count) {
  pthread_t threads[2];
  begin = given_begin;
  end = given_end;
  turns = count;
  for (int i = 0; i < 2; ++i) pthread_create(&threads[i], 0, work, 0);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], 0);
  return atomic_load(&both) ? -1 : atomic_load(&allowed);
}
