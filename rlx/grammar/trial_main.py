"""The program of the process that tries grammars: compiles one, and takes its first steps.

Grammar stage, started by `trial.py` through `rlx.text.confined`. It imports nothing of rlx. llguidance ends its process
where rules or references are nested deeper than its stack, and its own limits do not hold everywhere: an intersection
of expressions may take any time and memory. Here that ends this process, and one request gets an error.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import RepetitionNode, gbnf_to_lark

#: Lark has no `"a"**`: a repetition of a repetition needs its brackets, which the package leaves out.
RepetitionNode.is_atomic = lambda self: False  # type: ignore[method-assign]

_WALKS, _STEPS, _SECONDS = 3, 24, 0.05  # of the trial, after the first mask
_NO_TOKENIZER = "no tokenizer"
_LONGEST = 40  # bytes of a token
_CONTROL = 256 + _LONGEST  # the id that stands for every control token
#: Control tokens in Lark's syntax, by name or id. Nothing that costs time can stand between these brackets.
_NAMED = re.compile(r"<[\w|/:.\-\uff5c\u2581]{1,64}>|<\[[0-9,^\-]{1,200}\]>")
_PATTERN = re.compile(r'"pattern"\s*:\s*("(?:[^"\\]|\\.)*")')
_LITERAL = re.compile(r"/((?:[^/\\\n]|\\.)+)/")
_GRAMMARS = {"json_schema": "grammar_from_json_schema", "regex": "grammar_from_regex", "lark": "grammar_from_lark"}


class _Tokens:
    """A small vocabulary: all bytes, a longer token of each length, a control token, and the end."""

    bos_token_id = None

    def __init__(self) -> None:
        longer = [b"a" * size for size in range(2, _LONGEST + 2)]
        self.tokens = [*(bytes([i]) for i in range(256)), *longer, b"<control>", b"<end>"]
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = [_CONTROL, self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def _tokenizer(slices: tuple[str, ...]) -> Any:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens()), slices=list(slices))


def prepare() -> None:
    """Makes the usual tokenizer: afterwards the process can open no file."""
    _tokenizer(())


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Tries a grammar.

    Args:
        request: `kind` and `text`, `options` of a JSON schema, `limits` and `slices` as in the main process. The kind
            `gbnf` is only translated to Lark.

    Returns:
        `error`, "" if there is none; `warnings`; `seconds` of CPU time; for GBNF `text`.
    """
    start = time.process_time()
    if request["kind"] == "gbnf":
        return _translated(request["text"])
    make: Callable[..., str] = getattr(llguidance.LLMatcher, _GRAMMARS[request["kind"]])
    options = {"overrides": request["options"]} if request["kind"] == "json_schema" else {}
    try:
        source = make(request["text"], **options)
    except ValueError as refused:
        return {"error": str(refused), "warnings": [], "seconds": 0.0}
    limits = llguidance.LLParserLimits(**request["limits"])
    is_error, texts = llguidance.LLMatcher.validate_grammar_with_warnings(source, None, limits=limits)
    error = texts[0] if is_error else _first_mask(make, request, options, limits)
    warnings = [] if is_error else [text for text in texts if not text.startswith(_NO_TOKENIZER)]
    return {"error": error, "warnings": warnings, "seconds": time.process_time() - start}


def _translated(text: str) -> dict[str, Any]:
    try:
        return {"error": "", "text": gbnf_to_lark(text)}
    except RecursionError:
        return {"error": "its brackets are too deep"}
    except Exception as error:  # the package raises `Exception` itself
        return {"error": str(error)}


def _first_mask(make: Callable[..., str], request: dict[str, Any], options: dict[str, Any], limits: Any) -> str:
    """Compiles for the small vocabulary and computes masks; returns the error of the first ones.

    Each regular expression is tried by itself, too, because answers may come to it late.
    """
    text, tokenizer = request["text"], _tokenizer(tuple(request["slices"]))
    source = make(_NAMED.sub(f"<[{_CONTROL}]>", text) if request["kind"] == "lark" else text, **options)
    alone = map(llguidance.LLMatcher.grammar_from_regex, _expressions(request["kind"], text))
    for i, each in enumerate((source, *alone)):
        matcher = llguidance.LLMatcher(tokenizer, each, log_level=0, limits=limits)
        first = matcher.deep_copy()
        first.compute_ff_tokens()
        first.compute_bitmask()
        error = str(matcher.get_error() or first.get_error())
        if error and (i == 0 or "too many" in error or "fuel" in error):
            return error
        _walks(matcher)
    return ""


def _expressions(kind: str, text: str) -> set[str]:
    """The regular expressions inside of a grammar."""
    if kind == "regex":
        return set()
    found = {json.loads(each) for each in _PATTERN.findall(text)}
    if kind == "json_schema":
        return found | set(_names(json.loads(text)))
    return found | set(_LITERAL.findall(text))


def _names(schema: Any) -> Iterator[str]:
    """The regular expressions that stand for names of properties."""
    if isinstance(schema, list):
        for each in schema:
            yield from _names(each)
    elif isinstance(schema, dict):
        if isinstance(schema.get("patternProperties"), dict):
            yield from schema["patternProperties"]
        for each in schema.values():
            yield from _names(each)


def _walks(matcher: Any) -> None:
    """Some texts that the grammar allows. An error here is one of a text that may never come."""
    chooser, end = random.Random(1), time.process_time() + _SECONDS
    for _ in range(_WALKS):
        _walk(matcher.deep_copy(), chooser, end)


def _walk(matcher: Any, chooser: random.Random, end: float) -> None:
    for _ in range(_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [i for i in range(_CONTROL + 1) if mask >> i & 1]
        if matcher.is_error() or not allowed or time.process_time() > end:
            return
        matcher.consume_token(chooser.choice(allowed))
        matcher.consume_tokens(matcher.compute_ff_tokens())
