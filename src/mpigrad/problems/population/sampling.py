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
        note: Callable[[int, dict[str, float]], bool] = lambda draw, numbers: False,
    ) -> Posterior:
        """Sample from `density`, a log density that blackjax can differentiate.

        Parameters
        ----------
        starts
            Arrays of shape (chains, ...).
        note
            Called after each draw with its number and a few figures; true: that is enough.
        """
        chains = len(starts.effects)
        keys = jax.random.split(jax.random.key(seed), chains)
        begun = time.monotonic()
        adaptation = blackjax.window_adaptation(
            blackjax.nuts,
            density,
            target_acceptance_rate=self.acceptance,
            adaptation_info_fn=get_filter_adapt_info_fn(),  # keeps nothing
            max_num_doublings=self.depth,
        )

        def adapt(key: Array, start: Unknowns) -> tuple[Any, Any, Any]:
            (state, found), _ = adaptation.run(jax.random.fold_in(key, 0), start, self.warmup)  # type: ignore[call-arg]
            return state, found["step_size"], found["inverse_mass_matrix"]

        state, step_size, metric = mpigrad.jit(mpigrad.vmap(adapt))(keys, starts)
        jax.block_until_ready(state)
        warmed = first = time.monotonic()
        kernel = blackjax.nuts.build_kernel()

        def advance(number: Array, key: Array, state: Any, step_size: Array, metric: Array) -> Any:
            key = jax.random.fold_in(key, number)
            state, info = kernel(key, state, density, step_size, metric, self.depth)
            return state, (info.num_integration_steps, info.acceptance_rate, info.is_divergent)

        step = mpigrad.jit(mpigrad.vmap(advance, in_axes=(None, 0, 0, 0, 0)))
        kept: list[Any] = []
        for draw in range(1, self.draws + 1):
            state, figures = step(np.int32(draw), keys, state, step_size, metric)
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
