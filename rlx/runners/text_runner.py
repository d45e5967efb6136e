"""Text input and output: conversations and completions on top of a token runner.

Runners stage, over `base.py`. The model's tokenizer and chat template turn a prompt into ids. The tokens of the answer
are converted to text, and to the model's reasoning if it writes any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from rlx.arguments import SAMPLING, check_arguments
from rlx.engine.loop.handle import Stream
from rlx.engine.opening.options import OPENING
from rlx.engine.request.context import Context, no_tower
from rlx.engine.request.output import Generation, Step
from rlx.engine.request.stopping import AnswerText, FinishReason, checked_count, stop_strings
from rlx.errors import ArgumentError
from rlx.grammar.grammar import chosen_grammar
from rlx.grammar.parsed import parsed
from rlx.grammar.thinking import after_thinking
from rlx.grammar.tool_calls import calls_grammar
from rlx.prompt import Prompt, read_images
from rlx.runners.base import LmRunner
from rlx.sampling.options import combined
from rlx.text.tool_calls.format import ToolCall, whole_calls
from rlx.tracing import span

if TYPE_CHECKING:
    from rlx.text.answer import ThinkingTags
    from rlx.text.tokenizer import Tokenizer
    from rlx.text.tool_calls import Tool, ToolCallDelta, ToolChoice, ToolFormat

Messages = str | Sequence[Mapping[str, Any]]
_OPTIONS = ("sample", "stop", "min_tokens", "speculative", "top_logprobs", "grammar", "json_schema")
_CHAT = ("tools", "tool_choice", "parallel_tool_calls", "thinking", "variables")


@dataclass(frozen=True)
class Answer:
    """The answer of a model.

    Attributes:
        text: the answer, without control tokens, reasoning, tool calls and stop string.
        thinking: the model's reasoning; empty if there is none.
        generation: the tokens.
        prompt_tokens: number of tokens in the prompt.
        json_schema: the schema that it follows, as it was given; else None.
        tool_calls: the tools that the model calls.
    """

    text: str
    thinking: str
    generation: Generation
    prompt_tokens: int
    json_schema: Any = None
    tool_calls: tuple[ToolCall, ...] = ()

    @cached_property
    def parsed(self) -> Any:
        """The value of the text, if a JSON schema was given: an instance of the pydantic class, or what JSON says.

        None without a schema, and where the model calls tools instead.

        Raises:
            GrammarError: the answer was cut before it was complete, or the pydantic class does not accept the value.
        """
        if self.json_schema is None or self.tool_calls:
            return None
        return parsed(self.text, self.json_schema, self.finish_reason)

    @property
    def ids(self) -> list[int]:
        """The tokens, including the one that ended the answer."""
        return list(self.generation)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended."""
        return self.generation.finish_reason

    @property
    def steps(self) -> list[Step] | None:
        """Log-probabilities of each token if `top_logprobs` requested them; else None."""
        return self.generation.steps

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message that continues the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [call.message for call in self.tool_calls]
        return message

    def __str__(self) -> str:
        return self.text


class TextRunner(LmRunner):
    """An `LmRunner` with methods that take and return text."""

    def chat(self, messages: Messages, max_tokens: int | None = None, **options: Any) -> Answer:
        """The model's answer to a conversation.

            messages = [{"role": "user", "content": "What is 27 + 45?"}]
            answer = runner.chat(messages, max_tokens=64)
            messages += [answer.message, {"role": "user", "content": "And in words?"}]

        Args:
            messages: a list of `{"role": ..., "content": ...}`, or a string: one user message. A content is a string or
                a list of parts `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}`; docs/images.md
                has the forms of an image.
            max_tokens: maximum length of the answer, reasoning included; by default what the context has room for.
            tools: JSON schemas of functions that the model may call. `Answer.tool_calls` are its calls; docs/tools.md
                shows the whole way.
            tool_choice: "auto" lets the model decide, "required" makes it call a tool, "none" forbids it;
                `{"type": "function", "function": {"name": ...}}` makes it call that one.
            parallel_tool_calls: whether an answer may have several calls.
            thinking: whether the model reasons before it answers, if it supports both; None takes the template's
                default.
            variables: further variables of the chat template.
            sample: a `SampleOpts`, or "recommended"; None as for `generate`. Single options of `SampleOpts`, such as
                `temperature` or `seed`, can be given as keyword arguments; they override `sample`.
            stop, min_tokens, speculative, top_logprobs: as for `generate`.
            grammar, json_schema: what the text must look like, as for `generate`. It begins after the reasoning.
                `Answer.parsed` is the value of the text.

        Raises:
            ChatTemplateError: the model has no chat template, or the template rejects the messages.
            ToolError: a tool, a call in a message or `tool_choice` is invalid, or a schema cannot be enforced.
            MultimodalError, ImageError: as `chat_ids`.
            UnknownArgumentError: there is no such option.
            SamplingError: an option is out of its range, or has no effect because decoding is greedy.
            GrammarError, PromptError, ArgumentError, NumericalError, BusyError: as `generate`.
        """
        return self._answered(self._chat_call("chat", messages, options), max_tokens, options)

    def chat_stream(self, messages: Messages, max_tokens: int | None = None, **options: Any) -> Stream:
        """`chat` as a stream: an iterator of `Step` with `text`, `thinking` and `tool_calls`.

        for step in runner.chat_stream("Tell me a story.", max_tokens=200):
            print(step.text, end="", flush=True)
        """
        return self._streamed(self._chat_call("chat_stream", messages, options), max_tokens, options)

    def complete(self, prompt: str, max_tokens: int | None = None, **options: Any) -> Answer:
        """The model's continuation of a text, without a chat template.

            print(runner.complete("Once upon a time", max_tokens=20).text)

        Args:
            prompt: the text; control tokens in it are ordinary text.
            max_tokens: maximum number of tokens; by default what the context has room for.
            options: `sample`, `stop`, `min_tokens`, `speculative`, `top_logprobs`, `grammar`, `json_schema` and
                sampling options, as for `chat`.

        Raises:
            TokenizerError: the model has no tokenizer, or `prompt` is not a string.
            GrammarError, PromptError, SamplingError, ArgumentError, NumericalError, BusyError: as `chat`.
        """
        return self._answered(_Call("complete", self._text(prompt)), max_tokens, options)

    def complete_stream(self, prompt: str, max_tokens: int | None = None, **options: Any) -> Stream:
        """`complete` as a stream: an iterator of `Step`."""
        return self._streamed(_Call("complete_stream", self._text(prompt)), max_tokens, options)

    def chat_ids(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        check: Callable[[str], None] | None = None,
        **variables: Any,
    ) -> list[int] | Prompt:
        """The token ids of a conversation, formatted with the model's chat template, up to the start of the answer.

        With images it is a `Prompt`, in which a placeholder stands for each image.

        Args:
            messages: as for `chat`; control tokens in a content are ordinary text.
            tools: JSON schemas of functions that the model may call.
            check: gets the formatted text before it is encoded, and may raise an error of its own, such as for a text
                that is far too long.
            variables: further variables of the template, such as `enable_thinking=False`.

        Raises:
            ChatTemplateError: the model has no chat template, or the template rejects the messages.
            MultimodalError: a message contains an image, and the model was opened without a vision tower; or a part
                that is neither text nor an image.
            ImageError: an image cannot be used.
        """
        from rlx.text.chat import chat_ids
        from rlx.text.image_parts import taken_images

        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        plain, values = taken_images(given)
        images = self._images
        if values and images is None:
            raise no_tower(f"{self.family} model", "messages", len(values))
        if images is None:
            return chat_ids(self.tokenizer, plain, tools, check=check, **variables)
        parts = [images.encoder.processor.parts(image) for image in read_images(values)]
        tokens = images.tokens and images.tokens.laid_out(parts)
        ids = chat_ids(self.tokenizer, plain, tools, images=tokens, check=check, **variables)
        shown = [part for each in parts for part in each if not isinstance(part, str)]
        return Prompt(ids, shown) if shown else ids

    def _text(self, prompt: str) -> Context:
        return self.checked_prompt(self.tokenizer.encode(prompt))

    def _chat_call(self, where: str, messages: Messages, options: dict[str, Any]) -> _Call:
        from rlx.text.answer import ThinkingTags, tool_format
        from rlx.text.chat import thinking_variables
        from rlx.text.tool_calls import checked_choice, checked_tools

        variables = {**(options.pop("variables", None) or {})}
        variables |= thinking_variables(self.tokenizer, options.pop("thinking", None), "thinking")
        given, parallel = options.pop("tools", None), options.pop("parallel_tool_calls", True)
        tools = checked_tools(given or ())
        choice = checked_choice(options.pop("tool_choice", None), tools)
        if choice.mode == "none":
            given, tools = None, ()
        with span("read the messages", "text"):
            context = self.checked_prompt(self.chat_ids(messages, given, **variables))
        tags = ThinkingTags.of(self.tokenizer)
        call = _Call(where, context, tags, tags is not None and tags.is_open(self.tokenizer, context.ids))
        if not tools:
            return call
        return replace(call, calls=_Calls(tool_format(self.tokenizer), tools, choice, parallel))

    def _answered(self, call: _Call, max_tokens: int | None, options: dict[str, Any]) -> Answer:
        """The complete answer."""
        found = self.generate(call.context, self._most(call, max_tokens), **self._token_options(call, options))
        text = call.text(self.tokenizer, options)
        pieces = [text.push(token, found.finish_reason) for token in found[:-1]]
        pieces += [text.push(token, found.finish_reason, last=True) for token in found[-1:]]
        if found.steps is not None:
            found.steps = [piece.step(step) for step, piece in zip(found.steps, pieces, strict=True)]
        said, thinking = ("".join(getattr(piece, name) for piece in pieces) for name in ("text", "thinking"))
        calls = whole_calls(delta for piece in pieces for delta in piece.tool_calls)
        return Answer(said, thinking, found, len(call.context), options.get("json_schema"), calls)

    def _streamed(self, call: _Call, max_tokens: int | None, options: dict[str, Any]) -> Stream:
        """The answer as a stream."""
        stream = self.stream(call.context, self._most(call, max_tokens), **self._token_options(call, options))
        text = call.text(self.tokenizer, options)

        def spoken(step: Step) -> Step:
            return text.push(step.token, step.finish_reason, last=step.finish_reason is not None).step(step)

        return stream.mapped(spoken)

    def _most(self, call: _Call, max_tokens: int | None) -> int:
        """Maximum number of tokens of an answer."""
        if max_tokens is None and self.max_seq is None:
            raise ArgumentError("max_tokens is required: the context is unlimited", where=call.where)
        found = checked_count("max_tokens", max_tokens)
        return (self.max_seq or 0) + 1 if found is None else found  # more than the context has room for

    def _token_options(self, call: _Call, options: dict[str, Any]) -> dict[str, Any]:
        """Converts options of `chat` to those of `generate`: sampling options become one `SampleOpts`."""
        check_arguments(call.where, options, call.known, OPENING)
        sampling = {name: options[name] for name in options if name in SAMPLING}
        others = {name: options[name] for name in options if name not in SAMPLING}
        if sampling:
            others["sample"] = combined(self._sampling(others.get("sample")), sampling)
        form = chosen_grammar(others.pop("grammar", None), others.pop("json_schema", None))
        if call.calls is not None:
            form = calls_grammar(*call.calls, form)
        if form is not None:
            others["grammar"] = after_thinking(form, self.tokenizer, call.context.ids) if call.tags else form
        return others


class _Calls(NamedTuple):
    """The tools of a call of `chat`: how the model writes calls, what it may call, whether it must, and how often."""

    tool_format: ToolFormat | None
    tools: tuple[Tool, ...]
    choice: ToolChoice
    parallel: bool


@dataclass(frozen=True)
class _Call:
    """A prompt that is answered with text.

    Attributes:
        where: name of the method, for messages.
        context: the prompt.
        tags: the tags around reasoning; None if there are none.
        is_open: whether the prompt ends inside the reasoning.
        calls: the tools; None if there are none.
    """

    where: str
    context: Context
    tags: ThinkingTags | None = None
    is_open: bool = False
    calls: _Calls | None = None

    @property
    def known(self) -> list[str]:
        """The options of the method, its positional arguments first."""
        own = ("messages", "max_tokens", *_CHAT) if self.where.startswith("chat") else ("prompt", "max_tokens")
        return [*own, *_OPTIONS, *sorted(SAMPLING)]

    def text(self, tokenizer: Tokenizer, options: Mapping[str, Any]) -> _AnswerText:
        """The converter from the tokens of the answer to its text."""
        return _AnswerText(self, tokenizer, stop_strings(options.get("stop", ())), options.get("min_tokens") or 0)


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a token adds to an answer."""

    text: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def step(self, step: Step) -> Step:
        return replace(step, text=self.text, thinking=self.thinking, tool_calls=self.tool_calls)


class _AnswerText:
    """Splits the tokens of an answer into reasoning, text and tool calls."""

    def __init__(self, call: _Call, tokenizer: Tokenizer, stop: Sequence[str], min_tokens: int) -> None:
        from rlx.text.answer import AnswerParser, kept_ids

        tool_format, tools = call.calls[:2] if call.calls else (None, ())
        self._text = AnswerText(tokenizer, stop, kept_ids(tokenizer, call.tags, tool_format))
        self._parser = AnswerParser(call.tags, call.is_open, tool_format, tools)
        self._min, self._count = min_tokens, 0

    def push(self, token: int, reason: FinishReason | None, last: bool = False) -> _Piece:
        """Adds one token; returns what is now certain."""
        self._count += 1
        piece = ""
        if not (last and reason == FinishReason.STOP):  # a stop id has no text
            piece = self._text.push(token, may_stop=self._count >= self._min)
        parts = self._parser.push(piece + self._text.finish() if last else piece)
        parts += self._parser.finish() if last else []
        calls = tuple(part.tool_call for part in parts if part.tool_call is not None)
        return _Piece("".join(part.text for part in parts), "".join(part.thinking for part in parts), calls)
