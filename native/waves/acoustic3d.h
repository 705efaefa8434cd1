// The acoustic wave equation on three axes, u_tt = c^2 (u_xx + u_yy + u_zz + s), with convolutional
// absorbing layers. reference.py describes the step. Along each axis i, layers filter both derivatives:
// D is the filtered second derivative, with the memory p of the inner filter, and the outer filter with
// the memory z makes k D + z of it. p lies between the cells and acts along the axis, z in the cells.
//
// With the cotangent v of the next pressure times dt^2 c^2, and the opposite of the cotangent of p in
// place of p, the adjoint of a step is
//     D' = k v + e z                                   (in all cells along the axis)
//     next = 2 v - before + dt^2 c^2 (sum of the filtered second derivative of D' and of the derivative
//                                     of e_half p, without any outer filter)
//     p' = b_half p + the derivative of D',   z' = b z + v
//
// With a density (kDensity) the differences of D are multiplied by buoyancies between the cells, and the
// derivative of the pressure in p by the first of them. c^2 includes the density, and p, z and sources
// are divided by it (mpigrad/waves/acoustic/model.py). Every term is linear in the buoyancies, so their
// cotangents are products of differences of D' and of the pressure, and of p' and of its derivative. The
// history of a step has the pressure before it, too, with its margin.
#pragma once

#include "waves/acoustic_model.h"
#include "waves/blocks.h"
#include "waves/layer_field.h"
#include "waves/layer_filter.h"
#include "waves/propagate.h"
#include "waves/registers.h"
#include "waves/rim.h"

namespace mpigrad::waves {

// Only the steps of rows are compiled for each order of the differences, that is for each reach R of the
// stencil.
template <class T, bool kDensity>
class Acoustic3d {
 public:
  using Value = T;
  static constexpr int kAxes = 3;
  static constexpr int kPhases = 1;
  static int models(const Setup& setup) { return kDensity ? 1 + kAxes * static_cast<int>(setup.tile.reach) : 1; }
  static int fields(const Setup&) { return 3; }
  static constexpr bool kHistoryIsState = false;

  struct Wave {
    // Present and earlier pressure, or the next one, and the memories. Forward steps replace z in place.
    Field<T> w, u;
    LayerField<T> p[kAxes], next_p[kAxes], z[kAxes], next_z[kAxes];
  };

  explicit Acoustic3d(const Setup& setup)
      : setup_(setup), tile_(setup.tile), dt_(static_cast<T>(setup.dt)) {
    static constexpr double kSecond[2][5] = {{-5. / 2, 4. / 3, -1. / 12},
                                             {-205. / 72, 8. / 5, -1. / 5, 8. / 315, -1. / 560}};
    static constexpr double kFirst[2][4] = {{27. / 24, -1. / 24},
                                            {1225. / 1024, -245. / 3072, 49. / 5120, -5. / 7168}};
    double volume = 1;
    const int64_t reach = tile_.reach;
    for (int axis = 0; axis < kAxes; ++axis) {
      const double h = setup.spacing[axis];
      volume *= h;
      for (int n = 0; n <= reach; ++n) second_[axis][n] = static_cast<T>(kSecond[reach / 4][n] / (h * h));
      for (int n = 0; n < reach; ++n) first_[axis][n] = static_cast<T>(kFirst[reach / 4][n] / h);
      layers_[axis] = AxisLayers(tile_, static_cast<Axis>(axis), reach);
      static constexpr T kOnes[kReach + 1] = {1, 1, 1, 1, 1};  // faces have the coefficients
      filter_[axis] = Filter(setup.profiles[axis], kDensity ? kOnes : second_[axis],
                             kDensity ? 1 / second_[axis][1] : T(1), layers_[axis], reach);
    }
    std::array<int64_t, kSides> margin;
    for (int side = 0; side < kSides; ++side) margin[side] = tile_.layers[side] ? tile_.layers[side] + reach : 0;
    margin[2] = layers_[kColumns].left_end(), margin[3] = layers_[kColumns].right_end();
    rim_ = Rim(tile_, margin, reach);
    share_ = static_cast<T>(1 / volume);
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
    k_.clear();
    sum_ = Field<T>(tile_);
    sum_.clear();
    each_cell([&](int64_t o, int64_t m) {
      const T c = dt_ * velocity_[m];
      k_[o] = c * c;
    });
    clear_faces(faces_);
    each_face(faces_, [&](T* row, int model, int64_t k, int64_t cells, T factor) {
      for (int64_t j = 0; j < cells; ++j) row[j] = factor * models[model][k + j];
    });
  }

  void load_tangents(const Arrays<const T>& tangents) {
    each_cell([&](int64_t o, int64_t m) { sum_[o] = 2 * dt_ * dt_ * velocity_[m] * tangents[0][m]; });
    clear_faces(face_sums_);
    each_face(face_sums_, [&](T* row, int model, int64_t k, int64_t cells, T factor) {
      for (int64_t j = 0; j < cells; ++j) row[j] = factor * tangents[model][k + j];
    });
  }

  void gradient(const Arrays<T>& models) const {
    std::fill_n(models[0], model_cells(), T(0));
    each_cell([&](int64_t o, int64_t m) { models[0][m] += 2 * sum_[o] / velocity_[m]; });
    each_face(face_sums_, [&](const T* row, int model, int64_t k, int64_t cells, T factor) {
      for (int64_t j = 0; j < cells; ++j) models[model][k + j] = factor * row[j];
    });
  }

  // ---- the state: the pressure, the one before, and p and z of each axis in its layers ----

  std::vector<int64_t> state_sizes() const {
    const int64_t cells = tile_.nx * tile_.nm * tile_.ny;
    int64_t memory = 0;
    for (const AxisLayers& layers : layers_) memory += 2 * layers.size(tile_);
    return {cells, cells, memory};
  }

  Wave wave() const {
    Wave wave{Field<T>(tile_), Field<T>(tile_), {}, {}, {}, {}};
    for (int axis = 0; axis < kAxes; ++axis)
      for (auto* field : {&wave.p[axis], &wave.next_p[axis], &wave.z[axis], &wave.next_z[axis]})
        *field = LayerField<T>(layers_[axis]);
    return wave;
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
    each_memory(wave, [&](T& value) { value = *memory++; });
  }

  void end(const Wave& wave, const Arrays<T>& state, int64_t shot) const {
    const std::vector<int64_t> sizes = state_sizes();
    T *w = state[0] + shot * sizes[0], *u = state[1] + shot * sizes[1];
    each_row([&](int64_t i, int64_t m, int64_t row) {
      std::memcpy(w + row, wave.w + tile_.at(i, m, 0), tile_.ny * sizeof(T));
      std::memcpy(u + row, wave.u + tile_.at(i, m, 0), tile_.ny * sizeof(T));
    });
    T* memory = state[2] + shot * sizes[2];
    each_memory(wave, [&](T& value) { *memory++ = value; });
  }

  void begin_adjoint(Wave& wave, const Arrays<const T>& cotangents, int64_t shot) {
    if (shot == 0) clear_faces(face_sums_);
    begin(wave, cotangents, shot);
    each_row([&](int64_t i, int64_t m, int64_t) {
      for (int64_t j = 0; j < tile_.ny; ++j) {
        const int64_t o = tile_.at(i, m, j);
        wave.w[o] *= k_[o];
        wave.u[o] *= -k_[o];  // in the first step back this is the cotangent of the pressure before
      }
    });
    negate_p(wave);
  }

  void end_adjoint(Wave& wave, const Arrays<const T>&, const Arrays<T>& cotangents, int64_t shot) const {
    if (cotangents.empty()) return;
    each_row([&](int64_t i, int64_t m, int64_t) {
      for (int64_t j = 0; j < tile_.ny; ++j) {
        const int64_t o = tile_.at(i, m, j);
        wave.w[o] /= k_[o];
        wave.u[o] /= -k_[o];
      }
    });
    negate_p(wave);
    end(wave, cotangents, shot);
  }

  // ---- a step ----

  // Order 8 gains little from more, and its frames between ranks are wider.
  int64_t depth() const { return tile_.reach > 2 ? 2 : 4; }
  int64_t history_size() const {
    return drive_cells() + (kDensity ? (tile_.nx + 2 * tile_.reach) * tile_.plane : 0);
  }

  T* first(Wave&) const { return nullptr; }
  int source_phase() const { return 0; }
  void prepare(int, Mode mode, Wave& wave, T* history, T* rim) const {
    if (mode != Mode::kReverse) return;
    T* rest = transfer_boxes<true>(tile_, rim_.ring, static_cast<T*>(wave.u), rim);
    rest = transfer_rows<true>(rim_.outside, rest, rows_of(history));
    if (!kDensity) return;
    transfer_boxes<true>(tile_, rim_.outside, static_cast<T*>(wave.w), rest);
    for (const Box& b : rim_.outside)
      for (int64_t i = b.i0; i < b.i1; ++i)
        for (int64_t m = b.m0; m < b.m1; ++m) keep_pressure(i, m, b.j0, b.j1, wave, history);
    end_streams();
  }

  void update(int, Mode mode, const Box& box, Wave& wave, T* history) const {
    if (tile_.reach == 2) return update<2>(mode, box, wave, history);
    update<4>(mode, box, wave, history);
  }

  // ---- boundary saving: the pressure before, around the inside, and the history outside ----

  int64_t rim_size() const { return rim_.ring_cells + (kDensity ? 2 : 1) * rim_.outside_cells; }
  void keep_before(const Wave& wave, T* rim) const {
    T* rest = transfer_boxes<false>(tile_, rim_.ring, static_cast<T*>(wave.u), rim);
    if (kDensity)
      transfer_boxes<false>(tile_, rim_.outside, static_cast<T*>(wave.w), rest + rim_.outside_cells);
  }
  void keep_after(T* history, T* rim) const {
    transfer_rows<false>(rim_.outside, rim + rim_.ring_cells, rows_of(history));
  }
  // Backwards the pressure before is the next one.
  void turn(Wave& wave) const { swap(wave.w, wave.u); }

  // Neighbours need the pressure only: an axis' layers lie in the tiles at the boundary, further from
  // the faces across this axis than the stencil reaches, and nothing moves their memories along others.
  void pieces(int, Mode, const Wave& wave, std::vector<Piece<T>>& list) const {
    add_pieces(wave.u, list);
  }
  void all_pieces(const Wave& wave, std::vector<Piece<T>>& list) const { add_pieces(wave.w, list); }

  void finish(int, Mode mode, Wave& wave) const {
    swap(wave.w, wave.u);
    for (int axis = 0; axis < kAxes; ++axis) {
      swap(wave.p[axis], wave.next_p[axis]);
      if (mode == Mode::kAdjoint) swap(wave.z[axis], wave.next_z[axis]);
    }
  }

  bool injects_first(int, Mode) const { return false; }
  void inject(int, Mode mode, const PointTable::Entry& e, Wave& wave, T value, T* history) const {
    if (mode == Mode::kReverse && !rim_.has(e.i, e.j, e.m)) return;  // the rim has it
    const T source = mode == Mode::kAdjoint ? value : share_ * value;
    wave.u[e.cell] += k_[e.cell] * source;
    if (mode == Mode::kSave || mode == Mode::kReverse ||
        (mode == Mode::kRim && !rim_.has(e.i, e.j, e.m)))
      history[history_row(e.i, e.m) + e.j] += source;
  }

  T sample(Mode mode, const PointTable::Entry& e, const Wave& wave) const {
    const T factor = mode == Mode::kAdjoint ? share_ : T(1);
    return factor * static_cast<T>(e.weight) * wave.w[e.cell];
  }

 private:
  using Filter = LayerFilter<T>;

  // Axes in the order of the grid: x, y, z.
  static constexpr int kOrder[kAxes] = {kRows, kMiddle, kColumns};
  static constexpr int kReach = Filter::kReach;
  static constexpr int64_t kLine = 512;  // cells of a row that are computed at once
  static constexpr int64_t kTogether = 2;  // rows behind each other, which read the same planes

  int64_t model_cells() const { return tile_.lx * tile_.lm * tile_.ly; }
  // Of the history: first what drives each cell, then the pressure.
  int64_t drive_cells() const { return tile_.nx * tile_.nm * history_stride_; }
  T* pressure_of(T* history) const { return history + drive_cells() + tile_.origin(); }
  int64_t history_row(int64_t i, int64_t m) const { return (i * tile_.nm + m) * history_stride_; }
  auto rows_of(T* history) const {
    return [this, history](int64_t i, int64_t m) { return history + history_row(i, m); };
  }

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
  using FaceFields = std::array<std::array<Field<T>, kReach>, kAxes>;
  void clear_faces(FaceFields& fields) {
    for (int axis = 0; kDensity && axis < kAxes; ++axis)
      for (int n = 0; n < tile_.reach; ++n) {
        fields[axis][n] = Field<T>(tile_);
        fields[axis][n].clear();
      }
  }
  // f(row of a field, model, index in it, cells, coefficient of the differences) for the rows of faces
  // between the cells and those n further on. The models begin with the faces n cells before the tile.
  template <class F>
  void each_face(const FaceFields& fields, const F& f) const {
    if (!kDensity) return;
    int model = 0;
    for (int axis = 0; axis < kAxes; ++axis)
      for (int n = 1; n <= tile_.reach; ++n) {
        const int64_t x = axis == kRows ? n : 0, y = axis == kMiddle ? n : 0, z = axis == kColumns ? n : 0;
        int64_t k = 0;
        ++model;
        for (int64_t i = -x; i < tile_.nx; ++i)
          for (int64_t m = -y; m < tile_.nm; ++m, k += tile_.ny + z)
            f(fields[axis][n - 1] + tile_.at(i, m, -z), model, k, tile_.ny + z, second_[axis][n]);
      }
  }
  // The memories in the order of the state.
  template <class F>
  void each_memory(const Wave& wave, const F& f) const {
    for (int axis : kOrder)
      for (T* memory : {static_cast<T*>(wave.p[axis]), static_cast<T*>(wave.z[axis])})
        layers_[axis].each_cell(tile_, [&](int64_t place, auto...) { f(memory[place]); });
  }
  void negate_p(Wave& wave) const {
    for (int axis = 0; axis < kAxes; ++axis)
      layers_[axis].each_cell(tile_, [p = static_cast<T*>(wave.p[axis])](int64_t o, auto...) { p[o] = -p[o]; });
  }

  void clear(Wave& wave) const {
    wave.w.clear();
    wave.u.clear();
    for (int axis = 0; axis < kAxes; ++axis)
      for (auto* field : {&wave.p[axis], &wave.next_p[axis], &wave.z[axis], &wave.next_z[axis]})
        field->clear();
  }

  void add_pieces(T* w, std::vector<Piece<T>>& list) const {
    const std::array<int64_t, kAxes> cells{tile_.nx, tile_.ny, tile_.nm};
    for (int axis = 0; axis < kAxes; ++axis) {
      // As in Piece: first the columns (across columns the rows), then the third axis.
      const int a = axis == kColumns ? kRows : kColumns, b = kAxes - axis - a;
      list.push_back({w, axis, 0, cells[a], 0, cells[b]});
    }
  }

  template <int R>
  void update(Mode mode, const Box& box, Wave& wave, T* history) const {
    switch (mode) {
      case Mode::kPlain: return rows<R, Mode::kPlain>(box, wave, history);
      case Mode::kSave: return rows<R, Mode::kSave>(box, wave, history);
      case Mode::kAdjoint: return rows<R, Mode::kAdjoint>(box, wave, history);
      case Mode::kBorn: return rows<R, Mode::kBorn>(box, wave, history);
      case Mode::kRim: return rows<R, Mode::kRim>(box, wave, history);
      case Mode::kReverse:
        if (const Box part = rim_.part(box); !part.empty())
          rows<R, Mode::kReverse>(part, wave, history);
    }
  }

  // Rows are computed in whole registers. Beyond the last column k is zero, which leaves zeros there.
  template <int R, Mode M>
  void rows(const Box& box, Wave& wave, T* history) const {
    const bool last = box.j1 == tile_.ny && tile_.neighbor[2 * kColumns + 1] == kNobody;
    const int64_t j1 = last ? whole_registers(tile_.ny) : box.j1;
    const int64_t block = middle_block();
    for (int64_t j = box.j0; j < j1; j += kLine) {
      Lines lines;
      for (int64_t begin = box.m0; begin < box.m1; begin += block)
        for (int64_t first = box.i0; first < box.i1; first += kTogether)
          for (int64_t m = begin; m < std::min(begin + block, box.m1); ++m)
            for (int64_t i = first; i < std::min(first + kTogether, box.i1); ++i)
              row<R, M>(i, m, j, std::min(j + kLine, j1), wave, history, lines);
    }
    if (M == Mode::kSave || M == Mode::kRim) end_streams();
  }

  // Cells of the middle axis in a block, for which the planes that the stencil reads stay in half of the
  // core's cache.
  int64_t middle_block() const {
    const int64_t row = (2 * tile_.reach + 4) * tile_.stride * static_cast<int64_t>(sizeof(T));
    return std::max<int64_t>(16, core_cache() / 2 / row);
  }

  struct alignas(64) Lines {
    T terms[kLine] = {};       // of layers along the columns, which leave zeros between the ends
    T drive[kLine + 16] = {};  // for the history
    T none[kLine];             // in place of memories outside of the layers
  };

  // Cells j0 to j1 of a row, at most kLine.
  template <int R, Mode M>
  void row(int64_t i, int64_t m, int64_t j0, int64_t j1, Wave& wave, T* history, Lines& lines) const {
    const AxisLayers& columns = layers_[kColumns];
    const int64_t left = std::clamp(columns.left_end(), j0, j1);
    const int64_t right = std::clamp(tile_.ny - columns.right_end(), left, j1);
    const int64_t end = std::min(j1, tile_.ny);
    constexpr Mode kStep = step_of(M);
    if (j0 < left) ends<R, kStep>(i, m, columns.left(i, m), j0, left, wave, lines.terms - j0, history);
    if (right < end) ends<R, kStep>(i, m, columns.right(i, m), right, end, wave, lines.terms - j0, history);
    if (kDensity && M == Mode::kAdjoint) first_faces<R>(i, m, j0, end, wave, history);
    if (kDensity && (M == Mode::kSave || M == Mode::kReverse)) keep_pressure(i, m, j0, end, wave, history);
    const bool x = layers_[kRows].is_near(i, R), y = layers_[kMiddle].is_near(m, R);
    if (x && y) cells<R, kStep, 2>(kRows, i, m, j0, j1, wave, lines, history);
    else if (x) cells<R, kStep, 1>(kRows, i, m, j0, j1, wave, lines, history);
    else if (y) cells<R, kStep, 1>(kMiddle, i, m, j0, j1, wave, lines, history);
    else cells<R, kStep, 0>(kRows, i, m, j0, j1, wave, lines, history);
    // Only the adjoint reads the history of a step, so it is written past the caches, in whole lines.
    const int64_t stop = j1 < tile_.ny ? j1 : history_stride_;
    const auto save = [&](int64_t begin, int64_t end) {
      stream(history + history_row(i, m) + begin, lines.drive + begin - j0, end - begin);
    };
    if (M == Mode::kReverse) std::memcpy(history + history_row(i, m) + j0, lines.drive, (stop - j0) * sizeof(T));
    if (M == Mode::kSave || (M == Mode::kRim && (x || y)))
      save(j0, stop);
    else if (M == Mode::kRim)
      save(j0, left), save(right, std::max(right, end));
  }

  // Keeps the pressure before a step in cells j0 to j1 of a row, and in the margin next to them.
  void keep_pressure(int64_t i, int64_t m, int64_t j0, int64_t j1, const Wave& wave, T* history) const {
    const int64_t reach = tile_.reach, begin = j0 == 0 ? -Tile::kMargin : j0;
    const int64_t end = j1 == tile_.ny ? tile_.stride - Tile::kMargin : j1;
    for (int64_t x = i ? i : -reach; x <= (i < tile_.nx - 1 ? i : i + reach); ++x)
      for (int64_t y = m ? m : -reach; y <= (m < tile_.nm - 1 ? m : m + reach); ++y) {
        const int64_t o = tile_.at(x, y, begin);
        stream(pressure_of(history) + o, wave.w + o, end - begin);
      }
  }

  // The buoyancies of a row along an axis, times coefficients, and the sums of their cotangents, or their
  // tangents: between cell j and those n + 1 further on.
  template <int R>
  struct Faces {
    const T* b[R];
    T* sum[R];
  };
  template <int R, Mode M>
  MPIGRAD_INLINE Faces<R> faces(int axis, int64_t o) const {
    Faces<R> f{};
    for (int n = 0; kDensity && n < R; ++n) {
      f.b[n] = faces_[axis][n] + o;
      if (M == Mode::kAdjoint || M == Mode::kBorn) f.sum[n] = face_sums_[axis][n] + o;
    }
    return f;
  }

  // The cotangents of the faces before the first cells at sides of the grid. Beyond them all is zero.
  template <int R>
  void first_faces(int64_t i, int64_t m, int64_t j0, int64_t j1, const Wave& wave, T* history) const {
    const int64_t o = tile_.at(i, m, 0);
    const T *w = wave.w + o, *before = pressure_of(history) + o;
    for (int axis : {kRows, kMiddle}) {
      const int64_t a = axis == kRows ? i : m, step = axis == kRows ? tile_.plane : tile_.stride;
      if (a >= R || tile_.neighbor[2 * axis] != kNobody) continue;
      const typename Filter::Factors* f = filter_[axis].at(a);
      const T* z = wave.z[axis] + f->rows.first + (axis == kRows ? m : i) * f->rows.pitch;
      const Faces<R> face = faces<R, Mode::kAdjoint>(axis, o);
      for (int64_t n = a; n < R; ++n)
        for (int64_t j = j0; j < j1; ++j)
          face.sum[n][j - (n + 1) * step] -= f[-n - 1].ahead[n] * (f->k * w[j] + f->e * z[j]) * before[j];
    }
    if (tile_.neighbor[2 * kColumns] != kNobody) return;
    const Filter& f = filter_[kColumns];
    const T* z = wave.z[kColumns] + layers_[kColumns].left(i, m);
    const Faces<R> face = faces<R, Mode::kAdjoint>(kColumns, o);
    for (int64_t j = j0; j < std::min<int64_t>(R, j1); ++j)
      for (int64_t n = j; n < R; ++n) {
        const T memory = layers_[kColumns].left_end() ? f.e()[j] * z[j] : T(0);
        face.sum[n][j - n - 1] -= f.ahead(n)[j - n - 1] * (f.k()[j] * w[j] + memory) * before[j];
      }
  }

  // What a row reads and writes of the layers of x or y.
  template <int R>
  struct Memories {
    const T *p[2 * R], *z[2 * R + 1];  // from R cells before
    T *next_p, *next_z;
    T k[2 * R + 1], e[2 * R + 1], e_half[2 * R], ahead[R], behind[R], first[R], b, b_half;
  };
  template <int R>
  MPIGRAD_INLINE Memories<R> memories(Axis axis, bool back, int64_t i, int64_t m, const Wave& wave,
                                      T* none) const {
    Memories<R> r;
    const typename Filter::Factors* f = filter_[axis].at(axis == kRows ? i : m);
    const int64_t other = axis == kRows ? m : i;
    const auto place = [&](int n) { return f[n].rows.first + other * f[n].rows.pitch; };
    for (int n = -R; n <= R; ++n) {
      r.z[n + R] = wave.z[axis] + place(n);
      r.k[n + R] = f[n].k, r.e[n + R] = f[n].e;
      if (n == R) continue;
      r.p[n + R] = wave.p[axis] + place(n);
      r.e_half[n + R] = f[n].e_half;
    }
    for (int n = 0; n < R; ++n) {
      r.ahead[n] = f->ahead[n], r.behind[n] = f[-n - 1].ahead[n];
      r.first[n] = first_[axis][n];
    }
    r.b = f->b, r.b_half = f->b_half;
    r.next_p = f->within ? wave.next_p[axis] + place(0) : none;
    r.next_z = f->within ? (back ? wave.next_z[axis] : wave.z[axis]) + place(0) : none;
    return r;
  }

  // The next row, while this one is computed: other loads wait for memory longer than they compute.
  MPIGRAD_INLINE static void prefetch(const T* p) { __builtin_prefetch(p); }
  template <int R>
  MPIGRAD_INLINE static void prefetch(const Memories<R>& r, int64_t j, int64_t next) {
    prefetch(r.p[2 * R - 1] + j + next), prefetch(r.next_p + j + next);
    prefetch(r.z[2 * R] + j + next), prefetch(r.next_z + j + next);
  }

  // A cell's second derivative outside of layers, without the part of the cell itself if the density is
  // constant. `before`: the pressure before the step.
  template <Mode M, int R>
  MPIGRAD_INLINE static T along(const T* w, int64_t j, int64_t step, const T* second, const Faces<R>& face,
                                const T* before) {
    T sum = 0;
    for (int n = 1; n <= R; ++n) {
      const int64_t far = n * step;
      if (!kDensity) {
        sum += second[n] * (w[j + far] + w[j - far]);
        continue;
      }
      const T up = w[j + far] - w[j];
      sum += face.b[n - 1][j] * up - face.b[n - 1][j - far] * (w[j] - w[j - far]);
      if (M == Mode::kAdjoint) face.sum[n - 1][j] -= up * (before[j + far] - before[j]);
      if (M == Mode::kBorn)
        sum += face.sum[n - 1][j] * (before[j + far] - before[j]) -
               face.sum[n - 1][j - far] * (before[j] - before[j - far]);
    }
    return sum;
  }

  // A cell's second derivative along x or y, filtered in layers, whose memories it steps. `second`: the
  // coefficients outside of layers.
  template <Mode M, bool kLayers, int R>
  MPIGRAD_INLINE static T across(const T* w, int64_t j, int64_t step, const T* second,
                                 const Memories<R>& r, const Faces<R>& face, const T* before) {
    if (!kLayers) return along<M>(w, j, step, second, face, before);
    constexpr bool kBack = M == Mode::kAdjoint, kBorn = M == Mode::kBorn && kDensity;
    // Of faces, and of their tangents or cotangents.
    const auto b = [&](int n, int64_t at) { return kDensity ? face.b[n][at] : T(1); };
    T sum = 0, slope = 0, slope_before = 0;
    if (kDensity && (kBack || kBorn))
      for (int n = 0; n < R; ++n)
        slope_before += r.first[n] * (before[j + (n + 1) * step] - before[j - n * step]);
    if (kBack) {
      T d[2 * R + 1];
      for (int n = 0; n <= 2 * R; ++n) d[n] = r.k[n] * w[j + (n - R) * step] + r.e[n] * r.z[n][j];
      for (int n = 0; n < R; ++n) {
        const int64_t far = (n + 1) * step;
        const T up = r.ahead[n] * (d[R + n + 1] - d[R]);
        sum += b(n, j) * up - r.behind[n] * b(n, j - far) * (d[R] - d[R - n - 1]);
        const T behind = r.e_half[R - n - 1] * b(0, j - far) * r.p[R - n - 1][j];
        sum += r.first[n] * (r.e_half[R + n] * b(0, j + n * step) * r.p[R + n][j] - behind);
        slope += r.first[n] * (d[R + n + 1] - d[R - n]);
        if (kDensity) face.sum[n][j] -= up * (before[j + far] - before[j]);
      }
      if (kDensity) face.sum[0][j] -= r.e_half[R] * slope_before * r.p[R][j];
      r.next_p[j] = r.b_half * r.p[R][j] + slope;
      r.next_z[j] = r.b * r.z[R][j] + w[j];
      return sum;
    }
    for (int n = 0; n < R; ++n) {
      const int64_t far = (n + 1) * step;
      sum += r.ahead[n] * b(n, j) * (w[j + far] - w[j]) - r.behind[n] * b(n, j - far) * (w[j] - w[j - far]);
      sum += r.first[n] * (r.p[R + n][j] - r.p[R - n - 1][j]);
      slope += r.first[n] * (w[j + far] - w[j - n * step]);
      if (kBorn)
        sum += r.ahead[n] * face.sum[n][j] * (before[j + far] - before[j]) -
               r.behind[n] * face.sum[n][j - far] * (before[j] - before[j - far]);
    }
    slope = b(0, j) * slope + (kBorn ? face.sum[0][j] * slope_before : T(0));
    const T memory = r.z[R][j];
    r.next_p[j] = r.b_half * r.p[R][j] + r.e_half[R] * slope;
    r.next_z[j] = r.b * memory + r.e[R] * sum;
    return r.k[R] * sum + memory;
  }

  // Modes that compute the same in the cells share their code, because it takes long to compile: three of
  // them keep what drives each cell, and differ in what they do with it afterwards.
  static constexpr Mode step_of(Mode mode) {
    return mode == Mode::kRim || mode == Mode::kReverse ? Mode::kSave : mode;
  }

  // The step of a row that is near the layers of no axis, of the axis `near`, or of both x and y
  // (kNear: 0, 1 or 2).
  template <int R, Mode M, int kNear>
  void cells(Axis near, int64_t i, int64_t m, int64_t j0, int64_t j1, Wave& wave, Lines& lines,
             T* history) const {
    constexpr bool kBack = M == Mode::kAdjoint;
    const int64_t o = tile_.at(i, m, 0), stride = tile_.stride, plane = tile_.plane;
    // Only rows near one axis have another order of axes than x and y.
    const Axis a = kNear == 1 ? near : kRows, b = a == kRows ? kMiddle : kRows;
    const int64_t step_a = a == kRows ? plane : stride, step_b = a == kRows ? stride : plane;
    const T* __restrict__ w = wave.w + o;
    T* __restrict__ u = wave.u + o;
    const T* __restrict__ k = k_ + o;
    const T* __restrict__ h = history + (M == Mode::kPlain ? 0 : history_row(i, m));
    T* __restrict__ sum = sum_ + o;
    const T* __restrict__ terms = lines.terms - j0;
    T* __restrict__ drives = lines.drive - j0;
    T* none = lines.none - j0;
    const Memories<R> layers_a = kNear > 0 ? memories<R>(a, kBack, i, m, wave, none) : Memories<R>{};
    const Memories<R> layers_b = kNear > 1 ? memories<R>(b, kBack, i, m, wave, none) : Memories<R>{};
    T cz[R + 1], ca[R + 1], cb[R + 1];  // copied, so that no store can change them
    for (int n = 0; n <= R; ++n)
      cz[n] = second_[kColumns][n], ca[n] = second_[a][n], cb[n] = second_[b][n];
    const T c0 = kDensity ? T(0) : cz[0] + (kNear > 0 ? 0 : ca[0]) + (kNear > 1 ? 0 : cb[0]);
    const Faces<R> face = faces<R, M>(kColumns, o), face_a = faces<R, M>(a, o), face_b = faces<R, M>(b, o);
    const T* before = kDensity && (M == Mode::kAdjoint || M == Mode::kBorn) ? pressure_of(history) + o : w;
    in_registers(j0, j1, [&](int64_t begin, auto count) __attribute__((always_inline)) {
      for (const T* next : {w + R * plane + stride, static_cast<const T*>(u + stride), k + stride})
        prefetch(next + begin);
      if (kBack) prefetch(sum + begin + stride), prefetch(h + begin + history_stride_);
      if (kNear > 0) prefetch(layers_a, begin, layers_[a].next_row());
      if (kNear > 1) prefetch(layers_b, begin, layers_[b].next_row());
#pragma omp simd
      for (int64_t j = begin; j < begin + count; ++j) {
        T drive = c0 * w[j] + terms[j] + along<M>(w, j, 1, cz, face, before);
        drive += across<M, (kNear > 0)>(w, j, step_a, ca, layers_a, face_a, before) +
                 across<M, (kNear > 1)>(w, j, step_b, cb, layers_b, face_b, before);
        if (M == Mode::kAdjoint) sum[j] += w[j] * h[j];
        T next = 2 * w[j] - u[j] + k[j] * drive;
        if (M == Mode::kBorn) next += sum[j] * h[j];
        if (M == Mode::kSave) drives[j] = drive;
        u[j] = next;
      }
    });
  }

  // Terms of the layers along the columns at an end of a row, and the step of their memories. The row's
  // cell 0 would be at `place` of them.
  template <int R, Mode M>
  void ends(int64_t i, int64_t m, int64_t place, int64_t j0, int64_t j1, Wave& wave,
            T* __restrict__ terms, T* history) const {
    constexpr bool kBack = M == Mode::kAdjoint, kBorn = M == Mode::kBorn && kDensity;
    const Filter& f = filter_[kColumns];
    const int64_t o = tile_.at(i, m, 0);
    const T* __restrict__ w = wave.w + o;
    const T* before = kDensity && (kBack || kBorn) ? pressure_of(history) + o : wave.w + o;
    const T* __restrict__ p = wave.p[kColumns] + place;
    const T* z = wave.z[kColumns] + place;
    T* __restrict__ next_p = wave.next_p[kColumns] + place;
    T* next_z = (kBack ? wave.next_z[kColumns] : wave.z[kColumns]) + place;
    const T *k = f.k(), *b = f.b(), *e = f.e(), *b_half = f.b_half(), *e_half = f.e_half();
    const T* within = f.within();
    const Faces<R> face = faces<R, M>(kColumns, o);
    const T* ahead[R];
    T second[R], first[R];
    for (int n = 0; n < R; ++n) {
      ahead[n] = f.ahead(n), first[n] = first_[kColumns][n];
      second[n] = kDensity ? T(1) : second_[kColumns][n + 1];
    }
    const auto of_face = [&](int n, int64_t at) { return kDensity ? face.b[n][at] : T(1); };
    in_registers(j0, j1, [&](int64_t begin, auto count) __attribute__((always_inline)) {
      for (const T* next : {p, z, static_cast<const T*>(next_p), static_cast<const T*>(next_z)})
        prefetch(next + begin + layers_[kColumns].next_row());
#pragma omp simd
      for (int64_t j = begin; j < begin + count; ++j) {
        T filtered = 0, plain = 0, slope = 0, slope_before = 0;
        if (kDensity && (kBack || kBorn))
          for (int n = 0; n < R; ++n) slope_before += first[n] * (before[j + n + 1] - before[j - n]);
        if (kBack) {
          T d[2 * R + 1];
          for (int n = 0; n <= 2 * R; ++n)
            d[n] = k[j + n - R] * w[j + n - R] + e[j + n - R] * z[j + n - R];
          for (int n = 0; n < R; ++n) {
            const int far = n + 1;
            const T up = ahead[n][j] * (d[R + far] - d[R]), plain_up = second[n] * (w[j + far] - w[j]);
            filtered += of_face(n, j) * up - ahead[n][j - far] * of_face(n, j - far) * (d[R] - d[R - far]);
            filtered += first[n] * (e_half[j + n] * of_face(0, j + n) * p[j + n] -
                                    e_half[j - far] * of_face(0, j - far) * p[j - far]);
            plain += of_face(n, j) * plain_up - second[n] * of_face(n, j - far) * (w[j] - w[j - far]);
            slope += first[n] * (d[R + far] - d[R - n]);
            if (kDensity) face.sum[n][j] -= (up - plain_up) * (before[j + far] - before[j]);
          }
          if (kDensity) face.sum[0][j] -= e_half[j] * slope_before * p[j];
          terms[j] = filtered - plain;
          next_z[j] = within[j] * (b[j] * z[j] + w[j]);
          next_p[j] = within[j] * (b_half[j] * p[j] + slope);
        } else {
          for (int n = 0; n < R; ++n) {
            const int far = n + 1;
            T up = of_face(n, j) * (w[j + far] - w[j]), down = of_face(n, j - far) * (w[j] - w[j - far]);
            filtered += first[n] * (p[j + n] - p[j - far]);
            slope += first[n] * (w[j + far] - w[j - n]);
            if (kBorn) {
              up += face.sum[n][j] * (before[j + far] - before[j]);
              down += face.sum[n][j - far] * (before[j] - before[j - far]);
            }
            filtered += ahead[n][j] * up - ahead[n][j - far] * down;
            plain += second[n] * (up - down);
          }
          slope = of_face(0, j) * slope + (kBorn ? face.sum[0][j] * slope_before : T(0));
          const T memory = z[j];
          terms[j] = k[j] * filtered + memory - plain;
          next_z[j] = b[j] * memory + e[j] * filtered;
          next_p[j] = b_half[j] * p[j] + e_half[j] * slope;
        }
      }
    });
  }

  const Setup& setup_;
  const Tile& tile_;
  const T dt_;
  T share_ = 0;  // of a source in its cell
  // Coefficients of the derivatives in the cells, and between them, by axis of tile.h.
  T second_[kAxes][kReach + 1] = {}, first_[kAxes][kReach] = {};
  AxisLayers layers_[kAxes];
  Filter filter_[kAxes];
  Rim rim_{tile_, {}, 0};
  int64_t history_stride_ = 0;
  const T* velocity_ = nullptr;
  Field<T> k_;    // (dt c)^2
  Field<T> sum_;  // k times the cotangent of k, or in tangents the tangent of k
  FaceFields faces_, face_sums_;  // see Faces
};

}  // namespace mpigrad::waves
