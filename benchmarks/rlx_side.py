"""rlx as one side of `versus.py`: the engine's steps, no sampling; and for the Python API a runner."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from sides import Ids, main

from rlx import SampleOpts, __version__, auto_runner
from rlx.engine.engine import Engine
from rlx.engine.programs import reporting

DEVICE = os.environ.get("VERSUS_DEVICE", "cpu")


class RlxSide:
    """See `sides.Side`."""

    engine: Engine

    def open(self, model: str, threads: int, context: int) -> dict[str, Any]:
        self.engine = Engine.open(model, threads=threads, max_seq=context, device=DEVICE)
        self.sequence = self.engine.open_sequence()
        stats, config = self.engine.stats(), self.engine.config
        facts = {key: stats[key] for key in ("kv_bytes", "weights_bytes", "target", "precision", "kv_dtype")}
        facts["target"] = os.environ.get("RLX_TARGET", facts["target"])  # avx512-vnni-bf16 runs as avx512
        return {"version": __version__, "vocab": config.vocab_size, "context": config.context, **facts}

    def clear(self) -> None:
        self.sequence.rewind(0)

    def feed(self, ids: Ids) -> None:
        self._logits = self.engine.append(self.sequence, ids)

    def keep(self) -> None:
        self._length = len(self.sequence)
        self.sequence.mark()

    def back(self) -> None:
        self.sequence.rewind(self._length)

    def logits(self) -> np.ndarray:
        return self._logits

    def open_api(self, model: str, threads: int, context: int) -> None:
        self.runner = auto_runner(model, threads=threads, max_seq=context, device=DEVICE)

    def generate(self, ids: Ids, tokens: int) -> list[int]:
        return self.runner.generate(ids, tokens, sample=SampleOpts.greedy(), stop_at_eog=False)

    # -- what only rlx is asked ---------------------------------------------------------------------------------------

    def work(self, prompts: list[int], depths: list[int], step: int) -> dict[str, Any]:
        """Operations of each prompt, run in chunks of at most `step`, and bytes of weights and cache that decoding a
        token at each depth reads: by these numbers all sides are measured.
        """
        flops = {
            str(p): sum(reporting.step_flops(self.engine, min(step, p - at), at) for at in range(0, p, step))
            for p in prompts
        }
        moved = {str(d): reporting.step_bytes(self.engine, d) for d in depths}
        return {"flops": flops, "bytes": moved}

    def encode(self, text: str) -> dict[str, Any]:
        """The ids of a text, by the model's own tokenizer."""
        return {"ids": self.engine.tokenizer.encode(text)}

    def profile(self, tokens: int) -> dict[str, Any]:
        """Where a step of so many tokens spends its time, as `rlx bench` has it: [label, ms, GB/s, GFLOP/s] a row."""
        found = reporting.profile_step(self.engine, [1] * tokens)
        rows = [(t.label, t.seconds * 1e3, t.bytes / t.seconds / 1e9, t.flops / t.seconds / 1e9) for t in found]
        return {"rows": rows}


if __name__ == "__main__":
    main(RlxSide)
