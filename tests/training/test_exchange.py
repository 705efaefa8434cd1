"""Sums over ranks have the order of ranks to the last bit, through memory and by messages."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

from mpigrad.training import exchange as module
from mpigrad.training.exchange import Exchange
from mpigrad.training.flat_buffer import HEADER, FlatBuffer, Memory, Parameter, combine

PARAMETERS = [
    Parameter("a", (7, 3), "float32"),
    Parameter("b", (), "float64"),
    Parameter("c", (40_000,), "float32"),
    Parameter("z", (5,), "complex64"),
    Parameter("none", (0, 2), "float64"),
    Parameter("h", (9,), "bfloat16"),
    Parameter("d", (11,), "float64"),
]


def values(rank: int) -> list[np.ndarray]:
    rng = np.random.default_rng(rank)
    made = [
        rng.standard_normal((2, *p.shape)) * 10.0 ** rng.integers(-3, 3, p.shape)
        for p in PARAMETERS
    ]
    return [
        (m[0] + 1j * m[1] if p.dtype == "complex64" else m[0]).astype(jnp.dtype(p.dtype))
        for m, p in zip(made, PARAMETERS, strict=True)
    ]


def exchanged(exchange: Exchange, flat: FlatBuffer, weights: list[float], mine: list) -> None:
    exchange.begin(weights[exchange.comm.rank])
    order = flat.order if exchange.comm.rank % 2 == 0 else flat.order[::-1]
    for index in order[:-2]:  # the last ones are found missing at the end
        flat.arrays[index][...] = mine[index]
        exchange.ready(index)
    for index in order[-2:]:
        flat.arrays[index][...] = mine[index]
    exchange.finish()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.thin(3)  # two numbers have the same sum in both orders
@pytest.mark.parametrize("by", ["memory", "messages", "both"])
def test_sums_are_those_in_the_order_of_ranks_bit_for_bit(comm, monkeypatch, by):
    plain = Memory.map_all

    def elsewhere(self, comm):
        """Hide memories as if ranks were on other hosts: all ranks, or even and odd ranks."""
        found = plain(self, comm)
        together = (
            (lambda r: r == comm.rank) if by == "messages" else (lambda r: (r - comm.rank) % 2 == 0)
        )
        return [memory if together(rank) else None for rank, memory in enumerate(found)]

    if by != "memory":
        monkeypatch.setattr(Memory, "map_all", elsewhere)
    flat = FlatBuffer(PARAMETERS, [3, 1, 0, 2, 6, 5, 4])
    exchange = Exchange(flat, comm, bucket=0.03, first_bucket=1e-4)
    weights = [3.0, 0.5, 2.0, 1.0][: comm.size]
    for step in range(2):
        everybody = [values(rank + 10 * step) for rank in range(comm.size)]
        exchanged(exchange, flat, weights, everybody[comm.rank])
        square = 0.0
        for index, parameter in enumerate(PARAMETERS):
            pieces = [own[index] for own in everybody]
            small = parameter.dtype == "bfloat16"
            total = pieces[0].astype("float32") if small else pieces[0].copy()
            for piece in pieces[1:]:
                total = total + piece.astype(total.dtype)
            total = (total * total.real.dtype.type(1 / sum(weights))).astype(parameter.dtype)
            np.testing.assert_array_equal(flat.arrays[index], total, parameter.name)
            square += float(np.sum(np.abs(total.astype("complex128")) ** 2))
        squares = np.array(comm.mpi.allgather(exchange.square))
        np.testing.assert_allclose(exchange.norm(squares, ""), np.sqrt(square), rtol=1e-5)
    assert not flat.header.any() and len(flat.header) == HEADER
    exchange.close()


@pytest.mark.ranks(1, 2, 3)
def test_errors_name_parameters_that_are_not_finite(comm):
    flat = FlatBuffer(PARAMETERS)
    exchange = Exchange(flat, comm, 0.03, 0.03)
    mine = values(comm.rank)
    culprit = comm.size - 1
    if comm.rank == culprit:
        mine[2][23_456] = np.nan
        mine[6][3] = np.inf
    exchanged(exchange, flat, [1.0] * comm.size, mine)
    squares = np.array(comm.mpi.allgather(exchange.square))
    with pytest.raises(FloatingPointError, match=f"step 7 is not finite: .* rank {culprit}") as e:
        exchange.norm(squares, "step 7 is")
    assert f"c (from rank {culprit})" in str(e.value) and f"d (from rank {culprit})" in str(e.value)
    # Squares may overflow.
    mine = [np.zeros_like(m) for m in values(0)]
    mine[2][5] = 1e30
    exchanged(exchange, flat, [1.0] * comm.size, mine)
    squares = np.array(comm.mpi.allgather(exchange.square))
    assert abs(exchange.norm(squares, "") / 1e30 - 1) < 1e-6
    # But not in float64, in which the norm for clipping is computed.
    mine[6][3] = 1e200
    exchanged(exchange, flat, [1.0] * comm.size, mine)
    squares = np.array(comm.mpi.allgather(exchange.square))
    with pytest.raises(FloatingPointError, match="step 8 is too large: the sum of squares"):
        exchange.norm(squares, "step 8 is")
    exchange.close()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_compressed_sums_are_equal_on_all_ranks_and_nearly_right(comm, dtype):
    flat = FlatBuffer(PARAMETERS)
    exchange = Exchange(flat, comm, 0.03, 0.03, dtype)
    weights = [3.0, 0.5, 2.0][: comm.size]
    everybody = [values(rank) for rank in range(comm.size)]
    # 2000 samples: their sum does not fit into float16, their mean does.
    exchanged(exchange, flat, [2000 * w for w in weights], [2000 * v for v in everybody[comm.rank]])
    total = sum(own[2].astype(float) for own in everybody) / sum(weights)
    error = np.abs(flat.arrays[2] - total)
    scale = sum(np.abs(own[2]) for own in everybody) / sum(weights)
    bound = {"float16": 1e-3, "bfloat16": 1e-2}[dtype] if comm.size > 1 else 1e-6
    assert np.all(error <= 2 * bound * scale + 1e-6)
    assert len(set(comm.mpi.allgather(flat.message.tobytes()))) == 1
    # Numbers that have 16 bits anyway: only they are rounded, the factor is not.
    if comm.size > 1:
        factor = np.float32(1 / (2000 * sum(weights)))
        sent = [(2000 * own[5]).astype("bfloat16").astype("float32") * factor for own in everybody]
        total = np.sum([one.astype("bfloat16").astype("float32") for one in sent], axis=0)
        np.testing.assert_array_equal(flat.arrays[5], total.astype("bfloat16"))
    if comm.size > 1 and dtype == "float16":
        exchanged(exchange, flat, weights, [1e8 * v for v in everybody[comm.rank]])
        squares = np.array(comm.mpi.allgather(exchange.square))
        with pytest.raises(FloatingPointError, match=r"is not finite \(sent as float16\): "):
            exchange.norm(squares, "it is")
    exchange.close()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("unit", [1e-30, 1e25])
def test_squares_that_float32_cannot_hold(unit):
    """A gradient that is not small must not count as zero, nor one that is finite as infinite."""
    pieces = [np.full(100, unit, "float32") for _ in range(2)]
    nonfinite = []
    square = combine(pieces, 1.0, np.empty(100, "float32"), nonfinite=nonfinite)
    assert square == pytest.approx(100 * (2 * unit) ** 2, rel=1e-6) and not nonfinite


@pytest.mark.ranks(1)
def test_combine_adds_in_order_whatever_the_target():
    rng = np.random.default_rng(0)
    pieces = [rng.standard_normal(100_000).astype(np.float32) for _ in range(3)]
    expected = ((pieces[0] + pieces[1]) + pieces[2]) * np.float32(0.3)
    for target in range(3):
        mine = [piece.copy() for piece in pieces]
        square = combine(mine, 0.3, mine[target], [mine[target - 1]])
        np.testing.assert_array_equal(mine[target], expected)
        np.testing.assert_array_equal(mine[target - 1], expected)
        np.testing.assert_allclose(square, np.sum(expected.astype(float) ** 2), rtol=1e-5)
    factors = [0.1, 0.7, 0.2]
    expected = [np.float32(f) * piece for f, piece in zip(factors, pieces, strict=True)]
    out = np.empty_like(pieces[0])
    combine(pieces, 0.3, out, factors=factors)
    np.testing.assert_array_equal(
        out, ((expected[0] + expected[1]) + expected[2]) * np.float32(0.3)
    )


@pytest.mark.ranks(1)
def test_factors_of_16_bit_numbers_are_not_rounded_to_them():
    flat = FlatBuffer([Parameter("h", (200,), "float16"), Parameter("b", (200,), "bfloat16")])
    for array in flat.arrays:
        array[:] = np.linspace(1, 6e4, 200)
    before = [array.astype("float32") for array in flat.arrays]
    flat.multiply(1e-6)  # 1.3e-2 off as a number of float16
    for array, numbers in zip(flat.arrays, before, strict=True):
        np.testing.assert_array_equal(array, (numbers * np.float32(1e-6)).astype(array.dtype))


@pytest.mark.ranks(2)
def test_the_memory_of_an_interrupted_step_is_kept(comm, monkeypatch):
    """Rank 0 is interrupted after it has sent a bucket, and drops the exchange."""
    kept = []
    monkeypatch.setattr(module, "_abandoned", kept)
    comm = comm.dup()  # the messages of the interrupted step are never received
    flat = FlatBuffer(PARAMETERS)
    exchange = Exchange(flat, comm, 0.03, 0.03)
    exchange.begin(1.0)
    if comm.rank == 0:
        for index in flat.order:
            exchange.ready(index)
        exchange.close()
        assert kept
    comm.mpi.barrier()
    if comm.rank == 1:
        assert not kept
        for index in flat.order:
            exchange.ready(index)
        exchange.close()
    comm.mpi.barrier()
    for request in kept:
        try:
            request.Cancel()
        except MPI.Exception:  # a collective, which cannot be cancelled, may not have ended yet
            continue
        request.Wait()
