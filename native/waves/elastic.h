// Elastic waves for the time loop of propagate.h. A step has two phases: the velocities from the
// stresses, then the stresses from the velocities. The phases of the adjoint do the same backwards in
// time. A run that is saved writes the velocities of each step, and the memories of their
// derivatives, directly into the history instead of the wave's own fields, at no extra cost.
#pragma once

#include "waves/elastic_adjoint.h"
#include "waves/propagate.h"
#include "waves/rim.h"

namespace mpigrad::waves {

template <class T>
class Elastic {
 public:
  using Value = T;
  static constexpr int kModels = 5, kFields = 7, kPhases = 2;
  static constexpr bool kHistoryIsState = true;
  enum Kind : int64_t { kPressure, kVx, kVy };  // field that a source drives or a receiver records

  struct Wave {
    Memory first;  // the initial velocities, if steps in place have changed them
    elastic::Velocity<T> v, next, previous;
    Field<T> p, q, s;
    Memory memories, strips;
    elastic::Stress<T> stress;
    elastic::Strips<T> by_stress, by_velocity;
    // The adjoint's receivers add these when the stresses have been computed from the velocities.
    std::vector<std::pair<T*, T>> late;
  };

  // profiles: a and b at the centres, a and b half a cell further, along x, then along y.
  explicit Elastic(const Setup& setup)
      : setup_(setup),
        tile_(setup.tile),
        middle_(tile_.core(1)),
        weights_(setup.dt, setup.spacing[0], setup.spacing[1]),
        back_(-setup.dt, setup.spacing[0], setup.spacing[1]),
        area_(1 / (setup.spacing[0] * setup.spacing[1])),
        rim_(tile_, tile_.layers, elastic::kReach) {
    for (size_t k = 0; k < 8; ++k)
      profiles_[k].assign(setup.profiles[k].begin(), setup.profiles[k].end());
    for (int half = 0; half < 2; ++half) {
      profile_.ax[half] = profiles_[2 * half].data(), profile_.bx[half] = profiles_[2 * half + 1].data();
      profile_.ay[half] = profiles_[4 + 2 * half].data();
      profile_.by[half] = profiles_[5 + 2 * half].data();
    }
  }

  // ---- the model: K = lambda + mu and mu at the cells, mu at the corners, 1/rho between them ----

  std::vector<double> extremes(const Arrays<const T>&) const { return {}; }
  std::string fault(const double*) const { return ""; }  // Python checks the model

  void load(const Arrays<const T>& models) {
    forward_ = {models[0], models[1], models[2], models[3], models[4]};
    // The adjoint divides by mu. In a fluid it uses a tiny mu, which does not affect other cells.
    const T little = sizeof(T) == 8 ? T(1e-24) : T(1e-12);
    const int64_t cells = tile_.nx * tile_.ny;
    positive_ = Memory(2 * cells * sizeof(T));
    T* positive = static_cast<T*>(positive_.data());
    for (int k = 0; k < 2; ++k)
      for (int64_t c = 0; c < cells; ++c)
        positive[k * cells + c] = std::max(models[1 + k][c], little * models[0][c]);
    adjoint_ = {models[0], positive, positive + cells, models[3], models[4]};
    sums_ = Memory(kModels * cells * sizeof(T));
    T* sum = static_cast<T*>(sums_.data());
    std::fill_n(sum, kModels * cells, T(0));
    gradient_ = {sum, sum + cells, sum + 2 * cells, sum + 3 * cells, sum + 4 * cells};
  }

  void load_tangents(const Arrays<const T>& t) { tangents_ = {t[0], t[1], t[2], t[3], t[4]}; }

  void gradient(const Arrays<T>& models) const {
    for (int64_t c = 0; c < tile_.nx * tile_.ny; ++c) {
      models[0][c] = gradient_.bulk[c] / adjoint_.bulk[c];
      models[1][c] = gradient_.shear[c] / adjoint_.shear[c];
      models[2][c] = gradient_.corner[c] / adjoint_.corner[c];
      models[3][c] = gradient_.bx[c] / adjoint_.bx[c] / adjoint_.bx[c];
      models[4][c] = gradient_.by[c] / adjoint_.by[c] / adjoint_.by[c];
    }
  }

  // ---- the state: vx, vy, p, q, s, and the memories along x and along y ----

  std::vector<int64_t> state_sizes() const {
    const int64_t cells = tile_.nx * tile_.ny;
    return {cells, cells, cells, cells, cells, 4 * along_x(), 4 * along_y()};
  }

  Wave wave() const {
    Wave w;
    w.first = Memory(history_size() * sizeof(T));
    w.p = Field<T>(tile_), w.q = Field<T>(tile_), w.s = Field<T>(tile_);
    w.memories = Memory(2 * (along_x() + along_y()) * sizeof(T));
    T* m = static_cast<T*>(w.memories.data());
    w.stress = {w.p, w.q, w.s, {m, m + along_x()}, {m + 2 * along_x(), m + 2 * along_x() + along_y()}};
    return w;
  }

  void begin(Wave& w, const Arrays<const T>& state, int64_t shot) const {
    std::memset(w.first.data(), 0, w.first.bytes());
    std::memset(w.memories.data(), 0, w.memories.bytes());
    w.p.clear(), w.q.clear(), w.s.clear();
    w.v = w.next = slot(static_cast<T*>(w.first.data()));
    if (!state.empty()) transfer<true>(w, state, shot);
  }

  void end(const Wave& w, const Arrays<T>& state, int64_t shot) const {
    transfer<false>(w, state, shot);
  }

  void begin_adjoint(Wave& w, const Arrays<const T>& cotangents, int64_t shot) const {
    begin(w, cotangents, shot);
    scale(w, [](T x, T parameter) { return x * parameter; }, T(1) / weights_.dt);
    using S = elastic::Strips<T>;
    const int64_t x = S::rows(tile_) * tile_.ny, y = tile_.nx * S::columns(tile_);
    w.strips = Memory(4 * (x + y) * sizeof(T));
    std::memset(w.strips.data(), 0, w.strips.bytes());
    T* s = static_cast<T*>(w.strips.data());
    w.by_stress = {{s, s + x}, {s + 2 * x, s + 2 * x + y}};
    s += 2 * (x + y);
    w.by_velocity = {{s, s + x}, {s + 2 * x, s + 2 * x + y}};
  }

  void end_adjoint(Wave& w, const Arrays<T>& cotangents, int64_t shot) const {
    if (cotangents.empty()) return;
    scale(w, [](T x, T parameter) { return x / parameter; }, weights_.dt);
    end(w, cotangents, shot);
  }

  // ---- a step ----

  int64_t depth() const { return 1; }
  int64_t history_size() const {
    return (2 * (tile_.padded() + along_x() + along_y()) + 15) / 16 * 16;
  }

  // The history of a step that would have ended with the initial wave.
  T* first(Wave& w) const { return static_cast<T*>(w.first.data()); }

  // Before a phase: `history` is that of the step, `before` that of the step before it.
  void prepare(int phase, Mode mode, Wave& w, T* history, T* before) {
    if (phase == 0) w.next = w.v;
    if (mode == Mode::kSave && phase == 0) {
      w.next = slot(history);
      clear_margin(w.next.vx);
      clear_margin(w.next.vy);
    }
    if (mode == Mode::kReverse && phase == 0) transfer_stress<true>(w.stress, before);
    if (mode == Mode::kReverse && phase == 1) {
      w.next = slot(history);
      clear_margin(w.next.vx);
      clear_margin(w.next.vy);
      transfer_velocity<true>(w.next, before);
    }
    if (mode == Mode::kAdjoint || mode == Mode::kBorn) {
      after_ = slot(history);
      before_ = slot(before);
    }
    if (mode != Mode::kAdjoint || (phase == 1 && fused(mode))) return;
    in_parallel(setup_.threads, {0, tile_.nx, 0, tile_.ny}, [&](const Box& b) {
      for (int64_t i = b.i0; i < b.i1; ++i)
        if (phase == 0)
          recall_stress(tile_, profile_, i, b.j0, b.j1, w.stress, w.v, w.by_stress);
        else
          recall_velocity(tile_, profile_, i, b.j0, b.j1, w.v, w.stress, w.by_velocity);
    });
  }

  void update(int phase, Mode mode, const Box& b, Wave& w, T*) const {
    if (mode == Mode::kReverse) return undo(phase, rim_.part(b), w);
    if (!fused(mode)) return rows(phase, mode, b, b.i0, b.i1, w);
    const bool middle = b == middle_;
    if (phase == 0)
      middle ? both_phases(mode, b, w) : rows(0, mode, b, b.i0, b.i1, w);
    else
      rows(1, mode, b, middle ? fused_end() : b.i0, b.i1, w);
  }

  void finish(int phase, Mode mode, Wave& w) const {
    if (phase == 0 || mode == Mode::kReverse) {
      w.previous = w.v;
      w.v = w.next;
    } else {
      for (const auto& [velocity, value] : w.late) *velocity += value;
      w.late.clear();
    }
  }

  void pieces(int phase, Mode mode, const Wave& w, std::vector<Piece<T>>& list) const {
    if ((phase == 0) != (mode == Mode::kReverse))
      add_pieces({w.next.vx, w.next.vy}, list);
    else
      add_pieces({w.stress.p, w.stress.q, w.stress.s}, list);
  }
  void all_pieces(const Wave& w, std::vector<Piece<T>>& list) const {
    add_pieces({w.v.vx, w.v.vy, w.stress.p, w.stress.q, w.stress.s}, list);
  }

  // ---- boundary saving: before each step the stresses around the inside, the velocities outside ----

  int64_t rim_size() const {
    return 3 * rim_.ring_cells + 2 * (rim_.outside_cells + along_x() + along_y());
  }
  void keep_before(const Wave& w, T* rim) const {
    transfer_velocity<false>(w.v, rim);
    transfer_stress<false>(w.stress, rim);
  }
  void keep_after(T*, T*) const {}
  void turn(Wave&) const {}

  // ---- points ----

  // The phase of the adjoint before which the sources' cotangents are read.
  int source_phase() const { return source() == kPressure ? 0 : 1; }

  bool injects_first(int, Mode) const { return false; }
  void inject(int phase, Mode mode, const PointTable::Entry& e, Wave& w, T value, T*) const {
    const bool adjoint = mode == Mode::kAdjoint, undone = mode == Mode::kReverse;
    if (phase != ((adjoint || source() == kPressure) != undone ? 1 : 0)) return;
    if (undone && !rim_.has(e.i, e.j)) return;  // the rim has it
    const int64_t c = e.i * tile_.ny + e.j;
    if (adjoint) {
      switch (receiver(e.point)) {
        case kPressure: w.stress.p[e.cell] -= adjoint_.bulk[c] * value; break;
        case kVx: w.late.emplace_back(w.v.vx + e.cell, adjoint_.bx[c] * value); break;
        case kVy: w.late.emplace_back(w.v.vy + e.cell, adjoint_.by[c] * value); break;
      }
    } else {
      const T drive = (undone ? -1 : 1) * weights_.dt * area_ * value;
      switch (source()) {
        case kPressure: w.stress.p[e.cell] += drive; break;
        case kVx: w.next.vx[e.cell] += forward_.bx[c] * drive; break;
        case kVy: w.next.vy[e.cell] += forward_.by[c] * drive; break;
      }
    }
  }

  T sample(Mode mode, const PointTable::Entry& e, const Wave& w) const {
    const bool adjoint = mode == Mode::kAdjoint;
    T value = 0;
    switch (adjoint ? source() : receiver(e.point)) {
      case kPressure: {
        const T p = w.stress.p[e.cell];
        value = adjoint ? p / adjoint_.bulk[e.i * tile_.ny + e.j] : -p;
        break;
      }
      case kVx: value = w.v.vx[e.cell]; break;
      case kVy: value = w.v.vy[e.cell]; break;
    }
    return static_cast<T>(e.weight) * value * (adjoint ? weights_.dt * area_ : T(1));
  }

 private:
  int64_t along_x() const { return elastic::px(tile_) * tile_.ny; }
  int64_t along_y() const { return tile_.nx * elastic::py(tile_); }

  Kind source() const { return static_cast<Kind>(setup_.source_kind); }
  Kind receiver(int64_t point) const {
    return static_cast<Kind>(setup_.component_kinds[point / setup_.receivers]);
  }

  // Velocities and their memories in a piece of a history.
  elastic::Velocity<T> slot(T* data) const {
    if (!data) return {};
    const int64_t size = tile_.padded();
    T* m = data + 2 * size;
    return {data + tile_.origin(),
            data + size + tile_.origin(),
            {m, m + along_x()},
            {m + 2 * along_x(), m + 2 * along_x() + along_y()}};
  }

  void clear_margin(T* field) const {
    constexpr int64_t r = elastic::kReach;
    for (int64_t i = -r; i < tile_.nx + r; ++i) {
      T* row = field + tile_.at(i, 0);
      if (i < 0 || i >= tile_.nx) {
        std::fill(row - r, row + tile_.ny + r, T(0));
      } else {
        std::fill(row - r, row, T(0));
        std::fill(row + tile_.ny, row + tile_.ny + r, T(0));
      }
    }
  }

  // Between a wave and a state's arrays.
  template <bool kIn, class Array>
  void transfer(const Wave& w, const Array& state, int64_t shot) const {
    const std::vector<int64_t> sizes = state_sizes();
    const auto copy = [](T* mine, auto* theirs, int64_t n) {
      if constexpr (kIn)
        std::memcpy(mine, theirs, n * sizeof(T));
      else
        std::memcpy(theirs, mine, n * sizeof(T));
    };
    T* const fields[5] = {w.v.vx, w.v.vy, w.stress.p, w.stress.q, w.stress.s};
    for (int k = 0; k < 5; ++k)
      for (int64_t i = 0; i < tile_.nx; ++i)
        copy(fields[k] + tile_.at(i, 0), state[k] + shot * sizes[k] + i * tile_.ny, tile_.ny);
    T* const x[4] = {w.stress.mx[0], w.stress.mx[1], w.v.mx[0], w.v.mx[1]};
    T* const y[4] = {w.stress.my[0], w.stress.my[1], w.v.my[0], w.v.my[1]};
    for (int k = 0; k < 4; ++k) {
      copy(x[k], state[5] + shot * sizes[5] + k * along_x(), along_x());
      copy(y[k], state[6] + shot * sizes[6] + k * along_y(), along_y());
    }
  }

  // Between fields and a rim: the memories, which follow each other, velocities, stresses.
  template <bool kIn>
  void transfer_velocity(const elastic::Velocity<T>& v, T* rim) const {
    const int64_t memories = 2 * (along_x() + along_y());
    std::memcpy(kIn ? v.mx[0] : rim, kIn ? rim : v.mx[0], memories * sizeof(T));
    rim += memories;
    for (T* field : {v.vx, v.vy}) rim = transfer_boxes<kIn>(tile_, rim_.outside, field, rim);
  }
  template <bool kIn>
  void transfer_stress(const elastic::Stress<T>& stress, T* rim) const {
    rim += 2 * (along_x() + along_y() + rim_.outside_cells);
    for (T* field : {stress.p, stress.q, stress.s})
      rim = transfer_boxes<kIn>(tile_, rim_.ring, field, rim);
  }

  // From cotangents to the adjoint's variables, or back.
  template <class F>
  void scale(Wave& w, F f, T memories) const {
    T* const fields[5] = {w.v.vx, w.v.vy, w.stress.p, w.stress.q, w.stress.s};
    const T* const by[5] = {adjoint_.bx, adjoint_.by, adjoint_.bulk, adjoint_.shear, adjoint_.corner};
    for (int k = 0; k < 5; ++k)
      for (int64_t i = 0; i < tile_.nx; ++i) {
        T* row = fields[k] + tile_.at(i, 0);
        for (int64_t j = 0; j < tile_.ny; ++j) row[j] = f(row[j], by[k][i * tile_.ny + j]);
      }
    for (int k = 0; k < 2; ++k) {
      for (T* m : {w.stress.mx[k], w.v.mx[k]})
        for (int64_t n = 0; n < along_x(); ++n) m[n] *= memories;
      for (T* m : {w.stress.my[k], w.v.my[k]})
        for (int64_t n = 0; n < along_y(); ++n) m[n] *= memories;
    }
  }

  void add_pieces(std::initializer_list<T*> fields, std::vector<Piece<T>>& list) const {
    for (T* field : fields) {
      list.push_back({field, 0, 0, tile_.ny});
      list.push_back({field, 1, 0, tile_.nx});
    }
  }

  // The stresses of a row of the middle are computed as soon as the velocities around it are there,
  // while they are in the cache. Forces are added to the velocities between the phases.
  bool fused(Mode mode) const {
    return setup_.threads == 1 && (mode == Mode::kAdjoint || source() == kPressure);
  }
  // The last rows' stresses are left for the second phase, to be computed while its messages travel.
  int64_t fused_end() const {
    const Box& b = middle_;
    return b == Box{0, tile_.nx, 0, tile_.ny} ? b.i1 : b.i1 - (b.i1 - b.i0) / 8;
  }
  void both_phases(Mode mode, const Box& b, Wave& w) const {
    constexpr int64_t r = elastic::kReach;
    const int64_t end = fused_end();
    for (int64_t i = b.i0; i < b.i1 + r; ++i) {
      if (i < b.i1) rows(0, mode, b, i, i + 1, w);
      const int64_t k = i - r;
      if (k < b.i0 || k >= end) continue;
      mode == Mode::kAdjoint ? deform_back(k, b, w) : deform_row(k, b, w, mode, w.v, w.next);
    }
  }

  // One phase of rows of a box.
  void rows(int phase, Mode mode, const Box& b, int64_t first, int64_t last, Wave& w) const {
    for (int64_t i = first; i < last; ++i) {
      if (mode != Mode::kAdjoint) {
        phase == 0 ? accelerate_row(i, b, w, mode) : deform_row(i, b, w, mode, w.previous, w.v);
      } else if (phase == 1) {
        deform_back(i, b, w);
      } else {
        accelerate_back(i, b, w);
        if (fused(mode))
          recall_velocity(tile_, profile_, i, b.j0, b.j1, w.v, w.stress, w.by_velocity);
      }
    }
  }

  // A step backwards inside the layers: the stresses first.
  void undo(int phase, const Box& b, Wave& w) const {
    for (int64_t i = b.i0; i < b.i1; ++i)
      if (phase == 0)
        deform(tile_, back_, i, b.j0, b.j1, w.v.vx, w.v.vy, forward_, w.stress);
      else
        accelerate(tile_, back_, i, b.j0, b.j1, w.stress, forward_, w.v.vx, w.v.vy, w.next.vx,
                   w.next.vy);
  }

  void accelerate_row(int64_t i, const Box& b, Wave& w, Mode mode) const {
    remember_stress(tile_, weights_, profile_, i, b.j0, b.j1, w.stress);
    accelerate(tile_, weights_, i, b.j0, b.j1, w.stress, forward_, w.v.vx, w.v.vy, w.next.vx,
               w.next.vy);
    accelerate_in_layers(tile_, weights_, i, b.j0, b.j1, w.stress, forward_, w.next.vx, w.next.vy);
    if (mode == Mode::kBorn) {
      const int64_t o = tile_.at(i, 0), c = i * tile_.ny;
      for (int64_t j = b.j0; j < b.j1; ++j) {
        w.next.vx[o + j] += tangents_.bx[c + j] / forward_.bx[c + j] *
                            (after_.vx[o + j] - before_.vx[o + j]);
        w.next.vy[o + j] += tangents_.by[c + j] / forward_.by[c + j] *
                            (after_.vy[o + j] - before_.vy[o + j]);
      }
    }
  }

  void deform_row(int64_t i, const Box& b, Wave& w, Mode mode,
                  const elastic::Velocity<T>& previous, const elastic::Velocity<T>& v) const {
    remember_velocity(tile_, weights_, profile_, i, b.j0, b.j1, previous, v);
    deform(tile_, weights_, i, b.j0, b.j1, v.vx, v.vy, forward_, w.stress);
    deform_in_layers(tile_, weights_, i, b.j0, b.j1, v, forward_, w.stress);
    if (mode == Mode::kBorn) {
      deform(tile_, weights_, i, b.j0, b.j1, after_.vx, after_.vy, tangents_, w.stress);
      deform_in_layers(tile_, weights_, i, b.j0, b.j1, after_, tangents_, w.stress);
    }
  }

  void accelerate_back(int64_t i, const Box& b, Wave& w) const {
    correlate_deformation(tile_, weights_, i, b.j0, b.j1, w.stress, after_, gradient_);
    accelerate(tile_, back_, i, b.j0, b.j1, w.stress, adjoint_, w.v.vx, w.v.vy, w.v.vx, w.v.vy);
    accelerate_by_strips(tile_, back_, i, b.j0, b.j1, w.by_stress, adjoint_, w.v.vx, w.v.vy);
    correlate_acceleration(tile_, i, b.j0, b.j1, w.v, before_, after_, gradient_);
  }

  void deform_back(int64_t i, const Box& b, Wave& w) const {
    deform(tile_, back_, i, b.j0, b.j1, w.v.vx, w.v.vy, adjoint_, w.stress);
    deform_by_strips(tile_, back_, i, b.j0, b.j1, w.by_velocity, adjoint_, w.stress);
  }

  const Setup& setup_;
  const Tile& tile_;
  const Box middle_;
  const elastic::Weights<T> weights_, back_;
  const T area_;
  const Rim rim_;
  std::vector<T> profiles_[8];
  elastic::Profile<T> profile_;
  elastic::Parameters<T> forward_, adjoint_, tangents_;
  elastic::Gradient<T> gradient_;
  elastic::Velocity<T> before_, after_;  // of the step that the adjoint or the tangent is at
  Memory positive_, sums_;
};

}  // namespace mpigrad::waves
