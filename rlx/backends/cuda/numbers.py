"""Math functions of kernels, of f32.

The card's approximations serve where their error is far below that of f32 sums.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, pi, sqrt

from rlx.backends.cuda.code import BF16, F16, F32, F64, I32, I64, Code, Value

LOG2_E = 1 / log(2)

# erf(x) = 1 - (c0 t + c1 t^2 + ...) exp(-x^2) with t = 1 / (1 + 0.3275911 x), x >= 0, within 1.5e-7: formula 7.1.26 of
# Abramowitz and Stegun, "Handbook of Mathematical Functions".
_ERF_T = 0.3275911
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)

# tanh(x) = x + x^3 (c0 + c1 x^2 + ...), its Taylor series.
_TANH = (-1 / 3, 2 / 15, -17 / 315, 62 / 2835)
_TANH_SMALL = 0.25


def polynomial(k: Code, x: Value, coefficients: tuple[float, ...]) -> Value:
    """c0 + c1 x + c2 x^2 + ... by Horner's rule."""
    result = k.as_value(coefficients[-1], x.type)
    for c in reversed(coefficients[:-1]):
        result = k.fma(result, x, c)
    return result


def exp2(k: Code, x: Value) -> Value:
    """2^x, with a relative error of 2^-22."""
    return k.call(F32, "llvm.nvvm.ex2.approx.f", x)


def exp(k: Code, x: Value) -> Value:
    """e^x: 2^(x log2(e)), whose product is split so that large x keep their precision."""
    high = x * LOG2_E
    rest = k.fma(x, LOG2_E, -high)
    scale = k.fma(rest, log(2), 1.0)
    return exp2(k, high) * k.select(k.fabs(rest) < 1.0, scale, k.f32(1.0))


def log_(k: Code, x: Value) -> Value:
    """ln(x) of a normal x."""
    return k.call(F32, "llvm.nvvm.lg2.approx.f", x) * log(2)


def sqrt_(k: Code, x: Value) -> Value:
    """The square root, rounded correctly."""
    return k.call(F32, "llvm.sqrt.f32", x)


def rsqrt(k: Code, x: Value) -> Value:
    """1 / the square root, within 2^-22."""
    return k.call(F32, "llvm.nvvm.rsqrt.approx.f", x)


def tanh(k: Code, x: Value) -> Value:
    """tanh |x| = 1 - 2 / (e^(2 |x|) + 1), with the series near 0."""
    size, square = k.fabs(x), x * x
    large = 1.0 - 2.0 / (exp(k, k.fmin(size, 20.0) * 2.0) + 1.0)
    small = k.fma(size * square, polynomial(k, square, _TANH), size)
    found = k.select(size < _TANH_SMALL, small, large)
    kept = k.select(x < 0.0, -found, found)
    return k.select(x.is_nan(), x, kept)


def reciprocal(k: Code, x: Value) -> Value:
    """1 / x, within 2^-23; 0 of a subnormal result."""
    return k.call(F32, "llvm.nvvm.rcp.approx.ftz.f", x)


def sigmoid(k: Code, x: Value) -> Value:
    """1 / (1 + e^-x)."""
    return reciprocal(k, exp(k, -x) + 1.0)


def silu(k: Code, x: Value) -> Value:
    """x sigmoid(x); 0 where e^-x is infinite."""
    return x * sigmoid(k, x)


def gelu_tanh(k: Code, x: Value) -> Value:
    """GELU's tanh form, see `rlx.ir.meaning`."""
    inner = sqrt(2 / pi) * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1.0 + tanh(k, inner))


def gelu_erf(k: Code, x: Value) -> Value:
    """GELU's exact form."""
    z = k.fabs(x) * sqrt(0.5)
    t = 1.0 / (z * _ERF_T + 1.0)
    tail = polynomial(k, t, _ERF) * t * exp(k, -(z * z))  # 1 - erf(z)
    return k.select(x < 0.0, 0.5 * x * tail, 0.5 * x * (2.0 - tail))


def softplus(k: Code, x: Value) -> Value:
    """max(x, 0) + ln(1 + e^-|x|); the logarithm by its series where e^-|x| is small."""
    e = exp(k, -k.fabs(x))
    series = e * polynomial(k, e, (1.0, -1 / 2, 1 / 3, -1 / 4))
    found = k.fmax(x, 0.0) + k.select(e < 0.02, series, log_(k, e + 1.0))
    return k.select(x.is_nan(), x, found)


UNARY: dict[str, Callable[[Code, Value], Value]] = {
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "gelu_erf": gelu_erf,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "exp": exp,
    "neg": lambda k, x: -x,
    "softplus": softplus,
    "relu": lambda k, x: k.select(x.is_nan(), x, k.fmax(x, 0.0)),
    "sqrt": sqrt_,
}
BINARY: dict[str, Callable[[Code, Value, Value], Value]] = {
    "add": lambda k, x, y: x + y,
    "sub": lambda k, x, y: x - y,
    "mul": lambda k, x, y: x * y,
    "div": lambda k, x, y: x / y,
    "maximum": lambda k, x, y: k.select(x.is_nan(), x, k.select(y.is_nan(), y, k.fmax(x, y))),
}


def softcap(k: Code, x: Value, cap: float) -> Value:
    """cap tanh(x / cap)."""
    return tanh(k, x / cap) * cap


def clamp(k: Code, x: Value, low: float | None, high: float | None) -> Value:
    """min(max(x, low), high); NaN stays."""
    found = x if low is None else k.fmax(x, low)
    found = found if high is None else k.fmin(found, high)
    return k.select(x.is_nan(), x, found)


# cos and sin of |r| <= pi / 4 by their Taylor series, in f64.
_COS = (1.0, -1 / 2, 1 / 24, -1 / 720, 1 / 40320, -1 / 3628800)
_SIN = (1.0, -1 / 6, 1 / 120, -1 / 5040, 1 / 362880, -1 / 39916800)


def cos_sin(k: Code, angle: Value) -> tuple[Value, Value]:
    """cos and sin of an angle of any size, computed in f64."""
    wide = angle.to(F64)
    turns = k.call(F64, "llvm.rint.f64", wide * (2 / pi))
    rest = k.fma(-turns, pi / 2, wide)
    quarter = turns.to(I64).to(I32) & 3
    square = rest * rest
    c, s = polynomial(k, square, _COS), polynomial(k, square, _SIN) * rest
    swapped = (quarter & 1).equals(1)
    cos, sin = k.select(swapped, s, c), k.select(swapped, c, s)
    cos = k.select(((quarter + 1) & 2).equals(2), -cos, cos)
    sin = k.select((quarter & 2).equals(2), -sin, sin)
    return cos.to(F32), sin.to(F32)


def rounded(x: Value, out: str) -> Value:
    """A result as it is stored: f32, or rounded to bf16."""
    return x.to("bfloat") if out == "bf16" else x


def bf16_parts(k: Code, x: Value) -> tuple[Value, Value]:
    """x as a sum of two bf16 numbers, bits as i16 each, within 2^-17 of x."""
    high = x.to("bfloat")
    low = (x - high.to(F32)).to("bfloat")
    return high.bits("i16"), low.bits("i16")


def halves(word: Value) -> tuple[Value, Value]:
    """Two bf16 as f32."""
    return (word << 16).bits(F32), (word & -0x10000).bits(F32)


def rounded_pair(k: Code, x: Value, y: Value, kind: str) -> Value:
    """Two f32 as a register of two bf16 or f16; x is in the low half."""
    if k.features.bf16:
        return k.pure_assembly(I32, f"cvt.rn.{kind}x2.f32 $0, $1, $2;", "=r,f,f", y, x)
    return k.vector([each.to(F16 if kind == "f16" else BF16) for each in (x, y)]).bits(I32)


def fma_pairs(k: Code, a: Value, b: Value, c: Value) -> Value:
    """a b + c of two bf16 each, where the results are bf16 without rounding."""
    if k.features.bf16:
        return k.pure_assembly(I32, "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", a, b, c)
    low, high = (k.fma(*each).bits(I32) for each in zip(*map(halves, (a, b, c)), strict=True))
    return k.bytes_of(low, high, 0x7632)


def pair_parts(k: Code, x: Value, y: Value, kind: str, count: int = 2) -> list[Value]:
    """Two f32 as a sum of `count` registers, each of two numbers of bf16 or f16; x is in the low half.

    Two parts of bf16 are within 2^-17, three within 2^-25; two parts of f16 within 2^-22 and 2^-25, up to 65,504.
    """
    found = []
    for i in range(count):
        found.append(rounded_pair(k, x, y, kind))
        if i + 1 == count:
            break
        if kind == "bf16":
            kept = halves(found[-1])
        else:
            first, second = k.lanes(found[-1].bits("<2 x half>"))
            kept = first.to(F32), second.to(F32)
        x, y = x - kept[0], y - kept[1]
    return found
