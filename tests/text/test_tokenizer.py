"""Real vocabularies: ids against llama.cpp's test vectors and against the `tokenizers` package, GGUF against folder;
and SentencePiece merging against its rule.
"""

from __future__ import annotations

import lzma
import tempfile
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from golden_folder import goldens
from hypothesis import example, given
from hypothesis import strategies as st
from vocabularies import byte_level, texts, write_gguf

from rlx.errors import ModelFileError
from rlx.text import Tokenizer, load_tokenizer
from rlx.text.spm import SentencePieceMerger, best_pieces
from rlx.text.tokenizer import SPACE, SpecialSplitter

DATA = Path(__file__).parent.parent / "data"
FAMILIES = ["llama", "llama-k256", "qwen2", "qwen3", "gemma3"]
VECTORS = DATA / "vocabs" / "ggml-vocab-llama-spm.gguf"
UNPACKED = tempfile.TemporaryDirectory(prefix="rlx-vocabulary-")


@cache
def trio(family: str) -> tuple[Tokenizer, Tokenizer, tokenizers.Tokenizer]:
    """A family's tokenizer from its GGUF file, from its folder, and as the package reads it."""
    folder = goldens() / family
    gguf = next(iter(sorted(folder.glob("model-*.gguf"))))
    library = tokenizers.Tokenizer.from_file(str(folder / "hf" / "tokenizer.json"))
    return load_tokenizer(gguf), load_tokenizer(folder / "hf"), library


@cache
def llama2() -> Tokenizer:
    """Of a vocabulary without weights, which lies in the repository compressed."""
    file = Path(UNPACKED.name) / VECTORS.name
    file.write_bytes(lzma.decompress(Path(f"{VECTORS}.xz").read_bytes()))
    return load_tokenizer(file)


def vectors() -> list[tuple[str, list[int]]]:
    given = Path(f"{VECTORS}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{VECTORS}.out").read_text().split("\n")
    return [(text, [int(word) for word in line.split()]) for text, line in zip(given, lines, strict=False)]


@pytest.mark.parametrize(("text", "ids"), vectors())
def test_llama2_ids_are_those_of_llama_cpp(text: str, ids: list[int]) -> None:
    assert llama2().encode(text, add_special_tokens=False) == ids
    assert llama2().decode(ids) == text


@pytest.mark.parametrize("family", FAMILIES)
@given(texts)
@example("e\u0301 \u0041\u030a")
@example("   leading and   inner\n\n\nruns ")
def test_all_three_readings_agree(family: str, text: str) -> None:
    gguf, folder, library = trio(family)
    for parse_special in (False, True):
        library.encode_special_tokens = not parse_special
        expected = library.encode(text, add_special_tokens=False).ids
        assert gguf.encode(text, False, parse_special) == expected
        assert folder.encode(text, False, parse_special) == expected


@pytest.mark.parametrize("family", FAMILIES)
@given(texts)
def test_framing_is_that_of_the_package(family: str, text: str) -> None:
    gguf, folder, library = trio(family)
    library.encode_special_tokens = True
    expected = library.encode(text).ids
    assert gguf.encode(text) == folder.encode(text) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_else_agrees(family: str) -> None:
    gguf, folder, library = trio(family)
    for name in ("bos_id", "eos_id", "eog_ids", "special_ids", "add_bos", "add_eos", "chat_template", "vocab_size"):
        assert getattr(gguf, name) == getattr(folder, name), name
    assert gguf.vocab_size == library.get_vocab_size()
    for token in range(gguf.vocab_size):
        assert gguf.id_to_token(token) == folder.id_to_token(token) == library.id_to_token(token)
        assert gguf.token_bytes(token) == folder.token_bytes(token)
        assert gguf.token_to_id(gguf.id_to_token(token)) == token
    assert gguf.token_to_id("no such piece") is None


@pytest.mark.parametrize("family", FAMILIES)
@given(texts)
def test_decode_inverts_encode(family: str, text: str) -> None:
    gguf, _, _ = trio(family)
    decoded = gguf.decode(gguf.encode(text, add_special_tokens=False))
    if family == "gemma3":  # U+2581 is how a space is spelled there
        assert decoded == text.replace("\u2581", " ")
    else:
        assert decoded == (unicodedata.normalize("NFC", text) if family.startswith("qwen") else text)


@pytest.mark.parametrize(
    ("family", "ends"),
    [
        ("llama", {"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"}),
        ("qwen2", {"<|im_end|>"}),  # the other one is declared as padding
        ("gemma3", {"<eos>", "<end_of_turn>"}),
    ],
)
def test_ends_of_generation(family: str, ends: set[str]) -> None:
    gguf, _, _ = trio(family)
    assert {gguf.id_to_token(token) for token in gguf.eog_ids} == ends


def test_bos_is_never_doubled() -> None:
    gguf, folder, _ = trio("llama")
    for tokenizer in (gguf, folder):
        bos = tokenizer.bos_id
        assert tokenizer.encode("<|begin_of_text|>hi", parse_special=True).count(bos) == 1
        assert tokenizer.encode("hi") == [bos, *tokenizer.encode("hi", add_special_tokens=False)]
        assert tokenizer.encode("<|begin_of_text|>hi").count(bos) == 1  # the text of BOS, as text, behind a true one
        assert tokenizer.encode("") == [bos]


def test_control_tokens_in_a_text_are_text() -> None:
    for family, text in (("llama", "<|eot_id|>"), ("qwen2", "<|im_end|>"), ("gemma3", "<end_of_turn>")):
        for tokenizer in trio(family)[:2]:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert not tokenizer.special_ids.intersection(ids)
            assert tokenizer.decode(ids) == text
            assert tokenizer.encode(text, False, parse_special=True) == [tokenizer.token_to_id(text)]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_threads_do_not_disturb_each_other(family: str) -> None:
    text = "<|eot_id|><end_of_turn> some text"
    for tokenizer in trio(family)[:2]:
        expected = {flag: tokenizer.encode(text, parse_special=flag) for flag in (False, True)}
        assert expected[False] != expected[True]

        def same(i: int, tokenizer: Tokenizer = tokenizer, expected: dict[bool, Any] = expected) -> bool:
            return tokenizer.encode(text, parse_special=bool(i % 2)) == expected[bool(i % 2)]

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(same, range(200)))


def test_load_tokenizer_takes_what_auto_runner_takes(tmp_path: Path) -> None:
    """A file of weights stands for the folder that it is in, and a folder for its GGUF file."""
    hf = goldens() / "qwen2" / "hf"
    assert load_tokenizer(hf / "model.safetensors").eog_ids == load_tokenizer(hf).eog_ids
    write_gguf(tmp_path / "a.gguf", byte_level(("Hello",)))
    assert load_tokenizer(tmp_path).token_to_id("Hello") is not None
    write_gguf(tmp_path / "b.gguf", byte_level(("Hello",)))
    with pytest.raises(ModelFileError, match=r"2 models here: a\.gguf .*b\.gguf"):
        load_tokenizer(tmp_path)


# -------------------------------------------------------------------------------------------- SentencePiece merging


ALPHABET = "ab" + SPACE


def by_the_rule(text: str, cost: dict[str, float]) -> list[str]:
    """Join the leftmost of the cheapest pairs until no pair is a piece."""
    symbols = list(text)
    while True:
        pairs = [(cost[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in cost]
        if not pairs:
            return symbols
        _, at = min(pairs)
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]


# Few letters and few different costs: many overlaps, ties and pieces that are reached in two ways.
costs = st.dictionaries(st.text(ALPHABET, min_size=2, max_size=5), st.integers(0, 3).map(float), max_size=25)


@given(st.text(ALPHABET, max_size=30), costs)
def test_best_pieces_follows_the_rule(text: str, cost: dict[str, float]) -> None:
    assert best_pieces(text, cost) == by_the_rule(text, cost)


@given(st.text("ab ", max_size=30), costs)
def test_cutting_at_words_changes_nothing(text: str, cost: dict[str, float]) -> None:
    pieces = {piece: i for i, piece in enumerate([*ALPHABET, *cost])}
    scores = [0.0] * len(ALPHABET) + [-value for value in cost.values()]
    merger = SentencePieceMerger(pieces, scores, None, None)
    expected = by_the_rule(text.replace(" ", SPACE), {**dict.fromkeys(ALPHABET, 0.0), **cost})
    assert merger.encode(text) == [pieces[piece] for piece in expected]


@given(st.text("ab", max_size=20), st.sets(st.text("ab", min_size=1, max_size=4), max_size=5))
def test_splitter_takes_the_leftmost_longest(text: str, specials: set[str]) -> None:
    ids = {special: number for number, special in enumerate(sorted(specials))}
    parts = list(SpecialSplitter(ids).split(text))
    names = {number: special for special, number in ids.items()}
    assert "".join(part if isinstance(part, str) else names[part] for part in parts) == text
    at = 0
    for part in parts:
        if isinstance(part, int):
            here = [special for special in specials if text.startswith(special, at)]
            assert names[part] == max(here, key=len)
            at += len(names[part])
        else:
            assert part
            assert not any(special in text[at : at + len(part)] for special in specials)
            at += len(part)
