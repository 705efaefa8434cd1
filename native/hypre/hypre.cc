// Distributed solves by hypre, as an XLA FFI handler: a Krylov method with a multigrid
// preconditioner, or the multigrid cycle alone.
//
// A System is one sparsity structure on one communicator with one multigrid configuration. It keeps
// the matrix and its multigrid hierarchy from call to call while the values stay bit-equal on every
// rank, so that the adjoint solve of a symmetric system does no set-up.
//
// Unlike the communication library this one links MPI: the MPI that hypre was built with. Python
// compares the marker below with the MPI that mpi4py runs on before it loads this library.
#include "hypre/assembled.h"
#include "hypre/structured.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "ffi.h"

#define MPIGRAD_TEXT_(x) #x
#define MPIGRAD_TEXT(x) MPIGRAD_TEXT_(x)
#if defined(OPEN_MPI)
#define MPIGRAD_MPI                                                       \
  "Open MPI " MPIGRAD_TEXT(OMPI_MAJOR_VERSION) "." MPIGRAD_TEXT(OMPI_MINOR_VERSION) "." MPIGRAD_TEXT( \
      OMPI_RELEASE_VERSION)
#elif defined(I_MPI_VERSION)
#define MPIGRAD_MPI "Intel MPI " I_MPI_VERSION
#elif defined(MPICH_VERSION)
#define MPIGRAD_MPI "MPICH " MPICH_VERSION
#else
#define MPIGRAD_MPI "unknown MPI"
#endif
#define MPIGRAD_EXPORT extern "C" __attribute__((visibility("default")))

// Found by Python in the bytes of this file, before it is loaded.
MPIGRAD_EXPORT const char mpigrad_hypre_marker[] = "mpigrad-hypre-built-with:" MPIGRAD_MPI;

namespace {

namespace ffi = xla::ffi;
using namespace mpigrad::hypre;

constexpr int kInfo = 5;  // numbers reported per right-hand side

std::mutex mutex;  // hypre keeps global state
std::unordered_map<int64_t, std::unique_ptr<System>> systems;
int64_t next_id = 1;

std::string describe(const Answer& a, const Request& q, std::string_view name) {
  const std::string rank = std::to_string(a.rank);
  std::string check = q.method == kPCG ? "check that the matrix is positive definite"
                                       : "check the matrix, or try another relaxation or method";
  if (name.find("PFMG") != std::string_view::npos) {
    check += ", or take BoomerAMG(), which suits coefficients that jump";
  }
  char numbers[160] = "";
  switch (a.outcome) {
    case kConverged:
      return "";
    case kMaxSteps:
      std::snprintf(numbers, sizeof numbers,
                    "the relative residual is %.3g after %d iterations, above the tolerance %.3g. "
                    "Raise max_steps=%lld",
                    a.residual, static_cast<int>(a.iterations), q.tolerance,
                    static_cast<long long>(q.max_steps));
      return std::string(name) + " did not converge: " + numbers + ", loosen rtol, or " + check +
             "; solve(..., throw=False) returns what was reached.";
    case kNotFinite:
      return "the matrix, the right-hand side or x0 holds NaN or infinity on rank " + rank +
             ". Look for a division by zero or an overflow in what computes them.";
    case kNotPositive:
      if (a.rank < 0) {
        return "the matrix is not positive definite: PCG has met a direction p with <p, A p> < 0 "
               "after " + std::to_string(a.iterations) + " iterations. If -A is positive definite, "
               "solve with -A and -b instead; else solve by GMRES or BiCGStab.";
      }
      return "the matrix is not positive definite: a diagonal entry on rank " + rank +
             " is zero or negative. If all are negative, solve with -A and -b instead; if only "
             "some are, solve by GMRES.";
    case kNotSymmetric:
      return "the matrix is not symmetric; PCG takes symmetric positive definite matrices only. "
             "Check that entries (i, j) and (j, i) get the same value, also where i and j belong "
             "to different ranks, or solve by GMRES or BiCGStab.";
    case kZeroDiagonal:
      return "a diagonal entry on rank " + rank + " is zero, and " + std::string(name) +
             " divides by it. Is the matrix singular? If not, reorder its rows, or solve by "
             "GMRES(preconditioner=None).";
    case kStagnated:
      std::snprintf(numbers, sizeof numbers,
                    "the relative residual gets no lower than %.3g (after %d iterations). The "
                    "matrix is singular, or the tolerance %.3g is below what rounding allows",
                    a.residual, static_cast<int>(a.iterations), q.tolerance);
      return std::string(name) + " did not converge: " + numbers +
             "; loosen rtol, or solve(..., throw=False) for what was reached.";
    case kBreakdown:
      std::snprintf(numbers, sizeof numbers, "broke down after %d iterations at the relative "
                    "residual %.3g", static_cast<int>(a.iterations), a.residual);
      return std::string(name) + " " + numbers +
             ": it divided by zero, or the residual grew without bound. The matrix may be "
             "singular; " + check + ".";
  }
  return "";
}

using Numbers = ffi::Buffer<ffi::F64, 2>;
using List = ffi::Buffer<ffi::F64, 1>;

// values (1 or B, entries), b (B, n), x0 (B, n) or for zeros (B, 0), known (0 or 1: the number of the
// values, where they are those of an earlier solve) -> x (B, n), info (B, kInfo)
ffi::Error solve(ffi::Token, Numbers values, Numbers b, Numbers x0, List known, ffi::Result<ffi::Token>,
                 ffi::Result<Numbers> x, ffi::Result<Numbers> info, int64_t system, int64_t method,
                 int64_t restart, double rtol, int64_t max_steps, bool throws, int64_t site,
                 std::string_view name, std::string_view where) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto found = systems.find(system);
  if (found == systems.end()) {
    return ffi::Error::InvalidArgument(
        "mpigrad: solve: the matrix's pattern is gone, or Python is ending");
  }
  System& s = *found->second;
  const auto vs = values.dimensions(), bs = b.dimensions(), xs = x0.dimensions();
  if (vs[1] != s.entries() || bs[1] != s.rows() || xs[0] != bs[0] ||
      (xs[1] != bs[1] && xs[1] != 0) ||
      (vs[0] != 1 && vs[0] != bs[0])) {
    return ffi::Error::InvalidArgument("mpigrad: solve: the arrays don't fit the pattern");
  }
  if (!initialized) HYPRE_Init();
  initialized = true;
  char asked[160];
  std::snprintf(asked, sizeof asked, "%.80s %lld %a %lld %lld", std::string(name).c_str(),
                static_cast<long long>(restart), rtol, static_cast<long long>(max_steps),
                static_cast<long long>(bs[0]));
  const int identity = static_cast<int>(std::hash<std::string_view>{}(asked) & 0x7fffffff);
  const Request request{static_cast<Method>(method), restart, rtol, max_steps, site, identity};
  const std::string head = "mpigrad: solve, " + std::string(where) + ": ";
  const bool own_values = vs[0] > 1;
  const bool same = !own_values && s.ready() && known.element_count() == 1 &&
                    known.typed_data()[0] == static_cast<double>(s.number());
  for (int64_t k = 0; k < bs[0]; ++k) {
    Answer answer;
    const std::string error =
        s.solve(values.typed_data() + (own_values ? k * vs[1] : 0),
                own_values || (k == 0 && !same) || !s.ready(), b.typed_data() + k * bs[1],
                xs[1] ? x0.typed_data() + k * bs[1] : nullptr, request, x->typed_data() + k * bs[1], answer);
    const bool fails = !error.empty() || (throws && answer.outcome != kConverged);
    if (fails && failed) failed();
    if (!error.empty()) return ffi::Error::Internal(head + error);
    if (fails) {
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                        head + describe(answer, request, name));
    }
    const double numbers[kInfo] = {static_cast<double>(answer.outcome),
                                   static_cast<double>(answer.iterations), answer.residual,
                                   static_cast<double>(s.setups()), static_cast<double>(s.number())};
    std::copy(numbers, numbers + kInfo, info->typed_data() + k * kInfo);
  }
  return ffi::Error::Success();
}

int64_t keep(std::unique_ptr<System> system) {
  std::lock_guard<std::mutex> guard(mutex);
  systems.emplace(next_id, std::move(system));
  return next_id++;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* mpigrad_hypre_solve(
    XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(mpigrad_hypre_solve, solve,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Token>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<List>()
                                  .Ret<ffi::Token>()
                                  .Ret<Numbers>()
                                  .Ret<Numbers>()
                                  .Attr<int64_t>("system")
                                  .Attr<int64_t>("method")
                                  .Attr<int64_t>("restart")
                                  .Attr<double>("rtol")
                                  .Attr<int64_t>("max_steps")
                                  .Attr<bool>("throws")
                                  .Attr<int64_t>("site")
                                  .Attr<std::string_view>("name")
                                  .Attr<std::string_view>("where"));

MPIGRAD_EXPORT const char* mpigrad_hypre_mpi_library() {
  static char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  return text;
}

MPIGRAD_EXPORT const char* mpigrad_hypre_version() { return "hypre " HYPRE_RELEASE_VERSION; }

MPIGRAD_EXPORT int mpigrad_hypre_bigint_bits() { return 8 * sizeof(HYPRE_BigInt); }

// Local: notes the structure. row_starts (n + 1), columns (entries) in the order of the rows;
// order (entries) or null. The communicator stays the caller's.
MPIGRAD_EXPORT int64_t mpigrad_hypre_create_assembled(int comm, int64_t first, int64_t n,
                                                      const int64_t* row_starts,
                                                      const int64_t* columns, const int64_t* order,
                                                      const BoomerAMGOptions* options) {
  const Structure given{MPI_Comm_f2c(comm), first, n, row_starts, columns, order};
  return keep(std::make_unique<Assembled>(given, *options));
}

// Local: notes a stencil on this rank's tile of a grid. shape, lower and upper (3 each, upper not in
// the tile) and steps (n_given + n_zero, 3) in hypre's order of the axes; values come offset after
// offset for the given ones, the others are zero.
MPIGRAD_EXPORT int64_t mpigrad_hypre_create_structured(int comm, int64_t first, int axes,
                                                       const int64_t* shape, const int64_t* lower,
                                                       const int64_t* upper, int64_t n_given,
                                                       int64_t n_zero, const int64_t* steps,
                                                       const PFMGOptions* options) {
  Tile tile{axes, {}, {}};
  std::copy_n(shape, kAxes, tile.shape);
  std::copy_n(lower, kAxes, tile.cells.lower);
  std::copy_n(upper, kAxes, tile.cells.upper);
  std::vector<Entry> entries;
  int64_t size = 0;
  for (int64_t k = 0; k < n_given + n_zero; ++k) {
    entries.emplace_back(tile, steps + k * kAxes, k < n_given, size);
    if (k < n_given) size += entries.back().inside.size();
  }
  return keep(std::make_unique<Structured>(MPI_Comm_f2c(comm), first, tile, std::move(entries),
                                           size, *options));
}

MPIGRAD_EXPORT void mpigrad_hypre_destroy(int64_t id) {
  std::lock_guard<std::mutex> guard(mutex);
  systems.erase(id);
}

// What the communication library has: the record where the watchdog looks, and who is told of failures.
MPIGRAD_EXPORT void mpigrad_hypre_watch(void* record, void (*tell)()) {
  failed = tell;
  watched = static_cast<mpigrad::Record*>(record);
}

// Seconds of set-up and of solving on this rank; the numbers of both, and of systems kept now.
MPIGRAD_EXPORT void mpigrad_hypre_totals(double* seconds, int64_t* counts) {
  std::lock_guard<std::mutex> guard(mutex);
  seconds[0] = totals.setup_seconds;
  seconds[1] = totals.solve_seconds;
  counts[0] = totals.setups;
  counts[1] = totals.solves;
  counts[2] = static_cast<int64_t>(systems.size());
}

// Before MPI ends: frees everything. Where MPI has ended already, hypre's objects are left alone.
MPIGRAD_EXPORT void mpigrad_hypre_finalize() {
  std::lock_guard<std::mutex> guard(mutex);
  int ended = 0;
  MPI_Finalized(&ended);
  if (ended) {
    for (auto& item : systems) (void)item.second.release();
    systems.clear();
    return;
  }
  systems.clear();
  if (initialized) HYPRE_Finalize();
  initialized = false;
}
