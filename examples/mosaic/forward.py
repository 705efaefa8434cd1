"""Values beside the references of the benchmark Mosaic."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
from cases import beam, bell, noise, slab

__all__ = ["forward", "forward_cases"]


def forward_cases() -> dict[str, tuple[str, str, Any]]:
    """Return the entry, the output, and the request of a swept value for each experiment."""

    def heat(build: Any) -> tuple[str, str, Any]:
        return "heat", "thermal_compliance", build

    def elastic(build: Any) -> tuple[str, str, Any]:
        return "elastic", "compliance", build

    return {
        "thermal_mesh-forward_baseline": heat(
            lambda n: slab(int(n), noise(int(n) * max(1, int(n) // 2)))
        ),
        "thermal_mesh-forward_agreement": heat(lambda rho: slab(16, rho)),
        "thermal_mesh-forward_source_baseline": heat(lambda n: slab(int(n), source=bell(int(n)))),
        "thermal_mesh-forward_source_linearity": heat(lambda a: slab(16, source=bell(16, a))),
        "structural_mesh-forward_baseline": elastic(lambda n: beam((int(n), 2, 4))),
        "structural_mesh-forward_agreement": elastic(lambda rho: beam((8, 2, 4), rho)),
    }


def forward(callers: Any, data: pathlib.Path, say: Any) -> float:
    """Compare all cases that have a reference, and return the largest relative error."""
    worst = 0.0
    for name, (kind, output, build) in forward_cases().items():
        known = np.load(data / f"{name}.npz")
        errors = {}
        for i, swept in enumerate(known["sweep_values"]):
            if f"reference_{i}" in known:
                value = float(callers[kind].apply(build(swept))[output])
                errors[float(swept)] = abs(value / float(known[f"reference_{i}"]) - 1)
        worst = max(worst, *errors.values())
        listed = ", ".join(f"{swept:g}: {error:.1e}" for swept, error in errors.items())
        say(f"{name}: {listed}")
    square = [
        float(callers["heat"].apply(slab(16, flux=q, hot_spot=True))["thermal_compliance"]) / q**2
        for q in (0.25, 0.5, 1.0, 2.0, 4.0)
    ]
    law = max(square) / min(square) - 1
    say(f"thermal_mesh-forward_physical_laws: C / Q² differs by {law:.1e}")
    say(f"largest relative error: {max(worst, law):.1e}")
    return max(worst, law)
