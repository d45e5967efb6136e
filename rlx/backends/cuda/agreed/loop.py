"""The block that the card keeps for a run of steps, and the tokens that it tells the host.

First, as i32, the number of rows of the embedding table, and how many steps were done. Then what the card knows of each
row, `ROW_BYTES` bytes: how many tokens it may still get, how many tokens there are to stop at, and which; behind them,
as f64, a random number for each step.

The tokens of the last `STEPS` steps lie in memory that the host sees, i32 [STEPS, rows].
"""

from __future__ import annotations

TABLE, DONE = range(2)
HEAD_BYTES = 8

LEFT, STOP_COUNT = range(2)
STOPS, STOPS_AT = 62, 2
STEPS = 32  # of a run at most; and of the host's memory for tokens
NUMBERS_AT = (STOPS_AT + STOPS) // 2  # in numbers of 8 bytes
ROW_BYTES = 8 * (NUMBERS_AT + STEPS)
