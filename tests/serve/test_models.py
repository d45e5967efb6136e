"""The model list, and the first words."""

from __future__ import annotations

from typing import Any


def test_the_model_is_listed(server: Any) -> None:
    (found,) = server.openai.models.list().data
    assert found.id == "demo"
    assert server.openai.models.retrieve("demo") == found


def test_it_answers(server: Any) -> None:
    for name in ("demo", "gpt-4o"):
        answer = server.openai.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "What is 27 + 45?"}], max_tokens=30
        )
        assert answer.choices[0].message.content and answer.model == "demo"
