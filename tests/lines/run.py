"""Which lines of src/ do the tests execute? `python tests/lines/run.py`, with Python 3.12 or newer.

    python tests/lines/run.py [--before FILE] [--save FILE] [arguments for tests/run.py]

Prints the number of lines for each room. `--save` writes all lines to a file, and `--before` prints
the lines of such a file that are no longer executed.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def executed(folder: pathlib.Path) -> set[str]:
    """Return the lines that the processes have noted, as `mpigrad/loops.py:17`."""
    found: set[str] = set()
    for file in folder.iterdir():
        rows = file.read_text(errors="replace").splitlines()
        found.update(row for row in rows if not row.startswith("T "))
    return found


def main() -> int:
    """Run the tests and print the lines; the exit code of the tests."""
    parser = argparse.ArgumentParser(description="Count the lines of src/ that the tests execute.")
    parser.add_argument("--before", type=pathlib.Path, help="compare with these lines")
    parser.add_argument("--save", type=pathlib.Path, help="write the lines to this file")
    options, arguments = parser.parse_known_args()
    folder = ROOT / "build" / "lines"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = os.environ | {
        "MPIGRAD_LINES_IN": str(folder),
        "MPIGRAD_LINES_OF": str(ROOT / "src"),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).strip(":"),
    }
    code = subprocess.run(
        [sys.executable, "tests/run.py", *arguments], cwd=ROOT, env=environment, check=False
    ).returncode
    lines = executed(folder)
    rooms = collections.Counter("/".join(line.split("/")[:2]).split(":")[0] for line in lines)
    for room, count in sorted(rooms.items()):
        print(f"{count:6}  {room}")
    print(f"{len(lines):6}  lines of src/ executed")
    if options.save:
        options.save.write_text("\n".join(sorted(lines)) + "\n")
    if options.before:
        before = set(options.before.read_text().split())
        lost = before - lines
        files = collections.Counter(line.rpartition(":")[0] for line in lost)
        for file, count in files.most_common():
            numbers = sorted(int(x.rpartition(":")[2]) for x in lost if x.startswith(f"{file}:"))
            print(f"{count:6}  {file}: {', '.join(map(str, numbers))}")
        print(f"{len(lost):6}  lines of {len(before)} are no longer executed")
    return code


if __name__ == "__main__":
    sys.exit(main())
