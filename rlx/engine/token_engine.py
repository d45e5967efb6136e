"""The interfaces of an engine for the loop and for the runners, and an engine without a cache.

Runners stage, under the engine loop. `rlx.engine.engine.Engine` implements both interfaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlx.engine.request.context import Logits
from rlx.sampling.choice import Choose, choose_rows

if TYPE_CHECKING:
    from rlx.engine.batch import Batch
    from rlx.engine.images import ImageInput
    from rlx.engine.kv.disk_kv_cache import DiskKVCache
    from rlx.engine.kv.prompt_embeddings import PromptEmbeddings
    from rlx.engine.kv.sequence import Sequence
    from rlx.engine.kv.snapshot import Snapshot
    from rlx.engine.prefix_writer import PrefixWriter
    from rlx.engine.programs.background import BackgroundCompiler
    from rlx.engine.programs.ready import ReadyPrograms
    from rlx.engine.speculation.drafts import Counters, Drafts
    from rlx.models.config import ModelConfig
    from rlx.sampling import SampleOpts
    from rlx.text.tokenizer import Tokenizer
    from rlx.weights import ModelWeights

MOST_ROWS = 1 << 30


class StepEngine(Protocol):
    """The part of an engine that the loop uses.

    Attributes:
        most_rows: maximum number of rows in a segment.
    """

    most_rows: int

    @property
    def choose(self) -> Choose:
        """Chooses tokens from rows of logits."""
        ...

    def open_sequence(self, prompt: Ids[int] = (), embeddings: Any = None, *, salt: str = "") -> Any:
        """A sequence that will hold `prompt`. It begins with the longest prefix that the cache knows for this salt."""
        ...

    def step(self, batch: Batch) -> Ids[Logits | None]:
        """Computes the segments. `PoolFullError`, before anything is computed, if the cache has no room."""
        ...

    def greedy(self, sequence: Any, token: int, count: int, stops: Ids[int] = (), loads: bool = True) -> list[int]:
        """Appends `token` and the likeliest tokens after it natively, at most until one of `stops`, and for 50 ms.

        Args:
            loads: whether its program may be loaded or compiled for this.

        Returns:
            1 to `count` tokens; the last one is not appended. `[]` if it cannot: a step then computes the next one.

        Raises:
            NumericalError: a logit is NaN or infinite; the token that would follow is not appended.
        """
        ...


class TokenEngine(StepEngine, Protocol):
    """The engine interface of the runners.

    Attributes:
        device: the name of what it runs on.
        max_seq: maximum number of tokens of a sequence.
        ahead: compiles programs in the background.
        images: how images come into prompts; None if the engine takes none.
        weights: the open file.
        kept: states of prompts on disk; None for none.
        prefix_writer: writes them; None for none.
    """

    @property
    def config(self) -> ModelConfig: ...
    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def images(self) -> ImageInput | None: ...

    @property
    def weights(self) -> ModelWeights: ...

    @property
    def recommended(self) -> SampleOpts | None: ...

    ahead: BackgroundCompiler
    device: str
    max_seq: int
    kept: DiskKVCache | None
    prefix_writer: PrefixWriter | None

    def open_sequence(
        self,
        prompt: Ids[int] = (),
        embeddings: PromptEmbeddings | None = None,
        *,
        shared: bool = True,
        salt: str = "",
    ) -> Sequence:
        """A new sequence, which holds the longest known prefix of a prompt, at least one token less than it."""
        ...

    def check_fits(self, positions: int) -> None:
        """`PoolFullError` if the pool can never hold so many positions of one sequence."""
        ...

    def hidden(self, sequence: Sequence, ids: Ids[int]) -> Logits:
        """Appends ids: the hidden states before the head, float32[len(ids), hidden]."""
        ...

    def head_drafts(self, sequence: Sequence, counters: Counters) -> Drafts | None:
        """Drafts of the MTP head for a sequence that begins; None while the head follows another sequence.

        Raises:
            UnsupportedModelError: the model has no MTP head.
        """
        ...

    def prompt_embeddings(self, count: int, embeds: Any, bias: Any = None) -> PromptEmbeddings:
        """The prompt embeddings for `count` positions; `PromptError` for wrong shapes."""
        ...

    def snapshot_of(self, sequence: Sequence) -> Snapshot: ...
    def restored(self, snapshot: Snapshot) -> Sequence:
        """A new sequence that goes on from a snapshot; `SnapshotError` if it is of something else."""
        ...

    def compile(
        self,
        on_program: Callable[[Any], None] | None = None,
        batch: int = 1,
        phase: str | None = None,
        rows: int | None = None,
    ) -> Ids[Any]: ...

    @property
    def ready(self) -> ReadyPrograms: ...
    def stats(self) -> Mapping[str, Any]: ...
    def close(self) -> None: ...


class ComputedAnew:
    """A sequence that is nothing but its ids, and the prompt embeddings of some."""

    recurrent = False

    def __init__(self, embeddings: Any = None) -> None:
        self.ids: list[int] = []
        self.embeddings = embeddings

    def __len__(self) -> int:
        return len(self.ids)

    def call_end(self, start: int, most: int) -> int:
        """End of a call of at most `most` rows from `start`."""
        return start + most

    def mark(self, length: int) -> None:
        """There is nothing to copy."""

    def rewind(self, length: int) -> None:
        """Drops the ids after the first `length`."""
        del self.ids[length:]

    def pause(self) -> None:
        """There is nothing to save."""

    resume = close = discard = pause


class RecomputeEngine:
    """An engine without a cache: computes the whole context for each token.

    For runners that have nothing but `predict_logits`, and as the reference.

    Args:
        logits: the logits after some ids, float32[vocab]; of those and prompt embeddings where there are some.
    """

    most_rows, choose = MOST_ROWS, staticmethod(choose_rows)

    def __init__(self, logits: Callable[..., Logits]) -> None:
        self._logits = logits

    def open_sequence(
        self, prompt: Ids[int] = (), embeddings: Any = None, *, shared: bool = True, salt: str = ""
    ) -> ComputedAnew:
        """An empty sequence."""
        return ComputedAnew(embeddings)

    def step(self, batch: Batch) -> list[Logits | None]:
        """Appends the segments; the logits after those that ask for them, float32[vocab]."""
        found: list[Logits | None] = []
        for segment in batch.segments:
            context: Any = segment.sequence
            context.ids.extend(segment.tokens)
            embeddings = [] if context.embeddings is None else [context.embeddings]
            found.append(None if segment.logits == "none" else np.asarray(self._logits([*context.ids], *embeddings)))
        return found

    def greedy(self, sequence: Any, token: int, count: int, stops: Ids[int] = (), loads: bool = True) -> list[int]:
        """It cannot: `[]`, so that steps are computed one by one."""
        return []
