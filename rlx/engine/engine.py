"""The engine under every runner: a model's programs, weights and states, with one main method, `step`.

It does not sample and does not process text. `step` appends token ids to sequences and returns logits.
`model_runner.py` runs the programs, and `rlx.engine.kv.pool` holds the states.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Ids
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx import compiler, text, vision, weights
from rlx.backends.device import Workers
from rlx.backends.memory import Values
from rlx.closing import on_error
from rlx.compiler.compile import Compiler, Progress
from rlx.compiler.guards import row_numbers
from rlx.compiler.tensors import Tensors
from rlx.engine import kv, programs, speculation
from rlx.engine.images import ImageInput
from rlx.engine.kv.pool import CachePool
from rlx.engine.kv.prompt_embeddings import PromptEmbeddings
from rlx.engine.kv.sequence import Sequence
from rlx.engine.model_runner import ALL_ROWS_VALUES, Limits, ModelRunner, Rows, Segment
from rlx.engine.opening.options import (
    IMAGE_CACHE_BYTES,
    STALL_MS,
    EngineOptions,
    method_takes_options,
    parse_image_bytes,
)
from rlx.engine.opening.setup import Plan, Source, identity, pools_of, tokenizer_of
from rlx.engine.programs.background import BackgroundCompiler
from rlx.engine.programs.host import Host
from rlx.engine.programs.programs import (
    HIDDEN,
    TOWER,
    Bucketing,
    ProgramRecord,
    Programs,
    ProgramSpec,
    bucketing_of,
    expected_programs,
    programs_of,
)
from rlx.engine.request import Logits
from rlx.engine.token_run import Run, RunRow, all_tokens, begin_run
from rlx.errors import SnapshotError
from rlx.ir import dims
from rlx.models.variants import EmbeddedRows
from rlx.passes.layout import HOST_LAYOUT
from rlx.sampling import SampleOpts
from rlx.sampling.choice import Choose
from rlx.text.chat import template_text
from rlx.tracing import span
from rlx.weights import WeightLoader, open_weights

if TYPE_CHECKING:
    from rlx.engine.kv.disk_kv_cache import DiskKVCache
    from rlx.engine.kv.prefix_writer import PrefixWriter
    from rlx.engine.kv.snapshot import Snapshot
    from rlx.engine.opening.options import ModelSource
    from rlx.engine.programs.ready import ReadyPrograms
    from rlx.engine.speculation.drafts import Drafting
    from rlx.models.vision_config import VisionConfig
    from rlx.vision.opening import MmprojPath, Vision
    from rlx.vision.tower import Tower
    from rlx.vision.weights import TowerWeights


#: The parts of an engine that hold memory or threads; the last one is closed first. Workers read the memory of others.
_PARTS = ("pool", "_tensors", "_host", "_programs", "_vision", "_drafting", "_workers", "prefix_writer", "ahead")


class Engine:
    """A loaded model. Make one with `Engine.open`.

    `step` computes a batch of sequences, which `open_sequence` opens.

    Attributes:
        ahead: compiles programs in the background.
        adapters: those that requests may have; None if there are none.
        check_fits: raises `PoolFullError` if the pool can never hold so many positions of one sequence.
        device: the name of what it runs on.
        n_cpu_moe: layers whose experts the CPU computes beside a card.
        most_rows: maximum number of rows in a call of `verify`.
        native_loops: whether one native call runs several steps; otherwise each runs alone, where it can be observed.
        open_sequence: opens a sequence, see `CachePool.open`.
        pool: the states of all sequences.
        tables: the programs in memory, "prefill", "decode" and "batch".
        images: how images come into prompts.
        kept: states of prompts on disk; None without the option `cache_kv`.
        profile: the compile profile of the programs.
        step, compute: compute a batch, see `ModelRunner`.
        weights: the open file.
    """

    images: ImageInput | None = None
    choose: Choose
    check_fits: Callable[[int], None]
    step: Callable[[Ids[Segment]], list[Logits | None]]
    compute: Callable[[Ids[Segment]], list[Values | None]]
    kept: DiskKVCache | None = None
    prefix_writer: PrefixWriter | None = None
    _workers: Workers
    _tensors: Tensors
    _vision: Vision | None = None

    def __init__(
        self,
        plan: Plan,
        progress: Progress | None = None,
        keep_packed: bool = False,
        ahead: Ids[ProgramSpec] = (),
        mmproj: MmprojPath | None = None,
        chat_template: str | None = None,
    ) -> None:
        setup = plan.setup
        self.config, self.max_seq, self.most_rows = plan.config, setup.max_seq, setup.profile.buckets[-1]
        self.graph = plan.graph.replace(outputs={"logits": plan.graph.outputs["logits"]})
        self._weights, self._setup, self._progress, self._loaded = plan.weights, setup, progress, False
        self._keep_packed, self._path = keep_packed, plan.weights.loader.path
        self._chat_template = chat_template
        self.profile, self.weights, self.adapters = setup.profile, plan.weights, plan.adapters
        bucketing = bucketing_of(setup.profile, setup.max_seq)
        self._draftings, self._drafting, self._draft_lock = dict[str, "Drafting"](), ExitStack(), Lock()
        self.ahead = BackgroundCompiler(progress)
        self._compiler = Compiler(setup.target, setup.cache, self.ahead.tell, self.ahead.compiling)
        self.device, self.native_loops = self._compiler.backend.name, self._compiler.native_loops
        self._mmproj, self._vision_lock = mmproj, Lock()  # callers and the engine's loop ask for the tower
        placed, self.n_cpu_moe = plan.cpu_experts.placed, plan.cpu_experts.n
        telling = self.ahead.tell, self.ahead.compiling
        self._host = host = Host(placed(plan.graph), setup, *telling) if self.n_cpu_moe else None
        places = (lambda: self._workers), (lambda: {**self._tensors.buffers, **(host.tensors.buffers if host else {})})
        self._programs = Programs(plan.graph, setup, self._compiler, *places, placed=placed, host=host)
        self.tables = self._programs.tables
        self._compile_ahead(ahead)
        with on_error(partial(self.close, keep_file=True)):
            if mmproj is not None:  # whoever names one has images: what is wrong is said now
                _ = self.vision
            self._workers = self._compiler.workers(setup.threads)
            self._tensors = Tensors(self._compiler, self._workers)
            self.choose = self._compiler.backend.chooser(self._workers, self._compiler)
            memory, (nbytes,) = self._compiler.backend.memory, pools_of([plan])
            plan.check_memory(nbytes)
            self.pool = CachePool(
                self.graph,
                memory,
                setup.layouts,
                max_seq=self.max_seq,
                rows=self.most_rows,
                kv_bytes=nbytes,
                fitted=self._fitted,
            )
            if setup.cache_kv is not None:
                self.kept, self.prefix_writer = kv.prefix_writer.keeping(
                    setup, self._compiler, self.graph, self.pool, plan.weights.loader
                )
            self._programs.bind(self.pool.memory)
            self.model_runner = ModelRunner(self._programs, self.pool, bucketing, self._limits(), self.load)
            self.model_runner.is_pending = self.ahead.is_pending
            self.step, self.compute = self.model_runner.step, self.model_runner.compute
            self.check_fits, self.open_sequence = self.pool.check_fits, self.pool.open
            self.model_runner.adapters = None if plan.adapters is None else plan.adapters.low_rank

    @classmethod
    @method_takes_options(EngineOptions)
    def open(cls, path: ModelSource, options: EngineOptions) -> Engine:
        """Opens a model file or directory, checks it, and loads its weights.

        Args:
            path: a file or directory, or an open `WeightLoader`, which the engine then owns.
            options: the fields of `EngineOptions`.

        Raises:
            ArgumentError: `keep_packed` with a cache that has no folder, or an option is out of its range.
            ModelFileError and its subclasses: the file cannot be used.
        """
        loader = path if isinstance(path, WeightLoader) else open_weights(path)
        with on_error(loader.close):
            return cls.of(loader, options)

    @classmethod
    def of(cls, loader: WeightLoader, options: EngineOptions) -> Engine:
        """As `open`, for an open file; the file stays open if this fails."""
        with span("read the configuration", "open"):
            plan = Plan.of(loader, options)
        ahead = expected_programs(options.compile_ahead, plan.setup) if options.load else ()
        if plan.adapters is not None:
            ahead = [*ahead, *(replace(spec, adapters=plan.adapters.low_rank) for spec in ahead)]
        with span("make the engine", "open"):
            template = None if options.chat_template is None else template_text(options.chat_template)
            engine = cls(plan, options.progress, options.keep_packed, ahead, options.mmproj, template)
        limit = options.image_cache_bytes
        kept = IMAGE_CACHE_BYTES if limit is None else parse_image_bytes(limit)
        with on_error(partial(engine.close, keep_file=True)):
            engine.images = ImageInput(
                lambda: engine.vision, engine.config.arch, options.image_options(), kept, STALL_MS / 1000
            )
            if options.load:
                engine.load()
        return engine

    def _limits(self) -> Limits:
        fitting = [b for b in self.profile.buckets if b * self.config.vocab_size <= ALL_ROWS_VALUES]
        # A layer's own embedding table may be smaller than the vocabulary.
        ids = min(dims.value(each.rows, {}) for each in row_numbers(self.graph))
        rows, embeds = max(fitting, default=1), EmbeddedRows.of(self.config)
        widths = (self.config.hidden, (1 + embeds.deepstack) * self.config.hidden)
        return Limits(self.max_seq, self.most_rows, rows, ids, embeds, widths)

    def load(self) -> None:
        """Packs all weights, once."""
        if self._loaded:
            return
        for name, value in self.graph.constants.items():
            self._tensors.add_array(name, value)
        rows = {name: row for name, row in self._programs.weights.items() if row["layout"] != HOST_LAYOUT}
        source, loader = Source(self._weights, self.config), self._weights.loader
        cached = partial(compiler.packed_cache.cache_of, loader.path.name, loader.stamps())
        kept = cached if self._keep_packed else lambda made, weights: None
        with span("load the weights", "open"):
            self._tensors.load(rows, source, self._progress, kept(self._compiler, rows))
            if self._host is not None:
                self._host.load(source, self._progress, kept)
            if self.adapters is not None:
                self._tensors.load(self.adapters.rows(self.graph, self._setup.layouts), self.adapters)
        self._loaded = True

    # -- sequences ------------------------------------------------------------------------------------------------

    def _compile_ahead(self, specs: Ids[ProgramSpec]) -> None:
        """Begins to compile programs in the background."""
        jobs = dict[Hashable, Callable[[], object]]()
        for spec in specs:
            jobs[spec] = partial(self._programs.compile_missing, spec)
            if len(jobs) == 1:  # after the program for the prompt comes the choice of its first token
                jobs["choice"] = partial(self._compiler.backend.prepare_choosing, self._compiler)
        self.ahead.start(jobs)

    def _fitted(self, embeddings: PromptEmbeddings) -> PromptEmbeddings:
        """Prompt embeddings as this model takes them; `PromptError` if it cannot."""
        kind = self.model_runner.limits.embeds
        embeddings.check_width(self.model_runner.limits.widths)
        embeddings = embeddings.fitting(bool(kind.sections), kind.two_way != "none")
        embeddings.check_calls(self.most_rows)
        return embeddings

    def append(self, sequence: Sequence, tokens: Ids[int], logits: Rows = "last") -> Logits:
        """`step` of one segment."""
        (found,) = self.step([Segment(sequence, tokens, logits)])
        assert found is not None
        return found

    def run(self, rows: Ids[RunRow], *, loads: bool = True) -> Run | None:
        """Steps of some sequences that take each other's tokens: `token_run.begin_run`.

        None if there is no program for every past, or steps run one by one here, where each can be observed.
        """
        if not (self.native_loops and self.bucketing.decode == "dynamic"):
            return None
        return begin_run(self.model_runner, rows, self.choose, loads=loads)

    def greedy(self, sequence: Sequence, token: int, count: int, stops: Ids[int] = ()) -> list[int]:
        """Appends `token` and the likeliest tokens after it to a sequence, for at most 50 ms.

        Ties go to the lower token id. The sequence then also holds all tokens of the result but the last.

        Args:
            count: maximum number of tokens. At least one is returned, possibly fewer than `count`.
            stops: token ids that end it.

        Returns:
            `[]` if only a step can compute the next one, see `run`.

        Raises:
            PromptError, PoolFullError: as `step`.
            NumericalError: a logit is NaN or infinite; the sequence ends before the token that it followed.
        """
        run = self.run([row := RunRow(sequence, token, count, stops)])
        return [] if run is None else all_tokens(run, row)

    def hidden(self, sequence: Sequence, ids: Ids[int]) -> Logits:
        """Appends ids to a sequence: the hidden states before the head, float32 [len(ids), hidden].

        Raises:
            PromptError, BusyError, PoolFullError: as `step`.
        """
        self.model_runner.reserve(sequence, ids)
        return np.concatenate([np.asarray(each) for each in self.model_runner.pieces(sequence, ids, False, HIDDEN)])

    def snapshot_of(self, sequence: Sequence) -> Snapshot:
        """A copy of a sequence: its ids, the used part of every cache, and the recurrent states.

        Raises:
            SnapshotError: it has an adapter.
        """
        if sequence.adapter:
            raise SnapshotError("the session has an adapter: it cannot be saved", where="snapshot")
        if len(sequence):
            self.model_runner.refresh(sequence)
        return kv.sequence_snapshot.take_snapshot(sequence, self._identity)

    def restored(self, snapshot: Snapshot) -> Sequence:
        """A new sequence that goes on from a snapshot, also from one of another engine of the same model.

        The context length may differ; the cache types must be the same.

        Raises:
            SnapshotError: it is of another model or other state formats.
            PromptError: it holds more tokens than the context.
            PoolFullError: the pool has no room for it.
        """
        kv.sequence_snapshot.check_snapshot(self.pool, snapshot, self._identity, self._path, self.model_runner.limits)
        sequence = self.pool.open()
        with on_error(sequence.discard):
            kv.sequence_snapshot.restore(sequence, snapshot)
        return sequence

    def prompt_embeddings(self, count: int, embeds: Any, bias: Any = None) -> PromptEmbeddings:
        """The prompt embeddings for `count` positions, optionally with a bias; see `PromptEmbeddings.checked`.

        Raises:
            PromptError: wrong shapes, or the bias opens later keys in a prompt that is longer than one chunk.
        """
        embeddings = PromptEmbeddings.checked(embeds, bias, count, self.config.hidden, self.config.heads)
        embeddings.check_calls(self.most_rows)
        return embeddings

    @property
    def shared_rows(self) -> int:
        """Largest row count of a prompt that may share a step with other prompts: its device says so."""
        return self._compiler.backend.shared_rows

    @property
    def bucketing(self) -> Bucketing:
        """Chooses the program of a call of one sequence."""
        return self.model_runner.bucketing

    @cached_property
    def _identity(self) -> str:
        return identity(self.graph, self._weights.loader)

    # -- speculative decoding -------------------------------------------------------------------------------------

    def drafting(self, name: str) -> Drafting:
        """What makes drafts for this model, see `open_drafting`; it is opened at first use.

        Raises:
            ModelFileError, TokenizerError: the file cannot be used.
            ArgumentError: it is of another model, or has another vocabulary.
        """
        with self._draft_lock:
            if name not in self._draftings:
                given = self, self._programs.graph, self._setup, self._tensors, self._progress, len(self._draftings)
                self._draftings[name] = made = speculation.drafting.open_drafting(name, *given)
                self._drafting.callback(made.close)
            return self._draftings[name]

    # -- images -----------------------------------------------------------------------------------------------------

    @property
    def vision(self) -> Vision:
        """The model's vision tower, opened at first use; `tower` is None if the model takes text only."""

        def make(config: VisionConfig, weights: TowerWeights) -> Tower:
            return vision.Tower(config, weights, self.profile, self._compiler, lambda: self._workers, self._progress)

        with self._vision_lock:
            if self._vision is None:
                self._vision = vision.Vision(self._weights.loader, self.config, self._mmproj, make)
            return self._vision

    # -- programs -------------------------------------------------------------------------------------------------

    def compile(
        self,
        on_program: Callable[[ProgramRecord], None] | None = None,
        batch: int = 1,
        phase: str | None = None,
        rows: int | None = None,
    ) -> list[ProgramRecord]:
        """Compiles (or finds in the cache) the programs of buckets, batches and the tower, and the weight packers."""
        records = []
        if phase != TOWER:
            records += self._programs.prepare(programs_of(self._setup.profile, batch, phase, rows), on_program)
        if phase in (None, TOWER) and (tower := self.vision.required() if phase else self.vision.tower):
            records += programs.ready.compile_tower(tower, rows, on_program)
        return records

    @property
    def ready(self) -> ReadyPrograms:
        """The programs that were compiled or loaded so far, for inspection."""
        tower = self._vision.opened if self._vision is not None else None
        return programs.ready.ready_programs(self._programs, tower, self._compiler.target)

    @cached_property
    def tokenizer(self) -> text.Tokenizer:
        """The model's own tokenizer, with the chat template that was given in place of its own."""
        with span("load the tokenizer", "open"):
            return tokenizer_of(self._weights.loader, self._chat_template)

    @cached_property
    def recommended(self) -> SampleOpts | None:
        """The sampling options in the model's files; None if there are none."""
        return weights.recommended.recommended(self._weights.loader)

    def stats(self) -> dict[str, Any]:
        """Memory in bytes by use, threads, counters of the caches, and the programs that were compiled."""
        host = self._host
        return {
            "parameters": sum(prod(info.shape) for info in self._weights.loader.tensors.values()),
            "weights_bytes": self._tensors.nbytes,
            "host_weights_bytes": host.tensors.nbytes if host else 0,
            "n_cpu_moe": self.n_cpu_moe,
            "kept_bytes": self._tensors.kept_bytes + (host.tensors.kept_bytes if host else 0),
            **self.pool.stats(),
            "arena_bytes": self._programs.arena_bytes,
            "threads": self._workers.n,
            "target": self._compiler.target.level,
            "precision": self._setup.profile.precision,
            "deterministic": self._setup.is_deterministic,
            "profile": str(self._setup.source) if self._setup.source else None,
            "kv_dtype": self._setup.kv_type.name,
            "cache": self._compiler.cache.stats,
            "compiled": [*self._compiler.compiled, *(host.compiler.compiled if host else ())],
            "programs": {phase: replace(table.stats) for phase, table in self._programs.tables.items()},
        }

    def close(self, *, keep_file: bool = False) -> None:
        """Stops the workers, releases memory and, unless `keep_file` is set, closes the model file."""
        with span("close the model", "open"), ExitStack() as parts:  # each is closed, whatever another one raises
            if not keep_file:
                parts.callback(self._weights.close)
            for name in _PARTS:
                if (part := getattr(self, name, None)) is not None:
                    parts.callback(part.close)
