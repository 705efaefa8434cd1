"""A run that is started again says what is there, and overwrites only if it is told to."""

from __future__ import annotations

import importlib
import time

import numpy as np
import pytest

from mpigrad.checkpoint import Store
from mpigrad.launch.applications import application, application_names
from mpigrad_apps.output_directory import prepare_output

REMEDIES = "--overwrite to replace it, or another --out."


def settings_of(name, out, **values):
    return application(name).settings_class()(out=out, **values)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", application_names())
def test_every_application_refuses_an_earlier_run(comm, directory, name):
    """Before anything is launched, and again on all ranks."""
    settings = settings_of(name, directory)
    settings.check_output()
    prepare_output(settings, directory, comm)
    settings.check_output()  # settings.json alone is not a run
    comm.mpi.Barrier()
    if comm.rank == 0:
        (directory / "report.html").touch()
    comm.mpi.Barrier()
    date = time.strftime("%Y-%m-%d %H:")
    for attempt in (settings.check_output, lambda: prepare_output(settings, directory, comm)):
        with pytest.raises(FileExistsError) as raised:
            attempt()
        assert str(raised.value).startswith(f"--out: {directory} has an earlier run of {date}")
        text = str(raised.value).removesuffix(" (found on rank 0)")
        assert text.endswith(f". Use {REMEDIES}")
    prepare_output(settings_of(name, directory, overwrite=True), directory, comm)
    if not hasattr(settings, "resume"):
        return
    for folder in ("restart", "restart/stage1", "synchronous/restart"):
        Store(directory / folder, comm).save(len(folder), np.zeros(1))
        comm.mpi.Barrier()
        with pytest.raises(FileExistsError) as raised:
            settings.check_output()
        assert f"has an earlier run with the last step {len(folder)} of {date}" in str(raised.value)
        assert str(raised.value).endswith(f"Use --resume to continue it, {REMEDIES}")
        time.sleep(0.02)  # the next one is newer
    prepare_output(settings_of(name, directory, resume=True), directory, comm)
    with pytest.raises(ValueError, match="--overwrite: got --resume"):
        settings_of(name, directory, resume=True, overwrite=True).check_output()


@pytest.mark.ranks(1)
def test_a_history_without_saves_names_its_last_whole_line(tmp_path):
    """There is nothing that `--resume` could continue."""
    lines = '{"iteration": 6, "loss": 1.0}\n{"iteration": 7, "loss": 0.5}\n{"itera'
    (tmp_path / "history.jsonl").write_text(lines)
    with pytest.raises(FileExistsError) as raised:
        settings_of("poisson", tmp_path).check_output()
    assert "has an earlier run with the last step 7 of 20" in str(raised.value)
    assert str(raised.value).endswith(f". Use {REMEDIES}")


@pytest.mark.ranks(1, 2)
def test_a_report_without_saves_is_not_continued(comm, directory):
    """`--resume` must not replace the results of a simulation. `--overwrite` does."""
    resumed = settings_of("heat", directory, resume=True)
    prepare_output(resumed, directory, comm)
    if comm.rank == 0:
        (directory / "report.html").touch()
    comm.mpi.Barrier()
    with pytest.raises(FileExistsError, match=r"--resume: .* no saves to continue from") as raised:
        prepare_output(resumed, directory, comm)
    assert REMEDIES in str(raised.value)
    prepare_output(settings_of("heat", directory, overwrite=True), directory, comm)
    comm.mpi.Barrier()
    assert not (directory / "report.html").exists()
    prepare_output(resumed, directory, comm)


@pytest.mark.ranks(1)
def test_overwrite_removes_results_and_no_other_files(tmp_path, comm):
    results = ("fields.pvd", "fields.pvti", "snapshots.pvd", "heat.gif", "animation.gif")
    folders = ("fields.pieces-1", "fields-vtk", "snapshots-vtk", "snapshots.zarr")
    others = ("holiday.gif", "own.pvd", "own.pvti", "snapshots.txt")
    for name in (*results, *others):
        (tmp_path / name).touch()
    for name in (*folders, "own-vtk"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.vti").touch()
    prepare_output(settings_of("heat", tmp_path, overwrite=True), tmp_path, comm)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*others, "own-vtk", "settings.json"}


@pytest.mark.ranks(1, 2)
def test_a_file_is_no_output_directory(comm, directory):
    if comm.rank == 0:
        (directory / "notes.txt").touch()
    comm.mpi.Barrier()
    for out in (directory / "notes.txt", directory / "notes.txt" / "run"):
        with pytest.raises(FileExistsError, match=r"--out: .*notes\.txt.* Choose a directory\."):
            prepare_output(settings_of("heat", out), out, comm)


@pytest.mark.ranks(1)
def test_the_command_refuses_before_it_launches(tmp_path, monkeypatch, capfd):
    cli = importlib.import_module("mpigrad.launch.cli")
    (tmp_path / "report.html").touch()
    run = ["mpigrad", "run", "poisson", "--out", str(tmp_path)]
    for more, expected in (
        ([], f"mpigrad: --out: {tmp_path} has an earlier run of "),
        (["--overwrite", "--resume"], "mpigrad: --overwrite: got --resume, too."),
        (["--overwrite", "--print-script", "slurm"], "mpigrad: run poisson --overwrite: a job"),
    ):
        monkeypatch.setattr("sys.argv", [*run, *more])
        with pytest.raises(SystemExit) as raised:
            cli.main()
        assert raised.value.code == 2
        assert capfd.readouterr().err.startswith(expected)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", application_names())
def test_the_help_says_how_long_the_default_size_takes(name, monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["mpigrad", "run", name, "--help"])
    with pytest.raises(SystemExit) as raised:
        importlib.import_module("mpigrad.launch.cli").main()
    assert raised.value.code == 0
    assert "on two cores" in " ".join(capfd.readouterr().out.replace("│", " ").split())
