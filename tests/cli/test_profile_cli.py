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
from rlx import demo
from rlx.backends.cpu.target import Target
from rlx.cli.main import cli
from rlx.compiler.compile import Compiler
from rlx.engine.opening.options import EngineOptions
from rlx.engine.opening.setup import Plan
from rlx.models.shapes import SHAPES, USUAL
from rlx.profile import compile_profile
from rlx.profile.keys import FAMILIES, KEYS
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
    machine |= {"engine.cache_kv", "engine.cache_kv_bytes"}
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


def test_environment_and_precision_hold_beside_a_written_profile(
    model: Path, beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("profile", "init", model).exit_code == 0
    for name, value in (("RLX_CACHE", "readonly"), ("RLX_THREADS", "1"), ("RLX_TARGET", "generic")):
        monkeypatch.setenv(name, value)
    with open_weights(model) as loader:
        setup = Plan.of(loader, EngineOptions(precision="exact")).setup
    assert setup.source == beside
    assert (setup.cache.policy, setup.threads, setup.target.level) == ("readonly", 1, "generic")
    assert setup.kv_type.name == "f32", "of exact programs, if the profile does not say"


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


@pytest.mark.parametrize("command", [("compile", "--check"), ("profile", "show")])
def test_a_profile_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    file, read = tmp_path / "p.toml", list[Path]()
    file.write_text("family = 'qwen3'")
    reader = compile_profile.read_file
    monkeypatch.setattr(compile_profile, "read_file", lambda path: read.append(path) or reader(path))
    result = run(*command, "--profile", file)
    assert (result.exit_code, read) == (0, [file]), result.output
    assert str(file) in result.stderr


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


def test_the_one_model_beside_a_profile_is_taken(model: Path, tmp_path: Path) -> None:
    profile, beside = tmp_path / "gemma.rlx.toml", tmp_path / "m-f16.gguf"
    profile.write_text('family = "gemma"\n')
    beside.write_bytes(model.read_bytes())
    assert check("--profile", profile).startswith(f"model: {beside} (beside {profile})\n{profile}: fits {beside};")
    (tmp_path / "m-Q8_0.gguf").write_bytes(model.read_bytes())
    said = check("--profile", profile)
    assert f"{tmp_path}: there are 2 models here: m-Q8_0.gguf (Q8_0, " in said
    assert f"rlx compile {tmp_path}:Q8_0" in said
    assert f"rlx profile show {tmp_path}:Q8_0" in run("profile", "show", tmp_path).stderr
    assert check("--profile", profile, beside).startswith(f"{profile}: fits {beside};")


def test_without_a_model_anywhere_it_is_the_demo_model(tmp_path: Path, demo_model: Path) -> None:
    profile = tmp_path / "p.toml"
    profile.write_text("[buckets]\nseq = [1, 8]\n")
    told = "model: the demo model (no model was named)\n"
    assert check("--profile", profile).startswith(f"{told}{profile}: fits {demo_model};")
    assert check().startswith(f"{told}no profile; the defaults: fits {demo_model};")
    profile.write_text("family = 'gemma'\n")
    said = run("run", "--profile", profile, "hi").stderr
    assert f"{profile}: it is for the family 'gemma', and no model is named: the demo model is of 'qwen3'" in said
    assert f'`rlx compile MODEL --profile {profile}`, or model = "MODEL" at the top of the profile' in said


def test_a_profile_of_a_family_without_a_model_compiles_for_a_published_shape(tmp_path: Path) -> None:
    assert set(USUAL) == set(FAMILIES) and set(USUAL.values()) <= set(SHAPES)
    for family, shape in USUAL.items():
        profile = tmp_path / f"{family}.rlx.toml"
        profile.write_text(f"family = '{family}'\n")
        said = check("--profile", profile)
        if family != demo.FAMILY:
            told = f"model: the shape {shape} ({profile} is for '{family}' and nothing names a model)\n"
            assert said.startswith(f"{told}{profile}: fits {shape}-Q4_K_M;"), said


def test_the_runner_asks_in_the_same_order(model: Path, tmp_path: Path) -> None:
    profile = tmp_path / "p.toml"
    profile.write_text(f'model = "{model}"\n')
    with rlx.auto_runner(profile=profile, load=False) as runner:
        assert runner.family == "gemma"
    with rlx.auto_runner(load=False) as runner:
        assert runner.family == demo.FAMILY


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


def test_weights_are_named_where_there_are_none(model: Path) -> None:
    assert f"--weights Q8_0 is for a config.json or --shape; {model} has weights" in check(model, "--weights", "Q8_0")
    assert "--shape tiny-llama takes the place of a MODEL" in check(model, "--shape", "tiny-llama")
    assert "Did you mean tiny-llama or" in check("--shape", "tiny-lama")


def test_inspect_names_the_profile(model: Path, beside: Path) -> None:
    assert "runnable: yes, by GemmaRunner\n" in run("inspect", model).stdout
    beside.write_text("")
    assert f"runnable: yes, by GemmaRunner, as {beside} says\n" in run("inspect", model).stdout
