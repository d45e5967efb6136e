"""`rlx run`: one prompt, one answer; and `rlx trace`, which also records what is done, and when."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import click

import rlx
from rlx import cli, env, tracing
from rlx.cli.answering import (
    INTERRUPTED_ANSWER,
    Answer,
    Answerer,
    Out,
    answer_grammar,
    image_option,
    read_images,
    speculative_option,
    speeds,
    structured_options,
    system_messages,
    system_option,
    template_variables,
    thinking_option,
    user_message,
)
from rlx.cli.command import Command
from rlx.cli.main import INTERRUPTED
from rlx.cli.options import (
    Decorator,
    Function,
    described,
    ending_options,
    engine_options,
    model_path,
    one_adapter,
    open_runner,
    sample_opts,
    sampling_options,
    yes_option,
)
from rlx.cli.output import Bars, counted, moves_cursor, printable, size, stdout, table, wrapped
from rlx.cli.prompt import Words
from rlx.errors import ChatTemplateError
from rlx.grammar import Grammar
from rlx.profile.keys import BUCKETS
from rlx.prompt import Prompt
from rlx.runners import Model
from rlx.text.chat import get_ready
from rlx.tracing import Detail, Trace, span
from rlx.vision.image import Image


@click.command(cls=Command)
@click.argument("words", nargs=-1, metavar="[MODEL] PROMPT")
@click.option("--model", metavar="MODEL", help="Another way to name MODEL.")
@click.option("--prompt", metavar="TEXT", help="Another way to give PROMPT.")
@click.option("--file", metavar="FILE", help="Read PROMPT from FILE.")
@click.option("--stdin/--no-stdin", default=None, help="Wait for the end of stdin, or do not read it.")
@ending_options
@sampling_options
@system_option
@thinking_option
@structured_options
@speculative_option
@one_adapter
@image_option
@click.option("--raw", is_flag=True, help="No chat template; control tokens written in the prompt count as such.")
@yes_option
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option("--no-stream", is_flag=True, help="Print the text when it is complete.")
@click.pass_context
def run(
    ctx: click.Context,
    words: tuple[str, ...],
    model: str | None,
    prompt: str | None,
    file: str | None,
    stdin: bool | None,
    ending: dict[str, Any],
    sample: dict[str, Any],
    system: str | None,
    thinking: bool | None,
    grammar: Grammar | None,
    speculative: str | None,
    adapters: dict[str, str] | None,
    image: tuple[str, ...],
    raw: bool,
    yes: bool,
    engine: dict[str, Any],
    as_json: bool,
    no_stream: bool,
    recording: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Answer PROMPT.

    MODEL is a GGUF file, a safetensors file, a directory with one, or the name of a downloaded model, ORG/REPO[:QUANT].
    Without MODEL the demo model answers, or with --image the demo model that sees. The model's chat template is used if
    it has one.

    What comes on stdin stands before PROMPT; a PROMPT of - is all of stdin. Write -- in front of a PROMPT that begins
    with a dash.

    \b
    rlx run "Tell me a story about a brave fox."
    rlx run model.gguf "What is 27 + 45?" --temperature 0.7 --seed 1
    rlx run model.gguf --image cat.png "What is this?"
    rlx run model.gguf --json-schema person.json "Who wrote Faust?"
    cat README.md | rlx run model.gguf "Summarize this."
    """
    start = time.perf_counter()
    if raw and (system, thinking, image) != (None, None, ()):
        raise click.UsageError("--system, --thinking and --image need the chat template, and --raw leaves it out")
    model, text = Words(words, model, prompt, file, stdin).resolve()
    images, engine["adapters"] = read_images(image), adapters
    path = model_path(model, engine, images=bool(images), yes=yes)
    ctx.with_resource(recording())  # what is wrong so far leaves an earlier trace as it is
    if not raw:
        get_ready()
    with Bars("opening the model") as bars:
        with span("open the model"):
            opened = open_runner(path, {**engine, "compile_ahead": _calls(text, ending["max_tokens"])}, bars)
        with opened as runner:
            with span("read the prompt"):
                chosen = sample_opts(runner.recommended_sample, sample)
                context = runner.checked_prompt(prompt_of(runner, text, system, thinking, raw, images))
                form = grammar if raw else answer_grammar(grammar, runner, context.ids)
            answerer = Answerer(runner, ending, chosen, speculative, form)
            loaded = time.perf_counter() - start
            bars.waiting("reading the prompt")
            out = None if as_json or no_stream else _out(form)
            with span("answer"):
                answer, end = answerer(context, out, bars.close)
            said = _report(answer, len(context), end)
            report = {"model": model, "family": runner.family, **said, **_counters(runner)}
            report["sampling"] = described(chosen, runner.recommended_sample)
    report["load_seconds"] = loaded
    if as_json:
        click.echo(json.dumps(report))
    else:
        if no_stream:
            complete = _out(form)
            complete.write((printable(answer.text) if complete.isatty() else answer.text) + "\n")
        click.echo(wrapped(speeds(report), sys.stderr), err=True)
    if end == INTERRUPTED_ANSWER:
        ctx.exit(INTERRUPTED)


def _out(form: Grammar | None) -> Out:
    """stdout; in a terminal rows break between words, but not those of JSON and other text of a given form."""
    out = stdout()
    return cli.tail.WrappedStream(out) if form is None and moves_cursor(out) else out


def _calls(prompt: str, tokens: int) -> list[int] | bool:
    """About how many tokens the calls will have: what is compiled while the model loads.

    Where the program for the prompt cannot be guessed, it is compiled once the prompt's tokens are counted.
    """
    low, high = len(prompt) // 6 + 4, len(prompt) // 3 + 28  # a template has at least 4 tokens, and hardly ever over 28
    guessed = [] if any(low <= rows < high for rows in BUCKETS) else [low]
    return [*guessed, *[1] * (tokens > 1)] if env.compile_ahead() else False


def prompt_of(
    runner: Model, prompt: str, system: str | None, thinking: bool | None, raw: bool, images: Sequence[Image]
) -> list[int] | Prompt:
    """The prompt behind its images: in the chat template if the model has one, else as it is."""
    variables = template_variables(runner, thinking)
    if raw or not runner.tokenizer.chat_template:
        if images:
            hint = "leave --image out; it may be a base model"
            raise ChatTemplateError("the model has no chat template for images", where="--image", hint=hint)
        if system is not None:
            hint = "leave --system out; it may be a base model"
            raise ChatTemplateError("the model has no chat template for a system message", where="--system", hint=hint)
        return runner.tokenizer.encode(prompt, parse_special=raw)
    asked = user_message(prompt, [{"type": "image", "image": image} for image in images])
    return runner.chat_ids([*system_messages(system), asked], **variables)


def _counters(runner: Model) -> dict[str, Any]:
    """The compile profile, and what the compile cache counted since the start."""
    stats = runner.stats()
    cache = stats["cache"]
    compiled = [asdict(row) for row in stats["compiled"]]
    counts = {"compiles": cache.compiles, "compile_seconds": cache.compile_seconds}
    return {"profile": stats["profile"], **counts, "compiled": compiled}


def _report(answer: Answer, prompt: int, end: str) -> dict[str, Any]:
    return {
        "text": answer.text,
        "ids": answer.ids,
        "end": end,
        "prompt_tokens": prompt,
        "tokens": len(answer.ids),
        "first_token_seconds": answer.first_seconds,
        "first_token_compile_seconds": answer.first_wait,
        "prompt_tokens_per_second": answer.prompt_rate(prompt),
        "tokens_per_second": answer.rate,
    }


_DETAIL = click.Choice(("steps", "kernels"))


def detail_option(name: str, default: str) -> Decorator:
    """How much is recorded."""
    text = "Record the time of each step, or also its regions and kernels on each worker."
    return click.option(name, "detail", type=_DETAIL, default=default, show_default=True, help=text)


def limit_option(name: str) -> Decorator:
    """Where the recording ends."""
    text = "Maximum number of events; 1000 are about 200 kB."
    return click.option(
        name, "limit", type=click.IntRange(1), default=tracing.EVENTS, show_default=True, metavar="N", help=text
    )


def trace_options(command: Function) -> Function:
    """Adds --trace, --trace-detail and --trace-limit: the arguments `trace`, `detail` and `limit`."""
    command = limit_option("--trace-limit")(command)
    command = detail_option("--trace-detail", "steps")(command)
    help_text = "Record a trace in FILE for https://ui.perfetto.dev."
    return click.option("--trace", metavar="FILE", help=help_text)(command)


def check_no_trace(path: str | None) -> None:
    """`click.UsageError` if a trace is asked for: other processes than this one would compute."""
    if path is not None:
        raise click.UsageError("--trace records this process only: leave out --ray")


@contextmanager
def recorded(
    path: str | None, detail: Detail, limit: int, then: Callable[[Trace], object] | None = None
) -> Iterator[None]:
    """Records a trace in the `with` block, and says what it is; without a path it does nothing.

    Args:
        then: called at the end, to say more.
    """
    if path is None:
        yield
        return
    facts = {"rlx": rlx.__version__, "command": " ".join(["rlx", *sys.argv[1:]]), "cpus": os.cpu_count()}
    with tracing.trace(path, detail=detail, limit=limit, **facts) as found:
        try:
            yield
        finally:
            tracing.stop()
            click.echo(_said(found), err=True)
            if then is not None:
                then(found)


def _said(found: Trace) -> str:
    """A line about the file."""
    what = f"{counted(found.events, 'event')}, {size(found.path.stat().st_size)}, {found.seconds:.2f} s"
    full = f" The limit of {found.limit} events was reached: the file lacks what followed." if found.is_full else ""
    return f"trace: {found.path}, {what}. Open it in https://ui.perfetto.dev.{full}"


_SHARED = [each for each in run.params if each.name not in ("as_json", "no_stream", "debug")]
_OUT = "The file of the trace."


@click.command(cls=Command, params=_SHARED)
@click.option("-o", "--out", metavar="FILE", default="trace.json", show_default=True, help=_OUT)
@detail_option("--detail", "kernels")
@limit_option("--limit")
@click.pass_context
def trace(ctx: click.Context, /, out: str, detail: Detail, limit: int, **options: Any) -> None:
    """Answer PROMPT, and write a time line of what is done.

    https://ui.perfetto.dev opens the file. It shows how the model is opened, loaded and compiled, with every pass;
    each step of a program with its regions; the kernels that each worker runs, and its waits; the request. It is
    valid after Ctrl-C, too.

    \b
    rlx trace "Tell me a story." -o trace.json
    rlx trace model.gguf "What is 27 + 45?" --max-tokens 20
    """
    recording = partial(recorded, out, detail, limit, _show)
    ctx.invoke(run, **options, as_json=False, no_stream=False, recording=recording)


def _show(found: Trace) -> None:
    """Where the time went, and how much of it the trace explains."""
    total = max(found.seconds, 1e-9)
    rows = [(name, seconds / 1e9) for name, seconds in found.phases.items()]
    rows += [("not covered", total - sum(seconds for _, seconds in rows))]
    cells = [(name, f"{seconds * 1e3:.1f}", f"{seconds / total:.1%}") for name, seconds in rows]
    table(("phase", "ms", "share"), cells, right=("ms", "share"), file=sys.stderr)
    answer = found.phases.get("answer", 0)
    if answer:
        click.echo(f"steps of programs: {found.steps / 1e6:.1f} ms, {found.steps / answer:.1%} of the answer", err=True)
