"""Keep the language of mpigrad plain: figures of its prose, and the rules that a machine can keep.

    python tools/language.py              figures for each part, per 1,000 words
    python tools/language.py --list       the sentences that break a rule, with file and line
    python tools/language.py --check      exit code 1 if a figure is over its limit (make lint)
    python tools/language.py PATH ...     of these files and folders alone

Prose is the text of the pages (code removed), of docstrings, of comments and of error messages.
"""

from __future__ import annotations

import argparse
import ast
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs")
PROSE = (*PAGES, "src", "native", "examples")
# Per 1,000 words. The figures of lineax, mpi4py and deepwave are below all of them.
LIMITS = {"where": 2.5, "is no": 0.3, ";": 3.0}
# Words that another word says better, and the sentences in which they are right.
WORDS = {
    r"\banew\b": "again",
    r"\bfor ever\b": "forever, or without end",
    r"\bthereby\b": "so",
    r"\blikewise\b": "also",
    r"\bbeside\b": "next to, or with",
    r"\balike\b": "the same on all ranks",
}
# Docstrings that begin so do not say what the function does.
FIRST_WORDS = r"(What|Whether|Of|Where|Those|That) "
# Tables of names, quotations and licences.
LEFT_OUT = ("docs/changes.md", "docs/reference", "docs/examples/")


@dataclass(frozen=True)
class Text:
    """A piece of prose and its place."""

    file: pathlib.Path
    line: int
    kind: str  # page, docstring, comment or error
    text: str


def texts(file: pathlib.Path) -> Iterator[Text]:
    """All prose of a file."""
    source = file.read_text()
    if file.suffix == ".md":
        yield from _page(file, source)
    elif file.suffix == ".py":
        yield from _python(file, source)
    elif file.suffix in (".cc", ".h"):
        for number, line in enumerate(source.splitlines(), 1):
            if match := re.search(r"(?<![:\"])//+\s?(.*)", line):
                yield Text(file, number, "comment", match[1])


def _page(file: pathlib.Path, source: str) -> Iterator[Text]:
    fence = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fence = not fence
        elif not fence:
            yield Text(file, number, "page", line)


def _python(file: pathlib.Path, source: str) -> Iterator[Text]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(
            r"#\s*(type:|noqa|pyright|fmt)", token.string
        ):
            yield Text(file, token.start[0], "comment", token.string.lstrip("# "))
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                first = node.body[0].lineno
                yield Text(file, first, "docstring", _without_examples(text))
        elif isinstance(node, ast.Raise) and node.exc is not None:
            parts = [
                part.value
                for part in ast.walk(node.exc)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
            yield Text(file, node.lineno, "error", "".join(parts))


def _without_examples(text: str) -> str:
    kept = [line for line in text.splitlines() if not line.lstrip().startswith((">>>", "..."))]
    return "\n".join(kept)


def _plain(text: str) -> str:
    """Prose without code, formulas, links and markup."""
    text = re.sub(r"`[^`]*`", "x", text)
    text = re.sub(r"\$[^$]*\$", "x", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"https?://\S+", "", text)


COUNTED = {
    "where": r"\b[Ww]here\b",
    "if": r"\b[Ii]f\b",
    "is no": r"\b(is|are|was|were) (no|none)\b(?! longer\b)",
    ";": r";",
}


def figures(some: list[Text]) -> dict[str, float]:
    """Occurrences per 1,000 words."""
    words = "\n".join(_plain(text.text) for text in some)
    total = max(1, len(re.findall(r"[A-Za-z]+", words)))
    found = {name: 1000 * len(re.findall(p, words)) / total for name, p in COUNTED.items()}
    return found | {"words": total}


def broken(text: Text) -> Iterator[str]:
    """The rules that a text breaks."""
    plain = _plain(text.text)
    for name in LIMITS:
        for _ in re.findall(COUNTED[name], plain):
            yield name
    for pattern, better in WORDS.items():
        if re.search(pattern, plain):
            yield f"{pattern.strip(chr(92) + 'b')}: {better}"
    if text.kind == "docstring" and re.match(FIRST_WORDS, text.text):
        yield "first word"


def main() -> int:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("paths", nargs="*", type=pathlib.Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    roots = [path.resolve() for path in given.paths] or [ROOT / name for name in PROSE]
    files = [
        file
        for root in roots
        for file in ([root] if root.is_file() else sorted(root.rglob("*")))
        if file.suffix in (".md", ".py", ".cc", ".h")
        and not str(file.relative_to(ROOT)).startswith(LEFT_OUT)
    ]
    parts: dict[str, list[Text]] = {}
    for file in files:
        for text in texts(file):
            parts.setdefault(text.kind, []).append(text)
            if given.list:
                for rule in broken(text):
                    first = " ".join(text.text.split())[:110]
                    print(f"{file.relative_to(ROOT)}:{text.line}: {rule}: {first}")
    everything = [text for some in parts.values() for text in some]
    print(f"{'':12}" + "".join(f"{name:>9}" for name in (*COUNTED, "words")))
    for kind, some in [*parts.items(), ("all", everything)]:
        found = figures(some)
        print(
            f"{kind:12}" + "".join(f"{found[n]:9.1f}" for n in COUNTED) + f"{found['words']:9.0f}"
        )
    if given.check:
        found = figures(everything)
        over = [
            f"{name}: {found[name]:.2f} > {limit}"
            for name, limit in LIMITS.items()
            if found[name] > limit
        ]
        if found["where"] >= found["if"]:
            over.append("'where' is more frequent than 'if'")
        openings = sum(bool(re.match(FIRST_WORDS, t.text)) for t in parts.get("docstring", []))
        if openings:
            over.append(f"{openings} docstrings begin with What, Whether, Of, ...")
        print("\n".join(over), file=sys.stderr)
        return 1 if over else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
