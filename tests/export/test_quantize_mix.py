"""The choice of types against llama.cpp's: what its 0.3.36 Python release wrote, and what its repository lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from rlx.export.quantize import FILE_TYPES, kept_type, more_bits, tensor_types
from rlx.ir.dtypes import BF16, DTYPES, F8_E4M3, F16, F32, F64, Q8_0, DType


@dataclass(frozen=True)
class Fake:
    name: str
    shape: tuple[int, ...] = (256, 256)
    dtype: DType = F16


def chosen(tensors: list[Fake], arch: str, target: str, **keys: int) -> dict[str, str]:
    metadata: dict[str, Any] = {f"{arch}.{key.replace('__', '.')}": value for key, value in keys.items()}
    types = tensor_types(tensors, arch, metadata, FILE_TYPES[target])
    return {tensor.name: dtype.name for tensor, dtype in zip(tensors, types, strict=True)}


def decoder(layers: int, width: int, ffn: int, attention: int, *, tied: bool) -> list[Fake]:
    """A dense decoder's matrices and norms, with the layers in no order."""
    tensors = [Fake("token_embd.weight", (512, width)), Fake("output_norm.weight", (width,), F32)]
    if not tied:
        tensors.append(Fake("output.weight", (512, width)))
    for i in sorted(range(layers), key=lambda i: i * 7 % layers):
        rows = {"attn_q": attention, "attn_k": 128, "attn_v": 128, "ffn_gate": ffn, "ffn_up": ffn}
        tensors += [Fake(f"blk.{i}.{name}.weight", (n, width)) for name, n in rows.items()]
        tensors.append(Fake(f"blk.{i}.attn_output.weight", (width, attention)))
        tensors.append(Fake(f"blk.{i}.ffn_down.weight", (width, ffn)))
        tensors.append(Fake(f"blk.{i}.attn_norm.weight", (width,), F32))
    return tensors


# ------------------------------------------------------------------------------------------------ whole small models

# (layers, width, ffn, attention, tied) and, for each type of file, what llama.cpp wrote: the head; the token table; the
# matrices that read `width` numbers; attn_output; ffn_down; attn_v and ffn_down of layers with more bits.
QWEN3 = (9, 256, 512, 256, True)
GEMMA3 = (12, 640, 1280, 256, True)
GEMMA3_NARROW = (8, 288, 544, 192, True)
UNTIED = (9, 256, 512, 256, False)
QWEN2_ODD = (8, 272, 400, 272, False)
WRITTEN = [
    (QWEN3, "F16", "f16 f16 f16 f16 f16 f16 f16"),
    (QWEN3, "BF16", "bf16 bf16 bf16 bf16 bf16 bf16 bf16"),
    (QWEN3, "Q8_0", "q8_0 q8_0 q8_0 q8_0 q8_0 q8_0 q8_0"),
    (QWEN3, "Q4_0", "q6_k q6_k q4_0 q4_0 q4_0 q4_0 q4_0"),
    (QWEN3, "Q6_K", "q6_k q6_k q6_k q6_k q6_k q6_k q6_k"),
    (QWEN3, "Q5_K_M", "q6_k q6_k q5_k q5_k q5_k q6_k q6_k"),
    (QWEN3, "Q4_K_M", "q6_k q6_k q4_k q4_k q4_k q6_k q6_k"),
    (UNTIED, "Q4_K_M", "q6_k q4_k q4_k q4_k q4_k q6_k q6_k"),
    (UNTIED, "Q4_0", "q6_k q4_0 q4_0 q4_0 q4_0 q4_0 q4_0"),
    (GEMMA3, "Q8_0", "q8_0 q8_0 q8_0 q8_0 q8_0 q8_0 q8_0"),
    (GEMMA3, "Q4_0", "q8_0 q8_0 q4_0 q4_0 q4_0 q4_0 q4_0"),
    (GEMMA3, "Q6_K", "q8_0 q8_0 q8_0 q6_k q6_k q8_0 q6_k"),
    (GEMMA3, "Q5_K_M", "q8_0 q8_0 q5_1 q5_k q5_k q8_0 q6_k"),
    (GEMMA3, "Q4_K_M", "q8_0 q8_0 q5_0 q4_k q4_k q8_0 q6_k"),
    (GEMMA3_NARROW, "Q6_K", "q8_0 q8_0 q8_0 q8_0 q8_0 q8_0 q8_0"),
    (GEMMA3_NARROW, "Q5_K_M", "q8_0 q8_0 q5_1 q5_1 q5_1 q8_0 q8_0"),
    (GEMMA3_NARROW, "Q4_K_M", "q8_0 q8_0 q5_0 q5_0 q5_0 q8_0 q8_0"),
    (QWEN2_ODD, "Q8_0", "f16 f16 f16 f16 f16 f16 f16"),
    (QWEN2_ODD, "Q4_0", "f16 f16 f16 f16 f16 f16 f16"),
    (QWEN2_ODD, "Q4_K_M", "f16 f16 f16 f16 f16 f16 f16"),
]
SIX_BITS = {8: {0, 3, 6, 7}, 9: {0, 3, 6, 7, 8}, 12: {0, 3, 6, 9, 10, 11}}


@pytest.mark.parametrize(("shape", "target", "written"), WRITTEN)
def test_a_small_model_gets_the_types_llama_cpp_gives_it(
    shape: tuple[int, int, int, int, bool], target: str, written: str
) -> None:
    layers, width, ffn, attention, tied = shape
    tensors = decoder(layers, width, ffn, attention, tied=tied)
    found = chosen(tensors, "any", target, block_count=layers)
    head, table, inner, output, down, more_value, more_down = written.split()
    assert found["token_embd.weight"] == table
    assert found.get("output.weight", head) == head
    for i in range(layers):
        more = i in SIX_BITS[layers]
        expected = dict.fromkeys(("attn_q", "attn_k", "ffn_gate", "ffn_up"), inner)
        expected |= {"attn_output": output, "attn_norm": "f32"}
        expected |= {"attn_v": more_value if more else inner, "ffn_down": more_down if more else down}
        assert {name: found[f"blk.{i}.{name}.weight"] for name in expected} == expected


# ------------------------------------------------------------------------------------------------ real models

# The layers to which llama.cpp's lists of real models (tests/snapshots) give six bits in Q4_K_M and Q5_K_M.
REAL = {
    28: [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27],  # Qwen3-0.6B
    34: [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 29, 30, 31, 32, 33],  # gemma-3-4b-it
    40: [0, 1, 2, 3, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 35, 36, 37, 38, 39],  # Qwen3-14B
    64: [*range(8), *range(10, 56, 3), *range(56, 64)],  # Qwen3.6-27B
}


@pytest.mark.parametrize("layers", REAL)
def test_layers_with_more_bits_in_real_models(layers: int) -> None:
    assert [i for i in range(layers) if more_bits(i, layers)] == REAL[layers]


def test_fused_projections_count_as_values() -> None:
    """Qwen3.6-27B: three layers of four have attn_qkv, the fourth attn_v; the rule counts both together."""
    names = [f"blk.{i}.{'attn_v' if i % 4 == 3 else 'attn_qkv'}.weight" for i in range(64)]
    found = chosen([Fake(name) for name in reversed(names)], "qwen35", "Q4_K_M", block_count=64)
    assert [i for i, name in enumerate(names) if found[name] == "q6_k"] == REAL[64]
    assert set(found.values()) == {"q6_k", "q4_k"}


def test_values_are_counted_among_the_layers_that_have_them() -> None:
    """Layers 2, 5, 8, ... of 24 have values: 8 of them, of which the rule takes 0, 3, 6 and 7."""
    layers = list(range(2, 24, 3))
    tensors = [Fake(f"blk.{i}.attn_v.weight") for i in layers]
    found = chosen(tensors, "any", "Q4_K_M", block_count=24)
    assert [layers.index(i) for i in layers if found[f"blk.{i}.attn_v.weight"] == "q6_k"] == [0, 3, 6, 7]


@pytest.mark.parametrize(
    ("arch", "kv_heads", "expected"),
    [("llama", 8, "q5_k"), ("llama", 64, "q4_k"), ("qwen2", 8, "q5_k"), ("x", 8, "q4_k")],
)
def test_values_of_models_with_80_layers(arch: str, kv_heads: int, expected: str) -> None:
    keys = {"block_count": 80, "attention__head_count": 64, "attention__head_count_kv": kv_heads}
    tensors = [Fake(f"blk.{i}.attn_v.weight") for i in range(80)]
    found = chosen(tensors, arch, "Q4_K_M", **keys)
    six = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, *range(12, 70, 3), *range(70, 80)}  # Llama 3.1 70B
    assert found == {f"blk.{i}.attn_v.weight": "q6_k" if i in six else expected for i in range(80)}


@pytest.mark.parametrize(
    ("target", "body", "output"), [("Q4_K_M", "q4_k", "q5_k"), ("Q5_K_M", "q5_k", "q5_k"), ("Q4_0", "q4_0", "q4_0")]
)
def test_eight_experts(target: str, body: str, output: str) -> None:
    """As written for a Mixtral of 9 layers: attention gets more, and the layer stands in the name."""
    tensors = [Fake("token_embd.weight"), Fake("output.weight")]
    for i in reversed(range(9)):
        names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp")
        tensors += [Fake(f"blk.{i}.{name}.weight") for name in names]
        tensors += [Fake(f"blk.{i}.ffn_{name}_exps.weight", (8, 256, 256)) for name in ("gate", "up", "down")]
    found = chosen(tensors, "llama", target, block_count=9, expert_count=8)
    for i in range(9):
        mixed = target != "Q4_0" and i in SIX_BITS[9]
        expected = {"attn_q": body, "attn_k": "q8_0", "attn_v": "q8_0", "attn_output": output, "ffn_gate_inp": "f32"}
        expected |= {"ffn_gate_exps": body, "ffn_up_exps": body, "ffn_down_exps": "q6_k" if mixed else body}
        assert {name: found[f"blk.{i}.{name}.weight"] for name in expected} == expected


def test_other_numbers_of_experts_change_nothing_but_the_count_of_layers() -> None:
    """As written for a model of 9 layers and 6 experts with a shared one, whose down projections are not counted."""
    names = ("attn_k", "attn_v", "ffn_down_exps", "ffn_down_shexp")
    tensors = [Fake(f"blk.{i}.{name}.weight") for name in names for i in range(9)]
    found = chosen(tensors, "qwen2moe", "Q4_K_M", block_count=9, expert_count=6)
    for name in names:
        more = set() if name == "attn_k" else SIX_BITS[9]
        assert [found[f"blk.{i}.{name}.weight"] for i in range(9)] == [
            "q6_k" if i in more else "q4_k" for i in range(9)
        ]


# ------------------------------------------------------------------------------------------------ vision towers


@pytest.mark.parametrize(("target", "odd", "down", "narrow"), [
    ("Q8_0", "f16", "q8_0", "q8_0"),
    ("Q4_K_M", "f16", "q6_k", "q5_0"),
    ("F16", "f16", "f16", "f16"),
])  # fmt: skip
def test_a_tower_gets_the_types_llama_cpp_gives_it(target: str, odd: str, down: str, narrow: str) -> None:
    """The widths of Gemma 3's tower, 1152 and 4304 (no multiple of 32), and of a Qwen 3.5's, 768 and 3072."""
    tensors = [
        Fake("v.blk.0.ffn_down.weight", (1152, 4304)),
        Fake("v.blk.1.ffn_down.weight", (768, 3072)),
        Fake("v.blk.0.ffn_up.weight", (4304, 1152)),
        Fake("v.patch_embd.weight", (1152, 3, 14, 14), F32),
        Fake("v.patch_embd.weight.1", (768, 3, 16, 16)),
        Fake("v.position_embd.weight", (2, 1024, 768), F32),
        Fake("v.blk.0.attn_q.bias", (768,), F32),
        Fake("v.std_scale", (768,), F32),
    ]
    kept = ["f32", "f16", "f32", "f32", "f32"]
    assert list(chosen(tensors, "clip", target, vision__block_count=27).values()) == [odd, down, narrow, *kept]


# ------------------------------------------------------------------------------------------------ what is kept


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("blk.0.attn_norm.weight", BF16, F32),
        ("blk.0.ffn_gate_inp.weight", F16, F32),
        ("blk.0.ssm_conv1d.weight", BF16, F32),
        ("per_layer_model_proj.weight", BF16, BF16),
        ("per_layer_model_proj.weight", F8_E4M3, BF16),
        ("per_layer_model_proj.weight", F64, F64),
        ("blk.0.attn_norm.weight", F64, F32),
        ("blk.0.laurel_l.weight", Q8_0, Q8_0),
        ("blk.0.laurel_l.weight", F32, F32),
    ],
)
def test_types_of_what_is_kept(name: str, dtype: DType, expected: DType) -> None:
    assert kept_type(Fake(name, dtype=dtype)) is expected


# ------------------------------------------------------------------------------------------------ names of types


def test_file_types_have_the_numbers_of_the_registry() -> None:
    from gguf import GGMLQuantizationType, LlamaFileType

    for name, target in FILE_TYPES.items():
        member = "ALL_F32" if name == "F32" else f"MOSTLY_{name}"
        assert target.ggml == LlamaFileType[member]
        assert target.dtype.ggml == GGMLQuantizationType[name.removesuffix("_M")]
        assert DTYPES[target.dtype.name] is target.dtype
