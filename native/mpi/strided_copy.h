// Copies of boxes between arrays of different strides: packing, unpacking and transposition.
#pragma once

#include <algorithm>
#include <complex>
#include <cstdint>
#include <cstring>

namespace mpigrad {

struct Axis {
  int64_t extent, from, to;  // strides of the source and of the destination, in elements
};

constexpr int kMostAxes = 12;

// A box of at most kMostAxes axes, whose axes are merged where both arrays allow it.
class Box {
 public:
  bool empty = false;

  void add(Axis a) {
    empty |= a.extent == 0;
    if (a.extent == 1) return;
    if (count_) {
      Axis& outer = axes_[count_ - 1];
      if (outer.from == a.from * a.extent && outer.to == a.to * a.extent) {
        outer = {outer.extent * a.extent, a.from, a.to};
        return;
      }
    }
    axes_[count_++] = a;
  }

  template <class T>
  void copy(const T* from, T* to) const {
    if (empty) return;
    int reads = -1, writes = -1;  // the axes along which source and destination are contiguous
    for (int i = 0; i < count_; ++i) {
      if (axes_[i].from == 1) reads = i;
      if (axes_[i].to == 1) writes = i;
    }
    Axis outer[kMostAxes];
    int n = 0;
    // The destination is written in its order.
    for (int i = 0; i < count_; ++i) {
      if (i == reads || i == writes) continue;
      int at = n++;
      for (; at && outer[at - 1].to < axes_[i].to; --at) outer[at] = outer[at - 1];
      outer[at] = axes_[i];
    }
    const Axis none{1, 1, 1};
    const Axis& r = reads < 0 ? none : axes_[reads];
    const Axis& w = writes < 0 ? none : axes_[writes];
    if (reads == writes)
      walk(outer, n, from, to,
           [&](const T* a, T* b) { std::memcpy(b, a, r.extent * sizeof(T)); });
    else
      walk(outer, n, from, to, [&](const T* a, T* b) { transpose(a, b, r, w); });
  }

 private:
  Axis axes_[kMostAxes];
  int count_ = 0;

  template <class T, class F>
  static void walk(const Axis* outer, int n, const T* from, T* to, const F& inner) {
    if (n == 0) return inner(from, to);
    for (int64_t i = 0; i < outer->extent; ++i)
      walk(outer + 1, n - 1, from + i * outer->from, to + i * outer->to, inner);
  }

  // Tiles of some cache lines each way, so that every line is read and written once.
  template <class T>
  static void transpose(const T* from, T* to, const Axis& r, const Axis& w) {
    constexpr int64_t tile = 128 / sizeof(T);
    for (int64_t j = 0; j < w.extent; j += tile) {
      const int64_t rows = std::min(tile, w.extent - j);
      for (int64_t i = 0; i < r.extent; i += tile) {
        const int64_t columns = std::min(tile, r.extent - i);
        const T* a = from + j * w.from + i;
        T* b = to + i * r.to + j;
        if (rows == tile && columns == tile) {
          for (int64_t k = 0; k < tile; ++k)
            for (int64_t l = 0; l < tile; ++l) b[k * r.to + l] = a[l * w.from + k];
        } else {
          for (int64_t k = 0; k < columns; ++k)
            for (int64_t l = 0; l < rows; ++l) b[k * r.to + l] = a[l * w.from + k];
        }
      }
    }
  }
};

// Elements of 16 bytes, which are moved as one.
struct Wide {
  double part[2];
};

// Copies elements of `width` bytes: 1, 2, 4, 8 or 16.
inline void copy_box(const Box& box, size_t width, const char* from, char* to) {
  const auto as = [&](auto example) {
    using T = decltype(example);
    box.copy(reinterpret_cast<const T*>(from), reinterpret_cast<T*>(to));
  };
  if (width == 1) as(uint8_t{});
  else if (width == 2) as(uint16_t{});
  else if (width == 4) as(uint32_t{});
  else if (width == 8) as(uint64_t{});
  else as(Wide{});
}

}  // namespace mpigrad
