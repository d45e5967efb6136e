"""The pieces of a SentencePiece model file (`tokenizer.model`).

Export stage, under `hf_tokenizer.py`. The file is a protocol buffer (sentencepiece_model.proto, ModelProto). Field 1,
repeated: a piece with text (1), score (2, float32) and type (3, 1 if absent; numbers as in `TokenType`). Field 2: the
trainer's specification with the kind of model (3: 2 is BPE). Field 3: the normalizer's, with `add_dummy_prefix` (3,
true if absent). Other fields are skipped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlx.errors import TokenizerError
from rlx.text.vocabulary import TokenType

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BPE = 2


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """What a `tokenizer.model` says.

    Attributes:
        pieces: in the order of their ids.
        space_prefix: whether a space is put before a text.
    """

    pieces: list[Piece]
    space_prefix: bool


def is_sentencepiece(file: Path) -> bool:
    """Whether the file starts as such a model; other formats also use the name `tokenizer.model`."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(1) == b"\x0a"


def read_sentencepiece(file: Path) -> SentencePieceModel:
    """Reads a BPE model; `TokenizerError` if the file is damaged or of another kind."""
    try:
        return _read(file.read_bytes(), file)
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, AttributeError) as error:
        hint = "the download or the copy failed: repeat it"
        raise TokenizerError(f"the file is not a SentencePiece model ({error})", where=file, hint=hint) from error


def _read(buffer: bytes, where: Path) -> SentencePieceModel:
    pieces: list[Piece] = []
    space_prefix, kind = True, 1
    for field, value in _fields(buffer):
        if field == 1:
            pieces.append(_piece(dict(_fields(_bytes(value)))))
        elif field == 2:
            kind = int(_number(dict(_fields(_bytes(value))).get(3, 1)))
        elif field == 3:
            space_prefix = bool(dict(_fields(_bytes(value))).get(3, 1))
    if kind != _BPE:
        raise TokenizerError(f"a SentencePiece model of kind {kind}, expected {_BPE} (BPE)", where=where)
    return SentencePieceModel(pieces, space_prefix)


def _piece(fields: dict[int, int | float | bytes]) -> Piece:
    text = _bytes(fields[1]).decode() if 1 in fields else ""
    return Piece(text, float(_number(fields.get(2, 0.0))), int(_number(fields.get(3, TokenType.NORMAL))))


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
