"""The small files beside `tokenizer.json`, each in the spellings that published models have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from rlx.errors import TokenizerError
from rlx.text import load_tokenizer

WORDS = ["a", "b", "\u2581", "\u2581a"]


def folder(path: Path, backend: tokenizers.Tokenizer | None = None, **files: Any) -> Path:
    (backend or byte_level()).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        file, dot, kind = name.rpartition("_")
        text = content if isinstance(content, str) else json.dumps(content)
        (path / f"{file}.{kind}").write_text(text, encoding="utf-8")
        assert dot
    return path


def byte_level(specials: tuple[str, ...] = ("<s>", "</s>", "<|im_end|>"), normal: tuple[str, ...] = ()) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    backend.add_tokens(list(normal))
    return backend


def sentencepiece(strip: bool = True) -> Any:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("\u2581", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def framed(backend: Any, single: str, *names: str) -> Any:
    pairs = [(name, backend.token_to_id(name)) for name in names]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=pairs)
    return backend


def test_the_post_processor_says_what_frames_a_text(tmp_path: Path) -> None:
    backend = framed(byte_level(), "<s> $A </s>", "<s>", "</s>")
    tokenizer = load_tokenizer(folder(tmp_path, backend))
    assert tokenizer.encode("ab") == backend.encode("ab").ids
    assert (tokenizer.add_bos, tokenizer.add_eos, tokenizer.bos_id) == (True, True, 256)


def test_the_configuration_overrules_the_post_processor(tmp_path: Path) -> None:
    backend = framed(byte_level(), "<s> $A", "<s>")
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True}
    tokenizer = load_tokenizer(folder(tmp_path, backend, tokenizer_config_json=config))
    assert (tokenizer.prefix, tokenizer.suffix) == ((), (257,))
    config = {"bos_token": "<s>", "add_bos_token": True}
    assert load_tokenizer(folder(tmp_path, byte_level(), tokenizer_config_json=config)).prefix == (256,)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, {"</s>", "<|im_end|>"}),
        ({"generation_config_json": {"eos_token_id": [256, 65]}}, {"</s>", "<|im_end|>", "<s>", 65}),
        ({"generation_config_json": {"eos_token_id": 256}}, {"</s>", "<|im_end|>", "<s>"}),
        ({"generation_config_json": {}, "config_json": {"eos_token_id": 256}}, {"</s>", "<|im_end|>", "<s>"}),
        (
            {"generation_config_json": {"eos_token_id": 257}, "config_json": {"eos_token_id": 256}},
            {"</s>", "<|im_end|>"},
        ),
    ],
)
def test_ends_of_generation(tmp_path: Path, files: dict[str, Any], ends: set[str | int]) -> None:
    tokenizer = load_tokenizer(folder(tmp_path, **files))
    assert tokenizer.eog_ids == {end if isinstance(end, int) else tokenizer.token_to_id(end) for end in ends}


@pytest.mark.parametrize("given", [151_645, [259, 256], -1])
def test_an_end_that_no_token_has_is_left_out_with_a_warning(tmp_path: Path, given: int | list[int]) -> None:
    """Small checkpoints often state the default of a larger model's configuration."""
    files = folder(tmp_path, config_json={"eos_token_id": given})
    outside = given[0] if isinstance(given, list) else given
    with pytest.warns(UserWarning, match=rf"config\.json: eos_token_id {outside} is no id of a vocab") as seen:
        tokenizer = load_tokenizer(files)
    assert len(seen) == 1
    ends = {"</s>", "<|im_end|>"} | ({"<s>"} if isinstance(given, list) else set())
    assert tokenizer.eog_ids == {tokenizer.token_to_id(end) for end in ends}


def test_where_the_chat_template_may_be(tmp_path: Path) -> None:
    def template(**files: Any) -> str | None:
        return load_tokenizer(folder(tmp_path, **files)).chat_template

    assert template() is None
    assert template(tokenizer_config_json={"chat_template": "config"}) == "config"
    named = [{"name": "default", "template": "first"}, {"name": "tool_use", "template": "second"}]
    assert template(tokenizer_config_json={"chat_template": named}) == "first"
    assert load_tokenizer(tmp_path).chat_templates["tool_use"] == "second"
    assert template(chat_template_json={"chat_template": "json"}) == "json"
    assert template(chat_template_jinja="jinja") == "jinja"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("more")
    assert load_tokenizer(tmp_path).chat_templates["rag"] == "more"


@pytest.mark.parametrize("strip", [False, True])
def test_sentencepiece_spaces_and_bytes(tmp_path: Path, strip: bool) -> None:
    backend = sentencepiece(strip)
    tokenizer = load_tokenizer(folder(tmp_path, backend))
    ids = tokenizer.encode("a b\u00e9", add_special_tokens=False)
    assert ids == backend.encode("a b\u00e9", add_special_tokens=False).ids
    assert tokenizer.decode(ids) == backend.decode(ids) == ("a b\u00e9" if strip else " a b\u00e9")
    assert tokenizer.special_ids == {0, 1, 2}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer_config_json": {"eos_token": "<nope>"}}, "eos_token '<nope>' is not in the vocabulary"),
    ({"tokenizer_config_json": {"eos_token": ["<eos>"]}}, r"eos_token \['<eos>'\] is not in the vocabulary"),
    ({"tokenizer_config_json": "{"}, r"tokenizer_config\.json: the JSON does not parse"),
    ({"tokenizer_config_json": "[]"}, "expected an object"),
    ({"tokenizer_config_json": {"chat_template": 7}}, "chat_template is neither"),
    ({"tokenizer_config_json": {"chat_template": [{"name": "x"}]}}, "chat_template is neither"),
    ({"generation_config_json": {"eos_token_id": "257"}}, "eos_token_id '257' is neither an id nor a list of ids"),
    ({"generation_config_json": {"eos_token_id": ["x"]}}, "is neither an id"),
    ({"config_json": {"eos_token_id": [257, True]}}, r"config\.json: .* is neither an id"),
    ({"tokenizer_json": "{}"}, "cannot be read"),
]


@pytest.mark.parametrize(("files", "what"), WRONG)
def test_errors(tmp_path: Path, files: dict[str, Any], what: str) -> None:
    with pytest.raises(TokenizerError, match=what):
        load_tokenizer(folder(tmp_path, **files))


def test_tokenizers_of_other_models_are_refused(tmp_path: Path) -> None:
    backend = byte_level()
    backend.decoder = decoders.CTC()
    with pytest.raises(TokenizerError, match=r"decoder \['CTC'\] is neither"):
        load_tokenizer(folder(tmp_path, backend))
