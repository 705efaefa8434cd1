// Handlers of waves: whole runs of a time loop, each one operation between two tokens.
#include <iterator>
#include <map>
#include <memory>
#include <mutex>

#include "waves/run.h"

namespace mpigrad::waves {
namespace {

// By the physics's number, and by kind.
constexpr Run* kRuns[] = {run_acoustic, run_elastic};
constexpr const char* kNames[] = {"propagate", "propagate (tangent)", "propagate (adjoint)"};

// A run's description goes with its Python object, whose end may come while another thread runs.
std::mutex setups_mutex;
std::map<int64_t, std::shared_ptr<Setup>> setups;

std::shared_ptr<Setup> find_setup(int64_t number) {
  const std::lock_guard<std::mutex> lock(setups_mutex);
  const auto found = setups.find(number);
  return found == setups.end() ? nullptr : found->second;
}

ffi::Error handle(Kind kind, Arguments& in, Results& out, int64_t site, int64_t number,
                  int64_t rest, int64_t save) {
  const std::shared_ptr<Setup> held = find_setup(number);
  if (!held)
    return ffi::Error(ffi::ErrorCode::kInternal,
                      "mpigrad: a program of waves outlived its survey; trace it again");
  const Setup& setup = *held;
  Call c(kNames[kind], setup.slot, site, 0);
  if (ffi::Error e = c.collective_with({{"shots", setup.shots}, {"steps", setup.steps}});
      e.failure())
    return e;
  try {
    return kRuns[setup.physics](kind, c, setup, in, out, rest, save);
  } catch (const std::bad_alloc&) {
    return c.fail("not enough memory for the fields of a wave; use more ranks, or give `memory` "
                  "or `checkpoints`");
  }
}

ffi::Error forward(Token, Arguments in, TokenOut, Results out, int64_t site, int64_t setup,
                   int64_t rest, int64_t save) {
  return handle(kForward, in, out, site, setup, rest, save);
}
ffi::Error tangent(Token, Arguments in, TokenOut, Results out, int64_t site, int64_t setup,
                   int64_t rest, int64_t save) {
  return handle(kTangent, in, out, site, setup, rest, save);
}
ffi::Error adjoint(Token, Arguments in, TokenOut, Results out, int64_t site, int64_t setup,
                   int64_t rest, int64_t save) {
  return handle(kAdjoint, in, out, site, setup, rest, save);
}

}  // namespace
}  // namespace mpigrad::waves

// A run that Python describes: numbers as in mpigrad/waves/native_run.py.
MPIGRAD_EXPORT int64_t mpigrad_waves_create(const int64_t* numbers, int64_t count,
                                            const double* reals, int64_t real_count) {
  using namespace mpigrad::waves;
  static int64_t last = 0;
  auto setup = std::make_shared<Setup>();
  const int64_t* n = numbers;
  setup->number = ++last;
  setup->physics = *n++;
  if (setup->physics < 0 || setup->physics >= int64_t{std::size(kRuns)}) return 0;
  setup->slot = *n++;
  Tile& tile = setup->tile;
  tile.lx = *n++;
  tile.ly = *n++;
  for (int64_t& cells : tile.layers) cells = *n++;
  for (int& rank : tile.neighbor) rank = static_cast<int>(*n++);
  tile.reach = *n++;
  tile.complete();
  setup->steps = *n++;
  setup->shots = *n++;
  setup->threads = *n++;
  setup->checkpoints = *n++;
  setup->memory = *n++;
  setup->fingerprint = *n++;
  setup->dt = reals[0];
  setup->hx = reals[1];
  setup->hy = reals[2];
  setup->numbers.assign(reals + 3, reals + real_count);
  if (n != numbers + count) return 0;
  const std::lock_guard<std::mutex> lock(setups_mutex);
  setups.emplace(last, std::move(setup));
  return last;
}

MPIGRAD_EXPORT void mpigrad_waves_profile(int64_t number, const double* values, int64_t count) {
  mpigrad::waves::find_setup(number)->profiles.emplace_back(values, values + count);
}

// Points in compressed rows, `points` of them in each of `shots` shots; cells in C order.
MPIGRAD_EXPORT void mpigrad_waves_points(int64_t number, int64_t shots, int64_t points,
                                         const int64_t* starts, const int64_t* cells,
                                         const double* weights) {
  using namespace mpigrad::waves;
  Setup& setup = *find_setup(number);
  const Tile& tile = setup.tile;
  PointTable table;
  table.points = points;
  table.shots.resize(shots);
  for (int64_t row = 0; row < shots * points; ++row)
    for (int64_t k = starts[row]; k < starts[row + 1]; ++k) {
      const int64_t i = cells[k] / tile.ny, j = cells[k] % tile.ny;
      PointTable::Shot& shot = table.shots[row / points];
      (tile.in_middle(i, j) ? shot.middle : shot.edges)
          .push_back({tile.at(i, j), i, j, row % points, weights[k]});
    }
  setup.tables.push_back(std::move(table));
}

MPIGRAD_EXPORT void mpigrad_waves_free(int64_t number) {
  using namespace mpigrad::waves;
  const std::lock_guard<std::mutex> lock(setups_mutex);
  setups.erase(number);
}

#define MPIGRAD_WAVES                                                                  \
  MPIGRAD_BIND MPIGRAD_IN.RemainingArgs() MPIGRAD_OUT.RemainingRets() MPIGRAD_ATTR(site) \
      MPIGRAD_ATTR(setup) MPIGRAD_ATTR(rest) MPIGRAD_ATTR(save)
MPIGRAD_HANDLER(mpigrad_waves_forward, waves::forward, MPIGRAD_WAVES);
MPIGRAD_HANDLER(mpigrad_waves_tangent, waves::tangent, MPIGRAD_WAVES);
MPIGRAD_HANDLER(mpigrad_waves_adjoint, waves::adjoint, MPIGRAD_WAVES);
