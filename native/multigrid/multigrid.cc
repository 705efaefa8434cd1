// Solves by black-box multigrid on the tiles of a grid, as an XLA FFI handler.
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "multigrid/system.h"

namespace mpigrad::multigrid {
namespace {

constexpr int kInfo = 5;  // entries of the info of each right-hand side

// A system is freed with its Python object, perhaps while another thread is in a solve.
std::mutex systems_mutex;
std::map<int64_t, std::shared_ptr<System>> systems;
int64_t last_id = 0;

std::shared_ptr<System> find(int64_t id) {
  const std::lock_guard<std::mutex> lock(systems_mutex);
  const auto found = systems.find(id);
  return found == systems.end() ? nullptr : found->second;
}

using Numbers = ffi::Buffer<ffi::F64, 2>;
using List = ffi::Buffer<ffi::F64, 1>;

// values (1 or B, entries), b (B, n), x0 (B, n) or for zeros (B, 0), values_id (0 or 1: the id of the
// values, if they are those of an earlier solve) -> x (B, n), info (B, kInfo)
ffi::Error solve(Token, Numbers values, Numbers b, Numbers x0, List values_id, TokenOut,
                 ffi::Result<Numbers> x, ffi::Result<Numbers> info, int64_t system, int64_t site,
                 double rtol, int64_t max_steps, bool throws, std::string_view name,
                 std::string_view settings) {
  const std::shared_ptr<System> held = find(system);
  if (!held)
    return ffi::Error(ffi::ErrorCode::kInternal,
                      "solve: the matrix's pattern was freed, or Python is ending. Keep the pattern.");
  System& s = *held;
  const auto vs = values.dimensions(), bs = b.dimensions(), xs = x0.dimensions();
  Call c("solve", s.slot(), site, 0);
  if (vs[1] != s.entries() || bs[1] != s.rows() || xs[0] != bs[0] ||
      (xs[1] != bs[1] && xs[1] != 0) || (vs[0] != 1 && vs[0] != bs[0]))
    return c.fail("the arrays do not fit the pattern. Report this as a bug of mpigrad.");
  if (ffi::Error e = c.collective_with({}); e.failure()) return e;
  const Request request{rtol, max_steps, {settings, bs[0]}, [&c] { c.watch.moves(); }};
  const bool own_values = vs[0] > 1;
  const bool same = !own_values && s.ready() && values_id.element_count() == 1 &&
                    values_id.typed_data()[0] == static_cast<double>(s.number());
  try {
    for (int64_t k = 0; k < bs[0]; ++k) {
      Answer answer;
      const std::string error =
          s.solve(values.typed_data() + (own_values ? k * vs[1] : 0),
                  own_values || (k == 0 && !same) || !s.ready(), b.typed_data() + k * bs[1],
                  xs[1] ? x0.typed_data() + k * bs[1] : nullptr, request,
                  x->typed_data() + k * bs[1], answer);
      c.watch.sent(s.bytes());
      if (!error.empty()) return c.done(error);
      if (throws && answer.outcome != kConverged) {
        mark_failure();
        return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                          "solve, " + call_site(site) + ": " + describe(answer, name, true, rtol, max_steps));
      }
      const double numbers[kInfo] = {
          static_cast<double>(answer.outcome), static_cast<double>(answer.iterations),
          answer.residual, static_cast<double>(s.setups()), static_cast<double>(s.number())};
      std::copy(numbers, numbers + kInfo, info->typed_data() + k * kInfo);
    }
  } catch (const std::bad_alloc&) {
    return c.fail("this rank does not have enough memory for the solver. Use more ranks.");
  } catch (const std::exception& error) {
    return c.fail(error.what());
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mpigrad::multigrid

MPIGRAD_PLAIN_HANDLER(mpigrad_multigrid_solve, multigrid::solve,
                      MPIGRAD_BIND MPIGRAD_IN.Arg<mpigrad::multigrid::Numbers>()
                          .Arg<mpigrad::multigrid::Numbers>()
                          .Arg<mpigrad::multigrid::Numbers>()
                          .Arg<mpigrad::multigrid::List>() MPIGRAD_OUT
                          .Ret<mpigrad::multigrid::Numbers>()
                          .Ret<mpigrad::multigrid::Numbers>() MPIGRAD_ATTR(system)
                              MPIGRAD_ATTR(site)
                          .Attr<double>("rtol") MPIGRAD_ATTR(max_steps)
                          .Attr<bool>("throws")
                          .Attr<std::string_view>("name")
                          .Attr<std::string_view>("settings"));

// Local: stores a stencil on this rank's tile of a grid. All arrays have three axes, the fastest first:
// shape, lower and upper (not in the tile), tiles (the number along each axis), starts (for each axis the
// first cell of each tile and the number of cells) and steps (n_given + n_zero, 3). Values of the given
// offsets come offset after offset. The others are zero.
MPIGRAD_EXPORT int64_t mpigrad_multigrid_create(int64_t slot, int axes, const int64_t* shape,
                                                const int64_t* lower, const int64_t* upper,
                                                const int64_t* tiles, const int64_t* starts,
                                                int64_t n_given, int64_t n_zero,
                                                const int64_t* steps, int keeps_stale) {
  using namespace mpigrad::multigrid;
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
  std::vector<int64_t> along[kAxes];
  for (int a = 0; a < kAxes; ++a) {
    along[a].assign(starts, starts + tiles[a] + 1);
    starts += tiles[a] + 1;
  }
  auto system = std::make_shared<System>(slot, tile, std::move(entries), size, tiles, along,
                                         keeps_stale != 0);
  const std::lock_guard<std::mutex> lock(systems_mutex);
  systems.emplace(++last_id, std::move(system));
  return last_id;
}

MPIGRAD_EXPORT void mpigrad_multigrid_destroy(int64_t id) {
  using namespace mpigrad::multigrid;
  const std::lock_guard<std::mutex> lock(systems_mutex);
  systems.erase(id);
}

// Seconds of set-up and of solving on this rank, the counts of both, and the count of systems now.
MPIGRAD_EXPORT void mpigrad_multigrid_totals(double* seconds, int64_t* counts) {
  using namespace mpigrad::multigrid;
  const std::lock_guard<std::mutex> lock(systems_mutex);
  seconds[0] = totals.setup_seconds;
  seconds[1] = totals.solve_seconds;
  counts[0] = totals.setups;
  counts[1] = totals.solves;
  counts[2] = static_cast<int64_t>(systems.size());
}
