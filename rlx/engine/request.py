"""A request: what is asked, and the checks of its prompt and its options.

Runners stage. `LmRunner.checked_prompt` makes a `Context` of token ids or of a `Prompt`. `LmRunner.submit` takes a
`Request`; `generate` and `stream` make one of their arguments. Its state while it is computed is in `loop/job.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from inspect import Parameter
from math import isfinite
from numbers import Integral
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

import numpy as np
import numpy.typing as npt

from rlx import arguments, grammar
from rlx.errors import ArgumentError, MultimodalError, NumericalError, PromptError
from rlx.prompt import Prompt, TokenIds, check_is_sequence
from rlx.sampling.choice import BROKEN
from rlx.sampling.options import Sample

if TYPE_CHECKING:
    from rlx.grammar import Grammar

Logits = npt.NDArray[np.float32]


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """The model generated one of the stop ids."""
    STOP_STRING = "stop_string"
    """The text contains one of the stop strings."""
    GRAMMAR = "grammar"
    """The text is complete by its grammar, and nothing may follow."""
    CALLBACK = "callback"
    """`on_token` returned False."""
    LENGTH = "length"
    """The requested number of tokens is reached."""
    CONTEXT = "context"
    """The context is full."""
    ABORTED = "aborted"
    """It was aborted, or its stream was closed."""


@dataclass(frozen=True, eq=False)
class Context:
    """The tokens before an answer.

    Attributes:
        ids: one for each position, 0 for rows of images.
        images: where the images stand, and what is to be computed of them; None if there are none.
        adapter: the number of the adapter that its rows get, 0 for none.
        salt: only prompts with the same one share what the cache knows of them.
    """

    ids: list[int]
    images: Any = None
    adapter: int = 0
    salt: str = ""

    def __len__(self) -> int:
        return len(self.ids)


PromptLike = TokenIds | Prompt | Context


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_ids(ids: TokenIds, vocab_size: int, what: str) -> list[int]:
    """`ids` as a list of at least one Python int inside the vocabulary; `PromptError` otherwise."""
    check_is_sequence(ids, what)
    if len(ids) == 0:
        raise PromptError("it is empty", where=what, hint="give at least one token, such as tokenizer.bos_id")
    if isinstance(ids, Sequence) and {*map(type, ids)} == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return list(ids)  # quick, also for a single id
    try:
        array = np.asarray(ids)
    except ValueError:  # rows of different length
        array = np.empty(0)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        _refuse_ids(ids, what)
    outside = np.flatnonzero((array < 0) | (array >= vocab_size))
    if len(outside):
        found = f"id {array[outside[0]]} at position {outside[0]} is outside the vocabulary of {vocab_size}"
        raise PromptError(found, where=what, hint=f"ids run from 0 to {vocab_size - 1}")
    return [int(token) for token in array.tolist()]


def _refuse_ids(ids: Any, what: str) -> NoReturn:
    wrong = [(at, token) for at, token in enumerate(ids) if not _is_whole(token)]
    at, token = wrong[0] if wrong else max(enumerate(ids), key=lambda pair: abs(pair[1]))  # no wrong type: a huge int
    raise PromptError(f"expected a token id at position {at}, found {token!r}", where=what)


def too_long(context: Context, max_seq: int, what: str) -> PromptError:
    """The error of a prompt that has more tokens than the context holds."""
    count, rows, shorter = len(context.ids), "", "shorten it"
    if context.images is not None:
        rows, shorter = f", {context.images.rows} of them of images", "give fewer or smaller images"
    hint = f"{shorter}, or open the model with a max_seq of {count} plus the tokens of the answer"
    return PromptError(f"it has {count} tokens{rows}, and the context holds {max_seq}", where=what, hint=hint)


def checked_prompt(
    prompt: PromptLike, images: Any, vocab_size: int, max_seq: int | None, what: str, model: str
) -> Context:
    """The checked context of a prompt: each image takes as many positions as it has rows.

    Args:
        images: the `ImageInput` that puts images into prompts; None if the runner takes none.
        max_seq: how many positions there may be; None for any number.
        what: the argument, for messages.
        model: what the model is called in messages.

    Raises:
        PromptError: there is no id, an invalid one, or too many.
        MultimodalError: the model takes no images, or placeholders and images do not match.
        ImageError: the model takes no image of such a size.
    """
    if isinstance(prompt, Context):  # it is checked
        return prompt
    found: Context | None = None
    if isinstance(prompt, Prompt):
        found = None if images is None else images.placed(prompt, vocab_size, what)
        if found is None and prompt.images:
            raise no_tower(model, what, len(prompt.images))
        prompt = prompt.ids
    context = Context(check_ids(prompt, vocab_size, what)) if found is None else found
    if max_seq is not None and len(context.ids) > max_seq:
        raise too_long(context, max_seq, what)
    return context


def no_tower(model: str, where: str, images: int = 1) -> MultimodalError:
    """The error of images for a model that takes none."""
    count = "there is an image" if images == 1 else f"there are {images} images"
    return MultimodalError(
        f"{count}, and the {model} has no vision tower", where=where,
        hint="open the model with its vision projector (`mmproj`), or its folder of safetensors, which holds the tower",
    )  # fmt: skip


def check_finite(logits: Logits, where: str) -> Logits:
    """`logits`, [..., vocab]; `NumericalError` if one of them is NaN or infinite."""
    with np.errstate(all="ignore"):
        if isfinite(np.add.reduce(logits, axis=None)):  # one pass, no mask: the sum of finite logits is finite
            return logits
    for row in logits.reshape(-1, logits.shape[-1]):
        if not np.isfinite(row).all():
            at = int(np.flatnonzero(~np.isfinite(row))[0])
            raise NumericalError(f"logit {at} is {row[at]}", where=where, hint=BROKEN)
    return logits


@dataclass(frozen=True)
class Request:
    """A generation that `submit` takes.

    handle = runner.submit(rlx.Request(ids, 100, priority=1, timeout=30))

    Attributes:
        ids: the prompt: at least one token id, or a `Prompt` with images.
        n_new: maximum number of tokens.
        sample: sampling options: a `SampleOpts`, or "recommended" for those in the model's files; the runner's default
            if None.
        stop_at_eog: False continues after the model's stop ids.
        stop: strings that end it.
        min_tokens: until there are this many tokens, stop ids are not chosen and stop strings are ignored.
        speculative: `prompt-lookup`, `mtp` or `model:PATH`; None takes the runner's default.
        top_logprobs: also report log-probabilities: of each token, and of this many of the likeliest tokens.
        priority: requests with a higher priority are served first.
        timeout: seconds after which it fails with a `DeadlineError`; None for never.
        embeds: numbers [len(ids), hidden] in place of the embeddings of `ids`.
        attn_bias: with `embeds`: numbers [len(ids), len(ids)] or [heads, len(ids), len(ids)] in place of the causal
            mask.
        grammar: what the text must look like. Stop ids are chosen only where it is complete.
        stop_ids: further token ids that end it, also without `stop_at_eog`.
        keep_ids: control tokens that are not left out of texts.
        adapter: the name of the LoRA adapter that answers, one of `adapters` of the opened model; None for the model
            as it is.
        cache_salt: requests share what the cache knows of their prompts only with requests of the same salt. Requests
            of users who must not learn of each other, not even by the time of an answer, need different ones.
    """

    ids: PromptLike
    n_new: int
    sample: Sample = None
    stop_at_eog: bool = True
    stop: str | Sequence[str] = ()
    min_tokens: int = 0
    speculative: str | None = None
    top_logprobs: int | None = None
    priority: int = 0
    timeout: float | None = None
    embeds: Any = None
    attn_bias: Any = None
    grammar: Grammar | None = None
    stop_ids: Collection[int] = ()
    keep_ids: Collection[int] = ()
    adapter: str | None = None
    cache_salt: str = ""

    def check(self) -> None:
        """`ArgumentError` if a number is out of its range, or of another type."""
        if checked_count("n_new", self.n_new) is None:
            raise ArgumentError("n_new is None, expected a whole number of at least 0", where="generate")
        if (least := checked_count("min_tokens", self.min_tokens) or 0) > self.n_new:
            raise ArgumentError(f"min_tokens is {least}, more than the {self.n_new} of max_tokens", where="generate")
        checked_count("top_logprobs", self.top_logprobs)
        stop_strings(self.stop)
        arguments.whole("priority", self.priority, -(1 << 62), 1 << 62)
        arguments.text("cache_salt", self.cache_salt)
        arguments.flag("stop_at_eog", self.stop_at_eog)
        timeout: Any = self.timeout
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (is_number and timeout > 0):
            raise ArgumentError(f"timeout is {timeout!r}", where="submit", hint="give seconds above 0, or None")


def stop_strings(stop: Any) -> tuple[str, ...]:
    """One string or several as a tuple; `ArgumentError` for other types and for an empty string."""
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ArgumentError(f"stop is {stop!r}, expected a text or several", where="generate")
    if "" in texts:
        raise ArgumentError("stop is an empty text", where="generate", hint="it would end every answer at once")
    return tuple(texts)


def checked_count(name: str, value: Any) -> int | None:
    """A whole number of at least 0, or None; `ArgumentError` for anything else."""
    if value is None:
        return None
    if not _is_whole(value) or value < 0:
        raise ArgumentError(f"{name} is {value!r}, expected a whole number of at least 0", where="generate")
    return int(value)


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of every call that generates; `LmRunner.generate` says what they mean."""

    stop: str | Sequence[str]
    min_tokens: int
    speculative: str | None
    top_logprobs: int | None
    grammar: Grammar | None
    json_schema: Any
    adapter: str | None


#: The same as parameters, with their defaults, for signatures.
PARAMETERS = [
    Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(Request, name, None), annotation=kind.__forward_arg__)
    for name, kind in RequestOptions.__annotations__.items()
]


def request_of(
    ids: PromptLike, n_new: int, sample: Sample, stop_at_eog: bool, options: RequestOptions, **more: Any
) -> Request:
    """The request of a call.

    Args:
        more: further fields, which override the options.

    Raises:
        GrammarError: the grammar or the schema cannot be used.
    """
    fields: dict[str, Any] = {**options, **more}
    fields["grammar"] = named_grammar(fields.get("grammar"), fields.pop("json_schema", None))
    return Request(ids, n_new, sample, stop_at_eog, **fields)


def named_grammar(form: Any, schema: Any) -> Grammar | None:
    """As `rlx.grammar.chosen_grammar`, which most requests do not need."""
    return None if form is None and schema is None else grammar.chosen_grammar(form, schema)
