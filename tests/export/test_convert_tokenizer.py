"""Tokenizers on their way into GGUF: what is written cuts a text as the `tokenizers` package cuts it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from rlx.errors import TokenizerError
from rlx.export.hf_config import TextConfig
from rlx.export.hf_tokenizer import pre_tokenizer_name, tokenizer_metadata
from rlx.text.from_gguf import tokenizer_from_gguf
from rlx.text.tokenizer import TokenType

TEXTS = [
    "Hello world",
    "  two  spaces\n\nand\ttabs 1234567",
    "def f(x):\n    return x+1",
    "naïve café — über 日本語 🙂",
    "I'm, we'll, they'd",
    "x",
    "    ",
]
BOS, TEMPLATE = "tokenizer.ggml.bos_token_id", "tokenizer.chat_template"
SIZE = 512


@pytest.fixture
def folder(goldens: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a fixture's tokenizer and configuration."""

    def copy(family: str) -> Path:
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(goldens / family / "hf" / name, tmp_path / name)
        return tmp_path

    return copy


def entries(folder: Path, size: int = SIZE, **config: Any) -> dict[str, Any]:
    """The keys of the folder's tokenizer without their types."""
    read = {**json.loads((folder / "config.json").read_text()), "vocab_size": size, **config}
    found = tokenizer_metadata(folder, read, TextConfig(read, folder).arch, size)
    return {key: value for key, (value, _) in found.items()}


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gemma3"])
def test_texts_are_cut_as_before(folder: Callable[[str], Path], family: str) -> None:
    """Gemma's vocabulary is there as tokenizer.json only, so the scores come from the ranks of its merges."""
    path = folder(family)
    found = tokenizer_from_gguf(entries(path))
    expected = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text).ids, text


def test_gemma4_goes_by_merges(folder: Callable[[str], Path]) -> None:
    path = folder("gemma3")
    gemma4 = {
        "model_type": "gemma4_text", "global_head_dim": 32,
        "layer_types": ["sliding_attention"] * 6 + ["full_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25}},
    }  # fmt: skip
    keys = entries(path, **gemma4)
    assert (keys["tokenizer.ggml.model"], "tokenizer.ggml.pre" in keys) == ("gemma4", False)
    expected = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    found = tokenizer_from_gguf(keys)
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text).ids, text


def test_a_space_before_the_text_is_kept(folder: Callable[[str], Path]) -> None:
    """As in Llama 2: SentencePiece with a space put before a text, by the normalizer or by the pre-tokenizer."""
    path = folder("gemma3")
    llama = {"model_type": "llama", "rope_parameters": {"rope_theta": 1e4}, "hidden_act": "silu", "layer_types": None}
    prepend = {"type": "Prepend", "prepend": "▁"}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    both = {"type": "Sequence", "normalizers": [prepend, replace]}
    edit(path / "tokenizer.json", lambda c: c.update(normalizer=both))
    keys = entries(path, **llama)
    assert (keys["tokenizer.ggml.model"], "tokenizer.ggml.add_space_prefix" in keys) == ("llama", False)
    expected = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    assert tokenizer_from_gguf(keys).encode("the text") == expected.encode("the text").ids
    edit(path / "tokenizer.json", lambda c: c.update(normalizer=replace))
    assert entries(path, **llama)["tokenizer.ggml.add_space_prefix"] is False
    edit(path / "tokenizer_config.json", lambda c: c.update(add_prefix_space=True))
    assert entries(path, **llama)["tokenizer.ggml.add_space_prefix"] is True


def test_types_of_added_tokens(folder: Callable[[str], Path]) -> None:
    path = folder("qwen3")

    def add(content: dict[str, Any]) -> None:
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        texts = ["<think>", "<|looks_special|>", "a▁b"]
        content["added_tokens"] += [{"id": SIZE + i, "content": text, **plain} for i, text in enumerate(texts)]

    edit(path / "tokenizer.json", add)
    edit(path / "tokenizer_config.json", lambda content: content.pop("added_tokens_decoder"))
    keys = entries(path, SIZE + 3)
    assert keys["tokenizer.ggml.tokens"][SIZE:] == ["<think>", "<|looks_special|>", "a b"]
    expected = [TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.USER_DEFINED]
    assert keys["tokenizer.ggml.token_type"][SIZE:] == expected


@pytest.mark.parametrize(
    ("steps", "normalizer", "ignore_merges", "name"),
    [
        ([{"type": "ByteLevel", "add_prefix_space": False}], None, False, "gpt-2"),
        ([{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}], None, False, "starcoder"),
    ],
)
def test_names_of_pre_tokenizers(
    steps: list[dict[str, Any]], normalizer: dict[str, Any] | None, ignore_merges: bool, name: str
) -> None:
    spec = {"type": "Sequence", "pretokenizers": steps}
    fast = {"pre_tokenizer": spec, "normalizer": normalizer, "model": {"ignore_merges": ignore_merges}}
    assert pre_tokenizer_name(fast, Path("tokenizer.json")) == name


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="x+"), r"cuts by .*x\+"),
        (lambda c: c.update(pre_tokenizer={"type": "BertPreTokenizer"}), "BertPreTokenizer"),
        (lambda c: c.update(normalizer={"type": "Lowercase"}), "Lowercase"),
        (lambda c: c["model"].update(type="WordLevel"), "WordLevel"),
        (lambda c: c["model"].update(merges=[]), "no merges"),
        (lambda c: c["added_tokens"].append({"id": 600, "content": "<far>"}), "601 tokens"),
        (lambda c: c["added_tokens"].append({"content": "<nowhere>"}), "files are not what they should be"),
        (lambda c: c["model"].update(merges=[["a", "b"], 3]), "files are not what they should be"),
        (lambda c: c["model"].update(vocab={"a": "b"}), "files are not what they should be"),
    ],
)
def test_what_gguf_has_no_form_for_is_refused(
    folder: Callable[[str], Path], change: Callable[[dict[str, Any]], object], named: str
) -> None:
    path = folder("qwen3")
    edit(path / "tokenizer.json", change)
    with pytest.raises(TokenizerError, match=named):
        entries(path)
