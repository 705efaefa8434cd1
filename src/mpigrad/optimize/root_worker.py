"""Any serial optimizer on the root, while the other ranks compute their parts of the objective."""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mpigrad.autodiff.transforms import Loss, jvp, value_and_grad
from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.communicator import Communicator, check_rank, default_communicator, resolve
from mpigrad.guard.failure import current_board
from mpigrad.operations.collectives import bcast, reduce
from mpigrad.operations.jit import jit
from mpigrad.optimize.flattening import Flattening
from mpigrad.optimize.root_protocol import agree, parcel, request, unpacked

__all__ = ["Served", "root_driven"]

Point = Any  # a pytree like x0, or the vector of its numbers


class _Ask(enum.IntEnum):
    """What the root wants of the other ranks: the first number of each request."""

    LEAVE = 0
    FAIL = 1
    VALUE = 2
    GRADIENT = 3  # and value
    PRODUCT = 4  # of Hessian and vector


def root_driven(
    f: Callable[[Any], Any] | None,
    x0: Any,
    *,
    loss: Loss = "share",
    value_and_grad: Callable[[Any], tuple[Any, Any]] | None = None,
    root: int = 0,
    comm: Communicator | None = None,
) -> Served:
    """Let an optimizer that knows nothing of MPI run on the root (collective).

    >>> with optimize.root_driven(f, x0) as objective:  # doctest: +SKIP
    ...     if objective:  # on the root; the other ranks serve until it leaves the block
    ...         objective.result = scipy.optimize.minimize(
    ...             objective.value_and_gradient, objective.x0, jac=True
    ...         )
    >>> objective.result.x  # doctest: +SKIP

    The other ranks enter their block when the root has left it.

    Parameters
    ----------
    f
        Function of the unknowns, which every rank calls at the same point. It is compiled.
    x0
        Unknowns: a pytree of real arrays, of the same structure on every rank. The root's count.
    loss
        "share": the objective is the sum over ranks of what `f` returns; "replicated": `f` returns
        it on every rank.
    value_and_grad
        Instead of compiling `f`: a function that gives the global value and its gradient, called
        as it is; may be any Python. `f` may then be None.
    root
        The rank whose optimizer it is.
    comm
        The ranks; by default all of the default communicator.

    Returns
    -------
    A `Served`, for `with`.

    Raises
    ------
    ValueError, TypeError
        On every rank, where the ranks' unknowns differ in structure, or are not real.
    """
    if f is None and value_and_grad is None:
        raise TypeError("root_driven needs f, or value_and_grad")
    comm = resolve(comm)
    return Served(
        _programs(f, value_and_grad, loss, comm), x0, check_rank(root, comm, "root"), comm
    )


def _programs(
    f: Callable[[Any], Any] | None,
    given: Callable[[Any], tuple[Any, Any]] | None,
    loss: Loss,
    comm: Communicator,
) -> dict[_Ask, Callable[..., Any]]:
    """What every rank runs at each request."""
    both = given or value_and_grad(f, loss=loss, replicated=0, comm=comm)  # type: ignore[arg-type]

    def value(x: Any) -> Any:
        if f is None:
            return both(x)[0]
        own = f(x)
        return own if loss == "replicated" else bcast(reduce(own, root=0, comm=comm), 0, comm)

    def product(x: Any, p: Any) -> Any:
        return jvp(lambda y: both(y)[1], (x,), (p,))[1]  # forward over reverse

    return {
        _Ask.VALUE: value if f is None else jit(value),
        _Ask.GRADIENT: given or jit(both),
        _Ask.PRODUCT: jit(product),
    }


class Served:
    """The objective as the root's optimizer sees it: NumPy in, NumPy out.

    True on the root, false on the other ranks. Points are pytrees like x0 or vectors of their
    numbers, and gradients have the form of their point. The last point's value and gradient are
    remembered, so that asking for one after the other costs one evaluation; ask for both at once
    where both are wanted, since a value alone is computed without its gradient. What is not finite
    is handed on as it is. An error in an evaluation, on any rank, is raised on the root alone, with
    its place: an optimizer that survives it may go on, and one that doesn't takes all ranks along.

    Attributes
    ----------
    x0
        The vector of the unknowns' numbers, of float64.
    result
        None, or what the root has put here, which every rank has after the block.
    evaluations
        How often the objective has been computed: value or gradient or both at a point.
    """

    def __init__(
        self, programs: dict[_Ask, Callable[..., Any]], x0: Any, root: int, comm: Communicator
    ) -> None:
        self._programs, self._root, self._comm = programs, root, comm
        self._home = default_communicator()
        with raise_on_all_ranks(comm):
            self._form = Flattening(x0)
        assert_same_on_all_ranks(comm, self._form.signature, "x0's leaves, shapes and dtypes")
        self.x0 = comm.mpi.bcast(self._form.flat(x0), root)
        self.result: Any = None
        self.evaluations = 0
        self._memory: tuple[bytes, float, NDArray[np.float64] | None] = (b"", math.nan, None)
        self._open = False
        self._evaluating = False
        self._faults = 0

    def __bool__(self) -> bool:
        return self._comm.rank == self._root

    # ---- what the root asks for ----

    def value(self, x: Point) -> float:
        """The objective at x."""
        flat = self._flat(x)
        if self._memory[0] != flat.tobytes():
            self._memory = (flat.tobytes(), self._request(_Ask.VALUE, flat), None)
        return self._memory[1]

    def value_and_gradient(self, x: Point) -> tuple[float, Any]:
        """The objective and its gradient at x, in one pass."""
        flat = self._flat(x)
        if self._memory[0] != flat.tobytes() or self._memory[2] is None:
            value, gradient = self._request(_Ask.GRADIENT, flat)
            self._memory = (flat.tobytes(), value, gradient)
        _, value, gradient = self._memory
        assert gradient is not None
        return value, self._like(x, gradient)

    def gradient(self, x: Point) -> Any:
        """The gradient at x."""
        return self.value_and_gradient(x)[1]

    def hessp(self, x: Point, p: Point) -> Any:
        """The Hessian at x times p, of p's form."""
        return self._like(p, self._request(_Ask.PRODUCT, self._flat(x), self._flat(p)))

    def hessian(self, x: Point) -> NDArray[np.float64]:
        """The matrix of second derivatives at x, of shape (n, n): n products."""
        flat = self._flat(x)
        return np.stack([self.hessp(flat, column) for column in np.eye(self._form.size)])

    @functools.cached_property
    def function(self) -> Callable[[Any], jax.Array]:
        """The objective as a JAX function of a pytree like x0, for optimizers that trace it.

        It can be compiled and differentiated once, in reverse. It runs on the root, and asks the
        other ranks from inside the compiled program.
        """
        home, shapes = self._home, self._form.shapes()
        scalar = jax.ShapeDtypeStruct((), jnp.result_type(*jax.tree.leaves(shapes)))

        def host_value(x: Any) -> Any:
            return np.asarray(self.value(self._form.flat(x)), scalar.dtype)

        def host_both(x: Any) -> Any:
            value, gradient = self.value_and_gradient(self._form.flat(x))
            return np.asarray(value, scalar.dtype), self._form.tree(gradient)

        def ask(host: Callable[[Any], Any], result: Any, x: Any) -> Any:
            def here(x: Any) -> Any:  # JAX may call it in a thread that is in no `with comm:`
                with contextlib.nullcontext() if default_communicator() is home else home:
                    return host(x)

            return jax.pure_callback(here, result, x, vmap_method="sequential")

        @jax.custom_vjp
        def objective(x: Any) -> Any:
            return ask(host_value, scalar, x)

        objective.defvjp(
            lambda x: ask(host_both, (scalar, shapes), x),
            lambda gradient, seed: (jax.tree.map(lambda g: (seed * g).astype(g.dtype), gradient),),
        )
        return objective

    def _flat(self, x: Point) -> NDArray[np.float64]:
        if isinstance(x, (np.ndarray, jax.Array)) and x.shape == (self._form.size,):
            return np.array(x, np.float64)
        return self._form.flat(x)

    def _like(self, x: Point, flat: NDArray[np.float64]) -> Any:
        if isinstance(x, (np.ndarray, jax.Array)) and x.shape == flat.shape:
            return flat.copy()  # optimizers work in place
        return self._form.tree(flat)

    # ---- the block ----

    def __enter__(self) -> Self:
        self._open = True
        self._faults = _faults()
        if not self:
            try:
                self._serve()
            finally:
                self._open = False
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self:
            return
        self._open = False
        if error is not None:
            self._fail(error)
            return
        try:
            message = pickle.dumps(self.result)
        except Exception as cause:
            name = type(self.result).__name__
            unfit = TypeError(f"a result of {name} can't be sent to the other ranks: {cause}")
            self._fail(unfit)
            raise unfit from cause
        self._send(_Ask.LEAVE)
        self._comm.mpi.bcast(message, self._root)

    def _fail(self, error: BaseException) -> None:
        """Let the other ranks raise the root's error."""
        # Who is still in an evaluation, or has been told by the guard, hears no request.
        if not self._evaluating and self._faults == _faults():
            self._send(_Ask.FAIL)
            self._comm.mpi.bcast(pickle.dumps(parcel(error, self._comm)), self._root)

    def _serve(self) -> None:
        """Until the root leaves: compute what it asks for."""
        while True:
            head = request(np.empty(1 + self._form.size), self._root, self._comm, first=True)
            ask, operands = _Ask(int(head[0])), [head[1:]]
            if ask is _Ask.PRODUCT:
                operands.append(request(np.empty(self._form.size), self._root, self._comm))
            if ask in self._programs:
                self._evaluate(ask, operands)  # what becomes of an error, the root decides
                continue
            message = pickle.loads(self._comm.mpi.bcast(None, self._root))
            if ask is _Ask.FAIL:
                raise unpacked(message, "the optimizer that this rank served failed")
            self.result = message
            return

    # ---- requests ----

    def _request(self, ask: _Ask, *operands: NDArray[np.float64]) -> Any:
        if not self._open:
            raise RuntimeError(
                f"rank {self._comm.rank}: the objective is asked "
                + (
                    "after its block: the other ranks serve inside `with` only"
                    if self
                    else f"on a rank that serves: only rank {self._root} asks; "
                    "write `if objective:` around its optimizer"
                )
            )
        self._send(ask, *operands)
        out, error = self._evaluate(ask, operands)
        if error is not None:
            raise error
        if ask is _Ask.PRODUCT:
            return self._form.flat(out, "the product")
        self.evaluations += 1
        return (
            float(out)
            if ask is _Ask.VALUE
            else (float(out[0]), self._form.flat(out[1], "the gradient"))
        )

    def _send(self, ask: _Ask, *operands: NDArray[np.float64]) -> None:
        first, *others = operands or (np.zeros(self._form.size),)
        request(np.concatenate([[float(ask)], first]), self._root, self._comm, first=True)
        for operand in others:
            request(operand, self._root, self._comm)

    def _evaluate(
        self, ask: _Ask, operands: Sequence[NDArray[np.float64]]
    ) -> tuple[Any, BaseException | None]:
        """This rank's result, and the error that some rank had."""
        out, error = None, None
        self._evaluating = True
        try:
            trees = [self._form.tree(operand) for operand in operands]
            out = jax.block_until_ready(self._programs[ask](*trees))
        except Exception as raised:
            error = raised
        error = agree(error, self._comm)
        self._evaluating, self._faults = False, _faults()
        return out, error


def _faults() -> int:
    """How many verdicts the guard has raised on several ranks."""
    return int(current_board().header["faults"])
