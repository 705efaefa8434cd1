"""Options of the `mpigrad` command, parsed by argparse."""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
from typing import NoReturn

__all__ = ["LaunchOptions", "Parser", "launch_parser"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options for starting and ending ranks, as in the help of `launch_parser`."""

    ranks: int | None = None
    hosts: pathlib.Path | None = None
    timeout: float = math.inf
    grace: float = 30.0
    print_script: str | None = None

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> LaunchOptions:
        """Create the options from the result of a parser."""
        return cls(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(cls)})


class OptionError(ValueError):
    """An invalid command line."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises its errors and does not accept abbreviations."""

    def __init__(self, prog: str, description: str = "", *, add_help: bool = True) -> None:
        super().__init__(
            prog=prog,
            description=description,
            add_help=add_help,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise OptionError(message)


def launch_parser(
    prog: str, description: str = "", *, add_help: bool = True, ranks: int | None = None
) -> Parser:
    """Return a parser of the options that start ranks."""
    parser = Parser(prog, description, add_help=add_help)
    group = parser.add_argument_group("launching options")
    default = f"default: {ranks}" if ranks else "default: 1, or the slots of --hosts"
    group.add_argument(
        *("-n", "--ranks"),
        type=int,
        default=ranks,
        metavar="RANKS",
        help=f"number of ranks, the processes that compute together ({default}; inside mpiexec or "
        "srun: their number)",
    )
    group.add_argument(
        "--hosts",
        type=pathlib.Path,
        metavar="FILE",
        help="file with a line `NAME slots=RANKS` for each host (default: this host only)",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="time limit, after which all ranks are ended with exit code 124",
    )
    group.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time for the job to save and end after the first Ctrl-C (default: 30)",
    )
    group.add_argument(
        "--print-script",
        choices=["slurm"],
        help="print a script that runs this command as a batch job, and start nothing",
    )
    return parser
