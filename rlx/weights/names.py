"""Names of tensors: one canonical name each, whatever the file calls it.

Part of the weights stage, between the readers and the model builders. Canonical names are those of GGUF
(`blk.3.attn_q.weight`). A GGUF file uses them as they are; a Hugging Face checkpoint uses a module path
(`model.layers.3.self_attn.q_proj.weight`) that the tables of the family files translate. A name that no row knows is no
weight of the language model (rotary buffers, vision towers, layers that predict further tokens) and is left out;
`ModelWeights.unused` lists those, and `ModelWeights.unknown` those that belong to a layer all the same.

Names only: that GGUF permutes the rows of llama's q and k, stores 1 + w for some norms and -exp(A_log) for a decay, is
for others to know. What a family's tensors look like where the formats disagree is in `RANKS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from rlx.errors import UnsupportedModelError, WeightError
from rlx.models.names import Row, Table
from rlx.models.registry import ARCHITECTURES, ENCODERS, HEADS
from rlx.weights.loader import WeightLoader, renamed

# Tensors whose files disagree about dimensions: checkpoints store a convolution over channels as [C, 1, width], GGUF
# files of Mamba-2 a norm in groups and numbers as a column, and quantizing a GGUF file drops a leading 1. Name in the
# layer -> how many dimensions it has for the model.
RANKS = {
    "ssm_conv1d.weight": 2, "shortconv.conv.weight": 2, "ffn_gate_inp_shexp.weight": 2, "exp_probs_b.bias": 1,
    "ssm_norm.weight": 1, "ssm_a": 1, "ssm_d": 1,
}  # fmt: skip

# Where checkpoints keep the head.
HEAD_PREFIXES: tuple[str, ...] = ("", "language_model.", "model.", "model.language_model.")

_GGUF_LAYER = re.compile(r"blk\.(0|[1-9][0-9]*)\.(.+)")
_HF_LAYER = r"\.(0|[1-9][0-9]*)\.(.+)"
_NUMBER = re.compile(r"(?<=\.)(0|[1-9][0-9]*)(?=\.)")


def canonical_names(loader: WeightLoader, family: str) -> dict[str, str | tuple[str, ...]]:
    """Canonical name -> the file's, for every tensor in the file that the family knows, in file order.

    Of a stack whose matrices are tensors of the file it is the names of these, in order.

    Raises:
        UnsupportedModelError: no table for the family.
        WeightError: two tensors of the file mean the same, or a matrix of a stack is missing.
    """
    found: dict[str, dict[int | None, str]] = {}
    for name in loader.tensors:
        place = _find(name, family)
        if place is None:
            continue
        canonical, index = place
        others = found.setdefault(canonical, {})
        rival = others.get(index, others.get(None)) if index is not None else next(iter(others.values()), None)
        if rival is not None:
            raise WeightError(f"{rival!r} and {name!r} are both {canonical}", where=loader.path)
        others[index] = name
    return {canonical: names.get(None) or _in_order(canonical, names, loader) for canonical, names in found.items()}


def canonical_name(name: str, family: str) -> str | None:
    """The canonical form of a file's name, GGUF or Hugging Face; None if the family has no such tensor."""
    found = _find(name, family)
    return found[0] if found else None


def file_names(canonical: str, family: str) -> list[str]:
    """Every name that a file may use for a canonical one, the canonical name first; of a stack its first matrix."""
    table = _table(family)
    prefixes, paths = table.prefixes, _to_hf(table.decoder).get(canonical, ())
    if layer := _GGUF_LAYER.fullmatch(canonical):
        paths = tuple(f"{table.path}.{layer[1]}.{inner}" for inner in _to_hf(table.layer).get(layer[2], ()))
    elif canonical in _to_hf(table.head):
        prefixes, paths = HEAD_PREFIXES, _to_hf(table.head)[canonical]
    return [canonical, *(prefix + path.replace("{}", "0") for path in paths for prefix in prefixes)]


def layer_of(name: str, family: str) -> int | None:
    """The layer that a file's name says, also where the family knows no such tensor; None for all others."""
    if layer := _GGUF_LAYER.fullmatch(name):
        return int(layer[1])
    table = _table(family)
    paths = (f"{re.escape(prefix + table.path)}{_HF_LAYER}" for prefix in table.prefixes)
    found = next(filter(None, (re.fullmatch(path, name) for path in paths)), None)
    return int(found[1]) if found else None


def rank(canonical: str) -> int | None:
    """How many dimensions the tensor has for the model, where files disagree."""
    layer = _GGUF_LAYER.fullmatch(canonical)
    return RANKS.get(layer[2]) if layer else None


def stack_name(names: tuple[str, ...]) -> str:
    """One text for the names of a stack: the number in which they differ becomes `*`."""
    name = names[0]
    last = [*_NUMBER.finditer(name)][-1]
    return f"{name[: last.start()]}*{name[last.end() :]}"


def _in_order(canonical: str, names: dict[int | None, str], loader: WeightLoader) -> tuple[str, ...]:
    """The names of the matrices of a stack."""
    numbered = {index: name for index, name in names.items() if index is not None}
    missing = next((i for i in range(len(numbered)) if i not in numbered), None)
    if missing is not None:
        there = stack_name(tuple(numbered.values())).replace("*", str(missing))
        raise WeightError(f"{canonical} lacks {there!r}, number {missing} of {max(numbered) + 1}", where=loader.path)
    return tuple(numbered[i] for i in range(len(numbered)))


def _find(name: str, family: str) -> tuple[str, int | None] | None:
    """Canonical name, and which matrix of a stack it is."""
    table = _table(family)
    if layer := _GGUF_LAYER.fullmatch(name):
        return (name, None) if layer[2] in _to_hf(table.layer) else None
    if name in _to_hf(table.decoder) or name in _to_hf(table.head):
        return name, None
    for prefix in HEAD_PREFIXES:
        if name.startswith(prefix) and (head := from_hf(table.head).get(name.removeprefix(prefix))):
            return head, None
    for prefix in table.prefixes:
        if name.startswith(prefix) and (found := _in_decoder(name.removeprefix(prefix), table)):
            return found
    return None


def _in_decoder(path: str, table: Table) -> tuple[str, int | None] | None:
    if layer := re.fullmatch(re.escape(table.path) + _HF_LAYER, path):
        found = _translated(layer[2], table.layer)
        return (f"blk.{layer[1]}.{found[0]}", found[1]) if found else None
    return _translated(path, table.decoder)


def _translated(path: str, rows: tuple[Row, ...]) -> tuple[str, int | None] | None:
    if canonical := from_hf(rows).get(path):
        return canonical, None
    number = _NUMBER.search(path)
    if number and (canonical := from_hf(rows).get(f"{path[: number.start()]}{{}}{path[number.end() :]}")):
        return canonical, int(number[0])
    return None


@cache
def _table(family: str) -> Table:
    if family in ENCODERS:
        return ENCODERS[family].names
    if family in HEADS:
        return HEADS[family]
    if family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(f"no tensor names are known for the family {family!r}, only for {known}")
    return ARCHITECTURES[family].names


def _pairs(rows: tuple[Row, ...]) -> Iterator[tuple[str, str | None]]:
    for row in rows:
        for suffix in row.suffixes:
            end = f".{suffix}" if suffix else ""
            yield row.canonical + end, None if row.hf is None or suffix == "scale" else row.hf + end


@cache
def _to_hf(rows: tuple[Row, ...]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for canonical, hf in _pairs(rows):
        found[canonical] = found.get(canonical, ()) + ((hf,) if hf else ())
    return found


@cache
def from_hf(rows: tuple[Row, ...]) -> dict[str, str]:
    """Path in a checkpoint -> canonical name."""
    return {hf: canonical for canonical, hf in _pairs(rows) if hf}


# -- the block that predicts a further token ------------------------------------------------------------------------

# Checkpoints of Qwen 3.5 keep the block apart, as `mtp.*`: a layer with full attention, and what joins its two inputs.
# GGUF counts it among the blocks (`nextn_predict_layers` says how many are such), and readers that do not use it pass
# it over. Here it has the names of a layer behind the last.
_PREDICTING_LAYER = re.compile(r"mtp\.layers\.([0-9]+)\.(.+)")
# What joins the embedding of the last token with the state of the one before, and the norm before the head.
_JOINING = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}


def predicting_blocks(loader: WeightLoader, arch: str) -> int:
    """1 if the checkpoint has such a block, else 0; of several, which no reader of GGUF uses, none counts."""
    if not arch.startswith(("qwen35", "qwen3next")):
        return 0
    found = {layer[1] for name in loader.tensors if (layer := _PREDICTING_LAYER.fullmatch(name))}
    return 1 if found == {"0"} and _JOINING.keys() <= loader.tensors.keys() else 0


def with_prediction(loader: WeightLoader, layers: int) -> WeightLoader:
    """The checkpoint, whose block that predicts is one more layer of the decoder.

    Args:
        loader: closed with the result.
        layers: layers before it.
    """
    return renamed(loader, lambda name: _decoder_name(name, layers))


def _decoder_name(name: str, layers: int) -> str:
    if name in _JOINING:
        return f"blk.{layers}.{_JOINING[name]}"
    layer = _PREDICTING_LAYER.fullmatch(name)
    return f"model.layers.{layers + int(layer[1])}.{layer[2]}" if layer else name
