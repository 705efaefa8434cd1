// hypre's Krylov methods behind one interface. Only their creation depends on the kind of matrix.
#pragma once

#include <HYPRE.h>
#include <HYPRE_krylov.h>
#include <mpi.h>

#include <cstdint>

#include "hypre/calls.h"

namespace mpigrad::hypre {

// The numbers of `LinearSolver.hypre_method`. Cycles: the multigrid cycle alone, repeated. One cycle:
// M b, without a residual.
enum Method : int64_t { kPCG = 0, kGMRES = 1, kBiCGStab = 2, kCycles = 3, kOneCycle = 4 };

// The functions that make and free a method for one kind of matrix (IJ, structured).
struct Maker {
  HYPRE_Int (*create)(MPI_Comm, HYPRE_Solver*);
  HYPRE_Int (*destroy)(HYPRE_Solver);
};

using MethodFunction = HYPRE_Int (*)(HYPRE_Solver, HYPRE_Matrix, HYPRE_Vector, HYPRE_Vector);

struct KrylovFunctions {
  const char* name;
  MethodFunction setup, solve;
  HYPRE_Int (*set_preconditioner)(HYPRE_Solver, HYPRE_PtrToSolverFcn, HYPRE_PtrToSolverFcn,
                                  HYPRE_Solver);
  HYPRE_Int (*set_tolerance)(HYPRE_Solver, HYPRE_Real);
  HYPRE_Int (*set_max_steps)(HYPRE_Solver, HYPRE_Int);
  HYPRE_Int (*iterations)(HYPRE_Solver, HYPRE_Int*);
};

inline constexpr KrylovFunctions kKrylov[] = {
    {"GMRES", HYPRE_GMRESSetup, HYPRE_GMRESSolve, HYPRE_GMRESSetPrecond, HYPRE_GMRESSetTol,
     HYPRE_GMRESSetMaxIter, HYPRE_GMRESGetNumIterations},
    {"BiCGSTAB", HYPRE_BiCGSTABSetup, HYPRE_BiCGSTABSolve, HYPRE_BiCGSTABSetPrecond,
     HYPRE_BiCGSTABSetTol, HYPRE_BiCGSTABSetMaxIter, HYPRE_BiCGSTABGetNumIterations},
};

// One method with its work vectors, bound to our function z <- M r, the preconditioner. The matrix is
// given with each solve.
class Krylov {
 public:
  Krylov() = default;
  Krylov(const Krylov&) = delete;
  Krylov& operator=(const Krylov&) = delete;
  ~Krylov() {
    if (solver_) maker_.destroy(solver_);
  }

  // Collective. The matrix and the vectors serve as models of the work vectors.
  void create(MPI_Comm comm, Method method, int64_t restart, const Maker& maker,
              HYPRE_PtrToSolverFcn precondition, void* self, HYPRE_Matrix a, HYPRE_Vector b,
              HYPRE_Vector x, Calls& call) {
    functions_ = &kKrylov[method - kGMRES];
    maker_ = maker;
    call(functions_->name, [&] { return maker_.create(comm, &solver_); });
    if (method == kGMRES) {
      const auto size = static_cast<HYPRE_Int>(restart);
      call(functions_->name, [&] { return HYPRE_GMRESSetKDim(solver_, size); });
    }
    call(functions_->name, [&] {
      return functions_->set_preconditioner(solver_, precondition, nothing,
                                            static_cast<HYPRE_Solver>(self));
    });
    call(functions_->name, [&] { return functions_->setup(solver_, a, b, x); });
  }

  // Collective: iterates from the present x and returns the number of iterations. hypre's residual is
  // not read: for a singular matrix its recurrence may be far below the true residual.
  HYPRE_Int solve(HYPRE_Matrix a, HYPRE_Vector b, HYPRE_Vector x, double tolerance,
                  int64_t max_steps, Calls& call) {
    HYPRE_Int iterations = 0;
    if (call.failed()) return iterations;
    const auto steps = static_cast<HYPRE_Int>(max_steps);
    call(functions_->name, [&] { return functions_->set_tolerance(solver_, tolerance); });
    call(functions_->name, [&] { return functions_->set_max_steps(solver_, steps); });
    // The generic error means NaN in the iterations, which the residual will show.
    call(functions_->name,
         [&] { return functions_->solve(solver_, a, b, x) & ~HYPRE_ERROR_GENERIC; });
    HYPRE_ClearAllErrors();
    call(functions_->name, [&] { return functions_->iterations(solver_, &iterations); });
    return iterations;
  }

 private:
  static HYPRE_Int nothing(HYPRE_Solver, HYPRE_Matrix, HYPRE_Vector, HYPRE_Vector) { return 0; }

  const KrylovFunctions* functions_ = nullptr;
  Maker maker_{};
  HYPRE_Solver solver_ = nullptr;
};

}  // namespace mpigrad::hypre
