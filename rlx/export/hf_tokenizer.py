"""Converts the tokenizer of a checkpoint to `tokenizer.*` keys.

Export stage, read by `hf.py`. There are five kinds of vocabulary: `llama` (SentencePiece, by scores), `gpt2`
(byte-level BPE, by merges and a named pre-tokenizer), `gemma4` (BPE over characters, by merges), `bert` (WordPiece) and
`t5` (Unigram). Token texts, types
and padding follow the reference converter; the `gguf` package reads special ids, switches and chat templates.
"""

from __future__ import annotations

import base64
import logging
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.errors import ConfigError, TokenizerError, file_error
from rlx.export.hf_config import GgufType, Metadata
from rlx.text.from_hf import read_object
from rlx.text.pretokenizers import PRE_TOKENIZERS
from rlx.text.tokenizer import SPACE, TokenType, is_byte_token

if TYPE_CHECKING:
    from gguf import SpecialVocab

_NFC_LOST = ("qwen35", "modern-bert")  # its checkpoints normalize text to form C, readers of its GGUF files do not


def pre_tokenizer_name(fast: Mapping[str, Any], where: Path) -> str:
    """`tokenizer.ggml.pre` for a parsed tokenizer.json; `TokenizerError` if no name matches."""
    patterns = tuple(_patterns(fast.get("pre_tokenizer") or {}, where))
    nfc, ignore = _nfc(fast.get("normalizer") or {}, where), bool(fast["model"].get("ignore_merges"))
    for name, known in PRE_TOKENIZERS.items():
        alike = (known.patterns, known.ignore_merges) == (patterns, ignore)
        if alike and (known.nfc == nfc or name in _NFC_LOST):
            return name
    what = f"no pre-tokenizer of GGUF cuts by {list(patterns)}, with NFC {nfc} and ignore_merges {ignore}"
    raise TokenizerError(what, where=where, hint=f"known are {', '.join(PRE_TOKENIZERS)}")


def _patterns(step: Mapping[str, Any], where: Path) -> Iterator[str]:
    """The regular expressions that split a text, in order."""
    kind = step.get("type")
    if kind == "Sequence":
        for part in step.get("pretokenizers", []):
            yield from _patterns(part, where)
    elif kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        pattern = step.get("pattern") or {}
        yield pattern["Regex"] if "Regex" in pattern else re.escape(str(pattern.get("String")))
    elif kind == "Digits":
        yield r"\p{N}" if step.get("individual_digits") else r"\p{N}+"
    elif kind == "ByteLevel" and not step.get("add_prefix_space"):
        if step.get("use_regex", True):
            yield from PRE_TOKENIZERS["gpt-2"].patterns
    else:
        raise TokenizerError(f"a pre-tokenizer {dict(step)} has no form in GGUF", where=where)


def _nfc(normalizer: Mapping[str, Any], where: Path) -> bool:
    """Whether text is normalized to form C; any other normalizer is an error."""
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    if any(step.get("type") != "NFC" for step in steps):
        raise TokenizerError(f"a normalizer {dict(normalizer)} has no form in GGUF", where=where)
    return bool(steps)


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BPE = 2


Piece = tuple[str, float, int]
"""Text, score and type of a token."""


def is_sentencepiece(file: Path) -> bool:
    """Whether the file starts as such a model; other formats also use the name `tokenizer.model`."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(1) == b"\x0a"


def read_sentencepiece(file: Path) -> tuple[list[Piece], bool]:
    """The pieces of a BPE model in the order of their ids, and whether a space is put before a text.

    Raises:
        TokenizerError: the file is damaged or of another kind.
    """
    try:
        return _read(file.read_bytes(), file)
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, AttributeError) as error:
        hint = "the download or the copy failed: repeat it"
        raise TokenizerError(f"the file is not a SentencePiece model ({error})", where=file, hint=hint) from error


def _read(buffer: bytes, where: Path) -> tuple[list[Piece], bool]:
    pieces: list[Piece] = []
    space_prefix, kind = True, 1
    for number, value in _fields(buffer):
        if number == 1:
            pieces.append(_piece(dict(_fields(_bytes(value)))))
        elif number == 2:
            kind = int(_number(dict(_fields(_bytes(value))).get(3, 1)))
        elif number == 3:
            space_prefix = bool(dict(_fields(_bytes(value))).get(3, 1))
    if kind != _BPE:
        raise TokenizerError(f"a SentencePiece model of kind {kind}, expected {_BPE} (BPE)", where=where)
    return pieces, space_prefix


def _piece(fields: dict[int, int | float | bytes]) -> Piece:
    text = _bytes(fields[1]).decode() if 1 in fields else ""
    return text, float(_number(fields.get(2, 0.0))), int(_number(fields.get(3, TokenType.NORMAL)))


def _bytes(value: int | float | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a number where bytes were expected")
    return value


def _number(value: int | float | bytes) -> int | float:
    if isinstance(value, bytes):
        raise TypeError("bytes where a number was expected")
    return value


def _fields(buffer: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """(field number, value) of a message."""
    at = 0
    while at < len(buffer):
        tag, at = _varint(buffer, at)
        wire = tag & 7
        if wire == _VARINT:
            value, at = _varint(buffer, at)
            yield tag >> 3, value
        elif wire == _FIXED32:
            yield tag >> 3, struct.unpack_from("<f", buffer, at)[0]
            at += 4
        elif wire in (_BYTES, _FIXED64):
            length, at = _varint(buffer, at) if wire == _BYTES else (8, at)
            if at + length > len(buffer):
                raise IndexError(f"a field of {length} bytes at byte {at} of {len(buffer)}")
            yield tag >> 3, buffer[at : at + length]
            at += length
        else:
            raise TypeError(f"wire type {wire} at byte {at}")


def _varint(buffer: bytes, at: int) -> tuple[int, int]:
    """A number in groups of 7 bits, the lowest first, and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = buffer[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError(f"a number of more than ten bytes before byte {at}")


_SENTENCEPIECE_ARCHS = ("llama", "gemma", "gemma2", "gemma3", "gemma3n")
_ADDED_SCORE, _PADDING_SCORE = -1000.0, -10000.0
_WORD_PIECES = "jina-v2-en"  # what the reference converter calls all of them; readers do not ask
# Gemma 4: control tokens that programs need in the output.
_SHOWN = frozenset({
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
})  # fmt: skip


@dataclass
class Tokens:
    """A vocabulary in GGUF's form.

    Attributes:
        model: `tokenizer.ggml.model`.
        pre: `tokenizer.ggml.pre`, or None where the model has no such key.
        texts, kinds, scores: one per token; no scores if the model uses merges.
        merges: whether the model uses merges.
        space_prefix: `tokenizer.ggml.add_space_prefix`, or None for the reader's default.
        more: further keys behind `tokenizer.ggml.`.
    """

    model: str
    pre: str | None
    texts: list[str]
    kinds: list[int]
    scores: list[float] = field(default_factory=list)
    merges: bool = False
    space_prefix: bool | None = None
    more: Metadata = field(default_factory=dict)


def tokenizer_metadata(folder: Path, config: Mapping[str, Any], arch: str, size: int) -> Metadata:
    """The keys `tokenizer.*`.

    Args:
        config: `config.json`.
        arch: the architecture.
        size: rows of the embedding table; the vocabulary is padded to it.

    Raises:
        TokenizerError: there is no tokenizer, or GGUF cannot represent it.
        ConfigError: `vocab_size` is not `size`.
    """
    said = {**config, **(config.get("text_config") or {})}.get("vocab_size", size)
    if said != size:
        where = folder / "config.json"
        raise ConfigError(f"'vocab_size' is {said}, the embedding table has {size} rows", where=where)
    try:
        tokens = _tokens(_Files(folder), arch, size)
        found = _entries(tokens) | _special_entries(_special_vocabulary(folder, tokens), tokens, folder)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:  # JSON with unexpected contents
        raise TokenizerError(f"the tokenizer's files are not what they should be ({error!r})", where=folder) from error
    if arch == "gemma" and "<end_of_turn>" in tokens.texts:  # the one family whose files omit its id
        found |= _token_id("eot", tokens.texts.index("<end_of_turn>"))
    return found


class _Files:
    """The files of a tokenizer, parsed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sentencepiece = folder / "tokenizer.model"
        self.fast = read_object(folder / "tokenizer.json")
        self.config = read_object(folder / "tokenizer_config.json")

    @property
    def model(self) -> Mapping[str, Any]:
        found = self.fast.get("model") or {}
        return found if isinstance(found, dict) else {}

    def added(self) -> dict[int, Mapping[str, Any]]:
        """Tokens added to the vocabulary, by id; tokenizer_config.json wins over the other file."""
        listed = {int(entry["id"]): entry for entry in self.fast.get("added_tokens") or []}
        return listed | {int(i): entry for i, entry in (self.config.get("added_tokens_decoder") or {}).items()}

    def vocabulary(self, size: int) -> dict[int, str]:
        """Id -> text of tokenizer.json, added tokens included."""
        index = self.model.get("vocab")
        if self.model.get("type") != "BPE" or not isinstance(index, dict):
            what = f"a tokenizer of type {self.model.get('type')!r} has no form in GGUF, expected BPE"
            raise TokenizerError(what, where=self.folder / "tokenizer.json")
        found = {token: text for text, token in index.items()}
        found |= {int(entry["id"]): entry["content"] for entry in self.fast.get("added_tokens") or []}
        _check_size(max(found, default=-1) + 1, size, self.folder)
        return found


def _tokens(files: _Files, arch: str, size: int) -> Tokens:
    """The vocabulary, from the most detailed file."""
    if arch in _SENTENCEPIECE_ARCHS and is_sentencepiece(files.sentencepiece):
        return _from_sentencepiece(files, arch, size)
    if not files.fast:
        raise TokenizerError(
            "the folder holds no tokenizer.json and no SentencePiece tokenizer.model", where=files.folder,
            hint="get these files of the model and put them beside config.json",
        )  # fmt: skip
    if arch == "gemma4":
        return _gemma4(files, size)
    if files.model.get("type") == "WordPiece":
        return _word_pieces(files, size)
    if files.model.get("type") == "Unigram":
        return _unigram(files, size)
    if files.model.get("byte_fallback"):
        return _from_merges(files, arch, size)
    return _byte_level(files, size)


def _check_size(count: int, size: int, where: Path) -> None:
    if count > size:
        raise TokenizerError(f"the vocabulary has {count} tokens, the embedding table {size} rows", where=where)


# -- SentencePiece ----------------------------------------------------------------------------------------------------


def _from_sentencepiece(files: _Files, arch: str, size: int) -> Tokens:
    pieces, space_prefix = read_sentencepiece(files.sentencepiece)
    pieces += [(f"[PAD{i}]", _PADDING_SCORE, TokenType.UNUSED) for i in range(len(pieces), size)]
    texts, scores, kinds = map(list, zip(*pieces[:size], strict=True))
    tokens = Tokens("llama", "default", texts, kinds, scores)
    _add(tokens, files, size)
    tokens.space_prefix = _space_prefix(files, arch, space_prefix)
    return tokens


def _add(tokens: Tokens, files: _Files, size: int) -> None:
    """Replaces vocabulary entries by added tokens with the same id."""
    earlier = read_object(files.folder / "added_tokens.json")  # used before tokenizer_config.json had a list
    listed = {int(token): {"content": text} for text, token in earlier.items()} | files.added()
    for token, entry in listed.items():
        if token < size:
            tokens.texts[token], tokens.kinds[token] = _added(entry)
            tokens.scores[token] = _ADDED_SCORE


def _added(entry: Mapping[str, Any]) -> tuple[str, int]:
    """Text and type of an added token."""
    text = str(entry["content"])
    if entry.get("special") or _looks_special(text):
        return text, TokenType.CONTROL
    return text.replace(SPACE, " "), TokenType.USER_DEFINED  # such a token is matched against the raw text


def _looks_special(text: str) -> bool:
    """Whether a token is a control token that some models publish as a normal one."""
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<｜") and text.endswith("｜>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )


def _space_prefix(files: _Files, arch: str, found: bool) -> bool | None:
    """Gemma never puts a space before a text; readers do by default."""
    if arch != "llama":
        return False
    said = files.config.get("add_prefix_space")
    if isinstance(said, bool):
        return said
    return None if found else False


def _from_merges(files: _Files, arch: str, size: int) -> Tokens:
    """A SentencePiece vocabulary that exists only as tokenizer.json: the rank of a merge replaces the score."""
    vocabulary = files.vocabulary(size)
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(files.model.get("merges") or []):
        ranks.setdefault("".join(pair.split(" ", 1) if isinstance(pair, str) else pair), rank)
    texts = [vocabulary.get(i, f"[PAD{i}]") for i in range(size)]
    kinds = [_kind_of(vocabulary, i) for i in range(size)]
    scores = [_score(text, kind, ranks) for text, kind in zip(texts, kinds, strict=True)]
    tokens = Tokens("llama", "default", texts, kinds, scores)
    _add(tokens, files, size)
    tokens.space_prefix = _space_prefix(files, arch, _prepends(files.fast))
    return tokens


def _kind_of(vocabulary: Mapping[int, str], token: int) -> int:
    if token not in vocabulary:
        return TokenType.UNUSED
    return TokenType.BYTE if is_byte_token(vocabulary[token]) else TokenType.NORMAL


def _score(text: str, kind: int, ranks: Mapping[str, int]) -> float:
    if kind == TokenType.UNUSED:
        return _PADDING_SCORE
    return 0.0 if kind == TokenType.BYTE else -float(ranks.get(text, len(ranks)))


def _prepends(fast: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json puts a space before a text: its normalizer or its pre-tokenizer does."""
    normalizer, pre = fast.get("normalizer") or {}, fast.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer]) + pre.get("pretokenizers", [pre])
    return any(
        step.get("type") == "Prepend"
        or (step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )


# -- encoders -----------------------------------------------------------------------------------------------------


def _word_pieces(files: _Files, size: int) -> Tokens:
    """WordPiece, where GGUF marks the first piece of a word instead of the others."""
    index, added = files.model["vocab"], files.added()
    _check_size(max(index.values(), default=-1) + 1, size, files.folder)
    prefix, normalizer = files.model.get("continuing_subword_prefix", "##"), files.fast.get("normalizer") or {}
    texts, kinds = [f"[PAD{i}]" for i in range(size)], [int(TokenType.UNUSED)] * size
    for text, token in index.items():
        special = token in added and bool(added[token].get("special"))
        kinds[token] = int(TokenType.CONTROL if special else TokenType.NORMAL)
        within = text.startswith(prefix)
        texts[token] = text if special else text.removeprefix(prefix) if within else SPACE + text
    lowercase = bool(normalizer.get("lowercase", True))
    return Tokens("bert", _WORD_PIECES, texts, kinds, more={"normalizer.lowercase": (lowercase, GgufType.BOOL)})


def _unigram(files: _Files, size: int) -> Tokens:
    """Unigram, with the table of the characters that its normalizer replaces."""
    pieces, added, unknown = files.model["vocab"], files.added(), files.model.get("unk_id")
    _check_size(max(len(pieces), max(added, default=-1) + 1), size, files.folder)
    texts = [str(text) for text, _ in pieces] + [f"[PAD{i}]" for i in range(len(pieces), size)]
    scores = [float(score) for _, score in pieces] + [_PADDING_SCORE] * (size - len(pieces))
    kinds = [int(TokenType.NORMAL)] * len(pieces) + [int(TokenType.UNUSED)] * (size - len(pieces))
    for token, entry in added.items():
        texts[token] = str(entry["content"])
        kinds[token] = int(TokenType.CONTROL if entry.get("special") else TokenType.USER_DEFINED)
    if unknown is not None:
        kinds[unknown] = int(TokenType.UNKNOWN)
    steps = files.fast.get("normalizer") or {}
    steps = steps.get("normalizers", [steps])
    table = next((each["precompiled_charsmap"] for each in steps if each.get("type") == "Precompiled"), None)
    pre = files.fast.get("pre_tokenizer") or {}
    cuts = any(each.get("type") == "WhitespaceSplit" for each in pre.get("pretokenizers", [pre]))
    more: Metadata = {"remove_extra_whitespaces": (cuts or len(steps) > 1, GgufType.BOOL)}
    if table is not None:
        more["precompiled_charsmap"] = list(base64.b64decode(table)), (GgufType.ARRAY, GgufType.UINT8)
    return Tokens("t5", "default", texts, kinds, scores, space_prefix=_prepends(files.fast), more=more)


# -- BPE by merges ----------------------------------------------------------------------------------------------------


def _byte_level(files: _Files, size: int) -> Tokens:
    vocabulary, added = files.vocabulary(size), files.added()
    texts, kinds = [], []
    for token in range(size):
        text, kind = vocabulary.get(token, f"[PAD{token}]"), TokenType.NORMAL
        if token not in vocabulary:
            kind = TokenType.UNUSED
        elif token in added:
            text, kind = _added({**added[token], "content": text})  # type: ignore[assignment]
        texts.append(text)
        kinds.append(int(kind))
    pre = pre_tokenizer_name(files.fast, files.folder / "tokenizer.json")
    return Tokens("gpt2", pre, texts, kinds, merges=True)


def _gemma4(files: _Files, size: int) -> Tokens:
    vocabulary, special = files.vocabulary(size), _named(files.config)
    base = len(files.model["vocab"])
    texts = [vocabulary.get(i, f"[PAD{i}]") for i in range(size)]
    kinds = [_gemma4_kind(vocabulary.get(i), i >= base, special) for i in range(size)]
    return Tokens("gemma4", None, texts, kinds, [_ADDED_SCORE] * size, merges=True, space_prefix=False)


def _gemma4_kind(text: str | None, appended: bool, special: frozenset[str]) -> int:
    if text is None:
        return TokenType.UNUSED
    if is_byte_token(text):
        return TokenType.BYTE
    if text in _SHOWN:
        return TokenType.USER_DEFINED
    if text in special:
        return TokenType.CONTROL
    return TokenType.USER_DEFINED if appended else TokenType.NORMAL


def _named(config: Mapping[str, Any]) -> frozenset[str]:
    """The texts with a role in tokenizer_config.json: `bos_token` and the like, and lists of further ones."""
    found = [value for key, value in config.items() if key.endswith("_token") and not isinstance(value, bool)]
    for key in ("extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"):
        more = config.get(key) or []
        found += list(more.values()) if isinstance(more, dict) else list(more)
    return frozenset(str(each["content"] if isinstance(each, dict) else each) for each in found if each)


# -- keys -------------------------------------------------------------------------------------------------------------


def _entries(tokens: Tokens) -> Metadata:
    found: Metadata = {"tokenizer.ggml.model": (tokens.model, GgufType.STRING)}
    if tokens.pre is not None:
        found["tokenizer.ggml.pre"] = tokens.pre, GgufType.STRING
    found["tokenizer.ggml.tokens"] = tokens.texts, (GgufType.ARRAY, GgufType.STRING)
    if tokens.scores:
        found["tokenizer.ggml.scores"] = tokens.scores, (GgufType.ARRAY, GgufType.FLOAT32)
    found["tokenizer.ggml.token_type"] = [int(kind) for kind in tokens.kinds], (GgufType.ARRAY, GgufType.INT32)
    if tokens.space_prefix is not None:
        found["tokenizer.ggml.add_space_prefix"] = tokens.space_prefix, GgufType.BOOL
    return found | {f"tokenizer.ggml.{key}": entry for key, entry in tokens.more.items()}


def _special_entries(special: SpecialVocab, tokens: Tokens, folder: Path) -> Metadata:
    """Merges, special ids, tokens added to every text, and chat templates."""
    from gguf import GGUFValueType, GGUFWriter

    if tokens.merges and not special.merges:
        raise TokenizerError("there are no merges", where=folder / "tokenizer.json")
    keys = GGUFWriter(None, "none")
    with _quiet():
        special.add_to_gguf(keys, quiet=True)
    return {
        key: (each.value, (each.type, each.sub_type or GGUFValueType.get_type(each.value[0])))
        if each.type == GGUFValueType.ARRAY
        else (each.value, each.type)
        for key, each in keys.kv_data[0].items()
        if key != "general.architecture"
    }


def _special_vocabulary(folder: Path, tokens: Tokens) -> SpecialVocab:
    from gguf import SpecialVocab

    try:
        with _quiet():
            return SpecialVocab(folder, load_merges=tokens.merges, n_vocab=len(tokens.texts))
    except OSError as error:
        raise file_error(TokenizerError, "the tokenizer's files cannot be read", error, folder) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the package's warnings about templates that it does not fully support."""
    log = logging.getLogger("gguf.vocab")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _token_id(role: str, token: int) -> Metadata:
    return {f"tokenizer.ggml.{role}_token_id": (token, GgufType.UINT32)}
