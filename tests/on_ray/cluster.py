"""What `rlx.ray` does when replicas, nodes and actors die: `python tests/on_ray/cluster.py [SCENARIO ...]`.

Each scenario is a process of its own on a local Ray cluster with the demo model, and is killed with all that it started
when it takes too long. It prints what it saw. All of them take some minutes; `make test-ray` runs them.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

SECONDS = 240  # for one scenario
PORT = 8199
URL = f"http://127.0.0.1:{PORT}"
SYSTEMS = [f"You are helper number {i} of a large company. {'Be brief and friendly. ' * 20}" for i in range(4)]
SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


# ------------------------------------------------------------------------------------------------- cluster and requests


@contextmanager
def cluster(nodes: int = 2) -> Iterator[Any]:
    """A local cluster of nodes with one core each, and Ray Serve's HTTP proxy on the first one."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
    for _ in range(nodes - 1):
        found.add_node(num_cpus=1, object_store_memory=80 << 20)
    ray.init(address=found.address, log_to_driver=False, logging_level="warning")
    serve.start(http_options={"port": PORT, "location": "HeadOnly"})
    yield found
    serve.shutdown()
    ray.shutdown()
    found.shutdown()


def deploy(**options: Any) -> None:
    from ray import serve

    import rlx.ray

    app = rlx.ray.deployment("demo", **{"num_cpus": 1, "slots": 4, **options})
    serve.run(app, route_prefix="/")


def replica_processes() -> list[int]:
    return processes("ray::ServeReplica:default:Replica")


def processes(title: str) -> list[int]:
    """Of the processes that this scenario started, those with this text in their titles."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if title in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


def body(prompt: str, tokens: int = 40, system: str | None = None, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system else []
    return {
        "messages": [*messages, {"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, **more,
    }  # fmt: skip


class Load:
    """Threads that ask until they are told to stop. Half of them stream."""

    def __init__(self, threads: int = 6, tokens: int = 200) -> None:
        self.outcomes: Counter[str] = Counter()
        self.texts: dict[str, set[str]] = {}
        self.slowest = 0.0
        self._tokens, self._stop = tokens, threading.Event()
        self._pool = ThreadPoolExecutor(threads)
        self._runs = [self._pool.submit(self._ask, i) for i in range(threads)]

    def _ask(self, i: int) -> None:
        client = httpx.Client(base_url=URL, timeout=60)
        while not self._stop.is_set():
            start = time.monotonic()
            prompt = f"Tell me story number {i}."
            try:
                outcome, text = (streamed if i % 2 else whole)(client, body(prompt, self._tokens))
            except httpx.HTTPError as error:
                outcome, text = f"connection: {type(error).__name__}", ""
            self.outcomes[outcome] += 1
            if outcome.endswith("complete"):
                self.texts.setdefault(prompt, set()).add(text)
            self.slowest = max(self.slowest, time.monotonic() - start)

    def stop(self) -> Counter[str]:
        self._stop.set()
        for run in self._runs:
            run.result(timeout=120)
        print(f"    {sum(self.outcomes.values())} requests: {dict(self.outcomes)}; slowest {self.slowest:.1f} s")
        assert all(len(texts) == 1 for texts in self.texts.values()), "equal requests have equal answers"
        return self.outcomes


def whole(client: httpx.Client, request: dict[str, Any]) -> tuple[str, str]:
    found = client.post("/v1/chat/completions", json=request)
    if found.status_code != 200:
        return f"status {found.status_code}", found.text
    return "whole: complete", found.json()["choices"][0]["message"]["content"]


def streamed(client: httpx.Client, request: dict[str, Any]) -> tuple[str, str]:
    """How a stream ended, and its text."""
    text, end = [], "stream: cut without an error"
    with client.stream("POST", "/v1/chat/completions", json={**request, "stream": True}) as response:
        if response.status_code != 200:
            return f"status {response.status_code}", ""
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return end, "".join(text)
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                end = f"stream: ended with {event['error']['code']}"
            elif event["choices"]:
                text.append(event["choices"][0]["delta"].get("content") or "")
                if event["choices"][0].get("finish_reason"):
                    end = "stream: complete"
    return end, "".join(text)


def until(what: Callable[[], Any], seconds: float = 90) -> Any:
    limit = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.2)
    return found


def is_fine(outcomes: Counter[str]) -> bool:
    """Whether only streams that had begun were lost, and those with an error that says so."""
    return set(outcomes) <= {"whole: complete", "stream: complete", "stream: ended with replica_lost"}


# ------------------------------------------------------------------------------------------------------------ scenarios


@scenario
def a_replica_is_killed_under_load() -> None:
    with cluster():
        deploy(replicas=2)
        load = Load()
        time.sleep(8)
        for _ in range(2):
            pids = until(lambda: len(replica_processes()) == 2 and replica_processes())
            os.kill(pids[0], signal.SIGKILL)
            time.sleep(8)
        outcomes = load.stop()
        assert is_fine(outcomes), outcomes
        assert outcomes["stream: ended with replica_lost"] >= 1, "the replica was killed in the middle of its streams"


@scenario
def a_node_is_lost_under_load() -> None:
    with cluster() as nodes:
        deploy(replicas=2)
        load = Load()
        time.sleep(8)
        nodes.remove_node(nodes.list_all_nodes()[-1], allow_graceful=False)
        time.sleep(12)
        outcomes = load.stop()
        assert is_fine(outcomes), outcomes


@scenario
def two_replicas_share_the_load() -> None:
    with cluster():
        deploy(replicas=2, slots=1)
        client = httpx.Client(base_url=URL, timeout=60)
        for i in range(4):
            whole(client, body(f"Warm {i}", 5))
        with ThreadPoolExecutor(2) as pool:
            ask = lambda i: client.post("/v1/chat/completions", json=body(f"Story {i}", 400))  # noqa: E731
            rounds = [[found.headers["x-rlx-replica"] for found in pool.map(ask, range(2))] for _ in range(5)]
        print(f"    replicas of two requests at a time: {rounds}")
        assert all(len(set(names)) == 2 for names in rounds), "none waits behind the other"


@scenario
def requests_go_where_their_prefix_is() -> None:
    with cluster():
        deploy(replicas=2)
        client = httpx.Client(base_url=URL, timeout=60)
        places: dict[int, list[str]] = {}
        cached = prompt = 0
        for turn in range(6):
            for i, system in enumerate(SYSTEMS):
                found = client.post("/v1/chat/completions", json=body(f"Question {turn}?", 5, system))
                usage = found.json()["usage"]
                places.setdefault(i, []).append(found.headers["x-rlx-replica"])
                if turn:
                    cached += usage["prompt_tokens_details"]["cached_tokens"]
                    prompt += usage["prompt_tokens"]
        print(f"    {cached} of {prompt} tokens of later prompts came from the cache; places {places}")
        assert all(len(set(names)) == 1 for names in places.values())
        assert cached > prompt * 0.7


@scenario
def a_redeploy_loses_nothing() -> None:
    with cluster(3):
        deploy(replicas=2)
        before = set(replica_processes())
        load = Load()
        time.sleep(6)
        deploy(replicas=2, slots=2)
        until(lambda: not before & set(replica_processes()), 120)
        time.sleep(3)
        outcomes = load.stop()
        assert set(outcomes) <= {"whole: complete", "stream: complete"}, outcomes
        assert len(replica_processes()) == 2


@scenario
def a_client_that_goes_away_frees_its_place() -> None:
    with cluster(1):
        deploy(replicas=1, slots=1)
        client = httpx.Client(base_url=URL, timeout=60)
        whole(client, body("Warm", 5))
        start = time.monotonic()
        for i in range(20):
            with client.stream("POST", "/v1/chat/completions", json=body(f"Story {i}", 900, stream=True)) as response:
                next(response.iter_lines())
        outcome, _ = whole(client, body("Hi", 5))
        print(f"    20 streams were left, and an answer came after {time.monotonic() - start:.1f} s: {outcome}")
        assert outcome == "whole: complete"


@scenario
def a_full_queue_is_refused() -> None:
    from rlx.serve import ServerOptions

    with cluster(1):
        deploy(replicas=1, slots=1, server=ServerOptions(queue=1))
        with ThreadPoolExecutor(12) as pool, httpx.Client(base_url=URL, timeout=60) as client:
            ask = lambda i: client.post("/v1/chat/completions", json=body(f"Story {i}", 900))  # noqa: E731
            found = list(pool.map(ask, range(12)))
        statuses = Counter(each.status_code for each in found)
        print(f"    12 requests at once: {dict(statuses)}")
        assert set(statuses) == {200, 429}
        refused = next(each for each in found if each.status_code == 429)
        assert refused.headers["retry-after"] and refused.json()["error"]["code"] == "queue_full"


@scenario
def replicas_follow_the_load() -> None:
    with cluster():
        fast = {"upscale_delay_s": 1, "look_back_period_s": 2, "metrics_interval_s": 0.5, "downscale_delay_s": 2}
        scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, **fast}
        deploy(replicas=(1, 2), deployment_options={"autoscaling_config": scaling})
        assert len(replica_processes()) == 1
        load = Load(threads=8, tokens=800)
        until(lambda: len(replica_processes()) == 2)
        outcomes = load.stop()
        assert set(outcomes) <= {"whole: complete", "stream: complete"}, outcomes
        until(lambda: len(replica_processes()) == 1)


@scenario
def a_dataset_gets_the_answers_of_one_process() -> None:
    import ray

    import rlx
    import rlx.ray

    prompts = [f"Tell me about the number {i}." for i in range(400)]
    with rlx.auto_runner("demo", threads=1) as runner:
        expected = [runner.chat(prompt, 60).text for prompt in prompts]
    with cluster():
        rows = ray.data.from_items([{"id": i, "prompt": prompt} for i, prompt in enumerate(prompts)])
        options = {"max_tokens": 60, "replicas": 2, "num_cpus": 1, "batch_size": 20, "engine": {"slots": 4}}
        stop = threading.Event()
        killed: list[int] = []

        def killer() -> None:
            """Kills an actor of the pool as soon as it has worked for a second, and another one later."""
            while not stop.is_set() and len(killed) < 2:
                pids = [p for p in processes("ray::MapWorker") if p not in killed]
                if pids and not stop.wait(2.5):
                    os.kill(pids[0], signal.SIGKILL)
                    killed.append(pids[0])
                stop.wait(0.5)

        thread = threading.Thread(target=killer)
        thread.start()
        found = rlx.ray.generate(rows.repartition(20), "demo", **options).take_all()
        stop.set()
        thread.join()
    print(f"    {len(found)} rows; actors killed meanwhile: {len(killed)}")
    assert killed, "an actor was killed"
    assert sorted(row["id"] for row in found) == list(range(len(prompts)))
    assert {row["id"]: row["answer"] for row in found} == dict(enumerate(expected))


@scenario
def a_batch_on_a_cluster_loses_nothing() -> None:
    url = "/v1/chat/completions"
    requests = [
        {"custom_id": str(i), "method": "POST", "url": url, "body": body(f"Story {i}", 200, SYSTEMS[i % 4])}
        for i in range(300)
    ]
    with tempfile.TemporaryDirectory() as folder, cluster() as nodes:
        source, out, alone = (Path(folder) / name for name in ("in.jsonl", "out.jsonl", "alone.jsonl"))
        source.write_text("".join(f"{json.dumps(request)}\n" for request in requests))
        command = [sys.executable, "-m", "rlx", "batch", str(source), "OUT", "demo", "--threads", "1", "--slots", "4"]
        environment = {**os.environ, "RAY_ADDRESS": nodes.address}
        on_ray = [*command[:5], str(out), *command[6:], "--ray"]
        run = subprocess.Popen(on_ray, env=environment, stderr=subprocess.PIPE, text=True)
        until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 20)
        os.kill(processes("ray::Worker")[0], signal.SIGKILL)
        _, said = run.communicate(timeout=150)
        print(f"    {said.strip().splitlines()[-1]}")
        assert run.returncode == 0, said
        subprocess.run([*command[:5], str(alone), *command[6:]], check=True, timeout=150, capture_output=True)
        assert _answers(out) == _answers(alone) and len(_answers(out)) == 300


def _answers(path: Path) -> dict[str, str]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["custom_id"] for row in rows}) == len(rows), "nothing is done twice"
    return {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}


# ----------------------------------------------------------------------------------------------------------------- main


def main(names: list[str]) -> int:
    """Runs scenarios, each in a process group of its own; the number of those that failed."""
    failed = 0
    for name in names or list(SCENARIOS):
        print(name, flush=True)
        start = time.monotonic()
        process = subprocess.Popen([sys.executable, __file__, "--run", name], start_new_session=True)
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        failed += code != 0
        print(f"  {'ok' if code == 0 else 'FAILED'} after {time.monotonic() - start:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        faulthandler.dump_traceback_later(SECONDS - 10, exit=True)
        SCENARIOS[sys.argv[2]]()
    else:
        sys.exit(main(sys.argv[1:]))
