"""Partial results of reductions: of some values of a thread, and the number that comes out in the end."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from quack_core.device import fast_math
from quack_core.device.reduce import (
    MAX,
    ONLINE_SOFTMAX,
    SUM,
    Partial,
    Reduction,
    combine_tree,
    finite,
)

OPERATIONS: dict[str, Reduction] = {
    "sum": SUM,
    "sum_squares": SUM,
    "max": MAX,
    "lse": ONLINE_SOFTMAX,
    "select": SUM,
}
"""By the names of `quack_core.gemm.op.PARTIALS`."""


def of_values(name: str, values: list[Float32]) -> Partial:
    """Of values that count."""
    if name == "lse":
        (largest,) = combine_tree([(v,) for v in values], MAX)
        powers: list[Partial] = [(fast_math.exp(v - finite(largest)),) for v in values]
        return largest, combine_tree(powers, SUM)[0]
    if name == "sum_squares":
        values = [v * v for v in values]
    return combine_tree([(v,) for v in values], OPERATIONS[name])


@cute.jit
def counted(name: cutlass.Constexpr[str], value: Float32, counts: Boolean) -> Float32:
    """A value that counts, or what changes nothing."""
    nothing = const_expr(-math.inf if name in ("max", "lse") else 0.0)
    return value if counts else Float32(nothing)


@cute.jit
def write(
    name: cutlass.Constexpr[str],
    total: tuple,
    target: cute.Tensor,
    at: Int32,
    tile: Int32,
    matrix: Int32,
) -> None:
    """Write the number of a row, or of a column, and of a tile.

    Args:
        target: float32 (rows or columns of D, tiles), or (L, ...).
    """
    value = total[0]
    if const_expr(name == "lse"):
        value = finite(total[0]) + fast_math.log(total[1])
    if const_expr(cute.rank(target) == 2):
        target[Int64(at), Int64(tile)] = value
    else:
        target[Int64(matrix), Int64(at), Int64(tile)] = value
