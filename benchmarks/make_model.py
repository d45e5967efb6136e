"""Write a GGUF file with a real model's shapes and random weights, for benchmarks and tests without a download.

The blocks of a quantized type are drawn at random instead of quantizing drawn numbers, so a file is written about as
fast as the disk takes it, tensor by tensor, in little memory. Weights have a standard deviation of 0.02 whatever the
type, so activations stay finite; the mix of types in a Q4_K_M or Q5_K_M file is the one `llama-quantize` writes. The
tokenizer inside is small and works (every text can be encoded); the rest of the vocabulary is unused filler. What
such a model writes is noise: it serves to measure, not to talk to.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import pi, prod, sqrt
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFWriter, LlamaFileType, TokenType
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
STD = 0.02
CHUNK = 16 << 20  # bytes drawn and written at a time


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of one model; `rope_factor` is llama's frequency divisor or gemma3's linear position scale."""

    arch: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_base: float = 1e6
    eps: float = 1e-6
    tied: bool = True
    window: int = 0
    rope_factor: float = 0.0


SHAPES = {
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 40960),
    "qwen3-1.7b": Shape("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, 40960),
    "qwen3-4b": Shape("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, 40960),
    "qwen3-8b": Shape("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 40960, tied=False),
    "qwen2.5-0.5b": Shape("qwen2", 896, 4864, 24, 14, 2, 64, 151936, 32768),
    "qwen2.5-1.5b": Shape("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, 32768),
    "llama-3.2-1b": Shape("llama", 2048, 8192, 16, 32, 8, 64, 128256, 131072, 5e5, 1e-5, rope_factor=32.0),
    "llama-3.2-3b": Shape("llama", 3072, 8192, 28, 24, 8, 128, 128256, 131072, 5e5, 1e-5, rope_factor=32.0),
    "llama-3.1-8b": Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256, 131072, 5e5, 1e-5, False, rope_factor=8.0),
    "gemma-3-270m": Shape("gemma3", 640, 2048, 18, 4, 1, 256, 262144, 32768, window=512),
    "gemma-3-1b": Shape("gemma3", 1152, 6912, 26, 4, 1, 256, 262144, 32768, window=512),
    "gemma-3-4b": Shape("gemma3", 2560, 10240, 34, 8, 4, 256, 262208, 131072, window=1024, rope_factor=8.0),
    "tiny-qwen3": Shape("qwen3", 256, 512, 4, 4, 2, 64, 512, 1024),
    "tiny-qwen2": Shape("qwen2", 256, 512, 4, 4, 2, 64, 512, 1024, tied=False),
    "tiny-llama": Shape("llama", 256, 512, 4, 4, 2, 64, 512, 1024, 5e5, 1e-5, rope_factor=8.0),
    "tiny-gemma3": Shape("gemma3", 288, 512, 7, 4, 1, 64, 512, 1024, window=32, rope_factor=8.0),
}

# ---------------------------------------------------------------------------------------------------- tensors


def tensors(s: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and row-major shapes of all tensors, in file order."""
    if not s.tied:
        yield "output.weight", (s.vocab, s.hidden)
    yield "token_embd.weight", (s.vocab, s.hidden)
    if s.arch == "llama" and s.rope_factor:
        yield "rope_freqs.weight", (s.head_dim // 2,)
    for layer in range(s.layers):
        for name, shape in layer_tensors(s):
            yield f"blk.{layer}.{name}", shape
    yield "output_norm.weight", (s.hidden,)


def layer_tensors(s: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    yield "attn_norm.weight", (s.hidden,)
    for name, rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
        yield f"{name}.weight", (rows, s.hidden)
        if s.arch == "qwen2":
            yield f"{name}.bias", (rows,)
    if s.arch in ("qwen3", "gemma3"):
        yield "attn_q_norm.weight", (s.head_dim,)
        yield "attn_k_norm.weight", (s.head_dim,)
    yield "attn_output.weight", (s.hidden, q)
    if s.arch == "gemma3":
        yield "post_attention_norm.weight", (s.hidden,)
        yield "post_ffw_norm.weight", (s.hidden,)
    yield "ffn_norm.weight", (s.hidden,)
    yield "ffn_gate.weight", (s.ffn, s.hidden)
    yield "ffn_up.weight", (s.ffn, s.hidden)
    yield "ffn_down.weight", (s.hidden, s.ffn)


# ---------------------------------------------------------------------------------------------------- types

# kind -> (the type of most matrices, the file's declared type)
KINDS = {
    "F32": (Type.F32, LlamaFileType.ALL_F32),
    "F16": (Type.F16, LlamaFileType.MOSTLY_F16),
    "BF16": (Type.BF16, LlamaFileType.MOSTLY_BF16),
    "Q8_0": (Type.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "Q4_0": (Type.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "Q4_K_M": (Type.Q4_K, LlamaFileType.MOSTLY_Q4_K_M),
    "Q5_K_M": (Type.Q5_K, LlamaFileType.MOSTLY_Q5_K_M),
    "Q6_K": (Type.Q6_K, LlamaFileType.MOSTLY_Q6_K),
}
# What stands in where a row is no multiple of 256.
NARROW = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}


def tensor_type(name: str, shape: tuple[int, ...], kind: str, s: Shape) -> Type:
    """The type `llama-quantize` gives this tensor in a file of this kind."""
    if len(shape) == 1:
        return Type.F32
    wanted = KINDS[kind][0]
    head = name == "output.weight" or (s.tied and name == "token_embd.weight")
    if wanted in (Type.Q4_0, *NARROW) and (head or (kind.endswith("_M") and more_bits(name, s.layers))):
        wanted = Type.Q6_K
    return NARROW[wanted] if wanted in NARROW and shape[-1] % 256 else wanted


def more_bits(name: str, layers: int) -> bool:
    """Whether a mixed file spends six bits on it: values and down projections in the outer and every third layer."""
    if not name.endswith(("attn_v.weight", "ffn_down.weight")):
        return False
    layer, eighth = int(name.split(".")[1]), layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


# ---------------------------------------------------------------------------------------------------- random blocks


def random_bytes(rng: np.random.Generator, n: int, width: int) -> Bytes:
    words = rng.integers(0, 2**64, -(-n * width // 8), dtype=np.uint64)
    return words.view(np.uint8)[: n * width].reshape(n, width)


def halves(rng: np.random.Generator, n: int, mean: float, signed: bool = False) -> Bytes:
    """n scales around `mean` as the two bytes of a float16, [n, 2]; half of them negative if `signed`."""
    scale = rng.random(n, dtype=np.float32) * np.float32(0.5 * mean) + np.float32(0.75 * mean)
    if signed:
        scale *= rng.integers(0, 2, n, dtype=np.int8) * 2 - 1
    return scale.astype(np.float16).view(np.uint8).reshape(n, 2)


def floats(rng: np.random.Generator, n: int) -> NDArray[np.float32]:
    """n uniform values; uniform because that is several times faster than normal."""
    return (rng.random(n, dtype=np.float32) - np.float32(0.5)) * np.float32(STD * sqrt(12))


def f32(rng: np.random.Generator, n: int) -> Bytes:
    return floats(rng, n).view(np.uint8)


def f16(rng: np.random.Generator, n: int) -> Bytes:
    return floats(rng, n).astype(np.float16).view(np.uint8)


def bf16(rng: np.random.Generator, n: int) -> Bytes:
    return (floats(rng, n).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def q8_0(rng: np.random.Generator, n: int) -> Bytes:
    out = random_bytes(rng, n, 34)
    out[:, :2] = halves(rng, n, STD / 73.3)  # 73.3: the deviation of the codes -127..127
    codes = out[:, 2:].view(np.int8)
    np.maximum(codes, -127, out=codes)  # a quantizer never writes -128
    return out


def symmetric(width: int, deviation: float) -> Callable[[np.random.Generator, int], Bytes]:
    """Q4_0 and Q5_0: the codes are off centre by a half, so the scale's sign is drawn too, as in quantized files."""

    def draw(rng: np.random.Generator, n: int) -> Bytes:
        out = random_bytes(rng, n, width)
        out[:, :2] = halves(rng, n, STD / deviation, signed=True)
        return out

    return draw


def q5_1(rng: np.random.Generator, n: int) -> Bytes:
    out = random_bytes(rng, n, 24)
    out[:, :2] = halves(rng, n, STD / 9.23)
    minimum = out[:, :2].copy().view(np.float16) * np.float16(-15.5)
    out[:, 2:4] = minimum.view(np.uint8)
    return out


def k_blocks(width: int, middle: float, deviation: float) -> Callable[[np.random.Generator, int], Bytes]:
    """Q4_K and Q5_K: codes 0..2*middle with 6-bit scales and minima, both held in 32..63.

    The variance is that of scale * code around its middle plus that of the group offset middle * (scale - minimum).
    """
    scale_square, scale_variance = 47.5**2 + 1023 / 12, 1023 / 12
    total = sqrt(scale_square * deviation**2 + 2 * scale_variance * middle**2)

    def draw(rng: np.random.Generator, n: int) -> Bytes:
        out = random_bytes(rng, n, width)
        out[:, :2] = halves(rng, n, STD / total)
        out[:, 2:4] = (out[:, :2].copy().view(np.float16) * np.float16(middle)).view(np.uint8)
        out[:, 4:12] |= 0xA0  # the highest bit of all sixteen 6-bit numbers
        return out

    return draw


def q6_k(rng: np.random.Generator, n: int) -> Bytes:
    out = random_bytes(rng, n, 210)
    scales = out[:, 192:208]
    scales[:] = (scales & 0xBF) | (~scales >> 1 & 0x40)  # bit 6 = not the sign: magnitudes of 64..128
    out[:, 208:] = halves(rng, n, STD / (97.8 * 18.5))
    return out


DRAW: dict[Type, Callable[[np.random.Generator, int], Bytes]] = {
    Type.F32: f32, Type.F16: f16, Type.BF16: bf16, Type.Q8_0: q8_0, Type.Q4_0: symmetric(18, 4.64),
    Type.Q5_0: symmetric(22, 9.25), Type.Q5_1: q5_1, Type.Q4_K: k_blocks(144, 7.5, 4.61),
    Type.Q5_K: k_blocks(176, 15.5, 9.23), Type.Q6_K: q6_k,
}  # fmt: skip


def chunks(name: str, shape: tuple[int, ...], kind: Type, s: Shape, seed: int) -> Iterator[Bytes]:
    """The bytes of one tensor; they depend on the seed and the tensor's name only."""
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
    if name == "rope_freqs.weight":
        yield rope_divisors(s).view(np.uint8)
    elif name.endswith("norm.weight"):
        yield (1 + 5 * floats(rng, shape[0])).astype(np.float32).view(np.uint8)
    else:
        block, width = GGML_QUANT_SIZES[kind]
        left = prod(shape) // block
        while left:
            n = min(left, CHUNK // width)
            yield DRAW[kind](rng, n)
            left -= n


def rope_divisors(s: Shape, low: float = 1.0, high: float = 4.0, original: int = 8192) -> NDArray[np.float32]:
    """Llama 3's frequency divisors: 1 for short wavelengths, `rope_factor` for long ones, a ramp between."""
    wavelength = 2 * pi * s.rope_base ** (np.arange(0, s.head_dim, 2) / s.head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / s.rope_factor + smooth)).astype(np.float32)


# ---------------------------------------------------------------------------------------------------- vocabulary

WORDS = "the and was that with have this from they one there what about which when time story fox said".split()
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_CHAT = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA_CHAT = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def chains(space: str) -> list[tuple[str, str]]:
    """Merges that build each of WORDS, with the space before it, from the left: ('_', 't'), ('_t', 'h'), ..."""
    pairs = [(space + word[:i], word[i]) for word in WORDS for i in range(len(word))]
    return list(dict.fromkeys(pairs))


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE: printable Latin-1 as itself, the rest from U+0100."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = (chr(256 + i) for i, _ in enumerate(b for b in range(256) if b not in plain))
    return [chr(b) for b in plain] + list(moved)


def pad(tokens: list[str], types: list[TokenType], size: int) -> None:
    """Fill the vocabulary up with unused tokens, in place."""
    if size < len(tokens):
        raise SystemExit(f"a vocabulary needs at least {len(tokens)} tokens, not {size}")
    tokens += [f"[PAD{i}]" for i in range(len(tokens), size)]
    types += [TokenType.UNUSED] * (size - len(types))


def add_bpe(writer: GGUFWriter, s: Shape) -> None:
    llama = s.arch == "llama"
    pairs = chains("Ġ")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    if llama:
        special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokens = byte_alphabet() + [a + b for a, b in pairs]
    types = [TokenType.NORMAL] * len(tokens) + [TokenType.CONTROL] * len(special)
    tokens += special
    pad(tokens, types, s.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe" if llama else "qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{a} {b}" for a, b in pairs])
    writer.add_bos_token_id(tokens.index(special[0]))
    writer.add_eos_token_id(tokens.index(special[-1]))
    writer.add_pad_token_id(tokens.index(special[1] if llama else special[0]))
    writer.add_add_bos_token(llama)
    writer.add_chat_template(LLAMA_CHAT if llama else CHATML)


def add_spm(writer: GGUFWriter, s: Shape) -> None:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    pieces = [a + b for a, b in chains("▁")] + ["▁", "\n", *(chr(c) for c in range(33, 127))]
    tokens = special + [f"<0x{b:02X}>" for b in range(256)] + pieces
    types = [TokenType.CONTROL] * len(special) + [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(pieces)
    scores = [-1000.0] * (len(tokens) - len(pieces)) + [-float(rank) for rank in range(len(pieces))]
    pad(tokens, types, s.vocab)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores + [-1000.0] * (s.vocab - len(scores)))
    writer.add_token_types(types)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(6)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(GEMMA_CHAT)


# ---------------------------------------------------------------------------------------------------- file


def add_metadata(writer: GGUFWriter, s: Shape, kind: str, name: str) -> None:
    writer.add_type("model")
    writer.add_name(f"{name} with random weights")
    writer.add_file_type(KINDS[kind][1])
    writer.add_quantization_version(2)
    writer.add_block_count(s.layers)
    writer.add_context_length(s.context)
    writer.add_embedding_length(s.hidden)
    writer.add_feed_forward_length(s.ffn)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_layer_norm_rms_eps(s.eps)
    writer.add_rope_freq_base(s.rope_base)
    writer.add_vocab_size(s.vocab)
    if s.arch == "llama":
        writer.add_rope_dimension_count(s.head_dim)
    if s.arch == "gemma3":
        writer.add_sliding_window(s.window)
        writer.add_rope_freq_base_swa(10000.0)
        if s.rope_factor:
            writer.add_string("gemma3.rope.scaling.type", "linear")
            writer.add_rope_scaling_factor(s.rope_factor)


def write_model(out: Path, name: str, s: Shape, kind: str, seed: int = 0) -> int:
    """Write the file and return its number of parameters; a broken-off run leaves no file of that name."""
    writer = GGUFWriter(None, s.arch)
    add_metadata(writer, s, kind, name)
    (add_spm if s.arch == "gemma3" else add_bpe)(writer, s)
    plan = [(tensor, shape, tensor_type(tensor, shape, kind, s)) for tensor, shape in tensors(s)]
    for tensor, shape, type_ in plan:
        writer.add_tensor_info(tensor, shape, np.dtype(np.float32), nbytes(shape, type_), raw_dtype=type_)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    writer.write_header_to_file(partial)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    file: BinaryIO = writer.fout[0]
    writer.write_padding(file, file.tell())
    for tensor, shape, type_ in plan:
        for part in chunks(tensor, shape, type_, s, seed):
            file.write(part.data)
        writer.write_padding(file, nbytes(shape, type_))
    writer.close()
    partial.replace(out)
    return sum(prod(shape) for _, shape, _ in plan)


def nbytes(shape: tuple[int, ...], kind: Type) -> int:
    block, width = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise SystemExit(f"rows of {shape[-1]} elements cannot be stored as {kind.name}: no multiple of {block}")
    return prod(shape) // block * width


def arguments() -> argparse.Namespace:
    lines = [
        f"  {n:14s} {s.arch:7s} hidden {s.hidden:5d}  ffn {s.ffn:5d}  layers {s.layers:2d}"
        f"  heads {s.heads:2d}/{s.kv_heads}  head dim {s.head_dim:3d}  vocab {s.vocab:6d}"
        f"  {'tied' if s.tied else 'untied'}"
        for n, s in SHAPES.items()
    ]
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="shapes:\n" + "\n".join(lines), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", required=True, choices=SHAPES, metavar="NAME", help="one of the shapes below")
    parser.add_argument("--type", required=True, choices=KINDS, dest="kind", help="weight type or mix of types")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the GGUF file to write")
    parser.add_argument("--layers", type=int, metavar="N", help="another number of layers (for a smaller file)")
    parser.add_argument("--vocab", type=int, metavar="N", help="another vocabulary size, at least 512")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    args = parser.parse_args()
    if args.layers is not None and not 1 <= args.layers <= 512:
        parser.error(f"--layers {args.layers}: expected 1 to 512")
    if args.vocab is not None and not 512 <= args.vocab <= 1 << 20:
        parser.error(f"--vocab {args.vocab}: expected 512 to {1 << 20}")
    return args


def main() -> None:
    args = arguments()
    shape = SHAPES[args.shape]
    shape = replace(shape, layers=args.layers or shape.layers, vocab=args.vocab or shape.vocab)
    start = time.perf_counter()
    parameters = write_model(args.out, args.shape, shape, args.kind, args.seed)
    size, seconds = args.out.stat().st_size, time.perf_counter() - start
    print(f"{args.out}: {parameters:,} parameters, {size:,} bytes, {seconds:.1f} s")


if __name__ == "__main__":
    main()
