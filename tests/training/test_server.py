"""The parameter server: its updates, and its behaviour after failures."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from server_replicas import NumpyReplica, Session, squares

from mpigrad.checkpoint import Checkpoint
from mpigrad.communicator import Communicator
from mpigrad.training import (
    Batches,
    ParameterServer,
    StepError,
    StepRecord,
    Strategy,
    Synchronous,
    trainer,
)
from mpigrad.training import server as server_loop
from mpigrad.training.strategy import END, SAVE, STOP

A = np.random.default_rng(7).standard_normal((103, 5))
TRUE = np.arange(5.0)
B = A @ TRUE + 0.5 + 0.1 * np.sin(10 * A[:, 0])


def batches(run: Any, epochs: int, size: int = 10) -> Iterator[Any]:
    """This worker's rows of a least-squares problem."""
    return iter(Batches(len(A), size, epochs=epochs, shard=run.shard, take=lambda i: (A[i], B[i])))


def least_squares(**options: float) -> NumpyReplica:
    return NumpyReplica([np.zeros(5), np.zeros(1)], squares, **options)


def serial(epochs: int, **options: float) -> NumpyReplica:
    """The run of one process with global batches."""
    replica = least_squares(**options)
    for rows in Batches(len(A), 10, epochs=epochs):
        _, gradients = squares(replica.arrays, A[rows], B[rows])
        for place, gradient in zip(replica.gradients.arrays, gradients, strict=True):
            place[...] = gradient
        replica.update()
    return replica


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.thin(3)  # a server and two workers
def test_bound_zero_is_the_serial_run(comm: Communicator) -> None:
    """With uneven parts of batches, also empty ones (3 rows, at the end of an epoch)."""
    replica, session = least_squares(momentum=0.9), Session()
    run = ParameterServer().start(replica, comm)
    run.train(batches(run, epochs=5), session)
    expected = serial(5, momentum=0.9)
    for x, y in zip(replica.arrays, expected.arrays, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
    assert run.step_number == 55
    if comm.rank == 0:
        assert [r.step for r in session.records] == list(range(1, 56))
        assert {s for r in session.records for s in r.staleness} == {0}
        assert sum(r.samples for r in session.records) == 5 * len(A)
        assert run.keeps_state


def beside(comm: Communicator, train: Callable[[Communicator, Strategy], Any]) -> None:
    """The served run has the bits of the synchronous one on as many ranks as it has workers."""
    served = train(comm, ParameterServer())
    workers = comm.split(None if comm.rank == 0 else 0)
    if workers:
        assert served == train(workers, Synchronous())


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.thin(3)
def test_bound_zero_is_the_synchronous_run(comm: Communicator, tmp_path: pathlib.Path) -> None:
    """Bit for bit, also if another trainer resumes from a save."""
    directory = pathlib.Path(comm.mpi.bcast(str(tmp_path)))

    def train(where: Communicator, strategy: Strategy, *ends: int) -> Any:
        for steps in (*ends, 1000):
            coach = trainer(least_squares(momentum=0.9), strategy=strategy, comm=where)
            history = coach.run(
                Batches(len(A), 10, epochs=5, take=lambda i: (A[i], B[i])),
                steps=steps,
                checkpoint=Checkpoint(directory, every=7, resume=True) if ends else None,
            )
            assert [r.step for r in history.records] == list(range(1, min(steps, 55) + 1))
        return [x.tobytes() for x in coach.model], [r.loss for r in history.records]

    beside(comm, train)
    assert train(comm, ParameterServer()) == train(comm, ParameterServer(), 20)


@pytest.mark.ranks(3)
def test_bound_zero_is_the_synchronous_run_of_jax(comm: Communicator) -> None:
    def loss(parameters: Any, a: Any, b: Any) -> Any:
        return jnp.mean((jnp.tanh(a @ parameters["in"]) @ parameters["out"] - b) ** 2)

    def train(where: Communicator, strategy: Strategy) -> Any:
        random = np.random.default_rng(3)
        start = {name: random.standard_normal(5, "float32") for name in ("in", "out")}
        start["in"] = np.outer(start["in"], start["in"])
        coach = trainer(start, optax.adam(0.05), loss, strategy, comm=where)
        history = coach.run(Batches(40, 8, epochs=4, take=lambda i: (A[i], B[i])))
        assert len(history.records) == 20 and set(history.staleness) <= {0}
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(coach.model)]

    beside(comm, train)


@pytest.mark.ranks(3)
def test_parameters_that_no_loss_depends_on(comm: Communicator) -> None:
    """The optimizer does not change parameters without a gradient in an update."""

    def partly(arrays: Any, a: np.ndarray, b: np.ndarray) -> tuple[float, Any]:
        loss, (x, y) = squares(arrays, a, b)
        return loss, [x, y if run.step_number % 2 == 0 or comm.rank == run.step_number else None]

    replica = NumpyReplica([np.zeros(5), np.zeros(1)], partly)
    run = ParameterServer().start(replica, comm)
    run.train(batches(run, epochs=1), Session(steps=6))
    skipped = [frozenset(), frozenset(), frozenset(), frozenset([1]), frozenset(), frozenset([1])]
    assert replica.skipped == (skipped if comm.rank == 0 else [])


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.thin(3)
@pytest.mark.parametrize("scale", [False, True])
def test_stale_gradients_find_the_minimum(comm: Communicator, scale: bool) -> None:
    replica, session = least_squares(rate=0.05), Session()
    run = ParameterServer(staleness=4, scale_by_staleness=scale).start(replica, comm)
    run.train(batches(run, epochs=15), session)
    x, y = replica.arrays
    np.testing.assert_allclose(x, TRUE, atol=0.1)
    np.testing.assert_allclose(y, 0.5, atol=0.1)
    everywhere = comm.mpi.allgather([a.tobytes() for a in replica.arrays])
    assert everywhere.count(everywhere[0]) == comm.size


def delayed(delays: np.random.Generator, steps: int) -> Iterator[Any]:
    for _ in range(steps):
        if delays.random() < 0.02:
            time.sleep(2e-3)
        yield (np.ones((1, 5)), np.ones(1))


@pytest.mark.ranks(4)
@pytest.mark.cases("[03]-1000", reason="test_server_versions has all bounds, without messages")
@pytest.mark.parametrize(
    ("bound", "updates"),
    [
        *((bound, 1000) for bound in (0, 1, 3, 7)),
        *(
            pytest.param(b, 10_000, marks=pytest.mark.full("1,000 updates check the same bound"))
            for b in (0, 1, 3, 7)
        ),
    ],
)
def test_every_staleness_is_within_the_bound(comm: Communicator, bound: int, updates: int) -> None:
    replica, session = least_squares(rate=1e-3), Session(steps=updates)
    run = ParameterServer(staleness=bound).start(replica, comm)
    run.train(delayed(np.random.default_rng([bound, comm.rank]), 100 * updates), session)
    assert run.step_number == updates
    if comm.rank == 0:
        assert len(session.records) == updates
        found = [s for record in session.records for s in record.staleness]
        assert min(found) >= 0 and max(found) <= bound
        assert bound > 0 or len(found) == updates * (comm.size - 1)
        assert max(found) == bound


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("wish", [SAVE, STOP, END, 0])
def test_no_gradient_is_lost(comm: Communicator, wish: int) -> None:
    """A save, an end and `steps` use all computed gradients."""
    computed, saved = 0.0, []

    def counting(arrays: Any, a: np.ndarray, b: np.ndarray) -> tuple[float, Any]:
        nonlocal computed
        computed += len(b)
        return squares(arrays, a, b)

    def done() -> bool:
        used = sum(record.samples for record in session.records)
        saved.append((run.step_number, comm.mpi.allreduce(used), comm.mpi.allreduce(computed)))
        return wish != SAVE

    replica = NumpyReplica([np.zeros(5), np.zeros(1)], counting, rate=0.01)
    session = Session(wish_at=12, wish=wish, done=done) if wish else Session(steps=12)
    run = ParameterServer(staleness=3).start(replica, comm)
    run.train(batches(run, epochs=10), session)
    if not wish:
        done()
        run.train(batches(run, epochs=1), Session(steps=12))  # there is nothing to do
    everywhere = comm.mpi.allgather(saved)
    assert everywhere.count(everywhere[0]) == comm.size
    ((step, used, there),) = saved
    assert 12 <= step <= 12 + (wish > 0) and used == there
    if comm.rank == 0:
        whole = sum(record.samples for record in session.records) == 10 * len(A)
        assert whole == (wish == SAVE)


@pytest.mark.ranks(2, 3)
@pytest.mark.thin(3)
def test_a_worker_alone_is_interrupted(comm: Communicator, tmp_path: pathlib.Path) -> None:
    """The resumed run neither loses nor repeats a batch after a signal to one worker."""
    directory = pathlib.Path(comm.mpi.bcast(str(tmp_path)))
    for asked in (True, False):
        coach = trainer(least_squares(rate=0.01), strategy=ParameterServer(2))
        taken = iter(range(100))

        def take(rows: Any, asked: bool = asked, taken: Iterator[int] = taken) -> Any:
            if next(taken) == 5 and asked and comm.rank == comm.size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return A[rows], B[rows]

        given = Batches(len(A), 10, epochs=3, take=take)
        history = coach.run(given, checkpoint=Checkpoint(directory, minutes=None, resume=True))
        assert history.interrupted == asked
        samples = sum(record.samples for record in history.records)
        assert samples < 3 * len(A) if asked else samples == 3 * len(A)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.thin(3)
def test_a_failing_worker_ends_all(comm: Communicator) -> None:
    def failing(run: Any) -> Iterator[Any]:
        for n, batch in enumerate(batches(run, epochs=3)):
            if comm.rank == comm.size - 1 and n == 7:
                raise LookupError("no file of that name")
            yield batch

    for staleness in (0, 3):
        replica = least_squares()
        run = ParameterServer(staleness).start(replica, comm)
        start = time.monotonic()
        kind = LookupError if comm.rank == comm.size - 1 else StepError
        with pytest.raises(kind, match="no file of that name") as caught:
            run.train(failing(run), Session())
        if comm.rank < comm.size - 1:
            assert f"rank {comm.size - 1} has failed: LookupError" in str(caught.value)
            assert "in failing" in str(caught.value)
        assert time.monotonic() - start < 10  # the machine may be busy
        comm.mpi.Barrier()
        run.train(batches(run, epochs=1), Session())  # nothing is left of it
        states = comm.mpi.allgather((run.step_number, [x.tobytes() for x in replica.arrays]))
        assert states.count(states[0]) == comm.size


@pytest.mark.ranks(3)
def test_a_worker_may_finish_a_long_batch_after_a_failure(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_loop, "_PATIENCE", 1e-3)
    monkeypatch.setattr(server_loop, "end_job", pytest.fail)

    def slow(run: Any) -> Iterator[Any]:
        for n, batch in enumerate(batches(run, epochs=2)):
            if comm.rank == 1 and n == 4:  # which it makes after rank 2's first gradient
                raise LookupError("no file of that name")
            if comm.rank == 2:
                time.sleep(0.2)
            yield batch

    run = ParameterServer(3).start(least_squares(), comm)
    with pytest.raises(LookupError if comm.rank == 1 else StepError, match="no file"):
        run.train(slow(run), Session())


@pytest.mark.full("test_exchange checks the same norm of a sum")
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("strategy", [Synchronous(clip=1.0), ParameterServer()])
def test_rejects_a_gradient_whose_norm_overflows_float64(
    comm: Communicator, strategy: Strategy
) -> None:
    def steep(arrays: Any, a: np.ndarray, b: np.ndarray) -> tuple[float, Any]:
        return 0.0, [np.full(5, 1e160), np.zeros(1)]

    coach = trainer(NumpyReplica([np.zeros(5), np.zeros(1)], steep), strategy=strategy)
    with pytest.raises(FloatingPointError, match=r"step 1 is not made, .* is too large: the sum"):
        coach.run([(A[:4], B[:4])])
    assert not coach.model[0].any()


@pytest.mark.ranks(3)
def test_a_worker_is_dropped(comm: Communicator, capfd: pytest.CaptureFixture[str]) -> None:
    def spoiled(arrays: Any, a: np.ndarray, b: np.ndarray) -> tuple[float, Any]:
        loss, (x, y) = squares(arrays, a, b)
        if comm.rank == 2 and run.step_number >= 4:
            x[3] = np.nan
        return loss, [x, y]

    for strategy in (ParameterServer(throw=False), ParameterServer()):
        replica, session = NumpyReplica([np.zeros(5), np.zeros(1)], spoiled), Session()
        run = strategy.start(replica, comm)
        if strategy.throw:
            with pytest.raises(FloatingPointError, match=r"layer0 \(from rank 2\)"):
                run.train(batches(run, epochs=2), session)
            continue
        run.train(batches(run, epochs=2), session)
        said = capfd.readouterr().err
        assert run.step_number == 22 and np.isfinite(replica.arrays[0]).all()
        if comm.rank == 0:
            assert said.count("continues without rank 2: FloatingPointError") == 1
            assert [len(r.staleness) for r in session.records[:6]] == [2, 2, 2, 2, 1, 1]


@pytest.mark.ranks(2)
def test_all_workers_dropped_and_the_server_failing(comm: Communicator) -> None:
    def bad(*_: Any) -> Any:
        raise ValueError("the data are broken")

    replica = NumpyReplica([np.zeros(5), np.zeros(1)], bad)
    run = ParameterServer(throw=False).start(replica, comm)
    with pytest.raises(StepError, match=r"all workers(.|\n)*the data are broken"):
        run.train(batches(run, epochs=1), Session())
    replica, session = least_squares(), Session()
    if comm.rank == 0:
        session.note = bad  # type: ignore[method-assign]
    run = ParameterServer(1).start(replica, comm)
    with pytest.raises(ValueError if comm.rank == 0 else StepError, match="the data are broken"):
        run.train(batches(run, epochs=1), session)


@pytest.mark.ranks(2)
def test_an_error_of_the_last_callback_is_raised(comm: Communicator) -> None:
    def last(record: StepRecord) -> None:
        if record.step == 3:
            raise LookupError("too late?")

    training = trainer(models.Linear(), strategy=ParameterServer(1))
    with pytest.raises(StepError if comm.rank else LookupError, match="too late"):
        training.run(models.batches(), steps=3, callback=last)
    assert training.run(models.batches(), steps=4).records[-1].step == 4
    with pytest.raises(
        StepError if comm.rank else RuntimeError, match="cannot be called in the callback"
    ):
        training.run(models.batches(), steps=5, callback=lambda record: training.save("nowhere"))


@pytest.mark.ranks(1)
def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="got -1"):
        ParameterServer(staleness=-1)
    with pytest.raises(TypeError):
        ParameterServer(staleness=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="throw must be True or False, got 'ignore'"):
        ParameterServer(throw="ignore")  # type: ignore[arg-type]
