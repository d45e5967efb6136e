"""The output of a generation: steps as they come, and the whole as a list.

Runners stage. The engine loop chooses tokens. `Output` makes steps of them in the consumer's thread: texts, stop
strings, callbacks and log-probabilities. It ends a request where the loop cannot see that it should end.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx.engine.request.request import Request
from rlx.engine.request.stopping import AnswerText, FinishReason, OnToken, answer_text, says_stop, stop_strings
from rlx.errors import ArgumentError, TokenizerError

if TYPE_CHECKING:
    from rlx.text.tokenizer import Tokenizer
    from rlx.text.tool_calls import ToolCallDelta

Logits = npt.NDArray[np.float32]


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


class Generation(list[int]):
    """The result of a generation: a list of token ids, with its text and the reason why it ended.

    Attributes:
        steps: log-probabilities of each token if `top_logprobs` requested them; else None.
    """

    def __init__(self, tokens: Iterable[int], output: Output, steps: list[Step] | None = None) -> None:
        super().__init__(tokens)
        self._output, self.steps = output, steps

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended."""
        return self._output.reason

    @property
    def text(self) -> str:
        """The text of the tokens without control tokens, up to a stop string.

        Raises:
            TokenizerError: the model has no tokenizer that can be built.
        """
        output = self._output
        if output.text is not None:
            return output.text
        return answer_text(output.tokenizer(), self[:-1] if output.reason == FinishReason.STOP else self)


_FULL = (FinishReason.LENGTH, FinishReason.CONTEXT)


class Output:
    """Makes steps of the tokens of one request, and ends it at a stop string or where its callback says so.

    If several conditions hold, the first in the order of `FinishReason` is reported.

    Args:
        request: what is asked.
        tokenizer: returns the tokenizer; `TokenizerError` if there is none.
        on_token: called once with every token, before the conditions are checked.
        pieces: whether steps have texts without stop strings, too; they are empty if there is no tokenizer.

    Attributes:
        reason: why it ended; None if it continues.
        stopped_by: the stop id or the stop string that ended it; None if it was another reason.
        logprobs: whether steps have log-probabilities.
        streams: whether somebody looks at each step as it comes.

    Raises:
        ArgumentError: a stop string is empty, or the callback is not callable.
        TokenizerError: there are stop strings, and no tokenizer.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Callable[[], Tokenizer],
        on_token: OnToken | None = None,
        pieces: bool = True,
    ) -> None:
        if on_token is not None and not callable(on_token):
            raise ArgumentError(f"on_token is {on_token!r}, expected a function of a token", where="generate")
        self.tokenizer, self._on_token = tokenizer, on_token
        self._least, self._alternatives = request.min_tokens, request.top_logprobs or 0
        self.logprobs = request.top_logprobs is not None
        stop = stop_strings(request.stop)
        self._answer: AnswerText | None = None
        if stop or pieces:
            try:
                self._answer = AnswerText(tokenizer(), stop, request.keep_ids)
            except TokenizerError:
                if stop:
                    raise
        self.streams = bool(pieces or on_token or stop)
        self.reason: FinishReason | None = None
        self.stopped_by: int | str | None = None
        self._count = 0

    @property
    def text(self) -> str | None:
        """The confirmed text of the answer without the stop string; None if steps have no texts.

        Text that may begin a stop string is held back; it is included once the generation is over.
        """
        return self._answer.text if self._answer else None

    def step(self, token: int, logits: Logits | None, reason: FinishReason | None = None) -> Step:
        """The step of the next token.

        Args:
            logits: those that it was chosen from, float32[vocab]; None without log-probabilities.
            reason: why the loop ends the request with this token, if it does.
        """
        self._count += 1
        answer, piece = self._answer, ""
        halted = self._on_token is not None and says_stop(self._on_token, token)
        if reason == FinishReason.STOP:  # a stop id has no text
            self.stopped_by = token
        elif answer is not None:
            piece = answer.push(token, self._count >= self._least)
            if answer.stopped_at is not None:
                reason, self.stopped_by = FinishReason.STOP_STRING, answer.stopped_at
        if halted and (reason is None or reason in _FULL):
            reason = FinishReason.CALLBACK
        if reason is not None:
            self.reason = reason
            piece += "" if answer is None else answer.finish()
        if logits is None:
            return Step(token, None, reason, piece)
        logprob = float(log_probs(logits[None], [token])[0])
        top = likeliest(self.tokenizer(), token, logprob, logits, self._alternatives) if self._alternatives else ()
        return Step(token, logprob, reason, piece, top)

    def end(self, reason: FinishReason = FinishReason.ABORTED, token: int | None = None) -> None:
        """Notes the end where no step did.

        Args:
            token: the last one.
        """
        if self.reason is None:
            self.reason = reason
            self.stopped_by = token if reason == FinishReason.STOP else None


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


def log_probs(logits: Logits, ids: Iterable[int]) -> npt.NDArray[np.float32]:
    """log softmax(logits)[i, ids[i]]: float32[n] from float32[n, vocab]; sums of exponentials in float64."""
    found = np.empty(len(logits), np.float32)
    for i, (row, token) in enumerate(zip(logits, ids, strict=True)):  # row by row: avoids a second [n, vocab] array
        top: Any = row.max()
        found[i] = row[token] - top - np.log(np.exp(row - top).sum(dtype=np.float64))
    return found
