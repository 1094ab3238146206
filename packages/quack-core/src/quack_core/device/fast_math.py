"""Arithmetic on single float32 values where the default is slow or imprecise."""

import math

import cutlass.cute as cute
from cutlass import Float32

Values = cute.TensorSSA | Float32
"""A vector of float32 numbers, or one."""
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
LN_2_HIGH = 0.693359375
"""So few bits that products with small integers are exact."""
LN_2_LOW = LN_2 - LN_2_HIGH
INTEGERS = 1.5 * 2.0**23
"""Float32 of this size has no bits behind the point."""
EXP_COEFFICIENTS = (
    0.5,
    0.16666576266288757,
    0.041666463017463684,
    0.008363235741853714,
    0.0013933733571320772,
)
"""Of (e ** r - 1 - r) / r^2, lowest first, for |r| <= ln 2 / 2."""


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


@cute.jit
def rsqrt_rest(x: Float32, y: Float32) -> Float32:
    """What ``y = rsqrt(x)`` lacks of 1 / sqrt(x), to some bits; 0 where x or y is infinite."""
    product = x * y
    residual = cute.math.fma(-product, y, Float32(1.0)) - cute.math.fma(x, y, -product) * y
    rest = (y * Float32(0.5)) * residual
    return rest if x > Float32(0.0) and x < Float32(math.inf) else Float32(0.0)


def exp2(x: Float32) -> Float32:
    """2 ** x by the hardware approximation (2 ulp); subnormal results are flushed to 0."""
    return cute.math.exp2(x, fastmath=True)


def exp(x: Float32) -> Float32:
    """e ** x as exp2(x * log2(e)); scale by ``LOG2_E`` beforehand where a factor is multiplied anyway."""
    return exp2(x * Float32(LOG2_E))


def exp_rounded(x: Values) -> Values:
    """e ** x, x <= 0, to little more than half an ulp; results below 2 ** -126.5 are 0."""
    t, power = exp_parts(x)
    return cute.math.fma(power, t, power)


def exp_times(x: Values, factor: Float32, rest: Float32) -> Values:
    """e ** x * (factor + rest), x <= 0, rounded once: also to little more than half an ulp."""
    t, power = exp_parts(x)
    factor, rest = _like(x, factor), _like(x, rest)
    beyond = cute.math.fma(t, factor, cute.math.fma(t, rest, rest))
    return (factor + beyond) * power


def exp_parts(x: Values) -> tuple[Values, Values]:
    """(t, p): e ** x = (1 + t) * p, x <= 0, p a power of two or, where e ** x < 2 ** -126.5, 0.

    x = n * ln 2 + r with |r| <= ln 2 / 2, p = 2 ** n, and e ** r = 1 + r + r^2 * q(r), where the polynomial q
    (least squares at Chebyshev nodes) is off by 2 ** -26 of the result.
    """

    x = cute.math.max(x, _like(x, -105.0), propagate_nan=True)  # no inf - inf; 2 ** n is 0 there
    n = fma(x, LOG2_E, INTEGERS) - INTEGERS  # rounded to an integer
    r = fma(n, -LN_2_LOW, fma(n, -LN_2_HIGH, x))
    q = _like(x, EXP_COEFFICIENTS[-1])
    for coefficient in EXP_COEFFICIENTS[-2::-1]:
        q = fma(q, r, coefficient)
    return fma(q, r * r, r), cute.math.exp2(n, fastmath=True)


def fma(a: Values | float, b: Values | float, c: Values | float) -> Values:
    """a * b + c, rounded once; numbers stand for vectors of them where one operand is a vector."""
    given = (a, b, c)
    vectors = [v for v in given if isinstance(v, cute.TensorSSA)]
    like = vectors[0] if vectors else Float32(0.0)
    return cute.math.fma(*(v if isinstance(v, cute.TensorSSA) else _like(like, v) for v in given))


def _like(x: Values, value: float | Float32) -> Values:
    """A number as often as x has elements."""
    if isinstance(x, cute.TensorSSA):
        return cute.full_like(x, value)
    return Float32(value)


def divide(a: cute.TensorSSA, b: Float32, inverse: Float32) -> cute.TensorSSA:
    """a / b to little more than half an ulp, ``inverse`` being 1 / b to an ulp."""
    below, factor = cute.full_like(a, 0.0) - b, cute.full_like(a, 0.0) + inverse
    quotient = a * inverse
    return cute.math.fma(cute.math.fma(below, quotient, a), factor, quotient)


def log2(x: Float32) -> Float32:
    """Logarithm to base 2 by the hardware approximation."""
    return cute.math.log2(x, fastmath=True)


def log(x: Float32) -> Float32:
    """Natural logarithm through the base-2 approximation."""
    return log2(x) * Float32(LN_2)


def log_rounded(x: Float32, rest: Float32) -> Float32:
    """Natural logarithm of x + rest, x >= 1, to little more than half an ulp.

    A Newton step from the approximation: by what the number exceeds e ** y.
    """
    y = product(log2(x), Float32(LN_2))
    t, power = exp_parts(-y)
    near_one = product(x, power)
    excess = cute.math.fma(near_one, t, near_one - Float32(1.0))
    return y + cute.math.fma(rest, power, excess)


def reciprocal(x: Float32) -> Float32:
    """1 / x by the hardware approximation (1 ulp); not for subnormal x."""
    return cute.arch.rcp_approx(x)


def inverse(x: Float32) -> Float32:
    """1 / x to half an ulp and a bit: a Newton step more. NaN for 0, inf and subnormal x."""
    first = reciprocal(x)
    return cute.math.fma(first, cute.math.fma(-x, first, Float32(1.0)), first)


def inverse_rest(x: Float32, rest: Float32, y: Float32) -> Float32:
    """What ``y = inverse(x)`` lacks of 1 / (x + rest), to some bits."""
    residual = cute.math.fma(-rest, y, cute.math.fma(-x, y, Float32(1.0)))
    return product(residual, y)


def two_sum(a: Float32, b: Float32) -> tuple[Float32, Float32]:
    """The rounded sum and what it lacks, exactly; the same bits in both orders.

    Source: Knuth, The Art of Computer Programming, volume 2, section 4.2.2.
    """
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def fast_two_sum(a: Float32, b: Float32) -> tuple[Float32, Float32]:
    """The same for |a| >= |b|.

    Source: Dekker, A Floating-Point Technique for Extending the Available Precision, 1971.
    """
    total = a + b
    return total, b - (total - a)


def product(a: Float32, b: Float32) -> Float32:
    """a * b rounded by itself; -0 becomes 0.

    The compiler may fuse a plain product with an addition that follows, in one kernel and not in
    another: where bits must agree, between kernels or between lanes, it must not.
    """
    return cute.math.fma(a, b, Float32(0.0))
