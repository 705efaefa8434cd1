// Distributed solves by hypre, as an XLA FFI handler: a Krylov method with a multigrid
// preconditioner, or the multigrid cycle alone.
//
// A System is one sparsity structure on one communicator with one multigrid configuration. It keeps
// the matrix and its multigrid hierarchy between calls while the values are equal to the bit on every
// rank, so that the adjoint solve of a symmetric system needs no set-up.
//
// Compiled with hypre's sources, this library runs on every MPI (any_mpi/mpi.h). With a hypre of the
// system it links the MPI that hypre was built with, and Python compares the marker below with the
// MPI that mpi4py runs on before it loads this library.
#include "hypre/assembled.h"
#include "hypre/structured.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <unordered_map>

#include "ffi.h"

#define MPIGRAD_TEXT_(x) #x
#define MPIGRAD_TEXT(x) MPIGRAD_TEXT_(x)
#if defined(MPIGRAD_ANY_MPI)
#include "hypre/any_mpi/any_mpi.h"
#define MPIGRAD_MPI "any MPI"
#elif defined(OPEN_MPI)
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

// Python finds it in the bytes of the library before loading it.
MPIGRAD_EXPORT const char mpigrad_hypre_marker[] = "mpigrad-hypre-built-with:" MPIGRAD_MPI;

namespace {

namespace ffi = xla::ffi;
using namespace mpigrad::hypre;

constexpr int kInfo = 5;  // entries of the info of each right-hand side

std::mutex mutex;  // hypre keeps global state
std::unordered_map<int64_t, std::unique_ptr<System>> systems;
int64_t next_id = 1;

using Numbers = ffi::Buffer<ffi::F64, 2>;
using List = ffi::Buffer<ffi::F64, 1>;

// values (1 or B, entries), b (B, n), x0 (B, n) or for zeros (B, 0), values_id (0 or 1: the id of the
// values, if they are those of an earlier solve) -> x (B, n), info (B, kInfo)
ffi::Error solve(ffi::Token, Numbers values, Numbers b, Numbers x0, List values_id, ffi::Result<ffi::Token>,
                 ffi::Result<Numbers> x, ffi::Result<Numbers> info, int64_t system, int64_t method,
                 int64_t restart, double rtol, int64_t max_steps, bool throws, int64_t slot, int64_t site,
                 std::string_view name, std::string_view settings, std::string_view where) try {
  const SolveRecord record(slot, site);
  if (record.refusal()) {
    const std::string text = record.refusal();
    // A verdict of the guard is a complete text.
    const bool whole = text.rfind("mpigrad: ", 0) == 0;
    return ffi::Error::Internal(whole ? text : "solve, " + std::string(where) + ": " + text);
  }
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = systems.find(system);
  if (found == systems.end()) {
    return ffi::Error::InvalidArgument(
        "solve: the matrix's pattern was freed, or Python is ending. Keep the pattern.");
  }
  System& s = *found->second;
  const auto vs = values.dimensions(), bs = b.dimensions(), xs = x0.dimensions();
  if (vs[1] != s.entries() || bs[1] != s.rows() || xs[0] != bs[0] ||
      (xs[1] != bs[1] && xs[1] != 0) ||
      (vs[0] != 1 && vs[0] != bs[0])) {
    return ffi::Error::InvalidArgument(
        "solve: the arrays do not fit the pattern. Report this as a bug of mpigrad.");
  }
  if (!initialized) HYPRE_Init();
  initialized = true;
  const Request request{static_cast<Method>(method), restart, rtol, max_steps, record, {settings, bs[0]}};
  const std::string head = "solve, " + std::string(where) + ": ";
  const bool own_values = vs[0] > 1;
  const bool same = !own_values && s.ready() && values_id.element_count() == 1 &&
                    values_id.typed_data()[0] == static_cast<double>(s.number());
  for (int64_t k = 0; k < bs[0]; ++k) {
    Answer answer;
    const std::string error =
        s.solve(values.typed_data() + (own_values ? k * vs[1] : 0),
                own_values || (k == 0 && !same) || !s.ready(), b.typed_data() + k * bs[1],
                xs[1] ? x0.typed_data() + k * bs[1] : nullptr, request, x->typed_data() + k * bs[1], answer);
    const bool fails = !error.empty() || (throws && answer.outcome != kConverged);
    if (fails && guard.fail) guard.fail();
    if (!error.empty()) return ffi::Error::Internal(head + error);
    if (fails) {
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                        head + describe(answer, name, request.method == kPCG, rtol, max_steps));
    }
    const double numbers[kInfo] = {static_cast<double>(answer.outcome),
                                   static_cast<double>(answer.iterations), answer.residual,
                                   static_cast<double>(s.setups()), static_cast<double>(s.number())};
    std::copy(numbers, numbers + kInfo, info->typed_data() + k * kInfo);
  }
  return ffi::Error::Success();
} catch (const std::exception& error) {  // XLA is compiled without exceptions
  if (guard.fail) guard.fail();
  std::lock_guard<std::mutex> lock(mutex);
  const bool memory = dynamic_cast<const std::bad_alloc*>(&error);
  const auto found = systems.find(system);  // it may have been freed meanwhile
  const std::string rank =
      found == systems.end() ? "a rank" : "rank " + std::to_string(found->second->rank());
  return ffi::Error::Internal(
      "solve, " + std::string(where) + ": " + rank + " " +
      (memory ? "does not have enough memory for the solver. Use more ranks."
              : std::string("failed: ") + error.what() + ". Report this as a bug of mpigrad."));
}

// A communicator from its handle in Python, a pointer or an integer.
MPI_Comm as_communicator(int64_t handle) {
  MPI_Comm comm;
  static_assert(sizeof comm <= sizeof handle);
  std::memcpy(&comm, &handle, sizeof comm);
  return comm;
}

int64_t keep(std::unique_ptr<System> system) {
  std::lock_guard<std::mutex> lock(mutex);
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
                                  .Attr<int64_t>("slot")
                                  .Attr<int64_t>("site")
                                  .Attr<std::string_view>("name")
                                  .Attr<std::string_view>("settings")
                                  .Attr<std::string_view>("where"));

#if defined(MPIGRAD_ANY_MPI)
MPIGRAD_EXPORT const char* mpigrad_hypre_constant_names() { return constant_names(); }

// See find_mpi. `status` has the bytes of an MPI_Status, and the places of source and tag in it.
MPIGRAD_EXPORT const char* mpigrad_hypre_find_mpi(const char* library, int pointers,
                                                  const int64_t* status, const int64_t* constants) {
  const StatusLayout layout{static_cast<size_t>(status[0]), static_cast<size_t>(status[1]),
                            static_cast<size_t>(status[2])};
  return find_mpi(library, pointers, layout, constants);
}
#endif

MPIGRAD_EXPORT const char* mpigrad_hypre_mpi_library() {
  static char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  return text;
}

MPIGRAD_EXPORT const char* mpigrad_hypre_version() { return "hypre " HYPRE_RELEASE_VERSION; }

MPIGRAD_EXPORT int mpigrad_hypre_bigint_bits() { return 8 * sizeof(HYPRE_BigInt); }

// Local: stores the structure. row_starts (n + 1), columns (entries) in row order, and order
// (entries) or null. near_null (options->near_null, n). The caller keeps the communicator.
MPIGRAD_EXPORT int64_t mpigrad_hypre_create_assembled(int64_t comm, int64_t first, int64_t n,
                                                      const int64_t* row_starts,
                                                      const int64_t* columns, const int64_t* order,
                                                      const BoomerAMGOptions* options,
                                                      const double* near_null) {
  const Structure given{as_communicator(comm), first, n, row_starts, columns, order};
  return keep(std::make_unique<Assembled>(given, *options, near_null));
}

// Local: stores a stencil on this rank's tile of a grid. shape, lower and upper (3 each, upper not in
// the tile) and steps (n_given + n_zero, 3) are in hypre's order of the axes. Values of the given
// offsets come offset after offset. The others are zero.
MPIGRAD_EXPORT int64_t mpigrad_hypre_create_structured(int64_t comm, int64_t first, int axes,
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
  return keep(std::make_unique<Structured>(as_communicator(comm), first, tile, std::move(entries),
                                           size, *options));
}

MPIGRAD_EXPORT void mpigrad_hypre_destroy(int64_t id) {
  std::lock_guard<std::mutex> lock(mutex);
  systems.erase(id);
}

// From the communication library, see Guard.
MPIGRAD_EXPORT void mpigrad_hypre_watch(void* record, decltype(Guard::begin) begin, void (*end)(),
                                        void (*fail)()) {
  guard = {static_cast<mpigrad::Record*>(record), begin, end, fail};
}

// Seconds of set-up and of solving on this rank, the counts of both, and the count of systems now.
MPIGRAD_EXPORT void mpigrad_hypre_totals(double* seconds, int64_t* counts) {
  std::lock_guard<std::mutex> lock(mutex);
  seconds[0] = totals.setup_seconds;
  seconds[1] = totals.solve_seconds;
  counts[0] = totals.setups;
  counts[1] = totals.solves;
  counts[2] = static_cast<int64_t>(systems.size());
}

// Frees everything before MPI ends. If MPI has ended already, hypre's objects are left alone.
MPIGRAD_EXPORT void mpigrad_hypre_finalize() {
  std::lock_guard<std::mutex> lock(mutex);
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
