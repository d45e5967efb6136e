"""Streaming: whatever the ids, the pieces joined are the decoded text, and no piece ends inside a character."""

from __future__ import annotations

from functools import cache

import pytest
from golden_folder import goldens
from hypothesis import example, given
from hypothesis import strategies as st
from vocabularies import sentencepiece

from rlx.text import StreamDetokenizer, Tokenizer, load_tokenizer, tokenizer_from_gguf

KINDS = ["llama", "qwen2", "gemma3", "spm"]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "spm":  # puts a space before the text
        return tokenizer_from_gguf(sentencepiece(user=("<x>", " ", "\u00e9")))
    return load_tokenizer(goldens() / kind / "hf")


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = False, continues: bool = False) -> list[str]:
    detokenizer = StreamDetokenizer(tokenizer, skip, continues=continues)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


# Single bytes of the vocabularies above and what begins or ends a character, more often than chance would.
some_ids = st.lists(st.one_of(st.integers(0, 262), st.integers(0xC0, 0x103)), max_size=30)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [False, True])
@given(some_ids)
@example([])
@example([1, 261, 261])
@example([261, 1, 261])
def test_joined_pieces_are_the_decoded_text(kind: str, skip: bool, ids: list[int]) -> None:
    tokenizer = tokenizer_of(kind)
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@given(st.text(max_size=20))
def test_no_half_characters(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    text = text.replace("\ufffd", "")
    pieces = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


def test_the_space_that_encoding_added_goes_once() -> None:
    tokenizer = tokenizer_of("spm")
    word = tokenizer.vocabulary.ids["\u2581a"]
    assert stream(tokenizer, [word, word]) == ["a", " a", ""]
    assert stream(tokenizer, [word, word], continues=True) == [" a", " a", ""]
    assert stream(tokenizer, [1, word], skip=True) == ["", "a", ""]
    assert stream(tokenizer, [1, word]) == ["<s>", " a", ""]
