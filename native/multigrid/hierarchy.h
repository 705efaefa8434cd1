// The hierarchy of levels, and one symmetric V-cycle on it.
//
// Levels are distributed while they are large. Then one level is gathered on every rank, and all ranks
// do the same work from there on. The last level has few cells, and is solved by a Cholesky
// factorization.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "multigrid/setup.h"
#include "multigrid/smoother.h"

namespace mpigrad::multigrid {

// L D Lᵀ of the last level's matrix. A pivot that is zero but for rounding leaves its unknown out: a
// singular matrix has one.
class Cholesky {
 public:
  explicit Cholesky(const Level& level) : level_(level) {
    const Layout& layout = level.layout;
    const Stencil& stencil = level.stencil;
    n_ = layout.own.size();
    factor_.assign(n_ * n_, 0);
    x_.resize(n_);
    each([&](int64_t i, int64_t x, int64_t y, int64_t z) {
      const int half = parity(x);
      const float* a = stencil.values.data() + layout.at(y, z, half, stencil.slots()) + floor_half(x);
      factor_[i * n_ + i] = a[0];
      for (int u = 1; u < stencil.slots(); ++u) {
        const int* s = stencil.upper[u].at;
        const int64_t at[kAxes] = {x + s[0], y + s[1], z + s[2]};
        bool inside = true;
        for (int c = 0; c < kAxes; ++c) inside &= at[c] >= 0 && at[c] < layout.shape[c];
        if (!inside) continue;
        const int64_t j = (at[2] * layout.shape[1] + at[1]) * layout.shape[0] + at[0];
        factor_[j * n_ + i] = a[2 * layout.width * u];
      }
    });
    for (int64_t j = 0; j < n_; ++j) {
      double* row = &factor_[j * n_];
      const double diagonal = row[j];
      for (int64_t k = 0; k < j; ++k) {
        double sum = row[k];
        for (int64_t m = 0; m < k; ++m) sum -= row[m] * factor_[k * n_ + m];
        row[k] = sum;
      }
      double pivot = diagonal;
      for (int64_t k = 0; k < j; ++k) {
        const double scaled = row[k] * factor_[k * n_ + k];
        pivot -= row[k] * scaled;
        row[k] = scaled;
      }
      row[j] = pivot > 1e-6 * std::abs(diagonal) ? 1 / pivot : 0;
    }
  }

  void solve() {
    const Layout& layout = level_.layout;
    const auto place = [&](int64_t x, int64_t y, int64_t z) {
      return layout.at(y, z, parity(x)) + floor_half(x);
    };
    each([&](int64_t i, int64_t x, int64_t y, int64_t z) { x_[i] = level_.b[place(x, y, z)]; });
    for (int64_t i = 0; i < n_; ++i)
      for (int64_t k = 0; k < i; ++k) x_[i] -= factor_[i * n_ + k] * x_[k];
    for (int64_t i = 0; i < n_; ++i) x_[i] *= factor_[i * n_ + i];
    for (int64_t i = n_; i-- > 0;)
      for (int64_t k = 0; k < i; ++k) x_[k] -= factor_[i * n_ + k] * x_[i];
    each([&](int64_t i, int64_t x, int64_t y, int64_t z) {
      level_.x[place(x, y, z)] = static_cast<float>(x_[i]);
    });
  }

 private:
  template <class F>
  void each(F&& f) const {
    const int64_t* n = level_.layout.shape;
    int64_t i = 0;
    for (int64_t z = 0; z < n[2]; ++z)
      for (int64_t y = 0; y < n[1]; ++y)
        for (int64_t x = 0; x < n[0]; ++x) f(i++, x, y, z);
  }

  const Level& level_;
  int64_t n_ = 0;
  std::vector<double> factor_, x_;  // the diagonal is inverted
};

class Hierarchy {
 public:
  // `tiles[a]` has the first cell of each tile along an axis, and the number of cells.
  Hierarchy(Ranks& ranks, const std::vector<int64_t>* tiles) : ranks_(ranks) {
    for (int a = 0; a < kAxes; ++a) tiles_[a] = tiles[a];
  }

  // The first level, whose stencil `set_up` reads: the same one as before, if there was one.
  Level& start(const Layout& layout, bool box) {
    if (levels_.empty()) {
      levels_.push_back(std::make_unique<Level>());
      Level& first = *levels_.front();
      first.layout = layout;
      first.stencil.set_shape(box, layout.shape);
      first.distributed = ranks_.size() > 1;
      first.reserve_stencil();
    }
    return *levels_.front();
  }

  // Collective: makes the levels below the first, and calls `progress` at each.
  template <class Progress>
  void set_up(Progress&& progress) {
    smoothers_.clear();
    transfers_.clear();
    last_.reset();
    auto tiles = tiles_;
    for (size_t l = 0;; ++l) {
      progress();
      Level& level = *levels_[l];
      prepare(level);
      const int64_t cells = whole(level.layout).size();
      if (!level.distributed && cells <= kLastCells) break;
      const bool gathers =
          level.distributed && (cells <= kGatheredCells || smallest(tiles) < 2 * kHalo);
      bool coarsens[kAxes] = {};
      if (!gathers) choose_axes(level, coarsens);
      if (!std::equal(coarsens, coarsens + kAxes, level.coarsens)) levels_.resize(l + 1);
      if (levels_.size() == l + 1) {
        std::copy_n(coarsens, kAxes, level.coarsens);
        level.gathers = gathers;
        levels_.push_back(below(level));
      }
      Level& next = *levels_[l + 1];
      if (gathers) {
        gathered_tiles_ = tiles;
        gather(level, level.stencil.values, next, next.stencil.values, next.stencil.slots());
        continue;
      }
      for (int a = 0; a < kAxes; ++a)
        if (coarsens[a])
          for (int64_t& start : tiles[a]) start = floor_half(start + 1);
      Weights(level).compute(ranks_);
      Galerkin(level, next).compute();
    }
    last_.emplace(*levels_.back());
    for (size_t l = 0; l < levels_.size(); ++l) {
      Level& level = *levels_[l];
      invert_diagonal(level);
      smoothers_.push_back(std::make_unique<Smoother>(level));
      transfers_.push_back(level.coarsens_any() ? std::make_unique<Transfer>(level, *levels_[l + 1])
                                                : nullptr);
    }
  }

  Level& first() const { return *levels_.front(); }
  size_t size() const { return levels_.size(); }

  // Collective: x of the first level from its b. `emit(y, z)` is called for its rows when they are final.
  template <class Emit>
  void cycle(Emit&& emit) {
    cycle(0, emit);
  }

 private:
  struct Nothing {
    void operator()(int64_t, int64_t) const {}
  };

  static constexpr int64_t kLastCells = 64, kGatheredCells = 4096;
  static int64_t smallest(const std::array<std::vector<int64_t>, kAxes>& tiles) {
    int64_t least = INT64_MAX;
    for (const auto& starts : tiles)
      for (size_t i = 0; i + 1 < starts.size() && starts.size() > 2; ++i)
        least = std::min(least, starts[i + 1] - starts[i]);
    return least;
  }

  static Cells whole(const Layout& layout) {
    Cells all;
    for (int a = 0; a < kAxes; ++a) {
      all.lower[a] = 0;
      all.upper[a] = layout.shape[a];
    }
    return all;
  }

  // The level after `level`, without values.
  static std::unique_ptr<Level> below(Level& level) {
    auto next = std::make_unique<Level>();
    const Layout& layout = level.layout;
    if (level.gathers) {
      next->layout = Layout(layout.shape, whole(layout));
      next->stencil.set_shape(level.stencil.box, layout.shape);
    } else {
      int64_t shape[kAxes];
      Cells own;
      for (int a = 0; a < kAxes; ++a) {
        const auto half = [&](int64_t n) { return level.coarsens[a] ? floor_half(n + 1) : n; };
        shape[a] = half(layout.shape[a]);
        own.lower[a] = half(layout.own.lower[a]);
        own.upper[a] = half(layout.own.upper[a]);
      }
      next->layout = Layout(shape, own);
      next->stencil.set_shape(true, shape);
      next->distributed = level.distributed;
      Level::reserve(level.coarse, Transfer::coarse_size(level, next->layout));
    }
    next->reserve_stencil();
    return next;
  }

  // Memory, and the halos of the stencil.
  void prepare(Level& level) {
    const int64_t size = level.layout.all_rows() * 2 * level.layout.width;
    for (Array<float>* array : {&level.x, &level.b, &level.r}) Level::reserve(*array, size);
    if (level.distributed)
      exchange(ranks_, level.layout, level.stencil.values, level.stencil.slots());
  }

  // Coarsens the axes with strong links: point relaxation leaves errors that are rough along the others.
  void choose_axes(const Level& level, bool* coarsens) const {
    const Layout& layout = level.layout;
    double strength[kAxes] = {0, 0, 0};
    const int slots = level.stencil.slots();
    for (int64_t z = layout.own.lower[2]; z < layout.own.upper[2]; ++z)
      for (int64_t y = layout.own.lower[1]; y < layout.own.upper[1]; ++y)
        for (int half = 0; half < 2; ++half) {
          const float* a = level.stencil.values.data() + layout.at(y, z, half, slots);
          for (int u = 1; u < slots; ++u) {
            const float* link = a + u * 2 * layout.width;
            double sum = 0;
            for (int64_t k = layout.begin(half); k < layout.end(half); ++k) sum -= link[k] / a[k];
            for (int c = 0; c < kAxes; ++c)
              if (level.stencil.upper[u].at[c]) strength[c] += sum;
          }
        }
    if (level.distributed) ranks_.reduce(strength, kAxes, kSum);
    double largest = 0;
    for (int a = 0; a < kAxes; ++a) {
      strength[a] = layout.shape[a] > 1 ? std::abs(strength[a]) : -1;
      largest = std::max(largest, strength[a]);
    }
    for (int a = 0; a < kAxes; ++a)
      coarsens[a] = layout.shape[a] > 1 && !(strength[a] < 0.2 * largest);
  }

  static void invert_diagonal(Level& level) {
    const Layout& layout = level.layout;
    const int slots = level.stencil.slots();
    for (int64_t z = layout.own.lower[2]; z < layout.own.upper[2]; ++z)
      for (int64_t y = layout.own.lower[1]; y < layout.own.upper[1]; ++y)
        for (int half = 0; half < 2; ++half) {
          float* a = level.stencil.values.data() + layout.at(y, z, half, slots);
          for (int64_t k = layout.begin(half); k < layout.end(half); ++k)
            a[k] = a[k] > 0 ? 1 / a[k] : 0;
        }
  }

  // ---- the level that is gathered ----

  // Every rank's cells, row after row, to or from the rows of the whole grid.
  template <class Copy>
  void each_row(const Cells& cells, Copy&& copy) const {
    for (int64_t z = cells.lower[2]; z < cells.upper[2]; ++z)
      for (int64_t y = cells.lower[1]; y < cells.upper[1]; ++y)
        for (int half = 0; half < 2; ++half) {
          const int64_t begin = floor_half(cells.lower[0] + 1 - half);
          copy(y, z, half, begin, floor_half(cells.upper[0] + 1 - half) - begin);
        }
  }

  Cells tile_of(int rank) const {
    Cells cells;
    for (int a = 0; a < kAxes; ++a) {
      const int tiles = static_cast<int>(gathered_tiles_[a].size()) - 1;
      cells.lower[a] = gathered_tiles_[a][rank % tiles];
      cells.upper[a] = gathered_tiles_[a][rank % tiles + 1];
      rank /= tiles;
    }
    return cells;
  }

  void gather(const Level& level, const Array<float>& from, const Level& next,
              const Array<float>& to, int slots) {
    std::vector<int> counts, starts;
    int total = 0;
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      starts.push_back(total);
      counts.push_back(static_cast<int>(tile_of(rank).size() * slots));
      total += counts.back();
    }
    own_.resize(counts[ranks_.rank()]);
    all_.resize(total);
    float* place = own_.data();
    each_row(level.layout.own, [&](int64_t y, int64_t z, int half, int64_t begin, int64_t n) {
      for (int slot = 0; slot < slots; ++slot, place += n)
        std::copy_n(from.data() + level.layout.at(y, z, half, slots, slot) + begin, n, place);
    });
    ranks_.gather(own_.data(), counts[ranks_.rank()], all_.data(), counts, starts);
    place = all_.data();
    for (int rank = 0; rank < ranks_.size(); ++rank)
      each_row(tile_of(rank), [&](int64_t y, int64_t z, int half, int64_t begin, int64_t n) {
        for (int slot = 0; slot < slots; ++slot, place += n)
          std::copy_n(place, n, to.data() + next.layout.at(y, z, half, slots, slot) + begin);
      });
  }

  // Copies x of the gathered level to this rank's tile and the cells around it.
  void scatter(Level& level, const Level& next) const {
    Cells cells = level.layout.own;
    for (int a = 0; a < kAxes; ++a) {
      cells.lower[a] = std::max<int64_t>(cells.lower[a] - kHalo, 0);
      cells.upper[a] = std::min(cells.upper[a] + kHalo, level.layout.shape[a]);
    }
    each_row(cells, [&](int64_t y, int64_t z, int half, int64_t begin, int64_t n) {
      std::copy_n(next.x.data() + next.layout.at(y, z, half) + begin, n,
                  level.x.data() + level.layout.at(y, z, half) + begin);
    });
  }

  // ---- the cycle ----

  template <class Emit>
  void cycle(size_t l, Emit&& emit) {
    Level& level = *levels_[l];
    if (level.gathers) {
      gather(level, level.b, *levels_[l + 1], levels_[l + 1]->b, 1);
      cycle(l + 1, Nothing{});
      scatter(level, *levels_[l + 1]);
      return emit_all(l, emit);
    }
    if (l + 1 == levels_.size()) {
      last_->solve();
      return emit_all(l, emit);
    }
    down(l);
    cycle(l + 1, Nothing{});
    if (levels_[l + 1]->distributed && !levels_[l + 1]->gathers)
      exchange(ranks_, levels_[l + 1]->layout, levels_[l + 1]->x, 1);
    up(l, emit);
  }

  template <class Emit>
  void emit_all(size_t l, Emit&& emit) {
    const Smoother& smoother = *smoothers_[l];
    for (int64_t g = smoother.lower(); g < smoother.upper(); ++g) smoother.rows(g, emit);
  }

  // Groups of rows are restricted as soon as the groups around them have their residuals.
  void restrict_group(size_t l, int64_t group) {
    const Smoother& smoother = *smoothers_[l];
    Transfer& transfer = *transfers_[l];
    const Layout& next = levels_[l + 1]->layout;
    const int axis = smoother.axis();
    if (group < next.own.lower[axis] || group >= next.own.upper[axis]) return;
    if (axis == 1) {
      transfer.restrict_row(group, next.own.lower[2]);
    } else {
      for (int64_t y = next.own.lower[1]; y < next.own.upper[1]; ++y) transfer.restrict_row(y, group);
    }
  }

  void down(size_t l) {
    Level& level = *levels_[l];
    const Smoother& smoother = *smoothers_[l];
    const int64_t lower = smoother.lower(), upper = smoother.upper();
    const bool coarsens = level.coarsens[smoother.axis()];
    if (level.distributed) {
      clear_halo(level);
      for (int64_t g = lower; g <= upper; ++g) smoother.before(g);
      exchange(ranks_, level.layout, level.x, 1, 1);
      for (int64_t g = lower; g < upper; ++g) smoother.residual(g);
      smoother.correct_residual();
      exchange(ranks_, level.layout, level.r, 1, 1);
      const Layout& next = levels_[l + 1]->layout;
      for (int64_t g = next.own.lower[smoother.axis()]; g < next.own.upper[smoother.axis()]; ++g)
        restrict_group(l, g);
      return;
    }
    const auto finish = [&](int64_t g) {
      if (g < lower) return;
      smoother.residual(g);
      if (!coarsens) {
        restrict_group(l, g);
      } else if (parity(g) || g == upper - 1) {
        restrict_group(l, floor_half(g));
      }
    };
    for (int64_t g = lower; g <= upper; ++g) {
      smoother.before(g);
      finish(g - 2);
    }
    finish(upper - 1);
  }

  template <class Emit>
  void up(size_t l, Emit&& emit) {
    Level& level = *levels_[l];
    const Smoother& smoother = *smoothers_[l];
    Transfer& transfer = *transfers_[l];
    const Layout& layout = level.layout;
    const int axis = smoother.axis();
    transfer.fetch();
    // One cell beyond the tile, where it has neighbours.
    Cells reach = layout.own;
    for (int a = 0; a < kAxes; ++a) {
      reach.lower[a] = std::max<int64_t>(reach.lower[a] - 1, 0);
      reach.upper[a] = std::min(reach.upper[a] + 1, layout.shape[a]);
    }
    const auto correct = [&](int64_t g) {
      if (g < reach.lower[axis] || g >= reach.upper[axis]) return;
      if (axis == 1) return transfer.interpolate_row(g, layout.own.lower[2]);
      for (int64_t y = reach.lower[1]; y < reach.upper[1]; ++y) transfer.interpolate_row(y, g);
    };
    correct(smoother.lower() - 1);
    for (int64_t g = smoother.lower(); g <= smoother.upper() + 1; ++g) {
      correct(g);
      smoother.after(g);
      if (g - 2 >= smoother.lower()) smoother.rows(g - 2, emit);
    }
  }

  // The first sweep starts from zero on the cells of other ranks, too.
  static void clear_halo(Level& level) {
    const Layout& layout = level.layout;
    const Cells& own = layout.own;
    const int* halo = layout.halo;
    for (int64_t z = own.lower[2] - halo[2]; z < own.upper[2] + halo[2]; ++z)
      for (int64_t y = own.lower[1] - halo[1]; y < own.upper[1] + halo[1]; ++y) {
        const bool inside = y >= own.lower[1] && y < own.upper[1] && z >= own.lower[2] &&
                            z < own.upper[2];
        for (int half = 0; half < 2; ++half) {
          float* x = level.x.data() + layout.at(y, z, half);
          const int64_t begin = layout.begin(half), end = layout.end(half);
          if (inside) {
            std::fill(x + begin - 2, x + begin, 0.0f);
            std::fill(x + end, x + end + 2, 0.0f);
          } else {
            std::fill(x + begin - 2, x + end + 2, 0.0f);
          }
        }
      }
  }

  Ranks& ranks_;
  std::array<std::vector<int64_t>, kAxes> tiles_, gathered_tiles_;
  std::vector<std::unique_ptr<Level>> levels_;
  std::vector<std::unique_ptr<Smoother>> smoothers_;
  std::vector<std::unique_ptr<Transfer>> transfers_;
  std::optional<Cholesky> last_;
  std::vector<float> own_, all_;
};

}  // namespace mpigrad::multigrid
