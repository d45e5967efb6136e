"""A folder with the files that the documentation's examples name, and the command line run as the pages show it."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner
from PIL import Image, ImageDraw

from rlx import demo
from rlx.cli.main import cli

REQUEST = {
    "custom_id": "q1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "What is 27 + 45?"}], "max_tokens": 8},
}
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
STORY = "Once upon a time, there was a brave fox called Laura. Laura lived in a field of wheat. "
#: Why no test runs a command as it stands, and what such commands look like. A test counts them.
NOT_RUN = {
    "needs a network": r"(?:pip install|rlx pull) |rlx (?:run|chat) Qwen/",
    "starts a server; that of the page about it is started": r"(?:\w+=\w+ )?rlx serve",
    "needs an NVIDIA card": r"rlx (?:run|serve).* --device cuda",
    "needs a cluster, or containers": r".*(?:--ray|numactl) |podman ",
    "measures for minutes, or another program": r"python benchmarks/|rlx tune$",
    "emulates another machine, for minutes": r"python tools/emulate\.py",
    "is the test suite itself": r"pytest ",
    "unpacks fixtures; another test follows this page": r"python tests/golden_folder\.py|cd /tmp/goldens",
}


def fill(folder: Path, *, sees: bool = False) -> None:
    """Puts what the examples name into the folder; `model.gguf` is the demo model, or the one that sees."""
    model = demo.path(demo.VISION if sees else demo.TEXT)
    (folder / "models" / "qwen3").mkdir(parents=True)
    for name in ("model.gguf", "model-q4_k_m.gguf", "model-bf16.gguf", "models/qwen3/qwen3-5m-q8_0.gguf"):
        (folder / name).symlink_to(model)
    if sees:
        (folder / "mmproj-model.gguf").symlink_to(model.with_name(f"mmproj-{model.name}"))
    for name in ("cat.png", "a.png", "b.jpg", "photo.jpg", "shapes.png"):
        image = Image.new("RGB", (96, 96), (30, 30, 30))
        ImageDraw.Draw(image).ellipse((8, 8, 40, 40), fill=(220, 40, 40))
        image.save(folder / name)
    for name in ("question.txt", "README.md"):
        (folder / name).write_text("What is 27 + 45?\n")
    for name in ("wiki.txt", "stories.txt"):
        (folder / name).write_text(STORY * 40)
    (folder / "person.json").write_text(json.dumps(SCHEMA))
    (folder / "gemma.rlx.toml").write_text('model = "model.gguf"\n')
    (folder / "questions.jsonl").write_text(json.dumps(REQUEST) + "\n")
    (folder / "questions.gz").write_bytes(gzip.compress((json.dumps(REQUEST) + "\n").encode()))


def why_not_run(line: str) -> str | None:
    """The reason for which no test runs this command."""
    return next((reason for reason, pattern in NOT_RUN.items() if re.match(pattern, line)), None)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    output: str


def run(line: str, folder: Path) -> Done:
    """Runs a line of a page in the folder, which is the current one: `rlx` in this process, all else in a shell."""
    line, _, redirected = line.partition(" > ")
    before, _, command = line.rpartition(" | ")
    if not command.startswith("rlx "):
        found = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300)
        return Done(found.returncode, found.stdout + found.stderr)
    fed = subprocess.run(["bash", "-c", before], capture_output=True, check=True).stdout if before else b""
    with _cache_of_its_own(command, folder):
        words = list(_filled(shlex.split(command)[1:]))
        result = CliRunner().invoke(cli, words, input=fed, env={"HOME": str(folder)})
    if redirected:
        (folder / redirected).write_text(result.stdout)
    if result.exception is not None and not isinstance(result.exception, SystemExit | click.ClickException):
        raise result.exception
    return Done(result.exit_code, result.output)


class _cache_of_its_own:
    """What removes entries gets a copy of the cache."""

    def __init__(self, command: str, folder: Path) -> None:
        self.kept = os.environ["RLX_CACHE_DIR"]
        self.copy = folder / "cache" if command.startswith("rlx cache prune") else None

    def __enter__(self) -> None:
        if self.copy:
            shutil.copytree(self.kept, self.copy)
            os.environ["RLX_CACHE_DIR"] = str(self.copy)

    def __exit__(self, *error: object) -> None:
        os.environ["RLX_CACHE_DIR"] = self.kept


def _filled(words: list[str]) -> Iterator[str]:
    """The words with something in place of MODEL, DIR and the names of entries."""
    names = {"MODEL": "model.gguf", "DIR": "dumped"}
    if {"DIGEST", "A", "B"} & {*words}:
        entries: list[dict[str, Any]] = json.loads(CliRunner().invoke(cli, ["cache", "ls", "--json"]).stdout)
        programs = [entry["digest"] for entry in entries if entry["key"]["phase"]]
        names |= {"DIGEST": programs[0], "A": programs[0], "B": programs[1]}
    for word in words:
        yield names.get(word, word)
