/* The Poisson problem in plain C and hypre: what bench/poisson.py measures mpigrad against.
 *
 * -div(kappa grad u) = f on the unit square, u = 0 on the boundary, n x n cells: cell-centred finite
 * volumes, face coefficient = mean of the two cells' kappa, 2 kappa at the boundary (half a cell).
 * Each rank owns a stripe of grid lines. The loss is the sum of (u - d)^2.
 *
 * Commands come by a pipe for each rank (interleave.py): "value K" or "gradient K" (K varies kappa, so
 * that every call has new values), "quit". Rank 0 answers each with one line: seconds, loss, sum of
 * the kappa gradient weighted with x, iterations.
 *
 * PCG with BoomerAMG on an assembled matrix or, built with -DPFMG, with PFMG on a structured one.
 *
 * Build: mpicc -O3 poisson_hypre.c -I/usr/include/hypre -lHYPRE -lm -o poisson_hypre
 * Run:   bench/poisson.py starts it
 */
#include <HYPRE.h>
#include <HYPRE_krylov.h>
#include <HYPRE_parcsr_ls.h>
#include <HYPRE_struct_ls.h>
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"

static int rank, ranks, n, lines, first_line, cells;
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

/* A field is stored with one ghost line below and one above: (lines + 2) x n. */
static int below(void) { return rank > 0 ? rank - 1 : MPI_PROC_NULL; }
static int above(void) { return rank < ranks - 1 ? rank + 1 : MPI_PROC_NULL; }

static void exchange(double *f) {
  double *own = f + n;
  MPI_Sendrecv(own, n, MPI_DOUBLE, below(), 0, own + cells, n, MPI_DOUBLE, above(), 0, comm,
               MPI_STATUS_IGNORE);
  MPI_Sendrecv(own + cells - n, n, MPI_DOUBLE, above(), 1, f, n, MPI_DOUBLE, below(), 1, comm,
               MPI_STATUS_IGNORE);
}

/* The transpose of exchange: ghost lines are added to their owners' lines. */
static void accumulate(double *f, double *line) {
  double *own = f + n;
  memset(line, 0, n * sizeof(double));
  MPI_Sendrecv(own + cells, n, MPI_DOUBLE, above(), 2, line, n, MPI_DOUBLE, below(), 2, comm,
               MPI_STATUS_IGNORE);
  for (int i = 0; i < n; i++) own[i] += line[i];
  memset(line, 0, n * sizeof(double));
  MPI_Sendrecv(f, n, MPI_DOUBLE, below(), 3, line, n, MPI_DOUBLE, above(), 3, comm,
               MPI_STATUS_IGNORE);
  for (int i = 0; i < n; i++) own[cells - n + i] += line[i];
}

/* Values in the order of the columns: down, left, centre, right, up. A structured matrix has a place
 * for them in every cell, zero where they leave the grid; being symmetric, it is given the first
 * three. */
#ifdef PFMG
enum { EVERY = 1, HALF = 1 };
#else
enum { EVERY = 0, HALF = 0 };
#endif
#define ENTRY(inside, array, value) \
  if (inside) {                     \
    array[k++] = value;             \
  } else if (EVERY) {               \
    array[k++] = 0;                 \
  }

static void fill_values(const double *kappa, double *values) {
  const double *c = kappa + n;
  size_t k = 0;
  for (int l = 0; l < lines; l++) {
    const int j = first_line + l;
    for (int i = 0; i < n; i++, c++) {
      const double down = j > 0 ? 0.5 * (*c + c[-n]) : 2 * *c;
      const double left = i > 0 ? 0.5 * (*c + c[-1]) : 2 * *c;
      const double right = i < n - 1 ? 0.5 * (*c + c[1]) : 2 * *c;
      const double up = j < n - 1 ? 0.5 * (*c + c[n]) : 2 * *c;
      ENTRY(j > 0, values, -down)
      ENTRY(i > 0, values, -left)
      values[k++] = down + left + right + up;
      if (HALF) continue;
      ENTRY(i < n - 1, values, -right)
      ENTRY(j < n - 1, values, -up)
    }
  }
}

/* The cotangent of the values, -lambda_i u_j; u has ghost lines, lambda has none. */
static void values_cotangent(const double *lambda, const double *u, double *cotangent) {
  const double *v = u + n;
  size_t k = 0;
  for (int l = 0; l < lines; l++) {
    const int j = first_line + l;
    for (int i = 0; i < n; i++, v++, lambda++) {
      ENTRY(j > 0, cotangent, -*lambda * v[-n])
      ENTRY(i > 0, cotangent, -*lambda * v[-1])
      cotangent[k++] = -*lambda * *v;
      ENTRY(i < n - 1, cotangent, -*lambda * v[1])
      ENTRY(j < n - 1, cotangent, -*lambda * v[n])
    }
  }
}

/* The transpose of fill_values, before the ghost lines are handed back. */
static void fill_values_transpose(const double *values, double *kappa) {
  memset(kappa, 0, (size_t)(lines + 2) * n * sizeof(double));
  double *c = kappa + n;
  size_t k = 0;
  for (int l = 0; l < lines; l++) {
    const int j = first_line + l;
    for (int i = 0; i < n; i++, c++) {
      const double down = EVERY || j > 0 ? -values[k++] : 0;
      const double left = EVERY || i > 0 ? -values[k++] : 0;
      const double centre = values[k++];
      const double right = EVERY || i < n - 1 ? -values[k++] : 0;
      const double up = EVERY || j < n - 1 ? -values[k++] : 0;
      double own = 0;
#define FACE(inside, cotangent, offset)                \
  if (inside) {                                        \
    own += 0.5 * (centre + cotangent);                 \
    c[offset] += 0.5 * (centre + cotangent);           \
  } else {                                             \
    own += 2 * centre;                                 \
  }
      FACE(j > 0, down, -n)
      FACE(i > 0, left, -1)
      FACE(i < n - 1, right, 1)
      FACE(j < n - 1, up, n)
      *c += own;
    }
  }
}

static HYPRE_Int iterations; /* of the latest solve */

#ifdef PFMG

static HYPRE_Int lower[2], upper[2], entry_numbers[3] = {0, 1, 2};
static HYPRE_StructGrid grid;
static HYPRE_StructStencil stencil;
static HYPRE_StructMatrix A;
static HYPRE_StructVector b, x;
static HYPRE_StructSolver pfmg, pcg;

static void make_solver(void) {
  HYPRE_Int offsets[3][2] = {{0, -1}, {-1, 0}, {0, 0}};
  lower[1] = first_line;
  upper[0] = n - 1;
  upper[1] = first_line + lines - 1;
  HYPRE(HYPRE_StructGridCreate(comm, 2, &grid));
  HYPRE(HYPRE_StructGridSetExtents(grid, lower, upper));
  HYPRE(HYPRE_StructGridAssemble(grid));
  HYPRE(HYPRE_StructStencilCreate(2, 3, &stencil));
  for (int k = 0; k < 3; k++) HYPRE(HYPRE_StructStencilSetElement(stencil, k, offsets[k]));
  HYPRE(HYPRE_StructMatrixCreate(comm, grid, stencil, &A));
  HYPRE(HYPRE_StructMatrixSetSymmetric(A, 1));
  HYPRE(HYPRE_StructMatrixInitialize(A));
  for (int k = 0; k < 2; k++) {
    HYPRE_StructVector *v = k ? &x : &b;
    HYPRE(HYPRE_StructVectorCreate(comm, grid, v));
    HYPRE(HYPRE_StructVectorInitialize(*v));
    HYPRE(HYPRE_StructVectorAssemble(*v));
  }
}

/* A second set-up of the same PFMG would leak the first: each has a solver of its own. */
static void set_matrix(double *values) {
  HYPRE(HYPRE_StructMatrixSetBoxValues(A, lower, upper, 3, entry_numbers, values));
  HYPRE(HYPRE_StructMatrixAssemble(A));
  if (pcg) HYPRE(HYPRE_StructPCGDestroy(pcg));
  if (pfmg) HYPRE(HYPRE_StructPFMGDestroy(pfmg));
  HYPRE(HYPRE_StructPFMGCreate(comm, &pfmg));
  HYPRE(HYPRE_StructPFMGSetTol(pfmg, 0));
  HYPRE(HYPRE_StructPFMGSetMaxIter(pfmg, 1));
  HYPRE(HYPRE_StructPFMGSetZeroGuess(pfmg));
  HYPRE(HYPRE_StructPFMGSetRAPType(pfmg, 1));
  HYPRE(HYPRE_StructPFMGSetRelaxType(pfmg, 2));
  HYPRE(HYPRE_StructPFMGSetSkipRelax(pfmg, 1));
  HYPRE(HYPRE_StructPCGCreate(comm, &pcg));
  HYPRE(HYPRE_StructPCGSetTwoNorm(pcg, 1));
  HYPRE(HYPRE_StructPCGSetTol(pcg, 1e-8));
  HYPRE(HYPRE_StructPCGSetMaxIter(pcg, 500));
  HYPRE(HYPRE_StructPCGSetPrecond(pcg, HYPRE_StructPFMGSolve, HYPRE_StructPFMGSetup, pfmg));
  HYPRE(HYPRE_StructPCGSetup(pcg, A, b, x));
}

static void solve(double *from, double *to) {
  HYPRE(HYPRE_StructVectorSetBoxValues(b, lower, upper, from));
  HYPRE(HYPRE_StructVectorSetConstantValues(x, 0));
  HYPRE(HYPRE_StructPCGSolve(pcg, A, b, x));
  HYPRE(HYPRE_StructPCGGetNumIterations(pcg, &iterations));
  HYPRE(HYPRE_StructVectorGetBoxValues(x, lower, upper, to));
}

static void free_solver(void) {
  if (pcg) HYPRE(HYPRE_StructPCGDestroy(pcg));
  if (pfmg) HYPRE(HYPRE_StructPFMGDestroy(pfmg));
  HYPRE(HYPRE_StructVectorDestroy(b));
  HYPRE(HYPRE_StructVectorDestroy(x));
  HYPRE(HYPRE_StructMatrixDestroy(A));
  HYPRE(HYPRE_StructStencilDestroy(stencil));
  HYPRE(HYPRE_StructGridDestroy(grid));
}

#else

static HYPRE_BigInt *rows, *columns;
static HYPRE_Int *sizes;
static HYPRE_IJMatrix matrix;
static HYPRE_IJVector ij_b, ij_x;
static HYPRE_ParCSRMatrix A;
static HYPRE_ParVector b, x;
static HYPRE_Solver amg, pcg;

static void make_solver(void) {
  const HYPRE_BigInt first = (HYPRE_BigInt)first_line * n, last = first + cells - 1;
  rows = memory(cells, sizeof *rows);
  columns = memory(5L * cells, sizeof *columns);
  sizes = memory(cells, sizeof *sizes);
  HYPRE_Int *own_sizes = memory(cells, sizeof *own_sizes),
            *ghost_sizes = memory(cells, sizeof *ghost_sizes);
  size_t entries = 0;
  for (int c = 0; c < cells; c++) {
    const int j = first_line + c / n, i = c % n;
    const HYPRE_BigInt row = first + c;
    const size_t start = entries;
    if (j > 0) columns[entries++] = row - n;
    if (i > 0) columns[entries++] = row - 1;
    columns[entries++] = row;
    if (i < n - 1) columns[entries++] = row + 1;
    if (j < n - 1) columns[entries++] = row + n;
    rows[c] = row;
    sizes[c] = (HYPRE_Int)(entries - start);
    for (size_t k = start; k < entries; k++) ghost_sizes[c] += columns[k] < first || columns[k] > last;
    own_sizes[c] = sizes[c] - ghost_sizes[c];
  }

  HYPRE(HYPRE_IJMatrixCreate(comm, first, last, first, last, &matrix));
  HYPRE(HYPRE_IJMatrixSetObjectType(matrix, HYPRE_PARCSR));
  HYPRE(HYPRE_IJMatrixSetDiagOffdSizes(matrix, own_sizes, ghost_sizes));
  for (int k = 0; k < 2; k++) {
    HYPRE_IJVector *v = k ? &ij_x : &ij_b;
    HYPRE(HYPRE_IJVectorCreate(comm, first, last, v));
    HYPRE(HYPRE_IJVectorSetObjectType(*v, HYPRE_PARCSR));
    HYPRE(HYPRE_IJVectorInitialize(*v));
    HYPRE(HYPRE_IJVectorAssemble(*v));
    HYPRE(HYPRE_IJVectorGetObject(*v, (void **)(k ? &x : &b)));
  }
  HYPRE(HYPRE_BoomerAMGCreate(&amg));
  HYPRE(HYPRE_BoomerAMGSetCoarsenType(amg, 10));
  HYPRE(HYPRE_BoomerAMGSetInterpType(amg, 6));
  HYPRE(HYPRE_BoomerAMGSetPMaxElmts(amg, 4));
  HYPRE(HYPRE_BoomerAMGSetRelaxType(amg, 8));
  HYPRE(HYPRE_BoomerAMGSetStrongThreshold(amg, 0.25));
  HYPRE(HYPRE_BoomerAMGSetTol(amg, 0));
  HYPRE(HYPRE_BoomerAMGSetMaxIter(amg, 1));
  HYPRE(HYPRE_ParCSRPCGCreate(comm, &pcg));
  HYPRE(HYPRE_PCGSetTwoNorm(pcg, 1));
  HYPRE(HYPRE_PCGSetTol(pcg, 1e-8));
  HYPRE(HYPRE_PCGSetMaxIter(pcg, 500));
  HYPRE(HYPRE_PCGSetPrecond(pcg, (HYPRE_PtrToSolverFcn)HYPRE_BoomerAMGSolve,
                            (HYPRE_PtrToSolverFcn)HYPRE_BoomerAMGSetup, amg));
  free(own_sizes);
  free(ghost_sizes);
}

static void set_matrix(double *values) {
  HYPRE(HYPRE_IJMatrixInitialize(matrix));
  HYPRE(HYPRE_IJMatrixSetValues(matrix, cells, sizes, rows, columns, values));
  HYPRE(HYPRE_IJMatrixAssemble(matrix));
  HYPRE(HYPRE_IJMatrixGetObject(matrix, (void **)&A));
  HYPRE(HYPRE_ParCSRPCGSetup(pcg, A, b, x));
}

static void solve(double *from, double *to) {
  HYPRE(HYPRE_IJVectorSetValues(ij_b, cells, rows, from));
  HYPRE(HYPRE_ParVectorSetConstantValues(x, 0));
  HYPRE(HYPRE_ParCSRPCGSolve(pcg, A, b, x));
  HYPRE(HYPRE_PCGGetNumIterations(pcg, &iterations));
  HYPRE(HYPRE_IJVectorGetValues(ij_x, cells, rows, to));
}

static void free_solver(void) {
  HYPRE(HYPRE_ParCSRPCGDestroy(pcg));
  HYPRE(HYPRE_BoomerAMGDestroy(amg));
  HYPRE(HYPRE_IJVectorDestroy(ij_b));
  HYPRE(HYPRE_IJVectorDestroy(ij_x));
  HYPRE(HYPRE_IJMatrixDestroy(matrix));
}

#endif

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  comm = MPI_COMM_WORLD;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &ranks);
  n = argc > 1 ? atoi(argv[1]) : 0;
  if (n < 1 || n < ranks) {
    if (rank == 0) fprintf(stderr, "usage: poisson_hypre CELLS (per side, at least one line a rank)\n");
    MPI_Abort(comm, 2);
  }
  first_line = (int)((long)n * rank / ranks);
  lines = (int)((long)n * (rank + 1) / ranks) - first_line;
  cells = lines * n;
  const double h = 1.0 / n;

  HYPRE(HYPRE_Init());
  make_solver();
  const size_t padded = (size_t)(lines + 2) * n;
  double *kappa = memory(padded, sizeof *kappa), *gradient = memory(padded, sizeof *gradient),
         *u = memory(padded, sizeof *u), *rhs = memory(cells, sizeof *rhs),
         *data = memory(cells, sizeof *data), *residual = memory(cells, sizeof *residual),
         *lambda = memory(cells, sizeof *lambda), *values = memory(5L * cells, sizeof *values),
         *cotangent = memory(5L * cells, sizeof *cotangent), *line = memory(n, sizeof *line);

  for (int c = 0; c < cells; c++) {
    const double cx = (c % n + 0.5) * h, cy = (first_line + c / n + 0.5) * h;
    rhs[c] = h * h;
    data[c] = cx * (1 - cx) * cy * (1 - cy);
  }
  if (rank == 0) {
    puts("ready");
    fflush(stdout);
  }

  for (char command[64] = "";;) {
    wait_for_command(rank, command, sizeof command);
    if (!strncmp(command, "quit", 4)) break;
    const int with_gradient = !strncmp(command, "gradient", 8);
    const double vary = 0.1 * sin(atof(strchr(command, ' ')));
    for (int c = 0; c < cells; c++) {
      const double cx = (c % n + 0.5) * h, cy = (first_line + c / n + 0.5) * h;
      kappa[n + c] = 1 + cx * cx + cy * cy + vary * cx * cy;
    }

    MPI_Barrier(comm);
    const double start = MPI_Wtime();
    exchange(kappa);
    fill_values(kappa, values);
    set_matrix(values);
    solve(rhs, u + n);
    double loss = 0, weighted = 0, sums[2];
    for (int c = 0; c < cells; c++) {
      const double d = u[n + c] - data[c];
      loss += d * d;
      residual[c] = 2 * d;
    }
    if (with_gradient) {
      solve(residual, lambda);
      exchange(u);
      values_cotangent(lambda, u, cotangent);
      fill_values_transpose(cotangent, gradient);
      accumulate(gradient, line);
    }
    MPI_Allreduce(&loss, sums, 1, MPI_DOUBLE, MPI_SUM, comm);
    MPI_Barrier(comm);
    const double seconds = MPI_Wtime() - start;

    for (int c = 0; with_gradient && c < cells; c++) weighted += gradient[n + c] * (c % n + 0.5) * h;
    MPI_Reduce(&weighted, sums + 1, 1, MPI_DOUBLE, MPI_SUM, 0, comm);
    if (rank == 0) {
      printf("%.6f %.15e %.15e %d\n", seconds, sums[0], with_gradient ? sums[1] : 0, (int)iterations);
      fflush(stdout);
    }
  }

  free_solver();
  HYPRE(HYPRE_Finalize());
  MPI_Finalize();
  return 0;
}
