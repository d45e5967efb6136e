"""What is sent to choose tokens from rows of logits, and the memory that the kernels of `kernels/choose.py` work on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.backends.cuda.agreed.steps import THREADS
from rlx.sampling.choice import NUMBERS, Choice

PART = 2048  # tokens of a block
LISTED = 2048  # tokens that are sorted; if there are more, the host chooses
#: The largest vocabulary: a thread for each part; and the sums of its weights are exact.
MOST_TOKENS = PART * THREADS

#: Words of 8 bytes of a row of the table: addresses of logits, mask, and changes; words of the mask, and changes;
#: whether the likeliest token is asked for; then the numbers of the choice.
LOGITS, MASK, IDS, COUNTS, AMOUNTS, MASKED, CHANGES, GREEDY, FIRST_NUMBER = range(9)
WORDS = FIRST_NUMBER + len(NUMBERS)

#: Words of 8 bytes of a row in `rows`: its largest value; whether something is drawn; the first and the last interval
#: whose tokens are sorted, or `INTERVALS` and -1; what ends the sorted ones; the weight or the number of tokens before
#: the first interval; the weight that top-p has to reach.
TOP, DRAWS, FIRST, LAST, KIND, BEFORE, TARGET, ROW_WORDS = range(8)
#: What ends the sorted tokens: top-k, top-p, or both.
BY_COUNT, BY_SHARE, BY_BOTH = 1, 2, 3
#: Words of 8 bytes of each part of a row: largest value, its token, flags, and the weight of what is kept for sure.
BEST, BEST_TOKEN, FLAGS, MASS, PART_WORDS = range(5)
#: Numbers of 4 bytes of a row, all 0 between calls: blocks that have come, per kernel, and tokens that are listed.
LOOKED, WEIGHED, DRAWN, LISTED_COUNT, COUNTERS = range(5)
#: Of a row the token, or one of these, and whether all logits are finite.
NO_TOKEN, TOO_MANY = -1, -2

#: The pointers of each kernel; `memory` is address 0.
POINTERS = ("memory", "table", "parts", "rows", "counters", "sums", "listed", "found")
#: The sizes that it takes.
EXTENTS = ("VOCAB", "PARTS")


def describe(
    table: npt.NDArray[np.int64], logits: Sequence[int], choices: Sequence[Choice], put: Callable[[Any], int]
) -> None:
    """Fills the table, int64[rows, WORDS].

    Args:
        logits: address of each row.
        put: brings an array to the card; its address there.
    """
    table[:, MASK:GREEDY] = 0
    table[:, LOGITS] = logits
    table[:, GREEDY] = [choice.opts.is_greedy for choice in choices]
    table[:, FIRST_NUMBER:] = np.array([choice.numbers for choice in choices]).view(np.int64)
    for line, choice in zip(table, choices, strict=True):
        if (mask := choice.mask) is not None:
            line[MASK], line[MASKED] = put(mask), len(mask)
        if (changes := choice.changes) is not None:
            line[IDS], line[COUNTS], line[AMOUNTS] = map(put, changes)
            line[CHANGES] = len(changes.ids)
