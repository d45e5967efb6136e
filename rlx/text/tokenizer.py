"""Text to token ids and back: pieces, the class of every tokenizer, whatever file it comes from, ids to text as they
come.

Text stage: built by `from_gguf.py` or `from_hf.py`; used by the runners and `chat.py`.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cached_property
from itertools import accumulate
from numbers import Integral

import numpy as np

from rlx.arguments import flag, several
from rlx.closing import of_one_process
from rlx.errors import ArgumentError, TokenizerError


class SpecialSplitter:
    """Finds the given token texts in a text: the leftmost first, the longest where several begin at one place."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {text: token for text, token in ids.items() if text}
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        self._first = re.compile("[" + re.escape("".join(lengths)) + "]") if lengths else None

    def split(self, text: str) -> list[str | int]:
        """The text in order: ids of the tokens found, and the stretches between them that are not empty."""
        found = list[str | int]()
        begin = at = 0
        while self._first is not None and (match := self._first.search(text, at)) is not None:
            at = match.start()
            size = next((size for size in self._lengths[text[at]] if text[at : at + size] in self._ids), 0)
            if not size:
                at += 1
                continue
            if begin < at:
                found.append(text[begin:at])
            found.append(self._ids[text[at : at + size]])
            begin = at = at + size
        if begin < len(text):
            found.append(text[begin:])
        return found


SPACE = "\u2581"  # SentencePiece writes a space as this character


class TokenType(IntEnum):
    """Token types as `tokenizer.ggml.token_type` numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Spelling(Enum):
    """How the text of a normal token stands for bytes."""

    BYTE_LEVEL = "byte-level"  # one printable character a byte (GPT-2)
    SENTENCEPIECE = "sentencepiece"  # UTF-8, a space is U+2581
    WORDPIECE = "wordpiece"  # UTF-8, a space comes before each token without ##


def _byte_alphabet() -> tuple[str, ...]:
    """The character of each byte in byte-level BPE: printable Latin-1 stands for itself, the others follow U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_ALPHABET = _byte_alphabet()
_BYTE_OF = {char: byte for byte, char in enumerate(BYTE_ALPHABET)}


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Text and type (`TokenType`, one byte each) of the ids 0..n-1; an id without a token has the text ""."""

    tokens: Sequence[str]
    types: bytes
    spelling: Spelling

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token text -> id."""
        return {text: token for token, text in enumerate(self.tokens) if text}

    def of_type(self, *types: TokenType) -> list[int]:
        """The ids of the given types, ascending."""
        found = np.isin(np.frombuffer(self.types, np.uint8), [int(kind) for kind in types])
        return [int(token) for token in np.flatnonzero(found)]

    def bytes_of(self, token: int) -> bytes:
        """The bytes that id `token` stands for in a text."""
        text, kind = self.tokens[token], self.types[token]
        if kind == TokenType.BYTE:
            return bytes([int(text[3:5], 16)])
        if kind != TokenType.NORMAL:
            return text.encode("utf-8", "surrogateescape")
        if self.spelling is Spelling.WORDPIECE:
            return (text.removeprefix("##") if text.startswith("##") else " " + text).encode("utf-8", "surrogateescape")
        if self.spelling is Spelling.SENTENCEPIECE:
            return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")
        return _byte_level_bytes(text)


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in text])
    except KeyError:  # a token that was added as plain text
        return text.encode("utf-8", "surrogateescape")


def is_byte_token(text: str) -> bool:
    """Whether a token's text has the form `<0xHH>` of a byte token."""
    return re.fullmatch("<0x[0-9A-Fa-f]{2}>", text) is not None


# Tokens that end a generation whatever the metadata says, because models are published without naming them.
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<|fim_pad|>", "<|fim_repo|>", "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
_HTML_END = "</s>"  # an end in Llama 2, a strike-through tag in Gemma: counts only as a control token


def named_ends(vocabulary: Vocabulary) -> set[int]:
    """The ids whose text says that a generation ends there."""
    ids, types = vocabulary.ids, vocabulary.types
    found = {ids[text] for text in _ENDS if text in ids and types[ids[text]] != TokenType.BYTE}
    if _HTML_END in ids and types[ids[_HTML_END]] == TokenType.CONTROL and "<|tool_response>" not in ids:
        found.add(ids[_HTML_END])
    if "<|return|>" in ids and "<|call|>" in ids:  # there `<|end|>` closes a message, not the answer
        found.discard(ids.get("<|end|>", -1))
    return found


def end_ids(vocabulary: Vocabulary, declared: Iterable[int | None], padding: int | None) -> frozenset[int]:
    """`named_ends` and the ids that the model's files declare; a byte token never ends a generation.

    Files that declare an end and use another one for padding have said what that is for: its name does not count then.
    """
    known = {token for token in declared if token is not None and vocabulary.types[token] != TokenType.BYTE}
    return frozenset(known | (named_ends(vocabulary) - ({padding} if known else set())))


class StreamDetokenizer:
    """Turns ids into text one at a time and never emits a part of a character.

    The pieces from `push` and `finish`, joined, equal `tokenizer.decode(ids, skip_special_tokens)`.

    Args:
        skip_special_tokens: leave control tokens out.
        continues: the ids go on after a text (an answer after its prompt), so that a leading space is a real one.
        keep: control tokens that are not left out.
    """

    __reduce__ = of_one_process

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = False,
        *,
        continues: bool = False,
        keep: Collection[int] = (),
    ) -> None:
        if not hasattr(tokenizer, "token_bytes"):
            what, hint = f"expected a Tokenizer, found a {type(tokenizer).__name__}", "give load_tokenizer(path)"
            raise ArgumentError(what, where="tokenizer", hint=hint)
        self._bytes_of = tokenizer.token_bytes
        self._skip = tokenizer.special_ids.difference(keep) if skip_special_tokens else frozenset()
        self._drop_space = tokenizer.drop_space and not continues
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, perhaps none; `TokenizerError` for an id outside the vocabulary."""
        piece = self._bytes_of(token)
        if token in self._skip:
            return ""
        if self._drop_space and piece:
            piece, self._drop_space = piece.removeprefix(b" "), False
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """The rest of the text: U+FFFD if the last character never became whole."""
        return self._decoder.decode(b"", final=True)


def tail_of(text: str, markers: Sequence[str]) -> int:
    """Number of characters at the end of `text` that may begin one of the markers."""
    longest = min(max(map(len, markers), default=1) - 1, len(text))
    sizes = range(longest, 0, -1)
    return next((n for n in sizes if any(marker.startswith(text[-n:]) for marker in markers)), 0)


class AnswerText:
    """Converts token ids to the text of an answer, which ends before the first stop string.

    Of several stop strings the one that is completed first counts, however the text is split into tokens; of those
    completed at the same character, the longest. Control tokens have no text, except those of `keep`.

    Attributes:
        text: the confirmed text; a possible beginning of a stop string is held back.
        stopped_at: the stop string that was found.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), keep: Collection[int] = ()) -> None:
        self._detokenizer = StreamDetokenizer(tokenizer, skip_special_tokens=True, continues=True, keep=keep)
        self._stop, self._held, self._pieces = tuple(stop), "", list[str]()
        self.stopped_at: str | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def push(self, token: int, may_stop: bool = True) -> str:
        """Adds one token; returns the newly confirmed text, possibly empty.

        Args:
            may_stop: if False, a stop string that `token` completes is ordinary text.
        """
        more = self._detokenizer.push(token)
        if self._stop:
            return self._release(more, may_stop)
        self._pieces.append(more)
        return more

    def finish(self) -> str:
        """Ends the text; returns the rest of it."""
        rest = self._release(self._detokenizer.finish(), True)
        held, self._held = self._held, ""
        self._pieces.append(held)
        return rest + held

    def _release(self, more: str, may_stop: bool) -> str:
        if self.stopped_at is not None:
            return ""
        text, searched = self._held + more, 0
        while found := self._first_stop(text, searched):
            end, begin, stop = found
            if may_stop:
                self.stopped_at, self._held = stop, ""
                self._pieces.append(text[:begin])
                return text[:begin]
            searched = end
        certain = len(text) - tail_of(text[searched:], self._stop)
        self._held = text[certain:]
        self._pieces.append(text[:certain])
        return text[:certain]

    def _first_stop(self, text: str, start: int) -> tuple[int, int, str] | None:
        """(end, begin, string) of the stop string that is completed first in `text`."""
        begins = ((text.find(stop, start), stop) for stop in self._stop)
        return min(((begin + len(stop), begin, stop) for begin, stop in begins if begin >= 0), default=None)


def answer_text(tokenizer: Tokenizer, ids: Sequence[int], keep: Collection[int] = ()) -> str:
    """The text of an answer without control tokens, except those of `keep`."""
    text = AnswerText(tokenizer, keep=keep)
    for token in ids:
        text.push(token)
    text.finish()
    return text.text


PIECE = 1 << 16  # characters that are encoded at once where it may turn out that the text is too long
USUAL_CHARACTERS = 8  # of a token at most, in usual texts


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Tokenizer:
    """A tokenizer; make one with `load_tokenizer`, `tokenizer_from_gguf` or `tokenizer_from_hf`.

    It may be used from several threads at once.

    Attributes:
        vocabulary: text, type and bytes of every id.
        encode_parts: `(text, parse_special) -> ids` without BOS and EOS.
        bos_id, eos_id: the ids that begin and end a text, if the model has them.
        prefix, suffix: what `encode` puts around a text, usually BOS and nothing.
        between: what `encode_pair` puts between two texts.
        declared_ends: ids that end a generation by what the files say and by their names.
        drop_space: SentencePiece put a space before the text, so `decode` takes one off its start.
        chat_templates: Jinja templates by name.
        turn_ends: finds the ids that the template ends an answer with, see `rlx.text.chat`.
    """

    vocabulary: Vocabulary
    encode_parts: Callable[[str, bool], list[int]]
    bos_id: int | None
    eos_id: int | None
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    declared_ends: frozenset[int] = frozenset()
    drop_space: bool = False
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    turn_ends: Callable[[Tokenizer], frozenset[int]] = lambda tokenizer: frozenset()

    __reduce__ = of_one_process

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self.vocabulary)

    @property
    def add_bos(self) -> bool:
        """Whether `encode` begins a text with BOS."""
        return bool(self.prefix)

    @property
    def add_eos(self) -> bool:
        """Whether `encode` ends a text with EOS."""
        return bool(self.suffix)

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, if it has one."""
        return self.chat_templates.get("default")

    @cached_property
    def eog_ids(self) -> frozenset[int]:
        """Ids that end a generation (end of text, of turn, of message): `declared_ends` and what the template shows."""
        return self.declared_ends | self.turn_ends(self)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Control and unknown tokens and the ends of a generation: what `skip_special_tokens` leaves out."""
        return frozenset(self.vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)) | self.declared_ends

    @cached_property
    def control_splitter(self) -> SpecialSplitter:
        """Splits a text at the texts of `special_ids`, to keep control tokens out of user text."""
        return SpecialSplitter({self.vocabulary.tokens[token]: token for token in self.special_ids})

    @cached_property
    def _pieces(self) -> dict[int, bytes]:
        """Id -> bytes, of the ids that were asked for."""
        return {}

    @cached_property
    def _joined(self) -> tuple[bytes, list[int]]:
        """The bytes of all pieces, one after the other, and where each ends."""
        pieces = list(map(self.vocabulary.bytes_of, range(self.vocab_size)))
        return b"".join(pieces), list(accumulate(map(len, pieces)))

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """The ids of `text`.

        Args:
            add_special_tokens: put the model's BOS before and EOS behind the text, as the model asks for. A text that
                begins with its BOS already gets no second one.
            parse_special: the text of a control token (`<|im_end|>`) becomes its id. Otherwise it is text like any
                other, which is what text from a stranger should be. User-defined tokens are matched either way.

        Raises:
            TokenizerError: `text` is no string, or holds half a surrogate pair.
        """
        _check_text(text)
        ids = self.encode_parts(text, flag("parse_special", parse_special))
        return self._framed(ids) if flag("add_special_tokens", add_special_tokens) else ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """The ids of two texts as a cross-encoder takes them: the first with what stands around it, then the second.

        Raises:
            TokenizerError: as `encode`.
        """
        for text in (first, second):
            _check_text(text)
        one, two = (self.encode_parts(text, False) for text in (first, second))
        return [*self.prefix, *one, *self.between], [*two, *self.suffix]

    def estimated_beyond(self, text: str, most: int) -> int:
        """An estimate of the number of tokens of a text that has far more than `most` of them; 0 if it may fit.

        It encodes no more of the text than it takes to know: a text of megabytes is refused in a moment.

        Raises:
            TokenizerError: as `encode`.
        """
        _check_text(text)
        if len(text) <= max(PIECE, USUAL_CHARACTERS * most):
            return 0
        count = 0
        for at in range(0, len(text), PIECE):
            count += len(self.encode_parts(text[at : at + PIECE], False))
            if count > 2 * most:  # pieces may have some tokens more than the whole text has there
                return count * len(text) // (at + PIECE)
        return 0

    def _framed(self, ids: list[int]) -> list[int]:
        prefix = () if self.prefix and tuple(ids[: len(self.prefix)]) == self.prefix else self.prefix
        suffix = () if self.suffix and tuple(ids[-len(self.suffix) :]) == self.suffix else self.suffix
        return [*prefix, *ids, *suffix]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Nothing else is cleaned up: `decode(encode(text, add_special_tokens=False)) == text`, up to Unicode
        normalization where the model asks for it.

        Raises:
            ArgumentError: `ids` is no list.
            TokenizerError: one of them is no id of the vocabulary.
        """
        skip = self.special_ids if flag("skip_special_tokens", skip_special_tokens) else frozenset()
        pieces = [(token, self.token_bytes(token)) for token in several("ids", ids, "token ids")]
        data = b"".join([piece for token, piece in pieces if token not in skip])
        return (data.removeprefix(b" ") if self.drop_space else data).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one piece, perhaps a part of a character; `TokenizerError` for an id outside the vocabulary."""
        piece = self._pieces.get(token) if type(token) is int else None
        if piece is None:
            self._check_id(token)
            piece = self._pieces[int(token)] = self.vocabulary.bytes_of(token)
        return piece

    def id_to_token(self, token: int) -> str:
        """The piece as the vocabulary spells it; `TokenizerError` for an id outside the vocabulary."""
        self._check_id(token)
        return self.vocabulary.tokens[token]

    def _check_id(self, token: object) -> None:
        if not isinstance(token, Integral) or not 0 <= int(token) < len(self.vocabulary.tokens):
            raise TokenizerError(f"{token!r:.80} is no id of the vocabulary of {self.vocab_size} tokens")

    def tokens_with(self, text: str) -> frozenset[int]:
        """The ids whose bytes contain those of `text`, which is not empty."""
        part, (written, ends) = text.encode(), self._joined
        found, at = list[int](), written.find(part)
        while at >= 0:
            token = bisect_right(ends, at)
            is_inside = at + len(part) <= ends[token]
            if is_inside:
                found.append(token)
            at = written.find(part, ends[token] if is_inside else at + 1)
        return frozenset(found)

    def token_to_id(self, text: str) -> int | None:
        """The id of a piece as the vocabulary spells it, or None."""
        return self.vocabulary.ids.get(text)

    def __repr__(self) -> str:
        ends = sorted(self.vocabulary.tokens[token] for token in self.eog_ids)
        return f"<Tokenizer of {self.vocab_size} {self.vocabulary.spelling.value} tokens, ends {ends}>"


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TokenizerError(f"text must be a str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"character {error.start} is half a surrogate pair (U+{ord(text[error.start]):04X})", where="text",
            hint="cut texts between characters, or decode their bytes with errors='replace'",
        ) from None  # fmt: skip
