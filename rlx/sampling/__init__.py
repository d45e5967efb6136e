"""Sampling stage: the last row of logits -> the next token.

`options.py` says what may be asked for, `recommended.py` what the makers of a model ask for. `sampler.py` chooses:
`penalties.py` changes logits first, `filters.py` and `mirostat.py` say which tokens are left.
"""

from rlx.sampling.options import SampleOpts
from rlx.sampling.sampler import Sampler

__all__ = ["SampleOpts", "Sampler"]
