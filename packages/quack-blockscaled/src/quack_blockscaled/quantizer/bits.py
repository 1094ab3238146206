"""Scales that are powers of two and elements of few bits, in arithmetic that kernels and tests share.

Words are float32 numbers, or four codes, as 32-bit integers of any type that has the operators of
one. `Arithmetic` has what is no operator.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..formats import E3M2, E4M3, E5M2, ElementFormat, float_bits
from ..philox import NOISE_BITS

MANTISSA = 23
FRACTION = (1 << MANTISSA) - 1
INF = 0x7F800000
NAN = 0x7FC00000
MAGNITUDE = 0x7FFFFFFF
SIGN = -1 << 31
SUBNORMAL = 1 << MANTISSA - 1
"""2**-127 in float32."""
LOST = 255
"""The NaN of e8m0."""
GUARD = 7
"""Bits of a sum above `NOISE_BITS`: those of the steps that a number is away from zero."""


@dataclass(frozen=True)
class Arithmetic:
    """What words of one type need besides operators.

    Args:
        where: ``where(condition, a, b)``, a selection.
        as_float, as_word: the same bits as a float32, or as a word.
        least: the smaller float32 number; of a NaN and a number the number.
        add_down: the magnitude of a float32 number plus a positive one, rounded towards zero.
    """

    where: Callable[[Any, Any, Any], Any]
    as_float: Callable[[Any], Any]
    as_word: Callable[[Any], Any]
    least: Callable[[Any, float], Any]
    add_down: Callable[[Any, Any], Any]

    def at_least(self, word: Any, bound: int) -> Any:
        """The larger one."""
        return self.where(word < bound, word * 0 + bound, word)

    def at_most(self, word: Any, bound: int) -> Any:
        """The smaller one."""
        return self.where(word > bound, word * 0 + bound, word)


def e8m0(amax: Any, element: ElementFormat, rule: str, on: Arithmetic) -> Any:
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
        code = on.where(fraction >= least, code + 1, code)
    code = on.at_most(on.at_least(code, 0), LOST - 1)
    return on.where(amax >= INF, code * 0 + LOST, code)


def inverse(code: Any, on: Arithmetic) -> Any:
    """2**(127 - code), a float32's bits; NaN of the code of NaN."""
    bits = (254 - code) << MANTISSA
    bits = on.where(code > 253, bits * 0 + SUBNORMAL, bits)
    return on.where(code > 254, bits * 0 + NAN, bits)


def step(code: Any, on: Arithmetic) -> Any:
    """2**(code - 127), a float32's bits; NaN of the code of NaN."""
    bits = on.where(code < 1, code * 0 + SUBNORMAL, code << MANTISSA)
    return on.where(code > 254, bits * 0 + NAN, bits)


def carrier(element: ElementFormat) -> ElementFormat:
    """The format of 8 bits by whose conversion an element is made where it has none of its own.

    Numbers times `shrink` have the same exponents and subnormals in it; its mantissa is as long, or
    longer.
    """
    return E5M2 if element in (E5M2, E3M2) else E4M3


def shrink(element: ElementFormat) -> float:
    """A power of two: between numbers of an element and those of its carrier."""
    return 2.0 ** (element.bias - carrier(element).bias)


def clipped(word: Any, element: ElementFormat, on: Arithmetic) -> Any:
    """The magnitude of a number of the carrier's range, no larger than the largest of the element;
    NaN becomes that."""
    return on.as_word(on.least(on.as_float(word & MAGNITUDE), element.max * shrink(element)))


def nearest(word: Any, element: ElementFormat, on: Arithmetic) -> Any:
    """The magnitude of a number of the carrier's range rounded to one of the element, ties to even.

    The step is that of its exponent. Added to 2**23 steps, it is rounded to whole ones by the
    addition itself.
    """
    magic = _steps(word, MANTISSA, element, on)
    return on.as_word(on.as_float(word & MAGNITUDE) + magic - magic)


def stochastic(word: Any, noise: Any, element: ElementFormat, on: Arithmetic) -> Any:
    """As `nearest`, but up if noise and the first 16 bits below a step carry.

    Args:
        noise: 16 random bits; of NaN 0.
    """
    magic = _steps(word, GUARD, element, on)
    total = on.as_word(on.add_down(on.as_float(word), magic)) + noise
    return on.as_word(on.as_float(total & -1 << NOISE_BITS) - magic)


def signed(magnitude: Any, word: Any) -> Any:
    """A magnitude with the sign of a number."""
    return magnitude | (word & SIGN)


def narrowed(word: Any, element: ElementFormat) -> Any:
    """Four codes of the carrier as codes of the element, in the low bits of each byte.

    The carrier's NaN becomes the largest number.
    """
    above = element.exponent_bits + element.mantissa_bits
    low, top = (1 << above) - 1, 1 << above
    shift = carrier(element).mantissa_bits - element.mantissa_bits
    return (word >> shift & _each(low)) | (word >> 7 - above & _each(top))


def widened(word: Any, element: ElementFormat) -> Any:
    """The inverse: four codes in the low bits of each byte as codes of the carrier.

    Args:
        word: bits above a code, but below the next byte, are 0.
    """
    above = element.exponent_bits + element.mantissa_bits
    shift = carrier(element).mantissa_bits - element.mantissa_bits
    return ((word & _each((1 << above) - 1)) << shift) | ((word & _each(1 << above)) << 7 - above)


def pairs(even: Any, odd: Any) -> Any:
    """Eight codes of 4 bits side by side.

    Args:
        even, odd: elements 0, 2, 4, 6 and 1, 3, 5, 7 of them, as of `narrowed`.
    """
    return even | odd << 4


def unpaired(word: Any) -> tuple[Any, Any]:
    """The inverse: the even and the odd ones of eight codes of 4 bits, as of `narrowed`."""
    return word & _each(15), word >> 4 & _each(15)


def quads(word: Any) -> Any:
    """Four codes of 6 bits, as of `narrowed`, side by side in the low 24 bits."""
    word = (word & 0x003F003F) | (word >> 2 & 0x0FC00FC0)
    return (word & 0xFFF) | (word >> 4 & 0xFFF000)


def unquads(word: Any) -> Any:
    """The inverse; what lies above the low 24 bits does not matter."""
    word = (word & 0xFFF) | ((word & 0xFFF000) << 4)
    return (word & 0x003F003F) | ((word & 0x0FC00FC0) << 2)


def joined(groups: list[Any]) -> list[Any]:
    """Four words of 24 bits in three of 32."""
    a, b, c, d = groups
    return [a | b << 24, (b >> 8) | c << 16, (c >> 16) | d << 8]


def _steps(word: Any, exponent: int, element: ElementFormat, on: Arithmetic) -> Any:
    """2**exponent steps of an element at a number; of NaN those of the smallest."""
    up = exponent - element.mantissa_bits << MANTISSA
    least = float_bits(2.0**element.min_exponent * shrink(element))
    return on.as_float(on.at_least((word & INF) + up, least + up))


def _each(byte: int) -> int:
    """A byte four times, none of which reaches the sign."""
    return byte * 0x01010101
