"""Draw from a posterior with blackjax's NUTS, several chains at the same time."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import blackjax
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from blackjax.adaptation.mass_matrix import mass_matrix_adaptation
from blackjax.adaptation.step_size import dual_averaging_adaptation
from blackjax.adaptation.window_adaptation import build_schedule
from jaxtyping import Array, Bool, Float, Int

import mpigrad
from mpigrad.checkpoint import CheckpointSession
from mpigrad.communicator import Communicator
from mpigrad_apps.population.model import Unknowns

__all__ = ["NUTS", "Posterior"]


@dataclasses.dataclass(frozen=True)
class Posterior:
    """Draws of all unknowns, and statistics of the sampler.

    Attributes
    ----------
    unknowns
        Arrays of shape (chains, draws, ...).
    step_size
        Step size of each chain.
    steps
        Number of steps in the trajectory of each draw. Each step evaluates the density and its
        gradient.
    acceptance, divergent
        Acceptance and divergence of each draw.
    warmup_seconds, seconds
        Wall-clock time of the warm-up, which includes compilation, and of the draws.
    """

    unknowns: Unknowns
    step_size: Float[np.ndarray, " chains"]
    steps: Int[np.ndarray, "chains draws"]
    acceptance: Float[np.ndarray, "chains draws"]
    divergent: Bool[np.ndarray, "chains draws"]
    warmup_seconds: float
    seconds: float


class _Tuning(NamedTuple):
    """The states of one chain in blackjax's dual averaging and metric estimation."""

    step_size: Any
    metric: Any


_KINDS = (np.int32, np.float64, np.bool_, np.float64)  # of the figures of an iteration
_FAST, _SLOW, _WINDOW_ENDS, _DRAW = range(4)  # the change of the tuning in an iteration


@dataclasses.dataclass(frozen=True)
class NUTS:
    """The no-U-turn sampler of blackjax with Stan's warm-up (step size and diagonal metric).

    One compiled program advances all chains by one iteration of the warm-up or of the draws, and
    computes their densities in one batch.

    Parameters
    ----------
    warmup, draws
        Numbers of iterations of each chain.
    acceptance
        Mean acceptance that the step size is tuned for.
    depth
        A trajectory has at most 2^depth steps.
    """

    warmup: int = 300
    draws: int = 300
    acceptance: float = 0.8
    depth: int = 8

    def sample(
        self,
        density: Callable[[Unknowns], Array],
        starts: Unknowns,
        seed: int,
        note: Callable[[int, dict[str, float]], bool] = lambda iteration, figures: False,
        comm: Communicator | None = None,
        scales: Unknowns | None = None,
        session: CheckpointSession | None = None,
    ) -> Posterior | None:
        """Sample from `density`, a log density that JAX can differentiate (collective).

        Every rank runs the sampler. Its decisions depend on the density, which is equal on all
        ranks, and on the sampler's arithmetic, which ranks may round differently. Therefore each
        iteration starts from the state of rank 0. So rounding differences cannot grow until ranks
        take different decisions.

        Parameters
        ----------
        density
            Log density as a function of the unknowns, equal on all ranks.
        starts
            Unknowns to start from: arrays of shape (chains, ...).
        seed
            Seed of all random draws.
        note
            Called after each iteration, also of the warm-up, with the number of completed
            iterations and a few figures. A true result ends the sampling. The result must be the
            same on all ranks.
        comm
            The ranks that compute the density; by default all ranks.
        scales
            Rough standard deviations of one chain's unknowns, the metric at the start of the
            warm-up. By default ones.
        session
            The session of a checkpoint. The state and the draws are saved when it decides so and at
            the end, and the sampling continues from its save. A signal ends the sampling.

        Returns
        -------
        Posterior or None
            The draws, or None if the sampling ended before the first draw.
        """
        kernel = blackjax.nuts.build_kernel()
        start_tuning, tune = _tuning(self.acceptance)
        chains = np.arange(len(starts.effects), dtype=np.int32)

        def advance(iteration: Array, stage: Array, chain: Array, state: Any, tuning: Any) -> Any:
            state, tuning = mpigrad.bcast((state, tuning), comm=comm)
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), chain), iteration)
            logarithm = jnp.where(
                stage == _DRAW, tuning.step_size.log_step_size_avg, tuning.step_size.log_step_size
            )
            size, metric = jnp.exp(logarithm), tuning.metric.inverse_mass_matrix
            state, info = kernel(key, state, density, size, metric, self.depth)
            tuning = tune(stage, tuning, state.position, info.acceptance_rate)
            figures = info.num_integration_steps, info.acceptance_rate, info.is_divergent, size
            return state, tuning, figures

        step = mpigrad.jit(mpigrad.vmap(advance, in_axes=(None, None, 0, 0, 0)))
        if scales is None:
            scales = jax.tree.map(lambda leaf: np.ones(np.shape(leaf)[1:]), starts)
        tuning = jax.vmap(lambda _: start_tuning(scales))(chains)
        first = mpigrad.jit(mpigrad.vmap(lambda start: blackjax.nuts.init(start, density)))
        starts = _settled(starts)
        now = None if session is None else _load(session, first, starts, tuning)
        if now is None:
            now = _Sampling(0, first(starts), tuning)
        stages = _stages(self.warmup, self.draws)
        for iteration in range(now.iteration, len(stages)):
            stage, begun = stages[iteration], time.monotonic()
            now.state, now.tuning, figures = step(
                np.int32(iteration), stage, chains, now.state, now.tuning
            )
            figures = tuple(map(np.asarray, jax.device_get(figures), _KINDS))
            now.iteration += 1
            if stage == _DRAW:
                now.draws.append((jax.device_get(now.state.position), figures))
                now.seconds += time.monotonic() - begun
            else:
                now.warmup_seconds += time.monotonic() - begun
            means = {"steps": float(np.mean(figures[0])), "acceptance": float(np.mean(figures[1]))}
            ends = note(now.iteration, means)
            if session is not None:
                decision = session.decide(now.iteration)
                ends = ends or decision.stop
                if decision.save or ends or now.iteration == len(stages):
                    _save(session, now)
            if ends:
                break
        if not now.draws:
            return None
        unknowns, (steps, acceptance, divergent, sizes) = _stacked(now.draws)
        times = now.warmup_seconds, now.seconds
        return Posterior(unknowns, sizes[:, 0], steps, acceptance, divergent, *times)


@dataclasses.dataclass
class _Sampling:
    """The state of a sampling after an iteration. A draw is a position with its figures."""

    iteration: int
    state: Any
    tuning: Any
    draws: list[Any] = dataclasses.field(default_factory=list)
    warmup_seconds: float = 0.0
    seconds: float = 0.0


def _stacked(draws: list[Any]) -> Any:
    """Return the draws as arrays of shape (chains, draws, ...)."""
    return jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *draws)


def _save(session: CheckpointSession, now: _Sampling) -> None:
    """Save the state of rank 0, from which the next iteration starts on all ranks (collective)."""
    tree = now.state, now.tuning, _stacked(now.draws) if now.draws else None
    tree = session.store.comm.mpi.bcast(jax.device_get(tree))
    extra = {"draws": len(now.draws), "seconds": (now.warmup_seconds, now.seconds)}
    try:
        session.save(now.iteration, tree, extra=extra)
    except OSError as error:  # on all ranks, but a failed save must not end the run
        if session.store.comm.rank == 0:
            print(f"mpigrad: population: {error}, and the run continues", file=sys.stderr)


def _load(
    session: CheckpointSession, first: Callable[..., Any], starts: Unknowns, tuning: _Tuning
) -> _Sampling | None:
    """Return the sampling that was saved last, or None (collective)."""
    state = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), jax.eval_shape(first, starts))

    def like(extra: Any) -> Any:
        """Return a tree with the shapes of a save."""
        if not extra["draws"]:
            return state, tuning, None
        figures = tuple(np.empty(len(starts.effects), kind) for kind in _KINDS)
        return state, tuning, _stacked([(state.position, figures)] * extra["draws"])

    saved = session.load(None, make_like=like)
    if saved is None:
        return None
    state, tuning, draws = saved.tree
    each = [jax.tree.map(lambda x, i=i: x[:, i], draws) for i in range(saved.extra["draws"])]
    return _Sampling(saved.step, state, tuning, each, *saved.extra["seconds"])


def _stages(warmup: int, draws: int) -> list[np.int32]:
    """Return the stage of each iteration: Stan's windows, then draws."""
    slow = [
        _WINDOW_ENDS if ends else _SLOW if stage else _FAST
        for stage, ends in np.asarray(build_schedule(warmup)).tolist()
    ]
    return [np.int32(stage) for stage in [*slow, *[_DRAW] * draws]]


def _tuning(acceptance: float) -> tuple[Callable[..., _Tuning], Callable[..., _Tuning]]:
    """Return the functions that start the tuning of a chain and change it in an iteration."""
    start_size, change_size, final_size = dual_averaging_adaptation(acceptance)
    start_metric, change_metric, final_metric = mass_matrix_adaptation()

    def start(scales: Unknowns) -> _Tuning:
        numbers, _ = jax.flatten_util.ravel_pytree(scales)
        metric = start_metric(numbers.size)._replace(inverse_mass_matrix=numbers**2)
        return _settled(_Tuning(start_size(1.0), metric))

    def fast(now: _Tuning, position: Unknowns, accepted: Array) -> _Tuning:
        return now._replace(step_size=change_size(now.step_size, accepted))

    def slow(now: _Tuning, position: Unknowns, accepted: Array) -> _Tuning:
        return fast(now, position, accepted)._replace(metric=change_metric(now.metric, position))

    def window_ends(now: _Tuning, position: Unknowns, accepted: Array) -> _Tuning:
        done = slow(now, position, accepted)
        return _Tuning(start_size(final_size(done.step_size)), final_metric(done.metric))

    def draw(now: _Tuning, position: Unknowns, accepted: Array) -> _Tuning:
        return now

    def tune(stage: Array, now: _Tuning, position: Unknowns, accepted: Array) -> _Tuning:
        def cast(change: Callable[..., _Tuning]) -> Callable[..., _Tuning]:
            return lambda *operands: jax.tree.map(
                lambda new, old: jnp.asarray(new, old.dtype), change(*operands), now
            )

        changes = [cast(change) for change in (fast, slow, window_ends, draw)]
        return jax.lax.switch(stage, changes, now, position, accepted)

    return start, tune


def _settled(tree: Any) -> Any:
    """Convert to types that an iteration does not change, so that it is compiled only once."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.asarray(leaf).dtype), tree)
