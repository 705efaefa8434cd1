/* Transposes and matrix-vector products in plain C and hypre: what bench/sparse.py measures mpigrad
 * against.
 *
 * The matrix is that of a five-point stencil on n x lines cells; each rank owns a stripe of grid
 * lines. Its values are those of `entry` below, so that every program has the same.
 *
 * Commands come by a pipe for each rank (interleave.py): "transpose K R" or "product K R" (K varies the
 * values, R calls are timed), "quit". Rank 0 answers each with one line: seconds of a call, checksum.
 *
 * Build: mpicc -O3 sparse_hypre.c -I/usr/include/hypre -lHYPRE -lm -o sparse_hypre
 * Run:   bench/sparse.py starts it
 */
#include <HYPRE.h>
#include <HYPRE_parcsr_ls.h>
#include <_hypre_parcsr_mv.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"

static int rank, ranks;
static MPI_Comm comm;

static void check(HYPRE_Int code, const char *what) {
  if (!code) return;
  fprintf(stderr, "rank %d: %s failed with hypre error %d\n", rank, what, (int)code);
  MPI_Abort(comm, 1);
}
#define HYPRE(call) check(call, #call)

static void *memory(size_t count, size_t size) {
  void *p = calloc(count ? count : 1, size);
  if (!p) {
    fprintf(stderr, "rank %d: out of memory\n", rank);
    MPI_Abort(comm, 1);
  }
  return p;
}

static double entry(long row, long column, long k) {
  return (double)((7 * row + 13 * column + k) % 101) / 101;
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  comm = MPI_COMM_WORLD;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &ranks);
  const long n = argc > 1 ? atol(argv[1]) : 0, all_lines = argc > 2 ? atol(argv[2]) : 0;
  if (n < 1 || all_lines < ranks) {
    if (rank == 0) fprintf(stderr, "usage: sparse_hypre CELLS LINES (at least one line a rank)\n");
    MPI_Abort(comm, 2);
  }
  const long first_line = all_lines * rank / ranks;
  const long lines = all_lines * (rank + 1) / ranks - first_line, cells = lines * n;
  const HYPRE_BigInt first = (HYPRE_BigInt)(first_line * n), last = first + (HYPRE_BigInt)cells - 1;

  HYPRE_BigInt *rows = memory(cells, sizeof *rows), *columns = memory(5 * cells, sizeof *columns);
  HYPRE_Int *sizes = memory(cells, sizeof *sizes), *own_sizes = memory(cells, sizeof *own_sizes),
            *ghost_sizes = memory(cells, sizeof *ghost_sizes);
  size_t entries = 0;
  for (long c = 0; c < cells; c++) {
    const long j = first_line + c / n, i = c % n;
    const HYPRE_BigInt row = first + (HYPRE_BigInt)c;
    const size_t start = entries;
    if (j > 0) columns[entries++] = row - n;
    if (i > 0) columns[entries++] = row - 1;
    columns[entries++] = row;
    if (i < n - 1) columns[entries++] = row + 1;
    if (j < all_lines - 1) columns[entries++] = row + n;
    rows[c] = row;
    sizes[c] = (HYPRE_Int)(entries - start);
    for (size_t k = start; k < entries; k++) ghost_sizes[c] += columns[k] < first || columns[k] > last;
    own_sizes[c] = sizes[c] - ghost_sizes[c];
  }

  HYPRE_IJMatrix matrix;
  HYPRE_IJVector ij_x, ij_y;
  HYPRE_ParVector x, y;
  HYPRE(HYPRE_Init());
  HYPRE(HYPRE_IJMatrixCreate(comm, first, last, first, last, &matrix));
  HYPRE(HYPRE_IJMatrixSetObjectType(matrix, HYPRE_PARCSR));
  HYPRE(HYPRE_IJMatrixSetDiagOffdSizes(matrix, own_sizes, ghost_sizes));
  for (int k = 0; k < 2; k++) {
    HYPRE_IJVector *v = k ? &ij_x : &ij_y;
    HYPRE(HYPRE_IJVectorCreate(comm, first, last, v));
    HYPRE(HYPRE_IJVectorSetObjectType(*v, HYPRE_PARCSR));
    HYPRE(HYPRE_IJVectorInitialize(*v));
    HYPRE(HYPRE_IJVectorAssemble(*v));
    HYPRE(HYPRE_IJVectorGetObject(*v, (void **)(k ? &x : &y)));
  }
  double *numbers = memory(cells, sizeof *numbers), *values = memory(entries, sizeof *values);
  for (long c = 0; c < cells; c++) numbers[c] = (double)(5 * (first + c) % 17) / 17;
  HYPRE(HYPRE_IJVectorSetValues(ij_x, (HYPRE_Int)cells, rows, numbers));
  if (rank == 0) {
    puts("ready");
    fflush(stdout);
  }

  for (char command[64] = "";;) {
    wait_for_command(rank, command, sizeof command);
    char what[16] = "";
    long vary = 0, calls = 1;
    sscanf(command, "%15s %ld %ld", what, &vary, &calls);
    if (!strcmp(what, "quit")) break;
    size_t k = 0;
    for (long c = 0; c < cells; c++) {
      for (int e = 0; e < sizes[c]; e++, k++) values[k] = entry(rows[c], columns[k], vary);
    }
    HYPRE_ParCSRMatrix A, T = NULL;
    HYPRE(HYPRE_IJMatrixInitialize(matrix));
    HYPRE(HYPRE_IJMatrixSetValues(matrix, (HYPRE_Int)cells, sizes, rows, columns, values));
    HYPRE(HYPRE_IJMatrixAssemble(matrix));
    HYPRE(HYPRE_IJMatrixGetObject(matrix, (void **)&A));
    double seconds = 0;
    if (!strcmp(what, "transpose")) {
      for (long call = 0; call < calls; call++) {
        if (T) HYPRE(hypre_ParCSRMatrixDestroy(T)); /* not timed */
        MPI_Barrier(comm);
        const double start = MPI_Wtime();
        HYPRE(hypre_ParCSRMatrixTranspose(A, &T, 1));
        MPI_Barrier(comm);
        seconds += MPI_Wtime() - start;
      }
      HYPRE(HYPRE_ParCSRMatrixMatvec(1, T, x, 0, y));
      HYPRE(hypre_ParCSRMatrixDestroy(T));
    } else {
      HYPRE(HYPRE_ParCSRMatrixMatvec(1, A, x, 0, y)); /* the first makes the communication plan */
      MPI_Barrier(comm);
      const double start = MPI_Wtime();
      for (long call = 0; call < calls; call++) HYPRE(HYPRE_ParCSRMatrixMatvec(1, A, x, 0, y));
      MPI_Barrier(comm);
      seconds = MPI_Wtime() - start;
    }
    HYPRE(HYPRE_IJVectorGetValues(ij_y, (HYPRE_Int)cells, rows, numbers));
    double sum = 0, total = 0;
    for (long c = 0; c < cells; c++) sum += numbers[c] * (double)(3 * (first + c) % 19);
    MPI_Reduce(&sum, &total, 1, MPI_DOUBLE, MPI_SUM, 0, comm);
    if (rank == 0) {
      printf("%.9f %.15e\n", seconds / (double)calls, total);
      fflush(stdout);
    }
  }

  HYPRE(HYPRE_IJVectorDestroy(ij_x));
  HYPRE(HYPRE_IJVectorDestroy(ij_y));
  HYPRE(HYPRE_IJMatrixDestroy(matrix));
  HYPRE(HYPRE_Finalize());
  MPI_Finalize();
  return 0;
}
