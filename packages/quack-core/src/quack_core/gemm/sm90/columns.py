"""Reductions over the rows of a tile's columns: one number for each column and warpgroup's rows.

A column is spread over 8 lanes of each warp, which meet by shuffles, and over 4 warps, which meet in
shared memory: each has a place of its own there, so that all is added in a fixed order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from quack_core.device.reduce import Partial, combine_tree
from quack_core.reduction.tiling import WARP

from . import partials
from .fragment import BLOCK, PAIR, WARPGROUP, first_col, place
from .partials import OPERATIONS

LANES = 8
"""Of a warp, that have a column; every fourth one."""
APART = 4
WARPS = 4
"""Of a warpgroup."""


def of_threads(name: str, values: list[Float32], counts: list[Boolean]) -> list[Partial]:
    """Of each column that a thread has of a part.

    Args:
        values: in the order of the thread's sums.
        counts: which of them count: those in D at least.
    """
    found = []
    for col in range(max(place(i)[1] for i in range(len(values))) + 1):
        mine = [
            partials.counted(name, value, counts[i])
            for i, value in enumerate(values)
            if place(i)[1] == col
        ]
        found.append(partials.of_values(name, mine))
    return found


@cute.jit
def of_warp(name: cutlass.Constexpr[str], of_columns: list, lane: Int32) -> list:
    """Of all rows of a warp. Each step halves the columns that a lane goes on with.

    Threads: all lanes of a warp.

    Args:
        of_columns: of ``of_threads``; as many in each lane.

    Returns:
        Of neighbouring columns of a lane's, those from ``first_kept`` on.
    """
    operation, found = OPERATIONS[name], of_columns
    for step in cutlass.range_constexpr(LANES.bit_length() - 1):
        offset = const_expr(LANES * APART >> (step + 1))
        upper, half = lane // offset % 2 == 1, const_expr(len(found) // 2)
        if const_expr(half > 0):
            kept = [_choose(upper, found[half + i], found[i]) for i in range(half)]
            given = [_choose(upper, found[i], found[half + i]) for i in range(half)]
        else:
            kept, given = found, found
        found = [
            operation.combine(mine, _of_lane(theirs, offset))
            for mine, theirs in zip(kept, given, strict=True)
        ]
    return found


def first_kept(lane: Int32, columns: int) -> Int32:
    """The first column that a lane goes on with, of so many that each had."""
    return lane // APART * columns // LANES


@cute.jit
def collect(
    name: cutlass.Constexpr[str],
    values: list[Float32],
    counts: list[Boolean],
    shared: cute.Tensor,
    col: Int32,
    thread: Int32,
    first: cutlass.Constexpr[bool],
) -> None:
    """Add a part's values to what the thread's warp has found.

    Threads: a warpgroup.

    Args:
        values, counts: as of ``of_threads``.
        shared: float32 (columns of the tile, warps, numbers of a partial result).
        col: first column of the part, in the tile.
        first: nothing was found before in these columns.
    """
    of_columns = of_threads(name, values, counts)
    count, lane, warp = const_expr(len(of_columns)), thread % WARP, thread // WARP
    found = of_warp(name, of_columns, lane)
    start, apart = first_kept(lane, count), const_expr(max(1, LANES // count))
    if lane // APART % apart == 0:  # of lanes that found the same, one writes
        for i in cutlass.range_constexpr(len(found)):
            at = col + first_col(thread) + (start + i) // PAIR * BLOCK + (start + i) % PAIR
            total = found[i]
            if const_expr(not first):
                before = _read(shared, at, warp)
                total = OPERATIONS[name].combine(before, total)
            for number in cutlass.range_constexpr(len(total)):
                shared[at, warp, number] = total[number]


@cute.jit
def store(
    name: cutlass.Constexpr[str],
    shared: cute.Tensor,
    target: cute.Tensor,
    col: Int32,
    cols: Int32,
    tile: Int32,
    matrix: Int32,
    thread: Int32,
) -> None:
    """Write the results of a tile's columns.

    Threads: a warpgroup, that has met behind ``collect``, and meets again before the next tile's.

    Args:
        shared: of ``collect``.
        target: float32 (N, tiles) or (L, N, tiles).
        col: of the tile's first column, in D.
        cols: of D.
        tile: number of the warpgroup's rows.
    """
    count = const_expr(cute.size(shared, mode=[0]))
    for i in cutlass.range_constexpr(-(-count // WARPGROUP)):
        at = thread + i * WARPGROUP
        if at < count and col + at < cols:
            found = [_read(shared, at, warp) for warp in range(WARPS)]
            total = combine_tree(found, OPERATIONS[name])
            partials.write(name, total, target, col + at, tile, matrix)


def _read(shared: cute.Tensor, at: Int32, warp: Int32) -> Partial:
    return tuple(shared[at, warp, number] for number in range(cute.size(shared, mode=[2])))


@cute.jit
def _choose(upper, high: tuple, low: tuple) -> tuple:
    return tuple(h if upper else v for h, v in zip(high, low, strict=True))


def _of_lane(value: Partial, offset: int) -> Partial:
    """What the lane so far away has."""
    return tuple(cute.arch.shuffle_sync_bfly(v, offset=offset) for v in value)
