#!/usr/bin/env python3
"""The host drives: prefill, then one token at a time, with a sampler of our own.

python examples/logits.py [MODEL]
"""

from __future__ import annotations

import sys

import numpy as np

import rlx
from rlx import demo


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else demo.path()
    with rlx.auto_runner(path) as runner:
        prompt = runner.tokenizer.encode("Once upon a time")
        logits = runner.prefill_logits(prompt)
        for _ in range(12):
            top = np.argsort(-logits)[:3]
            weights = np.exp(logits[top] - logits[top[0]])
            words = [runner.tokenizer.decode([int(token)]) for token in top]
            shares = [f"{word!r} {w / weights.sum():.0%}" for word, w in zip(words, weights, strict=True)]
            print(f"position {runner.past_seq:3d}: {', '.join(shares)}")
            logits = runner.decode_logits(int(top[0]))


if __name__ == "__main__":
    main()
