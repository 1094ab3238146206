"""What a quantising kernel computes, and how: frozen records, without torch or the DSL."""

from dataclasses import dataclass

from quack_core import dtypes
from quack_core.errors import UnsupportedError

from ..formats import E4M3, E5M2, E8M0, FLOAT32, BlockFormat

VECTOR = 8
"""Elements of a thread's access: 16 bytes of 16 bits."""
WARP = 32
TILE = (128, 128)
"""Of blocks of several rows: 64 elements for each of 256 threads."""
ELEMENTS = (E4M3, E5M2)
"""Those that SM89 and later convert to by an instruction."""


@dataclass(frozen=True)
class QuantizeSpec:
    """Blocks along contiguous memory, elements of 8 bits, rounded to the nearest.

    Args:
        x: dtype of what is quantised.
        format: of the result.
        scale_rounding: one of ``scales.RULES``.

    Raises:
        UnsupportedError: there is no kernel for the format; names the way out.
    """

    x: str
    format: BlockFormat
    scale_rounding: str = "rceil"

    def __post_init__(self) -> None:
        if not is_built(self.format):
            raise UnsupportedError(
                f"quantize: there is no kernel for {self.format.name}",
                f"kernels are for blocks of 1x{VECTOR} to 1x{VECTOR * WARP} (a power of two) and of "
                "128x128, elements e4m3 or e5m2, and scales e8m0 or float32",
                "call .cpu() on x first: CPU tensors run the reference",
            )

    @property
    def name(self) -> str:
        """As profilers show it."""
        return f"quantize_{dtypes.short(self.x)}_{self.format.name}_{self.scale_rounding}"

    @property
    def module(self) -> str:
        """Where the kernel is."""
        return f"{__package__}.{'rows' if self.format.rows == 1 else 'tiles'}"


@dataclass(frozen=True)
class QuantizeConfig:
    """How the vectors are spread.

    Args:
        threads: of a CTA.
        unroll: vectors that a thread has in flight, of blocks of one row.
    """

    threads: int = 256
    unroll: int = 4


def is_built(format: BlockFormat) -> bool:
    """Whether there is a kernel for a format."""
    one_row = format.rows == 1 and VECTOR <= format.cols <= VECTOR * WARP
    return (
        format.element in ELEMENTS
        and format.scale in (E8M0, FLOAT32)
        and not format.per_tensor
        and (format.block == TILE or (one_row and format.cols & (format.cols - 1) == 0))
    )
