"""`rlx serve`: models behind HTTP."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from rlx import ray as cluster
from rlx import serve as http
from rlx.arguments import without_none
from rlx.cli.answering import speculative_option
from rlx.cli.command import Command
from rlx.cli.options import (
    adapter_option,
    engine_options,
    field_options,
    model_path,
    models_argument,
    open_plan,
    open_runner,
    sampling_options,
    yes_option,
)
from rlx.cli.output import Bars, counted
from rlx.cli.run import check_no_trace, recorded, trace_options
from rlx.engine.opening.options import RunnerOptions
from rlx.engine.opening.setup import pools_of
from rlx.runners.auto import is_encoder
from rlx.serve.options import ServerOptions, served
from rlx.tracing import Detail
from rlx.weights import open_weights
from rlx.weights.locate import resolve_model_path

if TYPE_CHECKING:
    from rlx.serve.model import ServedModel
    from rlx.serve.server import Server


Named: TypeAlias = tuple[str, list[str]]  # where a model is, and its names


@click.command(cls=Command)
@models_argument
@field_options("server", ServerOptions)
@field_options("loop", RunnerOptions, "slots", "stall_ms")
@sampling_options
@speculative_option
@adapter_option(
    "A LoRA adapter of MODEL, a PEFT folder or a GGUF file; requests choose it as the model NAME; repeatable.",
    multiple=True,
)
@click.option("--ray", "on_ray", is_flag=True, help="Serve on the nodes of a Ray cluster; RAY_ADDRESS names it.")
@click.option("--replicas", metavar="N", help="With --ray: how many processes open MODEL, such as 2, or 1-4 by load.")
@trace_options
@yes_option
@engine_options
def serve(
    models: list[str],
    server: dict[str, Any],
    loop: dict[str, Any],
    sample: dict[str, Any],
    speculative: str | None,
    adapters: dict[str, str] | None,
    on_ray: bool,
    replicas: str | None,
    trace: str | None,
    detail: Detail,
    limit: int,
    yes: bool,
    engine: dict[str, Any],
) -> None:
    """Serve MODEL over HTTP, by default the demo model. Of several, requests choose one by its name.

    Clients of OpenAI's, Anthropic's and Ollama's APIs can use it, and / has a page to chat on. Only this machine
    reaches the server, unless --host says otherwise. Ctrl-C or SIGTERM ends it when the requests that it answers
    are complete; a second Ctrl-C at once.

    \b
    rlx serve
    rlx serve model.gguf --port 8000 --alias gpt-4o
    rlx serve small=model.gguf demo-vision
    rlx serve model.gguf --host 0.0.0.0 --api-key-file keys.txt
    """
    http.check_installed()
    options = ServerOptions(**without_none(**server), sample=sample).resolved()
    found = _named(models, options, engine, yes=yes)
    if adapters and len(found) > 1:
        raise click.UsageError(f"--adapter is of one model: name one MODEL, not {len(found)}")
    engine["adapters"] = adapters
    loop = without_none(**loop, speculative=speculative)
    if on_ray:
        check_no_trace(trace)
        if len(found) > 1:
            raise click.UsageError(f"--ray serves one model a deployment: name one MODEL, not {len(found)}")
        _serve_on_ray(*found[0], options, {**engine, **loop}, replicas)
        return
    if replicas is not None:
        raise click.UsageError("--replicas needs --ray")
    with recorded(trace, detail, limit):
        _serve_here(found, options, engine, loop)


def _named(models: list[str], options: ServerOptions, engine: dict[str, Any], *, yes: bool) -> list[Named]:
    """The models to serve: the path and the names of each."""
    server = http.server
    found: list[Named] = []
    for own, model in map(server.split_name, models) if models else [(None, None)]:
        path, aliases = model_path(model, engine, yes=yes), [] if found else list(options.alias)
        names = server.names_of(path, model, aliases) if own is None else list(dict.fromkeys([*aliases, own]))
        found.append((path, names))
    server.check_names([names for _, names in found])
    return found


def _serve_here(models: list[Named], options: ServerOptions, engine: dict[str, Any], loop: dict[str, Any]) -> None:
    """Serves in this process, until SIGINT or SIGTERM."""
    lifecycle = http.lifecycle
    paths, names = [path for path, _ in models], [names for _, names in models]
    for path in paths:
        resolve_model_path(path)  # a wrong path is an error before anybody is told that the server listens
    with ExitStack() as opened, lifecycle.listening(options) as listeners, Bars() as bars:
        pools = cache(lambda: _pools(paths, engine))  # asked for before the first model is opened

        def opening(at: int) -> ServedModel:
            bars.waiting("opening the model" if len(paths) == 1 else f"opening {names[at][0]}")
            runner = open_runner(paths[at], served({**engine, **loop, **pools()[at]}), bars)
            opened.callback(runner.close)
            return http.ServedModel(runner, names[at][0], names[at][1:])

        app = http.create_app([partial(opening, at) for at in range(len(paths))], options)
        said = ", ".join(each[0] for each in names)
        Announcer(app.state.server, said, lifecycle.addresses(options, listeners), bars).begin()
        try:
            lifecycle.run(app, options, listeners)
        finally:
            bars.close()


def _pools(paths: list[str], engine: dict[str, Any]) -> list[dict[str, Any]]:
    """For each of several models the option that says how large its pool of caches is: their shares of the memory.

    Encoders have no caches, and no such option.
    """
    if len(paths) == 1:
        return [{}]
    with ExitStack() as stack:
        loaders = [stack.enter_context(open_weights(path)) for path in paths]
        caching = [at for at, loader in enumerate(loaders) if not is_encoder(loader)]
        plans = [stack.enter_context(open_plan(loaders[at], engine)) for at in caching]
        sizes = dict(zip(caching, pools_of(plans), strict=True))
    return [{"kv_bytes": sizes[at]} if at in sizes else {} for at in range(len(paths))]


def _serve_on_ray(
    path: str, names: list[str], options: ServerOptions, engine: dict[str, Any], replicas: str | None
) -> None:
    """Serves on a cluster, until SIGINT or SIGTERM."""
    cluster.check_installed()
    if len(options.hosts) > 1:
        raise click.UsageError("with --ray there is one --host, that of Ray's proxies")
    least, dash, most = (replicas or "1").partition("-")
    if not (least.isdecimal() and (most.isdecimal() or not dash)):
        raise click.UsageError(f"--replicas is {replicas!r}, expected a number such as 2, or a range such as 1-4")
    cpus = engine.pop("threads")
    count = (int(least), int(most)) if dash else int(least)
    options = replace(options, alias=tuple(names))
    app = cluster.deployment(path, num_cpus=cpus, replicas=count, drain=options.drain, server=options, **engine)
    click.echo(f"starting {path} on Ray", err=True)
    ready = f"ready at port {options.port} of Ray's proxies"
    cluster.serving.run(app, options.hosts[0], options.port, options.drain, lambda: click.echo(ready, err=True))


class Announcer:
    """Says on stderr what the server does.

    Args:
        server: whose state it follows.
        name: of the model; of several all names.
        urls: where the server is.
        bars: are on the terminal until the server is ready.
    """

    def __init__(self, server: Server, name: str, urls: list[str], bars: Bars) -> None:
        self._server, self._name, self._urls, self._url, self._bars = server, name, urls, urls[0], bars
        self._start = time.monotonic()

    def begin(self) -> None:
        """Says where the server is, and who reaches it."""
        options = self._server.options
        self._server.changed = self._changed
        who = "this machine only" if options.is_local else "every machine that reaches this one"
        keys = f" with {counted(len(options.api_key), 'API key')}" if options.api_key else ""
        click.echo(f"rlx serves {self._name} at {' and '.join(self._urls)}, for {who}{keys}", err=True)
        if not (options.is_local or options.api_key):
            click.echo(
                f"Warning: anybody who reaches port {self._url.rpartition(':')[2]} of this machine can use the model. "
                "--api-key asks for a key.",
                err=True,
            )

    def _changed(self) -> None:
        is_ready = self._server.state == "ready"
        if is_ready and self._server.unready() is not None:  # as /health says, too
            self._bars.waiting("compiling the first programs")
            return
        self._bars.close()
        if is_ready:
            click.echo(f"ready after {time.monotonic() - self._start:.1f} s. {self._try()}", err=True)
        elif self._server.state == "draining":
            left, most = self._server.in_flight, self._server.options.drain
            rest = f"{counted(left, 'request')} may finish within {most:g} s, Ctrl-C ends at once" if left else "bye"
            click.echo(f"\nending: {rest}", err=True)

    def _try(self) -> str:
        """The next steps of a user."""
        options = self._server.options
        key = " -H 'Authorization: Bearer KEY'" if options.api_key else ""
        body = '{"messages": [{"role": "user", "content": "Hello"}]}'
        page = f"Open {self._url} in a browser, or:" if options.page else "Try:"
        return (
            f"{page}\n  curl {self._url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n"
            f"Base URL for clients of OpenAI's API: {self._url}/v1. Ctrl-C ends the server."
        )
