"""Keys: integers ordered as the elements of a row are, by value and then by index."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint16, Uint32, Uint64

from quack_core import dtypes

from .spec import key_bytes

_INFINITY = {"float32": 0x7F800000, "bfloat16": 0x7F800000, "float16": 0x7C000000}
"""Bits of +inf in the upper end of a word; of a NaN those behind the sign are larger."""


class Keys:
    """Makes keys of values at ``places`` places: the elements of a row, or groups of them.

    The upper bits are the value, such that larger values are larger integers; NaN is the largest,
    and zeros are equal. The lower bits are all index bits minus the place. So keys of a row are all
    different, and none is 0, which stands for no element.

    Args:
        x: dtype of the values.
    """

    def __init__(self, x: str, places: int):
        self.x, self.index_bits = x, (places - 1).bit_length()
        self.dtype = Uint32 if key_bytes(x, places) == 4 else Uint64
        self.mask = (1 << self.index_bits) - 1

    def of(self, registers: cute.Tensor, i: int, place: Int32):
        """Key of register ``i``, which comes from ``place``."""
        width = dtypes.width(self.x)
        value = ordered(bits(registers, i), _INFINITY[self.x]) >> (32 - width)
        index = ~Uint32(place) & Uint32(self.mask)
        return (self.dtype(value) << self.index_bits) | self.dtype(index)

    def place(self, key) -> Int32:
        """Where a key comes from."""
        return Int32(~Uint32(key) & Uint32(self.mask))


def bits(registers: cute.Tensor, i: int) -> Uint32:
    """The bits of a floating-point register, at the upper end of a word."""
    if registers.element_type.width == 32:
        return cute.recast_tensor(registers, Uint32)[i]
    return Uint32(cute.recast_tensor(registers, Uint16)[i]) << 16


@cute.jit
def ordered(pattern: Uint32, infinity: cutlass.Constexpr[int]) -> Uint32:
    """Floating-point bits as an integer of the same order; NaN is the largest, -0 equals 0.

    The bits of negative numbers but the sign are flipped, of the others the sign.
    """
    flip = Uint32(0x80000000)
    if pattern > flip:  # a sign, and not of zero
        flip = Uint32(0x7FFFFFFF)
    magnitude = pattern & Uint32(0x7FFFFFFF)
    found = magnitude ^ flip
    if magnitude > Uint32(infinity):
        found = Uint32(0xFFFFFFFF)
    return found


@cute.jit
def choose(condition: Boolean, a, b):
    """``a`` if the condition holds, else ``b``."""
    return a if condition else b
