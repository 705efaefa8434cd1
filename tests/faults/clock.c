/* The time of day with an offset of seconds that a test changes while the program runs, as if somebody
 * had set the clock. The offset is a number in the file CLOCK_OFFSET. The monotonic clock stays. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static _Atomic(long) none, *offset = &none;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("CLOCK_OFFSET");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *page = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (page != MAP_FAILED) offset = page;
}

int clock_gettime(clockid_t clock, struct timespec *t) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(clock, t);
  if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) t->tv_sec += *offset;
  return code;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
  (void)zone;
  struct timespec now;
  int code = clock_gettime(CLOCK_REALTIME, &now);
  t->tv_sec = now.tv_sec;
  t->tv_usec = now.tv_nsec / 1000;
  return code;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
