"""The `rlx` command: finds and imports subcommands by name, and reports errors.

Nothing here imports more than click, so that `rlx --help` is quick; a subcommand is imported when it runs.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, TextIO, cast

import click

import rlx
from rlx import env
from rlx.cli.command import COMMAND, DEBUG, TYPED, Group, debug_option, in_options, option_names
from rlx.cli.command import message as in_words
from rlx.cli.output import wrapped
from rlx.errors import ArgumentError, RlxError

_WHERE = "RLX_IMPORT"


def import_all(names: Sequence[str]) -> None:
    """Imports files (`ops.py`, `folder/ops.py`) and installed modules (`package.ops`).

    Raises:
        ArgumentError: one is not there, or raises an error.
    """
    for name in names:
        try:
            if name.endswith(".py"):
                _import_file(Path(name).expanduser())
            else:
                import_module(name)
        except RlxError:
            raise
        except Exception as error:  # whatever the user's code raises
            hint = "Name files that end in .py, or modules that Python finds."
            raise ArgumentError(f"{name}: {type(error).__name__}: {error}", where=_WHERE, hint=hint) from error


def _import_file(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # its functions are found by the module's name
    spec.loader.exec_module(module)


# Subcommand -> where it is, and the first sentence of its help: to list them imports none.
_COMMANDS = {
    "run": ("rlx.cli.run:run", "Answer PROMPT."),
    "chat": ("rlx.cli.chat.commands:chat", "Talk with MODEL, by default the demo model."),
    "serve": ("rlx.cli.serve:serve", "Serve MODEL over HTTP, by default the demo model."),
    "compile": ("rlx.cli.compile:compile_", "Compile the programs of MODEL ahead of its first run."),
    "profile": ("rlx.cli.profile:profile", "Write and show compile profiles."),
    "inspect": ("rlx.cli.inspect:inspect", "Show what is in MODEL, by default the demo model."),
    "report": ("rlx.cli.report:report", "Write one HTML page about MODEL, by default the demo model."),
    "batch": ("rlx.cli.batch:batch", "Answer the requests of a file with MODEL."),
    "bench": ("rlx.cli.bench:bench", "Measure prefill and decode of MODEL, and the encoding of images."),
    "embed": ("rlx.cli.embed:embed", "Make vectors of the texts in FILE."),
    "rerank": ("rlx.cli.embed:rerank", "Order the texts in FILE by how well they answer QUERY."),
    "ppl": ("rlx.cli.ppl:ppl", "Measure the perplexity of the text in FILE."),
    "eval": ("rlx.cli.ppl:eval_", "Measure how often MODEL chooses the right answer."),
    "trace": ("rlx.cli.run:trace", "Answer PROMPT, and write a time line of what is done."),
    "tune": ("rlx.cli.tune:tune", "Adapt the kernels to this machine: measure variants, keep the fastest."),
    "devices": ("rlx.cli.devices:devices", "List the devices that programs run on."),
    "doctor": ("rlx.cli.doctor:doctor", "Show what rlx finds on this machine, for bug reports."),
    "pull": ("rlx.cli.downloads:pull", "Download a model from the Hugging Face hub."),
    "list": ("rlx.cli.downloads:list_", "List the downloaded models, the most recently used first."),
    "rm": ("rlx.cli.downloads:rm", "Remove downloaded models."),
    "convert": ("rlx.cli.convert:convert", "Write the safetensors model IN as the GGUF file OUT."),
    "quantize": ("rlx.cli.convert:quantize", "Write the model IN as the GGUF file OUT of another TYPE."),
    "imatrix": ("rlx.cli.ppl:imatrix", "Write the importance of MODEL's inputs as the GGUF file OUT."),
    "cache": ("rlx.cli.cache:cache", "Look into the compile cache, and clean it up."),
}
INTERRUPTED = 130  # exit code after SIGINT
UNREAD = 141  # exit code where the reader of stdout goes away, as after SIGPIPE


class Mistake(click.ClickException):
    """An error that the user can fix: one message on stderr, broken at words."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(wrapped(f"Error: {self.format_message()}", sys.stderr), err=True)


class Bug(Mistake):
    """An error in rlx."""

    exit_code = 1


class Commands(Group):
    """The group of subcommands; `invoke` reports their errors."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name][0].split(":")
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the environment variables; an option overrides its variable."""
        rows = [(f"{v.name}", f"{v.meaning}  [{v.values}; default: {v.default}]") for v in env.VARIABLES]
        with formatter.section("Environment"):
            formatter.write_dl(rows)

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        """As click's; what happens while words are parsed and `--help` is printed is reported as in `invoke`."""
        try:
            return super().make_context(*args, **more)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _discard(sys.stdout)
            raise click.exceptions.Exit(UNREAD) from None
        except OSError as error:
            raise Mistake(in_words(error, None, "rlx")) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the subcommand.

        `RlxError` and what the system refuses become their message and exit code 2, an interrupt becomes 130, anything
        else a message that says so and exit code 1; `--debug` adds the traceback.
        """
        try:
            ctx.meta[DEBUG] = ctx.meta.get(DEBUG, False) or env.debug_level() > 0
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise  # click knows what to do with these
        except BrokenPipeError:
            _discard(sys.stdout)  # what is buffered: Python would fail to write it at exit
            ctx.exit(UNREAD)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except (RlxError, OSError) as error:  # OSError: a folder that cannot be written, a full disk
            _show_traceback(ctx, error)
            raise Mistake(message(error, ctx)) from error
        except Exception as error:
            if isinstance(error, getattr(sys.modules.get("bdb"), "BdbQuit", ())):  # somebody left the debugger
                ctx.exit(INTERRUPTED)
            _show_traceback(ctx, error)
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise Bug(f"unexpected {what}. --debug shows where it comes from; please report it") from error


def show_mistake(ctx: click.Context, error: RlxError) -> None:
    """Prints an error for a command that continues, as for one that ends."""
    _show_traceback(ctx, error)
    Mistake(message(error, ctx)).show()


def message(error: Exception, ctx: click.Context) -> str:
    """The text of an error for a user of the command line."""
    return in_words(error, ctx.meta.get(COMMAND), ctx.meta.get(TYPED, "rlx"))


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Prints a warning without its place in the code."""
    ctx = click.get_current_context(silent=True)
    options = option_names(ctx.meta.get(COMMAND) if ctx else None)
    click.echo(wrapped(f"Warning: {in_options(str(message), options)}", sys.stderr), err=True)


def _show_traceback(ctx: click.Context, error: Exception) -> None:
    if ctx.meta.get(DEBUG):
        traceback.print_exception(error)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(rlx.__version__, message="rlx %(version)s", help="Show the version.")
@debug_option
def cli() -> None:
    """Run language models with native code compiled for this machine."""
    if env.get("RLX_IMPORT"):
        import_all(env.imports())


def _interruptible() -> None:
    """From here on an interrupt is a `KeyboardInterrupt`: until a command runs there is nothing to clean up."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def open_missing() -> None:
    """Opens the null device for each standard stream that the caller has closed, as in `rlx inspect >&-`.

    Otherwise the next file that is opened gets its number, and has in it what code in C prints.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - it stays open


def _discard(stream: TextIO) -> None:
    """Sends what a stream has buffered, and what follows, nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


class _LossyStderr:
    """Stderr whose reader may go away, as in `rlx run Hi 2>&1 >answer | head -1`: what follows is lost, silently.

    Stderr has what is said beside the result, so the command goes on and exits as if it had been read.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            _discard(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            _discard(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main(leave_quietly: Callable[[], None] = lambda: None) -> None:
    """Parses `sys.argv`, runs, exits with 0, 2 for a user's mistake, 130 after an interrupt, or 1.

    Args:
        leave_quietly: makes an interrupt end the process at once; called when all is written.
    """
    open_missing()
    sys.stderr = cast(TextIO, _LossyStderr(sys.stderr))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a prompt is one text: threads would only start and wait
    try:
        cli(prog_name="rlx", obj=_interruptible)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed
                stream.flush()
        leave_quietly()
