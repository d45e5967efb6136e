"""The choice of a token: what a device is told beside the logits of a row, what it then does, and who tells it.

Sampling stage: a `Sampler` has the state of one generation and makes choices, and devices carry them out. The function
`choose` is their meaning, in NumPy: every device finds the same tokens. For devices without a chooser of their own the
host chooses (`choose_rows`). It looks at few of a row's logits: with top-k, and without randomness, only tokens count
that may be among the largest. Of some sets of tokens, those with the largest maxima have one each that is at least the
least of these maxima: so tokens below this border are too small, unless a change raises them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite, log, log2
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from rlx.errors import NumericalError, SamplingError
from rlx.sampling.filters import Floats, Logits, exp, filters_of, tempered, total, weights, xtc_excluded
from rlx.sampling.options import SampleOpts, checked_sample
from rlx.sampling.penalties import Changes, Penalties, Tokenizer

Words = npt.NDArray[np.int32]
Ids = npt.NDArray[np.intp]

#: The numbers of a choice that a device reads, float64, in this order: options, then the logarithm of `min_p`, a random
#: number in [0, 1), and the smallest probability that Mirostat keeps.
NUMBERS = (
    "temperature", "top_n_sigma", "top_k", "typical_p", "top_p", "xtc_probability", "xtc_threshold",
    "repetition_penalty", "frequency_penalty", "presence_penalty", "mirostat", "log_min_p", "uniform", "least_share",
)  # fmt: skip
LOG_MIN_P, UNIFORM, LEAST_SHARE = range(len(NUMBERS) - 3, len(NUMBERS))


@dataclass(slots=True)
class Choice:
    """How a token is chosen from a row of logits.

    Attributes:
        opts: the options.
        numbers: what a device reads of them, see `NUMBERS`.
        mask: int32 words whose bit i % 32 of word i // 32 says whether token i may be chosen; None: any may. It comes
            first.
        changes: of the logits; they come after the mask.
    """

    opts: SampleOpts
    mask: Words | None = None
    changes: Changes | None = None
    numbers: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = np.zeros(len(NUMBERS))
        self.numbers[:LOG_MIN_P] = [getattr(self.opts, name) for name in NUMBERS[:LOG_MIN_P]]
        self.numbers[LOG_MIN_P] = log(self.opts.min_p) if self.opts.min_p else -np.inf


class Chosen(NamedTuple):
    """A token chosen from a row.

    Attributes:
        token: its id; -1 if no token can be chosen: `refuse` says why.
        is_finite: whether all logits of the row are finite. One of -inf excludes its token.
        surprise: -log2 of the token's probability under Mirostat, before any token is removed; else 0.
    """

    token: int
    is_finite: bool
    surprise: float = 0.0


def choose(logits: Logits, choice: Choice) -> Chosen:
    """Chooses a token from a row of logits, [vocab]."""
    is_finite = bool(np.isfinite(logits).all())
    values = changed(logits, choice)
    if not (np.isfinite(logits.max()) and np.isfinite(values.max())):
        return Chosen(-1, is_finite)
    if choice.opts.is_greedy:
        return Chosen(int(values.argmax()), is_finite)
    ids, shares = shares_of(values, choice)
    rising = shares.cumsum()
    at = rising.searchsorted(choice.numbers[UNIFORM] * rising[-1], side="right")
    last = rising.searchsorted(rising[-1])  # where rounding must not go beyond: the last token that has a share
    token = int(ids[min(at, last)])
    return Chosen(token, is_finite, float(surprises(values, choice)[token]) if choice.opts.mirostat else 0.0)


#: Chooses a token from each of some rows, float32[vocab] or an array of them, as `choose`. They lie where the device's
#: programs leave them, or on the host.
Choose = Callable[[Sequence[Any], Sequence[Choice]], list[Chosen]]

#: The hint for logits that are NaN or infinite.
BROKEN = "the weights or the arithmetic are broken: check the file, or try precision='exact'"
#: The choice of the likeliest token.
LIKELIEST = Choice(SampleOpts.greedy())


def masked(logits: Logits, words: Words) -> Logits:
    """The logits, [vocab], with -inf where the bit of an id is 0: a new array.

    Example:
        >>> masked(np.float32([1, 2, 3]), np.int32([0b101]))
        array([  1., -inf,   3.], dtype=float32)
    """
    allowed = np.unpackbits(words.view(np.uint8), bitorder="little", count=len(logits))
    return np.where(allowed, logits, np.asarray(-np.inf, logits.dtype))


def changed(logits: Logits, choice: Choice) -> Floats:
    """The logits after the mask and the changes, float64."""
    values: Floats = (logits if choice.mask is None else masked(logits, choice.mask)).astype(np.float64)
    opts, changes = choice.opts, choice.changes
    for token, count, amount in zip(*(each.tolist() for each in changes), strict=True) if changes else ():
        if 0 <= token < len(values):
            value = float(values[token])
            if count:
                scaled = value / opts.repetition_penalty if value > 0 else value * opts.repetition_penalty
                value = scaled - count * opts.frequency_penalty - opts.presence_penalty
            values[token] = value + amount
    return values


def shares_of(values: Floats, choice: Choice) -> tuple[Ids, Floats]:
    """The ids that may be drawn, ascending, and their probabilities up to a factor.

    With XTC these are of the mixture of the draws in which it applies and of those in which it does not.
    """
    opts, ids = choice.opts, np.arange(len(values))
    if opts.mirostat:
        masses = weights(values, opts.temperature)
        ids = np.flatnonzero(masses >= choice.numbers[LEAST_SHARE] * total(masses))
        ids = ids if len(ids) else np.array([masses.argmax()])
        return ids, masses[ids]
    for keep in filters_of(opts):
        ids = ids[keep(values[ids])]
    kept = values[ids]
    shares = weights(kept, opts.temperature)
    if opts.xtc_probability:
        left = np.delete(np.arange(len(kept)), xtc_excluded(kept, opts.xtc_threshold))
        without = weights(kept[left], opts.temperature)
        shares *= (1 - opts.xtc_probability) / total(shares)
        shares[left] += without * (opts.xtc_probability / total(without))
    return ids, shares


def surprises(values: Floats, choice: Choice) -> Floats:
    """The surprise of each token in bits, after the temperature."""
    below = tempered(values, choice.opts.temperature)
    found: Floats = surprise(below, float(total(exp(below))))
    return found


def surprise(below: Any, everything: float) -> Any:
    """The surprise in bits of a token, or of tokens, whose value is so far below the largest.

    Args:
        everything: the sum of all weights.
    """
    return log2(everything) - below * _BITS


_BITS = 1 / float(np.log(2))


def refuse(row: npt.ArrayLike, choice: Choice) -> NoReturn:
    """The error for a row of logits from which no token can be chosen.

    Raises:
        NumericalError: a logit is NaN or +inf, or all are -inf.
        SamplingError: mask, bias and bans leave no token.
    """
    logits = np.asarray(row)
    with np.errstate(invalid="ignore"):
        top = logits.max()
        if np.isfinite(top):
            top = changed(logits, choice).max()
            if top == -np.inf:
                hint = "ban fewer tokens: logit_bias of -inf and min_tokens do, also under a grammar"
                raise SamplingError("bias and bans exclude every token", where="sampling", hint=hint)
    raise NumericalError(f"the largest logit is {top}", where="sampling", hint=BROKEN)


# -- the choice of tokens by the host ---------------------------------------------------------------------------------

_BLOCK = 64  # tokens of a set


def choose_rows(rows: Sequence[npt.ArrayLike], choices: Sequence[Choice]) -> list[Chosen]:
    """See `Choose`."""
    return [_chosen(np.asarray(row), choice) for row, choice in zip(rows, choices, strict=True)]


def _chosen(logits: npt.NDArray[np.float32], choice: Choice) -> Chosen:
    opts, changes = choice.opts, choice.changes
    row = logits if choice.mask is None else masked(logits, choice.mask)
    if opts.is_greedy and not changes:
        token = int(row.argmax())
        is_finite = bool(np.isfinite(logits).all())
        return Chosen(token, is_finite) if is_finite and np.isfinite(row[token]) else choose(logits, choice)
    ids = _useful(row, choice)
    if ids is None or not np.isfinite(logits.max()):
        return choose(logits, choice)
    few = Choice(opts, changes=changes and _renumbered(changes, ids))
    few.numbers = choice.numbers
    found = choose(logits[ids], few)
    return Chosen(int(ids[found.token]), bool(np.isfinite(logits).all()), found.surprise)


def _useful(row: npt.NDArray[np.float32], choice: Choice) -> npt.NDArray[np.intp] | None:
    """The tokens that may be chosen, ascending, if they are known to be few."""
    opts, changes = choice.opts, choice.changes
    count = 1 if opts.is_greedy else 0 if opts.mirostat or opts.top_n_sigma else opts.top_k
    need, width = count + (len(changes.ids) if changes else 0), len(row) // _BLOCK
    if not count or need > width:
        return None
    border = np.partition(row[: width * _BLOCK].reshape(_BLOCK, width).max(0), -need)[-need]
    if not np.isfinite(border):
        return None
    ids = np.flatnonzero(row >= border)
    if changes:
        own = changes.ids[(changes.ids >= 0) & (changes.ids < len(row))]
        ids = np.union1d(ids, own[np.isfinite(row[own])])  # the mask excludes the others
    return ids.astype(np.intp)


def _renumbered(changes: Changes, ids: npt.NDArray[np.intp]) -> Changes:
    """Changes of tokens that are named by their places among some, -1 for those that are not there."""
    places = np.minimum(np.searchsorted(ids, changes.ids), len(ids) - 1)
    return changes._replace(ids=np.where(ids[places] == changes.ids, places, -1).astype(np.int32))


def log_probs(logits: npt.NDArray[np.float32], ids: Iterable[int]) -> npt.NDArray[np.float32]:
    """log softmax(logits)[i, ids[i]]: float32[n] from float32[n, vocab]; sums of exponentials in float64."""
    found = np.empty(len(logits), np.float32)
    for i, (row, token) in enumerate(zip(logits, ids, strict=True)):  # row by row: avoids a second [n, vocab] array
        top: Any = row.max()
        found[i] = row[token] - top - np.log(np.exp(row - top).sum(dtype=np.float64))
    return found


class Constraint(Protocol):
    """A limit on the tokens of one answer; `rlx.grammar.Constraint` implements it."""

    def mask(self) -> Words | None:
        """int32[ceil(vocab / 32)]: bit i % 32 of word i // 32 says whether id i may come next. None: any may."""
        ...

    def accept(self, token: int) -> None:
        """Goes on with a token."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must come next; `[]` if there is a choice."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow."""
        ...


class Sampler:
    """Chooses the tokens of one generation.

    `choice` says how the next token is chosen, a device chooses it, and `advance` goes on with it. `sample` does all
    three in NumPy. The random number generator (PCG64) advances by one number per token, so that equal logits, options
    and seeds give equal tokens. Of equally likely tokens, that with the lowest id comes first.

    Args:
        opts: the options.
        history: tokens before the first draw (the prompt), for the penalties and DRY.
        tokenizer: called for the tokenizer if DRY has sequence breakers that are texts.
        constraint: what the tokens may be. Its mask comes before bias and penalties, so that nothing else can be drawn.

    Raises:
        SamplingError: `opts` is no `SampleOpts`, or it needs a tokenizer and there is none.
    """

    def __init__(
        self,
        opts: SampleOpts,
        history: Iterable[int] = (),
        tokenizer: Callable[[], Tokenizer] | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.opts, self._constraint = checked_sample(opts), constraint
        self._choice = LIKELIEST if opts.is_plain_greedy and constraint is None else Choice(opts)
        self._draws = not opts.is_greedy
        self._tokenizer = tokenizer
        if opts.dry_multiplier:  # a text without a tokenizer is refused now
            _ = self._penalties
        self._recent = deque(history, opts.window)
        self._bound = 2 * opts.mirostat_tau  # of the surprise, in bits
        self._surprises: Floats | None = None  # of the last distribution, with Mirostat

    @cached_property
    def _penalties(self) -> Penalties:
        return Penalties(self.opts, self._tokenizer)

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self.opts.seed))  # a greedy sampler needs none

    def choice(self, vocab: int, banned: Collection[int] = (), *, draws: bool = True) -> Choice:
        """How the next token is chosen from logits, float[vocab]; valid until the next call.

        Args:
            banned: ids that are never chosen.
            draws: whether it takes a random number.

        Raises:
            SamplingError: the bias names an id outside the vocabulary.
            GrammarError: the grammar is too complex at this place of the text.
        """
        if banned and self._choice is LIKELIEST:
            self._choice = Choice(self.opts)
        if self._choice is LIKELIEST:
            return LIKELIEST
        choice = self._choice
        choice.mask = None if self._constraint is None else self._constraint.mask()
        if self._recent or banned or self.opts.logit_bias:
            choice.changes = self._penalties.changes(self._recent, banned, vocab)
        else:
            choice.changes = None
        if self.opts.mirostat:
            choice.numbers[LEAST_SHARE] = np.exp2(-self._bound)
        if draws and self._draws:
            choice.numbers[UNIFORM] = self._random.random()
        return choice

    def advance(self, chosen: Chosen, logits: npt.ArrayLike) -> int:
        """Goes on with what was chosen by the last `choice` from `logits`; the token.

        Raises:
            NumericalError: a logit is NaN or +inf, or all are -inf. A single -inf excludes its token.
            SamplingError: bias, `banned` and the mask leave no token.
        """
        if chosen.token < 0:
            refuse(logits, self._choice)
        if self.opts.mirostat and self._draws:
            self._adapt(chosen.surprise)
        self._recent.append(chosen.token)
        if self._constraint is not None:
            self._constraint.accept(chosen.token)
        return chosen.token

    @property
    def looks_back(self) -> bool:
        """Whether a choice depends on more than logits and a random number: on the tokens before it, or on a bias."""
        opts = self.opts
        changes = opts.logit_bias or opts.has_penalties or opts.dry_multiplier or opts.mirostat
        return self._constraint is not None or bool(changes)

    def ahead(self, vocab: int, count: int) -> tuple[Choice, Floats]:
        """How the next tokens are chosen if it does not look back, and the random number of each. None is taken yet."""
        choice = self.choice(vocab, draws=False)
        if not self._draws:
            return choice, np.zeros(count)
        generator = self._random.bit_generator
        state = generator.state
        numbers = self._random.random(count)
        generator.state = state
        return choice, numbers

    def take(self, tokens: Collection[int]) -> None:
        """Goes on with tokens that were chosen as `ahead` says."""
        if self._draws:
            self._random.random(len(tokens))
        self._recent.extend(tokens)

    def sample(self, logits: Logits, banned: Collection[int] = ()) -> int:
        """Chooses the next token for `logits`, float[vocab], and appends it to the history.

        Args:
            banned: ids that are never chosen.

        Raises:
            NumericalError, SamplingError, GrammarError: as `choice` and `advance`.
        """
        return self.advance(choose(logits, self.choice(len(logits), banned)), logits)

    def accept(self, token: int) -> None:
        """Appends `token` to the history as if it had been drawn: for callers of `distribution`, and for tokens that a
        grammar forces.

        With Mirostat, the first call after `distribution` also updates the bound, by the surprise of `token` there.
        """
        surprises, self._surprises = self._surprises, None
        if surprises is not None and token < len(surprises):
            self._adapt(float(surprises[token]))
        self._recent.append(token)
        if self._constraint is not None:
            self._constraint.accept(token)

    def distribution(self, logits: Logits, banned: Collection[int] = ()) -> tuple[Ids, Floats]:
        """Ids, ascending, and their probabilities in the next draw (float64, sum 1). Nothing is drawn.

        XTC applies at random; the probabilities average over both cases. With Mirostat they depend on its bound.
        """
        choice = self.choice(len(logits), banned, draws=False)
        values = changed(logits, choice)
        if not (isfinite(logits.max()) and isfinite(values.max())):
            refuse(logits, choice)
        if not self._draws:
            return np.array([values.argmax()]), np.ones(1)
        if self.opts.mirostat:
            self._surprises = surprises(values, choice)
        ids, shares = shares_of(values, choice)
        return ids, shares / shares.sum()

    def _adapt(self, surprise: float) -> None:
        """Updates Mirostat's bound by the surprise of the token that was drawn."""
        if isfinite(surprise):
            self._bound -= self.opts.mirostat_eta * (surprise - self.opts.mirostat_tau)
