// Conjugate gradients on hypre's vectors, by hypre's own kernels, in the order of hypre's PCG. hypre's
// PCG does more work: it multiplies by A for a first guess of zero, sets z to zero before every cycle,
// although PFMG does not read it, and runs a last cycle before it tests the residual.
#pragma once

#include <HYPRE.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace mpigrad::hypre {

// hypre exports them for its Krylov methods, but declares them in private headers only.
#define MPIGRAD_HYPRE_KERNELS(kind)                                                            \
  extern "C" {                                                                                 \
  void* hypre_##kind##KrylovCreateVector(void* like);                                          \
  HYPRE_Int hypre_##kind##KrylovDestroyVector(void* v);                                        \
  HYPRE_Int hypre_##kind##KrylovCopyVector(void* from, void* to);                              \
  HYPRE_Int hypre_##kind##KrylovScaleVector(HYPRE_Complex a, void* v);                         \
  HYPRE_Int hypre_##kind##KrylovAxpy(HYPRE_Complex a, void* x, void* y);                       \
  HYPRE_Real hypre_##kind##KrylovInnerProd(void* x, void* y);                                  \
  void* hypre_##kind##KrylovMatvecCreate(void* matrix, void* x);                               \
  HYPRE_Int hypre_##kind##KrylovMatvec(void* plan, HYPRE_Complex a, void* matrix, void* x,     \
                                       HYPRE_Complex b, void* y);                              \
  HYPRE_Int hypre_##kind##KrylovMatvecDestroy(void* plan);                                     \
  }                                                                                            \
  inline constexpr VectorKernels k##kind##Kernels = {                                          \
      hypre_##kind##KrylovCreateVector, hypre_##kind##KrylovDestroyVector,                     \
      hypre_##kind##KrylovCopyVector,   hypre_##kind##KrylovScaleVector,                       \
      hypre_##kind##KrylovAxpy,         hypre_##kind##KrylovInnerProd,                         \
      hypre_##kind##KrylovMatvecCreate, hypre_##kind##KrylovMatvec,                            \
      hypre_##kind##KrylovMatvecDestroy};

// The kernels of one kind of hypre's vectors.
struct VectorKernels {
  void* (*create)(void* like);
  HYPRE_Int (*destroy)(void* v);
  HYPRE_Int (*copy)(void* from, void* to);
  HYPRE_Int (*scale)(HYPRE_Complex a, void* v);
  HYPRE_Int (*axpy)(HYPRE_Complex a, void* x, void* y);  // y <- y + a x
  HYPRE_Real (*dot)(void* x, void* y);
  void* (*plan)(void* matrix, void* x);  // the plan of products, may be null
  // y <- a A x + b y
  HYPRE_Int (*multiply)(void* plan, HYPRE_Complex a, void* matrix, void* x, HYPRE_Complex b,
                        void* y);
  HYPRE_Int (*free_plan)(void* plan);
};

class ConjugateGradients {
 public:
  ConjugateGradients() = default;
  ConjugateGradients(const ConjugateGradients&) = delete;
  ConjugateGradients& operator=(const ConjugateGradients&) = delete;
  ~ConjugateGradients() {
    for (void* v : {p_, r_, s_}) {
      if (v) kernels_->destroy(v);
    }
    if (plan_) kernels_->free_plan(plan_);
  }

  // Collective: work vectors are made like `b`.
  void create(const VectorKernels& kernels, void* matrix, void* b) {
    if (kernels_) return;
    kernels_ = &kernels;
    for (void** v : {&p_, &r_, &s_}) *v = kernels.create(b);
    plan_ = kernels.plan(matrix, b);
  }

  // Collective: iterates from x, which is zero unless it is `guessed`. Ends when <r, r> <= small, when
  // the matrix or the preconditioner is found not to be positive definite, or when a value is not
  // finite. `precondition(r, z)` is z <- M r. Returns the number of iterations.
  template <class Precondition>
  int64_t solve(void* matrix, void* b, void* x, bool guessed, double small, int64_t max_steps,
                Precondition&& precondition) {
    const VectorKernels& k = *kernels_;
    curvature_ = 0;
    k.copy(b, r_);
    if (guessed) k.multiply(plan_, -1, matrix, x, 1, r_);
    precondition(r_, p_);
    double gamma = k.dot(r_, p_);
    for (int64_t step = 1; step <= max_steps; ++step) {
      k.multiply(plan_, 1, matrix, p_, 0, s_);
      const double curvature = k.dot(s_, p_);
      const double alpha = gamma / curvature;
      if (!(alpha >= std::numeric_limits<double>::min())) {
        curvature_ = curvature / k.dot(p_, p_);
        return step;
      }
      k.axpy(alpha, p_, x);
      k.axpy(-alpha, s_, r_);
      const double squares = k.dot(r_, r_);
      if (!(squares > small) || step == max_steps) return step;
      precondition(r_, s_);
      const double before = gamma;
      gamma = k.dot(r_, s_);
      if (!(gamma >= std::numeric_limits<double>::min())) return step;
      k.scale(gamma / before, p_);
      k.axpy(1, s_, p_);
    }
    return max_steps;
  }

  // <p, A p> / <p, p> of the direction of negative curvature that ended the last solve, or 0.
  double curvature() const { return curvature_; }

 private:
  const VectorKernels* kernels_ = nullptr;
  double curvature_ = 0;
  void *p_ = nullptr, *r_ = nullptr, *s_ = nullptr, *plan_ = nullptr;
};

}  // namespace mpigrad::hypre
