"""Reductions over the columns of a tile's rows: one number for each row and tile."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from quack_core.device.reduce import Partial, lanes_reduce

from . import partials
from .fragment import ROW_STEP, ROWS, place
from .partials import OPERATIONS

LANES = 4
"""Neighbours that have a row's columns."""


def neutral(name: str) -> list[Partial]:
    """Nothing yet, for each of the thread's two rows."""
    return [OPERATIONS[name].neutral() for _ in range(ROWS)]


def add(
    name: str, before: list[Partial], values: list[Float32], counts: list[Boolean]
) -> list[Partial]:
    """Partial results with the thread's values of a part added.

    Args:
        values: in the order of the thread's sums.
        counts: which of them count: those in D at least.
    """
    found = []
    for row in range(ROWS):
        mine = [
            partials.counted(name, value, counts[i])
            for i, value in enumerate(values)
            if place(i)[0] == row
        ]
        found.append(OPERATIONS[name].combine(before[row], partials.of_values(name, mine)))
    return found


@cute.jit
def store(
    name: cutlass.Constexpr[str],
    of_rows: list,
    target: cute.Tensor,
    row: Int32,
    rows: Int32,
    tile: Int32,
    matrix: Int32,
    lane: Int32,
) -> None:
    """Write the results of a tile's rows.

    Threads: all lanes of a warp.

    Args:
        of_rows: of ``add``.
        target: float32 (M, tiles) or (L, M, tiles).
        row: the thread's first one, in D.
        rows: of D.
        tile: column of the tile, in tiles.
    """
    for r in cutlass.range_constexpr(ROWS):
        total = lanes_reduce(of_rows[r], OPERATIONS[name], LANES)
        at = row + r * ROW_STEP
        if at < rows and lane % LANES == 0:
            partials.write(name, total, target, at, tile, matrix)
