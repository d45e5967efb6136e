"""The form of docstrings: where sections stand, arguments that exist, lines of a paragraph below each other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import rlx

PACKAGE = Path(rlx.__file__).parent
SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:")
ENTRY = re.compile(r"[*\w`]+(, [*\w`]+)*:")  # of a section, or an option

Documented = ast.Module | ast.ClassDef | ast.FunctionDef


@cache
def docstrings() -> list[tuple[str, Documented, list[str]]]:
    """Where each docstring of the package is, its node, and its lines."""
    return [found for file in sorted(PACKAGE.rglob("*.py")) for found in docstrings_of(file)]


def docstrings_of(file: Path) -> Iterator[tuple[str, Documented, list[str]]]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield f"{file.relative_to(PACKAGE)}: {getattr(node, 'name', 'module')}", node, text.split("\n")


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def test_sections() -> None:
    for where, node, lines in docstrings():
        for header, entry in ((i, lines[i + 1 :]) for i, line in enumerate(lines) if line.strip() in SECTIONS):
            assert indent(lines[header]) == 0, f"{where}: {lines[header]}"
            assert entry and indent(entry[0]) == 4, f"{where}: the first entry of {lines[header]}"
        if isinstance(node, ast.FunctionDef) and node.args.kwarg is None and "Args:" in lines:
            found = [node.args.vararg, *node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            known = {argument.arg for argument in found if argument}
            assert set(described(lines)) <= known, where


def described(lines: list[str]) -> list[str]:
    """The names in the section about arguments."""
    section = lines[lines.index("Args:") + 1 :]
    end = next((i for i, line in enumerate(section) if line and indent(line) == 0), len(section))
    entries = [ENTRY.match(line.strip()) for line in section[:end] if indent(line) == 4]
    return [name.strip("`* ") for entry in entries if entry for name in entry[0].rstrip(":").split(",")]


def test_paragraphs() -> None:
    """No line of a paragraph is further in than those around it, unless it belongs to an entry of a list or to code."""
    for where, _, lines in docstrings():
        for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
            if before.strip() and after.strip() and indent(before) == indent(after) == indent(line) - 4 < 8:
                starts = [text.strip() for text in (before, after)]
                listed = any(ENTRY.match(text) or text[0] in "-*>" for text in starts)
                assert listed or before.endswith((":", "(", "{")), f"{where}: {line}"
