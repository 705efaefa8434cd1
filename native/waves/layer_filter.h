// The convolutional absorbing layers of one axis on three axes, as factors of its cells.
#pragma once

#include <algorithm>
#include <vector>

#include "waves/layer_field.h"

namespace mpigrad::waves {

// The factors of an axis' layers in its cells and at the faces behind them, with a margin. A face shared
// with a neighbour lies outside of the layers.
template <class T>
class LayerFilter {
 public:
  static constexpr int kReach = 4;  // the largest of a stencil

  // At one place of the axis. k: of what passes the filter, b and e: the decay of the memory, and the
  // factor of what enters it.
  struct Factors {
    T k, b, e, b_half, e_half;
    T within;         // 1 in the layers
    T ahead[kReach];  // coefficients of the differences to the cells n + 1 further on
    AxisLayers::Rows rows;
  };

  LayerFilter() = default;
  // `entry`: a factor of what enters p.
  LayerFilter(const std::vector<double>& profiles, const T* second, T entry, const AxisLayers& layers,
              int64_t reach) {
    const int64_t n = static_cast<int64_t>(profiles.size()) / 6;
    const auto value = [&](int which, int64_t a) {
      return static_cast<T>(profiles[which * n + std::clamp<int64_t>(a, 0, n - 1)]);
    };
    for (int64_t a = -kMargin; a < n + kMargin; ++a) {
      const bool inside = a >= 0 && a < n;
      Factors f{value(0, a),         inside * value(1, a), inside * value(2, a), inside * value(4, a),
                inside * value(5, a) * entry, T(layers.has(a)), {},               layers.rows(a)};
      for (int m = 1; m <= reach; ++m)  // at half of the distance
        f.ahead[m - 1] = second[m] * value(m % 2 ? 3 : 0, a + m / 2);
      factors_.push_back(f);
      k_.push_back(f.k), b_.push_back(f.b), e_.push_back(f.e), b_half_.push_back(f.b_half);
      e_half_.push_back(f.e_half), within_.push_back(f.within);
      for (int m = 0; m < reach; ++m) ahead_[m].push_back(f.ahead[m]);
    }
  }

  const Factors* at(int64_t a) const { return factors_.data() + kMargin + a; }
  // The same along the axis.
  const T* k() const { return k_.data() + kMargin; }
  const T* b() const { return b_.data() + kMargin; }
  const T* e() const { return e_.data() + kMargin; }
  const T* b_half() const { return b_half_.data() + kMargin; }
  const T* e_half() const { return e_half_.data() + kMargin; }
  const T* within() const { return within_.data() + kMargin; }
  const T* ahead(int m) const { return ahead_[m].data() + kMargin; }

 private:
  static constexpr int64_t kMargin = 2 * kReach + kRegister;
  std::vector<Factors> factors_;
  std::vector<T> k_, b_, e_, b_half_, e_half_, within_, ahead_[kReach];
};

}  // namespace mpigrad::waves
