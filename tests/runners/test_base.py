"""The reference runner: validation, stopping, and that it computes the whole context for every token."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from rlx.engine.request.output import Logits
from rlx.engine.request.request import Request
from rlx.errors import ArgumentError, MultimodalError, PromptError
from rlx.prompt import Prompt, TokenIds
from rlx.runners.base import LmRunner
from rlx.sampling import SampleOpts


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


def test_no_token_costs_nothing() -> None:
    runner = Counter()
    assert runner.generate([1], 0) == []
    assert runner.contexts == []


@pytest.mark.parametrize("false", [False, np.False_])
def test_a_callback_that_returns_false_stops_behind_its_token(false: bool) -> None:
    seen: list[int] = []

    def on_token(token: int) -> bool:
        seen.append(token)
        return false if len(seen) == 3 else True

    assert Counter().generate([0], 8, on_token) == seen == [1, 2, 3]


@pytest.mark.parametrize("answer", [None, True, 0, "", []])
def test_only_false_stops(answer: Any) -> None:
    assert len(Counter().generate([0], 4, lambda token: answer)) == 4


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


def test_what_a_callback_raises_comes_through() -> None:
    runner = Counter()

    def on_token(token: int) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        runner.generate([0], 3, on_token)
    assert runner.generate([0], 1) == [1]


def test_sampling_options_are_used() -> None:
    drawn = [Counter().generate([0], 6, sample=SampleOpts(temperature=5, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert Counter().generate([0, 1, 1], 1, sample=SampleOpts(0, repetition_penalty=1e9)) == [2]
    assert Counter().generate([2, 1], 1, sample=SampleOpts(0, repetition_penalty=1e9)) == [5]  # 2 was in the prompt


@pytest.mark.parametrize("ids", [(1, 2), range(1, 3), np.array([1, 2], np.uint16), [np.int64(1), 2]])
def test_any_sequence_of_whole_numbers_is_a_prompt(ids: Any) -> None:
    runner = Counter()
    assert runner.generate(ids, 1) == [3]
    assert runner.contexts == [[1, 2]]
    assert all(type(token) is int for token in runner.contexts[0])


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
            r"it has 6 tokens, and the context holds 5\. Shorten it, or open the model with a max_seq of at least 6",
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


def test_images_are_refused_by_name() -> None:
    runner = Counter()
    assert not runner.supports_multimodal
    with pytest.raises(MultimodalError, match="the counter runner takes text only"):
        runner.generate_multimodal("what is this?", [np.zeros((2, 2, 3), np.uint8)], 4)


def test_a_prompt_without_images_is_its_ids_and_one_with_images_needs_a_tower() -> None:
    runner, image = Counter(), np.zeros((2, 2, 3), np.uint8)
    prompt = Prompt([3, 4])
    assert runner.generate(prompt, 2) == [t.token for t in runner.stream(prompt, 2)] == [5, 6]
    assert runner.generate_batch([prompt, [1]], 1) == [[5], [2]]
    assert list(runner.submit(Request(prompt, 1)).result()) == [5]
    np.testing.assert_array_equal(runner.score(Prompt([3, 4])), runner.score([3, 4]))
    with pytest.raises(
        MultimodalError, match=r"prompt: there is an image, and the counter model has no vision tower.*mmproj"
    ):
        runner.generate(Prompt([3, 4], [image]), 1)
    with pytest.raises(MultimodalError, match="prompt 1: there are 2 images"):
        runner.generate_batch([[1], Prompt([3], [image, image])], 1)
    with pytest.raises(PromptError, match=r"images: expected a list of images, found a ndarray. Give \[image\]"):
        Prompt([1], image)  # type: ignore[arg-type]
