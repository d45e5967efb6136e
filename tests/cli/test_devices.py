"""`rlx devices`: what programs run on here, and why a device is missing."""

from __future__ import annotations

import json

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


def test_json_says_what_the_lines_say() -> None:
    found = {row["name"]: row for row in json.loads(CliRunner().invoke(cli, ["devices", "--json"]).stdout)}
    assert [name for name, row in found.items() if row["missing"] is None] == rlx.devices()
    assert found["cpu"]["free_bytes"] > 0
    assert found["cuda"]["missing"] is None or "Choose device=" in found["cuda"]["missing"]

