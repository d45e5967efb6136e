"""Reading `tokenizer.*` keys: defaults, every error by its key, special and user-defined tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from vocabularies import BYTE, CONTROL, NORMAL, USER, byte_level, named, sentencepiece

from rlx.errors import TokenizerError
from rlx.text import Tokenizer, tokenizer_from_gguf
from rlx.text.pretokenizers import KNOWN_EXPRESSIONS, LINEAR, PRE_TOKENIZERS


def pieces(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False, **options)
    return [tokenizer.id_to_token(token) for token in ids]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    (byte_level(model=None), "tokenizer.ggml.model", "missing"),
    (byte_level(model=7), "tokenizer.ggml.model", "expected a string, found 7"),
    (byte_level(model="rwkv"), "tokenizer.ggml.model", "unknown tokenizer model 'rwkv'"),
    (byte_level(pre="nonsense"), "tokenizer.ggml.pre", "unknown pre-tokenizer 'nonsense'"),
    (byte_level(tokens=None), "tokenizer.ggml.tokens", "missing"),
    (byte_level(tokens=[]), "tokenizer.ggml.tokens", "empty"),
    (byte_level(tokens=[1, 2]), "tokenizer.ggml.tokens", "array of strings"),
    (byte_level(tokens="ab"), "tokenizer.ggml.tokens", "array of strings"),
    (byte_level(tokens=["a", "b", "a"], token_type=None), "tokenizer.ggml.tokens", "ids 0 and 2 have the same text"),
    (byte_level(token_type=np.ones(3, np.int32)), "tokenizer.ggml.token_type", "expected 258 numbers"),
    (byte_level(merges=None), "tokenizer.ggml.merges", "missing"),
    (byte_level(merges=["ab"]), "tokenizer.ggml.merges", "'ab' is not two pieces"),
    (byte_level(merges=[" a"]), "tokenizer.ggml.merges", "' a' is not two pieces"),
    (byte_level(merges=["a b"]), "tokenizer.ggml.merges", "do not fit the tokens"),
    (byte_level(merges=[1]), "tokenizer.ggml.merges", "array of strings"),
    (byte_level(eos_token_id=258), "tokenizer.ggml.eos_token_id", "258 is no id of a vocabulary of 258"),
    (byte_level(eot_token_id=-1), "tokenizer.ggml.eot_token_id", "-1 is no id"),
    (byte_level(bos_token_id=True), "tokenizer.ggml.bos_token_id", "True is no id"),
    (byte_level(add_bos_token=True), "tokenizer.ggml.bos_token_id", "add_bos_token is on"),
    (byte_level(add_bos_token=1), "tokenizer.ggml.add_bos_token", "expected true or false, found 1"),
    (byte_level(add_eos_token=True, eos_token_id=None), "tokenizer.ggml.eos_token_id", "add_eos_token is on"),
    (byte_level(pre="llama-bpe"), "tokenizer.ggml.bos_token_id", "add_bos_token is on"),
    (sentencepiece(scores=None), "tokenizer.ggml.scores", "missing"),
    (sentencepiece(scores=np.zeros(3, np.float32)), "tokenizer.ggml.scores", "expected 264 numbers"),
    (sentencepiece(scores=np.full(264, np.nan, np.float32)), "tokenizer.ggml.scores", "not finite"),
    (sentencepiece(bos_token_id=264), "tokenizer.ggml.bos_token_id", "264 is no id"),
    (sentencepiece(unknown_token_id=264), "tokenizer.ggml.unknown_token_id", "264 is no id"),
    (sentencepiece(token_type=np.full(264, BYTE, np.int32)), "tokenizer.ggml.tokens", "byte token 0 is spelled"),
]  # fmt: skip


@pytest.mark.parametrize(("metadata", "key", "what"), WRONG, ids=[f"{k.split('.')[-1]}-{w[:20]}" for _, k, w in WRONG])
def test_errors_name_the_key(metadata: dict[str, Any], key: str, what: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        tokenizer_from_gguf(metadata)
    assert caught.value.where == key
    assert what in caught.value.what


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_compiles_and_loses_nothing(pre: str) -> None:
    tokenizer = tokenizer_from_gguf(byte_level(("Hello",), pre=pre, add_bos_token=False))
    text = "Hello  don't\n\n x1234 \u00e9\u4e2d \U0001f999!!\t"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "text", "cut"),
    [
        ("llama-bpe", "1234", ["123", "4"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("gpt-2", "1234", ["1234"]),
        ("default", "1234", ["123", "4"]),
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("qwen2", "ab\n\ncd", ["ab", "\n\n", "cd"]),
        ("gpt-2", "a  b", ["a", " ", " b"]),
        ("llama-bpe", "(ab)", ["(ab", ")"]),
        ("gpt-2", "(ab)", ["(", "ab", ")"]),
        ("qwen2", "e\u0903e", ["e", "\u0903e"]),
        ("qwen35", "e\u0903e", ["e\u0903e"]),
        ("tekken", "AbCd", ["Ab", "Cd"]),
    ],
)
def test_where_a_text_is_cut(pre: str, text: str, cut: list[str]) -> None:
    """A merge for every pair of neighbours, so that a word stays whole and only the cuts show."""
    spelled = "".join(tokenizer_from_gguf(byte_level()).id_to_token(i) for i in byte_ids(text))
    words = tuple(spelled[i:j] for i in range(len(spelled)) for j in range(i + 2, len(spelled) + 1))
    tokenizer = tokenizer_from_gguf(byte_level(words, pre=pre, add_bos_token=False))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.token_bytes(token).decode() for token in ids] == cut


def byte_ids(text: str) -> list[int]:
    return list(text.encode())


def test_whole_words_win_over_merges_where_the_model_says_so() -> None:
    metadata = byte_level(("ab",), tokens=None)
    tokens = [*byte_level(("ab",))["tokenizer.ggml.tokens"], "xyz"]
    types = np.array([NORMAL] * 257 + [CONTROL, CONTROL, NORMAL], np.int32)
    metadata |= named({"tokens": tokens, "token_type": types, "add_bos_token": False, "pre": "llama-bpe"})
    assert pieces(tokenizer_from_gguf(metadata), "xyz") == ["xyz"]
    assert pieces(tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": "gpt-2"}), "xyz") == ["x", "y", "z"]


def test_a_control_token_cannot_be_spelled() -> None:
    """Even where a merge or a whole word would give exactly its text."""
    tokens = [*byte_level(("ab",))["tokenizer.ggml.tokens"], "stop"]
    types = np.array([NORMAL] * 257 + [CONTROL] * 3, np.int32)
    keys = {"tokens": tokens, "token_type": types, "pre": "llama-bpe", "add_bos_token": False}
    tokenizer = tokenizer_from_gguf(byte_level(("ab",)) | named(keys))
    assert pieces(tokenizer, "stop") == ["s", "t", "o", "p"]
    assert pieces(tokenizer, "stop", parse_special=True) == ["stop"]


def test_sentencepiece_defaults() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece())
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos, tokenizer.add_eos) == (1, 2, True, False)
    assert tokenizer.eog_ids == {2}
    assert tokenizer.special_ids == {0, 1, 2}
    assert pieces(tokenizer, "ab") == ["\u2581a", "b"] or pieces(tokenizer, "ab") == ["\u2581", "ab"]


def test_space_prefix_after_special_tokens_only() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece(user=("<x>",)))
    assert pieces(tokenizer, "b<x>b") == ["\u2581", "b", "<x>", "\u2581", "b"]
    assert pieces(tokenizer, "</s>b", parse_special=True) == ["</s>", "\u2581", "b"]
    without = tokenizer_from_gguf(sentencepiece(user=("<x>",), add_space_prefix=False))
    assert pieces(without, "b<x>b") == ["b", "<x>", "b"]
    assert without.decode(without.encode(" b")) == "<s> b"
    assert tokenizer.decode(tokenizer.encode(" b"), skip_special_tokens=True) == " b"


def test_user_defined_tokens_are_cut_out_either_way() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece(user=("<x>", "<x><x>", "  "), add_space_prefix=False))
    assert pieces(tokenizer, "a<x><x><x>b") == ["a", "<x><x>", "<x>", "b"]
    assert pieces(tokenizer, "a  b") == ["a", "  ", "b"]
    assert tokenizer.token_bytes(tokenizer.encode("  ", add_special_tokens=False)[0]) == b"  "


def test_ends_of_generation_are_named_or_declared() -> None:
    tokens = [*byte_level()["tokenizer.ggml.tokens"], "<|eom_id|>", "</s>", "<|done|>"]
    types = np.array([NORMAL] * 256 + [CONTROL] * 2 + [NORMAL, USER, CONTROL], np.int32)
    metadata = byte_level(tokens=tokens, token_type=types, eot_token_id=260)
    tokenizer = tokenizer_from_gguf(metadata)
    assert {tokenizer.id_to_token(i) for i in tokenizer.eog_ids} == {
        "<|endoftext|>", "<|im_end|>", "<|eom_id|>", "<|done|>",
    }  # fmt: skip
    # a token that ends a generation is a control token, whatever the file calls it
    assert 258 in tokenizer.special_ids
    assert pieces(tokenizer, "<|eom_id|>")[0] == "<"
    assert pieces(tokenizer, "<|eom_id|>", parse_special=True) == ["<|eom_id|>"]


def test_a_byte_never_ends_a_generation() -> None:
    """Converted files carry `eot_token_id = 107` from a vocabulary where that was `<end_of_turn>`."""
    assert tokenizer_from_gguf(sentencepiece(eot_token_id=107)).eog_ids == {2}


def test_the_end_of_a_message_is_not_the_end_of_the_answer() -> None:
    tokens = [*byte_level()["tokenizer.ggml.tokens"], "<|end|>", "<|return|>", "<|call|>"]
    types = np.array([NORMAL] * 256 + [CONTROL] * 5, np.int32)
    tokenizer = tokenizer_from_gguf(byte_level(tokens=tokens, token_type=types))
    assert {258, 259, 260} & tokenizer.eog_ids == {259, 260}


def gemma4() -> dict[str, Any]:
    metadata = sentencepiece({"a": 0.0, "b": 0.0, "\u2581": 0.0, "\n": 0.0, "ab": 0.0, "\u2581a": 0.0, "\n\n": 0.0})
    keys = {"model": "gemma4", "merges": ["\u2581 a", "a b", "\n \n"], "bos_token_id": 1, "eos_token_id": 2,
            "unknown_token_id": 0, "scores": None}  # fmt: skip
    return {k: v for k, v in (metadata | {f"tokenizer.ggml.{k}": v for k, v in keys.items()}).items() if v is not None}


def test_gemma4_merges_by_rank_and_falls_back_to_bytes() -> None:
    tokenizer = tokenizer_from_gguf(gemma4())
    assert pieces(tokenizer, "ab ab\n\n\u00e9") == ["ab", "\u2581a", "b", "\n\n", "<0xC3>", "<0xA9>"]
    assert tokenizer.add_bos
    assert tokenizer.decode(tokenizer.encode(" ab", add_special_tokens=False)) == " ab"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-4o", "HelloWorld it's 12345 a/b\n", ["Hello", "World", " it's", " ", "123", "45", " a", "/b", "\n"]),
        ("deepseek-v3", "Hi 你好abc 12345 x_y!", ["Hi", " ", "你好", "abc", " ", "123", "45", " x", "_y", "!"]),
        (
            "deepseek-llm",
            "Hi ՠabc 你好 12, x\n\n  ",
            ["Hi", " ՠ", "abc", " ", "你好", " ", "1", "2", ",", " x", "\n", "\n", "  "],
        ),
        ("deepseek-coder", "Hi 你好 12, x\n", ["Hi", " ", "你好", " ", "1", "2", ",", " x", "\n"]),
        ("seed-coder", "it's 12 !!\n x", ["it", "'s", " ", "1", "2", " !!", "\n", " x"]),
        ("bailingmoe2", "it's 12 !!\n\n\n x", ["it", "'s", " ", "1", "2", " !!\n\n\n", " x"]),
        (
            "kimi-k2",
            "Hi 你好abc it's 12345 a/b\n",
            ["Hi", " ", "你好", "abc", " it's", " ", "123", "45", " a", "/b", "\n"],
        ),
    ],
)
def test_where_texts_are_cut(pre: str, text: str, pieces: list[str]) -> None:
    assert cut(PRE_TOKENIZERS[pre].patterns, text) == pieces


def cut(patterns: Sequence[str], text: str) -> list[str]:
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)]


@pytest.mark.parametrize("pattern", LINEAR)
def test_what_takes_linear_time_cuts_in_the_same_places(pattern: str) -> None:
    """The published expression looks for the end of the text from each space of a run of spaces."""
    rng = np.random.default_rng(0)
    for size in rng.integers(0, 12, 200):
        text = "".join(rng.choice(list("a1 \t\u3000\n"), size))
        assert cut([LINEAR[pattern]], text) == cut([pattern], text)
    assert pattern not in KNOWN_EXPRESSIONS
