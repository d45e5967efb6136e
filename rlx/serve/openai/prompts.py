"""Prompts of `/v1/completions` and `/v1/embeddings`: texts, token ids, and lists of both.

Server stage, under OpenAI's paths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlx.prompt import Prompt
from rlx.runners.media import MEDIA
from rlx.serve.body import shown
from rlx.serve.errors import context_overflow, invalid
from rlx.serve.media import base64_source, load_images
from rlx.serve.model import fill_in_ids
from rlx.serve.openai.bodies import MediaPrompt

if TYPE_CHECKING:
    from rlx.serve.model import ServedModel

MAX_PROMPTS = 2048


def prompts(found: Any, field: str) -> list[Any]:
    """The single prompts of a field: a text or a list of ids is one, a list of texts or of lists is several.

    A list that has ids beside texts is one prompt, too.

    Raises:
        ApiError: there is none, or too many.
    """
    if not isinstance(found, list):
        return [found]
    if not found:
        raise invalid(field, "it is empty", "give at least one prompt")
    if any(isinstance(part, int) for part in found):
        if any(isinstance(part, list) for part in found):
            raise invalid(field, "it has ids beside lists", "put the ids into a list, too")
        return [found]
    if len(found) > MAX_PROMPTS:
        raise invalid(field, f"expected at most {MAX_PROMPTS} prompts, found {len(found)}")
    return list(found)


def prompt_ids(model: ServedModel, prompt: Any, field: str, adds: bool) -> list[int]:
    """The ids of one prompt: of a text, or of a list of ids and texts. Control tokens in texts count as such.

    Args:
        adds: whether a text at the beginning gets the model's BOS.

    Raises:
        ApiError: it is empty or far too long, or an id is outside the vocabulary.
        TokenizerError: a text cannot be encoded.
    """
    ids, vocab_size, most = list[int](), model.runner.vocab_size, model.runner.max_seq
    for i, part in enumerate([prompt] if isinstance(prompt, str) else prompt):
        if isinstance(part, str):
            model.check_length([part], field)
            ids += model.tokenizer.encode(part, add_special_tokens=adds and not i, parse_special=True)
            if len(ids) > 2 * most:
                raise context_overflow(len(ids), most, field)
        elif 0 <= part < vocab_size:
            ids.append(part)
        else:
            raise invalid(f"{field}[{i}]", f"there is no token {shown(part)} in a vocabulary of {vocab_size}")
    if not ids:
        raise invalid(field, "the prompt is empty", "give at least one token")
    return ids


def media_prompt(model: ServedModel, prompt: MediaPrompt, field: str, adds: bool) -> list[int] | Prompt:
    """A text with images in it, in base64; `<__media__>` stands for each.

    Raises:
        ApiError: there is not one image for each place, or the text is far too long.
        MultimodalError, ImageError: the model takes no images, or one cannot be used.
    """
    data, text = prompt.multimodal_data or [], prompt.prompt_string
    if not data:
        return prompt_ids(model, text, f"{field}.prompt_string", adds)
    if (places := text.count(MEDIA)) != len(data):
        what = f"there are {len(data)}, and {places} places for them in prompt_string"
        raise invalid(f"{field}.multimodal_data", what, f"write {MEDIA} where an image belongs")
    model.check_length([text], field)
    parts = [base64_source(each, f"{field}.multimodal_data[{i}]").part for i, each in enumerate(data)]
    (read,) = load_images([{"content": parts}], model.media, model.runner.supports_multimodal)
    return model.runner.with_images(text, [part["image"] for part in read["content"]])


def filled_in(model: ServedModel, prompt: str, suffix: str) -> list[int]:
    """The ids that ask for what stands between two texts.

    Raises:
        ApiError: the model has no tokens for it, or a text is far too long.
    """
    tokenizer = model.tokenizer
    model.check_length([prompt], "prompt")
    model.check_length([suffix], "suffix")
    if (tokens := fill_in_ids(tokenizer)) is None:
        what = "the model has no tokens for filling in"
        raise invalid("suffix", what, "leave it out, or serve a model for code", code="unsupported_parameter")
    before, after, middle = tokens
    parts = [tokenizer.encode(text, add_special_tokens=False) for text in (prompt, suffix)]
    return [*tokenizer.prefix, before, *parts[0], after, *parts[1], middle]
