"""`rlx devices`: what programs run on here, and why a device is missing."""

from __future__ import annotations

from click.testing import CliRunner

import rlx
from rlx.cli.main import cli


def test_each_device_has_a_line() -> None:
    done = CliRunner().invoke(cli, ["devices"])
    assert done.exit_code == 0, done.output
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert list(lines) == ["cpu", "reference", "cuda"]
    assert "free" in lines["cpu"]
    assert ("free" in lines["cuda"]) == ("cuda" in rlx.devices())
