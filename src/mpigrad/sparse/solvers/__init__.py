"""Linear solves: strategies, Krylov methods, hypre, and their derivatives."""
