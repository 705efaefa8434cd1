"""Draw from a posterior with blackjax's NUTS, several chains at the same time."""

from __future__ import annotations

import dataclasses
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

        begun = time.monotonic()
        step = mpigrad.jit(mpigrad.vmap(advance, in_axes=(None, None, 0, 0, 0)))
        first = mpigrad.jit(mpigrad.vmap(lambda start: blackjax.nuts.init(start, density)))
        state = first(_settled(starts))
        if scales is None:
            scales = jax.tree.map(lambda leaf: np.ones(np.shape(leaf)[1:]), starts)
        tuning = jax.vmap(lambda _: start_tuning(scales))(chains)
        kept: list[Any] = []
        warmed = begun
        for iteration, stage in enumerate(_stages(self.warmup, self.draws)):
            if stage == _DRAW and not kept:
                warmed = time.monotonic()
            number = np.int32(iteration)
            state, tuning, figures = step(number, stage, chains, state, tuning)
            steps, acceptance, *_ = figures = jax.device_get(figures)
            if stage == _DRAW:
                kept.append((jax.device_get(state.position), figures))
            told = {"steps": float(np.mean(steps)), "acceptance": float(np.mean(acceptance))}
            if note(iteration + 1, told):
                break
        if not kept:
            return None
        unknowns, (steps, acceptance, divergent, sizes) = jax.tree.map(
            lambda *draws: np.stack(draws, axis=1), *kept
        )
        return Posterior(
            unknowns,
            sizes[:, 0],
            steps,
            acceptance,
            divergent,
            warmed - begun,
            time.monotonic() - warmed,
        )


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
