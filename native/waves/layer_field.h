// Fields on three axes that are zero outside the absorbing layers: only rows near layers along x and y
// are stored as a whole. Of other rows the two ends are stored, next to each other, so that they are read
// in the order of memory.
#pragma once

#include "waves/memory.h"

namespace mpigrad::waves {

// The places of rows, with a margin of `reach` around the tile.
class LayerRows {
 public:
  LayerRows() = default;
  // `ends`: cells at the two ends of each row, of which the `reach` inner ones stay zero, or none.
  // `is_whole(i, m)`: whether the whole row is stored.
  template <class F>
  LayerRows(const Tile& t, int64_t left, int64_t right, const F& is_whole)
      : reach_(t.reach), middle_(t.nm + 2 * t.reach), split_(std::min(left, t.ny)) {
    constexpr int64_t line = 16;
    const auto rounded = [](int64_t n) { return (n + line - 1) / line * line; };
    const int64_t whole = rounded(t.ny + t.reach) + line, ends = rounded(left + right) + line;
    starts_.reserve(2 * (t.nx + 2 * reach_) * middle_);
    for (int64_t i = -reach_; i < t.nx + reach_; ++i)
      for (int64_t m = -reach_; m < t.nm + reach_; ++m) {
        const bool all = left + right >= t.ny || is_whole(i, m);
        cells_ += line;
        starts_.push_back(cells_);
        starts_.push_back(all ? cells_ : cells_ + left + right - t.ny);
        cells_ += (all ? whole : ends) - line;
      }
    cells_ += line;
  }

  // Where the row's cell 0 lies, or would lie: for cells of the left end, or of the right one.
  int64_t left(int64_t i, int64_t m) const { return starts_[2 * index(i, m)]; }
  int64_t right(int64_t i, int64_t m) const { return starts_[2 * index(i, m) + 1]; }
  int64_t at(int64_t i, int64_t m, int64_t j) const {
    return (j < split_ ? left(i, m) : right(i, m)) + j;
  }
  int64_t cells() const { return cells_; }

 private:
  int64_t index(int64_t i, int64_t m) const { return (i + reach_) * middle_ + m + reach_; }

  int64_t reach_ = 0, middle_ = 0, split_ = 0, cells_ = 0;
  std::vector<int64_t> starts_;
};

// Converts to the pointer to which LayerRows' places are added.
template <class T>
class LayerField {
 public:
  LayerField() = default;
  explicit LayerField(const LayerRows& rows)
      : memory_(rows.cells() * sizeof(T) + kColors * kShift), cells_(rows.cells()) {
    data_ = reinterpret_cast<T*>(static_cast<char*>(memory_.data()) + next_color++ % kColors * kShift);
  }
  void clear() { std::fill_n(data_, cells_, T(0)); }
  operator T*() const { return data_; }
  friend void swap(LayerField& a, LayerField& b) {
    std::swap(a.memory_, b.memory_);
    std::swap(a.cells_, b.cells_);
    std::swap(a.data_, b.data_);
  }

 private:
  static constexpr size_t kColors = 16, kShift = 1088;  // as for Field
  static inline size_t next_color = 0;
  Memory memory_;
  int64_t cells_ = 0;
  T* data_ = nullptr;
};

}  // namespace mpigrad::waves
