// The acoustic wave equation on three axes, u_tt = c^2 (u_xx + u_yy + u_zz + s), with the absorbing
// layer of Grote and Sim. reference.py describes the step, acoustic.h its form on two axes. Layers act
// on a cell by the dampings s_x, s_y, s_z. Where one of them is not zero, there are phi_x, phi_y and
// phi_z. Where two are not zero, psi, the sum of the earlier pressures, acts on phi, and where all are,
// on the pressure.
//
// With the cotangent v of the next pressure, A = product of 1 + s_i dt/2, p = dt^2 c^2 v / A, the
// opposite of the cotangents of phi in place of phi, and the coefficients a_i, b_i of the derivatives of
// w and of the sum in phi_i, the adjoint of a step is
//     q      = psi + sum of the derivatives of b_i phi_i               (where layers overlap)
//     A next = (2 - 2 e2 - 4 e3) p - (product of 1 - s_i dt/2) before
//              + dt^2 c^2 (sum of p_ii and of the derivatives of a_i phi_i + q)
//     psi'   = q - 8 e3 p / (dt^2 c^2),   phi_i' = exp(-s_i dt) phi_i + the derivative of p
#pragma once

#include "waves/acoustic_model.h"
#include "waves/propagate.h"

namespace mpigrad::waves {

template <class T, int R>
class Acoustic3d {
 public:
  using Value = T;
  static constexpr int kModels = 1, kFields = 3, kPhases = 1;
  static constexpr int64_t kDepth = 2;
  static constexpr bool kHistoryIsState = false;
  static constexpr int kAxes = 3;

  struct Wave {
    // Present and earlier pressure, or the next one, and the memories with their next values.
    Field<T> w, u;
    LayerField<T> phi[kAxes], psi, next_phi[kAxes], next_psi;
  };

  explicit Acoustic3d(const Setup& setup)
      : setup_(setup), tile_(setup.tile), dt_(static_cast<T>(setup.dt)) {
    static constexpr double kSecond[2][3] = {{-2, 1, 0}, {-5. / 2, 4. / 3, -1. / 12}};
    static constexpr double kFirst[2][3] = {{0, 1. / 2, 0}, {0, 2. / 3, -1. / 12}};
    double volume = 1;
    for (int axis = 0; axis < kAxes; ++axis) {
      const double h = setup.spacing[axis];
      volume *= h;
      for (int k = 0; k <= R; ++k) {
        second_[axis][k] = static_cast<T>(kSecond[R - 1][k] / (h * h));
        first_[axis][k] = static_cast<T>(kFirst[R - 1][k] / h);
      }
      damp(axis, setup.profiles[axis]);
    }
    share_ = static_cast<T>(1 / volume);
    for (int side = 0; side < kSides; ++side)
      margin_[side] = tile_.layers[side] ? tile_.layers[side] + R : 0;
    // Whole registers of 256 bits: the remainder of such a short row would cost as much.
    for (int side : {2, 3}) margin_[side] = (margin_[side] + 7) / 8 * 8;
    std::array<int64_t, kSides> wide;  // rows that a row in the margin reads
    for (int side = 0; side < kSides; ++side) wide[side] = whole(side);
    layer_rows_ = LayerRows(tile_, margin_[2], margin_[3], [&](int64_t i, int64_t m) {
      return is_near_layers(i, m, wide);
    });
    layer_cells_ = tile_.nx * tile_.nm * tile_.ny - tile_.lx * tile_.lm * tile_.ly;
    history_stride_ = (tile_.ny + 15) / 16 * 16;
  }

  // ---- the model ----

  std::vector<double> extremes(const Arrays<const T>& models) const {
    return velocity_extremes(models[0], model_cells());
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
  }

  void load_tangents(const Arrays<const T>& tangents) {
    each_cell([&](int64_t o, int64_t m) { sum_[o] = 2 * dt_ * dt_ * velocity_[m] * tangents[0][m]; });
  }

  void gradient(const Arrays<T>& models) const {
    std::fill_n(models[0], model_cells(), T(0));
    each_cell([&](int64_t o, int64_t m) { models[0][m] += 2 * sum_[o] / velocity_[m]; });
  }

  // ---- the state: the pressure, the one before, phi_x, phi_y, phi_z and psi in the layers ----

  std::vector<int64_t> state_sizes() const {
    const int64_t cells = tile_.nx * tile_.nm * tile_.ny;
    return {cells, cells, 4 * layer_cells_};
  }

  Wave wave() const {
    const auto field = [this] { return LayerField<T>(layer_rows_); };
    return {Field<T>(tile_), Field<T>(tile_), {field(), field(), field()}, field(),
            {field(), field(), field()}, field()};
  }

  void begin(Wave& wave, const Arrays<const T>& state, int64_t shot) const {
    clear(wave);
    if (state.empty()) return;
    const std::vector<int64_t> sizes = state_sizes();
    const T *w = state[0] + shot * sizes[0], *u = state[1] + shot * sizes[1];
    each_row([&](int64_t i, int64_t m, int64_t row) {
      std::memcpy(wave.w + tile_.at(i, m, 0), w + row, tile_.ny * sizeof(T));
      std::memcpy(wave.u + tile_.at(i, m, 0), u + row, tile_.ny * sizeof(T));
    });
    const T* memory = state[2] + shot * sizes[2];
    each_layer_cell([&](int64_t o, int64_t k) {
      for (int n = 0; n < kAxes; ++n) wave.phi[kOrder[n]][o] = memory[n * layer_cells_ + k];
      // Steps change it only where layers overlap, and elsewhere it passes through the run.
      wave.psi[o] = wave.next_psi[o] = memory[kAxes * layer_cells_ + k];
    });
  }

  void end(const Wave& wave, const Arrays<T>& state, int64_t shot) const {
    const std::vector<int64_t> sizes = state_sizes();
    T *w = state[0] + shot * sizes[0], *u = state[1] + shot * sizes[1];
    each_row([&](int64_t i, int64_t m, int64_t row) {
      std::memcpy(w + row, wave.w + tile_.at(i, m, 0), tile_.ny * sizeof(T));
      std::memcpy(u + row, wave.u + tile_.at(i, m, 0), tile_.ny * sizeof(T));
    });
    T* memory = state[2] + shot * sizes[2];
    each_layer_cell([&](int64_t o, int64_t k) {
      for (int n = 0; n < kAxes; ++n) memory[n * layer_cells_ + k] = wave.phi[kOrder[n]][o];
      memory[kAxes * layer_cells_ + k] = wave.psi[o];
    });
  }

  void begin_adjoint(Wave& wave, const Arrays<const T>& cotangents, int64_t shot) const {
    begin(wave, cotangents, shot);
    each_row([&](int64_t i, int64_t m, int64_t) {
      for (int64_t j = 0; j < tile_.ny; ++j) {
        const int64_t o = tile_.at(i, m, j);
        wave.w[o] *= k_[o] / later(i, m, j);
        // In the first step back this is the cotangent of the pressure before.
        wave.u[o] *= -k_[o] / earlier(i, m, j);
      }
    });
    negate_phi(wave);
  }

  void end_adjoint(Wave& wave, const Arrays<T>& cotangents, int64_t shot) const {
    if (cotangents.empty()) return;
    each_row([&](int64_t i, int64_t m, int64_t) {
      for (int64_t j = 0; j < tile_.ny; ++j) {
        const int64_t o = tile_.at(i, m, j);
        wave.w[o] *= later(i, m, j) / k_[o];
        wave.u[o] *= -earlier(i, m, j) / k_[o];
      }
    });
    negate_phi(wave);
    end(wave, cotangents, shot);
  }

  // ---- a step ----

  int64_t history_size() const { return tile_.nx * tile_.nm * history_stride_; }

  T* first(Wave&) const { return nullptr; }
  int source_phase() const { return 0; }
  void prepare(int, Mode, Wave&, T*, T*) const {}

  void update(int, Mode mode, const Box& box, Wave& wave, T* history) const {
    switch (mode) {
      case Mode::kPlain: return rows<Mode::kPlain>(box, wave, history);
      case Mode::kSave: return rows<Mode::kSave>(box, wave, history);
      case Mode::kAdjoint: return rows<Mode::kAdjoint>(box, wave, history);
      case Mode::kBorn: return rows<Mode::kBorn>(box, wave, history);
      case Mode::kRim:
      case Mode::kReverse: return;  // Python refuses boundary saving on three axes
    }
  }

  int64_t rim_size() const { return 0; }
  void keep_before(const Wave&, T*) const {}
  void keep_after(T*, T*) const {}
  void turn(Wave&) const {}

  // Neighbours need the new pressure, for layers that cross a face the phi across it, and where two
  // layers that overlap cross it, psi. The adjoint has no derivatives of psi.
  void pieces(int, Mode mode, const Wave& wave, std::vector<Piece<T>>& list) const {
    add_pieces(wave.u, wave.next_phi, mode == Mode::kAdjoint ? nullptr : static_cast<T*>(wave.next_psi), list);
  }
  void all_pieces(const Wave& wave, std::vector<Piece<T>>& list) const {
    add_pieces(wave.w, wave.phi, wave.psi, list);
  }

  void finish(int, Mode, Wave& wave) const {
    swap(wave.w, wave.u);
    for (int axis = 0; axis < kAxes; ++axis) swap(wave.phi[axis], wave.next_phi[axis]);
    swap(wave.psi, wave.next_psi);
  }

  void inject(int, Mode mode, const PointTable::Entry& e, Wave& wave, T value, T* history) const {
    const T source = mode == Mode::kAdjoint ? value : share_ * value;
    wave.u[e.cell] += k_[e.cell] / later(e.i, e.m, e.j) * source;
    if (mode == Mode::kSave) history[history_row(e.i, e.m) + e.j] += source;
  }

  T sample(Mode mode, const PointTable::Entry& e, const Wave& wave) const {
    const T factor = mode == Mode::kAdjoint ? share_ : T(1);
    return factor * static_cast<T>(e.weight) * wave.w[e.cell];
  }

 private:
  // Axes in the order of the grid: x, y, z.
  static constexpr int kOrder[kAxes] = {kRows, kMiddle, kColumns};
  static constexpr int64_t kRowsAtOnce = 16;
  enum Layers { kAcross, kAlong, kSeveral };  // the row, the axis of the row, several axes

  // The factors of an axis, with R cells more on each side. Across a face that is shared with a neighbour
  // the damping is zero.
  void damp(int axis, const std::vector<double>& sigma) {
    const size_t n = sigma.size() + 2 * R;
    damp_[axis].assign(n, T(0));
    half_[axis].assign(n, T(0));
    keep_[axis].assign(n, T(1));
    gain_[axis].assign(n, dt_);
    inverse_[axis].assign(n, T(1));
    layer_[axis].assign(n, T(0));
    for (size_t i = 0; i < sigma.size(); ++i) {
      const double s = sigma[i], half = s * (setup_.dt / 2);
      damp_[axis][i + R] = static_cast<T>(s);
      half_[axis][i + R] = static_cast<T>(half);
      keep_[axis][i + R] = static_cast<T>(std::exp(-s * setup_.dt));
      gain_[axis][i + R] = static_cast<T>(s > 0 ? -std::expm1(-s * setup_.dt) / s : setup_.dt);
      inverse_[axis][i + R] = static_cast<T>(1 / (1 + half));
      layer_[axis][i + R] = static_cast<T>(s > 0);
    }
  }

  T later(int64_t i, int64_t m, int64_t j) const {
    return (1 + half_[kRows][i + R]) * (1 + half_[kMiddle][m + R]) * (1 + half_[kColumns][j + R]);
  }
  T earlier(int64_t i, int64_t m, int64_t j) const {
    return (1 - half_[kRows][i + R]) * (1 - half_[kMiddle][m + R]) * (1 - half_[kColumns][j + R]);
  }

  int64_t model_cells() const { return tile_.lx * tile_.lm * tile_.ly; }
  int64_t history_row(int64_t i, int64_t m) const { return (i * tile_.nm + m) * history_stride_; }

  // f(i, m, index of the row's first cell in an array without margins)
  template <class F>
  void each_row(const F& f) const {
    for (int64_t i = 0; i < tile_.nx; ++i)
      for (int64_t m = 0; m < tile_.nm; ++m) f(i, m, (i * tile_.nm + m) * tile_.ny);
  }
  // Each cell, and the nearest cell of the model.
  template <class F>
  void each_cell(const F& f) const {
    each_row([&](int64_t i, int64_t m, int64_t) {
      const int64_t x = std::clamp<int64_t>(i - tile_.layers[0], 0, tile_.lx - 1);
      const int64_t y = std::clamp<int64_t>(m - tile_.layers[4], 0, tile_.lm - 1);
      const int64_t row = (x * tile_.lm + y) * tile_.ly;
      int64_t j = 0;
      for (; j < tile_.layers[2]; ++j) f(tile_.at(i, m, j), row);
      for (int64_t z = 0; z < tile_.ly; ++z, ++j) f(tile_.at(i, m, j), row + z);
      for (; j < tile_.ny; ++j) f(tile_.at(i, m, j), row + tile_.ly - 1);
    });
  }
  // Whether all cells of a row are in layers of these widths.
  bool is_near_layers(int64_t i, int64_t m, const std::array<int64_t, kSides>& width) const {
    return i < width[0] || i >= tile_.nx - width[1] || m < width[4] || m >= tile_.nm - width[5];
  }
  // Each cell of the layers: its place in a LayerField, and its index.
  template <class F>
  void each_layer_cell(const F& f) const {
    int64_t k = 0;
    each_row([&](int64_t i, int64_t m, int64_t) {
      const bool whole = is_near_layers(i, m, tile_.layers);
      const int64_t j0 = whole ? tile_.ny : tile_.layers[2];
      for (int64_t j = 0; j < j0; ++j) f(layer_rows_.at(i, m, j), k++);
      for (int64_t j = whole ? tile_.ny : tile_.ny - tile_.layers[3]; j < tile_.ny; ++j)
        f(layer_rows_.at(i, m, j), k++);
    });
  }
  void negate_phi(Wave& wave) const {
    each_layer_cell([&](int64_t o, int64_t) {
      for (int axis = 0; axis < kAxes; ++axis) wave.phi[axis][o] = -wave.phi[axis][o];
    });
  }

  void clear(Wave& wave) const {
    wave.w.clear();
    wave.u.clear();
    for (int axis = 0; axis < kAxes; ++axis) {
      wave.phi[axis].clear();
      wave.next_phi[axis].clear();
    }
    wave.psi.clear();
    wave.next_psi.clear();
  }

  void add_pieces(T* w, const LayerField<T>* phi, T* psi, std::vector<Piece<T>>& list) const {
    const std::array<int64_t, kAxes> cells{tile_.nx, tile_.ny, tile_.nm};
    for (int axis = 0; axis < kAxes; ++axis) {
      // As in Piece: first the columns (across columns the rows), then the third axis.
      const int a = axis == kColumns ? kRows : kColumns, b = kAxes - axis - a;
      const int64_t na = cells[a], nb = cells[b];
      const int64_t a0 = std::min(tile_.layers[2 * a], na), b0 = std::min(tile_.layers[2 * b], nb);
      const int64_t a1 = std::max(a0, na - tile_.layers[2 * a + 1]);
      const int64_t b1 = std::max(b0, nb - tile_.layers[2 * b + 1]);
      list.push_back({w, axis, 0, na, 0, nb});
      const auto add = [&](T* field, int64_t begin, int64_t end, int64_t low, int64_t high) {
        list.push_back({field, axis, begin, end, low, high, &layer_rows_});
      };
      add(phi[axis], 0, na, 0, b0);
      add(phi[axis], 0, na, b1, nb);
      add(phi[axis], 0, a0, b0, b1);
      add(phi[axis], a1, na, b0, b1);
      if (!psi) continue;
      for (const auto& [low, high] : {std::pair{int64_t{0}, b0}, std::pair{b1, nb}}) {
        add(psi, 0, a0, low, high);
        add(psi, a1, na, low, high);
      }
    }
  }

  template <Mode M>
  void rows(const Box& box, Wave& wave, T* history) const {
    const int64_t left = std::clamp(margin_[2], box.j0, box.j1);
    const int64_t right = std::clamp(tile_.ny - margin_[3], left, box.j1);
    const int64_t block = middle_block();
    for (int64_t begin = box.m0; begin < box.m1; begin += block)
      for (int64_t i = box.i0; i < box.i1; ++i) {
        const int64_t end = std::min(begin + block, box.m1);
        const bool beside = i < margin_[0] || i >= tile_.nx - margin_[1];
        const bool mixed = reads_mixed_rows(i);
        for (int64_t m = begin, next; m < end; m = next) {
          next = mixed ? m + 1 : std::min({end, m + kRowsAtOnce, run_end(m)});
          const int near = beside + (m < margin_[4] || m >= tile_.nm - margin_[5]);
          const auto in_layers = [&](int count, int64_t j0, int64_t j1) {
            if (j0 >= j1) return;
            if (count == 0) for (int64_t k = m; k < next; ++k) inside<M>(i, k, j0, j1, wave, history);
            else if (count == 1 && near) in_layer<M, kAcross>(i, m, next, j0, j1, wave, history);
            else if (count == 1) in_layer<M, kAlong>(i, m, next, j0, j1, wave, history);
            else in_layer<M, kSeveral>(i, m, next, j0, j1, wave, history);
          };
          in_layers(near, left, right);
          in_layers(near + 1, box.j0, left);
          in_layers(near + 1, right, box.j1);
        }
      }
    if (M == Mode::kSave) end_streams();
  }

  // Cells of a side in which rows are stored as a whole, as those beyond the tile are.
  int64_t whole(int side) const { return margin_[side] ? margin_[side] + R : 0; }
  // Whether the stencil at x = i reads rows that are stored as a whole and others: then their distances
  // change from row to row.
  bool reads_mixed_rows(int64_t i) const {
    const int64_t first = whole(0), last = tile_.nx - whole(1);
    return (i >= first - R && i < first + R) || (i >= last - R && i < last + R);
  }
  // The end of rows from m on, in one x, for which in_layer finds the rows before and behind at the same
  // distances, and whose layers along the middle axis are the same.
  int64_t run_end(int64_t m) const {
    const int64_t first = whole(4), last = tile_.nm - whole(5);
    int64_t end = tile_.nm;
    for (const auto& [edge, reach] :
         {std::pair{margin_[4], int64_t{0}}, std::pair{first, int64_t{R}}, std::pair{last, int64_t{R}},
          std::pair{tile_.nm - margin_[5], int64_t{0}}}) {
      if (m < edge - reach) end = std::min(end, edge - reach);
      else if (m < edge + reach) return m + 1;
    }
    return end;
  }

  // Cells of the middle axis in a block, for which the 2 R + 1 planes that the stencil reads stay in half
  // of the core's cache.
  int64_t middle_block() const {
    const int64_t row = (2 * R + 4) * tile_.stride * static_cast<int64_t>(sizeof(T));
    return std::max<int64_t>(16, core_cache() / 2 / row);
  }

  // Without damping.
  template <Mode M>
  void inside(int64_t i, int64_t m, int64_t j0, int64_t j1, Wave& wave, T* history) const {
    const int64_t o = tile_.at(i, m, 0), stride = tile_.stride, plane = tile_.plane;
    const T* __restrict__ w = wave.w + o;
    T* __restrict__ u = wave.u + o;
    const T* __restrict__ k = k_ + o;
    T* __restrict__ h = history + (M == Mode::kPlain ? 0 : history_row(i, m));
    T* __restrict__ sum = sum_ + o;
    T cx[R + 1], cy[R + 1], cz[R + 1];
    for (int n = 0; n <= R; ++n)
      cx[n] = second_[kRows][n], cy[n] = second_[kMiddle][n], cz[n] = second_[kColumns][n];
    const T c0 = cx[0] + cy[0] + cz[0];
    // Only the adjoint reads the history of a step, so it is written past the caches.
    constexpr int64_t kLine = M == Mode::kSave ? 512 : std::numeric_limits<int64_t>::max() / 2;
    T line[M == Mode::kSave ? kLine : 1];
    for (int64_t begin = j0; begin < j1; begin += kLine) {
      const int64_t end = std::min(begin + kLine, j1);
#pragma omp simd
      for (int64_t j = begin; j < end; ++j) {
        T drive = c0 * w[j];
        for (int n = 1; n <= R; ++n)
          drive += cx[n] * (w[j + n * plane] + w[j - n * plane]) +
                   cy[n] * (w[j + n * stride] + w[j - n * stride]) + cz[n] * (w[j + n] + w[j - n]);
        if (M == Mode::kAdjoint) sum[j] += w[j] * h[j];
        T next = 2 * w[j] - u[j] + k[j] * drive;
        if (M == Mode::kBorn) next += sum[j] * h[j];
        if (M == Mode::kSave) line[j - begin] = drive;
        u[j] = next;
      }
      if (M == Mode::kSave) stream(h + begin, line, end - begin);
    }
  }

  // With the damping of an axis across the row, along it, or of several axes. The rows m0 to m1 are in one
  // run (run_end).
  template <Mode M, Layers kLayers>
  void in_layer(int64_t i, int64_t m0, int64_t m1, int64_t j0, int64_t j1, Wave& wave,
                T* history) const {
    constexpr bool kBack = M == Mode::kAdjoint, kOverlap = kLayers == kSeveral;
    constexpr bool kDamped = kLayers != kAcross;  // along the columns
    const int64_t o = tile_.at(i, m0, 0), stride = tile_.stride, plane = tile_.plane;
    const auto place = [&](int64_t x, int64_t y) {
      return j0 < margin_[2] ? layer_rows_.left(i + x, m0 + y) : layer_rows_.right(i + x, m0 + y);
    };
    const int64_t here = place(0, 0);
    // Distances to the rows before and behind.
    int64_t xp[R + 1], xm[R + 1], yp[R + 1], ym[R + 1];
    for (int n = 1; n <= R; ++n) {
      xp[n] = place(n, 0) - here, xm[n] = place(-n, 0) - here;
      yp[n] = place(0, n) - here, ym[n] = place(0, -n) - here;
    }
    const int64_t pitch = place(0, 1) - here;
    const T* __restrict__ sz = damp_[kColumns].data() + R;
    const T* __restrict__ pz = half_[kColumns].data() + R;
    const T* __restrict__ gz = gain_[kColumns].data() + R;
    const T* __restrict__ bz = keep_[kColumns].data() + R;
    const T* __restrict__ az = inverse_[kColumns].data() + R;
    const T* __restrict__ lz = layer_[kColumns].data() + R;
    const T *gx = gain_[kRows].data() + R + i, *sx = damp_[kRows].data() + R + i;
    const T bx = keep_[kRows][R + i], px = half_[kRows][R + i];
    const T x = sx[0], g0x = gx[0], dt = dt_;
    T cx[R + 1], cy[R + 1], cz[R + 1], dx[R + 1], dy[R + 1], dz[R + 1];
    // The gains and the dampings of the adjoint's phi, which its derivative includes.
    T gxp[R + 1], gxm[R + 1], sxp[R + 1], sxm[R + 1];
    for (int n = 0; n <= R; ++n) {
      cx[n] = second_[kRows][n], cy[n] = second_[kMiddle][n], cz[n] = second_[kColumns][n];
      dx[n] = first_[kRows][n], dy[n] = first_[kMiddle][n], dz[n] = first_[kColumns][n];
      gxp[n] = dx[n] * gx[n], gxm[n] = dx[n] * gx[-n], sxp[n] = sx[n], sxm[n] = sx[-n];
    }
    const T c0 = cx[0] + cy[0] + cz[0];
    for (int64_t m = m0; m < m1; ++m) {
      const int64_t field = o + (m - m0) * stride, layer = here + (m - m0) * pitch;
      const T* __restrict__ w = wave.w + field;
      T* __restrict__ u = wave.u + field;
      const T* __restrict__ kk = k_ + field;
      T* __restrict__ sum = sum_ + field;
      T* __restrict__ h = history + (M == Mode::kPlain ? 0 : history_row(i, m));
      const T* __restrict__ fx = wave.phi[kRows] + layer;
      const T* __restrict__ fy = wave.phi[kMiddle] + layer;
      const T* __restrict__ fz = wave.phi[kColumns] + layer;
      const T* __restrict__ psi = wave.psi + layer;
      T* __restrict__ next_fx = wave.next_phi[kRows] + layer;
      T* __restrict__ next_fy = wave.next_phi[kMiddle] + layer;
      T* __restrict__ next_fz = wave.next_phi[kColumns] + layer;
      T* __restrict__ next_psi = wave.next_psi + layer;
      const T *gy = gain_[kMiddle].data() + R + m, *sy = damp_[kMiddle].data() + R + m;
      const T by = keep_[kMiddle][R + m], py = half_[kMiddle][R + m];
      const T axy = inverse_[kRows][R + i] * inverse_[kMiddle][R + m];
      const T y = sy[0], g0y = gy[0];
      const T layers = layer_[kRows][R + i] + layer_[kMiddle][R + m];
      const T always = layers > 1, beside = layers > 0 && layers < 2;  // psi: in all cells, in those of z
      T gyp[R + 1], gym[R + 1], syp[R + 1], sym[R + 1];
      for (int n = 1; n <= R; ++n)
        gyp[n] = dy[n] * gy[n], gym[n] = dy[n] * gy[-n], syp[n] = sy[n], sym[n] = sy[-n];
#pragma omp simd
      for (int64_t j = j0; j < j1; ++j) {
        const T z = kDamped ? sz[j] : T(0), qz = kDamped ? pz[j] : T(0), ez = kDamped ? bz[j] : T(1);
        const T iz = kDamped ? az[j] : T(1), hz = kDamped ? gz[j] : dt;
        T drive = c0 * w[j], wx = 0, wy = 0, wz = 0;
        T vx = 0, vy = 0, vz = 0;  // derivatives of psi, of the adjoint's phi with their gains
        for (int n = 1; n <= R; ++n) {
          const int64_t far = n * plane, row = n * stride;
          drive += cx[n] * (w[j + far] + w[j - far]) + cy[n] * (w[j + row] + w[j - row]) +
                   cz[n] * (w[j + n] + w[j - n]);
          wx += dx[n] * (w[j + far] - w[j - far]);
          wy += dy[n] * (w[j + row] - w[j - row]);
          wz += dz[n] * (w[j + n] - w[j - n]);
          if (kBack) {
            const T fxp = gxp[n] * fx[j + xp[n]], fxm = gxm[n] * fx[j + xm[n]];
            const T fyp = gyp[n] * fy[j + yp[n]], fym = gym[n] * fy[j + ym[n]];
            const T fzp = dz[n] * (kDamped ? gz[j + n] : dt) * fz[j + n];
            const T fzm = dz[n] * (kDamped ? gz[j - n] : dt) * fz[j - n];
            const T szp = kDamped ? sz[j + n] : T(0), szm = kDamped ? sz[j - n] : T(0);
            drive += (y + z - sxp[n]) * fxp - (y + z - sxm[n]) * fxm + (z + x - syp[n]) * fyp -
                     (z + x - sym[n]) * fym + (x + y - szp) * fzp - (x + y - szm) * fzm;
            if (kOverlap) vx += fxp - fxm, vy += fyp - fym, vz += fzp - fzm;
          } else {
            drive += dx[n] * (fx[j + xp[n]] - fx[j + xm[n]]) + dy[n] * (fy[j + yp[n]] - fy[j + ym[n]]) +
                     dz[n] * (fz[j + n] - fz[j - n]);
            if (kOverlap) {
              vx += dx[n] * (psi[j + xp[n]] - psi[j + xm[n]]);
              vy += dy[n] * (psi[j + yp[n]] - psi[j + ym[n]]);
              vz += dz[n] * (psi[j + n] - psi[j - n]);
            }
          }
        }
        if (M == Mode::kAdjoint) sum[j] += w[j] * h[j];
        T next;
        if (kOverlap) {
          const T e2 = px * py + (px + py) * qz, e3 = px * py * qz;
          const T overlaps = always + beside * lz[j];
          if (kBack) {
            const T q = psi[j] + dt * (y * z * vx + z * x * vy + x * y * vz);
            drive += overlaps * q;
            next_psi[j] = q - 8 * e3 * w[j] / kk[j];
          }
          next = (2 - 2 * e2 - 4 * e3) * w[j] - (1 - px) * (1 - py) * (1 - qz) * u[j] + kk[j] * drive;
          if (!kBack) {
            next -= 8 * e3 * psi[j];
            next_psi[j] = psi[j] + overlaps * w[j];
          }
        } else {
          next = 2 * w[j] - (1 - px) * (1 - py) * (1 - qz) * u[j] + kk[j] * drive;
        }
        if (M == Mode::kBorn) next += sum[j] * h[j];
        if (M == Mode::kSave) h[j] = drive;
        u[j] = next * (axy * iz);
        if (kBack) {
          next_fx[j] = bx * fx[j] + wx;
          next_fy[j] = by * fy[j] + wy;
          next_fz[j] = ez * fz[j] + wz;
        } else {
          T rx = (y + z - x) * wx, ry = (z + x - y) * wy, rz = (x + y - z) * wz;
          if (kOverlap) {
            rx += dt * y * z * (wx + vx);
            ry += dt * z * x * (wy + vy);
            rz += dt * x * y * (wz + vz);
          }
          next_fx[j] = bx * fx[j] + g0x * rx;
          next_fy[j] = by * fy[j] + g0y * ry;
          next_fz[j] = ez * fz[j] + hz * rz;
        }
      }
    }
  }

  const Setup& setup_;
  const Tile& tile_;
  const T dt_;
  T share_ = 0;  // of a source in its cell
  // Coefficients of the derivatives, by axis of tile.h.
  T second_[kAxes][R + 1], first_[kAxes][R + 1];
  // Damping s, s dt/2, the factors of phi and of the derivative in its update, 1 / (1 + s dt/2), and 1 in
  // the layers, with a margin of R.
  std::vector<T> damp_[kAxes], half_[kAxes], keep_[kAxes], gain_[kAxes], inverse_[kAxes], layer_[kAxes];
  std::array<int64_t, kSides> margin_;  // cells in which the layers act on the pressure
  LayerRows layer_rows_;
  int64_t layer_cells_ = 0, history_stride_ = 0;
  const T* velocity_ = nullptr;
  Field<T> k_;    // (dt c)^2
  Field<T> sum_;  // k times the cotangent of k, or in tangents the tangent of k
};

}  // namespace mpigrad::waves
