"""What a product computes, and how: frozen records, without torch or the DSL."""

import math
from dataclasses import dataclass

from quack_core import dtypes
from quack_core.arch import SM90

from ..formats import E4M3, FLOAT32, BlockFormat

BLOCK = 128
"""Elements along K that have one scale: a stage of the kernel, and the width of a swizzle in 8 bits."""
ROWS, SQUARES = (1, BLOCK), (BLOCK, BLOCK)
"""Blocks of operands."""
ATOM_M = 64
GROUPS = 2
"""Warpgroups that multiply; each has 64 of a tile's rows."""
TILE_M = ATOM_M * GROUPS
UNIT = 4
"""Scales in 16 bytes: TMA begins at multiples of that."""
PIECE_COLS = 32
"""Columns that a warpgroup stores at a time."""
ROUND_COST = {128: 1.0, 192: 1.46, 64: 0.79}
"""How long rounds of tiles of so many columns take. Source: the suite ``gemm_fp8_block`` on one H200 with
each width, relative to cuBLAS in the same run: 1.43 to 1.50."""
FEW_STEPS = 32
"""Of K, up to which the narrowest tiles are considered: with 64 rows, 7168 columns and 128 steps they took
1.3 times as long as wider ones, as more CTAs read the same rows."""
BARRIER_BYTES = 2048
"""For barriers, and what alignment takes."""


@dataclass(frozen=True)
class MatmulSpec:
    """D = A Bᵀ of e4m3 in blocks: those of A are 1x128.

    Args:
        d: dtype of the result.
        rows_b: blocks of B are 1x128 as well: a scale for each column of D; else they are 128x128.
        accumulate: the product is added to D; of float32 only.
        grouped: groups of rows of A, one below the other, each with a B of its own.
    """

    d: str
    rows_b: bool = False
    accumulate: bool = False
    grouped: bool = False

    def __post_init__(self) -> None:
        if self.grouped and (self.rows_b or self.accumulate):
            raise ValueError(f"grouped=True, {self}: groups have blocks of 128x128 and a new D")
        if self.accumulate and self.d != "float32":
            raise ValueError(f"accumulate=True, d={self.d!r}: it must be float32")

    @property
    def scales_a(self) -> int:
        """Of A, that a stage gets: those of a tile, and of the rows before that TMA begins with."""
        return TILE_M + UNIT * self.grouped

    @property
    def parts(self) -> int:
        """Of a tile's columns: one is added to the sums while the next one is multiplied. One: warpgroups
        take turns instead, which is faster, but leaves no registers for a scale of each column."""
        return 2 if self.rows_b else 1

    @property
    def name(self) -> str:
        """As profilers show it."""
        blocks = "1x128" if self.rows_b else "128x128"
        kind = "_add" if self.accumulate else "_grouped" if self.grouped else ""
        return f"matmul_fp8_1x128_{blocks}_{dtypes.short(self.d)}{kind}"


@dataclass(frozen=True)
class MatmulConfig:
    """A persistent kernel of SM90: one warp loads, two warpgroups multiply.

    There are no clusters: with pairs of CTAs that share B, products took up to 4 % longer.

    Args:
        tile_n: columns of a tile, which has 128 rows.
        group: rows of tiles that are worked on together, for L2.
    """

    tile_n: int = 128
    group: int = 8

    def __post_init__(self) -> None:
        if self.tile_n not in ROUND_COST:
            raise ValueError(f"tile_n={self.tile_n}: must be one of {tuple(ROUND_COST)}")
        if self.group < 1:
            raise ValueError(f"group={self.group}: must be at least 1")

    def at_once(self, spec: MatmulSpec) -> int:
        """Stages of a warpgroup's turn: while the sums of one are added, the next one is multiplied. Two
        of wide tiles leave no registers."""
        return 2 if spec.parts == 1 and self.tile_n <= BLOCK else 1

    @property
    def scale_cols(self) -> int:
        """Columns with one scale of a block of 128x128, wherever a tile begins."""
        return math.gcd(self.tile_n, BLOCK)

    def scales_b(self, spec: MatmulSpec) -> int:
        """Scales of B that a stage of a tile needs."""
        return self.tile_n if spec.rows_b else self.tile_n // self.scale_cols

    @property
    def num_threads(self) -> int:
        return 128 * (1 + GROUPS)

    @property
    def stage_bytes(self) -> int:
        """That TMA brings."""
        return (TILE_M + self.tile_n) * BLOCK

    def held_bytes(self, spec: MatmulSpec) -> int:
        """Of a stage, with its scales."""
        return self.stage_bytes + 4 * (lines(spec.scales_a) + lines(self.scales_b(spec)))

    def store_bytes(self, spec: MatmulSpec) -> int:
        """Shared memory of what is on its way out: two pieces of a warpgroup."""
        return GROUPS * 2 * ATOM_M * PIECE_COLS * dtypes.width(spec.d) // 8

    def depth(self, spec: MatmulSpec) -> int:
        """Stages: as many as fit, each with its scales."""
        room = SM90.smem_bytes - BARRIER_BYTES - self.store_bytes(spec)
        return room // self.held_bytes(spec)

    def smem_bytes(self, spec: MatmulSpec) -> int:
        """Shared memory of a CTA."""
        return BARRIER_BYTES + self.store_bytes(spec) + self.depth(spec) * self.held_bytes(spec)


def lines(scales: int) -> int:
    """As many, rounded up to lines of 128 bytes: where TMA begins to write."""
    return -(-scales // 32) * 32


def is_built(a: BlockFormat, b: BlockFormat) -> bool:
    """Whether there is a product for two formats."""
    same = all(one.element == E4M3 and one.scale == FLOAT32 for one in (a, b))
    return same and a.block == ROWS and b.block in (ROWS, SQUARES)


def choose(m: int, n: int, k: int, sms: int, groups: int = 1) -> MatmulConfig:
    """The configuration whose rounds of tiles take the shortest time.

    Args:
        m, n: of D.
        k: elements that are summed.
        sms: of the device.
        groups: of rows, whose sizes are on the device: taken as equal.
    """
    down = groups * -(-m // (groups * TILE_M))
    found = [cols for cols in ROUND_COST if cols > ATOM_M or k <= FEW_STEPS * BLOCK]

    def cost(tile_n: int) -> float:
        return -(-down * -(-n // tile_n) // sms) * ROUND_COST[tile_n]

    return MatmulConfig(min(found, key=cost))
