"""The choice of tokens by the host, for devices without a chooser of their own. It looks at few of a row's logits.

Sampling stage, over `choice.py`. With top-k, and without randomness, only tokens count that may be among the largest.
Of some sets of tokens, those with the largest maxima have one each that is at least the least of these maxima: so
tokens below this border are too small, unless a change raises them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rlx.sampling.choice import Changes, Choice, Chosen, choose, masked

_BLOCK = 64  # tokens of a set


def choose_rows(rows: Sequence[npt.ArrayLike], choices: Sequence[Choice]) -> list[Chosen]:
    """See `rlx.sampling.choice.Choose`."""
    return [_chosen(np.asarray(row), choice) for row, choice in zip(rows, choices, strict=True)]


def _chosen(logits: npt.NDArray[np.float32], choice: Choice) -> Chosen:
    opts, changes = choice.opts, choice.changes
    row = logits if choice.mask is None else masked(logits, choice.mask)
    if opts.is_greedy and not changes:
        token = int(row.argmax())
        is_finite = bool(np.isfinite(logits).all())
        return Chosen(token, is_finite) if is_finite and np.isfinite(row[token]) else choose(logits, choice)
    ids = _useful(row, choice)
    if ids is None or not np.isfinite(logits.max()):
        return choose(logits, choice)
    few = Choice(opts, changes=changes and _renumbered(changes, ids))
    few.numbers = choice.numbers
    found = choose(logits[ids], few)
    return Chosen(int(ids[found.token]), bool(np.isfinite(logits).all()), found.surprise)


def _useful(row: npt.NDArray[np.float32], choice: Choice) -> npt.NDArray[np.intp] | None:
    """The tokens that may be chosen, ascending, if they are known to be few."""
    opts, changes = choice.opts, choice.changes
    count = 1 if opts.is_greedy else 0 if opts.mirostat or opts.top_n_sigma else opts.top_k
    need, width = count + (len(changes.ids) if changes else 0), len(row) // _BLOCK
    if not count or need > width:
        return None
    border = np.partition(row[: width * _BLOCK].reshape(_BLOCK, width).max(0), -need)[-need]
    if not np.isfinite(border):
        return None
    ids = np.flatnonzero(row >= border)
    if changes:
        own = changes.ids[(changes.ids >= 0) & (changes.ids < len(row))]
        ids = np.union1d(ids, own[np.isfinite(row[own])])  # the mask excludes the others
    return ids.astype(np.intp)


def _renumbered(changes: Changes, ids: npt.NDArray[np.intp]) -> Changes:
    """Changes of tokens that are named by their places among some, -1 for those that are not there."""
    places = np.minimum(np.searchsorted(ids, changes.ids), len(ids) - 1)
    return changes._replace(ids=np.where(ids[places] == changes.ids, places, -1).astype(np.int32))
