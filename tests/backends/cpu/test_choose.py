"""Native code chooses the tokens that the meaning in NumPy chooses, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.backends import backend
from rlx.backends.cpu.kernels.rows import choose as kernel
from rlx.backends.cpu.loops import python_form
from rlx.compiler.compile import Compiler
from rlx.sampling import SampleOpts, Sampler
from rlx.sampling.choice import Choice, Choose, Chosen, choose, surprise
from rlx.sampling.filters import INTERVALS

Array = np.ndarray[Any, Any]
VOCABS = (1, 3, 32, 65, 1000, 5003)

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy with penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "plain": {},
    "cold": {"temperature": 1e-300},
    "top-k": {"top_k": 7},
    "top-k and penalties": {"top_k": 7, "presence_penalty": 1.5, "repetition_penalty": 0.7},
    "top-p": {"top_p": 0.9},
    "top-p of nothing": {"top_p": 0.0},
    "top-p of nearly all": {"top_p": float(np.nextafter(1, 0))},
    "min-p": {"min_p": 0.1},
    "typical": {"typical_p": 0.6},
    "typical of nothing": {"typical_p": 0.0},
    "n-sigma": {"top_n_sigma": 1.2},
    "all filters": {"temperature": 0.7, "top_n_sigma": 3, "top_k": 40, "typical_p": 0.97, "top_p": 0.95, "min_p": 0.01},
    "xtc": {"xtc_probability": 0.6, "xtc_threshold": 0.05},
    "xtc of all": {"xtc_probability": 1, "xtc_threshold": 0, "top_k": 5},
    "mirostat": {"mirostat": 2, "mirostat_tau": 3.0, "temperature": 0.8},
    "a small bound": {"mirostat": 2, "mirostat_tau": 0.0},
    "dry": {"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_sequence_breakers": ()},
    "bias": {"logit_bias": {0: 4.0, 1: -np.inf, 2: -1.0}, "top_p": 0.8},
}


@pytest.fixture(scope="module", params=[1, 2, 9])
def native(request: pytest.FixtureRequest) -> Iterator[Choose]:
    cpu = backend("cpu")
    compiler = Compiler(cpu.target())
    workers = compiler.workers(request.param)
    yield cpu.chooser(workers, compiler)
    workers.close()


class Mask:
    """A constraint with one mask."""

    def __init__(self, words: Array) -> None:
        self.mask, self.accept = lambda: words, lambda token: None


def row_of(random: np.random.Generator, vocab: int, kind: str) -> Array:
    row = (random.normal(size=vocab) * random.choice([0.5, 3, 8])).astype(np.float32)
    if kind == "ties":
        row = np.round(row)
    elif kind == "flat":
        row[:] = 1.5
    elif kind == "excluded":
        row[random.random(vocab) < 0.7] = -np.inf
        row[vocab // 2] = 0
    elif kind in ("nan", "inf", "-inf"):
        row[random.integers(vocab)] = float(kind)
    elif kind == "nothing":
        row[:] = -np.inf
    return row


def mask_of(random: np.random.Generator, vocab: int, share: float) -> Array:
    return np.packbits(random.random(-(-vocab // 32) * 32) < share, bitorder="little").view(np.int32)


def choice_of(random: np.random.Generator, vocab: int, options: dict[str, Any]) -> Choice:
    if "logit_bias" in options:
        options = options | {"logit_bias": {i: v for i, v in options["logit_bias"].items() if i < vocab}}
    history = random.integers(0, vocab, 30).tolist()
    share = random.choice([0, 0.0, 0.02, 0.5, 1])
    constraint: Any = Mask(mask_of(random, vocab, share)) if random.random() < 0.5 else None
    sampler = Sampler(SampleOpts(seed=int(random.integers(99)), **options), history, constraint=constraint)
    return sampler.choice(vocab, [0, 2, vocab + 7] if random.random() < 0.3 else ())


def meaning(row: Array, choice: Choice) -> Chosen:
    with np.errstate(invalid="ignore"):
        return choose(row, choice)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ["spread", "ties", "flat", "excluded", "nan", "inf", "-inf", "nothing"])
def test_native_code_chooses_what_numpy_chooses(native: Choose, kind: str, name: str) -> None:
    random = np.random.default_rng([*kind.encode(), *name.encode()])
    for vocab in VOCABS:
        rows = [row_of(random, vocab, kind) for _ in range(7)]
        choices = [choice_of(random, vocab, OPTIONS[name]) for _ in rows]
        assert native(rows, choices) == list(map(meaning, rows, choices))
        assert native(rows[:1], choices[:1]) == [meaning(rows[0], choices[0])]


def test_rows_of_a_call_may_have_any_options(native: Choose) -> None:
    random = np.random.default_rng(3)
    rows = [row_of(random, 700, "spread") for _ in OPTIONS]
    choices = [choice_of(random, 700, options) for options in OPTIONS.values()]
    assert native(rows, choices) == list(map(meaning, rows, choices))


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_a_generation_is_the_same(native: Choose, seed: int) -> None:
    random = np.random.default_rng(seed)
    options = {k: v for each in random.choice(list(OPTIONS), 3) for k, v in OPTIONS[each].items() if k != "logit_bias"}
    one, two = (Sampler(SampleOpts(seed=seed, **options)) for _ in range(2))
    for _ in range(5):
        row = row_of(random, 400, "spread")
        assert two.advance(native([row], [two.choice(len(row))])[0], row) == one.sample(row)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_kernel_in_python_chooses_the_same(name: str) -> None:
    random = np.random.default_rng([*name.encode()])
    function = python_form(kernel.choose())
    for kind in ("spread", "ties", "excluded"):
        row, found = row_of(random, 70, kind), np.zeros(4)
        choice = choice_of(random, len(row), OPTIONS[name])
        sizes = [INTERVALS if label == "sums" else 70 for label, _ in kernel.SCRATCH]
        scratch = [np.zeros(n, kind.numpy) for n, (_, kind) in zip(sizes, kernel.SCRATCH, strict=True)]
        mask, changes = choice.mask, choice.changes
        parts = [np.zeros(1, np.int32), np.zeros(1), np.zeros(1)] if changes is None else changes
        extents = (70, 0 if mask is None else len(mask), 0 if changes is None else len(changes.ids), 0, 1)
        words = np.zeros(1, np.int32) if mask is None else mask
        with np.errstate(all="ignore"):
            function(*scratch, row, words, *parts, choice.numbers, found, *extents)
        bits = surprise(found[2], found[3]) if found[3] else 0.0
        assert Chosen(int(found[0]), found[1] == 1, bits) == meaning(row, choice)
