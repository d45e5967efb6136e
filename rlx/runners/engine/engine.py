"""The engine under every runner: a model's programs, weights and session, with one main method, `forward`.

It does not sample and does not process text. `forward` appends token ids to the session and returns logits. The ids run
in the smallest program whose bucket holds them; longer inputs run in chunks of the largest bucket.
`rlx.runtime.session` describes how caches and recurrent states return to an earlier length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx import text
from rlx.backends.base import Program, Workers
from rlx.errors import ArgumentError, PromptError, SnapshotError
from rlx.ir import dims
from rlx.runners.engine.ahead import Ahead, expected_rows
from rlx.runners.engine.batch import Batch, programs_of
from rlx.runners.engine.bucketing import Bucketing
from rlx.runners.engine.greedy import greedy_run
from rlx.runners.engine.program_spec import GREEDY, HIDDEN, LOGITS, ProgramSpec
from rlx.runners.engine.programs import Programs
from rlx.runners.engine.ready import ProgramRecord, ReadyPrograms
from rlx.runners.opening.identity import identity
from rlx.runners.opening.opened import Source, tokenizer_of
from rlx.runners.opening.options import EngineOptions, method_takes_options
from rlx.runners.opening.setup import Plan
from rlx.runners.speculation.mtp import DRAFTS, HeadDrafter, Predictor
from rlx.runners.speculation.mtp_decode import drafted_run
from rlx.runners.speculation.speculative import Counters
from rlx.runtime.compile import Compiler, Progress
from rlx.runtime.guards import row_numbers
from rlx.runtime.kv import States
from rlx.runtime.packed_cache import PackedWeightCache, weights_key
from rlx.runtime.prompt_embeddings import PromptEmbeddings, feed
from rlx.runtime.session import Session
from rlx.runtime.snapshot import Snapshot
from rlx.runtime.tensors import Tensors
from rlx.sampling import SampleOpts
from rlx.sampling.recommended import recommended
from rlx.weights import WeightLoader, open_weights

if TYPE_CHECKING:
    from rlx.runners.opening.options import ModelSource

ALL_ROWS_VALUES = 1 << 24  # maximum number of logits per step when those of every position are requested


class Engine:
    """A loaded model. Make one with `Engine.open`.

    Attributes:
        ahead: compiles programs in the background.
        device: the name of what it runs on.
        bucketing: chooses the program of a call.
        most_rows: maximum number of rows in a call of `verify`.
        tables: the programs in memory, "prefill", "decode" and "batch".
        profile: the compile profile of the programs.
        weights: the open file.
    """

    _pool: Workers
    _tensors: Tensors
    _predictor: Predictor | None = None  # created at first use
    _hearing = False  # whether the MTP head receives the hidden states
    _last: Program | None = None  # the program of the last step

    def __init__(
        self, plan: Plan, progress: Progress | None = None, keep_packed: bool = False, ahead: Sequence[int] = ()
    ) -> None:
        setup = plan.setup
        self.config, self.max_seq, self.most_rows = plan.config, setup.max_seq, setup.profile.buckets[-1]
        self.graph = plan.graph.replace(outputs={"logits": plan.graph.outputs["logits"]})
        self._weights, self._setup, self._progress, self._loaded = plan.weights, setup, progress, False
        self._keep_packed = keep_packed
        self.bucketing, self.profile, self.weights = Bucketing(setup.profile.ranges), setup.profile, plan.weights
        self.ahead = Ahead(progress)
        self._compiler = Compiler(setup.target, setup.cache, self.ahead.tell)
        self.device = self._compiler.backend.name
        places = (lambda: self._pool), (lambda: self._tensors.addresses)
        self._programs = Programs(plan.graph, setup, self._compiler, *places, ahead=self.ahead)
        self.tables = self._programs.tables
        self.ahead.start(partial(self._programs.compile_missing, spec) for spec in self._expected(ahead))
        try:
            self._pool = self._compiler.workers(setup.threads)
            self._tensors = Tensors(self._compiler, self._pool)
            self._session = self._home = self.new_session()
            self._programs.bind(self._states.addresses)
        except BaseException:
            self.ahead.close()
            raise

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
        try:
            return cls.of(loader, options)
        except BaseException:
            loader.close()
            raise

    @classmethod
    def of(cls, loader: WeightLoader, options: EngineOptions) -> Engine:
        """As `open`, for an open file; the file stays open if this fails."""
        plan = Plan.of(loader, options)
        ahead = expected_rows(options.compile_ahead, plan.setup) if options.load else ()
        engine = cls(plan, options.progress, options.keep_packed, ahead)
        try:
            if options.load:
                engine._load()
        except BaseException:
            engine.close(keep_file=True)
            raise
        return engine

    def _expected(self, rows: Sequence[int]) -> list[ProgramSpec]:
        """Specs of the programs for calls of these row counts, without duplicates; 0 is greedy generation."""
        largest = self.most_rows
        return list(dict.fromkeys(ProgramSpec(self.bucketing.bucket(min(n, largest))) if n else GREEDY for n in rows))

    def _load(self) -> None:
        """Packs all weights, once."""
        if self._loaded:
            return
        for name, value in self.graph.constants.items():
            self._tensors.add_array(name, value)
        rows = self._programs.weights
        kept = self._kept(rows) if self._keep_packed else None
        self._tensors.load(rows, Source(self._weights, self.config), self._progress, kept)
        self._loaded = True

    def _kept(self, rows: Mapping[str, Any]) -> PackedWeightCache:
        """The packed-weight cache in the cache's folder, existing or not."""
        loader = self._weights.loader
        return PackedWeightCache(
            self._compiler.cache, weights_key(self._compiler, loader.path.name, loader.stamps(), rows)
        )

    # -- running --------------------------------------------------------------------------------------------------

    @property
    def past(self) -> int:
        """Number of tokens in the session."""
        return len(self._session.ids)

    @property
    def ids(self) -> list[int]:
        """The token ids of the session; a copy."""
        return self._session.ids.tolist()

    def forward(self, ids: Sequence[int], all_rows: bool = False) -> np.ndarray:
        """Appends ids to the session.

        After an error or an interrupt the session holds the ids of the chunks that were finished.

        Returns:
            float32 [vocab], the logits after the last id, or with `all_rows` [len(ids), vocab].

        Raises:
            PromptError: no ids, or more than the cache has room for.
        """
        rows = list(self._steps(ids, all_rows))
        return np.concatenate(rows) if all_rows else rows[-1][0]

    def forward_rows(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """As `forward` with `all_rows`, in pieces float32 [some rows, vocab], each computed on demand."""
        return self._steps(ids, True)

    def hidden_rows(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """As `forward_rows`, but returns the hidden states before the head: float32 [some rows, hidden]."""
        return self._steps(ids, False, HIDDEN)

    def _steps(self, ids: Sequence[int], all_rows: bool, output: str = LOGITS) -> Iterator[np.ndarray]:
        self._prepare(ids)
        self._catch_up()
        for chunk in self._chunks(ids, all_rows):
            yield self._step(chunk, all_rows, output)
        if len(ids) > 1:
            self._session.mark()

    def verify(self, ids: Sequence[int]) -> np.ndarray:
        """As `forward` with `all_rows`, for drafts: all ids but the first may be rejected.

        Recurrent states are unchanged until the next call. `trim` is free before it. The next call then updates the
        states by the ids that remain.

        Raises:
            PromptError: as `forward`.
        """
        self._prepare(ids)
        self._catch_up()
        return self._step(ids, True, aside=len(ids) > 1 and bool(self._session.recurrent))

    def prompt_embeddings(self, count: int, embeds: Any, bias: Any = None) -> PromptEmbeddings:
        """Checked prompt embeddings for `forward_embeddings`: `count` positions; see `PromptEmbeddings.checked`.

        Raises:
            PromptError: wrong shapes, or the bias opens later keys in a prompt that is longer than one chunk.
        """
        embeddings = PromptEmbeddings.checked(embeds, bias, count, self.config.hidden, self.config.heads)
        embeddings.check_calls(self._setup.profile.buckets[-1])
        return embeddings

    def forward_embeddings(self, ids: Sequence[int], embeddings: PromptEmbeddings) -> np.ndarray:
        """Starts a session of `ids`, computed from prompt embeddings; otherwise as `forward`.

        Layers with their own embedding tables look `ids` up there. After an error the session is empty.
        """
        self.reset()
        self._session.embeddings = embeddings
        try:
            return self.forward(ids)
        except BaseException:
            self.reset()
            raise

    @property
    def repeats(self) -> bool:
        """Whether `greedy` can run: it needs one decode program for every past."""
        return self.bucketing.decode == "dynamic" and self._compiler.native_loops

    def greedy(self, token: int, count: int, stops: Sequence[int] = ()) -> list[int]:
        """Appends `token` and the likeliest tokens after it: `greedy_run`; `PromptError` as `forward`."""
        self._prepare([token])
        self._catch_up()
        room = min(count, self.max_seq - self.past)
        return greedy_run(self._programs[GREEDY], self._session, token, room, stops, self._rows)

    def drafted(self, drafter: HeadDrafter, token: int, count: int, stops: Sequence[int], sums: Counters) -> list[int]:
        """As `greedy`, with MTP drafts: `drafted_run`."""
        self._prepare([token])
        self._catch_up()
        room = min(count, self.max_seq - self.past)
        return drafted_run(self._programs, self._session, drafter, token, room, stops, self._rows, sums)

    def _prepare(self, ids: Sequence[int]) -> None:
        """Checks the ids and that the cache has room for them, and loads the weights."""
        if not len(ids):
            raise PromptError("no token ids were given", hint="Give at least one.")
        if max(ids) >= self._rows:
            what = f"token id {max(ids)} is out of range: the smallest embedding table has {self._rows} rows"
            raise PromptError(what, hint="Ids above stand for parts of images or sound: leave them out.")
        if self.past + len(ids) > self.max_seq:
            raise PromptError(
                f"{len(ids)} tokens after {self.past} do not fit the context of {self.max_seq}",
                hint="Shorten the prompt or open the model with a larger max_seq.",
            )
        self._load()

    def _chunks(self, ids: Sequence[int], all_rows: bool) -> Iterator[Sequence[int]]:
        """Splits the ids into chunks that fit the buckets."""
        largest = self._setup.profile.buckets[-1]
        if all_rows:
            fitting = [b for b in self._setup.profile.buckets if b * self.config.vocab_size <= ALL_ROWS_VALUES]
            largest = max(fitting, default=1)
        first, at = self._session.done, 0
        while at < len(ids):
            end = self._session.call_end(first + at, min(largest, len(ids) - at)) - first
            yield ids[at:end]
            at = end

    def _spec(
        self, rows: int, past: int, all_rows: bool = False, hidden: bool = False, turn: int | None = None
    ) -> ProgramSpec:
        embeddings = self._session.embeddings_at(past)
        return self.bucketing.spec(rows, past, all_rows, hidden or self._hearing, embeddings, self.max_seq, turn)

    def _step(self, ids: Sequence[int], all_rows: bool, output: str = LOGITS, aside: bool = False) -> np.ndarray:
        rows, past, turn = len(ids), self._session.done, self._states.turn if aside else None
        self._last = program = self._programs[self._spec(rows, past, all_rows, output == HIDDEN, turn)]
        feed(program.inputs, ids, past, self._session.embeddings_at(past))
        env = {"SEQ": rows, "PAST_SEQ": past, **self._states.extents}
        self._session.begin(rows, aside=aside)
        program.run(**env)
        self._session.end(ids, aside=aside)
        if self._predictor and self._hearing:
            self._predictor.hear(past, ids, program.output(HIDDEN, **env))
        return program.output(output, **env).copy()

    def _catch_up(self) -> None:
        """Brings the states up to the session's ids: applies verified rows, and recomputes what a rewind dropped."""
        session = self._session
        session.settle()
        self._advance()
        if session.done < len(session.ids):
            for chunk in self._chunks(session.ids[session.done :], False):
                self._step(chunk, False)
            session.mark()

    def _advance(self) -> None:
        """Advances the recurrent states by the rows that the last step verified."""
        (count, there), last = self._session.ahead, self._last
        if count and last and last.then and not last.closed:
            if not there:
                last.then.run(SEQ=count)
            self._session.take(count)

    # -- the session ----------------------------------------------------------------------------------------------

    def trim(self, length: int) -> None:
        """Drops everything after the first `length` tokens; exact up to rounding for every kind of state.

        This is free for full caches, and for rings up to the number of tokens that they hold beyond the window.
        Otherwise, and with recurrent states, it restores a checkpoint: the newest at or before `length`. Checkpoints
        are taken at the end of calls with several ids; only the last ones are kept. The next `forward` recomputes the
        ids after the checkpoint, or all ids if there is no checkpoint.

        Raises:
            ArgumentError: the session holds fewer tokens, or `length` is negative.
        """
        if not 0 <= length <= self.past:
            raise ArgumentError(f"cannot trim to {length}: the cache holds {self.past} tokens")
        self._session.rewind(length)
        if self._predictor:
            self._predictor.forget(length)

    def reset(self) -> None:
        """Empties the session."""
        self.trim(0)

    def snapshot(self) -> Snapshot:
        """A copy of the session: its ids, the used part of every cache, and the recurrent states."""
        self._load()
        self._catch_up()
        return self._session.snapshot(self._identity)

    def restore(self, snapshot: Snapshot) -> None:
        """Replaces the session by a snapshot, also by one of another engine of the same model.

        The context length may differ; the cache types must be the same.

        Raises:
            SnapshotError: it is of another model or other state formats; the session is unchanged.
            PromptError: it holds more tokens than the context.
        """
        self._session.check(snapshot)
        if snapshot.position > self.max_seq:
            what = f"a snapshot of {snapshot.position} tokens does not fit the context of {self.max_seq}"
            raise PromptError(what, hint="Open the model with a larger max_seq.")
        if snapshot.model != self._identity:
            what = f"the snapshot is of another model ({snapshot.model[:12]}, this is {self._identity[:12]})"
            raise SnapshotError(what, where=self._weights.loader.path, hint="Open the file that it was taken from.")
        wrong = next((i for i in snapshot.ids if not 0 <= i < self._rows), None)
        if wrong is not None:  # a rewind would look its embedding up
            what = f"the snapshot has the token id {wrong}, expected ids from 0 to {self._rows - 1}"
            raise SnapshotError(what, where="restore", hint="The file is damaged: take the snapshot anew.")
        self._session.restore(snapshot)
        if self._predictor:
            self._predictor.forget(0)

    def scratch(self) -> Scratch:
        """A context with a temporary, empty session; on exit the previous session is restored."""
        return Scratch(self)

    def swap(self, session: Session | None = None) -> None:
        """Makes a session the current one; by default the engine's own."""
        session = self._home if session is None else session
        self._session.leave()
        self._session = session
        self._programs.bind(session.states.addresses)

    def recover(self) -> None:
        """Makes the engine's own session current again after an interrupt at any point."""
        self._hearing = False
        self.swap()

    def batch(self, slots: int, length: int) -> Batch:
        """A context with `slots` sequences of at most `length` tokens; on exit the session is restored."""
        self._load()
        states = States(self.graph, length, self._setup.profile.buckets[-1], slots=slots)
        return Batch(states, slots, self._programs, self._home, self.swap, self.forward)

    def new_session(self) -> Session:
        """An empty session with new states."""
        return Session(States(self.graph, self.max_seq, self._setup.profile.buckets[-1]))

    @property
    def _states(self) -> States:
        return self._session.states

    @cached_property
    def _rows(self) -> int:
        """Rows of the smallest embedding table; a layer's own table may be smaller than the vocabulary."""
        return min(dims.value(ids.rows, {}) for ids in row_numbers(self.graph))

    @cached_property
    def _identity(self) -> str:
        return identity(self.graph, self._weights.loader)

    # -- the MTP head -------------------------------------------------------------------------------------------------

    def predicting(self, drafts: int = DRAFTS) -> Predicting:
        """A context in which the MTP head follows the session and drafts up to `drafts` tokens in a row.

        Its weights are loaded at first use.

        Raises:
            UnsupportedModelError: the model has no MTP head.
            WeightError: a tensor is missing or has the wrong shape.
        """
        self._predictor = self._predictor or self._new_predictor()
        return Predicting(self, HeadDrafter(self._predictor, lambda: self.past, drafts))

    def hear(self, hearing: bool) -> None:
        """Sets whether the MTP head receives the hidden states of each step."""
        self._hearing = hearing

    def _new_predictor(self) -> Predictor:
        self._load()
        where = (self._compiler, self._pool, self._tensors)
        return Predictor.of(self.config, self._weights, self._setup, *where, self._progress)

    # -- programs -------------------------------------------------------------------------------------------------

    def compile(
        self,
        on_program: Callable[[ProgramRecord], None] | None = None,
        batch: int = 1,
        phase: str | None = None,
        rows: int | None = None,
    ) -> list[ProgramRecord]:
        """Compiles (or finds in the cache) the programs of buckets and batches, and the weight packers."""
        return self._programs.prepare(programs_of(self._setup.profile, batch, phase, rows), on_program)

    @property
    def ready(self) -> ReadyPrograms:
        """The programs that were compiled or loaded so far, for inspection."""
        return self._programs.ready()

    @cached_property
    def tokenizer(self) -> text.Tokenizer:
        """The model's own tokenizer."""
        return tokenizer_of(self._weights.loader)

    @cached_property
    def recommended(self) -> SampleOpts | None:
        """The sampling options in the model's files; None if there are none."""
        return recommended(self._weights.loader)

    def stats(self) -> dict[str, Any]:
        """Memory in bytes by use, threads, counters of the caches, and the programs that were compiled."""
        return {
            "weights_bytes": self._tensors.nbytes,
            "kept_bytes": self._tensors.kept_bytes,
            "kv_bytes": self._states.nbytes,
            "checkpoint_bytes": self._session.checkpoint_bytes,
            "arena_bytes": self._programs.arena_bytes,
            "threads": self._pool.n,
            "target": self._compiler.target.level,
            "precision": self._setup.profile.precision,
            "profile": str(self._setup.source) if self._setup.source else None,
            "kv_dtype": self._setup.kv_type.name,
            "cache": self._compiler.cache.stats,
            "compiled": [*self._compiler.compiled],
            "programs": {phase: replace(table.stats) for phase, table in self._programs.tables.items()},
        }

    def close(self, *, keep_file: bool = False) -> None:
        """Stops the workers, releases memory and, unless `keep_file` is set, closes the model file."""
        self.ahead.close()
        self._pool.close()
        if self._predictor:
            self._predictor.close()
        self._programs.close()
        self._tensors.close()
        self._states.close()
        if not keep_file:
            self._weights.close()


class Scratch:
    """Replaces an engine's session by an empty one, as a context manager.

    `Scratch` and `Predicting` are classes, not generators. An interrupt can leave a generator suspended; it would
    then finish later, while the engine computes something else.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._session: Session | None = None  # None: the engine's own session was empty and is used

    def __enter__(self) -> Engine:
        if self._engine.past:
            self._session = self._engine.new_session()
            self._engine.swap(self._session)
        return self._engine

    def __exit__(self, *error: object) -> None:
        if self._session is None:
            self._engine.reset()
        else:
            self._engine.swap()
            self._session.states.close()


class Predicting:
    """Connects the MTP head to an engine, as a context manager: the head receives the hidden states of each step."""

    def __init__(self, engine: Engine, drafter: HeadDrafter) -> None:
        self._engine, self._drafter = engine, drafter

    def __enter__(self) -> HeadDrafter:
        self._engine.hear(True)
        return self._drafter

    def __exit__(self, *error: object) -> None:
        self._engine.hear(False)
