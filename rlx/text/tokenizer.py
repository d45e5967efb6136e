"""Text to token ids and back: the class of every tokenizer, whatever file it comes from; ids to text as they come.

Text stage: built by `from_gguf.py` or `from_hf.py`; used by the runners and `chat.py`.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from rlx.errors import TokenizerError
from rlx.text.vocabulary import SpecialSplitter, TokenType, Vocabulary


class StreamDetokenizer:
    """Turns ids into text one at a time and never emits a part of a character.

    The pieces from `push` and `finish`, joined, equal `tokenizer.decode(ids, skip_special_tokens)`.

    Args:
        skip_special_tokens: leave control tokens out.
        continues: the ids go on after a text (an answer after its prompt), so that a leading space is a real one.
        keep: control tokens that are not left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = False,
        *,
        continues: bool = False,
        keep: Set[int] = frozenset(),
    ) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skip = tokenizer.special_ids - keep if skip_special_tokens else frozenset()
        self._drop_space = tokenizer.drop_space and not continues
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, perhaps none; `TokenizerError` for an id outside the vocabulary."""
        if token in self._skip:
            return ""
        piece = self._bytes_of(token)
        if self._drop_space and piece:
            piece, self._drop_space = piece.removeprefix(b" "), False
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """The rest of the text: U+FFFD if the last character never became whole."""
        return self._decoder.decode(b"", final=True)


class AnswerText:
    """Converts token ids to the text of an answer, which ends before the first stop string.

    Of several stop strings the one that is completed first counts, however the text is split into tokens; of those
    completed at the same character, the longest. Control tokens have no text, except those of `keep`.

    Attributes:
        text: the confirmed text; a possible beginning of a stop string is held back.
        stopped_at: the stop string that was found.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), keep: Set[int] = frozenset()) -> None:
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
        certain = len(text) - self._beginning(text[searched:])
        self._held = text[certain:]
        self._pieces.append(text[:certain])
        return text[:certain]

    def _first_stop(self, text: str, start: int) -> tuple[int, int, str] | None:
        """(end, begin, string) of the stop string that is completed first in `text`."""
        begins = ((text.find(stop, start), stop) for stop in self._stop)
        return min(((begin + len(stop), begin, stop) for begin, stop in begins if begin >= 0), default=None)

    def _beginning(self, text: str) -> int:
        """Number of characters at the end of `text` that may begin a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in self._stop)), 0)


def answer_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of an answer without control tokens."""
    text = AnswerText(tokenizer)
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
    def _pieces(self) -> list[bytes | None]:
        return [None] * self.vocab_size

    @cached_property
    def _joined(self) -> tuple[bytes, list[int]]:
        """The bytes of all pieces, one after the other, and where each ends."""
        pieces = [self.token_bytes(token) for token in range(self.vocab_size)]
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
        ids = self.encode_parts(text, parse_special)
        return self._framed(ids) if add_special_tokens else ids

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
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. `TokenizerError` for an id outside the vocabulary.

        Nothing else is cleaned up: `decode(encode(text, add_special_tokens=False)) == text`, up to Unicode
        normalization where the model asks for it.
        """
        skip = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(token) for token in ids if token not in skip])
        return (data.removeprefix(b" ") if self.drop_space else data).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one piece, perhaps a part of a character; `TokenizerError` for an id outside the vocabulary."""
        if not 0 <= token < len(self._pieces):
            raise TokenizerError(f"id {token} is outside the vocabulary of {self.vocab_size}")
        piece = self._pieces[token]
        if piece is None:
            piece = self._pieces[token] = self.vocabulary.bytes_of(token)
        return piece

    def id_to_token(self, token: int) -> str:
        """The piece as the vocabulary spells it; `TokenizerError` for an id outside the vocabulary."""
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(f"id {token} is outside the vocabulary of {self.vocab_size}")
        return self.vocabulary.tokens[token]

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
            hint="decode the bytes with errors='replace' first",
        ) from None  # fmt: skip
