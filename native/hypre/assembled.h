// Systems of assembled matrices (hypre's IJ interface), preconditioned by BoomerAMG.
#pragma once

#include <HYPRE_IJ_mv.h>
#include <HYPRE_parcsr_ls.h>
#include <HYPRE_parcsr_mv.h>

#include <cmath>
#include <vector>

#include "hypre/system.h"

namespace mpigrad::hypre {

MPIGRAD_HYPRE_KERNELS(Par)

// One BoomerAMG configuration, laid out as the ctypes structure in sparse/solvers/hypre.py.
struct BoomerAMGOptions {
  int32_t coarsening, interpolation, max_row_elements, relaxation, aggressive_levels, max_levels,
      unknowns_per_cell, keeps_stale, near_null,  // the number of near-null vectors
      singular;
  double strong_threshold;
};

class Assembled final : public System {
 public:
  // near_null: one vector after the other, shape (options.near_null, n)
  Assembled(const Structure& given, const BoomerAMGOptions& options, const double* near_null)
      : System(given, options.keeps_stale), options_(options) {
    near_null_values_.assign(near_null, near_null + options.near_null * n_);
    columns_.assign(given.columns, given.columns + given.entries());
    // hypre refuses null pointers, also on ranks without rows.
    for (auto* v : {&row_sizes_, &diagonal_sizes_, &ghost_sizes_}) v->reserve(n_ + 1);
    for (int64_t i = 0; i < n_; ++i) {
      const int64_t *row = given.columns + given.row_starts[i],
                    *end = given.columns + given.row_starts[i + 1];
      const auto own = std::count_if(row, end, [&](int64_t column) {
        return column >= first_ && column < first_ + n_;
      });
      rows_.push_back(static_cast<HYPRE_BigInt>(first_ + i));
      row_sizes_.push_back(static_cast<HYPRE_Int>(end - row));
      diagonal_sizes_.push_back(static_cast<HYPRE_Int>(own));
      ghost_sizes_.push_back(row_sizes_.back() - diagonal_sizes_.back());
    }
  }

  ~Assembled() override {
    if (amg_) HYPRE_BoomerAMGDestroy(amg_);
    for (HYPRE_IJVector v : {rhs_, solution_, correction_}) {
      if (v) HYPRE_IJVectorDestroy(v);
    }
    for (HYPRE_IJVector v : near_null_) {
      if (v) HYPRE_IJVectorDestroy(v);
    }
    for (HYPRE_IJMatrix m : matrices_) {
      if (m) HYPRE_IJMatrixDestroy(m);
    }
    HYPRE_ClearAllErrors();
  }

 private:
  void create(Calls& call) override {
    for (HYPRE_IJVector* v : {&rhs_, &solution_, &correction_}) {
      create_vector(v, call);
      call("HYPRE_IJVectorAssemble", [&] { return HYPRE_IJVectorAssemble(*v); });
    }
    const BoomerAMGOptions& o = options_;
    call("HYPRE_BoomerAMGCreate", [&] { return HYPRE_BoomerAMGCreate(&amg_); });
    const auto set = [&](HYPRE_Int (*function)(HYPRE_Solver, HYPRE_Int), int32_t value) {
      call("setting BoomerAMG's options", [&] { return function(amg_, value); });
    };
    set(HYPRE_BoomerAMGSetPrintLevel, 0);
    set(HYPRE_BoomerAMGSetCoarsenType, o.coarsening);
    set(HYPRE_BoomerAMGSetInterpType, o.interpolation);
    set(HYPRE_BoomerAMGSetPMaxElmts, o.max_row_elements);
    set(HYPRE_BoomerAMGSetRelaxType, o.relaxation);
    set(HYPRE_BoomerAMGSetAggNumLevels, o.aggressive_levels);
    set(HYPRE_BoomerAMGSetMaxLevels, o.max_levels);
    set(HYPRE_BoomerAMGSetNumFunctions, o.unknowns_per_cell);
    set(HYPRE_BoomerAMGSetMaxIter, 1);  // exactly one V-cycle
    if (o.near_null > 0) interpolate_near_null(call);
    if (o.singular) relax_coarsest(call);
    call("HYPRE_BoomerAMGSetTol", [&] { return HYPRE_BoomerAMGSetTol(amg_, 0); });
    call("HYPRE_BoomerAMGSetStrongThreshold",
         [&] { return HYPRE_BoomerAMGSetStrongThreshold(amg_, o.strong_threshold); });
  }

  void create_vector(HYPRE_IJVector* v, Calls& call) {
    call("HYPRE_IJVectorCreate", [&] { return HYPRE_IJVectorCreate(comm_, first(), last(), v); });
    call("HYPRE_IJVectorSetObjectType",
         [&] { return HYPRE_IJVectorSetObjectType(*v, HYPRE_PARCSR); });
    call("HYPRE_IJVectorInitialize", [&] { return HYPRE_IJVectorInitialize(*v); });
  }

  // Interpolates the near-null vectors exactly, on coarse grids of whole cells (Baker, Kolev & Yang,
  // Numer. Linear Algebra Appl. 17, 2010: GM-2).
  void interpolate_near_null(Calls& call) {
    near_null_.resize(options_.near_null, nullptr);
    for (size_t k = 0; k < near_null_.size(); ++k) {
      HYPRE_IJVector& v = near_null_[k];
      create_vector(&v, call);
      set(v, near_null_values_.data() + k * n_, call);
      call("HYPRE_IJVectorAssemble", [&] { return HYPRE_IJVectorAssemble(v); });
      near_null_objects_.push_back(object(v));
    }
    const auto set_option = [&](HYPRE_Int (*function)(HYPRE_Solver, HYPRE_Int), HYPRE_Int value) {
      call("setting BoomerAMG's near-null vectors", [&] { return function(amg_, value); });
    };
    set_option(HYPRE_BoomerAMGSetNodal, 4);
    set_option(HYPRE_BoomerAMGSetNodalDiag, 1);
    set_option(HYPRE_BoomerAMGSetInterpVecVariant, 2);
    set_option(HYPRE_BoomerAMGSetInterpVecQMax, 4);
    call("HYPRE_BoomerAMGSetInterpVectors", [&] {
      return HYPRE_BoomerAMGSetInterpVectors(
          amg_, static_cast<HYPRE_Int>(near_null_objects_.size()), near_null_objects_.data());
    });
  }

  // Relaxes on the coarsest grid. hypre's default, Gaussian elimination, would divide by a pivot that is
  // rounding, so that a part of the residual outside the range grows until PCG stagnates. So would a
  // smoother on a grid that has the null vectors only.
  void relax_coarsest(Calls& call) {
    constexpr HYPRE_Int kCoarsest = 3, kSweeps = 40, kLeast = 20;
    call("HYPRE_BoomerAMGSetMinCoarseSize", [&] {
      return HYPRE_BoomerAMGSetMinCoarseSize(amg_, kLeast * options_.unknowns_per_cell);
    });
    call("HYPRE_BoomerAMGSetCycleRelaxType", [&] {
      return HYPRE_BoomerAMGSetCycleRelaxType(amg_, options_.relaxation, kCoarsest);
    });
    call("HYPRE_BoomerAMGSetCycleNumSweeps",
         [&] { return HYPRE_BoomerAMGSetCycleNumSweeps(amg_, kSweeps, kCoarsest); });
  }

  void fill(int slot, Calls& call) override {
    HYPRE_IJMatrix& m = matrices_[slot];
    if (!m) {
      call("HYPRE_IJMatrixCreate",
           [&] { return HYPRE_IJMatrixCreate(comm_, first(), last(), first(), last(), &m); });
      call("HYPRE_IJMatrixSetObjectType",
           [&] { return HYPRE_IJMatrixSetObjectType(m, HYPRE_PARCSR); });
      call("HYPRE_IJMatrixSetDiagOffdSizes", [&] {
        return HYPRE_IJMatrixSetDiagOffdSizes(m, diagonal_sizes_.data(), ghost_sizes_.data());
      });
      call("HYPRE_IJMatrixSetMaxOffProcElmts",
           [&] { return HYPRE_IJMatrixSetMaxOffProcElmts(m, 0); });
    }
    call("HYPRE_IJMatrixInitialize", [&] { return HYPRE_IJMatrixInitialize(m); });
    if (n_ > 0) {
      call("HYPRE_IJMatrixSetValues", [&] {
        return HYPRE_IJMatrixSetValues(m, size(), row_sizes_.data(), rows_.data(), columns_.data(),
                                       latest_);
      });
    }
    call.agree();
    call("HYPRE_IJMatrixAssemble", [&] { return HYPRE_IJMatrixAssemble(m); });
    call.agree();
  }

  void set_up(Calls& call) override {
    call("HYPRE_BoomerAMGSetup", [&] {
      const HYPRE_Int code =
          HYPRE_BoomerAMGSetup(amg_, object(matrices_[0]), object(rhs_), object(solution_));
      // A coarse unknown of a near-null vector may have an empty row, if the interpolation has the
      // vector already. The l1 norm of that row is then reported as an error in argument 1, but the
      // hierarchy is complete, and smoothers leave the unknown as it is.
      if (options_.near_null == 0 || code != (HYPRE_ERROR_ARG | 1 << 3)) return code;
      HYPRE_ClearAllErrors();
      return 0;
    });
  }

  // The hierarchy's finest level is its own matrix, even if another one multiplies. With another
  // matrix here PCG stalls.
  HYPRE_Int precondition(HYPRE_Vector r, HYPRE_Vector z) override {
    return HYPRE_BoomerAMGSolve(amg_, object(matrices_[0]), reinterpret_cast<HYPRE_ParVector>(r),
                                reinterpret_cast<HYPRE_ParVector>(z));
  }

  HYPRE_Int from_zero(HYPRE_Vector r, HYPRE_Vector z) override {
    HYPRE_ParVectorSetConstantValues(reinterpret_cast<HYPRE_ParVector>(z), 0);
    return precondition(r, z);
  }
  const VectorKernels& kernels() override { return kParKernels; }

  HYPRE_Matrix matrix(int slot) override {
    return reinterpret_cast<HYPRE_Matrix>(object(matrices_[slot]));
  }
  HYPRE_Vector rhs() override { return reinterpret_cast<HYPRE_Vector>(object(rhs_)); }
  HYPRE_Vector solution() override { return reinterpret_cast<HYPRE_Vector>(object(solution_)); }

  const Maker& maker(Method method) override {
    static const Maker makers[] = {{HYPRE_ParCSRGMRESCreate, HYPRE_ParCSRGMRESDestroy},
                                   {HYPRE_ParCSRBiCGSTABCreate, HYPRE_ParCSRBiCGSTABDestroy}};
    return makers[method - kGMRES];
  }

  void set_rhs(const double* b, Calls& call) override { set(rhs_, b, call); }

  void set_solution(const double* x, Calls& call) override {
    if (x) return set(solution_, x, call);
    call("HYPRE_ParVectorSetConstantValues",
         [&] { return HYPRE_ParVectorSetConstantValues(object(solution_), 0); });
  }

  void get_solution(double* x, Calls& call) override { get(solution_, x, call); }

  void multiply(int slot, Calls& call) override {
    call("HYPRE_ParCSRMatrixMatvec", [&] {
      return HYPRE_ParCSRMatrixMatvec(1, object(matrices_[slot]), object(rhs_), 0,
                                      object(solution_));
    });
  }

  double residual(int slot, Calls& call) override {
    double square = 0;
    call("HYPRE_ParCSRMatrixMatvec", [&] {
      return HYPRE_ParCSRMatrixMatvec(-1, object(matrices_[slot]), object(solution_), 1,
                                      object(rhs_));
    });
    call("HYPRE_ParVectorInnerProd", [&] {
      return HYPRE_ParVectorInnerProd(object(rhs_), object(rhs_), &square);
    });
    return std::sqrt(square);
  }

  void correct(Calls& call) override {
    call("HYPRE_ParVectorSetConstantValues",
         [&] { return HYPRE_ParVectorSetConstantValues(object(correction_), 0); });
    call("HYPRE_BoomerAMGSolve", [&] {
      return HYPRE_BoomerAMGSolve(amg_, object(matrices_[0]), object(rhs_),
                                  object(correction_));
    });
    values_.resize(n_);
    get(correction_, values_.data(), call);
    if (n_ > 0) {
      call("HYPRE_IJVectorAddToValues", [&] {
        return HYPRE_IJVectorAddToValues(solution_, size(), rows_.data(), values_.data());
      });
    }
  }

  // ---- hypre's objects ----

  HYPRE_Int size() const { return static_cast<HYPRE_Int>(n_); }
  HYPRE_BigInt first() const { return static_cast<HYPRE_BigInt>(first_); }
  HYPRE_BigInt last() const { return first() + size() - 1; }

  void set(HYPRE_IJVector to, const double* from, Calls& call) {
    if (n_ == 0) return;
    call("HYPRE_IJVectorSetValues",
         [&] { return HYPRE_IJVectorSetValues(to, size(), rows_.data(), from); });
  }
  void get(HYPRE_IJVector from, double* to, Calls& call) {
    if (n_ == 0) return;
    call("HYPRE_IJVectorGetValues",
         [&] { return HYPRE_IJVectorGetValues(from, size(), rows_.data(), to); });
  }

  static HYPRE_ParCSRMatrix object(HYPRE_IJMatrix m) {
    void* p = nullptr;
    HYPRE_IJMatrixGetObject(m, &p);
    return static_cast<HYPRE_ParCSRMatrix>(p);
  }
  static HYPRE_ParVector object(HYPRE_IJVector v) {
    void* p = nullptr;
    HYPRE_IJVectorGetObject(v, &p);
    return static_cast<HYPRE_ParVector>(p);
  }

  BoomerAMGOptions options_;
  std::vector<HYPRE_BigInt> rows_, columns_;
  std::vector<HYPRE_Int> row_sizes_, diagonal_sizes_, ghost_sizes_;
  HYPRE_IJMatrix matrices_[2] = {nullptr, nullptr};
  HYPRE_IJVector rhs_ = nullptr, solution_ = nullptr, correction_ = nullptr;
  HYPRE_Solver amg_ = nullptr;
  std::vector<double> values_, near_null_values_;
  std::vector<HYPRE_IJVector> near_null_;
  std::vector<HYPRE_ParVector> near_null_objects_;  // hypre keeps the address of this array
};

}  // namespace mpigrad::hypre
