"""docs/custom-ops.md: its code runs, as a file, because the source of an op must be readable."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlx.ir import custom, op_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "custom-ops.md"


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    """The ops of the page are gone after it."""
    rows, known = dict(op_table.OPS), dict(custom._ops)
    yield
    for table, before in ((op_table.OPS, rows), (custom._ops, known)):
        table.clear()
        table.update(before)  # type: ignore[arg-type]


def test_the_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    sys.path.insert(0, str(PAGE.parents[1] / "tests"))
    from pages import fenced

    sys.path.pop(0)
    parts = fenced(PAGE, "python")
    assert len(parts) >= 7
    file = tmp_path / "page.py"
    file.write_text("\n".join(parts))
    names = runpy.run_path(str(file))
    assert list(custom.custom_ops()) == ["relu2", "swish", "gated_norm"]
    assert names["gated_norm"].digest
