"""`rlx inspect`: shows the contents of a model file, whether rlx can run it, and what that needs.

Reads headers only: no weights, no compiler. `describe` gives the facts, `show` the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, prod
from typing import TYPE_CHECKING, Any

import click

from rlx import backends
from rlx.cli.command import Command
from rlx.cli.inspect_vision import MMPROJ, audio_line, image_rows, is_mmproj, mmproj, tower_of, tower_rows
from rlx.cli.main import debug_option
from rlx.cli.options import model_argument
from rlx.cli.output import printable, size, stdout
from rlx.errors import RlxError, ShapeError, UnsupportedModelError

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.models import ModelConfig
    from rlx.passes.capabilities import Layouts
    from rlx.weights import WeightLoader

_KV_DTYPES = ("f16", "f32", "q8_0", "q4_0")  # the default of precision "auto", that of "exact", and the small ones
USE = "rlx run MODEL --mmproj FILE --image IMAGE PROMPT"
_LONG = 60  # characters of a value on the page
_TOKENS = 4096  # a session for the estimate of memory; no more than the context


@click.command(cls=Command)
@model_argument
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@debug_option
def inspect(model: str | None, tensors: bool, as_json: bool) -> None:
    """Show what is in MODEL, by default the demo model.

    Metadata, formats of the tensors, the memory it needs, and whether rlx can run it; if not, why.
    """
    from rlx import demo
    from rlx.weights import open_weights

    with open_weights(model if model is not None else demo.path()) as loader:
        facts = describe(loader, tensors)
    if as_json:
        click.echo(json.dumps(facts))
    else:
        stdout().writelines(f"{printable(line)}\n" for line in show(facts))


def describe(loader: WeightLoader, tensors: bool = False) -> dict[str, Any]:
    """Everything about an open file as plain JSON values.

    Args:
        tensors: name every tensor.
    """
    infos = list(loader.tensors.values())
    facts: dict[str, Any] = {
        "path": str(loader.path),
        "format": loader.format,
        "parameters": sum(prod(info.shape) for info in infos),
        "tensors": len(infos),
        "bytes": sum(info.nbytes for info in infos),
        "formats": _formats(loader),
        "metadata": {key: _summary(loader.metadata, key) for key in loader.metadata},
        **(mmproj(loader) if is_mmproj(loader) else _runnable(loader)),
    }
    if tensors:
        rows = [(i.name, i.dtype.name, list(i.shape), i.nbytes) for i in infos]
        facts["tensor_list"] = [dict(zip(("name", "dtype", "shape", "bytes"), row, strict=True)) for row in rows]
    return facts


def _formats(loader: WeightLoader) -> list[dict[str, Any]]:
    """One row per storage type, the largest first."""
    rows: dict[str, dict[str, Any]] = {}
    for info in loader.tensors.values():
        row = rows.setdefault(info.dtype.name, {"dtype": info.dtype.name, "tensors": 0, "parameters": 0, "bytes": 0})
        row["tensors"] += 1
        row["parameters"] += prod(info.shape)
        row["bytes"] += info.nbytes
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def _summary(metadata: Mapping[str, Any], key: str) -> Any:
    """A value, or a description of a long array, whose elements are not decoded."""
    kind = getattr(metadata, "type_of", lambda key: "")(key)
    if kind.startswith("array") and metadata.count(key) > 16:  # type: ignore[attr-defined]
        return f"{kind} [{metadata.count(key)}]"  # type: ignore[attr-defined]
    value = metadata[key]
    return _plain(value.tolist() if hasattr(value, "tolist") else value)


def _plain(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, by text."""
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _runnable(loader: WeightLoader) -> dict[str, Any]:
    """Whether rlx can run the model; if so its sizes and needs, otherwise the reason."""
    from rlx import models
    from rlx.engine.opening.opened import open_model
    from rlx.engine.opening.options import EngineOptions
    from rlx.engine.opening.setup import Setup
    from rlx.ir.dtypes import DTYPES
    from rlx.runners.auto import runner_class

    try:
        runner = runner_class(loader)
        config, weights = open_model(loader)
        sizes = [layer.head_dim for layer in config.each if not layer.recurrent]
        types = [name for name in _KV_DTYPES if not any(size % DTYPES[name].block for size in sizes)]
        graphs = {name: models.build(config, weights, DTYPES[name], place=weights.place) for name in types}
        memory = _memory(graphs, config)
        setup = Setup.of(config, weights, EngineOptions())
    except RlxError as error:
        return {"runnable": False, "reason": str(error)}
    profile = str(setup.source) if setup.source else None
    facts = {"runner": runner.__name__, "profile": profile, "deterministic": setup.is_deterministic}
    vision = tower_of(loader, config)
    seeing = {} if vision is None else {"vision": vision}
    return {"runnable": True, **facts, "config": _sizes(config), "memory": memory, **seeing}


def _sizes(config: ModelConfig) -> dict[str, Any]:
    names = ("arch", "family", "layers", "hidden", "heads", "vocab_size", "context")
    each = {name: sorted({getattr(layer, name) for layer in config.each}) for name in ("ffn", "kv_heads", "head_dim")}
    windows = sorted({window for window in config.windows if window is not None})
    counts = {
        "sliding_layers": sum(window is not None for window in config.windows),
        "recurrent_layers": sum(layer.recurrent for layer in config.each),
        "sharing_layers": sum(layer.source != i for i, layer in enumerate(config.each)),
    }
    experts = {} if config.experts is None else {"experts": config.experts.count, "experts_used": config.experts.used}
    sizes = {name: getattr(config, name) for name in names}
    sizes |= {name: values[0] if len(values) == 1 else values for name, values in each.items()}
    return {**sizes, "windows": windows, **counts, **experts}


def _memory(graphs: Mapping[str, Graph], config: ModelConfig) -> dict[str, Any]:
    """Bytes of the packed weights, of the caches and recurrent states of a session of the default length, and what a
    token adds to them beyond it; `UnsupportedModelError` for a type without kernels.
    """
    from rlx.compiler.kv import state_bytes
    from rlx.passes.layout import weight_table
    from rlx.profile import CompileProfile

    layouts = backends.backend().target().capabilities.layouts
    tokens, rows = min(config.context, _TOKENS), CompileProfile().buckets[-1]
    states = {name: state_bytes(graph, tokens, rows) for name, graph in graphs.items()}
    far, farther = (1 << 20, 1 << 21)  # beyond what windows keep
    grown = {n: state_bytes(g, farther, rows) - state_bytes(g, far, rows) for n, g in graphs.items()}
    return {
        "weights": weight_bytes(weight_table(next(iter(graphs.values())), layouts), layouts),
        "tokens": tokens,
        "states": states,
        "states_per_token": {name: size // (farther - far) for name, size in grown.items()},
    }


def weight_bytes(table: Mapping[str, Mapping[str, Any]], layouts: Layouts) -> int:
    """Memory of weights in bytes; a table that is only looked up stays in the file and needs none.

    Args:
        table: of `rlx.passes.layout.weight_table`.
        layouts: those of the device.
    """
    from rlx.ir.dtypes import DTYPES
    from rlx.passes.layout import FILE_LAYOUT, ROWS_LAYOUT

    total = 0
    for name, row in table.items():
        dtype, (*stack, n, k) = DTYPES[row["dtype"]], (1, 1, *map(int, row["shape"]))
        try:
            if row["layout"] == ROWS_LAYOUT:
                total += dtype.size([*stack, n, k])
            elif row["layout"] != FILE_LAYOUT:
                total += prod(stack) * layouts.matrix_bytes(dtype, n, k)
        except ShapeError as error:
            raise UnsupportedModelError(f"no kernel reads it: {error}", where=name) from error
    return total


# ---------------------------------------------------------------------------------------------------- the page


def show(facts: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the page."""
    yield f"{facts['path']} ({facts['format']})"
    yield f"{_count(facts['parameters'])} parameters in {facts['tensors']} tensors, {size(facts['bytes'])}"
    yield from _page("metadata", [(key, _short(value)) for key, value in facts["metadata"].items()])
    yield from _page("formats", [_format_row(row, facts["bytes"]) for row in facts["formats"]])
    if "tensor_list" in facts:
        rows = [(t["name"], t["dtype"], "x".join(map(str, t["shape"])), size(t["bytes"])) for t in facts["tensor_list"]]
        yield from _page("tensors", rows)
    yield from _verdict(facts)


def _verdict(facts: Mapping[str, Any]) -> Iterator[str]:
    """What rlx makes of the file; its last line says whether it runs."""
    vision: Mapping[str, Any] | None = facts.get("vision")
    if not facts["runnable"]:
        yield f"\nrunnable: no. {facts['reason']}"
    elif facts.get("kind") == MMPROJ:
        yield from _tower_page(facts["vision"])
        if "audio" in facts:
            yield audio_line(facts["audio"])
        yield f"\nrunnable: yes, as the vision tower of a language model: {USE}"
    else:
        rows = [*facts["config"].items(), ("deterministic", "yes" if facts["deterministic"] else "no, on this machine")]
        yield from _page("model", [(key, _short(value)) for key, value in rows])
        yield from _page("memory", _memory_rows(facts["memory"]))
        if vision is not None:
            yield from _tower_page(vision) if vision["usable"] else [f"\nimages: no. {vision['reason']}"]
        yield f"\nrunnable: yes, by {facts['runner']}" + (f", as {facts['profile']} says" if facts["profile"] else "")


def _tower_page(vision: Mapping[str, Any]) -> Iterator[str]:
    yield from _page("vision tower", tower_rows(vision))
    yield from _page("images", list(image_rows(vision)))


def _memory_rows(memory: Mapping[str, Any]) -> list[Sequence[str]]:
    tokens = memory["tokens"]
    rows = [("weights, packed", size(memory["weights"]))]
    for dtype, nbytes in memory["states"].items():
        more = size(memory["states_per_token"][dtype])
        rows.append((f"caches for {tokens} tokens, {dtype}", f"{size(nbytes)}, {more} a token beyond"))
    rows.append((f"together, {tokens} tokens in f16", size(memory["weights"] + memory["states"]["f16"])))
    return [*rows]


def _format_row(row: Mapping[str, Any], total: int) -> Sequence[str]:
    bits, share = 8 * row["bytes"] / max(1, row["parameters"]), row["bytes"] / max(1, total)
    figures = f"{_count(row['parameters'])} parameters", size(row["bytes"]), f"{share:.1%}", f"{bits:.3g} bits each"
    return (row["dtype"], f"{row['tensors']} tensors", *figures)


def _page(title: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A titled table whose columns are as wide as their longest cell."""
    yield f"\n{title}"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _short(value: Any) -> str:
    """A value on one line, truncated if it is long."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value)
    text = text.replace("\n", "\\n").replace("\t", "\\t")
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}... ({len(text)} characters)"


def _count(number: int) -> str:
    """A readable count, such as 5.0 M."""
    for unit, divisor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= divisor:
            return f"{number / divisor:.3g} {unit}"
    return str(number)
