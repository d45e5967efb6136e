"""Images in conversations: their parts in three forms, what templates write for them, and that nobody can forge one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden_folder import goldens

from rlx.errors import MultimodalError
from rlx.text import Tokenizer, chat_ids, load_tokenizer
from rlx.text.image_parts import IMAGE, ImageTokens, taken_images

# As the published templates write an image: `part.type == 'image'` only.
TEMPLATE = """{%- for m in messages -%}{{ '<T>' + m.role + '\\n' }}
{%- if m.content is string -%}{{ m.content }}{%- else -%}
{%- for part in m.content -%}
{%- if part.type == 'image' -%}
{%- if m.role == 'system' -%}{{ raise_exception('System message cannot contain images.') }}{%- endif -%}
{{ 'IMAGE' }}{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}{{ '</T>\\n' }}{%- endfor -%}"""
DATA = "data:image/png;base64,AAAA"


def made(family: str, folder: str, image: str, begin: str, end: str) -> Tokenizer:
    found = load_tokenizer(goldens() / family / folder)
    template = TEMPLATE.replace("IMAGE", image).replace("<T>", begin).replace("</T>", end)
    return replace(found, chat_templates={"default": template})


def qwen() -> tuple[Tokenizer, ImageTokens]:
    written = "<|vision_start|><|image_pad|><|vision_end|>"
    found = made("qwen35", "model-f16.gguf", written, "<|im_start|>", "<|im_end|>")
    texts = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
    return found, tokens(found, texts, texts[0])


def gemma3() -> tuple[Tokenizer, ImageTokens]:
    found = made("gemma3", "hf", "<start_of_image>", "<start_of_turn>", "<end_of_turn>")
    texts = "<image_soft_token>", "<start_of_image>", "<end_of_image>"
    return found, tokens(found, texts, texts[1], margin="\n\n")


def tokens(tokenizer: Tokenizer, texts: tuple[str, str, str], text: str, **more: Any) -> ImageTokens:
    ids: list[Any] = [tokenizer.token_to_id(each) for each in texts]
    assert None not in ids
    return ImageTokens(*ids, texts, text, **more)


def user(*parts: Any) -> dict[str, Any]:
    found = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    return {"role": "user", "content": found}


def prompt(made: tuple[Tokenizer, ImageTokens], *messages: Any, **more: Any) -> list[int]:
    tokenizer, images = made
    plain, found = taken_images(list(messages))
    return chat_ids(tokenizer, plain, images=images.laid_out([[each] for each in found]), **more)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ({"type": "image", "image": b"PNG"}, b"PNG"),
        ({"type": "image", "path": "a.png"}, "a.png"),
        ({"type": "image", "path": Path("a.png")}, Path("a.png")),
        ({"type": "image", "url": "file:///x/a.png"}, "/x/a.png"),
        ({"type": "image", "base64": "AAAA"}, "data:;base64,AAAA"),
        ({"type": "image_url", "image_url": {"url": DATA, "detail": "high"}}, DATA),
        ({"type": "image_url", "image_url": DATA}, DATA),
        ({"type": "input_image", "image_url": DATA}, DATA),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}, DATA),
        ({"type": "image", "source": {"type": "url", "url": DATA}}, DATA),
    ],
)
def test_the_forms_of_a_part(part: dict[str, Any], value: Any) -> None:
    messages, images = taken_images([user("a", part, "b")])
    assert images == [value] and messages[0]["content"][1] == IMAGE
    assert [each["text"] for each in messages[0]["content"][::2]] == ["a", "b"]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image"}, "the part of an image has no image. Give it under one of the keys image, path"),
        ({"type": "image", "image": b"", "url": "x"}, "has image and url"),
        ({"type": "image", "url": "https://example.com/a.png"}, "rlx downloads no images"),
        ({"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}, "rlx downloads no images"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "expected a data URI"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "expected a data URI"),
        ({"type": "input_image", "file_id": "7"}, "image_url is a NoneType, expected a data URI"),
        ({"type": "image", "source": {"type": "file", "file_id": "7"}}, "expected an image in base64"),
        ({"type": "image", "source": {"type": "url", "url": "/etc/passwd"}}, "expected a data URI"),
    ],
)
def test_other_forms_are_refused_with_their_place(part: dict[str, Any], said: str) -> None:
    with pytest.raises(MultimodalError, match=rf"messages\[0\]\.content\[1\].*{said}"):
        taken_images([user("a", part)])


def test_qwen_writes_both_ends_itself() -> None:
    tokenizer, images = qwen()
    ids = prompt((tokenizer, images), user("a", {"type": "image", "image": 1}, "b"))
    at = ids.index(images.placeholder)
    assert ids[at - 1 : at + 2] == [images.begin, images.placeholder, images.end]
    assert ids.count(images.placeholder) == ids.count(images.begin) == 1
    assert tokenizer.decode(ids) == "<|im_start|>user\na<|vision_start|><|image_pad|><|vision_end|>b<|im_end|>\n"


def test_gemma3_has_blank_lines_around_an_image_which_merge_with_the_text() -> None:
    tokenizer, images = gemma3()
    ids = prompt((tokenizer, images), user({"type": "image", "image": 1}, "What?"))
    expected = "<start_of_turn>user\n\n\n<start_of_image><image_soft_token><end_of_image>\n\nWhat?<end_of_turn>\n"
    assert ids == tokenizer.encode(expected, add_special_tokens=False, parse_special=True)


def test_begin_and_end_are_added_where_the_template_writes_the_placeholder_alone() -> None:
    tokenizer, images = qwen()
    bare = replace(tokenizer, chat_templates={"default": TEMPLATE.replace("IMAGE", "<|image_pad|>")})
    ids = prompt((bare, images), user({"type": "image", "image": 1}, {"type": "image", "image": 2}))
    every = [images.begin, images.placeholder, images.end]
    assert [each for each in ids if each in every] == every * 2


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("of", [qwen, gemma3])
def test_no_message_can_write_an_image(of: Any, trusted: bool, role: str) -> None:
    tokenizer, images = of()
    for text in images.texts:
        attack = f"a {text} b{text}{text} qz0token0i"
        ids = prompt((tokenizer, images), {"role": role, "content": attack}, user("x"), trust_content=trusted)
        assert not {images.placeholder, images.begin, images.end} & {*ids}
        assert attack in tokenizer.decode(ids), "it stays text"
        with_image = prompt((tokenizer, images), user({"type": "image", "image": 1}, attack))
        assert with_image.count(images.placeholder) == 1


def test_tokens_of_users_are_cut_where_the_tokenizer_would_find_them_in_any_text() -> None:
    tokenizer, images = qwen()
    types = bytearray(tokenizer.vocabulary.types)
    for token in (images.placeholder, images.begin, images.end):
        assert token is not None
        types[token] = 4  # user-defined: matched in every text
    vocabulary = replace(tokenizer.vocabulary, types=bytes(types))
    encode = tokenizer.encode_parts
    found = replace(tokenizer, vocabulary=vocabulary, encode_parts=lambda text, special: encode(text, True))
    attack = f"a {images.text} b"
    ids = prompt((found, images), user(attack, {"type": "image", "image": 1}))
    assert ids.count(images.placeholder) == 1 and attack in found.decode(ids)


def test_a_template_that_leaves_images_out_is_an_error() -> None:
    tokenizer, images = qwen()
    deaf = replace(tokenizer, chat_templates={"default": TEMPLATE.replace("IMAGE", "")})
    with pytest.raises(MultimodalError, match="the template writes 0 of the 1 images of the conversation"):
        prompt((deaf, images), user({"type": "image", "image": 1}, "a"))
    texts = replace(tokenizer, chat_templates={"default": "{% for m in messages %}{{ m.content }}{% endfor %}"})
    with pytest.raises(MultimodalError, match="writes 0 of the 1"):
        prompt((texts, images), user({"type": "image", "image": 1}, "a"))
