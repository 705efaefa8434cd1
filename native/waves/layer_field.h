// Memories of the absorbing layers of one axis on a tile with three axes. They exist in these layers
// only, and are zero elsewhere.
#pragma once

#include "waves/memory.h"
#include "waves/registers.h"

namespace mpigrad::waves {

// The places of an axis' cells in memory. Layers along x and y consist of whole rows. Of layers along the
// columns, the two ends of each row are stored next to each other, so that they are read in the order of
// memory.
class AxisLayers {
 public:
  AxisLayers() = default;
  // `reach`: of the stencil, which reads the memories so many cells beyond the layers.
  AxisLayers(const Tile& t, Axis axis, int64_t reach)
      : axis_(axis),
        n_(std::array{t.nx, t.ny, t.nm}[axis]),
        before_(t.layers[2 * axis]),
        behind_(t.layers[2 * axis + 1]),
        middle_(t.nm) {
    if (axis == kColumns) {
      const auto end = [&](int64_t width) { return width ? whole_registers(width + reach) : 0; };
      left_ = end(before_), right_ = end(behind_);
      if (left_ + right_ >= n_) left_ = n_, right_ = 0;
      pitch_ = before_ + behind_ ? whole_registers(kRegister + left_ + right_) : 0;
      cells_ = t.nx * t.nm * pitch_ + kRegister;
    } else {
      pitch_ = (t.ny + 15) / 16 * 16;
      const int64_t across = axis == kRows ? t.nm : t.nx;
      cells_ = (1 + across * (before_ + behind_)) * pitch_;
    }
  }

  int64_t cells() const { return cells_; }
  bool has(int64_t a) const { return (a >= 0 && a < before_) || (a >= n_ - behind_ && a < n_); }
  // Whether the stencil at `a` reads a cell of the layers.
  bool is_near(int64_t a, int64_t reach) const {
    return (before_ && a < before_ + reach) || (behind_ && a >= n_ - behind_ - reach);
  }

  // Of x or y: the first cell of the row at `a` and at `b` of the other of them is first + b pitch. A row
  // outside of the layers has a row of zeros.
  struct Rows {
    int64_t first = 0, pitch = 0;
  };
  Rows rows(int64_t a) const {
    if (axis_ == kColumns || !has(a)) return {};
    const int64_t k = a < before_ ? a : a - n_ + behind_ + before_;
    if (axis_ == kRows) return {(1 + k * middle_) * pitch_, pitch_};
    return {(1 + k) * pitch_, (before_ + behind_) * pitch_};
  }

  int64_t next_row() const { return pitch_; }

  // Of the columns: the number of cells stored at the two ends of a row, and the place where cell 0 of the
  // row would be, for cells of the left end and of the right one.
  int64_t left_end() const { return left_; }
  int64_t right_end() const { return right_; }
  int64_t left(int64_t i, int64_t m) const { return kRegister + (i * middle_ + m) * pitch_; }
  int64_t right(int64_t i, int64_t m) const { return left(i, m) + left_ + right_ - n_; }

  // f(its place, i, m, j) for each cell of the layers, in C order.
  template <class F>
  void each_cell(const Tile& t, const F& f) const {
    for (int64_t i = 0; i < t.nx; ++i)
      for (int64_t m = 0; m < t.nm; ++m)
        if (axis_ == kColumns) {
          for (int64_t j = 0; j < before_; ++j) f(left(i, m) + j, i, m, j);
          const int64_t last = right_ ? right(i, m) : left(i, m);
          for (int64_t j = n_ - behind_; j < n_; ++j) f(last + j, i, m, j);
        } else if (const int64_t a = axis_ == kRows ? i : m; has(a)) {
          const int64_t place = rows(a).first + rows(a).pitch * (axis_ == kRows ? m : i);
          for (int64_t j = 0; j < t.ny; ++j) f(place + j, i, m, j);
        }
  }
  int64_t size(const Tile& t) const { return t.nx * t.ny * t.nm / n_ * (before_ + behind_); }

 private:
  Axis axis_ = kRows;
  int64_t n_ = 0, before_ = 0, behind_ = 0, middle_ = 0;
  int64_t left_ = 0, right_ = 0, pitch_ = 0, cells_ = 0;
};

// Converts to the pointer to which the places of AxisLayers are added.
template <class T>
class LayerField {
 public:
  LayerField() = default;
  explicit LayerField(const AxisLayers& layers)
      : memory_(layers.cells() * sizeof(T) + kColors * kShift), cells_(layers.cells()) {
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
  static inline size_t next_color = 0;
  Memory memory_;
  int64_t cells_ = 0;
  T* data_ = nullptr;
};

}  // namespace mpigrad::waves
