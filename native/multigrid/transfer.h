// Between a level and the next one, which has every second cell along the coarsened axes: restriction
// of residuals and interpolation of corrections, by the same weights.
#pragma once

#include <algorithm>

#include "multigrid/level.h"
#include "multigrid/rows.h"

namespace mpigrad::multigrid {

// The corners of the coarse cells around a cell that is odd along some coarsened axes, one bit each.
struct Corners {
  int axes[kAxes], count = 0;
  Corners(const Level& level, int half, int y, int z) {
    const int odd[kAxes] = {half, y, z};
    for (int a = 0; a < kAxes; ++a)
      if (level.coarsens[a] && parity(odd[a])) axes[count++] = a;
  }
  int size() const { return 1 << count; }
  // -1 or 1 along the axes of the corners, 0 along others.
  Steps steps(int corner) const {
    Steps s{{0, 0, 0}};
    for (int i = 0; i < count; ++i) s.at[axes[i]] = corner >> i & 1 ? 1 : -1;
    return s;
  }
  int slot(const int* steps) const {
    int corner = 0;
    for (int i = 0; i < count; ++i) corner |= (steps[axes[i]] > 0) << i;
    return corner;
  }
};

// Merges the halves of a row: row[2 k] is even[k].
inline void merge(const float* even, const float* odd, float* row, int64_t lower, int64_t upper) {
  if (lower < upper && parity(lower)) {
    row[lower] = odd[floor_half(lower)];
    ++lower;
  }
  if (lower < upper && parity(upper)) {
    --upper;
    row[upper] = even[floor_half(upper)];
  }
  const int64_t begin = floor_half(lower), end = floor_half(upper);
#pragma GCC ivdep
  for (int64_t k = begin; k < end; ++k) {
    row[2 * k] = even[k];
    row[2 * k + 1] = odd[k];
  }
}

// The reverse. Numbers are multiplied by `scale`.
template <class T>
void split(const T* row, float* even, float* odd, int64_t lower, int64_t upper, T scale = 1) {
  if (lower < upper && parity(lower)) {
    odd[floor_half(lower)] = static_cast<float>(scale * row[lower]);
    ++lower;
  }
  if (lower < upper && parity(upper)) {
    --upper;
    even[floor_half(upper)] = static_cast<float>(scale * row[upper]);
  }
  const int64_t begin = floor_half(lower), end = floor_half(upper);
#pragma GCC ivdep
  for (int64_t k = begin; k < end; ++k) {
    even[k] = static_cast<float>(scale * row[2 * k]);
    odd[k] = static_cast<float>(scale * row[2 * k + 1]);
  }
}

class Transfer {
 public:
  // `next` has its layout.
  Transfer(Level& level, Level& next)
      : level_(level), next_(next), fine_(level.layout), coarse_(next.layout) {
    halves_ = level.coarsens[0] ? 1 : 2;
    line_.resize(static_cast<size_t>(2 * fine_.width));
    bool two_colors = !level.stencil.box && !level.distributed;
    for (int a = 0; a < kAxes; ++a) two_colors &= level.coarsens[a] || fine_.shape[a] == 1;
    for (int half = 0; half < halves_; ++half) {
      for (int d = 0; d < 27; ++d) {
        const Steps s{{d % 3 - 1, d / 3 % 3 - 1, d / 9 - 1}};
        bool fits = d != 13;
        for (int a = 0; a < kAxes; ++a) fits &= !s.at[a] || level.coarsens[a];
        // After a sweep of two colours the cells of the last one have no residual, but for what other
        // ranks contribute.
        const bool zero = two_colors && parity(s.at[0] + s.at[1] + s.at[2]);
        if (!fits || zero) continue;
        const Corners corners = corners_at(s.at, half);
        const Steps back{{-s.at[0], -s.at[1], -s.at[2]}};
        restricts_[half].add(weight(s.at, half, corners.slot(back.at)), fine_.away(s.at, half));
      }
    }
    for (int z = 0; z < 2; ++z)
      for (int y = 0; y < 2; ++y)
        for (int half = 0; half < 2; ++half) {
          const Corners corners(level, half, y, z);
          Terms& terms = interpolates_[z][y][half];
          const int zero[kAxes] = {0, 0, 0};
          for (int c = 0; corners.count && c < corners.size(); ++c) {
            const Steps s = corners.steps(c);
            const int64_t along_x = s.at[0] > 0, row = (s.at[2] > 0) * coarse_.rows[0] + (s.at[1] > 0);
            terms.add(weight(zero, half, c), row * halves_ * fine_.width + along_x);
          }
        }
  }

  // Restricts the residual to a row of the next level.
  void restrict_row(int64_t y, int64_t z) {
    const int64_t fy = fine(1, y), fz = fine(2, z);
    for (int half = 0; half < halves_; ++half) {
      const int64_t begin = level_.coarsens[0] ? coarse_.own.lower[0] : coarse_.begin(half),
                    end = level_.coarsens[0] ? coarse_.own.upper[0] : coarse_.end(half);
      const float* r = level_.r.data() + fine_.at(fy, fz, half);
      float* to = level_.coarsens[0] ? line_.data() - fine_.first
                                     : next_.b.data() + coarse_.at(y, z, half);
      run_row<kAdd>(restricts_[half],
                    level_.weights.data() + fine_.at(fy, fz, half, level_.weight_slots), r, r, to,
                    begin, fine_.padded(begin, end));
    }
    if (level_.coarsens[0])
      split(line_.data() - fine_.first, next_.b.data() + coarse_.at(y, z, 0),
            next_.b.data() + coarse_.at(y, z, 1), coarse_.own.lower[0], coarse_.own.upper[0]);
  }

  // Copies the next level's x, with one cell around, into rows in the numbering of this level.
  void fetch() {
    Cells cells = coarse_.own;
    for (int a = 0; a < kAxes; ++a) {
      cells.lower[a] = std::max<int64_t>(cells.lower[a] - 1, 0);
      cells.upper[a] = std::min(cells.upper[a] + 1, coarse_.shape[a]);
    }
    for (int64_t z = cells.lower[2]; z < cells.upper[2]; ++z)
      for (int64_t y = cells.lower[1]; y < cells.upper[1]; ++y) {
        const float *even = next_.x.data() + coarse_.at(y, z, 0),
                    *odd = next_.x.data() + coarse_.at(y, z, 1);
        float* row = coarse_row(y, z, 0);
        if (level_.coarsens[0]) {
          merge(even, odd, row, cells.lower[0], cells.upper[0]);
        } else {
          const int64_t begin = floor_half(cells.lower[0]), end = floor_half(cells.upper[0] + 1);
          std::copy(even + begin, even + end, row + begin);
          std::copy(odd + begin, odd + end, coarse_row(y, z, 1) + begin);
        }
      }
  }

  // Adds the interpolated correction to a row of x, also to one cell beyond the tile.
  void interpolate_row(int64_t y, int64_t z) {
    const int64_t lower = std::max<int64_t>(fine_.own.lower[0] - 1, 0),
                  upper = std::min(fine_.own.upper[0] + 1, fine_.shape[0]);
    const int64_t cy = coarse(1, y), cz = coarse(2, z);
    for (int half = 0; half < 2; ++half) {
      const Terms& terms = interpolates_[parity(z)][parity(y)][half];
      const float* t = coarse_row(cy, cz, level_.coarsens[0] ? 0 : half);
      float* x = level_.x.data() + fine_.at(y, z, half);
      const int64_t begin = floor_half(lower + 1 - half),
                    end = fine_.padded(begin, floor_half(upper + 1 - half));
      if (!terms.size) {
#pragma GCC ivdep
        for (int64_t k = begin; k < end; ++k) x[k] += t[k];
      } else {
        run_row<kAdd>(terms, level_.weights.data() + fine_.at(y, z, half, level_.weight_slots), t, x,
                      x, begin, end);
      }
    }
  }

  int64_t fine(int axis, int64_t at) const { return level_.coarsens[axis] ? 2 * at : at; }
  int64_t coarse(int axis, int64_t at) const { return level_.coarsens[axis] ? floor_half(at) : at; }

  static int64_t coarse_size(const Level& level, const Layout& next) {
    return next.all_rows() * (level.coarsens[0] ? 1 : 2) * level.layout.width;
  }

 private:
  Corners corners_at(const int* s, int half) const {
    return Corners(level_, half + s[0], s[1], s[2]);
  }
  int64_t weight(const int* s, int half, int slot) const {
    return fine_.away(s, half, level_.weight_slots) + slot * 2 * fine_.width;
  }
  float* coarse_row(int64_t y, int64_t z, int half) const {
    return level_.coarse.data() + (coarse_.row(y, z) * halves_ + half) * fine_.width - fine_.first;
  }

  Level &level_, &next_;
  const Layout &fine_, &coarse_;
  int halves_;
  Terms restricts_[2], interpolates_[2][2][2];
  std::vector<float> line_;
};

}  // namespace mpigrad::multigrid
