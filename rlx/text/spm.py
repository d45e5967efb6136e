"""SentencePiece-style merging: the pair whose union has the best score is joined first.

Text stage, used by `from_gguf.py` for `tokenizer.ggml.model = "llama"`. A list of merges for the `tokenizers` package
cannot express it: there each pair has a rank of its own, while here all pairs that make the same piece are equal and
the leftmost wins, and deriving the pairs of 262,144 pieces takes longer than loading a model may.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush

from rlx.errors import TokenizerError
from rlx.text.tokenizer import SPACE

_INNER_SPACE = re.compile(f"[^{SPACE}]{SPACE}")
_WORD = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")


class SentencePieceMerger:
    """Encodes text that holds no special tokens.

    Args:
        pieces: text -> id of the pieces that merging may produce (no control, unknown, byte or unused tokens).
        scores: score of every id, higher is merged earlier.
        byte_ids: id of the byte token of each of the 256 bytes, or None where the vocabulary has no byte tokens.
        unknown_id: what a character becomes that is no piece, where there are no byte tokens.
    """

    def __init__(
        self, pieces: Mapping[str, int], scores: Sequence[float], byte_ids: Sequence[int] | None, unknown_id: int | None
    ) -> None:
        self._pieces, self._byte_ids, self._unknown_id = pieces, byte_ids, unknown_id
        self._cost = {text: -scores[token] for text, token in pieces.items()}
        # Pieces that hold a space only at their front never cross the border of two words: words are independent then.
        self._by_word = not any(SPACE in text and _INNER_SPACE.search(text) for text in pieces)
        self._encode_word = lru_cache(maxsize=16_384)(self._merge)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, in which spaces are still spaces; `TokenizerError` for a character without any token."""
        text = text.replace(" ", SPACE)
        words = _WORD.findall(text) if self._by_word else [text] if text else []
        return [token for word in words for token in self._encode_word(word)]

    def _merge(self, word: str) -> tuple[int, ...]:
        if word in self._pieces and len(word) == 1:
            return (self._pieces[word],)
        ids: list[int] = []
        for piece in best_pieces(word, self._cost):
            ids += self._ids_of(piece, after_unknown=bool(ids) and ids[-1] == self._unknown_id)
        return tuple(ids)

    def _ids_of(self, piece: str, *, after_unknown: bool) -> list[int]:
        token = self._pieces.get(piece)
        if token is not None:
            return [token]
        if self._byte_ids is not None:
            return [self._byte_ids[byte] for byte in piece.encode()]
        if self._unknown_id is None:
            raise TokenizerError(
                f"{piece!r} is no piece, and there are neither byte tokens nor an unknown token",
                where="tokenizer.ggml.tokens",
            )
        return [] if after_unknown else [self._unknown_id]  # a run of unknown characters is one token


def best_pieces(text: str, cost: Mapping[str, float]) -> list[str]:
    """Split `text` by joining neighbours, least `cost` of the union first, leftmost among equals.

    A symbol is `text[i:end[i]]`; the heap holds (cost, start, end) of unions, and an entry whose two halves were joined
    to something else in the meantime is recognized by its ends.
    """
    size = len(text)
    end, before = list(range(1, size + 1)), list(range(-1, size))
    alive = bytearray(b"\1" * size)
    heap = [(price, i, i + 2) for i in range(size - 1) if (price := cost.get(text[i : i + 2])) is not None]
    heapify(heap)

    def offer(left: int, right: int) -> None:
        price = cost.get(text[left : end[right]])
        if price is not None:
            heappush(heap, (price, left, end[right]))

    while heap:
        _, left, stop = heappop(heap)
        right = end[left]
        if not alive[left] or right >= stop or end[right] != stop:
            continue
        end[left], alive[right] = stop, 0
        if stop < size:
            before[stop] = left
            offer(left, stop)
        if before[left] >= 0:
            offer(before[left], left)
    return [text[i : end[i]] for i in range(size) if alive[i]]
