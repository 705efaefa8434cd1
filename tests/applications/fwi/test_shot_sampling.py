"""Random subsets of shots and sums of shots: their data, gradients and whole runs."""

import dataclasses
import functools

import numpy as np
import pytest
from test_inversion import SMALL, moved

import mpigrad
from mpigrad_apps import fwi
from mpigrad_apps.fwi import estimation, prepare_inversion
from mpigrad_apps.fwi.shot_sampling import check_shot_sampling, sample_shots

SHOTS = dataclasses.replace(SMALL, shots=4)


def predicted(problem, parameters):
    return np.asarray(mpigrad.jit(lambda p: problem.predict(problem.tiles(p)))(parameters))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("groups", [1, 2])
def test_sampled_shots_are_shots_of_the_whole(comm, groups):
    if groups > comm.size:
        pytest.skip("more groups than ranks")
    problem = prepare_inversion(dataclasses.replace(SHOTS, groups=groups), comm)
    parameters = moved(problem.parametrization.initial(0))
    whole = predicted(problem, parameters)
    part = sample_shots(problem, 2, False, (5, 1))
    chosen = [list(problem.group.shots).index(shot) for shot in part.group.shots]
    assert len(chosen) == 2 // groups == part.group.survey.n_shots
    scale = np.abs(whole).max()
    np.testing.assert_allclose(predicted(part, parameters), whole[chosen], atol=1e-12 * scale)
    np.testing.assert_array_equal(part.recorded, problem.recorded[chosen])

    encoded = sample_shots(problem, None, True, (5, 1))
    own = len(problem.group.shots)
    wavelets = encoded.group.experiment.wavelets.reshape(own, -1)
    given = np.broadcast_to(problem.group.experiment.wavelets, (own, 1, SHOTS.steps))[:, 0]
    signs = np.sum(wavelets * given, axis=1) / np.sum(given**2, axis=1)
    np.testing.assert_allclose(np.abs(signs), 1)
    total = np.tensordot(signs, whole, 1)[None]
    np.testing.assert_allclose(predicted(encoded, parameters), total, atol=1e-12 * own * scale)
    np.testing.assert_allclose(encoded.recorded, np.tensordot(signs, problem.recorded, 1)[None])


def test_draws_differ_between_rounds_and_are_the_same_on_all_ranks(alone):
    problem = prepare_inversion(SHOTS, alone)
    draws = [tuple(sample_shots(problem, 2, False, (0, k)).group.shots) for k in range(12)]
    again = [tuple(sample_shots(problem, 2, False, (0, k)).group.shots) for k in range(12)]
    assert draws == again
    assert len(set(draws)) > 2
    sums = [sample_shots(problem, None, True, (0, k)).group.experiment for k in range(12)]
    signs = {tuple(np.sign(one.wavelets[0, :, 30])) for one in sums}
    assert len(signs) > 3


@pytest.mark.ranks(1, 2)
def test_the_gradient_of_encoded_shots(comm):
    settings = dataclasses.replace(SHOTS, groups=comm.size)
    part = sample_shots(prepare_inversion(settings, comm), None, True, (0, 0))
    share = mpigrad.jit(functools.partial(part.loss_share, part.misfit(None)))
    parameters = moved(part.parametrization.initial(0))
    mpigrad.taylor_test(share, parameters, replicated=True, step=1e-2, comm=comm)


@pytest.mark.ranks(1, 2)
@pytest.mark.thin(1)
@pytest.mark.cases("sampling0", reason="rounds are the same; encoding has tests of its own")
@pytest.mark.parametrize("sampling", [{"subset": 2}, {"encode": True}])
def test_rounds_lower_the_misfit_of_all_shots(comm, directory, sampling, monkeypatch):
    seeds = []

    def sample(problem, subset, encode, seed):
        seeds.append(seed)
        return sample_shots(problem, subset, encode, seed)

    monkeypatch.setattr(estimation, "sample_shots", sample)
    settings = dataclasses.replace(
        SHOTS, precision="float32", frequencies=(15.0,), rounds=2, iterations=2, **sampling
    )
    settings = dataclasses.replace(settings, out=directory / "run")
    result = fwi.run(settings, comm)
    assert result.misfits[1] < 0.6 * result.misfits[0]
    assert [record.stage for record in result.history] == [k for k in range(4) for _ in range(3)]
    assert (directory / "run" / "report.html").exists()
    assert len(set(seeds)) == 4  # each round of each stage draws its own shots
    other = {"subset": 4} if "subset" in sampling else {"encode": True, "subset": 2}
    with pytest.raises(ValueError, match="is of another run: subset is"):
        fwi.run(dataclasses.replace(settings, resume=True, **other), comm)


@pytest.mark.ranks(2)
def test_rejects_shots_that_cannot_be_sampled(comm, directory):
    for changes, text in [
        ({"rounds": 0}, "--rounds: expected at least 1, got 0"),
        ({"rounds": 3}, "--rounds: expected --subset or --encode with it, got 3 rounds"),
        ({"subset": 0}, "--subset: expected at least 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=text):
            dataclasses.replace(SHOTS, **changes).check()
    grouped = dataclasses.replace(SHOTS, groups=2, subset=3, out=directory / "refused")
    with pytest.raises(
        ValueError, match=r"--subset: each group takes the same .* multiple of 2, at"
    ):
        fwi.run(grouped, comm)
    problem = prepare_inversion(SHOTS, comm)
    receivers = np.repeat(problem.experiment.receivers, 4, axis=0) + np.arange(4)[:, None, None]
    moving = dataclasses.replace(problem.experiment, receivers=receivers)
    inputs = dataclasses.replace(problem.inputs, experiment=moving)
    with pytest.raises(ValueError, match="--encode: expected the same receivers for all shots"):
        check_shot_sampling(dataclasses.replace(problem, inputs=inputs), None, True)
