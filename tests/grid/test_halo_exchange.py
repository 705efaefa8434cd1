"""Halo exchange against padding the whole field, and its adjoint over all ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad
from launching import PROGRAMS
from launching import mpigrad as mpigrad_command
from mpigrad.grid import Grid, halo_exchange

COMM = mpigrad.default_communicator()


def whole_field(grid, fields=(), seed=3):
    return np.random.default_rng(seed).normal(size=(*grid.shape, *fields))


def expected(whole, grid, width, boundary):
    """This rank's tile in its layers, of the whole field padded axis by axis."""
    widths = width if isinstance(width, tuple) else ((width, width),) * grid.ndim
    sides = boundary if isinstance(boundary, tuple) else (boundary,) * grid.ndim
    for axis, (side, layers) in enumerate(zip(sides, widths, strict=True)):
        pair = side if isinstance(side, tuple) else (side, side)
        if grid.periodic[axis] or pair[0] == "periodic":
            whole = pad_axis(whole, axis, layers, "periodic")
        else:
            whole = pad_axis(whole, axis, (layers[0], 0), pair[0])
            whole = pad_axis(whole, axis, (0, layers[1]), pair[1])
    return whole[
        tuple(
            slice(part.start, part.stop + sum(layers))
            for part, layers in zip(grid.slices, widths, strict=True)
        )
    ]


def pad_axis(whole, axis, layers, side):
    how = {"mode": "wrap" if side == "periodic" else side}
    how = how if isinstance(side, str) else {"constant_values": side}
    return np.pad(whole, [layers if k == axis else (0, 0) for k in range(whole.ndim)], **how)


def random_exchange(generator, axes):
    """(grid, width, boundary, fields), any that the number of ranks allows."""
    most = {1: 24, 2: 13, 3: 9}[axes]
    shape = tuple(int(n) for n in generator.integers(most - 4, most + 1, axes))
    grid = Grid(
        shape, (1.0,) * axes, periodic=tuple(bool(p) for p in generator.integers(0, 4, axes) == 0)
    )
    reach = [min(4, n - 1) for n in grid.smallest_tile]
    width = tuple(tuple(int(w) for w in generator.integers(0, n + 1, 2)) for n in reach)
    if not np.any(width):
        width = 1
    choices = ["edge", "reflect", "symmetric", 0.0, -1.5]
    draw = lambda: choices[generator.integers(len(choices))]
    boundary = tuple(
        "periodic" if generator.integers(4) == 0 else (draw(), draw()) for _ in range(axes)
    )
    return grid, width, boundary, ((), (2,))[generator.integers(2)]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.thin(4)
@pytest.mark.cases("2-4", reason="other tests exchange along one axis and three")
@pytest.mark.parametrize(("axes", "cases"), [(1, 3), (2, 4), (3, 2)])
def test_random_exchanges_and_their_adjoints(axes, cases):
    generator = np.random.default_rng([COMM.size, axes])  # others on another number of ranks
    drawn = [random_exchange(generator, axes) for _ in range(cases)]
    wholes = [whole_field(grid, fields) for grid, _, _, fields in drawn]

    @mpigrad.jit
    def exchange(tiles):
        return [halo_exchange(u, *case[:3]) for u, case in zip(tiles, drawn, strict=True)]

    tiles = [jnp.asarray(whole[case[0].slices]) for whole, case in zip(wholes, drawn, strict=True)]
    for padded, whole, case in zip(exchange(tiles), wholes, drawn, strict=True):
        assert np.array_equal(padded, expected(whole, *case[:3])), case
    mpigrad.dot_test(exchange, tiles)


@pytest.mark.parametrize(
    ("shape", "width", "boundary", "fields"),
    [
        ((9, 8), 2, "edge", (3,)),
        ((4, 13), 1, 2.5, (2, 2)),
        ((10, 8), 4, 0.0, ()),
        ((11, 8), ((3, 0), (1, 2)), "reflect", ()),
        ((12,), 3, "symmetric", ()),
        ((6, 5, 7), 1, "edge", ()),
        ((6, 5, 7), 2, -1.0, (2,)),
        ((6, 5, 7), ((0, 1), (2, 0), (1, 1)), ("reflect", 0.0, ("edge", 3.0)), ()),
    ],
    ids=str,
)
def test_layers_are_those_of_the_whole_field(shape, width, boundary, fields):
    grid = Grid(shape, (1.0,) * len(shape))
    if np.max(width) >= min(grid.smallest_tile):
        pytest.skip("the layers reach past a neighbouring tile")
    whole = whole_field(grid, fields)
    padded = mpigrad.jit(lambda u: halo_exchange(u, grid, width, boundary))(
        jnp.asarray(whole[grid.slices])
    )
    assert np.array_equal(padded, expected(whole, grid, width, boundary))


@pytest.mark.thin(1, 2, 3, reason="on 1 a tile is its own neighbour, on 2 both sides are one")
@pytest.mark.parametrize("own", [False, True], ids=["of the grid", "of the exchange"])
def test_periodic_axes_with_any_number_of_tiles(own):
    """One tile along an axis is its own neighbour on both sides; of two each is the other's."""
    for dims in ((COMM.size, 1), (1, COMM.size)):
        grid = Grid((9, 8), (1.0, 1.0), dims=dims, periodic=not own)
        whole = whole_field(grid)
        exchange = mpigrad.jit(lambda u, g=grid: halo_exchange(u, g, 2, "periodic" if own else 7.0))
        padded = exchange(jnp.asarray(whole[grid.slices]))
        assert np.array_equal(padded, expected(whole, grid, 2, "periodic"))


@pytest.mark.ranks(4)
def test_a_field_of_6_by_6_in_two_layers_of_10():
    grid = Grid((6, 6), (1.0, 1.0), dims=(2, 2))
    whole = np.arange(1.0, 37.0).reshape(6, 6)
    padded = halo_exchange(jnp.asarray(whole[grid.slices]), grid, 2, 10.0)
    assert padded.shape == (7, 7)
    assert np.array_equal(padded, expected(whole, grid, 2, 10.0))
    if COMM.rank == 0:
        assert np.array_equal(
            padded[:, 2:], [[10] * 5] * 2 + [[*range(k, k + 5)] for k in (1, 7, 13, 19, 25)]
        )
        assert np.all(padded[:, :2] == 10)


@pytest.mark.full("it starts six processes; other tests compare more cases with NumPy")
@pytest.mark.launcher
def test_a_field_of_6_by_4_on_3_by_2_ranks():
    done = mpigrad_command("launch", "-n", 6, PROGRAMS / "halo_of_six.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[[1, 1, 1, 1], [1, 1, 2, 3], [1, 5, 6, 7], [1, 9, 10, 11]]" in done.stdout


@pytest.mark.thin(4)
def test_fields_of_several_dtypes_travel_in_one_message_each():
    grid = Grid((9, 8), (1.0, 1.0), periodic=(False, True))
    shapes = {
        "a": ((2,), "float32"),
        "b": ((), "float64"),
        "c": ((), "int32"),
        "d": ((3,), "float64"),
    }
    wholes = {k: (9 * whole_field(grid, rest)).astype(t) for k, (rest, t) in shapes.items()}
    tiles = {k: jnp.asarray(whole[grid.slices]) for k, whole in wholes.items()}
    exchange = lambda tiles: halo_exchange(tiles, grid, ((2, 1), (0, 2)), "reflect")
    padded = mpigrad.jit(exchange)(tiles)
    for k, whole in wholes.items():
        assert padded[k].dtype == whole.dtype
        assert np.array_equal(padded[k], expected(whole, grid, ((2, 1), (0, 2)), "reflect"))
    messages = str(jax.make_jaxpr(exchange)(tiles)).count("mpigrad_neighbor_alltoallv")
    assert messages == (3 if COMM.size > 1 else 0)


def test_adjoints_of_packed_fields_of_two_precisions():
    """Of all fields to the rounding of the coarsest; of one in their company to its own."""
    cases = [
        (Grid((9, 8), (1.0, 1.0), periodic=(False, True)), ((2, 1), (0, 2)), "symmetric"),
        (Grid((6, 7, 5), (1.0,) * 3), ((0, 1), (2, 0), (1, 1)), (0.0, "edge", ("reflect", -1.0))),
    ]
    kinds = {"a": ((2,), "float32"), "b": ((), "float64"), "c": ((), "float32")}
    tiles = [
        {
            name: jnp.asarray(whole_field(grid, rest)[grid.slices], dtype)
            for name, (rest, dtype) in kinds.items()
        }
        for grid, *_ in cases
    ]

    def exchange(tiles):
        return [halo_exchange(u, *case) for u, case in zip(tiles, cases, strict=True)]

    mpigrad.dot_test(exchange, tiles, rtol=1e-6)
    of_doubles = lambda b: halo_exchange(tiles[0] | {"b": b}, *cases[0])["b"]
    mpigrad.dot_test(of_doubles, tiles[0]["b"])


@pytest.mark.parametrize("boundary", ["edge", 2.0])
def test_gradient_equals_that_of_the_one_rank_program(boundary):
    grid = Grid((9, 8), (1.0, 1.0))
    whole = whole_field(grid)

    def energy(padded):  # non-linear, and corners count
        middle = padded[1:-1, 1:-1]
        return jnp.sum(jnp.sin(middle * padded[2:, 2:]) + padded[:-2, 2:] ** 2 * middle)

    def alone(u):
        how = {"mode": "edge"} if boundary == "edge" else {"constant_values": boundary}
        return energy(jnp.pad(u, 1, **how))

    value, gradient = mpigrad.value_and_grad(lambda u: energy(halo_exchange(u, grid, 1, boundary)))(
        jnp.asarray(whole[grid.slices])
    )
    reference, slope = jax.value_and_grad(alone)(jnp.asarray(whole))
    assert np.isclose(value, reference, rtol=1e-13)
    assert np.allclose(gradient, slope[grid.slices], rtol=1e-13, atol=1e-13)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.thin(4)
def test_corners_in_three_dimensions_come_from_the_tile_that_owns_them():
    dims = {1: (1, 1, 1), 2: (1, 2, 1), 3: (1, 1, 3), 4: (2, 1, 2)}[COMM.size]
    grid = Grid((5, 4, 6), (1.0, 1.0, 1.0), dims=dims)
    whole = whole_field(grid)
    padded = mpigrad.jit(lambda u: halo_exchange(u, grid))(jnp.asarray(whole[grid.slices]))
    assert np.array_equal(padded, expected(whole, grid, 1, "edge"))


def test_vmap_is_the_exchange_of_each():
    grid = Grid((9, 8), (1.0, 1.0))
    whole = whole_field(grid, (3,))
    batch = jnp.moveaxis(jnp.asarray(whole[grid.slices]), -1, 0)
    padded = mpigrad.vmap(lambda u: halo_exchange(u, grid))(batch)
    assert np.array_equal(np.moveaxis(padded, 0, -1), expected(whole, grid, 1, "edge"))


def test_forward_mode():
    grid = Grid((9, 8), (1.0, 1.0))
    whole = whole_field(grid)
    u = jnp.asarray(whole[grid.slices])
    _, tangent = mpigrad.jvp(lambda u: halo_exchange(u, grid, 1, 7.0), (u,), (u,))
    assert np.array_equal(tangent, expected(whole, grid, 1, 0.0))


@pytest.mark.ranks(1, 2, 3, 4)
def test_bad_arguments_are_refused():
    grid = Grid((9, 8), (1.0, 1.0))
    u = jnp.zeros(grid.local_shape)
    with pytest.raises(ValueError, match="of the tile of"):
        halo_exchange(jnp.zeros((2, 1)), grid)
    for width in (0, -1, ((0, 0), (0, 0)), ((1, -1), (1, 1))):
        with pytest.raises(ValueError, match="Give at least one layer"):
            halo_exchange(u, grid, width)
    for width in (1.5, (1, 1), ((1, 1),), "1"):
        with pytest.raises(TypeError, match="width must be"):
            halo_exchange(u, grid, width)
    for boundary in ("open", ("edge",), ("edge", ("edge", "periodic")), None):
        with pytest.raises(ValueError, match="boundary must be"):
            halo_exchange(u, grid, 1, boundary)
    tile = f"tiles of at least \\({grid.smallest_tile[0]}, {grid.smallest_tile[1]}\\) cells"
    with pytest.raises(ValueError, match=f"width 9 along axis . with {tile}"):
        halo_exchange(u, grid, 9, "edge" if COMM.size > 1 else "periodic")
    cells = min(grid.smallest_tile)
    with pytest.raises(ValueError, match=r"past the neighbouring|cells of the tile at the"):
        halo_exchange(u, grid, cells, "reflect")
