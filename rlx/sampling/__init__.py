"""Sampling stage: the last row of logits -> the next token.

`options.py` defines the options. `sampler.py` keeps the state of a generation, `penalties.py` finds what changes
logits. `choice.py` is what a device is asked for each token and what that means, over the filters of `filters.py`.
"""

from rlx.sampling.options import SampleOpts
from rlx.sampling.sampler import Sampler

__all__ = ["SampleOpts", "Sampler"]
