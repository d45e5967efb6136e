"""What HTTP costs: tokens a second of streamed chats beside those of the engine loop alone, and CPU time a token.

    python benchmarks/http_overhead.py qwen3-0.6b-Q4_K_M.gguf --clients 1,8

The loop alone is read by asyncio tasks of this process. Over HTTP the clients are in another process, which does
nothing but read. Both take turns, and the best of the rounds counts: what disturbs a machine makes it slower. The demo
model (`demo`) shows the overhead best, because its own steps take half a millisecond.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

import rlx
from rlx.serve import ServedModel, ServerOptions, create_app

MESSAGES = [{"role": "user", "content": "Tell me a long story about a brave fox and a wise owl."}]
READERS = """
import asyncio, json, sys, time
port, clients, tokens = map(int, sys.argv[1:4])
messages = json.loads(sys.argv[4])

async def read(i):
    body = {"messages": messages, "max_tokens": tokens, "seed": i, "temperature": 0.8}
    body |= {"ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\n"
    head += f"Content-Length: {len(data)}\\r\\nConnection: close\\r\\n\\r\\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + data)
    found = await reader.read(-1)
    writer.close()
    assert b"[DONE]" in found and b'"error"' not in found, found[:500]

async def main():
    start = time.perf_counter()
    await asyncio.gather(*(read(i) for i in range(clients)))
    return time.perf_counter() - start

print(asyncio.run(main()))
"""


def alone(runner: Any, clients: int, tokens: int) -> float:
    """Seconds of the engine loop without a server."""
    ids = runner.chat_ids(MESSAGES)

    async def read(i: int) -> None:
        sample = rlx.SampleOpts(temperature=0.8, seed=i)
        async for _ in runner.submit(rlx.Request(ids, tokens, sample, stop_at_eog=False)):
            pass

    async def main() -> None:
        await asyncio.gather(*(read(i) for i in range(clients)))

    start = time.perf_counter()
    asyncio.run(main())
    return time.perf_counter() - start


def over_http(port: int, clients: int, tokens: int) -> float:
    """Seconds of the same requests over HTTP, from the first to the last byte."""
    arguments = [str(port), str(clients), str(tokens), json.dumps(MESSAGES)]
    return float(subprocess.check_output([sys.executable, "-c", READERS, *arguments]))


@contextmanager
def served(runner: Any) -> Iterator[int]:
    """A server for the runner in a thread of this process; its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(ServedModel(runner, "model"), ServerOptions(log="none"))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--clients", default="1,8", help="numbers of clients")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    with rlx.auto_runner(args.model, threads=args.threads) as runner, served(runner) as port:
        print(
            f"{'clients':>8} {'loop tok/s':>12} {'HTTP tok/s':>12} {'ratio':>8} {'CPU us/token: loop':>20} {'HTTP':>8}"
        )
        for clients in map(int, args.clients.split(",")):
            ways = (lambda n=clients: alone(runner, n, args.tokens), lambda n=clients: over_http(port, n, args.tokens))
            best = [[float("inf")] * 2 for _ in ways]
            for i in range(args.rounds + 1):
                for found, way in zip(best, ways, strict=True):
                    cpu, wall = time.process_time(), way()
                    if i:  # the first round compiles and fills caches
                        found[:] = min(found[0], wall), min(found[1], time.process_time() - cpu)
            count = clients * args.tokens
            (loop, http), (loop_us, http_us) = zip(
                *((count / wall, 1e6 * cpu / count) for wall, cpu in best), strict=True
            )
            print(f"{clients:>8} {loop:>12.1f} {http:>12.1f} {http / loop:>8.3f} {loop_us:>20.0f} {http_us:>8.0f}")


if __name__ == "__main__":
    main()
