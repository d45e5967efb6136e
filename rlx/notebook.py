"""The view of an object in a notebook: small HTML for `_repr_html_`, readable in light and dark themes.

Only the standard library. All text is escaped. Colours are those of the page; borders are half transparent.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from html import escape
from importlib import import_module
from typing import Any

MOST_LINES = 400  # of a text in a fold
REDRAW_SECONDS = 0.1  # between two states of a text that grows

_CARD = "border-left:3px solid #8888;padding:0 0 0 10px;margin:4px 0"
_CELL = "text-align:left;padding:1px 14px 1px 0;vertical-align:top"
_TEXT = "max-height:26em;overflow:auto;font-size:85%;line-height:1.35;margin:4px 0;background:none"

Row = tuple[str, object]


def card(title: str, rows: Iterable[Row] = (), folds: Iterable[tuple[str, str]] = ()) -> str:
    """A title, a table of names and values, and texts that unfold.

    >>> card("a < b", [("x", 1)])[:60]
    '<div style="border-left:3px solid #8888;padding:0 0 0 10px;m'

    Args:
        rows: name and value; a value that is a mapping becomes lines of its own.
        folds: summary and text of each; a text is cut after `MOST_LINES` lines.
    """
    return f'<div style="{_CARD}"><b>{escape(title)}</b>{_table(rows)}{"".join(_fold(*fold) for fold in folds)}</div>'


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A title over a table with heads."""
    top = "".join(f'<th style="{_CELL}">{escape(head)}</th>' for head in heads)
    body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    return f'<div style="{_CARD}"><b>{escape(title)}</b><table><tr>{top}</tr>{body}</table></div>'


def _table(rows: Iterable[Row]) -> str:
    body = "".join(f'<tr><th style="{_CELL}">{escape(name)}</th>{_cell(value)}</tr>' for name, value in rows)
    return f"<table>{body}</table>" if body else ""


def _cell(value: object) -> str:
    return f'<td style="{_CELL}">{_shown(value)}</td>'


def _shown(value: object) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return "<br>".join(f"{escape(str(name))}: {_shown(each)}" for name, each in value.items()) or "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        parts = [str(getattr(each, "title", each)) for each in value]  # a compile has a title
        return (
            escape(("\n" if any(" " in part for part in parts) else ", ").join(parts)).replace("\n", "<br>") or "none"
        )
    return escape(str(value))


def _fold(summary: str, text: str) -> str:
    lines = text.rstrip("\n").split("\n")
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], f"... and {len(lines) - MOST_LINES} more lines: print() shows all"]
    shown = escape("\n".join(lines))
    return f'<details><summary>{escape(summary)}</summary><pre style="{_TEXT}">{shown}</pre></details>'


class GrowingText:
    """Text that is shown as it comes: printed, or in a notebook one output of the cell that is replaced.

    A notebook would keep an output for each piece that is printed, and its exports show each on a line of its own.
    """

    def __init__(self) -> None:
        self._text, self._drawn = "", time.monotonic()
        self._output = _notebook_output()

    def add(self, piece: str) -> None:
        """Shows one more piece."""
        self._text += piece
        if self._output is None:
            print(piece, end="", flush=True)
        elif time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self._draw()

    def finish(self) -> str:
        """Shows what is left; all of the text."""
        if self._output is None:
            print()
        else:
            self._draw()
        return self._text

    def _draw(self) -> None:
        self._output.update({"text/plain": self._text}, raw=True)
        self._drawn = time.monotonic()


def _notebook_output() -> Any:
    """A new output of the cell that runs; None outside of a notebook."""
    python = sys.modules.get("IPython")
    shell = python.get_ipython() if python else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    return import_module("IPython.display").display({"text/plain": ""}, raw=True, display_id=True)


class Stats(dict[str, Any]):
    """Sizes and counters by name: a dict that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return card("stats", self.items())
