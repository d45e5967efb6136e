"""A model that is served: a runner with its names. It prepares prompts, generates, and collects answers.

Server stage, between the APIs and the engine loop. Whatever takes long in Python (tokenizers, templates, images,
grammars) runs in worker threads, so that the event loop stays responsive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from anyio import CapacityLimiter, to_thread

from rlx.engine.request.context import Context
from rlx.errors import PromptError
from rlx.prompt import Prompt
from rlx.runners import Request
from rlx.runners.together import Together
from rlx.sampling import SampleOpts
from rlx.serve import record
from rlx.serve.answering import Answering
from rlx.serve.chat_prompt import ChatPrompt, chat_prompt
from rlx.serve.errors import context_overflow
from rlx.serve.facts import ModelFacts
from rlx.serve.generation import Choice, Collected, Delta, End, Finished, GenerationSpec
from rlx.serve.media import MediaOptions

if TYPE_CHECKING:
    from rlx.runners import CachedRunner
    from rlx.text.tokenizer import Tokenizer

T = TypeVar("T")
GRAMMARS_AT_ONCE = 2  # the process that tries them takes one at a time; meanwhile another is compiled
TEXTS_AT_ONCE = 2  # whose tokens are the answer: they may be long
BACKGROUND = 1 << 40
"""How much lower the priority of batches is than any that a request may have."""


class ServedModel:
    """A runner that is served under some names.

    Args:
        runner: closed by whoever opened it.
        name: what the model is called in answers.
        aliases: further names that requests may use.

    Attributes:
        created: Unix time at which it was opened.
        media: what images of requests may be.
        grammar_turns: how many grammars are made at once. Costly ones leave the threads to other requests.
        sample: sampling options that the server sets, by name; requests override them.
        max_tokens: as `ServerOptions.max_tokens`.
    """

    sample: Mapping[str, Any] = {}
    max_tokens: int | None = None

    def __init__(self, runner: CachedRunner, name: str, aliases: Sequence[str] = ()) -> None:
        self.runner, self.name, self.aliases = runner, name, tuple(aliases)
        self.created = int(time.time())
        self.media, self.grammar_turns = MediaOptions(), CapacityLimiter(GRAMMARS_AT_ONCE)
        self.text_turns = CapacityLimiter(TEXTS_AT_ONCE)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.runner.tokenizer

    @property
    def slots(self) -> int:
        """How many choices are computed at once."""
        return self.runner.slots

    @property
    def is_warm(self) -> bool:
        """Whether an answer need not wait for a compile: the first programs are there, or have computed something."""
        return self.runner._engine.ahead.is_ready or bool(self.runner.stats()["requests"]["tokens"])

    @property
    def names(self) -> tuple[str, ...]:
        """The name in answers, and the others."""
        return (self.name, *self.aliases)

    @cached_property
    def facts(self) -> ModelFacts:
        """What is known of its file."""
        return ModelFacts.of(self.runner.weights.loader)

    @property
    def default_sample(self) -> SampleOpts:
        """The sampling options of requests that give none: the server's, before the model's own recommendation, before
        those of OpenAI's API.
        """
        return replace(self.runner.recommended_sample or SampleOpts(), **self.sample)

    def limit(self, tokens: int | None) -> int | None:
        """How many tokens an answer may have, where a request says `tokens`; None for what the context has room for."""
        return min((each for each in (tokens, self.max_tokens) if each is not None), default=None)

    # ---------------------------------------------------------------------------------------------- prompts

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel: bool = True,
        variables: Mapping[str, Any] | None = None,
        continues: bool = False,
        splits: bool = True,
    ) -> ChatPrompt:
        """The prompt of a conversation, formatted with the model's chat template, and how its answer is read.

        Args:
            messages: in OpenAI's form; images are parts `image_url`, or see `ImageSource`.
            tools: functions that the model may call, in OpenAI's form.
            tool_choice: whether it has to call them, in OpenAI's form.
            parallel: whether an answer may have several calls.
            variables: further variables of the template, such as `enable_thinking` and `add_generation_prompt`.
            continues: whether the answer continues the last message, which must be the assistant's.
            splits: whether reasoning is split from the text.

        Raises:
            ChatTemplateError, MultimodalError, ImageError: as `TextRunner.chat`.
            ToolError: the tools or the choice are invalid.
            ApiError: a message is malformed, or the prompt is longer than the context.
        """
        return await in_thread(
            lambda: chat_prompt(
                self, messages, tools, tool_choice, parallel, dict(variables or {}), continues=continues, splits=splits
            )
        )

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
            count = self.runner.count_tokens(prompt) if isinstance(prompt, Prompt) else len(prompt)
            if count > most:
                raise context_overflow(count, most, field) from error
            raise

    def check_length(self, texts: Iterable[str], field: str) -> None:
        """Refuses texts that are far too long for the context, before anything slow is done with them.

        Raises:
            ApiError: a text is.
        """
        for text in texts:
            if count := self.tokenizer.estimated_beyond(text, self.runner.max_seq):
                raise context_overflow(count, self.runner.max_seq, field, estimated=True)

    # ---------------------------------------------------------------------------------------------- answers

    async def generate(self, *specs: GenerationSpec) -> Answering:
        """Hands requests over; their events as they come.

        Events of different choices interleave. The choices of the second spec follow those of the first in number, and
        so on. Closing the iterator aborts all of them at once.

            async for event in await model.generate(spec):
                ...

        Raises:
            ApiError, RlxError: a request is invalid or refused: before the first event. One that fails later raises
                where its events are read.
        """
        return await in_thread(lambda: self._submitted(specs))

    def _submitted(self, specs: Sequence[GenerationSpec]) -> Answering:
        checked = [
            replace(spec, prompt=self.checked(spec.prompt), max_tokens=self.limit(spec.max_tokens)) for spec in specs
        ]
        together = Together(self.runner, [request for spec in checked for request in self._requests(spec)])
        handles = iter(together.handles)
        choices = [[next(handles) for _ in range(spec.n)] for spec in checked]
        limits = [spec.max_tokens for spec in checked]
        note = record.observer(choices, limits, lambda: [self._decoded(spec) for spec in checked])
        return Answering(self.tokenizer, checked, together, note)

    def _decoded(self, spec: GenerationSpec) -> str:
        """The text of a checked prompt."""
        assert isinstance(spec.prompt, Context)
        return self.tokenizer.decode(spec.prompt.ids)

    def _requests(self, spec: GenerationSpec) -> list[Request]:
        """The requests of a spec, one a choice."""
        found = record.current()
        request = Request(
            self.checked(spec.prompt),
            self.runner.max_seq + 1 if spec.max_tokens is None else spec.max_tokens,
            spec.sample,
            stop_at_eog=not spec.ignore_eos,
            stop=spec.stop,
            min_tokens=spec.min_tokens,
            top_logprobs=spec.top_logprobs,
            priority=spec.priority - (BACKGROUND if found is not None and found.background else 0),
            timeout=spec.timeout if found is None else found.time_left(spec.timeout),
            stop_ids=spec.stop_ids,
            keep_ids=spec.keep_ids,
            grammar=spec.grammar,
            cache_salt=_salt(found.owner if found is not None else "", spec.cache_salt),
        )
        return [replace(request, sample=_own(spec.sample, i)) for i in range(spec.n)]

    async def collect(self, *specs: GenerationSpec) -> Collected:
        """The complete answer of requests.

        Raises:
            ApiError, RlxError: as `generate`.
        """
        choices = [Choice(i) for i in range(sum(spec.n for spec in specs))]
        async for event in await self.generate(*specs):
            if isinstance(event, Delta):
                choices[event.index].add(event)
            elif isinstance(event, End):
                choices[event.index].finish_reason, choices[event.index].stop = event.finish_reason, event.stop
            elif isinstance(event, Finished):
                return Collected(choices, event.usage, event.timings)
        raise AssertionError("the last event is Finished")


async def in_thread(work: Callable[[], T], turns: CapacityLimiter | None = None) -> T:
    """The result of `work`, which runs in a worker thread; with `turns`, when one of them is free."""
    return await to_thread.run_sync(work, limiter=turns)


def _salt(owner: str, salt: str) -> str:
    """The salt of a request for the engine, whose salts are one for each pair of owner and salt."""
    return f"{owner}:{salt}" if owner or salt else ""


def _own(sample: SampleOpts, index: int) -> SampleOpts:
    """The options of a choice: a seed of its own."""
    return sample if sample.seed is None else replace(sample, seed=(sample.seed + index) % 2**64)
