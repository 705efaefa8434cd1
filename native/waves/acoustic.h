// The acoustic wave equation, u_tt = c^2 (u_xx + u_yy + s), with the absorbing layer of Grote and Sim.
// reference.py describes the step. With the cotangent v of the pressure, the adjoint in the variable
// p = dt^2 c^2 v / later, later = (1 + sigma dt/2) (1 + tau dt/2), is the same step with the factors
// of phi and psi inside the derivative. The history of a step is the term that c^2 multiplies. The
// cotangent of the model is the sum over time of p times the history.
//
// With a density, c^2 is c^2 rho, the second derivatives are those of fluxes, and phi and psi are memories
// of fluxes: they are multiplied by beta, and sources are divided by rho (model.py). So a step is linear in
// the buoyancies and in beta. For their cotangents the history also has the pressure at the start of
// the step. In the adjoint phi and psi are multiplied by beta, so that neighbours need not know it.
#pragma once

#include <limits>

#include "waves/acoustic_model.h"
#include "waves/propagate.h"
#include "waves/registers.h"
#include "waves/rim.h"

namespace mpigrad::waves {

template <class T, int R>
class Acoustic {
 public:
  using Value = T;
  static constexpr int kPhases = 1;
  // Buoyancies to the next R cells along x, then along y, and beta of each axis.
  static constexpr int kFluxes = 2 * R + 2;
  static int models(const Setup& setup) { return setup.density ? 1 + kFluxes : 1; }
  static int fields(const Setup&) { return 3; }
  static constexpr bool kHistoryIsState = false;

  struct Wave {
    // Present and earlier pressure, the next pressure, phi and psi with their next values.
    Field<T> w, u, phi, psi, next_phi, next_psi;
  };

  explicit Acoustic(const Setup& setup)
      : setup_(setup),
        tile_(setup.tile),
        density_(setup.density),
        dt_(static_cast<T>(setup.dt)),
        area_(static_cast<T>(1 / (setup.spacing[0] * setup.spacing[1]))) {
    static_assert(R == 2 || R == 4);
    static constexpr double kSecond[2][5] = {{-5. / 2, 4. / 3, -1. / 12},
                                             {-205. / 72, 8. / 5, -1. / 5, 8. / 315, -1. / 560}};
    static constexpr double kFirst[2][5] = {{0, 2. / 3, -1. / 12}, {0, 4. / 5, -1. / 5, 4. / 105, -1. / 280}};
    for (int k = 0; k <= R; ++k) {
      const double second = kSecond[R / 4][k], first = kFirst[R / 4][k];
      xx_[k] = static_cast<T>(second / (setup.spacing[0] * setup.spacing[0]));
      yy_[k] = static_cast<T>(second / (setup.spacing[1] * setup.spacing[1]));
      x_[k] = static_cast<T>(first / setup.spacing[0]);
      y_[k] = static_cast<T>(first / setup.spacing[1]);
    }
    for (int axis = 0; axis < 2; ++axis) {
      const std::vector<double>& sigma = setup.profiles[axis];
      // At a face shared with a neighbour the damping is zero.
      damp_[axis].assign(sigma.size() + 2 * R, T(0));
      keep_[axis].assign(sigma.size() + 2 * R, T(1));
      gain_[axis].assign(sigma.size() + 2 * R, dt_);
      for (size_t i = 0; i < sigma.size(); ++i) {
        damp_[axis][i + R] = static_cast<T>(sigma[i]);
        keep_[axis][i + R] = static_cast<T>(std::exp(-sigma[i] * setup.dt));
        gain_[axis][i + R] = static_cast<T>(
            sigma[i] > 0 ? -std::expm1(-sigma[i] * setup.dt) / sigma[i] : setup.dt);
      }
    }
    for (int side = 0; side < kSides; ++side)
      margin_[side] = tile_.layers[side] ? tile_.layers[side] + R : 0;
    // Whole registers of 256 bits: the remainder of such a short row would cost as much.
    for (int side : {2, 3}) margin_[side] = (margin_[side] + 7) / 8 * 8;
    rim_ = Rim(tile_, margin_, R);
    for (const Box& box : {Box{0, tile_.layers[0], 0, tile_.ny},
                           Box{tile_.layers[0], tile_.nx - tile_.layers[1], 0, tile_.layers[2]},
                           Box{tile_.layers[0], tile_.nx - tile_.layers[1],
                               tile_.ny - tile_.layers[3], tile_.ny},
                           Box{tile_.nx - tile_.layers[1], tile_.nx, 0, tile_.ny}})
      layer_cells_ += std::max<int64_t>(0, box.i1 - box.i0) * std::max<int64_t>(0, box.j1 - box.j0);
  }

  // ---- the model ----

  std::vector<double> extremes(const Arrays<const T>& models) const {
    return velocity_extremes(models[0], tile_.lx * tile_.ly);
  }
  std::string fault(const double* most) const { return velocity_fault(most, setup_); }

  void load(const Arrays<const T>& models) {
    velocity_ = models[0];
    k_ = Field<T>(tile_);
    sum_ = Field<T>(tile_);
    sum_.clear();
    each_cell([&](int64_t o, int64_t m) {
      const T c = dt_ * velocity_[m];
      k_[o] = c * c;
    });
    if (!density_) return;
    for (int f = 0; f < kFluxes; ++f)
      for (Field<T>* field : {&flux_[f], &flux_sum_[f]}) {
        *field = Field<T>(tile_);
        field->clear();
      }
    each_flux([&](int f, int64_t o, int64_t m, T factor) { flux_[f][o] = factor * models[1 + f][m]; });
  }

  void load_tangents(const Arrays<const T>& tangents) {
    each_cell([&](int64_t o, int64_t m) { sum_[o] = 2 * dt_ * dt_ * velocity_[m] * tangents[0][m]; });
    if (!density_) return;
    each_flux([&](int f, int64_t o, int64_t m, T factor) { flux_sum_[f][o] = factor * tangents[1 + f][m]; });
  }

  void gradient(const Arrays<T>& models) const {
    std::fill_n(models[0], tile_.lx * tile_.ly, T(0));
    each_cell([&](int64_t o, int64_t m) { models[0][m] += 2 * sum_[o] / velocity_[m]; });
    if (!density_) return;
    each_flux([&](int f, int64_t o, int64_t m, T factor) {
      models[1 + f][m] = f < 2 * R ? factor * flux_sum_[f][o] : flux_sum_[f][o] / flux_[f][o];
    });
  }

  // ---- the state: the pressure, the one before, phi and psi in the layers ----

  std::vector<int64_t> state_sizes() const {
    return {tile_.nx * tile_.ny, tile_.nx * tile_.ny, 2 * layer_cells_};
  }

  Wave wave() const {
    return {Field<T>(tile_), Field<T>(tile_), Field<T>(tile_),
            Field<T>(tile_), Field<T>(tile_), Field<T>(tile_)};
  }

  void begin(Wave& wave, const Arrays<const T>& state, int64_t shot) const {
    clear(wave);
    if (state.empty()) return;
    const std::vector<int64_t> sizes = state_sizes();
    const T *w = state[0] + shot * sizes[0], *u = state[1] + shot * sizes[1];
    for (int64_t i = 0; i < tile_.nx; ++i) {
      std::memcpy(wave.w + tile_.at(i, 0), w + i * tile_.ny, tile_.ny * sizeof(T));
      std::memcpy(wave.u + tile_.at(i, 0), u + i * tile_.ny, tile_.ny * sizeof(T));
    }
    const T* phi = state[2] + shot * sizes[2];
    each_layer_cell([&](int64_t o, int64_t k) {
      wave.phi[o] = phi[k];
      wave.psi[o] = phi[layer_cells_ + k];
    });
  }

  void end(const Wave& wave, const Arrays<T>& state, int64_t shot) const {
    const std::vector<int64_t> sizes = state_sizes();
    T *w = state[0] + shot * sizes[0], *u = state[1] + shot * sizes[1];
    for (int64_t i = 0; i < tile_.nx; ++i) {
      std::memcpy(w + i * tile_.ny, wave.w + tile_.at(i, 0), tile_.ny * sizeof(T));
      std::memcpy(u + i * tile_.ny, wave.u + tile_.at(i, 0), tile_.ny * sizeof(T));
    }
    T* phi = state[2] + shot * sizes[2];
    each_layer_cell([&](int64_t o, int64_t k) {
      phi[k] = wave.phi[o];
      phi[layer_cells_ + k] = wave.psi[o];
    });
  }

  void begin_adjoint(Wave& wave, const Arrays<const T>& cotangents, int64_t shot) const {
    begin(wave, cotangents, shot);
    each_row([&](int64_t i, int64_t j) {
      const int64_t o = tile_.at(i, j);
      wave.w[o] *= k_[o] / later(i, j);
      // In the first step back this is the cotangent of the pressure before.
      wave.u[o] *= -k_[o] / earlier(i, j);
    });
    each_layer_cell([&](int64_t o, int64_t) {
      wave.phi[o] *= density_ ? -flux_[2 * R][o] : T(-1);
      wave.psi[o] *= density_ ? -flux_[2 * R + 1][o] : T(-1);
    });
  }

  void end_adjoint(Wave& wave, const Arrays<const T>&, const Arrays<T>& cotangents, int64_t shot) const {
    if (cotangents.empty()) return;
    each_row([&](int64_t i, int64_t j) {
      const int64_t o = tile_.at(i, j);
      wave.w[o] *= later(i, j) / k_[o];
      wave.u[o] *= -earlier(i, j) / k_[o];
    });
    each_layer_cell([&](int64_t o, int64_t) {
      wave.phi[o] /= density_ ? -flux_[2 * R][o] : T(-1);
      wave.psi[o] /= density_ ? -flux_[2 * R + 1][o] : T(-1);
    });
    end(wave, cotangents, shot);
  }

  // ---- a step ----

  int64_t depth() const { return 2; }
  // With a density, the pressure with its margin follows.
  int64_t history_size() const { return tile_.nx * tile_.stride + (density_ ? tile_.padded() : 0); }

  T* first(Wave&) const { return nullptr; }
  int source_phase() const { return 0; }
  void prepare(int, Mode mode, Wave& wave, T* history, T* rim) const {
    if (mode != Mode::kReverse) return;
    T* rest = transfer_boxes<true>(tile_, rim_.ring, static_cast<T*>(wave.u), rim);
    rest = transfer_boxes<true>(tile_, rim_.outside, history, rest);
    if (!density_) return;
    transfer_boxes<true>(tile_, rim_.outside, static_cast<T*>(wave.w), rest);
    std::memcpy(pressure(history) - tile_.origin(), wave.w - tile_.origin(), tile_.padded() * sizeof(T));
  }

  void update(int, Mode mode, const Box& box, Wave& wave, T* history) const {
    density_ ? update_as<true>(mode, box, wave, history) : update_as<false>(mode, box, wave, history);
  }

  // ---- boundary saving: the pressure before, around the inside, and the history outside ----

  int64_t rim_size() const { return rim_.ring_cells + (density_ ? 2 : 1) * rim_.outside_cells; }
  void keep_before(const Wave& wave, T* rim) const {
    transfer_boxes<false>(tile_, rim_.ring, static_cast<T*>(wave.u), rim);
    if (density_)
      transfer_boxes<false>(tile_, rim_.outside, static_cast<T*>(wave.w),
                            rim + rim_.ring_cells + rim_.outside_cells);
  }
  void keep_after(T* history, T* rim) const {
    transfer_boxes<false>(tile_, rim_.outside, history, rim + rim_.ring_cells);
  }
  // Backwards the pressure before is the next one.
  void turn(Wave& wave) const { swap(wave.w, wave.u); }

  // Neighbours need the new pressure, and for layers that cross a face also phi across x and psi
  // across y.
  void pieces(int, Mode, const Wave& wave, std::vector<Piece<T>>& list) const {
    add_pieces(wave.u, wave.next_phi, wave.next_psi, list);
  }
  void all_pieces(const Wave& wave, std::vector<Piece<T>>& list) const {
    add_pieces(wave.w, wave.phi, wave.psi, list);
  }

  void finish(int, Mode, Wave& wave) const {
    swap(wave.w, wave.u);
    swap(wave.phi, wave.next_phi);
    swap(wave.psi, wave.next_psi);
  }

  bool injects_first(int, Mode) const { return false; }
  void inject(int, Mode mode, const PointTable::Entry& e, Wave& wave, T value, T* history) const {
    if (mode == Mode::kReverse && !rim_.has(e.i, e.j)) return;  // the rim has it
    const T source = mode == Mode::kAdjoint ? value : area_ * value;
    wave.u[e.cell] += k_[e.cell] / later(e.i, e.j) * source;
    if (mode == Mode::kSave || mode == Mode::kReverse ||
        (mode == Mode::kRim && !rim_.has(e.i, e.j)))
      history[e.cell] += source;
  }

  T sample(Mode mode, const PointTable::Entry& e, const Wave& wave) const {
    const T factor = mode == Mode::kAdjoint ? area_ : T(1);
    return factor * static_cast<T>(e.weight) * wave.w[e.cell];
  }

 private:
  // The factors of the next pressure and of the one before in a step.
  T later(int64_t i, int64_t j) const {
    return (1 + damp_[0][i + R] * (dt_ / 2)) * (1 + damp_[1][j + R] * (dt_ / 2));
  }
  T earlier(int64_t i, int64_t j) const {
    return (1 - damp_[0][i + R] * (dt_ / 2)) * (1 - damp_[1][j + R] * (dt_ / 2));
  }

  // The pressure at the start of a step, in its history.
  T* pressure(T* history) const { return history + tile_.nx * tile_.stride + tile_.origin(); }

  template <class F>
  void each_row(const F& f) const {
    for (int64_t i = 0; i < tile_.nx; ++i)
      for (int64_t j = 0; j < tile_.ny; ++j) f(i, j);
  }
  // Each cell, and the nearest cell of the model.
  template <class F>
  void each_cell(const F& f) const {
    for (int64_t i = 0; i < tile_.nx; ++i) {
      const int64_t row = std::clamp<int64_t>(i - tile_.layers[0], 0, tile_.lx - 1) * tile_.ly;
      int64_t j = 0;
      for (; j < tile_.layers[2]; ++j) f(tile_.at(i, j), row);
      for (int64_t m = 0; m < tile_.ly; ++m, ++j) f(tile_.at(i, j), row + m);
      for (; j < tile_.ny; ++j) f(tile_.at(i, j), row + tile_.ly - 1);
    }
  }
  // f(index of the field, its cell, the place in its model, the factor of the model in the field) for
  // the buoyancies from a cell to that n cells further on, and for beta (n = 0).
  template <class F>
  void each_flux(const F& f) const {
    for (int axis = 0; axis < 2; ++axis)
      for (int n = 0; n <= R; ++n) {
        const int field = n ? axis * R + n - 1 : 2 * R + axis;
        const int64_t x = axis == 0 ? n : 0, y = axis == 1 ? n : 0, columns = tile_.ny + y;
        const T factor = n ? (axis == 0 ? xx_ : yy_)[n] : T(1);
        for (int64_t i = 0; i < tile_.nx + x; ++i)
          for (int64_t j = 0; j < columns; ++j) f(field, tile_.at(i - x, j - y), i * columns + j, factor);
      }
  }
  // Each cell of the layers, with its index.
  template <class F>
  void each_layer_cell(const F& f) const {
    int64_t k = 0;
    for (int64_t i = 0; i < tile_.nx; ++i) {
      const bool whole = i < tile_.layers[0] || i >= tile_.nx - tile_.layers[1];
      const int64_t j0 = whole ? tile_.ny : tile_.layers[2];
      for (int64_t j = 0; j < j0; ++j) f(tile_.at(i, j), k++);
      for (int64_t j = whole ? tile_.ny : tile_.ny - tile_.layers[3]; j < tile_.ny; ++j)
        f(tile_.at(i, j), k++);
    }
  }

  void clear(Wave& wave) const {
    wave.w.clear();
    wave.u.clear();
    // These are read only in the layers and a few cells beyond.
    int64_t reach[kSides];
    for (int side = 0; side < kSides; ++side) reach[side] = margin_[side] ? margin_[side] + R : 0;
    for (T* f : {static_cast<T*>(wave.phi), static_cast<T*>(wave.psi),
                 static_cast<T*>(wave.next_phi), static_cast<T*>(wave.next_psi)})
      for (int64_t i = -R; i < tile_.nx + R; ++i) {
        T* row = f + tile_.at(i, 0);
        if (i < reach[0] || i >= tile_.nx - reach[1]) {
          std::fill(row - R, row + tile_.ny + R, T(0));
        } else {
          std::fill(row - R, row + std::min(reach[2], tile_.ny), T(0));
          std::fill(row + std::max<int64_t>(0, tile_.ny - reach[3]), row + tile_.ny + R, T(0));
        }
      }
  }

  void add_pieces(T* w, T* phi, T* psi, std::vector<Piece<T>>& list) const {
    list.push_back({w, 0, 0, tile_.ny});
    list.push_back({w, 1, 0, tile_.nx});
    list.push_back({phi, 0, 0, tile_.layers[2]});
    list.push_back({phi, 0, tile_.ny - tile_.layers[3], tile_.ny});
    list.push_back({psi, 1, 0, tile_.layers[0]});
    list.push_back({psi, 1, tile_.nx - tile_.layers[1], tile_.nx});
  }

  template <bool B>
  void update_as(Mode mode, const Box& box, Wave& wave, T* history) const {
    switch (mode) {
      case Mode::kPlain: return rows<Mode::kPlain, B>(box, wave, history);
      case Mode::kSave: return rows<Mode::kSave, B>(box, wave, history);
      case Mode::kAdjoint: return rows<Mode::kAdjoint, B>(box, wave, history);
      case Mode::kBorn: return rows<Mode::kBorn, B>(box, wave, history);
      case Mode::kRim: return rows<Mode::kRim, B>(box, wave, history);
      case Mode::kReverse: {
        const Box part = rim_.part(box);
        for (int64_t i = part.i0; i < part.i1; ++i)
          inside<Mode::kReverse, B>(i, part.j0, part.j1, wave, history);
      }
    }
  }

  // B: with a density.
  template <Mode M, bool B>
  void rows(const Box& box, Wave& wave, T* history) const {
    constexpr Mode kOutside = M == Mode::kRim ? Mode::kSave : M;
    constexpr Mode kInside = M == Mode::kRim ? Mode::kPlain : M;
    const int64_t left = std::clamp(margin_[2], box.j0, box.j1);
    const int64_t right = std::clamp(tile_.ny - margin_[3], left, box.j1);
    for (int64_t i = box.i0; i < box.i1; ++i) {
      if (i < margin_[0] || i >= tile_.nx - margin_[1]) {
        in_layer<kOutside, B>(i, box.j0, box.j1, wave, history);
      } else {
        if (box.j0 < left) in_layer<kOutside, B>(i, box.j0, left, wave, history);
        inside<kInside, B>(i, left, right, wave, history);
        if (right < box.j1) in_layer<kOutside, B>(i, right, box.j1, wave, history);
      }
      if (B && M == Mode::kSave) save_pressure(i, box.j0, box.j1, wave.w, pressure(history));
      if (B && M == Mode::kAdjoint) add_faces(i, box.j0, box.j1, wave.w, pressure(history));
    }
    if (M == Mode::kSave) end_streams();
  }

  // A row of the pressure, and what is beyond its ends. The first and last row: also the rows beyond.
  void save_pressure(int64_t i, int64_t j0, int64_t j1, const T* from, T* to) const {
    stream(to + tile_.at(i, j0), from + tile_.at(i, j0), j1 - j0);
    const int64_t begin = j0 == 0 ? -R : j0, end = j1 == tile_.ny ? j1 + R : j1;
    const auto copy = [&](int64_t row, int64_t a, int64_t b) {
      std::memcpy(to + tile_.at(row, a), from + tile_.at(row, a), (b - a) * sizeof(T));
    };
    copy(i, begin, j0);
    copy(i, j1, end);
    for (int n = 1; n <= R; ++n) {
      if (i == 0) copy(-n, begin, end);
      if (i == tile_.nx - 1) copy(i + n, begin, end);
    }
  }

  // Adds to the cotangents of a row of buoyancies, each from a cell to a later one. Those across the
  // first faces are the neighbour's if there is one. v: the adjoint, w: the pressure.
  void add_faces(int64_t i, int64_t j0, int64_t j1, const T* v, const T* w) const {
    const int64_t o = tile_.at(i, 0), stride = tile_.stride;
    const T* __restrict__ a = v + o;
    const T* __restrict__ b = w + o;
    T *x[R + 1], *y[R + 1];
    for (int n = 1; n <= R; ++n) x[n] = flux_sum_[n - 1] + o, y[n] = flux_sum_[R + n - 1] + o;
#pragma omp simd
    for (int64_t j = j0; j < j1; ++j)
      for (int n = 1; n <= R; ++n) {
        const int64_t m = n * stride;
        x[n][j] -= (a[j + m] - a[j]) * (b[j + m] - b[j]);
        y[n][j] -= (a[j + n] - a[j]) * (b[j + n] - b[j]);
      }
    for (int n = 1; n <= R; ++n) {  // before the first cells the pressure is zero
      for (int64_t j = j0; j < j1 && i < n && tile_.neighbor[0] == kNobody; ++j)
        x[n][j - n * stride] -= a[j] * b[j];
      for (int64_t j = j0; j < std::min<int64_t>(n, j1) && tile_.neighbor[2] == kNobody; ++j)
        y[n][j - n] -= a[j] * b[j];
    }
  }

  // The buoyancies of a row as factors of the differences of the pressure, or their tangents.
  struct Factors {
    const T *x[R + 1], *y[R + 1];
    Factors(const std::array<Field<T>, kFluxes>& fields, int64_t o) {
      for (int n = 1; n <= R; ++n) x[n] = fields[n - 1] + o, y[n] = fields[R + n - 1] + o;
    }
    // The derivatives of the fluxes of w.
    MPIGRAD_INLINE T operator()(const T* w, int64_t j, int64_t stride) const {
      T total = 0;
      for (int n = 1; n <= R; ++n) {
        const int64_t m = n * stride;
        total += x[n][j] * (w[j + m] - w[j]) - x[n][j - m] * (w[j] - w[j - m]) +
                 y[n][j] * (w[j + n] - w[j]) - y[n][j - n] * (w[j] - w[j - n]);
      }
      return total;
    }
  };

  // Without damping.
  template <Mode M, bool B>
  void inside(int64_t i, int64_t j0, int64_t j1, Wave& wave, T* history) const {
    const int64_t o = tile_.at(i, 0), stride = tile_.stride;
    const T* __restrict__ w = wave.w + o;
    T* __restrict__ u = wave.u + o;
    const T* __restrict__ k = k_ + o;
    T* __restrict__ h = history + (M == Mode::kPlain ? 0 : o);
    T* __restrict__ sum = sum_ + o;
    const T* __restrict__ past = B && M == Mode::kBorn ? pressure(history) + o : nullptr;
    const T c0 = xx_[0] + yy_[0];
    T cx[R + 1], cy[R + 1];
    for (int n = 0; n <= R; ++n) cx[n] = xx_[n], cy[n] = yy_[n];
    const Factors fluxes(flux_, B ? o : 0), moved(flux_sum_, B ? o : 0);
    // Only the adjoint reads the history of a step, so it is written past the caches.
    constexpr int64_t kLine = M == Mode::kSave ? 512 : std::numeric_limits<int64_t>::max() / 2;
    T line[M == Mode::kSave ? kLine : 1];
    for (int64_t begin = j0; begin < j1; begin += kLine) {
      const int64_t end = std::min(begin + kLine, j1);
#pragma omp simd
      for (int64_t j = begin; j < end; ++j) {
        T drive = B ? fluxes(w, j, stride) : c0 * w[j];
        for (int n = 1; n <= R && !B; ++n)
          drive += cx[n] * (w[j + n * stride] + w[j - n * stride]) + cy[n] * (w[j + n] + w[j - n]);
        if (B && M == Mode::kBorn) drive += moved(past, j, stride);
        if (M == Mode::kAdjoint) sum[j] += w[j] * h[j];
        T next = 2 * w[j] - u[j] + k[j] * drive;
        if (M == Mode::kBorn) next += sum[j] * h[j];
        if (M == Mode::kSave) line[j - begin] = drive;
        if (M == Mode::kReverse) h[j] = drive;
        u[j] = next;
      }
      if (M == Mode::kSave) stream(h + begin, line, end - begin);
    }
  }

  template <Mode M, bool B>
  void in_layer(int64_t i, int64_t j0, int64_t j1, Wave& wave, T* history) const {
    const int64_t o = tile_.at(i, 0), stride = tile_.stride;
    const T* __restrict__ w = wave.w + o;
    T* __restrict__ u = wave.u + o;
    const T* __restrict__ phi = wave.phi + o;
    const T* __restrict__ psi = wave.psi + o;
    T* __restrict__ next_phi = wave.next_phi + o;
    T* __restrict__ next_psi = wave.next_psi + o;
    const T* __restrict__ kk = k_ + o;
    T* __restrict__ h = history + (M == Mode::kPlain ? 0 : o);
    T* __restrict__ sum = sum_ + o;
    const T* __restrict__ sx = damp_[0].data() + R + i;
    const T* __restrict__ sy = damp_[1].data() + R;
    const T* __restrict__ gx = gain_[0].data() + R + i;
    const T* __restrict__ gy = gain_[1].data() + R;
    const T* __restrict__ by = keep_[1].data() + R;
    const T bx = keep_[0][R + i], s = sx[0], dt = dt_;
    T cx[R + 1], cy[R + 1], dx[R + 1], dy[R + 1];
    for (int n = 0; n <= R; ++n) cx[n] = xx_[n], cy[n] = yy_[n], dx[n] = x_[n], dy[n] = y_[n];
    const T c0 = cx[0] + cy[0];
    constexpr bool kReads = B && (M == Mode::kAdjoint || M == Mode::kBorn);
    const T* __restrict__ past = kReads ? pressure(history) + o : nullptr;
    const Factors fluxes(flux_, B ? o : 0), moved(flux_sum_, B ? o : 0);
    const T *wide_x = B ? flux_[2 * R] + o : nullptr, *wide_y = B ? flux_[2 * R + 1] + o : nullptr;
    T *sum_x = B ? flux_sum_[2 * R] + o : nullptr, *sum_y = B ? flux_sum_[2 * R + 1] + o : nullptr;
#pragma omp simd
    for (int64_t j = j0; j < j1; ++j) {
      const T t = sy[j];
      T drive = B ? fluxes(w, j, stride) : c0 * w[j], wx = 0, wy = 0, past_x = 0, past_y = 0;
      for (int n = 1; n <= R; ++n) {
        const int64_t m = n * stride;
        if (!B) drive += cx[n] * (w[j + m] + w[j - m]) + cy[n] * (w[j + n] + w[j - n]);
        if (kReads) {
          past_x += dx[n] * (past[j + m] - past[j - m]);
          past_y += dy[n] * (past[j + n] - past[j - n]);
        }
        wx += dx[n] * (w[j + m] - w[j - m]);
        wy += dy[n] * (w[j + n] - w[j - n]);
        if (M == Mode::kAdjoint) {
          drive += dx[n] * (gx[n] * (t - sx[n]) * phi[j + m] - gx[-n] * (t - sx[-n]) * phi[j - m]) +
                   dy[n] * (gy[j + n] * (s - sy[j + n]) * psi[j + n] -
                            gy[j - n] * (s - sy[j - n]) * psi[j - n]);
        } else {
          drive += dx[n] * (phi[j + m] - phi[j - m]) + dy[n] * (psi[j + n] - psi[j - n]);
        }
      }
      if (B && M == Mode::kBorn) drive += moved(past, j, stride);
      const T p = s * (dt / 2), q = t * (dt / 2), slope_x = gx[0] * (t - s), slope_y = gy[j] * (s - t);
      if (M == Mode::kAdjoint) sum[j] += w[j] * h[j];
      T next = (2 - 2 * p * q) * w[j] - (1 - p) * (1 - q) * u[j] + kk[j] * drive;
      if (M == Mode::kBorn) next += sum[j] * h[j];
      if (M == Mode::kSave) h[j] = drive;
      u[j] = next / ((1 + p) * (1 + q));
      if (B) wx *= wide_x[j], wy *= wide_y[j];
      next_phi[j] = bx * phi[j] + (M == Mode::kAdjoint ? T(1) : slope_x) * wx;
      next_psi[j] = by[j] * psi[j] + (M == Mode::kAdjoint ? T(1) : slope_y) * wy;
      if (B && M == Mode::kBorn) {
        next_phi[j] += slope_x * sum_x[j] * past_x;
        next_psi[j] += slope_y * sum_y[j] * past_y;
      }
      if (B && M == Mode::kAdjoint) {  // phi and psi have the opposite sign of cotangents
        sum_x[j] -= slope_x * phi[j] * past_x;
        sum_y[j] -= slope_y * psi[j] * past_y;
      }
    }
  }

  const Setup& setup_;
  const Tile& tile_;
  const bool density_;
  const T dt_, area_;
  T xx_[R + 1], yy_[R + 1], x_[R + 1], y_[R + 1];
  // Damping, and the factors of phi or psi and of the derivative in their update, with a margin of R.
  std::vector<T> damp_[2], keep_[2], gain_[2];
  std::array<int64_t, kSides> margin_;  // cells in which the layers act on the pressure
  Rim rim_{tile_, {}, R};
  int64_t layer_cells_ = 0;
  const T* velocity_ = nullptr;
  Field<T> k_;    // (dt c)^2
  Field<T> sum_;  // k times the cotangent of k, or in tangents the tangent of k
  // With a density: buoyancies times the coefficients of the differences, and beta. Of the former the
  // cotangents without these coefficients, of beta its cotangents times beta, or the tangents of all.
  std::array<Field<T>, kFluxes> flux_, flux_sum_;
};

}  // namespace mpigrad::waves
