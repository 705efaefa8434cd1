"""Draws from a posterior: blackjax's NUTS, several chains side by side."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import blackjax
import jax
import numpy as np
from blackjax.adaptation.base import get_filter_adapt_info_fn
from jaxtyping import Array, Bool, Float, Int

import mpigrad
from mpigrad.communicator import Communicator
from mpigrad.problems.population.model import Unknowns

__all__ = ["NUTS", "Posterior"]


@dataclasses.dataclass(frozen=True)
class Posterior:
    """Draws of all unknowns, and how they came about.

    Attributes
    ----------
    unknowns
        Arrays of shape (chains, draws, ...).
    step_size
        That of each chain.
    steps
        Of each draw, the steps of its trajectory: evaluations of the density and its gradient.
    acceptance, divergent
        Of each draw.
    warmup_seconds, seconds
        Wall-clock time of the warm-up, with compiling, and of the draws, without.
    """

    unknowns: Unknowns
    step_size: Float[np.ndarray, " chains"]
    steps: Int[np.ndarray, "chains draws"]
    acceptance: Float[np.ndarray, "chains draws"]
    divergent: Bool[np.ndarray, "chains draws"]
    warmup_seconds: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class NUTS:
    """The no-U-turn sampler with Stan's warm-up (step size and diagonal metric).

    Chains go in step: one compiled program advances all of them, in one batch of densities.
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
        note: Callable[[int, dict[str, float]], bool] = lambda draw, figures: False,
        comm: Communicator | None = None,
    ) -> Posterior:
        """Sample from `density`, a log density that blackjax can differentiate (collective).

        Every rank runs the sampler, and starts each draw from rank 0's state.

        Parameters
        ----------
        starts
            Arrays of shape (chains, ...).
        note
            Called after each draw with its number and a few figures; true: that is enough. All
            ranks must give the same answer.
        comm
            The ranks that compute the density; by default all ranks.
        """
        chains = np.arange(len(starts.effects), dtype=np.int32)
        begun = time.monotonic()
        sampler = _agreeing(comm)
        adaptation = blackjax.window_adaptation(
            sampler,
            density,
            target_acceptance_rate=self.acceptance,
            adaptation_info_fn=get_filter_adapt_info_fn(),  # keeps nothing
            max_num_doublings=self.depth,
        )

        def key(chain: Array, draw: Any) -> Array:
            return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), chain), draw)

        def adapt(chain: Array, start: Unknowns) -> tuple[Any, Any, Any]:
            run: Any = adaptation.run
            (state, found), _ = run(key(chain, 0), start, self.warmup)
            return state, found["step_size"], found["inverse_mass_matrix"]

        state, step_size, metric = mpigrad.jit(mpigrad.vmap(adapt))(chains, starts)
        jax.block_until_ready(state)
        warmed = first = time.monotonic()
        kernel = sampler.build_kernel()

        def advance(draw: Array, chain: Array, state: Any, step_size: Array, metric: Array) -> Any:
            random = key(chain, draw)
            state, info = kernel(random, state, density, step_size, metric, self.depth)
            return state, (info.num_integration_steps, info.acceptance_rate, info.is_divergent)

        step = mpigrad.jit(mpigrad.vmap(advance, in_axes=(None, 0, 0, 0, 0)))
        kept: list[Any] = []
        for draw in range(1, self.draws + 1):
            state, figures = step(np.int32(draw), chains, state, step_size, metric)
            kept.append(jax.device_get((state.position, figures)))
            if draw == 1:  # it compiles
                first = time.monotonic()
            steps, acceptance, _ = kept[-1][1]
            if note(draw, {"steps": float(np.mean(steps)), "acceptance": float(acceptance.mean())}):
                break
        seconds = (time.monotonic() - first) * len(kept) / max(len(kept) - 1, 1)
        unknowns, (steps, acceptance, divergent) = jax.tree.map(
            lambda *draws: np.stack(draws, axis=1), *kept
        )
        return Posterior(
            unknowns,
            np.asarray(step_size),
            steps,
            acceptance,
            divergent,
            warmed - begun,
            seconds,
        )


def _agreeing(comm: Communicator | None) -> Any:
    """NUTS whose draws start from rank 0's state, step size and metric, on every rank.

    Its decisions follow from the density, which is equal on all ranks, and from its own arithmetic,
    which programs of different ranks may round differently. Left alone, such a difference grows
    from draw to draw, until ranks take different numbers of steps.
    """

    def build_kernel(*options: Any) -> Callable[..., Any]:
        kernel = blackjax.nuts.build_kernel(*options)

        def draw(
            rng_key: Array,
            state: Any,
            logdensity_fn: Callable[..., Any],
            step_size: Any,
            inverse_mass_matrix: Any,
            max_num_doublings: int = 10,
        ) -> Any:
            now = mpigrad.bcast((state, step_size, inverse_mass_matrix), comm=comm)
            state, step_size, inverse_mass_matrix = now
            return kernel(
                rng_key, state, logdensity_fn, step_size, inverse_mass_matrix, max_num_doublings
            )

        return draw

    return dataclasses.replace(blackjax.nuts, build_kernel=build_kernel)
