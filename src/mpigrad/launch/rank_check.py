"""The program of `mpigrad check`: one run of a user's program, and its outputs.

    python -m mpigrad.launch.rank_check FILE RTOL PROGRAM.py [ARGUMENT ...]

runs on each rank. If FILE does not exist, rank 0 writes the outputs to it. Otherwise it compares
them with those of the file, prints a line for each, and adds what differs to FILE.differences.
"""

from __future__ import annotations

import importlib.util
import pathlib
import pickle
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

from mpigrad.autodiff.gradient_checks import largest_difference

_KINDS = 'an array that is the same on all ranks, ("rows", part) or ("sum", share)'


def main() -> int:
    """Run the program on this rank, and write or compare its outputs on rank 0."""
    _, name, rtol, *sys.argv = sys.argv
    program, file, world = sys.argv[0], pathlib.Path(name), MPI.COMM_WORLD
    sys.path.insert(0, str(pathlib.Path(program).resolve().parent))
    # A module with a name, so that messages may have objects of its classes.
    spec = importlib.util.spec_from_file_location(pathlib.Path(program).stem, program)
    if spec is None or spec.loader is None:
        raise ValueError(f"mpigrad check: expected a Python file, got {program}. Check its name.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, "outputs", None)
    if function is None:
        raise ValueError(
            f"mpigrad check: expected a function outputs() in {program}, found none. Let it return "
            f"a dictionary of outputs by name, each {_KINDS}."
        )
    outputs = function()
    names = world.allgather(list(outputs))
    if any(other != names[0] for other in names):
        raise ValueError(
            f"mpigrad check: expected the same outputs on all ranks, got {names}. Return all of "
            "them on every rank."
        )
    whole = {name: _whole(name, outputs[name]) for name in names[0]}
    if world.rank == 0:
        if not file.exists():
            file.write_bytes(pickle.dumps({name: array for name, (array, _, _) in whole.items()}))
        reference = pickle.loads(file.read_bytes())
        _compare(reference, whole, float(rtol), file.with_suffix(".differences"))
    return 0


def _whole(name: str, output: Any) -> tuple[np.ndarray, float, int]:
    """Return, on rank 0, an output, its largest difference between ranks, and on which rank."""
    kind, part = output if isinstance(output, tuple) and len(output) == 2 else ("same", output)
    parts = MPI.COMM_WORLD.gather((kind, np.asarray(part)))
    if parts is None:
        return np.zeros(0), 0.0, 0
    kinds, arrays = {kind for kind, _ in parts}, [array for _, array in parts]
    if len(kinds) > 1 or not kinds <= {"same", "rows", "sum"}:
        raise ValueError(
            f"mpigrad check: output {name!r}: expected {_KINDS}, got {sorted(map(str, kinds))}. "
            "Return the same kind on every rank."
        )
    if kinds == {"rows"}:
        return np.concatenate(arrays), 0.0, 0
    if kinds == {"sum"}:
        return np.sum(arrays, axis=0), 0.0, 0
    spread = [
        largest_difference(array, arrays[0])[0] if array.shape == arrays[0].shape else np.inf
        for array in arrays
    ]
    return arrays[0], max(spread), int(np.argmax(spread))


def _compare(
    reference: dict[str, np.ndarray],
    outputs: dict[str, tuple[np.ndarray, float, int]],
    rtol: float,
    differences: pathlib.Path,
) -> None:
    """Print a line for each output, and add the names of those that differ to a file."""
    size, width = MPI.COMM_WORLD.size, max(map(len, reference), default=0)
    if {*outputs} != {*reference}:
        raise ValueError(
            f"mpigrad check: expected the outputs {sorted(reference)} on {size} ranks, got "
            f"{sorted(outputs)}. Return the same outputs on any number of ranks."
        )
    for name, (array, spread, rank) in outputs.items():
        expected = reference[name]
        shown = f"{array.item():.10g}" if array.size == 1 else f"shape {array.shape}"
        if array.shape != expected.shape:
            text, differs = f"{shown}, expected {expected.shape}", True
        elif not spread <= rtol:
            text, differs = f"rank {rank} differs from rank 0 by {spread:.2g}", True
        else:
            error, index, here, there = largest_difference(array, expected)
            differs = not error <= rtol
            place = f" at {list(index)}" if index else ""
            text = f"{shown}, within {error:.1g}"
            if differs:
                text = f"differs by {error:.2g}{place}: {here:.10g}, expected {there:.10g}"
        print(f"  {name:<{width}}  {size:3} rank{'s' if size > 1 else ' '}  {text}", flush=True)
        if differs:
            with differences.open("a") as stream:
                stream.write(f"{name} on {size} ranks\n")


if __name__ == "__main__":
    sys.exit(main())
