"""`quantize` and the writer: what is in the file, read by `gguf` and by rlx, and what errors leave behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.quants import dequantize
from gguf.quants import quantize as reference

from rlx.errors import ArgumentError, RlxError, WeightError
from rlx.export import quantize as stage
from rlx.export.hf import open_model
from rlx.export.model import ExportModel, ExportTensor, check_output
from rlx.export.quantize import FILE_TYPES, quantize
from rlx.ir.dtypes import BF16, F16, F32, Q4_0, DType
from rlx.weights import open_weights

WRITERS = {"general.file_type", "general.quantization_version"}
TYPES = list(FILE_TYPES)


def contents(path: Path) -> dict[str, Any]:
    """Keys with types and values, as the `gguf` package reads them; what the writer says itself left out."""
    fields = {name: field for name, field in GGUFReader(path).fields.items() if not name.startswith("GGUF.")}
    return {name: (field.types, field.contents()) for name, field in fields.items() if name not in WRITERS}


def only(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fake_tensor(name: str, shape: tuple[int, ...], dtype: DType = F16, fill: Callable[[], Any] | None = None) -> Any:
    def values() -> Any:
        rng = np.random.default_rng(len(name))
        return fill() if fill else (rng.standard_normal(shape) * 0.02).astype(np.float32)

    raw = (lambda: values().reshape(-1).view(np.uint8)) if dtype is F32 else None
    return ExportTensor(name, shape, dtype, values, raw)


def fake_model(*tensors: Any, metadata: dict[str, tuple[Any, Any]] | None = None) -> ExportModel:
    keys = {"general.architecture": ("llama", GGUFValueType.STRING), "llama.block_count": (1, GGUFValueType.UINT32)}
    return ExportModel(Path("fake"), "llama", keys | (metadata or {}), tensors, ("v.patch",), lambda: None)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[ExportModel], None]:
    """Makes `quantize` open this model, whatever path it gets."""
    return lambda model: monkeypatch.setattr(stage, "open_model", lambda path: model)


# ------------------------------------------------------------------------------------------------ what is written


@pytest.mark.parametrize("target", TYPES)
def test_keys_names_shapes_and_order_stay(goldens: Path, tmp_path: Path, target: str) -> None:
    source, out = goldens / "qwen3" / "model-f16.gguf", tmp_path / "out.gguf"
    done = quantize(source, out, target)
    assert contents(out) == contents(source)
    before, after = GGUFReader(source), GGUFReader(out)
    assert [t.name for t in after.tensors] == [t.name for t in before.tensors] == [name for name, _, _ in done.tensors]
    assert [t.shape.tolist() for t in after.tensors] == [t.shape.tolist() for t in before.tensors]
    assert [t.tensor_type.name.lower() for t in after.tensors] == [dtype.name for _, _, dtype in done.tensors]
    assert after.fields["general.file_type"].contents() == FILE_TYPES[done.type].ggml
    assert after.fields["general.quantization_version"].contents() == gguf.GGML_QUANT_VERSION
    assert done.nbytes == out.stat().st_size
    assert only(tmp_path) == ["out.gguf"]


@pytest.mark.parametrize("target", TYPES)
def test_values_are_the_originals_within_the_types_error(goldens: Path, tmp_path: Path, target: str) -> None:
    source, out = goldens / "gemma3" / "model-f16.gguf", tmp_path / "out.gguf"
    quantize(source, out, target)
    worst = {"Q8_0": 0.01, "Q6_K": 0.03, "Q5_1": 0.06, "Q5_0": 0.06, "Q5_K": 0.06, "Q4_K": 0.12, "Q4_0": 0.14}
    for a, b in zip(GGUFReader(source).tensors, GGUFReader(out).tensors, strict=True):
        original, found = (dequantize(t.data, t.tensor_type).astype(np.float64) for t in (a, b))
        error = np.sqrt(np.mean(np.square(original - found)))
        assert error <= worst.get(b.tensor_type.name, 0.005 if b.tensor_type.name == "BF16" else 0) * original.std()


@pytest.mark.parametrize("family", ["llama-k256", "qwen35-k256", "gemma4-k256"])
def test_types_equal_those_of_a_file_of_llama_cpp(
    opened: Callable[[ExportModel], None], goldens: Path, tmp_path: Path, family: str
) -> None:
    """The golden file was made by llama.cpp's tool from one in F16."""
    path = goldens / family / "model-Q4_K_M.gguf"
    with open_model(path) as model:
        halves = [replace(t, dtype=F16, raw=None) if t.dtype.is_quantized else t for t in model.tensors]
        opened(replace(model, tensors=tuple(halves)))
        quantize("in", tmp_path / "out.gguf", "Q4_K_M")
    peer = {t.name: t.tensor_type for t in GGUFReader(path).tensors}
    assert {t.name: t.tensor_type for t in GGUFReader(tmp_path / "out.gguf").tensors} == peer


def test_rlx_opens_the_file(goldens: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    quantize(goldens / "llama" / "model-f16.gguf", out, "Q8_0")
    reader = {t.name: t for t in GGUFReader(out).tensors}
    with open_weights(out) as weights:
        assert list(weights.tensors) == list(reader)
        for name, info in weights.tensors.items():
            assert info.dtype.ggml == reader[name].tensor_type
            np.testing.assert_array_equal(weights.raw(name), reader[name].data.view(np.uint8).reshape(-1))


def test_a_checkpoint_is_quantized_like_the_file_converted_from_it(goldens: Path, tmp_path: Path) -> None:
    folder = goldens / "qwen3"
    quantize(folder / "hf", tmp_path / "hf.gguf", "Q8_0")
    quantize(folder / "model-f16.gguf", tmp_path / "gguf.gguf", "Q8_0")
    a, b = ({t.name: t for t in GGUFReader(tmp_path / f"{name}.gguf").tensors} for name in ("hf", "gguf"))
    assert {name: t.tensor_type for name, t in a.items()} == {name: t.tensor_type for name, t in b.items()}
    for name, tensor in a.items():
        same = np.mean(tensor.data == b[name].data)  # the converted file was rounded to half floats
        assert same > 0.9, name


def test_equal_types_are_copied_bit_by_bit(goldens: Path, tmp_path: Path) -> None:
    source, out = goldens / "llama-k256" / "model-Q4_K_M.gguf", tmp_path / "out.gguf"
    quantize(source, out, "Q4_K_M")
    for a, b in zip(GGUFReader(source).tensors, GGUFReader(out).tensors, strict=True):
        assert (a.name, a.tensor_type) == (b.name, b.tensor_type)
        np.testing.assert_array_equal(a.data, b.data)


def test_bytes_are_the_reference_encoders(opened: Callable[[ExportModel], None], tmp_path: Path) -> None:
    tensors = [fake_tensor("blk.0.attn_q.weight", (3, 64)), fake_tensor("blk.0.ffn_up_exps.weight", (2, 5, 32), BF16)]
    opened(fake_model(*tensors, fake_tensor("blk.0.attn_norm.weight", (7,), F32)))
    done = quantize("in", tmp_path / "out.gguf", "Q4_0")
    found = {t.name: t for t in GGUFReader(tmp_path / "out.gguf").tensors}
    for tensor in tensors:
        expected = reference(tensor.values(), GGMLQuantizationType.Q4_0)
        np.testing.assert_array_equal(found[tensor.name].data, expected)
    assert found["blk.0.attn_norm.weight"].tensor_type is GGMLQuantizationType.F32
    assert done.left_out == ("v.patch",)
    assert done.parameters == 3 * 64 + 2 * 5 * 32 + 7
    assert done.types == {Q4_0: 2, F32: 1}


def test_every_kind_of_key_is_written(opened: Callable[[ExportModel], None], tmp_path: Path) -> None:
    array = GGUFValueType.ARRAY
    keys: dict[str, tuple[Any, Any]] = {
        "a.text": ("déjà\n", GGUFValueType.STRING), "a.flag": (True, GGUFValueType.BOOL),
        "a.big": (2**40, GGUFValueType.UINT64), "a.low": (-5, GGUFValueType.INT8),
        "a.real": (0.1, GGUFValueType.FLOAT64), "a.bytes": ([b"\xff\xfe", b""], (array, GGUFValueType.STRING)),
        "a.bools": ([True, False], (array, GGUFValueType.BOOL)), "a.none": ([], (array, GGUFValueType.INT32)),
        "split.count": (3, GGUFValueType.UINT16), "general.alignment": (64, GGUFValueType.UINT32),
    }  # fmt: skip
    opened(fake_model(fake_tensor("output.weight", (2, 32)), metadata=keys))
    quantize("in", tmp_path / "out.gguf", "Q8_0")
    with open_weights(tmp_path / "out.gguf") as file:
        found: Any = file.metadata
        names = ("a.text", "a.flag", "a.big", "a.low", "a.real")
        assert {name: (found[name], found.type_of(name)) for name in names} == {
            "a.text": ("déjà\n", "string"), "a.flag": (True, "bool"), "a.big": (2**40, "u64"),
            "a.low": (-5, "i8"), "a.real": (0.1, "f64"),
        }  # fmt: skip
        assert found.metadata_bytes("a.bytes") == [b"\xff\xfe", b""]
        assert found["a.bools"].tolist() == [True, False]
        assert {"a.none", "split.count", "general.alignment"}.isdisjoint(found)


# ------------------------------------------------------------------------------------------------ errors


def test_a_quantized_source_is_refused_and_taken_on_demand(goldens: Path, tmp_path: Path) -> None:
    source, out = goldens / "llama-k256" / "model-Q4_K_M.gguf", tmp_path / "out.gguf"
    with pytest.raises(ArgumentError, match=r"is q\d_k already and would become q4_0: .* requantize=True"):
        quantize(source, out, "Q4_0")
    assert only(tmp_path) == []
    assert quantize(source, out, "Q4_0", requantize=True).type == "Q4_0"


@pytest.mark.parametrize(
    ("source", "out", "read"),
    [
        ("m-00001-of-00003.gguf", "m-00002-of-00003.gguf", True),
        ("m-00001-of-00003.gguf", "n-00002-of-00003.gguf", False),
        ("m-00001-of-00003.gguf", "m.gguf", False),
        (".", "model.safetensors", True),
        (".", "config.json", True),
        (".", "m.gguf", False),
        ("model.safetensors", "config.json", True),
        ("m.gguf", "config.json", False),
    ],
)
def test_no_part_of_the_source_is_overwritten(tmp_path: Path, source: str, out: str, read: bool) -> None:
    for name in (source, out):
        if name != ".":
            (tmp_path / name).touch()
    if read:
        with pytest.raises(ArgumentError, match="this is a file that is read"):
            check_output(tmp_path / out, tmp_path / source, force=True)
    else:
        check_output(tmp_path / out, tmp_path / source, force=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, RlxError])
def test_nothing_is_left_of_a_run_that_broke_off(
    opened: Callable[[ExportModel], None], tmp_path: Path, error: type[BaseException]
) -> None:
    during: list[list[str]] = []

    def stop(what: str, done: int, total: int) -> None:
        during.append(only(tmp_path))
        if done > total / 2:
            raise error("stop")

    opened(fake_model(*(fake_tensor(f"blk.{i}.ffn_up.weight", (4, 32)) for i in range(4))))
    out = tmp_path / "out.gguf"
    out.write_bytes(b"old")
    with pytest.raises(error):
        quantize("in", out, "Q8_0", force=True, progress=stop)
    assert [len(names) for names in during] == [2, 2, 2]
    assert out.read_bytes() == b"old"
    assert only(tmp_path) == ["out.gguf"]


def test_numbers_that_are_none_name_their_tensor(opened: Callable[[ExportModel], None], tmp_path: Path) -> None:
    bad = fake_tensor("blk.1.ffn_up.weight", (4, 32), F16, lambda: np.full((4, 32), np.nan, np.float32))
    opened(fake_model(fake_tensor("blk.0.ffn_up.weight", (4, 32)), bad))
    with pytest.raises(WeightError, match=r"blk.1.ffn_up.weight: the tensor holds nan"):
        quantize("in", tmp_path / "out.gguf", "Q8_0")
    assert only(tmp_path) == []
