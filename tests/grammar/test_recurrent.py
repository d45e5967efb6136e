"""Forced tokens in a model with recurrent states, which cannot go back, and with drafts of its MTP head.

The checkpoint is the golden one of Qwen 3.5 with a head that sees little but the last token.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "runners"))
from heads import echo, random_head, with_head

import rlx
from rlx.grammar import Grammar
from rlx.text import Tokenizer
from rlx.text.tokenizer import Spelling, TokenType, Vocabulary

FORM = Grammar.regex("([a-m]{3}<the rest is forced>){4}")
IDS = np.random.default_rng(5).integers(0, 500, 40).tolist()


def letters(size: int) -> Tokenizer:
    """A token for each character, and filler."""
    texts = [chr(i) if 32 <= i < 127 else "" for i in range(128)]
    vocabulary = Vocabulary(texts + [""] * (size - 128), bytes([TokenType.NORMAL] * size), Spelling.SENTENCEPIECE)
    return Tokenizer(
        vocabulary=vocabulary, encode_parts=lambda text, special: [ord(c) for c in text], bos_id=None, eos_id=None
    )


@pytest.fixture(scope="module")
def runner(goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = with_head(goldens, tmp_path_factory.mktemp("guessable") / "hf", echo(random_head()), share=0.6)
    with rlx.auto_runner(path, precision="exact", max_seq=256, profile={"buckets": {"seq": [1, 32]}}) as found:
        found.__dict__["tokenizer"] = letters(found.vocab_size)
        yield found


@pytest.mark.parametrize("sample", [None, rlx.SampleOpts(temperature=1.0, seed=2)])
def test_one_answer_whatever_computes_it(runner: Any, sample: Any) -> None:
    before = runner.stats()["requests"]["steps"]
    options = {"sample": sample, "grammar": FORM}
    plain = runner.generate(IDS, 200, **options)
    assert plain.finish_reason == "grammar" and len(plain) == 4 * 23
    assert runner.stats()["requests"]["steps"] - before < 40
    drafted = runner.generate(IDS, 200, speculative="mtp", **options)
    assert drafted == plain and runner.stats()["speculation"]["drafted"]
    assert runner.generate(IDS, 200, speculative="prompt-lookup", **options) == plain
    for speculative in (None, "mtp"):
        found = runner.generate(IDS, 200, speculative=speculative, top_logprobs=0, **options)
        assert found == plain
        expected = runner.score([*IDS, *plain])[len(IDS) - 1 :]
        np.testing.assert_allclose([step.logprob for step in found.steps], expected, rtol=1e-3, atol=1e-3)
    assert runner.generate_batch([IDS, IDS[:9], IDS], 200, grammar=FORM)[0] == runner.generate(IDS, 200, grammar=FORM)
    for count in (1, 5, 40):
        assert runner.generate(IDS, count, **options) == plain[:count]
        going_on = runner.generate([*IDS, *plain[:count]], 6)
        assert going_on == runner.generate_batch([[*IDS, *plain[:count]]], 6)[0]


def test_a_stop_inside_of_forced_tokens_takes_the_rest_back(runner: Any) -> None:
    cut = runner.generate(IDS, 200, grammar=FORM, stop="is for")
    assert cut.finish_reason == "stop_string" and cut.text.endswith("<the rest ")
    assert runner.generate([*IDS, *cut], 6) == runner.generate_batch([[*IDS, *cut]], 6)[0]
