"""Text input and output of a model: conversations and completions.

Runners stage, under `model.py`. The model's tokenizer and chat template turn a prompt into ids. The tokens of the
answer are converted to text, and to the model's reasoning if it writes any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from rlx import grammar, runners
from rlx.arguments import SAMPLING, check_arguments, flag
from rlx.engine.loop.handle import Generation, Step, Stream
from rlx.engine.opening.options import OPENING
from rlx.engine.request import Context, FinishReason, Request, RequestOptions, checked_count, named_grammar, no_tower
from rlx.errors import ArgumentError
from rlx.prompt import Prompt, read_images
from rlx.runners.base import generated, streamed
from rlx.sampling.options import combined, resolved
from rlx.text.answer import AnswerParser, ThinkingTags, joined, kept_ids, tool_format
from rlx.text.chat import chat_ids, thinking_variables
from rlx.text.image_parts import taken_images
from rlx.text.tool_calls import Tool, ToolChoice, ToolFormat, checked_choice, checked_tools
from rlx.text.tool_calls.format import ToolCall, whole_calls
from rlx.tracing import span

if TYPE_CHECKING:
    from rlx.runners.model import Model

Messages = str | Sequence[Mapping[str, Any]]
_OPTIONS = ("sample", *RequestOptions.__annotations__)
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
        return grammar.parsed(self.text, self.json_schema, self.finish_reason)

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


@dataclass(frozen=True)
class Call:
    """A prompt that is answered with text.

    Attributes:
        where: name of the method, for messages.
        context: the prompt.
        tags: the tags around reasoning; None if there are none.
        is_open: whether the prompt ends inside the reasoning.
        tools: what the model may call. The rest is about them: how it writes calls, whether it must call one, and
            whether it may call several.
    """

    where: str
    context: Context
    tags: ThinkingTags | None = None
    is_open: bool = False
    tools: tuple[Tool, ...] = ()
    tool_format: ToolFormat | None = None
    choice: ToolChoice | None = None
    parallel: bool = True

    @property
    def known(self) -> list[str]:
        """The options of the method, its positional arguments first."""
        own = ("messages", "max_tokens", *_CHAT) if self.where.startswith("chat") else ("prompt", "max_tokens")
        return [*own, *_OPTIONS, *sorted(SAMPLING)]

    def parser(self) -> AnswerParser:
        """What splits the text of the answer into reasoning, text and tool calls."""
        return AnswerParser(self.tags, self.is_open, self.tool_format, self.tools)


def chat_prompt(
    model: Model,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None,
    check: Callable[[str], None] | None,
    variables: Mapping[str, Any],
) -> list[int] | Prompt:
    """The ids of a conversation up to the start of the answer; with images a `Prompt`. See `Model.chat_ids`."""
    given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    images = model._images
    plain, values = taken_images(given, partial(runners.media.frames, model))
    if values and images is None:
        raise no_tower(f"{model.family} model", "messages", len(values))
    if images is None:
        return chat_ids(model.tokenizer, plain, tools, check=check, **variables)
    parts = [images.encoder.processor.parts(image) for image in read_images(values)] if values else []
    tokens = images.tokens and images.tokens.laid_out(parts)
    ids = chat_ids(model.tokenizer, plain, tools, images=tokens, check=check, **variables)
    shown = [part for each in parts for part in each if not isinstance(part, str)]
    return Prompt(ids, shown) if shown else ids


def chat_call(model: Model, where: str, messages: Messages, options: dict[str, Any]) -> Call:
    """The call of a method that answers messages; takes its own options out of `options`."""
    variables = _variables(options.pop("variables", None))
    variables |= thinking_variables(model.tokenizer, options.pop("thinking", None), "thinking")
    given, parallel = options.pop("tools", None), flag("parallel_tool_calls", options.pop("parallel_tool_calls", True))
    tools = checked_tools(() if given is None else given)
    choice = checked_choice(options.pop("tool_choice", None), tools)
    if choice.mode == "none":
        given, tools = None, ()
    with span("read the messages", "text"):
        context = model.checked_prompt(model.chat_ids(messages, given, **variables))
    tags = ThinkingTags.of(model.tokenizer)
    call = Call(where, context, tags, tags is not None and tags.is_open(model.tokenizer, context.ids))
    if not tools:
        return call
    form = tool_format(model.tokenizer)
    return replace(call, tools=tools, tool_format=form, choice=choice, parallel=parallel)


def _variables(value: Any) -> dict[str, Any]:
    """Further variables of a template; `ArgumentError` if they are no mapping of names."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ArgumentError("expected names with values", where="variables", hint='give {"name": value}')
    return dict(value)


def text_call(model: Model, where: str, prompt: str) -> Call:
    """The call of a method that continues a text."""
    return Call(where, model.checked_prompt(model.tokenizer.encode(prompt)))


def answered(model: Model, call: Call, max_tokens: int | None, options: dict[str, Any]) -> Answer:
    """The complete answer."""
    found, parser = generated(model, _request(model, call, max_tokens, options)), call.parser()
    if found.steps is None:
        said, thinking, deltas = joined(parser.push(found.text) + parser.finish())
    else:
        found.steps = [_parsed(parser, step) for step in found.steps]
        said, thinking = ("".join(getattr(step, name) for step in found.steps) for name in ("text", "thinking"))
        deltas = tuple(delta for step in found.steps for delta in step.tool_calls)
    return Answer(said, thinking, found, len(call.context), options.get("json_schema"), whole_calls(deltas))


def answer_stream(model: Model, call: Call, max_tokens: int | None, options: dict[str, Any]) -> Stream:
    """The answer as a stream."""
    return streamed(model, _request(model, call, max_tokens, options), partial(_parsed, call.parser()))


def _parsed(parser: AnswerParser, step: Step) -> Step:
    """A step with the text, the reasoning and the tool calls that are now certain."""
    parts = parser.push(step.text) + (parser.finish() if step.finish_reason is not None else [])
    text, thinking, calls = joined(parts)
    return replace(step, text=text, thinking=thinking, tool_calls=calls)


def _request(model: Model, call: Call, max_tokens: int | None, options: dict[str, Any]) -> Request:
    """The request of a call with the options of `chat`: sampling options become one `SampleOpts`."""
    check_arguments(call.where, options, call.known, OPENING)
    sampling = {name: options[name] for name in options if name in SAMPLING}
    others = {name: options[name] for name in options if name not in SAMPLING}
    sample = others.pop("sample", None)
    if sampling:
        sample = combined(resolved(sample, model.recommended_sample, model.default_sample), sampling)
    form = named_grammar(others.pop("grammar", None), others.pop("json_schema", None))
    if call.choice is not None:
        form = grammar.calls_grammar(call.tool_format, call.tools, call.choice, call.parallel, form)
    if form is not None and call.tags:
        form = grammar.after_thinking(form, model.tokenizer, call.context.ids)
    most = checked_count("max_tokens", max_tokens)
    most = model.max_seq + 1 if most is None else most  # more than the context has room for
    keep = kept_ids(model.tokenizer, call.tags, call.tool_format)
    return Request(call.context, most, sample, grammar=form, keep_ids=keep, **others)


def several(texts: Any) -> list[str] | None:
    """`texts` if they are texts, at least one, in a list or a tuple; else None."""
    found = isinstance(texts, list | tuple) and bool(texts) and all(isinstance(each, str) for each in texts)
    return list(texts) if found else None
