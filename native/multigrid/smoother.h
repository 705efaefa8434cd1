// Gauss-Seidel relaxation by colours. Face stencils have two colours, the parity of x + y + z. Box
// stencils have one colour for each combination of parities. The sweep before the coarse correction
// starts from zero, so that it reads earlier colours only, and its residual is made of later colours.
// The sweep after it takes the colours in reverse order, which makes the cycle symmetric.
//
// Rows are taken in groups: rows of a plane, or planes of a three-dimensional grid. A sweep goes
// through the groups once, and each group is relaxed as soon as the groups around it admit it.
#pragma once

#include "multigrid/level.h"
#include "multigrid/rows.h"

namespace mpigrad::multigrid {

class Smoother {
 public:
  explicit Smoother(Level& level) : level_(level), layout_(level.layout) {
    axis_ = layout_.shape[2] > 1 ? 2 : 1;
    for (int z = 0; z < 2; ++z)
      for (int y = 0; y < 2; ++y)
        for (int half = 0; half < 2; ++half) {
          Kind& kind = kinds_[z][y][half];
          const int own = color(half, y, z);
          for (const Steps& s : level.stencil.neighbors()) {
            const int64_t link = level.stencil.link(layout_, s.at, half),
                          cell = layout_.away(s.at, half);
            const int other = color(half + s.at[0], y + s.at[1], z + s.at[2]);
            (other < own ? kind.earlier : kind.later).add(link, cell);
            kind.all.add(link, cell);
          }
        }
  }

  int64_t lower() const { return layout_.own.lower[axis_]; }
  int64_t upper() const { return layout_.own.upper[axis_]; }
  int axis() const { return axis_; }

  // Calls f(y, z) for the rows of a group.
  template <class F>
  void rows(int64_t g, F&& f) const {
    if (axis_ == 1) return f(g, layout_.own.lower[2]);
    for (int64_t y = layout_.own.lower[1]; y < layout_.own.upper[1]; ++y) f(y, g);
  }

  // Relaxes, from zero, all that may be relaxed when group g is reached, for g from lower() to upper().
  // Groups before g are final.
  void before(int64_t g) const {
    if (!level_.stencil.box) {
      relax_color<false>(g, 0);
      relax_color<false>(g - 1, 1);
    } else if (!parity(g)) {
      relax_box<false>(g);
      relax_box<false>(g - 1);
    } else if (g == upper() && parity(g - 1)) {
      relax_box<false>(g - 1);
    }
  }

  // The reverse, for g from lower() to upper() + 1. Groups before g - 1 are final.
  void after(int64_t g) const {
    if (!level_.stencil.box) {
      relax_color<true>(g - 1, 1);
      relax_color<true>(g - 2, 0);
    } else if (!parity(g)) {
      relax_box<true>(g - 1);
      relax_box<true>(g - 2);
    }
  }

  // r <- b - A x after the first sweep, if the groups around g are final.
  void residual(int64_t g) const {
    if (g < lower() || g >= upper()) return;
    rows(g, [&](int64_t y, int64_t z) {
      for (int half = 0; half < 2; ++half) {
        const Terms& terms = kind(y, z, half).later;
        if (!terms.size) continue;  // zero, and the restriction knows (transfer.h)
        run_row<kResidual>(terms, values(y, z, half), cells(level_.x, y, z, half), nullptr,
                           cells(level_.r, y, z, half), layout_.begin(half), layout_.stop(half));
      }
    });
  }

  // Adds to r what the cells of other ranks contribute, which had no values during the sweep.
  void correct_residual() const {
    const Cells& own = layout_.own;
    for (int a = 0; a < kAxes; ++a) {
      for (int side : {-1, 1}) {
        const int64_t at = side < 0 ? own.lower[a] : own.upper[a] - 1;
        if (at + side < 0 || at + side >= layout_.shape[a]) continue;
        Cells layer = own;
        layer.lower[a] = at;
        layer.upper[a] = at + 1;
        // Cells on several sides are corrected once.
        for (int c = 0; c < a; ++c) {
          if (own.lower[c] > 0) ++layer.lower[c];
          if (own.upper[c] < layout_.shape[c]) --layer.upper[c];
        }
        for (int64_t z = layer.lower[2]; z < layer.upper[2]; ++z)
          for (int64_t y = layer.lower[1]; y < layer.upper[1]; ++y)
            for (int64_t x = layer.lower[0]; x < layer.upper[0]; ++x) exact_residual(x, y, z);
      }
    }
  }

 private:
  struct Kind {
    Terms earlier, later, all;
  };

  int color(int x, int y, int z) const {
    if (!level_.stencil.box) return parity(x + y + z);
    return parity(z) * 4 + parity(y) * 2 + parity(x);
  }
  const Kind& kind(int64_t y, int64_t z, int half) const {
    return kinds_[parity(z)][parity(y)][half];
  }
  float* cells(const Array<float>& array, int64_t y, int64_t z, int half) const {
    return array.data() + layout_.at(y, z, half);
  }
  const float* values(int64_t y, int64_t z, int half) const {
    return level_.stencil.values.data() + layout_.at(y, z, half, level_.stencil.slots());
  }

  template <bool whole>
  void relax(int64_t y, int64_t z, int half) const {
    const Kind& k = kind(y, z, half);
    float* x = cells(level_.x, y, z, half);
    run_row<kRelax>(whole ? k.all : k.earlier, values(y, z, half), x, cells(level_.b, y, z, half),
                    x, layout_.begin(half), layout_.stop(half));
  }
  template <bool whole>
  void relax_color(int64_t g, int color) const {
    if (g < lower() || g >= upper()) return;
    rows(g, [&](int64_t y, int64_t z) { relax<whole>(y, z, parity(y + z + color)); });
  }
  template <bool whole>
  void relax_box(int64_t g) const {
    if (g < lower() || g >= upper()) return;
    const auto relax_rows = [&](int y_parity) {
      rows(g, [&](int64_t y, int64_t z) {
        if (axis_ == 2 && parity(y) != y_parity) return;
        relax<whole>(y, z, whole ? 1 : 0);
        relax<whole>(y, z, whole ? 0 : 1);
      });
    };
    relax_rows(whole ? 1 : 0);
    if (axis_ == 2) relax_rows(whole ? 0 : 1);
  }

  void exact_residual(int64_t x, int64_t y, int64_t z) const {
    const int half = parity(x);
    const int64_t k = floor_half(x);
    const float *a = values(y, z, half) + k, *v = cells(level_.x, y, z, half) + k;
    float total = *v / *a;
    const Terms& terms = kind(y, z, half).all;
    for (int s = 0; s < terms.size; ++s) total += a[terms.factor[s]] * v[terms.number[s]];
    cells(level_.r, y, z, half)[k] = cells(level_.b, y, z, half)[k] - total;
  }

  Level& level_;
  const Layout& layout_;
  int axis_;
  Kind kinds_[2][2][2];
};

}  // namespace mpigrad::multigrid
