#!/usr/bin/env python3
"""Time from interpreter start to the first token of a 32-token prompt, in fresh processes: compile cache cold and warm.

    python benchmarks/first_token.py [MODEL] [--runs 5]

A warm process must compile nothing and import no Numba; this prints what each process counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

CHILD = """
import json, sys, time
import rlx
from rlx import demo
start = time.perf_counter()
runner = rlx.auto_runner(sys.argv[1] or demo.path())
runner.generate(list(range(1, 33)), 1)
stats = runner.stats()["cache"]
print(json.dumps({"end": time.time(), "open_to_token": time.perf_counter() - start, "compiles": stats.compiles,
                  "numba": "numba" in sys.modules, "modules": len(sys.modules)}))
"""


def run(model: str, cache: str) -> dict[str, float]:
    """One fresh process; seconds from its start to its first token."""
    start = time.time()
    environment = {**os.environ, "RLX_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, model], env=environment, capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout)
    return {"seconds": result.pop("end") - start, **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cold = run(args.model, folder)
        warm = [run(args.model, folder) for _ in range(args.runs)]
    print(f"cold: {cold['seconds']:.2f} s, {cold['compiles']} compiles")
    seconds = [w["seconds"] for w in warm]
    print(f"warm: median {statistics.median(seconds):.2f} s of {len(warm)} ({min(seconds):.2f}-{max(seconds):.2f}), "
          f"{max(w['compiles'] for w in warm)} compiles, numba imported: {any(w['numba'] for w in warm)}")  # fmt: skip


if __name__ == "__main__":
    main()
