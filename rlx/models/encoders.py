"""The configuration of an encoder from an open file.

Part of the models stage. A new family needs a file like `bert.py` and a row of `ENCODER_FILES` in `registry.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlx.errors import UnsupportedModelError
from rlx.models.config import ModelConfig
from rlx.models.encoder import EncoderConfig
from rlx.models.gguf_config import vocab_size
from rlx.models.keys import Keys
from rlx.models.registry import ENCODER_TYPES, ENCODERS
from rlx.models.views import View


def encoder_config(format: str, metadata: Mapping[str, Any], where: object) -> EncoderConfig | None:
    """The configuration of an encoder; None if the file is of another kind of model.

    Raises:
        ConfigError: a key is missing, of the wrong type or out of range.
        UnsupportedModelError: a feature that rlx does not support.
    """
    plain = Keys(metadata, where)
    if format != "gguf":
        read = ENCODER_TYPES.get(str(metadata.get("model_type")))
        return None if read is None else _checked(read(plain), plain)
    arch = str(metadata.get("general.architecture"))
    if arch not in ENCODERS:
        return None
    types = plain.integer("tokenizer.ggml.token_type_count", (0, 1 << 10), 0)
    keys = Keys(metadata, where, f"{arch}.")
    return _checked(ENCODERS[arch].from_gguf(keys, vocab_size(keys), types), keys)


def _checked(config: EncoderConfig, keys: Keys) -> EncoderConfig:
    if config.hidden % (2 * config.heads):
        what = f"{config.hidden} elements are no even heads, of which there are {config.heads}"
        raise UnsupportedModelError(what, where=keys.where)
    return config


def encoder_views(config: EncoderConfig) -> Iterator[View]:
    """The parts of tensors that files may store as one."""
    for layer in range(config.layers):
        name, size = f"blk.{layer}", config.hidden
        for end in ("weight", "bias"):
            for i, part in enumerate("qkv"):
                yield View(f"{name}.attn_{part}.{end}", f"{name}.attn_qkv.{end}", i * size, size, 3 * size)
            if config.arch == "modern-bert":
                for i, part in enumerate(("gate", "mul")):
                    whole = f"{name}.ffn_up.{end}"
                    yield View(f"{name}.ffn_{part}.{end}", whole, i * config.ffn, config.ffn, 2 * config.ffn)


def of_decoder(config: ModelConfig) -> EncoderConfig:
    """What is asked of the configuration of an encoder, for a decoder that serves as one."""
    return EncoderConfig(
        arch=config.arch,
        vocab_size=config.vocab_size,
        hidden=config.hidden,
        heads=config.heads,
        layers=config.layers,
        ffn=config.each[0].ffn,
        context=config.context,
        eps=config.eps,
        activation=config.activation,
        windows=config.windows,
        bases=(),
        pooling="last",
    )
