/* A rank that waits for a message asks over and over, and gives its core away in between; here it
 * sleeps for a moment instead. Programs that wait until the watchdog ends them, five at a time, then
 * leave the cores to the other tests. */
#include <time.h>

int sched_yield(void) {
  const struct timespec moment = {0, 200000};
  return nanosleep(&moment, NULL);
}
