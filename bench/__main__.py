"""Compare mpigrad with other libraries, side by side.

    python bench [TABLE ...] [--quick] [--no-peers] [--out DIRECTORY]

Other libraries are installed on demand, into an environment of their own (build/peers).
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from suite import BenchError, run


def main() -> int:
    """Run the command in sys.argv; returns its exit code."""
    parser = argparse.ArgumentParser("python bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="of bench/tables.toml; all")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results/bench"))
    parser.add_argument("--quick", action="store_true", help="smaller problems, fewer rounds")
    parser.add_argument("--no-peers", action="store_true", help="install no other library")
    given = parser.parse_args()
    try:
        return run(given.tables, given.out, quick=given.quick, peers=not given.no_peers)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
