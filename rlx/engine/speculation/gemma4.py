"""Gemma 4's drafters: folders of their own, which draft for a Gemma 4 with its caches.

Runners stage, beside `heads.py`. A drafter has no cache. Its queries see what the caches of the model hold, and all
drafts of a row have the same position, so there is nothing to catch up with after accepted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rlx.backends.memory import Buffer
from rlx.compiler.compile import Progress
from rlx.compiler.tensors import Tensors
from rlx.engine.kv.prompt_embeddings import shift_at
from rlx.engine.model_runner import ModelRunner
from rlx.engine.opening.setup import Setup, Source, check_types
from rlx.engine.programs.programs import HIDDEN, ProgramSpec
from rlx.engine.speculation.heads import DraftHead, Head, OpenModel, integers, of_another_model
from rlx.errors import WeightError
from rlx.ir.graph import Graph
from rlx.models import gemma4_assistant, placed
from rlx.models.config import ModelConfig
from rlx.models.gemma4_assistant import TABLE, Assistant
from rlx.weights import ModelWeights, WeightLoader
from rlx.weights.composed import Composed
from rlx.weights.loader import LoaderOver

ORDER, OWN, ORDERED = "masked_embedding.token_ordering", "model.embed_tokens.weight", "ordered_embeddings.weight"
DRAFTS = 5  # maximum in a row


def ordered(loader: WeightLoader, order: npt.NDArray[np.int64], clusters: int) -> LoaderOver:
    """The folder with a further tensor: the rows of the embeddings in the order of the groups.

    Args:
        order: the tokens of all groups, one after the other.
        clusters: number of groups.
    """
    table = loader.tensors[OWN]
    shape = (clusters, len(order) // clusters, table.shape[1])

    rows = Composed.whole(loader, OWN).ordered(order)
    made = Composed.of(replace(table, name=ORDERED, shape=shape), (OWN,), rows.raw)
    return LoaderOver(loader, loader.tensors, [made])


def opening(
    loader: WeightLoader, weights: ModelWeights, config: ModelConfig, model: OpenModel, runner: ModelRunner
) -> Callable[[ExitStack], CacheReader]:
    """Opens the drafter of a folder, as `eagle3.opening`; `runner` runs the model."""
    head = gemma4_assistant.read_config(loader.metadata, loader.path)
    _check_base(head, config, loader)
    groups: npt.NDArray[np.int64] | None = None
    if head.clusters:
        order = integers(loader, ORDER, head.config.vocab_size)
        if not np.array_equal(np.sort(order), np.arange(len(order))):
            raise WeightError("expected each token once", where=ORDER)
        loader, groups = ordered(loader, order, head.clusters), order.reshape(head.clusters, -1)
    own, setup = ModelWeights(loader, "gemma4_assistant"), model.setup
    table = weights.info("token_embd.weight").dtype
    with placed(head.config, own.place):
        graph = gemma4_assistant.build(head, own, setup.kv_type, config, model.graph, table)
    leaves = {name: node for name, node in graph.leaves("weight").items() if name != TABLE}
    check_types(Graph(outputs=leaves), own, setup.layouts)

    def opened(parts: ExitStack) -> CacheReader:
        borrowed = {TABLE: model.tensors.buffers["token_embd.weight"]}
        made = Head(graph, Source(own, head.config), borrowed, (TABLE,), config.vocab_size, DRAFTS)
        return CacheReader(made, setup, model.beside(parts), model.progress, runner, groups)

    return opened


class CacheReader(DraftHead):
    """A head without a cache of its own, in place of a `Predictor`.

    Args:
        head, setup, tensors, progress: as of `DraftHead`.
        runner: runs the model.
        groups: the token of each row of its output matrix, i64 [groups, rows]; None if they are the model's.
    """

    def __init__(
        self,
        head: Head,
        setup: Setup,
        tensors: Tensors,
        progress: Progress | None,
        runner: ModelRunner,
        groups: npt.NDArray[np.int64] | None,
    ) -> None:
        super().__init__(head, setup, tensors, progress)
        self._runner, self._groups = runner, groups
        self._programs.bind(runner.pool.memory)
        self._count = 0  # of the rows of the model that it has the hidden states of
        self._hidden: Buffer | None = None

    def hear(self, start: int, ids: Ids[int], hidden: Buffer) -> None:
        self._hidden, self._start, self._count = self.copy(hidden), start, len(ids)

    def forget(self, length: int) -> None:
        self._count = min(self._count, max(0, length - self._start))

    def catch_up(self, length: int, token: int, count: int = 1) -> list[int]:
        return [*self._drafts(length, token, count)]

    def _drafts(self, length: int, token: int, count: int) -> Iterator[int]:
        at = length - 1 - self._start
        if not 0 <= at < self._count or self.sequence is None or self._hidden is None:
            return
        program, width = self._programs[ProgramSpec((1, 1))], 4 * self._width
        state = self._hidden.part(at * width, width)
        env = {"SEQ": 1, "PAST_SEQ": length - 1, **self._runner.bind_slots(program, self.sequence)}
        for _ in range(count):
            program.fill(HIDDEN, state)
            program.inputs["tokens"][:1] = token
            program.inputs["positions"][:1] = length + shift_at(self.sequence.embeddings, length)
            program.run(**env)
            token = int(program.output("token", **env)[0])
            if token < 0:
                return
            if self._groups is not None:
                token = int(self._groups[program.output("clusters", **env)[0]].reshape(-1)[token])
            yield token
            state = program.result("next_hidden", **env)

    @property
    def _width(self) -> int:
        size = self.head.graph.outputs["next_hidden"].shape[1]
        assert isinstance(size, int)
        return size


def _check_base(head: Assistant, model: ModelConfig, loader: WeightLoader) -> None:
    """`ArgumentError` if a drafter was trained with another model."""
    found = gemma4_assistant.sources(model) if model.arch == "gemma4" else {}
    if not found:
        how = f"it drafts for Gemma 4, and the model is {model.arch}"
    elif head.model_width != model.hidden:
        how = f"it reads hidden states of {head.model_width}, and the model's have {model.hidden} elements"
    elif head.config.vocab_size != model.vocab_size:
        how = f"it knows {head.config.vocab_size} tokens, and the model {model.vocab_size}"
    elif wrong := _unlike(head.config, model, found):
        how = wrong
    else:
        return
    raise of_another_model(loader, how)


def _unlike(head: ModelConfig, model: ModelConfig, found: dict[bool, int]) -> str:
    """How heads of the drafter differ from those of the caches that they read; "" if they do not."""
    for number, layer in enumerate(head.each):
        source = found.get(layer.window is not None)
        if source is None:
            return f"its layer {number} reads a cache {'with' if layer.window else 'without'} a window"
        size, kv_heads = model.each[source].head_dim, model.each[source].kv_heads
        if layer.head_dim != size or head.heads % kv_heads:
            return f"its layer {number} has {head.heads} heads of {layer.head_dim}, the cache {kv_heads} of {size}"
    return ""
