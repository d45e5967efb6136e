"""`rlx inspect`: shows the contents of a model file, whether rlx can run it, and what that needs.

Reads headers only: no weights, no compiler. `describe` gives the facts, `show` the page.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, prod
from typing import Any

import click

from rlx import backends, demo, models
from rlx.cli.command import Command, json_option
from rlx.cli.options import model_argument
from rlx.cli.output import printable, size, stdout, wrapped
from rlx.compiler.state_memory import state_bytes
from rlx.engine.opening.encoder import EncoderPlan
from rlx.engine.opening.options import EngineOptions
from rlx.engine.opening.setup import Setup, check_used, open_model
from rlx.errors import MultimodalError, RlxError
from rlx.ir.dtypes import DTYPES
from rlx.ir.graph import Graph
from rlx.models import ModelConfig
from rlx.models.vision_config import VISION_FAMILIES, VisionConfig
from rlx.passes.layout import weight_bytes, weight_table
from rlx.profile.keys import BUCKETS
from rlx.runners.auto import is_encoder, runner_class
from rlx.vision.image import ImageOptions
from rlx.vision.opening import mmproj_config, open_tower
from rlx.vision.processors import ImageProcessor
from rlx.vision.tower import tower_table
from rlx.vision.weights import TowerWeights
from rlx.weights import WeightLoader, open_weights
from rlx.weights.quantization import described, scheme_of

_KV_DTYPES = ("f16", "f32", "q8_0", "q4_0")  # the default of precision "auto", that of "exact", and the small ones
ENCODER = "encoder"
USE = "rlx run MODEL --mmproj FILE --image IMAGE PROMPT"
_LONG = 60  # characters of a value on the page
_TOKENS = 4096  # a session for the estimate of memory; no more than the context


@click.command(cls=Command)
@model_argument
@click.option("--tensors", is_flag=True, help="List every tensor.")
@json_option
def inspect(model: str | None, tensors: bool, as_json: bool) -> None:
    """Show what is in MODEL, by default the demo model.

    Metadata, formats of the tensors, the memory it needs, and whether rlx can run it; if not, why.
    """
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
        **({"quantization": described(scheme)} if (scheme := scheme_of(loader.metadata)) else {}),
        **(mmproj(loader) if is_mmproj(loader) else _encoder(loader) if is_encoder(loader) else _runnable(loader)),
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


def _encoder(loader: WeightLoader) -> dict[str, Any]:
    """As `_runnable`, for a text encoder."""
    layouts = backends.backend().target().capabilities.layouts
    try:
        plan = EncoderPlan.of(loader, layouts)
        graphs = [graph for graph in (plan.body, plan.head) if graph is not None]
        weights = sum(weight_bytes(weight_table(graph, layouts), layouts) for graph in graphs)
    except RlxError as error:
        return {"runnable": False, "reason": str(error)}
    config, modules = plan.config, plan.modules
    sizes = {name: getattr(config, name) for name in ("arch", "layers", "hidden", "heads", "vocab_size", "context")}
    does = "scores of pairs" if plan.scores else f"vectors, pooling {modules.pooling or 'not said'}"
    sizes |= {"makes": does, "prompts": ", ".join(modules.prompts) or "none"}
    return {"runnable": True, "kind": ENCODER, "config": sizes, "memory": {"weights": weights}}


def _runnable(loader: WeightLoader) -> dict[str, Any]:
    """Whether rlx can run the model; if so its sizes and needs, otherwise the reason."""
    try:
        runner = runner_class(loader)
        config, weights = open_model(loader)
        sizes = [layer.head_dim for layer in config.each if not layer.recurrent]
        types = [name for name in _KV_DTYPES if not any(size % DTYPES[name].block for size in sizes)]
        graphs = {name: models.build(config, weights, DTYPES[name], place=weights.place) for name in types}
        memory = _memory(graphs, config)
        setup = Setup.of(config, weights, EngineOptions())
        check_used(config, next(iter(graphs.values())), weights)
    except RlxError as error:
        return {"runnable": False, "reason": str(error)}
    profile = str(setup.source) if setup.source else None
    facts: dict[str, Any] = {"runner": runner.__name__, "profile": profile, "deterministic": setup.is_deterministic}
    vision = tower_of(loader, config)
    seeing = {} if vision is None else {"vision": vision}
    matrices = (weights.info(name) for name in weights.names)
    facts["matrices"] = dict(Counter(info.dtype.name for info in matrices if len(info.shape) > 1))
    return {"runnable": True, **facts, "config": _sizes(config), "memory": memory, **seeing}


def _sizes(config: ModelConfig) -> dict[str, Any]:
    names = ("arch", "family", "layers", "hidden", "heads", "vocab_size", "context")
    of_layers = ("ffn", "kv_heads", "head_dim")
    each = {name: sorted({getattr(layer, name) for layer in config.each} - {0}) for name in of_layers}
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
    layouts = backends.backend().target().capabilities.layouts
    tokens, rows = min(config.context, _TOKENS), BUCKETS[-1]
    states = {name: state_bytes(graph, tokens, rows, layouts) for name, graph in graphs.items()}
    far, farther = (1 << 20, 1 << 21)  # beyond what windows keep
    grown = {n: state_bytes(g, farther, rows, layouts) - state_bytes(g, far, rows, layouts) for n, g in graphs.items()}
    return {
        "weights": weight_bytes(weight_table(next(iter(graphs.values())), layouts), layouts),
        "tokens": tokens,
        "states": states,
        "states_per_token": {name: size // (farther - far) for name, size in grown.items()},
    }


# ---------------------------------------------------------------------------------------------------- the page


def show(facts: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the page."""
    yield f"{facts['path']} ({facts['format']})"
    yield f"{_count(facts['parameters'])} parameters in {facts['tensors']} tensors, {size(facts['bytes'])}"
    yield from _page("metadata", [(key, _short(value)) for key, value in facts["metadata"].items()])
    yield from _page("formats", [_format_row(row, facts["bytes"]) for row in facts["formats"]])
    if "quantization" in facts:
        yield from _page("quantization", list(_quantization_rows(facts)))
    if "tensor_list" in facts:
        rows = [(t["name"], t["dtype"], "x".join(map(str, t["shape"])), size(t["bytes"])) for t in facts["tensor_list"]]
        yield from _page("tensors", rows)
    yield from _verdict(facts)


def _quantization_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What `config.json` says, and the types that the matrices get without rounding."""
    yield "scheme", facts["quantization"]
    if types := facts.get("matrices"):
        yield "matrices", ", ".join(f"{count} {dtype}" for dtype, count in types.items())


def _verdict(facts: Mapping[str, Any]) -> Iterator[str]:
    """The verdict on the file; its last line says whether it runs."""
    vision: Mapping[str, Any] | None = facts.get("vision")
    if not facts["runnable"]:
        yield f"\nrunnable: no. {facts['reason']}"
    elif facts.get("kind") == MMPROJ:
        yield from _tower_page(facts["vision"])
        if "audio" in facts:
            yield f"\naudio: {facts['audio']}"
        yield f"\nrunnable: yes, as the vision tower of a language model: {USE}"
    elif facts.get("kind") == ENCODER:
        yield from _page("encoder", [(key, _short(value)) for key, value in facts["config"].items()])
        yield from _page("memory", [("weights, packed", size(facts["memory"]["weights"]))])
        yield "\nrunnable: yes, by `rlx embed` and `rlx rerank`"
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
        line = "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        yield from wrapped(line, sys.stdout, indent=4).split("\n")


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


MMPROJ = "mmproj"
# Width and height of the images whose tokens are listed: a thumbnail, squares, screens, a photo.
_IMAGES = ((224, 224), (512, 512), (640, 480), (1024, 1024), (1920, 1080), (4032, 3024))
_SIZES = ("hidden", "layers", "heads", "head_dim", "ffn", "patch", "merge", "positions", "out_hidden")


def is_mmproj(loader: WeightLoader) -> bool:
    """Whether an open file holds the tower of another one."""
    return loader.format == "gguf" and loader.metadata.get("general.architecture") == "clip"


def mmproj(loader: WeightLoader) -> dict[str, Any]:
    """The facts about an open mmproj file: "runnable", the tower under "vision", and "audio" if it has any."""
    facts: dict[str, Any] = {"kind": MMPROJ}
    if loader.metadata.get("clip.has_audio_encoder"):
        facts["audio"] = "not supported"
    try:
        config = mmproj_config(loader, {})
        tower = _tower(config, TowerWeights(loader, config, owned=False))
    except RlxError as error:
        return {**facts, "runnable": False, "reason": str(error)}
    return {**facts, "runnable": True, "vision": tower}


def tower_of(loader: WeightLoader, text: ModelConfig) -> dict[str, Any] | None:
    """The facts about the tower of a model, or under "reason" why it cannot be used; None if the model takes text
    only.
    """
    sees = any(text.arch in row.archs for row in VISION_FAMILIES.values())
    if not sees or (loader.format != "gguf" and not loader.metadata.get("vision_config")):
        return None
    try:
        config, weights = open_tower(loader, text)
        with weights:
            return {"path": str(weights.loader.path), "usable": True, **_tower(config, weights)}
    except RlxError as error:
        return {"usable": False, "reason": str(error)}


def _tower(config: VisionConfig, weights: TowerWeights) -> dict[str, Any]:
    layouts = backends.backend().target().capabilities.layouts
    memory = weight_bytes(tower_table(config, weights, layouts), layouts)
    processor = ImageProcessor.of(config, ImageOptions())
    return {
        "family": config.family,
        "architectures": list(VISION_FAMILIES[config.family].archs),
        "config": {name: getattr(config, name) for name in _SIZES},
        "mean": list(config.mean),
        "std": list(config.std),
        "limits": _limits(config, processor),
        "images": [_image(config, processor, width, height) for width, height in _IMAGES],
        "memory": memory,
    }


def _limits(config: VisionConfig, processor: Any) -> dict[str, Any]:
    """The limit of the size of an image: a fixed size, a budget of tokens, or the pixels that are seen of it."""
    if config.image_size:
        return {"size": [config.image_size, config.image_size]}
    if config.budget:
        return {"tokens": config.budget}
    return {"min_pixels": processor.min_pixels, "max_pixels": processor.max_pixels, "own_max_pixels": processor.own_max}


def _image(config: VisionConfig, processor: Any, width: int, height: int) -> dict[str, Any]:
    """The facts of an image of this size; "reason" if the model cannot take it."""
    facts: dict[str, Any] = {"width": width, "height": height}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows, columns = processor.target(height, width)
        tokens = prod(side // processor.unit for side in (rows, columns))
        _check_table(config, max(rows, columns))
    except RlxError as error:
        return {**facts, "reason": error.what}
    return {**facts, "resized": [columns, rows], "patches": tokens * config.patches_per_row, "tokens": tokens}


def _check_table(config: VisionConfig, side: int) -> None:
    """Gemma 4 has a table of a row for each place along a side."""
    count = side // (config.patch * (config.merge if config.family == "gemma4_unified" else 1))
    if config.family.startswith("gemma4") and count > config.positions:
        raise MultimodalError(f"{count} patches along a side, and the position table has {config.positions}")


# ---------------------------------------------------------------------------------------------------- the page


def tower_rows(tower: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rows about a tower, but for images."""
    config = tower["config"]
    fits = f"{' or '.join(tower['architectures'])} with hidden size {config['out_hidden']}"
    rows = [("file", tower["path"])] if "path" in tower else []
    rows += [("family", tower["family"]), ("language model", fits)]
    rows += [(name, str(config[name])) for name in _SIZES if name != "out_hidden" and config[name]]
    rows += [("mean, std", f"{_colours(tower['mean'])}, {_colours(tower['std'])}")]
    return [*rows, ("image size", _limit(tower["limits"])), ("weights, packed", size(tower["memory"]))]


def image_rows(tower: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each size of an image; one for all if they become the same."""
    images = tower["images"]
    same = "size" in tower["limits"]
    for image in images[:1] if same else images:
        name = "any" if same else f"{image['width']} x {image['height']}"
        if "reason" in image:
            yield name, f"refused: {image['reason']}", "", ""
        else:
            width, height = image["resized"]
            yield name, f"resized to {width} x {height}", f"{image['patches']} patches", f"{image['tokens']} tokens"


def _colours(values: list[float]) -> str:
    return " ".join(f"{value:g}" for value in (values[:1] if len(set(values)) == 1 else values))


def _limit(limits: Mapping[str, Any]) -> str:
    if "size" in limits:
        width, height = limits["size"]
        return f"always {width} x {height}"
    if "tokens" in limits:
        return f"scaled to fill {limits['tokens']} tokens"
    low, high, own = limits["min_pixels"], limits["max_pixels"], limits["own_max_pixels"]
    return f"{low} to {high} pixels" + (f", the model's own maximum is {own}" if own != high else "")
