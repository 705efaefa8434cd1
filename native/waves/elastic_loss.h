// Attenuation of elastic waves (relaxation.h) in rows of cells: in the place of Hooke's law of elastic.h.
#pragma once

#include "waves/elastic_slopes.h"
#include "waves/relaxation.h"

namespace mpigrad::waves::elastic {

// What a wave has besides: the memories of the strain rates. In the adjoint they are the filters f,
// `rest` is h, and `plain` is a, where the wave's stresses are t. (In a fluid a is tiny, and would be lost in
// differences of t and h.)
template <class T, int N>
struct Strains {
  Memory memory, rest;
  std::array<Field<T>, Shape<N>::kStresses> fields;
  Stress<T, N> plain{};

  T* values() const { return static_cast<T*>(memory.data()); }
  T* decaying() const { return static_cast<T*>(rest.data()); }
};

template <class T, int N, int R>
class Loss {
  using Stress = elastic::Stress<T, N>;
  using Strains = elastic::Strains<T, N>;
  using Motion = elastic::Motion<T, N>;
  using Memories = elastic::Memories<T, N>;
  using Parameters = elastic::Parameters<const T, N>;
  using Sums = elastic::Parameters<T, N>;
  using Rows = elastic::Rows<T, N>;
  using Slopes = elastic::Slopes<T, N, R>;
  static constexpr int kLast = Shape<N>::kLast, kPairs = Shape<N>::kPairs, kStresses = Shape<N>::kStresses;

 public:
  static constexpr int kModuli = 2 + kPairs;

  // The constants of the mechanisms are the profile after those of the axes.
  Loss(const Setup& setup, const Slopes& slopes) : tile_(setup.tile), slopes_(slopes), mechanisms_(setup.mechanisms) {
    if (mechanisms_)
      relaxation_ = Relaxation<T, kStresses>(setup.profiles[4 * N], mechanisms_, tile_.nx * tile_.nm, tile_.ny);
  }

  bool acts() const { return relaxation_.acts(); }
  int64_t values() const { return mechanisms_ * kStresses * cells(); }  // of a state
  const Sums& gradient() const { return gradient_; }

  // ---- the model: the loss of each modulus after the other parameters ----

  // Writes A and L / A of the moduli, A at least `little` times the first one.
  void load(const Arrays<const T>& models, T little, T* divisors) {
    lost_ = losses(models);
    for (int k = 0; k < kModuli; ++k) {
      const T* loss = acts() ? models[Parameters::kCount + k] : nullptr;
      T *divisor = divisors + k * cells(), *ratio = divisors + (kModuli + k) * cells();
      for (int64_t c = 0; c < cells(); ++c) {
        divisor[c] = models[k][c] - (loss ? relaxation_.coupling() * loss[c] : T(0));
        if (k > 0) divisor[c] = std::max(divisor[c], little * models[0][c]);
        if (loss) ratio[c] = loss[c] / divisor[c];
      }
      ratio_[k] = ratio;
    }
  }
  int64_t divisors() const { return (acts() ? 2 : 1) * kModuli * cells(); }
  // next(): an array of zeros.
  template <class Next>
  void load_gradient(const Next& next) {
    gradient_.bulk = next(), gradient_.shear = next();
    for (T*& mu : gradient_.shears) mu = next();
  }
  void load_tangents(const Arrays<const T>& tangents) {
    lost_tangents_ = losses(tangents);
    if (acts()) means_ = Memory(kStresses * cells() * sizeof(T));
  }

  // ---- the memories ----

  void make(Strains& w) const {
    if (acts()) w.memory = Memory(relaxation_.size() * sizeof(T));
  }
  void clear(Strains& w) const { std::fill_n(w.values(), relaxation_.size(), T(0)); }
  // Between the memories and an array of a state.
  template <bool kIn, class Array>
  void transfer(const Strains& w, Array* state) const {
    each_mechanism(w.values(), [&](int64_t l, const Rows& r, int64_t c, int64_t j, int64_t) {
      for (int k = 0; k < kStresses; ++k) {
        auto& there = state[(l * kStresses + k) * cells() + c];
        if constexpr (kIn)
          r[k][j] = there;
        else
          there = r[k][j];
      }
    });
  }

  // From cotangents of the memories to filters and decaying parts, and back.
  void begin_adjoint(Strains& w, const Stress& stress) const {
    const int64_t size = relaxation_.size();
    w.rest = Memory();
    if (std::any_of(w.values(), w.values() + size, [](T x) { return x != 0; })) {
      w.rest = Memory(size * sizeof(T));
      std::memcpy(w.decaying(), w.values(), size * sizeof(T));
      each_mechanism(w.decaying(), [&](int64_t, const Rows& h, int64_t, int64_t j, int64_t depth) {
        const T x = h[0][j], z = h[kLast][j], mean = total<N>(x, h[1][j], z) / N;
        const T share = 1 / slopes_.weight(Slopes::kNormal, depth);
        h[0][j] = share * mean, h[1][j] = share * (x - mean);
        if (N == 3) h[2][j] = share * (z - mean);
        for (int k = 0; k < kPairs; ++k) h[N + k][j] /= slopes_.weight(N + k, depth);
      });
    }
    std::fill_n(w.values(), size, T(0));
    for (int k = 0; k < kStresses; ++k) {
      w.fields[k] = Field<T>(tile_);
      w.fields[k].clear();
      w.plain[k] = w.fields[k];
    }
    slopes_.each_row([&](const Row& r) {
      for (int k = 0; k < kStresses; ++k) std::copy_n(stress[k] + r.o, tile_.ny, w.plain[k] + r.o);
      filter(r, w, stress);
    });
  }
  void end_adjoint(Strains& w, const T* state, const Stress& stress) const {
    slopes_.each_row([&](const Row& r) {
      for (int k = 0; k < kStresses; ++k) std::copy_n(w.plain[k] + r.o, tile_.ny, stress[k] + r.o);
    });
    // The loss has filtered the first memories, too.
    each_mechanism(w.values(), [&](int64_t l, const Rows& f, int64_t c, int64_t j, int64_t depth) {
      std::array<T, kStresses> values;
      Rows e, a;
      for (int k = 0; k < kStresses; ++k) {
        values[k] = -state[(l * kStresses + k) * cells() + c];
        e[k] = &values[k], a[k] = f[k] + j;
      }
      add_products(c, 0, 1, e, a, gradient_);
      const auto cotangent = [&](int k) {
        const T decayed = w.decaying() ? relaxation_.at(w.decaying(), c / tile_.ny, l, k)[j] : T(0);
        return decayed - ratio(k)[c] * f[k][j];
      };
      const T p = cotangent(0), dx = cotangent(1), dz = N == 3 ? cotangent(kLast) : T(0);
      std::array<T, kPairs> pairs;
      for (int k = 0; k < kPairs; ++k) pairs[k] = cotangent(N + k);
      const T share = slopes_.weight(Slopes::kNormal, depth);
      f[0][j] = share * (p + dx), f[1][j] = share * (p - (dx + dz));
      if (N == 3) f[2][j] = share * (p + dz);
      for (int k = 0; k < kPairs; ++k) f[N + k][j] = slopes_.weight(N + k, depth) * pairs[k];
    });
  }

  // ---- rows ----

  // The stresses, by the memories and strain rates of a row. Of a tangent, the run keeps m (`keeps`).
  void deform(const Row& r, const Motion& v, const Memories& from, const Memories& to, const Parameters& c,
              const Strains& w, const Stress& stress, bool keeps) const {
    const Rows e = slopes_.template strain_rates<Layers::kStep>(r, v, from, to), m = slopes_.scratch(1);
    relaxation_.step(w.values(), r.number, r.j0, r.j1, e, m);
    hooke<true>(r, e, c, m, lost_, stress);
    if (!keeps || !means_.data()) return;
    const Rows means = means_of(r);
    for (int k = 0; k < kStresses; ++k) std::copy(m[k] + r.j0, m[k] + r.j1, means[k] + r.j0);
  }
  // What the tangents of the moduli, and of the loss if there is one, add, with the run's velocities.
  void change(const Row& r, const Motion& run, const Parameters& tangents, const Stress& stress) const {
    const Rows e = slopes_.template strain_rates<Layers::kRead>(r, run, run.memory, run.memory);
    acts() ? hooke<true>(r, e, tangents, means_of(r), lost_tangents_, stress)
           : hooke<false>(r, e, tangents, e, tangents, stress);
  }
  // A step back of the filters. Then `plain` is to be deformed, and filtered.
  void step_back(const Row& r, const Strains& w) const {
    relaxation_.fetch_next(w.values(), r.number);
    for (int k = 0; k < kStresses; ++k)
      relaxation_.step_back(w.values(), w.decaying(), k, r.number, r.j0, r.j1, w.plain[k] + r.o);
  }
  // t of a row from a and the filters.
  void filter(const Row& r, const Strains& w, const Stress& stress) const {
    T *sum = slopes_.scratch(3)[0], *rest = slopes_.scratch(3)[1];
    for (int k = 0; k < kStresses; ++k) {
      const T *a = w.plain[k] + r.o, *q = ratio(k) + r.c;
      T* t = stress[k] + r.o;
      slopes_.prefetch(r, {a + tile_.stride, t + tile_.stride, q + tile_.ny});
      relaxation_.filtered(w.values(), k, r.number, r.j0, r.j1, sum);
      relaxation_.filtered(w.decaying(), k, r.number, r.j0, r.j1, rest);
#pragma omp simd
      for (int64_t j = r.j0; j < r.j1; ++j) t[j] = a[j] - q[j] * sum[j] + rest[j];
    }
  }
  // The moduli's part of the gradient with attenuation.
  void correlate(const Row& r, const Motion& run, const Strains& w, const Sums& sums) const {
    const Rows e = slopes_.template strain_rates<Layers::kRead>(r, run, run.memory, run.memory);
    Rows a;
    const Rows f = slopes_.scratch(1);
    const int64_t next = r.c + tile_.ny;
    relaxation_.fetch_next(w.values(), r.number);
    for (const Sums* all : {&sums, &gradient_}) {
      slopes_.prefetch(r, {all->bulk + next, all->shear + next});
      for (const T* mu : all->shears) slopes_.prefetch(r, {mu + next});
    }
    for (const T* v : run.v) slopes_.prefetch(r, {v + r.o + 2 * tile_.plane + tile_.stride});
    const T coupling = relaxation_.coupling();
    for (int k = 0; k < kStresses; ++k) {
      a[k] = w.plain[k] + r.o;
      slopes_.prefetch(r, {a[k] + tile_.stride});
      relaxation_.filtered(w.values(), k, r.number, r.j0, r.j1, f[k]);
#pragma omp simd
      for (int64_t j = r.j0; j < r.j1; ++j) f[k][j] = -(coupling * a[k][j] + f[k][j]);
    }
    add_products(r.c, r.j0, r.j1, e, a, sums), add_products(r.c, r.j0, r.j1, e, f, gradient_);
  }

 private:
  int64_t cells() const { return tile_.nx * tile_.nm * tile_.ny; }
  static Parameters losses(const Arrays<const T>& models) {
    Parameters loss;
    if (models.size() == Parameters::kCount) return loss;
    loss.bulk = models[Parameters::kCount], loss.shear = models[Parameters::kCount + 1];
    for (int k = 0; k < kPairs; ++k) loss.shears[k] = models[Parameters::kCount + 2 + k];
    return loss;
  }
  // L / A of the stress k of the adjoint: the mean, the deviators, the shear stresses.
  const T* ratio(int k) const { return ratio_[k == 0 ? 0 : k < N ? 1 : 2 + k - N]; }
  Rows means_of(const Row& r) const {
    Rows means;
    for (int k = 0; k < kStresses; ++k) means[k] = static_cast<T*>(means_.data()) + k * cells() + r.c;
    return means;
  }

  // stress += Hooke's law of `e` with c, less that of `m` with l (kLoss).
  template <bool kLoss>
  void hooke(const Row& r, const Rows& e, const Parameters& c, const Rows& m, const Parameters& l,
             const Stress& stress) const {
    const T *bulk = c.bulk + r.c, *shear = c.shear + r.c, *lost = l.bulk + r.c, *slipped = l.shear + r.c;
    const T *x = e[0], *y = e[1], *z = e[kLast], *mx = m[0], *my = m[1], *mz = m[kLast];
    T *n0 = stress[0] + r.o, *n1 = stress[1] + r.o, *n2 = stress[kLast] + r.o;
    const int64_t next = tile_.ny;
    slopes_.prefetch(r, {bulk + next, shear + next, lost + next, slipped + next});
#pragma omp simd
    for (int64_t j = r.j0; j < r.j1; ++j) {
      const T trace = total<N>(x[j], y[j], z[j]), past = kLoss ? total<N>(mx[j], my[j], mz[j]) : T(0);
      const T mu = 2 * shear[j], nu = kLoss ? 2 * slipped[j] : T(0), mean = trace * T(1. / N), before = past * T(1. / N);
      const T all = bulk[j] * trace - (kLoss ? lost[j] * past : T(0));
      const auto normal = [=](T rate, T earlier) __attribute__((always_inline)) {
        return all + mu * (rate - mean) - (kLoss ? nu * (earlier - before) : T(0));
      };
      n0[j] += normal(x[j], mx[j]);
      if constexpr (N == 3) n1[j] += normal(y[j], my[j]);
      n2[j] += normal(z[j], mz[j]);
    }
    for (int k = 0; k < kPairs; ++k) {
      const T *mu = c.shears[k] + r.c, *nu = l.shears[k] + r.c, *rate = e[N + k], *mean = m[N + k];
      T* s = stress[N + k] + r.o;
      slopes_.prefetch(r, {mu + next, nu + next});
#pragma omp simd
      for (int64_t j = r.j0; j < r.j1; ++j) s[j] += mu[j] * rate[j] - (kLoss ? nu[j] * mean[j] : T(0));
    }
  }

  // Adds the products of strain rates and scaled cotangents to the sums of the moduli.
  void add_products(int64_t c, int64_t j0, int64_t j1, const Rows& e, const Rows& a,
                    const Sums& sums) const {
    T *bulk = sums.bulk + c, *shear = sums.shear + c;
    const T *x = e[0], *y = e[1], *z = e[kLast], *p = a[0], *dx = a[1], *dz = a[kLast];
#pragma omp simd
    for (int64_t j = j0; j < j1; ++j) {
      bulk[j] += p[j] * total<N>(x[j], y[j], z[j]);
      shear[j] += N == 3 ? dx[j] * (x[j] - y[j]) + dz[j] * (z[j] - y[j]) : dx[j] * (x[j] - z[j]);
    }
    for (int k = 0; k < kPairs; ++k) {
      T* mu = sums.shears[k] + c;
      const T *rate = e[N + k], *s = a[N + k];
#pragma omp simd
      for (int64_t j = j0; j < j1; ++j) mu[j] += s[j] * rate[j];
    }
  }

  // f(mechanism, its memories in a row, index of a cell, its column, depth)
  template <class F>
  void each_mechanism(T* memory, const F& f) const {
    for (int64_t l = 0; l < mechanisms_; ++l)
      slopes_.each_row([&](const Row& r) {
        Rows rows;
        for (int k = 0; k < kStresses; ++k) rows[k] = relaxation_.at(memory, r.number, l, k);
        for (int64_t j = 0; j < tile_.ny; ++j) f(l, rows, r.c + j, j, slopes_.depth(r.i, r.m, j));
      });
  }

  const Tile& tile_;
  const Slopes& slopes_;
  int64_t mechanisms_;
  Relaxation<T, kStresses> relaxation_;
  Parameters lost_, lost_tangents_;
  Sums gradient_;
  std::array<const T*, kModuli> ratio_{};  // L / A
  Memory means_;                           // m of a tangent's run
};

}  // namespace mpigrad::waves::elastic
