"""A token history and its caches: the part of `token_history.py` that runs in the thread of the engine loop.

Runners stage, over `engine.py`. The caches hold a prefix of the history. A step computes the rest and appends a token.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from rlx.engine.loop.loop import EngineLoop
from rlx.engine.request.context import check_finite, fit_context
from rlx.engine.request.output import Logits
from rlx.errors import PromptError
from rlx.runners.session import last_logits
from rlx.sampling import SampleOpts, Sampler

if TYPE_CHECKING:
    from rlx.engine.engine import Engine
    from rlx.engine.kv.prompt_embeddings import PromptEmbeddings


class CachedHistory:
    """The tokens so far, and a sequence in the caches with a prefix of them.

    The methods that compute are tasks of the engine loop, which runs other requests where they yield.

    Args:
        engine: the model.
        loop: the engine's.

    Attributes:
        tokens: the history, prompt and generated tokens.
    """

    def __init__(self, engine: Engine, loop: EngineLoop) -> None:
        self.tokens: list[int] = []
        self._engine, self._loop = engine, loop
        self._logits: Logits | None = None  # after the whole history, if the caches hold all of it
        self._embeddings: PromptEmbeddings | None = None  # prompt embeddings that the history starts with
        self._sampler: Sampler | None = None
        self._sequence = engine.open_sequence(shared=False)

    @property
    def cached(self) -> int:
        """Number of tokens in the caches."""
        return len(self._sequence)

    def start(self, tokens: list[int], embeddings: PromptEmbeddings | None = None) -> None:
        """Replaces the history."""
        self.tokens, self._embeddings, self._sampler = tokens, embeddings, None
        self.empty_caches()

    def empty_caches(self) -> None:
        """Forgets what was computed, and keeps the history."""
        self._sequence.discard()
        self._sequence = self._engine.open_sequence(embeddings=self._embeddings, shared=False)
        self._logits = None

    def step(self, opts: SampleOpts) -> Generator[None, None, int]:
        """Chooses a token and appends it. Equal options in consecutive steps continue one random number sequence."""
        logits = self._logits if self._logits is not None else (yield from self._computed())
        if self._sampler is None or self._sampler.opts != opts:
            self._sampler = Sampler(opts, self.tokens)
        (chosen,) = self._engine.choose([logits], [self._sampler.choice(len(logits))])
        token = self._sampler.took(chosen, logits)
        self.tokens.append(token)
        self._logits = None
        return token

    def append(self, tokens: list[int]) -> Generator[None, None, Logits]:
        """Appends tokens that the caller chose; the logits after them. After an error the history is as before."""
        if not self.tokens:
            raise PromptError("there is no history", where="decode_get_logits", hint="call prefill first")
        before = len(self.tokens)
        self.tokens += tokens
        try:
            return (yield from self.last_logits())
        except BaseException:
            del self.tokens[before:]
            raise

    def last_logits(self) -> Generator[None, None, Logits]:
        """Computes the history; the logits after it, float32[vocab_size]."""
        self._logits = yield from self._computed()
        self._sampler = None  # it has not seen all tokens of the history
        return self._logits.copy()

    def _computed(self) -> Generator[None, None, Logits]:
        """Computes the history; the logits after it. The caches then hold all of it; after an error, what they held."""
        if not self.tokens:
            raise PromptError("there is no history", where="step", hint="call prefill with a prompt first")
        fit_context(self.tokens, self._engine.max_seq, "history")
        past = len(self._sequence)
        try:
            last = yield from last_logits(self._engine, self._sequence, self.tokens, self._loop)
            return check_finite(last, f"position {len(self.tokens) - 1}")
        except BaseException:
            if self._embeddings is not None and past < self._embeddings.end:
                self.empty_caches()  # a rewind would drop the embeddings
            else:
                self._sequence.rewind(min(past, len(self._sequence)))
            raise
