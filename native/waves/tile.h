// A rank's tile of a wave: its cells, its neighbours across faces, and what is static in a run.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace mpigrad::waves {

// The axes of a tile: rows (x), columns (the last axis, whose cells are next to each other in memory),
// and on three axes the middle one (y), which has one cell on two axes.
enum Axis { kRows, kColumns, kMiddle };

// Cells i0 to i1 along x, j0 to j1 along the columns, m0 to m1 along the middle axis, the ends not
// included.
struct Box {
  int64_t i0, i1, j0, j1, m0 = 0, m1 = 1;
  bool empty() const { return i0 >= i1 || j0 >= j1 || m0 >= m1; }
  bool operator==(const Box& b) const {
    return i0 == b.i0 && i1 == b.i1 && j0 == b.j0 && j1 == b.j1 && m0 == b.m0 && m1 == b.m1;
  }
};

// Sides are numbered: rows before, rows behind, columns before, columns behind, and of the middle axis.
constexpr int kSides = 6;
constexpr int kNobody = -1;

// Fields are stored with a margin of `reach` rows around, and of kMargin columns, so that rows begin
// on cache lines. Pointers to fields point to cell (0, 0). Beyond the layers the margin is zero.
struct Tile {
  static constexpr int64_t kMargin = 16;

  int64_t lx, ly, lm = 1;              // cells of the model along the rows, columns and middle axis
  std::array<int64_t, kSides> layers;  // cells of the absorbing layers on the sides
  std::array<int, kSides> neighbor;    // rank, or kNobody
  int64_t reach;                       // of the stencil
  bool volume = false;                 // whether the stencil also reaches along the middle axis

  int64_t nx, ny, nm;     // cells with the layers
  int64_t stride, plane;  // between cells of the next column axis, and of the next x

  void complete() {
    nx = lx + layers[0] + layers[1];
    ny = ly + layers[2] + layers[3];
    stride = (ny + kMargin + reach + 15) / 16 * 16;
    if (stride % 512 == 0) stride += 16;  // rows must not share cache sets
    nm = lm + layers[4] + layers[5];
    plane = (nm + 2 * margin()) * stride;
  }
  // The cells that are `steps` steps of the stencil or more from the faces shared with neighbours.
  Box core(int64_t steps) const {
    // Along columns a whole vector register more, which costs no more than `reach` cells.
    const int64_t x = steps * reach, y = std::max<int64_t>(reach, 16) + (steps - 1) * reach;
    const int64_t i0 = neighbor[0] == kNobody ? 0 : std::min(x, nx);
    const int64_t i1 = std::max(i0, neighbor[1] == kNobody ? nx : nx - x);
    const int64_t j0 = neighbor[2] == kNobody ? 0 : std::min(y, ny);
    const int64_t j1 = std::max(j0, neighbor[3] == kNobody ? ny : ny - y);
    const int64_t m0 = neighbor[4] == kNobody ? 0 : std::min(x, nm);
    const int64_t m1 = std::max(m0, neighbor[5] == kNobody ? nm : nm - x);
    return {i0, i1, j0, j1, m0, m1};
  }
  // The other cells.
  std::vector<Box> frame(const Box& c) const {
    std::vector<Box> boxes;
    for (const Box& box :
         {Box{0, c.i0, 0, ny, 0, nm}, Box{c.i1, nx, 0, ny, 0, nm}, Box{c.i0, c.i1, 0, ny, 0, c.m0},
          Box{c.i0, c.i1, 0, ny, c.m1, nm}, Box{c.i0, c.i1, 0, c.j0, c.m0, c.m1},
          Box{c.i0, c.i1, c.j1, ny, c.m0, c.m1}})
      if (!box.empty()) boxes.push_back(box);
    return boxes;
  }
  int64_t margin() const { return volume ? reach : 0; }  // cells around the middle axis
  int64_t origin() const { return reach * plane + margin() * stride + kMargin; }
  int64_t padded() const { return (nx + 2 * reach) * plane + kMargin; }
  int64_t at(int64_t i, int64_t j) const { return i * stride + j; }  // on two axes
  int64_t at(int64_t i, int64_t m, int64_t j) const { return i * plane + m * stride + j; }
};

// The cells around sources or receivers of each shot.
struct PointTable {
  struct Entry {
    int64_t cell;  // offset from cell (0, 0)
    int64_t i, j, m;
    int64_t point;  // of the shot
    double weight;
  };
  // Entries by rows: those of row i and cell m of the middle axis begin at starts[i * middle + m].
  struct Shot {
    std::vector<Entry> entries;
    std::vector<int64_t> starts;
    int64_t middle = 1;

    void sort(const Tile& t) {
      middle = t.nm;
      const auto row = [this](const Entry& e) { return e.i * middle + e.m; };
      std::stable_sort(entries.begin(), entries.end(),
                       [&](const Entry& a, const Entry& b) { return row(a) < row(b); });
      starts.assign(t.nx * middle + 1, 0);
      for (const Entry& e : entries) ++starts[row(e) + 1];
      for (int64_t i = 0; i < t.nx * middle; ++i) starts[i + 1] += starts[i];
    }
    // f(entry, its index) for the entries in a box.
    template <class F>
    void each(const Box& b, const F& f) const {
      for (int64_t i = b.i0; i < b.i1; ++i)
        for (int64_t k = starts[i * middle + b.m0]; k < starts[i * middle + b.m1]; ++k)
          if (entries[k].j >= b.j0 && entries[k].j < b.j1) f(entries[k], k);
    }
  };
  int64_t points = 0;  // of each shot
  std::vector<Shot> shots;

  // A table of one shot is used for all shots.
  const Shot& of(int64_t shot) const { return shots[shots.size() == 1 ? 0 : shot]; }
};

// Codes of checkpoints: keep the history of every step, or its rim (rim.h).
constexpr int64_t kAll = -1, kRims = -2;

// A run as Python describes it (description.h), with its profiles and points.
struct Setup {
  int64_t id, physics, slot;
  Tile tile;
  int64_t steps, shots, threads;
  int64_t checkpoints;  // 0: as memory allows, kAll, kRims, else one state every so many steps
  int64_t memory;       // bytes
  int64_t precision;      // of packing.h
  std::string directory;  // of the files of histories, empty without files
  int64_t fingerprint;  // equal on all ranks
  double dt;
  std::array<double, 3> spacing;
  double stable_length;                    // acoustic: see RunDescription, as for the next four
  bool density;                            // acoustic
  int64_t source_kind, receivers;          // elastic
  std::vector<int64_t> component_kinds;    // elastic
  int64_t surface, mechanisms;             // elastic
  std::vector<std::vector<double>> profiles;  // of the physics, along one axis
  std::vector<PointTable> tables;
};

}  // namespace mpigrad::waves
