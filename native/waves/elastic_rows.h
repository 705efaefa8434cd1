// Elastic waves on two or three axes on a staggered grid, of order 2 R (fourth or eighth), with C-PML: rows of
// cells (reference.py has the equations). Axes and components are in the order of the grid: x, y, and on three axes z.
// The columns are the last axis.
//
// A forward wave has the normal stresses s_xx, s_yy (and s_zz). The adjoint has the scaled cotangents of their
// mean p and of the deviators d_x = s_xx - p (and d_z = s_zz - p), for which Hooke's law is diagonal:
//     p += dt (lambda + 2 mu / axes) e,   d_i += dt 2 mu (D v_i - e / axes),   e = sum of D v_i,
//     s_ij += dt m_ij (D v_i + D v_j),  v~ += dt b (sum of D s_ij),
// with -dt. The cotangents of the strain rates are p + d_x, p - d_x (- d_z) and p + d_z. (In a fluid, mu is
// tiny: deviators that were differences of normal stresses would be lost to rounding.)
#pragma once

#include "waves/layer_field.h"

namespace mpigrad::waves::elastic {

// What depends on the number N of axes.
template <int N>
struct Shape {
  static constexpr int kLast = N - 1;  // the columns
  static constexpr int kPairs = N * (N - 1) / 2, kStresses = N + kPairs;
  static constexpr Axis axis(int a) { return a == 0 ? kRows : a == kLast ? kColumns : kMiddle; }
};
// The stress between two axes: xx, yy (zz), xy (xz, yz).
template <int N>
constexpr int stress_of(int a, int b) {
  return a == b ? a : N - 1 + a + b;
}
// Of the memories of an axis, that of the velocity or stress with component b: the axis itself first.
constexpr int memory_of(int axis, int b) { return b == axis ? 0 : b < axis ? b + 1 : b; }
constexpr int component_of(int axis, int memory) {
  return memory == 0 ? axis : memory <= axis ? memory - 1 : memory;
}

// Of values for each axis. On two axes `y` is not used, and z is the last one.
template <int N, class T>
MPIGRAD_INLINE T total(T x, T y, T z) {
  return N == 3 ? x + y + z : x + z;
}

template <class T, int N>
using Stress = std::array<T*, Shape<N>::kStresses>;
template <class T, int N>
using Memories = std::array<std::array<T*, N>, N>;  // by axis, and as memory_of

// Velocities and the memories of their derivatives: what a history keeps of each step.
template <class T, int N>
struct Motion {
  std::array<T*, N> v{};
  Memories<T, N> memory{};
};

// One value for each cell, without margins. bulk: lambda + 2 mu / axes, shears: of the pairs of axes.
// Of gradients, sums over steps that lack a division by the parameter, for buoyancies by its square.
template <class T, int N>
struct Parameters {
  T *bulk = nullptr, *shear = nullptr;
  std::array<T*, Shape<N>::kPairs> shears{};
  std::array<T*, N> buoyancy{};

  static constexpr int kCount = 2 + Shape<N>::kPairs + N;
  // next(): the arrays in their order.
  template <class Next>
  explicit Parameters(Next next) {
    bulk = next(), shear = next();
    for (T*& mu : shears) mu = next();
    for (T*& b : buoyancy) b = next();
  }
  Parameters() = default;
};

// The coefficients of a difference: of the values half a cell away, one and a half, and so on.
template <class T, int R>
using Difference = std::array<T, R>;

// dt times the coefficients along each axis, negated in the adjoint.
template <class T, int N, int R>
struct Weights {
  T dt;
  std::array<Difference<T, R>, N> of;

  Weights(double dt, const std::array<double, 3>& spacing) : dt(static_cast<T>(dt)) {
    static_assert(R == 2 || R == 4);
    const std::array<double, R> unit = [] {
      if constexpr (R == 2)
        return std::array<double, R>{27. / 24, -1. / 24};
      else
        return std::array<double, R>{1225. / 1024, -245. / 3072, 49. / 5120, -5. / 7168};
    }();
    for (int axis = 0; axis < N; ++axis)
      for (int n = 0; n < R; ++n) of[axis][n] = static_cast<T>(dt * unit[n] / spacing[Shape<N>::axis(axis)]);
  }
};

// What the layers do to a derivative g: nothing, g + psi with psi <- b psi + a g, g + psi with the psi of
// a history, or the transpose, the derivative of u + a (phi + u) with phi <- b (phi + u).
enum class Layers { kNone, kStep, kRead, kBack };

// The coefficients along an axis, zero outside of its layers, with a margin.
template <class T>
class Profile {
 public:
  Profile() = default;
  // a and b: in the layers before, then behind.
  Profile(const std::vector<double>& a, const std::vector<double>& b, double dt, int64_t cells,
          int64_t before, int64_t behind)
      : a_(cells + 2 * kMargin), rate_(a_), b_(a_) {
    for (int64_t k = 0; k < before + behind; ++k) {
      const int64_t place = kMargin + (k < before ? k : k + cells - before - behind);
      a_[place] = static_cast<T>(a[k]), b_[place] = static_cast<T>(b[k]);
      rate_[place] = static_cast<T>(a[k] / dt);
    }
  }
  // a, over dt in steps whose differences are times dt.
  const T* a(Layers kind) const { return (kind == Layers::kStep ? rate_ : a_).data() + kMargin; }
  const T* b() const { return b_.data() + kMargin; }

 private:
  static constexpr int64_t kMargin = 2 * kRegister;
  std::vector<T> a_, rate_, b_;
};

// The layers of x or y at a row, for one derivative.
template <class T, size_t R>
struct RowLayers {
  const T* memory[2 * R + 1];  // of the rows from R before to R behind. Only kBack has more than the own one.
  T* next;
  T a[2 * R + 1], b;
};
// The layers at an end of a row.
template <class T>
struct EndLayers {
  const T *memory, *a, *b;
  T* next;
  int64_t next_row;  // cells between the memories of two rows
};

// The last side of an axis, if it has no traction (media.py has the differences). The points half a cell behind
// the last cells lie on it. With the weights W of the points, the difference to half points is minus the
// transpose of that to the centres: so the adjoint's variables are those of the inside divided by W.
template <class T, int R>
struct Surface {
  static constexpr int kNear = R == 2 ? 4 : 7, kPoints = kNear + R;
  int axis = -1;  // none
  // To the centres and to half points: at this distance from the last cell, the coefficients of the last
  // points, less those of the inside, times dt over the spacing.
  T table[2][kNear][kPoints] = {};
  T weight[2][kNear] = {};

  Surface() = default;
  Surface(int axis, const std::vector<double>& values, double scale) : axis(axis) {
    const double* value = values.data();
    for (auto& rows : table)
      for (auto& row : rows)
        for (T& c : row) c = static_cast<T>(scale * *value++);
    for (auto& weights : weight)
      for (T& w : weights) w = static_cast<T>(*value++);
  }
};

// The difference of value(n), n steps further, half a step further (kAhead) or half a step back.
template <bool kAhead, class T, size_t R, class F>
MPIGRAD_INLINE T difference(const std::array<T, R>& c, const F& value) {
  constexpr int o = kAhead ? 0 : -1;
  T g = c[0] * (value(o + 1) - value(o));
#pragma GCC unroll 4
  for (int n = 1; n < static_cast<int>(R); ++n) g += c[n] * (value(o + 1 + n) - value(o - n));
  return g;
}

// The derivative of field(j) at j along x or y, whose memory it steps.
template <Layers L, bool kAhead, class T, size_t R, class F>
MPIGRAD_INLINE T slope(const F& field, int64_t j, int64_t step, const std::array<T, R>& c, T dt,
                       const RowLayers<T, R>& r) {
  constexpr int kOwn = R;
  if constexpr (L == Layers::kBack) {
    r.next[j] = r.b * (r.memory[kOwn][j] + field(j));
    return difference<kAhead>(c, [&](int n) __attribute__((always_inline)) {
      const T u = field(j + n * step);
      return u + r.a[kOwn + n] * (r.memory[kOwn + n][j] + u);
    });
  } else {
    const T g = difference<kAhead>(
        c, [&](int n) __attribute__((always_inline)) { return field(j + n * step); });
    if constexpr (L == Layers::kNone) return g;
    if constexpr (L == Layers::kRead) return g + dt * r.memory[kOwn][j];
    const T m = r.b * r.memory[kOwn][j] + r.a[kOwn] * g;
    r.next[j] = m;
    return g + dt * m;
  }
}

// What the layers at an end of a row add to the derivative of field(j) along it: add(j, value).
template <Layers L, bool kAhead, class T, size_t R, class F, class Add>
MPIGRAD_INLINE void slope_at_end(const F& field, int64_t j0, int64_t j1, const std::array<T, R>& c, T dt,
                                 const EndLayers<T>& r, const Add& add) {
  const T *memory = r.memory, *a = r.a, *b = r.b;
  T* next = r.next;
  in_registers(j0, j1, [&](int64_t begin, auto count) __attribute__((always_inline)) {
    // Loads of memories are most of the time at ends that were not fetched before.
    __builtin_prefetch(memory + begin + r.next_row);
    if (L != Layers::kRead && next != memory) __builtin_prefetch(next + begin + r.next_row, 1);
#pragma omp simd
    for (int64_t j = begin; j < begin + count; ++j) {
      if constexpr (L == Layers::kRead) {
        add(j, dt * memory[j]);
      } else if constexpr (L == Layers::kBack) {
        next[j] = b[j] * (memory[j] + field(j));
        add(j, difference<kAhead>(c, [&](int n) __attribute__((always_inline)) {
              return a[j + n] * (memory[j + n] + field(j + n));
            }));
      } else {
        const T g = difference<kAhead>(
            c, [&](int n) __attribute__((always_inline)) { return field(j + n); });
        const T m = b[j] * memory[j] + a[j] * g;
        next[j] = m;
        add(j, dt * m);
      }
    }
  });
}

// The field of a row that is differentiated along axis A for the velocity B: the stress of both, or in
// the adjoint the cotangent of a strain rate.
template <int N, int A, int B, bool kBack, class T>
MPIGRAD_INLINE auto stress_at(const Stress<T, N>& s) {
  if constexpr (A != B || !kBack) {
    return [f = static_cast<const T*>(s[stress_of<N>(A, B)])](int64_t j)
        __attribute__((always_inline)) { return f[j]; };
  } else {
    const T *p = s[0], *dx = s[1], *dz = s[N - 1];
    return [p, dx, dz](int64_t j) __attribute__((always_inline)) {
      if constexpr (A == 0) return p[j] + dx[j];
      else if constexpr (N == 2) return p[j] - dx[j];
      else if constexpr (A == 1) return p[j] - (dx[j] + dz[j]);
      else return p[j] + dz[j];
    };
  }
}

}  // namespace mpigrad::waves::elastic
