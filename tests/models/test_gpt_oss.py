"""gpt-oss in other files than the published ones, against the golden logits: experts in floats, GGUF."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFValueType
from golden_files import logits_of, write_gguf
from safetensors.numpy import save_file

from rlx.ir.stored import dequantize
from rlx.weights import open_weights

Array = np.ndarray
HF = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.sinks": "attn_sinks.weight", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias", "mlp.experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip
#: The values of four bits: 0 to 7, then their negatives (OCP Microscaling Formats 1.0).
FP4 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def floats(folder: Path) -> dict[str, Array]:
    """The checkpoint's tensors by its names in float32; stacks of experts [experts, outputs, inputs]."""
    with open_weights(folder) as loader:
        found = {}
        for name, info in loader.tensors.items():
            if name.endswith("_blocks"):
                stem = name.removesuffix("_blocks")
                codes = loader.raw(name).reshape(info.shape)
                pairs = np.stack([FP4[codes & 15], FP4[codes >> 4]], -1).reshape(*info.shape[:3], 32)
                exponents = loader.raw(f"{stem}_scales").reshape(*info.shape[:3], 1).astype(np.float32)
                found[stem] = (pairs * np.exp2(exponents - 127)).reshape(*info.shape[:2], -1)
            elif not name.endswith("_scales"):
                found[name] = dequantize(loader.raw(name), info.dtype, info.shape)
    return found


@pytest.fixture(scope="module")
def published(goldens: Path) -> dict[str, Array]:
    return floats(goldens / "gpt-oss" / "hf")


def check(path: Path, goldens: Path) -> None:
    golden = np.load(goldens / "gpt-oss" / "golden.npz")
    found = logits_of(path, golden["tokens"].astype(np.int32))[golden["positions"]]
    assert np.abs(found - golden["logits"]).max() < 2e-5 * np.abs(golden["logits"]).max()


def test_experts_in_floats_have_their_inputs_first(goldens: Path, published: dict[str, Array], tmp_path: Path) -> None:
    turned = {n: np.ascontiguousarray(v.swapaxes(1, 2)) if n.endswith("_proj") else v for n, v in published.items()}
    save_file(turned, tmp_path / "model.safetensors")
    config = json.loads((goldens / "gpt-oss" / "hf" / "config.json").read_text())
    config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(tmp_path, goldens)


def test_a_gguf_file(goldens: Path, published: dict[str, Array], tmp_path: Path) -> None:
    """It does not say that the ends of YaRN's ramp are not rounded, nor which layers have a window."""
    tensors = {}
    for name, values in published.items():
        path, _, end = name.removeprefix("model.").rpartition(".")
        block = ""
        if path.startswith("layers."):
            _, number, path = path.split(".", 2)
            block = f"blk.{number}."
        if end.startswith("gate_up_proj"):
            for i, part in enumerate(("gate", "up")):
                kind = "bias" if end.endswith("bias") else "weight"
                tensors[f"{block}ffn_{part}_exps.{kind}"] = values[:, i::2].copy()
        elif f"{path}.{end}" in HF:
            tensors[block + HF[f"{path}.{end}"]] = values
        else:
            names = {"lm_head": "output", "norm": "output_norm", "embed_tokens": "token_embd"}
            tensors[f"{block}{names.get(path) or HF[path]}.{end}"] = values
    sizes = {
        "block_count": 4, "context_length": 1024, "embedding_length": 64, "feed_forward_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32,
        "attention.value_length": 32, "attention.sliding_window": 16, "attention.layer_norm_rms_epsilon": 1e-5,
        "expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 64, "vocab_size": 512,
        "rope.freq_base": 150000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 32,
    }  # fmt: skip
    kinds = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
    metadata = {f"gpt-oss.{name}": (value, [kinds[type(value)]]) for name, value in sizes.items()}
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": ("gpt-oss", []), **metadata}, tensors)
    check(path, goldens)
