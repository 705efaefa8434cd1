"""A directory with the last saves of a run. A save is written completely or not at all."""

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
import time
import uuid
from collections.abc import Callable
from typing import Any

import jax

from mpigrad.checkpoint import manifest as manifests
from mpigrad.checkpoint.layout import Layout, Leaf, check_replicated, describe
from mpigrad.checkpoint.manifest import DamagedSaveError, Manifest, Owner, name_in_errors
from mpigrad.collective_errors import call_on_root, raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.runtime import earlier_run_error, last_save, sync_directory

__all__ = ["Snapshot", "Store"]

_SAVE = re.compile(r"save-(\d{6,})")
_UNFINISHED = ".unfinished-"
_REMOVED = ".removed-"  # an old save, which may have been removed in part
_OWNER = ".owner"  # in each save, and in the directory: who has written it
_ABANDONED = 3600.0  # seconds without a write, after which a save of another host is removed
_SHOWN = 6  # count of leaves that an error names


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A state that was read from a save.

    Attributes
    ----------
    step
        The index of the step that was saved.
    tree
        This rank's part of the state.
    extra
        The `extra` of the save as JSON returns it (tuples are lists).
    rejections
        A sentence for each newer save that was rejected, with the reason.
    """

    step: int
    tree: Any
    extra: Any
    rejections: tuple[str, ...] = ()


class Store:
    """A directory with the last saves of one run. All its functions are collective.

    A save is a directory `save-000001`, `save-000002`, ... with one file per rank and a manifest.
    It is written under another name, synchronised with the disk and then renamed. So a directory
    with such a name is complete, whenever the job is killed. A save that is rejected is never
    removed: the next `save` renames it to `rejected-000012`.

    Parameters
    ----------
    directory
        A directory that all ranks can read and write. It is made if it does not exist. Only one
        run may use it at a time.
    comm
        The ranks that share the state. Default: the default communicator.
    keep
        Count of saves that are kept. With 2, there is an older save if the newest is damaged.
    resume
        True: this run continues an earlier run with saves in the directory. Otherwise `save` raises
        an error there, unless `load` has read one of them.
    overwrite
        True: this run replaces an earlier run. `load` does not read its saves, and the first `save`
        removes them when it is complete.

    Raises
    ------
    ValueError, OSError
        On every rank, if `keep` is not positive, if both `resume` and `overwrite` are given, or if
        the directory cannot be made, is not writable or is not the same for all ranks.

    Examples
    --------
    >>> import numpy as np
    >>> from mpigrad.checkpoint import Store
    >>> store = Store("saves")
    >>> path = store.save(7, {"x": np.arange(3.0)}, extra={"loss": 0.5})
    >>> snapshot = store.load({"x": np.zeros(3)})
    >>> print(snapshot.step, snapshot.tree["x"], snapshot.extra)
    7 [0. 1. 2.] {'loss': 0.5}
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        comm: Communicator | None = None,
        *,
        keep: int = 2,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        self.comm = resolve(comm)
        self.directory = pathlib.Path(directory)
        self._damaged: set[int] = set()
        with raise_on_all_ranks(self.comm):
            self.keep = operator.index(keep)
            if self.keep < 1:
                raise ValueError(f"Store: keep must be at least 1, got {keep}")
            if resume and overwrite:
                raise ValueError("Store: expected resume or overwrite, got both. Give one of them.")
        self._check_directory()
        self._owner = call_on_root(self.comm, Owner.this_process)
        self._owns = False
        self._follows_a_dead_owner = False
        self._started: set[str] = set()  # directories of saves that this Store has begun
        self._latest = ""  # identity of the latest save, whether it succeeded or not
        self._newest = call_on_root(self.comm, lambda: max(self._numbers(), default=0))
        resume, overwrite = self.comm.mpi.bcast((resume, overwrite))
        self._replaced = self._newest if overwrite else 0  # the last save that is replaced
        # The last save of an earlier run that is neither continued nor replaced.
        self._forbidden = 0 if resume or overwrite else self._newest

    def forbid_earlier_run(self, name: str, **remedies: str) -> None:
        """Raise an error if there are saves that this run neither continues nor replaces.

        Collective. `name` and `remedies` are those of `earlier_run_error`.
        """
        if self._forbidden == 0:
            return

        def refuse() -> None:
            saves = [self._path(number) for number in self._numbers()]
            raise earlier_run_error(name, self.directory, last_save(saves), **remedies)

        call_on_root(self.comm, refuse)

    def _check_directory(self) -> None:
        """Raise an error unless every rank sees the files that rank 0 writes."""
        token = self.comm.mpi.bcast(f".seen-by-all-{uuid.uuid4().hex}")
        try:
            with raise_on_all_ranks(self.comm):
                if self.comm.rank == 0:
                    _make(self.directory)
                    with name_in_errors(self.directory / token):
                        (self.directory / token).touch()
            with raise_on_all_ranks(self.comm):
                if not (self.directory / token).exists():
                    raise OSError(
                        f"Store: rank {self.comm.rank} does not see the files that rank 0 writes "
                        f"in {self.directory}. Give a directory that all ranks share, with an "
                        "absolute path if they start in different directories."
                    )
        finally:
            if self.comm.rank == 0:
                with contextlib.suppress(OSError):  # there may be no such directory
                    (self.directory / token).unlink()

    def _numbers(self) -> list[int]:
        names = (_SAVE.fullmatch(entry.name) for entry in self.directory.iterdir())
        return [int(name[1]) for name in names if name]

    def _newest_first(self) -> list[int]:
        return sorted((n for n in self._numbers() if n > self._replaced), reverse=True)

    def _path(self, number: int) -> pathlib.Path:
        return self.directory / f"save-{number:06d}"

    # --- writing ---

    def save(self, step: int, tree: Any, layout: Layout = False, extra: Any = None) -> pathlib.Path:
        """Write a state, and remove the oldest save if there are more than `keep` (collective).

        When it returns on any rank, the complete save is on the disk.

        Parameters
        ----------
        step
            An integer, such as the index of the iteration. The value of rank 0 is written.
        tree
            A pytree of arrays (any real, complex, integer or boolean dtype of JAX), random keys
            and Python numbers.
        layout
            The part of each array that a rank holds, as a pytree prefix of `tree`. False: the
            same on all ranks, which is checked. True: stripes of rows, one rank after the other.
            `Stripes(axis)`: stripes along another axis. A `Grid`: this rank's tile, in the
            trailing axes.
        extra
            Further data that JSON can hold. The value of rank 0 is written.

        Returns
        -------
        pathlib.Path
            The directory of this save.

        Raises
        ------
        ValueError, TypeError
            On every rank, if the layout does not fit, or the states differ between ranks.
        OSError
            On every rank, if a rank cannot write, if another run writes into the directory, or if
            it has an earlier run that was neither loaded nor is to be replaced. Earlier saves stay
            as they are.
        """
        self.forbid_earlier_run("Store.save")
        leaves = describe(tree, layout, self.comm, "Store.save")
        check_replicated(leaves, tree, self.comm, "Store.save")
        step, identity, self._newest = call_on_root(self.comm, lambda: self._begin(step, extra))
        unfinished = self.directory / f"{_UNFINISHED}{identity}"
        problem = ""
        try:
            with raise_on_all_ranks(self.comm):
                file = manifests.write_leaves(unfinished, identity, self.comm.rank, leaves, tree)
                sync_directory(unfinished)
            written = self.comm.mpi.gather(file)
            with raise_on_all_ranks(self.comm):
                if written is not None:
                    manifest = Manifest(identity, step, tuple(leaves), tuple(written), extra)
                    problem = self._finish(unfinished, manifest)
        finally:
            if self.comm.rank == 0:
                _remove(unfinished)  # does not exist if it was renamed
        self._newest += 1
        with raise_on_all_ranks(self.comm):
            if problem:
                raise OSError(problem)
        if self.comm.rank == 0:
            self._prune()
        return self._path(self._newest)

    def _begin(self, step: int, extra: Any) -> tuple[int, str, int]:
        """Make, on rank 0, the directory that is renamed at the end.

        Returns
        -------
        The step, the identity of the save, and the number of the newest complete save.
        """
        try:
            step = operator.index(step)
            json.dumps(extra)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"Store.save: step must be an integer and extra must fit into JSON, got "
                f"step={step!r}, extra of type {type(extra).__name__}: {error}"
            ) from None
        newest = max(self._numbers(), default=0)
        if newest > self._newest and not _has_identity(self._path(newest), self._latest):
            raise OSError(
                f"Store.save: {self._path(newest)} was written by another run or another Store. "
                "Give each run its own directory."
            )
        self._own()
        for left in self.directory.glob(f"{_UNFINISHED}*"):
            if self._is_abandoned(left):
                _remove(left)
        for left in self.directory.glob(f"{_REMOVED}*"):
            _remove(left)
        identity = self._latest = uuid.uuid4().hex
        unfinished = self.directory / f"{_UNFINISHED}{identity}"
        self._started.add(unfinished.name)
        unfinished.mkdir()
        try:
            _write_text(unfinished / _OWNER, f"{self._owner}\n")
        except OSError:
            _remove(unfinished)
            raise
        return step, identity, max(newest, self._newest)

    def _is_abandoned(self, unfinished: pathlib.Path) -> bool:
        """Return True if nobody writes this save: only then it may be removed."""
        try:
            owner = _owner_of(unfinished)
            if owner == self._owner or unfinished.name in self._started:
                return True  # this process could not remove it before
            # A job that is killed between its directory and the name of its owner leaves no name.
            nobody = False if self._follows_a_dead_owner else None
            lives = nobody if owner is None else owner.lives()
            latest = max(p.stat().st_mtime for p in (unfinished, *unfinished.iterdir()))
        except OSError:  # it was renamed or removed meanwhile, or cannot be read now
            return False
        return lives is False or (lives is None and time.time() - latest > _ABANDONED)

    def _own(self) -> None:
        """Take the directory, unless a process that lives has taken it."""
        path = self.directory / _OWNER
        owner = _owner_of(self.directory)
        if owner == self._owner:
            return
        lives = False if owner is None else owner.lives()
        if owner is not None and (lives or (lives is None and self._owns)):
            raise OSError(
                f"Store.save: process {owner.pid} on {owner.host} writes its saves into "
                f"{self.directory}. Give each run its own directory, or end that process."
            )
        new = path.with_name(f"{_OWNER}-{uuid.uuid4().hex}")
        try:
            _write_text(new, f"{self._owner}\n")
            os.replace(new, path)
        except OSError:
            with contextlib.suppress(OSError):  # it may not exist
                new.unlink()
            raise
        self._owns = True
        self._follows_a_dead_owner = owner is not None and lives is False

    def _finish(self, unfinished: pathlib.Path, manifest: Manifest) -> str:
        """Make the save complete. Return what went wrong after that, or an empty string."""
        manifests.write_manifest(unfinished, manifest)
        sync_directory(unfinished)
        path = self._path(self._newest + 1)
        try:
            os.rename(unfinished, path)
        except OSError:
            # NFS may report an error for a request that it has answered twice.
            if not _has_identity(path, manifest.identity):
                raise
        # Only now: what a killed job leaves must have its owner, or it stays for an hour.
        with contextlib.suppress(OSError):
            (path / _OWNER).unlink()
        try:
            sync_directory(self.directory)
        except OSError as error:
            return f"{path} is complete, but the disk does not confirm it: {error}"
        return ""

    def _prune(self) -> None:
        """Remove the oldest saves, and rename those that were rejected."""
        try:
            numbers = set(self._numbers())
        except OSError as error:
            print(f"mpigrad: no save was removed: {error}", file=sys.stderr)
            return
        self._damaged &= numbers
        good = sorted(numbers - self._damaged)
        kept = [number for number in good if number > self._replaced][-self.keep :]
        for number in (*sorted(self._damaged), *sorted({*good} - {*kept})):
            path = self._path(number)
            try:
                if number in self._damaged:
                    os.rename(path, _free(self.directory / f"rejected-{number:06d}"))
                    self._damaged.discard(number)
                else:
                    # A directory with the name of a save must be complete, even if the job is
                    # killed here.
                    aside = _free(self.directory / f"{_REMOVED}{number:06d}")
                    os.rename(path, aside)
                    shutil.rmtree(aside)
            except OSError as error:  # the run can continue
                print(f"mpigrad: {path} was not removed: {error}", file=sys.stderr)

    # --- reading ---

    def load(
        self,
        like: Any,
        layout: Layout = False,
        check: Callable[[Any], object] | None = None,
        *,
        make_like: Callable[[Any], Any] | None = None,
    ) -> Snapshot | None:
        """Read the newest complete save, or return None if there are no saves (collective).

        All its files are read and compared with their hashes first. If a file is missing,
        truncated, changed or belongs to another save, the save is rejected: rank 0 names the file
        on stderr, and the save before is read. Every value is bitwise the value that was written.
        On another count of ranks, or with another layout, arrays are redistributed.

        Parameters
        ----------
        like
            A tree with the structure, shapes and dtypes of the state, for example the first state
            of a new run. Its shapes are those of this rank's part in the present run.
        layout
            As in `save`. It may differ from the layout with which the state was written.
        check
            A function of `extra` that raises an error if the save must not be used. It is called
            before the state is read.
        make_like
            A function of `extra` that returns the `like` to use, if only the save determines the
            shapes.

        Returns
        -------
        Snapshot or None

        Raises
        ------
        ValueError
            On every rank, if the save has another structure, other shapes or dtypes than `like`, or
            if there are saves but all of them are damaged.
        OSError
            On every rank, if a file cannot be read after several attempts. The save may be whole,
            and no older one is read in its place.
        """
        wanted: list[Leaf] = []
        if make_like is None:
            wanted = describe(like, layout, self.comm, "Store.load")
        rejections: list[str] = []
        for number in call_on_root(self.comm, self._newest_first):
            path = self._path(number)
            try:
                manifest = self._checked(path)
            except DamagedSaveError as error:
                rejections.append(f"{path} is rejected: {error}")
                self._damaged.add(number)
                if self.comm.rank == 0:
                    print(f"mpigrad: {rejections[-1]}", file=sys.stderr, flush=True)
                continue
            with raise_on_all_ranks(self.comm):
                if check is not None:
                    check(manifest.extra)
                if make_like is not None:
                    like = make_like(manifest.extra)
            if make_like is not None:
                wanted = describe(like, layout, self.comm, "Store.load")
            _compare(path, manifest.leaves, wanted)
            templates, structure = jax.tree.flatten(like)
            leaves: list[Any] = []
            with raise_on_all_ranks(self.comm):
                leaves = manifests.read_leaves(path, manifest, wanted, templates, self.comm.rank)
            tree = jax.tree.unflatten(structure, leaves)
            self._forbidden = 0
            return Snapshot(manifest.step, tree, manifest.extra, tuple(rejections))
        if rejections:
            raise ValueError(
                f"Store.load: all saves in {self.directory} are damaged:\n  "
                + "\n  ".join(rejections)
                + "\nTo start a new run, move them to another directory."
            )
        return None

    def _checked(self, path: pathlib.Path) -> Manifest:
        """Return the manifest of a complete save.

        Raises
        ------
        DamagedSaveError, OSError
            On every rank, if a file is wrong, or cannot be read.
        """
        manifest, problem = None, None
        with raise_on_all_ranks(self.comm):
            if self.comm.rank == 0:
                try:
                    manifest = manifests.read_manifest(path)
                except DamagedSaveError as error:
                    problem = str(error)
        manifest, problem = self.comm.mpi.bcast((manifest, problem))
        if problem is None:
            assert manifest is not None
            with raise_on_all_ranks(self.comm):
                try:
                    # Each file is checked by one rank, whichever ranks need its content.
                    for rank in range(self.comm.rank, len(manifest.files), self.comm.size):
                        manifests.check_file(path, manifest, rank)
                except DamagedSaveError as error:
                    problem = str(error)
            problem = next(filter(None, self.comm.mpi.allgather(problem)), None)
        if problem is not None:
            raise DamagedSaveError(problem)
        return manifest


def _make(directory: pathlib.Path) -> None:
    """Make a directory and its parents, and wait until they are on the disk."""
    missing = [d for d in (directory, *directory.parents) if not d.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_directory(made.parent)


def _free(path: pathlib.Path) -> pathlib.Path:
    """Return a path like this one that does not exist."""
    others = (path.with_name(f"{path.name}-{i}") for i in itertools.count(2))
    return next(p for p in itertools.chain([path], others) if not p.exists())


def _owner_of(directory: pathlib.Path) -> Owner | None:
    path = directory / _OWNER
    try:
        with name_in_errors(path):
            return Owner.parse(path.read_text(errors="replace"))
    except FileNotFoundError:
        return None


def _remove(directory: pathlib.Path) -> None:
    """Remove a directory if that is possible."""
    with contextlib.suppress(OSError):  # rmtree does not ignore the errors of close
        shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):  # rmtree cannot list it without file descriptors
        directory.rmdir()


def _write_text(path: pathlib.Path, text: str) -> None:
    with name_in_errors(path):
        path.write_text(text)


def _has_identity(path: pathlib.Path, identity: str) -> bool:
    try:
        return manifests.read_manifest(path).identity == identity
    except (DamagedSaveError, OSError):
        return False


def _compare(path: pathlib.Path, there: tuple[Leaf, ...], here: list[Leaf]) -> None:
    """Raise an error unless two states have the same leaves."""
    differences = []
    for a, b in itertools.zip_longest(there, here):
        if a is None or b is None or (a.name, str(a)) != (b.name, str(b)):
            in_file, expected = (f"{x.name} {x}" if x is not None else "nothing" for x in (a, b))
            differences.append(f"  {in_file} in the file, {expected} in this run")
    if differences:
        more = len(differences) - _SHOWN
        shown = differences[:_SHOWN] + ([f"  and {more} more"] if more > 0 else [])
        raise ValueError(
            f"Store.load: the state in {path} differs from the state of this run:\n"
            + "\n".join(shown)
            + "\nUse another directory, or the program that wrote it."
        )
