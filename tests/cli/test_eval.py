"""`rlx eval`: the numbers of lm-evaluation-harness from the logits of the demo model, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import rlx
from rlx.cli.main import cli

QUESTIONS: list[dict[str, Any]] = [
    {"query": "Once upon a time, there was a", "choices": ["fox who lived in a forest", "of", "the"], "gold": 0},
    {"query": "Hello! ", "choices": ["?!", "My name is", "colour 7"], "gold": 1},
    {"query": "The fox went to the", "choices": ["forest", "park", "naïve \u2028☃"], "gold": 1},
]


def evaluated(path: Path, *words: object) -> Result:
    return CliRunner().invoke(cli, ["eval", str(path), *map(str, words)])


def written(folder: Path, *lines: object) -> Path:
    path = folder / "questions.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def log_likelihood(runner: Any, query: str, choice: str) -> float:
    """By the definition, from the logits: the harness moves white space from the end of a query to the choice."""
    ids = runner.tokenizer.encode(f"{query} {choice}")
    logits = runner.predict_logits(ids, all_positions=True).astype(np.float64)
    first = len(runner.tokenizer.encode(query.rstrip()))
    scored = zip(logits[first - 1 : -1], ids[first:], strict=True)
    return sum(float(row[token] - np.log(np.exp(row).sum())) for row, token in scored)


def test_it_is_what_the_logits_say(tmp_path: Path) -> None:
    done = evaluated(written(tmp_path, *QUESTIONS), "demo", "--precision", "exact", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    right = np.zeros((2, len(QUESTIONS)), bool)
    with rlx.auto_runner(precision="exact") as runner:
        for i, question in enumerate(QUESTIONS):
            values = [log_likelihood(runner, question["query"], choice) for choice in question["choices"]]
            each = [value / len(choice) for value, choice in zip(values, question["choices"], strict=True)]
            right[:, i] = [int(np.argmax(scores)) == question["gold"] for scores in (values, each)]
    assert (found["acc"], found["acc_norm"]) == tuple(right.mean(1).tolist())
    errors = right.std(1, ddof=1) / np.sqrt(len(QUESTIONS))
    assert [found["acc_stderr"], found["acc_norm_stderr"]] == pytest.approx(errors.tolist())
    assert found["questions"] == len(QUESTIONS)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: it is no JSON"),
        ("5", "line 2: it is no question with a query and two choices or more"),
        ({**QUESTIONS[0], "choices": ["a"]}, "line 2: it is no question"),
        ({**QUESTIONS[0], "choices": ["a", ""]}, "line 2: it is no question"),
        ({**QUESTIONS[0], "query": " "}, "line 2: it is no question"),
        ({**QUESTIONS[0], "gold": 3}, "line 2: gold is 3. Give the number of the right choice, 0 to 2"),
        ({**QUESTIONS[0], "gold": True}, "gold is True"),
        ({**QUESTIONS[0], "query": "fox " * 5000}, "question 2: it has"),
    ],
)
def test_lines_that_are_no_questions(line: object, said: str, tmp_path: Path) -> None:
    done = evaluated(written(tmp_path, QUESTIONS[0], line), "demo")
    assert done.exit_code == 2 and said in " ".join(done.output.split()), done.output
