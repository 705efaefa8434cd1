// The set-up of a level's interpolation and of the next level's stencil (Dendy 1982). A cell between
// coarse cells interpolates by its own equation, summed across the axes along which it does not
// interpolate. The next level's stencil is Pᵀ A P with these weights P.
#pragma once

#include <cmath>
#include <vector>

#include "multigrid/ranks.h"
#include "multigrid/transfer.h"

namespace mpigrad::multigrid {

// Weights of the interpolation, in passes: first cells that are odd along one axis, then along two,
// since the latter use the weights of the former.
class Weights {
 public:
  explicit Weights(Level& level) : level_(level), layout_(level.layout) {
    sum_.resize(layout_.width);
    moved_.resize(layout_.width);
  }

  void compute(Ranks& ranks) {
    level_.weight_slots = 1;
    int passes = 0;
    for (bool c : level_.coarsens) {
      passes += c;
      if (c) level_.weight_slots *= 2;
    }
    Level::reserve(level_.weights,
                   layout_.all_rows() * level_.weight_slots * 2 * layout_.width);
    for (int pass = 1; pass <= passes; ++pass) {
      for (int64_t z = layout_.own.lower[2]; z < layout_.own.upper[2]; ++z)
        for (int64_t y = layout_.own.lower[1]; y < layout_.own.upper[1]; ++y)
          for (int half = 0; half < 2; ++half) {
            const Corners corners(level_, half, parity(y), parity(z));
            if (corners.count == pass) row(corners, y, z, half);
          }
      if (level_.distributed) exchange(ranks, layout_, level_.weights, level_.weight_slots);
    }
  }

 private:
  static constexpr float kRounding = 2e-5f;

  float* weights(int64_t y, int64_t z, int half) const {
    return level_.weights.data() + layout_.at(y, z, half, level_.weight_slots);
  }

  void row(const Corners& corners, int64_t y, int64_t z, int half) {
    const Stencil& stencil = level_.stencil;
    const float* a = stencil.values.data() + layout_.at(y, z, half, stencil.slots());
    float* w = weights(y, z, half);
    const int64_t begin = layout_.begin(half), end = layout_.end(half), slot = 2 * layout_.width;
    float *sum = sum_.data() - layout_.first, *moved_sum = moved_.data() - layout_.first;
    for (int64_t k = begin; k < end; ++k) {
      sum[k] = a[k];
      moved_sum[k] = 0;
    }
    for (int c = 0; c < corners.size(); ++c)
      for (int64_t k = begin; k < end; ++k) w[c * slot + k] = 0;
    for (const Steps& s : stencil.neighbors()) {
      const float* link = a + stencil.link(layout_, s.at, half);
      Steps along{{0, 0, 0}};
      int moved = 0;
      for (int i = 0; i < corners.count; ++i) {
        along.at[corners.axes[i]] = s.at[corners.axes[i]];
        moved += s.at[corners.axes[i]] != 0;
      }
#pragma GCC ivdep
      for (int64_t k = begin; k < end; ++k) sum[k] += link[k];
      if (!moved) continue;
#pragma GCC ivdep
      for (int64_t k = begin; k < end; ++k) moved_sum[k] -= link[k];
      const Corners there(level_, half + along.at[0], static_cast<int>(parity(y + along.at[1])),
                          static_cast<int>(parity(z + along.at[2])));
      for (int c = 0; c < corners.size(); ++c) {
        const Steps corner = corners.steps(c);
        bool fits = true;
        for (int i = 0; i < corners.count; ++i) {
          const int a = corners.axes[i];
          fits &= !along.at[a] || along.at[a] == corner.at[a];
        }
        if (!fits) continue;
        float* to = w + c * slot;
        if (!there.count) {
#pragma GCC ivdep
          for (int64_t k = begin; k < end; ++k) to[k] -= link[k];
        } else {
          const float* other = w + layout_.away(along.at, half, level_.weight_slots) +
                               there.slot(corner.at) * slot;
#pragma GCC ivdep
          for (int64_t k = begin; k < end; ++k) to[k] -= link[k] * other[k];
        }
      }
    }
    // The divisor is the diagonal and the links across: the sum of the whole row, less the links that are
    // interpolated. A sum of the row that is only rounding is left out, for the divisor may be smaller
    // still if the links across are strong. A divisor that is not positive has no meaning.
    for (int64_t k = begin; k < end; ++k) {
      const float divisor = (sum[k] > kRounding * a[k] ? sum[k] : 0) + moved_sum[k];
      sum[k] = divisor > 0 ? 1 / divisor : 0;
    }
    for (int c = 0; c < corners.size(); ++c) {
#pragma GCC ivdep
      for (int64_t k = begin; k < end; ++k) w[c * slot + k] *= sum[k];
    }
  }

  Level& level_;
  const Layout& layout_;
  std::vector<float> sum_, moved_;
};

// The next level's stencil.
class Galerkin {
 public:
  Galerkin(const Level& level, Level& next) : level_(level), next_(next) {
    halves_ = level.coarsens[0] ? 1 : 2;
    for (int half = 0; half < halves_; ++half) {
      for (int d = 0; d < 27; ++d) {
        const Steps from{{d % 3 - 1, d / 3 % 3 - 1, d / 9 - 1}};
        bool fits = true;
        for (int a = 0; a < kAxes; ++a) fits &= !from.at[a] || level.coarsens[a];
        if (!fits) continue;
        link(from, Steps{{0, 0, 0}}, half);
        for (const Steps& s : level.stencil.neighbors()) link(from, s, half);
      }
    }
  }

  void compute() {
    const Layout &fine = level_.layout, &coarse = next_.layout;
    const int slots = next_.stencil.slots();
    next_.reserve_stencil();
    std::vector<float> line(2 * fine.width);
    for (int64_t z = coarse.own.lower[2]; z < coarse.own.upper[2]; ++z)
      for (int64_t y = coarse.own.lower[1]; y < coarse.own.upper[1]; ++y)
        for (int half = 0; half < halves_; ++half) {
          const int64_t fy = level_.coarsens[1] ? 2 * y : y, fz = level_.coarsens[2] ? 2 * z : z;
          const int64_t begin = level_.coarsens[0] ? coarse.own.lower[0] : coarse.begin(half),
                        end = level_.coarsens[0] ? coarse.own.upper[0] : coarse.end(half);
          const float *a = level_.stencil.values.data() +
                           fine.at(fy, fz, half, level_.stencil.slots()),
                      *w = level_.weights.data() + fine.at(fy, fz, half, level_.weight_slots);
          for (int slot = 0; slot < slots; ++slot) {
            float* to = level_.coarsens[0]
                            ? line.data() - fine.first
                            : next_.stencil.values.data() + coarse.at(y, z, half, slots, slot);
            for (int64_t k = begin; k < end; ++k) to[k] = 0;
            for (const Product& p : products_[half][slot]) add(p, a, w, to, begin, end);
            if (level_.coarsens[0])
              split(line.data() - fine.first,
                    next_.stencil.values.data() + coarse.at(y, z, 0, slots, slot),
                    next_.stencil.values.data() + coarse.at(y, z, 1, slots, slot), begin, end);
          }
        }
  }

 private:
  // link * (left or 1) * (right or 1), as places relative to the fine cell of a coarse one.
  struct Product {
    int64_t link, left, right;
    bool has_left, has_right;
  };

  // The products of the link from the cell `from` away, by `s`.
  void link(const Steps& from, const Steps& s, int half) {
    const Layout& fine = level_.layout;
    const Steps to{{from.at[0] + s.at[0], from.at[1] + s.at[1], from.at[2] + s.at[2]}};
    const Corners left = corners(from, half), right = corners(to, half);
    const Steps back{{-from.at[0], -from.at[1], -from.at[2]}};
    for (int c = 0; c < right.size(); ++c) {
      const Steps corner = right.steps(c);
      int next[kAxes];
      for (int a = 0; a < kAxes; ++a)
        next[a] = level_.coarsens[a] ? (to.at[a] + corner.at[a]) / 2 : to.at[a];
      if (Stencil::direction(next) < 0) continue;
      const int slot = next_.stencil.slot(next);
      if (slot < 0) continue;
      Product p;
      const int slots = level_.stencil.slots(), wide = level_.weight_slots;
      const int64_t away = fine.away(from.at, half, slots);
      const int half_there = parity(half + from.at[0]);
      p.link = away + (Stencil::direction(s.at) ? level_.stencil.link(fine, s.at, half_there) : 0);
      p.has_left = left.count > 0;
      p.has_right = right.count > 0;
      p.left = fine.away(from.at, half, wide) + left.slot(back.at) * 2 * fine.width;
      p.right = fine.away(to.at, half, wide) + c * 2 * fine.width;
      products_[half][slot].push_back(p);
    }
  }

  Corners corners(const Steps& s, int half) const {
    return Corners(level_, half + s.at[0], s.at[1], s.at[2]);
  }

  static void add(const Product& p, const float* a, const float* w, float* to, int64_t begin,
                  int64_t end) {
    const float *link = a + p.link, *left = w + p.left, *right = w + p.right;
    if (p.has_left && p.has_right) {
#pragma GCC ivdep
      for (int64_t k = begin; k < end; ++k) to[k] += left[k] * link[k] * right[k];
    } else if (p.has_left || p.has_right) {
      const float* one = p.has_left ? left : right;
#pragma GCC ivdep
      for (int64_t k = begin; k < end; ++k) to[k] += one[k] * link[k];
    } else {
#pragma GCC ivdep
      for (int64_t k = begin; k < end; ++k) to[k] += link[k];
    }
  }

  const Level& level_;
  Level& next_;
  int halves_;
  std::vector<Product> products_[2][2 * kAxes * kAxes];
};

}  // namespace mpigrad::multigrid
