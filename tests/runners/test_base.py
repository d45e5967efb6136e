"""The reference runner: validation, stopping, and that it computes the whole context for every token."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from rlx.engine.request import Logits
from rlx.errors import ArgumentError, PromptError
from rlx.prompt import TokenIds
from rlx.runners.base import LmRunner


class Counter(LmRunner):
    """After token t comes t + 1, as far as the vocabulary goes; the end of it is the end of a text."""

    family, vocab_size = "counter", 10

    def __init__(self, max_seq: int | None = None, stop_ids: frozenset[int] = frozenset()) -> None:
        self.limit, self.stops, self.contexts = max_seq, stop_ids, list[list[int]]()

    @property
    def max_seq(self) -> int | None:
        return self.limit

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.stops

    def predict_logits(self, ids: TokenIds, all_positions: bool = False) -> Logits:
        context = self.checked_prompt(ids).ids
        self.contexts.append(context)
        rows = np.eye(10, dtype=np.float32)[[(i + 1) % 10 for i in context]]
        rows[:, 5] += 0.25  # the second choice
        return rows if all_positions else rows[-1]


def test_every_token_sees_the_whole_context() -> None:
    runner = Counter()
    assert runner.generate([3, 4], 3) == [5, 6, 7]
    assert runner.contexts == [[3, 4], [3, 4, 5], [3, 4, 5, 6]]


@pytest.mark.parametrize("false", [False, np.False_])
def test_a_callback_that_returns_false_stops_behind_its_token(false: bool) -> None:
    seen: list[int] = []

    def on_token(token: int) -> bool:
        seen.append(token)
        return false if len(seen) == 3 else True

    assert Counter().generate([0], 8, on_token) == seen == [1, 2, 3]


def test_a_stop_token_ends_the_text_and_is_part_of_it() -> None:
    runner = Counter(stop_ids=frozenset({4, 9}))
    seen: list[int] = []
    assert runner.generate([1], 20, seen.append) == seen == [2, 3, 4]
    assert runner.generate([1], 9, stop_at_eog=False) == [2, 3, 4, 5, 6, 7, 8, 9, 0]


def test_the_text_ends_with_the_context_whose_last_token_needs_no_room() -> None:
    runner = Counter(max_seq=5)
    assert runner.generate([0, 1, 2], 99) == [3, 4, 5]
    assert runner.generate([0, 1, 2, 3, 4], 99) == [5]
    assert max(map(len, runner.contexts)) == 5


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([], r"prompt: it is empty\. Give at least one token"),
        (np.array([], np.int64), "it is empty"),
        ("a text", r"expected token ids, found a str\. .*encode"),
        (b"bytes", "found a bytes"),
        (7, "expected a sequence of token ids, found a int"),
        (iter([1]), "expected a sequence of token ids, found a list_iterator"),
        (deque([1]), None),
        ([1, 2.0], r"expected a token id at position 1, found 2\.0"),
        ([None], "expected a token id at position 0, found None"),
        ([True, False], "expected a token id at position 0, found True"),
        (np.array([0.5]), "expected a token id at position 0, found "),
        ([[1, 2]], r"expected a token id at position 0, found \[1, 2\]"),
        ([1, [2, 3]], r"expected a token id at position 1, found \[2, 3\]"),
        (["1"], "expected a token id at position 0, found '1'"),
        ([1, 10], r"id 10 at position 1 is outside the vocabulary of 10\. Ids run from 0 to 9"),
        ([-1], "id -1 at position 0 is outside"),
        ([1, 2**70], "expected a token id at position 1, found 1180591620717411303424"),
        (
            [0] * 6,
            r"it has 6 tokens, and the context holds 5\. Shorten it, or open the model with a max_seq of 6 plus the",
        ),
    ],
)
def test_a_prompt_that_is_none_is_named(ids: Any, said: str | None) -> None:
    runner = Counter(max_seq=5)
    for call in (lambda: runner.generate(ids, 1), lambda: runner.predict_logits(ids)):
        if said is None:
            call()
            continue
        with pytest.raises(PromptError, match=said):
            call()


@pytest.mark.parametrize("n_new", [-1, 1.5, True, None, "3"])
def test_a_count_that_is_none_is_named(n_new: Any) -> None:
    with pytest.raises(ArgumentError, match=r"n_new is .*expected a whole number of at least 0"):
        Counter().generate([1], n_new)
