"""The server as an application of Ray Serve: `deployment`.

Ray stage. An ingress takes HTTP requests and passes them on to replicas, each a process with the model and the
application of `rlx.serve`. The router in the ingress knows which replica has which prefix.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray import exceptions, serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from rlx.engine.opening.options import RunnerOptions
from rlx.errors import ArgumentError
from rlx.ray.batch import at_least_one, cpus_of, path_on_nodes, range_of
from rlx.ray.relay import Relay, Replica
from rlx.serve.app import AHEAD
from rlx.serve.options import ServerOptions, served
from rlx.serve.prefixes import PrefixTable
from rlx.serve.server import names_of

if TYPE_CHECKING:
    from starlette.types import Message


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is an extra, and Any for the type checker
    """Ranks replicas by `PrefixTable`. Ray Serve asks one after the other whether it has room."""

    def initialize_state(self, imbalance: int = 8) -> None:  # the name is Ray's
        """Called by Ray Serve with the `request_router_kwargs`.

        Args:
            imbalance: as of `PrefixTable`.
        """
        self._table: PrefixTable[str] = PrefixTable(imbalance)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._table.keep({replica.replica_id.unique_id for replica in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas for a request, each a rank of its own, the best one first."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # sleep between rounds in which all are full
        found = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(each.replica_id) or 0 for name, each in found.items()}
        return [[found[name]] for name in self._table.ranked(keys_of(pending_request), loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._table.remember(keys_of(pending_request), replica_id.unique_id)


def keys_of(request: PendingRequest) -> list[int]:
    """The prefix keys of a request for `Replica.answer`."""
    keys = request.kwargs.get("keys")
    return keys if isinstance(keys, list) else []


LOST = (
    exceptions.RayActorError, exceptions.NodeDiedError, exceptions.ObjectLostError, exceptions.WorkerCrashedError,
    exceptions.RpcError, ReplicaUnavailableError,
)  # fmt: skip
DRAIN_SECONDS = 600.0
APPLICATION = "rlx"
REMOVAL_SECONDS = 20.0  # that Ray needs to end processes without requests
INGRESS_REQUESTS = 10_000  # that one ingress passes on at a time


def deployment(
    model: str | os.PathLike[str],
    *,
    num_cpus: int | None = None,
    replicas: int | tuple[int, int] = 1,
    ingress_replicas: int | None = None,
    drain: float = DRAIN_SECONDS,
    server: ServerOptions | None = None,
    ray_actor_options: Mapping[str, Any] | None = None,
    deployment_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> serve.Application:
    """A Ray Serve application that answers as `rlx serve` does.

        from ray import serve
        serve.run(rlx.ray.deployment("/models/qwen3.gguf", num_cpus=16, replicas=(1, 4)), route_prefix="/")

    Args:
        model: as for `rlx.auto_runner`. A path must be there on every node.
        num_cpus: cores of a replica, and its threads; by default the threads that the model would have here.
        replicas: how many; with (least, most) their number follows the load.
        ingress_replicas: how many processes pass requests on; by default one for each node that there is now. The proxy
            of a node prefers the one there.
        drain: seconds that running requests get to finish when a replica is taken away.
        server: options of the server: the names of the model (`alias`), how many requests may wait in the router
            (`queue`), keys, time limits, sizes. `host` and `port` are those of Ray's proxies.
        ray_actor_options: for replicas, beside `num_cpus`: `memory`, `resources`, `runtime_env`, `label_selector`.
        deployment_options: further options of `ray.serve.deployment` for the replicas; they override those from here.
        options: those of `rlx.auto_runner`, such as `slots`, `kv_bytes` and `max_seq`. By default `compile_ahead` is
            "batch", as with `rlx serve`.

    Raises:
        ArgumentError: an option is unknown or out of its range.
    """
    if "threads" in options:
        raise ArgumentError("threads follow from num_cpus", where="threads", hint="give num_cpus=")
    cpus = cpus_of(num_cpus)
    options = served({"threads": cpus, **options})
    slots = RunnerOptions(**options).slots
    shared = {"graceful_shutdown_timeout_s": drain, "health_check_timeout_s": 30.0}
    server = (server or ServerOptions()).resolved()
    names, queue = names_of(os.fspath(model), None, server.alias), server.queue
    # Ray's proxies listen, not the replicas. Further requests wait in the router, which gives them to whoever is free.
    server = replace(server, host=("0.0.0.0",), queue=AHEAD * slots)
    own = {
        "name": "Replica",
        "ray_actor_options": {**(ray_actor_options or {}), "num_cpus": cpus},
        "max_ongoing_requests": AHEAD * slots,
        "max_queued_requests": queue,
        "request_router_config": RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"imbalance": max(2, slots // 2)}
        ),
        **shared,
        **_scaling(replicas, slots),
        **(deployment_options or {}),
    }
    inner = serve.deployment(Replica).options(**own)
    front = serve.deployment(serve.ingress()(Ingress)).options(
        name="Ingress",
        num_replicas=_nodes() if ingress_replicas is None else at_least_one("ingress_replicas", ingress_replicas),
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=INGRESS_REQUESTS,
        **shared,
    )
    return front.bind(inner.bind(path_on_nodes(model), names, server, options), server.max_body_bytes)


def application(arguments: dict[str, Any]) -> serve.Application:
    """`deployment` for a file of Ray Serve, whose `args` are its arguments; `server` is a table of `ServerOptions`.

    import_path: rlx.ray.serving:application
    args: {model: /models/model.gguf, num_cpus: 16, replicas: [1, 4]}
    """
    found = dict(arguments)
    if "server" in found:
        found["server"] = ServerOptions(**found["server"])
    return deployment(**found)


def run(app: serve.Application, host: str, port: int, drain: float, ready: Callable[[], object]) -> None:
    """Runs an application in the foreground, until SIGINT or SIGTERM; then it drains and is removed.

    The cluster is that of RAY_ADDRESS; without it that of this machine. If there is none, one is started here and ends
    with the application.

    Args:
        host, port: where Ray's proxies listen, unless Ray Serve runs on the cluster already.
        drain: seconds that running requests get in the end.
        ready: called when all replicas are there.
    """
    told = threading.Event()
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(app, name=APPLICATION, route_prefix="/")
        with _signals(told):
            ready()
            told.wait()
            ending = threading.Thread(target=serve.delete, args=(APPLICATION,), daemon=True)
            ending.start()
            ending.join(drain + REMOVAL_SECONDS)  # Ray waits for ever where its own processes got the signal, too
    finally:
        ray.shutdown()


@contextmanager
def _signals(told: threading.Event) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM set the event. A second one is an interrupt."""

    def handle(number: int, frame: Any) -> None:
        if told.is_set():
            raise KeyboardInterrupt
        told.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, each in zip(numbers, before, strict=True):
            signal.signal(number, each)


def _nodes() -> int:
    """How many nodes the cluster has; 1 if there is none yet."""
    return sum(node["Alive"] for node in ray.nodes()) if ray.is_initialized() else 1


def _scaling(replicas: int | tuple[int, int], slots: int) -> dict[str, Any]:
    """The options that say how many replicas there are."""
    least, most = range_of(replicas)
    if least == most:
        return {"num_replicas": least}
    scaling = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": slots}
    return {"autoscaling_config": scaling, "num_replicas": None}


class Ingress:
    """Takes HTTP requests and passes them on. Ray Serve makes one or more of them.

    Args:
        replicas: the deployment of the replicas.
        most: largest body of a request, in bytes.
    """

    def __init__(self, replicas: DeploymentHandle[Any], most: int) -> None:
        self._replicas, self._most = replicas.options(stream=True), most

    def __serve_build_asgi_app__(self) -> Relay:  # called by `serve.ingress`
        return Relay(self._ask, LOST, BackPressureError, self._most)

    async def _ask(self, scope: dict[str, Any], body: bytes, keys: list[int]) -> AsyncGenerator[Message, None]:
        answer = self._replicas.answer.remote(scope, body, keys=keys)
        complete = False
        try:
            async for message in answer:
                yield message
            complete = True
        finally:
            if not complete:
                answer.cancel()  # the client is gone: the replica frees the sequence
