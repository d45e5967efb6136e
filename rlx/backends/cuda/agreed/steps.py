"""What the host gives every kernel of a step: symbols, and how blocks share rows of attention."""

from __future__ import annotations

THREADS = 256  # of a block
LINE = 128  # bytes of a line of the card's cache

MOST_CARDS = 8  # that compute together
PEERS_AT = 16  # place among the extents, as i64, of the distances in memory to the other cards

MANY_ROWS = 64  # programs of more rows have other kernels
#: Of attention of few rows: ranges of positions of a row at most, and the positions of which the size of a range is a
#: multiple.
RANGES, POSITIONS = 32, 64

#: Symbols that programs add: ranges of a row of attention that there is memory for, and about how many positions a
#: block has that shares a row.
SPLITS, EACH = "SPLITS", "EACH"
#: How many blocks share a row; only the host asks.
SHARING = "SHARING"
#: 0 after the last step of a loop, so that states stay as they are; else 1.
RUNS = "RUNS"
#: The number of the card among those that compute together.
CARD = "CARD"
ADDED = (SPLITS, EACH, RUNS, CARD)
