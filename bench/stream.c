/* The bandwidth of memory, as the triad of STREAM measures it: a[i] = b[i] + s c[i].

   cc -O3 -march=native -fopenmp stream.c -o stream; OMP_NUM_THREADS=2 ./stream MB [MB ...]

   For each size (of all three arrays together, in 10^6 bytes) one line: the size, and the largest
   of many passes in 10^9 bytes per second, 24 bytes counted for each i, as STREAM counts. */
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

static double best_pass(double *a, const double *b, const double *c, long n) {
  const int passes = n > (1L << 23) ? 20 : 400;
  double best = 1e30;
  for (int k = 0; k < passes; ++k) {
    const double s = 3.0 + k;
    const double start = omp_get_wtime();
#pragma omp parallel for schedule(static)
    for (long i = 0; i < n; ++i) a[i] = b[i] + s * c[i];
    const double seconds = omp_get_wtime() - start;
    if (seconds < best) best = seconds;
  }
  return best;
}

int main(int count, char **words) {
  for (int k = 1; k < count; ++k) {
    const double megabytes = atof(words[k]);
    const long n = (long)(megabytes * 1e6 / 24);
    double *a = malloc(n * sizeof(double));
    double *b = malloc(n * sizeof(double));
    double *c = malloc(n * sizeof(double));
    if (n < 1 || !a || !b || !c) {
      fprintf(stderr, "stream: no memory for %s MB\n", words[k]);
      return 1;
    }
#pragma omp parallel for schedule(static)
    for (long i = 0; i < n; ++i) { /* each thread touches its own part first */
      a[i] = 0;
      b[i] = 1;
      c[i] = (double)i;
    }
    const double seconds = best_pass(a, b, c, n);
    if (a[n / 2] < 0) printf("never\n"); /* so that no pass is left out */
    printf("%g %.3f\n", megabytes, 24.0 * n / seconds / 1e9);
    fflush(stdout);
    free(a), free(b), free(c);
  }
  return 0;
}
