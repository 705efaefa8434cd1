// Systems of grid stencils (hypre's structured interface), preconditioned by PFMG.
#pragma once

#include <HYPRE_struct_ls.h>
#include <HYPRE_struct_mv.h>

#include <cmath>
#include <vector>

#include "hypre/system.h"
#include "stencil/tile.h"

// hypre exports it, but declares it in private headers only.
extern "C" HYPRE_Real hypre_StructInnerProd(HYPRE_StructVector x, HYPRE_StructVector y);

namespace mpigrad::hypre {


MPIGRAD_HYPRE_KERNELS(Struct)

// One PFMG configuration, laid out as the ctypes structure in sparse/solvers/hypre.py.
struct PFMGOptions {
  int32_t coarse_operator, relaxation, sweeps, skips_relaxation, max_levels, keeps_stale;
  int32_t symmetric;  // hypre gets only one of the entries (i, j), (j, i)
};

class Structured final : public System {
 public:
  // `size` values come offset after offset.
  Structured(MPI_Comm comm, int64_t first, const Tile& tile, std::vector<Entry> entries,
             int64_t size, const PFMGOptions& options)
      : System(comm, first, tile.cells.size(), size, options.keeps_stale),
        tile_(tile),
        options_(options),
        entries_(std::move(entries)),
        asymmetry_(tile_, entries_) {
    for (int a = 0; a < kAxes; ++a) {
      lower_[a] = static_cast<HYPRE_Int>(tile_.cells.lower[a]);
      upper_[a] = static_cast<HYPRE_Int>(tile_.cells.upper[a] - 1);
    }
    for (const Entry& e : entries_) {
      if (e.direction() == 0) {
        for (int64_t i = 0; i < n_; ++i) diagonal_.push_back(static_cast<int32_t>(e.start + i));
      }
      if (!options_.symmetric || e.direction() <= 0) stencil_entries_.push_back(&e);
    }
  }

  ~Structured() override {
    if (pfmg_) HYPRE_StructPFMGDestroy(pfmg_);
    for (HYPRE_StructVector v : {rhs_, solution_, correction_}) {
      if (v) HYPRE_StructVectorDestroy(v);
    }
    for (HYPRE_StructMatrix m : matrices_) {
      if (m) HYPRE_StructMatrixDestroy(m);
    }
    if (stencil_) HYPRE_StructStencilDestroy(stencil_);
    if (grid_) HYPRE_StructGridDestroy(grid_);
    HYPRE_ClearAllErrors();
  }

 private:
  void create(Calls& call) override {
    call("HYPRE_StructGridCreate",
         [&] { return HYPRE_StructGridCreate(comm_, tile_.axes, &grid_); });
    call("HYPRE_StructGridSetExtents",
         [&] { return HYPRE_StructGridSetExtents(grid_, lower_, upper_); });
    call("HYPRE_StructGridAssemble", [&] { return HYPRE_StructGridAssemble(grid_); });
    const auto size = static_cast<HYPRE_Int>(stencil_entries_.size());
    call("HYPRE_StructStencilCreate",
         [&] { return HYPRE_StructStencilCreate(tile_.axes, size, &stencil_); });
    for (HYPRE_Int k = 0; k < size; ++k) {
      HYPRE_Int step[kAxes];
      std::copy_n(stencil_entries_[k]->step, kAxes, step);
      call("HYPRE_StructStencilSetElement",
           [&] { return HYPRE_StructStencilSetElement(stencil_, k, step); });
    }
    for (HYPRE_StructVector* v : {&rhs_, &solution_, &correction_}) {
      call("HYPRE_StructVectorCreate", [&] { return HYPRE_StructVectorCreate(comm_, grid_, v); });
      call("HYPRE_StructVectorInitialize", [&] { return HYPRE_StructVectorInitialize(*v); });
      call("HYPRE_StructVectorAssemble", [&] { return HYPRE_StructVectorAssemble(*v); });
    }
  }

  void fill(int slot, Calls& call) override {
    HYPRE_StructMatrix& m = matrices_[slot];
    if (!m) make(m, call);
    for (size_t k = 0; k < stencil_entries_.size(); ++k) {
      const Entry& e = *stencil_entries_[k];
      if (e.given) set(m, k, e.inside, latest_ + e.start, call);
    }
    call.agree();
    call("HYPRE_StructMatrixAssemble", [&] { return HYPRE_StructMatrixAssemble(m); });
    call.agree();
  }

  void make(HYPRE_StructMatrix& m, Calls& call) {
    call("HYPRE_StructMatrixCreate",
         [&] { return HYPRE_StructMatrixCreate(comm_, grid_, stencil_, &m); });
    call("HYPRE_StructMatrixSetSymmetric",
         [&] { return HYPRE_StructMatrixSetSymmetric(m, options_.symmetric); });
    call("HYPRE_StructMatrixInitialize", [&] { return HYPRE_StructMatrixInitialize(m); });
    // Entries that leave the grid, or that the pattern does not have, stay zero.
    const std::vector<double> zeros(n_, 0.0);
    for (size_t k = 0; k < stencil_entries_.size(); ++k) {
      set(m, k, tile_.cells, zeros.data(), call);
    }
  }

  void set(HYPRE_StructMatrix m, size_t entry, const Box& box, const double* values, Calls& call) {
    if (box.size() == 0) return;
    HYPRE_Int lower[kAxes], upper[kAxes], number = static_cast<HYPRE_Int>(entry);
    for (int a = 0; a < kAxes; ++a) {
      lower[a] = static_cast<HYPRE_Int>(box.lower[a]);
      upper[a] = static_cast<HYPRE_Int>(box.upper[a] - 1);
    }
    call("HYPRE_StructMatrixSetBoxValues", [&] {
      return HYPRE_StructMatrixSetBoxValues(m, lower, upper, 1, &number,
                                            const_cast<double*>(values));
    });
  }

  // A second set-up of the same PFMG would leak the first.
  void set_up(Calls& call) override {
    if (pfmg_) HYPRE_StructPFMGDestroy(pfmg_);
    pfmg_ = nullptr;
    const PFMGOptions& o = options_;
    call("HYPRE_StructPFMGCreate", [&] { return HYPRE_StructPFMGCreate(comm_, &pfmg_); });
    const auto set = [&](HYPRE_Int (*function)(HYPRE_StructSolver, HYPRE_Int), int32_t value) {
      call("setting PFMG's options", [&] { return function(pfmg_, value); });
    };
    set(HYPRE_StructPFMGSetRAPType, o.coarse_operator);
    set(HYPRE_StructPFMGSetRelaxType, o.relaxation);
    set(HYPRE_StructPFMGSetNumPreRelax, o.sweeps);
    set(HYPRE_StructPFMGSetNumPostRelax, o.sweeps);
    set(HYPRE_StructPFMGSetSkipRelax, o.skips_relaxation);
    if (o.max_levels > 0) set(HYPRE_StructPFMGSetMaxLevels, o.max_levels);
    set(HYPRE_StructPFMGSetMaxIter, 1);  // exactly one V-cycle, from zero
    call("HYPRE_StructPFMGSetTol", [&] { return HYPRE_StructPFMGSetTol(pfmg_, 0); });
    call("HYPRE_StructPFMGSetZeroGuess", [&] { return HYPRE_StructPFMGSetZeroGuess(pfmg_); });
    call.agree();
    call("HYPRE_StructPFMGSetup",
         [&] { return HYPRE_StructPFMGSetup(pfmg_, matrices_[0], rhs_, solution_); });
  }

  HYPRE_Int precondition(HYPRE_Vector r, HYPRE_Vector z) override {
    return HYPRE_StructPFMGSolve(pfmg_, matrices_[0], reinterpret_cast<HYPRE_StructVector>(r),
                                 reinterpret_cast<HYPRE_StructVector>(z));
  }

  HYPRE_Int from_zero(HYPRE_Vector r, HYPRE_Vector z) override { return precondition(r, z); }
  const VectorKernels& kernels() override { return kStructKernels; }

  HYPRE_Matrix matrix(int slot) override { return reinterpret_cast<HYPRE_Matrix>(matrices_[slot]); }
  HYPRE_Vector rhs() override { return reinterpret_cast<HYPRE_Vector>(rhs_); }
  HYPRE_Vector solution() override { return reinterpret_cast<HYPRE_Vector>(solution_); }

  // hypre's structured solvers have a type of their own, for the same objects.
  template <auto create>
  static HYPRE_Int made(MPI_Comm comm, HYPRE_Solver* solver) {
    return create(comm, reinterpret_cast<HYPRE_StructSolver*>(solver));
  }
  template <auto destroy>
  static HYPRE_Int freed(HYPRE_Solver solver) {
    return destroy(reinterpret_cast<HYPRE_StructSolver>(solver));
  }

  const Maker& maker(Method method) override {
    static const Maker makers[] = {
        {made<HYPRE_StructGMRESCreate>, freed<HYPRE_StructGMRESDestroy>},
        {made<HYPRE_StructBiCGSTABCreate>, freed<HYPRE_StructBiCGSTABDestroy>}};
    return makers[method - kGMRES];
  }

  void set_rhs(const double* b, Calls& call) override { set(rhs_, b, call); }

  void set_solution(const double* x, Calls& call) override {
    if (x) return set(solution_, x, call);
    call("HYPRE_StructVectorSetConstantValues",
         [&] { return HYPRE_StructVectorSetConstantValues(solution_, 0); });
  }

  void get_solution(double* x, Calls& call) override { get(solution_, x, call); }

  void multiply(int slot, Calls& call) override {
    call("HYPRE_StructMatrixMatvec", [&] {
      return HYPRE_StructMatrixMatvec(1, matrices_[slot], rhs_, 0, solution_);
    });
  }

  double residual(int slot, Calls& call) override {
    // A x - b: for b - A x hypre reads the vector once more.
    call("HYPRE_StructMatrixMatvec", [&] {
      return HYPRE_StructMatrixMatvec(1, matrices_[slot], solution_, -1, rhs_);
    });
    return std::sqrt(hypre_StructInnerProd(rhs_, rhs_));
  }

  void correct(Calls& call) override {
    call("HYPRE_StructVectorSetConstantValues",
         [&] { return HYPRE_StructVectorSetConstantValues(correction_, 0); });
    call("HYPRE_StructPFMGSolve", [&] {
      return HYPRE_StructPFMGSolve(pfmg_, matrices_[0], rhs_, correction_);
    });
    scratch_.resize(n_);
    get(correction_, scratch_.data(), call);
    for (double& change : scratch_) change = -change;
    call("HYPRE_StructVectorAddToBoxValues", [&] {
      return HYPRE_StructVectorAddToBoxValues(solution_, lower_, upper_, scratch_.data());
    });
  }

  void examine(const double* values, Digest& digest, bool& bad) override {
    stencil::examine(tile_, entries_, values, digest, bad,
                     options_.symmetric ? &asymmetry_ : nullptr);
  }

  // Collective. Entries within a tile are compared one by one: cheaper than products, and needed
  // before half of the entries are dropped.
  bool symmetric(Calls&) override {
    double all[Asymmetry::kSums];
    MPI_Allreduce(asymmetry_.sums(), all, Asymmetry::kSums, MPI_DOUBLE, MPI_SUM, comm_);
    return Asymmetry::none(all);
  }

  void set(HYPRE_StructVector to, const double* from, Calls& call) {
    call("HYPRE_StructVectorSetBoxValues", [&] {
      return HYPRE_StructVectorSetBoxValues(to, lower_, upper_, const_cast<double*>(from));
    });
  }
  void get(HYPRE_StructVector from, double* to, Calls& call) {
    call("HYPRE_StructVectorGetBoxValues",
         [&] { return HYPRE_StructVectorGetBoxValues(from, lower_, upper_, to); });
  }

  Tile tile_;
  PFMGOptions options_;
  std::vector<Entry> entries_;                  // of the completed stencil, in the order of the values
  std::vector<const Entry*> stencil_entries_;  // the entries that hypre gets
  Asymmetry asymmetry_;  // of the last values
  HYPRE_Int lower_[kAxes], upper_[kAxes];
  HYPRE_StructGrid grid_ = nullptr;
  HYPRE_StructStencil stencil_ = nullptr;
  HYPRE_StructMatrix matrices_[2] = {nullptr, nullptr};
  HYPRE_StructVector rhs_ = nullptr, solution_ = nullptr, correction_ = nullptr;
  HYPRE_StructSolver pfmg_ = nullptr;
  std::vector<double> scratch_;
};

}  // namespace mpigrad::hypre
