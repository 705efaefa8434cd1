"""First guesses of a solve from the solutions of earlier solves."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.solution import Result

__all__ = ["Guesses", "first_guess", "next_vectors", "pass_guesses"]


@jax.tree_util.register_pytree_with_keys_class
class Guesses:
    """The solutions of the last solves, from which the next solve takes its first guess.

    Give them to `solve` as `x0`, and take `solution.state` for the next solve. The right-hand side
    is approximated by those of the earlier solves, by least squares, and the first guess is the
    same combination of their solutions. For a matrix that stays the same, this guess has the
    smallest residual in the span of the earlier solutions (Fischer 1998). If only the matrix
    changes, it is the last solution. It costs one small sum over ranks, and no product with A. The
    number of iterations changes, and the solution does not, within the tolerance of the solver.

    In reverse mode the adjoint solves do the same among themselves: the cotangent of the guesses
    holds the last adjoint solutions, and goes from solve to solve backwards. So a gradient with
    respect to guesses is not a derivative. No derivative is taken through `vectors`, neither of the
    arrays from which guesses are made, nor of what is computed from them.

    Parameters
    ----------
    vectors
        The solutions, the last one first, and then their right-hand sides: an array of shape
        (2 keep, ...) with the shape of b, or a pytree of such arrays if b is a pytree. Zeros are
        places that are still free.

    Attributes
    ----------
    vectors
        The same.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.sparse import GMRES, Guesses, solve
    >>> A = lambda v: jnp.array([2 * v[0] + v[1], 2 * v[1]])
    >>> b, solver = jnp.array([3.0, 2.0]), GMRES(rtol=1e-4)
    >>> first = solve(A, b, solver, x0=Guesses.empty(b, keep=2))
    >>> second = solve(A, 2 * b, solver, x0=first.state)
    >>> int(first.stats["num_steps"]), int(second.stats["num_steps"])
    (2, 0)
    """

    # Its leaves have cotangents that are guesses, so they are hidden from the user's arithmetic.
    _vectors: Any

    def __init__(self, vectors: Any) -> None:
        self._vectors = jax.tree.map(lambda v: jax.lax.stop_gradient(jnp.asarray(v)), vectors)

    def __repr__(self) -> str:
        """Return the type with the vectors."""
        return f"Guesses(vectors={self._vectors!r})"

    @property
    def vectors(self) -> Any:
        return jax.tree.map(jax.lax.stop_gradient, self._vectors)

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        """Return the vectors and their name, for JAX."""
        return ((jax.tree_util.GetAttrKey("vectors"), self._vectors),), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Guesses:
        """Make guesses whose vectors stay active, for JAX and for `solve`."""
        guesses = object.__new__(cls)
        (guesses._vectors,) = children
        return guesses

    @classmethod
    def empty(cls, b: Any, keep: int = 5) -> Guesses:
        """Make guesses without solutions.

        Parameters
        ----------
        b
            A right-hand side, or an array or pytree of its shapes and dtype.
        keep
            The number of solutions that are kept, at least 1.

        Raises
        ------
        ValueError
            If `keep` is below 1.

        Examples
        --------
        >>> import jax.numpy as jnp
        >>> from mpigrad.sparse import Guesses
        >>> Guesses.empty(jnp.ones(4), keep=3).vectors.shape
        (6, 4)
        """
        if operator.index(keep) < 1:
            raise ValueError(
                f"Guesses: keep must be at least 1, got {keep}. Leave out x0 to keep no solutions."
            )
        return cls(jax.tree.map(lambda leaf: _zeros(keep, leaf), b))

    def check(self, b: Any, dtype: Any) -> None:
        """Raise an error unless these are guesses for the right-hand side b and this dtype."""

        def expected(leaf: Any) -> str:
            return f"{jnp.dtype(dtype).name}[2 keep, {', '.join(map(str, jnp.shape(leaf)))}]"

        def fits(vectors: Any, leaf: Any) -> bool:
            shape = jnp.shape(vectors)
            right = len(shape) == jnp.ndim(leaf) + 1 and shape[1:] == jnp.shape(leaf)
            return (
                right and shape[0] > 0 and shape[0] % 2 == 0 and jnp.result_type(vectors) == dtype
            )

        same = jax.tree.structure(self._vectors) == jax.tree.structure(b)
        if not (same and all(jax.tree.leaves(jax.tree.map(fits, self._vectors, b)))):
            types = jax.tree.map(
                lambda v: f"{jnp.result_type(v)}{list(jnp.shape(v))}", self._vectors
            )
            raise ValueError(
                f"solve: the guesses in x0 must have vectors {jax.tree.map(expected, b)}, got "
                f"{types}. Make them with Guesses.empty(b), of a b with the dtype of A x."
            )


def _zeros(keep: int, leaf: Any) -> jax.Array:
    return jnp.zeros((2 * keep, *jnp.shape(leaf)), jnp.result_type(leaf))


# ---- in the primitives ----


def first_guess(
    sums: Callable[[jax.Array], jax.Array], vectors: jax.Array, b: jax.Array
) -> jax.Array:
    """Return the combination of earlier solutions that solves for the nearest b (collective).

    Parameters
    ----------
    sums
        The function that adds arrays up over ranks.
    vectors
        The solutions and then their right-hand sides, the last ones first, shape (2 k, n).
    """
    # Successive right-hand sides are almost parallel. Their differences are far less so.
    pairs = vectors.reshape(2, len(vectors) // 2, len(b))
    solutions, sides = jnp.concatenate([pairs[:, :1], pairs[:, 1:] - pairs[:, :-1]], axis=1)
    gram = sums(sides.conj() @ jnp.concatenate([sides, b[None]]).T)
    gram, target = gram[:, :-1], gram[:, -1]
    # Differences and directions that are lost in rounding errors are left out.
    least = 100 * len(sides) * jnp.finfo(b.dtype).eps
    sizes = jnp.sqrt(jnp.diagonal(gram).real)
    scale = _inverse(sizes, least * jnp.max(sizes))
    squares, directions = jnp.linalg.eigh(scale[:, None] * gram * scale)
    weights = directions @ (_inverse(squares, least) * (directions.conj().T @ (scale * target)))
    return jnp.tensordot(scale * weights, solutions, 1).astype(b.dtype)


def _inverse(numbers: jax.Array, least: Any) -> jax.Array:
    """Return 1 / numbers, or zero for numbers that are not above `least`."""
    return jnp.where(numbers > least, 1 / jnp.where(numbers > least, numbers, 1), 0)


def next_vectors(vectors: jax.Array, x: jax.Array, b: jax.Array, result: jax.Array) -> jax.Array:
    """Return vectors with the solution x of b in front, if the solve was successful."""
    solutions, sides = vectors.reshape(2, len(vectors) // 2, len(b))
    parts = [x[None], solutions[:-1], b[None], sides[:-1]]
    return jnp.where(result == Result.SUCCESSFUL, jnp.concatenate(parts), vectors)


# ---- from one gradient to the next ----


def pass_guesses(loss: Any, after: Any, adjoint: Any) -> Any:
    """Return the loss, and give the adjoint solves of its gradient guesses of an earlier gradient.

    The adjoint solves start from `adjoint`, and the gradient with respect to the guesses that the
    function was called with are the guesses for the next gradient. `minimize(..., guesses=...)`
    does this for its optimizers, so only a loop of your own calls it.

    Parameters
    ----------
    loss
        The loss, a scalar.
    after
        The guesses after the last solve: `solution.state`, or a pytree of them.
    adjoint
        Guesses for the adjoint solves, like `after`. `Guesses.empty` for the first gradient, then
        the gradient with respect to the first guesses.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> from mpigrad.sparse import GMRES, Guesses, pass_guesses, solve
    >>> solver = GMRES(rtol=1e-4)
    >>> def loss(k, guesses, adjoint):
    ...     solution = solve(lambda v: k * v, jnp.ones(2), solver, x0=guesses)
    ...     value = jnp.sum(solution.value**2)
    ...     return pass_guesses(value, solution.state, adjoint), solution.state
    >>> gradient = mg.jit(mg.value_and_grad(loss, (0, 1), has_aux=True))
    >>> guesses = adjoint = Guesses.empty(jnp.ones(2))
    >>> for k in (2.0, 2.1):
    ...     (value, guesses), (slope, adjoint) = gradient(k, guesses, adjoint)
    """
    if jax.tree.structure(after) != jax.tree.structure(adjoint):
        raise TypeError(
            f"pass_guesses: adjoint must have the structure of after, {jax.tree.structure(after)}, "
            f"got {jax.tree.structure(adjoint)}. Begin with Guesses.empty."
        )
    return _pass(loss, after, adjoint)


@jax.custom_vjp
def _pass(loss: Any, after: Any, adjoint: Any) -> Any:
    return loss


def _forward(loss: Any, after: Any, adjoint: Any) -> tuple[Any, Any]:
    return loss, adjoint


def _backward(adjoint: Any, ct: Any) -> tuple[Any, Any, Any]:
    return ct, adjoint, jax.tree.map(jnp.zeros_like, adjoint)


_pass.defvjp(_forward, _backward)
