"""Random subsets and sums of shots, which make an iteration cheaper than with all shots."""

from __future__ import annotations

import dataclasses

import numpy as np

from mpigrad.waves import Survey
from mpigrad_apps.fwi.inversion import Inversion
from mpigrad_apps.shots.experiment import Experiment

__all__ = ["check_shot_sampling", "sample_shots"]


def check_shot_sampling(problem: Inversion, subset: int | None, encode: bool) -> None:
    """Raise a ValueError, the same on every rank, if the shots cannot be sampled so."""
    whole, groups = problem.experiment, problem.group.n_groups
    most = whole.n_shots // groups * groups
    if subset is not None and (subset % groups or subset > most):
        raise ValueError(
            f"--subset: each group takes the same number of shots, got {subset} for {groups} "
            f"group{'s' * (groups > 1)} and {whole.n_shots} shots. Use a multiple of {groups}, at "
            f"most {most}."
        )
    if encode and not np.all(whole.receivers == whole.receivers[:1]):
        raise ValueError(
            "--encode: expected the same receivers for all shots, got receivers that move with the "
            "shots. Leave the option out."
        )


def sample_shots(
    problem: Inversion, subset: int | None, encode: bool, seed: tuple[int, ...]
) -> Inversion:
    """Return the inversion with a random part of the shots, for one round.

    Parameters
    ----------
    subset
        Number of random shots, which are divided among the groups. None: all.
    encode
        Add up the shots of a group, each with a random sign, in one simulation. Waves are linear in
        the wavelet, so the expectation of the squared residuals over the signs is their sum over
        the shots (Krebs et al., "Fast full-wavefield seismic inversion using encoded sources",
        Geophysics 74(6), 2009).
    seed
        Seed of the draw. The same on all ranks.
    """
    group = problem.group
    # Ranks of a group draw the same shots, and groups draw independently.
    generator = np.random.default_rng([*seed, int(group.shots[0])])
    chosen = np.arange(len(group.shots))
    if subset is not None:
        count = subset // group.n_groups
        chosen = np.sort(generator.choice(len(group.shots), count, replace=False))
    part, recorded = group.experiment.shots(chosen), problem.recorded[chosen]
    if encode:
        signs = generator.choice([-1.0, 1.0], len(chosen))
        part = _encoded(part, signs)
        recorded = np.tensordot(signs, recorded, 1)[None]
    sampled = dataclasses.replace(
        group,
        experiment=part,
        survey=Survey(part.sources, part.receivers),
        shots=group.shots[chosen],
    )
    return dataclasses.replace(problem, group=sampled, recorded=recorded)


def _encoded(part: Experiment, signs: np.ndarray) -> Experiment:
    """Return the experiment whose only shot is the sum of all shots with these signs."""
    shots, sources = part.sources.shape[:2]
    wavelets = np.broadcast_to(part.wavelets, (shots, sources, part.steps))
    return dataclasses.replace(
        part,
        sources=part.sources.reshape(1, shots * sources, -1),
        receivers=part.receivers[:1],
        wavelets=(signs[:, None, None] * wavelets).reshape(1, shots * sources, part.steps),
    )
