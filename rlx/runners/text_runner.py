"""Text input and output: conversations and completions on top of a token runner.

Runners stage, over `base.py`. The model's tokenizer and chat template turn a prompt into ids. The tokens of the answer
are converted to text, and to the model's reasoning if it writes any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlx.arguments import SAMPLING, check_arguments
from rlx.errors import ArgumentError
from rlx.grammar.grammar import chosen_grammar
from rlx.grammar.parsed import parsed
from rlx.grammar.thinking import after_thinking
from rlx.prompt import Prompt, read_images
from rlx.runners.base import LmRunner
from rlx.runners.generation.context import Context, no_tower
from rlx.runners.generation.output import Generation, Step
from rlx.runners.generation.stopping import AnswerText, FinishReason, checked_count, stop_strings
from rlx.runners.opening.options import OPENING
from rlx.runners.serving.handle import Stream
from rlx.sampling.options import combined

if TYPE_CHECKING:
    from rlx.text.thinking import ThinkingTags
    from rlx.text.tokenizer import Tokenizer

Messages = str | Sequence[Mapping[str, Any]]
_OPTIONS = ("sample", "stop", "min_tokens", "speculative", "top_logprobs", "grammar", "json_schema")
_CHAT = ("tools", "thinking", "variables")


@dataclass(frozen=True)
class Answer:
    """The answer of a model.

    Attributes:
        text: the answer, without control tokens, reasoning and stop string.
        thinking: the model's reasoning; empty if there is none.
        generation: the tokens.
        prompt_tokens: number of tokens in the prompt.
        json_schema: the schema that it follows, as it was given; else None.
    """

    text: str
    thinking: str
    generation: Generation
    prompt_tokens: int
    json_schema: Any = None

    @cached_property
    def parsed(self) -> Any:
        """The value of the text, if a JSON schema was given: an instance of the pydantic class, or what JSON says.

        None without a schema.

        Raises:
            GrammarError: the answer was cut before it was complete, or the pydantic class does not accept the value.
        """
        return None if self.json_schema is None else parsed(self.text, self.json_schema, self.finish_reason)

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
    def message(self) -> dict[str, str]:
        """The answer as a message that continues the conversation."""
        thinking = {"reasoning_content": self.thinking} if self.thinking else {}
        return {"role": "assistant", "content": self.text, **thinking}

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
            tools: JSON schemas of functions that the model may call.
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
            MultimodalError, ImageError: as `chat_ids`.
            UnknownArgumentError: there is no such option.
            SamplingError: an option is out of its range, or has no effect because decoding is greedy.
            GrammarError, PromptError, ArgumentError, NumericalError, BusyError: as `generate`.
        """
        return self._answered(self._chat_call("chat", messages, options), max_tokens, options)

    def chat_stream(self, messages: Messages, max_tokens: int | None = None, **options: Any) -> Stream:
        """`chat` as a stream: an iterator of `Step` with `text` and `thinking`.

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
        **variables: Any,
    ) -> list[int] | Prompt:
        """The token ids of a conversation, formatted with the model's chat template, up to the start of the answer.

        With images it is a `Prompt`, in which a placeholder stands for each image.

        Args:
            messages: as for `chat`; control tokens in a content are ordinary text.
            tools: JSON schemas of functions that the model may call.
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
            return chat_ids(self.tokenizer, plain, tools, **variables)
        parts = [images.encoder.processor.parts(image) for image in read_images(values)]
        tokens = images.tokens and images.tokens.laid_out(parts)
        ids = chat_ids(self.tokenizer, plain, tools, images=tokens, **variables)
        shown = [part for each in parts for part in each if not isinstance(part, str)]
        return Prompt(ids, shown) if shown else ids

    def _text(self, prompt: str) -> Context:
        return self.checked_prompt(self.tokenizer.encode(prompt))

    def _chat_call(self, where: str, messages: Messages, options: dict[str, Any]) -> _Call:
        from rlx.text.chat import thinking_variables
        from rlx.text.thinking import ThinkingTags

        variables = {**(options.pop("variables", None) or {})}
        variables |= thinking_variables(self.tokenizer, options.pop("thinking", None), "thinking")
        context = self.checked_prompt(self.chat_ids(messages, options.pop("tools", None), **variables))
        tags = ThinkingTags.of(self.tokenizer)
        return _Call(where, context, tags, tags is not None and tags.is_open(self.tokenizer, context.ids))

    def _answered(self, call: _Call, max_tokens: int | None, options: dict[str, Any]) -> Answer:
        """The complete answer."""
        found = self.generate(call.context, self._most(call, max_tokens), **self._token_options(call, options))
        text = call.text(self.tokenizer, options)
        pieces = [text.push(token, found.finish_reason) for token in found[:-1]]
        pieces += [text.push(token, found.finish_reason, last=True) for token in found[-1:]]
        thinking, said = ("".join(part) for part in zip(*pieces, strict=True)) if pieces else ("", "")
        if found.steps is not None:
            found.steps = [replace(s, thinking=t, text=p) for s, (t, p) in zip(found.steps, pieces, strict=True)]
        return Answer(said, thinking, found, len(call.context), options.get("json_schema"))

    def _streamed(self, call: _Call, max_tokens: int | None, options: dict[str, Any]) -> Stream:
        """The answer as a stream."""
        stream = self.stream(call.context, self._most(call, max_tokens), **self._token_options(call, options))
        text = call.text(self.tokenizer, options)

        def spoken(step: Step) -> Step:
            thinking, said = text.push(step.token, step.finish_reason, last=step.finish_reason is not None)
            return replace(step, text=said, thinking=thinking)

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
        if form is not None:
            others["grammar"] = after_thinking(form, self.tokenizer, call.context.ids) if call.tags else form
        return others


@dataclass(frozen=True)
class _Call:
    """A prompt that is answered with text.

    Attributes:
        where: name of the method, for messages.
        context: the prompt.
        tags: the tags around reasoning; None if there are none.
        is_open: whether the prompt ends inside the reasoning.
    """

    where: str
    context: Context
    tags: ThinkingTags | None = None
    is_open: bool = False

    @property
    def known(self) -> list[str]:
        """The options of the method, its positional arguments first."""
        own = ("messages", "max_tokens", *_CHAT) if self.where.startswith("chat") else ("prompt", "max_tokens")
        return [*own, *_OPTIONS, *sorted(SAMPLING)]

    def text(self, tokenizer: Tokenizer, options: Mapping[str, Any]) -> _AnswerText:
        """The converter from the tokens of the answer to its text."""
        return _AnswerText(self, tokenizer, stop_strings(options.get("stop", ())), options.get("min_tokens") or 0)


class _AnswerText:
    """Splits the tokens of an answer into reasoning and text."""

    def __init__(self, call: _Call, tokenizer: Tokenizer, stop: Sequence[str], min_tokens: int) -> None:
        from rlx.text.thinking import ThinkingSplitter

        keep = call.tags.ids(tokenizer) if call.tags else frozenset()
        self._text, self._splitter = AnswerText(tokenizer, stop, keep), ThinkingSplitter(call.tags, call.is_open)
        self._min, self._count = min_tokens, 0

    def push(self, token: int, reason: FinishReason | None, last: bool = False) -> tuple[str, str]:
        """Adds one token; returns the newly confirmed reasoning and text."""
        self._count += 1
        piece = ""
        if not (last and reason == FinishReason.STOP):  # a stop id has no text
            piece = self._text.push(token, may_stop=self._count >= self._min)
        thinking, said = self._splitter.push(piece + self._text.finish() if last else piece)
        if last:
            more = self._splitter.finish()
            thinking, said = thinking + more[0], said + more[1]
        return thinking, said
