"""The native sums of products, compared with the same in JAX."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from helpers import close
from mpigrad.sparse import Matrix, Pattern
from mpigrad.sparse.matrix.multilinear import (
    FIRST,
    LAST,
    POOL,
    TrilinearContraction,
    _reference,
    contract,
    contract_p,
    count_contractions,
    multiply_patterns,
)

generator = np.random.default_rng(0)


def structures():
    starts = np.array([0, 3, 3, 5, 9])
    position = np.array([0, 2, 6, 1, 5, 0, 3, 4, 6])
    yield TrilinearContraction.matrix(starts, position, 7, None)
    yield TrilinearContraction.matrix(starts, position, 7, generator.permutation(9))
    for steps, n_pool in (((0, 2, 4), 20), ((3, 1), 15)):  # runs of rows as a stencil's, after two
        rows = [[5], [0, 3], *(np.array(steps) + i for i in range(12))]
        starts = np.cumsum([0, *(len(row) for row in rows)])
        yield TrilinearContraction.matrix(starts, np.concatenate(rows), n_pool, None)
    pool_starts, columns = np.array([0, 2, 2, 4, 5]), np.array([0, 3, 1, 3, 2])
    row = np.array([0, 2, 1, 3, 0])
    product_starts, found, target = multiply_patterns(
        np.array([0, 2, 4, 5]), row, pool_starts, columns
    )
    np.testing.assert_array_equal(product_starts, [0, 3, 4, 6])
    np.testing.assert_array_equal(found, [0, 1, 3, 2, 0, 3])
    np.testing.assert_array_equal(target, [0, 2, 1, 2, 3, 4, 5])
    yield TrilinearContraction.pairs(row, None, pool_starts, target, 6)
    yield TrilinearContraction.pairs(row, generator.permutation(5), pool_starts, target, 6)
    yield TrilinearContraction.selection(np.array([3, -1, 0, 4, 3]), 5)


def summed(structure, out, split, operands):
    """The derivative in `out`, meeting after meeting, by NumPy."""
    meetings, rest = structure.handle.meetings(), iter(operands)
    batches = max(x.shape[0] for x in operands)
    product = np.ones(())
    for role in structure.handle.others(out):
        x = np.concatenate([next(rest), next(rest)], axis=1) if role == POOL else next(rest)
        padding = np.zeros((x.shape[0], 1, x.shape[2]))  # what no entry of a selection reads
        product = product * np.concatenate([x, padding], axis=1)[:, meetings[role]]
    product = product.sum(2, keepdims=True) if out == FIRST else product
    total = np.zeros((batches, structure.sizes[out] + 1, product.shape[2]), product.dtype)
    for b in range(batches):
        np.add.at(total[b], meetings[out], product[b % len(product)])
    total = total[:, :-1]
    return [total[:, :split], total[:, split:]] if out == POOL else [total]


def derivatives(dtype):
    """Each derivative: with and without entries of other ranks, columns, batches, shared operands.

    Yields parameters, operands and what NumPy makes of them.
    """
    for structure in structures():
        for out in (FIRST, POOL, LAST):
            roles = structure.handle.others(out)
            if out == FIRST and structure.handle.kind == 2:  # a selection has no `first`
                continue
            for several, wide, batches in ((False, 1, 1), (True, 1, 3), (True, 3, 3)):
                pairs = structure.handle.kind == 1  # rows of the pool lie in one part each
                width, rest = 1 if pairs else wide, several * (1 if pairs else 2)
                split = structure.sizes[POOL] - rest
                given = []
                for k, role in enumerate(roles):
                    n = structure.sizes[role]
                    for length in (split, rest) if role == POOL else (n,):
                        shape = (1 if k == 0 else batches, length, 1 if role == FIRST else width)
                        x = generator.standard_normal((2, *shape))
                        x = x[0] + 1j * x[1] if dtype.startswith("complex") else x[0]
                        given.append(x.astype(dtype))
                expected = summed(structure, out, split, given)
                yield {"structure": structure.handle, "out": out, "split": split}, given, expected


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_native(dtype):
    cases, operands, expected = zip(*derivatives(dtype), strict=True)

    @jax.jit
    def program(operands):
        programs = zip(cases, operands, strict=True)
        return [contract_p.bind(*given, **case) for case, given in programs]

    got = program(operands)
    assert len(cases) == 60
    assert str(got[0][0].dtype) == dtype
    close(got, expected, 1e-5 if dtype in ("float32", "complex64") else 1e-13)


@pytest.mark.full("it evaluates sixty cases outside jit")
@pytest.mark.ranks(1)
def test_reference():
    """The JAX version, for devices without the native kernels."""
    for case, given, expected in derivatives("float64"):
        close(_reference(*map(jnp.asarray, given), **case), expected, 1e-13)


@pytest.mark.ranks(1)
def test_other_dtypes_take_the_reference():
    structure = next(structures())
    x, v = jnp.arange(7, dtype="bfloat16"), jnp.ones(9, "bfloat16")
    y = contract(structure, v, x)
    assert y.dtype == jnp.bfloat16
    close(y.astype("float32"), np.array([8, 0, 6, 13], "float32"))


@pytest.mark.ranks(1)
def test_without_jit():
    structure = next(structures())
    v, x = jnp.ones(9), jnp.arange(7.0)
    with jax.disable_jit():
        close(contract(structure, v, x), np.array([8.0, 0, 6, 13]))
        close(
            jax.grad(lambda x: contract(structure, v, x).sum())(x),
            np.array([2, 1, 1, 1, 1, 1, 2.0]),
        )


@pytest.mark.ranks(1)
def test_pool_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"6 own entries and 0 ghosts, but the pattern has 7"):
        contract(next(structures()), jnp.ones(9), jnp.ones(6))


def make_and_use_a_pattern(comm):
    rows = np.arange(3) + 3 * comm.rank
    pattern = Pattern.from_coo(rows, rows, 3, comm)
    A = Matrix(pattern, jnp.ones(3))
    A @ A.diagonal()
    mg.grad(lambda v: jnp.sum(((A + Matrix(pattern, v).T) @ A @ A.diagonal()) ** 2))(A.values)
    mg.jit(lambda v: Matrix(pattern, v) @ v)(A.values)
    return count_contractions()


@pytest.mark.thin(1)
def test_structures_go_with_their_pattern(comm):
    gc.collect()
    before = count_contractions()
    assert make_and_use_a_pattern(comm) > before
    gc.collect()
    assert count_contractions() <= before  # those of earlier tests may go now, too
