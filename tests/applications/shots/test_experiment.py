"""Experiments from options and files; wavelets and filters."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from mpigrad.waves.survey import ricker
from mpigrad_apps.fwi.misfit import low_pass
from mpigrad_apps.shots.experiment import make_experiment
from mpigrad_apps.shots.model_files import read_wavelets
from mpigrad_apps.shots.options import WaveOptions
from mpigrad_apps.shots.shot_group import make_shot_group

OPTIONS = WaveOptions(cells=(20, 12), spacing=(10.0, 5.0))


def made(comm, **changes):
    return make_experiment(dataclasses.replace(OPTIONS, **changes), comm, lambda fields: fields)


@pytest.mark.ranks(1)
def test_defaults_of_an_experiment(comm):
    whole = made(comm)
    assert whole.shape == (20, 12)
    assert whole.size == (200.0, 60.0)
    assert whole.sources[:, 0, 0].tolist() == pytest.approx([20, 73.333333, 126.666667, 180])
    assert whole.receivers[0, :, 0].tolist() == [10 * i + 5 for i in range(20)]
    assert np.all(whole.receivers[..., 1] == 12.5)
    fastest = whole.fields["vp"].max()
    assert whole.dt == pytest.approx(0.6 / (fastest * math.hypot(1 / 10, 1 / 5)))
    some = made(comm, shots=3, receivers=5, depth=20.0, steps=7, dt=1e-4, frequency=3.0)
    assert some.sources.shape == (3, 1, 2)
    assert some.receivers.shape == (1, 5, 2)
    assert np.array_equal(some.wavelets[0, 0], ricker(3.0, 1e-4, 7))


@pytest.mark.ranks(1, 2)
def test_own_positions_and_wavelets(comm, directory):
    sources, receivers = np.array([[5.0, 5.0], [50.0, 5.0]]), np.array([[20.0, 7.0]])
    if comm.rank == 0:
        np.savez(directory / "s.npz", sources=sources, receivers=receivers)
        np.savez(directory / "far.npz", sources=sources, receivers=receivers + 190)
        np.save(directory / "w.npy", np.arange(6.0).reshape(2, 3))
        np.save(directory / "bad.npy", np.array([1.0, np.inf]))
    comm.mpi.Barrier()
    whole = made(comm, survey=directory / "s.npz", wavelet=directory / "w.npy", steps=5)
    assert np.array_equal(whole.sources[:, 0], sources)
    assert np.array_equal(whole.receivers, receivers[None])
    assert whole.wavelets[1, 0].tolist() == [3, 4, 5, 0, 0]
    assert not whole.ricker
    with pytest.raises(
        ValueError, match=r"--survey: receiver 0 of shot 0 at \(210.0, 197.0\) m lies outside"
    ):
        made(comm, survey=directory / "far.npz")
    with pytest.raises(ValueError, match=r"--depth: source 0 of shot 0 at \(20.0, 61.0\) m lies"):
        made(comm, depth=61.0)
    with pytest.raises(ValueError, match="samples that are not finite"):
        made(comm, wavelet=directory / "bad.npy")
    with pytest.raises(ValueError, match="got wavelets of 2 shots"):
        made(comm, wavelet=directory / "w.npy")
    with pytest.raises(ValueError, match="--pml: expected 0 or more"):
        made(comm, pml=-1)
    if comm.rank == 0:
        assert read_wavelets(directory / "w.npy", 2, 1e-3).shape == (2, 1, 2)


@pytest.mark.ranks(1, 4)
def test_groups_need_a_rank_and_a_shot(comm):
    with pytest.raises(ValueError, match="each group needs a rank and a shot"):
        make_shot_group(comm, 5, made(comm), lambda grid, dt: None)  # type: ignore[arg-type, return-value]


@pytest.mark.ranks(1)
def test_low_pass_keeps_low_frequencies_in_place():
    t = np.arange(400) * 2e-3
    low, high = np.sin(2 * np.pi * 3 * t) * np.hanning(400), np.sin(2 * np.pi * 40 * t)
    filtered = np.asarray(low_pass(jnp.asarray(low + high * np.hanning(400)), 10.0, 2e-3))
    assert np.max(np.abs(filtered - low)) < 0.01  # its phase, too
    wavelet = ricker(5.0, 2e-3, 400)
    assert np.argmax(np.abs(np.fft.rfft(wavelet, 8000))) * 1 / (8000 * 2e-3) == pytest.approx(
        5, 0.02
    )
    with pytest.raises(ValueError, match="must be positive"):
        ricker(0.0, 1e-3, 5)
