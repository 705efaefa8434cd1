"""Transforms of tiles against NumPy's of the whole array, and their derivatives over all ranks."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft

import launching
import mpigrad as mg
from mpigrad import fft
from mpigrad.grid import Grid

COMM = mg.default_communicator()
SHAPES = [(7, 9), (8, 6), (5, 6, 7), (4, 6, 8)]


def decompositions(shape):
    """All arrangements of the ranks in tiles that have cells."""
    numbers = (range(1, min(n, COMM.size) + 1) for n in shape)
    return [d for d in itertools.product(*numbers) if math.prod(d) == COMM.size]


def whole_field(shape, real, seed=3):
    generator = np.random.default_rng(seed)
    field = generator.normal(size=shape)
    return field if real else field + 1j * generator.normal(size=shape)


def assert_spectrum(found, whole, layout):
    assert whole.shape[: len(layout.shape)] == layout.shape
    assert found.shape == layout.local_shape + whole.shape[len(layout.shape) :]
    np.testing.assert_allclose(found, whole[layout.slices], rtol=0, atol=1e-10)


@pytest.mark.thin(1, 4, reason="one rank sends nothing, and four form slabs and pencils")
@pytest.mark.cases(
    "shape0-False", "shape2-True", reason="two and three axes, real and complex, of odd sizes"
)
@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_layouts_give_the_transform_of_numpy(shape, real):
    whole = whole_field(shape, real)
    forward, back = (fft.rfftn, fft.irfftn) if real else (fft.fftn, fft.ifftn)
    expected = (np.fft.rfftn if real else np.fft.fftn)(whole)
    for dims in decompositions(shape):
        grid = Grid(shape, (1.0,) * len(shape), dims=dims, periodic=True)
        u = jnp.asarray(whole[grid.slices])
        there, again = jax.jit(lambda u, g=grid: (s := forward(u, g), back(s, g)))(u)
        assert_spectrum(there, expected, fft.Layout(grid, real=real))
        np.testing.assert_allclose(again, u, rtol=0, atol=1e-13)


@pytest.mark.launcher
@pytest.mark.full("four ranks form slabs and pencils, too")
@pytest.mark.parametrize(("shape", "real"), list(itertools.product(SHAPES, (True, False))))
def test_six_ranks_give_the_transform_of_numpy(shape, real, tmp_path):
    launching.on_six_ranks(
        tmp_path,
        __file__,
        "import test_fourier as t",
        f"t.test_all_layouts_give_the_transform_of_numpy({shape}, {real})",
        f"t.test_transforms_are_transposed_exactly({shape}, {real})",
    )


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_axes_and_norms_are_those_of_numpy(norm):
    shape = (5, 6, 7)
    grid, whole = Grid(shape, (1.0,) * 3, periodic=True), whole_field(shape, real=True)
    u = jnp.asarray(whole[grid.slices])
    cases = {(0, 1): np.fft.rfftn(whole, axes=(0, 1), norm=norm), (2, 0): None, (1,): None}
    for axes in cases:
        layout = fft.Layout(grid, real=True, axes=axes)
        spectrum = fft.rfftn(u, grid, axes, norm)
        assert_spectrum(spectrum, np.fft.rfftn(whole, axes=axes, norm=norm), layout)
        np.testing.assert_allclose(fft.irfftn(spectrum, grid, axes, norm), u, atol=1e-13)
    for axis in (0, -1):
        layout = fft.Layout(grid, axes=(axis,))
        spectrum = fft.fft(u, grid, axis, norm)
        assert_spectrum(spectrum, np.fft.fft(whole, axis=axis, norm=norm), layout)
        np.testing.assert_allclose(fft.ifft(spectrum, grid, axis, norm), u, atol=1e-13)
        spectrum = fft.rfft(u, grid, axis, norm)
        np.testing.assert_allclose(fft.irfft(spectrum, grid, axis, norm), u, atol=1e-13)


def test_transforms_between_walls_are_those_of_scipy():
    shape = (5, 8)
    grid, whole = Grid(shape, (1.0, 1.0)), whole_field(shape, real=True)
    u = jnp.asarray(whole[grid.slices])
    for kind, there, back in (("dct", fft.dctn, fft.idctn), ("dst", fft.dstn, fft.idstn)):
        expected = getattr(scipy.fft, f"{kind}n")(whole, type=2)
        spectrum = there(u, grid)
        assert_spectrum(spectrum, expected, fft.Layout(grid, kinds=kind))
        np.testing.assert_allclose(back(spectrum, grid), u, atol=1e-13)
    layout = fft.Layout(grid, real=True, kinds=("fft", "dst"))
    expected = np.fft.fft(np.asarray(scipy.fft.dst(whole, type=2, axis=1)), axis=0)[: 5 // 2 + 1]
    spectrum = fft.forward(u, layout)
    assert_spectrum(spectrum, expected, layout)
    np.testing.assert_allclose(fft.inverse(spectrum, layout), u, atol=1e-13)


def test_several_fields_travel_in_one_exchange():
    grid = Grid((6, 8), (1.0, 1.0), periodic=True)
    whole = whole_field((6, 8, 3), real=True)
    fields = {"u": jnp.asarray(whole[grid.slices]), "p": jnp.asarray(whole[grid.slices][..., 0])}
    run = lambda fields: fft.rfftn(fields, grid)
    there = jax.jit(run)(fields)
    layout = fft.Layout(grid, real=True)
    assert_spectrum(there["u"], np.fft.rfftn(whole, axes=(0, 1)), layout)
    assert_spectrum(there["p"], np.fft.rfftn(whole[..., 0]), layout)
    messages = str(jax.make_jaxpr(run)(fields)).count("mpigrad_redistribute")
    assert messages == len(layout.plan.exchanges)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_single_precision_stays_single(dtype):
    grid = Grid((6, 8), (1.0, 1.0), periodic=True)
    u = jnp.asarray(whole_field((6, 8), real=True)[grid.slices], dtype)
    there = fft.fftn(u, grid)
    assert there.dtype == jnp.complex64
    assert fft.ifftn(there, grid).dtype == jnp.complex64
    if dtype == "float32":
        there = fft.rfftn(u, grid, norm="ortho")
        assert (there.dtype, fft.irfftn(there, grid).dtype) == (jnp.complex64, jnp.float32)


@pytest.mark.cases("shape0-False", "shape1-True", reason="real and complex, even and odd")
@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize("shape", [(7, 6), (5, 4, 6)])
def test_transforms_are_transposed_exactly(shape, real):
    grid = Grid(shape, (1.0,) * len(shape), periodic=True)
    u = jnp.asarray(whole_field(shape, real)[grid.slices])
    forward, back = (fft.rfftn, fft.irfftn) if real else (fft.fftn, fft.ifftn)
    mg.dot_test(lambda u: forward(u, grid), u)
    mg.dot_test(lambda s: back(s, grid), forward(u, grid))


def test_the_gradient_is_that_of_one_rank():
    """With weights on the whole spectrum, whose symmetry the usual mistakes count once or twice."""
    shape = (6, 7, 8)
    grid = Grid(shape, (1.0,) * 3, periodic=True)
    whole = whole_field(shape, real=True)
    layout = fft.Layout(grid, real=True)
    weights = whole_field(layout.shape, real=False, seed=5)

    def loss(u, transform, w):
        return jnp.sum(jnp.abs(w * transform(u) - 1) ** 2 + jnp.sin((w * transform(u)).imag))

    mine = mg.jit(mg.grad(lambda u: loss(u, lambda v: fft.rfftn(v, grid), weights[layout.slices])))
    alone = jax.grad(lambda u: loss(u, jnp.fft.rfftn, weights))(jnp.asarray(whole))
    found = mine(jnp.asarray(whole[grid.slices]))
    np.testing.assert_allclose(found, alone[grid.slices], rtol=1e-11, atol=1e-11)


def test_derivatives_under_vmap_scan_and_checkpoint():
    grid = Grid((6, 5), (1.0, 1.0), periodic=True)
    u = jnp.asarray(whole_field((6, 5), real=True)[grid.slices])
    layout = fft.Layout(grid, real=True)
    k = sum(k**2 for k in layout.wavenumbers())

    def step(u, _):
        return fft.irfftn(jnp.exp(-0.01 * k) * fft.rfftn(u - 0.1 * u**3, grid), grid), None

    def loss(u):
        return jnp.sum(jax.lax.scan(jax.checkpoint(step), u, None, length=3)[0] ** 2)

    mg.taylor_test(mg.jit(loss), u)
    mg.taylor_test(mg.jit(lambda u: jnp.sum(mg.grad(loss)(u) ** 3)), u)  # second order
    batch = jnp.stack([u, 2 * u])
    together = mg.vmap(lambda u: fft.rfftn(u, grid))(batch)
    np.testing.assert_allclose(together[1], fft.rfftn(2 * u, grid), atol=1e-12)


def test_parseval_and_a_shifted_field():
    grid = Grid((6, 9), (0.5, 0.25), periodic=True)
    whole = whole_field((6, 9), real=True)
    u = jnp.asarray(whole[grid.slices])
    layout = fft.Layout(grid)
    spectrum = fft.fftn(u, grid, norm="ortho")
    power = mg.allreduce(jnp.sum(jnp.abs(spectrum) ** 2))
    np.testing.assert_allclose(power, np.sum(whole**2), rtol=1e-13)
    kx, ky = layout.wavenumbers()
    moved = fft.ifftn(fft.fftn(u, grid) * np.exp(-1j * (kx * 2 * 0.5 + ky * 3 * 0.25)), grid)
    np.testing.assert_allclose(moved.real, np.roll(whole, (2, 3), (0, 1))[grid.slices], atol=1e-12)


@pytest.mark.ranks(4)
def test_fewer_planes_than_ranks_leave_some_without_a_part():
    grid = Grid((8, 3), (1.0, 1.0), dims=(4, 1), periodic=True)
    whole = whole_field((8, 3), real=True)
    u = jnp.asarray(whole[grid.slices])
    layout = fft.Layout(grid, real=True)
    assert layout.shape == (8, 2)
    assert layout.local_shape[1] == (1 if COMM.rank < 2 else 0)
    spectrum = fft.rfftn(u, grid)
    assert_spectrum(spectrum, np.fft.rfftn(whole), layout)
    np.testing.assert_allclose(fft.irfftn(spectrum, grid), u, atol=1e-13)
    mg.dot_test(lambda u: fft.rfftn(u, grid), u)


@pytest.mark.ranks(1, 2)
def test_wrong_fields_are_refused():
    grid = Grid((6, 8), (1.0, 1.0), periodic=True)
    u = jnp.ones(grid.local_shape)
    with pytest.raises(ValueError, match="the first axes of a field must be those of the tile"):
        fft.rfftn(jnp.ones((3, 3)), grid)
    with pytest.raises(ValueError, match="part of the spectrum"):
        fft.irfftn(jnp.ones((2, 3), complex), grid)
    with pytest.raises(TypeError, match="takes real fields, got complex128 on rank"):
        fft.rfftn(u.astype(complex), grid)
    with pytest.raises(TypeError, match=r'got bfloat16 on rank .*x\.astype\("float32"\)'):
        fft.fftn(u.astype(jnp.bfloat16), grid)
    with pytest.raises(ValueError, match='norm must be "backward", "ortho" or "forward"'):
        fft.fftn(u, grid, norm="unit")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="different axes of a grid with 2 axes"):
        fft.fftn(u, grid, axes=(0, 2))
    with pytest.raises(ValueError, match='kinds must be "fft", "dct" or "dst"'):
        fft.Layout(grid, kinds="dht")
    with pytest.raises(ValueError, match='have the norm "backward" only'):
        fft.forward(u, fft.Layout(grid, kinds="dct"), norm="ortho")


@pytest.mark.ranks(2)
def test_a_line_over_ranks_has_no_transform():
    with pytest.raises(ValueError, match="needs this axis whole on each rank, got 2 tiles"):
        fft.Layout(Grid((8,), (1.0,), periodic=True))
