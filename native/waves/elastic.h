// Elastic waves on N axes for the time loop of propagate.h. A step has two phases, the velocities from the
// stresses, then the stresses from the velocities. Those of the adjoint do the same backwards in time. A run
// that is saved writes the velocities of each step, and the memories of their derivatives, directly into the
// history instead of the wave's own fields.
//
// Layers along an axis lie in the tiles at the boundary, further from the faces across this axis than the
// stencil reaches. So neighbours need no memories, and the adjoint's filter (elastic_rows.h) reads them
// on this tile only. Its memories are replaced by new ones in each step, because rows around read them.
#pragma once

#include "waves/elastic_rows.h"
#include "waves/propagate.h"
#include "waves/relaxation.h"
#include "waves/rim.h"

namespace mpigrad::waves {

template <class T, int N>
class Elastic {
  using Shape = elastic::Shape<N>;
  using Layers = elastic::Layers;
  using Memories = elastic::Memories<T, N>;
  using Motion = elastic::Motion<T, N>;
  using Stress = elastic::Stress<T, N>;
  using Parameters = elastic::Parameters<const T, N>;
  using Weights = elastic::Weights<T, N>;
  using Rows = elastic::Rows<T, Shape::kStresses>;
  static constexpr int kLast = Shape::kLast, kPairs = Shape::kPairs, kStresses = Shape::kStresses;
  static constexpr int kModuli = 2 + kPairs;
  static constexpr int64_t kReach = elastic::kReach;

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
    // Of attenuation: the memories of the strain rates. In the adjoint they are the filters f, `rest` is h, and
    // `plain` is a, where `stress` is t. (In a fluid a is tiny, and would be lost in differences of t and h.)
    Memory strains, rest;
    std::array<Field<T>, kStresses> plain_fields;
    Stress plain;
    T* strain() const { return static_cast<T*>(strains.data()); }
    T* decaying() const { return static_cast<T*>(rest.data()); }
    // Of the adjoint: the next memories of the stresses' derivatives, and of the velocities'.
    Memories next_memory, next_motion;
    // Velocities that the force of a step has changed in a history, and their values before.
    std::vector<std::pair<T*, T>> driven;
    // The adjoint's receivers add these when the stresses have been computed from the velocities.
    std::vector<std::pair<T*, T>> late;
  };

  // profiles: a and b at the centres, a and b half a cell further, along each axis, the constants of
  // attenuation, and the surface's table.
  explicit Elastic(const Setup& setup)
      : setup_(setup),
        tile_(setup.tile),
        middle_(tile_.core(1)),
        weights_(setup.dt, setup.spacing),
        back_(-setup.dt, setup.spacing),
        share_(static_cast<T>(1 / std::abs(setup.spacing[0] * setup.spacing[1] * setup.spacing[2]))),
        rim_(tile_, tile_.layers, kReach) {
    const std::array<int64_t, 3> cells{tile_.nx, tile_.ny, tile_.nm};
    for (int axis = 0; axis < N; ++axis) {
      const Axis of = Shape::axis(axis);
      layers_[axis] = AxisLayers(tile_, of, kReach);
      for (int half = 0; half < 2; ++half)
        profiles_[axis][half] = elastic::Profile<T>(
            setup.profiles[4 * axis + 2 * half], setup.profiles[4 * axis + 2 * half + 1], setup.dt,
            cells[of], tile_.layers[2 * of], tile_.layers[2 * of + 1]);
      memory_size_ += N * padded_memory(axis);
      // A tile without a neighbour behind it lies at the surface.
      if (setup.surface == of && tile_.neighbor[2 * of + 1] == kNobody)
        surface_ = elastic::Surface<T>(axis, setup.profiles.back(), setup.dt / setup.spacing[of]);
    }
    if (setup.mechanisms)
      relaxation_ = elastic::Relaxation<T, kStresses>(setup.profiles[4 * N], setup.mechanisms, tile_.nx * tile_.nm, tile_.ny);
  }

  // ---- the model: lambda + 2 mu / N and mu at the cells, mu between four of them, 1/rho between two ----

  std::vector<double> extremes(const Arrays<const T>&) const { return {}; }
  std::string fault(const double*) const { return ""; }  // Python checks the model

  void load(const Arrays<const T>& models) {
    forward_ = parameters(models), lost_ = losses(models);
    // The adjoint divides by the moduli. In a fluid it uses a tiny mu, which does not affect other cells.
    const T little = sizeof(T) == 8 ? T(1e-24) : T(1e-12);
    const bool relaxes = relaxation_.acts();
    divisors_ = Memory((relaxes ? 2 : 1) * kModuli * cells() * sizeof(T));
    Arrays<const T> adjoint = models;
    for (int k = 0; k < kModuli; ++k) {
      T *divisor = static_cast<T*>(divisors_.data()) + k * cells(), *ratio = divisor + kModuli * cells();
      adjoint[k] = divisor;
      for (int64_t c = 0; c < cells(); ++c) {
        const T loss = relaxes ? models[Parameters::kCount + k][c] : T(0);
        divisor[c] = models[k][c] - relaxation_.coupling() * loss;
        if (k > 0) divisor[c] = std::max(divisor[c], little * models[0][c]);
        if (relaxes) ratio[c] = loss / divisor[c];
      }
      ratio_[k] = ratio;
    }
    adjoint_ = parameters(adjoint);
    const int64_t values = models.size() * cells();
    sums_ = Memory(values * sizeof(T));
    T* sum = static_cast<T*>(sums_.data());
    std::fill_n(sum, values, T(0));
    const auto next = [&] { return std::exchange(sum, sum + cells()); };
    gradient_ = elastic::Parameters<T, N>(next);
    if (!relaxes) return;
    lost_gradient_.bulk = next(), lost_gradient_.shear = next();
    for (T*& mu : lost_gradient_.shears) mu = next();
  }

  void load_tangents(const Arrays<const T>& t) {
    tangents_ = parameters(t), lost_tangents_ = losses(t);
    if (relaxation_.acts()) means_ = Memory(kStresses * cells() * sizeof(T));
  }

  void gradient(const Arrays<T>& models) const {
    const auto& [bulk, shear, shears, buoyancy] = adjoint_;
    each_cell([&](int64_t, int64_t c, int64_t depth) {
      const auto moduli = [&, &bulk = bulk, &shear = shear, &shears = shears](
                              const elastic::Parameters<T, N>& sums, int first) {
        models[first][c] = weight(kNormal, depth) * sums.bulk[c] / bulk[c];
        models[first + 1][c] = weight(kNormal, depth) * sums.shear[c] / shear[c];
        for (int k = 0; k < kPairs; ++k)
          models[first + 2 + k][c] = weight(N + k, depth) * sums.shears[k][c] / shears[k][c];
      };
      moduli(gradient_, 0);
      if (relaxation_.acts()) moduli(lost_gradient_, Parameters::kCount);
      for (int b = 0; b < N; ++b)
        models[2 + kPairs + b][c] = weight(b, depth) * gradient_.buoyancy[b][c] / buoyancy[b][c] / buoyancy[b][c];
    });
  }

  // ---- the state: velocities, stresses, the memories along each axis, and those of attenuation ----

  std::vector<int64_t> state_sizes() const {
    std::vector<int64_t> sizes(N + kStresses, cells());
    for (const AxisLayers& layers : layers_) sizes.push_back(2 * N * layers.size(tile_));
    if (relaxation_.acts()) sizes.push_back(setup_.mechanisms * kStresses * cells());
    return sizes;
  }

  Wave wave() const {
    Wave w;
    w.first = Memory(history_size() * sizeof(T));
    for (int k = 0; k < kStresses; ++k) w.stress[k] = w.fields[k] = Field<T>(tile_);
    w.memories = Memory(memory_size_ * sizeof(T));
    w.memory = memories(static_cast<T*>(w.memories.data()));
    if (relaxation_.acts()) w.strains = Memory(relaxation_.size() * sizeof(T));
    return w;
  }

  void begin(Wave& w, const Arrays<const T>& state, int64_t shot) const {
    std::memset(w.first.data(), 0, w.first.bytes());
    std::memset(w.memories.data(), 0, w.memories.bytes());
    for (Field<T>& field : w.fields) field.clear();
    w.memory = memories(static_cast<T*>(w.memories.data()));
    w.v = w.next = slot(static_cast<T*>(w.first.data()));
    std::fill_n(w.strain(), relaxation_.size(), T(0));
    if (!state.empty()) transfer<true>(w, state, shot);
  }

  void end(const Wave& w, const Arrays<T>& state, int64_t shot) const {
    transfer<false>(w, state, shot);
  }

  void begin_adjoint(Wave& w, const Arrays<const T>& cotangents, int64_t shot) const {
    begin(w, cotangents, shot);
    w.others = Memory(2 * memory_size_ * sizeof(T));
    std::memset(w.others.data(), 0, w.others.bytes());
    w.next_memory = memories(static_cast<T*>(w.others.data()));
    w.next_motion = memories(static_cast<T*>(w.others.data()) + memory_size_);
    const Parameters& k = adjoint_;
    each_cell([&](int64_t o, int64_t c, int64_t depth) {
      for (int b = 0; b < N; ++b) w.v.v[b][o] *= k.buoyancy[b][c] / weight(b, depth);
      for (int b = 0; b < kPairs; ++b) w.stress[N + b][o] *= k.shears[b][c] / weight(N + b, depth);
      const T x = w.stress[0][o], z = w.stress[kLast][o], trace = sum(x, w.stress[1][o], z);
      const T share = 1 / weight(kNormal, depth), shear = 2 * k.shear[c] * share;
      w.stress[0][o] = k.bulk[c] * share * trace;
      w.stress[1][o] = shear * (x - trace / N);
      if (N == 3) w.stress[2][o] = shear * (z - trace / N);
    });
    each_memory(w, [&](T& value, int b, int64_t depth) { value /= weights_.dt * weight(b, depth); });
    if (relaxation_.acts()) begin_filters(w);
  }

  void end_adjoint(Wave& w, const Arrays<const T>& state, const Arrays<T>& cotangents, int64_t shot) const {
    if (cotangents.empty()) return;
    if (relaxation_.acts()) end_filters(w, state.back() + shot * state_sizes().back());
    const Parameters& k = adjoint_;
    each_cell([&](int64_t o, int64_t c, int64_t depth) {
      for (int b = 0; b < N; ++b) w.v.v[b][o] /= k.buoyancy[b][c] / weight(b, depth);
      for (int b = 0; b < kPairs; ++b) w.stress[N + b][o] /= k.shears[b][c] / weight(N + b, depth);
      const T share = 1 / weight(kNormal, depth), shear = 2 * k.shear[c] * share;
      const T mean = w.stress[0][o] / (k.bulk[c] * share) / N;
      const T x = w.stress[1][o] / shear, z = N == 3 ? w.stress[kLast][o] / shear : T(0);
      w.stress[0][o] = mean + x, w.stress[1][o] = mean - (x + z);
      if (N == 3) w.stress[2][o] = mean + z;
    });
    each_memory(w, [&](T& value, int b, int64_t depth) { value *= weights_.dt * weight(b, depth); });
    end(w, cotangents, shot);
  }

  // ---- a step ----

  int64_t depth() const { return 1; }
  int64_t history_size() const { return (N * motion_pitch() + memory_size_ + 15) / 16 * 16; }

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

  int64_t rim_size() const { return kStresses * rim_.ring_cells + N * rim_.outside_cells + memory_size_; }
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
    value /= weight(kind == kPressure ? kNormal : static_cast<int>(kind) - 1, depth(e.i, e.m, e.j));
    if (adjoint) {
      if (phase == 0) return;
      if (kind == kPressure) {
        w.stress[0][e.cell] -= adjoint_.bulk[c] * value;
        if (relaxation_.acts()) w.plain[0][e.cell] -= adjoint_.bulk[c] * value;
      } else
        w.late.emplace_back(w.v.v[kind - 1] + e.cell, adjoint_.buoyancy[kind - 1][c] * value);
      return;
    }
    const T drive = weights_.dt * share_ * value;
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
      value = (relaxation_.acts() ? w.plain[0][e.cell] : of(0)) / adjoint_.bulk[model_row(e.i, e.m) + e.j];
    else
      value = -sum(of(0), of(1), of(kLast)) / N;
    return static_cast<T>(e.weight) * value * (adjoint ? weights_.dt * share_ : T(1));
  }

 private:
  // Cells j0 to j1 of a row: where it begins in fields, and in arrays without margins, and its number.
  struct Row {
    int64_t i, m, j0, j1, o, c, number;
  };

  int64_t cells() const { return tile_.nx * tile_.nm * tile_.ny; }
  int64_t model_row(int64_t i, int64_t m) const { return (i * tile_.nm + m) * tile_.ny; }

  Kind source() const { return static_cast<Kind>(setup_.source_kind); }
  Kind receiver(int64_t point) const {
    return static_cast<Kind>(setup_.component_kinds[point / setup_.receivers]);
  }

  static Parameters parameters(const Arrays<const T>& models) {
    return Parameters([model = models.begin()]() mutable { return *model++; });
  }
  static Parameters losses(const Arrays<const T>& models) {
    Parameters loss;
    if (models.size() == Parameters::kCount) return loss;
    loss.bulk = models[Parameters::kCount], loss.shear = models[Parameters::kCount + 1];
    for (int k = 0; k < kPairs; ++k) loss.shears[k] = models[Parameters::kCount + 2 + k];
    return loss;
  }
  // Of values for each axis. On two axes `y` is not used, and z is the last one.
  MPIGRAD_INLINE static T sum(T x, T y, T z) { return N == 3 ? x + y + z : x + z; }

  // f(offset in a field, index in an array without margins, depth) for each cell
  template <class F>
  void each_cell(const F& f) const {
    for (int64_t i = 0; i < tile_.nx; ++i)
      for (int64_t m = 0; m < tile_.nm; ++m)
        for (int64_t j = 0; j < tile_.ny; ++j) f(tile_.at(i, m, j), model_row(i, m) + j, depth(i, m, j));
  }
  // f(memory, its component, depth) for each cell of each layer, in the order of the state's array of an axis.
  template <class F>
  void each_memory(const Wave& w, int axis, const F& f) const {
    for (const Memories* of : {&w.memory, &w.v.memory})
      for (int k = 0; k < N; ++k) {
        T* memory = (*of)[axis][k];
        layers_[axis].each_cell(tile_, [&, b = elastic::component_of(axis, k)](int64_t place, auto... at) {
          f(memory[place], b, depth(at...));
        });
      }
  }
  template <class F>
  void each_memory(const Wave& w, const F& f) const {
    for (int axis = 0; axis < N; ++axis) each_memory(w, axis, f);
  }

  // Fields and memories of a history begin some cache lines apart, as Field does.
  static constexpr int64_t kShift = 1088 / sizeof(T);
  int64_t motion_pitch() const { return (tile_.padded() + 15) / 16 * 16 + kShift; }
  int64_t padded_memory(int axis) const { return (layers_[axis].cells() + 15) / 16 * 16 + kShift; }

  Memories memories(T* data) const {
    Memories m{};
    for (int axis = 0; axis < N; ++axis)
      for (T*& memory : m[axis]) memory = std::exchange(data, data + padded_memory(axis));
    return m;
  }
  // Velocities and their memories in a piece of a history.
  Motion slot(T* data) const {
    Motion motion;
    if (!data) return motion;
    for (T*& v : motion.v) v = std::exchange(data, data + motion_pitch()) + tile_.origin();
    motion.memory = memories(data);
    return motion;
  }

  // Rows beyond the ends of x and y. update clears the cells beyond the ends of each row.
  void clear_margin(T* field) const {
    const auto clear = [&](int64_t i, int64_t m) { std::fill_n(field + tile_.at(i, m, 0), tile_.ny, T(0)); };
    for (int64_t k = 0; k < kReach; ++k) {
      for (int64_t m = 0; m < tile_.nm; ++m) clear(-1 - k, m), clear(tile_.nx + k, m);
      for (int64_t i = 0; N == 3 && i < tile_.nx; ++i) clear(i, -1 - k), clear(i, tile_.nm + k);
    }
  }
  void clear_columns(T* field) const {
    for (int64_t i = 0; i < tile_.nx; ++i)
      for (int64_t m = 0; m < tile_.nm; ++m) {
        std::fill_n(field + tile_.at(i, m, -kReach), kReach, T(0));
        std::fill_n(field + tile_.at(i, m, tile_.ny), kReach, T(0));
      }
  }
  void clear_ends(const Row& r, const Motion& v) const {
    for (T* field : v.v) {
      if (r.j0 == 0) std::fill_n(field + r.o - kReach, kReach, T(0));
      if (r.j1 == tile_.ny) std::fill_n(field + r.o + tile_.ny, kReach, T(0));
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
    // Strains here are times dt.
    each_mechanism(w.strain(), [&](int64_t l, const Rows& r, int64_t c, int64_t j, int64_t) {
      for (int k = 0; k < kStresses; ++k) {
        auto& there = state.back()[shot * sizes.back() + (l * kStresses + k) * cells() + c];
        if constexpr (kIn)
          r[k][j] = weights_.dt * there;
        else
          there = r[k][j] / weights_.dt;
      }
    });
  }

  // Between fields and a rim: the velocities' memories, which follow each other, velocities, stresses.
  template <bool kIn>
  void transfer_motion(const Motion& motion, T* rim) const {
    T* memories = motion.memory[0][0];
    std::memcpy(kIn ? memories : rim, kIn ? rim : memories, memory_size_ * sizeof(T));
    rim += memory_size_;
    for (T* field : motion.v) rim = transfer_boxes<kIn>(tile_, rim_.outside, field, rim);
  }
  template <bool kIn>
  void transfer_stress(const Stress& stress, T* rim) const {
    rim += memory_size_ + N * rim_.outside_cells;
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
    // Next to a surface across the rows, differences reach one row further.
    const int64_t end = fused_end(), lag = surface_.axis == 0 ? kReach + 1 : kReach;
    for (int64_t i = b.i0; i < std::max(b.i1, end + lag); ++i) {
      if (i < b.i1) rows(0, mode, b, i, i + 1, w);
      const int64_t k = i - lag;
      if (k < b.i0 || k >= end) continue;
      for (int64_t m = b.m0; m < b.m1; ++m)
        deform({k, m, b.j0, b.j1, tile_.at(k, m, 0), model_row(k, m), k * tile_.nm + m}, mode, w, w.v, w.next);
    }
  }

  // Fetches lines that the next row will read, while this one is computed.
  MPIGRAD_INLINE static void prefetch(const Row& r, std::initializer_list<const T*> rows) {
    for (const T* row : rows)
      for (int64_t j = r.j0; j < r.j1; j += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + j);
  }

  // One phase of rows of a box.
  void rows(int phase, Mode mode, const Box& b, int64_t first, int64_t last, Wave& w) const {
    for (int64_t i = first; i < last; ++i)
      for (int64_t m = b.m0; m < b.m1; ++m) {
        const Row row{i, m, b.j0, b.j1, tile_.at(i, m, 0), model_row(i, m), i * tile_.nm + m};
        phase == 0 ? accelerate(row, mode, w) : deform(row, mode, w, w.previous, w.v);
      }
  }

  // A step backwards inside of the layers: the stresses first.
  void undo(int phase, const Box& b, Wave& w) const {
    for (int64_t i = b.i0; i < b.i1; ++i)
      for (int64_t m = b.m0; m < b.m1; ++m) {
        const Row row{i, m, b.j0, b.j1, tile_.at(i, m, 0), model_row(i, m), i * tile_.nm + m};
        if (phase == 0)
          deform<Layers::kNone>(row, back_, w.v, w.memory, w.memory, forward_, w.stress);
        else
          forces<Layers::kNone>(row, w);
      }
  }

  // The velocities of a row.
  void accelerate(const Row& r, Mode mode, Wave& w) const {
    if (mode == Mode::kAdjoint) {
      relaxation_.acts() ? correlate_relaxed(r, w) : correlate_deformation(r, w.stress);
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
    if (relaxation_.acts())
      return mode == Mode::kAdjoint ? deform_back(r, v, w) : deform_relaxed(r, mode, w, previous, v);
    if (mode == Mode::kAdjoint) {
      deform<Layers::kBack>(r, back_, v, w.memory, w.next_memory, adjoint_, w.stress);
      return;
    }
    deform<Layers::kStep>(r, weights_, v, previous.memory, v.memory, forward_, w.stress);
    if (mode == Mode::kBorn)
      deform<Layers::kRead>(r, weights_, after_, after_.memory, after_.memory, tangents_, w.stress);
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
    const Weights& k = L == Layers::kStep ? weights_ : back_;
    const Stress s = at(w.stress, r.o);
    const int64_t plane = tile_.plane, stride = tile_.stride;
    prefetch(r, {s[elastic::stress_of<N>(0, B)] + (B == 0 ? 2 : 1) * plane + stride, v + stride,
                 buoyancy + tile_.ny});
    if (N == 3 && B == 1) prefetch(r, {s[1] + 3 * stride});
    if (N == 3 && B == 2) prefetch(r, {s[2] + stride, s[kStresses - 1] + 2 * stride});
    const auto x = elastic::stress_at<N, 0, B, kBack, T>(s);
    const auto y = elastic::stress_at<N, 1, B, kBack, T>(s);  // on three axes
    const auto z = elastic::stress_at<N, kLast, B, kBack, T>(s);
    with_layers<L>(r, [&](auto of_x, auto of_y) {
      constexpr Layers kX = decltype(of_x)::value, kY = decltype(of_y)::value;
      const auto rx = row_layers<kX>(0, B, !kBack, r, from, to);
      const auto ry = row_layers<kY>(1, B, !kBack, r, from, to);
      const T dt = k.dt, nx = k.near[0], fx = k.far[0], ny = k.near[1], fy = k.far[1], nz = k.near[kLast],
              fz = k.far[kLast];
#pragma omp simd
      for (int64_t j = r.j0; j < r.j1; ++j) {
        const T gx = elastic::slope<kX, B == 0>(x, j, plane, nx, fx, dt, rx);
        T gy = 0;
        if constexpr (N == 3) gy = elastic::slope<kY, B == 1>(y, j, stride, ny, fy, dt, ry);
        const T gz = elastic::difference<B == kLast>(
            nz, fz, [&](int n) __attribute__((always_inline)) { return z(j + n); });
        next[j] = v[j] + buoyancy[j] * sum(gx, gy, gz);
      }
    });
    const auto add = [=](int64_t j, T g) __attribute__((always_inline)) { next[j] += buoyancy[j] * g; };
    at_ends<L, B == kLast>(r, B, !kBack, from, to, k, z, add);
    at_surface<0>(r, B == 0, k, x, add), at_surface<kLast>(r, B == kLast, k, z, add);
    if constexpr (N == 3) at_surface<1>(r, B == 1, k, y, add);
  }

  // The stresses from velocities, by Hooke's law with `c`.
  template <Layers L>
  void deform(const Row& r, const Weights& k, const Motion& v, const Memories& from, const Memories& to,
              const Parameters& c, const Stress& stress) const {
    const T *bulk = c.bulk + r.c, *shear = c.shear + r.c;
    T *n0 = stress[0] + r.o, *n1 = stress[1] + r.o, *n2 = stress[kLast] + r.o;
    const int64_t ny = tile_.ny;
    prefetch(r, {bulk + ny, shear + ny});
    stretch<L>(r, k, v, from, to, [=](int64_t j, T x, T y, T z) __attribute__((always_inline)) {
      const T trace = sum(x, y, z), mu = 2 * shear[j], mean = trace * T(1. / N);
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
    for (const T* mu : c.shears) prefetch(r, {mu + r.c + ny});
    slides<L>(r, k, v, from, to, [&](int pair) {
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
    const int64_t ahead = 2 * tile_.plane + tile_.stride, n = tile_.ny;
    prefetch(r, {bulk + n, shear + n});
    for (const T* v : after_.v) prefetch(r, {v + r.o + ahead});
    for (const T* mu : gradient_.shears) prefetch(r, {mu + r.c + n});
    stretch<Layers::kRead>(
        r, weights_, after_, m, m, [=](int64_t j, T x, T y, T z) __attribute__((always_inline)) {
          bulk[j] += p[j] * sum(x, y, z);
          shear[j] += N == 3 ? dx[j] * (x - y) + dz[j] * (z - y) : dx[j] * (x - z);
        });
    slides<Layers::kRead>(r, weights_, after_, m, m, [&](int pair) {
      return multiply(stress[N + pair] + r.o, gradient_.shears[pair] + r.c);
    });
  }

  // use(j, D v_x, D v_y, D v_z) along their own axes, for each cell, and again for what the columns' layers
  // add. On two axes the last one is y.
  template <Layers L, class Use>
  void stretch(const Row& r, const Weights& k, const Motion& motion, const Memories& from,
               const Memories& to, const Use& use) const {
    constexpr bool kBack = L == Layers::kBack;
    const auto x = velocity(motion.v[0] + r.o), y = velocity(motion.v[1] + r.o);
    const auto z = velocity(motion.v[kLast] + r.o);
    with_layers<L>(r, [&](auto of_x, auto of_y) {
      constexpr Layers kX = decltype(of_x)::value, kY = decltype(of_y)::value;
      const auto rx = row_layers<kX>(0, 0, kBack, r, from, to);
      const auto ry = row_layers<kY>(1, 1, kBack, r, from, to);
      const int64_t plane = tile_.plane, stride = tile_.stride;
      const T dt = k.dt, nx = k.near[0], fx = k.far[0], ny = k.near[1], fy = k.far[1], nz = k.near[kLast],
              fz = k.far[kLast];
#pragma omp simd
      for (int64_t j = r.j0; j < r.j1; ++j) {
        const T gx = elastic::slope<kX, false>(x, j, plane, nx, fx, dt, rx);
        T gy = 0;
        if constexpr (N == 3) gy = elastic::slope<kY, false>(y, j, stride, ny, fy, dt, ry);
        const T gz = elastic::difference<false>(
            nz, fz, [&](int n) __attribute__((always_inline)) { return z(j + n); });
        use(j, gx, gy, gz);
      }
    });
    const auto add = [=](int64_t j, T g) __attribute__((always_inline)) { use(j, T(0), T(0), g); };
    at_ends<L, false>(r, kLast, kBack, from, to, k, z, add);
    at_surface<0>(r, false, k, x, [=](int64_t j, T g) __attribute__((always_inline)) { use(j, g, T(0), T(0)); });
    if constexpr (N == 3)
      at_surface<1>(r, false, k, y, [=](int64_t j, T g) __attribute__((always_inline)) { use(j, T(0), g, T(0)); });
    at_surface<kLast>(r, false, k, z, add);
  }

  // use(pair) is the `use` of `slide` for each pair of axes.
  template <Layers L, class Use>
  void slides(const Row& r, const Weights& k, const Motion& motion, const Memories& from,
              const Memories& to, const Use& use) const {
    slide<0, 1, L>(r, k, motion, from, to, use(0));
    if constexpr (N == 3) {
      slide<0, 2, L>(r, k, motion, from, to, use(1));
      slide<1, 2, L>(r, k, motion, from, to, use(2));
    }
  }
  // use(j, D_A v_B + D_B v_A) for each cell, and again for what the columns' layers add.
  template <int A, int B, Layers L, class Use>
  void slide(const Row& r, const Weights& k, const Motion& motion, const Memories& from,
             const Memories& to, const Use& use) const {
    constexpr bool kBack = L == Layers::kBack;
    const auto va = velocity(motion.v[A] + r.o), vb = velocity(motion.v[B] + r.o);
    with_layers<L, A == 0, B != kLast || A == 1>(r, [&](auto of_x, auto of_y) {
      constexpr Layers kX = decltype(of_x)::value, kY = decltype(of_y)::value;
      constexpr Layers kA = A == 0 ? kX : kY, kB = B == kLast ? Layers::kNone : kY;
      const auto ra = row_layers<kA>(A, B, kBack, r, from, to);
      const auto rb = row_layers<kB>(B, A, kBack, r, from, to);
      const int64_t step_a = A == 0 ? tile_.plane : tile_.stride, step_b = B == kLast ? 1 : tile_.stride;
      const T dt = k.dt, na = k.near[A], fa = k.far[A], nb = k.near[B], fb = k.far[B];
#pragma omp simd
      for (int64_t j = r.j0; j < r.j1; ++j)
        use(j, elastic::slope<kA, true>(vb, j, step_a, na, fa, dt, ra) +
                   elastic::slope<kB, true>(va, j, step_b, nb, fb, dt, rb));
    });
    if constexpr (B == kLast) at_ends<L, true>(r, A, kBack, from, to, k, va, use);
    at_surface<A>(r, true, k, vb, use), at_surface<B>(r, true, k, va, use);
  }

  // The buoyancies' part: cotangents after this step's adjoint acceleration.
  void correlate_acceleration(const Row& r, const Motion& adjoint) const {
    for (int b = 0; b < N; ++b) {
      const T *a = adjoint.v[b] + r.o, *before = before_.v[b] + r.o, *after = after_.v[b] + r.o;
      T* sum = gradient_.buoyancy[b] + r.c;
      prefetch(r, {sum + tile_.ny, before + tile_.stride});
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
  static auto velocity(const T* v) {
    return [v](int64_t j) __attribute__((always_inline)) { return v[j]; };
  }

  // f(kind of the layers of x, kind of y) as constants: L in their rows, or near them for the adjoint.
  template <Layers L, bool kHasX = true, bool kHasY = true, class F>
  void with_layers(const Row& r, const F& f) const {
    using On = std::integral_constant<Layers, L>;
    using Off = std::integral_constant<Layers, Layers::kNone>;
    if constexpr (N == 2 && kHasY) return with_layers<L, kHasX, false>(r, f);
    if constexpr (L == Layers::kNone) return f(Off(), Off());
    const auto acts = [](const AxisLayers& layers, int64_t a) {
      return L == Layers::kBack ? layers.is_near(a, kReach) : layers.has(a);
    };
    const bool x = kHasX && acts(layers_[0], r.i), y = kHasY && acts(layers_[1], r.m);
    if constexpr (kHasX && kHasY)
      if (x && y) return f(On(), On());
    if constexpr (kHasX)
      if (x) return f(On(), Off());
    if constexpr (kHasY)
      if (y) return f(Off(), On());
    f(Off(), Off());
  }

  // Of the derivative along x or y of the stress or the velocity of component b. The memories of
  // stresses lie where they are differentiated.
  template <Layers L>
  MPIGRAD_INLINE elastic::RowLayers<T> row_layers(int axis, int b, bool of_stress, const Row& r,
                                                    const Memories& from, const Memories& to) const {
    elastic::RowLayers<T> f{};
    if (L == Layers::kNone) return f;
    const int64_t a = axis == 0 ? r.i : r.m, other = axis == 0 ? r.m : r.i;
    const elastic::Profile<T>& profile = profiles_[axis][(axis == b) == of_stress];
    const int k = elastic::memory_of(axis, b);
    const auto place = [&](int64_t n) {
      const AxisLayers::Rows rows = layers_[axis].rows(a + n);
      return rows.first + other * rows.pitch;
    };
    for (int n = L == Layers::kBack ? -2 : 0; n <= (L == Layers::kBack ? 2 : 0); ++n) {
      f.memory[2 + n] = from[axis][k] + place(n);
      f.a[2 + n] = profile.a(L)[a + n];
    }
    // Outside of the layers b is zero, and so is what is written to the row of zeros.
    f.next = to[axis][k] + place(0);
    f.b = profile.b()[a];
    const int64_t next_row = layers_[axis].next_row();
    prefetch(r, {f.memory[2] + next_row});
    if (L != Layers::kRead && f.next != f.memory[2]) prefetch(r, {f.next + next_row});
    return f;
  }

  // The same along the columns, at both ends of a row.
  template <Layers L, bool kAhead, class F, class Add>
  MPIGRAD_INLINE void at_ends(const Row& r, int b, bool of_stress, const Memories& from,
                              const Memories& to, const Weights& w, const F& field, const Add& add) const {
    if (L == Layers::kNone) return;
    const AxisLayers& columns = layers_[kLast];
    const elastic::Profile<T>& profile = profiles_[kLast][(b == kLast) == of_stress];
    const int k = elastic::memory_of(kLast, b);
    const T near = w.near[kLast], far = w.far[kLast], dt = w.dt;
    const int64_t left = std::clamp(columns.left_end(), r.j0, r.j1);
    const int64_t right = std::clamp(tile_.ny - columns.right_end(), left, r.j1);
    const auto end = [&](int64_t j0, int64_t j1, int64_t place) {
      const elastic::EndLayers<T> layers{from[kLast][k] + place, profile.a(L), profile.b(), to[kLast][k] + place,
                                           columns.next_row()};
      elastic::slope_at_end<L, kAhead>(field, j0, j1, near, far, dt, layers, add);
    };
    if (r.j0 < left) end(r.j0, left, columns.left(r.i, r.m));
    if (right < r.j1) end(right, r.j1, columns.right(r.i, r.m));
  }

  // ---- attenuation (relaxation.h) ----

  // The sums e, m, ... of a row, of this thread.
  Rows scratch(int which) const {
    static thread_local std::vector<T> memory;
    const int64_t pitch = (tile_.ny + 31) / 16 * 16;
    memory.resize(std::max<size_t>(memory.size(), 4 * kStresses * pitch));
    Rows rows;
    for (int k = 0; k < kStresses; ++k) rows[k] = memory.data() + (which * kStresses + k) * pitch;
    return rows;
  }

  // The strain rates of a row times dt.
  template <Layers L>
  Rows strain_rates(const Row& r, const Motion& v, const Memories& from, const Memories& to) const {
    const Rows e = scratch(0);
    for (T* row : e) std::fill(row + r.j0, row + r.j1, T(0));
    T *e0 = e[0], *e1 = e[1], *e2 = e[kLast];
    stretch<L>(r, weights_, v, from, to, [=](int64_t j, T x, T y, T z) __attribute__((always_inline)) {
      e0[j] += x;
      if constexpr (N == 3) e1[j] += y;
      e2[j] += z;
    });
    slides<L>(r, weights_, v, from, to, [&](int pair) {
      return [row = e[N + pair]](int64_t j, T g) __attribute__((always_inline)) { row[j] += g; };
    });
    return e;
  }

  // stress += Hooke's law of `e` with c, less that of `m` with l.
  void hooke(const Row& r, const Rows& e, const Parameters& c, const Rows& m, const Parameters& l,
             const Stress& stress) const {
    const T *bulk = c.bulk + r.c, *shear = c.shear + r.c, *lost = l.bulk + r.c, *slipped = l.shear + r.c;
    const T *x = e[0], *y = e[1], *z = e[kLast], *mx = m[0], *my = m[1], *mz = m[kLast];
    T *n0 = stress[0] + r.o, *n1 = stress[1] + r.o, *n2 = stress[kLast] + r.o;
    const int64_t next = tile_.ny;
    prefetch(r, {bulk + next, shear + next, lost + next, slipped + next});
#pragma omp simd
    for (int64_t j = r.j0; j < r.j1; ++j) {
      const T trace = sum(x[j], y[j], z[j]), past = sum(mx[j], my[j], mz[j]);
      const T mu = 2 * shear[j], nu = 2 * slipped[j], mean = trace * T(1. / N), before = past * T(1. / N);
      const T all = bulk[j] * trace - lost[j] * past;
      n0[j] += all + mu * (x[j] - mean) - nu * (mx[j] - before);
      if constexpr (N == 3) n1[j] += all + mu * (y[j] - mean) - nu * (my[j] - before);
      n2[j] += all + mu * (z[j] - mean) - nu * (mz[j] - before);
    }
    for (int k = 0; k < kPairs; ++k) {
      const T *mu = c.shears[k] + r.c, *nu = l.shears[k] + r.c, *rate = e[N + k], *mean = m[N + k];
      T* s = stress[N + k] + r.o;
      prefetch(r, {mu + next, nu + next});
#pragma omp simd
      for (int64_t j = r.j0; j < r.j1; ++j) s[j] += mu[j] * rate[j] - nu[j] * mean[j];
    }
  }

  void deform_relaxed(const Row& r, Mode mode, Wave& w, const Motion& previous, const Motion& v) const {
    const Rows e = strain_rates<Layers::kStep>(r, v, previous.memory, v.memory), m = scratch(1);
    relaxation_.step(w.strain(), r.number, r.j0, r.j1, e, m);
    hooke(r, e, forward_, m, lost_, w.stress);
    if (!means_.data()) return;
    // Of a tangent, the run keeps m for what the tangent of the loss adds.
    Rows means;
    for (int k = 0; k < kStresses; ++k) means[k] = static_cast<T*>(means_.data()) + k * cells() + r.c;
    if (mode == Mode::kSave) {
      for (int k = 0; k < kStresses; ++k) std::copy(m[k] + r.j0, m[k] + r.j1, means[k] + r.j0);
    } else if (mode == Mode::kBorn) {
      const Rows of_run = strain_rates<Layers::kRead>(r, after_, after_.memory, after_.memory);
      hooke(r, of_run, tangents_, means, lost_tangents_, w.stress);
    }
  }

  // L / A of the stress k of the adjoint: the mean, the deviators, the shear stresses.
  const T* ratio(int k) const { return ratio_[k == 0 ? 0 : k < N ? 1 : 2 + k - N]; }
  // t of a row from a and the filters.
  void filter(const Row& r, const Wave& w) const {
    T *sum = scratch(3)[0], *rest = scratch(3)[1];
    for (int k = 0; k < kStresses; ++k) {
      const T *a = w.plain[k] + r.o, *q = ratio(k) + r.c;
      T* t = w.stress[k] + r.o;
      prefetch(r, {a + tile_.stride, t + tile_.stride, q + tile_.ny});
      relaxation_.filtered(w.strain(), k, r.number, r.j0, r.j1, sum);
      relaxation_.filtered(w.decaying(), k, r.number, r.j0, r.j1, rest);
#pragma omp simd
      for (int64_t j = r.j0; j < r.j1; ++j) t[j] = a[j] - q[j] * sum[j] + rest[j];
    }
  }
  void deform_back(const Row& r, const Motion& v, Wave& w) const {
    relaxation_.fetch_next(w.strain(), r.number);
    for (int k = 0; k < kStresses; ++k)
      relaxation_.step_back(w.strain(), w.decaying(), k, r.number, r.j0, r.j1, w.plain[k] + r.o);
    deform<Layers::kBack>(r, back_, v, w.memory, w.next_memory, adjoint_, w.plain);
    filter(r, w);
  }

  // The moduli's part of the gradient with attenuation.
  void correlate_relaxed(const Row& r, const Wave& w) const {
    const Rows e = strain_rates<Layers::kRead>(r, after_, after_.memory, after_.memory);
    Rows a;
    const Rows f = scratch(1);
    const int64_t next = r.c + tile_.ny;
    relaxation_.fetch_next(w.strain(), r.number);
    for (const auto& sums : {gradient_, lost_gradient_}) {
      prefetch(r, {sums.bulk + next, sums.shear + next});
      for (const T* mu : sums.shears) prefetch(r, {mu + next});
    }
    for (const T* v : after_.v) prefetch(r, {v + r.o + 2 * tile_.plane + tile_.stride});
    const T coupling = relaxation_.coupling();
    for (int k = 0; k < kStresses; ++k) {
      a[k] = w.plain[k] + r.o;
      prefetch(r, {a[k] + tile_.stride});
      relaxation_.filtered(w.strain(), k, r.number, r.j0, r.j1, f[k]);
#pragma omp simd
      for (int64_t j = r.j0; j < r.j1; ++j) f[k][j] = -(coupling * a[k][j] + f[k][j]);
    }
    correlate(r.c, r.j0, r.j1, e, a, gradient_), correlate(r.c, r.j0, r.j1, e, f, lost_gradient_);
  }
  // Adds the products of strain rates and scaled cotangents to the sums of the moduli.
  void correlate(int64_t c, int64_t j0, int64_t j1, const Rows& e, const Rows& a,
                 const elastic::Parameters<T, N>& sums) const {
    T *bulk = sums.bulk + c, *shear = sums.shear + c;
    const T *x = e[0], *y = e[1], *z = e[kLast], *p = a[0], *dx = a[1], *dz = a[kLast];
#pragma omp simd
    for (int64_t j = j0; j < j1; ++j) {
      bulk[j] += p[j] * sum(x[j], y[j], z[j]);
      shear[j] += N == 3 ? dx[j] * (x[j] - y[j]) + dz[j] * (z[j] - y[j]) : dx[j] * (x[j] - z[j]);
    }
    for (int k = 0; k < kPairs; ++k) {
      T* mu = sums.shears[k] + c;
      const T *rate = e[N + k], *s = a[N + k];
#pragma omp simd
      for (int64_t j = j0; j < j1; ++j) mu[j] += s[j] * rate[j];
    }
  }

  // From cotangents of the memories to filters and decaying parts, and back. `transfer` has multiplied by dt.
  void begin_filters(Wave& w) const {
    const int64_t size = relaxation_.size();
    w.rest = Memory();
    if (std::any_of(w.strain(), w.strain() + size, [](T x) { return x != 0; })) {
      w.rest = Memory(size * sizeof(T));
      std::memcpy(w.decaying(), w.strain(), size * sizeof(T));
      each_mechanism(w.decaying(), [&](int64_t, const Rows& h, int64_t, int64_t j, int64_t depth) {
        const T x = h[0][j], z = h[kLast][j], mean = sum(x, h[1][j], z) / N, square = weights_.dt * weights_.dt;
        const T share = 1 / (square * weight(kNormal, depth));
        h[0][j] = share * mean, h[1][j] = share * (x - mean);
        if (N == 3) h[2][j] = share * (z - mean);
        for (int k = 0; k < kPairs; ++k) h[N + k][j] /= square * weight(N + k, depth);
      });
    }
    std::fill_n(w.strain(), size, T(0));
    for (int k = 0; k < kStresses; ++k) {
      w.plain_fields[k] = Field<T>(tile_);
      w.plain_fields[k].clear();
      w.plain[k] = w.plain_fields[k];
    }
    each_row([&](const Row& r) {
      for (int k = 0; k < kStresses; ++k) std::copy_n(w.stress[k] + r.o, tile_.ny, w.plain[k] + r.o);
      filter(r, w);
    });
  }
  void end_filters(Wave& w, const T* state) const {
    each_row([&](const Row& r) {
      for (int k = 0; k < kStresses; ++k) std::copy_n(w.plain[k] + r.o, tile_.ny, w.stress[k] + r.o);
    });
    // The loss has filtered the first memories, too.
    const T dt = weights_.dt;
    each_mechanism(w.strain(), [&](int64_t l, const Rows& f, int64_t c, int64_t j, int64_t depth) {
      std::array<T, kStresses> values;
      Rows e, a;
      for (int k = 0; k < kStresses; ++k) {
        values[k] = -dt * state[(l * kStresses + k) * cells() + c];
        e[k] = &values[k], a[k] = f[k] + j;
      }
      correlate(c, 0, 1, e, a, lost_gradient_);
      const auto cotangent = [&](int k) {
        const T decayed = w.decaying() ? relaxation_.at(w.decaying(), c / tile_.ny, l, k)[j] : T(0);
        return decayed - ratio(k)[c] * f[k][j];
      };
      // Multiplied by dt twice, as `end` divides by it.
      const T square = dt * dt;
      const T p = cotangent(0), dx = cotangent(1), dz = N == 3 ? cotangent(kLast) : T(0);
      std::array<T, kPairs> pairs;
      for (int k = 0; k < kPairs; ++k) pairs[k] = cotangent(N + k);
      const T share = square * weight(kNormal, depth);
      f[0][j] = share * (p + dx), f[1][j] = share * (p - (dx + dz));
      if (N == 3) f[2][j] = share * (p + dz);
      for (int k = 0; k < kPairs; ++k) f[N + k][j] = square * weight(N + k, depth) * pairs[k];
    });
  }
  template <class F>
  void each_row(const F& f) const {
    for (int64_t i = 0; i < tile_.nx; ++i)
      for (int64_t m = 0; m < tile_.nm; ++m) f(Row{i, m, 0, tile_.ny, tile_.at(i, m, 0), model_row(i, m), i * tile_.nm + m});
  }
  // f(mechanism, its memories in a row, index of a cell, its column, depth)
  template <class F>
  void each_mechanism(T* memory, const F& f) const {
    for (int64_t l = 0; l < setup_.mechanisms; ++l)
      each_row([&](const Row& r) {
        Rows rows;
        for (int k = 0; k < kStresses; ++k) rows[k] = relaxation_.at(memory, r.number, l, k);
        for (int64_t j = 0; j < tile_.ny; ++j) f(l, rows, r.c + j, j, depth(r.i, r.m, j));
      });
  }

  // What the differences along an axis have next to the surface besides those of the inside: add(j, value).
  // half: between the cells.
  template <int Axis, class F, class Add>
  MPIGRAD_INLINE void at_surface(const Row& r, bool half, const Weights& k, const F& field, const Add& add) const {
    if (surface_.axis != Axis) return;
    constexpr int kNear = elastic::Surface<T>::kNear, kPoints = elastic::Surface<T>::kPoints;
    const T sign = k.dt < 0 ? T(-1) : T(1);
    const auto value = [&](const T* c, int64_t j, int64_t step) __attribute__((always_inline)) {
      T g = 0;
      for (int n = 0; n < kPoints; ++n) g += c[n] * field(j - n * step);
      return sign * g;
    };
    if constexpr (Axis == kLast) {
      for (int64_t j = std::max(r.j0, tile_.ny - kNear); j < r.j1; ++j)
        add(j, value(surface_.table[half][tile_.ny - 1 - j], tile_.ny - 1, 1));
    } else {
      const int64_t d = depth(r.i, r.m, 0), step = Axis == 0 ? tile_.plane : tile_.stride;
      if (d >= kNear) return;
      T c[kPoints];
      std::copy_n(surface_.table[half][d], kPoints, c);
#pragma omp simd
      for (int64_t j = r.j0; j < r.j1; ++j) add(j, value(c, j + d * step, step));
    }
  }
  // Cells between a cell and the surface.
  int64_t depth(int64_t i, int64_t m, int64_t j) const {
    if (surface_.axis < 0) return elastic::Surface<T>::kNear;
    return surface_.axis == 0 ? tile_.nx - 1 - i : surface_.axis == kLast ? tile_.ny - 1 - j : tile_.nm - 1 - m;
  }
  // Of a velocity, of a stress N + its pair of axes, or of the normal stresses.
  static constexpr int kNormal = -1;
  T weight(int field, int64_t depth) const {
    if (depth >= elastic::Surface<T>::kNear) return 1;
    bool half = field == surface_.axis;
    for (int a = 0; a < N; ++a)
      for (int b = a + 1; b < N; ++b)
        half |= field == elastic::stress_of<N>(a, b) && (a == surface_.axis || b == surface_.axis);
    return surface_.weight[half][depth];
  }

  const Setup& setup_;
  const Tile& tile_;
  const Box middle_;
  const Weights weights_, back_;
  const T share_;  // of a source in its cell
  AxisLayers layers_[N];
  elastic::Profile<T> profiles_[N][2];  // at the centres, and half a cell further
  int64_t memory_size_ = 0;
  const Rim rim_;
  elastic::Surface<T> surface_;
  Parameters forward_, adjoint_, tangents_;
  elastic::Parameters<T, N> gradient_;
  elastic::Relaxation<T, kStresses> relaxation_;
  Parameters lost_, lost_tangents_;
  elastic::Parameters<T, N> lost_gradient_;
  std::array<const T*, kModuli> ratio_{};  // L / A
  Memory means_;
  Motion before_, after_;  // of the step that the adjoint or the tangent is at
  Memory divisors_, sums_;
};

}  // namespace mpigrad::waves
