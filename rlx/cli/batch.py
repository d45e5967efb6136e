"""`rlx batch`: answers a file of requests."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import click

from rlx import cli, platform
from rlx import ray as cluster
from rlx import serve as server
from rlx.cli.command import Command
from rlx.cli.main import INTERRUPTED
from rlx.cli.options import engine_options, model_argument, model_path, open_runner
from rlx.cli.output import Bars, counted
from rlx.cli.run import check_no_trace, recorded, trace_options
from rlx.tracing import Detail

if TYPE_CHECKING:
    from rlx.serve.batch.results import Answering, Progress, Results
    from rlx.serve.batch.source import Source

#: What answers requests, and how many it takes at a time.
Answerer: TypeAlias = AbstractAsyncContextManager[tuple["Answering", int]]


@click.command(cls=Command)
@click.argument("requests", metavar="IN.jsonl")
@click.argument("answers", metavar="OUT.jsonl")
@model_argument
@click.option("--slots", type=click.IntRange(1, 128), metavar="N", help="Requests that are computed at the same time.")
@click.option("--ray", "on_ray", is_flag=True, help="Let the nodes of a Ray cluster answer; RAY_ADDRESS names it.")
@click.option("--replicas", type=click.IntRange(1), metavar="N", help="With --ray: how many processes open MODEL.")
@trace_options
@engine_options
@click.pass_context
def batch(
    ctx: click.Context,
    requests: str,
    answers: str,
    model: str | None,
    slots: int | None,
    on_ray: bool,
    replicas: int | None,
    trace: str | None,
    detail: Detail,
    limit: int,
    engine: dict[str, Any],
) -> None:
    """Answer the requests of a file with MODEL.

    The answers are appended to OUT.jsonl. Both files have the form of OpenAI's batch API, a JSON object a line.
    Without MODEL the demo model answers. A - is stdin or stdout. The same command continues what an interrupt, a
    crash or a full disk ended.

    \b
    rlx batch questions.jsonl answers.jsonl model.gguf
    """
    if on_ray:
        check_no_trace(trace)
    elif replicas is not None:
        raise click.UsageError("--replicas needs --ray")
    (cluster if on_ray else server).check_installed()
    if requests != "-" and os.path.exists(answers) and os.path.samefile(requests, answers):
        raise click.UsageError("IN.jsonl and OUT.jsonl are the same file")
    path = model_path(model, engine)
    name = server.server.model_name(path)
    engine |= {} if slots is None else {"slots": slots}
    with (
        server.batch.source.Source.open(requests, name) as source,
        server.batch.results.Results(answers, source) as results,
    ):
        if all(results.done):
            click.echo(f"all {counted(len(source), 'request')} were answered before", err=True)
            return
        opening = partial(_on_ray, path, name, engine, replicas) if on_ray else partial(_here, path, name, engine)
        with recorded(trace, detail, limit):
            finished = _answered(opening, source, results)
    if not finished:
        again = shlex.join(["rlx", *sys.argv[1:]])
        click.echo("Interrupted. " + (f"To go on: {again}" if "-" not in (requests, answers) else ""), err=True)
        ctx.exit(INTERRUPTED)


@contextmanager
def _here(path: str, name: str, engine: dict[str, Any], bars: Bars) -> Iterator[Answerer]:
    """Answers in this process. The model opens before there is an event loop, which would hold back a Ctrl-C."""
    with open_runner(path, engine, bars) as runner:
        yield server.app.answering_with(runner, name)


@contextmanager
def _on_ray(path: str, name: str, engine: dict[str, Any], replicas: int | None, bars: Bars) -> Iterator[Answerer]:
    bars.waiting("opening the model on the cluster")
    yield cluster.batch.answering_on_ray(path, name, engine, replicas)


def _answered(opening: Callable[[Bars], AbstractContextManager[Answerer]], source: Source, results: Results) -> bool:
    """Whether the work came to its end; SIGINT and SIGTERM end it early. It says what was done."""

    async def run(answerer: Answerer) -> None:
        task = asyncio.current_task()
        assert task is not None
        with platform.current().on_signals(asyncio.get_running_loop(), [signal.SIGTERM], task.cancel):
            async with answerer as (answering, at_once):
                await server.batch.results.answer_all(source, results, answering, at_once, bar)

    with Bar() as bar, _sigterm_as_interrupt():
        try:
            with opening(bar.opening) as answerer:
                asyncio.run(run(answerer))
            finished = True
        except (KeyboardInterrupt, asyncio.CancelledError):
            finished = False
    if bar.progress is not None:
        click.echo(summary(bar.progress, bar.seconds), err=True)
    return finished


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Inside, SIGTERM raises a KeyboardInterrupt where no event loop takes it, as SIGINT does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def summary(progress: Progress, seconds: float) -> str:
    """A line about a run."""
    own = progress.done - progress.before
    prompt = f"prompts: {counted(progress.prompt_tokens, 'token')}"
    if progress.cached_tokens:
        prompt += f", {progress.cached_tokens / progress.prompt_tokens:.0%} from the prefix cache"
    parts = [
        f"answered {own} of {counted(progress.total, 'request')}",
        progress.before and f"{progress.before} were answered before",
        progress.failed and f"{progress.failed} with an error",
        prompt,
        f"answers: {counted(progress.tokens, 'token')}, {progress.tokens / max(seconds, 1e-9):.1f} tokens/s",
    ]
    return "; ".join(part for part in parts if part)


class Bar:
    """How far a batch is: a bar on stderr if it is a terminal, otherwise nothing.

    Attributes:
        progress: what was reported last.
        seconds: since the first report.
    """

    def __init__(self) -> None:
        self.opening = Bars()
        self.progress: Progress | None = None
        self._display: Any = None
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def __call__(self, progress: Progress) -> None:
        if self.progress is None:
            self.opening.close()
            self.progress, self._start = progress, time.perf_counter()
            if sys.stderr is not None and sys.stderr.isatty():
                self._display = cli.drawing.request_bar(sys.stderr, progress.total, progress.before)
        if self._display is not None:
            speed = f"{progress.tokens / max(self.seconds, 1e-9):.0f} tokens/s"
            self._display.update(0, completed=progress.done, speed=speed, failed=_failed(progress))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.opening.close()
        if self._display is not None:
            self._display.stop()


def _failed(progress: Progress) -> str:
    return f"{progress.failed} with an error" if progress.failed else ""
