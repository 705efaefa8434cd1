"""Seconds of one value, and of a value and its gradient, as Mosaic measures them."""

from __future__ import annotations

import csv
import pathlib
import time
from typing import Any

from cases import beam, slab

__all__ = ["cost"]


def cost(callers: Any, data: pathlib.Path, say: Any, sizes: list[int]) -> None:
    """Print seconds beside the published ones, which are of other machines."""
    with (data / "published_seconds.csv").open() as file:
        published = list(csv.DictReader(file))
    say("seconds of wall time and of CPU, the mean of 3 calls with equal inputs. Published: best")
    for problem, kind, output, build, largest in (
        ("thermal-mesh", "heat", "thermal_compliance", slab, None),
        ("structural-mesh", "elastic", "compliance", lambda n: beam((n, 2, n // 2)), 128),
    ):
        for nx in sizes:
            if largest is not None and nx > largest:
                continue
            request, caller = build(nx), callers[kind]

            def value(caller: Any = caller, request: Any = request, output: Any = output) -> float:
                return float(caller.apply(request)[output])

            def gradient(
                caller: Any = caller,
                request: Any = request,
                output: Any = output,
                value: Any = value,
            ) -> None:
                weight = {output: 2 * value()}
                caller.vector_jacobian_product(request, {"rho"}, {output}, weight)

            for name, call in (("forward", value), ("vjp", gradient)):
                call()
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(3):
                    call()
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                same = [
                    (float(row["mean_s"]), row["solver"])
                    for row in published
                    if (row["problem"], row["pass"], row["nx"]) == (problem, name, str(nx))
                    and row["mean_s"] != "failed"
                ]
                best = "{:.3g} ({})".format(*min(same)) if same else "-"
                say(f"{problem} {name} {nx:>5}: {wall / 3:8.3f} {cpu / 3:8.3f}   {best}")
