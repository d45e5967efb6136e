"""The tensors of a vision tower under canonical names, in the form that its graphs take.

Vision stage, between an open file and the graphs. The differences between files and graphs are all here: names, the
order of a patch's values, norms that store 1 + weight, matrices that lie transposed, files with names exchanged.

Canonical names are those of an mmproj GGUF (`v.blk.3.attn_q.weight`); a safetensors checkpoint uses module paths
(`model.visual.blocks.3.attn.qkv.weight`), which the tables translate. Sources: the modules of transformers, and the
names that llama.cpp's converter writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rlx.errors import WeightError
from rlx.models.names import BIASED, WHOLE, Row
from rlx.models.vision_config import VisionConfig
from rlx.weights.composed import CanonicalTensors, Composed, Values, stack
from rlx.weights.loader import WeightLoader
from rlx.weights.names import from_hf

# Gemma 4 keeps a linear layer in a module of its own, with the bounds of its input and output beside it.
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def _bounded(canonical: str, path: str) -> tuple[Row, Row]:
    return Row(f"{canonical}.weight", f"{path}.linear.weight", WHOLE), Row(canonical, path, _BOUNDS)


_QWEN35 = (
    Row("v.patch_embd", "patch_embed.proj", BIASED),
    Row("v.position_embd", "pos_embed"),
    Row("v.blk.{}.ln1", "blocks.{}.norm1", BIASED),
    Row("v.blk.{}.ln2", "blocks.{}.norm2", BIASED),
    Row("v.blk.{}.attn_qkv", "blocks.{}.attn.qkv", BIASED),
    Row("v.blk.{}.attn_out", "blocks.{}.attn.proj", BIASED),
    Row("v.blk.{}.ffn_up", "blocks.{}.mlp.linear_fc1", BIASED),
    Row("v.blk.{}.ffn_down", "blocks.{}.mlp.linear_fc2", BIASED),
    Row("v.post_ln", "merger.norm", BIASED),
    Row("mm.0", "merger.linear_fc1", BIASED),
    Row("mm.2", "merger.linear_fc2", BIASED),
    Row("v.deepstack.{}.norm", "deepstack_merger_list.{}.norm", BIASED),
    Row("v.deepstack.{}.fc1", "deepstack_merger_list.{}.linear_fc1", BIASED),
    Row("v.deepstack.{}.fc2", "deepstack_merger_list.{}.linear_fc2", BIASED),
)
_GEMMA3 = (
    Row("v.patch_embd", "embeddings.patch_embedding", BIASED),
    Row("v.position_embd", "embeddings.position_embedding"),
    Row("v.blk.{}.ln1", "encoder.layers.{}.layer_norm1", BIASED),
    Row("v.blk.{}.ln2", "encoder.layers.{}.layer_norm2", BIASED),
    *(Row(f"v.blk.{{}}.attn_{x}", f"encoder.layers.{{}}.self_attn.{x}_proj", BIASED) for x in ("q", "k", "v", "out")),
    Row("v.blk.{}.ffn_up", "encoder.layers.{}.mlp.fc1", BIASED),
    Row("v.blk.{}.ffn_down", "encoder.layers.{}.mlp.fc2", BIASED),
    Row("v.post_ln", "post_layernorm", BIASED),
    Row("mm.soft_emb_norm", "mm_soft_emb_norm"),
    Row("mm.input_projection.weight", "mm_input_projection_weight", WHOLE),
)
_GEMMA4_LINEARS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GEMMA4_NORMS = {
    "ln1": "input_layernorm", "attn_post_norm": "post_attention_layernorm", "ln2": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
_GEMMA4_ROWS = (
    Row("v.patch_embd", "vision_tower.patch_embedder.input_proj"),
    Row("v.position_embd.weight", "vision_tower.patch_embedder.position_embedding_table", WHOLE),
    *(
        row
        for name, path in _GEMMA4_LINEARS.items()
        for row in _bounded(f"v.blk.{{}}.{name}", f"vision_tower.encoder.layers.{{}}.{path}")
    ),
    *(Row(f"v.blk.{{}}.{name}", f"vision_tower.encoder.layers.{{}}.{path}") for name, path in _GEMMA4_NORMS.items()),
    Row("v.std_bias", "vision_tower.std_bias", WHOLE),
    Row("v.std_scale", "vision_tower.std_scale", WHOLE),
    Row("mm.input_projection", "embed_vision.embedding_projection"),
)
_GEMMA4_UNIFIED = (
    Row("v.patch_norm.1", "vision_embedder.patch_ln1", BIASED),
    Row("v.patch_embd", "vision_embedder.patch_dense", BIASED),
    Row("v.patch_norm.2", "vision_embedder.patch_ln2", BIASED),
    Row("v.position_embd.weight", "vision_embedder.pos_embedding", WHOLE),
    Row("v.patch_norm.3", "vision_embedder.pos_norm", BIASED),
    Row("mm.input_projection", "embed_vision.embedding_projection"),
)
_SIGLIP = tuple(f"{outer}vision_tower.{inner}" for outer in ("", "model.") for inner in ("vision_model.", ""))
_PROJECTOR = ("multi_modal_projector.", "model.multi_modal_projector.")

#: Family -> where checkpoints keep the tower (all names below these belong to it), and its tensors below any of these.
#: `{}` stands for the number of a layer.
TABLES: dict[str, tuple[tuple[str, ...], tuple[Row, ...]]] = {
    "qwen35": (("model.visual.", "visual."), _QWEN35),
    "gemma3": ((*_SIGLIP, *_PROJECTOR), _GEMMA3),
    "gemma4": (("model.", ""), _GEMMA4_ROWS),
    "gemma4_unified": (("model.", ""), _GEMMA4_UNIFIED),
}

_LAYER = re.compile(r"(?:(?<=blocks\.)|(?<=layers\.)|(?<=_list\.))(?:0|[1-9][0-9]*)(?=\.)")
_GGUF_LAYER = re.compile(r"(?:(?<=^v\.blk\.)|(?<=^v\.deepstack\.))[0-9]+(?=\.)")
_DEEPSTACK = "v.deepstack."


def tower_names(names: Iterable[str], family: str, where: object, deepstack: Sequence[int] = ()) -> dict[str, str]:
    """Canonical name -> the file's, for every tensor of the family's tower, in file order.

    Args:
        names: those of all tensors in a safetensors checkpoint.
        family: a key of `TABLES`.
        deepstack: the layers whose results are merged, too: an mmproj names these mergers by the layer, a checkpoint
            counts them.
        where: the file, for messages.

    Raises:
        WeightError: two tensors of the file mean the same.
    """
    found: dict[str, str] = {}
    for name in names:
        canonical = tower_name(name, family, deepstack)
        if canonical is None:
            continue
        if canonical in found:
            raise WeightError(f"{found[canonical]!r} and {name!r} are both {canonical}", where=where)
        found[canonical] = name
    return found


def tower_name(name: str, family: str, deepstack: Sequence[int] = ()) -> str | None:
    """The canonical form of a checkpoint's name; None if the family's tower has no such tensor."""
    prefixes, rows = TABLES[family]
    for prefix in prefixes:
        if name.startswith(prefix):
            path, layer = _numberless(name.removeprefix(prefix), _LAYER)
            canonical = from_hf(rows).get(path, "")
            if canonical.startswith(_DEEPSTACK):
                return canonical.format(deepstack[int(layer)]) if int(layer) < len(deepstack) else None
            if canonical:
                return canonical.format(layer)
    return None


def checkpoint_names(canonical: str, family: str, deepstack: Sequence[int] = ()) -> list[str]:
    """Every name that a checkpoint may use for a canonical one."""
    prefixes, rows = TABLES[family]
    form, layer = _numberless(canonical, _GGUF_LAYER)
    if form.startswith(_DEEPSTACK):
        layer = str(deepstack.index(int(layer)))
    paths = [path.format(layer) for path, name in from_hf(rows).items() if name == form]
    return [prefix + path for path in paths for prefix in prefixes]


def _numberless(name: str, layer: re.Pattern[str]) -> tuple[str, str]:
    """The name with `{}` for the number of its layer, and the number; "" if it has none."""
    found = layer.search(name)
    return (name, "") if found is None else (f"{name[: found.start()]}{{}}{name[found.end() :]}", found[0])


_IN_LAYER = re.compile(r"(v\.blk\.\d+\.)(.+)")
_PART_OF_QKV = re.compile(r"\battn_[qkv]\b")
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}

Find = Callable[["TowerWeights", str], Composed | None]


class TowerWeights(CanonicalTensors):
    """The tensors of one tower.

    Args:
        loader: an open file: the mmproj, or the checkpoint that holds the text model, too.
        config: the tower's configuration.
        owned: whether the file is closed with this object.

    Raises:
        WeightError: two tensors of the file mean the same.
    """

    def __init__(self, loader: WeightLoader, config: VisionConfig, *, owned: bool) -> None:
        self.loader, self.config, self._owned = loader, config, owned
        self._names = None if self.gguf else tower_names(loader.tensors, config.family, loader.path, config.deepstack)
        self._composed: dict[str, Composed | None] = {}
        self._swapped = self._is_swapped()

    @property
    def gguf(self) -> bool:
        """Whether the file is an mmproj."""
        return self.loader.format == "gguf"

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """As of the base class, with the values that the graphs compute with."""
        values = super().array(name)
        # Gemma 3 multiplies by 1 + weight; its GGUF files hold the sum.
        return values + np.float32(1) if name == "mm.soft_emb_norm.weight" and not self.gguf else values

    def close(self) -> None:
        """Closes the file, if it is owned."""
        if self._owned:
            self.loader.close()

    # -- from the file's tensors to the graphs' -----------------------------------------------------------------------

    def plain(self, name: str) -> Composed | None:
        """A tensor as the file stores it."""
        if self._swapped and (layer := _IN_LAYER.fullmatch(name)):
            stem, _, end = layer[2].partition(".")
            name = f"{layer[1]}{_SWAPPED.get(stem, stem)}.{end}"
        own = name if self._names is None else self._names.get(name)
        return Composed.whole(self.loader, own) if own is not None and own in self.loader.tensors else None

    def _tried(self, name: str) -> list[str]:
        """The names that a tensor may have in the file."""
        if self.gguf:
            return [name]
        whole = _PART_OF_QKV.sub("attn_qkv", name)  # where checkpoints have no parts
        found = (checkpoint_names(each, self.config.family, self.config.deepstack) for each in (name, whole))
        return next(filter(None, found), [name])

    def _found(self, name: str) -> Composed | None:
        if name not in self._composed:
            layer = _IN_LAYER.fullmatch(name)
            find = _FINDS[self.config.family].get(layer[2] if layer else name, TowerWeights.plain)
            self._composed[name] = find(self, name)
        return self._composed[name]

    def _is_swapped(self) -> bool:
        """Whether ffn_up and ffn_down have each other's names, as in old mmproj files."""
        self._swapped = False
        down, sizes = self.plain("v.blk.0.ffn_down.weight"), (self.config.ffn, self.config.hidden)
        return self.gguf and sizes[0] != sizes[1] and down is not None and down.info.shape == sizes


def _flat(weights: TowerWeights, name: str) -> Composed | None:
    """The convolution over patches [hidden, colours, (frames,) height, width] as a matrix."""
    found = weights.plain(name)
    return found and found.reshaped(found.info.shape[0], weights.config.patch_values)


def _frames(weights: TowerWeights, name: str) -> Composed | None:
    """Qwen's convolution; mmproj files have a tensor for each of the two frames."""
    first, second = weights.plain(name), weights.plain(f"{name}.1")
    if first is None or not weights.gguf:
        return _flat(weights, name)
    if second is None or (first.info.shape, first.info.dtype) != (second.info.shape, second.info.dtype):
        raise WeightError(f"the tensor has no equal second part, {name}.1", where=f"{weights.loader.path}, {name}")
    both = stack(name, (first, second), weights.loader.path)
    return both.moved((first.info.shape[0], weights.config.patch_values), lambda values: np.moveaxis(values, 0, 2))


def _part_of_qkv(weights: TowerWeights, name: str) -> Composed | None:
    """Rows of attn_qkv: queries, keys and values one after the other."""
    stem, _, end = name.rpartition(".")
    whole = weights.plain(f"{stem[:-2]}_qkv.{end}") or weights.plain(name)
    count, number = weights.config.heads * weights.config.head_dim, "qkv".index(stem[-1])
    if whole is None or whole.info.shape[0] != 3 * count:
        return whole
    return whole.ordered(np.arange(number * count, (number + 1) * count))


def _transposed(weights: TowerWeights, name: str) -> Composed | None:
    """Gemma 3's projection, which files store as [in, out]."""
    found = weights.plain(name)
    return found and found.moved(found.info.shape[::-1], np.transpose)


def _colours_last(weights: TowerWeights, name: str) -> Composed | None:
    """The values of a patch in the order of Gemma 4's processor (row, column, colour); GGUF has colours first."""
    found, size = weights.plain(name), weights.config.patch_values
    if found is None or not weights.gguf:
        return found
    rows = found.info.shape[:1] if len(found.info.shape) > 1 else ()
    side = round((size // 3) ** 0.5)

    def move(values: Values) -> Values:
        return np.moveaxis(values.reshape(*rows, 3, side, side), -3, -1)

    shape = (*rows, size)
    return found.moved(shape, move) if np.prod(shape) == np.prod(found.info.shape) else found


def _by_rope(weights: TowerWeights, name: str) -> Composed | None:
    """Rows of Gemma 4's queries and keys: for each head the parts that turn by the row and by the column interleaved.

    A head is stored as (x, y), and each half turns for itself: x = (x1, x2) in pairs of its halves. The graphs turn the
    pairs of the halves of a whole head, (y1, x1, y2, x2), with the frequencies of the row first.
    """
    found, size = weights.plain(name), weights.config.head_dim
    if found is None or found.info.shape[0] % size or size % 4:
        return found
    x1, x2, y1, y2 = np.arange(size).reshape(4, -1)
    starts = np.arange(0, found.info.shape[0], size)
    return found.ordered((starts[:, None] + np.concatenate([y1, x1, y2, x2])).reshape(-1))


def _axis_table(weights: TowerWeights, name: str) -> Composed | None:
    """One of Gemma 4's position tables, by column or by row, which are stored as one tensor."""
    stem, _, axis = name.rpartition(".")
    found = weights.plain(f"{stem}.weight")
    if found is None or len(found.info.shape) != 3:
        return found
    index, shape = ("columns", "rows").index(axis), found.info.shape
    if weights.config.family == "gemma4_unified" and not weights.gguf:
        return found.moved((shape[0], shape[2]), lambda values: values[:, index])
    return found.moved(shape[1:], lambda values: values[index])


_GEMMA4: dict[str, Find] = {
    "v.patch_embd.weight": _colours_last,
    "v.position_embd.columns": _axis_table,
    "v.position_embd.rows": _axis_table,
}
_FINDS: dict[str, dict[str, Find]] = {
    "qwen35": {
        "v.patch_embd.weight": _frames,
        **{f"attn_{part}.{end}": _part_of_qkv for part in "qkv" for end in ("weight", "bias")},
    },
    "gemma3": {"v.patch_embd.weight": _flat, "mm.input_projection.weight": _transposed},
    "gemma4": {
        **_GEMMA4,
        **dict.fromkeys(("attn_q.weight", "attn_k.weight", "attn_q_norm.weight", "attn_k_norm.weight"), _by_rope),
    },
    "gemma4_unified": {**_GEMMA4, "v.patch_norm.1.weight": _colours_last, "v.patch_norm.1.bias": _colours_last},
}
