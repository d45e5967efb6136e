"""Sampling stage: the last row of logits -> the next token.

`options.py` defines the options, and `recommended.py` reads those that a model's files recommend. `sampler.py` chooses
a token: `penalties.py` changes logits first, then `filters.py` or `mirostat.py` select the tokens to draw from.
"""

from rlx.sampling.options import SampleOpts
from rlx.sampling.sampler import Sampler

__all__ = ["SampleOpts", "Sampler"]
