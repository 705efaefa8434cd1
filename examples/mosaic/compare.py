"""Compare mpigrad with the reference data of the benchmark Mosaic (arXiv:2606.27895).

    python compare.py DATA [--parts forward gradient inversion topopt cost] [--tesseract]
    mpiexec -n 2 python compare.py DATA
    mpiexec -n 4 python compare.py --parts large --sizes 3200

DATA is a directory with the references. All parts work on any number of ranks. The exit code is 1
if a value or a gradient is not as good as those of the other solvers.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

import jax

jax.config.update("jax_enable_x64", True)

from cost import cost
from entries import ElasticEntry, HeatEntry
from forward import forward
from gradients import gradients
from inversion import inversion
from large import large
from topopt import topopt

import mpigrad as mg

HERE = pathlib.Path(__file__).resolve().parent
PARTS = ("forward", "gradient", "inversion", "topopt", "cost", "large")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("data", type=pathlib.Path, nargs="?", help="directory of references")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-1])
    parser.add_argument("--tesseract", action="store_true", help="call the entries by Tesseract")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32, 64, 128], help="nx")
    parser.add_argument("--steps", type=int, help="of the optimizations; as in Mosaic")
    given = parser.parse_args()
    if given.data is None and set(given.parts) != {"large"}:
        parser.error("all parts but large need DATA, the directory of references")
    entries = {"heat": HeatEntry(), "elastic": ElasticEntry()}
    callers: dict[str, Any] = dict(entries)
    if given.tesseract:
        from tesseract_core import Tesseract

        for kind, name in (("heat", "thermal_mesh"), ("elastic", "structural_mesh")):
            callers[kind] = Tesseract.from_tesseract_api(HERE / name / "tesseract_api.py")

    def say(line: str) -> None:
        if mg.default_communicator().rank == 0:
            print(line, flush=True)

    good = True
    for part in given.parts:
        match part:
            case "forward":
                good &= forward(callers, given.data, say) < 1e-6
            case "gradient":
                good &= gradients(callers, entries, say) < 1e-6
            case "inversion":
                good &= inversion(entries, given.data, say, given.steps or 200) < 0.5
            case "topopt":
                good &= abs(topopt(callers, given.data, say, given.steps or 2500) - 1) < 1e-3
            case "cost":
                cost(callers, given.data, say, given.sizes)
            case "large":
                good &= all([large(nx, say) < 1e-6 for nx in given.sizes])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
