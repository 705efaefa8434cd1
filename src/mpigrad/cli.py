"""The `mpigrad` command: run, launch, doctor, bench.

This process starts the ranks and is none of them, so it imports neither JAX nor MPI. Options are
checked here, before anything is launched, and parsed again on the ranks (`mpigrad.rank`).
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import os
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

try:
    import tyro
except ImportError:
    sys.exit("mpigrad: the command line needs tyro: pip install 'mpigrad[problems]'")

import mpigrad
from mpigrad import job_script, launcher
from mpigrad.hosts import Host, placed, read_hosts

__all__ = ["PROBLEMS", "main", "problem_options"]

PROBLEMS = ("poisson", "heat", "acoustic", "elastic", "fwi", "population", "sgd")
_PACKAGES = ("equinox", "matplotlib", "zarr")  # of the problems; of one of them also:
_MORE_PACKAGES = {"population": ("blackjax", "diffrax"), "sgd": ("optax", "sklearn")}
# Of LaunchOptions: with a value, all of them.
_WITH_VALUE = ("-n", "--ranks", "--hosts", "--timeout", "--grace", "--print-script")
_FLAGS = ("--profile",)  # of Launch

Ranks = Annotated[int, tyro.conf.arg(aliases=["-n"], metavar="RANKS")]
MaybeRanks = Annotated[
    int | None,
    tyro.conf.arg(
        aliases=["-n"], metavar="RANKS", help_behavior_hint="(default: 1, or what --hosts take)"
    ),
]
Seconds = Annotated[float, tyro.conf.arg(metavar="SECONDS")]
HostsFile = Annotated[
    pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: this host)")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How ranks are started and ended."""

    ranks: MaybeRanks = None
    """Number of ranks, the processes that compute together. Inside mpiexec or srun it is theirs."""
    hosts: HostsFile = None
    """The hosts that run them: a line for each, its name and slots=RANKS."""
    timeout: Seconds = math.inf
    """Time limit, after which every rank is ended (exit code 124)."""
    grace: Seconds = 30.0
    """Time that the job may take to save and end after the first Ctrl-C."""
    print_script: Annotated[
        Literal["slurm"] | None,
        tyro.conf.arg(metavar="slurm", help_behavior_hint="(optional)"),
    ] = None
    """Start nothing: print a script that runs this command as a job of this batch system."""


@dataclasses.dataclass(frozen=True)
class Launch(LaunchOptions):
    """Run a Python program on several ranks.

    They get the settings that this MPI needs, and all of them end together: when one fails, at
    the time limit, at Ctrl-C.
    """

    program: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="PROGRAM.py")]]
    """The program, or `-m MODULE`."""
    arguments: tyro.conf.Positional[
        Annotated[
            tuple[str, ...],
            tyro.conf.arg(metavar="ARGUMENT ...", help_behavior_hint="(optional)"),
        ]
    ] = ()
    """The program's own arguments and options."""
    profile: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print at the end what each operation on each line has cost: calls, bytes, time, waiting."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Solve one of the problems that come with mpigrad, on several ranks.
    `mpigrad run PROBLEM --help` lists its options.
    """

    problem: tyro.conf.Positional[
        Annotated[
            Literal["poisson", "heat", "acoustic", "elastic", "fwi", "population", "sgd"],
            tyro.conf.arg(metavar="PROBLEM"),
        ]
    ]
    """poisson: the diffusivity kappa in div(kappa grad u) = f, from observations of u;
    heat: heat in a plate, or its diffusivity from thermometers;
    acoustic, elastic: shots at a model of the ground;
    fwi: the model of the ground, from the recordings of such shots;
    population: how patients absorb and eliminate a drug, from blood samples;
    sgd: a network that reads digits, or your own, by stochastic gradients."""


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Say what MPI, hypre, JAX and cores there are, try them, and name what is wrong.

    Every problem comes with what to do about it; the exit code is 1 when there is one.
    """

    ranks: Ranks = 2
    """Number of ranks of the self-test."""
    hosts: HostsFile = None
    """The hosts that run them: a line for each, its name and slots=RANKS."""
    timeout: Seconds = 120.0
    """Time limit of the self-test."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """Compare with other libraries, side by side: the tables of bench/, and a page of them.

    Other libraries are installed on demand, into an environment of their own.
    """

    tables: tyro.conf.Positional[
        Annotated[
            tuple[str, ...],
            tyro.conf.arg(metavar="TABLE ...", help_behavior_hint="(default: all)"),
        ]
    ] = ()
    """Names of bench/tables.toml: operations, poisson, sparse, waves, ..."""
    out: pathlib.Path = pathlib.Path("results/bench")
    """Directory for results, pictures and report.html."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Smaller problems and fewer rounds: minutes instead of an hour or two."""
    peers: bool = True
    """Install the other libraries; without, those are measured that are here already."""


def problem_options(problem: str) -> type[Any]:
    """The options of `mpigrad run PROBLEM`: the problem's settings, and those of launching."""
    settings = settings_of(problem)
    options = dataclasses.make_dataclass(
        "Options", [], bases=(settings, LaunchOptions), frozen=True
    )
    options.__doc__ = settings.__doc__
    return options


def settings_of(problem: str, options: Any = None) -> Any:
    """The class of a problem's settings; with `options` of a command line, its instance."""
    settings = _settings_module(problem).Settings
    if options is None:
        return settings
    return settings(**{f.name: getattr(options, f.name) for f in dataclasses.fields(settings)})


def _settings_module(problem: str) -> Any:
    """The module of a problem's settings, without the package around it, which imports JAX."""
    name = f"mpigrad.problems.{problem}.settings"
    if name not in sys.modules:
        file = pathlib.Path(__file__).parent / "problems" / problem / "settings.py"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def main() -> int:
    """Run the command in sys.argv; returns its exit code."""
    arguments = sys.argv[1:]
    try:
        match arguments:
            case ["run", problem, *rest] if problem in PROBLEMS:
                return _run(problem, rest)
            case ["launch", *rest]:
                return _launch(rest)
            case ["doctor", *rest]:
                options = _parse(Doctor, "mpigrad doctor", rest)
                _check_launch(options.ranks, options.timeout, 0.0)
                hosts = _hosts_of(options.hosts, options.ranks)
                doctor = importlib.import_module("mpigrad.doctor")
                return doctor.examine(options.ranks, options.timeout, hosts)
            case ["bench", *rest]:
                return _bench(_parse(Bench, "mpigrad bench", rest))
            case ["--version"]:
                print(f"mpigrad {mpigrad.__version__}")
                return 0
            case _:
                return _overview(arguments)
    except launcher.MPIError as error:
        print(error, file=sys.stderr)
        return 1


def _overview(arguments: list[str]) -> int:
    """Help, and the errors of a command line that names no command or no problem."""
    tyro.extras.subcommand_cli_from_dict(
        {"run": Run, "launch": Launch, "doctor": Doctor, "bench": Bench},
        prog="mpigrad",
        description="MPI programs that can be differentiated: run them, launch your own, and find "
        "out what is wrong with an installation.",
        args=arguments or ["--help"],
        console_outputs=_speaks(),
    )
    return 0


def _run(problem: str, arguments: list[str]) -> int:
    options = _parse(problem_options(problem), f"mpigrad run {problem}", arguments)
    ranks, hosts = _check_options(options)
    try:
        settings_of(problem, options).check()
    except (ValueError, OSError) as error:
        _refuse(str(error))
    packages = (*_PACKAGES, *_MORE_PACKAGES.get(problem, ()))
    missing = [name for name in packages if not _has(name)]
    if missing:
        _refuse(
            f"{', '.join(missing)} not installed, which `run {problem}` needs: "
            "pip install 'mpigrad[problems]'"
        )
    if options.print_script:
        resume = [w for w in ("--resume",) if hasattr(options, "resume") and w not in arguments]
        words = ["run", problem, *_without_launching(arguments), *resume]
        return _print_script(words, problem, ranks, options, requeue=hasattr(options, "resume"))
    return _start(["-m", "mpigrad.rank", problem, *arguments], options, ranks, hosts)


def _launch(arguments: list[str]) -> int:
    own, program = _split(arguments)
    options = _parse(Launch, "mpigrad launch", [*own, *(["--", *program] if program else [])])
    ranks, hosts = _check_options(options)
    match program:
        case []:
            _refuse("which program? mpigrad launch -n 4 program.py")
        case ["-m"]:
            _refuse("-m: which module? mpigrad launch -n 4 -m module")
        case ["-m", module, *_]:
            sys.path.insert(0, os.getcwd())  # as `python -m` does
            if not _has(module.partition(".")[0]):
                _refuse(f"there is no module {module}")
        case [file, *_] if not pathlib.Path(file).exists():
            _refuse(f"there is no file {file}")
    if options.print_script:
        words = ["launch", *(["--profile"] if options.profile else []), *program]
        name = pathlib.Path(program[1] if program[0] == "-m" else program[0]).stem
        return _print_script(words, name, ranks, options, requeue=True)
    profile = {"MPIGRAD_PROFILE": "1"} if options.profile else {}
    return _start(program, options, ranks, hosts, profile)


def _bench(options: Bench) -> int:
    bench = importlib.import_module("mpigrad.bench")
    try:
        return bench.run(options.tables, options.out, quick=options.quick, peers=options.peers)
    except bench.BenchError as error:
        _refuse(str(error).removeprefix("mpigrad: "))


def _start(
    program: Sequence[str],
    options: LaunchOptions,
    ranks: int,
    hosts: Sequence[Host],
    environment: Mapping[str, str] | None = None,
) -> int:
    """Launch the ranks; inside a launcher's world, become one of them."""
    around = launcher.world_around()
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
            f"-n {ranks}, but {around.launcher} has started {around.size} ranks here: "
            "leave -n out, or start the command outside of it"
        )
    if hosts:
        _refuse(f"--hosts: {around.launcher} has started the ranks, and placed them")
    if options.timeout < math.inf:
        _refuse(f"--timeout: {around.launcher} has started the ranks; give it the time limit")
    os.environ.update(environment or {})
    launcher.become_rank(program)


def _print_script(
    words: Sequence[str], name: str, ranks: int, options: LaunchOptions, *, requeue: bool
) -> int:
    if options.hosts is not None:
        _refuse("--hosts: a batch system places the ranks; leave it out of --print-script")
    print(job_script.slurm(words, name, ranks, options.timeout, requeue=requeue), end="")
    return 0


def _without_launching(arguments: Sequence[str]) -> list[str]:
    """The arguments without those of LaunchOptions, which a batch script gives to the system."""
    kept, skip = [], False
    for word in arguments:
        name, equals, _ = word.replace("_", "-").partition("=")
        if skip:
            skip = False
        elif name in _WITH_VALUE:
            skip = not equals
        else:
            kept.append(word)
    return kept


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split launch's own options from the program, whose options may have the same names."""
    i = 0
    while i < len(arguments):
        word = arguments[i]
        if word == "--":
            return arguments[:i], arguments[i + 1 :]
        if word == "-m" or not word.startswith("-"):
            return arguments[:i], arguments[i:]
        if word in ("-h", "--help"):
            return [word], []
        if word not in _FLAGS and word.partition("=")[0] not in _WITH_VALUE:
            _refuse(f"launch has no option {word}; see `mpigrad launch --help`")
        i += 1 if "=" in word or word in _FLAGS else 2
    return arguments, []


def _parse(options: type[Any], command: str, arguments: list[str]) -> Any:
    try:
        return tyro.cli(
            options,
            prog=command,
            args=arguments,
            console_outputs=_speaks(),
            config=(tyro.conf.OmitSubcommandPrefixes,),
        )
    except SystemExit:
        _let_the_first_speak()
        raise


def _check_options(options: LaunchOptions) -> tuple[int, tuple[Host, ...]]:
    """The number of ranks, and their hosts (none: this one)."""
    around, hosts = launcher.world_around(), ()
    if options.hosts is not None:
        hosts = _hosts_of(options.hosts, options.ranks)
    here = around.size if around else sum(host.slots for host in hosts) or 1
    ranks = here if options.ranks is None else options.ranks
    _check_launch(ranks, options.timeout, options.grace)
    return ranks, hosts


def _hosts_of(file: pathlib.Path | None, ranks: int | None) -> tuple[Host, ...]:
    """The hosts of a file, which take as many ranks."""
    if file is None:
        return ()
    try:
        hosts = read_hosts(file)
        placed(hosts, ranks or 1)
    except (ValueError, OSError) as error:
        _refuse(f"--hosts: {error}")
    return hosts


def _check_launch(ranks: int, timeout: float, grace: float) -> None:
    if ranks < 1:
        _refuse(f"-n {ranks}: at least 1 rank")
    if not timeout > 0:
        _refuse(f"--timeout {timeout:g}: more than 0 seconds")
    if not grace >= 0:
        _refuse(f"--grace {grace:g}: 0 seconds or more")


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _speaks() -> bool:
    """Whether this process prints for its world: of several ranks, the first."""
    around = launcher.world_around()
    return around is None or around.rank == 0


def _refuse(text: str) -> NoReturn:
    if _speaks():
        print(f"mpigrad: {text}", file=sys.stderr, flush=True)
    _let_the_first_speak()
    raise SystemExit(2)


def _let_the_first_speak() -> None:
    """A launcher ends all ranks with the first that fails, perhaps before rank 0 has spoken."""
    if not _speaks():
        time.sleep(5)
