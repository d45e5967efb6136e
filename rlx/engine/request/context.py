"""Prompts and logits, checked: what every call of a runner computes from and returns.

Runners stage. `LmRunner.checked_prompt` makes a `Context` of token ids or of a `Prompt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Integral
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from rlx.errors import MultimodalError, NumericalError, PromptError
from rlx.prompt import Prompt, TokenIds

if TYPE_CHECKING:
    from rlx.engine.images import ImageInput

Logits = npt.NDArray[np.float32]


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

    @property
    def text_ids(self) -> list[int]:
        """The ids without the rows of images: what penalties count."""
        return self.ids if self.images is None else self.images.without_rows(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


PromptLike = TokenIds | Prompt | Context


def checked_context(
    prompt: PromptLike, images: ImageInput | None, vocab_size: int, max_seq: int | None, what: str, model: str
) -> Context:
    """The checked context of a prompt: each image takes as many positions as it has rows.

    Args:
        images: how images come into prompts; None if the runner takes none.
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
    found = None
    if isinstance(prompt, Prompt):
        found = None if images is None else images.placed(prompt, vocab_size, what)
        if found is None and prompt.images:
            raise no_tower(model, what, len(prompt.images))
        prompt = prompt.ids
    context = Context(check_ids(prompt, vocab_size, what)) if found is None else found
    if context.images is None:
        fit_context(context.ids, max_seq, what)
    elif max_seq is not None and len(context) > max_seq:
        rows = context.images.rows
        hint = f"give fewer or smaller images, or open the model with a max_seq of at least {len(context)}"
        error = f"it has {len(context)} tokens, {rows} of them of images, and the context holds {max_seq}"
        raise PromptError(error, where=what, hint=hint)
    return context


def no_tower(model: str, where: str, images: int = 1) -> MultimodalError:
    """The error of images for a model that takes none."""
    count = "there is an image" if images == 1 else f"there are {images} images"
    return MultimodalError(
        f"{count}, and the {model} has no vision tower", where=where,
        hint="open the model with its vision projector (`mmproj`), or its folder of safetensors, which holds the tower",
    )  # fmt: skip


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_ids(ids: TokenIds, vocab_size: int, what: str) -> list[int]:
    """`ids` as a list of at least one Python int inside the vocabulary; `PromptError` otherwise."""
    if isinstance(ids, str | bytes):
        hint = "convert it to ids first: runner.tokenizer.encode(text), or runner.chat_ids(messages)"
        raise PromptError(f"expected token ids, found a {type(ids).__name__}", where=what, hint=hint)
    if not isinstance(ids, Sequence | np.ndarray):
        raise PromptError(f"expected a sequence of token ids, found a {type(ids).__name__}", where=what)
    if isinstance(ids, np.ndarray) and ids.ndim == 0:
        raise PromptError("expected a sequence of token ids, found one number", where=what, hint="give [id]")
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


def fit_context(ids: list[int], max_seq: int | None, what: str) -> list[int]:
    """`ids`; `PromptError` if there are more than `max_seq`."""
    if max_seq is not None and len(ids) > max_seq:
        raise PromptError(
            f"it has {len(ids)} tokens, and the context holds {max_seq}", where=what,
            hint=f"shorten it, or open the model with a max_seq of at least {len(ids)}",
        )  # fmt: skip
    return ids


def check_finite(logits: Logits, where: str) -> Logits:
    """`logits`, [..., vocab]; `NumericalError` if one of them is NaN or infinite."""
    with np.errstate(all="ignore"):
        if isfinite(np.add.reduce(logits, axis=None)):  # one pass, no mask: the sum of finite logits is finite
            return logits
    for row in logits.reshape(-1, logits.shape[-1]):
        if not np.isfinite(row).all():
            at = int(np.flatnonzero(~np.isfinite(row))[0])
            raise NumericalError(
                f"logit {at} is {row[at]}", where=where,
                hint="the weights or the arithmetic are broken: check the file, or try precision='exact'",
            )  # fmt: skip
    return logits
