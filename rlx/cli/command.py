"""Parts of every subcommand: options under the names that users of other tools type, refusals, errors in its words."""

from __future__ import annotations

import copy
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import click

from rlx.arguments import nearest
from rlx.cli.output import is_terminal, printable
from rlx.errors import AmbiguousModelError, ArgumentError, ProfileError, RlxError, file_error
from rlx.grammar.package import LENIENT

COMMAND = "rlx.command"
"""Key of `click.Context.meta`: the subcommand that is run."""

TYPED = "rlx.typed"
"""Key of `click.Context.meta`: the words that name it, such as "rlx profile show"."""

DEBUG = "rlx.debug"
"""Key of `click.Context.meta`: whether tracebacks of errors are shown."""

# Option -> what other tools call it, where it means the same. A command takes the names of the options that it has.
# Those with one dash are whole words: -no is not -n o, so that a prompt that begins with a dash is never cut.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "--model": ("-m", "-hf", "--hf-repo"),
    "--prompt": ("-p",),
    "--file": ("-f",),
    "--system": ("-sys", "--system-prompt"),
    "--max-tokens": ("-n", "--n-predict", "--predict", "--max-new-tokens"),
    "--generate": ("-n", "--n-gen"),
    "--repeat": ("-r", "--repetitions"),
    "--max-seq": ("-c", "--ctx-size"),
    "--threads": ("-t",),
    "--device": ("-dev",),
    "--n-cpu-moe": ("-ncmoe",),
    "--seed": ("-s",),
    "--json-schema": ("--json-schema-file", "-jf"),
    "--grammar": ("--grammar-file",),
    "--temperature": ("--temp",),
    "--typical-p": ("--typical",),
    "--top-n-sigma": ("--top-nsigma",),
    "--repetition-penalty": ("--repeat-penalty",),
    "--repetition-window": ("--repeat-last-n",),
    "--mirostat-tau": ("--mirostat-ent",),
    "--mirostat-eta": ("--mirostat-lr",),
    "--chat-template": ("--chat-template-file",),
    "--alias": ("-a", "--served-model-name"),
    "--slots": ("-np", "--parallel", "--max-num-seqs"),
    "--raw": ("--ignore-chat-template", "-no-cnv", "--no-conversation"),
}

# What other tools have and rlx has not, or has in another form -> what to do.
_CPU = "use --device cuda for an NVIDIA card, with --n-cpu-moe for experts that it has no room for, or leave it out"
_EXPERTS = "use --n-cpu-moe with the number of layers, such as 999 for all"
_KV = "use --kv-dtype, which is for keys and values together"
_CHAT = "a conversation is `rlx chat`"
_ROWS = "the rows of a prefill are `seq` under [buckets] in a compile profile"
_TLS = "put a proxy with TLS in front, such as Caddy or nginx"
_NEEDLESS = "it is not needed; leave it out"
ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers", "--main-gpu", "-mg"), _CPU),
    **dict.fromkeys(("-cmoe", "--cpu-moe", "-ot", "--override-tensor"), _EXPERTS),
    **dict.fromkeys(("-ctk", "-ctv", "--cache-type-k", "--cache-type-v", "--kv-bits"), _KV),
    **dict.fromkeys(("-cnv", "--conversation", "-i", "--interactive"), _CHAT),
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size", "--prefill-step-size"), _ROWS),
    **dict.fromkeys(("-fa", "--flash-attn", "--jinja", "--mlock", "--no-mmap", "--no-display-prompt"), _NEEDLESS),
    **dict.fromkeys(("--log-disable", "--trust-remote-code", "--simple-io"), _NEEDLESS),
    **dict.fromkeys(("-md", "--model-draft", "--draft-model"), "use --speculative model:PATH"),
    **dict.fromkeys(("--lora", "--adapter-path"), "use --adapter NAME=PATH"),
    **dict.fromkeys(("-cb", "--cont-batching", "--embeddings", "--embedding", "--enable-auto-tool-choice"), _NEEDLESS),
    **dict.fromkeys(("--ssl-key-file", "--ssl-cert-file", "--ssl-keyfile", "--ssl-certfile"), _TLS),
    **dict.fromkeys(
        ("--no-webui", "--no-ui"), "the page to chat on is that of `rlx serve`, where --no-page turns it off"
    ),
    "--max-kv-size": "use --max-seq, which bounds the whole context; the cache does not rotate",
}


def _remember_debug(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:  # the dictionary is shared with the group's context
        ctx.meta[DEBUG] = True


def flag_of(name: str) -> str:
    """The option for a parameter of the Python API: `max_seq` is --max-seq."""
    return f"--{name.replace('_', '-')}"


debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_remember_debug, help="Show tracebacks of errors."
)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def confirm_removal(command: str, what: str, more: str = "") -> None:
    """Asks whether something shall be removed; an answer of no ends the command with exit code 1.

    Args:
        command: what was typed, for the error where there is no terminal to ask.
        more: said behind the question.
    """
    if not is_terminal(sys.stdin):
        raise click.UsageError(f"{command} would remove {printable(what)}; say --yes: there is no terminal to ask.")
    click.confirm(f"Remove {printable(what)}?{more}", abort=True)


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """The type of an option that a function parses.

    Args:
        parse: the value of a text; raises a `ValueError` or `ArgumentError` if it is none.
        expected: completes "... is", for the error.
    """

    def __init__(self, parse: Callable[[str], Any], expected: str) -> None:
        self._parse, self._expected, self.name = parse, expected, parse.__name__.strip("_")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except (ValueError, ArgumentError):
            self.fail(f"{value!r} is {self._expected}", param, ctx)


class _Help(click.HelpFormatter):
    """A help text as wide as the terminal, also below click's least width of 50 columns."""

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        columns = min(shutil.get_terminal_size().columns, max_width or 80)
        super().__init__(indent_increment, max(width or columns - 2, 20), max_width)

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl(rows, min(col_max, max(self.width - 40, 8)), col_spacing)


class _Context(click.Context):
    formatter_class = _Help


class Command(click.Command):
    """A subcommand; its last option is --debug."""

    context_class = _Context

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        debug_option(self)

    def make_parser(self, ctx: click.Context) -> Any:
        """The parser, with the aliases of the options that this command has."""
        parser = super().make_parser(ctx)
        for option in self.get_params(ctx):
            names = [alias for name in option.opts for alias in ALIASES.get(name, ()) if alias not in option.opts]
            if names and isinstance(option, click.Option):
                alias = copy.copy(option)
                alias.opts, alias.secondary_opts = names, []
                alias.add_to_parser(parser, ctx)
        # Options with one dash are looked up as a whole, as those with two: `-hello` is not -h and more letters.
        short: dict[str, Any] = parser._short_opt
        parser._long_opt.update(short)
        short.clear()
        return parser

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise _explained(error, words, ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        if callable(ctx.obj):  # what `main` has to do when words are parsed and modules are there
            ctx.obj()
        ctx.meta[COMMAND], ctx.meta[TYPED] = self, " ".join(["rlx", *ctx.command_path.split()[1:]])
        return super().invoke(ctx)


class Group(click.Group):
    """A group of subcommands; a mistyped one gets the name that is close to it."""

    command_class, context_class = Command, _Context

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            known = self.list_commands(ctx)
            close = nearest(name, known)
            hint = f"Did you mean '{close[0]}'?" if close else f"There are {', '.join(known)}."
            raise click.UsageError(f"No such command '{name}'. {hint}", ctx)
        return super().resolve_command(ctx, args)


def _explained(error: click.NoSuchOption, words: list[str], ctx: click.Context) -> click.UsageError:
    """The message about an option that is not there.

    Args:
        words: what was typed behind the command.
    """
    word = next((word for word in words if word.startswith(error.option_name)), error.option_name)
    name = word.partition("=")[0]
    if name in ELSEWHERE:
        return click.UsageError(f"No such option: {name}. {ELSEWHERE[name][0].upper()}{ELSEWHERE[name][1:]}.", ctx)
    takes_text = any("PROMPT" in (param.metavar or "") for param in ctx.command.params)
    close = _close(name, ctx)
    said = f"No such option: {name if ' ' not in name else word}."
    if close and " " not in name:
        said += f" Did you mean {' or '.join(close)}?"
    if takes_text and (" " in word or not word.startswith("--")):
        said += f" For a text that begins with a dash, write -- in front: {ctx.command_path} -- {shlex.quote(word)}"
    return click.UsageError(said, ctx)


def _close(name: str, ctx: click.Context) -> list[str]:
    params = ctx.command.params
    names = [each for param in params for each in [*param.opts, *param.secondary_opts] if each.startswith("--")]
    aliases = [alias for each in names for alias in ALIASES.get(each, ()) if alias.startswith("--")]
    close = nearest(name, [*names, *aliases], 2, 0.7)
    return [each for each in close if each.rstrip("s") == name.rstrip("s")] or close


#: Arguments of the Python API that no option is called like, and how the command line says the same.
ARGUMENTS = {"n_new": "--max-tokens"}
#: Places in the Python API that say nothing to who types commands; `prompt` is what was typed, however.
_PYTHON = frozenset(
    "SampleOpts CompileProfile CompileCache WorkerPool Store generate generate_batch stream score embed build step "
    "bind restore decode_logits predict_logits prefill_logits sample".split()
)
_CALL = re.compile(
    r"tokenizer\.|\b(?:generate|bind|from_path|auto_runner|SampleOpts|CompileProfile)\(|rlx\.auto_runner|\bon_token\b"
)


def message(error: Exception, command: click.Command | None, name: str) -> str:
    """The text of an error for a user of the command line.

    Args:
        command: the subcommand that was run, whose options are named.
        name: what was typed to run it, such as "rlx run".
    """
    if isinstance(error, OSError) and error.strerror:
        return str(file_error(RlxError, "", error, error.filename))
    if not isinstance(error, RlxError) or isinstance(error, ProfileError):  # that one speaks of keys in a file
        return str(error)
    options = option_names(command)
    where = None if error.where in _PYTHON else options.get(error.where or "", error.where)
    where = error.where if error.is_file else where
    what, hint = (in_options(text, options) if text else text for text in (error.what, error.hint))
    hint = hint and hint.removesuffix(LENIENT)  # an argument that no option stands for
    if hint and _CALL.search(hint):
        hint = None  # the way out in Python
    if isinstance(error, AmbiguousModelError):
        hint = f"choose one: {name} {error.example}"
    return str(RlxError(str(what), where=where, hint=hint))


def option_names(command: click.Command | None) -> dict[str, str]:
    """Python argument -> option of this command."""
    params = command.params if command else []
    found = {str(p.name): max(p.opts, key=len) for p in params if isinstance(p, click.Option)}
    found.pop("prompt", None)  # a prompt is text, whichever way it comes
    return {**ARGUMENTS, **found}


def in_options(text: str, options: dict[str, str]) -> str:
    """`text` with arguments replaced by options: `max_seq` or max_seq=8 or max_seq; a plain word only where it stands
    as a name, in backticks, before = or as the subject at the beginning.
    """
    for name, option in options.items():
        if name not in text:
            continue
        text = re.sub(rf"`{name}`", option, text)
        text = re.sub(rf"(?<![\w.])`?{name}=(\"[^\"]*\"|'[^']*'|[\w+-]+(?:\.\w+)*)`?", partial(_given, option), text)
        text = re.sub(rf"^{name} (?=is |must )", f"{option} ", text)
        if "_" in name:
            text = re.sub(rf"(?<![\w.`\"'/-]){name}(?![\w(=/.])|(?<![\w.`\"'/-]){name}(?=\.(?:\s|$))", option, text)
    return text


def _given(option: str, found: re.Match[str]) -> str:
    value = found[1].strip("\"'")
    return option if value == "True" else f"{option} {value}"
