"""The interface of every language model runner.

Runners stage. A runner makes jobs of requests, and the engine loop computes them. Here the loop has an engine that
recomputes the whole context for every token: slow, and the reference for the cached decode of `model.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property, partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack

import numpy as np

from rlx import arguments, engine, grammar
from rlx.arguments import can_iterate, known_arguments, several
from rlx.backends import Device
from rlx.closing import Closing, on_error
from rlx.engine import speculation
from rlx.engine.images import ImageInput
from rlx.engine.loop.handle import Generation, Handle, OnToken, RequestGroup, Step, Stream
from rlx.engine.loop.job import DraftsOf, Job, Notifier
from rlx.engine.loop.loop import EngineLoop
from rlx.engine.loop.room import KeptSequence
from rlx.engine.opening.options import OPENING
from rlx.engine.request import (
    PARAMETERS,
    Context,
    Logits,
    PromptLike,
    Request,
    RequestOptions,
    checked_prompt,
    request_of,
)
from rlx.errors import ArgumentError, MultimodalError, PromptError, TokenizerError
from rlx.sampling import SampleOpts, Sampler
from rlx.sampling.choice import log_probs
from rlx.sampling.options import Sample, resolved

if TYPE_CHECKING:
    from rlx.engine.adapters import Adapters
    from rlx.engine.speculation.drafts import Counters
    from rlx.grammar import GrammarCompiler
    from rlx.text.tokenizer import Tokenizer

OnBatchToken = Callable[[int, int], bool | None]
"""Called with a prompt's number and every new token; False ends that generation."""

GREEDY = SampleOpts.greedy()

SPECULATIONS = ("prompt-lookup", "mtp")
DRAFT_MODEL = "model:"  # before the path of a draft model

P = ParamSpec("P")
R = TypeVar("R")


def takes_request_options(function: Callable[P, R]) -> Callable[P, R]:
    """A method whose `**options` are `RequestOptions`: unknown ones are named."""
    return known_arguments(function, OPENING, PARAMETERS)


class LmRunner(Closing, ABC):
    """A language model that returns logits and generates tokens.

    A subclass provides `family`, `vocab_size` and `predict_logits`; the other methods build on these. Any number of
    threads, asyncio tasks and callbacks may use a runner at the same time: one thread of the runner computes for all.
    """

    _on_token: OnToken | None = None
    """The default callback of calls that give none."""
    _streams = True
    """Whether the default callback is called per token; otherwise after the last token."""
    default_sample: SampleOpts = GREEDY
    """The sampling options of calls that give none: greedy, unless the runner was opened with a `sample`."""
    adapters: tuple[str, ...] = ()
    """The names of the LoRA adapters that requests may choose."""
    _speculative: str | None = None
    """Default speculative decoding of calls that give none."""
    _images: ImageInput | None = None
    """How images come into prompts; None if the runner takes none."""
    _kept: KeptSequence | None = None
    """The sequence that stays between calls, if the runner has one."""
    _cached = False
    """Whether the engine goes on where a sequence ends, instead of computing all of it anew."""

    @property
    @abstractmethod
    def family(self) -> str:
        """Short name of the model family, such as `qwen3`."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of logits; token ids are 0 to `vocab_size - 1`."""

    @property
    def max_seq(self) -> int | None:
        """How many tokens the context holds; None if it is unlimited."""
        return None

    @property
    def tokenizer(self) -> Tokenizer:
        """Converts text to token ids and back.

        Raises:
            TokenizerError: the runner has none.
        """
        hint = "use token ids, without stop strings"
        raise TokenizerError(f"the {self.family} runner has no tokenizer", where="tokenizer", hint=hint)

    @property
    def stop_ids(self) -> Set[int]:
        """Token ids that end a generation: end of text or end of a chat message."""
        return frozenset()

    @property
    def device(self) -> str:
        """The name of the device that the model runs on."""
        return Device.CPU

    @abstractmethod
    def predict_logits(self, ids: PromptLike, all_positions: bool = False) -> Logits:
        """Logits of the token after `ids`. Stateless: the session is not changed.

        Args:
            ids: the context, at least one token.
            all_positions: the logits after every position, not only after the last.

        Returns:
            float32[vocab_size], or float32[len(ids), vocab_size] with `all_positions`.

        Raises:
            PromptError: `ids` is empty, longer than the context, or holds an invalid token id.
            NumericalError: a logit is NaN or infinite.
        """

    @takes_request_options
    def generate(
        self,
        ids: PromptLike,
        n_new: int,
        on_token: OnToken | None = None,
        sample: Sample = None,
        stop_at_eog: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Up to `n_new` tokens that continue `ids`, greedily unless `sample` or the runner says otherwise.

        It ends with the first of: one of `stop_ids`; a stop string; a token for which `on_token` returns False; `n_new`
        tokens; a full context. The result includes the token that ends it. The last token is not stored in the context,
        so a prompt of `max_seq` tokens still gets one.

            answer = runner.generate(runner.tokenizer.encode("Once upon"), 20)
            print(answer.text, answer.finish_reason)

        Args:
            ids: the prompt, at least one token.
            n_new: maximum number of tokens.
            on_token: called once for every token of the result, in order. An exception from it ends the generation and
                propagates; the runner stays usable.
            sample: sampling options: a `SampleOpts`, or "recommended" for those in the model's files; `default_sample`
                if None.
            stop_at_eog: False continues after `stop_ids`.
            stop: strings that end the generation; `Generation.text` ends before them.
            min_tokens: until there are this many tokens, `stop_ids` are not chosen and stop strings are ignored.
            speculative: `prompt-lookup`, `mtp`, or `model:PATH` for a smaller model or a draft head: speculative
                decoding checks several guessed tokens in one step; the result is the same. None takes the
                runner's default.
            adapter: the name of the LoRA adapter that answers, one of `adapters`; None for the model as it is.
            top_logprobs: also report log-probabilities in `Generation.steps`: of each token, and of this many of the
                likeliest tokens at its position.
            grammar: a `Grammar` that the text must follow.
            json_schema: a JSON schema that the text must follow: a mapping, its text, or a class of pydantic models.

        Returns:
            A list of token ids with the attributes `text`, `finish_reason` and `steps`.

        Raises:
            PromptError: the prompt is empty, longer than the context, or holds an invalid token id.
            ArgumentError: a count is negative or not a whole number, a stop string is empty, or `speculative` is
                unknown.
            GrammarError: the grammar or the schema cannot be used.
            NumericalError: a logit is NaN or infinite.
            BusyError: the runner was closed.
        """
        return generated(self, request_of(ids, n_new, sample, stop_at_eog, options), on_token)

    @takes_request_options
    def stream(
        self,
        ids: PromptLike,
        n_new: int,
        sample: Sample = None,
        stop_at_eog: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """The tokens of `generate` as an iterator, also for `async for`.

        Arguments are checked immediately; the generation starts with the first step that is asked for. To end it early,
        close it or drop it.

            for step in runner.stream(ids, 20):
                print(step.text, end="", flush=True)

        Returns:
            An iterator of `Step`: `token`, `text`, `logprob` (under the model's own distribution), `top_logprobs` and,
            in the last one, `finish_reason`.

        Raises:
            As `generate`.
        """
        return streamed(self, request_of(ids, n_new, sample, stop_at_eog, options))

    def submit(self, request: Request) -> Handle:
        """Hands over a request, which is computed together with those of all other callers.

            handle = runner.submit(rlx.Request(ids, 100))
            for step in handle:
                print(step.text, end="", flush=True)

        In an asyncio task, use `async for step in handle` and `await handle`. The session of the runner is unchanged.

        Raises:
            PromptError, ArgumentError, SamplingError: the request is invalid, as for `generate`.
            PoolFullError: it can never fit the memory for KV caches.
            BusyError: the runner was closed.
        """
        if not isinstance(request, Request):
            raise ArgumentError(f"expected a Request, found a {type(request).__name__}", where="submit")
        handle = planned(self, request)
        submitted(self, handle)
        self._loop.wake()
        return handle

    @takes_request_options
    def generate_batch(
        self,
        prompts: Sequence[PromptLike | str | Sequence[Mapping[str, Any]]],
        n_new: int,
        on_token: OnBatchToken | None = None,
        sample: Sample = None,
        stop_at_eog: bool = True,
        **options: Unpack[RequestOptions],
    ) -> list[Generation]:
        """`generate` for several prompts at once: the same tokens at a higher total rate, where the runner can batch.

        Prompts may differ in length. Each generation ends independently. The session, if there is one, is unchanged.

        Args:
            prompts: at least one, each as for `generate`, or a text as for `complete`, or messages as for `chat`.
            n_new: maximum number of tokens for each prompt.
            on_token: called with the prompt's number and the token; False ends that generation only. Tokens of one
                generation come in order; tokens of different generations may interleave.
            sample: as for `generate`. With a seed, prompt i gets the tokens of `generate` with the seed `seed + i`.
            stop_at_eog: as for `generate`.
            options: as for `generate`, for each prompt; `speculative` has no default of the runner here.

        Returns:
            One generation per prompt, in the order of the prompts.

        Raises:
            PromptError: there are no prompts, or one of them is invalid as for `generate`; `where` has its number.
            ArgumentError, NumericalError, BusyError: as `generate`.
        """
        if on_token is not None:
            arguments.function("on_token", on_token)
        opts, handles = resolved(sample, self.recommended_sample, self.default_sample), list[Handle]()
        for i, context in enumerate(contexts(self, prompts)):
            request = request_of(context, n_new, with_own_seed(opts, i), stop_at_eog, options)
            watch, has_texts = None if on_token is None else partial(on_token, i), request.top_logprobs is not None
            handles.append(planned(self, request, watch, has_texts=has_texts, drafts=False))
            handles[-1].job.label = f"sequence {i}"
        return submitted_together(self, handles).results()

    @property
    def recommended_sample(self) -> SampleOpts | None:
        """The sampling options in the model's files; None if there are none."""
        return None

    # ---------------------------------------------------------------------------------------------- the loop

    @cached_property
    def _speculated(self) -> Counters:
        """Counts drafts."""
        return speculation.drafts.Counters()

    @cached_property
    def _engine(self) -> Any:
        """Computes the tokens of this runner."""
        return engine.token_engine.RecomputeEngine(self.predict_logits)

    @cached_property
    def _loop(self) -> EngineLoop:
        """Computes the requests of this runner."""
        found: EngineLoop = self.__dict__.setdefault("_loop", EngineLoop(self._engine))
        return found

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Makes grammars ready for this model. `grammars.compile(grammar)` ahead of a request saves it the time."""
        return grammar.GrammarCompiler(lambda: self.tokenizer, self.vocab_size)

    def score(self, ids: PromptLike, *, adapter: str | None = None) -> Logits:
        """Log-probabilities of a text's tokens, each given the tokens before it. Stateless.

        Args:
            ids: the text.
            adapter: as for `generate`.

        Returns:
            float32[len(ids) - 1], natural logarithms: element i is that of `ids[i + 1]` after `ids[: i + 1]`. Where
            `ids[i + 1]` is a row of an image, it is NaN.

        Raises:
            PromptError: there are fewer than two ids, more than the context holds, or an invalid token id.
            ArgumentError: there is no such adapter.
            NumericalError: a logit is NaN or infinite.
        """
        context = adapted(self, ids, adapter)
        if len(context) < 2:
            raise PromptError("a single token has no predecessor", where="score", hint="give at least two tokens")
        found = self._scores(context)
        for start, end in () if context.images is None else context.images.spans:
            found[max(0, start - 1) : end - 1] = np.nan
        return found

    def _scores(self, context: Context) -> Logits:
        return log_probs(self.predict_logits(context.ids[:-1], all_positions=True), context.ids[1:])

    @property
    def supports_multimodal(self) -> bool:
        """Whether prompts may have images: whether the model was opened with a vision tower."""
        return self._images is not None and self._images.is_supported

    def generate_multimodal(
        self,
        prompt: str,
        images: Any,
        *arguments: Any,
        **options: Any,
    ) -> Generation:
        """`generate` for text with images: see `Model`, which runners of models are.

        Raises:
            MultimodalError: always; this runner takes text only.
        """
        raise MultimodalError(
            f"the {self.family} runner takes text only", where="generate_multimodal",
            hint="leave the images out; `supports_multimodal` says whether a runner takes images",
        )  # fmt: skip

    def close(self) -> None:
        """Ends all requests and releases what the runner holds. Can be called more than once."""
        self._loop.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.family}, {self.vocab_size} tokens, context {self.max_seq}>"

    def checked_prompt(self, prompt: PromptLike, what: str = "prompt") -> Context:
        """A prompt that fits the context: token ids in a list of their own, and images.

        Raises:
            PromptError: it is empty, longer than the context, or holds an invalid token id.
            MultimodalError: it has images, and the model takes none; or not as many as placeholders.
            ImageError: the model takes no image of such a size.
        """
        return checked_prompt(prompt, self._images, self.vocab_size, self.max_seq, what, f"{self.family} model")


# -- what a call asks for, checked, becomes a job and its handle; what is wrong is said before anything is computed ----


def planned(
    runner: LmRunner, request: Request, on_token: OnToken | None = None, *, has_texts: bool = True, drafts: bool = True
) -> Handle:
    """The handle of a request, which is checked and not submitted yet.

    Args:
        on_token: called with every token.
        has_texts: whether steps have texts, and somebody looks at each of them as it comes.
        drafts: whether the runner's default of speculative decoding applies.
    """
    request.check()
    context, room = runner.checked_prompt(request.ids), runner.max_seq
    stops = frozenset(runner.stop_ids if request.stop_at_eog else ())
    keep = request.keep_ids
    if request.stop_ids is not Request.stop_ids:
        stops |= _checked_ids("stop_ids", request.stop_ids, runner.vocab_size)
    if keep is not Request.keep_ids:
        keep = _checked_ids("keep_ids", keep, runner.vocab_size)
    constraint = None if request.grammar is None else runner.grammars.compile(request.grammar).constraint(stops)
    opts: Any = runner.default_sample if request.sample is None else request.sample
    if isinstance(opts, str):
        opts = resolved(opts, runner.recommended_sample, GREEDY)
    adapter, salt = 0, request.cache_salt
    if request.adapter is not None or salt:
        adapter, salt = chosen_adapter(runner, request.adapter, salt)
    speculative = runner._speculative if request.speculative is None and drafts else request.speculative
    embeds = None
    if request.embeds is not None or request.attn_bias is not None:
        embeds = _embeddings(runner, request, context)

    def tokenizer() -> Any:
        return runner.tokenizer

    known = vars(runner).get("tokenizer")  # none is built for the ends of turns
    counted = context.ids if context.images is None else context.images.without_rows(context.ids)
    job = Job(
        replace(
            request,
            ids=context,
            sample=opts,
            min_tokens=request.min_tokens or 0,
            stop_ids=stops,
            keep_ids=keep,
            embeds=embeds,
            cache_salt=salt,
        ),
        Sampler(opts, counted, tokenizer, constraint),
        None if room is None else room - len(context.ids) + 1,
        constraint,
        turn_ids=stops if known is None else frozenset(known.eog_ids),
        adapter=adapter,
        streaming=bool(has_texts or on_token is not None or request.stop),
        drafts_of=None if speculative is None else _drafts_of(runner, speculative, context.ids, salt),
    )
    return Handle(runner._loop, job, tokenizer, on_token, has_texts=has_texts)


def submitted(runner: LmRunner, *handles: Handle, keeps: bool = False) -> None:
    """Submits planned requests, which begin together.

    Args:
        keeps: whether the sequence of one becomes the session.

    Raises:
        PoolFullError: one can never fit the memory for KV caches.
        BusyError: the runner was closed.
    """
    handles = tuple(each for each in handles if not each.job.ended)
    for each in handles:
        runner._engine.check_fits(len(each.job.prompt))
        if keeps and runner._kept is not None and runner._cached:
            each.job.keeps, each.over, each.job.replaces = True, runner._kept.adopt, runner._kept.take()
    if handles:
        runner._loop.submit(*(each.job for each in handles))


def generated(runner: LmRunner, request: Request, on_token: OnToken | None = None) -> Generation:
    """The tokens of a request, whose sequence becomes the session.

    Args:
        on_token: called with every token; by default what the runner was opened with.
    """
    on_token = runner._on_token if on_token is None else on_token
    late = None if runner._streams else on_token
    handle = planned(runner, request, None if late else on_token, has_texts=request.top_logprobs is not None)
    submitted(runner, handle, keeps=True)
    with on_error(handle.abort):
        found = handle.result()
    if late is not None:
        for token in found:
            late(token)
    return found


def streamed(runner: LmRunner, request: Request, change: Callable[[Step], Step] | None = None) -> Stream:
    """The steps of a request, whose sequence becomes the session. They always have log-probabilities.

    Args:
        change: applied to each step.
    """
    handle = planned(runner, replace(request, top_logprobs=0) if request.top_logprobs is None else request)

    def start() -> Handle:
        submitted(runner, handle, keeps=True)
        return handle

    return Stream(start, change)


def submitted_together(runner: LmRunner, handles: Sequence[Handle]) -> RequestGroup:
    """Submits planned requests that begin together, and that one consumer reads."""
    notifier = Notifier()
    for each in handles:
        each.job.notifier = notifier
    submitted(runner, *handles)
    return RequestGroup(runner._loop, handles)


def submitted_group(runner: LmRunner, requests: Sequence[Request]) -> RequestGroup:
    """Hands over requests that begin together.

    Raises:
        RlxError: as `LmRunner.submit`; then none of them is computed.
    """
    group = submitted_together(runner, [planned(runner, request) for request in requests])
    runner._loop.wake()
    return group


def _drafts_of(runner: LmRunner, speculative: str, context: list[int], salt: str) -> DraftsOf:
    """The maker of a generation's drafts."""
    checked_speculation(speculative)
    if not runner._cached:
        hint = "leave `speculative` out"
        raise ArgumentError("speculative decoding needs a cache", where="generate", hint=hint)
    engine, counters = runner._engine, runner._speculated
    if speculative != "prompt-lookup":
        drafting = engine.drafting(speculative)
        return lambda sequence: drafting.drafts(sequence, context, salt, counters)
    lookup = speculation.drafts.PromptLookup(context)
    return lambda sequence: speculation.drafts.Drafts(lookup, counters)


def chosen_adapter(runner: LmRunner, name: str | None, salt: str = "") -> tuple[int, str]:
    """The number of an adapter, 0 for none, and the salt of a prompt, which tells adapters apart.

    Raises:
        ArgumentError: there is no adapter of this name.
    """
    if name is None:
        return 0, f"\0{salt}" if salt.startswith("\0") else salt
    if not runner._cached:
        raise ArgumentError("an adapter needs a cache", where="adapter", hint="leave `adapter` out")
    adapters = runner._engine.adapters
    return adapter_number(adapters, name), adapters.salt(name, salt)


def adapted(runner: LmRunner, prompt: PromptLike, adapter: str | None, what: str = "prompt") -> Context:
    """A checked prompt whose rows get an adapter."""
    number, salt = chosen_adapter(runner, adapter)
    return replace(runner.checked_prompt(prompt, what), adapter=number, salt=salt)


def adapter_number(adapters: Adapters | None, name: str | None) -> int:
    """The number of one of a model's adapters, 0 for none; `ArgumentError` if there is none of this name."""
    if name is None:
        return 0
    if adapters is None:
        hint = "open the model with adapters={...}"
        raise ArgumentError(f"there is no adapter {name!r}", where="adapter", hint=hint)
    return adapters.number(name)


def _embeddings(runner: LmRunner, request: Request, context: Context) -> Any:
    """The checked prompt embeddings of a request."""
    if request.embeds is None:
        raise ArgumentError("this runner takes no prompt embeddings", where="embeds", hint="give ids alone")
    if context.images is not None:
        hint = "give the rows of images among `embeds`, or leave `embeds` out"
        raise ArgumentError("a prompt with images takes no embeds", where="embeds", hint=hint)
    return runner._engine.prompt_embeddings(len(context), request.embeds, request.attn_bias)


def checked_speculation(name: str | None) -> str | None:
    """`name`; `ArgumentError` if there is no such speculative decoding."""
    is_text = isinstance(name, str)
    if name is None or (is_text and (name in SPECULATIONS or (name.startswith(DRAFT_MODEL) and name != DRAFT_MODEL))):
        return name
    hint = f"give {', '.join(map(repr, SPECULATIONS))}, '{DRAFT_MODEL}PATH', or None"
    raise ArgumentError(f"speculative is {name!r}", where="generate", hint=hint)


def _checked_ids(name: str, ids: Any, vocab_size: int) -> frozenset[int]:
    """`ids` as a set; `ArgumentError` if one is outside the vocabulary."""
    found = several(name, ids, "token ids")
    for token in found:
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
            what = f"{token!r} is no id of the vocabulary of {vocab_size} tokens"
            raise ArgumentError(what, where=name)
    return frozenset(map(int, found))


def contexts(runner: LmRunner, prompts: Any) -> list[Context]:
    """Several checked prompts."""
    if not can_iterate(prompts) or not isinstance(prompts, Sequence | np.ndarray):
        raise PromptError(f"expected several prompts, found a {type(prompts).__name__}", where="generate_batch")
    if not len(prompts):
        raise PromptError("there are no prompts", where="generate_batch", hint="give at least one")
    return [runner.checked_prompt(_in_ids(runner, each), f"prompt {i}") for i, each in enumerate(prompts)]


def _in_ids(runner: LmRunner, prompt: Any) -> PromptLike:
    """A text or the messages of a conversation as ids; what is neither stays."""
    if isinstance(prompt, str):
        return runner.tokenizer.encode(prompt)
    chat_ids: Callable[..., PromptLike] | None = getattr(runner, "chat_ids", None)  # of runners with a chat template
    is_chat = isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(each, Mapping) for each in prompt)
    found: PromptLike = chat_ids(prompt) if chat_ids and is_chat else prompt
    return found


def with_own_seed(opts: SampleOpts, number: int) -> SampleOpts:
    """Options for one of several generations: a different, reproducible seed for each."""
    seed = getattr(opts, "seed", None)  # the sampler reports what is not a SampleOpts
    return opts if seed is None else replace(opts, seed=(seed + number) % 2**64)
