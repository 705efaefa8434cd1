// One sparse system that hypre keeps from call to call: its matrix, its multigrid hierarchy, and how
// a right-hand side is solved for. Included by hypre.cc alone.
#pragma once

#include <HYPRE.h>
#include <HYPRE_krylov.h>
#include <HYPRE_parcsr_ls.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "../communication/watch.h"

namespace mpigrad::hypre {

// What came of a solve; the same numbers as mpigrad.sparse.Result.
enum Outcome { kConverged = 0, kMaxSteps = 1, kNotFinite = 2, kNotPositive = 3, kNotSymmetric = 4 };

// One BoomerAMG configuration, laid out as the ctypes structure in sparse/hypre.py.
struct Options {
  int32_t coarsening, interpolation, max_row_elements, relaxation, aggressive_levels, max_levels;
  double strong_threshold;
};

struct Totals {
  double setup_seconds = 0, solve_seconds = 0;
  int64_t setups = 0, solves = 0;
};

struct System {
  MPI_Comm comm = MPI_COMM_NULL;
  HYPRE_BigInt first = 0;
  HYPRE_Int n = 0;
  std::vector<HYPRE_BigInt> rows, columns;
  std::vector<HYPRE_Int> row_sizes, diagonal_sizes, ghost_sizes;
  std::vector<int32_t> order;     // where each entry stands among the caller's values; empty: as is
  std::vector<int32_t> diagonal;  // where each row's diagonal entry stands, in row order
  Options options{};

  HYPRE_IJMatrix matrix = nullptr;
  HYPRE_IJVector rhs = nullptr, solution = nullptr;
  HYPRE_Solver amg = nullptr, pcg = nullptr;
  std::vector<double> kept;  // the latest values, in row order
  bool ready = false;        // matrix and hierarchy belong to `kept`, on every rank
  int64_t setups = 0;

  ~System() { release(); }
  void release() {
    if (pcg) HYPRE_ParCSRPCGDestroy(pcg);
    if (amg) HYPRE_BoomerAMGDestroy(amg);
    if (rhs) HYPRE_IJVectorDestroy(rhs);
    if (solution) HYPRE_IJVectorDestroy(solution);
    if (matrix) HYPRE_IJMatrixDestroy(matrix);
    pcg = amg = nullptr;
    rhs = solution = nullptr;
    matrix = nullptr;
    ready = false;
    HYPRE_ClearAllErrors();
  }
};

// Of this process, over all systems.
inline Totals totals;
inline bool initialized = false;
// The communication library's, where the watchdog looks.
inline Record* watched = nullptr;

// Ranks meet at the head of a solve: how long one waits there is the watchdog's affair. What
// follows may take its time.
class Meeting {
 public:
  explicit Meeting(int64_t site) {
    if (!watched) return;
    watched->operation.store("solve", std::memory_order_relaxed);
    watched->site.store(site, std::memory_order_relaxed);
    watched->start_ns.store(now_ns(), std::memory_order_release);
  }
  ~Meeting() {
    if (watched) watched->start_ns.store(0, std::memory_order_release);
  }
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;
};

// The first failing call of hypre on this rank; the calls after it are skipped.
class Calls {
 public:
  template <class F>
  void operator()(const char* name, F&& call) {
    if (failed()) return;
    HYPRE_Int code = call() & ~HYPRE_ERROR_CONV;  // convergence is judged by the residual
    if (!code) return;
    char text[512] = "";
    HYPRE_DescribeError(code, text);
    message_ = std::string(name) + " failed: " + (text[0] ? text : "error " + std::to_string(code));
  }
  void fail(std::string message) {
    if (!failed()) message_ = std::move(message);
  }
  bool failed() const { return !message_.empty(); }

  // Any rank's failure is every rank's: returns the message of the last rank that failed.
  std::string agree(MPI_Comm comm) {
    HYPRE_ClearAllErrors();
    int rank = 0, worst = 0;
    MPI_Comm_rank(comm, &rank);
    int mine = failed() ? rank + 1 : 0;
    MPI_Allreduce(&mine, &worst, 1, MPI_INT, MPI_MAX, comm);
    if (!worst) return "";
    char text[512] = "";
    if (rank + 1 == worst) std::snprintf(text, sizeof text, "%s", message_.c_str());
    MPI_Bcast(text, sizeof text, MPI_CHAR, worst - 1, comm);
    return "on rank " + std::to_string(worst - 1) + " " + text;
  }

 private:
  std::string message_;
};

inline HYPRE_ParCSRMatrix object(HYPRE_IJMatrix m) {
  void* p = nullptr;
  HYPRE_IJMatrixGetObject(m, &p);
  return static_cast<HYPRE_ParCSRMatrix>(p);
}

inline HYPRE_ParVector object(HYPRE_IJVector v) {
  void* p = nullptr;
  HYPRE_IJVectorGetObject(v, &p);
  return static_cast<HYPRE_ParVector>(p);
}

// Collective: the first solve of a system makes its hypre objects.
inline void create(System& s, Calls& call) {
  if (!initialized) {
    call("HYPRE_Init", [] { return HYPRE_Init(); });
    initialized = true;
  }
  const HYPRE_BigInt last = s.first + s.n - 1;
  call("HYPRE_IJMatrixCreate", [&] {
    return HYPRE_IJMatrixCreate(s.comm, s.first, last, s.first, last, &s.matrix);
  });
  call("HYPRE_IJMatrixSetObjectType",
       [&] { return HYPRE_IJMatrixSetObjectType(s.matrix, HYPRE_PARCSR); });
  call("HYPRE_IJMatrixSetDiagOffdSizes", [&] {
    return HYPRE_IJMatrixSetDiagOffdSizes(s.matrix, s.diagonal_sizes.data(), s.ghost_sizes.data());
  });
  call("HYPRE_IJMatrixSetMaxOffProcElmts",
       [&] { return HYPRE_IJMatrixSetMaxOffProcElmts(s.matrix, 0); });
  for (HYPRE_IJVector* v : {&s.rhs, &s.solution}) {
    call("HYPRE_IJVectorCreate", [&] { return HYPRE_IJVectorCreate(s.comm, s.first, last, v); });
    call("HYPRE_IJVectorSetObjectType",
         [&] { return HYPRE_IJVectorSetObjectType(*v, HYPRE_PARCSR); });
    call("HYPRE_IJVectorInitialize", [&] { return HYPRE_IJVectorInitialize(*v); });
    call("HYPRE_IJVectorAssemble", [&] { return HYPRE_IJVectorAssemble(*v); });
  }

  const Options& o = s.options;
  call("HYPRE_BoomerAMGCreate", [&] { return HYPRE_BoomerAMGCreate(&s.amg); });
  call("HYPRE_BoomerAMGSetPrintLevel", [&] { return HYPRE_BoomerAMGSetPrintLevel(s.amg, 0); });
  call("HYPRE_BoomerAMGSetCoarsenType",
       [&] { return HYPRE_BoomerAMGSetCoarsenType(s.amg, o.coarsening); });
  call("HYPRE_BoomerAMGSetInterpType",
       [&] { return HYPRE_BoomerAMGSetInterpType(s.amg, o.interpolation); });
  call("HYPRE_BoomerAMGSetPMaxElmts",
       [&] { return HYPRE_BoomerAMGSetPMaxElmts(s.amg, o.max_row_elements); });
  call("HYPRE_BoomerAMGSetRelaxType",
       [&] { return HYPRE_BoomerAMGSetRelaxType(s.amg, o.relaxation); });
  call("HYPRE_BoomerAMGSetAggNumLevels",
       [&] { return HYPRE_BoomerAMGSetAggNumLevels(s.amg, o.aggressive_levels); });
  call("HYPRE_BoomerAMGSetMaxLevels",
       [&] { return HYPRE_BoomerAMGSetMaxLevels(s.amg, o.max_levels); });
  call("HYPRE_BoomerAMGSetStrongThreshold",
       [&] { return HYPRE_BoomerAMGSetStrongThreshold(s.amg, o.strong_threshold); });
  // As a preconditioner: exactly one V-cycle.
  call("HYPRE_BoomerAMGSetTol", [&] { return HYPRE_BoomerAMGSetTol(s.amg, 0); });
  call("HYPRE_BoomerAMGSetMaxIter", [&] { return HYPRE_BoomerAMGSetMaxIter(s.amg, 1); });

  call("HYPRE_ParCSRPCGCreate", [&] { return HYPRE_ParCSRPCGCreate(s.comm, &s.pcg); });
  call("HYPRE_PCGSetTwoNorm", [&] { return HYPRE_PCGSetTwoNorm(s.pcg, 1); });
  call("HYPRE_PCGSetPrintLevel", [&] { return HYPRE_PCGSetPrintLevel(s.pcg, 0); });
  call("HYPRE_PCGSetPrecond", [&] {
    return HYPRE_PCGSetPrecond(s.pcg, reinterpret_cast<HYPRE_PtrToSolverFcn>(HYPRE_BoomerAMGSolve),
                               reinterpret_cast<HYPRE_PtrToSolverFcn>(HYPRE_BoomerAMGSetup), s.amg);
  });
}

// Local: hands the kept values over.
inline void set_values(System& s, Calls& call) {
  call("HYPRE_IJMatrixInitialize", [&] { return HYPRE_IJMatrixInitialize(s.matrix); });
  if (s.n > 0) {
    call("HYPRE_IJMatrixSetValues", [&] {
      return HYPRE_IJMatrixSetValues(s.matrix, s.n, s.row_sizes.data(), s.rows.data(),
                                     s.columns.data(), s.kept.data());
    });
  }
}

inline void set_rhs(System& s, const double* b, Calls& call) {
  if (s.n > 0) {
    call("HYPRE_IJVectorSetValues",
         [&] { return HYPRE_IJVectorSetValues(s.rhs, s.n, s.rows.data(), b); });
  }
}

inline void get_solution(System& s, double* x, Calls& call) {
  if (s.n > 0) {
    call("HYPRE_IJVectorGetValues",
         [&] { return HYPRE_IJVectorGetValues(s.solution, s.n, s.rows.data(), x); });
  }
}

// A number in (-1, 1) that depends on the global row alone, so that a verdict is the same for any
// number of ranks (the finalizer of splitmix64).
inline double noise(int64_t row, uint64_t seed) {
  uint64_t z = static_cast<uint64_t>(row) * 0x9E3779B97F4A7C15ull + seed;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return static_cast<double>(static_cast<int64_t>(z ^ (z >> 31))) * 0x1p-63;
}

// Collective: is w.Au = u.Aw for two noise vectors? Overwrites the right-hand side.
inline bool symmetric(System& s, Calls& call) {
  std::vector<double> in(s.n), out(s.n);
  double sums[4] = {0, 0, 0, 0}, all[4];
  for (int k = 0; k < 2; ++k) {
    const uint64_t mine = k ? 2 : 1, other = k ? 1 : 2;
    for (HYPRE_Int i = 0; i < s.n; ++i) in[i] = noise(s.first + i, mine);
    set_rhs(s, in.data(), call);
    call("HYPRE_ParCSRMatrixMatvec", [&] {
      return HYPRE_ParCSRMatrixMatvec(1, object(s.matrix), object(s.rhs), 0, object(s.solution));
    });
    get_solution(s, out.data(), call);
    for (HYPRE_Int i = 0; i < s.n; ++i) {
      sums[2 * k] += noise(s.first + i, other) * out[i];
      sums[2 * k + 1] += out[i] * out[i];
    }
  }
  MPI_Allreduce(sums, all, 4, MPI_DOUBLE, MPI_SUM, s.comm);
  // |w.Au - u.Aw| against the size that it has for matrices without any symmetry.
  return std::abs(all[0] - all[2]) <= 1e-9 * (std::sqrt(all[1]) + std::sqrt(all[3]));
}

struct Tolerance {
  double relative;
  int64_t max_steps;
  int64_t site;  // number of the source line that asks
};

struct Answer {
  Outcome outcome = kConverged;
  int rank = -1;  // the rank at fault, where there is one
  HYPRE_Int iterations = 0;
  double residual = 0;  // |b - Ax| / |b|
};

// What a rank knows about its part of the system, in one MAX reduction (ranks are counted from 1).
enum Flag { kChanged, kBadValue, kBadRhs, kBadDiagonal, kNonzeroRhs, kFlags };

// Are the caller's values, to the bit, those that are kept?
inline bool unchanged(const System& s, const double* values) {
  const size_t entries = s.columns.size();
  if (s.kept.size() != entries) return false;
  if (s.order.empty()) return !std::memcmp(s.kept.data(), values, entries * sizeof(double));
  for (size_t k = 0; k < entries; ++k) {
    if (std::memcmp(&s.kept[k], &values[s.order[k]], sizeof(double))) return false;
  }
  return true;
}

// Keeps new values, and looks for what no solve can start from.
inline void inspect_values(System& s, const double* values, int rank, int* flags) {
  const size_t entries = s.columns.size();
  s.kept.resize(entries);
  double* kept = s.kept.data();
  // x - x is 0 or, for infinities and NaN, NaN.
  double spoilt = 0;
  for (size_t k = 0; k < entries; ++k) {
    const double value = s.order.empty() ? values[k] : values[s.order[k]];
    spoilt += value - value;
    kept[k] = value;
  }
  if (spoilt != 0) flags[kBadValue] = rank + 1;
  for (int32_t k : s.diagonal) {
    if (kept[k] <= 0) flags[kBadDiagonal] = rank + 1;
  }
}

inline void inspect(System& s, const double* values, bool compare, const double* b, int* flags) {
  int rank = 0;
  MPI_Comm_rank(s.comm, &rank);
  flags[kChanged] = compare && !(s.ready && unchanged(s, values));
  if (flags[kChanged]) inspect_values(s, values, rank, flags);
  double spoilt = 0, size = 0;
  for (HYPRE_Int i = 0; i < s.n; ++i) {
    spoilt += b[i] - b[i];
    size = std::max(size, std::abs(b[i]));
  }
  if (spoilt != 0) flags[kBadRhs] = rank + 1;
  flags[kNonzeroRhs] = size > 0;
}

// Collective. Returns an error message, the same on every rank, if hypre itself failed.
inline std::string solve_one(System& s, const double* values, bool compare, const double* b,
                      const Tolerance& tolerance, double* x, Answer& answer) {
  int mine[kFlags] = {0}, all[kFlags];
  inspect(s, values, compare, b, mine);
  {
    const Meeting meeting(tolerance.site);
    MPI_Allreduce(mine, all, kFlags, MPI_INT, MPI_MAX, s.comm);
  }
  if (all[kChanged]) s.ready = false;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  answer = Answer{};
  if (all[kBadValue] || all[kBadRhs] || all[kBadDiagonal]) {
    const bool finite = !all[kBadValue] && !all[kBadRhs];
    answer.outcome = finite ? kNotPositive : kNotFinite;
    answer.rank = (finite ? all[kBadDiagonal] : std::max(all[kBadValue], all[kBadRhs])) - 1;
    answer.residual = nan;
    std::fill_n(x, s.n, nan);
    return "";
  }

  Calls call;
  HYPRE_ClearAllErrors();
  if (all[kChanged]) {
    const double start = MPI_Wtime();
    if (!s.matrix) create(s, call);
    set_values(s, call);
    if (std::string error = call.agree(s.comm); !error.empty()) return error;
    call("HYPRE_IJMatrixAssemble", [&] { return HYPRE_IJMatrixAssemble(s.matrix); });
    // With every new values, since the adjoint relies on it: two products beside a set-up.
    const bool good = symmetric(s, call);
    if (std::string error = call.agree(s.comm); !error.empty()) return error;
    if (!good) {
      answer.outcome = kNotSymmetric;
      answer.residual = nan;
      std::fill_n(x, s.n, nan);
      return "";
    }
    call("HYPRE_ParCSRPCGSetup", [&] {
      return HYPRE_ParCSRPCGSetup(s.pcg, object(s.matrix), object(s.rhs), object(s.solution));
    });
    if (std::string error = call.agree(s.comm); !error.empty()) return error;
    s.ready = true;
    ++s.setups;
    ++totals.setups;
    totals.setup_seconds += MPI_Wtime() - start;
  }

  const double start = MPI_Wtime();
  ++totals.solves;
  if (!all[kNonzeroRhs]) {
    std::fill_n(x, s.n, 0.0);
    return "";
  }
  set_rhs(s, b, call);
  call("HYPRE_ParVectorSetConstantValues",
       [&] { return HYPRE_ParVectorSetConstantValues(object(s.solution), 0); });
  call("HYPRE_PCGSetTol", [&] { return HYPRE_PCGSetTol(s.pcg, tolerance.relative); });
  call("HYPRE_PCGSetMaxIter", [&] {
    return HYPRE_PCGSetMaxIter(s.pcg, static_cast<HYPRE_Int>(tolerance.max_steps));
  });
  if (std::string error = call.agree(s.comm); !error.empty()) return error;
  call("HYPRE_ParCSRPCGSolve", [&] {
    return HYPRE_ParCSRPCGSolve(s.pcg, object(s.matrix), object(s.rhs), object(s.solution));
  });
  call("HYPRE_PCGGetNumIterations",
       [&] { return HYPRE_PCGGetNumIterations(s.pcg, &answer.iterations); });
  call("HYPRE_PCGGetFinalRelativeResidualNorm",
       [&] { return HYPRE_PCGGetFinalRelativeResidualNorm(s.pcg, &answer.residual); });
  get_solution(s, x, call);
  if (std::string error = call.agree(s.comm); !error.empty()) return error;
  if (!(answer.residual <= tolerance.relative)) answer.outcome = kMaxSteps;
  totals.solve_seconds += MPI_Wtime() - start;
  return "";
}

}  // namespace mpigrad::hypre
