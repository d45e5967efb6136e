"""Math functions of tile kernels on 16 f32 lanes, such as exp and tanh, approximated by polynomials.

The constants `*_ERROR` bound the errors. All coefficients are minimax fits (Remez exchange in float64, rounded to f32)
made for this file. NaN stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from llvmlite import ir

from rlx.backends.cpu.tiles import I32X16, Emitter, mangle

# Upper bounds of the errors, measured against float64 over all magnitudes and rounded up.
#: |exp(x) - e^x| <= EXP_ERROR * e^x, for results that are not subnormal.
EXP_ERROR = 1.2e-7
#: The same for `exp2_of_few_bits` and 2^x.
FEW_BITS_ERROR = 2.8e-6
#: |tanh(x) error| <= TANH_ERROR * |tanh(x)|.
TANH_ERROR = 2.5e-7
#: |sigmoid(x) error| <= SIGMOID_ERROR * sigmoid(x), for results that are not subnormal.
SIGMOID_ERROR = 2e-7
#: |silu(x) error| <= SILU_ERROR * |silu(x)|, for x >= -88. For smaller x, |silu(x)| is below 1e-36 and the result is 0.
SILU_ERROR = 2.5e-7
#: |gelu(x) error| <= GELU_ERROR * |x| for both forms. It is the error of the factor of x, a probability.
GELU_ERROR = 3e-7
#: |softplus(x) error| <= SOFTPLUS_ERROR * softplus(x), for results that are not subnormal.
SOFTPLUS_ERROR = 3e-7

# e^r = 1 + r + r^2 (c0 + c1 r + ...) for |r| <= ln(2) / 2.
_EXP = (0.5, 0.16666512191295624, 0.0416661873459816, 0.008369598537683487, 0.0013951719738543034)
# 2^r for 0 <= r <= 1, by the relative error.
_EXP2 = (1.0000026226043701, 0.6930038332939148, 0.2414427548646927, 0.052011460065841675, 0.013534167781472206)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # the upper part has 9 bits, so n times it is exact
_LOG2_E = 1 / math.log(2)
_ROUND = 12582912.0  # 1.5 * 2^23: adding it rounds to whole numbers

# ln(1 + u) = d + d^3 (c0 + c1 d^2 + ...) with d = u / (1 + u / 2), 0 <= u <= 1: twice the series of atanh(d / 2).
_LOG = (0.08333301544189453, 0.01250678300857544, 0.0021874229423701763, 0.0005473660421557724)

# P(N(0, 1) > a) = e^(-a^2 / 2) (c0 + c1 t + ...) with t = 1 / (1 + a / 4), 0 <= a <= 13.
_TAIL = (
    -2.5671337425592355e-05, 0.10030584037303925, 0.09419603645801544, 0.12443319708108902, -0.02857908234000206,
    0.31964701414108276, -0.35163071751594543, 0.40860670804977417, -0.20196928083896637, 0.03501596674323082,
)  # fmt: skip


def polynomial(e: Emitter, x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
    """c0 + c1 x + c2 x^2 + ... by Horner's rule."""
    result = e.f32(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = e.fma(result, x, e.f32(c))
    return result


def exp(e: Emitter, x: ir.Value) -> ir.Value:
    """e^x: 0 below -104, infinity above 88.73."""
    n, rest = _exp_parts(e, clamp(e, x, -104.0, 89.0))
    return e.scale_by_power(e.b.fadd(rest, e.f32(1.0)), n)


def exp2_of_few_bits(e: Emitter, x: ir.Value) -> ir.Value:
    """2^x for x below 128, within `FEW_BITS_ERROR`, for results that are rounded to bf16 anyway; 0 below -126."""
    n, rest = e.isa.floor_and_rest(e, x)
    return _from(e, -126.0, x, e.scale_by_power(polynomial(e, rest, _EXP2), n))


def exp_of_negative(e: Emitter, x: ir.Value) -> ir.Value:
    """e^x for x <= 0, and 0 below -87.3: like `exp`, without subnormal results."""
    n, rest = _exp_parts(e, x)
    return _from(e, -87.3, x, e.scale_by_power(e.b.fadd(rest, e.f32(1.0)), n))


def tanh(e: Emitter, x: ir.Value) -> ir.Value:
    """tanh(x) from tanh |x| = m / (m + 2) with m = e^(2 |x|) - 1. m is computed without cancellation for small x."""
    sign = e.b.and_(e.b.bitcast(x, I32X16), e.i32(-0x80000000))
    size = e.b.bitcast(e.b.xor(e.b.bitcast(x, I32X16), sign), x.type)
    # Beyond 9.02 the result rounds to 1.
    doubled = clamp(e, e.b.fmul(size, e.f32(2.0)), 0.0, 20.0)
    n, rest = _exp_parts(e, doubled)
    power = e.scale_by_power(e.f32(1.0), n)
    m = e.fma(power, rest, e.b.fsub(power, e.f32(1.0)))
    result = e.b.fdiv(m, e.b.fadd(m, e.f32(2.0)))
    return e.b.bitcast(e.b.or_(e.b.bitcast(result, I32X16), sign), x.type)


def sigmoid(e: Emitter, x: ir.Value) -> ir.Value:
    """1 / (1 + e^-x)."""
    return e.b.fdiv(e.f32(1.0), _one_plus_exp_of_minus(e, x))


def silu(e: Emitter, x: ir.Value) -> ir.Value:
    """x * sigmoid(x)."""
    return e.b.fdiv(x, _one_plus_exp_of_minus(e, x))


def gelu_tanh(e: Emitter, x: ir.Value) -> ir.Value:
    """x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    twice = 2 * math.sqrt(2 / math.pi)
    inner = e.fma(e.b.fmul(x, x), e.f32(twice * 0.044715), e.f32(twice))
    return e.b.fdiv(x, _one_plus_exp_of_minus(e, e.b.fmul(x, inner)))


def gelu_erf(e: Emitter, x: ir.Value) -> ir.Value:
    """x * P(N(0, 1) < x) = x / 2 * (1 + erf(x / sqrt(2)))."""
    # Beyond 12.5 the tail is below 1e-35 and no longer affects the result. The clamp avoids slow subnormals.
    size = clamp(e, absolute(e, x), 0.0, 12.5)
    t = e.b.fdiv(e.f32(1.0), e.fma(size, e.f32(0.25), e.f32(1.0)))
    bell = exp(e, e.b.fmul(e.b.fmul(size, size), e.f32(-0.5)))
    tail = e.b.fmul(bell, polynomial(e, t, _TAIL))
    below = e.b.select(e.b.fcmp_ordered("<", x, e.f32(0.0)), tail, e.b.fsub(e.f32(1.0), tail))
    return e.b.fmul(x, below)


def softplus(e: Emitter, x: ir.Value) -> ir.Value:
    """ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|). This form cannot overflow, and equals e^x for very negative x."""
    u = exp(e, e.b.fneg(absolute(e, x)))
    d = e.b.fdiv(u, e.fma(u, e.f32(0.5), e.f32(1.0)))
    square = e.b.fmul(d, d)
    return e.b.fadd(relu(e, x), e.fma(e.b.fmul(d, square), polynomial(e, square, _LOG), d))


def relu(e: Emitter, x: ir.Value) -> ir.Value:
    """max(x, 0); NaN stays NaN."""
    return clamp(e, x, 0.0)


def sqrt(e: Emitter, x: ir.Value) -> ir.Value:
    """The square root, correctly rounded; NaN of negative numbers."""
    return e.call(f"llvm.sqrt.{mangle(x.type)}", x.type, [x])


def maximum(e: Emitter, x: ir.Value, y: ir.Value) -> ir.Value:
    """Lanewise maximum; NaN where either is NaN."""
    return e.b.select(e.b.fcmp_unordered("uno", x, x), x, e.max(x, y))


def softcap(e: Emitter, x: ir.Value, cap: float) -> ir.Value:
    """cap * tanh(x / cap)."""
    return e.b.fmul(tanh(e, e.b.fmul(x, e.f32(1 / cap))), e.f32(cap))


def absolute(e: Emitter, x: ir.Value) -> ir.Value:
    """|x|."""
    return e.b.bitcast(e.b.and_(e.b.bitcast(x, I32X16), e.i32(0x7FFFFFFF)), x.type)


def clamp(e: Emitter, x: ir.Value, low: float | None = None, high: float | None = None) -> ir.Value:
    """x within [low, high]; None does not bound, NaN stays NaN."""
    x = x if low is None else e.max(e.f32(low), x)
    return x if high is None else e.min(e.f32(high), x)


def _exp_parts(e: Emitter, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(n, r') with integer n and e^x = 2^n (1 + r'), by Cody and Waite's two-step reduction x = n ln(2) + r."""
    n = e.b.fsub(e.fma(x, e.f32(_LOG2_E), e.f32(_ROUND)), e.f32(_ROUND))
    r = e.fma(n, e.f32(-_LN2_LOW), e.fma(n, e.f32(-_LN2_HIGH), x))
    return n, e.fma(e.b.fmul(r, r), polynomial(e, r, _EXP), r)


def _from(e: Emitter, least: float, x: ir.Value, value: ir.Value) -> ir.Value:
    """`value` where x is at least `least` or NaN, else 0.

    AVX-512 leaves out the other lanes in the last instruction of `value`. A subnormal result takes some processors 150
    cycles, and the weight of every masked position would be one.
    """
    return e.b.select(e.b.fcmp_unordered(">=", x, e.f32(least)), value, e.f32(0.0))


def _one_plus_exp_of_minus(e: Emitter, x: ir.Value) -> ir.Value:
    return e.b.fadd(e.f32(1.0), exp(e, e.b.fneg(x)))


#: The functions of one argument, by the names that kernels take.
UNARY: dict[str, Callable[[Emitter, ir.Value], ir.Value]] = {
    "exp": exp,
    "tanh": tanh,
    "sigmoid": sigmoid,
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "gelu_erf": gelu_erf,
    "softplus": softplus,
    "relu": relu,
    "sqrt": sqrt,
}
