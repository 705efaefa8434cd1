"""Check the libraries of a wheel, and print what each needs.

python tools/check_wheel.py dist/mpigrad-….whl

It fails if the wheel's tag depends on Python or is not manylinux, or if waves or multigrid are
missing for a kind of processor. It also fails if a library links an MPI, a hypre or another library
that is neither in the wheel nor allowed by manylinux, looks for libraries in a folder of the
builder, or has public names that are not mpigrad's (another hypre in the process could meet them).
It needs pyelftools, which comes with auditwheel.
"""

from __future__ import annotations

import io
import pathlib
import re
import sys
import zipfile

from elftools.elf.elffile import ELFFile

# Libraries that every Linux has. auditwheel copies all others into the wheel.
SYSTEM = re.compile(r"(libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+|ld-linux.*)\.so\.\d+")

VARIANTS = ("x86-64-v3", "x86-64-v4")  # `all` of cmake/variants.cmake


def newest(versions: set[str], name: str) -> str:
    """Return the newest of the symbol versions `name`_x.y.z, or an empty string."""
    found = [v.removeprefix(f"{name}_") for v in versions if re.fullmatch(rf"{name}_[\d.]+", v)]
    return max(found, key=lambda v: [int(n) for n in v.split(".")], default="")


def examine(name: str, content: bytes, inside: set[str]) -> list[str]:
    """Print a line about one library, and return what is wrong with it."""
    elf = ELFFile(io.BytesIO(content))
    needed, paths = [], []
    for tag in elf.get_section_by_name(".dynamic").iter_tags():
        if tag.entry.d_tag == "DT_NEEDED":
            needed.append(tag.needed)
        elif tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
            paths += (getattr(tag, "rpath", None) or tag.runpath).split(":")
    section = elf.get_section_by_name(".gnu.version_r")
    versions = {v.name for _, entries in section.iter_versions() for v in entries}
    glibc, libstdcxx = newest(versions, "GLIBC"), newest(versions, "GLIBCXX")
    words = [f"{len(content) / 1e6:.2f} MB", f"GLIBC {glibc}"]
    words += [f"GLIBCXX {libstdcxx}"] if libstdcxx else []
    print(f"{name}: {', '.join(words)}, needs {' '.join(needed)}")
    problems = [f"needs {n}" for n in needed if not SYSTEM.fullmatch(n) and n not in inside]
    problems += [f"looks for libraries in {p}" for p in paths if not p.startswith("$ORIGIN")]
    if pathlib.PurePath(name).name.startswith("libmpigrad"):
        symbols = elf.get_section_by_name(".dynsym").iter_symbols()
        exported = [s.name for s in symbols if s.entry.st_shndx != "SHN_UNDEF" and s.name]
        # The MPI of one rank has the names of MPI, which mpi4py looks up.
        names = "MPI_" if "one_rank" in name else r"(_ZNK?7)?mpigrad"
        others = [s for s in exported if not re.match(names, s)]
        problems += [f"exports {', '.join(others[:3])}"] if others else []
    return [f"{name} {problem}" for problem in problems]


def main() -> int:
    """Check the wheel of the command line. Return 1 and print the problems if there are any."""
    path = pathlib.Path(sys.argv[1])
    problems = []
    if not re.search(r"-py3-none-manylinux_\d+_\d+_\w+(\.\w+)*\.whl$", path.name):
        problems.append(f"{path.name}: expected the tag py3-none-manylinux_*")
    with zipfile.ZipFile(path) as wheel:
        libraries = [n for n in wheel.namelist() if re.search(r"\.so(\.|$)", n)]
        inside = {pathlib.PurePath(n).name for n in libraries}
        kinds = VARIANTS if "x86_64" in path.name else ("baseline",)
        expected = {f"libmpigrad_{part}_{v}.so" for part in ("waves", "multigrid") for v in kinds}
        problems += [f"{path.name} has no {name}" for name in sorted(expected - inside)]
        for name in libraries:
            problems += examine(name, wheel.read(name), inside)
    for problem in problems:
        print(f"wheel: {problem}", file=sys.stderr)
    return min(len(problems), 1)


if __name__ == "__main__":
    sys.exit(main())
