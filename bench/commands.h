/* What a C program of a comparison is told: its side of interleave.py. */
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The rank's next command, from a pipe of its own: ranks that wait sleep, and don't disturb the program
 * that is measured in between. */
static void wait_for_command(int rank, char *text, int size) {
  static FILE *pipe;
  if (!pipe) {
    char path[4096];
    const char *folder = getenv("BENCH_PIPES");
    snprintf(path, sizeof path, "%s/%d", folder ? folder : "", rank);
    pipe = folder ? fopen(path, "r") : NULL;
    if (!pipe) {
      fprintf(stderr, "rank %d: there is no pipe of commands; bench/poisson.py or sparse.py starts this program\n", rank);
      exit(2);
    }
  }
  if (!fgets(text, size, pipe)) strcpy(text, "quit\n");
}
