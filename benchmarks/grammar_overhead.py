#!/usr/bin/env python3
"""What structured output costs: a mask per token by the size of the vocabulary, and decoding beside decoding without.

    python benchmarks/grammar_overhead.py [MODEL] [--tokens 64] [--turns 15] [--answers 20]

The first table follows answers without a model, whose tokens are drawn from their masks. Its times are microseconds of
CPU time per sampled token: the mask (llguidance), its application to the logits, and going on with the token, forced
ones included. The second table takes turns between two sides that decode the same number of tokens one by one: without
a grammar, and with one that allows nearly everything. "added" is the difference of the medians. The last line is JSON
with its forced tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import rlx
from rlx import demo
from rlx.grammar import Grammar, GrammarCompiler
from rlx.sampling.choice import masked
from rlx.text import Tokenizer, load_tokenizer
from rlx.text.tokenizer import BYTE_ALPHABET, Spelling, TokenType, Vocabulary

TEXT = {"type": "string", "maxLength": 40}
SCHEMA = {
    "type": "object",
    "properties": {
        "title": TEXT,
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "kind": {"enum": ["film", "book", "song"]},
        "people": {
            "type": "array",
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {"name": TEXT, "role": TEXT, "born": {"type": "integer"}},
                "required": ["name", "role", "born"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["title", "year", "kind", "people"],
    "additionalProperties": False,
}
ANYTHING = Grammar.regex(r"(?s:.)+")
GRAMMARS = {"JSON schema": Grammar.json_schema(SCHEMA), "any JSON": Grammar.json_object(), "any text": ANYTHING}
SIZES = (4_096, 32_000, 152_000, 262_144)


def vocabulary(size: int) -> Tokenizer:
    """A byte-level vocabulary: all bytes, pieces of the demo model, and words joined of these."""
    random, known = np.random.default_rng(0), load_tokenizer(demo.path()).vocabulary
    words = dict.fromkeys(BYTE_ALPHABET)
    words |= dict.fromkeys(token for token, kind in zip(known.tokens, known.types, strict=True) if kind == 1)
    parts = [word for word in words if len(word) > 1]
    while len(words) < size - 1:
        words["".join(parts[i] for i in random.integers(0, len(parts), 2))] = None
    tokens = [*list(words)[: size - 1], "<|end|>"]
    ids = {token: i for i, token in enumerate(tokens)}

    def encode(text: str, parse_special: bool) -> list[int]:
        spelled, found = "".join(BYTE_ALPHABET[byte] for byte in text.encode()), []
        while spelled:
            length = next(n for n in range(min(16, len(spelled)), 0, -1) if spelled[:n] in ids)
            found.append(ids[spelled[:length]])
            spelled = spelled[length:]
        return found

    types = bytes([TokenType.NORMAL] * (size - 1) + [TokenType.CONTROL])
    pieces = Vocabulary(tokens, types, Spelling.BYTE_LEVEL)
    return Tokenizer(vocabulary=pieces, encode_parts=encode, bos_id=None, eos_id=size - 1)


def masks(size: int, answers: int) -> None:
    """Prints the rows of one vocabulary."""
    tokenizer = vocabulary(size)
    start = time.thread_time()
    compiler = GrammarCompiler(lambda: tokenizer, size)
    _ = compiler.vocabulary
    ready = time.thread_time() - start
    random = np.random.default_rng(1)
    logits = random.normal(size=size).astype(np.float32)
    for name, grammar in GRAMMARS.items():
        start = time.thread_time()
        compiled = compiler.compile(grammar)
        compiling, times = time.thread_time() - start, []
        for _ in range(answers):
            constraint = compiled.constraint({size - 1})
            for _ in range(60):
                if constraint.is_over:
                    break
                times.append(one(constraint, logits, random))
        table = 1e6 * np.array(times)
        whole = table.sum(axis=1)
        shown = [*table.mean(axis=0), whole.mean(), np.quantile(whole, 0.99), whole.max()]
        cells = " | ".join(f"{value:.0f}" for value in shown)
        print(f"| {size} | {name} | {1e3 * ready:.0f} | {1e3 * compiling:.1f} | {cells} |", flush=True)


def one(constraint: rlx.grammar.Constraint, logits: np.ndarray, random: np.random.Generator) -> list[float]:
    """Seconds of one token: its mask, the mask's application, and all that follows it."""
    times = [time.thread_time()]
    words = constraint.mask()
    times.append(time.thread_time())
    assert words is not None
    values = masked(logits, words)
    times.append(time.thread_time())
    token = int(random.choice(np.flatnonzero(values > -np.inf)))
    chosen = time.thread_time()
    constraint.accept(token)
    for forced in [] if constraint.is_over else constraint.forced():
        constraint.accept(forced)
    return [times[1] - times[0], times[2] - times[1], time.thread_time() - chosen]


def decoding(runner: rlx.LmRunner, tokens: int, turns: int) -> None:
    """Prints the times of a step, with and without a grammar, side by side."""
    ids = runner.tokenizer.encode("Once upon a time there was a fox.")
    step = rlx.SampleOpts(temperature=0.0, logit_bias={0: 0.0})  # greedy, but not natively: token by token
    drawn = rlx.SampleOpts(temperature=1.0, seed=1)
    for name, sample in (("greedy, step by step", step), ("drawn", drawn)):
        sides: dict[str, list[float]] = {"without": [], "with": []}
        for turn in range(turns + 1):
            for side, grammar in (("without", None), ("with", ANYTHING)):
                request = rlx.Request(ids, tokens, sample, stop_at_eog=False, grammar=grammar)
                start = time.perf_counter()
                count = len(runner.submit(request).result())
                if turn:  # the first turn loads programs
                    sides[side].append((time.perf_counter() - start) / count)
        bare, bound = (1e3 * statistics.median(sides[side]) for side in ("without", "with"))
        print(f"| {name} | {bare:.3f} | {bound:.3f} | {100 * (bound - bare) / bare:+.1f}% |", flush=True)


def json_speed(runner: rlx.LmRunner, turns: int) -> None:
    """Prints the tokens a second of an answer in JSON, and how many steps it took."""
    ids, grammar, rates = runner.tokenizer.encode("A film as JSON:"), Grammar.json_schema(SCHEMA), []
    for turn in range(turns + 1):
        before, start = runner.stats()["requests"]["steps"], time.perf_counter()
        sample = rlx.SampleOpts(temperature=1.0, seed=turn)
        found = runner.submit(rlx.Request(ids, 200, sample, grammar=grammar)).result()
        if turn:
            steps = runner.stats()["requests"]["steps"] - before
            rates.append((len(found) / (time.perf_counter() - start), len(found) / steps))
    speed, size = (statistics.median(each) for each in zip(*rates, strict=True))
    print(f"JSON by a schema: {speed:.1f} tokens/s, {size:.2f} tokens a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(demo.path()))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--answers", type=int, default=20)
    args = parser.parse_args()
    print("| vocabulary | grammar | load, ms | compile, ms | mask | apply | go on | mean | 99% | largest |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for size in SIZES:
        masks(size, args.answers)
    with rlx.auto_runner(args.model) as runner:
        print(f"\n{args.model}, {runner.vocab_size} tokens; milliseconds a token\n")
        print("| sampling | without | with a grammar | added |\n|---|---:|---:|---:|")
        decoding(runner, args.tokens, args.turns)
        print()
        json_speed(runner, args.turns)


if __name__ == "__main__":
    main()
