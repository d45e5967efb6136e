"""Makes grammars ready for one vocabulary, in the form that llguidance reads, and keeps those that were used last.

Grammar stage, between `Grammar` and `Constraint`. A runner has one `GrammarCompiler`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

from rlx.errors import GrammarError
from rlx.grammar.constraint import Constraint, Marker, bits, is_blank
from rlx.grammar.grammar import Grammar, checked
from rlx.grammar.package import SLICES, grammar_error, limits, llguidance
from rlx.text.tokenizer import TokenType

if TYPE_CHECKING:
    from rlx.text.tokenizer import Tokenizer

_MARK = "\x02"  # in front of a text: what a tokenizer adds to the beginning of a text stands before it
KEPT = 64  # compiled grammars
KEPT_SECONDS = 3.0  # CPU time of the trials of all that are kept: what takes a second keeps about 150 MB


class GrammarTokenizer:
    """A tokenizer as llguidance wants it.

    The end of an answer is a token of its own, behind all others. Which of the model's tokens stand for it is decided
    by the request (`Constraint`), not by the vocabulary.

    Args:
        tokenizer: the model's.
        width: number of logits. Ids without a token are never chosen.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, width: int) -> None:
        known = min(width, tokenizer.vocab_size)
        self._tokenizer, self.eos_token_id = tokenizer, width
        self.tokens = list(map(tokenizer.vocabulary.bytes_of, range(known)))
        self.tokens += [b""] * (width - known) + [b"<end-of-answer>"]
        special = {*tokenizer.special_ids, *tokenizer.vocabulary.of_type(TokenType.UNUSED)}
        self.special_token_ids = [*sorted(token for token in special if token < known), width]
        self._before = tokenizer.encode_parts(_MARK, False)

    def __call__(self, text: bytes | str) -> list[int]:
        """The ids of a text within others; `[]` if the tokenizer cannot spell it so."""
        data = text.encode() if isinstance(text, str) else text
        if not data:
            return []
        size = len(self._before)
        found = self._tokenizer.encode_parts(_MARK + data.decode("utf-8", "replace"), False)
        ids = found[size:]
        if found[:size] != self._before or b"".join(self.tokens[token] for token in ids) != data:
            return self._spelled(data)
        return ids

    def _spelled(self, data: bytes) -> list[int]:
        """The ids of some bytes, the longest token first."""
        found, at = list[int](), 0
        while at < len(data):
            size, token = next(
                ((size, token) for size in range(min(len(data) - at, self._longest), 0, -1)
                 if (token := self._by_bytes.get(data[at : at + size])) is not None),
                (0, 0),
            )  # fmt: skip
            if not size:
                return []
            found.append(token)
            at += size
        return found

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        special = frozenset(self.special_token_ids)
        return {piece: i for i, piece in enumerate(self.tokens) if piece and i not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes), default=0)


class VocabularyMasks:
    """A vocabulary as llguidance reads it. To make one of 150,000 tokens takes a second.

    Attributes:
        width: number of logits.
        pieces: the bytes of each id.
        tokenizer: llguidance's form of it.
        blank: a mask of the tokens that are nothing but white space.
        everything: a mask of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer, width: int) -> None:
        package, own = llguidance(), GrammarTokenizer(tokenizer, width)
        self.width, self.pieces = width, own.tokens[:width]
        self.tokenizer = package.LLTokenizer(package.TokenizerWrapper(own), slices=SLICES)
        self.blank = bits((i for i, piece in enumerate(self.pieces) if is_blank(piece)), width)
        self.everything = bits((i for i, piece in enumerate(self.pieces) if piece), width)


@dataclass
class CompiledGrammar:
    """A grammar for one vocabulary. All answers that follow it share one.

    Attributes:
        matcher: llguidance's state before the first token; answers begin with copies of it.
    """

    grammar: Grammar
    vocabulary: VocabularyMasks
    matcher: Any
    _markers: dict[tuple[str, bool], Marker] = field(default_factory=dict)

    def marker(self, text: str, *, blank_after: bool) -> Marker:
        """Finds a text in an answer, see `Marker`."""
        key = text, blank_after
        if key not in self._markers:
            self._markers[key] = Marker(text, self.vocabulary.pieces, blank_after=blank_after)
        return self._markers[key]

    def constraint(self, stop_ids: Set[int] = frozenset()) -> Constraint:
        """The state of an answer that begins.

        Args:
            stop_ids: the tokens that end an answer where the grammar allows it.
        """
        return Constraint(self, frozenset(stop_ids))


class GrammarCompiler:
    """Makes grammars ready for a model. May be used from several threads at once.

    Args:
        tokenizer: returns the model's tokenizer.
        width: number of logits.

    Example:
        >>> constraint = GrammarCompiler(lambda: tokenizer, 32000).compile(Grammar.json_object()).constraint()
    """

    def __init__(self, tokenizer: Callable[[], Tokenizer], width: int) -> None:
        self._tokenizer, self._width = tokenizer, width
        self._known: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock, self._building = Lock(), Lock()
        self._masks: VocabularyMasks | None = None

    @property
    def vocabulary(self) -> VocabularyMasks:
        """The vocabulary, made at first use.

        Raises:
            TokenizerError: the model has no tokenizer.
            GrammarError: llguidance is not installed.
        """
        with self._building:
            if self._masks is None:
                self._masks = VocabularyMasks(self._tokenizer(), self._width)
            return self._masks

    def compile(self, grammar: Any) -> CompiledGrammar:
        """The grammar for this vocabulary; milliseconds at first, and at once while it is among the last ones used.

        Raises:
            GrammarError: it cannot be compiled, or names a token that the model does not have.
            TokenizerError: the model has no tokenizer.
        """
        grammar = checked(grammar)
        with self._lock:
            found = self._known.get(grammar)
            if found is not None:
                self._known.move_to_end(grammar)
                return found
        found = self._compiled(grammar)
        with self._lock:
            self._known[grammar] = found
            while len(self._known) > KEPT or (len(self._known) > 1 and self._seconds() > KEPT_SECONDS):
                self._known.popitem(last=False)
        return found

    def _seconds(self) -> float:
        return sum(each.seconds for each in self._known)

    def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        vocabulary = self.vocabulary
        matcher = llguidance().LLMatcher(vocabulary.tokenizer, grammar.source, log_level=0, limits=limits())
        if matcher.is_error():
            raise grammar_error(matcher.get_error(), grammar.name, grammar.kind, grammar.written)
        found = CompiledGrammar(grammar, vocabulary, matcher)
        first = found.constraint()  # this also finds the texts before it in the vocabulary
        if first.is_over:
            hint = "let it allow at least one character"
            raise GrammarError("it allows no text but the empty one", where=grammar.name, hint=hint)
        matcher.deep_copy().compute_ff_tokens()  # the parts of the lexer that the first mask needs, which copies share
        return found
