"""Sums over all rows of a launch with a CTA per row: the rows in chunks.

One warp of every CTA calls these functions, with all lanes. Whichever CTA comes last adds up; what
it adds, and in which order, depends on the number of rows alone.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from quack_core.device.reduce import SUM, warp_reduce
from quack_core.reduction.tiling import WARP

from .config import CHUNKS, COPIES, COPY_INTS, WEIGHT_CHUNKS
from .gradient import Options, label_of

WEIGHED, _, DRAWN, DONE, ROWS = range(COPIES * COPY_INTS, COPIES * COPY_INTS + 5)
"""Counters: chunks whose weights are added up, 64 bits, in the upper half where the lower one counts
labels; chunks whose weights somebody adds up; those whose losses are added up; from the last on, rows of
each chunk that are done. Before them lie copies of the sum of all weights, as `_encoded`."""
LOSSES, WEIGHTS = range(2)
"""Rows of the scratch ``sums``: losses, then of chunks, at their first rows; weights of chunks."""
AT_ONCE = 8
"""Loads that a lane has under way."""


def announced_total(counters: cute.Pointer, row: Int32) -> Int32:
    """What `sum_of_weights` asks first: early, so that the answer is there when it is called."""
    copy = counters + Int64(row) % COPIES * COPY_INTS
    return cute.arch.load(copy, Int32, sem="relaxed", scope="gpu")


@cute.jit
def sum_of_weights(
    mT: cute.Tensor,
    mW: cute.Tensor | None,
    sums: cute.Tensor,
    counters: cute.Pointer,
    announced: Int32,
    row: Int32,
    options: Options,
    num_classes: cutlass.Constexpr[int],
) -> Float32:
    """Sum of the weights of all labels that count, in every lane.

    Unless it is announced, a warp adds up chunks as long as there are any left, then waits for those
    that others have drawn: they run already, and wait for nobody before they are done with them.
    """
    lane = cute.arch.lane_idx()
    announced = cute.arch.shuffle_sync(announced, 0)
    if announced == 0:
        rows = Int32(cute.size(mT))
        size = _size(rows, WEIGHT_CHUNKS)
        count, chunk = (rows + size - 1) // size, _draw(counters)
        while chunk < count:

            def weight(row: Int32) -> Float32:
                return label_of(Int64(mT[Int64(row)]), mW, options.ignore_index, num_classes).factor

            def of_chunk(i: Int32) -> Float32:
                return Float32(sums[WEIGHTS, i])

            first = chunk * size
            total, last = _sum(weight, first, cutlass.min(first + size, rows)), Int32(0)
            if lane == 0:
                if const_expr(mW is None):
                    before, total = _add_count(counters + WEIGHED, total)
                    last = Int32(before == count - 1)
                else:
                    sums[WEIGHTS, chunk] = total
                    last = Int32(_arrive(counters + WEIGHED) == count - 1)
            if cute.arch.shuffle_sync(last, 0) != 0:
                cute.arch.sync_warp()
                if const_expr(mW is None):
                    total = cute.arch.shuffle_sync(total, 0)
                else:
                    total = _sum(of_chunk, Int32(0), count)
                code = _encoded(total)
                for i in cutlass.range(lane, COPIES, WARP, unroll=1):
                    cute.arch.store(counters + i * COPY_INTS, code, sem="relaxed", scope="gpu")
            chunk = _draw(counters)
        if lane == 0:
            announced = announced_total(counters, row)
            while announced == 0:
                announced = announced_total(counters, row)
        announced = cute.arch.shuffle_sync(announced, 0)
    return Float32(announced.bitcast(Float32))


@cute.jit
def is_last(sums: cute.Tensor, counters: cute.Pointer, row: Int32, rows: Int32) -> Boolean:
    """Count a row as done; the last one of a chunk adds up the chunk's losses.

    Args:
        row: its loss lies in ``sums`` by now, and none of its CTAs asks for the total any more.

    Returns:
        Whether all are done, all chunks added up, and no other warp will touch a counter.
    """
    size, lane, last = _size(rows, CHUNKS), cute.arch.lane_idx(), Int32(0)
    chunk = row // size
    first = chunk * size
    end = cutlass.min(first + size, rows)
    if lane == 0:
        last = Int32(_arrive(counters + ROWS + chunk) == end - first - 1)
    last = cute.arch.shuffle_sync(last, 0)
    if last != 0:
        cute.arch.sync_warp()

        def loss(row: Int32) -> Float32:
            return Float32(sums[LOSSES, row])

        total = _sum(loss, first, end)
        if lane == 0:
            sums[LOSSES, first] = total
            last = Int32(_arrive(counters + DONE) == (rows + size - 1) // size - 1)
        last = cute.arch.shuffle_sync(last, 0)
        cute.arch.sync_warp()
    return last != 0


@cute.jit
def clear(state: cute.Tensor) -> None:
    """All counters are zero again."""
    lane = cute.arch.lane_idx()
    for i in cutlass.range(lane, COPIES, WARP, unroll=1):
        state[i * COPY_INTS] = Int32(0)
    for i in cutlass.range(WEIGHED + lane, cute.size(state), WARP, unroll=1):
        state[i] = Int32(0)


@cute.jit
def sum_of_losses(sums: cute.Tensor, rows: Int32) -> Float32:
    """Sum of the losses of all rows, in every lane; where `is_last` says so."""
    first, total = cute.arch.lane_idx() * _size(rows, CHUNKS), Float32(0.0)
    if first < rows:
        total = Float32(sums[LOSSES, first])
    return warp_reduce((total,), SUM)[0]


def _size(rows: Int32, most: int) -> Int32:
    """Rows of a chunk: all have so many but the last one, which may have fewer."""
    return cutlass.max((rows + most - 1) // most, Int32(AT_ONCE * WARP))


@cute.jit
def _sum(value_of: Callable[[Int32], Float32], first: Int32, end: Int32) -> Float32:
    """Sum of values by index, in every lane."""
    total = Float32(0.0)
    for start in cutlass.range(first + cute.arch.lane_idx(), end, AT_ONCE * WARP, unroll=1):
        places = [start + i * WARP for i in range(AT_ONCE)]
        values = [value_of(cutlass.min(place, end - 1)) for place in places]
        for i in cutlass.range_constexpr(AT_ONCE):
            total += values[i] if places[i] < end else Float32(0.0)
    return warp_reduce((total,), SUM)[0]


@cute.jit
def _draw(counters: cute.Pointer) -> Int32:
    """The number of a chunk, or of one too many; the same in every lane."""
    chunk = Int32(0)
    if cute.arch.lane_idx() == 0:
        chunk = Int32(cute.arch.atomic_add(counters + DRAWN, Int32(1), sem="relaxed", scope="gpu"))
    return Int32(cute.arch.shuffle_sync(chunk, 0))


def _arrive(counter: cute.Pointer) -> Int32:
    """How many came before; what they wrote is visible."""
    return Int32(cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu"))


def _add_count(counter: cute.Pointer, count: Float32) -> tuple[Int32, Float32]:
    """Add to the lower half of a counter of 64 bits, and 1 to the upper one.

    What others have added comes with the answer: nothing else has to be visible, which would take
    a fence.

    Returns:
        The upper half before, the lower one now.
    """
    wide = cute.recast_ptr(counter, dtype=Int64)
    number = Int64(Int32(count))
    before = Int64(cute.arch.atomic_add(wide, number + (1 << 32), sem="relaxed", scope="gpu"))
    return Int32(before >> 32), Float32(Uint32(before & 0xFFFFFFFF) + Uint32(number))


@cute.jit
def _encoded(total: Float32) -> Int32:
    """Its bits, which are never 0: a sum of nothing becomes -0."""
    value = Float32(-0.0) if total == Float32(0.0) else total
    return Int32(value.bitcast(Int32))
