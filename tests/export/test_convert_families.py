"""Checkpoints of every model type, converted: the file computes what the checkpoint does; and what GGUF cannot say.

The readers of both kinds of file are held by the goldens, whose GGUF files the reference converter wrote.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import rlx
from rlx.errors import ConfigError, UnsupportedModelError, WeightError
from rlx.export.convert import convert
from rlx.export.hf import open_model
from rlx.export.hf_config import TextConfig, metadata_from_config
from rlx.export.model import ExportModel
from rlx.ir.stored import dequantize
from rlx.models import from_gguf, from_hf
from rlx.weights import open_weights
from tests.models.golden_files import logits_of
from tests.models.random_checkpoints import FULL, LINEAR, MODEL_TYPES, SLIDING, Config, checkpoint

VOCAB = 512
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
YARN = {**DEFAULT, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES_GEMMA4 = {
    FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"}, SLIDING: DEFAULT,
}  # fmt: skip
COMMON: Config = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rope_parameters": DEFAULT,
}  # fmt: skip
SHARED: Config = {
    "num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL], "num_kv_shared_layers": 2,
}  # fmt: skip
HYBRID: Config = {
    "layer_types": [LINEAR, FULL], "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "rope_parameters": {
        **DEFAULT, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
    },
}  # fmt: skip
#: What makes a drawn configuration one that GGUF can say.
OWN: dict[str, Config] = {
    "llama": {"rope_parameters": {**DEFAULT, "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None, "num_local_experts": 3},
    "qwen2": {"sliding_window": None, "use_sliding_window": False, "layer_types": [FULL] * 2, "rope_parameters": YARN},
    "qwen3": {"sliding_window": None, "use_sliding_window": False, "layer_types": [FULL] * 2},
    "qwen3_moe": {"sliding_window": None, "use_sliding_window": False, "mlp_only_layers": [], "norm_topk_prob": True},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID,
    "gemma2": {"layer_types": [SLIDING, FULL], "query_pre_attn_scalar": 16},
    "gemma3_text": {"layer_types": [SLIDING, FULL], "query_pre_attn_scalar": 16,
                    "rope_parameters": {FULL: {**DEFAULT, "rope_type": "linear", "factor": 8.0}, SLIDING: DEFAULT}},
    "gemma3n_text": {**SHARED, "altup_correct_scale": True, "activation_sparsity_pattern": [0.95, 0.0, 0.5, 0.0],
                     "vocab_size_per_layer_input": VOCAB - 16, "rope_parameters": {FULL: DEFAULT, SLIDING: DEFAULT}},
    "gemma4_text": {**SHARED, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB,
                    "use_double_wide_mlp": True, "attention_k_eq_v": False, "num_global_key_value_heads": None,
                    "enable_moe_block": False, "num_experts": None, "rope_parameters": ROPES_GEMMA4},
    "gemma4_unified_text": {"layer_types": [SLIDING, FULL], "num_kv_shared_layers": 0, "rope_parameters": ROPES_GEMMA4},
}  # fmt: skip
GEMMA4_EXPERTS: Config = {
    "num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 3,
    "top_k_experts": 2, "moe_intermediate_size": 16,
}  # fmt: skip


Tensors = dict[str, np.ndarray]
Make = Callable[..., Path]


@pytest.fixture
def made(goldens: Path, tmp_path: Path) -> Make:
    """A function that writes a checkpoint with a tokenizer after `edit` changed its tensors."""

    def make(model_type: str, edit: Callable[[Tensors], object] | None = None, **changes: Any) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        checkpoint(folder, model_type, 1, **{**COMMON, **OWN.get(model_type, {}), **changes})
        family = "gemma3" if "gemma" in model_type else "qwen35" if "qwen3_5" in model_type else "qwen3"
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(goldens / family / "hf" / name, folder / name)
        if edit:
            tensors = safetensors.numpy.load_file(folder / "model.safetensors")
            edit(tensors)
            safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def say(folder: Path, **changes: Any) -> None:
    """Changes what the configuration says of the tensors that are there; None leaves a key out."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    gone = {key for key, value in changes.items() if value is None}
    file.write_text(json.dumps({key: value for key, value in config.items() if key not in gone}))


def numbers(model: ExportModel) -> dict[str, Any]:
    prefix = model.arch + "."
    return {key.removeprefix(prefix): value for key, (value, _) in model.metadata.items() if key.startswith(prefix)}


def keys_of(folder: Path) -> dict[str, Any]:
    with open_model(folder) as model:
        assert model.left_out == ()
        return numbers(model)


def assert_the_file_computes_the_same(folder: Path) -> None:
    tokens = np.random.default_rng(3).integers(0, VOCAB - 16, 27).astype(np.int32)
    done = convert(folder, folder.with_suffix(".gguf"), "F32")
    expected = logits_of(folder, tokens)
    np.testing.assert_allclose(logits_of(done.path, tokens), expected, rtol=0, atol=2e-6 * np.abs(expected).max())


# -- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_file_computes_what_its_checkpoint_does(made: Make, model_type: str) -> None:
    assert_the_file_computes_the_same(made(model_type))


FIXTURES = (
    *("ernie4.5", "exaone4-swa", "glm4", "glm4-moe", "granite", "granitemoe-shared"),
    *("qwen2moe", "olmoe", "minimax-m2", "dots1", "ernie4.5-moe", "seed-oss", "arcee", "hunyuan", "hunyuan-moe"),
    *("command-r", "cohere2", "starcoder2", "stablelm", "nemotron", "ling2", "mistral4", "exaone3.5"),
    *("lfm2", "ministral3", "olmo3", "phi3", "smollm3"),
    *("qwen3next", "deepseek-v2", "deepseek-v3", "granite-hybrid", "nemotron-h"),
)


@pytest.mark.parametrize("family", FIXTURES)
def test_a_file_computes_what_a_golden_checkpoint_does(goldens: Path, tmp_path: Path, family: str) -> None:
    (tmp_path / "hf").symlink_to(goldens / family / "hf", target_is_directory=True)
    assert_the_file_computes_the_same(tmp_path / "hf")


@pytest.mark.parametrize("family", ["bert", "modernbert", "embeddinggemma", "qwen3-embedding"])
def test_a_file_of_an_encoder_makes_the_vectors_of_its_checkpoint(goldens: Path, tmp_path: Path, family: str) -> None:
    done = convert(goldens / family / "hf", tmp_path / "model.gguf", "F32")
    golden = np.load(goldens / family / "golden.npz")
    texts = [str(golden["prefix"]) + text for text in json.loads(str(golden["texts"]))]
    with rlx.auto_runner(done.path, precision="exact") as runner:
        for i, text in enumerate(texts):
            assert runner.tokenizer.encode(text) == golden[f"ids_{i}"].tolist()
        assert np.abs(runner.embed(texts) - golden["embeddings"]).max() < 2e-5


def test_experts_of_gpt_oss_stay_in_mxfp4(goldens: Path, tmp_path: Path) -> None:
    done = convert(goldens / "gpt-oss" / "hf", tmp_path / "model.gguf", "F16")
    kinds = {name: str(dtype) for name, _, dtype in done.tensors}
    assert kinds["blk.1.ffn_gate_exps.weight"] == kinds["blk.1.ffn_down_exps.weight"] == done.type.lower() == "mxfp4"
    assert kinds["blk.1.ffn_gate_exps.bias"] == "f32" and kinds["blk.1.attn_q.weight"] == "f16"
    golden = np.load(goldens / "gpt-oss" / "golden.npz")
    with rlx.auto_runner(done.path, precision="exact", max_seq=64) as runner:
        found = runner.predict_logits(golden["tokens"].tolist())
    assert np.abs(found - golden["logits"][-1]).max() < 2e-4 * np.abs(golden["logits"]).max()


def test_a_reranker_of_qwen_3_keeps_the_rows_of_its_answers(goldens: Path, tmp_path: Path) -> None:
    """Its name says what it is."""
    folder = tmp_path / "Qwen3-Reranker-Tiny"
    shutil.copytree(goldens / "qwen3-embedding" / "hf", folder)
    (folder / "modules.json").unlink()
    fast = json.loads((folder / "tokenizer.json").read_text())
    ids = [fast["model"]["vocab"][word] for word in ("yes", "no")]
    with open_model(folder) as model:
        found = {tensor.name: tensor for tensor in model.tensors}
        assert (numbers(model)["pooling_type"], "output.weight" in found) == (4, False)
        assert "{document}" in model.metadata["tokenizer.chat_template.rerank"][0]
        head = found["cls.output.weight"].values()
    with open_weights(folder) as loader:
        name = next(name for name in ("lm_head.weight", "embed_tokens.weight") if name in loader.tensors)
        info = loader.tensors[name]
        stored = dequantize(loader.raw(name), info.dtype, info.shape)
    np.testing.assert_array_equal(head, stored[ids])


def test_what_gguf_lacks_of_encoders(goldens: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no place for the pooler of a cross-encoder"):
        open_model(goldens / "bert-reranker" / "hf")
    folder = tmp_path / "modernbert"
    shutil.copytree(goldens / "modernbert" / "hf", folder)
    say(folder, layer_types=[FULL] * 4)
    with pytest.raises(UnsupportedModelError, match="not all but every 3rd one"):
        open_model(folder)
    say(folder, layer_types=None, classifier_activation="relu")
    with pytest.raises(UnsupportedModelError, match="classifier_activation"):
        open_model(folder)


@pytest.mark.parametrize(("family", "changes", "named"), [
    ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
    ("gpt-oss", {"layer_types": [FULL] * 4}, "layer_types"),
    ("granite-hybrid", {"time_step_limit": [0.01, 0.5]}, "time_step_limit"),
    ("ministral3", {"sliding_window": 7}, "sliding_window"),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 0, 0]}, "no_rope_layers"),
])  # fmt: skip
def test_settings_of_newer_families_that_gguf_lacks(
    goldens: Path, tmp_path: Path, family: str, changes: Config, named: str
) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(goldens / family / "hf", folder)
    say(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=named):
        open_model(folder)


def test_hybrids_without_recurrent_layers(goldens: Path, tmp_path: Path) -> None:
    """Granite has no rope all the same, and of Nemotron-H each layer says what it has."""
    own: tuple[tuple[str, Config], ...] = (
        ("granite-hybrid", {"layer_types": [FULL] * 2}),
        ("nemotron-h", {"layers_block_type": [FULL, "mlp"], "tie_word_embeddings": True}),
        ("nemotron-h", {"layers_block_type": ["mamba", "moe", FULL, "mlp"]}),
    )
    for number, (family, types) in enumerate(own):
        folder = tmp_path / str(number)
        shutil.copytree(goldens / family / "hf", folder)
        say(folder, **types)
        config = from_hf(json.loads((folder / "config.json").read_text()))
        found = TextConfig(json.loads((folder / "config.json").read_text()), folder)
        keys = {key: value for key, (value, _) in metadata_from_config(found).items()}
        keys |= {"general.architecture": found.file_arch}
        read = from_gguf(keys, lambda name: name != "rope_freqs.weight" and "nextn" not in name)
        assert [(layer.has_rope, layer.recurrent, layer.kv_heads) for layer in read.each] == [
            (layer.has_rope, layer.recurrent, layer.kv_heads) for layer in config.each
        ]


def test_blocks_of_glm_that_predict_are_left_out_and_said(goldens: Path) -> None:
    with open_model(goldens / "glm4-moe" / "hf") as model:
        assert numbers(model)["block_count"] == 3 and model.left_out
        assert all(name.startswith("model.layers.3.") for name in model.left_out)


def test_gemma4_with_experts_and_values_that_are_keys(made: Make) -> None:
    folder = made("gemma4_text", **GEMMA4_EXPERTS)
    assert_the_file_computes_the_same(folder)
    with open_model(folder) as model:
        assert model.metadata["tokenizer.ggml.model"][0] == "gemma4"
        assert "tokenizer.ggml.pre" not in model.metadata


def fuse(tensors: Tensors) -> None:
    """Experts that stand one by one, as the stacks of newer checkpoints."""
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts."
        count = sum(name.startswith(at) for name in tensors) // 3
        parts = {p: [tensors.pop(f"{at}{e}.{p}_proj.weight") for e in range(count)] for p in ("gate", "up", "down")}
        tensors[f"{at}gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        tensors[f"{at}down_proj"] = np.array(parts["down"])


def split(tensors: Tensors) -> None:
    """The opposite."""
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts."
        both, down = tensors.pop(f"{at}gate_up_proj"), tensors.pop(f"{at}down_proj")
        for e, (gate, up) in enumerate(np.split(each, 2) for each in both):
            for part, values in (("gate", gate), ("up", up), ("down", down[e])):
                tensors[f"{at}{e}.{part}_proj.weight"] = np.ascontiguousarray(values)


@pytest.mark.parametrize(("model_type", "edit"), [("qwen3_moe", fuse), ("qwen3_5_moe_text", split)])
def test_experts_in_the_other_form(made: Make, model_type: str, edit: Callable[[Tensors], None]) -> None:
    assert_the_file_computes_the_same(made(model_type, edit))


@pytest.mark.parametrize(("model_type", "changes", "expected"), [
    ("mixtral", {}, {"expert_count": 3, "expert_used_count": 2, "rope.dimension_count": 16}),
    ("qwen2", {"rope_parameters": {**YARN, "beta_fast": 24.0}}, {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 24.0, "rope.scaling.attn_factor": None,
    }),
    ("qwen3_5_text", {}, {
        "attention.recurrent_layers": [True, False], "ssm.state_size": 16, "ssm.inner_size": 96,
        "ssm.time_step_rank": 6, "rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0],
        "full_attention_interval": 4,
    }),
    ("qwen3_5_moe_text", {"moe_intermediate_size": 16}, {
        "expert_feed_forward_length": 16, "expert_shared_feed_forward_length": 24,
    }),
    ("gemma3n_text", {"altup_num_inputs": 3}, {
        "activation_sparsity_scale": pytest.approx([1.6448536, float("-inf"), 0.0, float("-inf")], abs=1e-6),
        "attention.sliding_window_pattern": [True, False, True, False], "altup.num_inputs": 3,
        "attention.shared_kv_layers": 2, "rope.freq_base": 10_000.0, "rope.freq_base_swa": 10_000.0,
    }),
    ("gemma4_text", {"intermediate_size": 40, "head_dim": 8, "global_head_dim": 16}, {
        "feed_forward_length": [40, 40, 80, 80], "attention.head_count_kv": 2, "attention.shared_kv_layers": 2,
        "embedding_length_per_layer_input": 16, "rope.dimension_count": 16, "rope.dimension_count_swa": 8,
    }),
    ("gemma4_text", {**GEMMA4_EXPERTS, "head_dim": 8, "global_head_dim": 16}, {
        "attention.head_count_kv": [2, 1], "attention.key_length": 16, "attention.key_length_swa": 8,
        "expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 16,
    }),
])  # fmt: skip
def test_keys(made: Make, model_type: str, changes: Config, expected: Config) -> None:
    keys = keys_of(made(model_type, **changes))
    assert {name: keys.get(name) for name in expected} == expected


def test_widths_of_feed_forwards(made: Make) -> None:
    """One for all layers, in whichever form the checkpoint says it."""
    folder = made("gemma3n_text", intermediate_size=48)
    assert keys_of(folder)["feed_forward_length"] == 48
    say(folder, intermediate_size=[48] * 4)
    assert keys_of(folder)["feed_forward_length"] == 48


def test_a_model_within_another_is_converted_and_the_rest_said(made: Make) -> None:
    def nest(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_tower.layers.0.fc1.weight"] = np.zeros((4, 4), np.float32)

    folder = made("qwen3", nest)
    config = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "some_vision_model", "text_config": config, "vision_config": {"hidden_size": 4}}
    (folder / "config.json").write_text(json.dumps(outer))
    with open_model(folder) as model:
        assert (model.arch, model.left_out) == ("qwen3", ("vision_tower.layers.0.fc1.weight",))


# -- a block that predicts --------------------------------------------------------------------------------------------


def predict(blocks: int, left_out: str = "") -> Callable[[Tensors], None]:
    """Adds blocks that are the last layer once more."""

    def edit(tensors: Tensors) -> None:
        hidden, rng = tensors["model.norm.weight"].size, np.random.default_rng(0)
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            for block in range(blocks):
                tensors[name.replace("model.layers.1.", f"mtp.layers.{block}.")] = tensors[name]
        tensors["mtp.fc.weight"] = rng.standard_normal((hidden, 2 * hidden)).astype(np.float32)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            tensors[f"mtp.{name}.weight"] = rng.standard_normal(hidden).astype(np.float32)
        tensors.pop(left_out, None)

    return edit


def test_a_block_that_predicts_comes_behind_the_layers(made: Make) -> None:
    folder = made("qwen3_5_text", predict(1), mtp_num_hidden_layers=1)
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    with open_model(folder) as model:
        found = {tensor.name: tensor.values() for tensor in model.tensors}
        keys = numbers(model)
    assert (keys["block_count"], keys["nextn_predict_layers"]) == (3, 1)
    assert keys["attention.recurrent_layers"] == [True, False, False]
    for new, old, offset in (
        ("nextn.eh_proj", "fc", 0), ("nextn.enorm", "pre_fc_norm_embedding", 1),
        ("nextn.hnorm", "pre_fc_norm_hidden", 1), ("nextn.shared_head_norm", "norm", 1),
        ("attn_norm", "layers.0.input_layernorm", 1), ("attn_q", "layers.0.self_attn.q_proj", 0),
        ("post_attention_norm", "layers.0.post_attention_layernorm", 1), ("ffn_down", "layers.0.mlp.down_proj", 0),
    ):  # fmt: skip
        np.testing.assert_array_equal(found[f"blk.2.{new}.weight"], stored[f"mtp.{old}.weight"] + np.float32(offset))


# -- ropes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "scale"),
    [({"attention_factor": 1.3}, 1.3), ({"mscale": 1.0, "mscale_all_dim": 0.5}, (log(4) + 10) / (log(4) / 2 + 10))],
)
def test_readers_compute_the_scale_of_yarn(made: Make, own: Config, scale: float) -> None:
    """It is 1 + 0.1 ln(factor) for them, times what the file says."""
    found = keys_of(made("qwen3", rope_parameters={**YARN, **own}))["rope.scaling.attn_factor"]
    assert found * (1 + 0.1 * log(4)) == pytest.approx(scale)


# -- what GGUF has no words for ---------------------------------------------------------------------------------------

SCALED = {"full_attention": DEFAULT, "sliding_attention": {**DEFAULT, "rope_type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(("model_type", "changes", "error", "named"), [
    ("qwen3", {"model_type": "mamba"}, UnsupportedModelError, "mamba"),
    ("qwen3", {"rope_parameters": {**YARN, "rope_type": "dynamic"}}, UnsupportedModelError, "dynamic"),
    ("qwen3", {"rope_parameters": {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
     UnsupportedModelError, "llama3"),
    ("qwen3", {"rope_parameters": {**YARN, "truncate": False}}, UnsupportedModelError, "truncate"),
    ("qwen3", {"hidden_act": "relu"}, UnsupportedModelError, "hidden_act"),
    ("qwen3", {"rope_parameters": {**YARN, "rope_type": "longrope", "long_factor": [2] * 8, "short_factor": [1] * 8}},
     UnsupportedModelError, "longrope"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 32, "layer_types": [FULL, "sliding_attention"]},
     UnsupportedModelError, "sliding_window"),
    ("qwen3", {"use_bidirectional_attention": True}, UnsupportedModelError, "use_bidirectional_attention"),
    ("qwen3", {"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor"),
    ("qwen3", {"vocab_size": VOCAB + 8}, WeightError, "embed_tokens.weight: expected shape"),
    ("qwen3_moe", {"norm_topk_prob": False}, UnsupportedModelError, "norm_topk_prob"),
    ("gemma3_text", {"query_pre_attn_scalar": 100}, UnsupportedModelError, "query_pre_attn_scalar"),
    ("gemma3_text", {"rope_parameters": SCALED}, UnsupportedModelError, r"sliding_attention\.rope_type' is 'linear'"),
    ("gemma3n_text", {"altup_correct_scale": False}, UnsupportedModelError, "altup_correct_scale"),
    *(("qwen3", {"model_type": wrong}, ConfigError, r"'model_type' is .*, expected a string") for wrong in ([], {}, 3)),
])  # fmt: skip
def test_what_gguf_cannot_say_is_refused(
    made: Make, model_type: str, changes: Config, error: type[Exception], named: str
) -> None:
    folder = made(model_type)
    say(folder, **changes)
    with pytest.raises(error, match=named):
        open_model(folder)


@pytest.mark.parametrize(("model_type", "edit", "error", "named"), [
    ("qwen3_moe", lambda tensors: tensors.pop("model.layers.1.mlp.experts.1.up_proj.weight"),
     WeightError, r"model\.layers\.1\.mlp\.experts\.1\.up_proj"),
    ("qwen3", lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": np.zeros(4, np.float32)}),
     UnsupportedModelError, r"self_attn\.sinks"),
    ("qwen3", lambda tensors: tensors.update({"model.layers.2.input_layernorm.weight": np.zeros(64, np.float32)}),
     UnsupportedModelError, "num_hidden_layers"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_named(
    made: Make, model_type: str, edit: Callable[[Tensors], object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        open_model(made(model_type, edit))
