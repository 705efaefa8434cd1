"""Stiff differential equations in time over ranks, with exact derivatives of the adaptive steps."""

from mpigrad.ode.integrate import integrate
from mpigrad.ode.methods import (
    ImplicitEuler,
    KenCarp3,
    KenCarp4,
    KenCarp5,
    Kvaerno3,
    Kvaerno5,
    Method,
)

__all__ = [
    "ImplicitEuler",
    "KenCarp3",
    "KenCarp4",
    "KenCarp5",
    "Kvaerno3",
    "Kvaerno5",
    "Method",
    "integrate",
]
