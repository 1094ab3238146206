"""Split-K: several CTAs have parts of a tile's K; whichever comes last adds their sums, in order.

So the result does not depend on who is last, and nobody waits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from quack_core.device import barrier

from .fragment import WARPGROUP

VECTOR = 4
"""float32 values of an access."""


def part(split: Int32, splits: int, steps: Int32) -> tuple[Int32, Int32]:
    """First step along K, and number of steps, of a part; parts are equal but for the last ones."""
    each = (steps + splits - 1) // splits
    first = cutlass.min(split * each, steps)
    return first, cutlass.min(each, steps - first)


def elements(accumulators: int, groups: int, splits: int) -> int:
    """float32 values that the parts of a tile need.

    Args:
        accumulators: sums of a thread.
        groups: warpgroups that share a tile.
    """
    return accumulators * WARPGROUP * groups * splits


@cute.jit
def collect(
    sums: cute.Tensor,
    parts: cute.Tensor,
    counters: cute.Tensor,
    answer: cute.Tensor,
    tile: Int32,
    split: Int32,
    splits: cutlass.Constexpr[int],
    groups: cutlass.Constexpr[int],
    group: Int32,
    number: Int32,
    thread: Int32,
) -> Boolean:
    """Leave this part's sums to the last one; the last one gets the sums of all.

    Threads: a warpgroup.
    Synchronises: two named barriers; the counter is zero again when the last one has come.

    Args:
        sums: of this part; afterwards, in the last one, of all.
        parts: float32 scratch, ``elements`` of each tile.
        counters: int32, one of each tile's warpgroups; zero before and after.
        answer: int32 in shared memory, one of each warpgroup.
        tile: its number.
        number: of the warpgroup's named barrier.

    Returns:
        Whether this was the last one.

    Source: PTX ISA, memory consistency model: the barriers extend the order of thread 0's atomic
    addition (acquire and release) to the warpgroup.
    """
    size = const_expr(cute.size(sums))
    first = (Int64(tile) * splits * groups + group) * (size * WARPGROUP) + thread * VECTOR
    stride = const_expr(groups * size * WARPGROUP)  # from one part to the next
    mine = parts.iterator + first + Int64(split) * stride
    vector = cute.make_rmem_tensor(VECTOR, Float32)
    for i in cutlass.range_constexpr(size // VECTOR):
        for v in cutlass.range_constexpr(VECTOR):
            vector[v] = sums[i * VECTOR + v]
        cute.autovec_copy(vector, _vector(mine, i))
    barrier.sync_numbered(number, WARPGROUP)
    if thread == 0:
        counter = counters.iterator + (tile * groups + group)
        before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        answer[group] = before
        if before == splits - 1:
            counters[tile * groups + group] = Int32(0)
    barrier.sync_numbered(number, WARPGROUP)
    last = Boolean(answer[group] == splits - 1)
    if last:
        sums.fill(Float32(0.0))
        for s in cutlass.range(splits, unroll=1):
            source = parts.iterator + first + Int64(s) * stride
            for i in cutlass.range_constexpr(size // VECTOR):
                cute.autovec_copy(_vector(source, i), vector)
                for v in cutlass.range_constexpr(VECTOR):
                    sums[i * VECTOR + v] = sums[i * VECTOR + v] + vector[v]
    return last


def _vector(pointer: cute.Pointer, i: int) -> cute.Tensor:
    """A thread's vector number i; neighbours have neighbouring ones."""
    start = (pointer + i * VECTOR * WARPGROUP).align(16)
    return cute.make_tensor(start, cute.make_layout(VECTOR))
