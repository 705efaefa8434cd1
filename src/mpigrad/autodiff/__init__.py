"""Derivatives of programs with messages: transformations, custom rules, Jacobians and checks."""

from mpigrad.autodiff.custom_rules import custom_jvp, custom_vjp
from mpigrad.autodiff.gradient_checks import DotTest, dot_test, taylor_test
from mpigrad.autodiff.jacobian import jacobian
from mpigrad.autodiff.transforms import Loss, grad, jvp, linearize, value_and_grad, vjp, vmap

__all__ = [
    "DotTest",
    "Loss",
    "custom_jvp",
    "custom_vjp",
    "dot_test",
    "grad",
    "jacobian",
    "jvp",
    "linearize",
    "taylor_test",
    "value_and_grad",
    "vjp",
    "vmap",
]
