"""Questions with several choices: which answer a model finds likeliest, as lm-evaluation-harness measures it.

Runners stage, over the public API of a runner; `rlx eval` prints what this computes. A choice is scored by the sum of
the log-probabilities of its tokens behind the query (the task type `multiple_choice` of
https://github.com/EleutherAI/lm-evaluation-harness):

- acc: the share of questions whose likeliest choice is the right one,
- acc_norm: the same with each sum divided by the number of characters of its choice, so that long ones lose nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import PromptError
from rlx.runners.model import Model

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Question:
    """A question with its choices.

    Attributes:
        query: the text before each choice.
        choices: at least two texts.
        gold: the number of the right one.
    """

    query: str
    choices: tuple[str, ...]
    gold: int

    @staticmethod
    def of(value: Any) -> Question:
        """The question that a JSON object {"query", "choices", "gold"} describes.

        Raises:
            PromptError: it describes none.
        """
        found: dict[str, Any] = value if isinstance(value, dict) else {}
        query, choices, gold = found.get("query"), found.get("choices"), found.get("gold")
        texts = choices if isinstance(choices, list) and all(isinstance(each, str) for each in choices) else []
        if not (isinstance(query, str) and query.strip() and all(texts) and len(texts) > 1):
            hint = 'a question is {"query": "The sky is", "choices": ["blue", "green"], "gold": 0}'
            raise PromptError("it is no question with a query and two choices or more", hint=hint)
        if type(gold) is not int or not 0 <= gold < len(texts):
            raise PromptError(f"gold is {gold!r}", hint=f"give the number of the right choice, 0 to {len(texts) - 1}")
        return Question(query, tuple(texts), gold)


def log_likelihoods(model: Model, question: Question, delimiter: str = " ") -> Floats:
    """The log-likelihood of each choice behind the query, in nats: float64 [choices].

    White space at the end of the query counts to the choice, because tokenizers join it with the word that follows.

    Args:
        delimiter: stands between the query and a choice.

    Raises:
        PromptError: a question is longer than the context, or a choice has no token of its own.
    """
    tokenizer, query = model.tokenizer, question.query.rstrip()
    between = question.query[len(query) :] + delimiter
    first = len(tokenizer.prefix) + len(tokenizer.encode(query, add_special_tokens=False, parse_special=True))
    found = []
    for number, choice in enumerate(question.choices):
        text = query + between + choice
        ids = [*tokenizer.prefix, *tokenizer.encode(text, add_special_tokens=False, parse_special=True)]
        if len(ids) <= first:
            raise PromptError(f"choice {number} joins the last token of the query", hint="put a space between them")
        found.append(float(model.score(ids)[first - 1 :].astype(np.float64).sum()))
    return np.array(found)


@dataclass(frozen=True)
class Answers:
    """What a model answers.

    Attributes:
        right, right_norm: for each question whether its likeliest choice is the right one, by `acc` and by `acc_norm`.
    """

    right: Sequence[bool]
    right_norm: Sequence[bool]

    def as_dict(self) -> dict[str, Any]:
        """`questions`, `acc` and `acc_norm`, each with its standard error."""
        found: dict[str, Any] = {"questions": len(self.right)}
        for name, values in (("acc", self.right), ("acc_norm", self.right_norm)):
            share = sum(values) / len(values)
            error = sqrt(share * (1 - share) / (len(values) - 1)) if len(values) > 1 else 0.0
            found |= {name: share, f"{name}_stderr": error}
        return found


def answers(
    model: Model, questions: Sequence[Question], delimiter: str = " ", done: Callable[[int], None] = lambda count: None
) -> Answers:
    """The answers to questions.

    Args:
        delimiter: as for `log_likelihoods`.
        done: called with the number of questions so far, after each.

    Raises:
        PromptError: a question cannot be asked; `where` is its number, from 1 on.
    """
    right, right_norm = list[bool](), list[bool]()
    for number, question in enumerate(questions, 1):
        try:
            values = log_likelihoods(model, question, delimiter)
        except PromptError as error:
            raise PromptError(error.what, where=f"question {number}", hint=error.hint) from error
        lengths = np.array([len(choice) for choice in question.choices])
        right.append(int(values.argmax()) == question.gold)
        right_norm.append(int((values / lengths).argmax()) == question.gold)
        done(number)
    return Answers(right, right_norm)
