"""The keys of an mmproj file, from the configuration of a vision tower.

Export stage, read by `tower.py`: the reverse of `rlx.models.vision_gguf_config`. Keys and types follow llama.cpp's
converter, which leaves out the limits of an image's size; readers that do not know those ignore them.
"""

from __future__ import annotations

from math import isqrt

from rlx.export.hf_keys import Metadata, Writer
from rlx.models.keys import Keys
from rlx.models.vision_config import MERGE, VISION_FAMILIES, VisionConfig

_ANY_SIZE = 224  # readers want an image_size of families whose images have any; nothing depends on it
_MEL_BINS = 128  # readers want a number of mel bins, which raw samples do not have
_MOST = (1 << 32) - 1  # the largest number that a key of type u32 holds


def tower_metadata(config: VisionConfig, audio: Keys | None) -> Metadata:
    """The keys `clip.*`.

    Args:
        audio: `audio_config` of a model whose audio needs no tower (Gemma 4 unified), else None.
    """
    keys = Writer("clip")
    keys.flag("has_vision_encoder", True)
    _sizes(keys, config)
    keys.floats("vision.image_mean", config.mean)
    keys.floats("vision.image_std", config.std)
    _limits(keys, config)
    projector = VISION_FAMILIES[config.family].projector
    if config.family.startswith("gemma4"):  # a file with audio has two projectors
        keys.text("vision.projector_type", projector)
    else:
        keys.text("projector_type", projector)
        keys.flag("use_gelu", True)
    keys.f32("vision.attention.layer_norm_epsilon", config.eps)
    if config.family == "qwen35":
        keys.u32("vision.spatial_merge_size", config.merge)
        keys.flags("vision.is_deepstack_layers", [False] * config.layers)
    elif config.merge != MERGE[config.family]:
        keys.u32("vision.projector.scale_factor", config.merge)
    if audio is not None:
        _audio(keys, config, audio)
    return keys.found


def _sizes(keys: Writer, config: VisionConfig) -> None:
    square = isqrt(config.positions) * config.patch if config.family == "qwen35" else _ANY_SIZE
    keys.u32("vision.projection_dim", config.out_hidden)
    keys.u32("vision.image_size", config.image_size or square)
    keys.u32("vision.patch_size", config.patch)
    keys.u32("vision.embedding_length", config.hidden)
    keys.u32("vision.feed_forward_length", config.ffn)
    keys.u32("vision.block_count", config.layers)
    keys.u32("vision.attention.head_count", config.heads)
    if config.heads and config.head_dim != config.hidden // config.heads:
        keys.u32("vision.attention.head_dim", config.head_dim)


def _limits(keys: Writer, config: VisionConfig) -> None:
    """Limits of an image's area in pixels; the budget of Gemma 4 is an area too."""
    most = config.max_pixels or config.budget * (config.merge * config.patch) ** 2
    for key, pixels in (("vision.image_min_pixels", config.min_pixels), ("vision.image_max_pixels", most)):
        if pixels:
            keys.u32(key, min(pixels, _MOST))


def _audio(keys: Writer, config: VisionConfig, audio: Keys) -> None:
    keys.flag("has_audio_encoder", True)
    keys.u32("audio.projection_dim", config.out_hidden)
    keys.u32("audio.embedding_length", audio.integer("audio_embed_dim", (1, 1 << 20)))
    for key in ("feed_forward_length", "block_count", "attention.head_count"):
        keys.u32(f"audio.{key}", 0)
    keys.text("audio.projector_type", "gemma4ua")
    keys.u32("audio.num_mel_bins", _MEL_BINS)
    keys.f32("audio.attention.layer_norm_epsilon", audio.number("rms_norm_eps", (0.0, 1.0), 1e-6))
