"""How to choose the next token: the options, their ranges and their defaults.

Sampling stage. `sampler.py` follows them, `recommended.py` reads a model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any, Literal

from rlx.arguments import known_fields
from rlx.errors import SamplingError

LogitBias = Mapping[int, float] | Iterable[tuple[int, float]]
Breaker = str | tuple[int, ...]


@known_fields
@dataclass(frozen=True, slots=True)
class SampleOpts:
    """How to choose the next token. The defaults draw from the model's distribution as it is.

    The steps, in their order, which is that of llama.cpp's default chain: `logit_bias`, the penalties (repetition, then
    frequency and presence), DRY, `top_n_sigma`, `top_k`, `typical_p`, `top_p`, `min_p`, XTC, `temperature`, the draw.
    The filters therefore see the distribution before the temperature, and each the tokens that those before it left.

    Attributes:
        temperature: divides the logits before the draw; 0 takes the likeliest token and draws nothing.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens until their share reaches p, the one that reaches it included; 1 keeps all
            (Holtzman et al. 2020).
        min_p: keep tokens at least min_p times as likely as the likeliest; 0 keeps all (Nguyen et al. 2024).
        repetition_penalty: for tokens among the last `repetition_window`, positive logits are divided by it and others
            multiplied (Keskar et al. 2019, CTRL, section 4.1); 1 changes nothing.
        seed: of the random numbers, 0 to 2**64 - 1; None takes one from the operating system.
        repetition_window: how many tokens back the three penalties look, the prompt included; None means all of them.
        typical_p: keep the tokens whose surprise is nearest the entropy, until their share reaches typical_p; 1 keeps
            all. The likeliest token may go (Meister et al. 2022).
        top_n_sigma: keep logits within n standard deviations of the largest; 0 keeps all (Tang et al. 2024).
        frequency_penalty: taken off a logit for each time that its token is in the window.
        presence_penalty: taken off a logit once if its token is in the window.
        xtc_probability: how often XTC acts on a token: of the tokens with a share of at least `xtc_threshold` it leaves
            out all but the least likely; 0 never.
        xtc_threshold: above 0.5 no two tokens reach it, and XTC does nothing.
        dry_multiplier: strength of DRY, which penalizes a token that would make a repeated sequence longer, by
            `dry_multiplier * dry_base ** (length - dry_allowed_length)`; 0 is off.
        dry_base: at least 1.
        dry_allowed_length: repeated sequences shorter than that are free.
        dry_penalty_last_n: how many tokens back DRY looks, the prompt included; None means all of them.
        dry_sequence_breakers: a repeated sequence does not reach across these: texts, which stand for every token that
            contains them, or sequences of token ids.
        mirostat: 2 puts Mirostat 2 in the place of all filters and XTC: tokens more surprising than a bound are left
            out, and the bound follows the surprise of what was drawn (Basu et al. 2021). 0 is off.
        mirostat_tau: the surprise that Mirostat aims at, in bits.
        mirostat_eta: how fast its bound follows.
        logit_bias: added to the logits of these ids; -inf bans a token. A mapping or pairs; kept as pairs by id.

    Raises:
        SamplingError: an option of the wrong type or out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    repetition_window: int | None = 64
    _: KW_ONLY
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: tuple[Breaker, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logit_bias: LogitBias = ()

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            object.__setattr__(self, name, allowed.checked(name, getattr(self, name)))
        object.__setattr__(self, "dry_sequence_breakers", _breakers(self.dry_sequence_breakers))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.repetition_penalty == 0:
            raise SamplingError("repetition_penalty is 0", where="SampleOpts", hint="1 is off; more than 1 penalizes")
        if self.mirostat == 1:
            hint = "2 is Mirostat 2, which needs no estimate of the vocabulary's slope"
            raise SamplingError("mirostat is 1, expected 0 or 2", where="SampleOpts", hint=hint)

    @classmethod
    def greedy(cls) -> SampleOpts:
        """Always the likeliest token, the lowest id among equals."""
        return cls(temperature=0.0)

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn: the likeliest token is taken, after bias and penalties."""
        return self.temperature == 0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the choice is the largest of the model's own logits, so that native code may make it."""
        return self.is_greedy and not (self.logit_bias or self.has_penalties or self.dry_multiplier)

    @property
    def has_penalties(self) -> bool:
        """Whether tokens are penalized for being in the window."""
        return self.repetition_penalty != 1 or bool(self.frequency_penalty or self.presence_penalty)


Sample = SampleOpts | Literal["recommended"] | None
"""How a call chooses tokens: these options, what the model's files recommend, or as the runner does."""


def resolved(sample: SampleOpts | str | None, recommended: SampleOpts | None, default: SampleOpts) -> SampleOpts:
    """The options that `sample` stands for.

    Args:
        recommended: what the model's files say; None if they do not, which then means greedily.
        default: for None.

    Raises:
        SamplingError: `sample` is a text other than "recommended".
    """
    if sample is None:
        return default
    if isinstance(sample, str):
        if sample != "recommended":
            hint = "give a SampleOpts, or 'recommended' for what the model's files say"
            raise SamplingError(f"found {sample!r}", where="sample", hint=hint)
        return recommended or SampleOpts.greedy()
    return sample


# What changes the draw, and so does nothing where nothing is drawn; what Mirostat takes the place of.
_FILTERS = ("top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold")
_OF_DRAWS = (*_FILTERS, "mirostat", "mirostat_tau", "mirostat_eta")


def combined(base: SampleOpts, changes: Mapping[str, Any], spelled: Callable[[str], str] = "{}=".format) -> SampleOpts:
    """`base` with some options changed.

    Args:
        changes: options by name.
        spelled: how the caller's interface writes an option, for messages.

    Raises:
        SamplingError: an option is out of its range, or would do nothing: a filter without a temperature, or beside
            Mirostat.
    """
    opts = replace(base, **changes)
    idle = [spelled(name) for name in _OF_DRAWS if name in changes]
    if opts.is_greedy and idle:
        what = f"{idle[0]} does nothing at temperature 0: add {spelled('temperature')}, such as 0.7"
        raise SamplingError(what, where="sampling")
    replaced = [spelled(name) for name in _FILTERS if name in changes]
    if opts.mirostat and replaced:
        what = f"{replaced[0]} does nothing beside Mirostat, which takes the place of the filters"
        raise SamplingError(what, where="sampling")
    return opts


@dataclass(frozen=True, slots=True)
class _Range:
    """Values that an option may have: whole or finite numbers from `low` to `high`, and None if it is optional."""

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
        number = int(value) if self.whole else float(value)
        if not (self.low <= number <= self.high and (self.whole or isfinite(number))):
            raise SamplingError(f"{name} is {value!r}, expected {self._words()}", where="SampleOpts")
        return number

    def _words(self) -> str:
        if self.low == -inf:
            return "a finite number"
        return f"a finite number of at least {self.low}" if self.high == inf else f"{self.low} to {int(self.high)}"


_MAX_WHOLE = 2**64 - 1
_POSITIVE, _SHARE, _ANY = _Range(0), _Range(0, 1), _Range(-inf)
_COUNT, _WINDOW = _Range(0, _MAX_WHOLE, whole=True), _Range(0, _MAX_WHOLE, whole=True, optional=True)
_RANGES = {
    "temperature": _POSITIVE,
    "top_k": _COUNT,
    "top_p": _SHARE,
    "min_p": _SHARE,
    "repetition_penalty": _POSITIVE,
    "seed": _WINDOW,
    "repetition_window": _WINDOW,
    "typical_p": _SHARE,
    "top_n_sigma": _POSITIVE,
    "frequency_penalty": _ANY,
    "presence_penalty": _ANY,
    "xtc_probability": _SHARE,
    "xtc_threshold": _SHARE,
    "dry_multiplier": _POSITIVE,
    "dry_base": _Range(1),
    "dry_allowed_length": _Range(1, _MAX_WHOLE, whole=True),
    "dry_penalty_last_n": _WINDOW,
    "mirostat": _Range(0, 2, whole=True),
    "mirostat_tau": _POSITIVE,
    "mirostat_eta": _POSITIVE,
}


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return _is_number(value, Integral) and value >= 0


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of id and bias, by id; `SamplingError` for anything else."""
    try:
        pairs = dict(value.items() if isinstance(value, Mapping) else value)
    except (TypeError, ValueError):
        raise SamplingError(f"logit_bias is {value!r}, expected ids and numbers", where="SampleOpts") from None
    for token, bias in pairs.items():
        if not _is_id(token):
            raise SamplingError(f"logit_bias names the token {token!r}, expected an id", where="SampleOpts")
        if not _is_number(bias, Real) or not (isfinite(bias) or bias == -inf):
            what = f"logit_bias of token {token} is {bias!r}, expected a finite number or -inf"
            raise SamplingError(what, where="SampleOpts", hint="-inf bans the token")
    return tuple((int(token), float(pairs[token])) for token in sorted(pairs))


def _breakers(value: Any) -> tuple[Breaker, ...]:
    """Texts and sequences of ids, none of them empty; `SamplingError` for anything else."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SamplingError(
            f"dry_sequence_breakers is {value!r}, expected a sequence of texts or of sequences of ids",
            where="SampleOpts", hint='one text is given as ("\\n",)',
        )  # fmt: skip
    return tuple(_breaker(each) for each in value)


def _breaker(value: Any) -> Breaker:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        ids = tuple(value)
        if ids and all(map(_is_id, ids)):
            return tuple(map(int, ids))
    what = f"dry_sequence_breakers holds {value!r}, expected a text or a sequence of ids"
    raise SamplingError(what, where="SampleOpts")
