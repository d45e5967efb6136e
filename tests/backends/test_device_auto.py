"""`device="auto"`: the card if it works and the model fits, else the CPU, and a line says why."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paper_card
import pytest
from click.testing import CliRunner

import rlx
from rlx import backends
from rlx.backends import DeviceWarning
from rlx.cli.main import cli
from rlx.engine.opening.options import EngineOptions
from rlx.engine.opening.setup import Plan
from rlx.errors import ResourceError, TargetError
from rlx.store.cache import CompileCache
from rlx.weights import open_weights

OPTIONS: dict[str, Any] = {
    "precision": "exact", "max_seq": 96, "profile": {"buckets": {"seq": [1, 32]}}, "compile_ahead": False,
}  # fmt: skip


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[paper_card.PaperCard]:
    """A machine whose card is that on paper, with 64 GB."""
    monkeypatch.setitem(backends.MODULES, "cuda", "paper_card")
    monkeypatch.setattr(paper_card.BACKEND.memory, "lazy", False, raising=False)
    monkeypatch.setattr(paper_card.BACKEND.memory, "available", lambda: 64e9)
    yield paper_card.BACKEND


def opened(goldens: Path, **options: Any) -> Any:
    given = {**OPTIONS, "cache": CompileCache(policy="off"), "load": False, "kv_bytes": "2MiB", **options}
    return rlx.auto_runner(goldens if goldens.is_file() else goldens / "llama" / "hf", **given)


def test_the_card_is_taken(card: paper_card.PaperCard, goldens: Path, recwarn: pytest.WarningsRecorder) -> None:
    with opened(goldens, device="auto") as runner:
        assert runner.device == "paper"
    with opened(goldens, profile={**OPTIONS["profile"], "engine": {"device": "auto"}}) as runner:
        assert runner.device == "paper"
    assert not recwarn.list


def test_no_card(goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "why_missing", lambda device: "there is none")
    with pytest.warns(DeviceWarning, match="the CPU computes: there is none"), opened(goldens, device="Auto") as runner:
        assert runner.device == "cpu"
    graph = rlx.Graph("double")
    x = graph.input("x", [rlx.SEQ, 4])
    graph.output("y", x + x)
    with pytest.warns(DeviceWarning), rlx.compile(graph, device="auto") as exe:
        np.testing.assert_array_equal(exe(np.ones((3, 4), np.float32))["y"], 2)


def test_a_model_that_does_not_fit(card: paper_card.PaperCard, goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card.memory, "available", lambda: 500e6)
    with pytest.raises(ResourceError, match=r"lacks .* of the device's memory: 500 MB are free, .* caches 2.1 MB"):
        opened(goldens, device="cuda")
    with pytest.warns(DeviceWarning, match="the CPU computes: .*lacks"), opened(goldens, device="auto") as runner:
        assert runner.device == "cpu"


def test_a_context_that_does_not_fit(
    card: paper_card.PaperCard, goldens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names a context that fits, and with it the model opens."""
    monkeypatch.setattr(card.memory, "available", lambda: float((512 << 20) + (4 << 20)))
    with pytest.raises(ResourceError, match=r"Give max_seq=\d+ or less, kv_bytes=\d+MiB or less") as error:
        opened(goldens, device="cuda", max_seq=64000, kv_bytes="900MiB")
    hint = str(error.value)
    fits = int(hint.split("max_seq=")[1].split()[0])
    opened(goldens, device="cuda", max_seq=fits, kv_bytes=None).close()


def test_images_are_planned(
    card: paper_card.PaperCard, goldens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a tower and the largest image take is there before anything is loaded."""
    model = tmp_path / "model.gguf"
    shutil.copy(goldens / "qwen3vl-mm" / "model-f16.gguf", model)
    options = {**OPTIONS, "device": "cuda", "kv_bytes": "2MiB", "max_pixels": 1 << 16}

    def plan() -> Plan:
        with open_weights(model) as loader:
            return Plan.of(loader, EngineOptions(**options))

    assert plan().image_bytes == 0
    shutil.copy(next((goldens / "qwen3vl-mm").glob("mmproj-*.gguf")), tmp_path / "mmproj.gguf")
    planned = plan()
    with opened(model, **options) as runner:
        tower = runner._engine.vision.required()
        tower.load()
        packed, hidden = tower._tensors.nbytes, tower.config.hidden
    patches = (1 << 16) // tower.config.patch**2
    assert packed + 3 * 4 * hidden * patches <= planned.image_bytes + 4 * hidden * 64  # rows, keys and values
    assert planned.image_bytes <= packed + 8 * 4 * hidden * patches
    without = planned.weight_bytes + (512 << 20) + (2 << 20) + planned.image_bytes // 2
    monkeypatch.setattr(card.memory, "available", lambda: float(without))
    with pytest.raises(ResourceError, match=r"it takes weights .*, images .*, caches"):
        opened(model, **options)


def test_a_device_that_is_not_there(goldens: Path) -> None:
    with pytest.raises(TargetError, match="device 'aut' is not there"):
        opened(goldens, device="aut")


def test_the_command_line_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "why_missing", lambda device: "there is no card here")
    result = CliRunner().invoke(cli, ["run", "--device", "auto", "--max-tokens", "1", "Hi"])
    assert result.exit_code == 0 and result.stderr.count("the CPU computes: there is no card here") == 1
