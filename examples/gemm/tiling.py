"""What the steps compute, and how large their tiles are: plain records, parts of a kernel's key."""

from dataclasses import dataclass
from typing import Any

from cutlass import Int32

from quack_core.jit.compile import symbolic
from quack_core.jit.dsl import sym_int

K = 64  # elements of a stage along K: 128 bytes, the width of the widest swizzle
ATOM_M = 64  # rows of a matrix instruction
PIECE = 64  # columns of D that a warpgroup stores at a time: 128 bytes as well
BUFFERS = 2  # such parts of D that are on their way out
WARPGROUP = 128  # threads


@dataclass(frozen=True)
class Product:
    """What to compute: D = A B^T, in bfloat16 with float32 sums.

    A is (M, K), B (N, K) and D (M, N), all row-major; M is free, N and K are multiples of 8.
    """

    level: str

    @property
    def name(self) -> str:
        """Kernel name."""
        return f"product_{self.level}"


@dataclass(frozen=True)
class Tiling:
    """How it is computed.

    Args:
        tile_m, tile_n: of D, that are summed together.
        stages: parts of K in shared memory.
        groups: warpgroups that multiply.
        sharing: those of them that share a tile.
        cluster: CTAs that share a part of B.
    """

    tile_m: int
    tile_n: int
    stages: int
    groups: int = 1
    sharing: int = 1
    cluster: int = 1

    @property
    def stage_bytes(self) -> int:
        """Of A and of B, in a stage."""
        return (self.tile_m + self.tile_n) * K * 2

    @property
    def threads(self) -> int:
        """Of a CTA with a warpgroup that loads."""
        return WARPGROUP * (1 + self.groups)

    @property
    def smem_bytes(self) -> int:
        """Of such a CTA, with what it stores; 2048 for barriers and alignment."""
        return 2048 + self.stages * self.stage_bytes + self.groups * BUFFERS * ATOM_M * PIECE * 2


def arguments(stays: bool = False) -> tuple[Any, ...]:
    """Symbolic arguments of a kernel.

    Args:
        stays: CTAs walk over tiles; then the number of clusters that the GPU holds comes last.
    """
    m, n, k = sym_int(), sym_int(divisibility=8), sym_int(divisibility=8)
    operands = (symbolic("bfloat16", shape) for shape in ((m, k), (n, k), (m, n)))
    return (*operands, Int32(0)) if stays else tuple(operands)
