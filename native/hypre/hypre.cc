// Distributed symmetric solves by hypre: PCG preconditioned with BoomerAMG, as an XLA FFI handler.
//
// A System is one sparsity structure on one communicator with one multigrid configuration. It keeps
// the assembled matrix and its multigrid hierarchy from call to call while the values stay bit-equal
// on every rank, so that the adjoint solve of a symmetric system does no set-up.
//
// Unlike the communication library this one links MPI: the MPI that hypre was built with. Python
// compares the marker below with the MPI that mpi4py runs on before it loads this library.
#include "hypre_system.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "xla/ffi/api/ffi.h"

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

constexpr int kInfo = 4;  // numbers reported per right-hand side

std::mutex mutex;  // hypre keeps global state
std::unordered_map<int64_t, std::unique_ptr<System>> systems;
int64_t next_id = 1;

std::string describe(const Answer& a, const Tolerance& t) {
  const std::string rank = std::to_string(a.rank);
  char text[640] = "";
  switch (a.outcome) {
    case kConverged:
      return "";
    case kMaxSteps:
      std::snprintf(text, sizeof text,
                    "PCG with BoomerAMG did not converge: the relative residual is %.3g after %d "
                    "iterations, above the tolerance %.3g. Raise max_steps=%lld, loosen rtol, or "
                    "check that the matrix is symmetric positive definite; solve(..., throw=False) "
                    "returns what was reached.",
                    a.residual, static_cast<int>(a.iterations), t.relative,
                    static_cast<long long>(t.max_steps));
      break;
    case kNotFinite:
      return "the matrix or the right-hand side holds NaN or infinity on rank " + rank +
             ". Look for a division by zero or an overflow in what computes them.";
    case kNotPositive:
      return "the matrix is not positive definite: a diagonal entry on rank " + rank +
             " is zero or negative. If all are negative, solve with -A and -b instead.";
    case kNotSymmetric:
      return "the matrix is not symmetric; this solver takes symmetric positive definite matrices "
             "only. Check that entries (i, j) and (j, i) get the same value, also where i and j "
             "belong to different ranks.";
  }
  return text;
}

using Numbers = ffi::Buffer<ffi::F64, 2>;

// values (1 or B, entries), b (B, n) -> x (B, n), info (B, kInfo)
ffi::Error solve(ffi::Token, Numbers values, Numbers b, ffi::Result<ffi::Token>,
                 ffi::Result<Numbers> x, ffi::Result<Numbers> info, int64_t system, double rtol,
                 int64_t max_steps, bool throws, int64_t site,
                 std::string_view where) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto found = systems.find(system);
  if (found == systems.end()) {
    return ffi::Error::InvalidArgument(
        "mpigrad: solve: the matrix's pattern is gone, or Python is ending");
  }
  System& s = *found->second;
  const auto vs = values.dimensions(), bs = b.dimensions();
  if (vs[1] != static_cast<int64_t>(s.columns.size()) || bs[1] != s.n ||
      (vs[0] != 1 && vs[0] != bs[0])) {
    return ffi::Error::InvalidArgument("mpigrad: solve: the arrays don't fit the pattern");
  }
  const Tolerance tolerance{rtol, max_steps, site};
  const std::string head = "mpigrad: solve, " + std::string(where) + ": ";
  for (int64_t k = 0; k < bs[0]; ++k) {
    const bool own_values = vs[0] > 1;
    Answer answer;
    const std::string error = solve_one(
        s, values.typed_data() + (own_values ? k * vs[1] : 0), own_values || k == 0 || !s.ready,
        b.typed_data() + k * bs[1], tolerance, x->typed_data() + k * bs[1], answer);
    if (!error.empty()) return ffi::Error::Internal(head + error);
    if (throws && answer.outcome != kConverged) {
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                        head + describe(answer, tolerance));
    }
    const double numbers[kInfo] = {static_cast<double>(answer.outcome),
                                   static_cast<double>(answer.iterations), answer.residual,
                                   static_cast<double>(s.setups)};
    std::copy(numbers, numbers + kInfo, info->typed_data() + k * kInfo);
  }
  return ffi::Error::Success();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* mpigrad_hypre_solve(
    XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(mpigrad_hypre_solve, solve,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Token>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Ret<ffi::Token>()
                                  .Ret<Numbers>()
                                  .Ret<Numbers>()
                                  .Attr<int64_t>("system")
                                  .Attr<double>("rtol")
                                  .Attr<int64_t>("max_steps")
                                  .Attr<bool>("throws")
                                  .Attr<int64_t>("site")
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
MPIGRAD_EXPORT int64_t mpigrad_hypre_create(int comm, int64_t first, int64_t n,
                                            const int64_t* row_starts, const int64_t* columns,
                                            const int64_t* order, const Options* options) {
  std::lock_guard<std::mutex> guard(mutex);
  auto s = std::make_unique<System>();
  s->comm = MPI_Comm_f2c(comm);
  s->first = static_cast<HYPRE_BigInt>(first);
  s->n = static_cast<HYPRE_Int>(n);
  s->options = *options;
  s->columns.assign(columns, columns + row_starts[n]);
  if (order) s->order.assign(order, order + row_starts[n]);
  // hypre refuses null pointers, also on ranks without rows.
  for (auto* v : {&s->row_sizes, &s->diagonal_sizes, &s->ghost_sizes}) v->reserve(n + 1);
  for (int64_t i = 0; i < n; ++i) {
    s->rows.push_back(static_cast<HYPRE_BigInt>(first + i));
    s->row_sizes.push_back(static_cast<HYPRE_Int>(row_starts[i + 1] - row_starts[i]));
    const auto own =
        std::count_if(columns + row_starts[i], columns + row_starts[i + 1],
                      [&](int64_t column) { return column >= first && column < first + n; });
    s->diagonal_sizes.push_back(static_cast<HYPRE_Int>(own));
    s->ghost_sizes.push_back(s->row_sizes.back() - s->diagonal_sizes.back());
    const int64_t* end = columns + row_starts[i + 1];
    const int64_t* diagonal = std::find(columns + row_starts[i], end, first + i);
    if (diagonal != end) s->diagonal.push_back(static_cast<int32_t>(diagonal - columns));
  }
  const int64_t id = next_id++;
  systems.emplace(id, std::move(s));
  return id;
}

MPIGRAD_EXPORT void mpigrad_hypre_destroy(int64_t id) {
  std::lock_guard<std::mutex> guard(mutex);
  systems.erase(id);
}

// Where the watchdog looks: the record of the communication library.
MPIGRAD_EXPORT void mpigrad_hypre_watch(void* record) {
  watched = static_cast<mpigrad::Record*>(record);
}

// Seconds of set-up and of solving on this rank, then the numbers of both.
MPIGRAD_EXPORT void mpigrad_hypre_totals(double* seconds, int64_t* counts) {
  std::lock_guard<std::mutex> guard(mutex);
  seconds[0] = totals.setup_seconds;
  seconds[1] = totals.solve_seconds;
  counts[0] = totals.setups;
  counts[1] = totals.solves;
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
