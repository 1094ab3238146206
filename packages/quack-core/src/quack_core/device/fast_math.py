"""Arithmetic on single float32 values where the default is slow or imprecise."""

import math

import cutlass.cute as cute
from cutlass import Float32

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@cute.jit
def rsqrt(x: Float32) -> Float32:
    """1 / sqrt(x) to about one ulp: the hardware's approximation (2 ulp) and one Newton step.

    As in IEEE arithmetic, infinity gives 0, 0 gives infinity, NaN and negative numbers give NaN.
    Small numbers are scaled first, because the approximation takes subnormals for 0.
    """
    small = x < Float32(2.0**-100)
    v = x * Float32(2.0**60) if small else x
    y = cute.math.rsqrt(v, fastmath=True)
    residual = Float32(1.0) - (v * y) * y
    refined = y + (y * Float32(0.5)) * residual
    result = refined if v > Float32(0.0) and v < Float32(math.inf) else y
    return result * Float32(2.0**30) if small else result


def exp2(x: Float32) -> Float32:
    """2 ** x by the hardware approximation (2 ulp); subnormal results are flushed to 0."""
    return cute.math.exp2(x, fastmath=True)


def exp(x: Float32) -> Float32:
    """e ** x as exp2(x * log2(e)); scale by ``LOG2_E`` beforehand where a factor is multiplied anyway."""
    return exp2(x * Float32(LOG2_E))


def log2(x: Float32) -> Float32:
    """Logarithm to base 2 by the hardware approximation."""
    return cute.math.log2(x, fastmath=True)


def log(x: Float32) -> Float32:
    """Natural logarithm through the base-2 approximation."""
    return log2(x) * Float32(LN_2)


def reciprocal(x: Float32) -> Float32:
    """1 / x by the hardware approximation (1 ulp); not for subnormal x."""
    return cute.arch.rcp_approx(x)
