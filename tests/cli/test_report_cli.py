"""`rlx report`: what it writes, what it refuses, and the report of what does not compile."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rlx.backends.cpu import link
from rlx.cli.main import cli
from rlx.errors import CompileError


def rlx(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, ["report", *map(str, args)])


def data_of(path: Path) -> dict[str, Any]:
    """The data of a page, read as the page does."""
    (stored,) = re.findall(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(json.loads(stored)["data"])))
    return found


def test_a_shape_of_28_layers_is_small(tmp_path: Path) -> None:
    out = tmp_path / "big.html"
    result = rlx("--shape", "qwen3-0.6b", "--weights", "Q8_0", "--phase", "decode", "--out", out)
    assert result.exit_code == 0, result.output
    assert out.stat().st_size < 1_000_000, "four programs are below 5 MB"
    assert data_of(out)["subject"]["command"] == "", "there are no weights to measure"
    (program,) = data_of(out)["programs"]
    last = program["drawings"][-1]
    assert [frame["title"] for frame in last["frames"]] == ["28 equal layers: 0-27"]
    assert len(last["boxes"]) < 40 and len(program["regions"]["of"]) == 169
    assert {row["group"] for row in program["groups"]} >= {"gated", "prologue"}


def test_the_command_for_times_is_what_the_user_would_type(demo_model: Path, tmp_path: Path) -> None:
    """With the name that was given, not where the file lies: a page is made to be shown."""
    out, own = tmp_path / "report.html", tmp_path / "my model.gguf"
    shutil.copy(demo_model, own)
    for given, command in (((), "rlx report --measure"), ((own,), f"rlx report '{own}' --measure")):
        assert rlx(*given, "--phase", "decode", "--out", out).exit_code == 0
        assert data_of(out)["subject"]["command"] == command


@pytest.mark.parametrize(
    ("out", "said"), [("nowhere/report.html", "its folder does not exist"), ("", "it is a directory")]
)
def test_what_cannot_be_written_is_named_before_anything_is_compiled(tmp_path: Path, out: str, said: str) -> None:
    result = rlx("--out", tmp_path / out)
    assert result.exit_code == 2 and said in result.stderr and "--out" in result.stderr


def test_a_program_that_does_not_compile_is_shown_up_to_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here no kernel is found for attention; the passes before are there, and the error in its place."""
    select = link.select

    def failing(node: Any, target: Any) -> Any:
        if node.op == "attention":
            raise CompileError("no kernel for attention", hint="Choose another type.")
        return select(node, target)

    monkeypatch.setattr(link, "select", failing)
    monkeypatch.setenv("RLX_CACHE", "off")
    out = tmp_path / "failed.html"
    result = rlx("--phase", "decode", "--out", out)
    assert result.exit_code == 2 and "no kernel for attention" in result.stderr
    (program,) = data_of(out)["programs"]
    assert program["problem"] == {
        "stage": "kernels", "kind": "CompileError", "message": "no kernel for attention. Choose another type."
    }  # fmt: skip
    assert [each["name"] for each in program["passes"]][-2:] == ["schedule", "memory"]
    assert program["drawings"] and "kernels" not in program


def test_a_tower_comes_with_its_model(tmp_path: Path) -> None:
    out = tmp_path / "seeing.html"
    result = rlx("demo-vision", "--phase", "tower", "--bucket", "2-16", "--out", out)
    assert result.exit_code == 0, result.output
    names = [program["name"] for program in data_of(out)["programs"]]
    assert names and all(name.startswith("tower-") for name in names)
