"""Qwen 3.5's block that predicts a further token, under the names of a layer behind the last.

Weights stage, between an open checkpoint and the names of its tensors. Checkpoints keep the block apart, as `mtp.*`: a
layer with full attention, and what joins its two inputs. GGUF counts it among the blocks (`nextn_predict_layers` says
how many are such) and readers that do not use it pass it over.
"""

from __future__ import annotations

import re
from dataclasses import replace

from rlx.weights.loader import LoaderOver, WeightLoader
from rlx.weights.mapped import Bytes

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


class WithPrediction(LoaderOver):
    """A `WeightLoader` whose block that predicts is one more layer of the decoder.

    Args:
        loader: the checkpoint; closed with this object.
        layers: layers before it.
    """

    def __init__(self, loader: WeightLoader, layers: int) -> None:
        self._names = {_decoder_name(name, layers): name for name in loader.tensors}
        super().__init__(loader, {new: replace(loader.tensors[old], name=new) for new, old in self._names.items()})

    def raw(self, name: str) -> Bytes:
        return self.loader.raw(self._names.get(name, name))

    def release(self, name: str) -> None:
        self.loader.release(self._names.get(name, name))


def _decoder_name(name: str, layers: int) -> str:
    if name in _JOINING:
        return f"blk.{layers}.{_JOINING[name]}"
    layer = _LAYER.fullmatch(name)
    return f"model.layers.{layers + int(layer[1])}.{layer[2]}" if layer else name
