"""A serial optimizer on the root, with the other ranks as workers that evaluate for it."""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpigrad.autodiff import Loss, jvp, value_and_grad
from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.communicator import (
    BlockingCall,
    Communicator,
    check_rank,
    default_communicator,
    resolve,
)
from mpigrad.guard import count_faults, end_job
from mpigrad.operations import bcast, jit, reduce

__all__ = [
    "Flattening",
    "RootObjective",
    "first_error",
    "pack_error",
    "request",
    "root_objective",
    "shared_evaluation",
    "unpack_error",
]

# ---- Conversion between a pytree of real arrays and the vector that serial optimizers take ----


class Flattening:
    """Convert pytrees of the structure of `example` to vectors of float64, and back.

    Parameters
    ----------
    example
        A pytree of real floating-point arrays.

    Attributes
    ----------
    size
        Length of the vector.
    signature
        Path, shape and dtype of each leaf.
    """

    def __init__(self, example: Any) -> None:
        leaves, self._structure = jax.tree.flatten(example)
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(example)]
        self._shapes = [np.shape(leaf) for leaf in leaves]
        self._dtypes = [jax.dtypes.canonicalize_dtype(jax.numpy.result_type(x)) for x in leaves]
        self.size = sum(math.prod(shape) for shape in self._shapes)
        self.signature = [
            (path, shape, str(dtype))
            for path, shape, dtype in zip(paths, self._shapes, self._dtypes, strict=True)
        ]
        for path, _, dtype in self.signature:
            if not jax.numpy.issubdtype(dtype, jax.numpy.floating):
                raise TypeError(
                    f"root_objective: x0{path} has dtype {dtype}, expected real floating-point "
                    "arrays. Convert integers to floats, and give a complex array as its real and "
                    "imaginary parts."
                )
        if not self.size:
            raise ValueError(
                "root_objective: expected at least one unknown, got x0 without elements. Add one."
            )

    def flat(self, tree: Any, name: str = "the point") -> NDArray[np.float64]:
        """Return the vector of a pytree of the structure of the example, as a new array."""
        leaves, structure = jax.tree.flatten(tree)
        if structure != self._structure or [np.shape(x) for x in leaves] != self._shapes:
            raise ValueError(
                f"root_objective: {name} has another structure than x0 (of {self.size} elements):\n"
                f"  x0: {self._structure} with shapes {self._shapes}\n"
                f"  {name}: {structure} with shapes {[np.shape(x) for x in leaves]}\n"
                "Give a pytree of the structure of x0, or its vector."
            )
        return np.concatenate([np.asarray(x, np.float64).ravel() for x in leaves])

    def tree(self, flat: NDArray[np.float64]) -> Any:
        """Return the pytree of a vector: NumPy arrays with the example's shapes and dtypes."""
        ends = np.cumsum([math.prod(shape) for shape in self._shapes])[:-1]
        parts = zip(np.split(flat, ends), self._shapes, self._dtypes, strict=True)
        return jax.tree.unflatten(
            self._structure, [part.reshape(shape).astype(dtype) for part, shape, dtype in parts]
        )

    def shapes(self) -> Any:
        """Return the pytree of `jax.ShapeDtypeStruct`."""
        kinds = zip(self._shapes, self._dtypes, strict=True)
        return jax.tree.unflatten(
            self._structure, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]
        )


# ---- Messages between a root that runs an optimizer and the worker ranks that evaluate for it


# A rank that failed in an evaluation waits so many seconds for the others to end theirs.
_PATIENCE = 5.0

# An exception for another rank: the exception if it can be pickled, its rank, its traceback.
ErrorMessage = tuple[BaseException, int, str]


def request(
    message: NDArray[np.float64], root: int, comm: Communicator, *, first: bool = False
) -> NDArray[np.float64]:
    """Broadcast a request, or a further part of one, into `message` (collective).

    The root may compute for any time before it sends the `first` part. Workers that wait for it
    leave their processors to the root. The watchdog does not count this waiting as a hang, as long
    as the root can still send.
    """
    if comm.size > 1:
        under_way = comm.mpi.Ibcast(message, root)
        serves = first and comm.rank != root
        with BlockingCall("the optimizer's next request", comm.slot, unlimited=serves):
            _complete(under_way)
    return message


def _complete(under_way: MPI.Request, seconds: float = math.inf) -> bool:
    """Wait without keeping a processor busy. Return False if it takes longer than `seconds`."""
    start = time.monotonic()
    while not under_way.Test():
        waited = time.monotonic() - start
        if waited > seconds:
            return False
        time.sleep(min(waited / 10, 1e-3))
    return True


def first_error(error: Exception | None, comm: Communicator) -> BaseException | None:
    """Return this rank's error of an evaluation, or the error of the lowest rank (collective)."""
    if comm.size == 1:
        return error
    failed, all_ranks = np.array([error is not None]), np.zeros(comm.size, bool)
    under_way = comm.mpi.Iallgather(failed, all_ranks)
    # The others may wait inside the objective for the rank that failed. The watchdog sees no
    # deadlock, so this rank, which knows the cause, ends the job.
    if error is not None and not _complete(under_way, _PATIENCE):
        world = MPI.COMM_WORLD
        end_job(
            "".join(traceback.format_exception(error))
            + f"mpigrad: rank {world.rank} of {world.size} failed in an evaluation of the "
            "objective, in which other ranks wait for it; ending all ranks"
        )
    with BlockingCall("the end of an evaluation", comm.slot):
        _complete(under_way)
    if not all_ranks.any():
        return None
    messages = comm.mpi.allgather(None if error is None else pack_error(error, comm))
    first = next(message for message in messages if message is not None)
    return error or unpack_error(first, "an evaluation of the objective failed")


@contextlib.contextmanager
def shared_evaluation(comm: Communicator) -> Iterator[None]:
    """Raise an error of this block on all ranks. The block may send messages (collective).

    If other ranks wait inside the block for a rank that has failed, the job ends.
    """
    error: BaseException | None = None
    try:
        yield
    except Exception as raised:
        error = first_error(raised, comm)
    else:
        error = first_error(None, comm)
    if error is not None:
        raise error


def pack_error(error: BaseException, comm: Communicator) -> ErrorMessage:
    """Return an error in a form that can be sent."""
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return error, comm.rank, text


def unpack_error(message: ErrorMessage, what: str) -> BaseException:
    """Return an error received from another rank, with its traceback as a note."""
    error, rank, text = message
    error.add_note(f"mpigrad: {what}, on rank {rank}:\n{text}")
    return error


# ---- A serial optimizer on the root, with the other ranks as workers that evaluate for it ----


Point = Any  # a pytree of the structure of x0, or its vector


class _Request(enum.IntEnum):
    """A request of the root to the workers: the first number of each message."""

    LEAVE = 0
    FAIL = 1
    VALUE = 2
    GRADIENT = 3  # and value
    PRODUCT = 4  # of Hessian and vector


def root_objective(
    f: Callable[[Any], Any] | None,
    x0: Any,
    *,
    loss: Loss = "share",
    value_and_grad: Callable[[Any], tuple[Any, Any]] | None = None,
    root: int = 0,
    comm: Communicator | None = None,
) -> RootObjective:
    """Run a serial optimizer on the root while the other ranks evaluate for it (collective).

    Use it in a `with` statement. On the root the body runs the optimizer. The other ranks are
    workers: they evaluate until the root has left its block, and then enter theirs.

    Parameters
    ----------
    f
        Function of the unknowns, which every rank calls at the same point. It is compiled.
    x0
        The first point: a pytree of real arrays with the same structure on every rank. The values
        of the root are used.
    loss
        "share": the objective is the sum over ranks of the values that f returns. "replicated": f
        returns it on every rank.
    value_and_grad
        x -> (global value, gradient), used instead of f. It may be any Python function and is not
        compiled. f may be None.
    root
        The rank that runs the optimizer.
    comm
        The ranks that evaluate. Default: the default communicator.

    Returns
    -------
    RootObjective
        The context manager.

    Raises
    ------
    ValueError, TypeError
        On every rank, if the unknowns differ in structure between ranks, or are not real.

    Examples
    --------
    >>> import numpy as np
    >>> import scipy.optimize
    >>> from mpigrad import optimize
    >>> def loss(x):
    ...     return ((x - 2.0) ** 2).sum()
    >>> with optimize.root_objective(loss, np.zeros(2), loss="replicated") as objective:
    ...     if objective:  # on the root
    ...         objective.result = scipy.optimize.minimize(
    ...             objective.value_and_gradient, objective.x0, jac=True
    ...         )
    >>> print(objective.result.x.round(3))  # on every rank
    [2. 2.]
    """
    if f is None and value_and_grad is None:
        raise TypeError("root_objective: f and value_and_grad are both None. Give one of them.")
    comm = resolve(comm)
    return RootObjective(
        _programs(f, value_and_grad, loss, comm), x0, check_rank(root, comm, "root"), comm
    )


def _programs(
    f: Callable[[Any], Any] | None,
    rule: Callable[[Any], tuple[Any, Any]] | None,
    loss: Loss,
    comm: Communicator,
) -> dict[_Request, Callable[..., Any]]:
    """Return the function that every rank runs for each request."""
    both = rule or value_and_grad(f, loss=loss, replicated=0, comm=comm)  # type: ignore[arg-type]

    def value(x: Any) -> Any:
        if f is None:
            return both(x)[0]
        share = f(x)
        return share if loss == "replicated" else bcast(reduce(share, root=0, comm=comm), 0, comm)

    def product(x: Any, p: Any) -> Any:
        return jvp(lambda y: both(y)[1], (x,), (p,))[1]  # forward over reverse

    return {
        _Request.VALUE: value if f is None else jit(value),
        _Request.GRADIENT: rule or jit(both),
        _Request.PRODUCT: jit(product),
    }


class RootObjective:
    """The objective of a serial optimizer on the root, with NumPy arguments and results.

    `root_objective` returns it. It is true on the root and false on the workers.

    Points are pytrees of the structure of x0 or their vectors, and a gradient has the form of its
    point. The value and gradient of the last point are cached. If you need both, call
    `value_and_gradient`, because `value` does not compute the gradient. Values that are not finite
    are returned as they are.

    An error in an evaluation on any rank is raised on the root only, with the traceback of that
    rank. The optimizer may catch it and continue. If it does not, the error is raised on all ranks.

    Attributes
    ----------
    x0
        The first point as a vector of float64.
    result
        Set it on the root. After the block every rank has it. None before.
    evaluations
        Count of evaluations of the objective: of its value, its gradient or both at a point.

    Examples
    --------
    >>> import numpy as np
    >>> from mpigrad import optimize
    >>> def loss(x):
    ...     return (x["a"] ** 2).sum()
    >>> with optimize.root_objective(loss, {"a": np.ones(2)}, loss="replicated") as objective:
    ...     if objective:  # on the root
    ...         print(objective.value(objective.x0), objective.gradient({"a": np.ones(2)}))
    2.0 {'a': array([2., 2.], dtype=float32)}
    """

    def __init__(
        self, programs: dict[_Request, Callable[..., Any]], x0: Any, root: int, comm: Communicator
    ) -> None:
        self._programs, self._root, self._comm = programs, root, comm
        self._home = default_communicator()
        with raise_on_all_ranks(comm):
            self._form = Flattening(x0)
        assert_same_on_all_ranks(
            comm, self._form.signature, "root_objective: x0's leaves, shapes and dtypes"
        )
        self.x0 = comm.mpi.bcast(self._form.flat(x0), root)
        self.result: Any = None
        self.evaluations = 0
        self._cache: tuple[bytes, float, NDArray[np.float64] | None] = (b"", math.nan, None)
        self._open = False
        self._evaluating = False
        self._faults = 0

    def __bool__(self) -> bool:
        return self._comm.rank == self._root

    # ---- requests of the root ----

    def value(self, x: Point) -> float:
        """Return the objective at x."""
        flat = self._flat(x)
        if self._cache[0] != flat.tobytes():
            self._cache = (flat.tobytes(), self._request(_Request.VALUE, flat), None)
        return self._cache[1]

    def value_and_gradient(self, x: Point) -> tuple[float, Any]:
        """Return the objective and its gradient at x, in one evaluation."""
        flat = self._flat(x)
        if self._cache[0] != flat.tobytes() or self._cache[2] is None:
            value, gradient = self._request(_Request.GRADIENT, flat)
            self._cache = (flat.tobytes(), value, gradient)
        _, value, gradient = self._cache
        assert gradient is not None
        return value, self._like(x, gradient)

    def gradient(self, x: Point) -> Any:
        """Return the gradient at x."""
        return self.value_and_gradient(x)[1]

    def hessp(self, x: Point, p: Point) -> Any:
        """Return the Hessian at x times p, in the form of p."""
        return self._like(p, self._request(_Request.PRODUCT, self._flat(x), self._flat(p)))

    def hessian(self, x: Point) -> NDArray[np.float64]:
        """Return the Hessian at x, of shape (n, n), by n products."""
        flat = self._flat(x)
        return np.stack([self.hessp(flat, column) for column in np.eye(self._form.size)])

    @functools.cached_property
    def function(self) -> Callable[[Any], jax.Array]:
        """The objective as a JAX function of a pytree, for optimizers that trace it.

        It can be compiled, and differentiated once in reverse mode. It runs on the root and sends
        requests to the workers from inside the compiled program.
        """
        home, shapes = self._home, self._form.shapes()
        scalar = jax.ShapeDtypeStruct((), jnp.result_type(*jax.tree.leaves(shapes)))

        def host_value(x: Any) -> Any:
            return np.asarray(self.value(self._form.flat(x)), scalar.dtype)

        def host_both(x: Any) -> Any:
            value, gradient = self.value_and_gradient(self._form.flat(x))
            return np.asarray(value, scalar.dtype), self._form.tree(gradient)

        def ask(host: Callable[[Any], Any], result: Any, x: Any) -> Any:
            def here(x: Any) -> Any:  # JAX may call it in a thread outside of `with comm:`
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
            return flat.copy()  # optimizers may change it in place
        return self._form.tree(flat)

    # ---- the block ----

    def __enter__(self) -> Self:
        self._open = True
        self._faults = count_faults()
        if not self:
            try:
                self._work()
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
            failure = TypeError(
                f"root_objective: the result of type {name} cannot be sent to the other ranks "
                f"({cause}). Set objective.result to an object that can be pickled."
            )
            self._fail(failure)
            raise failure from cause
        self._send(_Request.LEAVE)
        self._comm.mpi.bcast(message, self._root)

    def _fail(self, error: BaseException) -> None:
        """Raise the root's error on the other ranks."""
        # A worker that is still in an evaluation, or has an error of the guard, reads no request.
        if not self._evaluating and self._faults == count_faults():
            self._send(_Request.FAIL)
            self._comm.mpi.bcast(pickle.dumps(pack_error(error, self._comm)), self._root)

    def _work(self) -> None:
        """Compute the root's requests until it leaves its block."""
        while True:
            head = request(np.empty(1 + self._form.size), self._root, self._comm, first=True)
            ask, operands = _Request(int(head[0])), [head[1:]]
            if ask is _Request.PRODUCT:
                operands.append(request(np.empty(self._form.size), self._root, self._comm))
            if ask in self._programs:
                self._evaluate(ask, operands)  # the root handles errors
                continue
            message = pickle.loads(self._comm.mpi.bcast(None, self._root))
            if ask is _Request.FAIL:
                raise unpack_error(message, "the optimizer failed that this rank evaluated for")
            self.result = message
            return

    # ---- messages ----

    def _request(self, ask: _Request, *operands: NDArray[np.float64]) -> Any:
        if not self._open:
            raise RuntimeError(
                f"root_objective: rank {self._comm.rank} called the objective "
                + (
                    "after its `with` block, when the other ranks no longer evaluate. Call it "
                    "inside the block."
                    if self
                    else f"but only rank {self._root} may call it. Write `if objective:` around "
                    "the optimizer."
                )
            )
        self._send(ask, *operands)
        out, error = self._evaluate(ask, operands)
        if error is not None:
            raise error
        if ask is _Request.PRODUCT:
            return self._form.flat(out, "the product")
        self.evaluations += 1
        return (
            float(out)
            if ask is _Request.VALUE
            else (float(out[0]), self._form.flat(out[1], "the gradient"))
        )

    def _send(self, ask: _Request, *operands: NDArray[np.float64]) -> None:
        first, *others = operands or (np.zeros(self._form.size),)
        request(np.concatenate([[float(ask)], first]), self._root, self._comm, first=True)
        for operand in others:
            request(operand, self._root, self._comm)

    def _evaluate(
        self, ask: _Request, operands: Sequence[NDArray[np.float64]]
    ) -> tuple[Any, BaseException | None]:
        """Return this rank's result, and the error if some rank had one."""
        out, error = None, None
        self._evaluating = True
        try:
            trees = [self._form.tree(operand) for operand in operands]
            out = jax.block_until_ready(self._programs[ask](*trees))
        except Exception as raised:
            error = raised
        error = first_error(error, self._comm)
        self._evaluating, self._faults = False, count_faults()
        return out, error
