"""Sampling stage: the last row of logits -> the next token.

`options.py` defines the options, and `penalties.py` finds what changes logits. `choice.py` has the state of a
generation, what a device is asked for each token, and what that means, over the filters of `filters.py`.
"""

from rlx.sampling.choice import Sampler
from rlx.sampling.options import SampleOpts

__all__ = ["SampleOpts", "Sampler"]
