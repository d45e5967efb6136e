"""The sampling options that a model's files recommend, as `SampleOpts`.

Weights stage, over the open file. For safetensors this reads `generation_config.json`, with the meaning that
transformers gives it; for GGUF the keys `general.sampling.*`, whose names are llama.cpp's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from rlx.errors import SamplingError
from rlx.sampling.options import SampleOpts
from rlx.weights.loader import WeightLoader

_GGUF = "general.sampling."
_GGUF_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "penalty_last_n": "repetition_window",
    "penalty_repeat": "repetition_penalty",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}
_HF_KEYS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_HF_PENALTIES = ("repetition_penalty",)  # apply without `do_sample` too
_HF_TOP_K = 50  # the default of transformers
_WHOLE_CONTEXT = -1  # as a window, in llama.cpp


def recommended(loader: WeightLoader) -> SampleOpts | None:
    """The options that the model's files recommend; None without a recommendation, or if it is plain greedy.

    A value out of its range is ignored with a warning: a recommendation is no reason to refuse a model.
    """
    if loader.format == "gguf":
        return _from_gguf(loader.metadata, str(loader.path))
    folder = loader.path if loader.path.is_dir() else loader.path.parent
    return _from_transformers(getattr(loader, "generation_config", {}), f"{folder}/generation_config.json")


def gguf_keys(opts: SampleOpts) -> dict[str, int | float]:
    """The keys of a GGUF file that recommend `opts`, without those that have no effect.

    The format has no key for options that are missing in `_GGUF_KEYS`, such as `typical_p`.
    """
    off = SampleOpts()
    values = {key: getattr(opts, name) for key, name in _GGUF_KEYS.items()}
    values["penalty_last_n"] = _WHOLE_CONTEXT if opts.repetition_window is None else opts.repetition_window
    changed = {key for key, name in _GGUF_KEYS.items() if getattr(opts, name) != getattr(off, name)} | {"temp"}
    return {_GGUF + key: value for key, value in values.items() if key in changed}


def _from_gguf(metadata: Mapping[str, Any], where: str) -> SampleOpts | None:
    settings = {name: metadata[_GGUF + key] for key, name in _GGUF_KEYS.items() if _GGUF + key in metadata}
    if settings.get("repetition_window") == _WHOLE_CONTEXT:
        settings["repetition_window"] = None
    found = dict(_valid(settings, where))
    return SampleOpts(**found) if found else None


def _from_transformers(config: Mapping[str, Any], where: str) -> SampleOpts | None:
    """Without `do_sample`, transformers is greedy whatever the other keys say, but applies the penalty."""
    draws = config.get("do_sample") is True
    names = _HF_KEYS if draws else _HF_PENALTIES
    found = dict(_valid({name: config[name] for name in names if config.get(name) is not None}, where))
    if draws:
        found.setdefault("top_k", _HF_TOP_K)
    elif found.get("repetition_penalty", 1) == 1:
        return None
    else:
        found["temperature"] = 0
    return SampleOpts(**found, repetition_window=None)


def _valid(settings: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """The values within their ranges; the others cause a warning."""
    for name, value in settings.items():
        try:
            SampleOpts(**{name: value})
        except SamplingError as error:
            warnings.warn(f"{where}: the recommended {error.what}; it is ignored", stacklevel=4)
        else:
            yield name, value
