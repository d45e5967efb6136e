"""Makes grammars ready for one vocabulary, and keeps those that were used last.

Grammar stage, between `Grammar` and `Constraint`. A runner has one `GrammarCompiler`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from rlx.errors import GrammarError
from rlx.grammar.constraint import Constraint
from rlx.grammar.grammar import Grammar
from rlx.grammar.package import SLICES, grammar_error, limits, llguidance
from rlx.grammar.vocabulary import GrammarTokenizer, Marker, bits

if TYPE_CHECKING:
    from rlx.text.tokenizer import Tokenizer

KEPT = 64  # compiled grammars
KEPT_SECONDS = 3.0  # CPU time of the trials of all that are kept: what takes a second keeps about 150 MB


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
        self.blank = bits((i for i, piece in enumerate(self.pieces) if piece and not piece.strip(b" \t\r\n")), width)
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
        if not isinstance(grammar, Grammar):
            hint = "make one with Grammar.json_schema, regex, choice, lark or gbnf"
            raise GrammarError(f"expected a Grammar, found a {type(grammar).__name__}", where="grammar", hint=hint)
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
