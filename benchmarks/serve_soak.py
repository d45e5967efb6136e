"""Mixed load on a server for some minutes: no request is lost, memory and descriptors do not grow.

    pip install locust
    rlx serve demo --kv-bytes 64MB --log none &
    locust -f benchmarks/serve_soak.py --headless --host http://127.0.0.1:8080 --users 8 --run-time 30m --only-summary

Users send chats, completions and embeddings of all lengths, streams and whole answers, several choices, malformed
requests, and requests whose client goes away. The exit code is 1 if a request got another status than it should, or
none; if a request is left in the server afterwards; or if memory or descriptors, which /metrics shows, are more than a
little higher in the second half of the run than in the first. A small --kv-bytes is full soon, and memory constant from
then on.
"""

from __future__ import annotations

import random
import re
from typing import Any
from urllib.request import urlopen

import gevent
from locust import HttpUser, between, events, task
from locust.env import Environment

WORDS = "the fox tells a story of seven boats and an old map while rain falls on every roof in the little town".split()
CHAT, TIMEOUT = "/v1/chat/completions", 300
EVERY = 10.0  # seconds between two looks at the server
GROWTH = {"process_resident_memory_bytes": 24 << 20, "process_open_fds": 8}  # the second half above the first
LEFT = ("rlx:num_requests_running", "rlx:num_requests_waiting", "rlx:num_requests_inside")  # 0 after the load


def text(most: int) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(1, most)))


def chat_body() -> dict[str, Any]:
    message = {"role": "user", "content": text(random.choice((5, 60, 300)))}
    return {"messages": [message], "max_tokens": random.randint(1, 120), "n": random.choice((1, 1, 1, 3))}


class Client(HttpUser):
    """Sends a request of a kind that is drawn, and the next one soon after its answer."""

    wait_time = between(0.0, 0.2)

    def _answer(self, name: str, path: str, body: dict[str, Any], status: int, items: str = "", count: int = 0) -> None:
        with self.client.post(path, json=body, name=name, timeout=TIMEOUT, catch_response=True) as found:
            if found.status_code != status:
                found.failure(f"status {found.status_code} instead of {status}: {found.text[:200]}")
            elif items and len(found.json()[items]) != count:
                found.failure(f"{len(found.json()[items])} {items} instead of {count}")
            else:
                found.success()

    @task(2)
    def chat(self) -> None:
        body = chat_body()
        self._answer("chat", CHAT, body, 200, "choices", body["n"])

    @task
    def completions(self) -> None:
        prompts = [text(40) for _ in range(random.randint(1, 4))]
        body = {"prompt": prompts, "max_tokens": 20, "logprobs": 2}
        self._answer("completions", "/v1/completions", body, 200, "choices", len(prompts))

    @task
    def embeddings(self) -> None:
        self._answer("embeddings", "/v1/embeddings", {"input": [text(80), text(8)]}, 200, "data", 2)

    @task
    def malformed(self) -> None:
        self._answer("malformed", CHAT, {"messages": [], "max_tokens": -1}, 400)

    @task
    def stream(self) -> None:
        body = {**chat_body(), "stream": True}
        with self.client.post(CHAT, json=body, name="stream", timeout=TIMEOUT, catch_response=True) as found:
            is_whole = found.status_code == 200 and found.text.endswith("data: [DONE]\n\n")
            found.success() if is_whole else found.failure(f"status {found.status_code}: ...{found.text[-200:]}")

    @task
    def gone(self) -> None:
        """Goes away in the middle of the prompt or of the answer."""
        body = {**chat_body(), "max_tokens": 500, "ignore_eos": True, "stream": True}
        with self.client.post(CHAT, json=body, name="gone", timeout=TIMEOUT, catch_response=True, stream=True) as found:
            for _, _ in zip(range(random.randint(0, 50)), found.iter_lines(), strict=False):
                pass
            found.success() if found.status_code == 200 else found.failure(f"status {found.status_code}")


def wait_until_ready(url: str) -> None:
    """The server may still be opening its model."""
    with gevent.Timeout(TIMEOUT):
        while True:
            try:
                urlopen(url, timeout=TIMEOUT).close()
                return
            except OSError:  # no connection yet, or 503
                gevent.sleep(0.2)


class Watch:
    """What /metrics shows during the load."""

    def __init__(self, environment: Environment) -> None:
        self._url, self._samples = f"{environment.host}/metrics", list[dict[str, float]]()
        self._greenlet = gevent.spawn(self._watch)

    def _look(self) -> dict[str, float]:
        with urlopen(self._url, timeout=TIMEOUT) as found:
            lines = found.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {re.sub(r"\{.*\}", "", name): float(value) for name, value in pairs}

    def _watch(self) -> None:
        while True:
            gevent.sleep(EVERY)
            self._samples.append(self._look())

    def wrong(self) -> list[str]:
        """What is wrong after the load."""
        self._greenlet.kill()
        gevent.sleep(2)  # requests whose clients went away end
        last = self._look()
        found = [f"after the load {name} is {last[name]:g}" for name in LEFT if last[name]]
        settled = self._samples[len(self._samples) // 5 :]  # the first ones warm up
        if len(settled) < 2:
            return [*found, f"the run is too short to see growth: it takes {EVERY * 4:g} seconds at least"]
        for name, most in GROWTH.items():
            if name in last:
                half = len(settled) // 2
                first, second = (max(each[name] for each in part) for part in (settled[:half], settled[half:]))
                print(f"{name}: at most {first:.0f} in the first half, {second:.0f} in the second")
                found += [f"{name} grew by {second - first:.0f}"] if second - first > most else []
        return found


@events.test_start.add_listener
def started(environment: Environment, **_: Any) -> None:
    wait_until_ready(f"{environment.host}/health")
    watch = Watch(environment)

    @events.quitting.add_listener
    def ended(environment: Environment, **_: Any) -> None:
        wrong = watch.wrong()
        print("\n".join(wrong) or "nothing grew, and no request is left")
        if wrong or environment.stats.total.num_failures:
            environment.process_exit_code = 1
