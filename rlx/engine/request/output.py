"""The output of a generation: steps as they come, the whole as a list, why it ends, and log-probabilities.

Runners stage. A handle makes steps of the tokens that the engine loop chooses. The loop ends a request at a stop id, at
the end of its grammar, its number of tokens or its context (`Job.add`); the consumer ends it at a stop string or with
its callback (`Handle`).
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx.text.tokenizer import answer_text

if TYPE_CHECKING:
    from rlx.text.tokenizer import Tokenizer
    from rlx.text.tool_calls import ToolCallDelta

Logits = npt.NDArray[np.float32]

OnToken = Callable[[int], bool | None]
"""Called with every new token; False ends the generation."""


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """The model generated one of the stop ids."""
    STOP_STRING = "stop_string"
    """The text contains one of the stop strings."""
    GRAMMAR = "grammar"
    """The text is complete by its grammar, and nothing may follow."""
    CALLBACK = "callback"
    """`on_token` returned False."""
    LENGTH = "length"
    """The requested number of tokens is reached."""
    CONTEXT = "context"
    """The context is full."""
    ABORTED = "aborted"
    """It was aborted, or its stream was closed."""


def says_stop(on_token: OnToken | None, token: int) -> bool:
    """Whether the callback returned False, or NumPy's False; None and other values continue."""
    answer = on_token(token) if on_token else None
    return isinstance(answer, bool | np.bool_) and not answer


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A candidate for the next token.

    Attributes:
        token: its id.
        text: its text, with its leading space; an incomplete character is U+FFFD.
        logprob: natural logarithm of its probability under the model.
        bytes: its bytes, which may be a part of a character.
    """

    token: int
    text: str
    logprob: float
    bytes: builtins.bytes = b""


@dataclass(frozen=True, slots=True)
class Step:
    """One token of a stream.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability under the model, before penalties, filters and temperature; None
            if the request asked for none.
        finish_reason: why the stream ends with it; None if it continues.
        text: the text that this token completes, possibly empty. An incomplete character is held back, and so is a
            possible beginning of a stop string. The texts of all steps together are `Generation.text`.
        top_logprobs: the likeliest tokens of this step, the likeliest first; as many as `top_logprobs` requested.
        thinking: in a stream of `chat`, text of the model's reasoning; it is not part of `text`.
        tool_calls: in a stream of `chat`, pieces of tool calls; their texts are not part of `text`.
    """

    token: int
    logprob: float | None
    finish_reason: FinishReason | None
    text: str = ""
    top_logprobs: tuple[TokenLogprob, ...] = ()
    thinking: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class Scores(list[float]):
    """The scores of documents.

    Attributes:
        tokens: how many the model has read for them.
    """

    def __init__(self, scores: Iterable[float], tokens: int) -> None:
        super().__init__(scores)
        self.tokens = tokens


class Generation(list[int]):
    """The result of a generation: a list of token ids, with its text and the reason why it ended.

    Attributes:
        finish_reason: why it ended.
        steps: log-probabilities of each token if `top_logprobs` requested them; else None.
    """

    def __init__(
        self,
        tokens: Iterable[int],
        finish_reason: FinishReason | None,
        tokenizer: Callable[[], Tokenizer],
        text: str | None = None,
        steps: list[Step] | None = None,
    ) -> None:
        super().__init__(tokens)
        self.finish_reason, self.steps, self._tokenizer, self._text = finish_reason, steps, tokenizer, text

    @property
    def text(self) -> str:
        """The text of the tokens without control tokens, up to a stop string.

        Raises:
            TokenizerError: the model has no tokenizer that can be built.
        """
        if self._text is not None:
            return self._text
        return answer_text(self._tokenizer(), self[:-1] if self.finish_reason == FinishReason.STOP else self)


def likeliest(tokenizer: Tokenizer, token: int, logprob: float, logits: Logits, count: int) -> tuple[TokenLogprob, ...]:
    """The likeliest tokens at a position; ties go to the lower id.

    Args:
        token, logprob: any token, and its log-probability there.
        logits: at the position, float32[vocab].
        count: how many.
    """
    count = min(count, len(logits))
    if not count:
        return ()
    bound = np.partition(logits, len(logits) - count)[len(logits) - count]
    among = np.flatnonzero(logits >= bound)
    ids = among[np.argsort(-logits[among], kind="stable")][:count].tolist()
    shift = logprob - float(logits[token])  # log softmax is logit + shift
    return tuple(candidate(tokenizer, i, float(logits[i]) + shift) for i in ids)


def candidate(tokenizer: Tokenizer, token: int, logprob: float) -> TokenLogprob:
    """A token with its text and bytes; control tokens have theirs, too. What the tokenizer lacks has none."""
    piece = tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""
    return TokenLogprob(token, piece.decode("utf-8", "replace"), logprob, piece)


def of_unit_length(vectors: npt.ArrayLike) -> Logits:
    """Vectors [..., width], each divided by its length, as float32; zeros stay."""
    exact = np.asarray(vectors, np.float64)
    lengths = np.linalg.norm(exact, axis=-1, keepdims=True)
    return (exact / np.where(lengths == 0, 1, lengths)).astype(np.float32)


def log_probs(logits: Logits, ids: Iterable[int]) -> npt.NDArray[np.float32]:
    """log softmax(logits)[i, ids[i]]: float32[n] from float32[n, vocab]; sums of exponentials in float64."""
    found = np.empty(len(logits), np.float32)
    for i, (row, token) in enumerate(zip(logits, ids, strict=True)):  # row by row: avoids a second [n, vocab] array
        top: Any = row.max()
        found[i] = row[token] - top - np.log(np.exp(row - top).sum(dtype=np.float64))
    return found
