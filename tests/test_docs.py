"""What the documentation says is so: examples run, quotes and tables are those of the code, commands exist."""

from __future__ import annotations

import io
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from pages import DOCS, PAGES, ROOT, consoles, fenced, shell_lines, text

from rlx.backends.cpu.layouts import BLOCK_ROWS, PACKINGS
from rlx.backends.cpu.target import Target
from rlx.cli.main import cli
from rlx.ir.dtypes import BF16, DType
from rlx.profile import CompileProfile
from rlx.profile.keys import FOREIGN, KEYS

PLACES = ("rlx/", "tests/", "docs/", "benchmarks/", "examples/", "tools/")  # of paths in running text

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def python(page: Path) -> list[str]:
    return fenced(page, "python")


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text(page), flags=re.DOTALL | re.MULTILINE)


def spans(page: Path) -> list[str]:
    """What stands between backticks."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def rows(page: Path) -> Iterator[list[str]]:
    """The cells of every row of every table."""
    for line in text(page).splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in line.strip("|").split("|")]


# -- examples ---------------------------------------------------------------------------------------------------------


def test_commands_of_the_compiler_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their output is what the page shows, up to a line of three dots. It was made on a machine without tiles."""
    if Target.host().has_bf16_tiles:
        monkeypatch.setenv("RLX_TARGET", "native-bf16")
    rlx = f"{sys.executable} -m rlx"
    found = [*consoles(DOCS / "compiler.md")]
    assert len(found) >= 5
    for command, output in found:
        line = re.sub(r"\brlx\b", rlx, command, count=1) if command.startswith("rlx ") else command
        done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        lines = done.stdout.rstrip("\n").split("\n") if done.stdout else []
        shown = output[: output.index("...")] if "..." in output else output
        assert lines[: len(shown)] == shown if "..." in output else lines == shown, command


def test_the_page_about_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    """Its example runs, its file is read, and its table is that of the code."""
    (code,) = python(DOCS / "profiles.md")
    exec(compile(code, "docs/profiles.md", "exec"), {})
    assert 'kv_dtype = "q8_0"' in capsys.readouterr().out
    (file,) = re.findall(r"```toml\n(.*?)```", text(DOCS / "profiles.md"), re.DOTALL)
    profile = CompileProfile.load(tomllib.loads(file))
    assert (profile.family, profile.decode.precision, profile.kv_dtype) == ("gemma", "exact", "q8_0")
    named = {tuple(row[:2]): row[2:] for row in rows(DOCS / "profiles.md") if row[1] != "key"}
    for key in KEYS.values():
        place = f"`[{key.section}]`" if key.section else "top of the file"
        values, default, by_phase, meaning = named.pop((place, f"`{key.name}`"))
        assert not key.choices or values == ", ".join(f"`{choice}`" for choice in key.choices)
        assert (default, by_phase == "yes", meaning) == (key.default, key.by_phase, key.meaning)
    assert not named
    for path in FOREIGN:
        assert f"`{path.rpartition('.')[2]}`" in text(DOCS / "profiles.md") or path.startswith("backend."), path


#: What examples say, as a pattern for all of it.
SAID = {
    "chat.py": r".*27 \+ 45 = 72.*77.*",
    "structured.py": r"the hero: a (fox|dog|cat), \d+ years old, with [012] friends\nthe end: (happy|sad)\n",
    "logits.py": r"([^\n]*\n){12}",
    "images.py --seed 1": r"drawn: a green diamond, a blue circle, a red square\n[^\n]* The circle is blue\.\n"
    r"[^\n]* The green diamond is at the top left\.\n[^\n]* A green diamond, a blue circle and a red square\.\n",
}


@pytest.mark.parametrize("example", SAID)
def test_examples_run(example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script, *words = example.split()
    monkeypatch.setattr(sys, "argv", [script, *words])
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 27 + 45?\nAnd what is 5 more than that?\n"))
    runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    assert re.fullmatch(SAID[example], capsys.readouterr().out, re.DOTALL)


# -- names ------------------------------------------------------------------------------------------------------------


@by_page
def test_paths_in_the_text_exist(page: Path) -> None:
    for span in spans(page):
        if span.startswith(PLACES) and " " not in span:
            assert list(ROOT.glob(span.rstrip("/"))), span


# -- commands ---------------------------------------------------------------------------------------------------------


def commands(page: Path) -> list[str]:
    """Those of blocks, and what stands between backticks."""
    return [*shell_lines(page), *spans(page)]


def check_rlx(line: str) -> None:
    """The subcommand is there and has every option that the line shows."""
    command: click.Command = cli
    words = line.split()[1:]
    context = click.Context(cli)
    while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z]+", words[0]):
        found = command.get_command(context, words.pop(0))
        assert found is not None, line
        command = found
    options = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
    assert set(re.findall(r"(?<!\S)\[?(--[a-z-]+)", " ".join(words))) <= options, line


def check_script(line: str) -> None:
    """The script is there and knows every option that the line shows."""
    script = ROOT / line.split()[1]
    assert script.is_file(), line
    assert all(f'"{option}"' in script.read_text() for option in re.findall(r" (--[a-z-]+)", line)), line


@by_page
def test_commands_exist(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for files that a command writes
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands(page):
        if line.startswith("rlx "):
            check_rlx(line)
        elif re.match(r"python (benchmarks|tools|examples|tests)/", line):
            check_script(line)
        elif line.startswith("python -c "):
            exec(line.removeprefix("python -c ").strip('"'), {"print": str})
        elif line.startswith("make "):
            assert line.split()[1] in targets, line
        elif line.startswith("pytest "):
            assert all((ROOT / path).exists() for path in line.split()[1:]), line


# -- tables -----------------------------------------------------------------------------------------------------------


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def format_row(dtype: DType) -> list[str]:
    """What the table of formats must say of a type but for where it comes from."""
    packing = PACKINGS[dtype]
    file, memory = 8 * dtype.nbytes / dtype.block, 8 * packing.nbytes / BLOCK_ROWS / packing.superblock
    in_file = "8 and the scales" if dtype.ggml is None else f"{file:.6g}"
    number = "none" if dtype.ggml is None else str(dtype.ggml)
    plain = "bf16, or float32" if dtype is BF16 else "float32"
    return [dtype.name.upper(), number, in_file, f"{memory:.6g}", "int8" if dtype.has_integer_codes else plain]


def test_the_table_of_formats_is_that_of_the_code() -> None:
    table = [row for row in rows(DOCS / "formats.md") if len(row) == 6][1:]
    assert sorted(row[:4] + row[5:] for row in table) == sorted(map(format_row, PACKINGS))
    for row in table:
        assert ("safetensors" in row[4]) == (row[0] in ("F32", "F16", "BF16", "F8_E4M3"))
    assert f"- {len(PACKINGS)} weight formats" in text(ROOT / "README.md")
