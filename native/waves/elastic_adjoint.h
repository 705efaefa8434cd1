// The adjoint of a step of elastic waves, in the scaled cotangents of elastic_rows.h: the same rows with
// negative weights, what the layers add to them, and the gradient with respect to the parameters.
#pragma once

#include "waves/elastic_rows.h"

namespace mpigrad::waves::elastic {

// Sums over steps: bulk of p~ dt (vx_x + vy_y), shear of q~ dt (vx_x - vy_y), corner of
// s~ dt (vx_y + vy_x), bx and by of v~ times the change of v. Each lacks a division by its
// parameter, buoyancies by their square.
template <class T>
struct Gradient {
  T *bulk, *shear, *corner, *bx, *by;
};

// a phi of the memories in the layers, with zeros around: x[k] has rows, y[k] columns for both
// sides, each with kPad more before and after.
template <class T>
struct Strips {
  static constexpr int64_t kPad = 4;
  T *x[2], *y[2];

  static int64_t rows(const Tile& t) { return px(t) + 4 * kPad; }
  static int64_t columns(const Tile& t) { return py(t) + 4 * kPad; }
  // Index of a row or column of the tile in the strips of one of the two sides along an axis.
  static int64_t place(int64_t i, int side, int64_t cells, int64_t before, int64_t after) {
    return side ? i - (cells - after) + before + 3 * kPad : i + kPad;
  }
};

// From cotangents u of the derivatives: phi <- phi + u, the strips are a phi, phi <- b phi.
// half: which of the profile's points each memory lies at, the same along x and y.
template <class T, class X0, class X1, class Y0, class Y1>
inline void recall(const Tile& t, const Profile<T>& f, int half0, int half1, int64_t i, int64_t j0,
                   int64_t j1, T* const mx[2], T* const my[2], const Strips<T>& r, X0 x0, X1 x1,
                   Y0 y0, Y1 y1) {
  using S = Strips<T>;
  if (const int64_t k = layer_row(t, i); k >= 0) {
    const int side = i >= t.layers[0];
    const int64_t row = S::place(i, side, t.nx, t.layers[0], t.layers[1]) * t.ny;
    T *m0 = mx[0] + k * t.ny, *m1 = mx[1] + k * t.ny, *r0 = r.x[0] + row, *r1 = r.x[1] + row;
    const T a0 = f.ax[half0][k], b0 = f.bx[half0][k], a1 = f.ax[half1][k], b1 = f.bx[half1][k];
#pragma omp simd
    for (int64_t j = j0; j < j1; j++) {
      const T total0 = m0[j] + x0(j), total1 = m1[j] + x1(j);
      r0[j] = a0 * total0, r1[j] = a1 * total1;
      m0[j] = b0 * total0, m1[j] = b1 * total1;
    }
  }
  T *m0 = my[0] + i * py(t), *m1 = my[1] + i * py(t);
  T *r0 = r.y[0] + i * S::columns(t), *r1 = r.y[1] + i * S::columns(t);
  const T *a0 = f.ay[half0], *b0 = f.by[half0], *a1 = f.ay[half1], *b1 = f.by[half1];
  in_layers(t, j0, j1, [&](int64_t j, int64_t l) {
    const int64_t c = j < t.layers[2] ? l + S::kPad : l + 3 * S::kPad;
    const T total0 = m0[l] + y0(j), total1 = m1[l] + y1(j);
    r0[c] = a0[l] * total0, r1[c] = a1[l] * total1;
    m0[l] = b0[l] * total0, m1[l] = b1[l] * total1;
  });
}

// The adjoint of remember_velocity in row i.
template <class T>
inline void recall_stress(const Tile& t, const Profile<T>& f, int64_t i, int64_t j0, int64_t j1,
                          const Stress<T>& stress, const Velocity<T>& v, const Strips<T>& r) {
  const int64_t o = t.at(i, 0);
  const T *p = stress.p + o, *q = stress.q + o, *s = stress.s + o;
  auto xx = [=](int64_t j) { return p[j] + q[j]; };
  auto yy = [=](int64_t j) { return p[j] - q[j]; };
  auto xy = [=](int64_t j) { return s[j]; };
  recall(t, f, 0, 1, i, j0, j1, v.mx, v.my, r, xx, xy, yy, xy);
}

// The adjoint of remember_stress in row i.
template <class T>
inline void recall_velocity(const Tile& t, const Profile<T>& f, int64_t i, int64_t j0, int64_t j1,
                            const Velocity<T>& v, const Stress<T>& stress, const Strips<T>& r) {
  const int64_t o = t.at(i, 0);
  const T *vx = v.vx + o, *vy = v.vy + o;
  auto x = [=](int64_t j) { return vx[j]; };
  auto y = [=](int64_t j) { return vy[j]; };
  recall(t, f, 1, 0, i, j0, j1, stress.mx, stress.my, r, x, y, y, x);
}

// body(k, the strips' rows) for the sides along x near which row i lies.
template <class T, class Body>
inline void near_x(const Tile& t, int64_t i, Body body) {
  for (int side = 0; side < 2; side++) {
    const int64_t first = side ? t.nx - t.layers[1] : 0, last = side ? t.nx : t.layers[0];
    if (first < last && i >= first - kReach && i < last + kReach)
      body(Strips<T>::place(i, side, t.nx, t.layers[0], t.layers[1]));
  }
}
// body(first column, last, the shift from columns to the strips') for the sides along y.
template <class T, class Body>
inline void near_y(const Tile& t, int64_t j0, int64_t j1, Body body) {
  for (int side = 0; side < 2; side++) {
    const int64_t first = side ? t.ny - t.layers[3] : 0, last = side ? t.ny : t.layers[2];
    if (first < last)
      body(std::max(j0, first - kReach), std::min(j1, last + kReach),
           Strips<T>::place(0, side, t.ny, t.layers[2], t.layers[3]));
  }
}

// What strips that recall_stress has left add to accelerate.
template <class T>
inline void accelerate_by_strips(const Tile& t, const Weights<T>& w, int64_t i, int64_t j0,
                                 int64_t j1, const Strips<T>& r, const Parameters<T>& c, T* vx,
                                 T* vy) {
  const int64_t o = t.at(i, 0), W = t.ny;
  const T *bx = c.bx + i * t.ny, *by = c.by + i * t.ny;
  vx += o, vy += o;
  near_x<T>(t, i, [&](int64_t row) {
    const T *r0 = r.x[0] + row * W, *r1 = r.x[1] + row * W;
#pragma omp simd
    for (int64_t j = j0; j < j1; j++) {
      vx[j] += bx[j] * further(r0 + j, W, w.near_x, w.far_x);
      vy[j] += by[j] * back(r1 + j, W, w.near_x, w.far_x);
    }
  });
  near_y<T>(t, j0, j1, [&](int64_t first, int64_t last, int64_t shift) {
    const T* r0 = r.y[0] + i * Strips<T>::columns(t) + shift;
    const T* r1 = r.y[1] + i * Strips<T>::columns(t) + shift;
#pragma omp simd
    for (int64_t j = first; j < last; j++) {
      vx[j] += bx[j] * back(r1 + j, 1, w.near_y, w.far_y);
      vy[j] += by[j] * further(r0 + j, 1, w.near_y, w.far_y);
    }
  });
}

// What strips that recall_velocity has left add to deform.
template <class T>
inline void deform_by_strips(const Tile& t, const Weights<T>& w, int64_t i, int64_t j0, int64_t j1,
                             const Strips<T>& r, const Parameters<T>& c, const Stress<T>& stress) {
  const int64_t o = t.at(i, 0), W = t.ny;
  const T *bulk = c.bulk + i * t.ny, *shear = c.shear + i * t.ny, *corner = c.corner + i * t.ny;
  T *p = stress.p + o, *q = stress.q + o, *s = stress.s + o;
  near_x<T>(t, i, [&](int64_t row) {
    const T *r0 = r.x[0] + row * W, *r1 = r.x[1] + row * W;
#pragma omp simd
    for (int64_t j = j0; j < j1; j++) {
      const T xx = back(r0 + j, W, w.near_x, w.far_x);
      p[j] += bulk[j] * xx;
      q[j] += shear[j] * xx;
      s[j] += corner[j] * further(r1 + j, W, w.near_x, w.far_x);
    }
  });
  near_y<T>(t, j0, j1, [&](int64_t first, int64_t last, int64_t shift) {
    const T* r0 = r.y[0] + i * Strips<T>::columns(t) + shift;
    const T* r1 = r.y[1] + i * Strips<T>::columns(t) + shift;
#pragma omp simd
    for (int64_t j = first; j < last; j++) {
      const T yy = back(r0 + j, 1, w.near_y, w.far_y);
      p[j] += bulk[j] * yy;
      q[j] -= shear[j] * yy;
      s[j] += corner[j] * further(r1 + j, 1, w.near_y, w.far_y);
    }
  });
}

// The moduli's part of the gradient in row i: cotangents after the step, velocities of the step.
template <class T>
inline void correlate_deformation(const Tile& t, const Weights<T>& w, int64_t i, int64_t j0,
                                  int64_t j1, const Stress<T>& stress, const Velocity<T>& v,
                                  const Gradient<T>& g) {
  const int64_t W = t.stride, o = t.at(i, 0), c = i * t.ny;
  const T *p = stress.p + o, *q = stress.q + o, *s = stress.s + o, *vx = v.vx + o, *vy = v.vy + o;
  T *bulk = g.bulk + c, *shear = g.shear + c, *corner = g.corner + c;
#pragma omp simd
  for (int64_t j = j0; j < j1; j++) {
    const T xx = back(vx + j, W, w.near_x, w.far_x), yy = back(vy + j, 1, w.near_y, w.far_y);
    bulk[j] += p[j] * (xx + yy);
    shear[j] += q[j] * (xx - yy);
    corner[j] += s[j] * (further(vx + j, 1, w.near_y, w.far_y) + further(vy + j, W, w.near_x, w.far_x));
  }
  if (const int64_t k = layer_row(t, i); k >= 0) {
    const T *m0 = v.mx[0] + k * t.ny, *m1 = v.mx[1] + k * t.ny;
#pragma omp simd
    for (int64_t j = j0; j < j1; j++) {
      bulk[j] += p[j] * (w.dt * m0[j]);
      shear[j] += q[j] * (w.dt * m0[j]);
      corner[j] += s[j] * (w.dt * m1[j]);
    }
  }
  const T *m0 = v.my[0] + i * py(t), *m1 = v.my[1] + i * py(t);
  in_layers(t, j0, j1, [&](int64_t j, int64_t l) {
    bulk[j] += p[j] * (w.dt * m0[l]);
    shear[j] -= q[j] * (w.dt * m0[l]);
    corner[j] += s[j] * (w.dt * m1[l]);
  });
}

// The buoyancies' part: cotangents v~ after this step's adjoint acceleration, velocities before and
// after the step.
template <class T>
inline void correlate_acceleration(const Tile& t, int64_t i, int64_t j0, int64_t j1,
                                   const Velocity<T>& adjoint, const Velocity<T>& before,
                                   const Velocity<T>& after, const Gradient<T>& g) {
  const int64_t o = t.at(i, 0), c = i * t.ny;
  const T *ax = adjoint.vx + o, *ay = adjoint.vy + o, *bx = before.vx + o, *by = before.vy + o;
  const T *vx = after.vx + o, *vy = after.vy + o;
  T *gx = g.bx + c, *gy = g.by + c;
#pragma omp simd
  for (int64_t j = j0; j < j1; j++) {
    gx[j] += ax[j] * (vx[j] - bx[j]);
    gy[j] += ay[j] * (vy[j] - by[j]);
  }
}

}  // namespace mpigrad::waves::elastic
