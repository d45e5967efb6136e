"""The pages of the documentation, cut into blocks of code: what the tests of the documentation share.

Above a block that no test can run stands `<!-- not run: REASON -->`, which neither GitHub nor the site shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("*/*/README.md")])
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")


@dataclass(frozen=True)
class Block:
    """A block of code: its language ("" if it names none), its text, its first line, and why no test runs it."""

    page: Path
    language: str
    code: str
    line: int
    not_run: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """Every block of code of the page, in order."""
    found, reason = [], ""
    for token in MarkdownIt("commonmark").parse(text(page)):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            found.append(Block(page, token.info.strip(), token.content, token.map[0] + 1, reason))
        mark = _NOT_RUN.fullmatch(token.content.strip()) if token.type == "html_block" else None
        reason = mark[1] if mark else ""
    return tuple(found)


def fenced(page: Path, language: str) -> list[str]:
    """The blocks of one language that tests run."""
    return [block.code for block in blocks(page) if block.language == language and not block.not_run]


def shell_lines(page: Path) -> list[str]:
    """The commands of the page's `bash` blocks: comments are left out, continued lines are joined."""
    joined = "".join(block.code for block in blocks(page) if block.language == "bash").replace("\\\n", " ")
    lines = (re.split(r"(?:^|  )# ", line)[0].strip() for line in joined.splitlines())
    return [line for line in lines if line]


def consoles(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(command, lines of its output) of every command in a `console` block."""
    for block in fenced(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *output = part.rstrip("\n").split("\n")
            yield command, output
