"""The block of i32 that the card keeps for a loop of steps.

How many tokens were found, how many there are to stop at, the number of rows of the embedding table, `STOPS` tokens to
stop at, then the tokens found; behind them, as f64, a random number for each step.
"""

from __future__ import annotations

COUNT, STOP_COUNT, TABLE = range(3)
STOPS, STOPS_AT = 64, 3
FOUND_AT = STOPS_AT + STOPS
STEPS = 32  # of a loop between two looks at its tokens
NUMBERS_AT = (FOUND_AT + STEPS + 1) // 2  # in numbers of 8 bytes
NBYTES = 8 * (NUMBERS_AT + STEPS)
