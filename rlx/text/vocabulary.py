"""The pieces of a tokenizer: text, type and bytes of every id, and which ids end a generation.

Text stage: `from_gguf.py` and `from_hf.py` fill a `Vocabulary`; `tokenizer.py` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property

import numpy as np


class SpecialSplitter:
    """Finds the given token texts in a text: the leftmost first, the longest where several begin at one place."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {text: token for text, token in ids.items() if text}
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        self._first = re.compile("[" + re.escape("".join(lengths)) + "]") if lengths else None

    def split(self, text: str) -> list[str | int]:
        """The text in order: ids of the tokens found, and the stretches between them that are not empty."""
        found = list[str | int]()
        begin = at = 0
        while self._first is not None and (match := self._first.search(text, at)) is not None:
            at = match.start()
            size = next((size for size in self._lengths[text[at]] if text[at : at + size] in self._ids), 0)
            if not size:
                at += 1
                continue
            if begin < at:
                found.append(text[begin:at])
            found.append(self._ids[text[at : at + size]])
            begin = at = at + size
        if begin < len(text):
            found.append(text[begin:])
        return found


SPACE = "\u2581"  # SentencePiece writes a space as this character


class TokenType(IntEnum):
    """Token types as `tokenizer.ggml.token_type` numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Spelling(Enum):
    """How the text of a normal token stands for bytes."""

    BYTE_LEVEL = "byte-level"  # one printable character a byte (GPT-2)
    SENTENCEPIECE = "sentencepiece"  # UTF-8, a space is U+2581
    WORDPIECE = "wordpiece"  # UTF-8, a space comes before each token without ##


def _byte_alphabet() -> tuple[str, ...]:
    """The character of each byte in byte-level BPE: printable Latin-1 stands for itself, the others follow U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_ALPHABET = _byte_alphabet()
_BYTE_OF = {char: byte for byte, char in enumerate(BYTE_ALPHABET)}


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Text and type (`TokenType`, one byte each) of the ids 0..n-1; an id without a token has the text ""."""

    tokens: Sequence[str]
    types: bytes
    spelling: Spelling

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token text -> id."""
        return {text: token for token, text in enumerate(self.tokens) if text}

    def of_type(self, *types: TokenType) -> list[int]:
        """The ids of the given types, ascending."""
        found = np.isin(np.frombuffer(self.types, np.uint8), [int(kind) for kind in types])
        return [int(token) for token in np.flatnonzero(found)]

    def bytes_of(self, token: int) -> bytes:
        """The bytes that id `token` stands for in a text."""
        text, kind = self.tokens[token], self.types[token]
        if kind == TokenType.BYTE:
            return bytes([int(text[3:5], 16)])
        if kind != TokenType.NORMAL:
            return text.encode("utf-8", "surrogateescape")
        if self.spelling is Spelling.WORDPIECE:
            return (text.removeprefix("##") if text.startswith("##") else " " + text).encode("utf-8", "surrogateescape")
        if self.spelling is Spelling.SENTENCEPIECE:
            return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")
        return _byte_level_bytes(text)


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in text])
    except KeyError:  # a token that was added as plain text
        return text.encode("utf-8", "surrogateescape")


def is_byte_token(text: str) -> bool:
    """Whether a token's text has the form `<0xHH>` of a byte token."""
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">") and _is_hex(text[3:5])


def _is_hex(text: str) -> bool:
    return all(char in "0123456789ABCDEFabcdef" for char in text)


# Tokens that end a generation whatever the metadata says, because models are published without naming them.
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<|fim_pad|>", "<|fim_repo|>", "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
_HTML_END = "</s>"  # an end in Llama 2, a strike-through tag in Gemma: counts only as a control token


def named_ends(vocabulary: Vocabulary) -> set[int]:
    """The ids whose text says that a generation ends there."""
    ids, types = vocabulary.ids, vocabulary.types
    found = {ids[text] for text in _ENDS if text in ids and types[ids[text]] != TokenType.BYTE}
    if _HTML_END in ids and types[ids[_HTML_END]] == TokenType.CONTROL and "<|tool_response>" not in ids:
        found.add(ids[_HTML_END])
    if "<|return|>" in ids and "<|call|>" in ids:  # there `<|end|>` closes a message, not the answer
        found.discard(ids.get("<|end|>", -1))
    return found


def end_ids(vocabulary: Vocabulary, declared: Iterable[int | None], padding: int | None) -> frozenset[int]:
    """`named_ends` and the ids that the model's files declare; a byte token never ends a generation.

    Files that declare an end and use another one for padding have said what that is for: its name does not count then.
    """
    known = {token for token in declared if token is not None and vocabulary.types[token] != TokenType.BYTE}
    return frozenset(known | (named_ends(vocabulary) - ({padding} if known else set())))
