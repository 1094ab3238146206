"""What kernels that quantise, and back, compute, and how: frozen records, without torch or the DSL."""

from dataclasses import dataclass

from quack_core import dtypes
from quack_core.arch import Arch
from quack_core.errors import UnsupportedError

from ..formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FLOAT32, UE4M3, BlockFormat

VECTOR = 8
"""Elements that one call of Philox serves, and that a thread has side by side in a tile."""
WIDEST = 16
"""Elements that a thread has side by side in a row."""
WARP = 32
ACCESS_BITS = 128
"""Of the widest access to memory."""
TILE = (128, 128)
"""Of blocks of several rows: 64 elements for each of 256 threads."""


@dataclass(frozen=True)
class QuantizeSpec:
    """Blocks of a tensor in row-major order.

    Args:
        x: dtype of what is quantised.
        format: of the result.
        scale_rounding: one of ``scales.RULES``.
        stochastic: elements are rounded so, else to the nearest.
        copies: ``"rows"`` along contiguous memory; of a matrix that lies so ``"columns"``, which are
            written contiguous, or ``"both"``.

    Raises:
        UnsupportedError: there is no kernel for the format; names the way out.
    """

    x: str
    format: BlockFormat
    scale_rounding: str = "rceil"
    stochastic: bool = False
    copies: str = "rows"

    def __post_init__(self) -> None:
        if self.copies != "rows" and (self.stochastic or not has_columns(self.format)):
            raise UnsupportedError(
                f"quantize: there is no kernel for {self.format.name} along columns",
                "kernels are for elements of 8 bits, to the nearest",
                "quantize x.mT.contiguous() along rows",
            )
        check_built("quantize", self.format)

    @property
    def name(self) -> str:
        """As profilers show it."""
        rounding = self.scale_rounding + ("_stochastic" if self.stochastic else "")
        copies = "" if self.copies == "rows" else f"_{self.copies}"
        return f"quantize{copies}_{dtypes.short(self.x)}_{self.format.name}_{rounding}"

    @property
    def module(self) -> str:
        """Where the kernel is."""
        if self.copies != "rows":
            return f"{__package__}.columns"
        return f"{__package__}.{'rows' if self.format.rows == 1 else 'tiles'}"

    @property
    def vector(self) -> int:
        """Elements that a thread has side by side, in blocks of one row."""
        return min(WIDEST, self.format.cols)

    @property
    def clips(self) -> bool:
        """Whether elements may exceed the largest number by more than the rounding of their scale."""
        return self.format.scale == UE4M3 or self.scale_rounding in ("floor", "even")

    def configure(self, arch: Arch) -> "QuantizeConfig":
        """For an architecture: those after SM90 convert to every element."""
        return QuantizeConfig(native=arch.capability >= (10, 0))


@dataclass(frozen=True)
class DequantizeSpec:
    """Numbers of blocks that a quantising kernel can make, in row-major order.

    Args:
        out: dtype of the numbers.
        format: of values and scales.

    Raises:
        UnsupportedError: there is no kernel for the format; names the way out.
    """

    out: str
    format: BlockFormat

    def __post_init__(self) -> None:
        check_built("dequantize", self.format)

    @property
    def name(self) -> str:
        """As profilers show it."""
        return f"dequantize_{self.format.name}_{dtypes.short(self.out)}"

    @property
    def module(self) -> str:
        """Where the kernel is."""
        return f"{__package__}.numbers"

    @property
    def vector(self) -> int:
        """Elements that a thread has side by side: numbers of 16 bytes, which are one access."""
        return ACCESS_BITS // dtypes.width(self.out)

    def configure(self, arch: Arch) -> "DequantizeConfig":
        """For an architecture: none of them matters, what the kernel needs all of them have."""
        return DequantizeConfig()


@dataclass(frozen=True)
class QuantizeConfig:
    """How the vectors are spread, and what the architecture offers.

    Args:
        threads: of a CTA.
        unroll: vectors that a thread has in flight, of blocks of one row.
        native: there are instructions that convert to elements of 4 and 6 bits.
    """

    threads: int = 256
    unroll: int = 2
    native: bool = False


@dataclass(frozen=True)
class DequantizeConfig:
    """How the vectors are spread.

    Args:
        threads: of a CTA.
        unroll: vectors that a thread has in flight; those of a CTA divide a block of 128x128.
    """

    threads: int = 256
    unroll: int = 4


def check_built(name: str, format: BlockFormat) -> None:
    """That there are kernels for a format.

    Raises:
        UnsupportedError: there are none; names the way out.
    """
    if not is_built(format):
        raise UnsupportedError(
            f"{name}: there is no kernel for {format.name}",
            f"kernels are for blocks of 1x{VECTOR} to 1x{WIDEST * WARP} (a power of two, at "
            f"least {WIDEST} where elements have fewer than 8 bits) and of 128x128, elements of 8 "
            "bits with scales e8m0 or float32, of 6 with e8m0, of 4 with e8m0 or ue4m3",
            "call .cpu() on x first: CPU tensors run the reference",
        )


def is_built(format: BlockFormat) -> bool:
    """Whether there are kernels for a format: one that quantises, and one that makes numbers again."""
    kind = (format.scale, format.per_tensor)
    wide = format.element in (E4M3, E5M2) and kind in ((E8M0, False), (FLOAT32, False))
    six = format.element in (E2M3, E3M2) and kind == (E8M0, False)
    four = format.element == E2M1 and kind in ((E8M0, False), (UE4M3, False), (UE4M3, True))
    smallest = VECTOR if wide else WIDEST
    one_row = format.rows == 1 and smallest <= format.cols <= WIDEST * WARP
    if one_row and format.cols & (format.cols - 1) == 0:
        return wide or six or four
    return wide and format.block == TILE


def has_columns(format: BlockFormat) -> bool:
    """Whether there is a kernel that reads rows and quantises along columns."""
    one_row = format.rows == 1 and WIDEST <= format.cols <= TILE[1]
    return is_built(format) and format.element.bits == 8 and (one_row or format.block == TILE)
