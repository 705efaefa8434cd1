// One sparse system that hypre keeps between calls: the matrix, the preconditioner (a multigrid
// hierarchy, perhaps of an earlier matrix), and the methods that solve it. The derived class has one
// of hypre's kinds of matrices.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "hypre/calls.h"
#include "hypre/conjugate.h"
#include "hypre/krylov.h"
#include "hypre/request.h"
#include "stencil/digest.h"
#include "stencil/values.h"

namespace mpigrad::hypre {


class System {
 public:
  System(const Structure& given, bool keeps_stale)
      : comm_(given.comm), first_(given.first), n_(given.n), keeps_stale_(keeps_stale) {
    entries_ = static_cast<size_t>(given.entries());
    if (given.order) order_.assign(given.order, given.order + entries_);
    for (int64_t i = 0; i < n_; ++i) {
      const int64_t *row = given.columns + given.row_starts[i],
                    *end = given.columns + given.row_starts[i + 1];
      const int64_t* diagonal = std::find(row, end, first_ + i);
      if (diagonal != end) diagonal_.push_back(static_cast<int32_t>(diagonal - given.columns));
    }
  }
  // Values in the caller's order. The derived class sets `diagonal_`.
  System(MPI_Comm comm, int64_t first, int64_t n, int64_t entries, bool keeps_stale)
      : comm_(comm),
        first_(first),
        n_(n),
        keeps_stale_(keeps_stale),
        entries_(static_cast<size_t>(entries)) {}
  virtual ~System() = default;
  System(const System&) = delete;
  System& operator=(const System&) = delete;

  int rank() const {
    int rank = 0;
    MPI_Comm_rank(comm_, &rank);
    return rank;
  }
  int64_t rows() const { return n_; }
  int64_t entries() const { return static_cast<int64_t>(entries_); }
  int64_t setups() const { return setups_; }
  int64_t number() const { return number_; }  // id of the latest values, the same on all ranks
  bool ready() const { return ready_; }

  // Collective. Without `compare` the values must be the latest ones. `guess` may be null. Returns an
  // error message, the same on every rank, if hypre itself failed.
  std::string solve(const double* values, bool compare, const double* b, const double* guess,
                    const Request& request, double* x, Answer& answer);

 protected:
  // ---- the interface of a kind of matrices, collective unless marked "local" ----
  // There are two matrices: slot 0 has the values of the hierarchy, slot 1 later values.
  virtual void create(Calls& call) = 0;          // vectors and preconditioner, once
  virtual void fill(int slot, Calls& call) = 0;  // the values, and at first the matrix
  virtual void set_up(Calls& call) = 0;          // the preconditioner of slot 0
  virtual HYPRE_Int precondition(HYPRE_Vector r, HYPRE_Vector z) = 0;  // z <- M r
  virtual HYPRE_Int from_zero(HYPRE_Vector r, HYPRE_Vector z) = 0;     // the same, and z need not be zero
  virtual const VectorKernels& kernels() = 0;                          // local
  virtual HYPRE_Matrix matrix(int slot) = 0;                           // local
  virtual HYPRE_Vector rhs() = 0;                                      // local
  virtual HYPRE_Vector solution() = 0;                                 // local
  virtual const Maker& maker(Method method) = 0;                       // local
  virtual void set_rhs(const double* b, Calls& call) = 0;              // local
  virtual void set_solution(const double* x, Calls& call) = 0;         // local, null: zeros
  virtual void get_solution(double* x, Calls& call) = 0;               // local
  virtual void multiply(int slot, Calls& call) = 0;                    // solution <- A rhs
  virtual double residual(int slot, Calls& call) = 0;  // rhs <- +-(b - A x), returns its two-norm
  virtual void correct(Calls& call) = 0;               // x <- x + M r for that residual
  virtual bool symmetric(Calls& call);  // true if the values are, may overwrite rhs and solution
  // Local: reads the caller's values, each time in the same order.
  virtual void examine(const double* values, Digest& digest, bool& bad);

  MPI_Comm comm_ = MPI_COMM_NULL;
  int64_t first_ = 0, n_ = 0;
  const double* latest_ = nullptr;  // values in row order, during a solve
  std::vector<int32_t> diagonal_;   // the position of each row's diagonal entry among them

 private:
  // The findings of a rank about its part of the system, in one MAX reduction (ranks from 1).
  enum Flag { kChanged, kBadValue, kBadVector, kBadDiagonal, kNonzeroRhs, kNonzeroGuess,
              kRequest, kMinusRequest, kFlags };

  static HYPRE_Int precondition_(HYPRE_Solver self, HYPRE_Matrix, HYPRE_Vector r, HYPRE_Vector z) {
    return reinterpret_cast<System*>(self)->precondition(r, z);
  }

  bool changed(const double* values);
  void inspect_diagonal();
  double inspect(const double* values, bool compare, const double* b, const double* guess,
                 Method method, int* flags);
  bool take(const Request& request, bool changed, Answer& answer, Calls& call);
  void renew(Calls& call);
  int64_t solve(const Request& request, double small, bool guessed, int64_t max_steps, Calls& call);
  bool indefinite();
  void give_rhs(const double* b, Calls& call);
  double residual(const double* b, Calls& call);
  void iterate(const Request& request, const double* b, double size, bool guessed,
               int64_t max_steps, Answer& answer, Calls& call);
  void cycle(const Request& request, const double* b, double size, int64_t max_steps,
             Answer& answer, Calls& call);
  int64_t& usual(const Request& request) { return usual_[{request.method, request.restart}]; }

  bool keeps_stale_;
  size_t entries_ = 0;
  std::vector<int32_t> order_;   // each entry's position among the caller's values, or empty
  std::vector<double> ordered_;  // the latest values in row order, if the caller's are not
  Digest digest_;                // digest of the latest values
  int64_t number_ = 0;
  bool created_ = false;
  bool ready_ = false;      // the matrix has the latest values, on every rank
  bool hierarchy_ = false;  // slot 0 has one
  int multiplies_ = 0;      // the slot of the matrix that multiplies
  // Findings in the latest values on this rank.
  bool bad_value_ = false, zero_diagonal_ = false, negative_diagonal_ = false;
  int symmetry_ = -1;                              // of the latest values: -1 unknown, 0 no, 1 yes
  int64_t setups_ = 0;
  bool holds_rhs_ = false;  // hypre's vector has the right-hand side, not a residual
  ConjugateGradients conjugate_gradients_;
  std::map<std::pair<Method, int64_t>, Krylov> krylov_;
  // By method, the most iterations of a solve with the hierarchy of its own matrix.
  std::map<std::pair<Method, int64_t>, int64_t> usual_;
};

// ---- values: the same as before, finite, symmetric? ----

// True if the caller's values differ from the last ones in any bit. Records values that are not finite.
inline bool System::changed(const double* values) {
  Digest digest;
  bool bad = false;
  examine(values, digest, bad);
  if (ready_ && digest == digest_) return false;
  digest_ = digest;
  bad_value_ = bad;
  ordered_.resize(order_.size());
  for (size_t k = 0; k < order_.size(); ++k) ordered_[k] = values[order_[k]];
  return true;
}

inline void System::examine(const double* values, Digest& digest, bool& bad) {
  for (size_t start = 0; start < entries_; start += 2048) {  // a block stays in the cache
    const size_t size = std::min<size_t>(2048, entries_ - start);
    digest.add(values + start, size);
    bad |= !all_finite(values + start, size);
  }
}

inline void System::inspect_diagonal() {
  zero_diagonal_ = negative_diagonal_ = false;
  if (diagonal_.empty()) return;
  const int64_t size = static_cast<int64_t>(diagonal_.size());
  const double* first = latest_ + diagonal_.front();
  int zeros = 0, negatives = 0;
  if (diagonal_.back() - diagonal_.front() == size - 1) {  // without gaps, as in the values of a stencil
    for (int64_t i = 0; i < size; ++i) {
      zeros |= first[i] == 0;
      negatives |= first[i] < 0;
    }
  } else {
    for (int32_t k : diagonal_) {
      zeros |= latest_[k] == 0;
      negatives |= latest_[k] < 0;
    }
  }
  zero_diagonal_ = zeros;
  negative_diagonal_ = negatives;
}

// Returns this rank's part of |b|^2.
inline double System::inspect(const double* values, bool compare, const double* b,
                              const double* guess, Method method, int* flags) {
  int rank = 0;
  MPI_Comm_rank(comm_, &rank);
  flags[kChanged] = compare && changed(values);
  latest_ = order_.empty() ? values : ordered_.data();
  if (flags[kChanged]) inspect_diagonal();
  const auto nonzero = [](double x) { return x != 0; };
  if (bad_value_) flags[kBadValue] = rank + 1;
  // Smoothers divide by the diagonal.
  const bool bad = zero_diagonal_ || (negative_diagonal_ && method == kPCG);
  if (bad) flags[kBadDiagonal] = rank + 1;
  const double squares = sum_of_squares(b, n_);
  flags[kNonzeroRhs] = squares > 0 || std::any_of(b, b + n_, nonzero);
  flags[kNonzeroGuess] = guess && std::any_of(guess, guess + n_, nonzero);
  const bool finite = (std::isfinite(squares) || all_finite(b, n_)) &&
                      (!flags[kNonzeroGuess] || all_finite(guess, n_));
  if (!finite) flags[kBadVector] = rank + 1;
  return squares;
}

// Collective: true if w.Au = u.Aw for two noise vectors. Overwrites right-hand side and solution. Rows
// and columns are scaled by the diagonal: a row of huge entries would hide all others.
inline bool System::symmetric(Calls& call) {
  std::vector<double> vector(n_), scale(n_, 1.0);
  for (size_t i = 0; i < diagonal_.size() && diagonal_.size() == scale.size(); ++i) {
    const double d = latest_[diagonal_[i]];
    if (d > 0) scale[i] = 1 / std::sqrt(d);
  }
  double sums[4] = {0, 0, 0, 0}, all[4];
  for (int k = 0; k < 2; ++k) {
    const uint64_t mine = k ? 2 : 1, other = k ? 1 : 2;
    for (int64_t i = 0; i < n_; ++i) vector[i] = scale[i] * noise(first_ + i, mine);
    set_rhs(vector.data(), call);
    multiply(multiplies_, call);
    get_solution(vector.data(), call);
    for (int64_t i = 0; i < n_; ++i) {
      const double scaled = scale[i] * vector[i];
      sums[2 * k] += noise(first_ + i, other) * scaled;
      sums[2 * k + 1] += scaled * scaled;
    }
  }
  MPI_Allreduce(sums, all, 4, MPI_DOUBLE, MPI_SUM, comm_);
  // |w.Au - u.Aw|, compared with its size for matrices without any symmetry.
  return std::abs(all[0] - all[2]) <= 1e-9 * (std::sqrt(all[1]) + std::sqrt(all[3]));
}

// ---- the hierarchy, of these values or of earlier ones ----

// Collective: sets up a hierarchy of the values.
inline void System::renew(Calls& call) {
  if (multiplies_ != 0 || !ready_) {
    multiplies_ = 0;
    fill(0, call);
  }
  ready_ = hierarchy_ = false;  // until both are made
  set_up(call);
  if (!call.agree()) return;
  hierarchy_ = ready_ = true;
  ++setups_;
  ++totals.setups;
}

// Collective: makes matrix and hierarchy fit the values. False if the answer is known without a solve.
inline bool System::take(const Request& request, bool changed, Answer& answer, Calls& call) {
  const double start = MPI_Wtime();
  if (changed) {
    ready_ = false;
    symmetry_ = -1;
    if (!created_) create(call);
    created_ = true;
    multiplies_ = keeps_stale_ && hierarchy_ ? 1 : 0;
    hierarchy_ &= multiplies_ == 1;
    fill(multiplies_, call);
    ready_ = call.agree();
  }
  // Checked for all new values, since the adjoint relies on it: two products next to a set-up.
  if (request.method == kPCG && symmetry_ < 0 && !call.failed()) {
    symmetry_ = symmetric(call);
    call.agree();
  }
  const bool good = request.method != kPCG || symmetry_ == 1;
  if (good && !hierarchy_ && !call.failed()) renew(call);
  totals.setup_seconds += MPI_Wtime() - start;
  if (call.failed()) ready_ = hierarchy_ = false;
  if (!good) answer.outcome = kNotSymmetric;
  return good && !call.failed();
}

// ---- iterations ----

// Collective: iterates from the present solution. PCG ends when <r, r> <= small.
inline int64_t System::solve(const Request& request, double small, bool guessed, int64_t max_steps,
                             Calls& call) {
  const HYPRE_Matrix a = matrix(multiplies_);
  if (request.method == kPCG) {
    int64_t steps = 0;
    call("PCG", [&] {
      conjugate_gradients_.create(kernels(), a, rhs());
      steps = conjugate_gradients_.solve(
          a, rhs(), solution(), guessed, small, max_steps, [&](void* r, void* z) {
            from_zero(static_cast<HYPRE_Vector>(r), static_cast<HYPRE_Vector>(z));
          });
      return HYPRE_GetError() & ~HYPRE_ERROR_GENERIC;  // NaN: the residual will show it
    });
    return steps;
  }
  const auto [place, is_new] = krylov_.try_emplace({request.method, request.restart});
  if (is_new) {
    place->second.create(comm_, request.method, request.restart, maker(request.method),
                         precondition_, this, a, rhs(), solution(), call);
    call.agree();
  }
  return place->second.solve(a, rhs(), solution(), request.tolerance, max_steps, call);
}

// Collective: true if PCG has found a direction p with <p, A p> < 0 by more than rounding. The p of a
// singular matrix may lie in its null space, so rounding is measured by the matrix, not by A p.
inline bool System::indefinite() {
  double largest = 0;
  if (!(conjugate_gradients_.curvature() < 0)) return false;
  for (size_t k = 0; k < entries_; ++k) largest = std::max(largest, std::abs(latest_[k]));
  MPI_Allreduce(MPI_IN_PLACE, &largest, 1, MPI_DOUBLE, MPI_MAX, comm_);
  return conjugate_gradients_.curvature() < -1e-12 * largest;
}

// A residual overwrites b, which is set again if it is needed once more.
inline void System::give_rhs(const double* b, Calls& call) {
  if (holds_rhs_) return;
  set_rhs(b, call);
  holds_rhs_ = call.agree();
}

inline double System::residual(const double* b, Calls& call) {
  give_rhs(b, call);
  holds_rhs_ = false;
  return residual(multiplies_, call);
}

// Collective: iterates from the present solution until the residual itself is small, not only its
// recurrence. If the two differ, the iterations restart while that helps. `size` is |b|.
inline void System::iterate(const Request& request, const double* b, double size,
                            bool guessed, int64_t max_steps, Answer& answer, Calls& call) {
  if (request.method == kCycles) {
    cycle(request, b, size, max_steps, answer, call);
  } else {
    double last;
    answer.iterations = 0;
    answer.residual = std::numeric_limits<double>::infinity();
    const double target = request.tolerance * size;
    do {
      last = answer.residual;
      give_rhs(b, call);
      const int64_t iterations = solve(request, target * target, guessed || answer.iterations > 0,
                                       max_steps - answer.iterations, call);
      if (!call.agree()) return;
      answer.iterations += iterations;
      answer.residual = residual(b, call) / size;
    } while (answer.residual > request.tolerance && answer.residual < last / 2 &&
             answer.iterations < max_steps);
  }
  answer.outcome = answer.residual <= request.tolerance ? kConverged
                   : answer.iterations >= max_steps     ? kMaxSteps
                   : answer.residual < 1                ? kStagnated
                                                        : kBreakdown;  // NaN, too
  if (request.method == kPCG && answer.outcome != kConverged && indefinite()) {
    answer.outcome = kNotPositive;
    answer.rank = -1;  // no particular rank
  }
}

// Collective: repeats x <- x + M (b - A x).
inline void System::cycle(const Request& request, const double* b, double size, int64_t max_steps,
                          Answer& answer, Calls& call) {
  answer.iterations = 0;
  const double first = residual(b, call) / size;
  answer.residual = first;
  // A residual that has grown by orders of magnitude does not recover. NaN fails every comparison.
  while (call.agree() && answer.residual > request.tolerance && answer.residual <= 1e6 * first &&
         answer.iterations < max_steps) {
    correct(call);
    ++answer.iterations;
    answer.residual = residual(b, call) / size;
  }
}

inline std::string System::solve(const double* values, bool compare, const double* b,
                                 const double* guess, const Request& request, double* x,
                                 Answer& answer) {
  int mine[kFlags] = {0}, all[kFlags];
  const double squares = inspect(values, compare, b, guess, request.method, mine);
  mine[kRequest] = request.text.hash();
  mine[kMinusRequest] = -mine[kRequest];
  MPI_Allreduce(mine, all, kFlags, MPI_INT, MPI_MAX, comm_);
  request.record.ranks_have_come();
  if (all[kChanged]) {
    ready_ = false;
    ++number_;
  }
  if (all[kRequest] != -all[kMinusRequest]) {
    int size = 0;
    MPI_Comm_size(comm_, &size);
    std::vector<RequestText> texts(size);
    const int bytes = sizeof request.text;
    MPI_Allgather(&request.text, bytes, MPI_CHAR, texts.data(), bytes, MPI_CHAR, comm_);
    return different_requests(texts);
  }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  answer = Answer{};
  if (all[kBadValue] || all[kBadVector] || all[kBadDiagonal]) {
    const bool finite = !all[kBadValue] && !all[kBadVector];
    answer.outcome = !finite                  ? kNotFinite
                     : request.method == kPCG ? kNotPositive
                                              : kZeroDiagonal;
    answer.rank = (finite ? all[kBadDiagonal] : std::max(all[kBadValue], all[kBadVector])) - 1;
    answer.residual = nan;
    std::fill_n(x, n_, nan);
    return "";
  }

  Calls call(comm_);
  if (!take(request, all[kChanged], answer, call)) {
    answer.residual = nan;
    std::fill_n(x, n_, nan);
    return call.message();
  }

  const double start = MPI_Wtime();
  ++totals.solves;
  if (!all[kNonzeroRhs]) {
    std::fill_n(x, n_, 0.0);
    return "";
  }
  if (request.method == kOneCycle) {
    set_rhs(b, call);
    if (!call.agree()) return call.message();
    call("the multigrid cycle", [&] { return from_zero(rhs(), solution()); });
    get_solution(x, call);
    answer.iterations = 1;
    answer.residual = std::numeric_limits<double>::quiet_NaN();  // not computed
    totals.solve_seconds += MPI_Wtime() - start;
    return call.agree() ? "" : call.message();
  }
  double size = 0;
  MPI_Allreduce(&squares, &size, 1, MPI_DOUBLE, MPI_SUM, comm_);
  size = std::sqrt(size);
  if (!(size > 0 && std::isfinite(size))) {  // its square overflows or underflows
    answer.outcome = kBreakdown;
    answer.residual = nan;
    std::fill_n(x, n_, nan);
    return "";
  }
  const bool guessed = all[kNonzeroGuess];
  holds_rhs_ = false;
  set_solution(guessed ? guess : nullptr, call);
  give_rhs(b, call);
  if (call.failed()) return call.message();
  if (guessed) answer.residual = residual(b, call) / size;
  if (!guessed || !(answer.residual <= request.tolerance)) {
    // A hierarchy of earlier values gets twice the iterations of one of the present values. Beyond
    // that, a new one is cheaper.
    int64_t& usual = this->usual(request);
    const bool stale = multiplies_ != 0;
    const int64_t patience =
        stale && usual ? std::min(request.max_steps, 2 * usual + 5) : request.max_steps;
    iterate(request, b, size, guessed, patience, answer, call);
    if (stale && answer.outcome != kConverged && !call.failed()) {
      const int64_t wasted = answer.iterations;
      renew(call);
      set_solution(guessed ? guess : nullptr, call);
      if (!call.agree()) return call.message();
      iterate(request, b, size, guessed, request.max_steps, answer, call);
      if (answer.outcome == kConverged) usual = std::max<int64_t>(usual, answer.iterations);
      answer.iterations += wasted;
    } else if (!stale && answer.outcome == kConverged) {
      usual = std::max<int64_t>(usual, answer.iterations);
    }
  }
  get_solution(x, call);
  if (!call.agree()) return call.message();
  if (answer.outcome == kBreakdown || answer.outcome == kNotPositive) std::fill_n(x, n_, nan);
  totals.solve_seconds += MPI_Wtime() - start;
  return "";
}

}  // namespace mpigrad::hypre
