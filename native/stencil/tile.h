// A rank's tile of a grid and the entries of a stencil on it. Axes are numbered from the fastest, as
// hypre numbers them. Grids with fewer than three axes have one cell along the others.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "stencil/digest.h"
#include "stencil/values.h"

namespace mpigrad::stencil {

constexpr int kAxes = 3;

struct Box {
  int64_t lower[kAxes], upper[kAxes];  // upper is exclusive

  int64_t size() const {
    int64_t product = 1;
    for (int a = 0; a < kAxes; ++a) product *= std::max<int64_t>(0, upper[a] - lower[a]);
    return product;
  }
  int64_t line() const { return std::max<int64_t>(0, upper[0] - lower[0]); }  // cells of a line
  bool has_line(int64_t j, int64_t k) const {
    return lower[1] <= j && j < upper[1] && lower[2] <= k && k < upper[2];
  }
  int64_t position(int64_t i, int64_t j, int64_t k) const {
    return ((k - lower[2]) * (upper[1] - lower[1]) + j - lower[1]) * (upper[0] - lower[0]) + i -
           lower[0];
  }
};

struct Tile {
  int axes;
  int64_t shape[kAxes];  // of the whole grid
  Box cells;
};

// All entries of one offset. They link the cells `inside` to the cells that are `step` away.
struct Entry {
  int step[kAxes];
  bool given;     // true: the pattern's values from `start` on, false: zeros
  Box inside;     // the tile's cells whose neighbour at this step is in the grid
  int64_t start;

  Entry(const Tile& tile, const int64_t* along, bool is_given, int64_t from)
      : given(is_given), start(from) {
    for (int a = 0; a < kAxes; ++a) {
      step[a] = static_cast<int>(along[a]);
      inside.lower[a] = std::max(tile.cells.lower[a], -along[a]);
      inside.upper[a] = std::min(tile.cells.upper[a], tile.shape[a] - along[a]);
    }
  }

  // 1 if the step leads to later cells, -1 to earlier ones, 0 to the same.
  int direction() const {
    for (int a = kAxes - 1; a >= 0; --a) {
      if (step[a]) return step[a] > 0 ? 1 : -1;
    }
    return 0;
  }
  bool opposes(const Entry& other) const {
    return step[0] == -other.step[0] && step[1] == -other.step[1] && step[2] == -other.step[2];
  }
};

// Compares the entries of opposite offsets. If a(i, j) and a(j, i) belong to this rank, they are
// compared directly. Otherwise both enter one sum over all ranks, with opposite signs and a weight
// of the pair's own. Differences are relative to both diagonal entries, so that a huge one hides none.
class Asymmetry {
 public:
  Asymmetry(const Tile& tile, const std::vector<Entry>& entries) : tile_(tile) {
    for (const Entry& e : entries) {
      if (e.direction() == 0) diagonal_start_ = e.start;
      for (const Entry& f : entries) {
        if (e.direction() < 0 && f.opposes(e)) pairs_.push_back({&e, &f});
      }
    }
  }

  void begin(const double* values) {
    values_ = values;
    diagonal_ = values + diagonal_start_;
    std::fill_n(sums_, kSums, 0.0);
  }
  // The entries of one line of cells, and their opposites in lines before it.
  void compare(int64_t j, int64_t k) {
    pair_ = 0;
    for (const auto& [back, forth] : pairs_) {
      ++pair_;
      follow(*back, *forth, true, j, k);
      follow(*forth, *back, !back->given, j, k);
    }
  }

  // Three numbers, and whether there is no asymmetry if they are the sums of those of all ranks.
  static constexpr int kSums = 3;
  const double* sums() const { return sums_; }
  static bool none(const double* all) {
    return all[0] == 0 && std::abs(all[1]) <= kTolerance * all[2];
  }

 private:
  static constexpr double kTolerance = 1e-9;

  void follow(const Entry& e, const Entry& opposite, bool within, int64_t j, int64_t k) {
    const Box &cells = tile_.cells, &box = e.inside;
    if (!e.given || !box.has_line(j, k) || !box.line()) return;
    if (!cells.has_line(j + e.step[1], k + e.step[2])) {
      across(e, box.lower[0], box.upper[0], j, k);
      return;
    }
    const int64_t first = std::clamp(cells.lower[0] - e.step[0], box.lower[0], box.upper[0]),
                  last = std::clamp(cells.upper[0] - e.step[0], box.lower[0], box.upper[0]);
    across(e, box.lower[0], first, j, k);
    across(e, last, box.upper[0], j, k);
    if (within && first < last) beside(e, opposite, first, last, j, k);
  }

  void beside(const Entry& e, const Entry& opposite, int64_t first, int64_t last, int64_t j,
              int64_t k) {
    const int64_t x = first + e.step[0], y = j + e.step[1], z = k + e.step[2];
    const double *here = values_ + e.start + e.inside.position(first, j, k),
                 *own = diagonal_ + tile_.cells.position(first, j, k),
                 *beyond = diagonal_ + tile_.cells.position(x, y, z);
    const int64_t size = last - first;
    int64_t bad = 0;
    if (opposite.given) {
      const double* there = values_ + opposite.start + opposite.inside.position(x, y, z);
      for (int64_t m = 0; m < size; ++m) {
        const double d = here[m] - there[m];
        bad += !(d * d <= kTolerance * kTolerance * (own[m] * beyond[m]));
      }
    } else {
      for (int64_t m = 0; m < size; ++m) {
        bad += !(here[m] * here[m] <= kTolerance * kTolerance * (own[m] * beyond[m]));
      }
    }
    sums_[0] += static_cast<double>(bad);
  }

  void across(const Entry& e, int64_t first, int64_t last, int64_t j, int64_t k) {
    if (first >= last) return;
    const double* here = values_ + e.start + e.inside.position(first, j, k);
    const bool back = e.direction() < 0;  // then the other rank has the earlier cell
    for (int64_t i = first; i < last; ++i) {
      const int64_t x = i + back * e.step[0], y = j + back * e.step[1], z = k + back * e.step[2];
      const double value = here[i - first],
                   weight = noise(((z * tile_.shape[1] + y) * tile_.shape[0] + x) * 27 + pair_, 3);
      sums_[1] += back ? weight * value : -weight * value;
      sums_[2] += std::abs(value);
    }
  }

  const Tile& tile_;
  std::vector<std::pair<const Entry*, const Entry*>> pairs_;  // back and forth
  int64_t diagonal_start_ = 0;
  const double *values_ = nullptr, *diagonal_ = nullptr;
  int pair_ = 0;
  double sums_[kSums] = {0, 0, 0};  // pairs that differ, the weighted sum, the sum of absolute values
};

// One pass for all checks of the values, line by line, while they are in the cache.
inline void examine(const Tile& tile, const std::vector<Entry>& entries, const double* values,
                    Digest& digest, bool& bad, Asymmetry* asymmetry) {
  if (asymmetry) asymmetry->begin(values);
  const Box& cells = tile.cells;
  for (int64_t k = cells.lower[2]; k < cells.upper[2]; ++k) {
    for (int64_t j = cells.lower[1]; j < cells.upper[1]; ++j) {
      for (const Entry& e : entries) {
        const Box& box = e.inside;
        if (!e.given || !box.has_line(j, k) || !box.line()) continue;
        const double* line = values + e.start + box.position(box.lower[0], j, k);
        digest.add(line, box.line());
        bad |= !all_finite(line, box.line());
      }
      if (asymmetry) asymmetry->compare(j, k);
    }
  }
}

}  // namespace mpigrad::stencil
