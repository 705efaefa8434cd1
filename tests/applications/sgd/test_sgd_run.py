"""Whole trainings: what they write, how well they read digits, and how they go on."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from mpigrad_apps.sgd import Settings, run

LINE = """
import jax.numpy as jnp
import numpy as np
from mpigrad_apps.sgd import Task

X = np.linspace(-1, 1, 30)[:, None]


def loss(model, x):
    return jnp.mean((x @ model["slope"] - 3 * x) ** 2)


def line():
    return Task({"slope": jnp.zeros((1, 1))}, loss, (X,), held_out=(X[:4],), score=loss)
"""
TORCH = """
import torch
from mpigrad_apps.sgd import Task

X = torch.linspace(-1, 1, 30)[:, None]


def loss(model, x):
    return ((model(x) - 3 * x) ** 2).mean()


def line():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.1))
    return model, loss, X
"""


def write(directory, comm, text):
    if comm.rank == 0:
        (directory / "mine.py").write_text(text)
    comm.mpi.Barrier()
    return f"{directory / 'mine.py'}:line"


def leaves(models):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(models)]


@pytest.mark.full("three trainings of three epochs each")
def test_digits_are_read_after_training_in_every_mode(comm, directory, capfd):
    settings = Settings(epochs=3, learning_rate=0.05, staleness=(2,), out=directory / "out")
    result = run(settings, comm)
    comm.mpi.Barrier()
    names = [log.name for log in result.logs]
    assert names == ["synchronous", "asynchronous-2", "local"]
    for log in result.logs:
        first, *_, last = log.epochs
        if comm.size > 2 and log.name == "asynchronous-2":
            # Stale gradients of more workers learn more slowly in as many samples.
            assert last.loss < first.loss and last.score > first.score
        else:
            assert last.score > 0.85, log.name
        assert log.steps[-1].samples == 3 * 1440
        lines = (settings.out / log.name / "history.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["samples"] == 3 * 1440
        assert max((n for step in log.steps for n in step.staleness), default=0) <= 2
        with np.load(settings.out / log.name / "model.npz") as file:
            assert file[".last.bias"].shape == (10,)
    page = result.report.read_text()
    assert page.count("data:image/png;base64,") == 3
    assert ("local: epoch 3/3" in capfd.readouterr().out) == (comm.rank == 0)


@pytest.mark.long("two modes, each whole and in two parts; tests/training has single ones")
def test_a_training_goes_on_bit_for_bit(comm, directory):
    settings = Settings(
        mode=("synchronous", "local"),
        module=write(directory, comm, LINE),
        learning_rate=0.05,
        batch=7,
        every=2,
        epochs=4,
        out=directory / "whole",
    )
    whole = run(settings, comm)
    parts = dataclasses.replace(settings, out=directory / "parts", epochs=2)
    run(parts, comm)
    after = run(dataclasses.replace(parts, epochs=4, resume=True), comm)
    for a, b in zip(leaves(whole.models), leaves(after.models), strict=True):
        assert np.array_equal(a, b)
    for a, b in zip(whole.logs, after.logs, strict=True):
        assert [step.loss for step in a.steps] == [step.loss for step in b.steps]
        assert [epoch.score for epoch in a.epochs] == [epoch.score for epoch in b.epochs]
        assert a.epochs[-1].score < a.epochs[0].score
    with pytest.raises(ValueError, match=r"of another run: batch is 7 .* 6"):
        run(dataclasses.replace(parts, batch=6, resume=True), comm)


def test_rejects_invalid_settings_on_all_ranks(comm, directory):
    out = directory / "out"
    with pytest.raises(ValueError, match="--epochs: expected at least 1"):
        run(Settings(epochs=0, out=out), comm)
    module = write(directory, comm, LINE + "\n\ndef other():\n    return 3\n")
    with pytest.raises(TypeError, match=r"other\(\) must return"):
        run(Settings(module=module.replace(":line", ":other"), out=out), comm)
    if comm.rank == 0:
        out.write_text("a file")
    comm.mpi.Barrier()
    with pytest.raises(OSError, match="out"):
        run(Settings(module=module, out=out), comm)


@pytest.mark.torch
def test_digits_are_read_by_torch(comm, directory):
    result = run(
        Settings(framework="torch", epochs=3, learning_rate=0.05, out=directory / "out"), comm
    )
    for log in result.logs:
        # Stale gradients of more workers learn more slowly in as many samples.
        slow = comm.size > 2 and log.name in ("asynchronous-2", "asynchronous-4")
        assert log.epochs[-1].score > (0.5 if slow else 0.85), log.name
    comm.mpi.Barrier()
    assert (result.settings.out / "local" / "model.pt").exists()


@pytest.mark.torch
@pytest.mark.thin(3)
def test_a_module_of_torch_goes_on_bit_for_bit(comm, directory):
    settings = Settings(
        module=write(directory, comm, TORCH), batch=7, optimizer="adam", staleness=(0,),
        epochs=3, out=directory / "whole",
    )  # fmt: skip
    whole = run(settings, comm)
    parts = dataclasses.replace(settings, out=directory / "parts", epochs=1)
    run(parts, comm)
    after = run(dataclasses.replace(parts, epochs=3, resume=True), comm)
    for one, other in zip(whole.models, after.models, strict=True):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            assert np.array_equal(a.detach().numpy(), b.detach().numpy())
