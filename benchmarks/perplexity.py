#!/usr/bin/env python3
"""What faster arithmetic costs a trained model: perplexity of a text in exact and in auto precision.

    python benchmarks/perplexity.py [MODEL ...] [--text FILE]        (the embedded demo model by default)

A text is cut into windows, each computed on its own; every token but a window's first is scored by the logits before
it. Perplexity is exp of the mean negative log likelihood. Without --text the text is held-out stories of the grammar
that the demo model was trained on (`tools/demo`), which only that model and its kin know; for another model give a text
that it can know. Random weights tell nothing.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import rlx
from rlx import demo
from rlx.errors import PromptError

GRAMMAR = Path(__file__).resolve().parent.parent / "tools" / "demo"
STORIES, SEED = 60, 3
PRECISIONS = ("exact", "auto")


@dataclass(frozen=True)
class Score:
    """The negative log likelihoods of a text's tokens, in nats, float64 [scored tokens]."""

    losses: np.ndarray

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.losses.mean()))


def held_out_stories(count: int = STORIES, seed: int = SEED) -> str:
    """Stories about pairs of an animal and a trait that the demo model never saw together."""
    sys.path.insert(0, str(GRAMMAR))
    from make_corpus import story_request  # type: ignore[import-not-found,unused-ignore]

    rng = random.Random(seed)
    return "\n\n".join(story_request(rng, held=True)[1]["text"] for _ in range(count))


def windows(ids: Sequence[int], length: int, prefix: Sequence[int]) -> Iterator[list[int]]:
    """Pieces of at most `length` tokens, `prefix` included, which begins every text; each has something to score."""
    step = max(1, length - len(prefix))
    for at in range(0, len(ids), step):
        piece = [*prefix, *ids[at : at + step]]
        if len(piece) > 1:
            yield piece


def losses(logits: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """-log p of each of `ids` but the first, float64, given the logits [len(ids), vocab] after each."""
    rows = logits[:-1].astype(np.float64)
    rows -= rows.max(axis=-1, keepdims=True)
    chosen = rows[np.arange(len(rows)), np.asarray(ids[1:])]
    found: np.ndarray = np.log(np.exp(rows).sum(axis=-1)) - chosen
    return found


def score(model: str, text: str, precision: str, length: int, threads: int | None) -> Score:
    """One model on one text.

    Raises:
        PromptError: the text has no token to score.
    """
    with rlx.auto_runner(model, precision=precision, max_seq=length, threads=threads) as runner:
        tokenizer = runner.tokenizer
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = windows(ids, length, tokenizer.prefix)
        found = [losses(runner.predict_logits(piece, all_positions=True), piece) for piece in pieces]
    if not found:
        raise PromptError(f"the text has {len(ids)} tokens", where="perplexity", hint="give a longer one")
    return Score(np.concatenate(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[str(demo.path())], metavar="MODEL")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="UTF-8; held-out stories of the demo's grammar if none"
    )
    parser.add_argument("--window", type=int, default=512, metavar="N", help="tokens of a window (default 512)")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.window < 2:
        parser.error(f"--window {args.window}: expected 2 or more")
    text = args.text.read_text() if args.text else held_out_stories()
    print(f"{'tokens':>7}{'exact':>11}{'auto':>11}{'difference':>12}  model")
    for model in args.models:
        exact, auto = (score(model, text, precision, args.window, args.threads) for precision in PRECISIONS)
        change = auto.perplexity / exact.perplexity - 1
        print(
            f"{len(auto.losses):7}{exact.perplexity:11.5f}{auto.perplexity:11.5f}{change:+12.3%}  {model}", flush=True
        )


if __name__ == "__main__":
    main()
