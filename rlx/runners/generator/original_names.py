"""Aliases of generator methods, with RLX's names and its order of arguments.

Runners stage, between `token_history.py` and `token_generator.py`. Each is one call of a method with keyword arguments.
"""

from __future__ import annotations

from typing import Any

from rlx.engine.request.context import PromptLike
from rlx.engine.request.stopping import OnToken
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
