"""Every source that says which tokens end a generation, one at a time and together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vocabularies import CONTROL, NORMAL, USER, byte_level

from rlx.text import Tokenizer, load_tokenizer, tokenizer_from_gguf
from rlx.text.chat import turn_ends

# Names that no list knows.
TOKENS = ["<|first|>", "<|second|>", "<|third|>", "<|shown|>"]
TURNS = "{% for m in messages %}<|first|>{{ m.role }}\n{{ m.content }}BEHIND\n{% endfor %}"


def tokenizer(template: str | None = None, kind: int = CONTROL, **keys: Any) -> Tokenizer:
    tokens = [*byte_level()["tokenizer.ggml.tokens"][:256], *TOKENS]
    types = np.array([NORMAL] * 256 + [kind] * len(TOKENS), np.int32)
    metadata = byte_level(tokens=tokens, token_type=types, **({"eos_token_id": None} | keys))
    return tokenizer_from_gguf(metadata | ({} if template is None else {"tokenizer.chat_template": template}))


def ends(of: Tokenizer) -> set[str]:
    return {of.id_to_token(token) for token in of.eog_ids}


@pytest.mark.parametrize("key", ["eos_token_id", "eot_token_id", "eom_token_id"])
def test_each_key_of_a_gguf_file(key: str) -> None:
    assert ends(tokenizer()) == set()
    assert ends(tokenizer(**{key: 257})) == {"<|second|>"}


def test_all_sources_count_together() -> None:
    template = TURNS.replace("BEHIND", "<|shown|>")
    assert ends(tokenizer(template, eos_token_id=256, eot_token_id=257, eom_token_id=258)) == set(TOKENS)


# ---------------------------------------------------------------------------------------------------- the template


def test_the_template_shows_the_end_of_a_turn() -> None:
    found = tokenizer(TURNS.replace("BEHIND", "<|shown|>"))
    assert ends(found) == {"<|shown|>"}
    assert found.declared_ends == frozenset()
    assert ends(tokenizer(TURNS.replace("BEHIND", " \n<|shown|>"))) == {"<|shown|>"}, "spaces aside"


def test_an_answer_that_nothing_ends() -> None:
    assert ends(tokenizer(TURNS.replace("BEHIND", ""))) == set(), "the head of the next turn is not its end"
    assert ends(tokenizer(TURNS.replace("BEHIND", "") + "<|second|>assistant")) == set(), "nor is a head at the end"
    assert ends(tokenizer(TURNS.replace("BEHIND", " over <|shown|>"))) == set(), "a text comes first"


def test_only_a_control_token_ends_a_turn() -> None:
    assert ends(tokenizer(TURNS.replace("BEHIND", "<|shown|>"), kind=USER)) == set()
    assert ends(tokenizer(TURNS.replace("BEHIND", "<|nowhere|>"))) == set()


@pytest.mark.parametrize(
    ("family", "end"),
    [
        ("llama", "<|eot_id|>"),
        ("qwen3", "<|im_end|>"),
        ("qwen35", "<|im_end|>"),
        ("gemma3", "<end_of_turn>"),
        ("gemma4-e2b", "<turn|>"),
    ],
)
def test_templates_of_the_families(goldens: Path, family: str, end: str) -> None:
    found = load_tokenizer(goldens / family / "hf")
    assert turn_ends(found) == {found.token_to_id(end)}


# ---------------------------------------------------------------------------------------------------- config.json


@pytest.mark.parametrize(
    ("config", "end"), [({"eos_token_id": 65}, 65), ({"text_config": {"eos_token_id": [66]}}, 66), ({}, None)]
)
def test_the_end_in_the_config_of_a_model_with_parts(
    goldens: Path, tmp_path: Path, config: dict[str, Any], end: int | None
) -> None:
    (tmp_path / "tokenizer.json").symlink_to(goldens / "qwen2" / "hf" / "tokenizer.json")
    plain = load_tokenizer(tmp_path).eog_ids
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).eog_ids == plain | ({end} if end else set())
