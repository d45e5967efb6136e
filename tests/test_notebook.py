"""The example notebook runs from top to bottom, and what notebooks show of objects is small, escaped HTML."""

from __future__ import annotations

import ast
import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlx.notebook import GrowingText

NOTEBOOK = Path(__file__).parent.parent / "examples" / "first_meeting.ipynb"
VOID = {"br"}


class Checked(HTMLParser):
    """Counts tags, and refuses those that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(value: Any) -> Checked:
    return Checked(value._repr_html_())


def run(source: str, names: dict[str, Any]) -> Any:
    """Runs a cell as a notebook does; returns the value of its last expression, and lets streams show themselves."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    if hasattr(value, "_ipython_display_"):
        value._ipython_display_()
    return value


def test_a_text_that_grows_is_one_output_of_a_notebook(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    outputs: list[list[str]] = []

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Any:
        states = [data["text/plain"]]
        outputs.append(states)
        return SimpleNamespace(update=lambda data, raw: states.append(data["text/plain"]))

    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    text = GrowingText()
    for piece in ("Once", " upon", " a time"):
        text.add(piece)
    assert text.finish() == "Once upon a time"
    assert len(outputs) == 1 and outputs[0][0] == "" and outputs[0][-1] == "Once upon a time"
    assert capsys.readouterr().out == ""
    del shell.kernel  # IPython in a terminal
    text = GrowingText()
    text.add("Hi")
    text.finish()
    assert capsys.readouterr().out == "Hi\n" and len(outputs) == 1


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4 and not any(cell.get("outputs") for cell in notebook["cells"])
    names: dict[str, Any] = {}
    pages, printed = [], []
    for cell in (each for each in notebook["cells"] if each["cell_type"] == "code"):
        value = run("".join(cell["source"]), names)
        printed.append(capsys.readouterr().out)
        if hasattr(value, "_repr_html_"):
            pages.append(shown(value).text)
    assert len(pages) == 6
    assert "qwen3" in pages[0] and "decode-1-1" in pages[1] and "gated-silu" in pages[2] and "silu" in pages[3]
    text = "".join(printed)
    assert "72" in printed[1], "27 + 45"
    assert len(printed[2].strip()) > 40, "the stream showed itself"
    assert "gated" in text and "for row in range(begin, end):" in text
    assert float(text.split("largest difference: ")[1].split()[0]) < 1e-3
