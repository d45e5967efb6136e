#!/usr/bin/env python3
"""How much a small KV cache changes the logits: f16, bf16, q8_0, q4_0 against f32, everything else in exact precision.

    python benchmarks/kv_cache_error.py [MODEL ...]        (the embedded demo model by default)

Prints, for each model and type, the largest error of any logit as a share of the largest logit, the worst cosine over
positions, and how often the most likely token stays the same. The text is the model's own greedy continuation.
"""

from __future__ import annotations

import argparse

import numpy as np

import rlx
from rlx import demo
from rlx.errors import ArgumentError


def logits(path: str, ids: list[int], kv_dtype: str) -> np.ndarray:
    """float64 [len(ids), vocab] of a prefill of the first half and a decode of the rest, as in use."""
    with rlx.auto_runner(path, precision="exact", kv_dtype=kv_dtype, max_seq=len(ids)) as runner:
        half = len(ids) // 2
        rows = [runner.prefill_logits(ids[:half])] + [runner.decode_logits(token) for token in ids[half:]]
    return np.asarray(rows, np.float64)


def continuation(path: str, length: int) -> list[int]:
    with rlx.auto_runner(path, precision="exact", max_seq=length) as runner:
        prompt = runner.tokenizer.encode("Once upon a time there was")
        return prompt + list(runner.generate(prompt, length - len(prompt), stop_at_eog=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[str(demo.path())])
    parser.add_argument("--length", type=int, default=256, help="tokens of text")
    args = parser.parse_args()
    for path in args.models:
        ids = continuation(path, args.length)
        reference = logits(path, ids, "f32")
        for kind in ("f16", "bf16", "q8_0", "q4_0"):
            try:
                found = logits(path, ids, kind)
            except ArgumentError as refusal:  # heads of no whole blocks
                print(f"{path}: {kind:5} {refusal}")
                continue
            error = np.abs(found - reference).max() / np.abs(reference).max()
            norms = np.linalg.norm(found, axis=-1) * np.linalg.norm(reference, axis=-1)
            cosine = ((found * reference).sum(-1) / norms).min()
            same = (found.argmax(-1) == reference.argmax(-1)).mean()
            print(f"{path}: {kind:5} error {error:.1e}  cosine {cosine:.7f}  same token {same:.1%}")


if __name__ == "__main__":
    main()
