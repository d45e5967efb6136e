"""Aliases of generator methods, with RLX's names and its order of arguments.

Runners stage, between `token_history.py` and `token_generator.py`. Each is one call of a method with keyword arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.errors import ArgumentError
from rlx.runners.generation.context import PromptLike
from rlx.runners.generation.stopping import OnToken
from rlx.runners.generator.token_history import TokenHistory
from rlx.sampling import SampleOpts


class OriginalNames(TokenHistory):
    """A `TokenHistory` with RLX's further method names."""

    def generate_cached_with(self, n: int, opts: SampleOpts, on_token: OnToken) -> list[int]:
        """As `generate_cached`; `on_token` is called with every new token, and False from it ends the generation."""
        return self.generate_cached(n, opts, on_token=on_token)

    def generate_from_embeds_with(
        self, ids: PromptLike, embeds: Any, n: int, opts: SampleOpts, on_token: OnToken
    ) -> list[int]:
        """As `generate_from_embeds`, with a callback."""
        return self.generate_from_embeds(ids, embeds, n, opts, on_token=on_token)

    def generate_from_embeds_with_bias(
        self, ids: PromptLike, embeds: Any, attn_bias: Any, n: int, opts: SampleOpts
    ) -> list[int]:
        """As `generate_from_embeds`, with an attention bias; None is the causal mask."""
        return self.generate_from_embeds(ids, embeds, n, opts, attn_bias=attn_bias)

    def generate_from_embeds_with_bias_and_callback(
        self, ids: PromptLike, embeds: Any, attn_bias: Any, n: int, opts: SampleOpts, on_token: OnToken
    ) -> list[int]:
        """As `generate_from_embeds`, with a bias and a callback."""
        return self.generate_from_embeds(ids, embeds, n, opts, attn_bias=attn_bias, on_token=on_token)


def bound(where: str, arguments: Sequence[Any], options: Mapping[str, Any], *orders: Sequence[str]) -> dict[str, Any]:
    """Positional arguments by name, together with `options`.

    Args:
        orders: tuples of argument names, rlx's own order first; the first that is long enough applies.

    Raises:
        ArgumentError: too many arguments, one is given twice, or the first of rlx's own order is missing.
    """
    names = next((order for order in orders if len(arguments) <= len(order)), None)
    ways = " or ".join(f"({', '.join(order)})" for order in orders)
    if names is None:
        raise ArgumentError(f"{len(arguments)} arguments, expected {ways}", where=where)
    found = dict(zip(names, arguments, strict=False))
    if twice := found.keys() & options.keys():
        raise ArgumentError(f"{min(twice)} is given twice", where=where, hint=f"the order is {ways}")
    found |= options
    if orders[0][0] not in found:
        raise ArgumentError(f"{orders[0][0]} is missing", where=where, hint=f"give {ways}")
    return found
