"""Files that are complete at any time, and files of earlier runs (without JAX and MPI)."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

__all__ = [
    "EarlierRun",
    "earlier_run_error",
    "last_record",
    "last_save",
    "name_in_errors",
    "sync_directory",
    "write_atomically",
]

# ---- Write files that are complete at any time, even if the job is killed while it writes ----


@contextlib.contextmanager
def name_in_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add a path to an error of this block that has an error number but does not name a file.

    Examples
    --------
    >>> import errno, os
    >>> from mpigrad.extend import name_in_errors
    >>> try:
    ...     with name_in_errors("saves"):
    ...         raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    ... except OSError as error:
    ...     print(error)
    [Errno 28] No space left on device: 'saves'
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(pathlib.Path(path))
        raise


def sync_directory(directory: pathlib.Path) -> None:
    """Wait until the entries of a directory are on the disk."""
    with name_in_errors(directory):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system cannot do it
                raise
        finally:
            os.close(handle)


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Write a temporary file next to `path`, then rename it to `path` in one step.

    A reader of `path` gets the complete old file or the complete new file at any time, also after
    the machine has failed. Several processes may write the same path.

    Parameters
    ----------
    path
        The file to write or to replace.
    write
        Function that writes the content to a binary file object.

    Examples
    --------
    >>> from mpigrad.extend import write_atomically
    >>> write_atomically("note.txt", lambda file: file.write(b"text"))
    """
    path = pathlib.Path(path)
    # Processes of two hosts or containers may have the same id. Mode "x" makes a new file.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with name_in_errors(path), open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        with contextlib.suppress(OSError):  # it does not exist if it was renamed
            temporary.unlink()


# ---- The error for a directory or history of an earlier run ----


class EarlierRun(NamedTuple):
    """The last step of an earlier run, and when it was saved, in seconds since 1970."""

    step: int | None
    seconds: float


def last_save(saves: Sequence[pathlib.Path]) -> EarlierRun:
    """Return the newest of some saves (directories `save-000012`). There is at least one."""
    dates: list[tuple[float, str, pathlib.Path]] = []
    for save in saves:
        with contextlib.suppress(OSError):
            dates.append((save.stat().st_mtime, save.name, save))
    seconds, _, newest = max(dates, default=(0.0, "", saves[-1]))
    step = None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        manifest = json.loads((newest / "manifest.json").read_text(encoding="utf-8"))
        step = int(manifest["manifest"]["step"])
    return EarlierRun(step, seconds)


def last_record(history: pathlib.Path) -> EarlierRun | None:
    """Return the last whole record of a history (a file of JSON lines), or None."""
    lines = history.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in reversed(lines):
        try:
            record = json.loads(line)
            step = record.get("iteration", record.get("step"))
        except (ValueError, AttributeError):  # a job that is killed may leave half a line
            continue
        return EarlierRun(step, history.stat().st_mtime)
    return None


def earlier_run_error(
    name: str,
    directory: pathlib.Path,
    run: EarlierRun,
    *,
    resume: str = "resume=True",
    overwrite: str = "overwrite=True",
    other: str = "another directory",
) -> FileExistsError:
    """Return the error that names the last step of an earlier run, its date, and what to do.

    Parameters
    ----------
    name
        The option or function that the user typed.
    directory
        The directory or the history of the earlier run.
    run
        Its last step.
    resume, overwrite, other
        What the user must give to continue the run (empty: it has no saves), to replace it, or to
        keep it.
    """
    date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.seconds))
    last = f"of {date}" if run.step is None else f"with the last step {run.step} of {date}"
    return FileExistsError(
        f"{name}: {directory} has an earlier run {last}. Use "
        + (f"{resume} to continue it, " if resume else "")
        + f"{overwrite} to replace it, or {other}."
    )
