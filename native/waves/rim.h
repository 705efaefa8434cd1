// Boundary saving: without damping a step is its own inverse, so a wave can be run backwards from its
// last state. In the layers waves are lost. The fields there that a gradient needs, and the cells
// around the inside that its steps need, are kept for every step (Dussaud et al., "Computational
// strategies for reverse-time migration", SEG 2008).
#pragma once

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
    inside = {i0, i1, j0, j1};
    for (const Box& box : {Box{0, i0, 0, t.ny}, Box{i1, t.nx, 0, t.ny}, Box{i0, i1, 0, j0},
                           Box{i0, i1, j1, t.ny}})
      add(outside, outside_cells, box);
    for (const Box& box : outside) {
      if (t.neighbor[0] != kNobody) add(ring, ring_cells, cut(box, {0, reach, 0, t.ny}));
      if (t.neighbor[1] != kNobody) add(ring, ring_cells, cut(box, {t.nx - reach, t.nx, 0, t.ny}));
      if (t.neighbor[2] != kNobody) add(ring, ring_cells, cut(box, {0, t.nx, 0, reach}));
      if (t.neighbor[3] != kNobody) add(ring, ring_cells, cut(box, {0, t.nx, t.ny - reach, t.ny}));
    }
    if (inside.empty()) return;
    for (const Box& box :
         {Box{std::max<int64_t>(0, i0 - reach), i0, j0, j1}, Box{i1, std::min(i1 + reach, t.nx), j0, j1},
          Box{i0, i1, std::max<int64_t>(0, j0 - reach), j0}, Box{i0, i1, j1, std::min(j1 + reach, t.ny)}})
      add(ring, ring_cells, box);
  }

  bool has(int64_t i, int64_t j) const {
    return i >= inside.i0 && i < inside.i1 && j >= inside.j0 && j < inside.j1;
  }
  Box part(const Box& b) const { return cut(b, inside); }

 private:
  static Box cut(const Box& a, const Box& b) {
    return {std::max(a.i0, b.i0), std::min(a.i1, b.i1), std::max(a.j0, b.j0), std::min(a.j1, b.j1)};
  }
  static void add(std::vector<Box>& list, int64_t& cells, const Box& box) {
    if (box.empty()) return;
    list.push_back(box);
    cells += (box.i1 - box.i0) * (box.j1 - box.j0);
  }
};

// Copies a field's cells in boxes to `data` (kIn: from it) and returns the end of the data.
template <bool kIn, class T>
T* transfer_boxes(const Tile& tile, const std::vector<Box>& boxes, T* field, T* data) {
  for (const Box& b : boxes)
    for (int64_t i = b.i0; i < b.i1; ++i, data += b.j1 - b.j0) {
      T* row = field + tile.at(i, b.j0);
      std::memcpy(kIn ? row : data, kIn ? data : row, (b.j1 - b.j0) * sizeof(T));
    }
  return data;
}

}  // namespace mpigrad::waves
