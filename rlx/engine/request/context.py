"""A checked prompt: what every call of a runner computes from.

Runners stage, over `checks.py`. `LmRunner.checked_prompt` makes one of token ids or of a `Prompt`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlx.engine.request.checks import check_ids
from rlx.errors import MultimodalError
from rlx.prompt import Prompt, TokenIds


@dataclass(frozen=True, eq=False)
class Context:
    """The tokens before an answer.

    Attributes:
        ids: one for each position, 0 for rows of images.
        images: where the images stand, and what is to be computed of them; None if there are none.
    """

    ids: list[int]
    images: Any = None

    @property
    def text_ids(self) -> list[int]:
        """The ids without the rows of images: what penalties count."""
        return self.ids if self.images is None else self.images.without_rows(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


PromptLike = TokenIds | Prompt | Context


def text_context(prompt: PromptLike, vocab_size: int, what: str, model: str) -> Context:
    """The context of a prompt for a model that takes no images.

    Args:
        model: what the model is called in messages.

    Raises:
        PromptError: there is no id, or an invalid one.
        MultimodalError: there are images, or there is audio.
    """
    if isinstance(prompt, Context):
        return prompt
    if isinstance(prompt, Prompt):
        if prompt.images:
            raise no_tower(model, what, len(prompt.images))
        if prompt.audio:
            raise MultimodalError(f"there is audio, and the {model} takes none", where=what, hint="leave it out")
        prompt = prompt.ids
    return Context(check_ids(prompt, vocab_size, what))


def no_tower(model: str, where: str, images: int = 1) -> MultimodalError:
    """The error of images for a model that takes none."""
    count = "there is an image" if images == 1 else f"there are {images} images"
    return MultimodalError(
        f"{count}, and the {model} has no vision tower", where=where,
        hint="open the model with its vision projector (`mmproj`), or its folder of safetensors, which holds the tower",
    )  # fmt: skip
