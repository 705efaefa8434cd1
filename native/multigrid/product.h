// The vectors of conjugate gradients on a tile, in double precision and in C order, and the product with
// the matrix. Each pass goes through the rows once: memory decides about its time.
#pragma once

#include <cstring>
#include <utility>
#include <vector>

#include "multigrid/level.h"
#include "multigrid/ranks.h"
#include "stencil/tile.h"

namespace mpigrad::multigrid {

using stencil::Entry;
using stencil::Tile;

class Product {
 public:
  Product(const Tile& tile, const std::vector<Entry>& entries) : tile_(tile), entries_(entries) {
    const Cells& own = tile.cells;
    whole_ = Layout(tile.shape, own);
    for (int a = 0; a < kAxes; ++a) halo_[a] = tile.shape[a] > 1;
    nx_ = own.line();
    width_ = (kEdge + nx_ + 1 + 7) / 8 * 8;
    if (width_ % 64 == 0) width_ += 8;  // rows must not share cache sets
    for (int a = 1; a < kAxes; ++a) rows_[a - 1] = own.upper[a] - own.lower[a] + 2 * halo_[a];
    for (const Entry& e : entries) {
      if (!e.given) continue;
      if (e.direction() == 0) {
        diagonal_ = &e;
        continue;
      }
      Link link{&e, nullptr, (e.step[2] * rows_[0] + e.step[1]) * width_ + e.step[0]};
      for (const Entry& other : entries)
        if (other.given && other.opposes(e) && e.direction() < 0) link.opposite = &other;
      links_.push_back(link);
    }
    zeros_.resize(nx_);
    axis_ = tile.shape[2] > 1 ? 2 : 1;
  }

  void set_values(const double* values) {
    values_ = values;
    if (!p_.empty()) return;
    p_ = Array<double>(rows_[0] * rows_[1] * width_);
    z_ = Array<float>(rows_[0] * rows_[1] * width_);
  }

  // The first of this rank's cells of a row of z.
  float* z_row(int64_t y, int64_t z) const { return z_.data() + at(y, z); }

  // Calls f(i, y, z) for the rows of the tile, where i is their index.
  template <class F>
  void rows(F&& f) const {
    const Cells& own = tile_.cells;
    int64_t i = 0;
    for (int64_t z = own.lower[2]; z < own.upper[2]; ++z)
      for (int64_t y = own.lower[1]; y < own.upper[1]; ++y) f(i++, y, z);
  }

  void load(const double* x) {
    rows([&](int64_t i, int64_t y, int64_t z) {
      std::copy_n(x + i * nx_, nx_, p_.data() + at(y, z));
    });
  }
  void exchange(Ranks& ranks) { exchange_halo(ranks, p_.data()); }
  void exchange_z(Ranks& ranks) { exchange_halo(ranks, z_.data()); }

  // p <- unit z + beta p, s <- A p. Returns <p, s> of this rank.
  double advance(double unit, double beta, double* s) {
    const int64_t lower = tile_.cells.lower[axis_], upper = tile_.cells.upper[axis_];
    double dot = 0;
    move(lower - halo_[axis_], unit, beta);
    if (halo_[axis_]) move(lower, unit, beta);
    for (int64_t g = lower; g < upper; ++g) {
      if (halo_[axis_]) move(g + 1, unit, beta);
      group(g, [&](int64_t y, int64_t z) {
        dot += multiply<false>(y, z, nullptr, s + index(y, z) * nx_);
      });
    }
    return dot;
  }

  // r <- b - A p. Returns the square of r of this rank.
  double residual(const double* b, double* r) const {
    double square = 0;
    rows([&](int64_t i, int64_t y, int64_t z) {
      square += multiply<true>(y, z, b + i * nx_, r + i * nx_);
    });
    return square;
  }

  // x <- x + alpha p, r <- r - alpha s for a row. Returns the square of r.
  double update(int64_t y, int64_t z, double alpha, double* x, double* r, const double* s) const {
    const double* p = p_.data() + at(y, z);
    double square = 0;
#pragma omp simd reduction(+ : square)
    for (int64_t k = 0; k < nx_; ++k) {
      x[k] += alpha * p[k];
      const double next = r[k] - alpha * s[k];
      r[k] = next;
      square += next * next;
    }
    return square;
  }

  double square() const {
    double total = 0;
    rows([&](int64_t, int64_t y, int64_t z) {
      const double* p = p_.data() + at(y, z);
      for (int64_t k = 0; k < nx_; ++k) total += p[k] * p[k];
    });
    return total;
  }

 private:
  static constexpr int64_t kEdge = 8;  // cells before the first of a row

  // The entries of one step: those of the row itself, or the opposite ones of the row they lead to, which
  // were read before.
  struct Link {
    const Entry *own, *opposite;
    int64_t away;
  };

  int64_t at(int64_t y, int64_t z) const {
    const Cells& own = tile_.cells;
    return ((z - own.lower[2] + halo_[2]) * rows_[0] + y - own.lower[1] + halo_[1]) * width_ + kEdge;
  }
  int64_t index(int64_t y, int64_t z) const {
    const Cells& own = tile_.cells;
    return (z - own.lower[2]) * (own.upper[1] - own.lower[1]) + y - own.lower[1];
  }
  template <class F>
  void group(int64_t g, F&& f, int halo = 0) const {
    if (axis_ == 1) return f(g, tile_.cells.lower[2]);
    for (int64_t y = tile_.cells.lower[1] - halo; y < tile_.cells.upper[1] + halo; ++y) f(y, g);
  }

  void move(int64_t g, double unit, double beta) {
    group(
        g,
        [&](int64_t y, int64_t z) {
          double* p = p_.data() + at(y, z);
          const float* from = z_row(y, z);
#pragma GCC ivdep
          for (int64_t k = -1; k < nx_ + 1; ++k) p[k] = unit * from[k] + beta * p[k];
        },
        halo_[1]);
  }

  template <bool residual>
  double multiply(int64_t y, int64_t z, const double* b, double* to) const {
    const Cells& own = tile_.cells;
    const double* a[kMost];
    int64_t away[kMost];
    int size = 0;
    for (const Link& link : links_) {
      const Entry& e = *link.own;
      const int64_t there[2] = {y + e.step[1], z + e.step[2]};
      const double* row = zeros_.data();
      if (link.opposite && own.has_line(there[0], there[1])) {
        const Cells& box = link.opposite->inside;
        row = values_ + link.opposite->start +
              box.position(own.lower[0] + e.step[0], there[0], there[1]);
      } else if (e.inside.has_line(y, z)) {
        row = values_ + e.start + e.inside.position(own.lower[0], y, z);
      }
      a[size] = row;
      away[size++] = link.away;
    }
    const double *p = p_.data() + at(y, z),
                 *d = values_ + diagonal_->start + index(y, z) * nx_;
    double total = 0;
    switch (size) {
#define MPIGRAD_LINKS(S)                                          \
  case S:                                                         \
    total = inner<residual, S>(a, away, d, p, b, to, 1, nx_ - 1, S); \
    break;
      MPIGRAD_LINKS(2) MPIGRAD_LINKS(4) MPIGRAD_LINKS(6) MPIGRAD_LINKS(8) MPIGRAD_LINKS(26)
#undef MPIGRAD_LINKS
      default:
        total = inner<residual, 0>(a, away, d, p, b, to, 1, nx_ - 1, size);
    }
    total += edge<residual>(0, y, z, p, d, b, to);
    if (nx_ > 1) total += edge<residual>(nx_ - 1, y, z, p, d, b, to);
    return total;
  }

  template <size_t... s>
  __attribute__((always_inline)) static double links_of(const double* const* a, const int64_t* away, const double* p, int64_t k,
                         std::index_sequence<s...>) {
    return ((a[s][k] * p[k + away[s]]) + ...);
  }

  template <bool residual, int S>
  static double inner(const double* const* links, const int64_t* distances, const double* d,
                      const double* p, const double* b, double* to, int64_t begin, int64_t end,
                      int size) {
    constexpr int kSize = S ? S : kMost;
    const int n = S ? S : size;
    const double* a[kSize];
    int64_t away[kSize];
    for (int s = 0; s < n; ++s) {
      a[s] = links[s];
      away[s] = distances[s];
    }
    double total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t k = begin; k < end; ++k) {
      double sum = d[k] * p[k];
      if constexpr (S) {
        sum += links_of(a, away, p, k, std::make_index_sequence<S>());
      } else {
        for (int s = 0; s < n; ++s) sum += a[s][k] * p[k + away[s]];
      }
      if constexpr (residual) {
        const double r = b[k] - sum;
        to[k] = r;
        total += r * r;
      } else {
        to[k] = sum;
        total += sum * p[k];
      }
    }
    return total;
  }

  // A cell at the end of a row, some of whose links may lead out of the grid.
  template <bool residual>
  double edge(int64_t k, int64_t y, int64_t z, const double* p, const double* d, const double* b,
              double* to) const {
    const int64_t x = tile_.cells.lower[0] + k;
    double sum = d[k] * p[k];
    for (const Link& link : links_) {
      const Cells& box = link.own->inside;
      if (!box.has_line(y, z) || x < box.lower[0] || x >= box.upper[0]) continue;
      sum += values_[link.own->start + box.position(x, y, z)] * p[k + link.away];
    }
    if constexpr (residual) {
      to[k] = b[k] - sum;
      return to[k] * to[k];
    }
    to[k] = sum;
    return sum * p[k];
  }

  // Halos of one cell. Doubles are sent as pairs of words.
  template <class T>
  void exchange_halo(Ranks& ranks, T* array) {
    constexpr int64_t words = sizeof(T) / sizeof(float);
    ranks.exchange(whole_, 1, [&](bool packs, const Cells& cells, float* buffer) {
      int64_t count = 0;
      const int64_t n = cells.line();
      for (int64_t z = cells.lower[2]; z < cells.upper[2]; ++z)
        for (int64_t y = cells.lower[1]; y < cells.upper[1]; ++y, count += n * words) {
          if (!buffer) continue;
          T* row = array + at(y, z) + cells.lower[0] - tile_.cells.lower[0];
          if (packs)
            std::memcpy(buffer + count, row, n * sizeof(T));
          else
            std::memcpy(row, buffer + count, n * sizeof(T));
        }
      return count;
    });
  }

  static constexpr int kMost = 26;
  const Tile& tile_;
  const std::vector<Entry>& entries_;
  Layout whole_;
  std::vector<Link> links_;
  const Entry* diagonal_ = nullptr;
  const double* values_ = nullptr;
  int halo_[kAxes], axis_;
  int64_t nx_, width_, rows_[2];
  std::vector<double> zeros_;
  Array<double> p_;
  Array<float> z_;
};

}  // namespace mpigrad::multigrid
