// The end of a solve, and the error that tells of it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace mpigrad::stencil {

// The numbers of mpigrad.solution.Result.
enum Outcome {
  kConverged = 0,
  kMaxSteps = 1,
  kNotFinite = 2,
  kNotPositive = 3,
  kNotSymmetric = 4,
  kBreakdown = 5,
  kStagnated = 6,
  kZeroDiagonal = 7
};

struct Answer {
  Outcome outcome = kConverged;
  int rank = -1;  // the rank at fault, or -1
  int64_t iterations = 0;
  double residual = 0;  // |b - Ax| / |b|
};

// The settings of a solve that must be the same on all ranks.
struct RequestText {
  char text[512];

  RequestText(std::string_view settings = "", int64_t sides = 0) {
    std::snprintf(text, sizeof text, "%lld right-hand side%s by %.*s", static_cast<long long>(sides),
                  sides == 1 ? "" : "s", static_cast<int>(settings.size()), settings.data());
  }
  // Positive.
  int hash() const {
    return static_cast<int>(std::hash<std::string_view>{}(text) & 0x7fffffff);
  }
};

// The error of ranks whose hashes differ.
inline std::string different_requests(const std::vector<RequestText>& all) {
  size_t other = 0;
  while (other + 1 < all.size() && !std::strcmp(all[other].text, all[0].text)) ++other;
  return std::string("the ranks ask for different solves: rank 0 for ") + all[0].text + ", rank " +
         std::to_string(other) + " for " + all[other].text +
         ". Call solve with the same method, preconditioner, settings and number of right-hand sides on "
         "every rank.";
}

// The texts begin with the sentences of mpigrad.solution.Result.
inline std::string describe(const Answer& a, std::string_view solver, bool positive_definite,
                            double tolerance, int64_t max_steps) {
  const std::string rank = std::to_string(a.rank), name(solver);
  std::string check = positive_definite ? "check that the matrix is positive definite"
                                       : "check the matrix, or try another relaxation or method";
  if (name.find("PFMG") != std::string::npos || name.find("BoxMG") != std::string::npos) {
    check += ", or take BoomerAMG(), which suits coefficients that jump";
  }
  const bool restarts = name.find("GMRES") != std::string::npos;
  char residual[80] = "", limit[80] = "";
  std::snprintf(residual, sizeof residual, "the relative residual is %.3g after %d steps",
                a.residual, static_cast<int>(a.iterations));
  std::snprintf(limit, sizeof limit, "above the tolerance %.3g", tolerance);
  switch (a.outcome) {
    case kConverged:
      return "";
    case kMaxSteps:
      return name + " did not converge: max_steps steps were taken before the tolerance was met, "
             "and " + residual + ", " + limit + ". Raise " +
             (restarts ? "restart or " : "") + "max_steps=" + std::to_string(max_steps) + ", loosen rtol, or " + check +
             ". solve(..., throw=False) returns the last iterate.";
    case kNotFinite:
      return "NaN or infinity appeared: the matrix, the right-hand side or x0 holds such a value on "
             "rank " + rank + ". Look for a division by zero or an overflow in the code that "
             "computes them.";
    case kNotPositive:
      if (a.rank < 0) {
        return "the matrix is not positive definite: PCG has found a direction p with <p, A p> < 0 "
               "after " + std::to_string(a.iterations) + " steps. If -A is positive definite, "
               "solve with -A and -b. Otherwise solve with GMRES() or BiCGStab().";
      }
      return "the matrix is not positive definite: a diagonal entry on rank " + rank +
             " is zero or negative, but PCG needs a positive definite matrix. If all are negative, "
             "solve with -A and -b. Otherwise solve with GMRES().";
    case kNotSymmetric:
      return "the matrix is not symmetric, but this solver needs a symmetric one. Give entries "
             "(i, j) and (j, i) the same value, also if i and j belong to different ranks, or solve "
             "with GMRES() or BiCGStab().";
    case kZeroDiagonal:
      return "the preconditioner divides by a zero on the diagonal: " + name + " found it on rank " +
             rank + ". Check that the matrix is not singular, reorder its rows, or solve with "
             "GMRES(preconditioner=None).";
    case kStagnated:
      return name + " did not converge: " +
             (a.residual <= 1e-8 ? "rounding errors allow no smaller residual"
                                 : "the residual no longer decreases") +
             ": " + residual + ", " + limit + ". " +
             (a.residual <= 1e-8 ? "Loosen rtol."
                                 : "The matrix is singular, or nearly: give its null space as "
                                   "nullspace=, or check how it is made.") +
             " solve(..., throw=False) returns the last iterate.";
    case kBreakdown:
      return name + " did not converge: the method broke down: it divided by zero, or its numbers "
             "overflowed, and " + residual + ". The matrix may be singular (give "
             "nullspace=), or have numbers beyond "
             "1e150 or 1e-150, whose squares no float64 holds: " + check + ".";
  }
  return "";
}

}  // namespace mpigrad::stencil
