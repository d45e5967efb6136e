"""Checks of arguments: unknown keywords, names that are close to what was written, whole numbers, flags, texts, paths
and functions.

Every part may ask this module. Public functions are wrapped in `known_arguments`; functions that hand options on use
`check_arguments`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from math import inf
from numbers import Integral
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rlx.errors import ArgumentError, UnknownArgumentError

CUTOFF = 0.6  # similarity from which on a name is suggested; 1 is equal
LONGEST = 256  # characters of a name that are compared


def nearest(name: object, known: Collection[str], most: int = 1, cutoff: float = CUTOFF) -> list[str]:
    """The known names that are spelled most like `name`, the nearest first; at most `most`."""
    return get_close_matches(str(name)[:LONGEST], known, most, cutoff)  # its time grows with the length of the name


def did_you_mean(
    name: object,
    known: Collection[str],
    *,
    shown: Callable[[str], str] = repr,
    most: int = 1,
    otherwise: str | None = None,
) -> str:
    """The hint for an unknown name: "did you mean 'x'?", or "there is a, b" where no known name is near.

    Args:
        shown: how a suggested name is written.
        most: maximum number of suggestions.
        otherwise: the hint in place of the list of all known names.
    """
    found = nearest(name, known, most)
    if found:
        return f"did you mean {' or '.join(map(shown, found))}?"
    return f"there is {', '.join(known)}" if otherwise is None else otherwise


P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

_COUNT = ("n_new", "max_tokens", "n")

#: Names in llama.cpp's, transformers', vLLM's, Ollama's, OpenAI's and mlx-lm's interfaces -> ours. Of several the first
#: that a function has.
SYNONYMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("model", "model_path", "model_name", "model_id", "pretrained_model_name_or_path"), ("path",)),
    **dict.fromkeys(("weights_path", "filename", "file"), ("path",)),
    **dict.fromkeys(("weights", "params", "parameters", "constants", "symbols", "shapes"), ("path", "bind")),
    **dict.fromkeys(("n_ctx", "num_ctx", "ctx_size", "context_length", "context_size"), ("max_seq",)),
    **dict.fromkeys(("max_model_len", "max_length", "max_context", "max_seq_len", "max_kv_size"), ("max_seq",)),
    **dict.fromkeys(("n_threads", "num_threads", "num_thread", "nthreads", "workers"), ("threads",)),
    **dict.fromkeys(("type_k", "type_v", "cache_type_k", "cache_type_v", "kv_cache_dtype", "kv_bits"), ("kv_dtype",)),
    **dict.fromkeys(("dtype", "torch_dtype", "compute_type", "quantization"), ("precision",)),
    **dict.fromkeys(("device_map", "backend"), ("device",)),
    **dict.fromkeys(("speculative_decoding", "draft_model", "prompt_lookup_num_tokens"), ("speculative",)),
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens", "max_completion_tokens"), _COUNT),
    **dict.fromkeys(("max_tokens", "n_new", "n_tokens", "num_tokens", "n"), _COUNT),
    **dict.fromkeys(("min_new_tokens", "min_length"), ("min_tokens",)),
    **dict.fromkeys(("prompt_ids", "input_ids", "tokens", "token_ids", "prompt_tokens"), ("ids", "prompts")),
    **dict.fromkeys(("prompt", "text", "inputs"), ("ids", "prompt", "prompts")),
    **dict.fromkeys(("prompt_list", "batch", "ids"), ("prompts", "ids", "messages")),
    **dict.fromkeys(("callback", "streamer", "token_callback", "progress_callback"), ("on_token", "progress")),
    **dict.fromkeys(("stop_strings", "stop_sequences", "stop_words", "stop_sequence"), ("stop",)),
    **dict.fromkeys(("sampler", "sampling", "sampling_params", "opts", "sample_opts"), ("sample",)),
    **dict.fromkeys(("n_probs", "logprobs", "num_logprobs"), ("top_logprobs",)),
    **dict.fromkeys(("enable_thinking", "think", "reasoning"), ("thinking",)),
    **dict.fromkeys(("functions",), ("tools",)),
    **dict.fromkeys(("response_format", "guided_json", "schema", "response_model", "format"), ("json_schema",)),
    **dict.fromkeys(("guided_grammar", "guided_regex", "guided_choice", "structured_outputs"), ("grammar",)),
    **dict.fromkeys(("logits_all", "all_logits"), ("all_positions",)),
    **dict.fromkeys(("temp",), ("temperature",)),
    **dict.fromkeys(("repeat_penalty", "rep_pen", "penalty_repeat"), ("repetition_penalty",)),
    **dict.fromkeys(("repeat_last_n", "penalty_last_n", "repetition_context_size"), ("repetition_window",)),
    **dict.fromkeys(("typical", "tfs_z"), ("typical_p",)),
    **dict.fromkeys(("random_seed", "random_state", "rng_seed"), ("seed",)),
    "mirostat_mode": ("mirostat",),
}

#: Options of `SampleOpts`, which adds them; a function with `sample` takes them inside one.
SAMPLING: set[str] = set()
#: What others have and rlx has not, with what to do.
NOTES: dict[str, str] = {
    **dict.fromkeys(("n_gpu_layers", "gpu_layers", "num_gpu", "main_gpu", "tensor_split"), "`device` has all layers"),
    **dict.fromkeys(("n_batch", "n_ubatch", "batch_size"), "a compile profile has the sizes: [buckets] seq"),
    **dict.fromkeys(("use_mmap", "mmap", "use_mlock", "low_cpu_mem_usage"), "model files are always mapped"),
    **dict.fromkeys(("flash_attn", "attn_implementation", "use_cache"), "rlx always does it"),
    **dict.fromkeys(("trust_remote_code", "token", "revision"), "rlx runs no code of a model and opens local files"),
    "do_sample": "tokens are drawn with sample=SampleOpts(temperature=...), and greedily without",
    "num_return_sequences": "generate_batch([ids] * n, ...) gives several answers",
    "stream": "the methods stream, chat_stream and complete_stream give tokens as they come",
    "verbose": "set RLX_DEBUG to see more",
}


def known_arguments(
    function: Callable[P, R], opening: Collection[str] = (), options: Sequence[Parameter] = ()
) -> Callable[P, R]:
    """`function`, which for an unknown keyword raises an `UnknownArgumentError` that names the right one.

    Args:
        opening: options that are given when a model is opened.
        options: what its `**options` stands for; the signature of the result has them.
    """
    code = getattr(function, "__code__")  # noqa: B009 - callables in general have none
    names = (*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *(each.name for each in options))
    known, where = frozenset(names), function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def checked(*arguments: P.args, **given: P.kwargs) -> R:
        if not given.keys() <= known:
            check_arguments(where, given, names, opening)
        return function(*arguments, **given)

    if options:
        own = signature(function)
        named = [each for each in own.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        checked.__signature__ = own.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return checked


def known_fields(cls: C) -> C:
    """A dataclass whose constructor is wrapped in `known_arguments`."""
    cls.__init__ = known_arguments(cls.__init__)  # type: ignore[misc]
    return cls


def check_arguments(where: str, options: Iterable[str], known: Collection[str], opening: Collection[str] = ()) -> None:
    """Raises an `UnknownArgumentError` for the first of `options` that is not among `known`.

    Args:
        opening: as for `known_arguments`.
    """
    for name in options:
        if name not in known:
            hint = _advice(name, [other for other in known if other != "self"], opening)
            raise UnknownArgumentError(f"there is no argument {name!r}", where=where, hint=hint)


def _advice(name: str, known: list[str], opening: Collection[str]) -> str:
    ours = SYNONYMS.get(name, (name,))
    for other in ours:
        if other in known:
            return f"use {other}="
    if sampling := [other for other in ours if other in SAMPLING and "sample" in known]:
        return f"use sample=SampleOpts({sampling[0]}=...)"
    if early := [other for other in ours if other in opening]:
        return f"give {early[0]}= when the model is opened, as in rlx.auto_runner(path, {early[0]}=...)"
    if name in NOTES:
        return f"leave it out: {NOTES[name]}"
    return did_you_mean(name, known, shown="{}=".format)


def bound(where: str, arguments: Sequence[Any], options: Mapping[str, Any], *orders: Sequence[str]) -> dict[str, Any]:
    """Positional arguments by name, together with `options`.

    Args:
        orders: tuples of argument names, rlx's own order first; the first that is long enough applies.

    Raises:
        ArgumentError: too many arguments, one is given twice, or the first of rlx's own order is missing.
    """
    names = next((order for order in orders if len(arguments) <= len(order)), None)
    ways = " or ".join(f"({', '.join(order)})" for order in orders)
    if names is None:
        raise ArgumentError(f"{len(arguments)} arguments, expected {ways}", where=where)
    found = dict(zip(names, arguments, strict=False))
    if twice := found.keys() & options.keys():
        raise ArgumentError(f"{min(twice)} is given twice", where=where, hint=f"the order is {ways}")
    found |= options
    if orders[0][0] not in found:
        raise ArgumentError(f"{orders[0][0]} is missing", where=where, hint=f"give {ways}")
    return found


def whole(name: str, value: Any, least: int, most: int) -> int:
    """`value` as an int.

    Raises:
        ArgumentError: it is not a whole number from `least` to `most`.
    """
    number = int(value) if not isinstance(value, bool) and isinstance(value, Integral) else None
    if number is None or not least <= number <= most:
        raise ArgumentError(f"{name} is {value!r}, expected a whole number from {least} to {most}")
    return number


def flag(name: str, value: Any) -> bool:
    """`value` as a bool.

    Raises:
        ArgumentError: it is neither True nor False, nor 1 nor 0: the text "false" would count as True.
    """
    try:
        return bool((False, True).index(value))
    except ValueError:  # arrays, too, have no one truth
        raise ArgumentError(f"{name} is {value!r}, expected True or False") from None


def as_float(value: Any) -> float:
    """The float nearest to a number: an infinite one beyond the largest."""
    try:
        return float(value)
    except OverflowError:
        return inf if value > 0 else -inf


def text(name: str, value: Any) -> str:
    """`value`, which is a text; else `ArgumentError`."""
    if not isinstance(value, str):
        raise ArgumentError(f"expected a text, found a {type(value).__name__}", where=name)
    return value


def path(name: str, value: Any) -> Path:
    """`value` as a path; `~` is the home folder.

    Raises:
        ArgumentError: it is no path, or has characters that no file's name has.
    """
    if not isinstance(value, str | os.PathLike) or isinstance(found := os.fspath(value), bytes):
        raise ArgumentError(f"expected a path, found a {type(value).__name__}", where=name)
    try:
        if b"\0" in os.fsencode(found):
            raise ValueError
        return Path(found).expanduser()
    except (ValueError, RuntimeError) as error:  # half a surrogate pair, NUL, or no home folder
        raise ArgumentError(f"{found!r} is no path on this system", where=name) from error


def no_path(owner: type, value: Any) -> None:
    """Refuses a path where an opened model is expected: `Qwen3Runner("model.gguf")`."""
    if isinstance(value, str | os.PathLike):
        hint = f"Write {owner.__name__}.from_path({os.fspath(value)!r})."
        raise ArgumentError("a path is opened by from_path", where=owner.__name__, hint=hint)


def function(name: str, value: Any) -> Any:
    """`value`, which can be called; else `ArgumentError`."""
    if not callable(value):
        raise ArgumentError(f"expected a function, found a {type(value).__name__}", where=name)
    return value


def several(name: str, values: Any, what: str = "texts") -> list[Any]:
    """`values` as a list.

    Raises:
        ArgumentError: they are none: one text, a mapping, or nothing that can be iterated over.
    """
    if not can_iterate(values):
        raise ArgumentError(f"expected a list of {what}, found a {type(values).__name__}", where=name)
    return list(values)


def can_iterate(values: Any) -> bool:
    """Whether these are several values: no text, no mapping, no array without dimensions."""
    is_one = isinstance(values, str | bytes | Mapping) or getattr(values, "ndim", 1) == 0
    return not is_one and isinstance(values, Iterable)


def without_none(**values: Any) -> dict[str, Any]:
    """The arguments that are not None."""
    return {name: value for name, value in values.items() if value is not None}
