// Attenuation of elastic waves by standard linear solids (attenuation.py has the equations). With strain rates
// times dt, e, the mechanisms l have memories r_l in each cell and for each strain rate (gain is that of
// attenuation.py over dt, half is times dt):
//     r_l <- keep_l r_l + gain_l e,    m = sum of half_l (r_l before + r_l after),
//     stress += U e - L m
// with Hooke's laws of the unrelaxed moduli U and of the loss L. The memories do not depend on the moduli.
//
// In the adjoint, with A = U - c L, c = sum of half_l gain_l, and the cotangents a of the stresses times A,
// filters f_l of a take the place of the memories' cotangents, which are -(L / A) f_l:
//     t = a - (L / A) sum of gain_l f_l,    f_l <- keep_l f_l + half_l (1 + keep_l) a.
// t is the cotangent of e. So the adjoint differentiates t, where that without loss differentiates a. The
// gradient is the sum over steps of e a in A, and that of -e (c a + sum of gain_l f_l) in L: it needs
// the strain rates of the run, not its memories. Cotangents of the last memories decay by themselves, as h_l.
#pragma once

#include <array>
#include <vector>

#include "waves/registers.h"

namespace mpigrad::waves::elastic {

template <class T, int S>
class Relaxation {
  using Rows = std::array<T*, S>;

 public:
  Relaxation() = default;
  // constants: keep, gain and half of each mechanism.
  Relaxation(const std::vector<double>& constants, int64_t count, int64_t rows, int64_t row_cells)
      : count_(count), rows_(rows), pitch_((row_cells + 15) / 16 * 16), constants_(constants.begin(), constants.end()) {
    for (int64_t l = 0; l < count; ++l) coupling_ += half(l) * gain(l);
  }

  bool acts() const { return count_ > 0; }
  T coupling() const { return coupling_; }
  int64_t size() const { return rows_ * count_ * S * pitch_; }  // of the memories of a wave
  // The memory of a mechanism for a strain rate in a row. Those of a row follow each other, because a processor
  // fetches few rows of few cells ahead.
  T* at(T* memory, int64_t row, int64_t l, int k) const { return memory + ((row * count_ + l) * S + k) * pitch_; }

  // Fetches the memories of the next row into the caches.
  void fetch_next(const T* memory, int64_t row) const {
    const T* next = memory + (row + 1) * count_ * S * pitch_;
    for (int64_t n = 0; n < count_ * S * pitch_; n += 64 / static_cast<int64_t>(sizeof(T)))
      __builtin_prefetch(next + n, 1);
  }
  // Steps the memories of a row by `e`, and writes m.
  void step(T* memory, int64_t row, int64_t j0, int64_t j1, const Rows& e, const Rows& m) const {
    fetch_next(memory, row);
    for (int k = 0; k < S; ++k)
      for (int64_t l = 0; l < count_; ++l) {
        T *r = at(memory, row, l, k), *mean = m[k];
        const T *rate = e[k], keep = this->keep(l), gain = this->gain(l), half = this->half(l);
        if (l == 0) std::fill(mean + j0, mean + j1, T(0));
#pragma omp simd
        for (int64_t j = j0; j < j1; ++j) {
          const T before = r[j], after = keep * before + gain * rate[j];
          mean[j] += half * (before + after);
          r[j] = after;
        }
      }
  }

  // The sum of gain_l f_l of a row, zeros without f.
  void filtered(T* f, int k, int64_t row, int64_t j0, int64_t j1, T* sum) const {
    std::fill(sum + j0, sum + j1, T(0));
    for (int64_t l = 0; f && l < count_; ++l) {
      const T *values = at(f, row, l, k), gain = this->gain(l);
#pragma omp simd
      for (int64_t j = j0; j < j1; ++j) sum[j] += gain * values[j];
    }
  }
  // A step back of the filters by `a`, and of the h_l.
  void step_back(T* f, T* h, int k, int64_t row, int64_t j0, int64_t j1, const T* a) const {
    for (int64_t l = 0; l < count_; ++l) {
      T* values = at(f, row, l, k);
      const T keep = this->keep(l), enter = half(l) * (1 + keep);
#pragma omp simd
      for (int64_t j = j0; j < j1; ++j) values[j] = keep * values[j] + enter * a[j];
      if (!h) continue;
      values = at(h, row, l, k);
      for (int64_t j = j0; j < j1; ++j) values[j] *= keep;
    }
  }

 private:
  T keep(int64_t l) const { return constants_[3 * l]; }
  T gain(int64_t l) const { return constants_[3 * l + 1]; }
  T half(int64_t l) const { return constants_[3 * l + 2]; }

  int64_t count_ = 0, rows_ = 0, pitch_ = 0;
  std::vector<T> constants_;
  T coupling_ = 0;
};

}  // namespace mpigrad::waves::elastic
