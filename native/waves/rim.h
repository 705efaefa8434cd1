// Boundary saving: without damping a step is its own inverse, so a wave can be run backwards from its
// last state. In the layers waves are lost. The fields there that a gradient needs, and the cells
// around the inside that its steps need, are kept for every step (Dussaud et al., "Computational
// strategies for reverse-time migration", SEG 2008).
#pragma once

#include <array>
#include <cstring>
#include <vector>

#include "waves/tile.h"

namespace mpigrad::waves {

struct Rim {
  Box inside;                      // cells in which a step can be undone
  std::vector<Box> outside, ring;  // the rest, and its cells that steps inside read, on this tile or on neighbours
  int64_t outside_cells = 0, ring_cells = 0;

  // `margin`: cells of each side that are not inside. `reach`: of the star-shaped stencil.
  Rim(const Tile& t, const std::array<int64_t, kSides>& margin, int64_t reach) {
    const int64_t i0 = std::min(margin[0], t.nx), i1 = std::max(i0, t.nx - margin[1]);
    const int64_t j0 = std::min(margin[2], t.ny), j1 = std::max(j0, t.ny - margin[3]);
    const int64_t m0 = std::min(margin[4], t.nm), m1 = std::max(m0, t.nm - margin[5]);
    inside = {i0, i1, j0, j1, m0, m1};
    for (const Box& box :
         {Box{0, i0, 0, t.ny, 0, t.nm}, Box{i1, t.nx, 0, t.ny, 0, t.nm}, Box{i0, i1, 0, t.ny, 0, m0},
          Box{i0, i1, 0, t.ny, m1, t.nm}, Box{i0, i1, 0, j0, m0, m1}, Box{i0, i1, j1, t.ny, m0, m1}})
      add(outside, outside_cells, box);
    for (const Box& box : outside)
      for (int side = 0; side < kSides; ++side)
        if (t.neighbor[side] != kNobody) add(ring, ring_cells, cut(box, end_of(whole(t), side, reach)));
    if (inside.empty()) return;
    for (int side = 0; side < kSides; ++side) add(ring, ring_cells, cut(whole(t), beyond(inside, side, reach)));
  }

  bool has(int64_t i, int64_t j, int64_t m = 0) const {
    return i >= inside.i0 && i < inside.i1 && j >= inside.j0 && j < inside.j1 && m >= inside.m0 &&
           m < inside.m1;
  }
  Box part(const Box& b) const { return cut(b, inside); }

 private:
  static Box whole(const Tile& t) { return {0, t.nx, 0, t.ny, 0, t.nm}; }
  static Box cut(const Box& a, const Box& b) {
    return {std::max(a.i0, b.i0), std::min(a.i1, b.i1), std::max(a.j0, b.j0),
            std::min(a.j1, b.j1), std::max(a.m0, b.m0), std::min(a.m1, b.m1)};
  }
  // The first and the end of a box along the axis of a side.
  static std::array<int64_t*, 2> ends(Box& b, int side) {
    if (side / 2 == kRows) return {&b.i0, &b.i1};
    if (side / 2 == kColumns) return {&b.j0, &b.j1};
    return {&b.m0, &b.m1};
  }
  // The last `reach` cells of a box before a side, and the cells behind it.
  static Box end_of(Box b, int side, int64_t reach) {
    const auto [first, last] = ends(b, side);
    side % 2 ? *first = *last - reach : *last = *first + reach;
    return b;
  }
  static Box beyond(Box b, int side, int64_t reach) {
    const auto [first, last] = ends(b, side);
    if (side % 2)
      *first = *last, *last += reach;
    else
      *last = *first, *first -= reach;
    return b;
  }
  static void add(std::vector<Box>& list, int64_t& cells, const Box& box) {
    if (box.empty()) return;
    list.push_back(box);
    cells += (box.i1 - box.i0) * (box.j1 - box.j0) * (box.m1 - box.m0);
  }
};

// Copies the cells of boxes to `data` (kIn: from it) and returns the end of the data. `row(i, m)`: the
// address of column 0.
template <bool kIn, class T, class Row>
T* transfer_rows(const std::vector<Box>& boxes, T* data, const Row& row) {
  for (const Box& b : boxes)
    for (int64_t i = b.i0; i < b.i1; ++i)
      for (int64_t m = b.m0; m < b.m1; ++m, data += b.j1 - b.j0) {
        T* cells = row(i, m) + b.j0;
        std::memcpy(kIn ? cells : data, kIn ? data : cells, (b.j1 - b.j0) * sizeof(T));
      }
  return data;
}
// The same for a field.
template <bool kIn, class T>
T* transfer_boxes(const Tile& tile, const std::vector<Box>& boxes, T* field, T* data) {
  return transfer_rows<kIn>(boxes, data, [&](int64_t i, int64_t m) { return field + tile.at(i, m, 0); });
}

}  // namespace mpigrad::waves
