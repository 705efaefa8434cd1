"""Run mpi4jax's own tests on mpigrad's module: `make test-peers`.

The sdist comes from the package index. Its tests run on 1, 2 and 3 ranks. The tests that may fail
are in differences.toml, each with its reason. A failure that is not in the list is an error, and so
is an entry of the list whose tests pass.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from dataclasses import dataclass

HERE = pathlib.Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "peers"
NAME, VERSION = "mpi4jax", "0.9.1.post2"
SHA256 = "1089ab81b22edf7273e5c94cfac4dadb4fc4b2d691af87d6eff85479c8f15a0a"
RANKS = (1, 2, 3)
LIMIT = 400  # seconds for one number of ranks
STUB = '''"""mpigrad's module, also in programs that a test starts."""

from mpigrad.compat.mpi4jax.stand_in import install

install()
'''


@dataclass(frozen=True)
class Difference:
    """Tests that are expected to fail.

    Attributes
    ----------
    tests
        Patterns of test names.
    ranks
        The numbers of ranks on which they fail.
    reason
        Why they fail, in a sentence.
    """

    tests: tuple[str, ...]
    ranks: tuple[int, ...]
    reason: str

    def covers(self, test: str, ranks: int) -> bool:
        """Return True if this test may fail on this number of ranks."""
        return ranks in self.ranks and any(fnmatch.fnmatchcase(test, p) for p in self.tests)


def differences(file: pathlib.Path) -> list[Difference]:
    """Read the list of expected differences."""
    rows = tomllib.loads(file.read_text())["difference"]
    return [
        Difference(tuple(row["tests"]), tuple(row.get("ranks", RANKS)), row["reason"])
        for row in rows
    ]


def source(folder: pathlib.Path) -> pathlib.Path:
    """Download the sdist, check it and unpack it; return its folder."""
    archive, unpacked = folder / f"{NAME}-{VERSION}.tar.gz", folder / f"{NAME}-{VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    if not archive.exists():
        words = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        words += ["--no-binary", NAME, "--dest", str(folder), f"{NAME}=={VERSION}"]
        subprocess.run([sys.executable, *words], check=True, timeout=LIMIT, env=without_cuda())
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        archive.unlink()
        sys.exit(f"test-peers: {archive.name} has SHA-256 {found}, expected {SHA256}. Try again.")
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return unpacked


def without_cuda() -> dict[str, str]:
    """Return the environment in which mpi4jax's metadata needs no CUDA."""
    return os.environ | {"CUDA_PATH": str(HERE)}


def outcomes(folder: pathlib.Path, ranks: int) -> dict[str, tuple[str, str]]:
    """Return the worst outcome of each test on all ranks, with its text."""
    order = ("skipped", "passed", "not run", "failed")
    worst: dict[str, tuple[str, str]] = {}
    for rank in range(ranks):
        own: dict[str, tuple[str, str]] = {}
        for line in (folder / f"rank{rank}.jsonl").read_text().splitlines():
            row = json.loads(line)
            before = own.get(row["test"], ("", ""))[0]
            if row["test"] and before != "failed":  # a failed teardown comes after the call
                last = row["text"].strip().rpartition("\n")[2]  # all of it is in the log
                own[row["test"]] = row["outcome"], f"rank {rank}: {last}"
        for test, outcome in own.items():
            kept = worst.setdefault(test, outcome)
            if order.index(outcome[0]) > order.index(kept[0]):
                worst[test] = outcome
    return worst


def compare(
    found: dict[str, tuple[str, str]], expected: list[Difference], ranks: int
) -> tuple[list[str], dict[str, int]]:
    """Return the unexpected outcomes, one text each, and the number of tests by outcome."""
    wrong: list[str] = []
    counts: dict[str, int] = dict.fromkeys(("passed", "skipped", "differ"), 0)
    for test, (outcome, text) in found.items():
        listed = any(d.covers(test, ranks) for d in expected)
        if outcome in ("failed", "not run"):
            counts["differ"] += 1
            if not listed:
                wrong.append(f"{test} on {ranks} ranks: {outcome}, {text}")
        else:
            counts[outcome] += 1
            if outcome == "passed" and listed:
                wrong.append(f"{test} on {ranks} ranks: passed, but is in differences.toml")
    for d in expected:
        if ranks in d.ranks and not any(d.covers(test, ranks) for test in found):
            wrong.append(f"{', '.join(d.tests)} on {ranks} ranks: there is no such test")
    return wrong, counts


def run(unpacked: pathlib.Path, ranks: int) -> dict[str, tuple[str, str]]:
    """Run the tests of the sdist on this number of ranks."""
    folder, stub = BUILD / f"outcomes-{ranks}", BUILD / "stub"
    for made in (folder, stub):
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
    (stub / f"{NAME}.py").write_text(STUB)
    paths = [str(stub), str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {
        "MPIGRAD_PEER_OUTCOMES": str(folder),
        "MPIGRAD_TIMEOUT": "30",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    words = ["-m", "mpigrad", "launch", "-n", str(ranks), "--timeout", str(LIMIT), "--as", NAME]
    words += ["-m", "pytest", "tests", "-q", "-p", "outcomes", "-p", "no:cacheprovider"]
    log = BUILD / f"log-{ranks}.txt"
    with log.open("w") as output:
        subprocess.run(
            [sys.executable, *words],
            cwd=unpacked,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=LIMIT + 60,
            check=False,
        )
    missing = [rank for rank in range(ranks) if not (folder / f"rank{rank}.jsonl").exists()]
    if missing:
        sys.exit(f"test-peers: rank {missing[0]} of {ranks} has no outcomes. See {log}.")
    return outcomes(folder, ranks)


def main() -> int:
    """Run everything, print a line for each number of ranks, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-n", type=int, nargs="*", default=RANKS, help="numbers of ranks")
    parser.add_argument("--source", type=pathlib.Path, help="the unpacked sdist, if it is here")
    parser.add_argument(
        "--fetch", type=pathlib.Path, help="unpack the sdist in this folder, and run no test"
    )
    arguments = parser.parse_args()
    if arguments.fetch:
        print(source(arguments.fetch))
        return 0
    unpacked = arguments.source or source(BUILD)
    expected = differences(HERE / "differences.toml")
    wrong: list[str] = []
    for ranks in arguments.n:
        start = time.monotonic()
        unexpected, counts = compare(run(unpacked, ranks), expected, ranks)
        wrong += unexpected
        print(
            f"test-peers: {NAME} {VERSION} on {ranks} ranks: {counts['passed']} passed, "
            f"{counts['skipped']} skipped by themselves, {counts['differ']} differ, "
            f"{len(unexpected)} of all unexpected ({time.monotonic() - start:.0f} s)",
            flush=True,
        )
    for text in wrong:
        print(f"test-peers: {text}")
    if wrong:
        print(f"test-peers: all output is in {BUILD}{os.sep}log-*.txt")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
