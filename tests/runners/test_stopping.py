"""What ends a generation, and how much of the text belongs to the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_engine import job

from rlx.engine.loop.handle import Handle
from rlx.engine.request import FinishReason
from rlx.errors import ArgumentError, TokenizerError
from rlx.sampling import SampleOpts, Sampler
from rlx.text import Tokenizer
from rlx.text.tokenizer import AnswerText

pytestmark = pytest.mark.any_machine

END = frozenset({9})


class Bytes:
    """A tokenizer whose ids are bytes, and 256 is a control token."""

    special_ids, drop_space = frozenset({256}), False

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


class Pieces(Bytes):
    """A tokenizer whose ids are the places of a list."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token].encode()


def text_of(pieces: Sequence[str], stop: Sequence[str]) -> tuple[str, str | None, list[str]]:
    """The answer, the stop string, and what was certain after each piece."""
    answer = AnswerText(Pieces(pieces), stop)  # type: ignore[arg-type]
    shown = [answer.push(token) for token in range(len(pieces))]
    shown.append(answer.finish())
    assert "".join(shown) == answer.text
    return answer.text, answer.stopped_at, shown


class Stopping:
    """A request that is given tokens: the loop's side and the consumer's decide when it ends."""

    def __init__(
        self,
        n_new: int = 1 << 30,
        *,
        room: int | None = None,
        tokenizer: Any = None,
        on_token: Any = None,
        stop_ids: Any = (),
        **asked: Any,
    ) -> None:
        self.job = job([1], n_new, room=room, stop_ids=tuple(stop_ids), **asked)
        self.job.request.check()
        self.handle = Handle(Mock(), self.job, tokenizer or none, on_token, has_texts=False)
        if self.job.ended:
            self.handle.read()

    def push(self, token: int) -> FinishReason | None:
        self.job.add(token)
        step = self.handle.step(len(self.job.tokens) - 1)
        return step and step.finish_reason

    @property
    def count(self) -> int:
        return len(self.job.tokens)

    @property
    def reason(self) -> FinishReason | None:
        return self.handle.finish_reason

    @property
    def text(self) -> str | None:
        return None if self.handle._answer is None else self.handle._answer.text


def none() -> Any:
    raise TokenizerError("there is none", where="tokenizer")


# ---------------------------------------------------------------------------------------------------- reasons


def fed(stopping: Stopping, tokens: Sequence[int]) -> list[FinishReason | None]:
    return [stopping.push(token) for token in tokens]


def test_a_stop_id_ends_it() -> None:
    stopping = Stopping(5, stop_ids=END)
    assert fed(stopping, [1, 2, 9]) == [None, None, "stop"]
    assert (stopping.reason, stopping.count, stopping.text) == (FinishReason.STOP, 3, None)


@pytest.mark.parametrize(
    ("max_tokens", "room", "expected"),
    [(2, None, "length"), (2, 9, "length"), (2, 2, "length"), (9, 2, "context"), (1 << 30, 2, "context")],
)
def test_the_number_of_tokens_and_the_context_end_it(max_tokens: int, room: int | None, expected: str) -> None:
    assert fed(Stopping(max_tokens, room=room), [1, 2]) == [None, expected]


def test_the_callback_sees_every_token_and_may_end_it() -> None:
    seen: list[int] = []
    stopping = Stopping(5, stop_ids=END, on_token=lambda token: seen.append(token) or token != 7)
    assert fed(stopping, [1, 7]) == [None, "callback"]
    assert seen == [1, 7]


def test_of_several_reasons_the_first_is_given() -> None:
    def no(token: int) -> bool:
        return False

    assert Stopping(1, room=1, stop_ids=END, on_token=no).push(9) == "stop"
    assert Stopping(1, room=1, stop_ids=END, on_token=no).push(8) == "callback"
    everything = Stopping(1, room=1, stop="a", tokenizer=Bytes, on_token=no)
    assert everything.push(ord("a")) == "stop_string"


# ---------------------------------------------------------------------------------------------------- min_tokens


def test_min_tokens_keeps_the_end_out_of_the_first_tokens() -> None:
    stopping, sampler = Stopping(9, stop_ids=END, min_tokens=3), Sampler(SampleOpts.greedy())
    logits = np.arange(10, dtype=np.float32)  # the end is the likeliest
    tokens = []
    while stopping.reason is None:
        tokens.append(sampler.sample(logits, stopping.job.banned))
        stopping.push(tokens[-1])
    assert (tokens, stopping.reason) == ([8, 8, 8, 9], "stop")


# ---------------------------------------------------------------------------------------------------- stop strings


@pytest.mark.parametrize(
    ("pieces", "stop", "answer", "found"),
    [
        (["Hello", " wor", "ld"], [], "Hello world", None),
        (["Hello", " wor", "ld"], ["world"], "Hello ", "world"),
        (["Hello world, and more"], ["world"], "Hello ", "world"),
        (["one\n", "\n", "two"], ["\n\n"], "one", "\n\n"),
        (["a", "b", "a", "b", "c"], ["abc"], "ab", "abc"),
        (["aab"], ["ab"], "a", "ab"),
        (["Use", "r: hi"], ["User:", "Us er"], "", "User:"),
        (["no st", "op", "p"], ["stopped"], "no stopp", None),
        (["xabcd"], ["abcd", "bc"], "xa", "bc"),
        (["xa", "bcd"], ["abcd", "bc"], "xa", "bc"),
        (["xabc"], ["c", "abc"], "x", "abc"),
        (["caf", "\u00e9 \u2603", "!"], ["\u2603!"], "caf\u00e9 ", "\u2603!"),
    ],
)
def test_the_answer_ends_before_the_stop_string(
    pieces: list[str], stop: list[str], answer: str, found: str | None
) -> None:
    assert text_of(pieces, stop)[:2] == (answer, found)


def test_what_may_be_a_stop_string_is_held_back() -> None:
    _, _, shown = text_of(["Hi U", "s", "e", "rs. U", "ser", ":"], ["User:"])
    assert shown == ["Hi ", "", "", "Users. ", "", "", ""]


def test_a_stop_string_may_end_within_a_character_of_tokens() -> None:
    stopping = Stopping(20, stop="\u2603", tokenizer=Bytes, stop_ids={256})
    assert fed(stopping, [*b"a\xe2\x98", 0x83]) == [None, None, None, "stop_string"]
    assert stopping.text == "a"


def test_the_end_of_the_turn_is_no_text_and_frees_what_was_held() -> None:
    stopping = Stopping(20, stop="User:", tokenizer=Bytes, stop_ids={256})
    assert fed(stopping, [*b"Us", 256])[-1] == "stop"
    assert stopping.text == "Us"


@given(st.text("ab\u00e9", max_size=30), st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=3), st.data())
def test_it_does_not_matter_how_the_text_is_cut(text: str, stop: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    answer, found, _ = text_of(pieces, stop)
    places = [(text.find(each) + len(each), text.find(each), each) for each in stop if each in text]
    assert (answer, found) == ((text[: min(places)[1]], min(places)[2]) if places else (text, None))


# ---------------------------------------------------------------------------------------------------- mistakes


def never() -> Tokenizer:
    raise AssertionError("nobody needs it")


def test_the_tokenizer_is_asked_for_only_if_there_are_stop_strings() -> None:
    assert Stopping(3, tokenizer=never).text is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on_token": 5}, "on_token is 5, expected a function of a token"),
        ({"n_new": -1}, "n_new is -1, expected a whole number of at least 0"),
        ({"n_new": 1.5}, r"n_new is 1\.5"),
        ({"n_new": True}, "n_new is True"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"n_new": 2, "min_tokens": 3}, "min_tokens is 3, more than the 2 of max_tokens"),
        ({"stop": ["a", ""], "tokenizer": never}, "stop is an empty text"),
        ({"stop": [3], "tokenizer": never}, r"stop is \[3\], expected a text or several"),
        ({"stop": None, "tokenizer": never}, "stop is None"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        Stopping(**options)
