"""Ollama's `options` as sampling options and as what ends an answer.

Server stage. Options that say how a model is loaded are decided when the server starts: they are hints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rlx.sampling import SampleOpts
from rlx.serve import record
from rlx.serve.builders import changed_sample
from rlx.serve.errors import invalid
from rlx.serve.fields import MAX_BREAKERS, MAX_STOPS, is_one_of, shown, unknown_field

_RENAMED = {"repeat_penalty": "repetition_penalty", "repeat_last_n": "repetition_window"}
_NAMES = {field.name: f"options.{field.name}" for field in fields(SampleOpts)}
_NAMES |= {own: f"options.{name}" for name, own in _RENAMED.items()}
_OWN = {field.name for field in fields(SampleOpts)} - {"logit_bias"}
_COUNTS = {"top_k", "seed", "repetition_window", "mirostat", "dry_allowed_length", "dry_penalty_last_n"}

#: Options of how a model is loaded and computed, which change no answer -> values that ask for what is so anyway.
_HINTS: dict[str, tuple[Any, ...]] = {
    "num_gpu": (0, -1),
    "main_gpu": (0,),
    "low_vram": (True, False),
    "use_mmap": (True,),
    "use_mlock": (False,),
    "numa": (False,),
    "num_batch": (),
    "num_thread": (0,),
    "num_keep": (0,),  # of a prompt that is cut: messages go as a whole
    "f16_kv": (True,),
    "logits_all": (False,),
}
#: Options that would change answers -> the value that changes nothing, and the way out for others.
_FIXED: dict[str, tuple[Any, str]] = {
    "vocab_only": (False, "the model is loaded"),
    "embedding_only": (False, "the model is loaded"),
    "penalize_newline": (True, "line breaks are penalized like other tokens"),
    "tfs_z": (1, "give `min_p` or `top_n_sigma` instead"),
}


@dataclass(frozen=True)
class Options:
    """What Ollama's `options` say.

    Attributes:
        sample: the sampling options.
        max_tokens: maximum number of tokens; None for what the context has room for.
        stop: strings that end the answer.
    """

    sample: SampleOpts
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


def options_of(options: Mapping[str, Any] | None, default: SampleOpts, context: int) -> Options:
    """The options of a request.

    Args:
        default: what options that are missing stand for.
        context: number of tokens that the context holds.

    Raises:
        ApiError: an option is unknown, out of its range, or asks for what the server does not do.
    """
    changes: dict[str, Any] = {}
    most: int | None = None
    stop: tuple[str, ...] = ()
    for name, value in (options or {}).items():
        field = f"options.{name}"
        if value is None:
            continue
        if name == "num_predict":
            most = _max_tokens(value, field)
        elif name == "stop":
            stop = _stops(value, field)
        elif name == "num_ctx":
            _check_context(value, context, field)
        elif name in _HINTS:
            if not is_one_of(value, _HINTS[name]):
                record.ignore(field)
        elif name in _FIXED:
            _check_fixed(name, value, field)
        elif (own := _RENAMED.get(name, name)) in _OWN:
            changes[own] = _converted(own, value, field)
        else:
            known = (*_OWN, *_RENAMED, *_HINTS, *_FIXED, "num_predict", "num_ctx", "stop")
            raise unknown_field(field, [f"options.{each}" for each in known])
    return Options(changed_sample(default, changes, _NAMES), most, stop)


def _converted(name: str, value: Any, field: str) -> Any:
    if name == "dry_sequence_breakers":
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise invalid(field, f"expected an array of strings, found {shown(value)}")
        if len(value) > MAX_BREAKERS:
            raise invalid(field, f"expected at most {MAX_BREAKERS} strings, found {len(value)}")
        return tuple(value)
    kinds, expected = (int, "an integer") if name in _COUNTS else ((int, float), "a number")
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise invalid(field, f"expected {expected}, found {shown(value)}")
    if name == "seed":
        return None if value == -1 else value % 2**64
    if name in ("repetition_window", "dry_penalty_last_n"):
        return None if value < 0 else value
    return max(0, value) if name == "top_k" else value


def _max_tokens(value: Any, field: str) -> int | None:
    """The maximum number of tokens; Ollama writes -1 and -2 for no limit but the context."""
    if isinstance(value, bool) or not isinstance(value, int) or value < -2:
        raise invalid(field, f"expected an integer of at least 0, or -1, found {shown(value)}")
    return None if value < 0 else value


def _stops(value: Any, field: str) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > MAX_STOPS or not all(isinstance(t, str) and t for t in texts):
        raise invalid(field, f"expected at most {MAX_STOPS} strings that are not empty, found {shown(value)}")
    return tuple(texts)


def _check_context(value: Any, context: int, field: str) -> None:
    """A larger context than there is, which many clients always ask for, is a hint: what fits is answered."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise invalid(field, f"expected an integer, found {shown(value)}")
    if value > context:
        record.ignore(field)


def _check_fixed(name: str, value: Any, field: str) -> None:
    same, way_out = _FIXED[name]
    if value != same:
        raise invalid(field, f"{shown(value)} is not what the server does, and a request cannot change it", way_out)
