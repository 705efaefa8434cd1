"""Krylov methods written in JAX: for any linear map, any floating-point type, without hypre."""
