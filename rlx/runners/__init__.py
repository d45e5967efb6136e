"""Runners: a model as something that answers. Between the native programs and the command line.

`stopping.py` says when it is enough, `base.py` what every runner offers, `programs.py` is the table of a model's
programs, `engine.py` holds them with weights and caches, `cached.py` drives it a token at a time, `families.py` names
the runners, `auto.py` picks one for a path. Names are imported when they are first used, so that the command line can
read `opening/options.py` quickly.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlx.runners.auto import auto_runner
    from rlx.runners.base import LmRunner
    from rlx.runners.cached import CachedRunner
    from rlx.runners.families import GemmaRunner, Llama32Runner, Qwen3Runner, Qwen35Runner
    from rlx.runners.generation.requests import Generation, Step, Stream, TokenLogprob
    from rlx.runners.generation.stopping import FinishReason, Stopping
    from rlx.runners.text_runner import Answer, TextRunner

#: Module -> its public names.
_HOMES = {
    "rlx.runners.auto": ("auto_runner",),
    "rlx.runners.base": ("LmRunner",),
    "rlx.runners.cached": ("CachedRunner",),
    "rlx.runners.families": ("GemmaRunner", "Llama32Runner", "Qwen3Runner", "Qwen35Runner"),
    "rlx.runners.generation.requests": ("Generation", "Step", "Stream", "TokenLogprob"),
    "rlx.runners.generation.stopping": ("FinishReason", "Stopping"),
    "rlx.runners.text_runner": ("Answer", "TextRunner"),
}

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


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'rlx.runners' has no attribute {name!r}")
