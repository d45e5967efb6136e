"""Runners: a model as something that answers. Between the native programs and the command line.

`base.py` says what every runner offers, `model.py` is a model over an engine, `auto.py` picks the class for a path.
The engine below holds a model's programs, weights and caches. Names are imported when they are first used, so that the
command line can read the options quickly.
"""

from typing import TYPE_CHECKING

from rlx.lazy import names_of

if TYPE_CHECKING:
    from rlx.engine.loop.handle import Generation, Handle, Step, Stream, TokenLogprob
    from rlx.engine.loop.record import RequestStats
    from rlx.engine.request import FinishReason, Request
    from rlx.runners import builder as builder
    from rlx.runners import media as media
    from rlx.runners import text as text
    from rlx.runners.auto import GemmaRunner, Llama32Runner, Qwen3Runner, Qwen35Runner, auto_runner
    from rlx.runners.base import LmRunner
    from rlx.runners.encoder import EncoderRunner
    from rlx.runners.model import Model
    from rlx.runners.text import Answer
    from rlx.text import rerank as rerank

#: Public names -> the module that has them.
_HOMES = {
    **dict.fromkeys(("GemmaRunner", "Llama32Runner", "Qwen3Runner", "Qwen35Runner", "auto_runner"), "rlx.runners.auto"),
    "LmRunner": "rlx.runners.base",
    "EncoderRunner": "rlx.runners.encoder",
    "Model": "rlx.runners.model",
    **dict.fromkeys(("Generation", "Step", "TokenLogprob"), "rlx.engine.loop.handle"),
    "Request": "rlx.engine.request",
    "FinishReason": "rlx.engine.request",
    **dict.fromkeys(("Handle", "Stream"), "rlx.engine.loop.handle"),
    "RequestStats": "rlx.engine.loop.record",
    "Answer": "rlx.runners.text",
}

__all__ = [
    "Answer",
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
    "TokenLogprob",
    "auto_runner",
]

#: Parts of `Model` that most programs do not need: conversations, images, the order of documents.
_PARTS = {name: f"rlx.runners.{name}" for name in ("builder", "media", "text")} | {"rerank": "rlx.text.rerank"}

__getattr__ = names_of("rlx.runners", {**_HOMES, **_PARTS})
