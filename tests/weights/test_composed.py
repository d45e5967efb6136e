"""Tensors that lie in a file as several, or inside another: stacks of experts and row views."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import bf16, checkpoint, gguf_file

from rlx.errors import WeightError
from rlx.weights import ModelWeights, open_weights

EXPERTS, FFN, WIDTH = 3, 4, 6
Array = np.ndarray[Any, Any]


def numbers(seed: int, *shape: int) -> Array:
    """float32 on the bf16 grid."""
    return np.random.default_rng(seed).integers(-128, 128, shape).astype(np.float32) / 16


def mixture(spelling: str = "mlp.experts.{}.gate_proj.weight", **changed: Any) -> dict[str, tuple[str, Array]]:
    """The gates of a layer's experts, last one first in the file; `changed` replaces (or with None drops) some."""
    found: dict[str, tuple[str, Array]] = {}
    for expert in reversed(range(EXPERTS)):
        value = changed.get(f"e{expert}", ("bfloat16", bf16(numbers(expert, FFN, WIDTH))))
        if value is not None:
            found["model.layers.2." + spelling.format(expert)] = value
    return found


@pytest.mark.parametrize(
    ("family", "spelling"),
    [
        ("qwen3moe", "mlp.experts.{}.gate_proj.weight"),
        ("qwen35moe", "mlp.experts.{}.gate_proj.weight"),
        ("llama", "mlp.experts.{}.gate_proj.weight"),
        ("llama", "block_sparse_moe.experts.{}.w1.weight"),
    ],
)
def test_experts_become_one_tensor_in_their_order(tmp_path: Path, family: str, spelling: str) -> None:
    with ModelWeights(open_weights(checkpoint(tmp_path, mixture(spelling))), family) as weights:
        name, expected = "blk.2.ffn_gate_exps.weight", np.stack([numbers(e, FFN, WIDTH) for e in range(EXPERTS)])
        info = weights.info(name)
        assert info.shape == (EXPERTS, FFN, WIDTH) and info.dtype.name == "bf16" and info.nbytes == expected.nbytes // 2
        assert info.name == "model.layers.2." + spelling.format("*") == weights.names[name]
        assert weights.place(name) == f"{weights.loader.path}, {info.name}"
        assert weights.unused == [] and weights.has(name)
        np.testing.assert_array_equal(weights.array(name), expected)
        pieces = list(weights.pieces(name))
        assert weights.raw(name).tobytes() == b"".join(piece.tobytes() for piece in pieces) == bf16(expected).tobytes()
        assert all(not piece.flags.writeable for piece in pieces)  # the file's own bytes, not a copy
        weights.release(name)


def test_streams_of_a_residual_are_stacked(tmp_path: Path) -> None:
    tensors = {f"model.language_model.altup_projections.{i}.weight": ("float32", numbers(i, 5, 5)) for i in range(3)}
    with ModelWeights(open_weights(checkpoint(tmp_path, tensors)), "gemma3n") as weights:
        expected = np.stack([numbers(i, 5, 5) for i in range(3)])
        np.testing.assert_array_equal(weights.array("altup_proj.weight"), expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"e1": None}, r"blk\.2\.ffn_gate_exps\.weight lacks 'model\.layers\.2\.mlp\.experts\.1\.gate_.*number 1 of 3"),
        ({"e0": None}, r"lacks 'model\.layers\.2\.mlp\.experts\.0\.gate_proj\.weight', number 0 of 3"),
        (
            {"e2": ("bfloat16", bf16(numbers(0, FFN, 2)))},
            r"'.*experts\.2\.gate_proj\.weight' is bf16\[4, 2\], .*\[4, 6\]",
        ),
        (
            {"e1": ("float32", numbers(0, FFN, WIDTH))},
            r"'.*experts\.1\.gate_proj\.weight' is f32\[4, 6\], expected bf16",
        ),
    ],
)
def test_an_expert_that_is_missing_or_unlike_the_others_is_named(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with open_weights(checkpoint(tmp_path, mixture(**changed))) as loader, pytest.raises(WeightError, match=message):
        ModelWeights(loader, "qwen3moe")


# --- row views


def fused(tmp_path: Path) -> ModelWeights:
    tensors = {
        "blk.0.attn_qkv.weight": numbers(0, 12, WIDTH),
        "blk.0.attn_qkv.bias": numbers(1, 12),
        "blk.0.ffn_gate_up_exps.weight": numbers(2, EXPERTS, 2 * FFN, WIDTH),
    }
    return ModelWeights(open_weights(gguf_file(tmp_path / "m.gguf", tensors)), "llama")


QKV, BIAS, EXPS = "blk.0.attn_qkv.weight", "blk.0.attn_qkv.bias", "blk.0.ffn_gate_up_exps.weight"
VIEWS: dict[str, tuple[str, tuple[Any, ...], Callable[[], Array]]] = {
    "first rows": (QKV, (0, 5), lambda: numbers(0, 12, WIDTH)[:5]),
    "last rows": (QKV, (8, 4), lambda: numbers(0, 12, WIDTH)[8:]),
    "all rows": (QKV, (0, 12), lambda: numbers(0, 12, WIDTH)),
    "rows of each head": (QKV, (2, 2, 4), lambda: numbers(0, 12, WIDTH)[[2, 3, 6, 7, 10, 11]]),
    "numbers": (BIAS, (3, 5), lambda: numbers(1, 12)[3:8]),
    "numbers of each head": (BIAS, (0, 1, 3), lambda: numbers(1, 12)[::3]),
    "half of each expert": (EXPS, (FFN, FFN), lambda: numbers(2, EXPERTS, 2 * FFN, WIDTH)[:, FFN:]),
    "every second row of each expert": (EXPS, (1, 1, 2), lambda: numbers(2, EXPERTS, 2 * FFN, WIDTH)[:, 1::2]),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_the_rows_of_its_source(tmp_path: Path, view: str) -> None:
    source, cut, rows = VIEWS[view]
    expected = rows()
    with fused(tmp_path) as weights:
        for _ in range(2):  # saying it twice is no mistake
            weights.define("blk.0.part.weight", source, *cut)
        assert weights.has("blk.0.part.weight")
        info = weights.info("blk.0.part.weight")
        assert info.shape == expected.shape and info.nbytes == expected.nbytes and info.name == source
        np.testing.assert_array_equal(weights.array("blk.0.part.weight"), expected)
        assert weights.raw("blk.0.part.weight").tobytes() == expected.tobytes()
        pieces = list(weights.pieces("blk.0.part.weight"))
        assert len(pieces) == (EXPERTS if source == EXPS else 1)
        assert b"".join(piece.tobytes() for piece in pieces) == expected.tobytes()
        copied = {piece.flags.writeable for piece in pieces}
        assert copied == {"each head" in view or "second row" in view}
        weights.release("blk.0.part.weight")
        np.testing.assert_array_equal(weights.array("blk.0.part.weight"), expected)
        assert weights.place("blk.0.part.weight") == f"{weights.loader.path}, {source}" and weights.unused == []


@pytest.mark.parametrize(("head", "own"), [(None, False), (0, False), (1, True)], ids=["absent", "a copy", "another"])
def test_a_head_that_is_not_the_embedding_table(tmp_path: Path, head: int | None, own: bool) -> None:
    """Whatever `tie_word_embeddings` says, as transformers reads it."""
    tensors = {"token_embd.weight": numbers(0, 12, WIDTH)}
    if head is not None:
        tensors["output.weight"] = numbers(head, 12, WIDTH)
    with ModelWeights(open_weights(gguf_file(tmp_path / "m.gguf", tensors)), "llama") as weights:
        assert weights.has_own_head is own


def test_a_square_that_may_be_transposed_already_is(tmp_path: Path) -> None:
    square = numbers(2, EXPERTS, WIDTH, WIDTH)
    with ModelWeights(open_weights(gguf_file(tmp_path / "m.gguf", {EXPS: square})), "llama") as weights:
        for name, either in (("blk.0.turned.weight", False), ("blk.0.either.weight", True)):
            weights.define(name, EXPS, 0, WIDTH, WIDTH, True, either=either)
        np.testing.assert_array_equal(weights.array("blk.0.turned.weight"), square.swapaxes(1, 2))
        np.testing.assert_array_equal(weights.array("blk.0.either.weight"), square)


def test_rows_of_a_block_format_and_views_of_views(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q4_K
    blocks = np.random.default_rng(0).integers(0, 256, (12, 2 * 144)).astype(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor(QKV, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with ModelWeights(open_weights(tmp_path), "llama") as weights:
        weights.define("blk.0.attn_k.weight", QKV, 1, 2, 4)
        weights.define("blk.0.half.weight", "blk.0.attn_k.weight", 3, 3)
        assert weights.info("blk.0.half.weight").shape == (3, 512)
        assert weights.raw("blk.0.attn_k.weight").tobytes() == blocks[[1, 2, 5, 6, 9, 10]].tobytes()
        assert weights.raw("blk.0.half.weight").tobytes() == blocks[[6, 9, 10]].tobytes()
        assert weights.info("blk.0.half.weight").nbytes == 3 * 288


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ((EXPS, 24, 8, 24), r"rows 24 to 32 of every 24"),
        ((EXPS, -8, 8, 24), r"rows -8 to 0 of every 24"),
        ((QKV, 0, 2, 5), r"rows 0 to 2 of every 5 of 'blk\.0\.attn_qkv\.weight', which has 12"),
        ((QKV, 8, 5), r"rows 8 to 13 of every 12"),
        ((QKV, -1, 2), r"rows -1 to 1 of every 12"),
        ((QKV, 0, 0), r"rows 0 to 0 of every 12"),
        ((EXPS, 0, 9, 24), r"of every 24 of 'blk\.0\.ffn_gate_up_exps\.weight', which has 8"),
        ((BIAS, 0, 2, 0), r"of every 0"),
        (("blk.0.ffn_up.weight", 0, 2), r"there is no tensor for blk\.0\.ffn_up\.weight; names tried"),
    ],
)
def test_rows_that_do_not_divide_are_named(tmp_path: Path, cut: tuple[Any, ...], message: str) -> None:
    with fused(tmp_path) as weights:
        with pytest.raises(WeightError, match=message) as caught:
            weights.define("blk.0.part.weight", *cut)
        assert str(tmp_path) in str(caught.value) and not weights.has("blk.0.part.weight")
