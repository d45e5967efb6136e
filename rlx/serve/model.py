"""A model that is served: a runner with its names. It checks prompts and submits requests.

Server stage, between the APIs and the engine loop. Whatever takes long in Python (tokenizers, templates, images,
grammars) runs in worker threads, so that the event loop stays responsive.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from anyio import CapacityLimiter, move_on_after

from rlx.engine.request import Context
from rlx.errors import DeadlineError, PromptError
from rlx.prompt import Prompt
from rlx.runners import Request
from rlx.runners.base import submitted_group
from rlx.runners.encoder import as_encoder
from rlx.sampling import SampleOpts
from rlx.serve import record
from rlx.serve.answers import Asked, EventStream
from rlx.serve.errors import context_overflow
from rlx.serve.http import in_thread
from rlx.serve.options import ServerOptions
from rlx.text.answer import AnswerParser, ThinkingTags, tool_format

if TYPE_CHECKING:
    from rlx.grammar import Grammar
    from rlx.runners import Model
    from rlx.text.tokenizer import Tokenizer
    from rlx.weights import WeightLoader

GRAMMARS_AT_ONCE = 2  # the process that tries them takes one at a time; meanwhile another is compiled
TEXTS_AT_ONCE = 2  # whose tokens are the answer: they may be long
BACKGROUND = 1 << 40
"""How much lower the priority of batches is than any that a request may have."""
#: The control tokens of models that fill in the middle: before the text, before what follows it, before the answer.
FILL_IN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
FILE = "<|file_sep|>"  # before the name of a file, which a line break and its text follow
_FILE_TYPE = "general.file_type"


class ServedModel:
    """A runner that is served under some names.

    Args:
        runner: closed by whoever opened it.
        name: what the model is called in answers.
        aliases: further names that requests may use.
        adapter: the name of the adapter that answers; None for the model as it is.

    Attributes:
        names: the name in answers, and the others.
        created: Unix time at which it was opened.
        options: how it is served; requests override the sampling options.
        grammar_turns: how many grammars are made at once. Costly ones leave the threads to other requests.
    """

    def __init__(self, runner: Model, name: str, aliases: Sequence[str] = (), adapter: str | None = None) -> None:
        self.runner, self.name, self.aliases, self.adapter = runner, name, tuple(aliases), adapter
        self.names = (name, *aliases)
        self.created = int(time.time())
        self.options, self.grammar_turns = ServerOptions(), CapacityLimiter(GRAMMARS_AT_ONCE)
        self.text_limiter = CapacityLimiter(TEXTS_AT_ONCE)

    @property
    def with_adapters(self) -> list[ServedModel]:
        """It, and for each of its adapters a model with the name of the adapter."""
        return [self, *(ServedModel(self.runner, name, adapter=name) for name in self.runner.adapters)]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self.runner.tokenizer

    @property
    def slots(self) -> int:
        """How many choices are computed at once."""
        return self.runner.slots

    @property
    def is_warm(self) -> bool:
        """Whether an answer need not wait for a compile: the first programs are there, or have computed something."""
        if as_encoder(self.runner):
            return True
        return self.runner._engine.ahead.is_ready or bool(self.runner.stats()["requests"]["tokens"])

    @property
    def is_compiled(self) -> bool:
        """Whether everything is there that is compiled ahead."""
        return bool(as_encoder(self.runner)) or self.runner._engine.ahead.is_complete

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        encoder = as_encoder(self.runner)
        return self.runner.config.hidden if encoder is None else encoder.width

    @property
    def file(self) -> WeightLoader:
        """Its file, which has path, format and tensors."""
        return self.runner.weights.loader

    @cached_property
    def file_bytes(self) -> int:
        """Bytes of all tensors of its file."""
        return sum(info.nbytes for info in self.file.tensors.values())

    @cached_property
    def quantization(self) -> str:
        """The type of its weights, such as `Q4_K_M`: what a GGUF file says, else that of most bytes."""
        number = self.file.metadata.get(_FILE_TYPE) if self.file.format == "gguf" else None
        if isinstance(number, int):
            from gguf import LlamaFileType  # slow

            if number in {each.value for each in LlamaFileType}:
                return LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_")
        sizes: Counter[str] = Counter()
        for info in self.file.tensors.values():
            sizes[info.dtype.name] += info.nbytes
        return sizes.most_common(1)[0][0].upper() if sizes else "unknown"

    @cached_property
    def capabilities(self) -> tuple[str, ...]:
        """Its abilities, in Ollama's words."""
        if (encoder := as_encoder(self.runner)) is not None:
            return ("rerank",) if encoder.is_reranker else ("embedding",)
        can = {
            "completion": True,
            "tools": tool_format(self.tokenizer) is not None,
            "vision": self.runner.supports_multimodal,
            "insert": fill_in_ids(self.tokenizer) is not None,
            "thinking": self.tags is not None,
        }
        return tuple(name for name, whether in can.items() if whether)

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Its parameters, and the bytes that they take."""
        stats = self.runner.stats()
        return stats["parameters"], stats["weights_bytes"]

    @cached_property
    def tags(self) -> ThinkingTags | None:
        """The tags around its reasoning; None for a model that never reasons."""
        return ThinkingTags.of(self.tokenizer)

    @cached_property
    def default_sample(self) -> SampleOpts:
        """The sampling options of requests that give none: the server's, before the model's own recommendation, before
        those of OpenAI's API.
        """
        return replace(self.runner.recommended_sample or SampleOpts(), **self.options.sample)

    def limit(self, tokens: int | None) -> int | None:
        """How many tokens an answer may have, where a request says `tokens`; None for what the context has room for.

        It is a number that fits a metric and a span, whatever the request says.
        """
        limits = [each for each in (tokens, self.options.max_tokens) if each is not None]
        return min(*limits, self._room) if limits else None

    @property
    def _room(self) -> int:
        """More tokens than any answer can have."""
        return self.runner.max_seq + 1

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

    def asked(
        self,
        prompt: list[int] | Prompt | Context,
        max_tokens: int | None = None,
        sample: SampleOpts | None = None,
        *,
        n: int = 1,
        parser: Callable[[], AnswerParser] | None = None,
        include_stop: bool = False,
        grammar: Callable[[], Grammar | None] | None = None,
        **fields: Any,
    ) -> Asked:
        """A request for the engine, and how its answer is read.

        Args:
            max_tokens: as the request says; None for what the context has room for.
            sample: None for `default_sample`.
            n, parser, include_stop, grammar: as `Asked` has them.
            fields: further ones of `Request`.

        Raises:
            ApiError, RlxError: as `checked`.
        """
        limit = self.limit(max_tokens)
        most = self._room if limit is None else limit
        request = Request(self.checked(prompt), most, sample or self.default_sample, adapter=self.adapter, **fields)
        return Asked(request, limit, n, parser, include_stop, grammar)

    async def grammar_of(self, asked: Asked) -> Grammar | None:
        """The grammar of what is asked for. A few are made at once, and the others wait without a thread.

        Raises:
            DeadlineError: the time of the request ended while it waited.
        """
        assert asked.grammar is not None
        found, timeout = record.current(), asked.request.timeout
        with move_on_after(timeout if found is None else found.time_left(timeout)):
            return await in_thread(asked.grammar, self.grammar_turns)
        hint = "give it more time, or send fewer grammars at once"
        raise DeadlineError("the request was not finished in time: its grammar waited", where="timeout", hint=hint)

    def submit(self, asked: Sequence[Asked]) -> EventStream:
        """Hands requests to the engine, for the current request over HTTP if there is one.

        Raises:
            RlxError: one is invalid or refused; then none of them is computed.
        """
        begun = time.perf_counter()
        together = submitted_group(self.runner, [request for each in asked for request in self._requests(each)])
        handles = iter(together.handles)
        choices = [[next(handles) for _ in range(each.n)] for each in asked]
        note = record.observer(
            begun, choices, [each.limit for each in asked], lambda: [self._prompt(each) for each in asked]
        )
        return EventStream(self.tokenizer, asked, together, note)

    def _prompt(self, asked: Asked) -> str:
        assert isinstance(asked.request.ids, Context)
        return self.tokenizer.decode(asked.request.ids.ids)

    def _requests(self, asked: Asked) -> list[Request]:
        """The requests of the engine, one a choice."""
        request, found = asked.request, record.current()
        if found is not None:
            request = replace(
                request,
                priority=request.priority - (BACKGROUND if found.background else 0),
                timeout=found.time_left(request.timeout),
                cache_salt=f"{found.owner}:{request.cache_salt}" if found.owner or request.cache_salt else "",
            )
        sample = asked.request.sample
        if not isinstance(sample, SampleOpts) or sample.seed is None:
            return [request] * asked.n
        own = [replace(sample, seed=(sample.seed + i) % 2**64) for i in range(1, asked.n)]
        return [request, *(replace(request, sample=each) for each in own)]


def fill_in_ids(tokenizer: Tokenizer) -> list[int] | None:
    """The ids of the first row of `FILL_IN` that a vocabulary has; None if it has none."""
    for names in FILL_IN:
        tokens = [token for name in names if (token := tokenizer.token_to_id(name)) is not None]
        if len(tokens) == len(names):
            return tokens
    return None
