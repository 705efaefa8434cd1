// Elastic waves (P-SV) on a staggered grid, fourth order, with C-PML: one row of cells at a time.
//
// Fields: p = (s_xx + s_yy) / 2, q = (s_xx - s_yy) / 2 at (i, j), s = s_xy at (i + 1/2, j + 1/2),
// vx at (i + 1/2, j), vy at (i, j + 1/2). In these the elastic law is diagonal:
//     p += dt K (vx_x + vy_y), q += dt mu (vx_x - vy_y), s += dt m (vx_y + vy_x),
//     vx += dt bx ((p + q)_x + s_y), vy += dt by (s_x + (p - q)_y),
// and the adjoint, in p~ = K p', q~ = mu q', s~ = m s', v~ = b v' (p' ... the cotangents), has the
// same form with -dt. In the layers every derivative g becomes g + psi, psi <- b psi + a g. The
// adjoint differentiates u + a phi instead of u, with phi <- b phi after phi += u, so only strips of
// a phi are added.
#pragma once

#include "waves/tile.h"

namespace mpigrad::waves::elastic {

constexpr int64_t kReach = 2;

// The memories of the layers along x lie in rows of their own, those along y in columns.
inline int64_t px(const Tile& t) { return t.layers[0] + t.layers[1]; }
inline int64_t py(const Tile& t) { return t.layers[2] + t.layers[3]; }
// The memories' row for a row of the tile, or -1.
inline int64_t layer_row(const Tile& t, int64_t i) {
  return i < t.layers[0] ? i : i >= t.nx - t.layers[1] ? i - (t.nx - px(t)) : -1;
}

// Without margins, (nx, ny) each.
template <class T>
struct Parameters {
  const T *bulk, *shear, *corner, *bx, *by;
};

// a and b at the cells' centres [0] and half a cell further [1], along x and along y.
template <class T>
struct Profile {
  const T *ax[2], *bx[2], *ay[2], *by[2];
};

// dt times the weights of the near and of the far difference, negated in the adjoint.
template <class T>
struct Weights {
  T dt, near_x, far_x, near_y, far_y;

  Weights(double dt, double hx, double hy)
      : dt(dt),
        near_x(dt * 27 / (24 * hx)),
        far_x(dt / (24 * hx)),
        near_y(dt * 27 / (24 * hy)),
        far_y(dt / (24 * hy)) {}
};

// Velocities, and the memories of their derivatives: what a history keeps of each step.
// Memories: mx[0] of vx_x, mx[1] of vy_x, (px, ny) each, my[0] of vy_y, my[1] of vx_y, (nx, py).
template <class T>
struct Velocity {
  T *vx, *vy, *mx[2], *my[2];
};

// Memories: mx[0] of (p + q)_x, mx[1] of s_x, my[0] of (p - q)_y, my[1] of s_y.
template <class T>
struct Stress {
  T *p, *q, *s, *mx[2], *my[2];
};

// The derivative along an axis of offset o, half a cell further or half a cell back, times dt.
template <class T>
inline T further(const T* f, int64_t o, T near, T far) {
  return near * (f[o] - f[0]) - far * (f[2 * o] - f[-o]);
}
template <class T>
inline T back(const T* f, int64_t o, T near, T far) {
  return near * (f[0] - f[-o]) - far * (f[o] - f[-2 * o]);
}

// The columns of a row that lie in the layers along y: body(j, its column in the memories).
template <class Body>
inline void in_layers(const Tile& t, int64_t j0, int64_t j1, Body body) {
  const int64_t first = j1 < t.layers[2] ? j1 : t.layers[2], last = t.ny - t.layers[3];
#pragma omp simd
  for (int64_t j = j0; j < first; j++) body(j, j);
#pragma omp simd
  for (int64_t j = j0 > last ? j0 : last; j < j1; j++) body(j, j - (t.ny - py(t)));
}

// v += K (dt D sigma), without the layers: K is a buoyancy, or a tangent of it.
template <class T>
inline void accelerate(const Tile& t, const Weights<T>& w, int64_t i, int64_t j0, int64_t j1,
                       const Stress<T>& stress, const Parameters<T>& k, const T* vx0, const T* vy0,
                       T* vx, T* vy) {
  const int64_t W = t.stride, o = t.at(i, 0), c = i * t.ny;
  const T *p = stress.p + o, *q = stress.q + o, *s = stress.s + o;
  const T *bx = k.bx + c, *by = k.by + c;
  vx0 += o, vy0 += o, vx += o, vy += o;
#pragma omp simd
  for (int64_t j = j0; j < j1; j++) {
    vx[j] = vx0[j] + bx[j] * ((further(p + j, W, w.near_x, w.far_x) + further(q + j, W, w.near_x, w.far_x)) + back(s + j, 1, w.near_y, w.far_y));
    vy[j] = vy0[j] + by[j] * (back(s + j, W, w.near_x, w.far_x) + (further(p + j, 1, w.near_y, w.far_y) - further(q + j, 1, w.near_y, w.far_y)));
  }
}

// stress += K (dt D v), without the layers: K are moduli, or tangents of them.
template <class T>
inline void deform(const Tile& t, const Weights<T>& w, int64_t i, int64_t j0, int64_t j1,
                   const T* vx, const T* vy, const Parameters<T>& k, const Stress<T>& stress) {
  const int64_t W = t.stride, o = t.at(i, 0), c = i * t.ny;
  T *p = stress.p + o, *q = stress.q + o, *s = stress.s + o;
  const T *bulk = k.bulk + c, *shear = k.shear + c, *corner = k.corner + c;
  vx += o, vy += o;
#pragma omp simd
  for (int64_t j = j0; j < j1; j++) {
    const T xx = back(vx + j, W, w.near_x, w.far_x), yy = back(vy + j, 1, w.near_y, w.far_y);
    p[j] += bulk[j] * (xx + yy);
    q[j] += shear[j] * (xx - yy);
    s[j] += corner[j] * (further(vx + j, 1, w.near_y, w.far_y) + further(vy + j, W, w.near_x, w.far_x));
  }
}

// The memories of the stresses' derivatives in row i, one step further.
template <class T>
inline void remember_stress(const Tile& t, const Weights<T>& w, const Profile<T>& f, int64_t i,
                            int64_t j0, int64_t j1, const Stress<T>& stress) {
  const int64_t W = t.stride, o = t.at(i, 0), k = layer_row(t, i);
  const T *p = stress.p + o, *q = stress.q + o, *s = stress.s + o;
  if (k >= 0) {
    T *m0 = stress.mx[0] + k * t.ny, *m1 = stress.mx[1] + k * t.ny;
    const T a0 = f.ax[1][k] / w.dt, b0 = f.bx[1][k], a1 = f.ax[0][k] / w.dt, b1 = f.bx[0][k];
#pragma omp simd
    for (int64_t j = j0; j < j1; j++) {
      m0[j] = b0 * m0[j] + a0 * (further(p + j, W, w.near_x, w.far_x) + further(q + j, W, w.near_x, w.far_x));
      m1[j] = b1 * m1[j] + a1 * back(s + j, W, w.near_x, w.far_x);
    }
  }
  T *m0 = stress.my[0] + i * py(t), *m1 = stress.my[1] + i * py(t);
  in_layers(t, j0, j1, [&](int64_t j, int64_t l) {
    m0[l] = f.by[1][l] * m0[l] + f.ay[1][l] / w.dt * (further(p + j, 1, w.near_y, w.far_y) - further(q + j, 1, w.near_y, w.far_y));
    m1[l] = f.by[0][l] * m1[l] + f.ay[0][l] / w.dt * back(s + j, 1, w.near_y, w.far_y);
  });
}

// The memories of the velocities' derivatives in row i: from those of `before` to those of `v`.
template <class T>
inline void remember_velocity(const Tile& t, const Weights<T>& w, const Profile<T>& f, int64_t i,
                              int64_t j0, int64_t j1, const Velocity<T>& before,
                              const Velocity<T>& v) {
  const int64_t W = t.stride, o = t.at(i, 0), k = layer_row(t, i);
  const T *vx = v.vx + o, *vy = v.vy + o;
  if (k >= 0) {
    const int64_t r = k * t.ny;
    const T *n0 = before.mx[0] + r, *n1 = before.mx[1] + r;
    T *m0 = v.mx[0] + r, *m1 = v.mx[1] + r;
    const T a0 = f.ax[0][k] / w.dt, b0 = f.bx[0][k], a1 = f.ax[1][k] / w.dt, b1 = f.bx[1][k];
#pragma omp simd
    for (int64_t j = j0; j < j1; j++) {
      m0[j] = b0 * n0[j] + a0 * back(vx + j, W, w.near_x, w.far_x);
      m1[j] = b1 * n1[j] + a1 * further(vy + j, W, w.near_x, w.far_x);
    }
  }
  const int64_t r = i * py(t);
  const T *n0 = before.my[0] + r, *n1 = before.my[1] + r;
  T *m0 = v.my[0] + r, *m1 = v.my[1] + r;
  in_layers(t, j0, j1, [&](int64_t j, int64_t l) {
    m0[l] = f.by[0][l] * n0[l] + f.ay[0][l] / w.dt * back(vy + j, 1, w.near_y, w.far_y);
    m1[l] = f.by[1][l] * n1[l] + f.ay[1][l] / w.dt * further(vx + j, 1, w.near_y, w.far_y);
  });
}

// What the layers add to `accelerate`.
template <class T>
inline void accelerate_in_layers(const Tile& t, const Weights<T>& w, int64_t i, int64_t j0,
                                 int64_t j1, const Stress<T>& stress, const Parameters<T>& c,
                                 T* vx, T* vy) {
  const int64_t o = t.at(i, 0), k = layer_row(t, i);
  const T *bx = c.bx + i * t.ny, *by = c.by + i * t.ny;
  vx += o, vy += o;
  if (k >= 0) {
    const T *m0 = stress.mx[0] + k * t.ny, *m1 = stress.mx[1] + k * t.ny;
#pragma omp simd
    for (int64_t j = j0; j < j1; j++) {
      vx[j] += bx[j] * (w.dt * m0[j]);
      vy[j] += by[j] * (w.dt * m1[j]);
    }
  }
  const T *m0 = stress.my[0] + i * py(t), *m1 = stress.my[1] + i * py(t);
  in_layers(t, j0, j1, [&](int64_t j, int64_t l) {
    vx[j] += bx[j] * (w.dt * m1[l]);
    vy[j] += by[j] * (w.dt * m0[l]);
  });
}

// What the layers add to `deform`.
template <class T>
inline void deform_in_layers(const Tile& t, const Weights<T>& w, int64_t i, int64_t j0, int64_t j1,
                             const Velocity<T>& v, const Parameters<T>& c,
                             const Stress<T>& stress) {
  const int64_t o = t.at(i, 0), k = layer_row(t, i);
  const T *bulk = c.bulk + i * t.ny, *shear = c.shear + i * t.ny, *corner = c.corner + i * t.ny;
  T *p = stress.p + o, *q = stress.q + o, *s = stress.s + o;
  if (k >= 0) {
    const T *m0 = v.mx[0] + k * t.ny, *m1 = v.mx[1] + k * t.ny;
#pragma omp simd
    for (int64_t j = j0; j < j1; j++) {
      p[j] += bulk[j] * (w.dt * m0[j]);
      q[j] += shear[j] * (w.dt * m0[j]);
      s[j] += corner[j] * (w.dt * m1[j]);
    }
  }
  const T *m0 = v.my[0] + i * py(t), *m1 = v.my[1] + i * py(t);
  in_layers(t, j0, j1, [&](int64_t j, int64_t l) {
    p[j] += bulk[j] * (w.dt * m0[l]);
    q[j] -= shear[j] * (w.dt * m0[l]);
    s[j] += corner[j] * (w.dt * m1[l]);
  });
}

}  // namespace mpigrad::waves::elastic
