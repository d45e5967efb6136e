"""A few mutants of every kind, and the driver that counts them: it must see what it is there to see."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "run.py"
KINDS = ("gguf", "safetensors", "tokenizer", "template", "adapter", "snapshot", "json", "profile", "image")

BAD = """
import os, sys
from tests.fuzz import run, targets
def use(folder):
    way = os.environ["WAY"]
    if way == "crash": os.abort()
    if way == "hang":
        while True: pass
    if way == "unnamed": raise KeyError("x")
    if way == "memory": return bytearray(200 << 20)
    if way == "unprintable": raise targets.Named()
    if way == "refused":
        from rlx.errors import RlxError
        raise RlxError("no")
def make(rng, folder): (folder / "x").write_text(str(rng.random()))
class Named(__import__("rlx.errors").errors.RlxError):
    def __init__(self): Exception.__init__(self, "\\x1b[2J")
targets.Named = Named
targets.KINDS = {"profile": targets.Kind(make, use)}
targets.prepare = lambda kind: None
run.MEMORY_KB = 100 << 10
usual = run.CPU_SECONDS
for way in ("crash", "hang", "unnamed", "memory", "unprintable", "refused", "accepted"):
    os.environ["WAY"] = way
    run.CPU_SECONDS = 0.3 if way == "hang" else usual
    result = run.run("profile", 3, 0)
    assert dict(result.counts) == {way: 3}, result
"""


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.system("limits")] * (k == "template")) for k in KINDS]
)
def test_no_mutant_crashes_hangs_or_ends_without_a_name(kind: str, goldens: Path) -> None:
    command = [sys.executable, str(RUN), "--kind", kind, "--count", "30", "--seed", "7", "--seconds", "2"]
    done = subprocess.run(command, env=_environment(FUZZ_GOLDENS=str(goldens)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) refused", done.stdout)[0]) > 3, done.stdout


def test_the_driver_sees_every_way_to_end() -> None:
    done = subprocess.run([sys.executable, "-c", BAD], env=_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(RUN.parents[2]), **more}
