"""The kernels of the device cuda, assembled for each kind of card by ptxas, where the test extra brings it.

`python -m pytest -s tests/backends/test_ptxas.py` prints registers and spills of every kernel.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import paper_card
import pytest

import rlx
from rlx.backends.cuda import choice_code, ptx
from rlx.backends.cuda.packing import module_of
from rlx.backends.cuda.sass import tool
from rlx.backends.cuda.target import LEVELS, named
from rlx.ir.dtypes import BF16, F8_E4M3, IQ3_XXS, Q4_K, Q6_K, Q8_0
from rlx.platform import cpu_count
from rlx.store.cache import CompileCache

CARDS = {level: level for level in ("sm_75", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120")} | {"sm_90": "sm_90a"}
MODELS = {"llama-k256": "model-Q4_K_M.gguf", "qwen35": "hf"}
#: Bytes that a kernel may store and load again because it has too few registers. A few cost nothing where it waits for
#: memory; more is a mistake in its shape.
SPILLS = 96
#: The card and model that `make test` assembles for; the others take half a minute each.
QUICK = ("sm_90", "llama-k256")


pytestmark = pytest.mark.skipif(tool("ptxas") is None, reason="there is no ptxas (the package nvidia-cuda-nvcc has it)")


@pytest.fixture
def card() -> Iterator[paper_card.PaperCard]:
    with paper_card.registered() as found:
        found.ptx.clear()
        yield found


@pytest.mark.parametrize(
    ("level", "family"),
    [
        pytest.param(level, family, marks=[] if (level, family) == QUICK else pytest.mark.slow)
        for level in CARDS
        for family in MODELS
    ],
)
def test_programs(
    card: paper_card.PaperCard, goldens: Path, family: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "level", level)
    options: dict[str, Any] = {
        "device": "paper", "max_seq": 96, "profile": {"buckets": {"seq": [1, 32, 128]}}, "compile_ahead": False,
        "cache": CompileCache(policy="off"), "load": False,
    }  # fmt: skip
    with rlx.auto_runner(goldens / family / MODELS[family], **options) as runner:
        runner.compile(batch=2)
    _check(card.ptx, level)


@pytest.mark.parametrize("level", [pytest.param(c, marks=[] if c == QUICK[0] else pytest.mark.slow) for c in CARDS])
def test_packing(level: str) -> None:
    types = (Q8_0, Q4_K, Q6_K, IQ3_XXS, F8_E4M3, BF16)
    texts = ptx.compiled([module_of(dtype) for dtype in types], level, LEVELS[level][0])
    _check({f"pack {dtype}": text for dtype, text in zip(types, texts, strict=True)}, level)


@pytest.mark.parametrize("level", CARDS)
def test_choice_of_tokens(level: str) -> None:
    features = named(level).features
    modules = choice_code.modules_of(choice_code.made(features), features)
    texts = ptx.compiled([*modules.values()], level, LEVELS[level][0])
    _check(dict(zip(modules, texts, strict=True)), level)


def _check(modules: dict[str, str], level: str) -> None:
    with ThreadPoolExecutor(cpu_count()) as pool:
        rows = dict(zip(modules, pool.map(lambda text: _assembled(text, CARDS[level]), modules.values()), strict=True))
    for name, (registers, stores, loads) in rows.items():
        print(f"{level}  {name:32} {registers:4} registers {stores:5} + {loads} bytes spilled")
    assert rows and all(registers <= 255 for registers, _, _ in rows.values())
    assert not {name: row for name, row in rows.items() if sum(row[1:]) > SPILLS}, "kernels that spill"


def _assembled(text: str, card: str) -> tuple[int, int, int]:
    """Registers, and bytes of spill stores and loads, of a module."""
    command = [str(tool("ptxas")), f"-arch={card}", "-v", "-o", "/dev/null", "/dev/stdin"]
    run = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"ptxas refuses it: {run.stderr}"
    registers = re.search(r"Used (\d+) registers", run.stderr)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", run.stderr)
    assert registers and spilled, run.stderr
    return int(registers[1]), int(spilled[1]), int(spilled[2])
