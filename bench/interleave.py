"""Programs that are asked in turn, and so measured against each other.

A program that waits sleeps, on every rank: each reads its commands from a pipe of its own. (Ranks
that looked for a command every half millisecond would take part of a core from the others.)
"""

from __future__ import annotations

import os
import pathlib
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO

# The folder of the pipes, which have the ranks' numbers as names (C programs read them, too).
PIPES = "BENCH_PIPES"
_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "XLA_", "JAX_")


def commands(rank: int = 0) -> Iterator[str]:
    """The commands that this rank is given, until it is told to quit."""
    with (pathlib.Path(os.environ[PIPES]) / str(rank)).open() as pipe:
        for line in pipe:
            if line.strip() == "quit":
                return
            yield line.strip()


class Ended(Exception):
    """A program has ended before it had answered."""


class Program:
    """A running program: on ranks with the settings of `mpigrad launch`; with None, without MPI."""

    def __init__(
        self,
        words: list[str],
        ranks: int | None,
        environment: Mapping[str, str] | None = None,
        stderr: IO[str] | None = None,
    ) -> None:
        if ranks is None:  # another library: what is set for ranks is not for it
            around = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        else:
            from mpigrad.launch.launcher import rank_environment
            from mpigrad.launch.mpi_installation import find_launcher, mpi_library

            launcher = find_launcher(mpi_library())
            words = [launcher.path, "-n", str(ranks), *words]
            around = os.environ | rank_environment(launcher, ranks)
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[IO[str]] = []
        for rank in range(ranks or 1):
            path = pathlib.Path(self._folder.name) / str(rank)
            os.mkfifo(path)
            # Read and write: opening waits for nobody, and a program that has ended breaks nothing.
            self._pipes.append(open(os.open(path, os.O_RDWR), "w"))  # noqa: SIM115
        self.words = words
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**around, **(environment or {}), PIPES: self._folder.name},
        )

    def answer(self) -> str:
        """The next line that the program prints, on rank 0."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Ended(f"{shlex.join(self.words)} ended early")
        return line

    def ask(self, command: str) -> str:
        """Tell every rank a command, and wait for the answer."""
        self._tell(command)
        return self.answer()

    def end(self) -> None:
        """Let it end; it has no other choice."""
        self._tell("quit")
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def _tell(self, command: str) -> None:
        for pipe in self._pipes:
            pipe.write(command + "\n")
            pipe.flush()
