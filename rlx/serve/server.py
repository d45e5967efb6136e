"""A server: its models, what they are called, its state, and the parts that all routers share.

Server stage, under the application. All models are opened when the server starts, in order, and stay until it ends. The
first is the default.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from rlx import demo, serve
from rlx.engine.opening.options import SLOTS
from rlx.errors import ArgumentError, BusyError, RlxError
from rlx.grammar import trial
from rlx.serve import record, status
from rlx.serve.batch.jobs import BatchJobs, FileStore
from rlx.serve.errors import ApiError
from rlx.serve.middleware import Access, ConcurrencyLimiter
from rlx.serve.model import ServedModel
from rlx.serve.options import ServerOptions
from rlx.serve.record import Log, RequestRecord
from rlx.serve.status import Metrics

if TYPE_CHECKING:
    from rlx.serve.telemetry import Telemetry

Loader = Callable[[], ServedModel]
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def split_name(text: str) -> tuple[str | None, str]:
    """The name and the rest of `NAME=PATH`; without a name None, and the text. The path of a file that exists has none.

    >>> split_name("small=models/qwen3:Q8_0")
    ('small', 'models/qwen3:Q8_0')
    """
    name, equals, path = text.partition("=")
    is_name = equals and name and path and "/" not in name and not Path(text).expanduser().exists()
    return (name, path) if is_name else (None, text)


def check_names(models: Sequence[Sequence[str]]) -> None:
    """Refuses models that requests cannot tell apart.

    Args:
        models: the names of each.

    Raises:
        ArgumentError: there is no model, or two have the same name.
    """
    if not models:
        raise ArgumentError("there is no model", where="model")
    uses = Counter(name for names in models for name in set(names))
    if double := next((name for name in uses if uses[name] > 1), None):
        hint = "give one of them another name, as in other=model.gguf"
        raise ArgumentError(f"two models are called {double!r}", where="model", hint=hint)


def names_of(path: str | Path, given: str | None, aliases: Sequence[str] = ()) -> list[str]:
    """The names of a model: by `aliases`, by its file, and as the user wrote it. No name shows a folder.

    Args:
        given: how the user named the model, or None.
    """
    written = [] if given is None else [Path(given).name if Path(given).exists() else given]
    return list(dict.fromkeys([*aliases, model_name(path), *written]))


def model_name(path: str | Path) -> str:
    """The name of a model: that of its file or folder, without suffix; `demo` for the demo model.

    >>> model_name("/models/Qwen3-0.6B-Q4_K_M.gguf")
    'Qwen3-0.6B-Q4_K_M'
    >>> model_name("/models/big-00001-of-00003.gguf")
    'big'
    """
    for name in (demo.TEXT, demo.VISION):
        if Path(path) == demo.path(name):
            return name
    found = Path(path)
    if found.suffix not in (".gguf", ".safetensors"):
        return found.resolve().name
    plain = _SHARD.sub("", found.stem)
    return plain if plain != "model" else found.resolve().parent.name


class State(StrEnum):
    """The states of a server."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Server:
    """The models, the state, and the parts that all routers share.

    Args:
        sources: the models, or what opens them; it then answers 503 until all are there.
        options: how they are served.

    Attributes:
        opened: the models that are open: all, or none before they are.
        state: what it can do now.
        error: why a model could not be opened.
        in_flight: number of requests that are being answered and want something computed.
        changed: called after every change of the state, and when requests no longer wait for a compile.
        batches: those that were sent over HTTP.

    Raises:
        ArgumentError: `sources` are open, and there is none, or two have the same name.
    """

    batches: BatchJobs  # which call the application

    def __init__(self, sources: Sequence[ServedModel | Loader], options: ServerOptions) -> None:
        self._sources, self.options = sources, options
        self.opened: tuple[ServedModel, ...] = ()
        self.state, self.in_flight = State.LOADING, 0
        self.error: BaseException | None = None
        self.changed: Callable[[], object] = lambda: None
        self.access = Access(options)
        self.limiter = ConcurrencyLimiter(SLOTS, options.queue)
        self.log = Log(options.log)
        self.telemetry = _telemetry(options.otlp_endpoint)
        self.metrics = Metrics(self)
        self.files = FileStore(int(options.files_mb * 1_000_000))
        self._is_warm = False
        if all(isinstance(each, ServedModel) for each in sources):
            self._open()
            self._become(State.READY)

    # ---------------------------------------------------------------------------------------------- models

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """The models, the default first; `ApiError` 503 while they are loading, or if one cannot be opened."""
        if not self.opened:
            raise self.refusal() or AssertionError("it is ready without a model")
        return self.opened

    @property
    def without_adapters(self) -> list[ServedModel]:
        """The models that are open, each once: those of adapters have their runners."""
        return [each for each in self.opened if each.adapter is None]

    @property
    def default_name(self) -> str:
        """The name of the first model; before it is open as the options say."""
        return self.opened[0].name if self.opened else next(iter(self.options.alias), "")

    def find(self, name: str) -> ServedModel | None:
        """The model with this name; None if there is none."""
        return next((each for each in self.models if name in each.names), None)

    def named(self, name: str | None) -> ServedModel:
        """The model that a request means; the record of the request says which.

        Without a name it is the first one. So is one of another name, unless the server is strict.

        Raises:
            ApiError: there is no such model, or it is loading.
        """
        models = self.models
        model = models[0] if name is None else self.find(name)
        if model is None and self.options.strict_model:
            hint = f"there is {', '.join(repr(name) for each in models for name in each.names)}"
            what = f"the model {name!r} does not exist here"
            raise ApiError(404, what, param="model", code="model_not_found", hint=hint)
        model = model or models[0]
        if (found := record.current()) is not None:
            found.model = model.name
        return model

    def _open(self) -> None:
        """Opens those models that are not open yet."""
        opened = [each if isinstance(each, ServedModel) else each() for each in self._sources]
        found = [model for each in opened for model in each.with_adapters]
        check_names([each.names for each in found])
        for model in found:
            model.options = self.options
            with suppress(RlxError):  # of a file without one: the requests that need it say so
                model.tokenizer.encode("")  # built now, not in the first request,
                _ = model.tokenizer.eog_ids  # with the process of the chat template, which says what ends a turn
        self.limiter.slots = sum(each.slots for each in opened)
        self.opened = tuple(found)
        threading.Thread(target=_prepare_grammars, args=[self.opened], name="rlx-grammars", daemon=True).start()

    async def load(self) -> None:
        """Opens the models in a thread of its own, and waits until they are compiled.

        A process that ends before they are there does not wait for the thread.
        """
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def work() -> None:
            try:
                self._open()
            except BaseException as error:
                self.error = error
            with suppress(RuntimeError):  # the event loop was closed meanwhile
                loop.call_soon_threadsafe(done.set)

        if not self.opened:
            threading.Thread(target=work, name="rlx-opening", daemon=True).start()
            await done.wait()
            if self.error is not None or self.state == State.LOADING:
                self._become(State.READY if self.error is None else State.FAILED)
            while self.state == State.READY and self.unready() is not None:
                await asyncio.sleep(0.1)
                if self.unready() is None:
                    self.changed()

    def cut(self) -> None:
        """Ends what is still computed; its clients get an error that says so."""
        closing, self.opened = self.without_adapters, ()
        for model in closing:
            threading.Thread(target=model.runner.close, name="rlx-closing", daemon=True).start()

    # ---------------------------------------------------------------------------------------------- state

    def drain(self) -> None:
        """From now on nothing new begins."""
        self._become(State.DRAINING)

    def _become(self, state: State) -> None:
        self.state = state
        self.changed()

    def refusal(self) -> ApiError | None:
        """The error of a request that wants something computed now; None if that is possible."""
        if self.state == State.READY:
            return None
        if self.state == State.LOADING:
            return _unavailable("the model is loading", "loading", "try again in some seconds")
        if self.state == State.FAILED:
            return _unavailable(f"the model cannot be opened: {self.error}", "failed")
        return _unavailable("the server is ending", "draining", "send the request to another one, or again later")

    def unready(self) -> ApiError | None:
        """Why a request would not be answered now, or would wait for a compile; None if it is answered at once.

        One that comes while the first programs are compiled is answered all the same, when they are there.
        """
        problem = self.refusal()
        if problem is None and not self._is_warm:
            everything = self.options.warm == "all"
            self._is_warm = all(each.is_compiled if everything else each.is_warm for each in self.models)
        return problem or (None if self._is_warm else _unavailable("the model is compiled for this CPU", "loading"))

    @property
    def is_crowded(self) -> bool:
        """Whether requests wait: there are more than slots, or choices of several wait for the slots of a model."""
        inside = self.limiter.inside
        if inside < 2 or inside > self.limiter.slots:
            return inside > self.limiter.slots
        with suppress(BusyError):  # closed meanwhile
            return any(each.runner.stats()["requests"]["queue"] for each in self.without_adapters)
        return False

    def places_for_batches(self) -> int:
        """How many requests of batches are computed at once: half of the slots of each model stay free for others."""
        return max(1, min((each.slots for each in self.without_adapters), default=0) // 2)

    def done(self, found: RequestRecord, headers: Headers) -> None:
        """Notes a request that has ended."""
        if found.status not in (200, 503) or found.path not in status.PROBES:
            self.log.request(found)
        if self.telemetry is not None:
            self.telemetry.span(found, headers)
        self.metrics.count(found)


def _unavailable(what: str, code: str, hint: str | None = None) -> ApiError:
    """The 503 of a server that does not answer now; `code` is one word for why."""
    return ApiError(503, what, code=code, hint=hint, headers={"Retry-After": "1"})


def _prepare_grammars(models: Sequence[ServedModel]) -> None:
    """Starts the process that tries grammars and reads the vocabularies for them, before the first request needs both.

    A large vocabulary takes a second.
    """
    with suppress(RlxError):  # without the package: the requests that need it say so
        trial.start()
    for model in models:
        with suppress(RlxError):  # without a tokenizer
            model.runner.grammars.vocabulary  # noqa: B018


def _telemetry(endpoint: str | None) -> Telemetry | None:
    """The spans that an option, or else OTEL_EXPORTER_OTLP_ENDPOINT, asks for; None if neither does.

    Raises:
        ArgumentError: the extra `otel` is not installed.
    """
    found = endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not found:
        return None
    try:
        telemetry = serve.telemetry
    except ImportError as error:
        hint = '`pip install "rlx[otel]"`'
        raise ArgumentError("traces need OpenTelemetry", where="otlp_endpoint", hint=hint) from error
    return telemetry.Telemetry(found)
