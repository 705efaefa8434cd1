"""Options of the `mpigrad` command, by argparse."""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
from typing import NoReturn

__all__ = ["LaunchOptions", "Parser", "launch_parser"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How ranks are started and ended: see the help of `launch_parser`."""

    ranks: int | None = None
    hosts: pathlib.Path | None = None
    timeout: float = math.inf
    grace: float = 30.0
    print_script: str | None = None

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> LaunchOptions:
        """Take the launching options out of what a parser has found."""
        return cls(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(cls)})


class OptionError(ValueError):
    """A command line that makes no sense."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are exceptions, and that takes no abbreviations."""

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
    default = f"default: {ranks}" if ranks else "default: 1, or what --hosts take"
    group.add_argument(
        *("-n", "--ranks"),
        type=int,
        default=ranks,
        metavar="RANKS",
        help="number of ranks, the processes that compute together; inside mpiexec or srun it is "
        f"theirs ({default})",
    )
    group.add_argument(
        "--hosts",
        type=pathlib.Path,
        metavar="FILE",
        help="the hosts that run them: a line for each, its name and slots=RANKS (default: this)",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="time limit, after which every rank is ended with exit code 124",
    )
    group.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time that the job may take to save and end after the first Ctrl-C (default: 30)",
    )
    group.add_argument(
        "--print-script",
        choices=["slurm"],
        help="start nothing: print a script that runs this command as a job of this batch system",
    )
    return parser
