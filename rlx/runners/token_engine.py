"""What runners need of an engine: token ids in, logits out. `rlx.runners.engine.Engine` is the one there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from rlx.runners.ahead import Ahead
from rlx.runners.batch import Batch
from rlx.runners.generation import Logits
from rlx.runners.prediction import HeadDrafter
from rlx.runners.ready import ReadyPrograms
from rlx.runners.speculative import Counters
from rlx.sampling import SampleOpts

if TYPE_CHECKING:
    from rlx.models.config import ModelConfig
    from rlx.runtime.snapshot import Snapshot
    from rlx.text.tokenizer import Tokenizer


class TokenEngine(Protocol):
    """What a runner needs of an engine; `rlx.runners.engine.Engine` is the one there is.

    Attributes:
        max_seq: how many tokens the cache has room for.
        ahead: what compiles in the background.
        most_rows: of a call of `verify`.
        past: how many it holds.
        ids: those tokens.
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
    max_seq: int
    most_rows: int

    def forward(self, ids: Sequence[int], all_rows: bool = False) -> Logits:
        """Appends `ids` to the cache; float32[vocab] after the last, or float32[len(ids), vocab], the caller's own."""
        ...

    def forward_rows(self, ids: Sequence[int]) -> Iterator[Logits]:
        """As `forward` with `all_rows`, some rows at a time."""
        ...

    def hidden_rows(self, ids: Sequence[int]) -> Iterator[Logits]:
        """As `forward_rows`, but what the head multiplies: float32[some rows, hidden]."""
        ...

    def verify(self, ids: Sequence[int]) -> Logits:
        """As `forward` with `all_rows`, for ids of which all but the first may turn out wrong and be trimmed."""
        ...

    def predicting(self) -> AbstractContextManager[HeadDrafter]:
        """Inside, the model's own head for further tokens follows the session, and drafts.

        Raises:
            UnsupportedModelError: the model has none.
        """
        ...

    @property
    def repeats(self) -> bool:
        """Whether `greedy` can run."""
        ...

    def greedy(self, token: int, count: int, stops: Sequence[int] = ()) -> list[int]:
        """Appends `token`, and the likeliest after it, to one of `stops` at most: 1 to `count` tokens, the last of them
        not appended.

        Raises:
            NumericalError: a logit is NaN or infinite; what it followed is not appended.
        """
        ...

    def drafted(self, drafter: HeadDrafter, token: int, count: int, stops: Sequence[int], sums: Counters) -> list[int]:
        """As `greedy`, inside `predicting`, with drafts; none, and nothing appended, where there are no drafts. It adds
        to `sums`.
        """
        ...

    def trim(self, length: int) -> None:
        """Forgets everything behind the first `length` tokens, of which there are at least as many."""
        ...

    def reset(self) -> None:
        """Forgets everything."""
        ...

    def snapshot(self) -> Snapshot: ...
    def restore(self, snapshot: Snapshot) -> None: ...

    def recover(self) -> None:
        """Ends `scratch`, `batch` and `predicting` after an interrupt, wherever that came; the session stays valid."""
        ...

    def scratch(self) -> AbstractContextManager[object]:
        """Inside, the cache is empty; afterwards it is what it was before."""
        ...

    def batch(self, slots: int, length: int) -> AbstractContextManager[Batch]:
        """Inside, sequences of at most `length` tokens in so many slots; afterwards the session is what it was."""
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
