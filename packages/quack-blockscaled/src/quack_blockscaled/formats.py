"""Block-scaled formats: frozen records of an element, a scale and the block that shares it.

Source: OCP Microscaling Formats (MX) v1.0 for the MX formats and their elements; the PTX ISA for
ue4m3 scales of 16 elements; fp8 in blocks of 128 as in the report on DeepSeek-V3.
"""

import struct
from dataclasses import dataclass

from quack_core.errors import DTypeError, ShapeError

# bits of an element: (elements, bytes) that a whole number of bytes holds
_GROUPS = {4: (2, 1), 6: (4, 3), 8: (1, 1)}


@dataclass(frozen=True)
class ElementFormat:
    """A small float: a sign, then exponent, then mantissa; subnormals below the smallest exponent.

    Args:
        name: as in ``"e4m3"``.
        exponent_bits, mantissa_bits: with the sign they are 4, 6 or 8 bits.
        bias: of the exponent; a normal number is ``1.mantissa * 2**(exponent - bias)``.
        has_inf: the largest exponent holds Inf and NaN, as in IEEE 754.
        has_nan: there is a NaN. Without Inf it is the one code of all ones.
        dtype: torch's name of what stores it; ``"uint8"``: bytes, packed where bits are fewer.

    Raises:
        DTypeError: a field is out of range, or Inf comes without NaN.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_inf: bool = False
    has_nan: bool = False
    dtype: str = "uint8"

    def __post_init__(self) -> None:
        if self.exponent_bits < 1 or self.mantissa_bits < 1:
            raise DTypeError(
                f"element {self.name!r}: exponent_bits is {self.exponent_bits}, mantissa_bits is "
                f"{self.mantissa_bits}: each must be at least 1"
            )
        if self.bits not in _GROUPS:
            raise DTypeError(
                f"element {self.name!r}: exponent_bits {self.exponent_bits}, mantissa_bits "
                f"{self.mantissa_bits} and a sign are {self.bits} bits: they must be 4, 6 or 8"
            )
        if not 0 <= self.bias < 2**self.exponent_bits:
            raise DTypeError(
                f"element {self.name!r}: bias is {self.bias}, exponent_bits is "
                f"{self.exponent_bits}: the bias must be 0 to {2**self.exponent_bits - 1}"
            )
        if self.has_inf and not (self.has_nan and self.exponent_bits > 1):
            raise DTypeError(
                f"element {self.name!r}: has_inf is True, has_nan is {self.has_nan}, exponent_bits "
                f"is {self.exponent_bits}: Inf needs NaN beside it, and 2 or more exponent_bits"
            )
        if self.dtype != "uint8" and self.bits != 8:
            raise DTypeError(
                f"element {self.name!r}: dtype is {self.dtype}, an element has {self.bits} bits: "
                "fewer than 8 are stored as uint8"
            )

    @property
    def bits(self) -> int:
        """Bits of an element, with its sign."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def group(self) -> tuple[int, int]:
        """How many elements are how many bytes: (1, 1), (2, 1) or (4, 3)."""
        return _GROUPS[self.bits]

    @property
    def min_exponent(self) -> int:
        """Of the smallest normal number; subnormals have it too."""
        return 1 - self.bias

    @property
    def max_code(self) -> int:
        """Code of the largest finite number."""
        ones = 2 ** (self.bits - 1) - 1
        if self.has_inf:
            return ones - 2**self.mantissa_bits
        return ones - self.has_nan

    @property
    def nan_code(self) -> int:
        """What NaN becomes: the positive NaN of all ones, or the largest number where there is none.

        This is what conversion instructions give.
        """
        return 2 ** (self.bits - 1) - 1 if self.has_nan else self.max_code

    @property
    def max(self) -> float:
        """Largest finite number."""
        return self.value(self.max_code)

    @property
    def smallest(self) -> float:
        """Smallest positive number, a subnormal."""
        return self.value(1)

    def value(self, code: int) -> float:
        """The number that a code stands for, exactly.

        Raises:
            DTypeError: the code has more bits than an element.
        """
        if not 0 <= code < 2**self.bits:
            raise DTypeError(
                f"element {self.name!r}: the code is {code}: it must be 0 to {2**self.bits - 1}"
            )
        sign = -1.0 if code >> self.bits - 1 else 1.0
        magnitude = code & 2 ** (self.bits - 1) - 1
        if magnitude > self.max_code:
            infinite = self.has_inf and magnitude == self.max_code + 1
            return sign * float("inf") if infinite else float("nan")
        exponent, mantissa = divmod(magnitude, 2**self.mantissa_bits)
        if exponent:
            mantissa += 2**self.mantissa_bits
        power = max(exponent, 1) - self.bias - self.mantissa_bits
        return sign * mantissa * 2.0**power


@dataclass(frozen=True)
class ScaleFormat:
    """What a scale is stored as. There are three; each has a NaN.

    Args:
        name: as in ``"e8m0"``.
        bits: of one scale.
        dtype: torch's name of what stores it.
        min: the smallest number, which is the scale of a block of zeros.
        max: the largest.
    """

    name: str
    bits: int
    dtype: str
    min: float
    max: float


E4M3 = ElementFormat("e4m3", 4, 3, 7, has_nan=True, dtype="float8_e4m3fn")
E5M2 = ElementFormat("e5m2", 5, 2, 15, has_inf=True, has_nan=True, dtype="float8_e5m2")
E3M2 = ElementFormat("e3m2", 3, 2, 3)
E2M3 = ElementFormat("e2m3", 2, 3, 1)
E2M1 = ElementFormat("e2m1", 2, 1, 1)

E8M0 = ScaleFormat("e8m0", 8, "float8_e8m0fnu", min=2.0**-127, max=2.0**127)
UE4M3 = ScaleFormat("ue4m3", 8, "float8_e4m3fn", min=0.0, max=448.0)
FLOAT32 = ScaleFormat("float32", 32, "float32", min=0.0, max=2.0**128 - 2.0**104)
SCALES = (E8M0, UE4M3, FLOAT32)
SMALLEST_FLOAT32 = 2.0**-126
"""Of the float32 scales of blocks that are not zero: below it reciprocals overflow."""


@dataclass(frozen=True)
class BlockFormat:
    """Blocks of elements, each with a scale: ``x = element * scale * per-tensor scale``.

    Args:
        name: for messages, files and kernels.
        element: of the data.
        scale: one of `SCALES`.
        block: (rows, cols); cols count along the dimension that is quantised, which is the one that
            a product sums over.
        per_tensor: a float32 scale of the whole tensor comes on top.

    Raises:
        DTypeError: ``element`` or ``scale`` is something else.
        ShapeError: a block is empty, or a row of it does not fill whole bytes.
    """

    name: str
    element: ElementFormat
    scale: ScaleFormat
    block: tuple[int, int]
    per_tensor: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.element, ElementFormat):
            raise DTypeError(
                f"format {self.name!r}: element is {self.element!r}: it must be an ElementFormat"
            )
        if self.scale not in SCALES:
            names = ", ".join(each.name for each in SCALES)
            raise DTypeError(
                f"format {self.name!r}: scale is {self.scale!r}: it must be one of {names}"
            )
        if len(self.block) != 2 or min(self.block) < 1:
            raise ShapeError(
                f"format {self.name!r}: block is {self.block}: it must be two positive sizes"
            )
        if self.cols % self.element.group[0]:
            raise ShapeError(
                f"format {self.name!r}: a block has {self.cols} columns, {self.element.group[0]} "
                f"elements {self.element.name} fill {self.element.group[1]} bytes: the columns must "
                f"be a multiple of {self.element.group[0]}"
            )

    @property
    def rows(self) -> int:
        """Of a block, across the dimension that is quantised."""
        return self.block[0]

    @property
    def cols(self) -> int:
        """Of a block, along the dimension that is quantised."""
        return self.block[1]

    @property
    def by_column(self) -> bool:
        """Whether scales lie in memory with those of neighbouring rows beside each other, as products
        read float32 scales of single rows; else as the blocks."""
        return self.rows == 1 and self.scale == FLOAT32

    def packed(self, elements: int) -> int:
        """Bytes of so many elements, a multiple of those in a group."""
        per_group, size = self.element.group
        return elements // per_group * size


MXFP8_E4M3 = BlockFormat("mxfp8_e4m3", E4M3, E8M0, (1, 32))
MXFP8_E5M2 = BlockFormat("mxfp8_e5m2", E5M2, E8M0, (1, 32))
MXFP6_E3M2 = BlockFormat("mxfp6_e3m2", E3M2, E8M0, (1, 32))
MXFP6_E2M3 = BlockFormat("mxfp6_e2m3", E2M3, E8M0, (1, 32))
MXFP4 = BlockFormat("mxfp4", E2M1, E8M0, (1, 32))
NVFP4 = BlockFormat("nvfp4", E2M1, UE4M3, (1, 16), per_tensor=True)
FP8_BLOCK_1X128 = BlockFormat("fp8_block_1x128", E4M3, FLOAT32, (1, 128))
FP8_BLOCK_128X128 = BlockFormat("fp8_block_128x128", E4M3, FLOAT32, (128, 128))

FORMATS = {
    each.name: each
    for each in (
        MXFP8_E4M3,
        MXFP8_E5M2,
        MXFP6_E3M2,
        MXFP6_E2M3,
        MXFP4,
        NVFP4,
        FP8_BLOCK_1X128,
        FP8_BLOCK_128X128,
    )
}
"""The formats above by name."""


def float_bits(value: float) -> int:
    """The bits of a number in float32, rounded to it."""
    found: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return found
