"""Checkpoints of the families without a fixture, drawn at random: every transform against its own formula in NumPy.

The expected tensors are written with loops over heads, as the model's equations speak of them; the names on the left
are those of published checkpoints.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from rlx.errors import ConfigError, UnsupportedModelError, WeightError
from rlx.export.hf import open_model
from rlx.export.model import ExportModel

Array = npt.NDArray[np.float32]
VOCAB, HIDDEN, LAYERS = 512, 32, 2
LINEAR = "model.layers.{}.linear_attn."

COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}


class Checkpoint:
    """A folder in the making: tensors drawn when they are named."""

    def __init__(self, folder: Path, tokenizer: Path, config: dict[str, Any]) -> None:
        self.folder, self.config = folder, {**COMMON, **config}
        self.tensors: dict[str, Array] = {}
        self._random = np.random.default_rng(len(config))
        folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer / name, folder / name)

    def draw(self, name: str, *shape: int) -> Array:
        self.tensors[name] = self._random.standard_normal(shape).astype(np.float32)
        return self.tensors[name]

    def base(self, norms: tuple[str, ...], *, attention: bool = True, head_norms: bool = True) -> None:
        """What nearly all have: embeddings, norms, attention."""
        self.draw("model.embed_tokens.weight", VOCAB, HIDDEN)
        self.draw("model.norm.weight", HIDDEN)
        for layer in range(LAYERS):
            at = f"model.layers.{layer}."
            for norm in norms:
                self.draw(f"{at}{norm}.weight", HIDDEN)
            if attention:
                self.attention(at + "self_attn.", 8, 2, head_norms)

    def attention(self, at: str, size: int, kv_heads: int, head_norms: bool, per_query: int = 1) -> None:
        self.draw(f"{at}q_proj.weight", 4 * size * per_query, HIDDEN)
        self.draw(f"{at}k_proj.weight", kv_heads * size, HIDDEN)
        self.draw(f"{at}v_proj.weight", kv_heads * size, HIDDEN)
        self.draw(f"{at}o_proj.weight", HIDDEN, 4 * size)
        for norm in ("q_norm", "k_norm") if head_norms else ():
            self.draw(f"{at}{norm}.weight", size)

    def mlp(self, at: str, width: int) -> None:
        self.draw(f"{at}gate_proj.weight", width, HIDDEN)
        self.draw(f"{at}up_proj.weight", width, HIDDEN)
        self.draw(f"{at}down_proj.weight", HIDDEN, width)

    def open(self) -> ExportModel:
        safetensors.numpy.save_file(self.tensors, self.folder / "model.safetensors")
        (self.folder / "config.json").write_text(json.dumps(self.config))
        return open_model(self.folder)


Make = Callable[[dict[str, Any]], Checkpoint]


@pytest.fixture
def bpe(goldens: Path, tmp_path: Path) -> Make:
    return lambda config: Checkpoint(tmp_path / "model", goldens / "qwen3" / "hf", config)


@pytest.fixture
def sentencepiece(goldens: Path, tmp_path: Path) -> Make:
    return lambda config: Checkpoint(tmp_path / "model", goldens / "gemma3" / "hf", config)


def values(model: ExportModel) -> dict[str, Array]:
    found = {}
    for tensor in model.tensors:
        found[tensor.name] = tensor.values()
        assert found[tensor.name].shape == tensor.shape
    assert model.left_out == ()
    return found


def assert_same(found: dict[str, Array], expected: dict[str, Array]) -> None:
    """All tensors that are expected, bit for bit."""
    for name, array in expected.items():
        assert found[name].shape == array.shape, name
        assert np.array_equal(found[name], array), name


def numbers(model: ExportModel) -> dict[str, Any]:
    prefix = model.arch + "."
    return {key.removeprefix(prefix): value for key, (value, _) in model.metadata.items() if key.startswith(prefix)}


# -- mixtures of experts ----------------------------------------------------------------------------------------------


def experts(checkpoint: Checkpoint, at: str, names: tuple[str, str, str]) -> tuple[Array, Array, Array]:
    """Three experts of width 16, one tensor a matrix -> (gate, up, down) stacked."""
    shapes = ((16, HIDDEN), (16, HIDDEN), (HIDDEN, 16))
    gate, up, down = (
        np.array([checkpoint.draw(f"{at}.{e}.{name}.weight", *shape) for e in range(3)])
        for name, shape in zip(names, shapes, strict=True)
    )
    return gate, up, down


def test_mixtral(bpe: Make) -> None:
    config = {
        "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "tie_word_embeddings": False,
        "intermediate_size": 16,
    }  # fmt: skip
    checkpoint = bpe(config)
    checkpoint.base(("input_layernorm", "post_attention_layernorm"), head_norms=False)
    head = checkpoint.draw("lm_head.weight", VOCAB, HIDDEN)
    expected: dict[str, Array] = {"output.weight": head}
    for layer in range(LAYERS):
        at, to = f"model.layers.{layer}.block_sparse_moe", f"blk.{layer}."
        expected[f"{to}ffn_gate_inp.weight"] = checkpoint.draw(f"{at}.gate.weight", 3, HIDDEN)
        gate, up, down = experts(checkpoint, f"{at}.experts", ("w1", "w3", "w2"))
        expected |= {f"{to}ffn_gate_exps.weight": gate, f"{to}ffn_up_exps.weight": up}
        expected[f"{to}ffn_down_exps.weight"] = down
        query = checkpoint.tensors[f"model.layers.{layer}.self_attn.q_proj.weight"]
        permuted = np.empty_like(query)
        for h in range(4):
            for i in range(4):  # a pair of halves becomes a pair of neighbours
                permuted[8 * h + 2 * i], permuted[8 * h + 2 * i + 1] = query[8 * h + i], query[8 * h + 4 + i]
        expected[f"{to}attn_q.weight"] = permuted
        expected[f"{to}attn_v.weight"] = checkpoint.tensors[f"model.layers.{layer}.self_attn.v_proj.weight"]
    with checkpoint.open() as model:
        assert model.arch == "llama"
        assert_same(values(model), expected)
        keys = numbers(model)
        assert (keys["expert_count"], keys["expert_used_count"], keys["rope.dimension_count"]) == (3, 2, 8)
        assert model.metadata["general.size_label"][0].startswith("3x")


QWEN_NORMS = ("input_layernorm", "post_attention_layernorm")
QWEN_EXPERTS = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("fused", [False, True])
def test_qwen3_moe_with_experts_one_by_one_and_fused(bpe: Make, fused: bool) -> None:
    config = {
        "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    }  # fmt: skip
    checkpoint = bpe(config)
    checkpoint.base(QWEN_NORMS)
    expected: dict[str, Array] = {}
    for layer in range(LAYERS):
        at, to = f"model.layers.{layer}.mlp", f"blk.{layer}."
        expected[f"{to}ffn_gate_inp.weight"] = checkpoint.draw(f"{at}.gate.weight", 3, HIDDEN)
        if fused:
            both = checkpoint.draw(f"{at}.experts.gate_up_proj", 3, 32, HIDDEN)
            gate, up = both[:, :16], both[:, 16:]
            down = checkpoint.draw(f"{at}.experts.down_proj", 3, HIDDEN, 16)
        else:
            gate, up, down = experts(checkpoint, f"{at}.experts", QWEN_EXPERTS)
        expected |= {f"{to}ffn_gate_exps.weight": gate, f"{to}ffn_up_exps.weight": up}
        expected[f"{to}ffn_down_exps.weight"] = down
    with checkpoint.open() as model:
        found = values(model)
        assert_same(found, expected)
        assert not any("gate_up" in name for name in found)
        assert numbers(model)["expert_feed_forward_length"] == 16


def test_weights_of_experts_that_are_not_normalized_are_refused(bpe: Make) -> None:
    checkpoint = bpe({"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": False})
    with pytest.raises(UnsupportedModelError, match="norm_topk_prob"):
        checkpoint.open()


def test_a_missing_expert_is_named(bpe: Make) -> None:
    config = {
        "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    }  # fmt: skip
    checkpoint = bpe(config)
    checkpoint.base(QWEN_NORMS)
    for layer in range(LAYERS):
        checkpoint.draw(f"model.layers.{layer}.mlp.gate.weight", 3, HIDDEN)
        experts(checkpoint, f"model.layers.{layer}.mlp.experts", QWEN_EXPERTS)
    del checkpoint.tensors["model.layers.1.mlp.experts.1.up_proj.weight"]
    with pytest.raises(WeightError, match=r"model\.layers\.1\.mlp\.experts\.1\.up_proj"):
        checkpoint.open()


# -- Qwen 3.5 ---------------------------------------------------------------------------------------------------------

K_HEADS, V_HEADS, STATE = 2, 6, 4
KEYS = 2 * K_HEADS * STATE
QWEN35 = {
    "head_dim": 16, "num_key_value_heads": 1, "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": STATE, "linear_num_key_heads": K_HEADS,
    "linear_num_value_heads": V_HEADS, "linear_value_head_dim": STATE,
    "rope_parameters": {
        "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25, "rope_theta": 1e7, "rope_type": "default",
    },
}  # fmt: skip


def tiled(array: Array, width: int) -> Array:
    """V heads in GGUF's order: head j of the file is the one that used K head j % K_HEADS, in turn."""
    out = np.empty_like(array)
    each = V_HEADS // K_HEADS
    for j in range(V_HEADS):
        source = j % K_HEADS * each + j // K_HEADS
        out[j * width : (j + 1) * width] = array[source * width : (source + 1) * width]
    return out


def qwen35(make: Make, config: dict[str, Any]) -> tuple[Checkpoint, dict[str, Array]]:
    checkpoint = make({**QWEN35, **config})
    checkpoint.base(QWEN_NORMS, attention=False)
    at, to, channels = LINEAR.format(0), "blk.0.", KEYS + V_HEADS * STATE
    qkv = checkpoint.draw(f"{at}in_proj_qkv.weight", channels, HIDDEN)
    conv = checkpoint.draw(f"{at}conv1d.weight", channels, 1, 4)[:, 0]
    out = checkpoint.draw(f"{at}out_proj.weight", HIDDEN, V_HEADS * STATE)
    decay = checkpoint.draw(f"{at}A_log", V_HEADS)
    expected = {
        f"{to}attn_qkv.weight": np.concatenate([qkv[:KEYS], tiled(qkv[KEYS:], STATE)]),
        f"{to}ssm_conv1d.weight": np.concatenate([conv[:KEYS], tiled(conv[KEYS:], STATE)]),
        f"{to}attn_gate.weight": tiled(checkpoint.draw(f"{at}in_proj_z.weight", V_HEADS * STATE, HIDDEN), STATE),
        f"{to}ssm_alpha.weight": tiled(checkpoint.draw(f"{at}in_proj_a.weight", V_HEADS, HIDDEN), 1),
        f"{to}ssm_beta.weight": tiled(checkpoint.draw(f"{at}in_proj_b.weight", V_HEADS, HIDDEN), 1),
        f"{to}ssm_dt.bias": tiled(checkpoint.draw(f"{at}dt_bias", V_HEADS), 1),
        f"{to}ssm_a": np.array([-np.exp(np.float64(a)) for a in tiled(decay, 1)], np.float32),
        f"{to}ssm_norm.weight": checkpoint.draw(f"{at}norm.weight", STATE),
        f"{to}ssm_out.weight": tiled(out.T, STATE).T,
    }
    checkpoint.attention("model.layers.1.self_attn.", 16, 1, True, per_query=2)
    plus_one = {
        "output_norm": "model.norm", "blk.1.attn_q_norm": "model.layers.1.self_attn.q_norm",
        "blk.0.post_attention_norm": "model.layers.0.post_attention_layernorm",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
    }  # fmt: skip
    expected |= {f"{new}.weight": checkpoint.tensors[f"{old}.weight"] + np.float32(1) for new, old in plus_one.items()}
    expected["blk.1.attn_q.weight"] = checkpoint.tensors["model.layers.1.self_attn.q_proj.weight"]
    return checkpoint, expected


@pytest.fixture
def qwen35_tokenizer(bpe: Make) -> Make:
    """The tokenizer with the pattern of Qwen 3.5, whose words have marks in them."""

    def make(config: dict[str, Any]) -> Checkpoint:
        checkpoint = bpe(config)
        file = checkpoint.folder / "tokenizer.json"
        content = json.loads(file.read_text())
        split = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]
        words, other = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+"
        assert words in split["Regex"] and other in split["Regex"]
        pattern = split["Regex"].replace(words, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+")
        split["Regex"] = pattern.replace(other, r" ?[^\s\p{L}\p{M}\p{N}]+")
        file.write_text(json.dumps(content))
        return checkpoint

    return make


def test_qwen35(qwen35_tokenizer: Make) -> None:
    checkpoint, expected = qwen35(qwen35_tokenizer, {"model_type": "qwen3_5_text"})
    for layer in range(LAYERS):
        checkpoint.mlp(f"model.layers.{layer}.mlp.", 48)
    with checkpoint.open() as model:
        assert_same(values(model), expected)
        keys = numbers(model)
        assert keys["attention.recurrent_layers"] == [True, False]
        assert (keys["ssm.state_size"], keys["ssm.inner_size"], keys["ssm.time_step_rank"]) == (4, 24, 6)
        assert (keys["rope.dimension_count"], keys["rope.dimension_sections"]) == (4, [1, 1, 0, 0])
        assert keys["full_attention_interval"] == 4
        assert model.metadata["tokenizer.ggml.pre"][0] == "qwen35"


@pytest.mark.parametrize("fused", [False, True])
def test_qwen35_with_experts(qwen35_tokenizer: Make, fused: bool) -> None:
    config = {
        "model_type": "qwen3_5_moe_text", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    }  # fmt: skip
    checkpoint, expected = qwen35(qwen35_tokenizer, config)
    del checkpoint.config["intermediate_size"]
    for layer in range(LAYERS):
        at, to = f"model.layers.{layer}.mlp.", f"blk.{layer}."
        checkpoint.draw(f"{at}gate.weight", 3, HIDDEN)
        if fused:
            both = checkpoint.draw(f"{at}experts.gate_up_proj", 3, 32, HIDDEN)
            checkpoint.draw(f"{at}experts.down_proj", 3, HIDDEN, 16)
            expected |= {f"{to}ffn_gate_exps.weight": both[:, :16], f"{to}ffn_up_exps.weight": both[:, 16:]}
        else:
            gate, up, down = experts(checkpoint, f"{at}experts", QWEN_EXPERTS)
            expected |= {f"{to}ffn_gate_exps.weight": gate, f"{to}ffn_up_exps.weight": up}
            expected[f"{to}ffn_down_exps.weight"] = down
        checkpoint.mlp(f"{at}shared_expert.", 24)
        expected[f"{to}ffn_gate_shexp.weight"] = checkpoint.tensors[f"{at}shared_expert.gate_proj.weight"]
        expected[f"{to}ffn_gate_inp_shexp.weight"] = checkpoint.draw(f"{at}shared_expert_gate.weight", 1, HIDDEN)
    with checkpoint.open() as model:
        assert_same(values(model), expected)
        keys = numbers(model)
        assert "feed_forward_length" not in keys
        assert keys["expert_shared_feed_forward_length"] == 24


def with_prediction(make: Make) -> tuple[Checkpoint, dict[str, Array]]:
    """A block that predicts a further token behind the two layers."""
    checkpoint, _ = qwen35(make, {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1})
    for layer in range(LAYERS):
        checkpoint.mlp(f"model.layers.{layer}.mlp.", 48)
    expected = {"blk.2.nextn.eh_proj.weight": checkpoint.draw("mtp.fc.weight", HIDDEN, 2 * HIDDEN)}
    checkpoint.attention("mtp.layers.0.self_attn.", 16, 1, True, per_query=2)
    checkpoint.mlp("mtp.layers.0.mlp.", 48)
    for new, old in (
        ("nextn.enorm", "pre_fc_norm_embedding"), ("nextn.hnorm", "pre_fc_norm_hidden"),
        ("nextn.shared_head_norm", "norm"), ("attn_norm", "layers.0.input_layernorm"),
        ("post_attention_norm", "layers.0.post_attention_layernorm"),
    ):  # fmt: skip
        expected[f"blk.2.{new}.weight"] = checkpoint.draw(f"mtp.{old}.weight", HIDDEN) + np.float32(1)
    for new, old in (("attn_q", "self_attn.q_proj"), ("ffn_down", "mlp.down_proj")):
        expected[f"blk.2.{new}.weight"] = checkpoint.tensors[f"mtp.layers.0.{old}.weight"]
    return checkpoint, expected


def test_a_block_that_predicts_comes_behind_the_layers(qwen35_tokenizer: Make) -> None:
    checkpoint, expected = with_prediction(qwen35_tokenizer)
    with checkpoint.open() as model:
        assert_same(values(model), expected)
        keys = numbers(model)
        assert (keys["block_count"], keys["nextn_predict_layers"]) == (3, 1)
        assert keys["attention.recurrent_layers"] == [True, False, False]


def test_a_block_that_predicts_is_whole_or_an_error(qwen35_tokenizer: Make) -> None:
    checkpoint, _ = with_prediction(qwen35_tokenizer)
    del checkpoint.tensors["mtp.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(WeightError, match=r"blk\.2\.attn_k\.weight"):
        checkpoint.open()


def test_several_blocks_that_predict_are_left_out_and_said(qwen35_tokenizer: Make) -> None:
    checkpoint, _ = with_prediction(qwen35_tokenizer)
    for name in [name for name in checkpoint.tensors if name.startswith("mtp.layers.0.")]:
        checkpoint.tensors[name.replace("layers.0", "layers.1")] = checkpoint.tensors[name]
    with checkpoint.open() as model:
        keys = numbers(model)
        assert (keys["block_count"], "nextn_predict_layers" in keys) == (2, False)
        assert sorted(model.left_out) == sorted(name for name in checkpoint.tensors if name.startswith("mtp."))


# -- Gemma 3n and 4 ---------------------------------------------------------------------------------------------------

SANDWICH = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip


def per_layer_inputs(checkpoint: Checkpoint, rows: int = VOCAB) -> Iterator[tuple[str, Array]]:
    """(GGUF name, tensor) of what gives each layer an embedding of its own, of width 8."""
    draw = checkpoint.draw
    yield "per_layer_token_embd", draw("model.embed_tokens_per_layer.weight", rows, 8 * LAYERS)
    yield "per_layer_model_proj", draw("model.per_layer_model_projection.weight", 8 * LAYERS, HIDDEN)
    yield "per_layer_proj_norm", draw("model.per_layer_projection_norm.weight", 8)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        yield f"blk.{layer}.inp_gate", draw(f"{at}per_layer_input_gate.weight", 8, HIDDEN)
        yield f"blk.{layer}.proj", draw(f"{at}per_layer_projection.weight", HIDDEN, 8)
        yield f"blk.{layer}.post_norm", draw(f"{at}post_per_layer_input_norm.weight", HIDDEN)


GEMMA3N = {
    "model_type": "gemma3n_text", "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB - 16,
    "intermediate_size": [48] * LAYERS, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16,
    "activation_sparsity_pattern": [0.95, 0.0], "altup_num_inputs": 3, "num_kv_shared_layers": 1,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "final_logit_softcapping": 30.0,
}  # fmt: skip
ALTUP = {
    "altup_correct_coef": ("altup.correction_coefs.weight", (3, 3)),
    "altup_correct_scale": ("altup.correct_output_scale", (HIDDEN,)),
    "altup_predict_coef": ("altup.prediction_coefs.weight", (9, 3)),
    "altup_router": ("altup.modality_router.weight", (3, HIDDEN)),
    "altup_router_norm": ("altup.router_norm.weight", (HIDDEN,)),
    "laurel_l": ("laurel.linear_left.weight", (8, HIDDEN)),
    "laurel_r": ("laurel.linear_right.weight", (HIDDEN, 8)),
    "laurel_post_norm": ("laurel.post_laurel_norm.weight", (HIDDEN,)),
}


def test_gemma3n(sentencepiece: Make) -> None:
    checkpoint = sentencepiece(GEMMA3N)
    checkpoint.base(SANDWICH)
    expected = {f"{name}.weight": array for name, array in per_layer_inputs(checkpoint, VOCAB - 16)}
    padded = np.zeros((VOCAB, 8 * LAYERS), np.float32)  # tokens of images and sound have no embedding of their own
    padded[: VOCAB - 16] = expected["per_layer_token_embd.weight"]
    expected["per_layer_token_embd.weight"] = padded
    for gguf_name, name in (("altup_proj", "altup_projections"), ("altup_unembd_proj", "altup_unembed_projections")):
        parts = [checkpoint.draw(f"model.{name}.{i}.weight", HIDDEN, HIDDEN) for i in range(2)]
        expected[f"{gguf_name}.weight"] = np.array(parts)
    for layer in range(LAYERS):
        checkpoint.mlp(f"model.layers.{layer}.mlp.", 48)
        for name, (hf, shape) in ALTUP.items():
            expected[f"blk.{layer}.{name}.weight"] = checkpoint.draw(f"model.layers.{layer}.{hf}", *shape)
    for name in ("k_proj", "v_proj", "k_norm"):  # the last layer reads the keys and values of another
        del checkpoint.tensors[f"model.layers.1.self_attn.{name}.weight"]
    expected["blk.0.attn_norm.weight"] = checkpoint.tensors["model.layers.0.input_layernorm.weight"]
    expected["blk.0.ffn_norm.weight"] = checkpoint.tensors["model.layers.0.pre_feedforward_layernorm.weight"]
    with checkpoint.open() as model:
        found = values(model)
        assert_same(found, expected)
        assert "blk.1.attn_k.weight" not in found
        keys = numbers(model)
        assert keys["activation_sparsity_scale"] == [pytest.approx(1.6448536), float("-inf")]
        assert keys["attention.sliding_window_pattern"] == [True, False]
        assert (keys["rope.freq_base"], keys["rope.freq_base_swa"]) == (1e6, 1e4)
        assert (keys["altup.num_inputs"], keys["attention.shared_kv_layers"]) == (3, 1)


GEMMA4 = {
    "model_type": "gemma4_text", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16,
    "global_head_dim": 16, "final_logit_softcapping": 30.0, "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}  # fmt: skip


def gemma4(make: Make, config: dict[str, Any], kv_heads: int) -> tuple[Checkpoint, dict[str, Array]]:
    checkpoint = make({**GEMMA4, **config})
    checkpoint.base(SANDWICH, attention=False)
    checkpoint.attention("model.layers.0.self_attn.", 8, 2, True)
    checkpoint.attention("model.layers.1.self_attn.", 16, kv_heads, True)
    expected = {"rope_freqs.weight": np.array([1, 1, *[1e30] * 6], np.float32)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.layer_scalar"
        expected[f"blk.{layer}.layer_output_scale.weight"] = checkpoint.draw(name, 1)
    expected["output_norm.weight"] = checkpoint.tensors["model.norm.weight"]
    return checkpoint, expected


def test_gemma4_with_experts_and_values_that_are_keys(sentencepiece: Make) -> None:
    config = {
        "num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 16, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    }  # fmt: skip
    checkpoint, expected = gemma4(sentencepiece, config, 1)
    del checkpoint.tensors["model.layers.1.self_attn.v_proj.weight"]
    for layer in range(LAYERS):
        at, to = f"model.layers.{layer}.", f"blk.{layer}."
        checkpoint.mlp(f"{at}mlp.", 48)
        for name, hf, shape in (
            ("ffn_gate_inp.weight", "router.proj.weight", (3, HIDDEN)),
            ("ffn_gate_inp.scale", "router.scale", (HIDDEN,)),
            ("ffn_down_exps.scale", "router.per_expert_scale", (3,)),
            ("ffn_gate_up_exps.weight", "experts.gate_up_proj", (3, 32, HIDDEN)),
            ("ffn_down_exps.weight", "experts.down_proj", (3, HIDDEN, 16)),
            ("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight", (HIDDEN,)),
            ("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight", (HIDDEN,)),
            ("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight", (HIDDEN,)),
        ):  # fmt: skip
            expected[to + name] = checkpoint.draw(at + hf, *shape)
    with checkpoint.open() as model:
        found, keys = values(model), numbers(model)
        assert_same(found, expected)
        assert "blk.1.attn_v.weight" not in found
        assert keys["attention.head_count_kv"] == [2, 1]
        assert (keys["attention.key_length"], keys["attention.key_length_swa"]) == (16, 8)
        assert (keys["expert_count"], keys["expert_used_count"], keys["expert_feed_forward_length"]) == (3, 2, 16)
        assert model.metadata["tokenizer.ggml.model"][0] == "gemma4"
        assert "tokenizer.ggml.pre" not in model.metadata


def test_gemma4_with_inputs_of_every_layer_and_shared_keys(sentencepiece: Make) -> None:
    config = {
        "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1, "use_double_wide_mlp": True,
        "per_layer_config": {"1": {"head_dim": 16}},
    }  # fmt: skip
    checkpoint, expected = gemma4(sentencepiece, config, 2)
    del checkpoint.config["global_head_dim"]
    for name in ("k_proj", "v_proj", "k_norm"):
        del checkpoint.tensors[f"model.layers.1.self_attn.{name}.weight"]
    expected |= {f"{name}.weight": array for name, array in per_layer_inputs(checkpoint)}
    for layer, width in enumerate((48, 96)):
        checkpoint.mlp(f"model.layers.{layer}.mlp.", width)
    with checkpoint.open() as model:
        found, keys = values(model), numbers(model)
        assert_same(found, expected)
        assert keys["feed_forward_length"] == [48, 96]
        assert keys["attention.head_count_kv"] == 2
        assert (keys["attention.shared_kv_layers"], keys["embedding_length_per_layer_input"]) == (1, 8)
        assert (keys["rope.dimension_count"], keys["rope.dimension_count_swa"]) == (16, 8)


# -- what GGUF has no words for, and what comes along -----------------------------------------------------------------


def qwen3(make: Make, config: dict[str, Any]) -> Checkpoint:
    checkpoint = make({"model_type": "qwen3", **config})
    checkpoint.base(QWEN_NORMS)
    for layer in range(LAYERS):
        checkpoint.mlp(f"model.layers.{layer}.mlp.", 48)
    return checkpoint


def test_a_model_within_another_is_converted_and_the_rest_said(bpe: Make) -> None:
    checkpoint = qwen3(bpe, {})
    text = checkpoint.config
    checkpoint.config = {"model_type": "some_vision_model", "text_config": text, "vision_config": {"hidden_size": 4}}
    checkpoint.tensors = {f"language_model.{name}": array for name, array in checkpoint.tensors.items()}
    checkpoint.draw("vision_tower.layers.0.fc1.weight", 4, 4)
    with checkpoint.open() as model:
        assert model.arch == "qwen3"
        assert model.left_out == ("vision_tower.layers.0.fc1.weight",)
        assert len(model.tensors) == 2 + 11 * LAYERS


def test_yarn(bpe: Make) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 24.0}
    with qwen3(bpe, {"rope_scaling": scaling}).open() as model:
        keys = numbers(model)
    assert (keys["rope.scaling.type"], keys["rope.scaling.factor"]) == ("yarn", 4.0)
    assert (keys["rope.scaling.original_context_length"], keys["rope.scaling.yarn_beta_fast"]) == (64, 24.0)
    assert "rope.scaling.attn_factor" not in keys


@pytest.mark.parametrize(
    ("own", "scale"),
    [({"attention_factor": 1.3}, 1.3), ({"mscale": 1.0, "mscale_all_dim": 0.5}, (log(4) + 10) / (log(4) / 2 + 10))],
)
def test_readers_compute_the_scale_of_yarn(bpe: Make, own: dict[str, float], scale: float) -> None:
    """It is 1 + 0.1 ln(factor) for them, times what the file says."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **own}
    with qwen3(bpe, {"rope_scaling": scaling}).open() as model:
        found = numbers(model)["rope.scaling.attn_factor"]
    assert found * (1 + 0.1 * log(4)) == pytest.approx(scale)


def test_linear_scaling_of_the_pairs_that_turn(sentencepiece: Make) -> None:
    ropes: dict[str, Any] = GEMMA4["rope_parameters"]
    full = {**ropes["full_attention"], "factor": 8.0}
    checkpoint, expected = gemma4(sentencepiece, {"rope_parameters": {**ropes, "full_attention": full}}, 2)
    expected["rope_freqs.weight"] = np.array([8, 8, *[1e30] * 6], np.float32)
    for layer in range(LAYERS):
        checkpoint.mlp(f"model.layers.{layer}.mlp.", 48)
    with checkpoint.open() as model:
        assert_same(values(model), expected)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "llama3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding_window"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_gguf_cannot_say_is_refused(bpe: Make, config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        qwen3(bpe, config).open()


@pytest.mark.parametrize("model_type", [[], {}, 3])
def test_a_model_type_that_is_no_text_is_named(bpe: Make, model_type: Any) -> None:
    with pytest.raises(ConfigError, match=r"'model_type' is .*, expected a string"):
        qwen3(bpe, {"model_type": model_type}).open()


def test_a_scale_that_readers_would_not_compute_is_refused(sentencepiece: Make) -> None:
    config = {"model_type": "gemma3_text", "query_pre_attn_scalar": 100, "sliding_window": 16}
    with pytest.raises(UnsupportedModelError, match="query_pre_attn_scalar"):
        sentencepiece(config).open()


def test_scaling_of_the_rope_of_windows_is_refused(sentencepiece: Make) -> None:
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    ropes = {"full_attention": {"rope_type": "default"}, "sliding_attention": scaled}
    with pytest.raises(UnsupportedModelError, match=r"sliding_attention\.rope_type' is 'linear'"):
        sentencepiece({"model_type": "gemma3_text", "rope_parameters": ropes}).open()


def test_streams_that_readers_would_scale_are_refused(sentencepiece: Make) -> None:
    config = {"model_type": "gemma3n_text", "layer_types": ["full_attention"] * LAYERS, "altup_correct_scale": False}
    with pytest.raises(UnsupportedModelError, match="altup_correct_scale"):
        sentencepiece(config).open()


def test_a_tensor_of_a_layer_that_nobody_knows_is_refused(bpe: Make) -> None:
    checkpoint = qwen3(bpe, {})
    checkpoint.draw("model.layers.0.self_attn.sinks", 4)
    with pytest.raises(UnsupportedModelError, match=r"self_attn\.sinks"):
        checkpoint.open()


def test_heads_that_do_not_fit_are_named(bpe: Make) -> None:
    checkpoint = bpe({"model_type": "llama", "num_attention_heads": 3})
    checkpoint.base(QWEN_NORMS, head_norms=False)
    for layer in range(LAYERS):
        checkpoint.mlp(f"model.layers.{layer}.mlp.", 48)
    with checkpoint.open() as model:
        query = next(tensor for tensor in model.tensors if tensor.name == "blk.1.attn_q.weight")
        with pytest.raises(WeightError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight: .*\[32, 32\].*heads"):
            query.values()


def test_a_layer_beyond_the_last_is_refused(bpe: Make) -> None:
    checkpoint = qwen3(bpe, {})
    checkpoint.draw("model.layers.2.input_layernorm.weight", HIDDEN)
    with pytest.raises(UnsupportedModelError, match="num_hidden_layers"):
        checkpoint.open()


def test_a_vocabulary_of_another_size_than_the_table_is_refused(bpe: Make) -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        qwen3(bpe, {"vocab_size": VOCAB + 8}).open()
