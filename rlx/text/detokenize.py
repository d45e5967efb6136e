"""Streaming detokenization: ids in, whole characters out.

Text stage, used by the runners' streaming and by the command line.
"""

from __future__ import annotations

import codecs
from collections.abc import Set

from rlx.text.tokenizer import Tokenizer


class StreamDetokenizer:
    """Turns ids into text one at a time and never emits a part of a character.

    The pieces from `push` and `finish`, joined, equal `tokenizer.decode(ids, skip_special_tokens)`.

    Args:
        skip_special_tokens: leave control tokens out.
        continues: the ids go on after a text (an answer after its prompt), so that a leading space is a real one.
        keep: control tokens that are not left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = False,
        *,
        continues: bool = False,
        keep: Set[int] = frozenset(),
    ) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skip = tokenizer.special_ids - keep if skip_special_tokens else frozenset()
        self._drop_space = tokenizer.drop_space and not continues
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, perhaps none; `TokenizerError` for an id outside the vocabulary."""
        if token in self._skip:
            return ""
        piece = self._bytes_of(token)
        if self._drop_space and piece:
            piece, self._drop_space = piece.removeprefix(b" "), False
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """What is left: U+FFFD if the last character never became whole."""
        return self._decoder.decode(b"", final=True)
