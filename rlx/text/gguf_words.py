"""The tokenizers of encoders from GGUF metadata, as the `tokenizer.json` that the `tokenizers` package reads.

Text stage, under `from_gguf.py`. BERT divides words into pieces of a vocabulary (WordPiece); XLM-RoBERTa chooses the
likeliest pieces of a text (Unigram), which a table has normalized before.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any, Protocol

from rlx.text.tokenizer import SPACE, Spelling, TokenType, Vocabulary

_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)
_METASPACE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
_MAX_WORD = 100  # characters; a longer word becomes the unknown token


class Keys(Protocol):
    """The part of the metadata that is read."""

    def flag(self, name: str, default: bool) -> bool: ...
    def token(self, name: str, default: int | None = None) -> int | None: ...
    def numbers(self, name: str) -> list[Any]: ...
    def vocabulary(self, spelling: Spelling) -> Vocabulary: ...
    def charsmap(self) -> bytes: ...


def wordpiece(keys: Keys) -> bytes:
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
        "vocab": {text: token for token, text in enumerate(_words(vocabulary))},
    }
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    return _file(vocabulary, normalizer, {"type": "BertPreTokenizer"}, decoder, model)


def unigram(keys: Keys) -> bytes:
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


def _words(vocabulary: Vocabulary) -> Iterator[str]:
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
