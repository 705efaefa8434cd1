"""Saves of a run in a directory: written whole or not at all, the last ones kept."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import operator
import os
import pathlib
import re
import shutil
import sys
import uuid
from collections.abc import Callable
from typing import Any

import jax

from mpigrad.checkpoint import files
from mpigrad.checkpoint.files import Damaged, Manifest
from mpigrad.checkpoint.layout import Layout, Leaf, check_replicated, describe
from mpigrad.collective_errors import call_on_root, raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve

__all__ = ["Saved", "Store"]

_SAVE = re.compile(r"save-(\d{6,})")
_UNFINISHED = ".unfinished-"
_SHOWN = 6  # leaves that an error names


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a store gives back.

    Attributes
    ----------
    step
        The number that it was saved with.
    tree
        This rank's part of the state.
    extra
        What was saved beside it, as JSON keeps it (tuples are lists).
    refused
        Why newer saves were passed over, a sentence for each.
    """

    step: int
    tree: Any
    extra: Any
    refused: tuple[str, ...] = ()


class Store:
    """A directory with the last saves of one run (collective: all ranks make and use it together).

    A save is a directory `save-000001`, `save-000002`, ... with one file per rank and a manifest.
    It is written under another name, synchronised with the disk and renamed: whenever the job is
    killed, what bears its name is whole.

    Parameters
    ----------
    directory
        Where all ranks can read and write; made if need be. It belongs to one run at a time.
    comm
        The ranks that share the state; all ranks if not given.
    keep
        Saves that are kept. With 2, the one before is there when the newest is damaged.

    Raises
    ------
    ValueError, OSError
        On every rank: `keep` is not positive, or the directory cannot be made, is not writable or
        is not the same for all ranks.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        comm: Communicator | None = None,
        keep: int = 2,
    ) -> None:
        self.comm = resolve(comm)
        self.directory = pathlib.Path(directory)
        self._refused: set[int] = set()
        with raise_on_all_ranks(self.comm):
            self.keep = operator.index(keep)
            if self.keep < 1:
                raise ValueError(f"mpigrad.Store: keep={keep} must be at least 1")
        self._check_directory()
        self._newest = call_on_root(self.comm, lambda: max(self._numbers(), default=0))

    def _check_directory(self) -> None:
        """Every rank must see what rank 0 writes."""
        token = self.comm.mpi.bcast(f".seen-by-all-{uuid.uuid4().hex}")
        try:
            with raise_on_all_ranks(self.comm):
                if self.comm.rank == 0:
                    self.directory.mkdir(parents=True, exist_ok=True)
                    (self.directory / token).touch()
            with raise_on_all_ranks(self.comm):
                if not (self.directory / token).exists():
                    raise OSError(
                        f"mpigrad.Store: rank {self.comm.rank} does not see in {self.directory} "
                        "what rank 0 writes there; give a directory that all ranks share, and an "
                        "absolute path where they do not start in the same one"
                    )
        finally:
            if self.comm.rank == 0:
                with contextlib.suppress(OSError):  # there may be no such directory
                    (self.directory / token).unlink()

    def _numbers(self) -> list[int]:
        names = (_SAVE.fullmatch(entry.name) for entry in self.directory.iterdir())
        return [int(name[1]) for name in names if name]

    def _path(self, number: int) -> pathlib.Path:
        return self.directory / f"save-{number:06d}"

    # --- writing ---

    def save(self, step: int, tree: Any, layout: Layout = False, extra: Any = None) -> pathlib.Path:
        """Write a state, and remove the oldest save beyond `keep` (collective).

        When it returns, on any rank, the save is on the disk and whole.

        Parameters
        ----------
        step
            Any number, such as that of the iteration; rank 0's is written.
        tree
            A pytree of arrays (any real, complex, integer or boolean dtype of JAX), random keys
            and numbers of Python.
        layout
            Which part of the arrays a rank holds, as a tree that may end above the leaves of
            `tree`: False, equal on all ranks (which is checked); True, stripes of rows, one rank
            after the other; `Stripes(axis)`, along another axis; a `Grid`, this rank's tile in the
            trailing axes.
        extra
            What JSON can hold; rank 0's is written.

        Returns
        -------
        pathlib.Path
            The directory of this save.

        Raises
        ------
        ValueError, TypeError
            On every rank: the layout does not fit, or the ranks disagree.
        OSError
            On every rank: a rank cannot write, or another run writes into the directory. Earlier
            saves are left as they are.
        """
        leaves = describe(tree, layout, self.comm, "mpigrad.Store.save")
        check_replicated(leaves, tree, self.comm, "mpigrad.Store.save")
        step, identity = call_on_root(self.comm, lambda: self._begin(step, extra))
        unfinished = self.directory / f"{_UNFINISHED}{identity}"
        try:
            with raise_on_all_ranks(self.comm):
                mine = files.write_numbers(unfinished, identity, self.comm.rank, leaves, tree)
                files.sync_directory(unfinished)
            written = self.comm.mpi.gather(mine)
            with raise_on_all_ranks(self.comm):
                if written is not None:
                    manifest = Manifest(identity, step, tuple(leaves), tuple(written), extra)
                    self._finish(unfinished, manifest)
        finally:
            if self.comm.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)  # renamed, if all went well
        self._newest += 1
        if self.comm.rank == 0:
            self._prune()
        return self._path(self._newest)

    def _begin(self, step: int, extra: Any) -> tuple[int, str]:
        """On rank 0: make the directory that is renamed at the end, named by its identity."""
        try:
            step = operator.index(step)
            json.dumps(extra)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"mpigrad.Store.save: step={step!r} must be a whole number, and extra what JSON "
                f"can hold: {error}"
            ) from None
        newest = max(self._numbers(), default=0)
        if newest > self._newest:
            raise OSError(
                f"mpigrad.Store.save: {self._path(newest)} was written by another run, or another "
                "Store; give each run a directory of its own"
            )
        for left in self.directory.glob(f"{_UNFINISHED}*"):  # of a job that was killed
            shutil.rmtree(left, ignore_errors=True)
        identity = uuid.uuid4().hex
        (self.directory / f"{_UNFINISHED}{identity}").mkdir()
        return step, identity

    def _finish(self, unfinished: pathlib.Path, manifest: Manifest) -> None:
        files.write_manifest(unfinished, manifest)
        files.sync_directory(unfinished)
        os.rename(unfinished, self._path(self._newest + 1))
        files.sync_directory(self.directory)

    def _prune(self) -> None:
        """Remove the oldest saves, and those that cannot be read."""
        good = sorted(set(self._numbers()) - self._refused)
        for number in [*self._refused, *good[: -self.keep]]:
            # Under its name it must be whole, also when the job is killed here.
            aside = self.directory / f"{_UNFINISHED}{number:06d}"
            try:
                os.rename(self._path(number), aside)
                shutil.rmtree(aside)
            except OSError as error:  # the run can go on with it
                print(f"mpigrad: {self._path(number)} is not removed: {error}", file=sys.stderr)
        self._refused.clear()

    # --- reading ---

    def load(
        self,
        like: Any,
        layout: Layout = False,
        check: Callable[[Any], object] | None = None,
        *,
        like_of: Callable[[Any], Any] | None = None,
    ) -> Saved | None:
        """The newest save that is whole (collective); None where none was ever finished.

        All its files are read and compared with their hashes before anything is used. A save with
        a file that is missing, truncated, changed or of another save is refused, rank 0 names the
        file on stderr, and the save before is read. On the number of ranks that wrote it every
        number comes back bit for bit; on another, or with another layout, arrays are cut anew.

        Parameters
        ----------
        like
            A tree with the structure, shapes and dtypes of what is read, such as the state that a
            new run begins with. Shapes are those of this rank's part, here and now.
        layout
            As for `save`; it may be another one.
        check
            Gets `extra` before anything else is looked at, and raises where the save is of no use.
        like_of
            extra -> what is used instead of `like`, where the save alone tells the shapes.

        Raises
        ------
        ValueError
            On every rank: the save holds another state than `like`, with both; or there are saves,
            and none of them is whole.
        """
        wanted: list[Leaf] = []
        if like_of is None:
            wanted = describe(like, layout, self.comm, "mpigrad.Store.load")
        refused: list[str] = []
        for number in sorted(self.comm.mpi.bcast(self._listed()), reverse=True):
            path = self._path(number)
            try:
                manifest = self._checked(path)
            except Damaged as error:
                refused.append(f"{path} is refused: {error}")
                self._refused.add(number)
                if self.comm.rank == 0:
                    print(f"mpigrad: {refused[-1]}", file=sys.stderr, flush=True)
                continue
            with raise_on_all_ranks(self.comm):
                if check is not None:
                    check(manifest.extra)
                if like_of is not None:
                    like = like_of(manifest.extra)
            if like_of is not None:
                wanted = describe(like, layout, self.comm, "mpigrad.Store.load")
            _compare(path, manifest.leaves, wanted)
            templates, structure = jax.tree.flatten(like)
            found: list[Any] = []
            with raise_on_all_ranks(self.comm):
                found = files.read_leaves(path, manifest, wanted, templates, self.comm.rank)
            tree = jax.tree.unflatten(structure, found)
            return Saved(manifest.step, tree, manifest.extra, tuple(refused))
        if refused:
            raise ValueError(
                f"mpigrad.Store.load: none of the saves in {self.directory} can be read:\n  "
                + "\n  ".join(refused)
                + "\nTo begin anew, move them away."
            )
        return None

    def _listed(self) -> list[int]:
        return self._numbers() if self.comm.rank == 0 else []

    def _checked(self, path: pathlib.Path) -> Manifest:
        """The manifest of a save all of whose files are whole; Damaged on every rank otherwise."""
        manifest, problem = None, None
        if self.comm.rank == 0:
            try:
                manifest = files.read_manifest(path)
            except Damaged as error:
                problem = str(error)
            except (KeyError, TypeError, ValueError) as error:
                problem = f"{path}'s manifest lacks or misstates {error}"
        manifest, problem = self.comm.mpi.bcast((manifest, problem))
        if problem is None:
            assert manifest is not None
            try:
                # Each file is read by one rank, whoever will want something from it.
                for rank in range(self.comm.rank, len(manifest.files), self.comm.size):
                    files.check_file(path, manifest, rank)
            except Damaged as error:
                problem = str(error)
            problem = next(filter(None, self.comm.mpi.allgather(problem)), None)
        if problem is not None:
            raise Damaged(problem)
        return manifest


def _compare(path: pathlib.Path, there: tuple[Leaf, ...], here: list[Leaf]) -> None:
    """Raise unless two states have the same leaves."""
    differences = []
    for a, b in itertools.zip_longest(there, here):
        if a is None or b is None or (a.name, str(a)) != (b.name, str(b)):
            in_file, asked = (f"{x.name} {x}" if x is not None else "nothing" for x in (a, b))
            differences.append(f"  {in_file} in the file, {asked} here")
    if differences:
        more = len(differences) - _SHOWN
        shown = differences[:_SHOWN] + ([f"  and {more} more"] if more > 0 else [])
        raise ValueError(
            f"mpigrad.Store.load: {path} holds another state than the one asked for:\n"
            + "\n".join(shown)
        )
