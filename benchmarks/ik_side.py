"""ik_llama.cpp as one side of `versus.py`: its `llama-bench`, which measures itself, with flash attention and weights
that are repacked at load.

The path of the program is in the environment variable IK_BENCH. Each measurement is a run of it: it loads the model,
runs the task once to warm up and then once more, which counts.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from sides import Missing, TimedCommands, main

_BEST = ("-fa", "1", "-rtr", "1", "-r", "1", "-o", "json")


class IkSide:
    """See `sides.TimedSide`."""

    def open(self, model: str, threads: int, context: int) -> dict[str, Any]:
        self.program, self.model, self.threads = os.environ["IK_BENCH"], model, threads
        self.settings: dict[str, Any] = {}
        found = self._run("-p", "8", "-n", "0")
        return {"version": f"build {found['build_commit']}", "settings": " ".join(_BEST[:4])}

    def variants(self, prompt: bool) -> list[dict[str, Any]]:
        """Repacked weights or not: not every type has a repacked form."""
        return [{"repack": 1}, {"repack": 0}]

    def use(self, **settings: Any) -> dict[str, Any]:
        self.settings = settings
        return {}

    def prefill(self, tokens: int) -> float:
        return tokens / float(self._run("-p", str(tokens), "-n", "0")["avg_ts"])

    def decode(self, tokens: int, depth: int) -> float:
        task = ("-p", "0", "-n", "0", "-gp", f"{depth},{tokens}") if depth else ("-p", "0", "-n", str(tokens))
        return 1 / float(self._run(*task)["avg_ts"])

    def _run(self, *task: str) -> dict[str, Any]:
        """The last row of what the program prints, a JSON list, for one task."""
        repack = str(self.settings.get("repack", 1))
        command = [
            self.program,
            "-m",
            self.model,
            "-t",
            str(self.threads),
            "-fa",
            "1",
            "-rtr",
            repack,
            *_BEST[4:],
            *task,
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise Missing(f"{self.program} cannot be run: {error}") from error
        start = done.stdout.find("[")
        if done.returncode or start < 0:
            raise Missing(f"{self.program} ends with {done.returncode}: {done.stderr.strip()[-500:]}")
        rows: list[dict[str, Any]] = json.loads(done.stdout[start:])
        return rows[-1]


if __name__ == "__main__":
    main(IkSide, TimedCommands)
