"""The LoRA adapters of an engine: their matrices in stacks, which the rows of a call choose from by number.

Runners stage, under the engine. Number 0 of each stack is zero, for rows without an adapter and for adapters that leave
the matrix as it is. A program without adapters has nothing of this; one with them (`variants.with_adapters`) runs only
if a row of the call has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import ArgumentError, UnsupportedModelError, WeightError
from rlx.ir.dtypes import BF16, F16, F32, DType
from rlx.ir.graph import Graph
from rlx.ir.stored import to_bf16
from rlx.models.architectures import Architecture
from rlx.models.config import ModelConfig
from rlx.models.encoder import EncoderConfig, encoder_views
from rlx.models.registry import ARCHITECTURES
from rlx.models.rope import by_halves, by_neighbours
from rlx.models.variants import LowRank, with_adapters
from rlx.models.views import views
from rlx.passes.capabilities import Layouts
from rlx.passes.layout import weight_table
from rlx.weights import ModelWeights
from rlx.weights.adapters import Adapter, Floats, open_adapter

PADDED = 16  # ranks are multiples of it in memory: the rows of a packed block

Pair = tuple[Floats, Floats]


class Adapters:
    """The adapters of an engine; a `rlx.compiler.tensors.Source` of their stacks.

    Args:
        found: by name.
        pairs: weight of the graph -> for each adapter that changes it, its number and its pair.

    Attributes:
        numbers: name -> number; an adapter's rows are those with its number.
        low_rank: what a program needs of them.
    """

    def __init__(self, found: Mapping[str, Adapter], pairs: Mapping[str, Mapping[int, Pair]]) -> None:
        self.numbers = {name: number for number, name in enumerate(found, 1)}
        self._digests = {name: adapter.digest for name, adapter in found.items()}
        self._stacks = {
            f"{name}.lora_{'ab'[half]}": {number: pair[half] for number, pair in of_weight.items()}
            for name, of_weight in pairs.items()
            for half in (0, 1)
        }
        ranks = {name: max(len(a) for a, _ in each.values()) for name, each in pairs.items()}
        self.low_rank = LowRank(
            len(found) + 1,
            {name: -(-rank // PADDED) * PADDED for name, rank in ranks.items()},
            {name: _narrowest(each.values()) for name, each in self._stacks.items()},
        )

    @staticmethod
    def of(
        paths: Mapping[str, Any], config: ModelConfig | EncoderConfig, weights: ModelWeights, graph: Graph
    ) -> Adapters:
        """Opens adapters for a model.

        Args:
            paths: name -> file or folder.
            config: of an encoder, whose formats order rows alike, or of a decoder.

        Raises:
            ModelFileError, ConfigError, UnsupportedModelError, WeightError: one cannot be read, or is of another model.
        """
        found = {name: open_adapter(path, config.arch) for name, path in paths.items()}
        linears = {node.inputs[1].name: node.inputs[1].shape for node in graph.nodes() if node.op == "linear"}
        decoder = config if isinstance(config, ModelConfig) else None
        cuts = list(encoder_views(config) if isinstance(config, EncoderConfig) else views(config, weights.has))
        pairs: dict[str, dict[int, Pair]] = {}
        for number, adapter in enumerate(found.values(), 1):
            for name, (a, b) in adapter.pairs.items():
                tied = decoder is not None and decoder.tied
                name = "token_embd.weight" if name == "output.weight" and tied else _layer_weight(name, adapter)
                b = _in_order(b, name, adapter, decoder, weights) if decoder else b
                parts = dict(_parts(name, b, linears, cuts))
                if not parts or weights.has(f"{name.removesuffix('.weight')}.scale"):
                    what = f"the adapter changes {name}, which is no plain linear layer of this model"
                    raise UnsupportedModelError(what, where=adapter.path)
                for part, rows in parts.items():
                    if linears[part] != (len(rows), a.shape[1]):
                        what = f"the adapter changes a matrix {[len(rows), a.shape[1]]}, the model's {part} is"
                        hint = "the adapter is of another base: use the model that it was trained on"
                        raise WeightError(f"{what} {list(linears[part])}", where=adapter.path, hint=hint)
                    pairs.setdefault(part, {})[number] = a, rows
        return Adapters(found, pairs)

    def number(self, name: str) -> int:
        """The number of an adapter; `ArgumentError` if there is none of this name."""
        if name not in self.numbers:
            hint = f"there is {', '.join(map(repr, self.numbers))}"
            raise ArgumentError(f"there is no adapter {name!r}", where="adapter", hint=hint)
        return self.numbers[name]

    def salt(self, name: str, salt: str) -> str:
        """The salt of a request with an adapter: it shares what is known of its prompt with those that have it, too."""
        return f"\0{self._digests[name]}\0{salt}"

    def rows(self, graph: Graph, layouts: Layouts) -> dict[str, dict[str, Any]]:
        """How the stacks lie in memory: the rows of a manifest's table of weights."""
        table = weight_table(with_adapters(graph, self.low_rank), layouts)
        return {name: row for name, row in table.items() if name in self._stacks}

    # -- the values, to load them --------------------------------------------------------------------------------------

    def pieces(self, name: str) -> Iterator[npt.NDArray[np.uint8]]:
        """The matrices of a stack, padded, as bytes."""
        stack, dtype = self._stacks[name], self.low_rank.dtypes[name]
        rank = self.low_rank.ranks[name.rpartition(".")[0]]
        n, k = next(iter(stack.values())).shape
        shape = (rank, k) if name.endswith("a") else (n, rank)
        for number in range(self.low_rank.count):
            whole = np.zeros(shape, np.float32)
            if number in stack:
                n, k = stack[number].shape
                whole[:n, :k] = stack[number]
            yield _stored(whole, dtype).reshape(-1).view(np.uint8)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The whole stack, as bytes."""
        return np.concatenate(list(self.pieces(name)))

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """They have matrices only."""
        raise KeyError(name)

    def release(self, name: str) -> None:
        """Drops the values: they are loaded."""
        self._stacks[name] = {}


def _layer_weight(name: str, adapter: Adapter) -> str:
    if name == "token_embd.weight":
        what = "the adapter changes the embeddings of tokens: only changes of linear layers are supported"
        raise UnsupportedModelError(what, where=adapter.path, hint="merge it into the model's weights")
    return name


def _in_order(b: Floats, name: str, adapter: Adapter, config: ModelConfig, weights: ModelWeights) -> Floats:
    """B with its rows in the order of the model's file: formats order the rows of some matrices in their own ways."""
    if adapter.format == weights.format:
        return b
    row: Architecture = ARCHITECTURES[config.arch]
    inner = name.split(".")[2] if name.startswith("blk.") else name
    recurrent = config.recurrence is not None and inner.startswith(("ssm_", "attn_qkv", "attn_gate"))
    if recurrent or (config.latent is not None and inner.startswith("attn_")):
        what = f"{adapter.format} and {weights.format} order the rows of {name} differently"
        hint = f"use an adapter in the format of the model's file, {weights.format}"
        raise UnsupportedModelError(what, where=adapter.path, hint=hint)
    if row.gguf_rope == row.hf_rope or inner not in ("attn_q", "attn_k"):
        return b
    heads = config.heads if inner == "attn_q" else config.each[int(name.split(".")[1])].kv_heads
    if len(b) % (2 * heads):
        return b  # its shape is wrong, which is said next
    return by_neighbours(b, heads) if weights.format == "gguf" else by_halves(b, heads)


def _parts(name: str, b: Floats, linears: Mapping[str, Any], cuts: list[Any]) -> Iterator[tuple[str, Floats]]:
    """The weights of linear layers that a matrix of the file is, or is cut into, and the rows of B for each."""
    if name in linears:
        yield name, b
        return
    for cut in cuts:
        if cut.source == name and not cut.transposed and len(b) % cut.period == 0:
            rows = b.reshape(-1, cut.period, b.shape[1])[:, cut.start : cut.start + cut.rows]
            yield from _parts(cut.name, rows.reshape(-1, b.shape[1]), linears, cuts)


def _narrowest(values: Any) -> DType:
    """The smallest type of floats that holds all values exactly."""
    arrays = list(values)
    if all(not (each.view(np.uint32) & 0xFFFF).any() for each in arrays):
        return BF16
    with np.errstate(over="ignore"):
        return F16 if all((each.astype(np.float16) == each).all() for each in arrays) else F32


def _stored(values: Floats, dtype: DType) -> npt.NDArray[Any]:
    if dtype is BF16:
        return to_bf16(values)
    return values.astype(np.float16) if dtype is F16 else values
