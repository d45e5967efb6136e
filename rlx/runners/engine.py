"""The engine under every runner: a model's programs, weights and session, and one verb, `forward`.

It knows nothing of sampling or text. A call appends token ids to the session and returns logits; the ids run through
the smallest program whose bucket holds them, and longer ones in chunks of the largest. How the session's caches and
recurrent states go back to an earlier length is in `rlx.runtime.session`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from os import PathLike
from typing import Any

import numpy as np

from rlx import text
from rlx.errors import ArgumentError, PromptError, SnapshotError
from rlx.runners.ahead import Ahead, expected_rows
from rlx.runners.batch import Batch, programs_of
from rlx.runners.drafted import drafted_run
from rlx.runners.greedy import greedy_run
from rlx.runners.identity import identity
from rlx.runners.modes import Modes
from rlx.runners.opened import Source, tokenizer_of
from rlx.runners.prediction import DRAFTS, HeadDrafter, Predictor
from rlx.runners.programs import Programs
from rlx.runners.ready import ProgramRecord, ReadyPrograms
from rlx.runners.setup import Plan
from rlx.runners.speculative import Counters
from rlx.runners.wanted import GREEDY, HIDDEN, LOGITS, Wanted
from rlx.runtime.compile import Compiler, Progress
from rlx.runtime.given import Given, feed
from rlx.runtime.guards import row_numbers
from rlx.runtime.kept import KeptWeights, weights_key
from rlx.runtime.kv import States
from rlx.runtime.native import NativeProgram
from rlx.runtime.session import Session
from rlx.runtime.snapshot import Snapshot
from rlx.runtime.tensors import Tensors
from rlx.runtime.threads import WorkerPool
from rlx.sampling import SampleOpts
from rlx.sampling.recommended import recommended
from rlx.weights import WeightLoader, open_weights

ALL_ROWS_VALUES = 1 << 24  # most logits that one call keeps when every position is wanted


class Engine:
    """A loaded model. Make one with `Engine.open`.

    Attributes:
        ahead: what compiles in the background.
        modes: which program a call runs in.
        most_rows: of a call of `verify`.
        tables: the programs in memory, "prefill", "decode" and "batch".
        profile: what they are compiled with.
        weights: the open file.
    """

    _pool: WorkerPool
    _tensors: Tensors
    _predictor: Predictor | None = None  # made when it is first wanted
    _hearing = False  # whether it is told what is computed
    _last: NativeProgram | None = None  # what the last step ran

    def __init__(
        self, plan: Plan, progress: Progress | None = None, keep_packed: bool = False, ahead: Sequence[int] = ()
    ) -> None:
        setup = plan.setup
        self.config, self.max_seq, self.most_rows = plan.config, setup.max_seq, setup.profile.buckets[-1]
        self.graph = plan.graph.replace(outputs={"logits": plan.graph.outputs["logits"]})
        self._weights, self._setup, self._progress, self._loaded = plan.weights, setup, progress, False
        self._keep_packed = keep_packed
        self.modes, self.profile, self.weights = Modes(setup.profile.ranges), setup.profile, plan.weights
        self.ahead = Ahead(progress)
        self._compiler = Compiler(setup.target, setup.cache, self.ahead.tell)
        places = (lambda: self._pool), (lambda: self._tensors.addresses)
        self._programs = Programs(plan.graph, setup, self._compiler, *places, ahead=self.ahead)
        self.tables = self._programs.tables
        self.ahead.start(partial(self._programs.compile_missing, wanted) for wanted in self._expected(ahead))
        try:
            self._pool = WorkerPool(setup.threads, self._compiler.runtime())
            self._tensors = Tensors(self._compiler, self._pool)
            self._session = self._home = self.new_session()
            self._programs.bind(self._states.addresses)
        except BaseException:
            self.ahead.close()
            raise

    @classmethod
    def open(
        cls,
        path: str | PathLike[str] | WeightLoader,
        *,
        progress: Progress | None = None,
        load: bool = True,
        keep_packed: bool = False,
        compile_ahead: bool | Sequence[int] | None = False,
        **choices: Any,
    ) -> Engine:
        """Opens a model file or directory, checks it, and loads its weights.

        Args:
            path: a file or directory, or an open `WeightLoader`, which the engine then owns.
            progress: called with (what, done, total) while weights are packed.
            load: False leaves the weights in the file until the first `forward`.
            keep_packed: map the packed weights from a copy in the cache's folder; without one, leave one there.
            compile_ahead: compile programs in the background while `ahead.is_busy()` is false: for calls of so many
                rows, in this order, or with True for all. None: as RLX_COMPILE_AHEAD says. Only with `load`.
            choices: those of `Choices`.

        Raises:
            ArgumentError: `keep_packed` with a cache that has no folder; `compile_ahead` is none of these.
            ModelFileError and its subclasses: the file cannot be used, and why.
        """
        loader = path if isinstance(path, WeightLoader) else open_weights(path)
        try:
            return cls.of(
                loader, progress=progress, load=load, keep_packed=keep_packed, compile_ahead=compile_ahead, **choices
            )
        except BaseException:
            loader.close()
            raise

    @classmethod
    def of(
        cls,
        loader: WeightLoader,
        *,
        progress: Progress | None = None,
        load: bool = True,
        keep_packed: bool = False,
        compile_ahead: bool | Sequence[int] | None = False,
        **choices: Any,
    ) -> Engine:
        """As `open`, of an open file, which stays open if this fails."""
        plan = Plan.of(loader, **choices)
        engine = cls(plan, progress, keep_packed, expected_rows(compile_ahead, plan.setup) if load else ())
        try:
            if load:
                engine._load()
        except BaseException:
            engine.close(keep_file=True)
            raise
        return engine

    def _expected(self, rows: Sequence[int]) -> list[Wanted]:
        """The programs for calls of so many rows, each once; 0 stands for the one of greedy generation."""
        largest = self.most_rows
        return list(dict.fromkeys(Wanted(self.modes.bucket(min(n, largest))) if n else GREEDY for n in rows))

    def _load(self) -> None:
        """Packs every weight, once."""
        if self._loaded:
            return
        for name, value in self.graph.constants.items():
            self._tensors.add_array(name, value)
        rows = self._programs.weights
        kept = self._kept(rows) if self._keep_packed else None
        self._tensors.load(rows, Source(self._weights, self.config), self._progress, kept)
        self._loaded = True

    def _kept(self, rows: Mapping[str, Any]) -> KeptWeights:
        """The copy of the packed weights in the cache's folder, there or not."""
        loader = self._weights.loader
        return KeptWeights(self._compiler.cache, weights_key(self._compiler, loader.path.name, loader.stamps(), rows))

    # -- running --------------------------------------------------------------------------------------------------

    @property
    def past(self) -> int:
        """How many tokens the session holds."""
        return len(self._session.ids)

    @property
    def ids(self) -> list[int]:
        """The tokens of the session; a copy."""
        return self._session.ids.tolist()

    def forward(self, ids: Sequence[int], all_rows: bool = False) -> np.ndarray:
        """Appends ids to the session.

        An error or an interrupt on the way leaves a session that holds the ids of the chunks that were done.

        Returns:
            float32 [vocab], the logits after the last id, or with `all_rows` [len(ids), vocab].

        Raises:
            PromptError: no ids, or more than the cache has room for.
        """
        rows = list(self._steps(ids, all_rows))
        return np.concatenate(rows) if all_rows else rows[-1][0]

    def forward_rows(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """As `forward` with `all_rows`, in pieces, float32 [some rows, vocab], each computed when it is asked for."""
        return self._steps(ids, True)

    def hidden_rows(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """As `forward_rows`, but what the head multiplies: float32 [some rows, hidden]."""
        return self._steps(ids, False, HIDDEN)

    def _steps(self, ids: Sequence[int], all_rows: bool, output: str = LOGITS) -> Iterator[np.ndarray]:
        self._prepare(ids)
        self._catch_up()
        for chunk in self._chunks(ids, all_rows):
            yield self._step(chunk, all_rows, output)
        if len(ids) > 1:
            self._session.mark()

    def verify(self, ids: Sequence[int]) -> np.ndarray:
        """As `forward` with `all_rows`, for ids of which all but the first may turn out wrong.

        Recurrent states stay as they are until the next call, before which `trim` costs nothing. Then they become those
        after the ids that are left.

        Raises:
            PromptError: as `forward`.
        """
        self._prepare(ids)
        self._catch_up()
        return self._step(ids, True, aside=len(ids) > 1 and bool(self._session.recurrent))

    def give(self, count: int, embeds: Any, bias: Any = None) -> Given:
        """What `forward_given` takes: embeddings of `count` positions, and perhaps a bias, see `Given.checked`.

        Raises:
            PromptError: they do not fit, or the bias opens later keys over more positions than a call has rows.
        """
        given = Given.checked(embeds, bias, count, self.config.hidden, self.config.heads)
        given.check_calls(self._setup.profile.buckets[-1])
        return given

    def forward_given(self, ids: Sequence[int], given: Given) -> np.ndarray:
        """Starts a session of `ids` that is computed from what is given in place of their embeddings; as `forward`.

        Layers with embeddings of their own look those of `ids` up. An error leaves an empty session.
        """
        self.reset()
        self._session.given = given
        try:
            return self.forward(ids)
        except BaseException:
            self.reset()
            raise

    @property
    def repeats(self) -> bool:
        """Whether `greedy` can run: one program serves every past."""
        return self.modes.decode == "dynamic"

    def greedy(self, token: int, count: int, stops: Sequence[int] = ()) -> list[int]:
        """Appends `token` and what the model finds likeliest after it: `greedy_run`; `PromptError` as `forward`."""
        self._prepare([token])
        self._catch_up()
        room = min(count, self.max_seq - self.past)
        return greedy_run(self._programs[GREEDY], self._session, token, room, stops, self._rows)

    def drafted(self, drafter: HeadDrafter, token: int, count: int, stops: Sequence[int], sums: Counters) -> list[int]:
        """As `greedy`, with drafts of the model's own head: `drafted_run`."""
        self._prepare([token])
        self._catch_up()
        room = min(count, self.max_seq - self.past)
        return drafted_run(self._programs, self._session, drafter, token, room, stops, self._rows, sums)

    def _prepare(self, ids: Sequence[int]) -> None:
        """The weights are there, and the cache has room for the ids."""
        if not len(ids):
            raise PromptError("no token ids were given", hint="Give at least one.")
        if max(ids) >= self._rows:
            what = f"token {max(ids)} has no row in a table of {self._rows} that every token is looked up in"
            raise PromptError(what, hint="Such tokens stand for parts of pictures or sound: leave them out.")
        if self.past + len(ids) > self.max_seq:
            raise PromptError(
                f"{len(ids)} tokens after {self.past} do not fit the context of {self.max_seq}",
                hint="Shorten the prompt or open the model with a larger max_seq.",
            )
        self._load()

    def _chunks(self, ids: Sequence[int], all_rows: bool) -> Iterator[Sequence[int]]:
        """The ids in pieces that the programs take."""
        largest = self._setup.profile.buckets[-1]
        if all_rows:
            fitting = [b for b in self._setup.profile.buckets if b * self.config.vocab_size <= ALL_ROWS_VALUES]
            largest = max(fitting, default=1)
        first, at = self._session.done, 0
        while at < len(ids):
            end = self._session.call_end(first + at, min(largest, len(ids) - at)) - first
            yield ids[at:end]
            at = end

    def program_for(self, rows: int, past: int) -> NativeProgram:
        """The program for a call of some rows behind `past` positions, compiled if need be."""
        return self._programs[self._wanted(rows, past)]

    def _wanted(
        self, rows: int, past: int, all_rows: bool = False, hidden: bool = False, turn: int | None = None
    ) -> Wanted:
        given = self._session.given_at(past)
        return self.modes.wanted(rows, past, all_rows, hidden or self._hearing, given, self.max_seq, turn)

    def _step(self, ids: Sequence[int], all_rows: bool, output: str = LOGITS, aside: bool = False) -> np.ndarray:
        rows, past, turn = len(ids), self._session.done, self._states.turn if aside else None
        self._last = program = self._programs[self._wanted(rows, past, all_rows, output == HIDDEN, turn)]
        feed(program.inputs, ids, past, self._session.given_at(past))
        env = {"SEQ": rows, "PAST_SEQ": past, **self._states.extents}
        self._session.begin(rows, aside=aside)
        program.run(**env)
        self._session.end(ids, aside=aside)
        if self._predictor and self._hearing:
            self._predictor.hear(past, ids, program.output(HIDDEN, **env))
        return program.output(output, **env).copy()

    def _catch_up(self) -> None:
        """Takes what the states lack of the session's ids into them: what was verified, or has to be computed again."""
        session = self._session
        session.settle()
        self._advance()
        if session.done < len(session.ids):
            for chunk in self._chunks(session.ids[session.done :], False):
                self._step(chunk, False)
            session.mark()

    def _advance(self) -> None:
        """Makes the recurrent states those after what the last step verified."""
        (count, there), last = self._session.ahead, self._last
        if count and last and last.then and not last.closed:
            if not there:
                last.then.run(SEQ=count)
            self._session.take(count)

    # -- the session ----------------------------------------------------------------------------------------------

    def trim(self, length: int) -> None:
        """Forgets everything after position `length`; exact to rounding for every kind of state.

        Full caches forget for free, and so do windowed ones for as many tokens as they have room for beyond the window.
        Otherwise, and whenever there are recurrent states, this copies a checkpoint back: the newest at or before
        `length` of those at the ends of the last calls with several ids. The ids between the two, or all where there is
        no such checkpoint, are computed again by the next `forward`.

        Raises:
            ArgumentError: the session holds fewer tokens, or `length` is negative.
        """
        if not 0 <= length <= self.past:
            raise ArgumentError(f"cannot trim to {length}: the cache holds {self.past} tokens")
        self._session.rewind(length)
        if self._predictor:
            self._predictor.forget(length)

    def reset(self) -> None:
        """Forgets everything."""
        self.trim(0)

    def snapshot(self) -> Snapshot:
        """A copy of the session: its ids, the used part of every cache, and the recurrent states."""
        self._load()
        self._catch_up()
        return self._session.snapshot(self._identity)

    def restore(self, snapshot: Snapshot) -> None:
        """Replaces the session by a copied one, also of another engine over the same model.

        The context may have another length; the cache types must be the same.

        Raises:
            SnapshotError: it is of another model or other state formats; the session stays.
            PromptError: it holds more tokens than the context.
        """
        self._session.check(snapshot)
        if snapshot.position > self.max_seq:
            what = f"a snapshot of {snapshot.position} tokens does not fit the context of {self.max_seq}"
            raise PromptError(what, hint="Open the model with a larger max_seq.")
        if snapshot.model != self._identity:
            what = f"the snapshot is of another model ({snapshot.model[:12]}, this is {self._identity[:12]})"
            raise SnapshotError(what, where=self._weights.loader.path, hint="Open the file that it was taken from.")
        self._session.restore(snapshot)
        if self._predictor:
            self._predictor.forget(0)

    def scratch(self) -> Scratch:
        """A session of its own: inside, it is empty; afterwards it is what it was before."""
        return Scratch(self)

    def swap(self, session: Session | None = None) -> None:
        """Makes a session the current one; the engine's own by default."""
        session = self._home if session is None else session
        self._session.leave()
        self._session = session
        self._programs.bind(session.states.addresses)

    def recover(self) -> None:
        """Makes the engine's own session the current one after an interrupt, wherever that came."""
        self._hearing = False
        self.swap()

    def batch(self, slots: int, length: int) -> Batch:
        """`slots` sequences of at most `length` tokens side by side; afterwards the session is what it was."""
        self._load()
        states = States(self.graph, length, self._setup.profile.buckets[-1], slots=slots)
        return Batch(states, slots, self._programs, self._home, self.swap, self.forward)

    def new_session(self) -> Session:
        """An empty session with states of its own."""
        return Session(States(self.graph, self.max_seq, self._setup.profile.buckets[-1]))

    @property
    def _states(self) -> States:
        return self._session.states

    @cached_property
    def _rows(self) -> int:
        """Rows of the smallest table of embeddings: a layer's own may have fewer than the vocabulary."""
        return min(ids.rows for ids in row_numbers(self.graph))

    @cached_property
    def _identity(self) -> str:
        return identity(self.graph, self._weights.loader)

    # -- the head for further tokens ----------------------------------------------------------------------------------

    def predicting(self, drafts: int = DRAFTS) -> Predicting:
        """Inside, the model's own head for further tokens follows the session, and drafts up to `drafts` in a row.

        Its weights are loaded the first time.

        Raises:
            UnsupportedModelError: the model has none.
            WeightError: it lacks a tensor, or one has another shape than it should.
        """
        self._predictor = self._predictor or self._new_predictor()
        return Predicting(self, HeadDrafter(self._predictor, lambda: self.past, drafts))

    def hear(self, hearing: bool) -> None:
        """Whether the head is told what is computed."""
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
        """Compiles (or finds in the cache) the programs of buckets and batches, and what packs the weights."""
        return self._programs.prepare(programs_of(self._setup.profile, batch, phase, rows), on_program)

    @property
    def ready(self) -> ReadyPrograms:
        """The programs that were compiled or loaded so far, to look into."""
        return self._programs.ready()

    @cached_property
    def tokenizer(self) -> text.Tokenizer:
        """The model's own tokenizer."""
        return tokenizer_of(self._weights.loader)

    @cached_property
    def recommended(self) -> SampleOpts | None:
        """How the model's files want tokens to be chosen; None if they do not say."""
        return recommended(self._weights.loader)

    def stats(self) -> dict[str, Any]:
        """What the engine holds, in bytes, and has done; threads; counters of the caches; what was compiled."""
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
        """Stops the workers, gives the memory back and, unless `keep_file` is set, closes the model file."""
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
    """An empty session in place of an engine's own, as a context manager.

    These two are classes and no generators: a generator that an interrupt leaves suspended would finish later, when
    the engine is at work on something else.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._session: Session | None = None  # the engine's own serves where it is empty

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
    """An engine whose head for further tokens is told what is computed, as a context manager."""

    def __init__(self, engine: Engine, drafter: HeadDrafter) -> None:
        self._engine, self._drafter = engine, drafter

    def __enter__(self) -> HeadDrafter:
        self._engine.hear(True)
        return self._drafter

    def __exit__(self, *error: object) -> None:
        self._engine.hear(False)
