"""Crafted tokenizers and templates: each breaks one rule, and each ends in an error with a name."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlx.errors import TokenizerError
from rlx.text import Tokenizer, load_tokenizer
from rlx.text.confined import Confined
from rlx.text.pretokenizers import KNOWN_EXPRESSIONS

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
PUBLISHED = next(iter(KNOWN_EXPRESSIONS))


def tokenizer_json(**parts: Any) -> dict[str, Any]:
    """A byte-level tokenizer of two letters; `parts` replaces parts of the file, `model` keys of the model."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [], **parts.pop("model", {})}
    base = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": BYTE_LEVEL}
    return {**base, "post_processor": None, "decoder": BYTE_LEVEL, "model": model, **parts}


def open_(folder: Path, content: Any, **files: bytes) -> Tokenizer:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "tokenizer.json").write_bytes(raw)
    for name, data in files.items():
        (folder / name.replace("__", ".")).write_bytes(data)
    return load_tokenizer(folder)


def split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(steps: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": steps}


def charsmap(data: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def added(token: int, content: str = "<x>") -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": content, "special": True, **flags}


DOUBLE = replace({"String": "a"}, "aa")
OPENING: dict[str, tuple[dict[str, Any] | bytes, str]] = {
    "doubling": (tokenizer_json(normalizer=sequence([DOUBLE] * 26)), r"CPU time|may use 512 MB"),
    "doubling_by_expression": (
        tokenizer_json(normalizer=sequence([replace({"Regex": "a"}, "a" * 4000)] * 3)), r"CPU time|may use 512 MB"),
    "doubling_of_nothing": (
        tokenizer_json(normalizer=sequence([replace({"String": ""}, "a" * 99)] * 6)), r"CPU time|512 MB"),
    "long_prepend": (
        tokenizer_json(normalizer=sequence([{"type": "Prepend", "prepend": "a"}, *[DOUBLE] * 30])), r"CPU time|512 MB"),
    "large_id": (tokenizer_json(model={"vocab": {"a": 0, "b": 500_000_000}}), "largest id is 500000000"),
    "negative_id": (tokenizer_json(model={"vocab": {"a": -1}}), "expected u32"),
    "fractional_id": (tokenizer_json(model={"vocab": {"a": 0.5}}), "expected u32"),
    "endless_id": (b'{"model":{"type":"BPE","vocab":{"a":' + b"9" * 9999 + b'},"merges":[]}}', "out of range"),
    "no_vocabulary": (tokenizer_json(model={"vocab": {}}), "vocabulary is empty"),
    "no_model": ({"version": "1.0"}, "Model missing"),
    "unknown_model": (tokenizer_json(model={"type": "Magic"}), "any variant"),
    "merge_of_no_token": (tokenizer_json(model={"merges": ["a x"]}), "out of vocabulary"),
    "unknown_piece": (
        tokenizer_json(model={"type": "Unigram", "vocab": [["b", 0.0]], "unk_id": 7}), "Unable to load vocab"),
    "bad_charsmap": (
        tokenizer_json(normalizer=charsmap(b"\xff" * 99)), r"tokenizers package failed|may use 512 MB"),
    "empty_charsmap": (
        tokenizer_json(normalizer=charsmap(b"")), "tokenizers package failed"),
    "no_expression": (tokenizer_json(pre_tokenizer=split("(")), "unmatched parenthesis"),
    "deep": (b'{"normalizer":' + b'{"type":"Sequence","normalizers":[' * 99_999, "recursion limit"),
    "surrogate": (b'{"model":{"type":"BPE","vocab":{"\\ud800":0},"merges":[]}}', "hex escape"),
    "cut": (json.dumps(tokenizer_json()).encode()[:-9], "EOF while parsing"),
    "no_utf8": (b"\xff\xfe{}", "expected value"),
    "empty": (b"", "EOF while parsing"),
}  # fmt: skip


#: What takes all memory or time until a limit ends it.
GREEDY = {"doubling", "doubling_by_expression", "doubling_of_nothing", "long_prepend"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.system("limits")] * (n in GREEDY)) for n in OPENING]
)
def test_refused_when_opened(tmp_path: Path, name: str) -> None:
    content, what = OPENING[name]
    with pytest.raises(TokenizerError, match=what) as caught:
        open_(tmp_path, content)
    assert "tokenizer.json" in str(caught.value.where)


def test_an_expression_of_exponential_time(tmp_path: Path) -> None:
    tokenizer = open_(tmp_path, tokenizer_json(pre_tokenizer={"type": "Sequence", "pretokenizers": [split("(a+)+$")]}))
    with pytest.raises(TokenizerError, match="cannot be encoded"):
        tokenizer.encode("a" * 40 + "b")
    assert tokenizer.encode("ab") == [0, 1]  # the next text is encoded


def test_an_unusual_expression_works(tmp_path: Path) -> None:
    """A file that is only unusual gives what the package gives, from a process of its own."""
    content = tokenizer_json(pre_tokenizer={"type": "Sequence", "pretokenizers": [split("a+"), BYTE_LEVEL]})
    content["model"] |= {"vocab": {"a": 0, "b": 1, "ab": 2, "aa": 3}, "merges": ["a b", "a a"]}
    assert open_(tmp_path, content).encode("aab") == [3, 1]
    content["pre_tokenizer"] = BYTE_LEVEL
    assert open_(tmp_path, content).encode("aab") == [0, 2]


@pytest.mark.parametrize(
    ("content", "confined"),
    [
        (tokenizer_json(), False),
        (tokenizer_json(pre_tokenizer=split(PUBLISHED)), False),
        (tokenizer_json(normalizer=replace({"String": " "}, "\u2581")), False),
        (tokenizer_json(added_tokens=[added(2, "Regex"), added(3, "Precompiler")]), False),
        (tokenizer_json(pre_tokenizer=split("a+")), True),
        (tokenizer_json(pre_tokenizer=split(PUBLISHED + "|(a+)+$")), True),
        (tokenizer_json(normalizer=sequence([DOUBLE] * 7)), True),
        (tokenizer_json(normalizer=sequence([{"type": "NFC"}] * 99)), True),
    ],
)
def test_who_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, Any], confined: bool) -> None:
    calls: list[str] = []
    call: Callable[..., Any] = Confined.call
    monkeypatch.setattr(Confined, "call", lambda self, request: calls.append("call") or call(self, request))
    open_(tmp_path, content)
    assert bool(calls) == confined


TEXTS: dict[str, tuple[dict[str, bytes], str]] = {
    "template_no_utf8": ({"chat_template__jinja": b"\xff\xfe"}, "chat_template.jinja: the file is no UTF-8"),
    "config_deep": ({"tokenizer_config__json": b'{"a":' * 99_999}, "nested too deeply"),
    "config_twice": ({"tokenizer_config__json": b'{"eos_token":"a","eos_token":"b"}'}, "'eos_token' occurs twice"),
    "config_number": ({"tokenizer_config__json": b'{"a":' + b"9" * 9999 + b"}"}, "does not parse"),
    "config_bomb": ({"tokenizer_config__json": b'{"a":[' + b"[]," * 9_999_999 + b"1]}"}, "too many to be read"),
    "map_of_lists": ({"special_tokens_map__json": b'{"bos_token":[[]]}'}, "bos_token"),
    "end_nan": ({"generation_config__json": b'{"eos_token_id":NaN}'}, "eos_token_id nan is neither an id"),
    "end_infinite": ({"config__json": b'{"eos_token_id":[Infinity]}'}, "is neither an id"),
    "end_true": ({"config__json": b'{"eos_token_id":true}'}, "is neither an id"),
    "end_large": ({"config__json": b'{"eos_token_id":1e99}'}, "is neither an id"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_files_beside_it(tmp_path: Path, name: str) -> None:
    files, what = TEXTS[name]
    with pytest.raises(TokenizerError, match=what):
        open_(tmp_path, tokenizer_json(), **files)


def test_a_lone_surrogate_is_no_text_to_encode(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="half a surrogate pair"):
        open_(tmp_path, tokenizer_json()).encode("\ud800")
