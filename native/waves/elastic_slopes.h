// Slopes of the fields of elastic waves along rows of cells: differences, with what layers and a surface do to them.
#pragma once

#include "waves/elastic_rows.h"

namespace mpigrad::waves::elastic {

// One row of values for each stress or strain rate, indexed by the column.
template <class T, int N>
using Rows = std::array<T*, Shape<N>::kStresses>;

// Cells j0 to j1 of a row: where it begins in fields, and in arrays without margins, and its number.
struct Row {
  int64_t i, m, j0, j1, o, c, number;
};

template <class T, int N, int R>
class Slopes {
  using Memories = elastic::Memories<T, N>;
  using Motion = elastic::Motion<T, N>;
  using Weights = elastic::Weights<T, N, R>;
  using Surface = elastic::Surface<T, R>;
  using Rows = elastic::Rows<T, N>;
  static constexpr int kLast = Shape<N>::kLast, kStresses = Shape<N>::kStresses;

 public:
  // profiles: a and b at the centres, a and b half a cell further, along each axis. With a surface, its table
  // is the last one.
  explicit Slopes(const Setup& setup)
      : tile_(setup.tile), weights_(setup.dt, setup.spacing), back_(-setup.dt, setup.spacing) {
    const std::array<int64_t, 3> cells{tile_.nx, tile_.ny, tile_.nm};
    for (int axis = 0; axis < N; ++axis) {
      const Axis of = Shape<N>::axis(axis);
      layers_[axis] = AxisLayers(tile_, of, R);
      for (int half = 0; half < 2; ++half)
        profiles_[axis][half] = Profile<T>(setup.profiles[4 * axis + 2 * half],
                                           setup.profiles[4 * axis + 2 * half + 1], setup.dt, cells[of],
                                           tile_.layers[2 * of], tile_.layers[2 * of + 1]);
      memory_size_ += N * padded_memory(axis);
      // A tile without a neighbour behind it lies at the surface.
      if (setup.surface == of && tile_.neighbor[2 * of + 1] == kNobody)
        surface_ = Surface(axis, setup.profiles.back(), setup.dt / setup.spacing[of]);
    }
  }

  const Weights& weights() const { return weights_; }
  const Weights& back() const { return back_; }  // of steps back
  const AxisLayers& layers(int axis) const { return layers_[axis]; }
  // Rows by which the stresses follow the velocities in one pass. Next to a surface across the rows, all
  // differences may reach to the last row.
  int64_t lag() const { return surface_.axis == 0 ? std::max(R, Surface::kNear - 1) : R; }

  Row row(int64_t i, int64_t m, int64_t j0, int64_t j1) const {
    const int64_t number = i * tile_.nm + m;
    return {i, m, j0, j1, tile_.at(i, m, 0), number * tile_.ny, number};
  }
  template <class F>
  void each_row(const F& f) const {
    for (int64_t i = 0; i < tile_.nx; ++i)
      for (int64_t m = 0; m < tile_.nm; ++m) f(row(i, m, 0, tile_.ny));
  }

  // ---- memories of the layers ----

  // Fields and memories of a history begin some cache lines apart, as Field does.
  static constexpr int64_t kShift = 1088 / sizeof(T);
  int64_t memory_size() const { return memory_size_; }
  Memories memories(T* data) const {
    Memories m{};
    for (int axis = 0; axis < N; ++axis)
      for (T*& memory : m[axis]) memory = std::exchange(data, data + padded_memory(axis));
    return m;
  }

  // ---- the surface ----

  // Cells between a cell and the surface.
  int64_t depth(int64_t i, int64_t m, int64_t j) const {
    if (surface_.axis < 0) return Surface::kNear;
    return surface_.axis == 0 ? tile_.nx - 1 - i : surface_.axis == kLast ? tile_.ny - 1 - j : tile_.nm - 1 - m;
  }
  // Of a velocity, of a stress N + its pair of axes, or of the normal stresses.
  static constexpr int kNormal = -1;
  T weight(int field, int64_t depth) const {
    if (depth >= Surface::kNear) return 1;
    bool half = field == surface_.axis;
    for (int a = 0; a < N; ++a)
      for (int b = a + 1; b < N; ++b)
        half |= field == stress_of<N>(a, b) && (a == surface_.axis || b == surface_.axis);
    return surface_.weight[half][depth];
  }

  // ---- rows ----

  // Fetches lines that the next row will read, while this one is computed.
  MPIGRAD_INLINE static void prefetch(const Row& r, std::initializer_list<const T*> rows) {
    for (const T* row : rows)
      for (int64_t j = r.j0; j < r.j1; j += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + j);
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
      const T dt = k.dt;
      const auto cx = k.of[0], cy = k.of[1], cz = k.of[kLast];
#pragma omp simd
      for (int64_t j = r.j0; j < r.j1; ++j) {
        const T gx = slope<kX, false>(x, j, plane, cx, dt, rx);
        T gy = 0;
        if constexpr (N == 3) gy = slope<kY, false>(y, j, stride, cy, dt, ry);
        const T gz = difference<false>(cz, [&](int n) __attribute__((always_inline)) { return z(j + n); });
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
      const T dt = k.dt;
      const auto ca = k.of[A], cb = k.of[B];
#pragma omp simd
      for (int64_t j = r.j0; j < r.j1; ++j)
        use(j, slope<kA, true>(vb, j, step_a, ca, dt, ra) + slope<kB, true>(va, j, step_b, cb, dt, rb));
    });
    if constexpr (B == kLast) at_ends<L, true>(r, A, kBack, from, to, k, va, use);
    at_surface<A>(r, true, k, vb, use), at_surface<B>(r, true, k, va, use);
  }

  // One of four sets of rows that this thread may write, with the values of earlier uses.
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

  // What the differences along an axis have next to the surface besides those of the inside: add(j, value).
  // half: between the cells.
  template <int Axis, class F, class Add>
  MPIGRAD_INLINE void at_surface(const Row& r, bool half, const Weights& k, const F& field, const Add& add) const {
    if (surface_.axis != Axis) return;
    constexpr int kNear = Surface::kNear, kPoints = Surface::kPoints;
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
  // f(kind of the layers of x, kind of y) as constants: L in their rows, or near them for the adjoint.
  template <Layers L, bool kHasX = true, bool kHasY = true, class F>
  void with_layers(const Row& r, const F& f) const {
    using On = std::integral_constant<Layers, L>;
    using Off = std::integral_constant<Layers, Layers::kNone>;
    if constexpr (N == 2 && kHasY) return with_layers<L, kHasX, false>(r, f);
    if constexpr (L == Layers::kNone) return f(Off(), Off());
    const auto acts = [](const AxisLayers& layers, int64_t a) {
      return L == Layers::kBack ? layers.is_near(a, R) : layers.has(a);
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
  MPIGRAD_INLINE RowLayers<T, R> row_layers(int axis, int b, bool of_stress, const Row& r, const Memories& from,
                                         const Memories& to) const {
    RowLayers<T, R> f{};
    if (L == Layers::kNone) return f;
    const int64_t a = axis == 0 ? r.i : r.m, other = axis == 0 ? r.m : r.i;
    const Profile<T>& profile = profiles_[axis][(axis == b) == of_stress];
    const int k = memory_of(axis, b);
    const auto place = [&](int64_t n) {
      const AxisLayers::Rows rows = layers_[axis].rows(a + n);
      return rows.first + other * rows.pitch;
    };
    constexpr int kAround = L == Layers::kBack ? R : 0;
    for (int n = -kAround; n <= kAround; ++n) {
      f.memory[R + n] = from[axis][k] + place(n);
      f.a[R + n] = profile.a(L)[a + n];
    }
    // Outside of the layers b is zero, and so is what is written to the row of zeros.
    f.next = to[axis][k] + place(0);
    f.b = profile.b()[a];
    const int64_t next_row = layers_[axis].next_row();
    prefetch(r, {f.memory[R] + next_row});
    if (L != Layers::kRead && f.next != f.memory[R]) prefetch(r, {f.next + next_row});
    return f;
  }

  // The same along the columns, at both ends of a row.
  template <Layers L, bool kAhead, class F, class Add>
  MPIGRAD_INLINE void at_ends(const Row& r, int b, bool of_stress, const Memories& from,
                              const Memories& to, const Weights& w, const F& field, const Add& add) const {
    if (L == Layers::kNone) return;
    const AxisLayers& columns = layers_[kLast];
    const Profile<T>& profile = profiles_[kLast][(b == kLast) == of_stress];
    const int k = memory_of(kLast, b);
    const int64_t left = std::clamp(columns.left_end(), r.j0, r.j1);
    const int64_t right = std::clamp(tile_.ny - columns.right_end(), left, r.j1);
    const auto end = [&](int64_t j0, int64_t j1, int64_t place) {
      const EndLayers<T> layers{from[kLast][k] + place, profile.a(L), profile.b(), to[kLast][k] + place,
                                columns.next_row()};
      slope_at_end<L, kAhead>(field, j0, j1, w.of[kLast], w.dt, layers, add);
    };
    if (r.j0 < left) end(r.j0, left, columns.left(r.i, r.m));
    if (right < r.j1) end(right, r.j1, columns.right(r.i, r.m));
  }

 private:
  int64_t padded_memory(int axis) const { return (layers_[axis].cells() + 15) / 16 * 16 + kShift; }
  static auto velocity(const T* v) {
    return [v](int64_t j) __attribute__((always_inline)) { return v[j]; };
  }

  const Tile& tile_;
  const Weights weights_, back_;
  AxisLayers layers_[N];
  Profile<T> profiles_[N][2];  // at the centres, and half a cell further
  int64_t memory_size_ = 0;
  Surface surface_;
};

}  // namespace mpigrad::waves::elastic
