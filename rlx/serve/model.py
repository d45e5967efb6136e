"""A model that is served: a runner with its names. It prepares prompts, generates, and collects answers.

Server stage, between the APIs and the engine loop. Whatever takes long in Python (tokenizers, templates, images,
grammars) runs in worker threads, so that the event loop stays responsive.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from anyio import to_thread

from rlx.errors import PromptError
from rlx.prompt import Prompt
from rlx.runners import FinishReason, Request, Step, TokenLogprob
from rlx.runners.generation.context import Context
from rlx.runners.serving.together import Together
from rlx.sampling import SampleOpts
from rlx.serve.errors import context_overflow
from rlx.serve.generation import (
    Choice,
    Collected,
    Delta,
    End,
    Event,
    Finished,
    GenerationSpec,
    Progress,
    Reason,
    Timings,
    TokenInfo,
    Usage,
)
from rlx.serve.media import MediaOptions, load_images

if TYPE_CHECKING:
    from rlx.runners import CachedRunner
    from rlx.text.tokenizer import Tokenizer

T = TypeVar("T")
PROGRESS_SECONDS = 1.0
Admission = Callable[[GenerationSpec], AbstractContextManager[object]]


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a conversation.

    Attributes:
        context: the checked prompt.
        parser: makes what splits an answer into reasoning, text and tool calls; None if all of it is text.
        keep_ids: control tokens that the parser reads.
    """

    context: Context
    parser: Callable[[], Any] | None = None
    keep_ids: frozenset[int] = frozenset()


class ServedModel:
    """A runner that is served under some names.

    Args:
        runner: closed by whoever opened it.
        name: what the model is called in answers.
        aliases: further names that requests may use.

    Attributes:
        created: Unix time at which it was opened.
        admission: called with every spec before it is computed; what it returns is open while it is. It may refuse
            with an `ApiError`.
        media: what images of requests may be.
    """

    def __init__(self, runner: CachedRunner, name: str, aliases: Sequence[str] = ()) -> None:
        self.runner, self.name, self.aliases = runner, name, tuple(aliases)
        self.created = int(time.time())
        self.admission: Admission = lambda spec: nullcontext()
        self.media = MediaOptions()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.runner.tokenizer

    def is_named(self, name: str) -> bool:
        """Whether a request for the model `name` means this one."""
        return name == self.name or name in self.aliases

    @property
    def default_sample(self) -> SampleOpts:
        """The sampling options of requests that give none: the model's own recommendation, or those of OpenAI's API."""
        return self.runner.recommended_sample or SampleOpts()

    # ---------------------------------------------------------------------------------------------- prompts

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """The prompt of a conversation, formatted with the model's chat template.

        Args:
            messages: contents are texts or lists of parts; images are parts `image_url`, or see `ImageSource`.
            tools: JSON schemas of functions that the model may call.
            variables: further variables of the template, such as `enable_thinking` and `add_generation_prompt`.

        Raises:
            ChatTemplateError, MultimodalError, ImageError: as `TextRunner.chat`.
            ApiError: it is longer than the context.
        """
        return await in_thread(lambda: self._chat_prompt(messages, tools, variables or {}))

    def _chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> ChatPrompt:
        loaded = load_images(messages, self.media, self.runner.supports_multimodal)
        found = self.runner.chat_ids(loaded, tools, **variables)
        return ChatPrompt(self.checked(found, "messages"))

    def checked(self, prompt: list[int] | Prompt | Context, field: str = "prompt") -> Context:
        """A prompt that fits the context.

        Args:
            field: what it is called in the request.

        Raises:
            ApiError: it is longer than the context.
            PromptError, MultimodalError, ImageError: it is invalid.
        """
        if isinstance(prompt, Context):
            return prompt
        most = self.runner.max_seq
        try:
            return self.runner.checked_prompt(prompt, field)
        except PromptError as error:
            ids = prompt.ids if isinstance(prompt, Prompt) else prompt
            count = len(ids) if not len(ids) or not isinstance(prompt, Prompt) else self.runner.count_tokens(prompt)
            if count > most:
                raise context_overflow(count, most, field) from error
            raise

    # ---------------------------------------------------------------------------------------------- answers

    async def generate(self, spec: GenerationSpec) -> AsyncIterator[Event]:
        """Hands a request over; its events as they come.

        Events of different choices interleave. Closing the iterator aborts all choices at once.

            async for event in await model.generate(spec):
                ...

        Raises:
            ApiError, RlxError: the request is invalid or refused: before the first event. A request that fails later
                raises where its events are read.
        """
        admitted = self.admission(spec)
        admitted.__enter__()
        try:
            together = await in_thread(lambda: self._submitted(spec))
        except BaseException as error:
            admitted.__exit__(type(error), error, error.__traceback__)
            raise
        return _Answering(self, spec, together, admitted)

    def _submitted(self, spec: GenerationSpec) -> Together:
        context = self.checked(spec.prompt)
        request = Request(
            context,
            self.runner.max_seq + 1 if spec.max_tokens is None else spec.max_tokens,
            spec.sample,
            stop_at_eog=not spec.ignore_eos,
            stop=spec.stop,
            min_tokens=spec.min_tokens,
            top_logprobs=spec.top_logprobs,
            priority=spec.priority,
            timeout=spec.timeout,
            stop_ids=spec.stop_ids,
            keep_ids=spec.keep_ids,
            grammar=spec.grammar,
        )
        return Together(self.runner, [replace(request, sample=_own(spec.sample, i)) for i in range(spec.n)])

    async def collect(self, spec: GenerationSpec) -> Collected:
        """The complete answer of a request.

        Raises:
            ApiError, RlxError: as `generate`.
        """
        choices = [Choice(i) for i in range(spec.n)]
        events = await self.generate(spec)
        async for event in events:
            if isinstance(event, Delta):
                add(choices[event.index], event)
            elif isinstance(event, End):
                choices[event.index].finish_reason, choices[event.index].stop = event.finish_reason, event.stop
            elif isinstance(event, Finished):
                return Collected(choices, event.usage, event.timings)
        raise AssertionError("the last event is Finished")

    def info(self, step: Step) -> TokenInfo:
        """The log-probabilities of a step."""
        assert step.logprob is not None
        piece = self.tokenizer.token_bytes(step.token)
        chosen = TokenLogprob(step.token, piece.decode("utf-8", "replace"), step.logprob, piece)
        return TokenInfo(chosen, step.top_logprobs)


async def in_thread(work: Callable[[], T]) -> T:
    """The result of `work`, which runs in a worker thread."""
    return await to_thread.run_sync(work)


def add(choice: Choice, delta: Delta) -> None:
    """Adds a delta to its choice."""
    choice.text += delta.text
    choice.thinking += delta.thinking
    choice.tokens += delta.tokens
    choice.logprobs += delta.logprobs


def _own(sample: SampleOpts, index: int) -> SampleOpts:
    """The options of a choice: a seed of its own."""
    return sample if sample.seed is None else replace(sample, seed=(sample.seed + index) % 2**64)


class _Answering(AsyncIterator[Event]):
    """The events of a request that was handed over."""

    def __init__(
        self, model: ServedModel, spec: GenerationSpec, together: Together, admitted: AbstractContextManager[object]
    ) -> None:
        self._together, self._admitted, self._closed = together, admitted, False
        self._events = self._run(model, spec, together)

    async def __anext__(self) -> Event:
        try:
            return await anext(self._events)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Aborts what is not complete. May be called again."""
        if not self._closed:
            self._closed = True
            self._together.abort()
            await self._events.aclose()
            self._admitted.__exit__(None, None, None)

    async def _run(self, model: ServedModel, spec: GenerationSpec, together: Together) -> AsyncGenerator[Event, None]:
        while (news := await together.news(PROGRESS_SECONDS)) != []:
            if news is None:
                yield _progress(together)
                continue
            for index, steps in news:
                for step in steps:
                    logprobs = () if spec.top_logprobs is None else (model.info(step),)
                    yield Delta(index, step.text, tokens=(step.token,), logprobs=logprobs)
                if not steps:
                    yield _end(spec, index, together)
        yield _finished(together)


def _progress(together: Together) -> Progress:
    found = max((handle.stats for handle in together.handles), key=lambda each: each.done_tokens)
    ms = 1000 * (found.queued_s + found.prompt_s)
    return Progress(found.prompt_tokens, found.cached_tokens, found.done_tokens, ms)


def _finished(together: Together) -> Finished:
    """The numbers of all choices; those of the prompt are of the first, which computes it for all."""
    every = [handle.stats for handle in together.handles]
    first, tokens = every[0], sum(each.tokens for each in every)
    timings = Timings(
        queue_ms=1000 * first.queued_s,
        prompt_ms=1000 * first.prompt_s,
        prompt_tokens=first.prompt_tokens - first.cached_tokens,
        decode_ms=1000 * max(each.decode_s for each in every),
        decode_tokens=tokens,
        cached_tokens=first.cached_tokens,
    )
    return Finished(Usage(first.prompt_tokens, first.cached_tokens, tokens), timings)


def _end(spec: GenerationSpec, index: int, together: Together) -> End:
    stopping = together.handles[index].stopping
    full = stopping.reason in (FinishReason.LENGTH, FinishReason.CONTEXT)
    reason: Reason = "length" if full else "stop"
    stop = stopping.stopped_by
    return End(index, reason, stop if isinstance(stop, str) or stop in spec.stop_ids else None)
