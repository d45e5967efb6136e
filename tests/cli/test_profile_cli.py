"""`rlx profile` and `rlx compile --check`: a file that changes nothing until edited, a check that compiles nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import rlx
from rlx.backends.cpu.target import Target
from rlx.cli.main import cli
from rlx.compiler.compile import Compiler
from rlx.engine.opening.options import EngineOptions
from rlx.engine.opening.setup import Plan
from rlx.profile.keys import KEYS
from rlx.weights import open_weights


def run(*args: object) -> Any:
    return CliRunner().invoke(cli, [*map(str, args)])


@pytest.fixture(scope="module")
def model(goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Alone in a folder."""
    path = tmp_path_factory.mktemp("alone") / "model.gguf"
    path.write_bytes((goldens / "gemma3" / "model-f16.gguf").read_bytes())
    return path


@pytest.fixture
def beside(model: Path) -> Iterator[Path]:
    """Where the model's profile is found."""
    path = model.parent / "gemma.rlx.toml"
    yield path
    path.unlink(missing_ok=True)


def digests(model: Path, profile: Any = None) -> list[str]:
    """Of the programs that would be compiled."""
    with open_weights(model) as loader:
        plan = Plan.of(loader, EngineOptions(profile=profile))
    compiler, chosen = Compiler(plan.setup.target, plan.setup.cache), plan.setup.profile
    return [compiler.program_key(plan.graph, chosen.options(bucket)).digest for bucket in chosen.ranges]


def test_init_writes_what_holds_already(model: Path, beside: Path) -> None:
    before = digests(model)
    result = run("profile", "init", model)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"wrote {beside}\n")
    assert digests(model) == before == digests(model, beside)
    written = rlx.CompileProfile.load(beside)
    assert written.family == "gemma"
    machine = {"precision.kv_dtype", "backend.cpu.level", "backend.cpu.threads", "engine.kv_bytes", "cache.policy"}
    machine |= {"engine.cache_kv", "engine.cache_kv_bytes", "engine.device", "buckets.seq"}
    assert {*written.common(), *written.prefill.flat()} == {*KEYS} - machine
    for path in machine:
        assert re.search(rf"^# {KEYS[path].name} = ", beside.read_text(), re.MULTILINE), path
    with open_weights(model) as loader:
        usual, read = Plan.of(loader, EngineOptions(profile={})).setup, Plan.of(loader, EngineOptions()).setup
    assert read.source == beside
    for name in ("kv_type", "target", "threads", "max_seq"):
        assert getattr(usual, name) == getattr(read, name)
    assert (usual.cache.policy, usual.cache.capacity) == (read.cache.policy, read.cache.capacity)
    beside.write_text(beside.read_text().replace('mode = "auto"', 'mode = "exact"'))
    assert digests(model) != before


def test_show_prints_the_profile_in_effect(model: Path, beside: Path) -> None:
    result = run("profile", "show", model)
    assert result.stderr == "the defaults of this machine\n"
    assert digests(model, tmp(model, result.stdout)) == digests(model)
    beside.write_text('[decode.precision]\nmode = "exact"\n')
    result = run("profile", "show", model, "--threads", "1")
    assert result.stderr == f"from {beside}\n"
    assert '[decode.precision]\nmode = "exact"' in result.stdout
    assert "threads = 1" in result.stdout
    assert "#" not in result.stdout


def tmp(model: Path, text: str) -> Path:
    path = model.parent / "shown.toml"
    path.write_text(text)
    return path


def test_check_says_what_would_be_compiled(model: Path, beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a check compiles nothing")

    monkeypatch.setattr(Compiler, "__init__", refuse)
    beside.write_text('[buckets]\nseq = [1, 8, 64]\n[prefill.precision]\nmode = "exact"\n[backend.cpu]\nthreads = 1\n')
    result = run("compile", "--check", model, "--kv-dtype", "f16")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    listed = [["decode", "1", "auto"], ["prefill", "2-8", "exact"], ["prefill", "9-64", "exact"]]
    assert rows == [*listed, ["greedy", "1", "auto"]]
    rows = [line.split() for line in run("compile", "--check", model, "--phase", "prefill").stdout.splitlines()]
    assert rows == listed[1:3]
    level = Target.host().level
    assert result.stderr == f"{beside}: fits {model}; target {level}, kv_dtype f16, threads 1\n"
    rows = [line.split() for line in run("compile", "--check", model, "--batch", "9").stdout.splitlines()]
    assert rows[4:] == [["batch", "2-8", "auto"], ["batch", "9-32", "auto"], ["batch", "33-64", "exact"]]
    found = json.loads(run("compile", "--check", "--json", model, "--precision", "auto").stdout)
    assert (found["profile"], found["threads"], found["kv_dtype"]) == (str(beside), 1, "f16")
    assert [row["precision"] for row in found["programs"]] == ["auto"] * 4, "the option wins over the profile"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("family = 'qwen3'", "the profile is for the family 'qwen3', this model is of 'gemma'"),
        ("[bucket]", "unknown key 'bucket'. Did you mean 'buckets'?"),
        ("[precision]\nkv_dtype = 'q8_0'", "KV caches of q8_0 need heads of whole blocks of 32, not of"),
    ],
)
def test_check_names_what_does_not_fit(goldens: Path, tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "p.toml"
    file.write_text(text)
    name = "qwen2" if "q8_0" in text else "gemma3"
    result = run("compile", "--check", goldens / name / "model-f16.gguf", "--profile", file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


# ------------------------------------------------------------------------------------- which model a profile means


def check(*args: object) -> str:
    """What a compile would take, or why it would not."""
    result = run("compile", "--check", *args)
    return str(result.stderr)


def test_a_profile_names_its_model_from_where_it_lies(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "profiles").mkdir()
    profile = tmp_path / "profiles" / "gemma.rlx.toml"
    (tmp_path / "m.gguf").write_bytes(model.read_bytes())
    monkeypatch.chdir(tmp_path)
    profile.write_text('model = "../m.gguf"\nfamily = "gemma"\n')
    said = "model: profiles/../m.gguf (named by profiles/gemma.rlx.toml)\n"
    assert check("--profile", "profiles/gemma.rlx.toml").startswith(said)
    profile.write_text('model = "../gone.gguf"\n')
    assert "gone.gguf: there is no such file" in check("--profile", profile)


# ------------------------------------------------------------------------------------------------ without weights


def test_a_config_alone_or_a_shape_is_compiled(goldens: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_bytes((goldens / "gemma3" / "hf" / "config.json").read_bytes())
    for name in (config, tmp_path):
        assert f"fits {config}; target" in check(name)
        assert f"fits {config}; target" in check(name, "--weights", "Q4_K_M")
    profile = tmp_path / "gemma.rlx.toml"
    profile.write_text('model = "config.json"\n')
    assert f"{profile}: fits {config};" in check("--profile", profile)
    assert "fits tiny-gemma3-Q4_K_M; target" in check("--shape", "tiny-gemma3")
    assert "fits tiny-gemma3-Q8_0; target" in check("--shape", "tiny-gemma3", "--weights", "q8_0")


def test_init_writes_nothing_into_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["profile", "init", "demo"])
    assert (result.exit_code, [path.name for path in tmp_path.iterdir()]) == (0, ["qwen3.rlx.toml"]), result.output


def test_init_writes_over_nothing(model: Path, beside: Path, tmp_path: Path) -> None:
    beside.write_text("# mine\n")
    result = run("profile", "init", model)
    assert result.exit_code == 2
    assert f"{beside}: the file is there already. --force writes over it" in result.stderr
    assert beside.read_text() == "# mine\n"
    text = run("profile", "init", model, "-o", "-").stdout
    for args in (("--force",), ("-o", tmp_path / "p.toml")):
        assert run("profile", "init", model, *args).exit_code == 0
    assert beside.read_text() == text
    assert (tmp_path / "p.toml").read_text() == text.replace('model = "model.gguf"', f'model = "{model}"')
    assert text.startswith("# A compile profile for rlx.")
