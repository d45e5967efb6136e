"""Forced tool calls with schemas of many kinds: each must be whole, and valid by `jsonschema`.

    python tests/runners/forced_tool_calls.py --calls 200 demo demo-vision MODEL.gguf...

Greedy and sampled answers, with and without `parallel_tool_calls`, alternate. Prints a line a model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema

import rlx
from rlx.runners import TextRunner

sys.path.append(str(Path(__file__).parent.parent / "text"))
from tool_schemas import SCHEMAS

QUESTIONS = ("What is the weather in Paris?", "What is 27 + 45?", "Tell me a story about a brave fox.")


def wrong_calls(runner: TextRunner, calls: int, most: int) -> tuple[list[str], int]:
    """What was wrong, and how many answers were cut because they reached `most` tokens."""
    kinds, wrong, cut = list(SCHEMAS), [], 0
    for i in range(calls):
        kind, other = kinds[i % len(kinds)], kinds[(i * 7 + 3) % len(kinds)]
        schemas = {"first": SCHEMAS[kind], "second": SCHEMAS[other]}
        tools = [{"type": "function", "function": {"name": k, "parameters": v}} for k, v in schemas.items()]
        named: Any = {"type": "function", "function": {"name": "first"}}
        options: dict[str, Any] = {"temperature": 1.0, "seed": i} if i % 3 else {}
        answer = runner.chat(
            QUESTIONS[i % len(QUESTIONS)], most, tools=tools, tool_choice=named if i % 2 else "required",
            parallel_tool_calls=i % 4 == 0, **options,
        )  # fmt: skip
        whole = answer.tool_calls
        if answer.finish_reason in ("length", "context"):
            cut, whole = cut + 1, whole[:-1]
        elif answer.text or not whole:
            wrong.append(f"{i} {kind}: {answer.text!r}")
        for call in whole:
            try:
                jsonschema.validate(call.arguments, schemas[call.name])
            except (jsonschema.ValidationError, KeyError) as error:
                wrong.append(f"{i} {kind}: {json.dumps(call.arguments)}: {error}")
    return wrong, cut


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=400)
    options = parser.parse_args()
    failed = False
    for model in options.models:
        runner, begin = rlx.auto_runner(model), time.perf_counter()
        assert isinstance(runner, TextRunner)
        wrong, cut = wrong_calls(runner, options.calls, options.max_tokens)
        seconds = time.perf_counter() - begin
        print(f"{model}: {options.calls} forced calls, {len(wrong)} wrong, {cut} cut, {seconds:.1f} s", flush=True)
        print(*wrong, sep="\n", end="\n" if wrong else "")
        failed = failed or bool(wrong)
        runner.close()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
