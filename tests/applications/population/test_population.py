"""Patients as jobs: the density of all ranks is that of one, and what is sampled from it."""

import dataclasses
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad
from mpigrad import jobs
from mpigrad.checkpoint import Checkpoint
from mpigrad_apps.population import (
    NUTS,
    Kinetics,
    Model,
    Prior,
    Settings,
    Shared,
    Unknowns,
    decay_rate,
    log_density,
    read_patients,
    run,
    summarize,
)
from mpigrad_apps.population.diagnostics import Summary
from mpigrad_apps.population.outputs import disagreement
from mpigrad_apps.population.records import make_patient_record

MODEL = Model(Kinetics(rtol=1e-5))
HEADER = "id,time,amt,dv\n"


def serial(records):
    """The sum over patients of one shape, without messages."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *records)
    each = jax.vmap(MODEL.log_likelihood, in_axes=(None, 0, 0))
    return lambda shared, effects: jnp.sum(each(shared, effects, stacked))


def some(patients):
    """Unknowns near the start, and a direction."""
    generator = np.random.default_rng(0)
    start = MODEL.prior.start(patients)
    direction = jax.tree.map(lambda leaf: jnp.asarray(generator.normal(size=leaf.shape)), start)
    return jax.tree.map(lambda leaf, part: leaf + 0.1 * part, start, direction), direction


def five_records():
    """One dose each, one shape."""
    times = np.array([0.5, 2.0, 6.0, 12.0, 24.0, 36.0])
    measured = [2 * np.exp(-times / (15 + i)) for i in range(5)]
    return [
        make_patient_record(60.0 + 5 * i, [(0.0, 100.0)], zip(times, values, strict=True))
        for i, values in enumerate(measured)
    ]


@pytest.mark.long("derivatives of the kinetics; test_kinetics.py has them on one rank")
@pytest.mark.cases("value", reason="other derivatives of one rank take long to compile")
@pytest.mark.parametrize("order", ["value", "gradient", "second"])
def test_density_and_derivatives_are_those_of_one_rank(comm, order):
    """The gradient passes the Taylor test, too, by the same program: it takes long to compile."""
    second, records = order == "second", five_records()
    point, direction = some(len(records))

    def derivatives(likelihood):
        density = log_density(MODEL, likelihood)
        if not second:
            return jax.value_and_grad(density)
        return lambda x: mpigrad.jvp(jax.grad(density), (x,), (direction,))

    with jobs.pool(comm) as pool:
        data = pool.put(records)
        program = mpigrad.jit(derivatives(pool.sum(MODEL.log_likelihood, data)))
        found = program(point)
        steps = 1e-2 * 0.5 ** np.arange(0 if second else 5)
        along = [jax.tree.map(lambda x, v, h=h: x + h * v, point, direction) for h in steps]
        moved = np.array([float(program(x)[0]) for x in along])
    if order == "value":
        expected, compared = jax.jit(log_density(MODEL, serial(records)))(point), found[0]
    else:
        expected, compared = jax.jit(derivatives(serial(records)))(point), found
    for a, b in zip(jax.tree.leaves(compared), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12 * float(np.max(np.abs(b))))
    if not second:
        value, gradient = found
        slope = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient, direction)))
        changes = moved - float(value)
        for remainders, rate in ((changes, 1), (changes - steps * float(slope), 2)):
            found_rate = np.log2(abs(remainders[-2] / remainders[-1]))
            assert abs(found_rate - rate) < 0.2, (rate, remainders)


@pytest.mark.ranks(1)
def test_slow_absorption_is_improbable_unless_it_is_allowed():
    """Flip-flop: the odds are (ka / α)^fast, α the larger rate of decay in the blood."""
    start = MODEL.prior.start(0).shared
    decay = float(decay_rate(np.exp(start.typical)))
    free = dataclasses.replace(MODEL, prior=Prior(fast=0.0))

    def odds(ratio):
        typical = start.typical.at[0].set(np.log(ratio * decay))
        faster, free_now = (m.log_prior(start._replace(typical=typical)) for m in (MODEL, free))
        return float(jnp.exp(faster - free_now)) / 2  # an even chance where it is free

    for ratio in (0.3, 1.0, 3.0):
        chance = ratio**20 / (1 + ratio**20)
        np.testing.assert_allclose(odds(ratio), chance, rtol=1e-9)


@pytest.mark.full("moments need many draws")
def test_draws_are_those_of_the_density():
    """A normal density has known moments. It needs neither patients nor messages."""
    center = Unknowns(
        Shared(jnp.arange(5.0), jnp.full(5, 0.5), jnp.asarray(2.0)), jnp.zeros((2, 5))
    )
    scale = 0.3

    def density(unknowns):
        away = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), unknowns, center)
        return -0.5 * sum(jax.tree.leaves(away)) / scale**2

    starts = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 0.1]), center)
    told = []
    posterior = NUTS(warmup=200, draws=500).sample(
        density, starts, 1, lambda iteration, figures: told.append(iteration) or iteration == 600
    )
    assert told == list(range(1, 601))
    assert posterior is not None
    assert posterior.steps.shape == (2, 400)
    assert not posterior.divergent.any()
    for drawn, middle in zip(
        jax.tree.leaves(posterior.unknowns), jax.tree.leaves(center), strict=True
    ):
        np.testing.assert_allclose(drawn.mean((0, 1)), middle, atol=0.08)
        np.testing.assert_allclose(drawn.std((0, 1)), scale, rtol=0.2)
    summary = summarize(posterior.unknowns.shared)
    assert len(summary) == 11
    assert all(known.rhat < 1.05 and known.ess > 100 for known in summary.values())
    assert summary["ka"].low < 1 < summary["ka"].high


@pytest.mark.full("it samples three times")
def test_stopped_samplings_go_on_bit_for_bit(comm, directory):
    """A signal to any rank stops it, in the warm-up and in the draws, and nothing is lost."""

    def density(unknowns):
        whole = jnp.asarray(sum(jnp.sum(jnp.cosh(leaf)) for leaf in jax.tree.leaves(unknowns)))
        return -mpigrad.allreduce(whole / comm.size, comm=comm)

    first = MODEL.prior.start(2)
    starts = jax.tree.map(lambda leaf: jnp.stack([0 * leaf, 0 * leaf + 0.1]), first)
    sampler = NUTS(warmup=20, draws=12, depth=4)
    whole = sampler.sample(density, starts, 1, lambda iteration, figures: False, comm)
    posterior, seen = None, []
    for stop in (7, 20, 21, 22, 29, 99):

        def note(iteration, figures, stop=stop):
            seen.append(iteration)
            if iteration == stop and comm.rank == stop % comm.size:
                os.kill(os.getpid(), signal.SIGTERM)
            return False

        checkpoint = Checkpoint(directory, minutes=None, resume=True)
        with checkpoint.start(comm) as session:
            posterior = sampler.sample(density, starts, 1, note, comm, session=session)
        drawn = 0 if posterior is None else posterior.steps.shape[1]
        assert drawn == max(min(stop, 32) - 20, 0)
        if posterior is not None:  # also of one draw
            assert np.isfinite(summarize(posterior.unknowns.shared)["ka"].median)
    assert seen == list(range(1, 33))
    times = {"warmup_seconds": 0.0, "seconds": 0.0}
    for a, b in zip(
        jax.tree.leaves(dataclasses.asdict(dataclasses.replace(posterior, **times))),
        jax.tree.leaves(dataclasses.asdict(dataclasses.replace(whole, **times))),
        strict=True,
    ):
        assert np.array_equal(a, b)
    assert 0 < posterior.seconds < 60


def small(directory, **changes):
    simulated = {} if "data" in changes else {"patients": 4}
    settings = Settings(
        rtol=1e-4, iterations=8, chains=2, warmup=20, draws=5, depth=3, out=directory / "out",
        **simulated,
    )  # fmt: skip
    return dataclasses.replace(settings, **changes)


@pytest.mark.full("a whole run with its sampler takes long to compile")
def test_a_run_is_written(comm, directory, capfd):
    settings = small(directory)
    result = run(settings, comm)
    comm.mpi.Barrier()
    out = settings.out
    assert json.loads((out / "settings.json").read_text())["patients"] == 4
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert history[-1]["loss"] < history[0]["loss"]
    assert read_patients(out / "data.csv").names == result.cohort.names
    draws = np.load(out / "posterior.npz")
    assert draws["effects"].shape == (2, 5, 4, 5)
    assert draws["typical"].shape == (2, 5, 5)
    assert result.posterior is not None
    np.testing.assert_array_equal(draws["typical"], result.posterior.unknowns.shared.typical)
    mpigrad.assert_replicated(result.posterior.unknowns, comm)
    table = (out / "patients.csv").read_text().splitlines()
    assert table[0].startswith("id,wt,ka,ka_5,ka_95,CL")
    assert len(table) == 5
    page = result.report.read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "effective draws per second" in page
    assert ("25/25" in capfd.readouterr().out) == (comm.rank == 0)


@pytest.mark.full("350 iterations of two chains on 12 patients take minutes")
@pytest.mark.ranks(2)
@pytest.mark.timeout(900)
def test_the_truth_is_found(comm, directory):
    """The parameters of 12 simulated patients are found from their table."""
    settings = small(directory, patients=12, iterations=40, warmup=150, draws=200, depth=6)
    first = run(dataclasses.replace(settings, draws=0, depth=8, out=directory / "first"), comm)
    assert first.posterior is None
    assert first.report.read_text().count("data:image/png;base64,") == 2
    result = run(dataclasses.replace(settings, data=directory / "first" / "data.csv"), comm)
    comm.mpi.Barrier()
    assert result.truth is None
    assert first.truth is not None
    true = np.exp(np.asarray(first.truth.shared.typical))
    known = [result.summary[name] for name in ("ka", "CL", "V1", "Q", "V2")]
    width = np.array([k.high - k.low for k in known])
    assert np.all(np.abs(np.array([k.median for k in known]) - true) < 1.2 * width)
    assert abs(result.summary["noise"].median - 0.15) < 0.05
    assert max(k.rhat for k in result.summary.values()) < 1.2  # one mode: chains of two have 2


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("rhat", "text"), [(1.01, ""), (1.23456, "(R-hat 1.23)"), (9.3e15, "(R-hat 9.3e+15)")]
)
def test_chains_that_do_not_agree_are_named(rhat, text):
    warning = disagreement(
        {"ka": Summary(1.0, 1.0, 1.0, 9.0, 1.0), "CL": Summary(2.0, 2.0, 2.0, 9.0, rhat)}
    )
    assert text in warning
    assert bool(text) == bool(warning)


def test_rejects_invalid_settings_and_data(comm, directory):
    for changes, message in (
        ({"patients": 0}, "--patients: expected at least 1"),
        ({"draws": 2}, "--draws: expected 0, or at least 4"),
        ({"warmup": 3}, "--warmup: expected at least 20"),
        ({"acceptance": 1.0}, "--acceptance: expected between 0 and 1"),
        ({"typical": (1.0, 5.0, 0.0, 10.0, 50.0)}, "--typical: expected five positive numbers"),
        ({"typical": (0.4, 5.0, 30.0, 10.0, 50.0)}, "absorption faster .*, got 0.4 per hour"),
        ({"rtol": 1.0}, "--rtol: expected between"),
        ({"seed": -1}, "--seed: expected at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            run(small(directory, **changes), comm)
    with pytest.raises(FileNotFoundError, match="--data: there is no file"):
        run(small(directory, data=directory / "none.csv"), comm)
    if comm.rank == 0:
        (directory / "bad.csv").write_text(HEADER + "a,0,100,.\na,1,.,-3\n")
        (directory / "out").mkdir(exist_ok=True)
        (directory / "out" / "patients.csv").write_text(HEADER)
    comm.mpi.Barrier()
    with pytest.raises(ValueError, match="would replace"):
        run(small(directory, data=directory / "out" / "patients.csv"), comm)
    with pytest.raises(ValueError, match="line 3: dv: expected a positive concentration"):
        run(small(directory, data=directory / "bad.csv"), comm)
