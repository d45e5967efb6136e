"""Qwen 3.5's block that predicts a further token, under the names of a layer behind the last.

Weights stage, between an open checkpoint and the names of its tensors. Checkpoints keep the block apart, as `mtp.*`: a
layer with full attention, and what joins its two inputs. GGUF counts it among the blocks (`nextn_predict_layers` says
how many are such) and readers that do not use it pass it over.
"""

from __future__ import annotations

import re

from rlx.weights.loader import Renamed, WeightLoader

_LAYER = re.compile(r"mtp\.layers\.([0-9]+)\.(.+)")
# What joins the embedding of the last token with the state of the one before, and the norm before the head.
_JOINING = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}


def predicting_blocks(loader: WeightLoader, arch: str) -> int:
    """1 if the checkpoint has such a block, else 0; of several, which no reader of GGUF uses, none counts."""
    if not arch.startswith("qwen35"):
        return 0
    found = {layer[1] for name in loader.tensors if (layer := _LAYER.fullmatch(name))}
    return 1 if found == {"0"} and _JOINING.keys() <= loader.tensors.keys() else 0


def with_prediction(loader: WeightLoader, layers: int) -> WeightLoader:
    """The checkpoint, whose block that predicts is one more layer of the decoder.

    Args:
        loader: closed with the result.
        layers: layers before it.
    """
    return Renamed(loader, lambda name: _decoder_name(name, layers))


def _decoder_name(name: str, layers: int) -> str:
    if name in _JOINING:
        return f"blk.{layers}.{_JOINING[name]}"
    layer = _LAYER.fullmatch(name)
    return f"model.layers.{layers + int(layer[1])}.{layer[2]}" if layer else name
