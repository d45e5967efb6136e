"""A tokenizer from the metadata of a GGUF file.

Text stage: reads the `tokenizer.*` keys (names of llama.cpp's format), chooses the algorithm by
`tokenizer.ggml.model` and hands the parts to `tokenizer.py`. The metadata is any mapping, so nothing here knows files.
"""

from __future__ import annotations

import base64
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from math import isfinite
from typing import Any, TypeGuard

import numpy as np

from rlx import text as readers
from rlx.errors import TokenizerError
from rlx.text.chat import turn_ends
from rlx.text.pretokenizers import PRE_TOKENIZERS, Encode, PreTokenizer, byte_level_bpe, gemma4_bpe
from rlx.text.tokenizer import (
    SPACE,
    SpecialSplitter,
    Spelling,
    Tokenizer,
    TokenType,
    Vocabulary,
    end_ids,
    is_byte_token,
)

_GGML = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_HIDDEN = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED)
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)
_METASPACE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
_MAX_WORD = 100  # characters; a longer word becomes the unknown token


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that the `tokenizer.*` keys describe; `TokenizerError` names the key that is wrong."""
    keys = _Keys(metadata)
    model = keys.text("model")
    if model not in _BUILDERS:
        raise TokenizerError(
            f"unknown tokenizer model {model!r}", where=_GGML + "model", hint=f"known are {', '.join(_BUILDERS)}"
        )
    return _BUILDERS[model](keys)


class _Keys:
    """Typed access to the metadata, and what every kind of tokenizer needs from it."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata

    def get(self, name: str) -> Any:
        return self.metadata.get(_GGML + name)

    def require(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise TokenizerError("the key is missing", where=_GGML + name, hint="the file carries no usable tokenizer")
        return value

    def text(self, name: str) -> str:
        value = self.require(name)
        if not isinstance(value, str):
            raise TokenizerError(f"expected a string, found {value!r}", where=_GGML + name)
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool | np.bool_):
            raise TokenizerError(f"expected true or false, found {value!r}", where=_GGML + name)
        return bool(value)

    def token(self, name: str, default: int | None = None) -> int | None:
        """The id under a key, checked against the vocabulary."""
        value = self.get(name)
        if value is None:
            return default if default is not None and default < len(self.tokens) else None
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < len(self.tokens):
            raise TokenizerError(f"{value!r} is no id of a vocabulary of {len(self.tokens)}", where=_GGML + name)
        return int(value)

    def numbers(self, name: str) -> list[Any]:
        """An array with one number for each token."""
        values = np.asarray(self.require(name))
        if values.shape != (len(self.tokens),) or values.dtype.kind not in "iuf":
            raise TokenizerError(
                f"expected {len(self.tokens)} numbers, found an array of {values.dtype} {values.shape}",
                where=_GGML + name,
            )
        return list(values.tolist())

    @cached_property
    def tokens(self) -> list[str]:
        values = self.require("tokens")
        if not _are_strings(values):
            raise TokenizerError("expected an array of strings", where=_GGML + "tokens")
        tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(values)]
        if not tokens:
            raise TokenizerError("the array is empty", where=_GGML + "tokens")
        if len(set(tokens)) != len(tokens):
            _fail_double(tokens)
        return tokens

    def charsmap(self) -> bytes:
        """The table with which SentencePiece normalizes a text; empty for none."""
        value = self.get("precompiled_charsmap")
        return b"" if value is None else np.asarray(value).astype(np.uint8).tobytes()

    def vocabulary(self, spelling: Spelling) -> Vocabulary:
        if self.get("token_type") is None:
            types = [TokenType.BYTE if is_byte_token(text) else TokenType.NORMAL for text in self.tokens]
        else:
            types = self.numbers("token_type")
        kinds = np.asarray(types, np.int64)
        kinds[(kinds < min(TokenType)) | (kinds > max(TokenType))] = TokenType.NORMAL
        vocabulary = Vocabulary(self.tokens, kinds.astype(np.uint8).tobytes(), spelling)
        _check_byte_tokens(vocabulary)
        return vocabulary

    def merges(self) -> Sequence[str]:
        values = self.require("merges")
        if not _are_strings(values):
            raise TokenizerError("expected an array of strings", where=_GGML + "merges")
        return values

    def templates(self) -> dict[str, str]:
        """Chat templates by name; the nameless one is called `default`."""
        return {
            "default" if key == _TEMPLATE else key.removeprefix(_TEMPLATE + "."): value
            for key in self.metadata
            if (key == _TEMPLATE or key.startswith(_TEMPLATE + ".")) and isinstance(value := self.metadata[key], str)
        }


def _are_strings(values: Any) -> TypeGuard[Sequence[str]]:
    """Whether it is an array of strings; there may be hundreds of thousands."""
    return isinstance(values, Sequence) and not isinstance(values, str) and set(map(type, values)) <= {str}


def _fail_double(tokens: Sequence[str]) -> None:
    first: dict[str, int] = {}
    for token, text in enumerate(tokens):
        if first.setdefault(text, token) != token:
            raise TokenizerError(f"ids {first[text]} and {token} have the same text {text!r}", where=_GGML + "tokens")


def _check_byte_tokens(vocabulary: Vocabulary) -> None:
    wrong = [i for i in vocabulary.of_type(TokenType.BYTE) if not is_byte_token(vocabulary.tokens[i])]
    if wrong:
        text = vocabulary.tokens[wrong[0]]
        raise TokenizerError(f"byte token {wrong[0]} is spelled {text!r}, not <0xHH>", where=_GGML + "tokens")


def _encoding(
    vocabulary: Vocabulary, ends: frozenset[int], encode_text: Encode, space_prefix: bool
) -> Callable[[str, bool], list[int]]:
    """Cuts out whole-string tokens, user-defined ones always, and encodes the stretches between them."""
    always = {vocabulary.tokens[i]: i for i in vocabulary.of_type(TokenType.USER_DEFINED) if i not in ends}
    special = {vocabulary.tokens[i]: i for i in (*vocabulary.of_type(*_SPECIAL), *ends)}
    splitters = SpecialSplitter(always), SpecialSplitter(always | special)

    def encode(text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        at_border = True  # the start of the text, or right after a special token
        for part in splitters[parse_special].split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += encode_text(" " + part if space_prefix and at_border else part)
            at_border = isinstance(part, int)
        return ids

    return encode


def _assemble(
    keys: _Keys,
    vocabulary: Vocabulary,
    encode_text: Encode,
    *,
    bos: int | None,
    eos: int | None,
    add_bos: bool,
    space_prefix: bool = False,
) -> Tokenizer:
    suffix = _framing(eos, keys.flag("add_eos_token", False), "eos")
    ends = end_ids(vocabulary, [eos, *(keys.token(name) for name in _ENDS)], keys.token("padding_token_id"))
    return Tokenizer(
        vocabulary=vocabulary,
        encode_parts=_encoding(vocabulary, ends, encode_text, space_prefix),
        bos_id=bos,
        eos_id=eos,
        prefix=_framing(bos, add_bos, "bos"),
        suffix=suffix,
        between=suffix,
        declared_ends=ends,
        drop_space=space_prefix,
        chat_templates=keys.templates(),
        turn_ends=turn_ends,
    )


def _framing(token: int | None, enabled: bool, name: str) -> tuple[int, ...]:
    if enabled and token is None:
        raise TokenizerError(f"the key is missing, but add_{name}_token is on", where=f"{_GGML}{name}_token_id")
    return (token,) if enabled and token is not None else ()


def _sentencepiece(keys: _Keys) -> Tokenizer:
    vocabulary = keys.vocabulary(Spelling.SENTENCEPIECE)
    bos, eos = keys.token("bos_token_id", 1), keys.token("eos_token_id", 2)
    merger = readers.spm.SentencePieceMerger(
        pieces=_mergeable(vocabulary),
        scores=_scores(keys),
        byte_ids=_byte_ids(vocabulary),
        unknown_id=keys.token("unknown_token_id", 0),
    )
    return _assemble(
        keys, vocabulary, merger.encode, bos=bos, eos=eos,
        add_bos=keys.flag("add_bos_token", True), space_prefix=keys.flag("add_space_prefix", True),
    )  # fmt: skip


def _scores(keys: _Keys) -> list[float]:
    scores = keys.numbers("scores")
    if not all(map(isfinite, scores)):
        raise TokenizerError("a score is not finite", where=_GGML + "scores")
    return scores


def _mergeable(vocabulary: Vocabulary) -> dict[str, int]:
    kinds = (TokenType.NORMAL, TokenType.USER_DEFINED)
    pairs = enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
    return {text: token for token, (text, kind) in pairs if kind in kinds}


def _byte_ids(vocabulary: Vocabulary) -> list[int] | None:
    """The byte tokens by byte, or None if there is none; a part of them is an error."""
    found = {int(vocabulary.tokens[i][3:5], 16): i for i in vocabulary.of_type(TokenType.BYTE)}
    if not found:
        return None
    missing = [byte for byte in range(256) if byte not in found]
    if missing:
        raise TokenizerError(f"the byte token <0x{missing[0]:02X}> is missing", where=_GGML + "tokens")
    return [found[byte] for byte in range(256)]


def _byte_level(keys: _Keys) -> Tokenizer:
    pre = _pre_tokenizer(keys)
    vocabulary = keys.vocabulary(Spelling.BYTE_LEVEL)
    hidden = vocabulary.of_type(*_HIDDEN)
    return _assemble(
        keys, vocabulary, byte_level_bpe(vocabulary, hidden, keys.merges(), pre),
        bos=keys.token("bos_token_id"), eos=keys.token("eos_token_id"),
        add_bos=keys.flag("add_bos_token", pre.add_bos),
    )  # fmt: skip


def _pre_tokenizer(keys: _Keys) -> PreTokenizer:
    name = keys.get("pre")
    if not name:
        warnings.warn(
            f"{_GGML}pre is missing: using 'default', which may tokenize otherwise than the model was trained on. "
            "Convert the model again to name its pre-tokenizer",
            stacklevel=2,
        )
        return PRE_TOKENIZERS["default"]
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise TokenizerError(f"unknown pre-tokenizer {name!r}", where=_GGML + "pre", hint=f"known are {known}")
    return PRE_TOKENIZERS[name]


def _gemma4(keys: _Keys) -> Tokenizer:
    vocabulary = keys.vocabulary(Spelling.SENTENCEPIECE)
    hidden, unknown = vocabulary.of_type(*_HIDDEN), keys.token("unknown_token_id")
    return _assemble(
        keys, vocabulary, gemma4_bpe(vocabulary, hidden, keys.merges(), unknown),
        bos=keys.token("bos_token_id"), eos=keys.token("eos_token_id"), add_bos=True,
    )  # fmt: skip


def _wordpiece(keys: _Keys) -> bytes:
    """BERT's. GGUF marks the start of a word with U+2581, where the package marks what goes on with ##."""
    vocabulary, unknown = keys.vocabulary(Spelling.SENTENCEPIECE), keys.token("unknown_token_id", 100)
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": keys.flag("normalizer.lowercase", True),
    }
    model = {
        "type": "WordPiece",
        "unk_token": vocabulary.tokens[unknown or 0],
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": _MAX_WORD,
        "vocab": {text: token for token, text in enumerate(_pieces(vocabulary))},
    }
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    return _file(vocabulary, normalizer, {"type": "BertPreTokenizer"}, decoder, model)


def _unigram(keys: _Keys) -> bytes:
    """XLM-RoBERTa's."""
    vocabulary, table = keys.vocabulary(Spelling.SENTENCEPIECE), keys.charsmap()
    normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()} if table else None
    model = {
        "type": "Unigram",
        "unk_id": keys.token("unknown_token_id", 3),
        "byte_fallback": False,
        "vocab": [[text, score] for text, score in zip(vocabulary.tokens, keys.numbers("scores"), strict=True)],
    }
    cuts = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, _METASPACE]}
    return _file(vocabulary, normalizer, cuts, _METASPACE, model)


def _pieces(vocabulary: Vocabulary) -> Iterator[str]:
    for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        plain = kind in _SPECIAL or text.startswith(SPACE)
        yield text.removeprefix(SPACE) if plain else f"##{text}"


def _file(vocabulary: Vocabulary, normalizer: Any, cuts: Any, decoder: Any, model: Any) -> bytes:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [
        {"id": token, "content": vocabulary.tokens[token], "special": True, **flags}
        for token in vocabulary.of_type(*_SPECIAL)
    ]
    parts = {"normalizer": normalizer, "pre_tokenizer": cuts, "post_processor": None, "decoder": decoder}
    return json.dumps({"version": "1.0", "added_tokens": special, **parts, "model": model}).encode()


def _words(keys: _Keys, build: Callable[[_Keys], bytes]) -> Tokenizer:
    """The tokenizer of an encoder: the `tokenizers` package reads it from a `tokenizer.json` that `build` writes.

    BERT divides words into pieces of a vocabulary (WordPiece); XLM-RoBERTa chooses the likeliest pieces of a text
    (Unigram), which a table has normalized before.
    """
    backend = readers.from_hf.Backend(build(keys), _GGML + "model")
    bos, eos, separator = (keys.token(f"{name}_token_id") for name in ("bos", "eos", "seperator"))
    prefix = _framing(bos, keys.flag("add_bos_token", True), "bos")
    suffix = _framing(eos, keys.flag("add_eos_token", True), "eos")
    more = _framing(separator, keys.flag("add_sep_token", False), "seperator")
    vocabulary = backend.vocabulary()
    return Tokenizer(
        vocabulary=vocabulary,
        encode_parts=backend.encode,
        bos_id=bos,
        eos_id=eos,
        prefix=prefix,
        suffix=suffix,
        between=(*suffix, *more),
        declared_ends=end_ids(vocabulary, [eos], keys.token("padding_token_id")),
        drop_space=True,
    )


_BUILDERS: dict[str, Callable[[_Keys], Tokenizer]] = {
    "llama": _sentencepiece,
    "gpt2": _byte_level,
    "gemma4": _gemma4,
    "bert": partial(_words, build=_wordpiece),
    "t5": partial(_words, build=_unigram),
}
