// Handlers of waves: whole runs of a time loop, each one operation between two tokens.
#include <exception>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "waves/description.h"
#include "waves/run.h"

namespace mpigrad::waves {
namespace {

// Indexed by RunDescription::physics, and by Kind.
constexpr Run* kRuns[] = {run_acoustic, run_elastic, run_acoustic3d, run_elastic3d};
constexpr const char* kNames[] = {"propagate", "propagate (tangent)", "propagate (adjoint)"};

// A run is freed with its Python object, perhaps while another thread is in a run.
std::mutex setups_mutex;
std::map<int64_t, std::shared_ptr<Setup>> setups;

std::shared_ptr<Setup> find_setup(int64_t id) {
  const std::lock_guard<std::mutex> lock(setups_mutex);
  const auto found = setups.find(id);
  return found == setups.end() ? nullptr : found->second;
}

ffi::Error handle(Kind kind, Arguments& in, Results& out, int64_t site, int64_t id,
                  int64_t rest, int64_t save) {
  const std::shared_ptr<Setup> held = find_setup(id);
  if (!held)
    return ffi::Error(ffi::ErrorCode::kInternal,
                      "mpigrad.waves: a compiled program is older than the model that it was traced "
                      "for. Trace it again.");
  const Setup& setup = *held;
  Call c(kNames[kind], setup.slot, site, 0);
  if (ffi::Error e = c.collective_with({{"shots", setup.shots}, {"steps", setup.steps}});
      e.failure())
    return e;
  try {
    return kRuns[setup.physics](kind, c, setup, in, out, rest, save);
  } catch (const std::bad_alloc&) {
    return c.fail("there is not enough memory for the fields of the waves. Use more ranks, or give "
                  "`memory` or `checkpoints`.");
  } catch (const std::exception& error) {
    return c.fail(std::string(error.what()) + ". Report this as a bug of mpigrad.");
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

// Makes a run of its description, and writes its id. Returns nullptr, or what is wrong.
MPIGRAD_EXPORT const char* mpigrad_waves_create_run(
    const mpigrad::waves::RunDescription* description, int64_t* id) {
  using namespace mpigrad::waves;
  static int64_t last = 0;
  static std::string error;
  const RunDescription& d = *description;
  if (d.version != kDescriptionVersion || d.size != int64_t{sizeof d}) {
    error = "its description of a run has version " + std::to_string(kDescriptionVersion) +
            " and " + std::to_string(sizeof d) + " bytes, that of the Python package version " +
            std::to_string(d.version) + " and " + std::to_string(d.size) + " bytes";
    return error.c_str();
  }
  if (d.physics < 0 || d.physics >= int64_t{std::size(kRuns)}) {
    error = "it has no physics with the id " + std::to_string(d.physics);
    return error.c_str();
  }
  auto setup = std::make_shared<Setup>();
  setup->physics = d.physics;
  setup->slot = d.slot;
  Tile& tile = setup->tile;
  tile.lx = d.cells[0];
  tile.ly = d.cells[1];
  tile.lm = d.cells[2];
  for (int side = 0; side < kSides; ++side) {
    tile.layers[side] = d.layers[side];
    tile.neighbor[side] = static_cast<int>(d.neighbors[side]);
  }
  tile.reach = d.reach;
  tile.volume = kRuns[d.physics] == run_acoustic3d || kRuns[d.physics] == run_elastic3d;
  tile.complete();
  setup->steps = d.steps;
  setup->shots = d.shots;
  setup->threads = d.threads;
  setup->checkpoints = d.checkpoints;
  setup->memory = d.memory;
  setup->precision = d.precision;
  setup->directory = d.directory;
  setup->fingerprint = d.fingerprint;
  setup->dt = d.dt;
  std::copy(d.spacing, d.spacing + 3, setup->spacing.begin());
  setup->stable_length = d.stable_length;
  setup->density = d.density != 0;
  setup->source_kind = d.source_kind;
  setup->receivers = d.receivers;
  setup->component_kinds.assign(d.component_kinds, d.component_kinds + d.n_components);
  setup->surface = d.surface;
  setup->mechanisms = d.mechanisms;
  const std::lock_guard<std::mutex> lock(setups_mutex);
  *id = setup->id = ++last;
  setups.emplace(last, std::move(setup));
  return nullptr;
}

MPIGRAD_EXPORT void mpigrad_waves_profile(int64_t id, const double* values, int64_t count) {
  if (const auto setup = mpigrad::waves::find_setup(id))
    setup->profiles.emplace_back(values, values + count);
}

// Points in compressed rows, `points` of them in each of `shots` shots. Cells are in C order.
MPIGRAD_EXPORT void mpigrad_waves_points(int64_t id, int64_t shots, int64_t points,
                                         const int64_t* starts, const int64_t* cells,
                                         const double* weights) {
  using namespace mpigrad::waves;
  const std::shared_ptr<Setup> setup = find_setup(id);
  if (!setup) return;
  const Tile& tile = setup->tile;
  PointTable table;
  table.points = points;
  table.shots.resize(shots);
  for (int64_t n = 0; n < shots; ++n) {
    PointTable::Shot& shot = table.shots[n];
    for (int64_t point = 0; point < points; ++point)
      for (int64_t k = starts[n * points + point]; k < starts[n * points + point + 1]; ++k) {
        const int64_t row = cells[k] / tile.ny, j = cells[k] % tile.ny;
        const int64_t i = row / tile.nm, m = row % tile.nm;
        shot.entries.push_back({tile.at(i, m, j), i, j, m, point, weights[k]});
      }
    shot.sort(tile);
  }
  setup->tables.push_back(std::move(table));
}

MPIGRAD_EXPORT void mpigrad_waves_free(int64_t id) {
  using namespace mpigrad::waves;
  const std::lock_guard<std::mutex> lock(setups_mutex);
  setups.erase(id);
}

#define MPIGRAD_WAVES                                                                  \
  MPIGRAD_BIND MPIGRAD_IN.RemainingArgs() MPIGRAD_OUT.RemainingRets() MPIGRAD_ATTR(site) \
      MPIGRAD_ATTR(setup) MPIGRAD_ATTR(rest) MPIGRAD_ATTR(save)
MPIGRAD_PLAIN_HANDLER(mpigrad_waves_forward, waves::forward, MPIGRAD_WAVES);
MPIGRAD_PLAIN_HANDLER(mpigrad_waves_tangent, waves::tangent, MPIGRAD_WAVES);
MPIGRAD_PLAIN_HANDLER(mpigrad_waves_adjoint, waves::adjoint, MPIGRAD_WAVES);
