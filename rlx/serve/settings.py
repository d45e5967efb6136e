"""The options of a generation under llama-server's names: defaults for `/props`, those of an answer for `/completion`.

Server stage, below the APIs.
"""

from __future__ import annotations

from dataclasses import fields
from math import isinf
from typing import TYPE_CHECKING, Any

from rlx.sampling import SampleOpts

if TYPE_CHECKING:
    from rlx.serve.generation import GenerationSpec
    from rlx.serve.model import ServedModel


def sampling_settings(opts: SampleOpts) -> dict[str, Any]:
    """Sampling options under their own names, and under llama-server's where those differ. -1 is a whole context."""
    found = {each.name: getattr(opts, each.name) for each in fields(opts) if each.name != "logit_bias"}
    window = -1 if opts.repetition_window is None else opts.repetition_window
    return {**found, "repeat_penalty": opts.repetition_penalty, "repeat_last_n": window}


def settings(model: ServedModel, spec: GenerationSpec, is_stream: bool) -> dict[str, Any]:
    """What an answer was generated with."""
    limit, grammar = model.limit(spec.max_tokens), spec.grammar
    return {
        **sampling_settings(spec.sample),
        "logit_bias": [{"token": i, "bias": None if isinf(bias) else bias} for i, bias in _biases(spec.sample)],
        "n_predict": -1 if limit is None else limit,
        "max_tokens": -1 if limit is None else limit,
        "n_ctx": model.runner.max_seq,
        "n_keep": 0,
        "n_discard": 0,
        "n_probs": spec.top_logprobs or 0,
        "min_tokens": spec.min_tokens,
        "min_keep": 0,
        "ignore_eos": spec.ignore_eos,
        "stop": list(spec.stop),
        "stream": is_stream,
        "grammar": "" if grammar is None else grammar.text,
    }


def _biases(opts: SampleOpts) -> list[tuple[int, float]]:
    return list(opts.logit_bias)  # type: ignore[arg-type]  # it is stored as pairs
