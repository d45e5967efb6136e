"""Data types: one row per type, GGUF block formats included.

A block format stores `block` consecutive elements of a row in `nbytes` bytes; scalar types have a block of one.
Source of ids, block sizes and byte counts: the GGUF registry (ggml.h; the `gguf` package's `GGML_QUANT_SIZES`), which
a test compares row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from rlx.errors import ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """A storage type. There is one object per type; types are compared by identity.

    Attributes:
        name: lower-case name, as printed in IR text.
        block: elements per block.
        nbytes: bytes per block.
        numpy: name of the NumPy type with the same bytes; None for block formats. bf16 is held as uint16.
        ggml: the type's id in a GGUF file; None if GGUF has no such type.
    """

    name: str
    block: int
    nbytes: int
    numpy: str | None = None
    ggml: int | None = None

    @property
    def is_quantized(self) -> bool:
        return self.block > 1

    @property
    def is_float(self) -> bool:
        return self.name in ("f32", "f16", "bf16", "f64")

    @property
    def has_integer_codes(self) -> bool:
        """Whether values are integers times scales, so that they can be multiplied with int8 activations."""
        return self.is_quantized and self is not F8_E4M3

    def row_bytes(self, elements: int) -> int:
        """Bytes of one row of `elements` values; `ShapeError` if the block size does not divide it."""
        return self.size((elements,))

    def size(self, shape: Sequence[int]) -> int:
        """Bytes of a dense row-major array of this shape; `ShapeError` if blocks do not divide its rows."""
        elements = shape[-1] if len(shape) else 1
        if elements % self.block:
            raise ShapeError(
                f"a row of {elements} elements is no multiple of the {self.block}-element blocks of {self.name}"
            )
        return elements // self.block * self.nbytes * prod(shape[:-1])

    def __repr__(self) -> str:
        return self.name


F32 = DType("f32", 1, 4, "float32", 0)
F16 = DType("f16", 1, 2, "float16", 1)
BF16 = DType("bf16", 1, 2, "uint16", 30)
F64 = DType("f64", 1, 8, "float64", 28)
I8 = DType("i8", 1, 1, "int8", 24)
I16 = DType("i16", 1, 2, "int16", 25)
I32 = DType("i32", 1, 4, "int32", 26)
I64 = DType("i64", 1, 8, "int64", 27)
U8 = DType("u8", 1, 1, "uint8")
Q4_0 = DType("q4_0", 32, 18, None, 2)
Q4_1 = DType("q4_1", 32, 20, None, 3)
Q5_0 = DType("q5_0", 32, 22, None, 6)
Q5_1 = DType("q5_1", 32, 24, None, 7)
Q8_0 = DType("q8_0", 32, 34, None, 8)
Q8_1 = DType("q8_1", 32, 40, None, 9)
Q2_K = DType("q2_k", 256, 84, None, 10)
Q3_K = DType("q3_k", 256, 110, None, 11)
Q4_K = DType("q4_k", 256, 144, None, 12)
Q5_K = DType("q5_k", 256, 176, None, 13)
Q6_K = DType("q6_k", 256, 210, None, 14)
Q8_K = DType("q8_k", 256, 292, None, 15)
IQ2_XXS = DType("iq2_xxs", 256, 66, None, 16)
IQ2_XS = DType("iq2_xs", 256, 74, None, 17)
IQ3_XXS = DType("iq3_xxs", 256, 98, None, 18)
IQ1_S = DType("iq1_s", 256, 50, None, 19)
IQ4_NL = DType("iq4_nl", 32, 18, None, 20)
IQ3_S = DType("iq3_s", 256, 110, None, 21)
IQ2_S = DType("iq2_s", 256, 82, None, 22)
IQ4_XS = DType("iq4_xs", 256, 136, None, 23)
IQ1_M = DType("iq1_m", 256, 56, None, 29)
TQ1_0 = DType("tq1_0", 256, 54, None, 34)
TQ2_0 = DType("tq2_0", 256, 66, None, 35)
MXFP4 = DType("mxfp4", 32, 17, None, 39)
NVFP4 = DType("nvfp4", 64, 36, None, 40)
Q1_0 = DType("q1_0", 128, 18, None, 41)

# 8-bit floats of safetensors checkpoints, rearranged into blocks: an f32 scale, then 32 e4m3fn bytes.
F8_E4M3 = DType("f8_e4m3", 32, 36)

# Quantized activations: int8 with a float32 scale per 32 elements. Does not occur in files; a device may lay its bytes
# out in another way and add to them (`Layouts.size`).
Q8A = DType("q8a", 32, 36)

#: Activation types of a linear: f32, or the output types of `quantize`.
ACTIVATIONS: dict[str, DType] = {t.name: t for t in (F32, Q8A, BF16)}

#: Types of KV caches.
KV_DTYPES = (F32, F16, BF16, Q8_0, Q4_0)

#: Values that `dtype` accepts.
DTypeLike: TypeAlias = DType | str | type[Any] | Any

#: NumPy's and PyTorch's names for types of the table.
_ALIASES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64", "int8": "i8", "int16": "i16",
            "int32": "i32", "int64": "i64", "uint8": "u8", "float": "f32", "half": "f16"}  # fmt: skip

DTYPES: dict[str, DType] = {t.name: t for t in list(globals().values()) if isinstance(t, DType)}
BY_GGML: dict[int, DType] = {t.ggml: t for t in DTYPES.values() if t.ggml is not None}


def dtype(value: Any) -> DType:
    """Converts a value to a type: a `DType`, a name such as "f32", "float32" or "q4_k", a type of NumPy or PyTorch.

    Raises:
        ShapeError: the value names no type.
    """
    if isinstance(value, DType):
        return value
    name = value if isinstance(value, str) else getattr(value, "__name__", None) or str(value)
    name = name.lower().removeprefix("torch.")
    found = DTYPES.get(_ALIASES.get(name, name))
    if found is None:
        hint = 'Give one of rlx.dtypes, such as rlx.dtypes.F32, or its name, such as "f32".'
        raise ShapeError(f"{value!r} is not a dtype", hint=hint)
    return found
