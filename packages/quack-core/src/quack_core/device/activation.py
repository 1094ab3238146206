"""Activation functions of one float32 number, for epilogues; the definitions are those of torch."""

import math
from collections.abc import Callable

import cutlass.cute as cute
from cutlass import Float32

from . import fast_math

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
CUBIC = 0.044715
QUICK = 1.702
TANH_COEFFICIENTS = (
    -0.3333294093608856,
    0.13320642709732056,
    -0.05266802757978439,
    0.016432009637355804,
)
"""Of (tanh x - x) / x^3 in powers of x^2, lowest first, for |x| < 0.55; off by 2 ** -24 of tanh x."""
TANH_NEAR = 0.55


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + e ** -x)."""
    return fast_math.reciprocal(Float32(1.0) + fast_math.exp(-x))


@cute.jit
def tanh(x: Float32) -> Float32:
    """1 - 2 / (1 + e ** 2x); near 0, where that would cancel, a polynomial."""
    far = Float32(1.0) - Float32(2.0) * fast_math.reciprocal(Float32(1.0) + fast_math.exp(x + x))
    square = x * x
    q = Float32(TANH_COEFFICIENTS[-1])
    for coefficient in TANH_COEFFICIENTS[-2::-1]:
        q = cute.math.fma(q, square, Float32(coefficient))
    near = cute.math.fma(q * square, x, x)
    return near if square < Float32(TANH_NEAR**2) else far


def identity(x: Float32) -> Float32:
    """x"""
    return x


@cute.jit
def relu(x: Float32) -> Float32:
    """max(x, 0); NaN stays."""
    return max(x, Float32(0.0))


def relu_sq(x: Float32) -> Float32:
    """max(x, 0) squared."""
    y = relu(x)
    return y * y


def silu(x: Float32) -> Float32:
    """x * sigmoid(x)"""
    return x * sigmoid(x)


def quick_gelu(x: Float32) -> Float32:
    """x * sigmoid(1.702 x)"""
    return x * sigmoid(Float32(QUICK) * x)


def gelu_tanh(x: Float32) -> Float32:
    """x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), which is torch's ``approximate="tanh"``."""
    inner = x * cute.math.fma(x * x, Float32(CUBIC), Float32(1.0))
    return x * sigmoid(Float32(2 * SQRT_2_OVER_PI) * inner)


def gelu(x: Float32) -> Float32:
    """x * (1 + erf(x / sqrt 2)) / 2"""
    half = Float32(0.5) * x
    return cute.math.fma(half, cute.math.erf(x * Float32(math.sqrt(0.5))), half)


FUNCTIONS: dict[str, Callable[[Float32], Float32]] = {
    "identity": identity,
    "relu": relu,
    "relu_sq": relu_sq,
    "silu": silu,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
}
"""By name."""


def _one(x: Float32) -> Float32:
    return Float32(1.0)


@cute.jit
def relu_grad(x: Float32) -> Float32:
    """1 where x > 0, else 0."""
    return Float32(1.0) if x > Float32(0.0) else Float32(0.0)


def relu_sq_grad(x: Float32) -> Float32:
    """2 max(x, 0)"""
    return Float32(2.0) * relu(x)


def sigmoid_grad(x: Float32) -> Float32:
    """s (1 - s)"""
    s = sigmoid(x)
    return s * sigmoid(-x)


def tanh_grad(x: Float32) -> Float32:
    """1 - tanh(x)^2, as 4 s(2x) s(-2x): nothing cancels."""
    return Float32(4.0) * sigmoid_grad(x + x)


def silu_grad(x: Float32) -> Float32:
    """s (1 + x (1 - s))"""
    return sigmoid(x) * cute.math.fma(x, sigmoid(-x), Float32(1.0))


def quick_gelu_grad(x: Float32) -> Float32:
    """That of silu at 1.702 x."""
    return silu_grad(Float32(QUICK) * x)


def gelu_tanh_grad(x: Float32) -> Float32:
    """s(u) (1 + x u' s(-u)), u = 2 sqrt(2 / pi) (x + 0.044715 x^3)"""
    square, factor = x * x, Float32(2 * SQRT_2_OVER_PI)
    u = factor * (x * cute.math.fma(square, Float32(CUBIC), Float32(1.0)))
    slope = factor * cute.math.fma(square, Float32(3 * CUBIC), Float32(1.0))
    return sigmoid(u) * cute.math.fma(x * slope, sigmoid(-u), Float32(1.0))


def gelu_grad(x: Float32) -> Float32:
    """(1 + erf(x / sqrt 2)) / 2 + x e ** (-x^2 / 2) / sqrt(2 pi)"""
    below = cute.math.fma(Float32(0.5), cute.math.erf(x * Float32(math.sqrt(0.5))), Float32(0.5))
    density = fast_math.exp(Float32(-0.5) * x * x) * Float32(1 / math.sqrt(2 * math.pi))
    return cute.math.fma(x, density, below)


DERIVATIVES: dict[str, Callable[[Float32], Float32]] = {
    "identity": _one,
    "relu": relu_grad,
    "relu_sq": relu_sq_grad,
    "silu": silu_grad,
    "sigmoid": sigmoid_grad,
    "tanh": tanh_grad,
    "gelu": gelu_grad,
    "gelu_tanh": gelu_tanh_grad,
    "quick_gelu": quick_gelu_grad,
}
"""By name."""
