"""Requests of a runner: what a call asks for becomes a handle, which is then submitted to the engine loop.

Runners stage, under `base.py`. What is wrong with a request is said here, before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.engine import speculation
from rlx.engine.loop.handle import Handle, RequestGroup
from rlx.engine.request.context import Context, PromptLike
from rlx.engine.request.output import OnToken
from rlx.engine.request.request import DraftsOf, Job, Request
from rlx.engine.threads import Notifier
from rlx.errors import ArgumentError, PromptError
from rlx.sampling import SampleOpts, Sampler
from rlx.sampling.options import resolved

if TYPE_CHECKING:
    from rlx.runners.base import LmRunner

SPECULATIONS = ("prompt-lookup", "mtp")
DRAFT_MODEL = "model:"  # before the path of a draft model


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
    if request.stop_ids:
        stops |= _checked_ids(request.stop_ids, runner.vocab_size)
    constraint = None if request.grammar is None else runner.grammars.compile(request.grammar).constraint(stops)
    opts = runner.default_sample
    if request.sample is not None:
        opts = resolved(request.sample, runner.recommended_sample, opts)
    request, adapter = _with_adapter(runner, request)
    speculative = runner._speculative if request.speculative is None and drafts else request.speculative
    embeds = None
    if request.embeds is not None or request.attn_bias is not None:
        embeds = _embeddings(runner, request, context)

    def tokenizer() -> Any:
        return runner.tokenizer

    job = Job(
        replace(request, ids=context, sample=opts, stop_ids=tuple(stops), embeds=embeds),
        Sampler(opts, context.text_ids, tokenizer, constraint),
        None if room is None else room - len(context.ids) + 1,
        constraint,
        turn_ids=_turn_ids(runner, stops),
        adapter=adapter,
        streaming=bool(has_texts or on_token or request.stop),
        drafts_of=None if speculative is None else _drafts_of(runner, speculative, context.ids, request.cache_salt),
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
        if keeps and runner._session is not None and runner._cached:
            each.job.keeps, each.over = True, runner._session.adopt
            each.job.replaces = runner._session.take()
    if handles:
        runner._loop.submit(*(each.job for each in handles))


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
    if speculative == "mtp":
        return lambda sequence: engine.head_drafts(sequence, counters)
    if speculative.startswith(DRAFT_MODEL):
        drafting = engine.draft_model(speculative.removeprefix(DRAFT_MODEL))
        # A draft model sees no images, nor a caller's own rows.
        return lambda sequence: None if sequence.embeddings else drafting.drafts(context, salt, counters)
    lookup = speculation.drafts.PromptLookup(context)
    return lambda sequence: speculation.drafts.Drafts(lookup, counters)


def _with_adapter(runner: LmRunner, request: Request) -> tuple[Request, int]:
    """A request whose salt tells adapters apart, and the number of its adapter, 0 for none."""
    salt, name = request.cache_salt, request.adapter
    if name is None:
        return (replace(request, cache_salt=f"\0{salt}") if salt.startswith("\0") else request), 0
    if not runner._cached:
        raise ArgumentError("an adapter needs a cache", where="generate", hint="leave `adapter` out")
    if (adapters := runner._engine.adapters) is None:
        hint = "open the model with adapters={...}"
        raise ArgumentError(f"there is no adapter {name!r}", where="adapter", hint=hint)
    number = adapters.number(name)
    return replace(request, cache_salt=adapters.salt(name, salt)), number


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
    if name in (None, *SPECULATIONS) or (str(name).startswith(DRAFT_MODEL) and name != DRAFT_MODEL):
        return name
    hint = f"give {', '.join(map(repr, SPECULATIONS))}, '{DRAFT_MODEL}PATH', or None"
    raise ArgumentError(f"speculative is {name!r}", where="generate", hint=hint)


def _checked_ids(ids: Sequence[Any], vocab_size: int) -> frozenset[int]:
    """`ids` as a set; `ArgumentError` if one is outside the vocabulary."""
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            what = f"{token!r} is no id of the vocabulary of {vocab_size} tokens"
            raise ArgumentError(what, where="stop_ids")
    return frozenset(ids)


def _turn_ids(runner: LmRunner, stop_ids: Set[int]) -> Set[int]:
    """The ids that end turns of a conversation, also where a request goes on after them. Builds no tokenizer for it."""
    tokenizer = vars(runner).get("tokenizer")
    return stop_ids if tokenizer is None else frozenset(tokenizer.eog_ids)


# -- batches -----------------------------------------------------------------------------------------------------------


def contexts(runner: LmRunner, prompts: Any) -> list[Context]:
    """Several checked prompts."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence | np.ndarray):
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
