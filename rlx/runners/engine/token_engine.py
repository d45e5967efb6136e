"""The engine interface of the runners: token ids in, logits out. `rlx.runners.engine.engine.Engine` implements it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from rlx.runners.engine.ahead import Ahead
from rlx.runners.engine.batch import SequenceBatch
from rlx.runners.engine.ready import ReadyPrograms
from rlx.runners.generation.requests import Logits
from rlx.runners.speculation.mtp import HeadDrafter
from rlx.runners.speculation.speculative import Counters
from rlx.sampling import SampleOpts

if TYPE_CHECKING:
    from rlx.models.config import ModelConfig
    from rlx.runtime.snapshot import Snapshot
    from rlx.text.tokenizer import Tokenizer


class TokenEngine(Protocol):
    """The engine interface of the runners; `rlx.runners.engine.engine.Engine` implements it.

    Attributes:
        device: the name of what it runs on.
        max_seq: how many tokens the cache has room for.
        ahead: compiles programs in the background.
        most_rows: maximum number of rows in a call of `verify`.
        past: number of tokens in the session.
        ids: the token ids of the session.
    """

    @property
    def config(self) -> ModelConfig: ...
    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def recommended(self) -> SampleOpts | None: ...

    @property
    def past(self) -> int: ...
    @property
    def ids(self) -> Sequence[int]: ...

    ahead: Ahead
    device: str
    max_seq: int
    most_rows: int

    def forward(self, ids: Sequence[int], all_rows: bool = False) -> Logits:
        """Appends `ids`: the logits after the last, float32[vocab], or after each, float32[len(ids), vocab]; a copy."""
        ...

    def forward_rows(self, ids: Sequence[int]) -> Iterator[Logits]:
        """As `forward` with `all_rows`, in pieces of some rows."""
        ...

    def hidden_rows(self, ids: Sequence[int]) -> Iterator[Logits]:
        """As `forward_rows`, but returns the hidden states before the head: float32[some rows, hidden]."""
        ...

    def verify(self, ids: Sequence[int]) -> Logits:
        """As `forward` with `all_rows`, for drafts: all ids but the first may be rejected and trimmed."""
        ...

    def predicting(self) -> AbstractContextManager[HeadDrafter]:
        """A context in which the MTP head follows the session and drafts tokens.

        Raises:
            UnsupportedModelError: the model has no MTP head.
        """
        ...

    @property
    def repeats(self) -> bool:
        """Whether `greedy` can run."""
        ...

    @property
    def current(self) -> Any:
        """The sequence of the session."""
        ...

    def greedy(self, sequence: Any, token: int, count: int, stops: Sequence[int] = ()) -> list[int]:
        """Appends `token` and the likeliest tokens after it to a sequence, at most until one of `stops`.

        Returns:
            1 to `count` tokens; the last one is not appended.

        Raises:
            NumericalError: a logit is NaN or infinite; the token that would follow is not appended.
        """
        ...

    def drafted(self, drafter: HeadDrafter, token: int, count: int, stops: Sequence[int], sums: Counters) -> list[int]:
        """As `greedy`, inside `predicting`, with MTP drafts. Returns [] and appends nothing if there are no drafts.

        Adds to the counters `sums`.
        """
        ...

    def trim(self, length: int) -> None:
        """Drops everything after the first `length` tokens; the session must hold at least as many."""
        ...

    def reset(self) -> None:
        """Empties the session."""
        ...

    def snapshot(self) -> Snapshot: ...
    def restore(self, snapshot: Snapshot) -> None: ...

    def recover(self) -> None:
        """Ends `scratch`, `batch` and `predicting` after an interrupt at any point; the session stays valid."""
        ...

    def scratch(self) -> AbstractContextManager[object]:
        """A context with a temporary, empty session; on exit the previous session is restored."""
        ...

    def batch(self, slots: int, length: int) -> AbstractContextManager[SequenceBatch]:
        """A context with `slots` sequences of at most `length` tokens; on exit the session is restored."""
        ...

    def compile(
        self,
        on_program: Callable[[Any], None] | None = None,
        batch: int = 1,
        phase: str | None = None,
        rows: int | None = None,
    ) -> Sequence[Any]: ...

    @property
    def ready(self) -> ReadyPrograms: ...
    def stats(self) -> Mapping[str, Any]: ...
    def close(self) -> None: ...
