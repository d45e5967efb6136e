"""Actors that answer the requests of `rlx batch --ray`: they are on the nodes of a cluster, each with the model.

Ray stage. The files stay with the command; it gives each request to the actor that has its prefix. How many processes
with a model there are, and what each of them gets, is also said here, for deployments and datasets, too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import rlx
from rlx.compiler.compile import worker_count
from rlx.engine.opening.options import RunnerOptions
from rlx.errors import ArgumentError, ResourceError
from rlx.serve.app import AHEAD, answering_with
from rlx.serve.batch.results import Answering
from rlx.serve.batch.source import BatchRequest
from rlx.serve.prefixes import PrefixTable, prefix_keys, prompt_text
from rlx.weights import open_weights


def at_least_one(name: str, value: Any) -> int:
    """`value`; `ArgumentError` unless it is a whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name} is {value!r}, expected a whole number of at least 1")
    return value


def range_of(replicas: int | tuple[int, int], least: int = 0) -> tuple[int, int]:
    """The least and the largest number of processes.

    Raises:
        ArgumentError: they are no whole numbers in this order.
    """
    if isinstance(replicas, int):
        return at_least_one("replicas", replicas), replicas
    with suppress(TypeError, ValueError):  # not two of them, or no numbers
        low, high = replicas
        if least <= low <= high and high >= 1:
            return int(low), int(high)
    hint = "give a number, or (least, most) such as (1, 4)"
    raise ArgumentError(f"replicas is {replicas!r}", hint=hint)


def cpus_of(num_cpus: int | None) -> int:
    """The cores of a process, which are its threads.

    Args:
        num_cpus: as the caller gave it; None takes the threads that a model has on this machine.

    Raises:
        ArgumentError: it is no whole number from 1 on.
    """
    return worker_count(None) if num_cpus is None else at_least_one("num_cpus", num_cpus)


def path_on_nodes(model: str | os.PathLike[str]) -> str:
    """The name of a model in another process: an absolute path, or the name of a downloaded or embedded model."""
    return os.path.abspath(model) if os.path.exists(model) else os.fspath(model)


START_SECONDS = 600  # for the first actor to open the model; a cluster that grows takes minutes


class Worker:
    """An actor: it opens the model, and answers requests as a server would."""

    def __init__(self, model: str, name: str, engine: dict[str, Any]) -> None:
        self._runner, self._name = rlx.auto_runner(model, **engine), name
        self._stack, self._opening = AsyncExitStack(), asyncio.Lock()
        self._answering: Answering | None = None

    async def answer(self, request: BatchRequest, request_id: str) -> tuple[int, Any]:
        """The status and the body of an answer."""
        async with self._opening:
            if self._answering is None:
                answering = answering_with(self._runner, self._name)
                self._answering = (await self._stack.enter_async_context(answering))[0]
        return await self._answering(request, request_id)

    async def is_open(self) -> None:
        """Whoever waits for it waits for the model."""


@asynccontextmanager
async def answering_on_ray(
    model: str, name: str, engine: dict[str, Any], replicas: int | None = None
) -> AsyncIterator[tuple[Answering, int]]:
    """A function that answers requests on a cluster, and how many it takes at a time.

    If an actor is killed, Ray starts another one, which answers what that one had.

    Args:
        name: of the model, in answers.
        engine: options of `rlx.auto_runner`; `threads` is the number of cores of an actor.
        replicas: number of actors; by default as many as the cores of the cluster are for.

    Raises:
        ModelFileError: the model's file cannot be opened here.
        ResourceError: no node has the cores for an actor, or none could open the model.
    """
    import ray

    with open_weights(model):  # a mistake in its name is told here, not by a process on another node
        pass
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="warning")
    cpus = cpus_of(engine.get("threads"))
    room = sum(int(node["Resources"].get("CPU", 0)) // cpus for node in ray.nodes() if node["Alive"])
    if not room:
        hint = "give fewer --threads, or start nodes"
        raise ResourceError(f"no node of the cluster has {cpus} cores", where="--ray", hint=hint)
    count = room if replicas is None else at_least_one("replicas", replicas)
    slots = RunnerOptions(**{"slots": 32, **engine}).slots
    make = ray.remote(Worker).options(
        num_cpus=cpus, max_restarts=-1, max_task_retries=-1, max_concurrency=2 * AHEAD * slots
    )
    actors = {i: make.remote(path_on_nodes(model), name, {**engine, "threads": cpus}) for i in range(count)}
    try:
        await _one_open(list(actors.values()))
        yield _on_actors(actors, slots), AHEAD * slots * count
    finally:
        for actor in actors.values():
            ray.kill(actor)


async def _one_open(actors: list[Any]) -> None:
    """Waits until one of the actors has opened the model."""
    from ray.exceptions import RayError

    async def opened(actor: Any) -> None:
        await actor.is_open.remote()

    tasks = [asyncio.create_task(opened(actor)) for actor in actors]
    try:
        done, _ = await asyncio.wait(tasks, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise ResourceError(f"no process with the model started in {START_SECONDS} s", where="--ray")
        await done.pop()
    except RayError as error:
        reason = str(error).strip().splitlines()[-1]
        hint = "the path of the model must be there on every node"
        raise ResourceError(f"no process could open the model: {reason}", where="--ray", hint=hint) from error
    finally:
        for task in tasks:
            task.cancel()


def _on_actors(actors: dict[int, Any], slots: int) -> Answering:
    """Gives each request to the actor that has its prefix, or to the one that has the fewest requests."""
    loads, table = dict.fromkeys(actors, 0), PrefixTable[int](max(2, slots // 2))

    async def answer(request: BatchRequest, request_id: str) -> tuple[int, Any]:
        keys = prefix_keys(prompt_text(request.body))
        name = table.ranked(keys, loads)[0]
        table.remember(keys, name)
        loads[name] += 1
        try:
            status, body = await actors[name].answer.remote(request, request_id)
        finally:
            loads[name] -= 1
        return status, body

    return answer
