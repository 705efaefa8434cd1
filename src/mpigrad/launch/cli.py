"""The `mpigrad` command: run, launch, doctor, and its options."""

from __future__ import annotations

import argparse
import base64
import dataclasses
import importlib
import importlib.util
import math
import os
import pathlib
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mpigrad._version import __version__
from mpigrad.launch import launcher
from mpigrad.launch.applications import Application, application, application_names
from mpigrad.launch.hosts import Host, place_ranks, read_hosts, slurm
from mpigrad.runtime.world import MPIError, check_system, world_around

__all__ = [
    "LaunchOptions",
    "Parser",
    "launch_parser",
    "main",
]

# ---- Options of the `mpigrad` command, parsed by argparse ----


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


# ---- The `mpigrad` command: run, launch, doctor ----
#
# This process starts the ranks and is not a rank itself, so it imports neither JAX nor MPI. It
# parses and checks all options before anything is launched.


_OVERVIEW = """usage: mpigrad [-h] [--version] COMMAND ...

Run differentiable MPI programs, and check the installation.

commands:
  run NAME      run an application on several ranks: {names}
  launch        run your own program on several ranks
  check         run your own program on several numbers of ranks, and compare what it computes
  doctor        show and test MPI, hypre, JAX and cores, and report problems

`mpigrad COMMAND --help` lists its options.
"""
_LAUNCH = """Run a Python program on several ranks.

The ranks get the settings that this MPI needs. All of them end if one fails, at the time limit, and
at Ctrl-C. The program is a file or `-m MODULE`. Arguments after it are passed to the program."""
_CHECK = """Run a Python program on several numbers of ranks, and compare what it computes.

The program has a function outputs(), which returns a dictionary: for each name an array that is the
same on all ranks, ("rows", part) for the rows that a rank has, or ("sum", share) for shares that
add up to the output. Values and gradients of any MPI program can be compared, with and without
mpigrad."""
_DOCTOR = """Show and test MPI, hypre, JAX and cores, and report problems.

Every problem is printed with its solution. The exit code is 1 if there is a problem."""

# Libraries whose names --as takes, and the modules that run a program with ours.
_STAND_INS = {"mpi4jax": "mpigrad.compat.mpi4jax"}


def main() -> int:
    """Run the command in sys.argv and return its exit code."""
    try:
        check_system()
        match sys.argv[1:]:
            case ["run", *rest]:
                return _run(rest)
            case ["launch", *rest]:
                return _launch(rest)
            case ["check", *rest]:
                return _check(rest)
            case ["doctor", *rest]:
                return _doctor(rest)
            case ["--version"]:
                _say(f"mpigrad {__version__}")
                return 0
            case [] | ["-h" | "--help"]:
                _say(_OVERVIEW.format(names=", ".join(application_names())))
                return 0
            case [word, *_]:
                _refuse(
                    f"expected a command (run, launch, check, doctor), got {word}. See `mpigrad "
                    "--help`."
                )
    except OptionError as error:
        _refuse(str(error))
    except MPIError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mpigrad: SIGINT: no rank was started", file=sys.stderr)
        return 128 + signal.SIGINT
    raise AssertionError


def _run(arguments: list[str]) -> int:
    names = application_names()
    if not arguments or arguments[0] not in names:
        if arguments and arguments[0] in ("-h", "--help"):
            for name in names:
                try:
                    _say(f"mpigrad run {name}: {application(name).summary}")
                except TypeError as error:
                    _say(str(error))
            return 0
        got = f", got {arguments[0]}" if arguments else ""
        _refuse(f"run: expected the NAME of an application ({', '.join(names)}){got}.")
    name, *words = arguments
    try:
        app = application(name)
    except TypeError as error:
        _refuse(str(error))
    parser = launch_parser(f"mpigrad run {name}", add_help=False)
    parsed, app_options = parser.parse_known_args(words)
    settings = _settings(app, name, app_options, parser)
    options = LaunchOptions.of(parsed)
    ranks, hosts = _check_options(options)
    try:
        for check in ("check", "check_output"):
            if hasattr(settings, check):
                getattr(settings, check)()
    except (ValueError, OSError) as error:
        _refuse(str(error))
    missing = [package for package in app.packages if not _has(package)]
    if missing:
        _refuse(
            f"run {name}: the packages {', '.join(missing)} are not installed. "
            f"Run: pip install '{app.requirement or ' '.join(missing)}'"
        )
    if options.print_script:
        resumes = hasattr(settings, "resume")
        if resumes and getattr(settings, "overwrite", False):
            _refuse(
                f"run {name} --overwrite: a job that is started again would overwrite its own "
                "saves. Give another --out with --print-script."
            )
        again = ["--resume"] if resumes and "--resume" not in app_options else []
        return _print_script(
            ["run", name, *app_options, *again], name, ranks, options, requeue=resumes
        )
    packed = base64.urlsafe_b64encode(pickle.dumps(settings)).decode()
    program = ["-m", "mpigrad.launch.run_application", name, packed]
    return _start(program, options, ranks, hosts)


def _settings(app: Application, name: str, arguments: Sequence[str], launching: Parser) -> Any:
    """Parse the settings of an application. Its help also lists the launching options."""
    try:
        import tyro
    except ImportError:
        _refuse(f"run {name}: tyro is not installed. Run: pip install '{app.requirement}'")
    try:
        return tyro.cli(
            app.settings_class(),
            prog=f"mpigrad run {name}",
            args=arguments,
            console_outputs=_prints(),
            config=(tyro.conf.OmitSubcommandPrefixes,),
        )
    except SystemExit as end:
        if end.code == 0:
            _say(launching.format_help().partition("\n\n")[2])
        _wait_for_first_rank()
        raise


def _launch(arguments: list[str]) -> int:
    parser = launch_parser("mpigrad launch", _LAUNCH)
    parser.usage = "mpigrad launch [options] PROGRAM.py [ARGUMENT ...]"
    parser.add_argument(
        "--profile",
        action="store_true",
        help="at the end, print calls, bytes and time of each operation on each line",
    )
    parser.add_argument(
        "--as",
        dest="stand_in",
        metavar="LIBRARY",
        help="let `import LIBRARY` give mpigrad's module of the same functions: mpi4jax, or "
        "mpi4jax==VERSION for a program written for an older one",
    )
    parser.add_argument(
        "--exact-adjoints",
        action="store_true",
        help="with --as mpi4jax: the adjoint of allreduce is allreduce, not the identity",
    )
    option_words, program = _split(arguments, parser)
    _print_help(parser, option_words)
    parsed, unknown = parser.parse_known_args(option_words)
    if unknown:
        _refuse(f"launch: unknown option {unknown[0]}. See `mpigrad launch --help`.")
    options = LaunchOptions.of(parsed)
    ranks, hosts = _check_options(options)
    match program:
        case []:
            _refuse("launch: expected a program. Write: mpigrad launch -n 4 PROGRAM.py")
        case ["-m"]:
            _refuse("launch -m: expected a module. Write: mpigrad launch -n 4 -m MODULE")
        case ["-m", module, *_]:
            sys.path.insert(0, os.getcwd())  # as `python -m` does
            if not _has(module.partition(".")[0]):
                _refuse(f"launch -m: there is no module {module}. Check its name and PYTHONPATH.")
        case [file, *_] if not pathlib.Path(file).exists():
            _refuse(f"launch: there is no file {file}. Check its path.")
    first, environment = _stand_in(parsed.stand_in, parsed.exact_adjoints)
    if options.print_script:
        flags = ["--profile"] if parsed.profile else []
        flags += ["--as", parsed.stand_in] if parsed.stand_in else []
        flags += ["--exact-adjoints"] if parsed.exact_adjoints else []
        name = pathlib.Path(program[1] if program[0] == "-m" else program[0]).stem
        return _print_script(["launch", *flags, *program], name, ranks, options, requeue=True)
    if parsed.profile:
        environment["MPIGRAD_PROFILE"] = "1"
    return _start([*first, *program], options, ranks, hosts, environment)


def _stand_in(requirement: str | None, exact: bool) -> tuple[list[str], dict[str, str]]:
    """Return the words before the program, and the variables, of --as and --exact-adjoints."""
    if requirement is None:
        if exact:
            _refuse("launch --exact-adjoints: this option needs --as mpi4jax. Add it.")
        return [], {}
    library, equals, version = requirement.partition("==")
    if library not in _STAND_INS or bool(equals) != bool(re.fullmatch(r"\d+\.\d+.*", version)):
        names = " or ".join(f"{name} or {name}==VERSION" for name in _STAND_INS)
        _refuse(f"launch --as: expected {names}, got {requirement}. Correct it, or leave --as out.")
    environment = {"MPIGRAD_MPI4JAX_VERSION": version} if version else {}
    if exact:
        environment["MPIGRAD_MPI4JAX_ADJOINTS"] = "exact"
    return ["-m", _STAND_INS[library]], environment


def _check(arguments: list[str]) -> int:
    parser = Parser("mpigrad check", _CHECK)
    parser.usage = "mpigrad check [options] PROGRAM.py [ARGUMENT ...]"
    parser.add_argument(
        *("-n", "--ranks"), type=int, nargs="+", default=[1, 2, 4], metavar="RANKS",
        help="numbers of ranks, the first one for comparison (default: 1 2 4)",
    )  # fmt: skip
    parser.add_argument(
        "--rtol", type=float, default=1e-8, help="largest difference, over the largest entry"
    )
    parser.add_argument(
        "--timeout", type=float, default=math.inf, metavar="SECONDS", help="limit of each run"
    )
    # The numbers of ranks end at the first word that is not one.
    end = next((i for i, word in enumerate(arguments) if word.endswith(".py")), len(arguments))
    _print_help(parser, arguments[:end])
    parsed, program = parser.parse_args(arguments[:end]), arguments[end:]
    if not program or not pathlib.Path(program[0]).exists():
        _refuse("check: expected a program. Write: mpigrad check -n 1 2 4 PROGRAM.py")
    if len(parsed.ranks) < 2:
        _refuse(f"check -n: expected at least two numbers of ranks, got {parsed.ranks[0]}.")
    for ranks in parsed.ranks:
        _check_launch(ranks, parsed.timeout, 0.0)
    with tempfile.TemporaryDirectory(prefix="mpigrad-check-") as directory:
        file = pathlib.Path(directory) / "outputs.pickle"
        words = ["-m", "mpigrad.launch.rank_check", str(file), str(parsed.rtol), *program]
        for ranks in parsed.ranks:
            if code := launcher.launch(words, ranks, timeout=parsed.timeout):
                return code
        differences = file.with_suffix(".differences")
        if differences.exists():
            listed = ", ".join(differences.read_text().splitlines())
            print(f"mpigrad check: these outputs depend on the number of ranks: {listed}.")
            return 1
    counts = ", ".join(map(str, parsed.ranks))
    print(f"mpigrad check: the outputs are the same on {counts} ranks, within {parsed.rtol:g}.")
    return 0


def _doctor(arguments: list[str]) -> int:
    parser = Parser("mpigrad doctor", _DOCTOR)
    parser.add_argument(
        *("-n", "--ranks"), type=int, default=2, metavar="RANKS", help="ranks of the self-test"
    )
    parser.add_argument("--hosts", type=pathlib.Path, metavar="FILE", help="hosts of the self-test")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="limit of the self-test"
    )
    _print_help(parser, arguments)
    parsed = parser.parse_args(arguments)
    _check_launch(parsed.ranks, parsed.timeout, 0.0)
    hosts = _hosts_of(parsed.hosts, parsed.ranks)
    doctor = importlib.import_module("mpigrad.launch.doctor")
    return doctor.examine(parsed.ranks, parsed.timeout, hosts)


def _start(
    program: Sequence[str],
    options: LaunchOptions,
    ranks: int,
    hosts: Sequence[Host],
    environment: Mapping[str, str] | None = None,
) -> int:
    """Launch the ranks. Inside the world of a launcher, become a rank instead."""
    around = world_around()
    if around is None:
        return launcher.launch(
            program,
            ranks,
            timeout=options.timeout,
            grace=options.grace,
            environment=environment,
            hosts=hosts,
        )
    if ranks != around.size:
        _refuse(
            f"-n: got {ranks}, but {around.launcher} has started {around.size} ranks here. "
            "Leave -n out, or start the command outside this launcher."
        )
    if hosts:
        _refuse(
            f"--hosts: {around.launcher} has started the ranks on its hosts. Leave --hosts out."
        )
    if options.timeout < math.inf:
        _refuse(
            f"--timeout: {around.launcher} has started the ranks. Give it the time limit instead."
        )
    os.environ.update(environment or {})
    launcher.become_rank(program)


def _print_script(
    words: Sequence[str], name: str, ranks: int, options: LaunchOptions, *, requeue: bool
) -> int:
    if options.hosts is not None:
        _refuse(
            "--hosts: the batch system places the ranks. Leave --hosts out with --print-script."
        )
    print(slurm(words, name, ranks, options.timeout, requeue=requeue), end="")
    return 0


def _split(arguments: list[str], parser: Parser) -> tuple[list[str], list[str]]:
    """Split the options of launch from the program, whose options may have the same names."""
    takes_value = {
        name: action.nargs != 0 for action in parser._actions for name in action.option_strings
    }
    i = 0
    while i < len(arguments):
        word = arguments[i]
        if word == "--":
            return arguments[:i], arguments[i + 1 :]
        if word == "-m" or not word.startswith("-"):
            return arguments[:i], arguments[i:]
        name, equals, _ = word.partition("=")
        if name not in takes_value:
            _refuse(f"launch: unknown option {word}. See `mpigrad launch --help`.")
        i += 2 if takes_value[name] and not equals else 1
    return arguments, []


def _print_help(parser: Parser, arguments: Sequence[str]) -> None:
    if {"-h", "--help"} & {*arguments}:
        _say(parser.format_help())
        raise SystemExit(0)


def _check_options(options: LaunchOptions) -> tuple[int, tuple[Host, ...]]:
    """Return the number of ranks and their hosts (empty: this host)."""
    around, hosts = world_around(), ()
    if options.hosts is not None:
        hosts = _hosts_of(options.hosts, options.ranks)
    here = around.size if around else sum(host.slots for host in hosts) or 1
    ranks = here if options.ranks is None else options.ranks
    _check_launch(ranks, options.timeout, options.grace)
    return ranks, hosts


def _hosts_of(file: pathlib.Path | None, ranks: int | None) -> tuple[Host, ...]:
    """Read a hosts file and check that its hosts take this number of ranks."""
    if file is None:
        return ()
    try:
        hosts = read_hosts(file)
        place_ranks(hosts, ranks or 1)
    except (ValueError, OSError) as error:
        _refuse(f"--hosts: {error}")
    return hosts


def _check_launch(ranks: int, timeout: float, grace: float) -> None:
    if ranks < 1:
        _refuse(f"-n: expected at least 1 rank, got {ranks}.")
    if not timeout > 0:
        _refuse(f"--timeout: expected more than 0 seconds, got {timeout:g}.")
    if not grace >= 0:
        _refuse(f"--grace: expected 0 seconds or more, got {grace:g}.")


def _say(text: str) -> None:
    if _prints():
        print(text)


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _prints() -> bool:
    """Return True if this process prints: it is rank 0, or not a rank."""
    around = world_around()
    return around is None or around.rank == 0


def _refuse(text: str) -> NoReturn:
    if _prints():
        prefix = "" if text.startswith("mpigrad ") else "mpigrad: "
        print(f"{prefix}{text}", file=sys.stderr, flush=True)
    _wait_for_first_rank()
    raise SystemExit(2)


def _wait_for_first_rank() -> None:
    """Wait until rank 0 has printed: a launcher ends all ranks when the first one exits."""
    if not _prints():
        time.sleep(5)
