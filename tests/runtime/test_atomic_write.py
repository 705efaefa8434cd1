"""Files that are complete at any time."""

import os
import pathlib

import pytest

from mpigrad.runtime import files

pytestmark = pytest.mark.ranks(1)


def test_processes_write_the_same_path(tmp_path):
    """Each writes a file of its own, as in two containers on one file system."""
    path = tmp_path / "file"

    def write(file):
        assert len(list(tmp_path.iterdir())) == 1
        files.write_atomically(path, lambda inner: inner.write(b"inner"))
        assert path.read_bytes() == b"inner"
        file.write(b"outer")

    files.write_atomically(path, write)
    assert path.read_bytes() == b"outer"
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~os.umask(os.umask(0o022))


def test_never_follows_a_link(tmp_path, monkeypatch):
    """Where a link has the temporary name, its target stays as it is."""
    target = tmp_path / "target"
    target.write_bytes(b"kept")
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "same")
    (tmp_path / ".file.same").symlink_to(target)
    with pytest.raises(FileExistsError):
        files.write_atomically(tmp_path / "file", lambda file: file.write(b"lost"))
    assert target.read_bytes() == b"kept"


def test_waits_for_the_directory(tmp_path, monkeypatch):
    synchronised: list[pathlib.Path] = []
    monkeypatch.setattr(files, "sync_directory", synchronised.append)
    files.write_atomically(tmp_path / "file", lambda file: file.write(b"1"))
    assert synchronised == [tmp_path]
