"""A request: what a caller wants to be generated.

Runners stage. `LmRunner.submit` takes one; `generate` and `stream` make one of their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from rlx.engine.request.context import PromptLike
from rlx.errors import ArgumentError
from rlx.grammar.grammar import Grammar
from rlx.sampling.options import Sample


@dataclass(frozen=True)
class Request:
    """A generation that `submit` takes.

    handle = runner.submit(rlx.Request(ids, 100, priority=1, timeout=30))

    Attributes:
        ids: the prompt: at least one token id, or a `Prompt` with images.
        n_new: maximum number of tokens.
        sample: sampling options: a `SampleOpts`, or "recommended" for those in the model's files; the runner's default
            if None.
        stop_at_eog: False continues after the model's stop ids.
        stop: strings that end it.
        min_tokens: until there are this many tokens, stop ids are not chosen and stop strings are ignored.
        speculative: `prompt-lookup` or `mtp`; None takes the runner's default.
        top_logprobs: also report log-probabilities: of each token, and of this many of the likeliest tokens.
        priority: requests with a higher priority are served first.
        timeout: seconds after which it fails with a `DeadlineError`; None for never.
        embeds: numbers [len(ids), hidden] in place of the embeddings of `ids`.
        attn_bias: with `embeds`: numbers [len(ids), len(ids)] or [heads, len(ids), len(ids)] in place of the causal
            mask.
        grammar: what the text must look like. Stop ids are chosen only where it is complete.
        stop_ids: further token ids that end it, also without `stop_at_eog`.
        keep_ids: control tokens that are not left out of texts.
        cache_salt: requests share what the cache knows of their prompts only with requests of the same salt. Requests
            of users who must not learn of each other, not even by the time of an answer, need different ones.
    """

    ids: PromptLike
    n_new: int
    sample: Sample = None
    stop_at_eog: bool = True
    stop: str | Sequence[str] = ()
    min_tokens: int = 0
    speculative: str | None = None
    top_logprobs: int | None = None
    priority: int = 0
    timeout: float | None = None
    embeds: Any = None
    attn_bias: Any = None
    grammar: Grammar | None = None
    stop_ids: Sequence[int] = ()
    keep_ids: Set[int] = frozenset()
    cache_salt: str = ""

    def seconds(self) -> float | None:
        """The checked `timeout`; `ArgumentError` if it is no number above 0."""
        if self.timeout is None:
            return None
        value: Any = self.timeout
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ArgumentError(f"timeout is {value!r}", where="submit", hint="give seconds above 0, or None")
        return float(value)
