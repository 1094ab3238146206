"""Sums over all rows of a launch with a CTA per row: the rows in ``CHUNKS`` parts, a lane for each.

One warp of every CTA calls these functions, with all lanes. Whichever CTA comes last adds up; what
it adds, and in which order, depends on the number of rows alone.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from quack_core.device import barrier
from quack_core.device.reduce import SUM, warp_reduce
from quack_core.reduction.tiling import WARP

from .config import CHUNKS
from .gradient import label_of

DRAWN, WEIGHED, DONE, ROWS = range(4)
"""Counters: chunks whose weights somebody adds up, and those that are added up; chunks whose losses
are added up; from the last on, CTAs of each chunk that are done."""
LOSSES, WEIGHTS = range(2)
"""Rows of the scratch ``sums``: losses, then of chunks, at their first rows; weights of chunks."""
AT_ONCE = 8
"""Loads that a lane has under way."""


@cute.jit
def sum_of_weights(
    mT: cute.Tensor,
    mW: cute.Tensor | None,
    sums: cute.Tensor,
    counters: cute.Pointer,
    ignore_index: Int64,
    num_classes: cutlass.Constexpr[int],
) -> Float32:
    """Sum of the weights of all labels that count, in every lane.

    A warp adds up chunks as long as there are any left, then waits for those that others have drawn:
    they run already, and wait for nobody before they are done with them.
    """
    lane, chunk = cute.arch.lane_idx(), Int32(CHUNKS)
    if lane == 0:
        if barrier.load_acquire(counters + WEIGHED) < CHUNKS:
            chunk = _draw(counters)
    chunk = cute.arch.shuffle_sync(chunk, 0)
    while chunk < CHUNKS:

        def weight(row: Int32) -> Float32:
            return label_of(Int64(mT[Int64(row)]), mW, ignore_index, num_classes).factor

        total = _sum_of_chunk(weight, chunk, Int32(cute.size(mT)))
        if lane == 0:
            sums[WEIGHTS, chunk] = total
            _count(counters + WEIGHED)
            chunk = _draw(counters)
        chunk = cute.arch.shuffle_sync(chunk, 0)
    if lane == 0:
        known = barrier.load_acquire(counters + WEIGHED)
        while known < CHUNKS:
            known = barrier.load_acquire(counters + WEIGHED)
    cute.arch.sync_warp()
    return warp_reduce((sums[WEIGHTS, lane],), SUM)[0]


@cute.jit
def is_last(
    sums: cute.Tensor, counters: cute.Pointer, row: Int32, rows: Int32, cluster: Int32
) -> Boolean:
    """Count this CTA as done with its row; the last one of a chunk adds up the chunk's losses.

    Args:
        row: whose loss lies in ``sums`` by now.
        cluster: CTAs of a row; each counts itself.

    Returns:
        Whether all are done, all chunks added up, and no other warp will touch a counter.
    """
    per_chunk, lane = _per_chunk(rows), cute.arch.lane_idx()
    chunk = row // per_chunk
    first = chunk * per_chunk
    expected = cutlass.min(per_chunk, rows - first) * cluster
    last = Int32(0)
    if lane == 0:
        last = Int32(_arrive(counters + ROWS + chunk) == expected - 1)
    last = cute.arch.shuffle_sync(last, 0)
    if last != 0:
        cute.arch.sync_warp()

        def loss(row: Int32) -> Float32:
            return Float32(sums[LOSSES, row])

        total = _sum_of_chunk(loss, chunk, rows)
        if lane == 0:
            sums[LOSSES, first] = total
            chunks = (rows + per_chunk - 1) // per_chunk
            last = Int32(_arrive(counters + DONE) == chunks - 1)
        last = cute.arch.shuffle_sync(last, 0)
        cute.arch.sync_warp()
    return last != 0


@cute.jit
def sum_of_losses(sums: cute.Tensor, rows: Int32) -> Float32:
    """Sum of the losses of all rows, in every lane; where `is_last` says so."""
    first, total = cute.arch.lane_idx() * _per_chunk(rows), Float32(0.0)
    if first < rows:
        total = Float32(sums[LOSSES, first])
    return warp_reduce((total,), SUM)[0]


def _per_chunk(rows: Int32) -> Int32:
    return (rows + CHUNKS - 1) // CHUNKS


@cute.jit
def _sum_of_chunk(value_of: Callable[[Int32], Float32], chunk: Int32, rows: Int32) -> Float32:
    """Sum of a value of each row, in every lane."""
    first, total = chunk * _per_chunk(rows), Float32(0.0)
    end = cutlass.min(first + _per_chunk(rows), rows)
    for start in cutlass.range(first + cute.arch.lane_idx(), end, AT_ONCE * WARP, unroll=1):
        places = [start + i * WARP for i in range(AT_ONCE)]
        values = [value_of(cutlass.min(place, rows - 1)) for place in places]
        for i in cutlass.range_constexpr(AT_ONCE):
            total += values[i] if places[i] < end else Float32(0.0)
    return warp_reduce((total,), SUM)[0]


def _draw(counters: cute.Pointer) -> Int32:
    """The number of a chunk, or of one too many."""
    return cute.arch.atomic_add(counters + DRAWN, Int32(1), sem="relaxed", scope="gpu")


def _count(counter: cute.Pointer) -> None:
    """Tell others, who see what was written before; without an answer."""
    cute.arch.red(counter, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")


def _arrive(counter: cute.Pointer) -> Int32:
    """How many came before; what they wrote is visible."""
    return cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
