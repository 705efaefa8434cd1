// Elastic waves on N axes, of order 2 R in space, for the time loop of propagate.h. A step has two phases, the
// velocities from the stresses, then the stresses from the velocities. Those of the adjoint do the same backwards in time. A run
// that is saved writes the velocities of each step, and the memories of their derivatives, directly into the
// history instead of the wave's own fields.
//
// Layers along an axis lie in the tiles at the boundary, further from the faces across this axis than the
// stencil reaches. So neighbours need no memories, and the adjoint's filter (elastic_rows.h) reads them
// on this tile only. Its memories are replaced by new ones in each step, because rows around read them.
#pragma once

#include "waves/elastic_loss.h"
#include "waves/propagate.h"
#include "waves/rim.h"

namespace mpigrad::waves {

template <class T, int N, int R>
class Elastic {
  using Shape = elastic::Shape<N>;
  using Layers = elastic::Layers;
  using Memories = elastic::Memories<T, N>;
  using Motion = elastic::Motion<T, N>;
  using Stress = elastic::Stress<T, N>;
  using Parameters = elastic::Parameters<const T, N>;
  using Weights = elastic::Weights<T, N, R>;
  using Row = elastic::Row;
  using Slopes = elastic::Slopes<T, N, R>;
  using Loss = elastic::Loss<T, N, R>;
  static constexpr int kLast = Shape::kLast, kPairs = Shape::kPairs, kStresses = Shape::kStresses;
  static constexpr int kModuli = Loss::kModuli, kNormal = Slopes::kNormal;

 public:
  using Value = T;
  static constexpr int kPhases = 2;
  // With attenuation, the loss of each modulus, and the memories of the mechanisms.
  static int models(const Setup& setup) { return Parameters::kCount + (setup.mechanisms ? kModuli : 0); }
  static int fields(const Setup& setup) { return 2 * N + kStresses + (setup.mechanisms > 0); }
  static constexpr bool kHistoryIsState = true;
  enum Kind : int64_t { kPressure, kVx, kVy, kVz };  // field that a source drives or a receiver records

  struct Wave {
    Memory first;  // the initial velocities, if steps in place have changed them
    Motion v, next, previous;
    std::array<Field<T>, kStresses> fields;
    Stress stress;
    Memory memories, others;
    Memories memory;
    elastic::Strains<T, N> strains;  // of attenuation
    // Of the adjoint: the next memories of the stresses' derivatives, and of the velocities'.
    Memories next_memory, next_motion;
    // Velocities that the force of a step has changed in a history, and their values before.
    std::vector<std::pair<T*, T>> driven;
    // The adjoint's receivers add these when the stresses have been computed from the velocities.
    std::vector<std::pair<T*, T>> late;
  };

  explicit Elastic(const Setup& setup)
      : setup_(setup),
        tile_(setup.tile),
        middle_(tile_.core(1)),
        slopes_(setup),
        share_(static_cast<T>(1 / std::abs(setup.spacing[0] * setup.spacing[1] * setup.spacing[2]))),
        rim_(tile_, tile_.layers, R),
        loss_(setup, slopes_) {}

  // ---- the model: lambda + 2 mu / N and mu at the cells, mu between four of them, 1/rho between two ----

  std::vector<double> extremes(const Arrays<const T>&) const { return {}; }
  std::string fault(const double*) const { return ""; }  // Python checks the model

  void load(const Arrays<const T>& models) {
    forward_ = parameters(models);
    // The adjoint divides by the moduli. In a fluid it uses a tiny mu, which does not affect other cells.
    divisors_ = Memory(loss_.divisors() * sizeof(T));
    T* const divisors = static_cast<T*>(divisors_.data());
    loss_.load(models, sizeof(T) == 8 ? T(1e-24) : T(1e-12), divisors);
    Arrays<const T> adjoint = models;
    for (int k = 0; k < kModuli; ++k) adjoint[k] = divisors + k * cells();
    adjoint_ = parameters(adjoint);
    const int64_t values = models.size() * cells();
    sums_ = Memory(values * sizeof(T));
    T* sum = static_cast<T*>(sums_.data());
    std::fill_n(sum, values, T(0));
    const auto next = [&] { return std::exchange(sum, sum + cells()); };
    gradient_ = elastic::Parameters<T, N>(next);
    if (loss_.acts()) loss_.load_gradient(next);
  }

  void load_tangents(const Arrays<const T>& t) {
    tangents_ = parameters(t);
    loss_.load_tangents(t);
  }

  void gradient(const Arrays<T>& models) const {
    const auto& [bulk, shear, shears, buoyancy] = adjoint_;
    each_cell([&](int64_t, int64_t c, int64_t depth) {
      const auto weight = [&](int field) { return slopes_.weight(field, depth); };
      const auto moduli = [&, &bulk = bulk, &shear = shear, &shears = shears](
                              const elastic::Parameters<T, N>& sums, int first) {
        models[first][c] = weight(kNormal) * sums.bulk[c] / bulk[c];
        models[first + 1][c] = weight(kNormal) * sums.shear[c] / shear[c];
        for (int k = 0; k < kPairs; ++k)
          models[first + 2 + k][c] = weight(N + k) * sums.shears[k][c] / shears[k][c];
      };
      moduli(gradient_, 0);
      if (loss_.acts()) moduli(loss_.gradient(), Parameters::kCount);
      for (int b = 0; b < N; ++b)
        models[2 + kPairs + b][c] = weight(b) * gradient_.buoyancy[b][c] / buoyancy[b][c] / buoyancy[b][c];
    });
  }

  // ---- the state: velocities, stresses, the memories along each axis, and those of attenuation ----

  std::vector<int64_t> state_sizes() const {
    std::vector<int64_t> sizes(N + kStresses, cells());
    for (int axis = 0; axis < N; ++axis) sizes.push_back(2 * N * slopes_.layers(axis).size(tile_));
    if (loss_.acts()) sizes.push_back(loss_.values());
    return sizes;
  }

  Wave wave() const {
    Wave w;
    w.first = Memory(history_size() * sizeof(T));
    for (int k = 0; k < kStresses; ++k) w.stress[k] = w.fields[k] = Field<T>(tile_);
    w.memories = Memory(slopes_.memory_size() * sizeof(T));
    w.memory = slopes_.memories(static_cast<T*>(w.memories.data()));
    loss_.make(w.strains);
    return w;
  }

  void begin(Wave& w, const Arrays<const T>& state, int64_t shot) const {
    std::memset(w.first.data(), 0, w.first.bytes());
    std::memset(w.memories.data(), 0, w.memories.bytes());
    for (Field<T>& field : w.fields) field.clear();
    w.memory = slopes_.memories(static_cast<T*>(w.memories.data()));
    w.v = w.next = slot(static_cast<T*>(w.first.data()));
    loss_.clear(w.strains);
    if (!state.empty()) transfer<true>(w, state, shot);
  }

  void end(const Wave& w, const Arrays<T>& state, int64_t shot) const {
    transfer<false>(w, state, shot);
  }

  void begin_adjoint(Wave& w, const Arrays<const T>& cotangents, int64_t shot) const {
    begin(w, cotangents, shot);
    w.others = Memory(2 * slopes_.memory_size() * sizeof(T));
    std::memset(w.others.data(), 0, w.others.bytes());
    w.next_memory = slopes_.memories(static_cast<T*>(w.others.data()));
    w.next_motion = slopes_.memories(static_cast<T*>(w.others.data()) + slopes_.memory_size());
    const Parameters& k = adjoint_;
    each_cell([&](int64_t o, int64_t c, int64_t depth) {
      for (int b = 0; b < N; ++b) w.v.v[b][o] *= k.buoyancy[b][c] / slopes_.weight(b, depth);
      for (int b = 0; b < kPairs; ++b) w.stress[N + b][o] *= k.shears[b][c] / slopes_.weight(N + b, depth);
      const T x = w.stress[0][o], z = w.stress[kLast][o], trace = elastic::total<N>(x, w.stress[1][o], z);
      const T share = 1 / slopes_.weight(kNormal, depth), shear = 2 * k.shear[c] * share;
      w.stress[0][o] = k.bulk[c] * share * trace;
      w.stress[1][o] = shear * (x - trace / N);
      if (N == 3) w.stress[2][o] = shear * (z - trace / N);
    });
    each_memory(w, [&](T& value, int b, int64_t depth) { value /= slopes_.weights().dt * slopes_.weight(b, depth); });
    if (loss_.acts()) loss_.begin_adjoint(w.strains, w.stress);
  }

  void end_adjoint(Wave& w, const Arrays<const T>& state, const Arrays<T>& cotangents, int64_t shot) const {
    if (cotangents.empty()) return;
    if (loss_.acts()) loss_.end_adjoint(w.strains, state.back() + shot * loss_.values(), w.stress);
    const Parameters& k = adjoint_;
    each_cell([&](int64_t o, int64_t c, int64_t depth) {
      for (int b = 0; b < N; ++b) w.v.v[b][o] /= k.buoyancy[b][c] / slopes_.weight(b, depth);
      for (int b = 0; b < kPairs; ++b) w.stress[N + b][o] /= k.shears[b][c] / slopes_.weight(N + b, depth);
      const T share = 1 / slopes_.weight(kNormal, depth), shear = 2 * k.shear[c] * share;
      const T mean = w.stress[0][o] / (k.bulk[c] * share) / N;
      const T x = w.stress[1][o] / shear, z = N == 3 ? w.stress[kLast][o] / shear : T(0);
      w.stress[0][o] = mean + x, w.stress[1][o] = mean - (x + z);
      if (N == 3) w.stress[2][o] = mean + z;
    });
    each_memory(w, [&](T& value, int b, int64_t depth) { value *= slopes_.weights().dt * slopes_.weight(b, depth); });
    end(w, cotangents, shot);
  }

  // ---- a step ----

  int64_t depth() const { return 1; }
  int64_t history_size() const { return (N * motion_pitch() + slopes_.memory_size() + 15) / 16 * 16; }

  // The history of a step that would have ended with the initial wave.
  T* first(Wave& w) const { return static_cast<T*>(w.first.data()); }

  // Before a phase: `history` is that of the step, `before` that of the step before it.
  void prepare(int phase, Mode mode, Wave& w, T* history, T* before) {
    if (phase == 0) w.next = w.v;
    if (phase == 0 && mode == Mode::kSave) {
      w.next = slot(history);
      for (T* field : w.next.v) clear_margin(field);
    }
    if (mode == Mode::kReverse && phase == 0) transfer_stress<true>(w.stress, before);
    if (mode == Mode::kReverse && phase == 1) {
      w.next = slot(history);
      for (T* field : w.next.v) clear_margin(field), clear_columns(field);
      transfer_motion<true>(w.next, before);
    }
    if (mode == Mode::kAdjoint || mode == Mode::kBorn) {
      after_ = slot(history);
      before_ = slot(before);
    }
  }

  void update(int phase, Mode mode, const Box& box, Wave& w, T*) const {
    if (mode == Mode::kReverse) return undo(phase, rim_.part(box), w);
    if (!fused() || !(box == middle_)) return rows(phase, mode, box, box.i0, box.i1, w);
    phase == 0 ? both_phases(mode, w) : rows(1, mode, box, fused_end(), box.i1, w);
  }

  void finish(int phase, Mode mode, Wave& w) const {
    if (phase == 0 || mode == Mode::kReverse) {
      for (; !w.driven.empty(); w.driven.pop_back()) *w.driven.back().first = w.driven.back().second;
      w.previous = w.v;
      w.v = w.next;
      if (mode == Mode::kAdjoint) std::swap(w.v.memory, w.next_motion);
    } else {
      for (const auto& [velocity, value] : w.late) *velocity += value;
      w.late.clear();
      if (mode == Mode::kAdjoint) std::swap(w.memory, w.next_memory);
    }
  }

  void pieces(int phase, Mode mode, const Wave& w, std::vector<Piece<T>>& list) const {
    if ((phase == 0) != (mode == Mode::kReverse))
      for (int axis = 0; axis < N; ++axis)
        for (T* field : w.next.v) add_piece(field, axis, list);
    else
      add_stresses(mode == Mode::kAdjoint, w, list);
  }
  void all_pieces(const Wave& w, std::vector<Piece<T>>& list) const {
    for (int axis = 0; axis < N; ++axis) {
      for (T* field : w.v.v) add_piece(field, axis, list);
      for (T* field : w.stress) add_piece(field, axis, list);
    }
  }

  // ---- boundary saving: before each step the stresses around the inside, the velocities outside ----

  int64_t rim_size() const { return kStresses * rim_.ring_cells + N * rim_.outside_cells + slopes_.memory_size(); }
  void keep_before(const Wave& w, T* rim) const {
    transfer_motion<false>(w.v, rim);
    transfer_stress<false>(w.stress, rim);
  }
  void keep_after(T*, T*) const {}
  void turn(Wave&) const {}

  // ---- points ----

  // The phase of the adjoint before which the sources' cotangents are read.
  int source_phase() const { return source() == kPressure ? 0 : 1; }

  // Forces change the old velocities, which a step adds to the new ones: so the stresses of a row can be
  // computed before all velocities are there.
  bool injects_first(int phase, Mode mode) const {
    return phase == 0 && mode != Mode::kAdjoint && mode != Mode::kReverse && source() != kPressure;
  }

  void inject(int phase, Mode mode, const PointTable::Entry& e, Wave& w, T value, T*) const {
    const int64_t c = model_row(e.i, e.m) + e.j;
    const bool adjoint = mode == Mode::kAdjoint;
    const Kind kind = adjoint ? receiver(e.point) : source();
    value /= slopes_.weight(kind == kPressure ? kNormal : static_cast<int>(kind) - 1, slopes_.depth(e.i, e.m, e.j));
    if (adjoint) {
      if (phase == 0) return;
      if (kind == kPressure) {
        w.stress[0][e.cell] -= adjoint_.bulk[c] * value;
        if (loss_.acts()) w.strains.plain[0][e.cell] -= adjoint_.bulk[c] * value;
      } else
        w.late.emplace_back(w.v.v[kind - 1] + e.cell, adjoint_.buoyancy[kind - 1][c] * value);
      return;
    }
    const T drive = slopes_.weights().dt * share_ * value;
    if (mode == Mode::kReverse) {
      if (phase != (source() == kPressure ? 0 : 1) || !rim_.has(e.i, e.j, e.m)) return;  // the rim has it
      const int b = static_cast<int>(source()) - 1;
      if (phase == 1)
        w.next.v[b][e.cell] -= forward_.buoyancy[b][c] * drive;
      else
        for (int k = 0; k < N; ++k) w.stress[k][e.cell] -= drive;
      return;
    }
    if (phase == 0 && source() != kPressure) {
      const int b = static_cast<int>(source()) - 1;
      T* velocity = w.v.v[b] + e.cell;
      if (mode == Mode::kSave) w.driven.emplace_back(velocity, *velocity);
      *velocity += forward_.buoyancy[b][c] * drive;
    } else if (phase == 1 && source() == kPressure) {
      for (int k = 0; k < N; ++k) w.stress[k][e.cell] += drive;
    }
  }

  T sample(Mode mode, const PointTable::Entry& e, const Wave& w) const {
    const bool adjoint = mode == Mode::kAdjoint;
    const Kind kind = adjoint ? source() : receiver(e.point);
    const auto of = [&](int k) { return w.stress[k][e.cell]; };
    T value;
    if (kind != kPressure)
      value = w.v.v[kind - 1][e.cell];
    else if (adjoint)
      value = (loss_.acts() ? w.strains.plain[0][e.cell] : of(0)) / adjoint_.bulk[model_row(e.i, e.m) + e.j];
    else
      value = -elastic::total<N>(of(0), of(1), of(kLast)) / N;
    return static_cast<T>(e.weight) * value * (adjoint ? slopes_.weights().dt * share_ : T(1));
  }

 private:
  int64_t cells() const { return tile_.nx * tile_.nm * tile_.ny; }
  int64_t model_row(int64_t i, int64_t m) const { return (i * tile_.nm + m) * tile_.ny; }

  Kind source() const { return static_cast<Kind>(setup_.source_kind); }
  Kind receiver(int64_t point) const {
    return static_cast<Kind>(setup_.component_kinds[point / setup_.receivers]);
  }

  static Parameters parameters(const Arrays<const T>& models) {
    return Parameters([model = models.begin()]() mutable { return *model++; });
  }
  // f(offset in a field, index in an array without margins, depth) for each cell
  template <class F>
  void each_cell(const F& f) const {
    for (int64_t i = 0; i < tile_.nx; ++i)
      for (int64_t m = 0; m < tile_.nm; ++m)
        for (int64_t j = 0; j < tile_.ny; ++j) f(tile_.at(i, m, j), model_row(i, m) + j, slopes_.depth(i, m, j));
  }
  // f(memory, its component, depth) for each cell of each layer, in the order of the state's array of an axis.
  template <class F>
  void each_memory(const Wave& w, int axis, const F& f) const {
    for (const Memories* of : {&w.memory, &w.v.memory})
      for (int k = 0; k < N; ++k) {
        T* memory = (*of)[axis][k];
        slopes_.layers(axis).each_cell(tile_, [&, b = elastic::component_of(axis, k)](int64_t place, auto... at) {
          f(memory[place], b, slopes_.depth(at...));
        });
      }
  }
  template <class F>
  void each_memory(const Wave& w, const F& f) const {
    for (int axis = 0; axis < N; ++axis) each_memory(w, axis, f);
  }

  int64_t motion_pitch() const { return (tile_.padded() + 15) / 16 * 16 + Slopes::kShift; }
  // Velocities and their memories in a piece of a history.
  Motion slot(T* data) const {
    Motion motion;
    if (!data) return motion;
    for (T*& v : motion.v) v = std::exchange(data, data + motion_pitch()) + tile_.origin();
    motion.memory = slopes_.memories(data);
    return motion;
  }

  // Rows beyond the ends of x and y. update clears the cells beyond the ends of each row.
  void clear_margin(T* field) const {
    const auto clear = [&](int64_t i, int64_t m) { std::fill_n(field + tile_.at(i, m, 0), tile_.ny, T(0)); };
    for (int64_t k = 0; k < R; ++k) {
      for (int64_t m = 0; m < tile_.nm; ++m) clear(-1 - k, m), clear(tile_.nx + k, m);
      for (int64_t i = 0; N == 3 && i < tile_.nx; ++i) clear(i, -1 - k), clear(i, tile_.nm + k);
    }
  }
  void clear_columns(T* field) const {
    for (int64_t i = 0; i < tile_.nx; ++i)
      for (int64_t m = 0; m < tile_.nm; ++m) {
        std::fill_n(field + tile_.at(i, m, -R), R, T(0));
        std::fill_n(field + tile_.at(i, m, tile_.ny), R, T(0));
      }
  }
  void clear_ends(const Row& r, const Motion& v) const {
    for (T* field : v.v) {
      if (r.j0 == 0) std::fill_n(field + r.o - R, R, T(0));
      if (r.j1 == tile_.ny) std::fill_n(field + r.o + tile_.ny, R, T(0));
    }
  }

  // Between a wave and a state's arrays.
  template <bool kIn, class Array>
  void transfer(const Wave& w, const Array& state, int64_t shot) const {
    const std::vector<int64_t> sizes = state_sizes();
    const auto copy = [](T* here, auto* there, int64_t n) {
      if constexpr (kIn)
        std::memcpy(here, there, n * sizeof(T));
      else
        std::memcpy(there, here, n * sizeof(T));
    };
    for (int k = 0; k < N + kStresses; ++k) {
      T* field = k < N ? w.v.v[k] : w.stress[k - N];
      auto* array = state[k] + shot * sizes[k];
      for (int64_t i = 0; i < tile_.nx; ++i)
        for (int64_t m = 0; m < tile_.nm; ++m)
          copy(field + tile_.at(i, m, 0), array + model_row(i, m), tile_.ny);
    }
    for (int axis = 0; axis < N; ++axis) {
      const int k = N + kStresses + axis;
      auto* value = state[k] + shot * sizes[k];
      each_memory(w, axis, [&](T& memory, auto...) { copy(&memory, value++, 1); });
    }
    if (loss_.acts()) loss_.template transfer<kIn>(w.strains, state.back() + shot * sizes.back());
  }

  // Between fields and a rim: the velocities' memories, which follow each other, velocities, stresses.
  template <bool kIn>
  void transfer_motion(const Motion& motion, T* rim) const {
    T* memories = motion.memory[0][0];
    std::memcpy(kIn ? memories : rim, kIn ? rim : memories, slopes_.memory_size() * sizeof(T));
    rim += slopes_.memory_size();
    for (T* field : motion.v) rim = transfer_boxes<kIn>(tile_, rim_.outside, field, rim);
  }
  template <bool kIn>
  void transfer_stress(const Stress& stress, T* rim) const {
    rim += slopes_.memory_size() + N * rim_.outside_cells;
    for (T* field : stress) rim = transfer_boxes<kIn>(tile_, rim_.ring, field, rim);
  }

  void add_piece(T* field, int axis, std::vector<Piece<T>>& list) const {
    const std::array<int64_t, 3> n{tile_.nx, tile_.ny, tile_.nm};
    // As in Piece: first the columns (across columns the rows), then the third axis.
    const Axis of = Shape::axis(axis);
    const int a = of == kColumns ? kRows : kColumns, b = 3 - of - a;
    list.push_back({field, of, 0, n[a], 0, n[b]});
  }
  // Across an axis, the stresses that are differentiated along it.
  void add_stresses(bool adjoint, const Wave& w, std::vector<Piece<T>>& list) const {
    for (int axis = 0; axis < N; ++axis) {
      for (int b = 0; b < N; ++b)
        if (b != axis) add_piece(w.stress[elastic::stress_of<N>(axis, b)], axis, list);
      if (!adjoint) {
        add_piece(w.stress[axis], axis, list);
      } else {
        add_piece(w.stress[0], axis, list);
        if (N == 2 || axis != 2) add_piece(w.stress[1], axis, list);
        if (N == 3 && axis != 0) add_piece(w.stress[2], axis, list);
      }
    }
  }

  // ---- rows ----

  // The stresses of a plane of the middle are computed as soon as the velocities around it are there,
  // while they are in the cache.
  bool fused() const { return setup_.threads == 1; }
  // The last rows' stresses are left for the second phase, to be computed while its messages travel.
  int64_t fused_end() const {
    const Box& b = middle_;
    const bool alone = b == Box{0, tile_.nx, 0, tile_.ny, 0, tile_.nm};
    return alone ? b.i1 : b.i1 - (b.i1 - b.i0) / 8;
  }
  void both_phases(Mode mode, Wave& w) const {
    const Box& b = middle_;
    const int64_t end = fused_end(), lag = slopes_.lag();
    for (int64_t i = b.i0; i < std::max(b.i1, end + lag); ++i) {
      if (i < b.i1) rows(0, mode, b, i, i + 1, w);
      const int64_t k = i - lag;
      if (k < b.i0 || k >= end) continue;
      for (int64_t m = b.m0; m < b.m1; ++m)
        deform(slopes_.row(k, m, b.j0, b.j1), mode, w, w.v, w.next);
    }
  }

  // One phase of rows of a box.
  void rows(int phase, Mode mode, const Box& b, int64_t first, int64_t last, Wave& w) const {
    for (int64_t i = first; i < last; ++i)
      for (int64_t m = b.m0; m < b.m1; ++m) {
        const Row row = slopes_.row(i, m, b.j0, b.j1);
        phase == 0 ? accelerate(row, mode, w) : deform(row, mode, w, w.previous, w.v);
      }
  }

  // A step backwards inside of the layers: the stresses first.
  void undo(int phase, const Box& b, Wave& w) const {
    for (int64_t i = b.i0; i < b.i1; ++i)
      for (int64_t m = b.m0; m < b.m1; ++m) {
        const Row row = slopes_.row(i, m, b.j0, b.j1);
        if (phase == 0)
          deform<Layers::kNone>(row, slopes_.back(), w.v, w.memory, w.memory, forward_, w.stress);
        else
          forces<Layers::kNone>(row, w);
      }
  }

  // The velocities of a row.
  void accelerate(const Row& r, Mode mode, Wave& w) const {
    if (mode == Mode::kAdjoint) {
      loss_.acts() ? loss_.correlate(r, after_, w.strains, gradient_) : correlate_deformation(r, w.stress);
      forces<Layers::kBack>(r, w);
      correlate_acceleration(r, w.next);
    } else {
      forces<Layers::kStep>(r, w);
      if (mode == Mode::kBorn) change_buoyancies(r, w.next);
      if (mode == Mode::kSave) clear_ends(r, w.next);
    }
  }

  // The stresses of a row. `previous` has the velocities' memories before the step.
  void deform(const Row& r, Mode mode, Wave& w, const Motion& previous, const Motion& v) const {
    if (loss_.acts()) {
      if (mode == Mode::kAdjoint) {
        loss_.step_back(r, w.strains);
        deform<Layers::kBack>(r, slopes_.back(), v, w.memory, w.next_memory, adjoint_, w.strains.plain);
        return loss_.filter(r, w.strains, w.stress);
      }
      loss_.deform(r, v, previous.memory, v.memory, forward_, w.strains, w.stress, mode == Mode::kSave);
      if (mode == Mode::kBorn) loss_.change(r, after_, tangents_, w.stress);
      return;
    }
    if (mode == Mode::kAdjoint) {
      deform<Layers::kBack>(r, slopes_.back(), v, w.memory, w.next_memory, adjoint_, w.stress);
      return;
    }
    deform<Layers::kStep>(r, slopes_.weights(), v, previous.memory, v.memory, forward_, w.stress);
    if (mode == Mode::kBorn) loss_.change(r, after_, tangents_, w.stress);
  }

  template <Layers L>
  void forces(const Row& r, Wave& w) const {
    force<0, L>(r, w), force<1, L>(r, w);
    if constexpr (N == 3) force<2, L>(r, w);
  }
  // v_B += b (sum of the derivatives of its stresses). The adjoint's memories are the velocities'.
  template <int B, Layers L>
  void force(const Row& r, Wave& w) const {
    constexpr bool kBack = L == Layers::kBack;
    const Memories& from = kBack ? w.v.memory : w.memory;
    const Memories& to = kBack ? w.next_motion : w.memory;
    const T* buoyancy = (kBack ? adjoint_ : forward_).buoyancy[B] + r.c;
    const T* v = w.v.v[B] + r.o;
    T* next = w.next.v[B] + r.o;
    const Weights& k = L == Layers::kStep ? slopes_.weights() : slopes_.back();
    const Stress s = at(w.stress, r.o);
    const int64_t plane = tile_.plane, stride = tile_.stride;
    slopes_.prefetch(r, {s[elastic::stress_of<N>(0, B)] + (B == 0 ? R : R - 1) * plane + stride, v + stride,
                 buoyancy + tile_.ny});
    if (N == 3 && B == 1) slopes_.prefetch(r, {s[1] + (R + 1) * stride});
    if (N == 3 && B == 2) slopes_.prefetch(r, {s[2] + stride, s[kStresses - 1] + R * stride});
    const auto x = elastic::stress_at<N, 0, B, kBack, T>(s);
    const auto y = elastic::stress_at<N, 1, B, kBack, T>(s);  // on three axes
    const auto z = elastic::stress_at<N, kLast, B, kBack, T>(s);
    slopes_.template with_layers<L>(r, [&](auto of_x, auto of_y) {
      constexpr Layers kX = decltype(of_x)::value, kY = decltype(of_y)::value;
      const auto rx = slopes_.template row_layers<kX>(0, B, !kBack, r, from, to);
      const auto ry = slopes_.template row_layers<kY>(1, B, !kBack, r, from, to);
      const T dt = k.dt;
      const auto cx = k.of[0], cy = k.of[1], cz = k.of[kLast];
#pragma omp simd
      for (int64_t j = r.j0; j < r.j1; ++j) {
        const T gx = elastic::slope<kX, B == 0>(x, j, plane, cx, dt, rx);
        T gy = 0;
        if constexpr (N == 3) gy = elastic::slope<kY, B == 1>(y, j, stride, cy, dt, ry);
        const T gz = elastic::difference<B == kLast>(
            cz, [&](int n) __attribute__((always_inline)) { return z(j + n); });
        next[j] = v[j] + buoyancy[j] * elastic::total<N>(gx, gy, gz);
      }
    });
    const auto add = [=](int64_t j, T g) __attribute__((always_inline)) { next[j] += buoyancy[j] * g; };
    slopes_.template at_ends<L, B == kLast>(r, B, !kBack, from, to, k, z, add);
    slopes_.template at_surface<0>(r, B == 0, k, x, add), slopes_.template at_surface<kLast>(r, B == kLast, k, z, add);
    if constexpr (N == 3) slopes_.template at_surface<1>(r, B == 1, k, y, add);
  }

  // The stresses from velocities, by Hooke's law with `c`.
  template <Layers L>
  void deform(const Row& r, const Weights& k, const Motion& v, const Memories& from, const Memories& to,
              const Parameters& c, const Stress& stress) const {
    const T *bulk = c.bulk + r.c, *shear = c.shear + r.c;
    T *n0 = stress[0] + r.o, *n1 = stress[1] + r.o, *n2 = stress[kLast] + r.o;
    const int64_t ny = tile_.ny;
    slopes_.prefetch(r, {bulk + ny, shear + ny});
    slopes_.template stretch<L>(r, k, v, from, to, [=](int64_t j, T x, T y, T z) __attribute__((always_inline)) {
      const T trace = elastic::total<N>(x, y, z), mu = 2 * shear[j], mean = trace * T(1. / N);
      if constexpr (L == Layers::kBack) {
        n0[j] += bulk[j] * trace;
        n1[j] += mu * (x - mean);
        if constexpr (N == 3) n2[j] += mu * (z - mean);
      } else {
        const T all = bulk[j] * trace;
        n0[j] += all + mu * (x - mean);
        if constexpr (N == 3) n1[j] += all + mu * (y - mean);
        n2[j] += all + mu * (z - mean);
      }
    });
    for (const T* mu : c.shears) slopes_.prefetch(r, {mu + r.c + ny});
    slopes_.template slides<L>(r, k, v, from, to, [&](int pair) {
      return multiply(c.shears[pair] + r.c, stress[N + pair] + r.o);
    });
  }
  static auto multiply(const T* factor, T* sum) {
    return [=](int64_t j, T g) __attribute__((always_inline)) { sum[j] += factor[j] * g; };
  }

  // The moduli's part of the gradient: cotangents after the step, velocities of the step.
  void correlate_deformation(const Row& r, const Stress& stress) const {
    const Memories& m = after_.memory;
    const T *p = stress[0] + r.o, *dx = stress[1] + r.o, *dz = stress[kLast] + r.o;
    T *bulk = gradient_.bulk + r.c, *shear = gradient_.shear + r.c;
    const int64_t ahead = R * tile_.plane + tile_.stride, n = tile_.ny;
    slopes_.prefetch(r, {bulk + n, shear + n});
    for (const T* v : after_.v) slopes_.prefetch(r, {v + r.o + ahead});
    for (const T* mu : gradient_.shears) slopes_.prefetch(r, {mu + r.c + n});
    slopes_.template stretch<Layers::kRead>(
        r, slopes_.weights(), after_, m, m, [=](int64_t j, T x, T y, T z) __attribute__((always_inline)) {
          bulk[j] += p[j] * elastic::total<N>(x, y, z);
          shear[j] += N == 3 ? dx[j] * (x - y) + dz[j] * (z - y) : dx[j] * (x - z);
        });
    slopes_.template slides<Layers::kRead>(r, slopes_.weights(), after_, m, m, [&](int pair) {
      return multiply(stress[N + pair] + r.o, gradient_.shears[pair] + r.c);
    });
  }

  // The buoyancies' part: cotangents after this step's adjoint acceleration.
  void correlate_acceleration(const Row& r, const Motion& adjoint) const {
    for (int b = 0; b < N; ++b) {
      const T *a = adjoint.v[b] + r.o, *before = before_.v[b] + r.o, *after = after_.v[b] + r.o;
      T* sum = gradient_.buoyancy[b] + r.c;
      slopes_.prefetch(r, {sum + tile_.ny, before + tile_.stride});
#pragma omp simd
      for (int64_t j = r.j0; j < r.j1; ++j) sum[j] += a[j] * (after[j] - before[j]);
    }
  }
  // A tangent's velocities, from the buoyancies' tangents.
  void change_buoyancies(const Row& r, const Motion& v) const {
    for (int b = 0; b < N; ++b) {
      const T *k = forward_.buoyancy[b] + r.c, *change = tangents_.buoyancy[b] + r.c;
      const T *before = before_.v[b] + r.o, *after = after_.v[b] + r.o;
      T* next = v.v[b] + r.o;
#pragma omp simd
      for (int64_t j = r.j0; j < r.j1; ++j) next[j] += change[j] / k[j] * (after[j] - before[j]);
    }
  }

  static Stress at(Stress fields, int64_t offset) {
    for (T*& field : fields) field += offset;
    return fields;
  }
  const Setup& setup_;
  const Tile& tile_;
  const Box middle_;
  const Slopes slopes_;
  const T share_;  // of a source in its cell
  const Rim rim_;
  Loss loss_;
  Parameters forward_, adjoint_, tangents_;
  elastic::Parameters<T, N> gradient_;
  Motion before_, after_;  // of the step that the adjoint or the tangent is at
  Memory divisors_, sums_;
};

}  // namespace mpigrad::waves
