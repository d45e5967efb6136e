"""A tokenizer from a Hugging Face folder: `tokenizer.json` and the small files beside it.

Text stage: the `tokenizers` package does the encoding; this reads from it, and from `tokenizer_config.json`,
`special_tokens_map.json`, `generation_config.json`, `config.json` and the chat template files, what generation needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from rlx.errors import TokenizerError
from rlx.text.tokenizer import Tokenizer
from rlx.text.turns import turn_ends
from rlx.text.vocabulary import SPACE, Spelling, TokenType, Vocabulary, end_ids, is_byte_token


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
    return _assemble(_Backend(file), config, folder)


def _assemble(backend: _Backend, config: Mapping[str, Any], folder: Path) -> Tokenizer:
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
        declared_ends=end_ids(vocabulary, [eos, *_declared_ends(folder, len(vocabulary))], padding),
        drop_space=backend.drops_space(),
        chat_templates=_templates(folder, config),
        turn_ends=turn_ends,
    )


class _Backend:
    """The `tokenizers` object and what can be learned from it."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer as Fast

        try:
            self._fast = Fast.from_file(str(file))
        except Exception as error:  # the package raises bare exceptions
            raise TokenizerError(f"the file cannot be read ({error})", where=file) from error
        self._file, self._lock = file, Lock()
        self._fast.no_padding()
        self._fast.no_truncation()
        self._decoders = list(_flatten(self._part("decoder")))

    def _part(self, name: str) -> dict[str, Any]:
        part = getattr(self._fast, name)
        return {} if part is None else dict(json.loads(part.__getstate__()))

    def encode(self, text: str, parse_special: bool) -> list[int]:
        with self._lock:  # the switch belongs to the object, not to the call
            self._fast.encode_special_tokens = not parse_special
            return list(self._fast.encode(text, add_special_tokens=False).ids)

    def framing(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that the file's post-processor puts before and behind a text."""
        plain = list(self._fast.encode("a", add_special_tokens=False).ids)
        framed = list(self._fast.encode("a").ids)
        starts = [i for i in range(len(framed)) if framed[i : i + len(plain)] == plain]
        if not plain or not starts:
            raise TokenizerError("its post-processor changes the text's own ids", where=self._file)
        return tuple(framed[: starts[0]]), tuple(framed[starts[0] + len(plain) :])

    def vocabulary(self) -> Vocabulary:
        index = self._fast.get_vocab(with_added_tokens=True)
        if not index:
            raise TokenizerError("the vocabulary is empty", where=self._file)
        tokens = [""] * (max(index.values()) + 1)
        for text, token in index.items():
            tokens[token] = text
        return Vocabulary(tokens, self._types(tokens), self._spelling())

    def _types(self, tokens: list[str]) -> bytes:
        types = bytearray([TokenType.NORMAL]) * len(tokens)
        if self._has("ByteFallback"):
            for token, text in enumerate(tokens):
                if is_byte_token(text):
                    types[token] = TokenType.BYTE
        for token, added in self._fast.get_added_tokens_decoder().items():
            types[token] = TokenType.CONTROL if added.special else TokenType.USER_DEFINED
        unknown = getattr(self._fast.model, "unk_token", None)
        unknown_id = None if unknown is None else self._fast.token_to_id(unknown)
        if unknown_id is not None:
            types[unknown_id] = TokenType.UNKNOWN
        return bytes(types)

    def _has(self, kind: str) -> bool:
        return any(decoder["type"] == kind for decoder in self._decoders)

    def _spelling(self) -> Spelling:
        if self._has("ByteLevel"):
            return Spelling.BYTE_LEVEL
        if self._has("ByteFallback") or self._has("Metaspace"):
            return Spelling.SENTENCEPIECE
        kinds = [decoder["type"] for decoder in self._decoders]
        raise TokenizerError(
            f"its decoder {kinds} is neither byte-level nor SentencePiece", where=self._file,
            hint="only the tokenizers of causal language models are supported",
        )  # fmt: skip

    def drops_space(self) -> bool:
        """Whether decoding takes a space off the start, because encoding put one there."""
        strips = any(d["type"] == "Strip" and d["content"] == " " and d["start"] > 0 for d in self._decoders)
        metaspace = [d for d in self._decoders if d["type"] == "Metaspace" and d["replacement"] == SPACE]
        return strips or any(d.get("prepend_scheme", "always") != "never" for d in metaspace)


def _flatten(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder.get("type") == "Sequence":
        for part in decoder["decoders"]:
            yield from _flatten(part)
    elif decoder:
        yield decoder


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file; `TokenizerError` if it holds anything else."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"the file is no JSON ({error})", where=file) from error
    if not isinstance(value, dict):
        raise TokenizerError("the file holds no JSON object", where=file)
    return value


def _config_id(vocabulary: Vocabulary, config: Mapping[str, Any], name: str) -> int | None:
    """The id of a token that the configuration names, as a text or as an object with `content`."""
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    if not isinstance(text, str) or text not in vocabulary.ids:
        raise TokenizerError(f"{name} {text!r} is not in the vocabulary", where="tokenizer_config.json")
    return vocabulary.ids[text]


def _chosen(wanted: object, token: int | None, framing: tuple[int, ...]) -> tuple[int, ...]:
    """What stands at one end of a text: the configuration's switch decides where it is set, else the post-processor."""
    if not isinstance(wanted, bool):
        return framing
    if not wanted or token is None:
        return ()
    return framing or (token,)


def _declared_ends(folder: Path, size: int) -> list[int]:
    """`eos_token_id` of `generation_config.json`, or of `config.json` where that says nothing."""
    for name in ("generation_config.json", "config.json"):
        value = _eos_of(read_object(folder / name))
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(token, int) and 0 <= token < size for token in ids):
                raise TokenizerError(f"eos_token_id {value} is no id of a vocabulary of {size}", where=folder / name)
            return ids
    return []


def _eos_of(config: Mapping[str, Any]) -> Any:
    """`eos_token_id`, or that of the text model where a model has several parts."""
    part = config.get("text_config")
    own = config.get("eos_token_id")
    return own if own is not None or not isinstance(part, dict) else part.get("eos_token_id")


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: files of their own win over `tokenizer_config.json`."""
    found = _named_templates(config.get("chat_template"), folder / "tokenizer_config.json")
    found |= _named_templates(read_object(folder / "chat_template.json").get("chat_template"), folder)
    if (file := folder / "chat_template.jinja").is_file():
        found["default"] = file.read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
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
