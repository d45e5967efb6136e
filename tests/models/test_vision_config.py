"""Configurations of vision towers: published sizes, defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rlx.errors import ConfigError, MultimodalError, RlxError, UnsupportedModelError
from rlx.models.vision_config import VisionConfig, vision_from_gguf, vision_from_hf

SIGLIP = {
    "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
    "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3", "vision_config": SIGLIP, "mm_tokens_per_image": 256, "boi_token_index": 255999,
    "eoi_token_index": 256000, "image_token_index": 262144,
}  # fmt: skip
QWEN35 = {
    "model_type": "qwen3_5", "image_token_id": 248056, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
    "vision_config": {
        "depth": 12, "hidden_size": 768, "num_heads": 12, "intermediate_size": 3072, "patch_size": 16,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 1024, "num_position_embeddings": 2304,
        "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": [],
    },
}  # fmt: skip
GEMMA4 = {
    "model_type": "gemma4", "image_token_id": 258880, "boi_token_id": 255999, "eoi_token_id": 258882,
    "text_config": {"use_bidirectional_attention": "vision"},
    "vision_config": {
        "hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "head_dim": 72, "intermediate_size": 4304, "patch_size": 16, "standardize": True,
    },
}  # fmt: skip


def read(config: dict[str, Any], hidden: int, preprocessor: dict[str, Any] | None = None) -> VisionConfig:
    found = vision_from_hf(config, preprocessor or {}, out_hidden=hidden)
    assert found is not None
    return found


def test_gemma3() -> None:
    found = read(GEMMA3, 2560)
    assert (found.layers, found.heads, found.head_dim, found.ffn) == (27, 16, 72, 4304)
    assert (found.merge, found.positions, found.image_size, found.patches_per_row) == (4, 4096, 896, 16)
    assert (found.image_token, found.begin_token, found.end_token) == (262144, 255999, 256000)
    assert (found.eps, found.mean, found.patch_values) == (1e-6, (0.5, 0.5, 0.5), 588)


def test_qwen35() -> None:
    found = read(QWEN35, 1024)
    assert (found.layers, found.head_dim, found.merge, found.patch_values) == (12, 64, 2, 1536)
    assert (found.min_pixels, found.max_pixels) == (65536, 16777216), "the published limits, where no file has any"
    assert (found.image_token, found.rope_base) == (248056, 1e4)
    areas = {"size": {"shortest_edge": 4096, "longest_edge": 65536}}
    assert (read(QWEN35, 1024, areas).min_pixels, read(QWEN35, 1024, areas).max_pixels) == (4096, 65536)


def test_qwen3vl() -> None:
    tower = {**QWEN35["vision_config"], "deepstack_visual_indexes": [5, 8, 11]}
    found = read({**QWEN35, "model_type": "qwen3_vl", "vision_config": tower}, 1024)
    assert (found.deepstack, found.row_width) == ((5, 8, 11), 4096)


def test_gemma4() -> None:
    found = read(GEMMA4, 2816, {"max_soft_tokens": 560})
    assert (found.head_dim, found.merge, found.positions, found.budget) == (72, 3, 10240, 560)
    assert (found.standardize, found.clipped, found.std) == (True, False, (1.0, 1.0, 1.0))
    causal = {**GEMMA4, "text_config": {"use_bidirectional_attention": None}}
    assert read(causal, 2816).budget == 280


@pytest.mark.parametrize(
    ("base", "change", "preprocessor", "error", "message"),
    [
        (GEMMA3, {"model_type": "gemma3n"}, {}, MultimodalError, "tower of the model type 'gemma3n' is not supported"),
        (GEMMA3, {"mm_tokens_per_image": 255}, {}, ConfigError, "the square of a divisor of 64"),
        (GEMMA3, {"vision_config": {**SIGLIP, "image_size": 900}}, {}, ConfigError, "a multiple of patch_size"),
        (GEMMA3, {}, {"size": {"height": 448, "width": 448}}, ConfigError, r"size\.height' is 448, expected 896"),
        (QWEN35, {}, {"patch_size": 14}, ConfigError, "patch_size' is 14, expected 16"),
        (QWEN35, {}, {"min_pixels": 9, "max_pixels": 8}, ConfigError, "at most max_pixels, which is 8"),
        (QWEN35, {"out": 2048}, {}, ConfigError, "out_hidden_size' is 1024, expected .* which is 2048"),
        (QWEN35, {"deepstack_visual_indexes": [5, 5]}, {}, ConfigError, "each layer once, in order"),
        (QWEN35, {"deepstack_visual_indexes": [12]}, {}, ConfigError, "an integer from 0 to 11"),
        (QWEN35, {"hidden_act": "quick_gelu"}, {}, UnsupportedModelError, "hidden_act"),
        (GEMMA4, {"num_key_value_heads": 4}, {}, UnsupportedModelError, "share keys"),
        (GEMMA4, {"head_dim": 70}, {}, ConfigError, "a multiple of 4"),
    ],
)
def test_what_is_refused(
    base: dict[str, Any], change: dict[str, Any], preprocessor: dict[str, Any], error: type[RlxError], message: str
) -> None:
    outer = {key: value for key, value in change.items() if key in base}
    inner = {key: value for key, value in change.items() if key not in base and key != "out"}
    config = {**base, **outer}
    config["vision_config"] = {**config["vision_config"], **inner}
    with pytest.raises(error, match=message):
        vision_from_hf(config, preprocessor, out_hidden=change.get("out", 1024))


@pytest.mark.parametrize(("side", "limits"), [(768, (65536, 16777216)), (96, (1024, 262144))])
def test_limits_that_no_gguf_file_states_follow_the_position_table(side: int, limits: tuple[int, int]) -> None:
    keys: dict[str, Any] = {
        "general.architecture": "clip", "clip.projector_type": "qwen3vl_merger", "clip.use_gelu": True,
        "clip.vision.projection_dim": 64, "clip.vision.image_size": side, "clip.vision.patch_size": 8,
        "clip.vision.embedding_length": 32, "clip.vision.feed_forward_length": 64, "clip.vision.block_count": 1,
        "clip.vision.attention.head_count": 2, "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_mean": [0.5] * 3, "clip.vision.image_std": [0.5] * 3,
    }  # fmt: skip
    shapes = {"v.position_embd.weight": ((side // 8) ** 2, 32), "v.patch_embd.weight": (32, 3, 8, 8)}
    found = vision_from_gguf(keys, shapes.get, {})
    assert (found.min_pixels, found.max_pixels) == limits
    stated = {**keys, "clip.vision.image_min_pixels": 256, "clip.vision.image_max_pixels": 4096}
    assert vision_from_gguf(stated, shapes.get, {}).max_pixels == 4096
