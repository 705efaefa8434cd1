"""The population problem: mpigrad on 1 and 2 ranks, and plain blackjax on one process.

    python bench/population.py [--patients 100] [--chains 4] [--warmup 200] [--draws 200]
        [--ranks 1 2] [--output FILE]

The same patients, the same model, the same sampler from the same starts. "plain": all patients in
one jitted vmap of one process, no message. A "gradient" is the log density of all unknowns and its
gradient; ESS: bulk effective sample size of the worst of the eleven numbers that patients share.
Runs come one after the other; each prints its row when it is done.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

HERE = pathlib.Path(__file__).resolve()


def plain_likelihood(model: Any, records: Any) -> Callable[..., Any]:
    """The sum over patients without mpigrad: those of one shape in one vmap."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    groups: dict[Any, list[int]] = {}
    for place, record in enumerate(records):
        groups.setdefault(tuple(np.shape(leaf) for leaf in record), []).append(place)
    each = jax.vmap(model.log_likelihood, in_axes=(None, 0, 0))
    stacked = [
        (
            np.array(places),
            jax.tree.map(lambda *leaves: np.stack(leaves), *(records[i] for i in places)),
        )
        for places in groups.values()
    ]

    def likelihood(shared: Any, effects: Any) -> Any:
        return sum(jnp.sum(each(shared, effects[places], group)) for places, group in stacked)

    return likelihood
