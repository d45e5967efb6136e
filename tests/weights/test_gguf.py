"""GGUF reader: values and tensors against the `gguf` package, and what it refuses, by name."""

from __future__ import annotations

import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.errors import ConfigError, GgufError, ModelFileError, RlxError, UnsupportedModelError
from rlx.weights.gguf import MAX_STRING_BYTES, GgufFile, GgufHeader, parse_header

F32, F16, Q4_K, Q8_0 = 0, 1, 12, 8
U8, U32, F32_KEY, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10
HUGE = (1 << 64) - 1


# --- a writer that can write wrong files


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(name) + u32(kind) + payload


def array(name: str, kind: int, count: int, payload: bytes) -> bytes:
    return key(name, ARRAY, u32(kind) + u64(count) + payload)


def tensor(name: str | bytes, dims: list[int], kind: int, offset: int, n_dims: int | None = None) -> bytes:
    sizes = b"".join(map(u64, dims))
    return text(name) + u32(len(dims) if n_dims is None else n_dims) + sizes + u32(kind) + u64(offset)


def file(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    data: int | None = None,
    align: int = 32,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_keys: int | None = None,
) -> bytes:
    keys, tensors = keys or [], tensors or []
    head = magic + u32(version) + u64(len(tensors) if n_tensors is None else n_tensors)
    head += u64(len(keys) if n_keys is None else n_keys) + b"".join(keys) + b"".join(tensors)
    if data is None:
        return head
    return head + bytes(-len(head) % align) + bytes(i % 251 for i in range(data))


ALIGN_64 = key("general.alignment", U32, u32(64))
TWO = [tensor("a", [8, 2], F32, 0), tensor("b", [32], F32, 64)]  # 64 and 128 bytes
TWO_AT_64 = [tensor("a", [8, 2], F32, 0), tensor("b", [32], F32, 128)]
GOOD_KEYS = [
    key("u", U32, u32(7)),
    key("s", STRING, text("hällo")),
    key("t", BOOL, b"\1"),
    array("n", U32, 3, u32(1) + u32(2) + u32(3)),
    array("w", STRING, 2, text("a") + text("")),
    array("e", STRING, 0, b""),
]


# --- malformed and odd files: the cases of llama.cpp's test-gguf, then more

Case = tuple[bytes, type[RlxError] | None, str]

CASES: dict[str, Case] = {
    "header_bad_magic": (file(magic=b"FUGG"), GgufError, "does not begin with b'GGUF' but with b'FUGG"),
    "header_bad_version_0": (file(version=0), GgufError, "byte 4: GGUF version 0 is not one of"),
    "header_bad_version_1": (file(version=1), GgufError, "version 1 is not one of .* Convert the model again"),
    "header_bad_version_future": (file(version=4), GgufError, "version 4 is not one of .* A newer rlx"),
    "header_bad_n_tensors": (file(n_tensors=HUGE), GgufError, f"byte 8: the tensor count is {HUGE}, at most 262144"),
    "header_bad_n_keys": (file(n_keys=HUGE), GgufError, f"byte 16: the key count is {HUGE}, at most 65536"),
    "header_empty": (file(), None, ""),
    "kv_bad_key_size": (file([u64(HUGE) + bytes(14)]), GgufError, f"name of key 0 is {HUGE} bytes long, at most 65535"),
    "kv_empty_key": (file([key("", U32, u32(1)) + bytes(8)]), GgufError, "byte 24: the name of key 0 is empty"),
    "kv_bad_type": (file([key("k", 13, u32(1))]), GgufError, "key 'k' has the type id 13, expected 0 to 12"),
    "kv_duplicate": (file([key("k", U32, u32(1))] * 2), GgufError, "byte 41: key 'k' occurs twice"),
    "kv_bad_align": (
        file([key("general.alignment", U32, u32(13))]), GgufError, "general.alignment is 13, expected a power of two"),
    "kv_wrong_type_align": (
        file([key("general.alignment", F32_KEY, u32(64))]), GgufError, "general.alignment' has type f32, expected u32"),
    "kv_ok": (file(GOOD_KEYS), None, ""),
    "tensors_bad_name_size": (
        file([], [tensor("x" * 64, [32], F32, 0)], data=128), GgufError, "tensor 0 is 64 bytes long, at most 63"),
    "tensors_bad_n_dims": (
        file([], [tensor("a", [1] * 5, F32, 0)], data=4), GgufError, "'a' has 5 dimensions, expected 1 to 4"),
    "tensors_bad_shape": (
        file([], [tensor("a", [HUGE, HUGE], F32, 0)], data=64), GgufError, "'a' of shape .* the whole file has 160"),
    "tensors_zero_dim": (
        file([], [tensor("a", [8, 0], F32, 0)], data=0), GgufError, r"'a' has a dimension of 0: \[8, 0\]"),
    "tensors_ne_too_big": (
        file([], [tensor("a", [1 << 32, 1 << 32], F32, 0)], data=64), GgufError, f"takes {1 << 66} bytes"),
    "tensors_nbytes_too_big": (
        file([], [tensor("a", [(1 << 63) - 32], F32, 0)], data=64), GgufError, f"takes {((1 << 63) - 32) * 4} bytes"),
    "tensors_pad_wrap": (
        file([], [tensor("a", [(1 << 62) - 1], F32, 0)], data=64), GgufError, f"takes {((1 << 62) - 1) * 4} bytes"),
    "tensors_bad_type": (
        file([], [tensor("a", [32], 99, 0)], data=128), UnsupportedModelError, "tensor 'a' has the type id 99"),
    "tensors_bad_offset": (
        file([], [tensor("a", [32], F32, 4)], data=256), GgufError, "'a' has the offset 4, expected a multiple"),
    "tensors_duplicate_name": (
        file([], [tensor("a", [32], F32, 0), tensor("a", [32], F32, 128)], data=256), GgufError, "'a' occurs twice"),
    "tensors_bad_align": (file([key("general.alignment", U32, u32(0))], TWO, data=256), GgufError, "alignment is 0"),
    "tensors_inconsistent_align": (
        file([ALIGN_64], [tensor("a", [8], F32, 0), tensor("b", [32], F32, 32)], data=512, align=64),
        GgufError, "'b' has the offset 32, expected a multiple of the alignment 64"),
    "tensors_ok": (file([], TWO, data=192), None, ""),
    "tensors_custom_align_ok": (file([ALIGN_64], TWO_AT_64, data=256, align=64), None, ""),
    "data_short": (file([], TWO, data=191), GgufError, "tensor 'b' ends at byte 320, the file has 319"),
    "data_bad_align": (
        file([key("general.alignment", U32, u32(1 << 17))], TWO, data=192), GgufError, "alignment is 131072"),
    "data_inconsistent_align": (file([ALIGN_64], TWO_AT_64, data=192), GgufError, "tensor 'b' ends at byte"),
    "data_mem_size_overflow": (
        file([], [tensor("a", [1 << 61], F32, 0), tensor("b", [1 << 61], F32, 1 << 63)], data=192),
        GgufError, f"takes {1 << 63} bytes"),
    "data_ok": (file(GOOD_KEYS, TWO, data=192), None, ""),
    "data_custom_align_ok": (file([*GOOD_KEYS, ALIGN_64], TWO_AT_64, data=256, align=64), None, ""),
    # beyond that list
    "empty_file": (b"", GgufError, "byte 0: the magic needs 4 bytes, the file has 0 left"),
    "big_endian": (file(version=3 << 24), GgufError, "big-endian"),
    "version_2_ok": (file(GOOD_KEYS, TWO, data=192, version=2), None, ""),
    "n_keys_unfillable": (file(n_keys=60_000), GgufError, "the key count is 60000, too many for the 0 bytes"),
    "n_tensors_unfillable": (file(n_tensors=1 << 18), GgufError, "the tensor count is 262144, too many for"),
    "key_not_utf8": (file([key(b"\xff\xfe", U32, u32(1))]), GgufError, "the name of key 0 is not UTF-8"),
    "string_past_end": (file([key("k", STRING, u64(99) + b"abc")]), GgufError, "'k' needs 99 bytes, .* 3 left"),
    "string_too_long": (
        file([key("k", STRING, u64(MAX_STRING_BYTES + 1))]), GgufError, "'k' is 67108865 bytes long, at most 67108864"),
    "array_past_end": (file([array("k", U64, 3, u64(1))]), GgufError, "'k' has 3 elements, too many for the 8 bytes"),
    "array_huge": (file([array("k", U64, HUGE, b"")]), GgufError, f"'k' has {HUGE} elements"),
    "array_nested": (file([key("k", ARRAY, u32(ARRAY) + u64(1) + bytes(20))]), GgufError, "'k' holds arrays"),
    "array_bad_type": (file([key("k", ARRAY, u32(99) + u64(1) + bytes(20))]), GgufError, "type id 99"),
    "strings_past_end": (
        file([array("k", STRING, 3, text("ab") + text("c") + u64(1 << 40))]),
        GgufError, r"byte 68: string 2 of the 3 in the array of key 'k' runs past the end"),
    "strings_wrap": (
        file([array("k", STRING, 2, u64(HUGE) + text("c"))]), GgufError, "byte 49: string 0 of the 2 in .* runs past"),
    "bool_2": (file([key("k", BOOL, b"\2")]), GgufError, "'k' is a bool with the value 2"),
    "bool_array_2": (file([array("k", BOOL, 2, b"\1\2")]), GgufError, "bools other than 0 and 1"),
    "known_key_wrong_type": (
        file([key("tokenizer.ggml.tokens", STRING, text("x"))]), GgufError, "type string, expected array of string"),
    "arch_wrong_type": (file([key("general.architecture", U32, u32(1))]), GgufError, "has type u32, expected string"),
    "split_wrong_type": (
        file([key("split.count", STRING, text("3"))]), GgufError, "'split.count' has type string, expected u16"),
    "split_of_one_ok": (file([key("split.count", 2, b"\1\0")]), None, ""),
    "tensor_empty_name": (file([], [tensor("", [32], F32, 0)], data=128), GgufError, "name of tensor 0 is empty"),
    "tensor_no_dims": (file([], [tensor("a", [], F32, 0)], data=128), GgufError, "'a' has 0 dimensions"),
    "tensor_n_dims_huge": (
        file([], [tensor("a", [1], F32, 0, n_dims=(1 << 32) - 1)], data=99), GgufError, "4294967295 dimensions"),
    "tensor_block": (
        file([], [tensor("a", [255], Q4_K, 0)], data=256), GgufError, "rows of 255, no multiple of the 256 in a q4_k"),
    "tensor_removed_type": (
        file([], [tensor("a", [32], 4, 0)], data=256), UnsupportedModelError, "the type id 4, which rlx does not know"),
    "tensor_overlap": (
        file([], [tensor("b", [32], F32, 32), tensor("a", [16], F32, 0)], data=256),
        GgufError, "tensor 'b' at offset 32 overlaps tensor 'a', which ends at 64"),
    "tensor_product_wraps_to_4": (  # in 64-bit arithmetic these dimensions multiply to 4
        file([], [tensor("a", [4194305, 4194305, 211106198978564], F32, 0)], data=256), GgufError, "the whole file"),
    "tensor_offset_wraps": (
        file([], [tensor("a", [32], F32, (1 << 64) - 32)], data=256), GgufError, f"ends at byte {(1 << 64) + 160}"),
    "gap_ok": (file([], [tensor("a", [8], F32, 0), tensor("b", [8], F32, 96)], data=128), None, ""),
    "any_order_ok": (file([], [tensor("b", [8], F32, 32), tensor("a", [8], F32, 0)], data=64), None, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_crafted_file(name: str) -> None:
    raw, error, message = CASES[name]
    if error is None:
        read_everything(raw)
        return
    with pytest.raises(error) as caught:
        parse_header(raw, "f.gguf")
    assert type(caught.value) is error
    assert str(caught.value).startswith("f.gguf")
    assert re.search(message, str(caught.value)), str(caught.value)


def test_a_crafted_file_allocates_nothing_of_the_size_it_claims() -> None:
    tracemalloc.start()
    try:
        for raw, error, _ in CASES.values():
            if error is not None:
                with pytest.raises(error):
                    parse_header(raw, "f.gguf")
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def read_everything(raw: bytes) -> GgufHeader:
    """Parse, decode every value, and check that every tensor lies inside the file, apart from the others."""
    header = parse_header(raw, "f.gguf")
    assert dict(header.metadata).keys() == set(header.metadata)
    end = header.data_offset
    for name in sorted(header.tensors, key=header.offsets.__getitem__):
        info, begin = header.tensors[name], header.offsets[name]
        assert begin >= end and begin % header.alignment == header.data_offset % header.alignment
        assert info.nbytes == info.dtype.size(info.shape)
        end = begin + info.nbytes
        assert end <= len(raw)
    return header


# --- damage


def small_model() -> bytes:
    """A plausible header of more than 2 KiB: hyper-parameters, a vocabulary, quantized and float tensors."""
    words = [f"tok{i}" for i in range(64)]
    keys = [
        key("general.architecture", STRING, text("llama")),
        key("general.alignment", U32, u32(32)),
        *(
            key(f"llama.{name}", U32, u32(value))
            for name, value in {
                "block_count": 1, "embedding_length": 256, "context_length": 128, "vocab_size": 64,
                "attention.head_count": 8, "attention.head_count_kv": 2, "rope.dimension_count": 32,
            }.items()
        ),
        key("llama.rope.freq_base", F32_KEY, struct.pack("<f", 1e4)),
        key("tokenizer.ggml.add_bos_token", BOOL, b"\1"),
        array("tokenizer.ggml.tokens", STRING, 64, b"".join(map(text, words))),
        array("tokenizer.ggml.scores", F32_KEY, 64, bytes(256)),
        array("tokenizer.ggml.token_type", 5, 64, u32(1) * 64),
        array("flags", BOOL, 5, b"\0\1\1\0\1"),
    ]  # fmt: skip
    tensors = [
        tensor("token_embd.weight", [256, 64], F16, 0),
        tensor("blk.0.attn_q.weight", [256, 4], Q4_K, 32768),
        tensor("blk.0.attn_k.weight", [256, 2], Q8_0, 33344),
        tensor("output_norm.weight", [256], F32, 33888),
    ]
    return file(keys, tensors, data=33888 + 1024)


def accepts(raw: bytes) -> bool:
    """Whether the file is accepted; every refusal must be one of our errors. Accepted files must be consistent."""
    try:
        read_everything(raw)
    except ModelFileError:
        return False
    return True


def test_every_truncation_of_the_header_is_refused() -> None:
    whole = small_model()
    header = parse_header(whole, "f.gguf")
    assert header.data_offset > 2048
    for length in range(header.data_offset):
        assert not accepts(whole[:length]), length
    assert not accepts(whole[:-1])
    assert accepts(whole)


def test_flipped_bits_in_the_first_2_kib_are_accepted_or_refused_by_name() -> None:
    """Each third one: of all bytes, and at every place in a byte."""
    damaged = bytearray(small_model())
    accepted = 0
    for bit in range(0, 8 * 2048, 3):
        damaged[bit // 8] ^= 1 << bit % 8
        accepted += accepts(bytes(damaged))
        damaged[bit // 8] ^= 1 << bit % 8
    assert 0 < accepted < 8 * 2048 // 3


# --- the same as the `gguf` package


def write_model(path: Path, fill: Callable[[gguf.GGUFWriter], None], arch: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, arch)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_all_types(writer: gguf.GGUFWriter) -> None:
    writer.add_uint8("k.u8", 200)
    writer.add_int8("k.i8", -100)
    writer.add_uint16("k.u16", 60_000)
    writer.add_int16("k.i16", -30_000)
    writer.add_uint32("k.u32", 4_000_000_000)
    writer.add_int32("k.i32", -2_000_000_000)
    writer.add_uint64("k.u64", HUGE)
    writer.add_int64("k.i64", -(1 << 63))
    writer.add_float32("k.f32", 0.1)
    writer.add_float64("k.f64", 0.1)
    writer.add_bool("k.yes", True)
    writer.add_bool("k.no", False)
    writer.add_string("k.text", "grüß dich, 世界 🦊")
    writer.add_array("k.ints", [1, -2, 3])
    writer.add_array("k.floats", [0.5, -1.25])
    writer.add_array("k.bools", [True, False, True])
    writer.add_array("k.words", ["a", "", "ß", "世界", "a b\nc"])


def add_all_tensors(writer: gguf.GGUFWriter) -> None:
    rng = np.random.default_rng(0)
    writer.add_tensor("f32", rng.standard_normal((3, 5), np.float32))
    writer.add_tensor("f16", rng.standard_normal((2, 3, 4), np.float32).astype(np.float16))
    writer.add_tensor("one", rng.standard_normal(7, np.float32))
    writer.add_tensor("four", rng.standard_normal((1, 2, 3, 4), np.float32))
    writer.add_tensor("ints", rng.integers(-9, 9, (4, 4), np.int32))
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.BF16):
        blocks = gguf.quantize(rng.standard_normal((6, 64), np.float32), kind)
        writer.add_tensor(kind.name.lower(), blocks, raw_dtype=kind)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    def fill(writer: gguf.GGUFWriter) -> None:
        add_all_types(writer)
        add_all_tensors(writer)

    return write_model(tmp_path / "m.gguf", fill)


def same_value(found: Any, expected: Any) -> bool:
    if isinstance(found, np.ndarray):
        return bool(found.tolist() == expected)
    return type(found) is type(expected) and found == expected


@pytest.mark.parametrize("mmap", [True, False])
def test_metadata_equals_the_reference(model: Path, mmap: bool) -> None:
    reference = gguf.GGUFReader(model).fields
    with GgufFile(model, mmap=mmap) as found:
        assert list(found.metadata) == [name for name in reference if not name.startswith("GGUF.")]
        for name, value in found.metadata.items():
            assert same_value(value, reference[name].contents()), name


@pytest.mark.parametrize("mmap", [True, False])
def test_tensors_equal_the_reference(model: Path, mmap: bool) -> None:
    reference = gguf.GGUFReader(model).tensors
    with GgufFile(model, mmap=mmap) as found:
        assert list(found.tensors) == [each.name for each in reference]
        for each in reference:
            info = found.tensors[each.name]
            assert info.dtype.ggml == each.tensor_type
            assert info.shape == tuple(reversed(each.shape.tolist()))
            assert info.nbytes == each.n_bytes
            assert found.raw(each.name).tobytes() == each.data.tobytes()


WORDS = st.lists(st.text(max_size=6), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None)
@given(words=WORDS, dims=st.lists(st.integers(1, 5), min_size=1, max_size=4), alignment=st.sampled_from([8, 32, 128]))
def test_written_files_read_back(
    tmp_path_factory: pytest.TempPathFactory, words: list[str], dims: list[int], alignment: int
) -> None:
    values = np.arange(np.prod(dims), dtype=np.float32).reshape(dims)

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_custom_alignment(alignment)
        writer.add_array("words", words)
        writer.add_tensor("a", values)
        writer.add_tensor("b", -values)

    path = write_model(tmp_path_factory.mktemp("g") / "m.gguf", fill)
    with GgufFile(path) as found:
        assert found.metadata["words"] == words and found.alignment == alignment
        for name, expected in (("a", values), ("b", -values)):
            assert found.tensors[name].shape == expected.shape
            assert found.raw(name).tobytes() == expected.tobytes()


# --- values


def test_token_bytes_that_are_no_utf8_survive() -> None:
    tokens = [b"ok", b"\xff\x00\xfe", "ß".encode()[:1], b"", b"\x00"]
    header = parse_header(file([array("tokenizer.ggml.tokens", STRING, 5, b"".join(map(text, tokens)))]), "f.gguf")
    assert header.metadata.metadata_bytes("tokenizer.ggml.tokens") == tokens
    words = header.metadata["tokenizer.ggml.tokens"]
    assert [word.encode("utf-8", "surrogateescape") for word in words] == tokens
    assert header.metadata.metadata_bytes("tokenizer.ggml.tokens") == tokens  # now from the decoded list


# --- the mapping


def test_raw_is_a_read_only_view_that_outlives_close(model: Path) -> None:
    found = GgufFile(model)
    view = found.raw("f32")
    assert view.ndim == 1 and view.dtype == np.uint8 and not view.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    before = view.tobytes()
    found.close()
    assert view.tobytes() == before
    with pytest.raises(ModelFileError, match="was closed"):
        found.raw("f32")


# --- hyper-parameters


def llama(*, tokens: int = 0, rows: int = 0, **values: int) -> bytes:
    keys = [key("general.architecture", STRING, text("llama"))]
    keys += [key("llama." + name.replace("__", "."), U32, u32(value)) for name, value in values.items()]
    keys += [array("tokenizer.ggml.tokens", STRING, tokens, text("t") * tokens)] if tokens else []
    tensors = [tensor("token_embd.weight", [8, rows], F32, 0)] if rows else []
    return file(keys, tensors, data=32 * rows)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (llama(block_count=0), "llama.block_count is 0, expected 1 to 1024"),
        (llama(block_count=1025), "llama.block_count is 1025"),
        (llama(embedding_length=1 << 31), "embedding_length is 2147483648"),
        (llama(attention__head_count=6, attention__head_count_kv=4), "head_count 6 is no multiple of head_count_kv 4"),
        (llama(rope__dimension_count=63), "rope.dimension_count is 63, expected an even number"),
        (llama(rope__dimension_count_swa=9), "rope.dimension_count_swa is 9, expected an even number"),
        (llama(expert_count=4, expert_used_count=5), "expert_used_count is 5, more than expert_count 4"),
        (llama(expert_count=1 << 20), "expert_count is 1048576, expected 0 to 1024"),
        (llama(ssm__inner_size=0), "ssm.inner_size is 0, expected 1 to"),
        (llama(vocab_size=9, tokens=8), "the vocabulary differ: llama.vocab_size 9, the token list 8"),
        (llama(tokens=8, rows=9), "the token list 8, token_embd.weight 9"),
        (
            file([key("general.architecture", STRING, text("x")), key("x.block_count", F32_KEY, u32(0))]),
            "x.block_count is [0.0], expected integers",
        ),
        (
            file(
                [
                    key("general.architecture", STRING, text("x")),
                    array("x.attention.head_count", U32, 2, u32(8) + u32(6)),
                    key("x.attention.head_count_kv", U32, u32(4)),
                ]
            ),
            "x.attention.head_count 6 is no multiple",
        ),
    ],
)
def test_absurd_hyperparameters_are_named(raw: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_header(raw, "f.gguf")
