"""Which architectures are encoders, and the configuration of one from an open file.

Part of the models stage. A new family needs a file like `bert.py` and a row in each table here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rlx.errors import UnsupportedModelError
from rlx.ir.graph import Graph
from rlx.models import bert, modernbert
from rlx.models.builder import Weights
from rlx.models.config import ModelConfig
from rlx.models.encoder import EncoderConfig
from rlx.models.gguf_config import vocab_size
from rlx.models.keys import Keys
from rlx.models.names import Table
from rlx.models.views import View


class EncoderFamily(NamedTuple):
    """The equations of an architecture, the names of its tensors, and the reader of its GGUF metadata."""

    build: Callable[[EncoderConfig, Weights], Graph]
    names: Table
    from_gguf: Callable[[Keys, int, int], EncoderConfig]


#: `general.architecture` -> its family.
ENCODERS = {
    "bert": EncoderFamily(bert.build, bert.NAMES, bert.from_gguf),
    "nomic-bert": EncoderFamily(bert.build, bert.NOMIC_NAMES, bert.from_gguf),
    "modern-bert": EncoderFamily(modernbert.build, modernbert.NAMES, modernbert.from_gguf),
}
#: `model_type` in `config.json` -> the reader.
ENCODER_TYPES: dict[str, Callable[[Keys], EncoderConfig]] = {
    "bert": bert.from_hf,
    "roberta": bert.from_hf,
    "xlm-roberta": bert.from_hf,
    "camembert": bert.from_hf,
    "nomic_bert": bert.nomic_from_hf,
    "modernbert": modernbert.from_hf,
}
#: GGUF architectures of decoders whose attention was opened in both directions -> the decoder.
TWO_WAY = {"gemma-embedding": "gemma3"}


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
