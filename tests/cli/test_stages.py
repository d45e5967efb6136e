"""`rlx compile --explain`, `--emit`, `--stop-after`: each stage of a model's program on stdout, alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rlx import demo
from rlx.cli.main import cli
from rlx.ir.text import loads
from rlx.passes.report import Report

ROOT = Path(__file__).parents[2]
#: Commands of the documentation that show code of some kernels: form, kernel.
DOCUMENTED = sorted(
    {
        command
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        for command in re.findall(
            r"^rlx compile --emit (\w+) --kernel ([a-z]\w*)", page.read_text("utf-8"), re.MULTILINE
        )
    }
)


def compile_(*args: str) -> Result:
    return CliRunner().invoke(cli, ["compile", str(demo.path()), *args])


@pytest.fixture(scope="module")
def decode() -> dict[str, Any]:
    """The decode program is compiled, and explained as JSON."""
    done = compile_("--phase", "decode", "--explain", "--json")
    assert done.exit_code == 0, done.output
    (program,) = json.loads(done.stdout)["programs"]
    return dict(program)


def test_explain_is_plain_data(decode: dict[str, Any]) -> None:
    report = Report.from_dict(decode["explain"])
    assert (decode["phase"], report.phase, report.rows) == ("decode", "decode", (1, 1))
    fuse = next(p for p in report.passes if p.name == "fuse")
    assert "gated-silu" in [event.rule for event in fuse.done]


def test_every_report_is_headed_by_the_phase_of_its_program() -> None:
    lines = compile_("--explain").stdout.splitlines()
    phases = [line.split()[0] for line in lines if " kernels  " in line]
    heads = [line for line in lines if "precision" in line]
    assert [head.split()[1].rstrip(",") for head in heads] == phases and "greedy" in phases


@pytest.mark.parametrize(
    ("args", "phase"),
    [
        (["--emit", "ir"], "graph"),
        (["--emit", "fused"], "decode"),
        (["--stop-after", "quantize"], "decode"),
        (["--stop-after", "last_row", "--phase", "prefill", "--bucket", "17-512"], "graph"),
    ],
)
def test_a_graph_on_stdout_parses(args: list[str], phase: str) -> None:
    done = compile_(*args)
    assert done.exit_code == 0 and loads(done.stdout).phase == phase
    assert done.stderr.startswith("program ")


@pytest.mark.parametrize(("form", "kernel"), DOCUMENTED)
def test_kernels_that_the_documentation_names_are_there(form: str, kernel: str) -> None:
    done = compile_("--emit", form, "--kernel", kernel)
    assert done.exit_code == 0 and kernel in done.stdout, done.output


def test_a_fused_graph_differs_from_the_one_that_was_built() -> None:
    assert "rope_kv_write" not in compile_("--emit", "ir").stdout
    assert "rope_kv_write" in compile_("--emit", "fused").stdout
    assert compile_("--emit", "fused").stdout == compile_("--stop-after", "fuse").stdout


@pytest.mark.usefixtures("decode")
def test_code_of_one_kernel() -> None:
    python, llvm, asm = (
        compile_("--emit", form, "--kernel", "norm_weighted").stdout for form in ("python", "llvm", "asm")
    )
    symbol = python.split("\n")[0].removeprefix("# ")
    assert symbol.startswith("norm_weighted") and "def " in python
    assert f"define void @{symbol}(" in llvm and "@step" not in llvm
    assert f"{symbol}:" in asm and "ret" in asm


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--stop-after", "fus"], "no pass is called 'fus'. Did you mean fuse? There are: graph, simplify,"),
        (["--stop-after", "last_row"], "decode programs have no pass last_row. Programs of phase prefill have it: add"),
        (["--emit", "asm", "--kernel", "nope"], "no kernel is called 'nope'. There are: "),
        (["--emit", "ir", "--kernel", "nope"], "--kernel goes with --emit python, llvm, asm, ptx or sass"),
        (["--emit", "ir", "--explain"], "Choose one of --explain and --emit"),
        (["--emit", "ir", "--json"], "--emit and --json exclude each other"),
        (["--emit", "ir", "--phase", "prefill", "--bucket", "4000"], "no program takes 4000 rows. The programs are: "),
        (["--emit", "ir", "--phase", "batch"], "no program is of phase 'batch'. The programs are: "),
        (["--bucket", "few"], "'few' is neither a number of rows nor a range"),
    ],
)
@pytest.mark.usefixtures("decode")
def test_mistakes_are_named(args: list[str], message: str) -> None:
    done = compile_(*args)
    assert done.exit_code == 2 and message in done.stderr and not done.stdout
