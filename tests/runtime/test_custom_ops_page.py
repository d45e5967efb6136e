"""docs/custom-ops.md: its code runs, as a file, because the source of an op must be readable."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from rlx.ir import custom

PAGE = Path(__file__).resolve().parents[2] / "docs" / "custom-ops.md"
pytestmark = pytest.mark.usefixtures("own_custom_ops")


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
