"""Whatever a user gets wrong: from Python a named error, on the command line exit code 2 and one clear message."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import broken_models as broken
import gguf
import numpy as np
import pytest

import rlx
from rlx.errors import (
    ArgumentError,
    ConfigError,
    GgufError,
    ModelFileError,
    NumericalError,
    ProfileError,
    RlxError,
    SafetensorsError,
    TargetError,
    UnsupportedModelError,
    WeightError,
)
from rlx.store.kinds import CacheWarning

pytestmark = pytest.mark.any_machine


class Result(NamedTuple):
    code: int
    out: str
    err: str


Rlx = Callable[..., Result]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Rlx:
    """`python -m rlx` with some arguments, in this process."""

    def run(*args: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["rlx", *map(str, args)])
        capfd.readouterr()
        handler = signal.getsignal(signal.SIGINT)
        try:
            with pytest.raises(SystemExit) as ended:
                runpy.run_module("rlx", run_name="__main__", alter_sys=True)
        finally:
            signal.signal(signal.SIGINT, handler)  # the command's own ends the process, which other tests interrupt
        out, err = capfd.readouterr()
        return Result(int(ended.value.code or 0), out, err)

    return run


def raising(kind: type[RlxError], message: str) -> Any:
    return pytest.raises(kind, match=re.escape(message))


def refused(result: Result, *parts: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that says all the parts."""
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("Error: ")
    assert result.err.count("\n") == 1, result.err
    for part in parts:
        assert part in result.err


def misused(result: Result, *parts: str) -> None:
    """The same for an option that click refuses: its message comes after the usage."""
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("Usage: rlx ")
    assert result.err.count("Error: ") == 1
    assert "Traceback" not in result.err
    for part in parts:
        assert part in result.err.rsplit("Error: ")[1]


@pytest.fixture(scope="session")
def model(goldens: Path) -> Path:
    return goldens / "qwen3" / "model-f16.gguf"


# ---------------------------------------------------------------------------------------------------- model files

Q = "blk.0.attn_q.weight"


def data_cut(source: Path, target: Path, missing: int) -> Path:
    target.write_bytes(source.read_bytes()[:-missing])
    return target


def head_of(source: Path, target: Path, nbytes: int) -> Path:
    target.write_bytes(source.read_bytes()[:nbytes])
    return target


def with_shape(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[broken.Tensors], None]:
    def edit(tensors: broken.Tensors) -> None:
        data, kind = tensors[name]
        tensors[name] = np.ascontiguousarray(change(data)), kind

    return edit


def quantized(name: str, kind: gguf.GGMLQuantizationType) -> Callable[[broken.Tensors], None]:
    def edit(tensors: broken.Tensors) -> None:
        tensors[name] = gguf.quants.quantize(tensors[name][0].astype(np.float32), kind), kind

    return edit


def of_activations(tensors: broken.Tensors) -> None:
    """Q8_1, a type that no file has for weights: blocks of 32 elements in 40 bytes."""
    rows, k = tensors[Q][0].shape
    tensors[Q] = np.zeros((rows, k // 32 * 40), np.uint8), gguf.GGMLQuantizationType.Q8_1


def poisoned(tensors: broken.Tensors) -> None:
    tensors[Q][0][:] = np.nan


def folder(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def hf_without(source: Path, target: Path, name: str) -> Path:
    (copied(source, target) / name).unlink()
    return target


def hf_with(source: Path, target: Path, **changes: Any) -> Path:
    file = copied(source, target) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return target


def hf_cut(source: Path, target: Path) -> Path:
    file = copied(source, target) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return target


Make = Callable[[Path, Path], Path]
AGAIN = "download it again"
MISMATCH = "download or convert the model again"

# What is wrong -> (how to make it of a model and a new path, error, what the message says besides the path).
FILES: dict[str, tuple[Make, type[RlxError], list[str]]] = {
    "missing": (lambda m, p: p, ModelFileError, ["there is no such file or directory", "Give a .gguf file"]),
    "no weights": (
        lambda m, p: folder(p, notes="x"),
        ModelFileError,
        ["no model.safetensors, no model.safetensors.index.json and no .gguf file; it holds notes", "Give the path"],
    ),
    "no model": (
        lambda m, p: folder(p.parent / "d", x="hello, this is text") / "x",
        ModelFileError,
        ["neither a GGUF nor a safetensors file; it begins with b'hello, this", "Give a .gguf file"],
    ),
    "cut in a string": (lambda m, p: head_of(m, p, 5000), GgufError, ["tokens' runs past the end of the file", AGAIN]),
    "cut in the data": (lambda m, p: data_cut(m, p, 1000), GgufError, ["tensor 'blk.3.", "the file has 426456", AGAIN]),
    "unknown architecture": (
        lambda m, p: broken.rewrite(m, p, keys={"general.architecture": "nonsense"}),
        UnsupportedModelError,
        ["the architecture 'nonsense' (general.architecture) is unknown", "Supported: "],
    ),
    "unknown tensor type": (
        lambda m, p: broken.with_tensor_type(m, p, Q, 99),
        UnsupportedModelError,
        [f"byte 12467: tensor '{Q}' has the type id 99, which rlx does not know", "Q4_K_M or Q8_0"],
    ),
    "tensor type without kernels": (
        lambda m, p: broken.rewrite(m, p, change=of_activations),
        UnsupportedModelError,
        [f"tensor '{Q}' has type q8_1, which rlx has no kernel for", "Use a file in F32, F16"],
    ),
    "missing tensor": (
        lambda m, p: broken.rewrite(m, p, drop=(Q,)),
        WeightError,
        [f"{Q}: the tensor is missing, expected shape [128, 64]", "The file is incomplete, or its metadata is of"],
    ),
    "missing key": (
        lambda m, p: broken.rewrite(m, p, drop=("qwen3.block_count",)),
        ConfigError,
        ["the key 'qwen3.block_count' is missing, expected an integer from 1 to 1024"],
    ),
    "wrong rows": (
        lambda m, p: broken.rewrite(m, p, change=with_shape(Q, lambda d: d[:-1])),
        WeightError,
        [f"{Q}: expected shape [128, 64], found [127, 64]", MISMATCH],
    ),
    "quantized norm": (
        lambda m, p: broken.rewrite(m, p, change=quantized("output_norm.weight", gguf.GGMLQuantizationType.Q8_0)),
        WeightError,
        ["output_norm.weight: expected f32, f16, bf16, found q8_0"],
    ),
    "checkpoint of other sizes": (
        lambda m, p: hf_with(m.parent / "hf", p, intermediate_size=100),
        WeightError,
        ["model.safetensors, model.layers.0.mlp.gate_proj.weight: expected shape [100, 64], found [96, 64]", MISMATCH],
    ),
    "checkpoint cut": (
        lambda m, p: hf_cut(m.parent / "hf", p),
        SafetensorsError,
        ["model.safetensors", "cut short"],
    ),
    "checkpoint without config": (
        lambda m, p: hf_without(m.parent / "hf", p, "config.json"),
        ConfigError,
        ["config.json"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_model_files(case: str, model: Path, tmp_path: Path, cli: Rlx) -> None:
    make, kind, parts = FILES[case]
    path = make(model, tmp_path / "model.gguf")
    with pytest.raises(kind) as caught:
        rlx.auto_runner(path)
    assert type(caught.value) is kind
    assert str(caught.value.where).startswith(str(path.resolve())), "where: the file"
    for part in parts:
        assert part in str(caught.value)
    for command in (["run", path, "Hi"], ["compile", path], ["bench", path]):
        refused(cli(*command), str(path), *parts)


def test_a_link_to_nothing(tmp_path: Path, cli: Rlx) -> None:
    link = tmp_path / "model.gguf"
    link.symlink_to("gone")
    refused(cli("run", link, "Hi"), f"{link}: it is a link to gone, which leads to nothing")


def test_broken_numbers_are_named(model: Path, tmp_path: Path, cli: Rlx) -> None:
    path = broken.rewrite(model, tmp_path / "model.gguf", change=poisoned)
    with rlx.auto_runner(path) as runner, raising(NumericalError, "logit 0 is nan. The weights or the"):
        runner.predict_logits([1, 2])
    found = cli("run", path, "Hi")
    assert found.code == 2
    assert "is nan. The weights or the arithmetic are broken: check the file" in found.err


# ---------------------------------------------------------------------------------------------------- options

WHOLE = "expected a whole number from 1 to"
# Options of `auto_runner` -> error, what it says; and the arguments for the command line with what that says, if other.
OPTIONS: list[tuple[dict[str, Any], type[RlxError], str, list[str]]] = [
    ({"threads": 0}, ArgumentError, f"threads is 0, {WHOLE} 1024", ["--threads", "0"]),
    ({"threads": 1.5}, ArgumentError, f"threads is 1.5, {WHOLE} 1024", ["--threads", "1.5"]),
    ({"threads": "2"}, ArgumentError, f"threads is '2', {WHOLE} 1024", ["--threads", "two"]),
    ({"max_seq": 2**40}, ArgumentError, f"max_seq is {2**40}, {WHOLE} 1048576", []),
    ({"kv_dtype": "f8"}, ArgumentError, "kv_dtype is 'f8', expected one of f32, f16, bf16,", ["--kv-dtype", "f8"]),
    ({"precision": "fast"}, ArgumentError, "precision is 'fast', expected one of auto, exact", ["--precision", "fast"]),
    ({"cache": "no"}, ArgumentError, "cache is 'no', expected one of on, off, redo, readonly", ["--cache", "no"]),
]  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS, ids=lambda case: str(case[0]))
def test_options(case: Any, model: Path, cli: Rlx) -> None:
    options, kind, message, arguments = case
    with raising(kind, message):
        rlx.auto_runner(model, **options)
    if arguments:
        misused(cli("run", model, "Hi", *arguments), arguments[0].partition("=")[0], arguments[-1].partition("=")[2])


# A profile's text -> what is said about it; all of the rules are in tests/profiles.
PROFILES: dict[str, str] = {
    "[precison]\n": "unknown key 'precison'. Did you mean 'precision'?",
    "family = 'gemma'": "the profile is for the family 'gemma', this model is of 'qwen3'",
    "[precision\nmode = 'auto'": "this is not TOML: Expected ']'",
}


@pytest.mark.parametrize("text", PROFILES)
def test_profiles(text: str, model: Path, tmp_path: Path, cli: Rlx) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    with raising(ProfileError, PROFILES[text]) as caught:
        rlx.auto_runner(model, profile=path)
    assert str(caught.value.where).startswith(str(path))
    refused(cli("run", model, "Hi", "--profile", path), str(path), PROFILES[text])


VARIABLES = [
    ("RLX_TARGET", "nonsense", TargetError, "RLX_TARGET: unknown target level 'nonsense'. Use native or one of"),
    ("RLX_CACHE", "nonsense", ArgumentError, "'nonsense' is no cache policy. Use one of on, off, redo, readonly"),
    ("RLX_CACHE_LIMIT", "much", ArgumentError, "RLX_CACHE_LIMIT: 'much' is not a size above 0. Write 500M or 2G"),
    ("RLX_THREADS", "0", ArgumentError, "RLX_THREADS: '0' is not a number from 1 to 1024"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "kind", "message"), VARIABLES, ids=[row[0] for row in VARIABLES])
def test_environment_variables(
    name: str, value: str, kind: type[RlxError], message: str,
    model: Path, cli: Rlx, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv(name, value)
    with raising(kind, message):
        rlx.auto_runner(model)
    refused(cli("run", model, "Hi"), message)


# ---------------------------------------------------------------------------------------------------- cache folder


def shared(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o777)
    return path


def linked(path: Path) -> Path:
    path.with_name("elsewhere").mkdir(0o700)
    path.symlink_to(path.with_name("elsewhere"))
    return path


FOLDERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a file": (lambda path: path.write_text("x") and path, "it is not a folder"),
    "everybody's": (shared, "other users can write it (mode 0777)"),
    "a link": (linked, "it is a symbolic link"),
    "under a file": (lambda path: (path.write_text("x") and path) / "cache", "it cannot be made: "),
}


def tiny() -> rlx.Graph:
    graph = rlx.Graph("tiny")
    graph.output("y", rlx.ops.silu(graph.input("x", [rlx.SEQ, 32])))
    return graph


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_cannot_be_used_costs_the_cache_and_nothing_else(
    case: str, tmp_path: Path, cli: Rlx, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, why = FOLDERS[case]
    path = make(tmp_path / "cache")
    monkeypatch.setenv("RLX_CACHE_DIR", str(path))
    with pytest.warns(CacheWarning, match=re.escape(f"{path} is not used: {why}")), rlx.compile(tiny()) as exe:
        assert exe(x=np.zeros((1, 32)))["y"].tolist() == [[0.0] * 32]
        assert not exe.stats["cached"]
    refused(cli("cache", "ls"), f"{path}: {why}")
    assert ("chmod 700" in cli("cache", "ls").err) == (case == "everybody's")


# ---------------------------------------------------------------------------------------------------- the real process


def test_no_traceback_without_debug_and_one_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlx", "run", str(tmp_path / "missing.gguf"), "Hi"]
    plain, debug = (subprocess.run([*command, *more], capture_output=True, text=True) for more in ([], ["--debug"]))
    assert (plain.returncode, debug.returncode) == (2, 2)
    assert re.fullmatch(r"Error: .*missing\.gguf: there is no such file or directory\. .*\n", plain.stderr)
    assert "Traceback" in debug.stderr
    assert debug.stderr.endswith(plain.stderr)
