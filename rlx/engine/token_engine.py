"""The engine interface of the runners: batches of tokens in, logits out. `rlx.engine.engine.Engine` has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Any, Protocol

from rlx.engine.batch import Batch
from rlx.engine.kv.kept_prefixes import KeptPrefixes
from rlx.engine.kv.prompt_embeddings import PromptEmbeddings
from rlx.engine.kv.sequence import Sequence
from rlx.engine.prefix_writer import PrefixWriter
from rlx.engine.programs.background import BackgroundCompiler
from rlx.engine.programs.ready import ReadyPrograms
from rlx.engine.request.output import Logits
from rlx.engine.speculation.drafts import Counters, Drafts
from rlx.sampling import SampleOpts

if TYPE_CHECKING:
    from rlx.engine.images import ImageInput
    from rlx.engine.kv.snapshot import Snapshot
    from rlx.models.config import ModelConfig
    from rlx.text.tokenizer import Tokenizer
    from rlx.weights import ModelWeights


class TokenEngine(Protocol):
    """The engine interface of the runners; `rlx.engine.engine.Engine` implements it.

    Attributes:
        device: the name of what it runs on.
        max_seq: maximum number of tokens of a sequence.
        most_rows: maximum number of rows in a call.
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
    most_rows: int
    kept: KeptPrefixes | None
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

    def step(self, batch: Batch) -> list[Logits | None]:
        """Appends the tokens of every segment to its sequence: the logits of the rows that it asks for."""
        ...

    def greedy(self, sequence: Sequence, token: int, count: int, stops: Ids[int] = (), loads: bool = True) -> list[int]:
        """Appends `token` and the likeliest tokens after it natively, at most until one of `stops`, and for 50 ms.

        Returns:
            1 to `count` tokens; the last one is not appended. `[]` if it cannot: a step then computes the next one.

        Raises:
            NumericalError: a logit is NaN or infinite; the token that would follow is not appended.
        """
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
