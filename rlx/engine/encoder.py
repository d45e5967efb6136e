"""Runs an encoder: token ids of texts -> pooled rows -> vectors or logits, many texts a call and none padded.

Runners stage, under `rlx.runners.encoder`. Texts are packed into calls of a program, longest first, each a segment of
its rows. So a text has the same bits alone and packed. The program of calls up to `ROWS` rows, and those of longer
texts, are compiled at first use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.backends import backend
from rlx.backends.program import Program
from rlx.compiler.compile import Compiler, worker_count
from rlx.compiler.tensors import Tensors
from rlx.engine.model_runner import packed
from rlx.engine.opening.encoder import EncoderPlan
from rlx.engine.opening.options import EngineOptions
from rlx.engine.opening.setup import chosen_profile, compile_cache
from rlx.errors import NumericalError, named_refusals
from rlx.ir.graph import Graph
from rlx.models.encoder import HIDDEN, POOLED, RESULT
from rlx.models.variants import with_adapters
from rlx.passes.layout import weight_table
from rlx.passes.options import MAX_SEGMENTS
from rlx.passes.segments import SEGMENTS_INPUT
from rlx.passes.specialize import ROWS_INPUT
from rlx.weights import WeightLoader

Rows = npt.NDArray[np.float32]
Done = Callable[[int], None]

ROWS = 512  # of a call: enough to read the weights once for much arithmetic, few enough for the caches of a CPU
HEAD_ROWS = 64


@dataclass(frozen=True)
class Text:
    """A text as token ids.

    Attributes:
        second: where the second text of a pair begins; None for a single text.
    """

    ids: Sequence[int]
    second: int | None = None

    def __len__(self) -> int:
        return len(self.ids)


class Encoder:
    """A loaded encoder. One thread at a time computes; others wait between two calls of a program.

    Args:
        loader: the open file; closed with the encoder.
        options: those of `EngineOptions` that concern a model without caches.

    Attributes:
        plan: the graphs, and what the files say.
        threads: how many compute.
        steps, tokens: calls of programs so far, and the tokens that they computed.

    Raises:
        ModelFileError: the files cannot be used.
        ArgumentError, ProfileError, TargetError: an option is out of its range.
    """

    def __init__(self, loader: WeightLoader, options: EngineOptions) -> None:
        self.profile = chosen_profile(options.profile, options)
        target = backend(self.profile.device).target(self.profile.level)
        self.plan = EncoderPlan.of(loader, target.capabilities.layouts, options.adapters)
        self.compiler = Compiler(target, compile_cache(options.cache, self.profile), options.progress)
        self._dump = Path(options.dump_ir) if options.dump_ir else None
        self._progress, self._lock, self._closed = options.progress, Lock(), False
        self._programs: dict[tuple[str, int, bool], Program] = {}
        self.threads = worker_count(self.profile.threads)
        self._workers = self.compiler.workers(self.threads)
        self.steps = self.tokens = 0

    # -- loading ------------------------------------------------------------------------------------------------------

    @cached_property
    def _tensors(self) -> Tensors:
        """The packed weights, of both graphs."""
        layouts, tensors = self.compiler.target.capabilities.layouts, Tensors(self.compiler, self._workers)
        table: dict[str, dict[str, Any]] = {}
        for graph in filter(None, (self.plan.body, self.plan.head)):
            for name, value in graph.constants.items():
                tensors.add_array(name, value)
            table |= {name: row for name, row in weight_table(graph, layouts).items() if name not in graph.constants}
        with named_refusals():
            tensors.load(table, self.plan.source, self._progress)
            if (adapters := self.plan.adapters) is not None:
                tensors.load(adapters.rows(self.plan.body, layouts), adapters)
        return tensors

    @cached_property
    def _adapted(self) -> Graph:
        """The body with adapters."""
        assert self.plan.adapters is not None
        return with_adapters(self.plan.body, self.plan.adapters.low_rank)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in memory."""
        return self._tensors.nbytes if "_tensors" in vars(self) else 0

    def _program(self, kind: str, most: int, adapted: bool = False) -> Program:
        """The program of the body or, if `kind` is `RESULT`, of the head, for calls of up to `most` rows."""
        key = kind, most, adapted
        if key not in self._programs:
            graph = self.plan.head if kind == RESULT else self._adapted if adapted else self.plan.body
            assert graph is not None
            capacity = ("CTX", (self._tile, self._capacity(most, MAX_SEGMENTS)))
            options = self.profile.options(
                (self._least, most),
                segments=kind != RESULT,
                all_rows=kind != ROWS_INPUT,
                symbols=(capacity,) if kind != RESULT else (),
            )
            with named_refusals():
                name = f"{graph.name}-{most}" + "-adapters" * adapted
                dump = self._dump and self._dump / name
                compiled = self.compiler.program(graph, options, dump=dump)
                program = compiled.instance(self._workers)
            names = graph.leaves("weight")
            program.bind({name: self._tensors.buffers[name] for name in names})
            self._programs[key] = program
        return self._programs[key]

    @property
    def _tile(self) -> int:
        return self.compiler.target.capabilities.layouts.tile

    @property
    def _least(self) -> int:
        """The fewest rows of a call: with fewer, a device that multiplies bf16 would compute otherwise."""
        has = self.compiler.target.capabilities
        return has.bf16_rows if has.bf16_dots or has.bf16_tiles else 1

    def _capacity(self, rows: int, texts: int) -> int:
        """Positions for the keys of some texts, each of which begins at a tile."""
        layouts = self.compiler.target.capabilities.layouts
        return rows + texts * (layouts.tile - 1) + layouts.room + layouts.page

    def close(self) -> None:
        """Releases memory and closes the file. Can be called more than once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for program in self._programs.values():
                program.close()
            self._programs.clear()
            if "_tensors" in vars(self):
                self._tensors.close()
            self._workers.close()
            self.plan.weights.close()

    # -- computing ----------------------------------------------------------------------------------------------------

    def pooled(self, texts: Sequence[Text], pooling: str, done: Done | None = None, adapter: int = 0) -> Rows:
        """The pooled row of each text, float32 [n, hidden], in the order given; of a text without ids zeros.

        Args:
            pooling: "cls", "last", "mean" or "max".
            adapter: the number of the adapter that all rows get, 0 for none.
            done: called with the number of texts that are done, after each call of a program.

        Raises:
            NumericalError: a row has a NaN or an infinity.
        """
        found, count = np.zeros((len(texts), self.plan.config.hidden), np.float32), 0
        for numbers in packed([len(text) for text in texts], ROWS, MAX_SEGMENTS):
            if filled := [number for number in numbers if len(texts[number])]:
                with self._lock:
                    found[filled] = self._run([texts[number] for number in filled], pooling, adapter)
            count += len(numbers)
            if done is not None:
                done(count)
        if not np.isfinite(found).all():
            raise NumericalError("a hidden state is NaN or infinite", where="encoder", hint="the file may be damaged")
        return found

    def through_head(self, rows: Rows) -> Rows:
        """The results of the head for pooled rows, float32 [n, width]; the rows themselves without a head."""
        if self.plan.head is None or not len(rows):
            return rows
        parts = []
        with self._lock:
            program = self._program(RESULT, HEAD_ROWS)
            for at in range(0, len(rows), HEAD_ROWS):
                part = rows[at : at + HEAD_ROWS]
                count = max(len(part), self._least)
                program.inputs[POOLED][: len(part)] = part
                program.run(SEQ=count)
                parts.append(program.output(RESULT, SEQ=count)[: len(part)].copy())
        return np.concatenate(parts)

    def _run(self, texts: Sequence[Text], pooling: str, adapter: int) -> Rows:
        """The pooled rows of texts that fit into one call."""
        lengths = np.array([len(text) for text in texts])
        ends = lengths.cumsum()
        rows, most = int(ends[-1]), ROWS
        while most < rows:
            most *= 2
        chosen = {"cls": ends - lengths, "last": ends - 1}.get(pooling)
        program = self._program(HIDDEN if chosen is None else ROWS_INPUT, most, bool(adapter))
        extents = {"SEQ": max(rows, self._least), "PAST_SEQ": 0, "SEGMENTS": len(texts), "OUTS": len(texts), "SLOTS": 1}
        extents["CTX"] = self._fill(program, texts, lengths, ends)
        if chosen is not None:
            program.inputs[ROWS_INPUT][: len(texts)] = chosen
        if adapter:
            program.inputs["adapter"][: extents["SEQ"]] = adapter
        program.run(**extents)
        self.steps, self.tokens = self.steps + 1, self.tokens + rows
        found = program.output(HIDDEN, **extents)
        if chosen is not None:
            return found[: len(texts)].copy()
        each = (found[end - length : end] for length, end in zip(lengths, ends, strict=True))
        rows_of = [row.max(0) if pooling == "max" else row.mean(0, dtype=np.float64) for row in each]
        return np.stack(rows_of).astype(np.float32)

    def _fill(
        self, program: Program, texts: Sequence[Text], lengths: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
    ) -> int:
        """Sets the inputs of a call; returns the positions that the keys take."""
        inputs, rows, config = program.inputs, int(ends[-1]), self.plan.config
        inputs["tokens"][:rows] = np.concatenate([text.ids for text in texts])
        inputs["tokens"][rows : self._least] = 0
        if "positions" in inputs:
            inputs["positions"][:rows] = np.concatenate([np.arange(n) for n in lengths]) + config.first_position
            inputs["positions"][rows : self._least] = 0
        if "types" in inputs:
            inputs["types"][: max(rows, self._least)] = 0
            for text, end in zip(texts, ends, strict=True):
                if text.second is not None and config.types > 1:
                    inputs["types"][end - len(text) + text.second : end] = 1
        tile, page = self._tile, self.compiler.target.capabilities.layouts.page
        sizes = -(-lengths // tile) * tile
        table = inputs[SEGMENTS_INPUT][: len(texts)]
        table[:] = np.stack([ends - lengths, lengths, 0 * lengths, sizes.cumsum() - sizes], axis=1)
        used = int(sizes.sum()) + self.compiler.target.capabilities.layouts.room
        return -(-used // page) * page
