"""Scales that are powers of two, in integer arithmetic that kernels and tests share.

Words are float32 numbers as 32-bit integers, of any type that has the operators of one. ``where`` is
``where(condition, a, b)`` of that type: a selection.
"""

import math
from collections.abc import Callable
from typing import Any

from ..formats import ElementFormat

Where = Callable[[Any, Any, Any], Any]

MANTISSA = 23
FRACTION = (1 << MANTISSA) - 1
INF = 0x7F800000
NAN = 0x7FC00000
SUBNORMAL = 1 << MANTISSA - 1
"""2**-127 in float32."""
LOST = 255
"""The NaN of e8m0."""


def e8m0(amax: Any, element: ElementFormat, rule: str, where: Where) -> Any:
    """The code of a block's scale, as of `scales.encode`.

    Subnormal magnitudes count as 2**-127 at most: their scale is the smallest anyway.

    Args:
        amax: largest magnitude of the block, not negative; NaN above all.
        rule: one of `scales.RULES`.
    """
    max_fraction, max_exponent = math.frexp(element.max)
    fraction = amax & FRACTION
    code = (amax >> MANTISSA) + (1 - max_exponent)
    least = {
        "floor": None,
        "rceil": int((2 * max_fraction - 1) * 2**MANTISSA) + 1,
        "ceil": 1,
        "even": 2**MANTISSA - 2 ** (MANTISSA - 1 - element.mantissa_bits),
    }[rule]
    if least is not None:  # of the mantissas from which on the next power of two is taken
        code = where(fraction >= least, code + 1, code)
    code = where(code < 0, code * 0, code)
    code = where(code > LOST - 1, code * 0 + (LOST - 1), code)
    return where(amax >= INF, code * 0 + LOST, code)


def inverse(code: Any, where: Where) -> Any:
    """2**(127 - code), a float32's bits; NaN of the code of NaN."""
    bits = (254 - code) << MANTISSA
    bits = where(code > 253, bits * 0 + SUBNORMAL, bits)
    return where(code > 254, bits * 0 + NAN, bits)
