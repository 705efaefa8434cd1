"""Run all tests: those that start MPI themselves in plain sessions, the rest on 1, 2, 3, 4 ranks.

    python tests/run.py                          what `make test` runs (tests/tiers.py has the rule)
    python tests/run.py --all                    every case on every number of ranks
    python tests/run.py --all -n 2,3 tests/grid/test_halo_exchange.py -k periodic

`-n 0` are the plain sessions. What follows goes to pytest. A session has a hard time limit; when a
rank fails while others wait for it, or nobody gets any further, the session ends and the summary
names each rank's test. The summary ends with the tests that took the most processor time.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

TESTS = pathlib.Path(__file__).resolve().parent
# Another folder, for two runs at once.
BUILD = TESTS.parent / os.environ.get("MPIGRAD_TEST_BUILD", "build")
LOGS = BUILD / "test-logs"
# What one rank has compiled, the others and the later sessions need not compile again.
COMPILED = BUILD / "test-compiled"
CACHE = {"MPIGRAD_PROGRAMS": str(COMPILED)}
# Other sessions use the core on which a rank waits for another.
YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}
PATIENCE = 20.0  # seconds that others may wait in a test which one rank has failed
ENDED = (0, 1, 5)  # pytest's exit codes: passed, failed, no tests
LONG = 5.0  # processor seconds of a test without the mark `long`
# Processor seconds of `spin` on the processor on which the budget in the Makefile was measured.
REFERENCE = 0.03


def spin() -> float:
    """Return the processor seconds of a loop in Python: the shortest of five."""
    times = []
    for _ in range(5):
        start = time.process_time()
        total = 0
        for i in range(1_500_000):
            total += i & 7
        times.append(time.process_time() - start)
    return min(times)


class Session:
    """One pytest session on `ranks` ranks; 0 ranks: a plain process, for tests that start MPI.

    Of these, some mostly wait, for time limits and for jobs to end: a session of their own.
    """

    def __init__(
        self, ranks: int, arguments: list[str], limit: float, *, waits: bool = False
    ) -> None:
        self.ranks = ranks
        self.size = max(ranks, 1)
        self.limit = limit
        self.name = f"{ranks}-ranks" if ranks else "waiting" if waits else "launcher"
        self.directory = LOGS / self.name
        plain = "launcher and waits" if waits else "launcher and not waits"
        marker = "not launcher" if ranks else plain
        if os.environ.get("MPIGRAD_TORCH") == "1":  # make test-torch
            marker += " and torch"
        colour = f"--color={'yes' if sys.stdout.isatty() else 'no'}"
        options = ["-q", "-rfE", colour, "-m", marker, *arguments]
        program = [str(TESTS / "session.py"), str(self.directory), *options]
        launch = [sys.executable, "-m", "mpigrad", "launch", "-n", str(ranks)]
        self.command = (
            [*launch, "--timeout", f"{limit:g}", *program] if ranks else [sys.executable, *program]
        )
        self.seconds = 0.0
        self.processor = 0.0  # seconds of all ranks and of the jobs that the tests started
        self.costs: dict[str, float] = collections.defaultdict(float)
        self.long: set[str] = set()
        self.trouble = ""
        self.collected = 0
        self.outcomes: dict[str, dict[int, str]] = collections.defaultdict(dict)
        self.texts: dict[tuple[str, int], str] = {}

    def title(self) -> str:
        """What the summary calls it."""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}" if self.ranks else self.name

    def run(self, *, beside: bool = False) -> None:
        """Run the session to its end, or end it; `beside` others its output is shown afterwards."""
        if not beside:
            print(f"== tests: {self.title()}", flush=True)
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        start = time.monotonic()
        output = (self.directory / "output.log").open("w+") if beside else None
        around = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        process = subprocess.Popen(
            self.command,
            cwd=TESTS.parent,
            env=around
            | (CACHE | YIELD if self.ranks else {})
            | {"MPIGRAD_TEST_RANKS": str(self.ranks)},
            stdout=output,
            stderr=subprocess.STDOUT if beside else None,
        )
        try:
            while process.poll() is None:
                time.sleep(0.5)
                self.trouble = self._stalled()
                if time.monotonic() - start > self.limit + 10:
                    self.trouble = f"did not end within {self.limit:g} s"
                if self.trouble:
                    break
        finally:
            if process.poll() is None:
                process.terminate()  # the launcher ends all ranks
                process.wait()
        self.seconds = time.monotonic() - start
        if output is not None:
            output.seek(0)
            print(f"== tests: {self.title()}\n{output.read()}", end="", flush=True)
        self._read(process.returncode)

    def _diary(self, rank: int) -> list[dict[str, Any]]:
        try:
            text = (self.directory / f"rank{rank}.jsonl").read_text()
        except OSError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _latest(self, rank: int) -> dict[str, Any]:
        """The last entry of a diary, without reading all of it twice a second."""
        try:
            with (self.directory / f"rank{rank}.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                return json.loads(file.read().splitlines()[-1])
        except (OSError, IndexError, ValueError):  # none, half of one, or a long one
            return (self._diary(rank) or [{}])[-1]

    def _stalled(self) -> str:
        """Who has failed a test that others are waiting in, if that is how it is."""
        last = {rank: self._latest(rank) for rank in range(self.size)}
        for rank, entry in last.items():
            if entry.get("outcome") == "failed" and time.time() - entry["time"] > PATIENCE:
                waiting = [str(r) for r, e in last.items() if e.get("start") == entry["test"]]
                if waiting:
                    ranks = f"rank{'s' * (len(waiting) > 1)} {', '.join(waiting)}"
                    return f"rank {rank} failed while {ranks} waited for it"
        return ""

    def _read(self, code: int) -> None:
        where: list[str] = []
        for rank in range(self.size):
            diary = self._diary(rank)
            for entry in diary:
                if "outcome" in entry:
                    before = self.outcomes[entry["test"]].get(rank)
                    if before != "failed":
                        self.outcomes[entry["test"]][rank] = entry["outcome"]
                    if entry["text"]:
                        self.texts[entry["test"], rank] = entry["text"]
                if "end" in entry:
                    self.costs[entry["end"]] += entry["cpu"]
                    self.long |= {entry["end"]} if entry["long"] else set()
            self.processor += next((e["cpu"] for e in reversed(diary) if "cpu" in e), 0.0)
            codes = [entry["finished"] for entry in diary if "finished" in entry]
            if codes and codes[-1] not in ENDED and not self.trouble:
                self.trouble = f"rank {rank} ended with pytest's exit code {codes[-1]}"
            if not diary or "finished" not in diary[-1]:
                starts = [entry["start"] for entry in diary if "start" in entry]
                where.append(f"  rank {rank}: {starts[-1] if starts else 'before the first test'}")
                if starts:
                    self.outcomes[starts[-1]].setdefault(rank, "failed")
            for entry in diary:
                self.collected = entry.get("collected", self.collected)
        if where or code:  # after the tests, too: messages that nobody has received
            self.trouble = "\n".join([self.trouble or f"ended with exit code {code}", *where])

    def failed(self) -> list[str]:
        """Tests that failed on some rank."""
        return [test for test, ranks in self.outcomes.items() if "failed" in ranks.values()]

    def count(self, outcome: str) -> int:
        """Number of tests with this outcome; a test passes when no rank fails and one passes."""
        worst = ("failed", "passed", "skipped")
        found = [next(o for o in worst if o in r.values()) for r in self.outcomes.values() if r]
        return found.count(outcome)

    def report(self) -> None:
        """Print what rank 0's own output does not show: failures elsewhere, and an early end."""
        for test in self.failed():
            ranks = [r for r, o in self.outcomes[test].items() if o == "failed"]
            if 0 in ranks and not self.trouble:
                continue  # in pytest's own summary
            names = ", ".join(map(str, ranks))
            print(f"-- {self.title()}: {test} failed on rank{'s' * (len(ranks) > 1)} {names}")
            text = next((self.texts[test, r] for r in ranks if (test, r) in self.texts), "")
            print(text)
        if self.trouble:
            logs = self.directory.relative_to(TESTS.parent)
            print(f"-- {self.title()}: {self.trouble}\n  output of the ranks: {logs}")


def costliest(sessions: list[Session], limit: int = 10) -> list[str]:
    """Describe the tests that took the most processor time, and the long cases without mark."""
    functions: dict[str, float] = collections.defaultdict(float)
    cases: dict[str, int] = collections.Counter()
    unmarked = {}
    for session in sessions:
        for test, cost in session.costs.items():
            function = test.partition("[")[0]
            functions[function] += cost
            cases[function] += 1
            if cost > LONG and test not in session.long:
                unmarked[f"{test} ({session.title()})"] = cost
    top = sorted(functions.items(), key=lambda pair: -pair[1])[:limit]
    lines = ["the costliest tests, in processor seconds:"]
    lines += [
        f"{cost:7.1f}  {test}" + (f" ({cases[test]} cases)" if cases[test] > 1 else "")
        for test, cost in top
    ]
    if unmarked:
        lines.append(f"more than {LONG:g} processor seconds without the mark `long`:")
        ordered = sorted(unmarked.items(), key=lambda pair: -pair[1])
        lines += [f"{cost:7.1f}  {test}" for test, cost in ordered]
    return lines


def within_budget(sessions: list[Session], budget: float, speed: float) -> bool:
    """Print the processor time of all sessions; False if it is over the budget.

    `speed` is that of this processor, and the budget is for a processor of speed 1.
    """
    used = sum(session.processor for session in sessions)
    line = f"processor time: {used:.0f} s"
    if budget:
        line += f", {used * speed:.0f} s on the processor of the budget of {budget:.0f} s"
    print(line)
    if not budget or used * speed <= budget:
        return True
    print(
        f"the tests are over their budget of {budget:.0f} processor seconds. Shorten the costliest "
        "ones, or leave cases to make test-full (tests/tiers.py). The budget is in the Makefile."
    )
    return False


def main() -> int:
    """Run the sessions and print the summary; 0 when every test passed."""
    parser = argparse.ArgumentParser(description="Run all tests, on 1, 2, 3 and 4 ranks.")
    parser.add_argument("-n", default="0,1,2,3,4", metavar="RANKS", help="0: tests that start MPI")
    parser.add_argument("--all", action="store_true", help="every case, as in make test-full")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for each session")
    parser.add_argument("--budget", type=float, default=0.0, help="processor seconds of all tests")
    options, arguments = parser.parse_known_args()
    if options.all:
        os.environ["MPIGRAD_ALL_TESTS"] = "1"
    spins = [spin()]
    numbers = [int(n) for n in options.n.split(",")]
    sessions = [Session(n, arguments, options.limit) for n in numbers]
    if 0 in numbers:
        sessions.insert(0, Session(0, arguments, options.limit, waits=True))
    shutil.rmtree(COMPILED, ignore_errors=True)  # every run compiles all of it once
    COMPILED.mkdir(mode=0o700, parents=True)
    # One rank leaves a core idle: the tests that start MPI run beside the others.
    beside = [s for s in sessions if s.ranks == 0 and len(sessions) > 1]
    threads = [threading.Thread(target=s.run, kwargs={"beside": True}) for s in beside]
    for thread in threads:
        thread.start()
    deadline = float(os.environ.get("MPIGRAD_TEST_DEADLINE", "inf"))  # make quick
    for session in sessions:
        if session not in beside and time.time() > deadline:
            print(f"== tests: {session.title()}: not run, out of time")
        elif session not in beside:
            session.run()
            session.report()
            spins.append(spin())
    for thread, session in zip(threads, beside, strict=True):
        thread.join()
        session.report()
    for session in sessions:
        counts = ", ".join(f"{session.count(o)} {o}" for o in ("passed", "failed", "skipped"))
        left = session.collected - len(session.outcomes)
        early = f" (ended early: {left} not run)" if session.trouble or left > 0 else ""
        print(f"{session.title():>9}: {counts} in {session.seconds:.0f} s{early}")
        if left > 0 and not session.failed() and deadline == float("inf"):
            session.trouble = session.trouble or f"{left} tests were not run"
    passed = sum(session.count("passed") for session in sessions)
    failed = sum(session.count("failed") for session in sessions)
    trouble = any(session.trouble for session in sessions)
    # The speed of a virtual machine changes by a third, and sessions slow down those beside them.
    speed = REFERENCE / statistics.median(spins)
    within = within_budget(sessions, options.budget, speed)
    if passed > 50:
        print("\n".join(costliest(sessions)))
    print(f"{passed} passed, {failed} failed")
    nothing = not passed and deadline == float("inf")
    return 1 if failed or trouble or nothing or not within else 0


if __name__ == "__main__":
    sys.exit(main())
