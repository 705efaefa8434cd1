// One symmetric system on a grid: its matrix, which stays in the caller's array, a hierarchy of its
// values or of earlier ones, and conjugate gradients in double precision with one cycle of the
// hierarchy, in single precision, as their preconditioner.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "multigrid/hierarchy.h"
#include "multigrid/product.h"
#include "stencil/tile.h"
#include "stencil/verdict.h"

namespace mpigrad::multigrid {

using namespace stencil;  // Tile, Entry, Asymmetry, Digest, Answer

struct Request {
  double tolerance;
  int64_t max_steps;  // 0: one cycle of the preconditioner on b, without a residual
  RequestText text;
  std::function<void()> progress;  // tells the watchdog that this rank goes on
};

struct Totals {
  double setup_seconds = 0, solve_seconds = 0;
  int64_t setups = 0, solves = 0;
};
inline Totals totals;  // over all systems of this process

class System {
 public:
  System(int64_t slot, const Tile& tile, std::vector<Entry> entries, int64_t size,
         const int64_t* tiles, const std::vector<int64_t>* starts, bool keeps_stale)
      : slot_(slot),
        tile_(tile),
        entries_(std::move(entries)),
        asymmetry_(tile_, entries_),
        size_(size),
        ranks_(slot, tiles),
        hierarchy_(ranks_, starts),
        product_(tile_, entries_),
        keeps_stale_(keeps_stale) {
    for (const Entry& e : entries_) {
      if (e.direction() == 0) diagonal_ = &e;
      box_ |= std::abs(e.step[0]) + std::abs(e.step[1]) + std::abs(e.step[2]) > 1;
    }
    n_ = tile_.cells.size();
  }
  System(const System&) = delete;
  System& operator=(const System&) = delete;

  int64_t slot() const { return slot_; }
  int64_t rows() const { return n_; }
  int64_t entries() const { return size_; }
  int64_t setups() const { return setups_; }
  int64_t number() const { return number_; }  // id of the latest values, the same on all ranks
  bool ready() const { return ready_; }
  int64_t bytes() const { return ranks_.bytes; }

  // Collective. Without `compare` the values must be the latest ones. `guess` may be null. Returns an
  // error message, the same on every rank, if the ranks ask for different solves.
  std::string solve(const double* values, bool compare, const double* b, const double* guess,
                    const Request& request, double* x, Answer& answer) {
    enum { kChanged, kBadValue, kBadVector, kBadDiagonal, kNonzeroRhs, kNonzeroGuess, kRequest,
           kMinusRequest, kFlags };
    double flags[kFlags] = {};
    ranks_.bytes = 0;
    flags[kChanged] = compare && changed(values);
    if (flags[kChanged]) positive_ = has_positive_diagonal(values);
    if (bad_value_) flags[kBadValue] = ranks_.rank() + 1;
    if (!positive_) flags[kBadDiagonal] = ranks_.rank() + 1;
    double squares = sum_of_squares(b, n_);
    flags[kNonzeroRhs] = squares > 0 || any_nonzero(b);
    flags[kNonzeroGuess] = guess && any_nonzero(guess);
    const bool finite = (std::isfinite(squares) || all_finite(b, n_)) &&
                        (!flags[kNonzeroGuess] || all_finite(guess, n_));
    if (!finite) flags[kBadVector] = ranks_.rank() + 1;
    flags[kRequest] = request.text.hash();
    flags[kMinusRequest] = -flags[kRequest];
    ranks_.reduce(flags, kFlags, kMax);
    if (flags[kChanged]) {
      ready_ = false;
      ++number_;
    }
    if (flags[kRequest] != -flags[kMinusRequest]) {
      std::vector<RequestText> all(ranks_.size());
      ranks_.gather(request.text, all.data());
      return different_requests(all);
    }
    answer = Answer{};
    const auto spoil = [&](Outcome outcome) {
      answer.outcome = outcome;
      answer.residual = std::numeric_limits<double>::quiet_NaN();
      std::fill_n(x, n_, answer.residual);
      return std::string();
    };
    if (flags[kBadValue] || flags[kBadVector] || flags[kBadDiagonal]) {
      const bool is_finite = !flags[kBadValue] && !flags[kBadVector];
      answer.rank = static_cast<int>(is_finite ? flags[kBadDiagonal]
                                               : std::max(flags[kBadValue], flags[kBadVector])) - 1;
      return spoil(is_finite ? kNotPositive : kNotFinite);
    }
    const double start = now();
    values_ = values;
    if (flags[kChanged]) {
      double sums[Asymmetry::kSums];
      std::copy_n(asymmetry_.sums(), Asymmetry::kSums, sums);
      ranks_.reduce(sums, Asymmetry::kSums, kSum);
      symmetric_ = Asymmetry::none(sums);
      fresh_ = false;
    }
    ready_ = true;
    if (!symmetric_) return spoil(kNotSymmetric);
    if (!has_hierarchy_ || (!fresh_ && !keeps_stale_)) renew(request.progress);
    product_.set_values(values);
    totals.setup_seconds += now() - start;
    iterate_all(b, flags[kNonzeroRhs] != 0, flags[kNonzeroGuess] ? guess : nullptr, squares,
                request, x, answer);
    return "";
  }

 private:
  static double now() { return 1e-9 * static_cast<double>(now_ns()); }
  bool any_nonzero(const double* v) const {
    return std::any_of(v, v + n_, [](double y) { return y != 0; });
  }

  // True if the values differ from the latest ones in any bit. Records values that are not finite.
  bool changed(const double* values) {
    Digest digest;
    bool bad = false;
    examine(tile_, entries_, values, digest, bad, &asymmetry_);
    if (ready_ && digest == digest_) return false;
    digest_ = digest;
    bad_value_ = bad;
    return true;
  }
  bool has_positive_diagonal(const double* values) const {
    int bad = 0;
    for (int64_t i = 0; i < n_; ++i) bad |= !(values[diagonal_->start + i] > 0);
    return !bad;
  }

  // Collective: makes the hierarchy of the present values.
  void renew(const std::function<void()>& progress) {
    has_hierarchy_ = false;
    Level& first = hierarchy_.start(Layout(tile_.shape, tile_.cells), box_);
    // The largest diagonal entry becomes about 1: single precision has few exponents.
    double largest = 0;
    for (int64_t i = 0; i < n_; ++i) largest = std::max(largest, values_[diagonal_->start + i]);
    ranks_.reduce(&largest, 1, kMax);
    const double scale = unit(largest);
    scale_ = scale;
    const Layout& layout = first.layout;
    const int slots = first.stencil.slots();
    for (const Entry& e : entries_) {
      const int slot = first.stencil.slot(e.step);
      if (!e.given || e.direction() < 0 || slot < 0) continue;
      const Box& box = e.inside;
      if (!box.line()) continue;
      for (int64_t z = box.lower[2]; z < box.upper[2]; ++z)
        for (int64_t y = box.lower[1]; y < box.upper[1]; ++y) {
          float* to = first.stencil.values.data();
          split(values_ + e.start + box.position(box.lower[0], y, z) - box.lower[0],
                to + layout.at(y, z, 0, slots, slot), to + layout.at(y, z, 1, slots, slot),
                box.lower[0], box.upper[0], scale);
        }
    }
    hierarchy_.set_up(progress);
    has_hierarchy_ = fresh_ = true;
    ++setups_;
    ++totals.setups;
  }

  void iterate_all(const double* b, bool nonzero, const double* guess, double squares,
                   const Request& request, double* x, Answer& answer) {
    const double start = now();
    ++totals.solves;
    if (guess) {
      std::copy_n(guess, n_, x);
    } else {
      std::fill_n(x, n_, 0.0);
    }
    if (!nonzero) {
      std::fill_n(x, n_, 0.0);
      return;
    }
    if (request.max_steps == 0) {
      cycle_once(b, x);
      answer.iterations = 1;
      answer.residual = std::numeric_limits<double>::quiet_NaN();  // not computed
      totals.solve_seconds += now() - start;
      return;
    }
    ranks_.reduce(&squares, 1, kSum);
    const double size = std::sqrt(squares);
    if (!(size > 0 && std::isfinite(size))) {  // its square overflows or underflows
      answer.outcome = kBreakdown;
      answer.residual = std::numeric_limits<double>::quiet_NaN();
      std::fill_n(x, n_, answer.residual);
      return;
    }
    iterate(b, guess != nullptr, size, request, x, answer);
    totals.solve_seconds += now() - start;
  }

  // Collective: iterates until the residual itself is small, not only its recurrence.
  void iterate(const double* b, bool guessed, double size, const Request& request, double* x,
               Answer& answer) {
    // A hierarchy of earlier values gets twice the iterations of one of the present values. Beyond that,
    // a new one is cheaper.
    const auto run = [&](int64_t max_steps, bool begun) {
      double last;
      answer.residual = std::numeric_limits<double>::infinity();
      const double target = request.tolerance * size;
      int64_t steps = 0;
      do {
        last = answer.residual;
        steps += conjugate_gradients(b, begun, target * target, max_steps - steps, x, answer, size,
                                     request.progress);
        begun = true;
      } while (answer.residual > request.tolerance && answer.residual < last / 2 &&
               steps < max_steps);
      answer.outcome = answer.residual <= request.tolerance ? kConverged
                       : steps >= max_steps                 ? kMaxSteps
                       : answer.residual < 1                ? kStagnated
                                                            : kBreakdown;  // NaN, too
      return steps;
    };
    int64_t wasted = 0;
    if (!fresh_) {
      wasted = run(usual_ ? std::min(request.max_steps, 2 * usual_ + 5) : request.max_steps, guessed);
      if (answer.outcome == kConverged) {
        answer.iterations = wasted;
        return;
      }
      renew(request.progress);
      guessed = answer.residual < 1;  // x is nearer to the solution than zero
      if (!guessed) std::fill_n(x, n_, 0.0);
    }
    const int64_t steps = run(request.max_steps, guessed);
    answer.iterations = wasted + steps;
    if (answer.outcome == kConverged) usual_ = std::max(usual_, steps);
    if (answer.outcome != kConverged && indefinite()) {
      answer.outcome = kNotPositive;
      answer.rank = -1;
    }
    if (answer.outcome == kBreakdown || answer.outcome == kNotPositive)
      std::fill_n(x, n_, std::numeric_limits<double>::quiet_NaN());
  }

  // Collective: true if a direction p had <p, A p> < 0 by more than rounding.
  bool indefinite() const {
    if (!(curvature_ < 0)) return false;
    double largest = 0;
    for (int64_t k = 0; k < size_; ++k) largest = std::max(largest, std::abs(values_[k]));
    ranks_.reduce(&largest, 1, kMax);
    return curvature_ < -1e-12 * largest;
  }

  // r <- b - A x. Returns its square.
  double residual(const double* b, const double* x, double* r) {
    product_.load(x);
    if (ranks_.size() > 1) product_.exchange(ranks_);
    double square = product_.residual(b, r);
    ranks_.reduce(&square, 1, kSum);
    return square;
  }

  // Collective: iterates from x, and ends when <r, r> <= small, or when the matrix or the cycle is found
  // not to be positive definite. Returns the number of steps.
  int64_t conjugate_gradients(const double* b, bool guessed, double small, int64_t max_steps,
                              double* x, Answer& answer, double size,
                              const std::function<void()>& progress) {
    curvature_ = 0;
    r_.resize(n_);
    s_.resize(n_);
    double square;
    if (guessed) {
      square = residual(b, x, r_.data());
      answer.residual = std::sqrt(square) / size;
      if (square <= small) return 0;
    } else {
      std::copy_n(b, n_, r_.data());
      square = size * size;
    }
    const int64_t nx = tile_.cells.line();
    double scale = unit(std::sqrt(square));  // the cycle works on r scale, near 1
    product_.rows([&](int64_t i, int64_t y, int64_t z) { give(&r_[i * nx], y, z, scale); });
    double gamma = precondition() / (scale * scale);  // <r, z>
    double beta = 0;
    int64_t step = 0;
    while (step < max_steps) {
      ++step;
      progress();
      double curvature = product_.advance(1 / scale, beta, s_.data());
      ranks_.reduce(&curvature, 1, kSum);
      const double alpha = gamma / curvature;
      if (!(alpha >= std::numeric_limits<double>::min())) {
        double pp = product_.square();
        ranks_.reduce(&pp, 1, kSum);
        curvature_ = curvature / pp;
        break;
      }
      // The residual before the step gives the scale after it, too: a step does not change it much.
      scale = unit(std::sqrt(square));
      square = 0;
      product_.rows([&](int64_t i, int64_t y, int64_t z) {
        square += product_.update(y, z, alpha, x + i * nx, &r_[i * nx], &s_[i * nx]);
        give(&r_[i * nx], y, z, scale);
      });
      ranks_.reduce(&square, 1, kSum);
      if (!(square > small) || step == max_steps) break;
      const double before = gamma;
      gamma = precondition() / (scale * scale);
      if (!(gamma >= std::numeric_limits<double>::min())) break;
      beta = gamma / before;
    }
    square = residual(b, x, r_.data());
    answer.residual = std::sqrt(square) / size;
    return step;
  }

  // Collective: x <- M b for the whole matrix, which a cycle has scaled.
  void cycle_once(const double* b, double* x) {
    double largest = 0;
    for (int64_t i = 0; i < n_; ++i) largest = std::max(largest, std::abs(b[i]));
    ranks_.reduce(&largest, 1, kMax);
    const double scale = unit(largest);
    const int64_t nx = tile_.cells.line();
    product_.rows([&](int64_t i, int64_t y, int64_t z) { give(b + i * nx, y, z, scale); });
    precondition();
    product_.rows([&](int64_t i, int64_t y, int64_t z) {
      const float* row = product_.z_row(y, z);
      for (int64_t k = 0; k < nx; ++k) x[i * nx + k] = row[k] / scale * scale_;
    });
  }

  // The power of two that brings x near 1, and is itself finite.
  static double unit(double x) { return std::ldexp(1.0, std::clamp(-std::ilogb(x), -1000, 1000)); }

  // Gives a row, times the scale, to the cycle.
  void give(const double* row, int64_t y, int64_t z, double scale) {
    Level& first = hierarchy_.first();
    split(row - tile_.cells.lower[0], first.b.data() + first.layout.at(y, z, 0),
          first.b.data() + first.layout.at(y, z, 1), tile_.cells.lower[0], tile_.cells.upper[0], scale);
  }

  // Collective: one cycle. Returns <b, x> of the first level, and leaves x for the next direction.
  double precondition() {
    Level& first = hierarchy_.first();
    const Layout& layout = first.layout;
    double dot = 0;
    hierarchy_.cycle([&](int64_t y, int64_t z) {
      const float *even = first.x.data() + layout.at(y, z, 0), *odd = first.x.data() + layout.at(y, z, 1);
      for (int half = 0; half < 2; ++half) {
        const float *x = half ? odd : even, *b = first.b.data() + layout.at(y, z, half);
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t k = layout.begin(half); k < layout.end(half); ++k)
          sum += static_cast<double>(x[k]) * b[k];
        dot += sum;
      }
      merge(even, odd, product_.z_row(y, z) - tile_.cells.lower[0], tile_.cells.lower[0],
            tile_.cells.upper[0]);
    });
    if (ranks_.size() > 1) product_.exchange_z(ranks_);
    ranks_.reduce(&dot, 1, kSum);
    return dot;
  }

  int64_t slot_;
  Tile tile_;
  std::vector<Entry> entries_;
  Asymmetry asymmetry_;
  int64_t size_, n_ = 0;
  Ranks ranks_;
  Hierarchy hierarchy_;
  Product product_;
  bool keeps_stale_, box_ = false;
  const Entry* diagonal_ = nullptr;
  const double* values_ = nullptr;  // during a solve
  Digest digest_;
  int64_t number_ = 0, setups_ = 0, usual_ = 0;
  bool ready_ = false;          // the latest values were examined, on every rank
  bool has_hierarchy_ = false, fresh_ = false;  // fresh: of the latest values
  bool bad_value_ = false, positive_ = true, symmetric_ = false;
  double curvature_ = 0, scale_ = 1;  // scale_: of the matrix in the hierarchy
  std::vector<double> r_, s_;
};

}  // namespace mpigrad::multigrid
