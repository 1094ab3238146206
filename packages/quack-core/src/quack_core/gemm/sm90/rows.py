"""Reductions over the columns of a tile's rows: one number for each row and tile."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quack_core.device import fast_math
from quack_core.device.reduce import (
    MAX,
    ONLINE_SOFTMAX,
    SUM,
    Partial,
    Reduction,
    combine_tree,
    finite,
    lanes_reduce,
)

from .fragment import BLOCK, PAIR, ROW_STEP, ROWS, place

LANES = 4
"""Neighbours that have a row's columns."""

OPERATIONS: dict[str, Reduction] = {
    "sum": SUM,
    "sum_squares": SUM,
    "max": MAX,
    "lse": ONLINE_SOFTMAX,
}
"""By the names of `quack_core.gemm.epilogue.REDUCTIONS`."""


def neutral(name: str) -> list[Partial]:
    """Nothing yet, for each of the thread's two rows."""
    return [OPERATIONS[name].neutral() for _ in range(ROWS)]


def add(
    name: str, before: list[Partial], values: list[Float32], col: Int32, cols: Int32
) -> list[Partial]:
    """Partial results with the thread's values of a part added.

    Args:
        values: in the order of the thread's sums.
        col: of the thread's first sum, in D.
        cols: of D: what lies beyond does not count.
    """
    operation, found = OPERATIONS[name], []
    for row in range(ROWS):
        mine = [
            _counted(name, value, col + place(i)[1] // PAIR * BLOCK + i % PAIR, cols)
            for i, value in enumerate(values)
            if place(i)[0] == row
        ]
        found.append(operation.combine(before[row], _partial(name, mine)))
    return found


@cute.jit
def _counted(name: cutlass.Constexpr[str], value: Float32, col: Int32, cols: Int32) -> Float32:
    """A value, or what changes nothing."""
    nothing = const_expr(0.0 if name in ("sum", "sum_squares") else -math.inf)
    return value if col < cols else Float32(nothing)


def _partial(name: str, values: list[Float32]) -> Partial:
    """Of some values."""
    if name == "lse":
        (largest,) = combine_tree([(v,) for v in values], MAX)
        powers: list[Partial] = [(fast_math.exp(v - finite(largest)),) for v in values]
        return largest, combine_tree(powers, SUM)[0]
    if name == "sum_squares":
        values = [v * v for v in values]
    return combine_tree([(v,) for v in values], OPERATIONS[name])


@cute.jit
def store(
    name: cutlass.Constexpr[str],
    partials: list,
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
        target: float32 (M, tiles) or (L, M, tiles).
        row: the thread's first one, in D.
        rows: of D.
        tile: column of the tile, in tiles.
    """
    for r in cutlass.range_constexpr(ROWS):
        total = lanes_reduce(partials[r], OPERATIONS[name], LANES)
        value = total[0]
        if const_expr(name == "lse"):
            value = finite(total[0]) + fast_math.log(total[1])
        at = row + r * ROW_STEP
        if at < rows and lane % LANES == 0:
            if const_expr(cute.rank(target) == 2):
                target[Int64(at), tile] = value
            else:
                target[Int64(matrix), at, tile] = value
