// The order in which a pass computes several steps of the cells, and the sizes of its blocks.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include <unistd.h>

#include "waves/tile.h"

namespace mpigrad::waves {

// Bytes of the second level, which one core uses, or 1 MiB if the system does not say.
inline int64_t core_cache() {
  static const int64_t bytes = [] {
    long found = 0;
#ifdef _SC_LEVEL2_CACHE_SIZE
    found = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    return found > 0 ? int64_t{found} : int64_t{1} << 20;
  }();
  return bytes;
}

// Columns of blocks along the middle axis, and in each of them a few rows at a time. Each step lags behind
// the one before by the stencil's reach along both. Step s computes the cells of tile.core(depth - s).
class Blocks {
 public:
  // `middle`: cells of a block along the middle axis, about.
  Blocks(const Tile& tile, int64_t depth, int64_t middle, int64_t bytes_of_a_value)
      : reach_(tile.reach), margin_(tile.margin()) {
    const Box first = tile.core(depth), last = tile.core(1);
    i0_ = first.i0, m0_ = first.m0;
    const int64_t n = std::max(first.i1, last.i1 + (depth - 1) * reach_) - i0_;
    const int64_t nm = std::max(first.m1, last.m1 + (depth - 1) * margin_) - m0_;
    columns_ = depth > 1 ? std::max<int64_t>(1, (nm + middle / 2) / middle) : 1;
    middle_ = std::max<int64_t>(1, (nm + columns_ - 1) / columns_);
    rows_ = depth > 1 ? rows_at_once(tile, bytes_of_a_value) : std::max<int64_t>(1, n);
    steps_ = std::max<int64_t>(0, (n + rows_ - 1) / rows_);
  }
  int64_t count() const { return columns_ * steps_; }
  // The part of a box that is computed in block k, in this step of the pass.
  Box at(int64_t k, Box b, int64_t step) const {
    const int64_t i = i0_ + k % steps_ * rows_ - step * reach_;
    const int64_t m = m0_ + k / steps_ * middle_ - step * margin_;
    b.i0 = std::max(b.i0, i), b.i1 = std::min(b.i1, i + rows_);
    b.m0 = std::max(b.m0, m), b.m1 = std::min(b.m1, m + middle_);
    return b;
  }

 private:
  // Rows use a quarter of the core's cache: the rest is for what the stencil reads around them, and the
  // history passes through. On 1040 columns 4 rows took 3 % more time than 16.
  int64_t rows_at_once(const Tile& tile, int64_t bytes_of_a_value) const {
    constexpr int64_t kFieldsOfAGradient = 5;
    const int64_t row = kFieldsOfAGradient * middle_ * tile.stride * bytes_of_a_value;
    return std::max(2 * reach_, core_cache() / 4 / row);
  }

  int64_t reach_, margin_, i0_, m0_, columns_, middle_, rows_, steps_;
};

// Which blocks are the fastest depends on caches of which the system says little (a virtual machine shows
// the third level of its host). So the first passes of a program take turns with a few sizes. The bits of
// the results do not depend on them, so every rank chooses for itself.
class BlockTrial {
 public:
  explicit BlockTrial(std::vector<int64_t> sizes)
      : sizes_(std::move(sizes)), seconds_(sizes_.size(), 1e300) {}

  bool decided() const { return sizes_.size() == 1 || passes_ == kRounds * sizes_.size(); }
  // Of the next pass.
  int64_t size() const { return sizes_[decided() ? best_ : passes_ % sizes_.size()]; }
  // The time that a pass of this size took.
  void add(double seconds) {
    double& shortest = seconds_[passes_ % sizes_.size()];
    shortest = std::min(shortest, seconds);
    if (++passes_ == kRounds * sizes_.size())
      best_ = std::min_element(seconds_.begin(), seconds_.end()) - seconds_.begin();
  }

 private:
  static constexpr size_t kRounds = 3;

  std::vector<int64_t> sizes_;
  std::vector<double> seconds_;  // the shortest of each size
  size_t passes_ = 0, best_ = 0;
};

// The trial of passes that are alike. Only acoustic waves on three axes have several sizes, so `mode` and the
// tile tell them apart. As all of a rank's waves, it is for one thread.
inline BlockTrial& block_trial(const Tile& t, int64_t depth, int64_t bytes_of_a_value, int64_t mode) {
  static std::map<std::array<int64_t, 8>, BlockTrial> trials;
  const std::array<int64_t, 8> key{mode, bytes_of_a_value, depth, t.reach, t.nx, t.ny, t.nm, t.volume};
  if (const auto found = trials.find(key); found != trials.end()) return found->second;
  const int64_t whole = t.nm + (depth - 1) * t.margin();
  std::vector<int64_t> sizes{whole};
  if (t.volume && depth > 1) {
    // What all steps read of three fields, around twice the reach of rows, fills the core's cache.
    const int64_t row = 3 * (depth + 4) * t.reach * t.stride * bytes_of_a_value;
    const int64_t fit = std::max<int64_t>(16, core_cache() * 3 / 5 / row);
    const int64_t between = std::llround(std::sqrt(static_cast<double>(whole * fit)));  // for a third level
    for (int64_t size : {between, fit})
      if (3 * size <= 2 * whole) sizes.push_back(size);  // else there is one block
  }
  return trials.emplace(key, BlockTrial(sizes)).first->second;
}

}  // namespace mpigrad::waves
