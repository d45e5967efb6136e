"""A wrapper of the `tokenizers` package, and the check whether a file may be read in the main process.

Text stage, used by `from_hf.py`. A `tokenizer.json` chooses its own normalizers and regular expressions, and valid
files can be hostile: 26 replacements that each double the text, or an expression that takes exponential time. Files
whose components have bounded cost run in the main process; all others run in a child process (`confined.py`), where
this module is the program. It imports nothing of rlx.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAX_COMPONENTS, MAX_GROWTH, MAX_PREPEND = 64, 64, 16  # in the main process
MAX_WORD = 256  # characters of a word that WordPiece divides: the time grows with the square
LONG = 256  # characters: less takes a tenth of a millisecond or so
_SPARE_IDS = 65_536
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Prepend", "Replace"}
_NORMALIZERS |= {"BertNormalizer"}
_CUTS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "Whitespace", "WhitespaceSplit"}
_CUTS |= {"BertPreTokenizer"}
_PROCESSORS = {"BertProcessing", "ByteLevel", "TemplateProcessing"}
_PARTS = ("normalizers", "pretokenizers", "processors", "decoders")
_REGEX = re.compile(rb'"Regex"\s*:\s*("(?:[^"\\]|\\.)*")', re.DOTALL)
_ESCAPED_ASCII = re.compile(rb"\\u00[2-7]")  # could hide the words that are looked for
_HEAVY = (b'"Precompiled"', b'"precompiled_charsmap"')


@contextmanager
def no_panic() -> Iterator[None]:
    """Turns a panic of the package, which is a `BaseException`, into a `ValueError`."""
    try:
        yield
    except BaseException as error:
        _refuse_panic(error)
        raise


def _refuse_panic(error: BaseException) -> None:
    if type(error).__name__ == "PanicException":
        raise ValueError(f"the tokenizers package failed: {error}") from None


def plain_ids(backend: Any, text: str) -> list[int]:
    """The ids of a text without BOS and EOS. Other threads go on while a long text is encoded.

    Raises:
        ValueError: the package panics.
    """
    try:
        if len(text) < LONG:
            return list(backend.encode(text, add_special_tokens=False).ids)
        (found,) = backend.encode_batch_fast([text], add_special_tokens=False)  # `encode` holds the GIL
        return list(found.ids)
    except BaseException as error:
        _refuse_panic(error)
        raise


class FastTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` package.

    Args:
        data: the file.

    Raises:
        Exception: of whatever class the package raises where the file is malformed.
    """

    def __init__(self, data: bytes) -> None:
        from tokenizers import Tokenizer

        with no_panic():
            self._fast = Tokenizer.from_buffer(data)
            self._fast.no_padding()
            self._fast.no_truncation()

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Ids without BOS and EOS. Not for several threads at once: the switch belongs to the object."""
        self._fast.encode_special_tokens = not parse_special
        return plain_ids(self._fast, text)

    def facts(self) -> dict[str, Any]:
        """The facts that generation needs, in the types of JSON.

        `tokens`: text by id; `added`: (id, special) of the added tokens; `unknown`: an id or None; `framed`: "a" with
        the file's special tokens around it, `plain`: "a" without, `pair`: "a" and "a" as a pair; `decoders`: the
        components in order.
        """
        with no_panic():
            unknown = getattr(self._fast.model, "unk_token", None)
            added = self._fast.get_added_tokens_decoder()
            return {
                "tokens": _tokens(self._fast.get_vocab(with_added_tokens=True)),
                "added": [(token, bool(each.special)) for token, each in added.items()],
                "unknown": None if unknown is None else self._fast.token_to_id(unknown),
                "framed": list(self._fast.encode("a").ids),
                "plain": list(self._fast.encode("a", add_special_tokens=False).ids),
                "pair": list(self._fast.encode("a", "a").ids),
                "decoders": _flat(self._fast.decoder),
            }

    def is_bounded(self) -> bool:
        """Whether the kinds of the components guarantee time and memory proportional to the text."""
        with no_panic():
            fast = self._fast
            steps, cuts, ends = (_flat(part) for part in (fast.normalizer, fast.pre_tokenizer, fast.post_processor))
            return (
                _is_bounded_model(fast.model)
                and len(steps) + len(cuts) + len(ends) <= MAX_COMPONENTS
                and _kinds(steps) <= _NORMALIZERS and _kinds(cuts) <= _CUTS and _kinds(ends) <= _PROCESSORS
                and _growth(steps) <= MAX_GROWTH
                and all(len(step["prepend"]) <= MAX_PREPEND for step in steps if step["type"] == "Prepend")
                and sum(end["type"] == "TemplateProcessing" for end in ends) <= 1
            )  # fmt: skip


def _is_bounded_model(model: Any) -> bool:
    """Whether it is BPE, or WordPiece, which gives up long words."""
    kind = type(model).__name__
    return kind == "BPE" or (kind == "WordPiece" and model.max_input_chars_per_word <= MAX_WORD)


def may_read(data: bytes, expressions: frozenset[str]) -> bool:
    """Whether the package may read the file in the main process: all its regular expressions are in `expressions`.

    The package compiles expressions while it reads the file, so this check runs first. It searches the bytes instead of
    parsing them, which would add a third to the time of opening.
    """
    if _ESCAPED_ASCII.search(data) or any(word in data for word in _HEAVY):
        return False
    return all(_text(found[1]) in expressions for found in _REGEX.finditer(data))


def _text(literal: bytes) -> str | None:
    try:
        return str(json.loads(literal))
    except ValueError:
        return None


def _tokens(index: dict[str, int]) -> list[str]:
    if not index:
        raise ValueError("the vocabulary is empty")
    largest = max(index.values())
    if largest > 2 * len(index) + _SPARE_IDS:
        raise ValueError(f"the largest id is {largest}, and there are only {len(index)} tokens")
    tokens = [""] * (largest + 1)
    for text, token in index.items():
        tokens[token] = text
    return tokens


def _flat(part: Any) -> list[dict[str, Any]]:
    """The components of a part, those in sequences included."""
    found, left = [], [] if part is None else [json.loads(part.__getstate__())]
    while left:
        each = left.pop()
        if each["type"] == "Sequence":
            left += reversed(next(each[name] for name in _PARTS if name in each))
        else:
            found.append(each)
    return found


def _kinds(parts: list[dict[str, Any]]) -> set[str]:
    return {part["type"] for part in parts}


def _growth(steps: list[dict[str, Any]]) -> float:
    """How many times longer a text may become: replacements one after the other multiply."""
    growth = 1.0
    for step in steps:
        if step["type"] == "Replace":
            found = len(step["pattern"].get("String", "").encode())
            growth *= max(1.0, len(step["content"].encode()) / found if found else len(step["content"].encode()) + 1)
    return growth


_OPEN: list[FastTokenizer] = []


def prepare() -> None:
    """Imports the package: afterwards the process can open no file."""
    FastTokenizer(b'{"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}').facts()


def handle(request: dict[str, Any]) -> Any:
    """The program: `{"file": text}` first, then `{"facts": true}` or `{"text": ..., "parse_special": ...}`."""
    if "file" in request:
        _OPEN[:] = [FastTokenizer(request["file"].encode())]
        return None
    return _OPEN[0].facts() if "facts" in request else _OPEN[0].encode(request["text"], request["parse_special"])
