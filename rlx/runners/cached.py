"""A runner over an engine: an engine loop that computes all requests, one step per token, from caches.

Runners stage, between `engine.py` (token ids in, logits out) and code that works with text.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rlx.engine.batch import Batch, Segment
from rlx.engine.loop.handle import Handle
from rlx.engine.loop.loop import EngineLoop
from rlx.engine.opening.options import SLOTS, STALL_MS
from rlx.engine.programs.ready import ReadyPrograms
from rlx.engine.request.context import Context, PromptLike
from rlx.engine.request.output import Generation, Logits
from rlx.engine.request.request import DraftsOf, Request
from rlx.engine.request.stopping import OnToken
from rlx.engine.speculation.drafts import Counters, Drafts, PromptLookup
from rlx.engine.token_engine import RecomputeEngine, TokenEngine
from rlx.errors import ArgumentError, TokenizerError, UnsupportedModelError
from rlx.notebook import Stats, card
from rlx.runners.base import GREEDY, Plan, checked_speculation
from rlx.runners.session import SessionRunner
from rlx.sampling import SampleOpts
from rlx.sampling.options import Sample, resolved

if TYPE_CHECKING:
    from rlx.engine.kv.prompt_embeddings import PromptEmbeddings
    from rlx.models.config import ModelConfig
    from rlx.text.tokenizer import Tokenizer
    from rlx.weights import ModelWeights


class CachedRunner(SessionRunner):
    """A `TextRunner` that caches what it has computed.

    Any number of threads, asyncio tasks and callbacks may use it at the same time. A closed runner always raises
    `BusyError`.

    Args:
        engine: a loaded model; closed with the runner.
        sample: default sampling options of calls that give none; "recommended" for those in the model's files; greedy
            by default.
        on_token: default callback of calls that give none.
        streams: whether `generate` calls it for each token as it is generated. False calls it after the last token; it
            then cannot stop the generation.
        speculative: default speculative decoding of requests: `prompt-lookup`, `mtp` or None.
        slots: maximum number of requests that are computed at the same time; others wait.
        stall_ms: how long a step of prompt tokens may keep those waiting whose answers are being generated, in
            milliseconds.

    Raises:
        ArgumentError: `speculative` is unknown.
        UnsupportedModelError: the engine holds a model of another family.
    """

    FAMILY: ClassVar[str | None] = None
    """The family that a subclass supports; None for any."""

    def __init__(
        self,
        engine: TokenEngine,
        *,
        sample: Sample = None,
        on_token: OnToken | None = None,
        streams: bool = True,
        speculative: str | None = None,
        slots: int = SLOTS,
        stall_ms: float = STALL_MS,
    ) -> None:
        found = engine.config.family
        if self.FAMILY not in (None, found):
            raise UnsupportedModelError(
                f"{type(self).__name__} runs the family '{self.FAMILY}', this model is of '{found}'",
                hint="rlx.auto_runner picks the right runner",
            )
        super().__init__(engine)
        self._on_token, self._streams = on_token, streams
        self._sample = None if sample is None else resolved(sample, engine.recommended, GREEDY)
        self._speculative = checked_speculation(speculative)
        self._cached, self._closed = True, False
        self._images = engine.images
        if self._images is not None:
            self._images.seconds = stall_ms / 1000
        self._speculated = Counters()
        self._own_loop = EngineLoop(engine, slots=slots, stall_ms=stall_ms, kept=engine.kept)
        own = weakref.ref(self)  # the engine must not keep its runner alive

        def loop() -> EngineLoop | None:
            return None if (runner := own()) is None else runner._loop

        if engine.prefix_writer is not None:
            engine.prefix_writer.start(loop)
        engine.ahead.is_busy = lambda: (now := loop()) is not None and not now.is_idle
        engine.ahead.is_over = lambda: (now := loop()) is None or now.is_closed

    # ---------------------------------------------------------------------------------------------- the model

    @property
    def family(self) -> str:
        return self._engine.config.family

    @property
    def vocab_size(self) -> int:
        return self._engine.config.vocab_size

    @property
    def max_seq(self) -> int:
        return self._engine.max_seq

    @property
    def config(self) -> ModelConfig:
        """Sizes and switches of the model."""
        return self._engine.config

    @property
    def slots(self) -> int:
        """How many requests are computed at once."""
        return self._loop.scheduler.slots

    @property
    def weights(self) -> ModelWeights:
        """The open file of the model."""
        return self._engine.weights

    @property
    def device(self) -> str:
        return self._engine.device

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, built at first use.

        Raises:
            TokenizerError: the file has none, or it cannot be built.
            BusyError: the runner was closed before the first use.
        """
        self._check_open("tokenizer")
        return self._engine.tokenizer

    @property
    def stop_ids(self) -> Set[int]:
        """The tokenizer's `eog_ids`; `TokenizerError` if the file has no usable tokenizer."""
        try:
            return self.tokenizer.eog_ids
        except TokenizerError as error:
            hint = "stop ids come from the tokenizer: use generate(..., stop_at_eog=False)"
            raise TokenizerError(error.what, where=error.where, hint=hint) from error

    # ---------------------------------------------------------------------------------------------- text

    def disable_decode_compile_cache(self) -> None:
        """Makes `generate` recompute the whole context for every token: slow, for comparison with the cached path."""
        self._own_loop.close()
        self._own_loop = EngineLoop(RecomputeEngine(self._uncached_logits))
        self._cached, self._speculative = False, None

    def generate_packed(
        self, ids: PromptLike, n_new: int, on_token: OnToken | None = None, **options: Any
    ) -> Generation:
        """Alias of `generate`: RLX's name for it with packed weights. rlx always packs weights."""
        return self.generate(ids, n_new, on_token, **options)

    def generate_stoppable(self, ids: PromptLike, n_new: int, on_token: OnToken, **options: Any) -> Generation:
        """Alias of `generate`: RLX's name for it with a callback that may stop it. In rlx every callback may."""
        return self.generate(ids, n_new, on_token, **options)

    @property
    def recommended_sample(self) -> SampleOpts | None:
        return self._engine.recommended

    def _uncached_logits(self, ids: list[int], embeddings: PromptEmbeddings | None = None) -> Logits:
        """The logits after some ids, computed from nothing, in the loop's thread."""
        sequence = self._engine.open_sequence((), embeddings, shared=False)
        try:
            while (at := len(sequence)) < len(ids):
                part = ids[at : sequence.call_end(at, self._engine.most_rows)]
                (found,) = self._engine.step(Batch([Segment(sequence, part)]))
            assert found is not None
            return found
        finally:
            sequence.close()

    # ---------------------------------------------------------------------------------------------- the loop

    @property
    def _loop(self) -> EngineLoop:
        return self._own_loop

    def _started(self, plans: list[Plan], *, keeps: bool = False) -> list[Handle]:
        self._check_open("generate")
        jobs = [job for job, _ in plans if not job.ended]
        for job in jobs:
            self._engine.check_fits(len(job.prompt))
        for job in jobs if keeps and self._cached else ():
            job.keeps, job.replaces = True, self._taken()
        handles = [Handle(self._loop, job, output, self._adopt if job.keeps else None) for job, output in plans]
        if jobs:
            self._loop.submit(*jobs)
        return handles

    def _drafts(self, speculative: str | None, context: list[int]) -> DraftsOf | None:
        if not speculative or not self._cached:
            return super()._drafts(speculative, context)
        if speculative == "mtp":
            return lambda sequence: self._engine.head_drafts(sequence, self._speculated)
        lookup = PromptLookup(context)
        return lambda sequence: Drafts(lookup, self._speculated)

    def _embeddings(self, request: Request, context: Context) -> Any:
        if request.embeds is None:
            return super()._embeddings(request, context)
        if context.images is not None:
            hint = "give the rows of images among `embeds`, or leave `embeds` out"
            raise ArgumentError("a prompt with images takes no embeds", where="embeds", hint=hint)
        return self._engine.prompt_embeddings(len(context), request.embeds, request.attn_bias)

    # ---------------------------------------------------------------------------------------------- the engine

    def compile(
        self,
        on_program: Callable[[Any], None] | None = None,
        batch: int = 1,
        *,
        phase: str | None = None,
        rows: int | None = None,
    ) -> Sequence[Any]:
        """Compiles every program, or finds it in the cache.

        Args:
            on_program: called with each record when it is ready: `phase`, `bucket`, `kernels`, `object_bytes`,
                `seconds`, `cached`.
            batch: maximum number of prompts that `generate_batch` will compute at once.
            phase: "prefill", "decode", "greedy" or "batch": only the programs of this phase; "tower": only those of the
                vision tower.
            rows: only programs that accept this number of rows.

        Raises:
            ArgumentError: `batch` is below 1, or no program matches `phase` and `rows`.
            CompileError: a program cannot be compiled.
            CacheError: the cache is read-only and lacks a program.
        """
        self._check_open("compile")
        return self._engine.compile(on_program, batch, phase, rows)

    @property
    def programs(self) -> ReadyPrograms:
        """The programs compiled or loaded so far, each with `ir`, `source`, `llvm`, `asm` and `explain`.

        Example: `print(runner.programs["decode"].asm("linear"))`; `runner.compile()` makes the missing ones.

        Raises:
            BusyError: the runner was closed.
        """
        self._check_open("programs")
        return self._engine.ready

    def stats(self) -> Mapping[str, Any]:
        """Sizes and counters of the engine: bytes, threads, compile cache counters, and what was `compiled`.

        `reused_tokens` counts prompt tokens that were not computed because the cache knew them. `speculation` counts
        `steps` with drafts, and how many tokens were `drafted` and `accepted`. `requests` says how many wait (`queue`)
        and compute (`running`, at most `slots`), which those are (`active`), what was computed, and the gaps between
        two tokens of a request in seconds. With a vision tower `images` counts images that were encoded, and those
        that were found in the cache of features.
        """
        self._check_open("stats")
        requests = self._loop.stats()
        reused = requests.pop("reused_tokens") + self._reused
        speculation = asdict(self._speculated)
        images = {} if self._images is None else self._images.stats()
        own = {"reused_tokens": reused, "speculation": speculation, "requests": requests}
        return Stats({**self._engine.stats(), **images, **own})

    def _repr_html_(self) -> str:
        if self._closed:
            return card(f"{type(self).__name__}, closed")
        config, stats = self.config, self._engine.stats()
        rows: list[tuple[str, object]] = [("family", self.family), ("layers", config.layers), ("hidden", config.hidden)]
        rows += [("vocabulary", self.vocab_size), ("context", self.max_seq), ("device", self.device)]
        rows += [(name, stats[name]) for name in ("target", "threads", "kv_dtype") if name in stats]
        return card(type(self).__name__, [*rows, ("programs", ", ".join(p.name for p in self.programs) or "none yet")])

    def close(self) -> None:
        """Ends all requests, and releases memory and threads. Can be called more than once."""
        self._loop.close()
        if not self._closed:
            self._closed = True
            self._engine.close()

    def __enter__(self) -> Self:
        self._check_open("with")
        return self
