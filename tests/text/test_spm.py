"""SentencePiece merging against the plainest possible implementation of its rule."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rlx.text.spm import SentencePieceMerger, best_pieces
from rlx.text.tokenizer import SPACE, SpecialSplitter

ALPHABET = "ab" + SPACE


def by_the_rule(text: str, cost: dict[str, float]) -> list[str]:
    """Join the leftmost of the cheapest pairs until no pair is a piece."""
    symbols = list(text)
    while True:
        pairs = [(cost[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in cost]
        if not pairs:
            return symbols
        _, at = min(pairs)
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]


# Few letters and few different costs: many overlaps, ties and pieces that are reached in two ways.
costs = st.dictionaries(st.text(ALPHABET, min_size=2, max_size=5), st.integers(0, 3).map(float), max_size=25)


@given(st.text(ALPHABET, max_size=30), costs)
def test_best_pieces_follows_the_rule(text: str, cost: dict[str, float]) -> None:
    assert best_pieces(text, cost) == by_the_rule(text, cost)


@given(st.text("ab ", max_size=30), costs)
def test_cutting_at_words_changes_nothing(text: str, cost: dict[str, float]) -> None:
    pieces = {piece: i for i, piece in enumerate([*ALPHABET, *cost])}
    scores = [0.0] * len(ALPHABET) + [-value for value in cost.values()]
    merger = SentencePieceMerger(pieces, scores, None, None)
    expected = by_the_rule(text.replace(" ", SPACE), {**dict.fromkeys(ALPHABET, 0.0), **cost})
    assert merger.encode(text) == [pieces[piece] for piece in expected]


@given(st.text("ab", max_size=20), st.sets(st.text("ab", min_size=1, max_size=4), max_size=5))
def test_splitter_takes_the_leftmost_longest(text: str, specials: set[str]) -> None:
    ids = {special: number for number, special in enumerate(sorted(specials))}
    parts = list(SpecialSplitter(ids).split(text))
    names = {number: special for special, number in ids.items()}
    assert "".join(part if isinstance(part, str) else names[part] for part in parts) == text
    at = 0
    for part in parts:
        if isinstance(part, int):
            here = [special for special in specials if text.startswith(special, at)]
            assert names[part] == max(here, key=len)
            at += len(names[part])
        else:
            assert part
            assert not any(special in text[at : at + len(part)] for special in specials)
            at += len(part)
