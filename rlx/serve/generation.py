"""The neutral form of a request and of its answer: what all APIs are translated to and from.

Server stage, below the APIs. Nothing here knows HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlx.prompt import Prompt
from rlx.runners import TokenLogprob
from rlx.sampling import SampleOpts

if TYPE_CHECKING:
    from rlx.engine.request.context import Context
    from rlx.text.answer import AnswerPart
    from rlx.text.tool_calls import ToolCallDelta

Reason = Literal["stop", "length", "tool_calls"]


class Parser(Protocol):
    """Splits an answer into reasoning, text and tool calls, as an `rlx.text.answer.AnswerParser` does."""

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        ...

    def push(self, text: str, /) -> list[AnswerPart]:
        """More text: what is now certain."""
        ...

    def finish(self) -> list[AnswerPart]:
        """No more text: the rest."""
        ...


@dataclass(frozen=True)
class GenerationSpec:
    """What is to be generated.

    Attributes:
        prompt: token ids, a `Prompt` with images, or a checked `Context` of either.
        max_tokens: maximum number of tokens of a choice; None for what the context has room for.
        sample: how tokens are chosen. With a seed, choice i has the seed `seed + i`.
        n: number of choices.
        stop: strings that end a choice.
        stop_ids: further token ids that end a choice.
        min_tokens: until a choice has this many tokens, nothing but the context ends it.
        ignore_eos: whether a choice continues after the model's own stop ids.
        include_stop: whether the text ends with the stop string that ended it.
        keep_ids: control tokens that are not left out of the text.
        top_logprobs: report log-probabilities: of each token, and of this many of the likeliest ones. None for none.
        grammar: an `rlx.grammar.Grammar` that the text must follow.
        parser: makes what splits a choice, such as an `AnswerParser`; None where all text is the answer.
        priority: requests with a higher priority are served first.
        timeout: seconds after which it fails with a `DeadlineError`.
        request_id: names it in logs.
        cache_salt: shares what the cache knows of its prompt only with requests of the same salt and owner.
    """

    prompt: list[int] | Prompt | Context
    max_tokens: int | None = None
    sample: SampleOpts = field(default_factory=SampleOpts)
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop: bool = False
    keep_ids: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    grammar: Any = None
    parser: Callable[[], Parser] | None = None
    priority: int = 0
    timeout: float | None = None
    request_id: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A generated token with its log-probability, under the model's own distribution.

    Attributes:
        chosen: the token.
        top: the likeliest tokens at its position, the likeliest first.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token adds to a choice; all texts may be empty.

    Attributes:
        index: the choice.
        text, thinking: answer and reasoning.
        tool_calls: pieces of tool calls.
        tokens: the new token ids. The last delta may have none: it then has text that was held back.
        logprobs: one for each of `tokens` if the spec asks for them.
    """

    index: int
    text: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """A choice is complete.

    Attributes:
        index: the choice.
        finish_reason: `stop` for the model's own end, a stop string or a stop id, `length`, or `tool_calls`.
        stop: the stop string, or the id of `GenerationSpec.stop_ids`, that ended it; None for other ends.
    """

    index: int
    finish_reason: Reason
    stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of the prompt is computed; comes once before the first delta, and about once a second while nothing else
    does.

    Attributes:
        total: tokens of the prompt.
        cached: how many of them were found in the prefix cache.
        processed: how many are there, cached ones included.
        ms: milliseconds since the request was handed to the engine.
    """

    total: int
    cached: int
    processed: int
    ms: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens. The prompt counts once, however many choices there are.

    Attributes:
        prompt_tokens: with the rows of images.
        cached_tokens: how many of them were found in the prefix cache.
        completion_tokens: of all choices, reasoning included.
        reasoning_tokens: how many of these are reasoning.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, in milliseconds, and the tokens of each part.

    Attributes:
        queue_ms: before the engine began with it.
        prompt_ms, prompt_tokens: of the prompt, without cached tokens.
        decode_ms: after the first token.
        decode_tokens: of all choices.
        decode_steps: those of them that came after the first of their choice: what `decode_ms` was needed for.
        cached_tokens: of the prompt.
    """

    queue_ms: float = 0.0
    prompt_ms: float = 0.0
    prompt_tokens: int = 0
    decode_ms: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """All choices are complete; always the last event."""

    usage: Usage
    timings: Timings


Event = Progress | Delta | End | Finished


@dataclass
class ToolCall:
    """A complete call: `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Choice:
    """A complete choice; the fields are those of `Delta` and `End`."""

    index: int
    text: str = ""
    thinking: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenInfo] = field(default_factory=list)
    finish_reason: Reason = "stop"
    stop: str | int | None = None

    def add(self, delta: Delta) -> None:
        """Adds what one token has added."""
        self.text += delta.text
        self.thinking += delta.thinking
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        for call in delta.tool_calls:
            if call.index == len(self.tool_calls):
                self.tool_calls.append(ToolCall(call.id, call.name))
            self.tool_calls[call.index].arguments += call.arguments


@dataclass(frozen=True)
class Collected:
    """A complete answer: its choices by index, and what they cost."""

    choices: list[Choice]
    usage: Usage
    timings: Timings
