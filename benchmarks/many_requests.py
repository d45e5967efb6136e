#!/usr/bin/env python3
"""Many requests at once: tokens a second in all, time to the first token, and gaps between tokens.

    python benchmarks/make_model.py --shape qwen3-0.6b --type Q4_K_M --out qwen3-0.6b-Q4_K_M.gguf
    python benchmarks/many_requests.py qwen3-0.6b-Q4_K_M.gguf
    python benchmarks/many_requests.py qwen3-0.6b-Q4_K_M.gguf --server ~/llama.cpp/build/bin/llama-server

Each request is a thread that waits for its time, gives a prompt of token ids, and takes the tokens as they come. With
--server the requests go to llama.cpp's server, which the script starts with 8 slots, and over HTTP; without, to
`runner.stream` of one runner. Scenarios (--only chooses):

    alone     one request of 300 + 100 tokens
    apart     8 such requests, one every half second, nothing in common
    common    the same, with the first 280 tokens of the prompts in common
    long      7 requests decode; a prompt of 2,000 tokens comes in. The gaps are those of the 7 from then until its
              first token
    short     8 prompts of 40 tokens at once, and the same number one after the other; one token each

Tokens a second count from the first arrival to the last token. A gap is the time between two tokens of one request.
Prompts are random ids, greedy, and every request runs to its last token. Each scenario has prompts of its own, so
nothing is in the prefix caches but what the scenario says.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

SLOTS = 8
CONTEXT = 2304  # positions of a request at most
IDS = 1000  # token ids of prompts are below this
Prompt = list[int]


@dataclass
class Request:
    """A request and what happened to it.

    Attributes:
        prompt: token ids.
        count: tokens of the answer.
        at: seconds after the start of the scenario at which it arrives.
        times: when its tokens came, in seconds after that start.
    """

    prompt: Prompt
    count: int
    at: float = 0.0
    times: list[float] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def first(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.times[0] - self.at

    def gaps(self, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        """Seconds between its tokens, of those gaps that touch the time from `begin` to `end`."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [later - earlier for earlier, later in pairs if later > begin and earlier < end]


class Side(Protocol):
    """What serves requests."""

    name: str

    def tokens(self, prompt: Prompt, count: int) -> Iterator[object]:
        """An item for each token of the answer, as soon as it is there."""

    def close(self) -> None: ...


class Runner:
    """One rlx runner in this process."""

    def __init__(self, model: str, threads: int | None, stall_ms: float, device: str = "cpu") -> None:
        import rlx

        self._runner = rlx.auto_runner(model, max_seq=4096, threads=threads, stall_ms=stall_ms, device=device)
        stats = self._runner.stats()
        self.name = f"rlx, {stats['target']}, {stats['threads']} threads"

    def tokens(self, prompt: Prompt, count: int) -> Iterator[object]:
        return iter(self._runner.stream(prompt, count, stop_at_eog=False))

    def close(self) -> None:
        self._runner.close()


class Server:
    """llama.cpp's server as a process of its own, with a slot for each request."""

    def __init__(self, program: str, model: str, threads: int | None) -> None:
        slots, port = ["--parallel", str(SLOTS), "--ctx-size", str(SLOTS * CONTEXT)], free_port()
        more = [] if threads is None else ["--threads", str(threads), "--threads-batch", str(threads)]
        command = [program, "--model", model, *slots, "--host", "127.0.0.1", "--port", str(port), *more]
        self.start(command, port, f"llama-server, {SLOTS} slots")

    def start(self, command: list[str], port: int, name: str) -> None:
        """Starts the process, and waits until it is ready."""
        self.port, self.name = port, name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def _wait_until_ready(self, seconds: float = 600) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._process.poll() is not None:
                self._log.seek(0)
                raise SystemExit(f"{self.name} ended:\n{self._log.read()[-2000:]}")
            try:
                with closing(self._connection()) as connection:
                    connection.request("GET", "/health")
                    if connection.getresponse().status == 200:
                        return
            except OSError:
                pass
            time.sleep(0.2)
        raise SystemExit(f"{self.name} was not ready within {seconds:.0f} seconds")

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)

    def tokens(self, prompt: Prompt, count: int) -> Iterator[object]:
        body = {
            "prompt": prompt, "n_predict": count, "stream": True, "ignore_eos": True, "temperature": 0.0,
            "cache_prompt": True, "return_tokens": True,
        }  # fmt: skip
        seen = 0
        for event in self._events("/completion", body):
            # Tokens whose text is no whole character are held back, and some come with the last event only.
            held = event["tokens_predicted"] - seen if event.get("stop") else 0
            found = [event] * held if event.get("stop") else event.get("tokens") or [event]
            seen += len(found)
            yield from found

    def _events(self, path: str, body: dict[str, object]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer.

        Raises:
            RuntimeError: the server refuses the request.
        """
        with closing(self._connection()) as connection:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"{self.name} answers {answer.status}: {answer.read()[:300]!r}")
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Clock:
    """Seconds since the start of a scenario."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def sleep_until(self, at: float) -> Self:
        time.sleep(max(0.0, at - self.now()))
        return self


def serve(side: Side, requests: Sequence[Request]) -> None:
    """Runs the requests, each in a thread of its own, until all are answered.

    Raises:
        RuntimeError: a request failed.
    """
    clock = Clock()

    def run(request: Request) -> None:
        clock.sleep_until(request.at)
        try:
            for _ in side.tokens(request.prompt, request.count):
                request.times.append(clock.now())
        except BaseException as error:
            request.error = error

    threads = [threading.Thread(target=run, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for request in requests:
        if request.error or len(request.times) != request.count:
            raise RuntimeError(f"a request got {len(request.times)} of {request.count} tokens") from request.error


# ------------------------------------------------------------------------------------------------------- scenarios


def rate(requests: Sequence[Request]) -> float:
    """Tokens a second in all."""
    return sum(r.count for r in requests) / (max(r.times[-1] for r in requests) - min(r.at for r in requests))


def report(name: str, requests: Sequence[Request], gaps: Sequence[float], stall: float) -> None:
    """Prints the row of a scenario; `stall` is the gap that is aimed at, in seconds."""
    first = statistics.median(r.first for r in requests)
    times = f"{statistics.median(gaps) * 1e3:9.0f} {max(gaps) * 1e3:8.0f} {max(gaps) / stall:9.1f}x" if gaps else ""
    print(f"{name:8} {rate(requests):9.1f} {first:12.2f} {times}", flush=True)


Draw = Callable[[int], Prompt]


def alone(side: Side, draw: Draw, stall: float) -> None:
    one = [Request(draw(300), 100)]
    serve(side, one)
    report("alone", one, one[0].gaps(), stall)


def apart(side: Side, draw: Draw, stall: float, common: int = 0) -> None:
    shared = draw(common)
    requests = [Request([*shared, *draw(300 - common)], 100, 0.5 * i) for i in range(SLOTS)]
    serve(side, requests)
    report("common" if common else "apart", requests, [gap for r in requests for gap in r.gaps()], stall)


def common(side: Side, draw: Draw, stall: float) -> None:
    apart(side, draw, stall, common=280)


def long(side: Side, draw: Draw, stall: float) -> None:
    others = [Request(draw(40), 200) for _ in range(SLOTS - 1)]
    late = Request(draw(2000), 8, at=4.0)
    serve(side, [*others, late])
    report("long", [late], [gap for r in others for gap in r.gaps(late.at, late.times[0])], stall)


def short(side: Side, draw: Draw, stall: float) -> None:
    together, single = ([Request(draw(40), 1) for _ in range(SLOTS)] for _ in range(2))
    serve(side, together)
    took = 0.0
    for request in single:
        serve(side, [request])
        took += request.times[0]
    last = max(r.times[0] for r in together)
    print(
        f"short    8 prompts of 40 tokens: {last:.2f} s at once, {took:.2f} s one after the other, {took / last:.2f}x"
    )


SCENARIOS: dict[str, Callable[[Side, Draw, float], None]] = {
    "alone": alone,
    "apart": apart,
    "common": common,
    "long": long,
    "short": short,
}


def main() -> None:
    args = arguments()
    if args.server:
        side: Side = Server(args.server, args.model, args.threads)
    else:
        side = Runner(args.model, args.threads, args.stall)
    rng = np.random.default_rng(args.seed)

    def draw(count: int) -> Prompt:
        return [int(token) for token in rng.integers(0, IDS, count)]

    try:
        for count in (8, 40, 300):  # programs are compiled, memory is touched
            serve(side, [Request(draw(count), 4) for _ in range(SLOTS)])
        print(f"{args.model}: {side.name}; stall target {args.stall} ms")
        print("         tokens/s  first token  gap: median      max  of target")
        print("                    median, s            ms       ms")
        for name in args.only:
            SCENARIOS[name](side, draw, args.stall / 1e3)
    finally:
        side.close()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--server", metavar="PATH", help="measure this llama-server in place of rlx")
    parser.add_argument("--threads", type=int, help="by default each side's own choice")
    parser.add_argument("--stall", type=float, default=200, help="gap in ms that rlx aims at while prompts come in")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=list(SCENARIOS), help=f"of {', '.join(SCENARIOS)}"
    )
    args = parser.parse_args()
    if unknown := set(args.only) - set(SCENARIOS):
        sys.exit(f"no scenario {', '.join(sorted(unknown))}: there are {', '.join(SCENARIOS)}")
    return args


if __name__ == "__main__":
    main()
