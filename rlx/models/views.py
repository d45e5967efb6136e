"""Views: tensors that files store as one but builders need separately - which rows of which tensor each of them is.

Part of the models stage, between the configuration and the builders; `rlx.weights` extracts the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from rlx.models.config import Layer, ModelConfig, Recurrence

HasTensor = Callable[[str], bool]
_ALONE = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_k_b",
    "attn_v_b",
    "ffn_gate_exps",
    "ffn_up_exps",
    "ffn_down_exps",
    "ffn_gate_shexp",
    "ffn_up_shexp",
)  # parts that some files store separately


class View(NamedTuple):
    """The tensor `name` is the rows [start, start + rows) of every `period` rows of the tensor `source`.

    Names are canonical. Every matrix of a stack is cut in the same way; if the period is the number of rows of the
    whole stack, the view is one of its matrices. The rows of a bias [experts, n] are the numbers of each expert.

    Attributes:
        matrices: the rows are so many matrices of a stack; 0 leaves them as they are.
        transposed: each matrix of that stack, or else of the source, is transposed.
        either: some files have the source transposed already; where both shapes fit, it is.
    """

    name: str
    source: str
    start: int
    rows: int
    period: int
    transposed: bool = False
    matrices: int = 0
    either: bool = False


def views(config: ModelConfig, has_tensor: HasTensor) -> Iterator[View]:
    """The views that the builder of this model needs.

    Args:
        has_tensor: whether the file has a tensor of this canonical name.
    """
    for name in ("altup_proj", "altup_unembd_proj"):
        if config.streams > 1 and has_tensor(f"{name}.weight"):
            width, parts = config.hidden, config.streams - 1
            yield from (
                View(f"{name}.{i}.weight", f"{name}.weight", i * width, width, parts * width) for i in range(parts)
            )
    for i, layer in enumerate(config.predictor.each if config.recurrence else config.each):
        for view in _of_layer(config, layer):
            source = f"blk.{i}.{view.source}"
            if has_tensor(source):
                yield view._replace(name=f"blk.{i}.{view.name}", source=source)


def place_in(config: ModelConfig, name: str) -> tuple[str, str]:
    """The tensor that files store instead of `name`, and a suffix for errors: for parts that no file has separately."""
    whole = next((view.source for view in views(config, lambda _: True) if view.name == name), name)
    if whole == name or name.split(".")[-2] in _ALONE:
        return name, ""
    return whole, f", of which {name} is a part"


def _of_layer(config: ModelConfig, layer: Layer) -> Iterator[View]:
    """The views of a layer, for tensors that the file has; names without the layer."""
    if layer.recurrent and config.recurrence is not None:
        yield from _delta_rule(config.recurrence) if config.recurrence.corrects else _mamba(config.recurrence)
    elif layer.recurrent:
        for end in ("weight", "bias"):
            parts = {f"shortconv.{part}.{end}": config.hidden for part in "bcv"}
            yield from _parts(f"shortconv.in_proj.{end}", parts)
    else:
        yield from _attention(config, layer)
    if config.fused_ffn:
        for end in ("weight", "bias"):
            yield from _parts(f"ffn_up.{end}", {f"ffn_up_gate.{end}": layer.ffn, f"ffn_up_value.{end}": layer.ffn})
    if config.experts is not None and config.experts.in_turns:
        yield from _in_turns(config.hidden)
    elif config.experts is not None:
        halves = config.experts.ffn
        yield from _parts("ffn_gate_up_exps.weight", {"ffn_gate_exps.weight": halves, "ffn_up_exps.weight": halves})
        for i, part in enumerate(("gate", "up")):
            whole = "ffn_gate_up_exps_t.weight"
            yield View(f"ffn_{part}_exps.weight", whole, i * halves, halves, 2 * halves, True, either=True)
        yield _turned_down(config.hidden)._replace(either=True)
    halves = config.experts.shared if config.experts is not None else layer.ffn
    if halves:
        yield from _parts("ffn_gate_up_shexp.weight", {"ffn_gate_shexp.weight": halves, "ffn_up_shexp.weight": halves})


def _in_turns(hidden: int) -> Iterator[View]:
    """Experts whose rows of gate and up take turns; floats may have their inputs first."""
    for i, part in enumerate(("gate", "up")):
        yield View(f"ffn_{part}_exps.weight", "ffn_gate_up_exps.weight", i, 1, 2)
        yield View(f"ffn_{part}_exps.weight", "ffn_gate_up_exps_t.weight", i, 1, 2, transposed=True)
        yield View(f"ffn_{part}_exps.bias", "ffn_gate_up_exps.bias", i, 1, 2)
    yield _turned_down(hidden)


def _turned_down(hidden: int) -> View:
    return View("ffn_down_exps.weight", "ffn_down_exps_t.weight", 0, hidden, hidden, transposed=True)


def _attention(config: ModelConfig, layer: Layer) -> Iterator[View]:
    if config.latent is not None:  # of each head first what makes its keys, then what makes its values
        sizes = config.latent.plain, config.latent.values, sum((config.latent.plain, config.latent.values))
        yield View("attn_k_b.weight", "attn_kv_b.weight", 0, sizes[0], sizes[2], True, config.heads)
        yield View("attn_v_b.weight", "attn_kv_b.weight", sizes[0], sizes[1], sizes[2], False, config.heads)
        return
    q, kv = config.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    gated = config.recurrence is not None and config.recurrence.corrects
    for end in ("weight", "bias"):
        yield from _parts(f"attn_qkv.{end}", {f"attn_q.{end}": q, f"attn_k.{end}": kv, f"attn_v.{end}": kv})
        if gated:  # per head first the query, then its gate
            yield View(f"attn_query.{end}", f"attn_q.{end}", 0, layer.head_dim, 2 * layer.head_dim)
            yield View(f"attn_query_gate.{end}", f"attn_q.{end}", layer.head_dim, layer.head_dim, 2 * layer.head_dim)
    if gated:
        yield from (View(f"{name}.scale", "attn_q.scale", 0, 1, 1) for name in ("attn_query", "attn_query_gate"))


def _delta_rule(net: Recurrence) -> Iterator[View]:
    sizes = {"q": net.keys, "k": net.keys, "v": net.values}
    yield from _parts("attn_qkv.weight", {f"ssm_{part}.weight": size for part, size in sizes.items()})
    yield from _parts("ssm_conv1d.weight", {f"ssm_conv_{part}.weight": size for part, size in sizes.items()})
    share = net.value_heads // net.key_heads  # Qwen 3 Next has these key head by key head
    sizes = {"ssm_q": net.key_dim, "ssm_k": net.key_dim, **dict.fromkeys(("ssm_v", "attn_gate"), share * net.value_dim)}
    yield from _parts("ssm_in.weight", {f"{part}.weight": size for part, size in sizes.items()})
    yield from _parts("ssm_ba.weight", {"ssm_beta.weight": share, "ssm_alpha.weight": share})


def _mamba(net: Recurrence) -> Iterator[View]:
    sizes = {"v": net.values, "k": net.keys, "q": net.keys}
    for end in ("weight", "bias"):
        inner = {f"ssm_{part}.{end}": size for part, size in sizes.items()}
        whole = {f"attn_gate.{end}": net.values, **inner, f"ssm_alpha.{end}": net.value_heads}
        yield from _parts(f"ssm_in.{end}", whole)
        yield from _parts(f"ssm_conv1d.{end}", {f"ssm_conv_{part}.{end}": size for part, size in sizes.items()})


def _parts(source: str, sizes: dict[str, int]) -> Iterator[View]:
    """Consecutive parts; each part has the scale of the whole."""
    at, period = 0, sum(sizes.values())
    for name, size in sizes.items():
        yield View(name, source, at, size, period)
        yield View(_scale(name), _scale(source), 0, 1, 1)
        at += size


def _scale(name: str) -> str:
    return f"{name.rpartition('.')[0]}.scale"
