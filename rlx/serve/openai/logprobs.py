"""The `logprobs` of `/v1/completions`. Server stage, under OpenAI's paths."""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan
from typing import Any

from rlx.runners import TokenLogprob
from rlx.serve.generation import TokenInfo


class Logprobs:
    """Makes the lists of one choice; of a stream piece by piece.

    Args:
        as_ids: write `token_id:15` in place of a token's text.
    """

    def __init__(self, as_ids: bool) -> None:
        self._as_ids, self._offset = as_ids, 0

    def of(self, infos: Iterable[TokenInfo]) -> dict[str, Any]:
        """The lists of some tokens. The first token of a prompt has no log-probability (NaN): it is null there.

        Offsets count characters from the beginning of the first token that was given.
        """
        tokens, values, tops, offsets = list[str](), list[float | None](), list[Any](), list[int]()
        for info in infos:
            known = not isnan(info.chosen.logprob)
            tokens.append(self._name(info.chosen))
            values.append(info.chosen.logprob if known else None)
            tops.append({self._name(each): each.logprob for each in info.top} if known else None)
            offsets.append(self._offset)
            self._offset += len(info.chosen.text)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _name(self, found: TokenLogprob) -> str:
        return f"token_id:{found.token}" if self._as_ids else found.text
