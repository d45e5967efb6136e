"""The sampling options, their ranges and their defaults.

Sampling stage. `choice.py` applies them, `recommended.py` reads those in a model's files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, Field, dataclass, field, fields, replace
from functools import cached_property, partial
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any, Literal

from rlx.arguments import SAMPLING, as_float, can_iterate, known_fields
from rlx.errors import SamplingError

LogitBias = Mapping[int, float] | Iterable[tuple[int, float]]
Breaker = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """The values allowed for an option: whole or finite numbers from `low` to `high`, and None if it is optional."""

    low: float
    high: float = inf
    whole: bool = False
    optional: bool = False

    def checked(self, name: str, value: Any) -> int | float | None:
        if self.optional and value is None:
            return None
        if not _is_number(value, Integral if self.whole else Real):
            expected = ("a whole number" if self.whole else "a number") + (" or None" if self.optional else "")
            raise SamplingError(f"{name} is {value!r}, expected {expected}", where="SampleOpts")
        number = int(value) if self.whole else as_float(value)
        if not (self.low <= number <= self.high and (self.whole or isfinite(number))):
            raise SamplingError(f"{name} is {value!r}, expected {self._words()}", where="SampleOpts")
        return number

    def _words(self) -> str:
        if self.low == -inf:
            return "a finite number"
        return f"a finite number of at least {self.low}" if self.high == inf else f"{self.low} to {int(self.high)}"


_MAX_WHOLE = 2**64 - 1
_POSITIVE, _SHARE, _ANY = Range(0), Range(0, 1), Range(-inf)
_COUNT, _WINDOW = Range(0, _MAX_WHOLE, whole=True), Range(0, _MAX_WHOLE, whole=True, optional=True)


def _number(default: float | None, allowed: Range, metavar: str, meaning: str) -> Any:
    """A field that is a number.

    Args:
        allowed: its values.
        metavar, meaning: as in `--help`.
    """
    return field(default=default, metadata={"allowed": allowed, "metavar": metavar, "help": meaning})


@known_fields
@dataclass(frozen=True)
class SampleOpts:
    """How to choose the next token. The defaults sample from the model's distribution without changes.

    The steps run in the order of llama.cpp's default chain: `logit_bias`, the penalties (repetition, then frequency and
    presence), DRY, `top_n_sigma`, `top_k`, `typical_p`, `top_p`, `min_p`, XTC, `temperature`, the draw. Each filter
    works on the tokens that the steps before it kept, and on probabilities before the temperature.

    Example: `SampleOpts(temperature=0.7, top_p=0.9, seed=1)`.

    Attributes:
        temperature: randomness of the draw: the logits are divided by it. 0 is greedy: the likeliest token.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens until their probabilities sum to top_p, including the token that reaches it;
            1 keeps all (Holtzman et al. 2020).
        min_p: keep tokens at least min_p times as likely as the likeliest; 0 keeps all (Nguyen et al. 2024).
        repetition_penalty: for the last `repetition_window` tokens, divides positive logits, multiplies negative ones
            (Keskar et al. 2019, CTRL, section 4.1); 1 changes nothing.
        seed: of the random number generator, 0 to 2**64 - 1; None takes one from the operating system.
        repetition_window: number of last tokens that the three penalties apply to, prompt included; None is all.
        typical_p: keep the tokens whose surprise (-ln p) is nearest the entropy, until their probabilities sum to
            typical_p; 1 keeps all. This may remove the likeliest token (Meister et al. 2022).
        top_n_sigma: keep logits within n standard deviations of the largest; 0 keeps all (Tang et al. 2024).
        frequency_penalty: subtracted from a logit for each occurrence of its token in the window.
        presence_penalty: subtracted from a logit once if its token occurs in the window.
        xtc_probability: probability that XTC applies to a draw: it removes all tokens with a probability of at least
            `xtc_threshold` except the least likely of them; 0 is off.
        xtc_threshold: above 0.5 XTC does nothing, because no two tokens reach it.
        dry_multiplier: strength of DRY, which subtracts `dry_multiplier * dry_base ** (length - dry_allowed_length)`
            from the logit of a token that would continue a repeated sequence; 0 is off.
        dry_base: growth of the DRY penalty per token of the sequence; at least 1.
        dry_allowed_length: shorter repeated sequences are not penalized.
        dry_penalty_last_n: number of last tokens that DRY searches, prompt included; None is all.
        dry_sequence_breakers: a repeated sequence ends at these: texts (every token that contains one), or sequences
            of token ids.
        mirostat: 2 replaces all filters and XTC by Mirostat 2, which removes tokens whose surprise is above a bound;
            the bound adapts to the surprise of the tokens drawn (Basu et al. 2021). 0 is off.
        mirostat_tau: target surprise of Mirostat, in bits.
        mirostat_eta: learning rate of Mirostat's bound.
        logit_bias: token id -> number added to its logit; -inf bans a token. A mapping or pairs; stored as pairs sorted
            by id.

    Raises:
        SamplingError: an option has the wrong type or is out of its range.
    """

    temperature: float = _number(1.0, _POSITIVE, "T", "Randomness; 0 always takes the likeliest token (greedy).")
    top_k: int = _number(0, _COUNT, "K", "Keep the K likeliest tokens.")
    top_p: float = _number(1.0, _SHARE, "P", "Keep the likeliest tokens whose probabilities reach P.")
    min_p: float = _number(0.0, _SHARE, "P", "Keep tokens at least P times as likely as the likeliest.")
    repetition_penalty: float = _number(1.0, _POSITIVE, "R", "Above 1: penalize tokens in the window.")
    seed: int | None = _number(None, _WINDOW, "N", "Seed of the random numbers; different each time by default.")
    repetition_window: int | None = _number(64, _WINDOW, "N", "Size of the window in tokens, or 'all'; 64 by default.")
    _: KW_ONLY
    typical_p: float = _number(1.0, _SHARE, "P", "Keep the most typical tokens whose probabilities reach P.")
    top_n_sigma: float = _number(0.0, _POSITIVE, "N", "Keep logits within N standard deviations of the largest.")
    xtc_probability: float = _number(0.0, _SHARE, "P", "Probability that XTC removes the top choices.")
    xtc_threshold: float = _number(0.1, _SHARE, "P", "Probability above which a token is a top choice; 0.1 by default.")
    frequency_penalty: float = _number(0.0, _ANY, "F", "Subtracted for each occurrence of a token in the window.")
    presence_penalty: float = _number(0.0, _ANY, "F", "Subtracted once for a token in the window.")
    dry_multiplier: float = _number(
        0.0, _POSITIVE, "M", "Strength of DRY, which penalizes repeated sequences; 0 is off."
    )
    dry_base: float = _number(1.75, Range(1), "B", "Growth of DRY with the length of the sequence; 1.75 by default.")
    dry_allowed_length: int = _number(
        2, Range(1, _MAX_WHOLE, whole=True), "N", "DRY ignores sequences shorter than N tokens; 2 by default."
    )
    dry_penalty_last_n: int | None = _number(None, _WINDOW, "N", "Tokens that DRY searches, or 'all', the default.")
    dry_sequence_breakers: tuple[Breaker, ...] = ("\n", ":", '"', "*")
    mirostat: int = _number(
        0, Range(0, 2, whole=True), "2", "2 turns on Mirostat 2, which replaces top-k, top-p and the other filters."
    )
    mirostat_tau: float = _number(5.0, _POSITIVE, "T", "Target surprise of Mirostat in bits; 5 by default.")
    mirostat_eta: float = _number(0.1, _POSITIVE, "E", "Learning rate of Mirostat; 0.1 by default.")
    logit_bias: LogitBias = ()

    def __post_init__(self) -> None:
        for name, (default, checked) in _CHECKS.items():
            if (value := getattr(self, name)) is not default:
                object.__setattr__(self, name, checked(value))
        if self.repetition_penalty == 0:
            raise SamplingError("repetition_penalty is 0", where="SampleOpts", hint="1 is off; more than 1 penalizes")
        if self.mirostat == 1:
            hint = "2 is Mirostat 2, which needs no estimate of the vocabulary's slope"
            raise SamplingError("mirostat is 1, expected 0 or 2", where="SampleOpts", hint=hint)

    @classmethod
    def greedy(cls) -> SampleOpts:
        """Always the likeliest token; of equal ones, that with the lowest id."""
        return cls(temperature=0.0)

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, after bias and penalties, without a draw."""
        return self.temperature == 0

    @cached_property
    def is_plain_greedy(self) -> bool:
        """Whether the choice is the largest unchanged logit, which native code can find."""
        return self.is_greedy and not (self.logit_bias or self.has_penalties or self.dry_multiplier)

    @cached_property
    def has_penalties(self) -> bool:
        """Whether one of the three penalties is on."""
        return self.repetition_penalty != 1 or bool(self.frequency_penalty or self.presence_penalty)

    @cached_property
    def window(self) -> int | None:
        """How many of the last tokens penalties and DRY look at; None is all."""
        windows = [self.repetition_window] if self.has_penalties else []
        windows += [self.dry_penalty_last_n] if self.dry_multiplier else []
        bounded = [each for each in windows if each is not None]
        return max(bounded, default=0) if len(bounded) == len(windows) else None


SAMPLING.update(each.name for each in fields(SampleOpts))

Sample = SampleOpts | Literal["recommended"] | None
"""How a call chooses tokens: options, "recommended" for those of the model's files, or None for the runner's."""


def resolved(sample: SampleOpts | str | None, recommended: SampleOpts | None, default: SampleOpts) -> SampleOpts:
    """The options that `sample` stands for.

    Args:
        recommended: the options in the model's files, if any; without them "recommended" means greedy.
        default: the options for None.

    Raises:
        SamplingError: `sample` is a text other than "recommended", or something else.
    """
    if sample is None:
        return default
    if isinstance(sample, str):
        if sample != "recommended":
            hint = "give a SampleOpts, or 'recommended' for what the model's files say"
            raise SamplingError(f"found {sample!r}", where="sample", hint=hint)
        return recommended or SampleOpts.greedy()
    return checked_sample(sample)


def checked_sample(opts: Any) -> SampleOpts:
    """`opts`; `SamplingError` unless they are a `SampleOpts`."""
    if isinstance(opts, SampleOpts):
        return opts
    hint = "SampleOpts.greedy() is the default"
    raise SamplingError(f"found {opts!r}, expected a SampleOpts", where="sample", hint=hint)


_MINUS_ONE = {"seed": None, "top_k": 0, "top_n_sigma": 0.0, "repetition_window": None, "dry_penalty_last_n": None}


def meant(name: str, value: Any) -> Any:
    """The value of an option as users of llama.cpp write it, for whom -1 is a random seed, all tokens, or off."""
    return _MINUS_ONE.get(name, value) if value == -1 else value


# Options that Mirostat replaces, and options that have no effect without a draw.
_FILTERS = ("top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold")
_OF_DRAWS = (*_FILTERS, "mirostat", "mirostat_tau", "mirostat_eta")


def combined(base: SampleOpts, changes: Mapping[str, Any], spelled: Callable[[str], str] = "{}=".format) -> SampleOpts:
    """`base` with some options changed.

    Args:
        changes: options by name.
        spelled: the spelling of an option in the caller's interface, for error messages.

    Raises:
        SamplingError: an option is out of its range, or has no effect: a filter at temperature 0 or with Mirostat.
    """
    opts = replace(base, **changes)
    idle = [spelled(name) for name in _OF_DRAWS if name in changes]
    if opts.is_greedy and idle:
        what = f"{idle[0]} does nothing at temperature 0: add {spelled('temperature')}, such as 0.7"
        raise SamplingError(what, where="sampling")
    replaced = [spelled(name) for name in _FILTERS if name in changes]
    if opts.mirostat and replaced:
        what = f"{replaced[0]} does nothing with Mirostat, which replaces the filters"
        raise SamplingError(what, where="sampling")
    return opts


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return _is_number(value, Integral) and value >= 0


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of id and bias, sorted by id; `SamplingError` for anything else."""
    try:
        pairs = dict(value.items() if isinstance(value, Mapping) else value)
    except (TypeError, ValueError):
        raise SamplingError(f"logit_bias is {value!r}, expected ids and numbers", where="SampleOpts") from None
    for token, bias in pairs.items():
        if not _is_id(token):
            raise SamplingError(f"logit_bias names the token {token!r}, expected an id", where="SampleOpts")
        if not _is_number(bias, Real) or not (isfinite(as_float(bias)) or bias == -inf):
            what = f"logit_bias of token {token} is {bias!r}, expected a finite number or -inf"
            raise SamplingError(what, where="SampleOpts", hint="-inf bans the token")
    return tuple((int(token), float(pairs[token])) for token in sorted(pairs))


def _breakers(value: Any) -> tuple[Breaker, ...]:
    """Non-empty texts and sequences of ids; `SamplingError` for anything else."""
    if not can_iterate(value):
        raise SamplingError(
            f"dry_sequence_breakers is {value!r}, expected a sequence of texts or of sequences of ids",
            where="SampleOpts", hint='one text is given as ("\\n",)',
        )  # fmt: skip
    return tuple(_breaker(each) for each in value)


def _breaker(value: Any) -> Breaker:
    if isinstance(value, str) and value:
        return value
    if can_iterate(value):
        ids = tuple(value)
        if ids and all(map(_is_id, ids)):
            return tuple(map(int, ids))
    what = f"dry_sequence_breakers holds {value!r}, expected a text or a sequence of ids"
    raise SamplingError(what, where="SampleOpts")


#: The options that are numbers; the metadata of each field has its range, and its metavar and help for a command line.
NUMBERS: Mapping[str, Field[Any]] = {each.name: each for each in fields(SampleOpts) if "allowed" in each.metadata}
_CONVERTED: dict[str, Callable[[Any], Any]] = {
    **{name: partial(each.metadata["allowed"].checked, name) for name, each in NUMBERS.items()},
    "dry_sequence_breakers": _breakers,
    "logit_bias": _biases,
}
#: Name of an option -> its default, and what checks and converts another value.
_CHECKS = {each.name: (each.default, _CONVERTED[each.name]) for each in fields(SampleOpts)}
