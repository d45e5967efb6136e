"""Every way to generate gives the tokens of the plain one, greedily, on every family: those of the golden file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from heads import random_head, with_head

import rlx
from rlx.engine.kv.snapshot import Snapshot
from rlx.runners import Model, auto_runner

FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen3moe", "qwen35", "qwen35moe", "gemma", "gemma2", "gemma3", "gemma3n",
    "gemma4-e2b", "gemma4-moe",
)  # fmt: skip
CLOSE = 4e-3  # of the largest logit: a margin between the best two that rounding may turn over
PAIR = {"buckets": {"seq": [1, 32]}}  # prompts of 48 tokens are two chunks

Way = Callable[[Path, list[int], int, Path], list[int]]


def plain(model: Path, ids: list[int], n: int, tmp: Path) -> list[int]:
    with opened(model) as runner:
        return runner.generate(ids, n, stop_at_eog=False)


def uncached(model: Path, ids: list[int], n: int, tmp: Path) -> list[int]:
    with opened(model) as runner:
        runner.disable_decode_compile_cache()
        return runner.generate(ids, min(n, 5), stop_at_eog=False)


def in_pieces(model: Path, ids: list[int], n: int, tmp: Path) -> list[int]:
    """The prompt comes in calls of four tokens and of one, which go on from the session."""
    with opened(model) as runner:
        for end in [*range(4, len(ids) - 3, 4), len(ids) - 1]:
            runner.prefill_logits(ids[:end])
        found = runner.generate(ids, n, stop_at_eog=False)
        assert runner.stats()["reused_tokens"] >= len(ids) - 1
    return found


def streamed(model: Path, ids: list[int], n: int, tmp: Path) -> list[int]:
    with opened(model) as runner:
        return [step.token for step in runner.stream(ids, n, stop_at_eog=False)]


def watched(model: Path, ids: list[int], n: int, tmp: Path) -> list[int]:
    seen: list[int] = []
    with opened(model) as runner:
        runner.generate(ids, n, seen.append, stop_at_eog=False)
    return seen


def by_hand(model: Path, ids: list[int], n: int, tmp: Path) -> list[int]:
    with opened(model) as runner:
        tokens = [int(runner.prefill_logits(ids).argmax())]
        while len(tokens) < n:
            tokens.append(int(runner.decode_logits(tokens[-1]).argmax()))
    return tokens


def restored(model: Path, ids: list[int], n: int, tmp: Path) -> list[int]:
    """From a file, in another runner with another context, after half the prompt."""
    with opened(model) as first:
        first.prefill_logits(ids[: len(ids) // 2])
        first.snapshot().save(tmp / "snapshot")
    with auto_runner(model, precision="exact", max_seq=128, profile=PAIR) as runner:
        runner.restore(Snapshot.load(tmp / "snapshot"))
        found = runner.generate(ids, n, stop_at_eog=False)
        assert runner.stats()["reused_tokens"] == len(ids) // 2
    return found


def continued(model: Path, ids: list[int], n: int, tmp: Path) -> list[int]:
    """A prompt that shares a part with a longer session, which went another way behind it."""
    with opened(model) as runner:
        half = ids[: len(ids) // 2]
        runner.generate(half, 6, stop_at_eog=False)
        return runner.generate(ids, n, stop_at_eog=False)


def looked_up(model: Path, ids: list[int], n: int, tmp: Path) -> list[int]:
    with opened(model) as runner:
        return runner.generate(ids, n, stop_at_eog=False, speculative="prompt-lookup")


def drafted(model: Path, ids: list[int], n: int, tmp: Path) -> list[int]:
    """With drafts of a head for further tokens whose weights are random: few of them come."""
    with opened(with_head(model.parents[1], tmp / "hf", random_head())) as runner:
        found = runner.generate(ids, n, stop_at_eog=False, speculative="mtp")
        counters = runner.stats()["speculation"]
        assert counters["drafted"] > counters["accepted"]
    return found


def generated(model: Path, ids: list[int], n: int, tmp: Path) -> list[int]:
    """By a generator: a program for pasts up to 64, then the one for any."""
    with rlx.TokenGenerator.from_path(model, precision="exact", max_seq=96, profile=PAIR) as generator:
        generator.with_inference_caches(64).prefill(ids)
        return generator.generate_cached(n)


def batched(model: Path, ids: list[int], n: int, tmp: Path) -> list[int]:
    """Beside prompts of other lengths, one of which ends early."""
    with opened(model) as runner:
        prompts = [ids[: len(ids) // 2], ids, ids[3:20], ids[:1]]
        seen: list[int] = []
        together = runner.generate_batch(
            prompts, n, lambda i, token: i != 2 or (seen.append(token), len(seen) < 2)[1], stop_at_eog=False
        )
        for prompt, found in zip(prompts, together, strict=True):
            assert found == runner.generate(prompt, len(found), stop_at_eog=False)
        assert together[2] == seen
        return together[1]


WAYS: tuple[Way, ...] = (
    plain,
    uncached,
    in_pieces,
    streamed,
    watched,
    by_hand,
    restored,
    continued,
    looked_up,
    batched,
)


def opened(model: Path) -> Model:
    return auto_runner(model, precision="exact", max_seq=96, profile=PAIR)


def sure(golden: Path) -> tuple[list[int], list[int]]:
    """The golden prompt, and the tokens that come after it up to the first near tie."""
    with np.load(golden) as file:
        ids, greedy, margins = file["tokens"].tolist(), file["greedy"].tolist(), file["greedy_margin"]
        ties = np.flatnonzero(margins < CLOSE * np.abs(file["logits"]).max())
    return ids, greedy[: ties[0]] if len(ties) else greedy


#: A generator makes programs of its own for every length of the past: one family of each kind of state.
GENERATED = ("llama", "qwen35", "gemma3n")
#: One of each kind of cache: full, windows, recurrent states, shared. The other families run the same code.
QUICK = ("qwen3", "qwen35", "gemma3", "gemma3n")
#: `test_native_goldens.py` holds these to tokens and logits.
ELSEWHERE = ("qwen3moe", "qwen35", "qwen35moe", "gemma3n", "gemma4-e2b", "gemma4-moe")
CASES = [*itertools.product(FAMILIES, WAYS), *((family, generated) for family in GENERATED), ("qwen35", drafted)]


def marks(family: str, way: Way) -> Iterator[pytest.MarkDecorator]:
    if (way is plain and family in ELSEWHERE) or not (way in (plain, generated) or family in QUICK):
        yield pytest.mark.slow
    if family not in ("qwen3", "qwen35", "gemma3n") or way not in (plain, batched):  # these programs run in all ways
        yield pytest.mark.any_machine


@pytest.mark.parametrize(
    ("family", "way"),
    [pytest.param(family, way, id=f"{family}-{way.__name__}", marks=[*marks(family, way)]) for family, way in CASES],
)
def test_every_way_gives_the_same_tokens(goldens: Path, tmp_path: Path, family: str, way: Way) -> None:
    ids, expected = sure(goldens / family / "golden.npz")
    folder = goldens / family
    model = next(path for path in (folder / "model-f16.gguf", folder / "hf") if path.exists())
    found = way(model, ids, len(expected), tmp_path)
    assert len(found) in (len(expected), 5)
    assert found == expected[: len(found)]
