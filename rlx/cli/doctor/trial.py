"""`rlx doctor`: compiles and runs a small graph, and measures the machine, in a process of its own.

A process of its own because native code that does not fit the CPU ends the process that runs it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import rlx
from rlx import SEQ, env, ops
from rlx.backends.host import HOST
from rlx.cli.doctor.examination import REINSTALL, Facts, Findings
from rlx.compiler.compile import Compiler
from rlx.compiler.limits import worker_count
from rlx.engine.kv.pool_size import available_memory
from rlx.errors import RlxError

_SECONDS = 180  # after which a trial counts as hanging
_CEILING = 1e-4  # of the result's largest value: f32 arithmetic in another order
_HINT = "RLX_TARGET=generic rlx doctor shows whether it is the instructions; please report it"
_MEASURED_BYTES = 512 << 20  # several times the last-level cache


def trial(measure: bool) -> Callable[[Findings], Facts]:
    """The section about a trial; `measure` adds the read bandwidth and the arithmetic peaks."""

    def run(findings: Findings) -> Facts:
        command = [sys.executable, "-m", "rlx.cli.doctor.trial", *(["--measure"] if measure else [])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            what = f"a small program did not end within {_SECONDS} s"
            findings.problem(what, "RLX_THREADS=1 rlx doctor shows whether it is the threads", prevents=True)
            return {"error": what}
        try:
            facts: Facts = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            facts = {"error": _ended(done.returncode, done.stderr)}
        if "error" in facts:
            what = f"a small program does not run: {facts['error']}"
            known = any(problem.what == facts["error"] for problem in findings.problems)
            findings.problem(facts["error"] if known else what, facts.pop("hint", _HINT), prevents=True)
        return facts

    return run


def _ended(code: int, stderr: str) -> str:
    """How a process ended that said nothing."""
    lines = stderr.strip().splitlines()
    if code >= 0:
        return lines[-1] if lines else f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"its process ended with signal {name}"


def main() -> None:
    """Prints the facts as one line of JSON."""
    try:
        facts = _run()
        if "--measure" in sys.argv[1:] and env.jit():
            facts |= _measured()
    except RlxError as error:
        facts = {"error": str(error), "hint": None}  # the message says the way out
    except ImportError as error:
        facts = {"error": f"{type(error).__name__}: {error}", "hint": REINSTALL}
    except Exception as error:
        facts = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(facts))


def _run() -> Facts:
    """Compiles a gated linear layer and compares its result with NumPy's."""
    import numpy as np

    graph = rlx.Graph("doctor")
    x = graph.input("x", [SEQ, 64])
    gate, up = (ops.linear(x, graph.weight(name, [96, 64])) for name in ("gate", "up"))
    graph.output("y", ops.silu(gate) * up)
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((96, 64)).astype(np.float32) for name in ("gate", "up")}
    rows = rng.standard_normal((8, 64)).astype(np.float32)
    start = time.perf_counter()
    with rlx.compile(graph, bind=weights) as layer:
        seconds = time.perf_counter() - start
        found, cached = layer(x=rows)["y"], bool(layer.stats["cached"])
    wide = rows.astype(np.float64)
    gated = wide @ weights["gate"].T
    expected = gated / (1 + np.exp(-gated)) * (wide @ weights["up"].T)
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not error < _CEILING:
        raise ArithmeticError(f"its result is wrong: relative error {error:.1e}")
    return {"error_of_result": error, "seconds": seconds, "cached": cached}


def _measured() -> Facts:
    """The read bandwidth and the arithmetic peaks of all workers."""
    compiler = Compiler()
    workers = compiler.workers(worker_count())
    try:
        nbytes = min(_MEASURED_BYTES, available_memory(HOST) // 4)
        bandwidth = compiler.backend.bandwidth(workers, nbytes)
        peaks = compiler.backend.peaks(workers, compiler)
    finally:
        workers.close()
    return {"threads": workers.n, "read_gb_per_s": bandwidth, "read_bytes": nbytes, "peak_gop_per_s": peaks}


if __name__ == "__main__":
    main()
