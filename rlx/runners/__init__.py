"""Runners: a model as something that answers. Between the native programs and the command line.

`base.py` says what every runner offers, `model.py` is a model over an engine, `auto.py` picks the class for a path.
The engine below holds a model's programs, weights and caches. Names are imported when they are first used, so that the
command line can read the options quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlx.engine.loop.handle import Handle, Stream
    from rlx.engine.request.output import Generation, Step, TokenLogprob
    from rlx.engine.request.record import RequestStats
    from rlx.engine.request.request import Request
    from rlx.engine.request.stopping import FinishReason
    from rlx.runners.auto import GemmaRunner, Llama32Runner, Qwen3Runner, Qwen35Runner, auto_runner
    from rlx.runners.base import LmRunner
    from rlx.runners.encoder import EncoderRunner
    from rlx.runners.model import Model
    from rlx.runners.text import Answer

    CachedRunner = Model
    TextRunner = Model

#: Module -> its public names.
_HOMES = {
    "rlx.runners.auto": ("GemmaRunner", "Llama32Runner", "Qwen3Runner", "Qwen35Runner", "auto_runner"),
    "rlx.runners.base": ("LmRunner",),
    "rlx.runners.encoder": ("EncoderRunner",),
    "rlx.runners.model": ("Model",),
    "rlx.engine.request.output": ("Generation", "Step", "TokenLogprob"),
    "rlx.engine.request.request": ("Request",),
    "rlx.engine.request.stopping": ("FinishReason",),
    "rlx.engine.loop.handle": ("Handle", "Stream"),
    "rlx.engine.request.record": ("RequestStats",),
    "rlx.runners.text": ("Answer",),
}

__all__ = [
    "Answer",
    "CachedRunner",
    "EncoderRunner",
    "FinishReason",
    "GemmaRunner",
    "Generation",
    "Handle",
    "Llama32Runner",
    "LmRunner",
    "Model",
    "Qwen3Runner",
    "Qwen35Runner",
    "Request",
    "RequestStats",
    "Step",
    "Stream",
    "TextRunner",
    "TokenLogprob",
    "auto_runner",
]


_ALIASES = {"CachedRunner": "Model", "TextRunner": "Model"}


def __getattr__(name: str) -> Any:
    name = _ALIASES.get(name, name)
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'rlx.runners' has no attribute {name!r}")
