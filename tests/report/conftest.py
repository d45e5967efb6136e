"""The report of the demo model, measured, which the tests of the page share."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from rlx.cli.main import cli


@pytest.fixture(scope="session")
def demo_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its decode program, and the prefill program of one bucket."""
    out = tmp_path_factory.mktemp("report") / "report.html"
    result = CliRunner().invoke(cli, ["report", "--measure", "--prompt", "20", "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out
