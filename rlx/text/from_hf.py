"""A tokenizer from a Hugging Face folder: `tokenizer.json` and the small files beside it.

Text stage: the `tokenizers` package does the encoding; this reads from it, and from `tokenizer_config.json`,
`special_tokens_map.json`, `generation_config.json`, `config.json` and the chat template files, what generation needs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from rlx import json_file
from rlx.errors import TokenizerError
from rlx.text.chat import turn_ends
from rlx.text.confined import Confined
from rlx.text.fast import FastTokenizer, may_read
from rlx.text.pretokenizers import KNOWN_EXPRESSIONS
from rlx.text.tokenizer import SPACE, Spelling, Tokenizer, TokenType, Vocabulary, end_ids, is_byte_token

MAX_BYTES = 128 << 20  # of a tokenizer.json
_MEMORY, _MEMORY_A_BYTE = 512 << 20, 24  # of the process that reads it


def tokenizer_from_hf(path: Path) -> Tokenizer:
    """Build the tokenizer of a folder, or of a `tokenizer.json` with the files beside it."""
    folder = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise TokenizerError(
            "the directory holds no tokenizer.json", where=path,
            hint="save the tokenizer in the fast format, or convert the model to GGUF",
        )  # fmt: skip
    config = read_object(folder / "special_tokens_map.json") | read_object(folder / "tokenizer_config.json")
    data = json_file.read_bytes(file, TokenizerError, MAX_BYTES)
    return _assemble(Backend(data, file), config, folder)


def _assemble(backend: Backend, config: Mapping[str, Any], folder: Path) -> Tokenizer:
    vocabulary = backend.vocabulary()
    prefix, suffix = backend.framing()
    bos, eos, padding = (_config_id(vocabulary, config, f"{name}_token") for name in ("bos", "eos", "pad"))
    return Tokenizer(
        vocabulary=vocabulary,
        encode_parts=backend.encode,
        bos_id=bos if bos is not None or len(prefix) != 1 else prefix[0],
        eos_id=eos,
        prefix=_chosen(config.get("add_bos_token"), bos, prefix),
        suffix=_chosen(config.get("add_eos_token"), eos, suffix),
        between=backend.between(prefix, suffix),
        declared_ends=end_ids(vocabulary, [eos, *_declared_ends(folder, len(vocabulary))], padding),
        drop_space=backend.drops_space(),
        chat_templates=_templates(folder, config),
        turn_ends=turn_ends,
    )


class Backend:
    """The `tokenizers` package: in this process, or in a child process for a file with components of unbounded cost.

    Args:
        data: a `tokenizer.json`.
        where: its place, for errors.
    """

    def __init__(self, data: bytes, where: object) -> None:
        self._where, self._lock = where, Lock()
        with self._named("the file cannot be read"):
            self._fast = _bounded(data) or _ConfinedTokenizer(data)
            self._facts = self._fast.facts()

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the package raises bare exceptions
            raise TokenizerError(f"{what} ({error})", where=self._where) from error

    def encode(self, text: str, parse_special: bool) -> list[int]:
        with self._named("the text cannot be encoded"), self._lock:
            return self._fast.encode(text, parse_special)

    def framing(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that the file's post-processor puts before and behind a text."""
        plain, framed = self._facts["plain"], self._facts["framed"]
        starts = [i for i in range(len(framed)) if framed[i : i + len(plain)] == plain]
        if not plain or not starts:
            raise TokenizerError("its post-processor changes the text's own ids", where=self._where)
        return tuple(framed[: starts[0]]), tuple(framed[starts[0] + len(plain) :])

    def between(self, prefix: tuple[int, ...], suffix: tuple[int, ...]) -> tuple[int, ...]:
        """The ids that the post-processor puts between the texts of a pair; without one for pairs, `suffix`."""
        plain, pair = self._facts["plain"], self._facts["pair"]
        start, end = [*prefix, *plain], [*plain, *suffix]
        if pair[: len(start)] != start or pair[len(pair) - len(end) :] != end:
            return suffix
        return tuple(pair[len(start) : len(pair) - len(end)])

    def vocabulary(self) -> Vocabulary:
        tokens = self._facts["tokens"]
        return Vocabulary(tokens, self._types(tokens), self._spelling())

    def _types(self, tokens: list[str]) -> bytes:
        types = bytearray([TokenType.NORMAL]) * len(tokens)
        if self._has("ByteFallback"):
            for token, text in enumerate(tokens):
                if is_byte_token(text):
                    types[token] = TokenType.BYTE
        for token, special in self._facts["added"]:
            types[token] = TokenType.CONTROL if special else TokenType.USER_DEFINED
        if self._facts["unknown"] is not None:
            types[self._facts["unknown"]] = TokenType.UNKNOWN
        return bytes(types)

    def _has(self, kind: str) -> bool:
        return any(decoder["type"] == kind for decoder in self._facts["decoders"])

    def _spelling(self) -> Spelling:
        if self._has("ByteLevel"):
            return Spelling.BYTE_LEVEL
        if self._has("ByteFallback") or self._has("Metaspace"):
            return Spelling.SENTENCEPIECE
        if self._has("WordPiece"):
            return Spelling.WORDPIECE
        kinds = [decoder["type"] for decoder in self._facts["decoders"]]
        what = f"its decoder {kinds} is neither byte-level, SentencePiece nor WordPiece"
        raise TokenizerError(what, where=self._where)

    def drops_space(self) -> bool:
        """Whether decoding takes a space off the start, because encoding put one there."""
        decoders = self._facts["decoders"]
        if self._has("WordPiece"):
            return True
        strips = any(d["type"] == "Strip" and d["content"] == " " and d["start"] > 0 for d in decoders)
        metaspace = [d for d in decoders if d["type"] == "Metaspace" and d["replacement"] == SPACE]
        return strips or any(d.get("prepend_scheme", "always") != "never" for d in metaspace)


class _ConfinedTokenizer:
    """A `FastTokenizer` in a child process."""

    def __init__(self, data: bytes) -> None:
        memory = _MEMORY + _MEMORY_A_BYTE * len(data)
        self._process = Confined("fast.py", memory=memory, setup={"file": data.decode("utf-8")})

    def facts(self) -> dict[str, Any]:
        return dict(self._process.call({"facts": True}))

    def encode(self, text: str, parse_special: bool) -> list[int]:
        return list(self._process.call({"text": text, "parse_special": parse_special}))


def _bounded(data: bytes) -> FastTokenizer | None:
    """A tokenizer in this process, or None if the file has components of unbounded cost."""
    if not may_read(data, KNOWN_EXPRESSIONS):
        return None
    found = FastTokenizer(data)
    return found if found.is_bounded() else None


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file; `TokenizerError` if it holds anything else."""
    return json_file.read_object(file, TokenizerError, MAX_BYTES) if file.exists() else {}


def _config_id(vocabulary: Vocabulary, config: Mapping[str, Any], name: str) -> int | None:
    """The id of a token that the configuration names, as a text or as an object with `content`."""
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    if not isinstance(text, str) or text not in vocabulary.ids:
        raise TokenizerError(f"{name} {text!r} is not in the vocabulary", where="tokenizer_config.json")
    return vocabulary.ids[text]


def _chosen(enabled: object, token: int | None, framing: tuple[int, ...]) -> tuple[int, ...]:
    """The special tokens at one end of a text. The configuration's switch wins over the post-processor."""
    if not isinstance(enabled, bool):
        return framing
    if not enabled or token is None:
        return ()
    return framing or (token,)


def _declared_ends(folder: Path, size: int) -> list[int]:
    """`eos_token_id` of `generation_config.json`, or of `config.json` where that says nothing.

    An id that no token has ends no text. Checkpoints with a small vocabulary often state the default of a larger model.
    """
    for name in ("generation_config.json", "config.json"):
        value = _eos_of(read_object(folder / name))
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(token) is int for token in ids):
                raise TokenizerError(f"eos_token_id {value!r} is neither an id nor a list of ids", where=folder / name)
            if outside := [token for token in ids if not 0 <= token < size]:
                what = f"eos_token_id {', '.join(map(str, outside))} is no id of a vocabulary of {size}"
                warnings.warn(f"{folder / name}: {what}; it is ignored", stacklevel=2)
            return [token for token in ids if 0 <= token < size]
    return []


def _eos_of(config: Mapping[str, Any]) -> Any:
    """`eos_token_id`, or that of the text model where a model has several parts."""
    part = config.get("text_config")
    own = config.get("eos_token_id")
    return own if own is not None or not isinstance(part, dict) else part.get("eos_token_id")


def templates_from_hf(folder: Path) -> dict[str, str]:
    """Chat templates by name, from the files of a checkpoint; `TokenizerError` if a file cannot be read."""
    return _templates(folder, read_object(folder / "tokenizer_config.json"))


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: files of their own win over `tokenizer_config.json`."""
    found = _named_templates(config.get("chat_template"), folder / "tokenizer_config.json")
    found |= _named_templates(read_object(folder / "chat_template.json").get("chat_template"), folder)
    if (file := folder / "chat_template.jinja").exists():
        found["default"] = json_file.read_text(file, TokenizerError)
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = json_file.read_text(file, TokenizerError)
    return found


def _named_templates(value: object, where: Path) -> dict[str, str]:
    """A template, or a list of objects with `name` and `template`."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}  # type: ignore[attr-defined]
    except (TypeError, KeyError):
        raise TokenizerError("chat_template is neither a text nor a list of named texts", where=where) from None
