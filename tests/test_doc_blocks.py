"""Every block of code of the documentation runs: Python in every run of the tests, commands in the slow ones.

What cannot run here is marked in the page or listed in `documented.NOT_RUN`, with its reason; both are counted.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import documented
import pytest
import yaml
from pages import DOCS, ROOT, Block, blocks, shell_lines

import rlx
from rlx.cli.bench import SLOWER
from rlx.ir import custom

GUIDES = sorted([*DOCS.glob("*.md"), ROOT / "README.md"])
ELSEWHERE = {  # pages whose examples need more than a folder: the test that runs them
    "add-a-model.md": "test_the_comparison_on_the_page_about_models",
    "profiles.md": "test_the_page_about_profiles",
    "sampling.md": "test_the_page_about_sampling",
}
OPENED = """
runner = rlx.auto_runner("model.gguf", max_seq=256)
tokenizer, texts, ids = runner.tokenizer, ["Once upon a", "The fox"], runner.tokenizer.encode("Once upon a time")
"""
PREPARED = {"batch.md": OPENED, "speculative.md": OPENED}  # what the text before an example has opened
SEES = ("images.md",)


def of_tools(names: dict[str, Any], shown: str) -> bool:
    """The call was made, its result went back, and the last text is that of the call."""
    assert [message["role"] for message in names["messages"]] == ["user", "assistant", "tool", "assistant"]
    called, result = names["messages"][1]["tool_calls"][0]["function"], names["messages"][2]["content"]
    arguments = json.loads(called["arguments"])
    assert called["name"] == "add" and result == str(sum(arguments.values()))
    return bool(json.loads(names["texts"][0]) == arguments)


#: What holds after a page besides: of the names that its blocks made, and of all that they showed.
HOLDS: dict[str, Callable[[dict[str, Any], str], bool]] = {
    "README.md": lambda names, shown: shown == "27 + 45 = 72.\n",
    "compiler.md": lambda names, shown: "silu(dot(" in names["mlp"].source() and "define" in names["mlp"].llvm(),
    "custom-ops.md": lambda names, shown: list(custom.custom_ops()) == ["relu2", "swish", "gated_norm"],
    "python.md": lambda names, shown: "qwen3 " in shown and names["text"] == "brave fox" and names["perplexity"] > 1,
    "structured.md": lambda names, shown: bool(re.search(r"^#[0-9a-f]{6}$", shown, re.M)) and "uniqueItems" in shown,
    "tools.md": of_tools,
}
MARKED, LISTED = 11, 52  # blocks that are marked as not run, and commands of `documented.NOT_RUN`, at most


def runs(language: str) -> list[Block]:
    return [block for page in GUIDES for block in blocks(page) if block.language == language and not block.not_run]


def by_page(language: str) -> Any:
    pages = sorted({block.page for block in runs(language)} - {DOCS / name for name in ELSEWHERE})
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- Python -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """For the page about the server: its address, `rlx serve` as the page starts it, on a free port."""
    if request.node.callspec.params["page"].name != "serve.md":
        yield None
        return
    command = [sys.executable, "-m", "rlx", "serve", "--port", "0", "--log", "none"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    guard = threading.Timer(180, server.kill)
    guard.start()
    try:
        assert server.stderr is not None
        address = next(filter(None, (re.search(r"127\.0\.0\.1:\d+", line) for line in server.stderr)))[0]
        for _ in range(1800):
            try:
                urlopen(f"http://{address}/health", timeout=60).close()
                break
            except OSError:  # 503 while the model is opened
                time.sleep(0.1)
        yield address
    finally:
        guard.cancel()
        server.kill()
        server.communicate()


def told_so(line: str) -> str:
    """A pattern for a line of a page: one that ends in " ..." goes on in any way."""
    return re.escape(line.removesuffix(" ...")) + (".*" if line.endswith(" ...") else "")


@pytest.mark.usefixtures("own_custom_ops")
@by_page("python")
def test_python_runs(page: Path, folder: Path, served: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Block after block, as one program; a block of text that follows one is its output.

    What a line has after " ..." is left open: other machines tell other stories.
    """
    documented.fill(folder, sees=page.name in SEES)
    names: dict[str, Any] = {"rlx": rlx}
    exec(PREPARED.get(page.name, ""), names)
    told = shown = ""
    for block in blocks(page):
        if block.language == "text" and told:
            expected = "".join(f"{told_so(line)}\n" for line in block.code.splitlines())
            assert re.fullmatch(expected, told), f"{block}: the output of the block above it is {told!r}"
        told = ""
        if block.language != "python" or block.not_run:
            continue
        code = re.sub(r"(?:localhost|127\.0\.0\.1):8080", served, block.code) if served else block.code
        file = folder / f"{page.stem}_{block.line}.py"  # a function of the example has a source that can be read
        file.write_text(code, encoding="utf-8")
        exec(compile(code, str(file), "exec"), names)
        told = capsys.readouterr().out
        shown += told
    assert HOLDS.get(page.name, lambda *_: True)(names, shown)
    for value in list(names.values()):
        if isinstance(value, rlx.LmRunner):
            value.close()


# -- data -------------------------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[str], object]] = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}


@pytest.mark.parametrize("block", [block for language in READERS for block in runs(language)], ids=str)
def test_data_parses(block: Block) -> None:
    assert READERS[block.language](block.code)


# -- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@by_page("bash")
def test_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goldens: Path) -> None:
    """Each in a folder of its own with the files that it names. Those of the README do what the README says."""
    for number, line in enumerate(dict.fromkeys(shell_lines(page))):
        if documented.why_not_run(line) or line.startswith("curl "):
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        documented.fill(folder, sees="--image" in line)
        prepare(line, folder, goldens)
        done = documented.run(line, folder)
        codes = (0, SLOWER) if "--at-least" in line else (0,)  # the machine is busier than at the first measurement
        assert done.code in codes, f"{page.name}: {line}\n{done.output}"


def prepare(line: str, folder: Path, goldens: Path) -> None:
    """What single commands need besides."""
    if "checkpoint/" in line or "config.json" in line:
        (folder / "checkpoint").symlink_to(goldens / "qwen3" / "hf")
        (folder / "config.json").symlink_to(goldens / "qwen3" / "hf" / "config.json")
    if "--compare before.json" in line:
        assert documented.run("rlx bench model.gguf --json > before.json", folder).code == 0
    if line.startswith(("rlx convert", "rlx quantize")):
        (folder / "model.gguf").unlink()
    if line.startswith("rlx quantize model-bf16.gguf"):
        (folder / "model-bf16.gguf").unlink()
        documented.run("rlx quantize demo model-bf16.gguf BF16 --requantize", folder)
    if line.startswith(("python ", "rlx quantize rlx/")) or "examples/" in line:
        for name in ("rlx", "tools", "benchmarks", "tests", "examples"):
            (folder / name).symlink_to(ROOT / name)
