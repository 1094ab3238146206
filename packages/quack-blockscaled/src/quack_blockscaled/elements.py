"""Conversion between float32 and the codes of small floats, in integer arithmetic, and their packing.

Conversion saturates in every format: what is larger than the largest number becomes that, Inf too.
NaN becomes the format's NaN, or the positive largest number where there is none. Zeros, and what
rounds to zero, keep their sign.
"""

import torch
from torch import Tensor

from quack_core.errors import ShapeError

from .formats import ElementFormat, float_bits
from .philox import NOISE_BITS, PER_CALL, WORD, philox

FLOAT_MANTISSA = 23
FLOAT_BIAS = 127
FLOAT_INF = 0x7F800000
MAGNITUDE = 0x7FFFFFFF
WIDEST = 30
"""Shifts by more are not defined, or reach the sign; by so many, none of 24 bits are left."""


def encode(x: Tensor, element: ElementFormat, noise: Tensor | None = None) -> Tensor:
    """Codes of float32 numbers, uint8: to the nearest, ties to even, or stochastically.

    Stochastic rounding: the part of a step that x exceeds the number below by, cut to 16 bits, and
    the noise are added; x goes up if there is a carry. That happens with a probability of that part,
    and bits of it beyond 16 are lost.

    Args:
        x: float32.
        noise: int32 of the shape of x, random numbers of 16 bits; None: to the nearest.
    """
    bits = x.view(torch.int32)
    magnitude = (bits & MAGNITUDE).clamp(max=float_bits(element.max))
    exponent = magnitude >> FLOAT_MANTISSA
    hidden = (exponent > 0).int() << FLOAT_MANTISSA
    mantissa = (magnitude & (1 << FLOAT_MANTISSA) - 1) | hidden
    # In subnormals of the element a step stays as wide as that of its smallest normal numbers, so
    # there are more bits to drop.
    lowest = element.min_exponent + FLOAT_BIAS
    below = (lowest - exponent).clamp(min=0)
    dropped = FLOAT_MANTISSA - element.mantissa_bits + below
    steps = mantissa >> dropped.clamp(max=WIDEST)
    rest = mantissa - (steps << dropped.clamp(max=WIDEST))
    if noise is None:
        half = 1 << (dropped - 1).clamp(max=WIDEST)
        up = (rest > half) | ((rest == half) & (steps & 1 == 1))
    else:
        part = rest >> (dropped - NOISE_BITS).clamp(max=WIDEST)
        up = part + noise >= 1 << NOISE_BITS
    # A step over the last mantissa of an exponent arrives at the next one by itself.
    code = steps + up.int() + ((exponent - lowest).clamp(min=0) << element.mantissa_bits)
    code = code | ((bits < 0).int() << element.bits - 1)
    code = torch.where(bits & MAGNITUDE > FLOAT_INF, element.nan_code, code)
    return code.to(torch.uint8)


def noise(elements: int, seed: int, device: torch.device) -> Tensor:
    """16 random bits for each element of a tensor, int32, in row-major order of its shape.

    Raises:
        ShapeError: the seed is negative, or has more than 63 bits.
    """
    if not 0 <= seed < 2**63:
        raise ShapeError(f"quantize: seed is {seed}: it must be 0 to 2**63 - 1")
    calls = torch.arange(-(-elements // PER_CALL), dtype=torch.int64, device=device)
    zero = torch.zeros_like(calls)
    words = philox([calls & WORD, calls >> 32, zero, zero], (seed & WORD, seed >> 32), multiply)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).reshape(-1)[:elements].int()


def multiply(word: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of a product, int64 as its factor is."""
    product = word * by  # of 64 bits: int64 wraps, and the masks undo the sign
    return product >> 32 & WORD, product & WORD


def decode(codes: Tensor, element: ElementFormat) -> Tensor:
    """The numbers of codes, float32 and exact.

    Args:
        codes: uint8, one code in each.
    """
    values = [element.value(code) for code in range(2**element.bits)]
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes.int()]


def pack(codes: Tensor, element: ElementFormat) -> Tensor:
    """Codes side by side in bytes, along the last dimension: the first is in the lowest bits.

    Two of 4 bits fill a byte, four of 6 bits three; those of 8 bits come back as they are.

    Args:
        codes: uint8 (..., N), N a multiple of the group's elements.
    """
    elements, size = element.group
    if elements == 1:
        return codes
    groups = codes.int().unflatten(-1, (codes.shape[-1] // elements, elements))
    shifts = torch.arange(elements, dtype=torch.int32, device=codes.device) * element.bits
    whole = (groups << shifts).sum(-1, dtype=torch.int32).unsqueeze(-1)
    return (whole >> _bytes(size, codes.device) & 0xFF).to(torch.uint8).flatten(-2)


def unpack(packed: Tensor, element: ElementFormat) -> Tensor:
    """The inverse of `pack`."""
    elements, size = element.group
    if elements == 1:
        return packed
    groups = packed.int().unflatten(-1, (packed.shape[-1] // size, size))
    whole = (groups << _bytes(size, packed.device)).sum(-1, dtype=torch.int32).unsqueeze(-1)
    shifts = torch.arange(elements, dtype=torch.int32, device=packed.device) * element.bits
    return (whole >> shifts & 2**element.bits - 1).to(torch.uint8).flatten(-2)


def _bytes(size: int, device: torch.device) -> Tensor:
    """By how many bits each byte of a group is shifted."""
    return torch.arange(size, dtype=torch.int32, device=device) * 8
