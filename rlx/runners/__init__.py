"""Runners: a model as something that answers. Between the native programs and the command line.

`base.py` says what every runner offers, `engine/` holds a model's programs, weights and caches, `serving/` drives it
for any number of callers, `families.py` names the runners, `auto.py` picks one for a path. Names are imported when they
are first used, so that the command line can read `opening/options.py` quickly.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlx.runners.auto import auto_runner
    from rlx.runners.base import LmRunner
    from rlx.runners.cached import CachedRunner
    from rlx.runners.families import GemmaRunner, Llama32Runner, Qwen3Runner, Qwen35Runner
    from rlx.runners.generation.output import Generation, Step, TokenLogprob
    from rlx.runners.generation.request import Request
    from rlx.runners.generation.stopping import FinishReason, Stopping
    from rlx.runners.serving.handle import Handle, Stream
    from rlx.runners.serving.request_stats import RequestStats
    from rlx.runners.text_runner import Answer, TextRunner

#: Module -> its public names.
_HOMES = {
    "rlx.runners.auto": ("auto_runner",),
    "rlx.runners.base": ("LmRunner",),
    "rlx.runners.cached": ("CachedRunner",),
    "rlx.runners.families": ("GemmaRunner", "Llama32Runner", "Qwen3Runner", "Qwen35Runner"),
    "rlx.runners.generation.output": ("Generation", "Step", "TokenLogprob"),
    "rlx.runners.generation.request": ("Request",),
    "rlx.runners.generation.stopping": ("FinishReason", "Stopping"),
    "rlx.runners.serving.handle": ("Handle", "Stream"),
    "rlx.runners.serving.request_stats": ("RequestStats",),
    "rlx.runners.text_runner": ("Answer", "TextRunner"),
}

__all__ = [
    "Answer",
    "CachedRunner",
    "FinishReason",
    "GemmaRunner",
    "Generation",
    "Handle",
    "Llama32Runner",
    "LmRunner",
    "Qwen3Runner",
    "Qwen35Runner",
    "Request",
    "RequestStats",
    "Step",
    "Stopping",
    "Stream",
    "TextRunner",
    "TokenLogprob",
    "auto_runner",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'rlx.runners' has no attribute {name!r}")
