"""What `open_model` says of a file, against the `gguf` package's reader and the files of the reference converter."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from rlx.export.hf import open_model
from rlx.export.model import ExportModel
from rlx.ir.dtypes import BF16

FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
WRITTEN_LATER = {"general.file_type", "general.quantization_version"}
# The reference converter names a model otherwise, and gives Gemma 1 the id that <end_of_turn> has in the published
# vocabulary, 107, whatever vocabulary there is.
OTHERWISE = {"general.name", "tokenizer.ggml.eot_token_id"}


def written_model(pieces: list[tuple[str, float, int]]) -> bytes:
    """A SentencePiece model file of BPE pieces (text, score, type), encoded as sentencepiece_model.proto says."""

    def varint(value: int) -> bytes:
        out = b""
        while value >= 0x80:
            out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
        return out + bytes([value])

    def field(number: int, value: bytes) -> bytes:
        return varint(number << 3 | 2) + varint(len(value)) + value

    def piece(text: str, score: float, kind: int) -> bytes:
        body = field(1, text.encode()) + varint(2 << 3 | 5) + np.float32(score).tobytes()
        return body if kind == 1 else body + varint(3 << 3) + varint(kind)

    trainer, normalizer = varint(3 << 3) + varint(2), varint(3 << 3) + varint(0)
    return b"".join(field(1, piece(*each)) for each in pieces) + field(2, trainer) + field(3, normalizer)


def reference(path: Path) -> tuple[dict[str, tuple[Any, Any]], dict[str, np.ndarray[Any, Any]]]:
    """Metadata with types, and dequantized tensors, as the `gguf` package reads them."""
    reader = gguf.GGUFReader(path)
    metadata = {
        key: (field.contents(), tuple(field.types) if len(field.types) > 1 else field.types[0])
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.")
    }
    tensors = {
        each.name: gguf.quants.dequantize(each.data, each.tensor_type).reshape(each.shape.tolist()[::-1])
        for each in reader.tensors
    }
    return metadata, tensors


def plain(value: Any) -> Any:
    """float32 where GGUF has float32, and text where it has bytes."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode()
    return np.float32(value) if isinstance(value, float) else value


def assert_equal(model: ExportModel, path: Path, otherwise: set[str]) -> None:
    metadata, tensors = reference(path)
    assert set(model.metadata) == set(metadata) - WRITTEN_LATER
    for key in set(model.metadata) - otherwise:
        value, kind = model.metadata[key]
        assert (kind, plain(value)) == (metadata[key][1], plain(metadata[key][0])), key
    assert {tensor.name for tensor in model.tensors} == set(tensors)
    for tensor in model.tensors:
        found = tensor.values()
        assert (found.dtype, found.shape, tensor.shape) == (np.float32, tensor.shape, tensors[tensor.name].shape)
        assert np.array_equal(found, tensors[tensor.name]), tensor.name


@pytest.mark.parametrize("name", ["qwen2/model-f16", "gemma3/model-f16", "llama-k256/model-Q4_K_M"])
def test_a_gguf_file_is_presented_as_it_stands(goldens: Path, name: str) -> None:
    path = goldens / f"{name}.gguf"
    with open_model(path) as model:
        assert_equal(model, path, set())
        raw = {each.name: np.asarray(each.data).reshape(-1).view(np.uint8) for each in gguf.GGUFReader(path).tensors}
        for tensor in model.tensors:
            assert tensor.raw is not None
            assert np.array_equal(tensor.raw(), raw[tensor.name])
            assert tensor.raw().size == tensor.dtype.size(tensor.shape)


def checkpoint_of(goldens: Path, family: str, config: str, folder: Path) -> Path:
    """The fixture with one of its configurations, and for Gemma the tokenizer.model that the converter read."""
    shutil.copytree(goldens / family / "hf", folder)
    (folder / "config.json").write_bytes((goldens / family / "hf" / config).read_bytes())
    if family.startswith("gemma"):
        metadata, _ = reference(goldens / family / "model-f16.gguf")
        keys = [f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type")]
        pieces = list(zip(*(metadata[key][0] for key in keys), strict=True))
        (folder / "tokenizer.model").write_bytes(written_model(pieces))
    return folder


@pytest.mark.parametrize("config", ["config.json", "config.hub_style.json"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_becomes_what_the_reference_converter_makes_of_it(
    goldens: Path, tmp_path: Path, family: str, config: str
) -> None:
    folder = checkpoint_of(goldens, family, config, tmp_path / "model")
    with open_model(folder) as model:
        assert (model.arch, model.left_out) == (family, ())
        assert_equal(model, goldens / family / "model-f16.gguf", OTHERWISE)
        assert model.metadata["general.name"][0] == "model"
        if family == "gemma":
            tokens, _ = model.metadata["tokenizer.ggml.tokens"]
            assert tokens[model.metadata["tokenizer.ggml.eot_token_id"][0]] == "<end_of_turn>"


def test_bytes_are_offered_where_nothing_but_the_order_changes(goldens: Path) -> None:
    """BF16 in the file: matrices as they are; norms with 1 added only as numbers."""
    with open_model(goldens / "gemma3" / "hf") as model:
        tensors = {tensor.name: tensor for tensor in model.tensors}
        norm, query = tensors["blk.0.attn_norm.weight"], tensors["blk.0.attn_q.weight"]
        assert (norm.raw, norm.dtype, query.dtype) == (None, BF16, BF16)
        assert query.raw is not None
        bits = query.raw().view(np.uint16).astype(np.uint32) << 16
        assert np.array_equal(bits.view(np.float32).reshape(query.shape), query.values())
