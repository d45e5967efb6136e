#!/usr/bin/env python3
"""Mixed load on a server for some minutes: no request is lost, memory and descriptors do not grow.

    python tests/serve/soak.py --minutes 30 --clients 8

It starts `rlx serve` with the demo model (or the model that --model names) as a process of its own. Clients send chats,
completions and embeddings of all lengths, streams and whole answers, several choices, malformed requests, and requests
whose client goes away. Every half minute a line has the requests so far, and the memory and descriptors of the server.
The exit code is 1 if a request got another status than it should, if one was never answered, or if memory or
descriptors of the second half are more than a little above those of the first.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

WORDS = "the fox tells a story of seven boats and an old map while rain falls on every roof in the little town".split()
TIMEOUT = 300
MEMORY_MB, DESCRIPTORS = 24, 8  # what the second half may have above the first


class Load:
    """Requests of all kinds, and how they ended."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self._client, self._rng = client, random.Random(seed)
        self.ended: Counter[str] = Counter()
        self.wrong: list[str] = []

    def _text(self, most: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, most)))

    async def one(self) -> None:
        """Sends one request, of a kind that is drawn."""
        kind = self._rng.choice(
            [self.chat, self.chat, self.completion, self.stream, self.gone, self.embedding, self.bad]
        )
        try:
            await kind()
            self.ended[kind.__name__] += 1
        except Exception as error:
            self.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}"[:300])

    async def _post(self, path: str, expected: int, **body: Any) -> Any:
        response = await self._client.post(path, json=body)
        if response.status_code != expected:
            raise AssertionError(f"{path} got {response.status_code}: {response.text[:200]}")
        return response.json()

    def _chat(self) -> dict[str, Any]:
        message = {"role": "user", "content": self._text(self._rng.choice((5, 60, 300)))}
        return {"messages": [message], "max_tokens": self._rng.randint(1, 120), "n": self._rng.choice((1, 1, 1, 3))}

    async def chat(self) -> None:
        body = self._chat()
        found = await self._post("/v1/chat/completions", 200, **body)
        assert len(found["choices"]) == body["n"] and found["usage"]["completion_tokens"] > 0

    async def completion(self) -> None:
        prompts = [self._text(40) for _ in range(self._rng.randint(1, 4))]
        found = await self._post("/v1/completions", 200, prompt=prompts, max_tokens=20, logprobs=2)
        assert len(found["choices"]) == len(prompts)

    async def embedding(self) -> None:
        found = await self._post("/v1/embeddings", 200, input=[self._text(80), self._text(8)])
        assert len(found["data"]) == 2

    async def stream(self) -> None:
        async with self._client.stream("POST", "/v1/chat/completions", json={**self._chat(), "stream": True}) as found:
            assert found.status_code == 200
            lines = [line async for line in found.aiter_lines()]
        assert lines[-2:] == ["data: [DONE]", ""], lines[-2:]

    async def gone(self) -> None:
        body = {**self._chat(), "max_tokens": 500, "ignore_eos": True, "stream": self._rng.random() < 0.5}
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rng.uniform(0.001, 0.5)):
                await self._client.post("/v1/chat/completions", json=body)

    async def bad(self) -> None:
        await self._post("/v1/chat/completions", 400, messages=[], max_tokens=-1)


def usage(process: subprocess.Popen[bytes]) -> tuple[float, int]:
    """Memory of the server in megabytes, without pages of files, and its number of descriptors."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(anonymous.split()[1]) / 1024, len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


async def soak(args: argparse.Namespace, url: str, process: subprocess.Popen[bytes]) -> list[str]:
    """Loads the server; what was wrong."""
    limits, samples = (
        httpx.Limits(max_connections=None, max_keepalive_connections=args.clients),
        list[tuple[float, int]](),
    )
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits) as client:
        start = time.monotonic()
        while time.monotonic() < start + TIMEOUT:
            with suppress(httpx.HTTPError):
                if (await client.get("/health")).status_code == 200:
                    break
            await asyncio.sleep(0.2)
        load, end = Load(client, args.seed), time.monotonic() + 60 * args.minutes

        async def run() -> None:
            while time.monotonic() < end and process.poll() is None:
                await load.one()

        tasks = [asyncio.create_task(run()) for _ in range(args.clients)]
        while not all(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=args.every)
            if process.poll() is not None:
                return [f"the server ended with {process.returncode}"]
            samples.append(usage(process))
            memory, descriptors = samples[-1]
            print(
                f"{dict(load.ended)} wrong {len(load.wrong)} memory {memory:.0f} MB descriptors {descriptors}",
                flush=True,
            )
        await asyncio.sleep(2)
        text = (await client.get("/metrics")).text
        wrong = [*load.wrong]
        for name in ("num_requests_running", "num_requests_waiting", "num_requests_inside"):
            left = next(line for line in text.splitlines() if line.startswith(f"rlx:{name}{{"))
            wrong += [] if left.endswith(" 0.0") else [f"after the load: {left}"]
    return wrong + growth(samples)


def growth(samples: list[tuple[float, int]]) -> list[str]:
    """What the second half of the samples has above the first; the very first ones warm up."""
    settled = samples[len(samples) // 5 :]
    first, second = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    if not first:
        return []
    memory, descriptors = (max(s[i] for s in second) - max(s[i] for s in first) for i in (0, 1))
    found = [f"memory grew by {memory:.0f} MB"] if memory > MEMORY_MB else []
    return found + ([f"{descriptors} more descriptors"] if descriptors > DESCRIPTORS else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--every", type=float, default=30, help="seconds between two lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kv-bytes", default="64MB")
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    program = shutil.which("rlx") or sys.exit("there is no command rlx")
    options = ["--log", "none", "--kv-bytes", args.kv_bytes]  # a small cache is soon full, and memory then constant
    process = subprocess.Popen([program, "serve", args.model, "--port", str(port), *options])
    try:
        wrong = asyncio.run(soak(args, f"http://127.0.0.1:{port}", process))
    finally:
        process.terminate()
        code = process.wait(60)
    wrong += [f"the server ended with {code}"] if code else []
    print("\n".join([*dict.fromkeys(wrong)][:20]) or "nothing was lost, nothing grew")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
