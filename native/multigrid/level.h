// One level of the multigrid hierarchy on a rank's tile: its cells, the layout of its arrays, and its
// stencil. Axes are numbered from the fastest: x, y, z.
//
// A row along x is stored in two halves, the cells of even and of odd index, so that all loops over
// cells of one colour, and over the cells between coarse ones, have unit stride. Cell x is number
// x / 2 of its half. A row has several slots of two halves, which are the entries of a stencil.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "stencil/tile.h"

namespace mpigrad::multigrid {

using stencil::kAxes;
constexpr int kHalo = 2;     // cells around a tile, along axes with more than one cell
constexpr int64_t kMargin = 16;  // of a half row, so that its own cells begin on a cache line

struct Steps {
  int at[kAxes];
};

using Cells = stencil::Box;

inline int64_t floor_half(int64_t x) { return x >= 0 ? x / 2 : -((1 - x) / 2); }
inline int parity(int64_t x) { return static_cast<int>(x & 1); }

// Zeros, on cache lines.
template <class T>
class Array {
 public:
  Array() = default;
  explicit Array(int64_t size) : size_(size) {
    const size_t bytes = (std::max<int64_t>(size, 1) * sizeof(T) + 63) / 64 * 64;
    data_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
    if (!data_) throw std::bad_alloc();
    std::fill_n(data_.get(), size, T(0));
  }
  T* data() const { return data_.get(); }
  int64_t size() const { return size_; }
  bool empty() const { return !size_; }
  T& operator[](int64_t i) const { return data_.get()[i]; }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<T[], Free> data_;
  int64_t size_ = 0;
};

// Where cells are in the arrays of a level.
struct Layout {
  int64_t shape[kAxes];  // of the whole grid
  Cells own;             // this rank's
  int halo[kAxes];
  int64_t first;  // number of the first cell of a half row
  int64_t width;  // of a half row
  int64_t rows[2];  // along y and z, with halos

  Layout() = default;
  Layout(const int64_t* whole, const Cells& cells) : own(cells) {
    for (int a = 0; a < kAxes; ++a) {
      shape[a] = whole[a];
      halo[a] = whole[a] > 1 ? kHalo : 0;
    }
    first = floor_half(own.lower[0]) - kMargin;
    const int64_t last = floor_half(own.upper[0] + 1) + 2;
    width = (last - first + 15) / 16 * 16;
    if (width % 128 == 0) width += 16;  // rows must not share cache sets
    for (int a = 1; a < kAxes; ++a) rows[a - 1] = own.upper[a] - own.lower[a] + 2 * halo[a];
  }
  int64_t all_rows() const { return rows[0] * rows[1]; }
  int64_t row(int64_t y, int64_t z) const {
    return (z - own.lower[2] + halo[2]) * rows[0] + y - own.lower[1] + halo[1];
  }
  // The place of number 0 of a half row in an array with so many slots.
  int64_t at(int64_t y, int64_t z, int half, int slots = 1, int slot = 0) const {
    return ((row(y, z) * slots + slot) * 2 + half) * width - first;
  }
  // The distance from a cell of this half to the cell `s` away.
  int64_t away(const int* s, int half, int slots = 1) const {
    const int to = parity(half + s[0]);
    return (s[2] * rows[0] + s[1]) * slots * 2 * width + (to - half) * width +
           floor_half(half + s[0]);
  }
  // Loops over a half row that ends at the end of the grid go on to a whole vector register: the numbers
  // there are zero, and stay zero.
  int64_t padded(int64_t start, int64_t stop) const {
    if (own.upper[0] < shape[0]) return stop;
    return std::min(start + (stop - start + kMargin - 1) / kMargin * kMargin, first + width);
  }
  int64_t stop(int half) const { return padded(begin(half), end(half)); }
  int64_t begin(int half) const { return floor_half(own.lower[0] + 1 - half); }
  int64_t end(int half) const { return floor_half(own.upper[0] + 1 - half); }
};

// A symmetric stencil: slot 0 is the diagonal, or its inverse, and slot u > 0 is the link to the cell
// `upper[u]` away, which is a later one. The link to an earlier cell is stored at that cell.
struct Stencil {
  bool box = false;  // all cells around, or the cells across faces only
  std::vector<Steps> upper;  // upper[0] is zero
  Array<float> values;

  int slots() const { return static_cast<int>(upper.size()); }

  static int direction(const int* s) {
    for (int a = kAxes - 1; a >= 0; --a)
      if (s[a]) return s[a] > 0 ? 1 : -1;
    return 0;
  }
  void set_shape(bool is_box, const int64_t* shape) {
    box = is_box;
    upper.assign(1, Steps{{0, 0, 0}});
    int reach[kAxes];
    for (int a = 0; a < kAxes; ++a) reach[a] = shape[a] > 1;
    for (int z = 0; z <= reach[2]; ++z)
      for (int y = -reach[1]; y <= reach[1]; ++y)
        for (int x = -reach[0]; x <= reach[0]; ++x) {
          const int s[kAxes] = {x, y, z};
          if (direction(s) > 0 && (box || std::abs(x) + std::abs(y) + std::abs(z) == 1))
            upper.push_back(Steps{{x, y, z}});
        }
  }
  // The slot of the link to `s`, or of the opposite link. -1: there is none.
  int slot(const int* s) const {
    const int sign = direction(s) < 0 ? -1 : 1;
    for (int u = 0; u < slots(); ++u) {
      const int* t = upper[u].at;
      if (t[0] == sign * s[0] && t[1] == sign * s[1] && t[2] == sign * s[2]) return u;
    }
    return -1;
  }
  std::vector<Steps> neighbors() const {
    std::vector<Steps> all;
    for (int u = 1; u < slots(); ++u)
      for (int sign : {-1, 1}) {
        const int* t = upper[u].at;
        all.push_back(Steps{{sign * t[0], sign * t[1], sign * t[2]}});
      }
    return all;
  }
  // The distance from number 0 of a half row (slot 0) to the link to `s` of the same cell.
  int64_t link(const Layout& layout, const int* s, int half) const {
    const int64_t u = int64_t{slot(s)} * 2 * layout.width;
    return direction(s) < 0 ? u + layout.away(s, half, slots()) : u;
  }
};

struct Level {
  Layout layout;
  Stencil stencil;
  bool distributed = false;
  bool gathers = false;            // the next level is this one, on every rank
  bool coarsens[kAxes] = {};       // the axes of which the next level has every second cell
  int weight_slots = 0;
  Array<float> x, b, r;
  Array<float> weights;  // of the interpolation: a slot for each corner around a cell
  Array<float> coarse;   // rows of the next level in the numbering of this one (transfer.h)

  // Zeros at first. Later set-ups write the same cells of the same arrays: first touches of memory cost
  // more than the set-up itself.
  static void reserve(Array<float>& array, int64_t size) {
    size += 64;  // for padded loops
    if (array.size() != size) array = Array<float>(size);
  }
  void reserve_stencil() {
    reserve(stencil.values, layout.all_rows() * stencil.slots() * 2 * layout.width);
  }
  bool coarsens_any() const { return coarsens[0] || coarsens[1] || coarsens[2]; }
};

}  // namespace mpigrad::multigrid
