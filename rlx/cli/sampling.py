"""Options for sampling and for the end of an answer, shared by the subcommands that generate."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click

from rlx.cli.options import Command, Decorator, collected
from rlx.engine.request.stopping import stop_strings
from rlx.errors import SamplingError
from rlx.sampling import SampleOpts
from rlx.sampling.options import combined


class _Window(click.ParamType):  # type: ignore[type-arg]
    """A number of tokens, or `all`."""

    name = "window"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == _ALL else click.INT.convert(value, param, ctx)


class _Bias(click.ParamType):  # type: ignore[type-arg]
    """`ID=BIAS`."""

    name = "bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        token, _, bias = value.partition("=")
        try:
            return int(token), float(bias)
        except ValueError:
            self.fail(f"{value!r} is no ID=BIAS, such as 42=-1.5 or 42=-inf", param, ctx)


_ALL = "all"
# Parameter name -> type, metavar and help; the defaults are the model's own.
_VALUES: dict[str, tuple[Any, str, str]] = {
    "temperature": (float, "T", "Randomness; 0 always takes the likeliest token (greedy)."),
    "top_k": (int, "K", "Keep the K likeliest tokens."),
    "top_p": (float, "P", "Keep the likeliest tokens whose probabilities reach P."),
    "min_p": (float, "P", "Keep tokens at least P times as likely as the likeliest."),
    "typical_p": (float, "P", "Keep the most typical tokens whose probabilities reach P."),
    "top_n_sigma": (float, "N", "Keep logits within N standard deviations of the largest."),
    "xtc_probability": (float, "P", "Probability that XTC removes the top choices."),
    "xtc_threshold": (float, "P", "Probability above which a token is a top choice; 0.1 by default."),
    "repetition_penalty": (float, "R", "Above 1: penalize tokens in the window."),
    "frequency_penalty": (float, "F", "Subtracted for each occurrence of a token in the window."),
    "presence_penalty": (float, "F", "Subtracted once for a token in the window."),
    "repetition_window": (_Window(), "N", "Size of the window in tokens, or 'all'; 64 by default."),
    "dry_multiplier": (float, "M", "Strength of DRY, which penalizes repeated sequences; 0 is off."),
    "dry_base": (float, "B", "Growth of DRY with the length of the sequence; 1.75 by default."),
    "dry_allowed_length": (int, "N", "DRY ignores sequences shorter than N tokens; 2 by default."),
    "dry_penalty_last_n": (_Window(), "N", "Tokens that DRY searches, or 'all', the default."),
    "mirostat": (int, "2", "2 turns on Mirostat 2, which replaces top-k, top-p and the other filters."),
    "mirostat_tau": (float, "T", "Target surprise of Mirostat in bits; 5 by default."),
    "mirostat_eta": (float, "E", "Learning rate of Mirostat; 0.1 by default."),
    "seed": (int, "N", "Seed of the random numbers; different each time by default."),
}
_SAMPLING: dict[str, Decorator] = {
    **{
        name: click.option(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
        for name, (kind, metavar, text) in _VALUES.items()
    },
    "dry_sequence_breakers": click.option(
        "--dry-sequence-breaker", "dry_sequence_breakers", multiple=True, metavar="TEXT",
        help="A repeated sequence ends at TEXT; may be given again. A line break, : \" and * by default.",
    ),
    "logit_bias": click.option(
        "--logit-bias", type=_Bias(), multiple=True, metavar="ID=BIAS",
        help="Add BIAS to the logit of token ID; -inf bans it; may be given again.",
    ),
}  # fmt: skip
_ENDING: dict[str, Decorator] = {
    "max_tokens": click.option(
        "--max-tokens", type=click.IntRange(1), default=256, show_default=True, metavar="N",
        help="Maximum number of tokens of the answer.",
    ),
    "min_tokens": click.option(
        "--min-tokens", type=click.IntRange(0), default=0, metavar="N",
        help="Minimum number of tokens of the answer.",
    ),
    "stop": click.option(
        "--stop", multiple=True, metavar="TEXT", help="End the answer before TEXT; may be given again."
    ),
}  # fmt: skip


def sampling_options(command: Command) -> Command:
    """Adds the options of `SampleOpts`; the command receives the given ones as the dict `sample`."""
    return collected(command, "sample", _SAMPLING, _given)


def ending_options(command: Command) -> Command:
    """Adds `--max-tokens`, `--min-tokens` and `--stop`; the command receives them as the dict `ending`."""
    return collected(command, "ending", _ENDING, _ending)


def sample_opts(recommended: SampleOpts | None, given: dict[str, Any]) -> SampleOpts:
    """The recommended options of the model (greedy without a recommendation), overridden by the given ones.

    An option without an effect is an error: a filter at temperature 0 or with Mirostat.
    """
    try:
        return combined(recommended or SampleOpts.greedy(), given, _option)
    except SamplingError as error:
        raise click.UsageError(error.what) from error


def described(opts: SampleOpts, recommended: SampleOpts | None) -> dict[str, Any]:
    """The sampling options for a report: those that differ from their defaults, and whether they are recommended."""
    plain = SampleOpts()
    changed = {f.name: getattr(opts, f.name) for f in fields(opts) if getattr(opts, f.name) != getattr(plain, f.name)}
    changed.pop("repetition_window", None) if not opts.has_penalties else None
    return {"greedy": opts.is_greedy, "recommended": opts == recommended, **changed}


def _given(**values: Any) -> dict[str, Any]:
    """The values that were given, checked before a model is opened."""
    given = {name: value for name, value in values.items() if value not in (None, ())}
    given |= {name: None for name in ("repetition_window", "dry_penalty_last_n") if given.get(name) == _ALL}
    SampleOpts(**given)
    return given


def _ending(**values: Any) -> dict[str, Any]:
    """The values, checked before a model is opened."""
    if values["min_tokens"] > values["max_tokens"]:
        raise click.UsageError(f"--min-tokens {values['min_tokens']} is more than --max-tokens {values['max_tokens']}")
    return {**values, "stop": stop_strings(values["stop"])}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
