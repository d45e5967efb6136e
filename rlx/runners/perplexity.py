"""Perplexity of a text, and the KL divergence of one model's predictions to another's: what `rlx ppl` computes.

Runners stage, over engines. A text is cut into windows that the model sees one by one. Two ways are in use:

- `sliding_windows`: each window begins `stride` tokens after the one before it, and only tokens that no earlier window
  has scored count (the strided evaluation of https://huggingface.co/docs/transformers/perplexity).
- `halved_windows`: windows side by side, of each of which only the second half counts. That is the default of
  llama.cpp's `llama-perplexity`.

Perplexity is exp of the mean negative log likelihood. The KL divergence of the model q to the base p at a position is
sum over the vocabulary of p * (log p - log q), in nats. Logits are compared piece by piece: memory does not grow with
the text, apart from some numbers a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.engine.engine import Engine
from rlx.engine.model_runner import ALL_ROWS_VALUES
from rlx.engine.request import Logits, check_finite
from rlx.errors import ArgumentError, PromptError

Floats = npt.NDArray[np.float64]

WINDOW = 512
_CONVERTED = 1 << 22  # logits that are converted to float64 at a time


@dataclass(frozen=True)
class Window:
    """Tokens that a model sees together.

    Attributes:
        ids: the tokens, the first of which is not scored.
        scored: how many of the last ones are.
    """

    ids: list[int]
    scored: int


def sliding_windows(ids: Sequence[int], length: int, stride: int, prefix: Sequence[int] = ()) -> list[Window]:
    """Windows of at most `length` tokens that score every token once, but a first one without anything before it.

    Args:
        ids: the text.
        stride: tokens from the beginning of a window to that of the next; `length` gives windows side by side.
        prefix: tokens in front of each window, such as BOS.

    Raises:
        ArgumentError: a window has no room for a token to score, or the stride would leave tokens out.
    """
    body = length - len(prefix)
    if body < 1 or length < 2:
        raise ArgumentError(f"window is {length}", hint=f"give at least {max(2, len(prefix) + 1)} tokens")
    if not 1 <= stride <= length:
        raise ArgumentError(f"stride is {stride}", hint=f"give 1 to {length}, the window")
    found, done = list[Window](), 0 if prefix else 1
    for start in range(0, len(ids), min(stride, body)):
        end = min(start + body, len(ids))
        if end > done:
            side_by_side = start >= done and not prefix  # nothing stands before its first token
            scored = end - max(done, start + 1 if side_by_side else start)
            if scored:
                found.append(Window([*prefix, *ids[start:end]], scored))
            done = end
    return found


def halved_windows(ids: Sequence[int], length: int, first: Sequence[int] = ()) -> list[Window]:
    """Whole windows of `length` tokens side by side, of which the second half is scored; the rest is left out.

    Args:
        ids: the text, with what the tokenizer puts in front of it.
        first: what stands in the place of the first tokens of each window: BOS, where the model has one.

    Raises:
        ArgumentError: a window is too short to have a second half.
    """
    if length < 4:
        raise ArgumentError(f"window is {length}", hint="give at least 4 tokens")
    starts = range(0, len(ids) // length * length, length)
    return [Window([*first, *ids[s + len(first) : s + length]], length - 1 - length // 2) for s in starts]


@dataclass
class Scores:
    """The measurements; the arrays are float64 [scored tokens].

    Attributes:
        losses: negative log likelihood of each token, in nats.
        base_losses: the same by the base; empty without one.
        divergences: KL divergence to the base at each token, in nats; empty without one.
        same: whether both find the same token likeliest.
    """

    losses: Floats = field(default_factory=lambda: np.empty(0))
    base_losses: Floats = field(default_factory=lambda: np.empty(0))
    divergences: Floats = field(default_factory=lambda: np.empty(0))
    same: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))

    def as_dict(self) -> dict[str, Any]:
        """`tokens`, `nll` in nats, `perplexity` with its standard `error`; with a base `base_perplexity` and `kl`.

        `kl` has `mean`, `error` of the mean, `median`, `p99`, `max` in nats, and `same_top`, a share.
        """
        error = float(self.losses.std(ddof=1)) / sqrt(len(self.losses)) if len(self.losses) > 1 else 0.0
        nll = float(self.losses.mean())
        found: dict[str, Any] = {"tokens": len(self.losses), "nll": nll, "perplexity": exp(nll)}
        found["error"] = exp(nll) * error
        if len(self.divergences):
            found |= {"base_perplexity": exp(float(self.base_losses.mean())), "kl": self._divergence()}
        return found

    def _divergence(self) -> dict[str, float]:
        kl = self.divergences
        median, p99 = np.quantile(kl, (0.5, 0.99)).tolist()
        error = float(kl.std(ddof=1)) / sqrt(len(kl)) if len(kl) > 1 else 0.0
        spread = {"median": median, "p99": p99, "max": float(kl.max())}
        return {"mean": float(kl.mean()), "error": error, **spread, "same_top": float(self.same.mean())}


def score(
    engine: Engine,
    windows: Sequence[Window],
    base: Engine | None = None,
    *,
    rows: int | None = None,
    on_tokens: Callable[[int], object] = lambda count: None,
) -> Scores:
    """Scores windows with a model, and compares its predictions with those of a base.

    Args:
        base: a model with the same vocabulary, or None.
        rows: most tokens that are computed at a time; 1 measures the programs of decoding.
        on_tokens: called with the number of tokens scored so far.

    Raises:
        PromptError: there is no token to score.
        ArgumentError: the vocabularies differ in size.
        NumericalError: a logit is NaN or infinite.
    """
    if not windows:
        raise PromptError("it has no token to score", where="text", hint="give a longer one, or a smaller window")
    vocab = engine.config.vocab_size
    if base is not None and base.config.vocab_size != vocab:
        what = f"the base has {base.config.vocab_size} tokens, the model {vocab}"
        raise ArgumentError(what, where="base", hint="KL divergence needs models of one vocabulary.")
    most = max(1, min(engine.most_rows, ALL_ROWS_VALUES // vocab, rows or engine.most_rows))
    found: list[tuple[Any, ...]] = []
    count = 0
    for window in windows:
        for part in _scored(engine, window, base, most):
            found.append(part)
            count += len(part[0])
            on_tokens(count)
    losses, base_losses, divergences, same = (np.concatenate(each) for each in zip(*found, strict=True))
    return Scores(losses, base_losses, divergences, same)


def _scored(engine: Engine, window: Window, base: Engine | None, most: int) -> Iterator[tuple[Any, ...]]:
    """(losses, losses of the base, divergences, whether the likeliest is the same) of a window's tokens, in pieces."""
    ids, first = window.ids, len(window.ids) - window.scored - 1
    engines = [engine] if base is None else [engine, base]
    sequences = [each.open_sequence(shared=False) for each in engines]
    try:
        for each, sequence in zip(engines, sequences, strict=True):
            for at in range(0, first, most):
                each.append(sequence, ids[at : min(at + most, first)])
        for at in range(first, len(ids) - 1, most):
            piece = ids[at : min(at + most, len(ids) - 1)]
            found = [each.append(own, piece, "all") for each, own in zip(engines, sequences, strict=True)]
            logits = [check_finite(rows, "ppl") for rows in found]
            yield compare(logits[0], logits[-1] if base else None, ids[at + 1 : at + 1 + len(piece)])
    finally:
        for sequence in sequences:
            sequence.discard()


def compare(logits: Logits, base: Logits | None, ids: Sequence[int]) -> tuple[Any, ...]:
    """(losses of `ids`, those of the base, KL divergences, whether the likeliest token is the same) of each row.

    Args:
        logits: of the model, float32 [rows, vocab].
        base: of the base; None gives empty arrays for what needs one.
        ids: the tokens that follow, [rows].
    """
    step = max(1, _CONVERTED // logits.shape[1])
    parts = []
    for at in range(0, len(logits), step):
        some, chosen = slice(at, at + step), np.asarray(ids[at : at + step])
        own = _log_softmax(logits[some])
        row = np.arange(len(own))
        none: Floats = np.empty(0)
        if base is None:
            parts.append((-own[row, chosen], none, none, none.astype(np.bool_)))
            continue
        theirs = _log_softmax(base[some])
        divergences = np.maximum((np.exp(theirs) * (theirs - own)).sum(-1), 0.0)  # rounding may leave less than 0
        same = own.argmax(-1) == theirs.argmax(-1)
        parts.append((-own[row, chosen], -theirs[row, chosen], divergences, same))
    return tuple(np.concatenate(each) for each in zip(*parts, strict=True))


def _log_softmax(logits: Logits) -> Floats:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(-1, keepdims=True))
    return wide
