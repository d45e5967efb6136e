"""All schemas with all prompts: does every answer parse, and does the schema hold?

python tests/grammar/many_schemas.py [MODEL ...] [--tokens 200] [--temperature 1.0]

An answer may be cut by the number of tokens; it must then be the beginning of JSON. Everything else is a failure, which
is printed. Judged by the package `jsonschema`, formats included.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from typing import Any

import jsonschema
from schemas import PROMPTS, SCHEMAS

import rlx


def fault(text: str, reason: str | None, schema: dict[str, Any]) -> str:
    """What is wrong with an answer; "" if nothing is, "cut" if it is not complete."""
    if reason not in ("grammar", "stop"):
        return "cut" if reason in ("length", "context") else f"ended with {reason}"
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    return "; ".join(error.message for error in checker.iter_errors(value))


def run(model: str, tokens: int, temperature: float) -> Counter[str]:
    """Prints a table of what ended how, and every failure; returns the counts."""
    counts: Counter[str] = Counter()
    start = time.perf_counter()
    with rlx.auto_runner(model) as runner:
        for name, schema in SCHEMAS.items():
            grammar, row = rlx.Grammar.json_schema(schema), Counter[str]()
            handles = []
            for i, prompt in enumerate(PROMPTS):
                ids = runner.chat_ids(prompt) if runner.tokenizer.chat_template else runner.tokenizer.encode(prompt)
                greedy = i % 5 == 0 or not temperature
                sample = rlx.SampleOpts.greedy() if greedy else rlx.SampleOpts(temperature=temperature, seed=i)
                handles.append(runner.submit(rlx.Request(ids, tokens, sample, grammar=grammar)))
            for prompt, handle in zip(PROMPTS, handles, strict=True):
                found = handle.result()
                wrong = fault(found.text, found.finish_reason, schema)
                row["cut" if wrong == "cut" else "failed" if wrong else "valid"] += 1
                if wrong not in ("", "cut"):
                    print(f"FAILED {name!r}, {prompt!r}: {wrong}: {found.text!r}")
            counts += row
            print(f"| {name} | {row['valid']} | {row['cut']} | {row['failed']} |", flush=True)
        steps = runner.stats()["requests"]
    print(f"{model}: {dict(counts)} in {time.perf_counter() - start:.0f} s;", end=" ")
    print(f"{steps['tokens']} tokens, {steps['steps']} steps of several requests")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["demo", "demo-vision"])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    failed = sum(run(model, options.tokens, options.temperature)["failed"] for model in options.models)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
