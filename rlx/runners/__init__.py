"""Runners: a model as something that answers. Between the native programs and the command line.

`stopping.py` says when it is enough, `base.py` what every runner offers, `programs.py` is the table of a model's
programs, `engine.py` holds them with weights and caches, `cached.py` drives it a token at a time, `families.py` names
the runners, `auto.py` picks one for a path. Importing this package loads neither the compiler nor the engine.
"""

from rlx.runners.auto import auto_runner
from rlx.runners.base import LmRunner
from rlx.runners.cached import CachedRunner
from rlx.runners.families import GemmaRunner, Llama32Runner, Qwen3Runner, Qwen35Runner
from rlx.runners.generation.requests import Generation, Step, Stream, TokenLogprob
from rlx.runners.generation.stopping import FinishReason, Stopping
from rlx.runners.text_runner import Answer, TextRunner

__all__ = [
    "Answer",
    "CachedRunner",
    "FinishReason",
    "GemmaRunner",
    "Generation",
    "Llama32Runner",
    "LmRunner",
    "Qwen3Runner",
    "Qwen35Runner",
    "Step",
    "Stopping",
    "Stream",
    "TextRunner",
    "TokenLogprob",
    "auto_runner",
]
