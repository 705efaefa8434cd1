// Handlers of waves: whole runs of a time loop, each one operation between two tokens.
#include <map>
#include <memory>
#include <mutex>

#include "acoustic.h"
#include "elastic.h"

namespace mpigrad::waves {
namespace {

enum PhysicsNumber { kAcoustic, kElastic };

// A run's description goes with its Python object, whose end may come while another thread runs.
std::mutex setups_mutex;
std::map<int64_t, std::shared_ptr<Setup>> setups;

std::shared_ptr<Setup> find_setup(int64_t number) {
  const std::lock_guard<std::mutex> lock(setups_mutex);
  const auto found = setups.find(number);
  return found == setups.end() ? nullptr : found->second;
}

using Arguments = ffi::RemainingArgs;
using Results = ffi::RemainingRets;

// Operands and results, taken in their order.
template <class T>
class Reader {
 public:
  Reader(Arguments& in, Results& out) : in_(in), out_(out) {}
  Arrays<const T> take(int n) {
    Arrays<const T> arrays;
    for (int i = 0; i < n; ++i)
      arrays.push_back(static_cast<const T*>(in_.get<Buffer>(input_++)->untyped_data()));
    return arrays;
  }
  int32_t take_ticket() {
    return static_cast<const int32_t*>(in_.get<Buffer>(input_++)->untyped_data())[0];
  }
  Arrays<T> give(int n, bool zero = false) {
    Arrays<T> arrays;
    for (int i = 0; i < n; ++i) {
      auto y = *out_.get<Buffer>(output_++);
      advise_huge_pages(y->untyped_data(), y->size_bytes());
      if (zero) std::memset(y->untyped_data(), 0, y->size_bytes());
      arrays.push_back(static_cast<T*>(y->untyped_data()));
    }
    return arrays;
  }
  int32_t* give_ticket() {
    return static_cast<int32_t*>((*out_.get<Buffer>(output_++))->untyped_data());
  }

 private:
  Arguments& in_;
  Results& out_;
  size_t input_ = 0, output_ = 0;
};

enum Kind { kForward, kTangent, kAdjoint };
constexpr const char* kNames[] = {"propagate", "propagate (tangent)", "propagate (adjoint)"};

template <class P>
ffi::Error run(Kind kind, Call& c, const Setup& setup, Arguments& in, Results& out, bool rest,
               bool save) {
  using T = typename P::Value;
  Reader<T> reader(in, out);
  const int fields = rest ? 0 : P::kFields;
  const PointTable *sources = &setup.tables[0], *receivers = &setup.tables[1];
  const auto values = [&](const PointTable* table, const T* data) {
    return Values<T>{table, const_cast<T*>(data), setup.steps};
  };
  Propagation<P> propagation(c, setup);
  const Arrays<const T> models = reader.take(P::kModels);
  const Values<T> amplitudes = values(sources, reader.take(1)[0]);
  const Arrays<const T> state = reader.take(fields);
  bool available = false;
  Kept* kept = nullptr;
  if (kind == kAdjoint) {
    const int32_t ticket = reader.take_ticket();
    kept = store.find(ticket, setup.number);
    available = kept != nullptr;
  }
  if (ffi::Error e = propagation.start(models, available); e.failure()) return e;
  int code = 0;
  if (kind == kForward) {
    const Values<T> gathers = values(receivers, reader.give(1, true)[0]);
    int32_t* ticket = reader.give_ticket();
    code = propagation.forward(state, amplitudes, gathers, reader.give(P::kFields), save, *ticket);
  } else if (kind == kTangent) {
    reader.take_ticket();
    const Arrays<const T> model_tangents = reader.take(P::kModels);
    const Values<T> amplitude_tangents = values(sources, reader.take(1)[0]);
    const Arrays<const T> state_tangents = reader.take(fields);
    const Values<T> gathers = values(receivers, reader.give(1, true)[0]);
    code = propagation.tangent(state, amplitudes, model_tangents, state_tangents,
                               amplitude_tangents, gathers, reader.give(P::kFields));
  } else {
    const Values<T> gathers = values(receivers, reader.take(1)[0]);
    const Arrays<const T> last = reader.take(P::kFields);
    const Arrays<T> model_cotangents = reader.give(P::kModels);
    const Values<T> amplitude_cotangents = values(sources, reader.give(1, true)[0]);
    code = propagation.adjoint(state, amplitudes, available ? kept : nullptr, gathers, last,
                               model_cotangents, amplitude_cotangents, reader.give(fields));
  }
  c.watch.sent(propagation.bytes());
  pool.trim(static_cast<size_t>(setup.memory / 4));
  return c.done(code);
}

ffi::Error handle(Kind kind, Arguments& in, Results& out, int64_t site, int64_t number,
                  int64_t rest, int64_t save) {
  const std::shared_ptr<Setup> held = find_setup(number);
  if (!held)
    return ffi::Error(ffi::ErrorCode::kInternal,
                      "mpigrad: a program of waves outlived its survey; trace it again");
  const Setup& setup = *held;
  const auto first = in.get<Buffer>(0);
  const bool doubles = first->element_type() == ffi::F64;
  Call c(kNames[kind], setup.slot, site, 0);
  if (ffi::Error e = c.collective_with({{"shots", setup.shots}, {"steps", setup.steps}});
      e.failure())
    return e;
  try {
    if (setup.physics == kAcoustic) {
      const bool second = setup.tile.reach == 1;
      if (doubles)
        return second ? run<Acoustic<double, 1>>(kind, c, setup, in, out, rest, save)
                      : run<Acoustic<double, 2>>(kind, c, setup, in, out, rest, save);
      return second ? run<Acoustic<float, 1>>(kind, c, setup, in, out, rest, save)
                    : run<Acoustic<float, 2>>(kind, c, setup, in, out, rest, save);
    }
    if (setup.physics == kElastic)
      return doubles ? run<Elastic<double>>(kind, c, setup, in, out, rest, save)
                     : run<Elastic<float>>(kind, c, setup, in, out, rest, save);
  } catch (const std::bad_alloc&) {
    return c.fail("not enough memory for the fields of a wave; use more ranks, or give `memory` "
                  "or `checkpoints`");
  }
  return c.fail("no such physics");
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

// A run that Python describes: numbers as in mpigrad/problems/waves/native.py.
MPIGRAD_EXPORT int64_t mpigrad_waves_create(const int64_t* numbers, int64_t count,
                                            const double* reals, int64_t real_count) {
  using namespace mpigrad::waves;
  static int64_t last = 0;
  auto setup = std::make_shared<Setup>();
  const int64_t* n = numbers;
  setup->number = ++last;
  setup->physics = *n++;
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
