"""The examples in the documentation run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_examples_of_the_compiler_page() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "compiler.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/compiler.md", "exec"), names)
    graph = names["mlp"].graph
    assert sum(n.op == "linear" for n in graph.nodes()) == 2, "gate and up are one gated linear"
    assert "silu(dot(" in names["mlp"].source()
    assert "define" in names["mlp"].llvm()
    assert "ret" in names["mlp"].asm()


def test_links_between_pages_and_code_exist() -> None:
    for page in [*DOCS.glob("*.md"), *DOCS.parent.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_examples_run() -> None:
    root = DOCS.parent
    told = subprocess.run(
        [sys.executable, root / "examples" / "chat.py"],
        input="What is 27 + 45?\nAnd what is 5 more than that?\n", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "27 + 45 = 72" in told.stdout and "77" in told.stdout
    lines = subprocess.run(
        [sys.executable, root / "examples" / "logits.py"], capture_output=True, text=True, check=True
    )
    assert len(lines.stdout.splitlines()) == 12
