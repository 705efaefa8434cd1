"""The native libraries run on every x86-64, except what is chosen at run time.

A processor stops a program at an instruction that it does not know (SIGILL), without a message. So
newer instructions stand only in the libraries of waves for newer processors and in the functions
`run_x86_64_v3` and `run_x86_64_v4` (native/processor.h).
"""

from __future__ import annotations

import functools
import pathlib
import platform
import re
import shutil
import subprocess

import pytest

import mpigrad
from mpigrad.runtime.processor import VARIANTS, built_variants

pytestmark = [
    pytest.mark.ranks(1),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="these are levels of x86-64"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump (binutils) is missing"),
]

LIBRARIES = sorted(
    (file for folder in mpigrad.__path__ for file in pathlib.Path(folder).glob("_native/*.so")),
    key=lambda file: file.name,
)
FUNCTION = re.compile(r"[0-9a-f]+ <(.+)>:$")
INSTRUCTION = re.compile(r" +[0-9a-f]+:\t((?:[0-9a-f]{2} )+) *\t(.+)")
# Prefixes that may stand before the operation: sizes, segments, repetitions, and REX (40 to 4f).
PREFIXES = re.compile(r"(?:(?:66|67|f2|f3|2e|36|3e|26|64|65|4[0-9a-f]) )*")


def level(code: str, text: str) -> int:
    """Return the level of x86-64 that an instruction needs: 1 (all), 2, 3 or 4."""
    operation = code[PREFIXES.match(code).end() :]  # type: ignore[union-attr]
    if operation.startswith("62 "):  # EVEX: AVX-512
        return 4
    # VEX: AVX, AVX2, BMI, FMA. The others repeat an older instruction and give other results there.
    if operation.startswith(("c4 ", "c5 ")) or text.startswith(("lzcnt", "movbe")):
        return 3
    if operation.startswith(("0f 38 ", "0f 3a ")) or text.startswith("popcnt"):  # SSSE3, SSE4
        return 2
    return 1


@functools.cache
def needed(library: pathlib.Path) -> dict[str, tuple[int, str]]:
    """Return for each function the level that it needs, with an instruction that needs it."""
    words = ["objdump", "--disassemble", "--wide", "--insn-width=16", str(library)]
    lines = subprocess.run(words, capture_output=True, text=True, check=True, timeout=200).stdout
    found: dict[str, tuple[int, str]] = {}
    function = ""
    for line in lines.splitlines():
        if named := FUNCTION.match(line):
            function = named[1]
            found.setdefault(function, (1, ""))
        elif read := INSTRUCTION.match(line):
            found[function] = max(found[function], (level(read[1], read[2]), read[2]))
    return found


def allowed(library: pathlib.Path, function: str) -> int:
    """Return the level for which a function may be compiled."""
    library_level = re.search(r"(?:waves|multigrid)_x86-64-v([34])", library.name)
    function_level = re.search(r"run_x86_64_v([34])", function)
    return max(int(found[1]) if found else 1 for found in (library_level, function_level))


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda file: file.name)
def test_newer_instructions_are_chosen_at_run_time(library: pathlib.Path) -> None:
    found = needed(library)
    assert len(found) > 50, "objdump shows no functions"
    wrong = {
        function: text
        for function, (level, text) in found.items()
        if level > allowed(library, function)
    }
    assert not wrong


def test_every_variant_has_its_instructions() -> None:
    """A wheel has waves for all processors, and a checkout for the one that built it."""
    names = {file.name: file for file in LIBRARIES}
    for library in ("communication", "hypre"):
        if file := names.get(f"libmpigrad_{library}.so"):
            levels = {allowed(file, f): level for f, (level, _) in needed(file).items()}
            assert levels == {1: 1, 3: 3, 4: 4}, library
    levels = dict(zip(VARIANTS, (1, 3, 4), strict=True))
    assert built_variants("waves") == built_variants("multigrid") != ()
    for variant in built_variants("waves"):
        waves = needed(names[f"libmpigrad_waves_{variant}.so"])
        assert max(level for level, _ in waves.values()) == levels[variant]


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        ("f2 0f 58 c1 ", "addsd  %xmm1,%xmm0", 1),
        ("f3 48 0f bd c7 ", "lzcnt  %rdi,%rax", 3),
        ("c4 e2 f9 f7 c7 ", "shlx   %rax,%rdi,%rax", 3),
        ("64 c5 fb 10 06 ", "vmovsd %fs:(%rsi),%xmm0", 3),
        ("62 f1 7f 28 7f 07 ", "vmovdqu8 %ymm0,(%rdi)", 4),
        ("66 48 0f 3a 16 c0 01 ", "pextrq $0x1,%xmm0,%rax", 2),
    ],
)
def test_levels_of_instructions(code: str, text: str, expected: int) -> None:
    assert level(code, text) == expected
