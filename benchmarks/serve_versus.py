#!/usr/bin/env python3
"""`rlx serve` beside llama.cpp's server: tokens a second, time to the first token, the longest gap between tokens.

    python benchmarks/make_model.py --shape qwen3-0.6b --type Q4_K_M --out qwen3-0.6b-Q4_K_M.gguf
    python benchmarks/serve_versus.py qwen3-0.6b-Q4_K_M.gguf --server ~/llama.cpp/build/bin/llama-server --threads 2
    python benchmarks/serve_versus.py qwen3-0.6b-Q4_K_M.gguf --only rlx --device cuda --clients 8,32 --tokens 300 100

The sides run one after the other, each as a process with the same file, threads, slots and context. They get the same
requests, over HTTP with a stream each. A number of clients send requests, each the next one when it has its answer.
Prompts are random token ids, 50 to 2,000 of them, and answers have 64 to 128 tokens, greedy, or as many as --tokens
says. With "common" a prompt begins with one of four system prompts of 400 tokens. The side "engine" is the engine
loop of rlx in this process, without HTTP: what HTTP costs is the difference.

Tokens a second are those of answers, from the first request to the last token. A gap is the time between two tokens of
one answer.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from many_requests import Clock, Prompt, Request, Runner, Server, Side, free_port

CLIENTS = (1, 4, 8, 16)
SHORTEST, LONGEST, SYSTEM = 50, 2000, 400
CONTEXT = LONGEST + 256
IDS = 1000
EACH = 4  # requests of each client


class RlxServer(Server):
    """`rlx serve` as a process of its own."""

    def __init__(self, model: str, threads: int | None, slots: int, stall_ms: float, device: str) -> None:
        port = free_port()
        program = shutil.which("rlx") or sys.exit("there is no command rlx: install it, or activate its environment")
        more = [] if threads is None else ["--threads", str(threads)]
        command = [program, "serve", model, "--port", str(port), "--slots", str(slots), "--log", "none"]
        command += ["--stall-ms", str(stall_ms), "--max-seq", str(CONTEXT), "--device", device, *more]
        self.start(command, port, "rlx serve")

    def tokens(self, prompt: Prompt, count: int) -> Iterator[object]:
        body = {
            "prompt": prompt, "max_tokens": count, "stream": True, "ignore_eos": True, "temperature": 0.0,
            "return_token_ids": True,
        }  # fmt: skip
        for event in self._events("/v1/completions", body):
            for choice in event["choices"]:
                yield from choice.get("token_ids") or ()


class LlamaServer(Server):
    """llama.cpp's server with as many slots as rlx has."""

    def __init__(self, program: str, model: str, threads: int | None, slots: int) -> None:
        port = free_port()
        more = [] if threads is None else ["--threads", str(threads), "--threads-batch", str(threads)]
        command = [program, "--model", model, "--parallel", str(slots), "--ctx-size", str(slots * CONTEXT)]
        self.start([*command, "--host", "127.0.0.1", "--port", str(port), *more], port, "llama-server")


def ask(side: Side, requests: Sequence[Request], clients: int) -> float:
    """Has so many clients send the requests, each the next one when it has an answer; the seconds until the last token.

    Raises:
        RuntimeError: a request failed.
    """
    clock, waiting, lock = Clock(), iter(requests), threading.Lock()

    def run() -> None:
        while True:
            with lock:
                request = next(waiting, None)
            if request is None:
                return
            request.at = clock.now()
            try:
                for _ in side.tokens(request.prompt, request.count):
                    request.times.append(clock.now())
            except BaseException as error:
                request.error = error

    threads = [threading.Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for request in requests:
        if request.error or len(request.times) != request.count:
            raise RuntimeError(f"a request got {len(request.times)} of {request.count} tokens") from request.error
    return clock.now()


def equal(rng: np.random.Generator, count: int, prompt: int, answer: int) -> list[Request]:
    """Requests of one length."""
    return [Request([int(token) for token in rng.integers(0, IDS, prompt)], answer) for _ in range(count)]


def drawn(rng: np.random.Generator, count: int, systems: Sequence[Prompt]) -> list[Request]:
    """Requests with prompts of mixed lengths, as many short ones as long ones on a scale of factors."""
    found = []
    for i in range(count):
        system = systems[i % len(systems)] if systems else []
        length = int(np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST))))
        own = rng.integers(0, IDS, max(SHORTEST, length - len(system)))
        found.append(Request([*system, *map(int, own)], int(rng.integers(64, 129))))
    return found


def measure(side: Side, args: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Prints a row for each number of clients; returns the tokens a second."""
    rng, rates = np.random.default_rng(args.seed), dict[str, dict[int, float]]()
    for length in (8, 60, 700):  # programs are compiled, memory is touched
        ask(side, [Request([int(t) for t in rng.integers(0, IDS, length)], 8) for _ in range(16)], 16)
    for kind in ("equal",) if args.tokens else ("mixed", "common"):
        systems = [[int(t) for t in rng.integers(0, IDS, SYSTEM)] for _ in range(4)] if kind == "common" else []
        for clients in args.clients:
            count = EACH * clients
            requests = equal(rng, count, *args.tokens) if args.tokens else drawn(rng, count, systems)
            seconds = ask(side, requests, clients)
            rate = sum(request.count for request in requests) / seconds
            rates.setdefault(kind, {})[clients] = rate
            gaps = [gap for request in requests for gap in request.gaps()]
            print(
                f"{side.name:14} {kind:7} {clients:7} {rate:9.1f} "
                f"{statistics.median(request.first for request in requests):12.2f} "
                f"{statistics.median(gaps) * 1e3:9.0f} {max(gaps) * 1e3:8.0f} {max(gaps) * 1e3 / args.stall:9.1f}x",
                flush=True,
            )
    return rates


def main() -> None:
    args = arguments()
    slots = max(args.clients)
    sides: dict[str, Callable[[], Side]] = {
        "rlx": lambda: RlxServer(args.model, args.threads, slots, args.stall, args.device),
        "engine": lambda: Runner(args.model, args.threads, args.stall, args.device),
    }
    if args.server:
        sides["llama"] = lambda: LlamaServer(args.server, args.model, args.threads, slots)
    print(f"{Path(args.model).name}, {args.threads or 'default'} threads, stall target {args.stall:g} ms")
    print("side           prompts clients  tokens/s  first token  gap: median      max  of target")
    print("                                          median, s            ms       ms")
    found = {}
    for name in args.only or sides:
        if name not in sides:
            sys.exit("the side llama needs --server PATH" if name == "llama" else f"there is no side {name}")
        side = sides[name]()
        side.name = {"engine": "engine alone"}.get(name, side.name)
        try:
            found[name] = measure(side, args)
        finally:
            side.close()
    for other, what in (("llama", "beside llama-server"), ("engine", "beside the engine alone")):
        for kind, rates in found.get("rlx", {}).items() if other in found else ():
            ratios = [f"{clients}: {rate / found[other][kind][clients]:.2f}x" for clients, rate in rates.items()]
            print(f"rlx serve {what}, {kind}, by clients: {', '.join(ratios)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--server", metavar="PATH", help="llama.cpp's llama-server")
    parser.add_argument("--threads", type=int, help="by default each side's own choice")
    parser.add_argument("--stall", type=float, default=200, help="gap in ms that rlx aims at while prompts come in")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=lambda text: [*map(int, text.split(","))], default=CLIENTS)
    parser.add_argument("--only", type=lambda text: text.split(","), help="of rlx, engine, llama")
    parser.add_argument("--device", default="cpu", help="of rlx: one of rlx.devices(); cpu by default")
    parser.add_argument("--tokens", type=int, nargs=2, metavar=("PROMPT", "ANSWER"), help="of every request, not mixed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
