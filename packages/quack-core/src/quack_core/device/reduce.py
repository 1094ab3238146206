"""Reductions, level by level: thread, warp, CTA, cluster. ``barrier.last_arrival`` is the level above.

A partial result is a tuple of float32 values, so that one exchange carries a sum, a maximum, or a
maximum with the sum of exponentials that belongs to it. All trees are fixed by the number of
threads; every thread receives the same bits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from quack_core.device import fast_math
from quack_core.reduction.tiling import WARP

Partial = tuple[Float32, ...]

DIRECT_SLOTS = 8
"""Up to this many partial results each thread reads them all instead of shuffling."""


@dataclass(frozen=True)
class Reduction:
    """An associative operation on tuples of float32 and its neutral element.

    ``combine`` must be straight-line code: it is inlined while a kernel is traced.
    """

    identity: tuple[float, ...]
    combine: Callable[[Partial, Partial], Partial]

    @property
    def width(self) -> int:
        """Float32 values per partial result."""
        return len(self.identity)

    def neutral(self) -> Partial:
        return tuple(Float32(value) for value in self.identity)


def _add(a: Partial, b: Partial) -> Partial:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _max(a: Partial, b: Partial) -> Partial:
    return (cute.arch.fmax(a[0], b[0]),)


@cute.jit
def _online(a: Partial, b: Partial) -> Partial:
    largest = cute.arch.fmax(a[0], b[0])
    # A maximum of -inf on both sides: subtract 0, so that no inf - inf makes a NaN.
    shift = Float32(0.0) if largest == Float32(-math.inf) else largest
    scaled = tuple(v[1] * fast_math.exp2(v[0] - shift) for v in (a, b))
    return largest, scaled[0] + scaled[1]


SUM = Reduction((0.0,), _add)
SUM2 = Reduction((0.0, 0.0), _add)
MAX = Reduction((-math.inf,), _max)
ONLINE_MAX_SUM = Reduction((-math.inf, 0.0), _online)
"""(m, s): the maximum of values in base-2 logarithmic units and the sum of 2 ** (value - m)."""


def thread_sum(values: cute.TensorSSA) -> Float32:
    """Sum of the values that one thread holds, in index order."""
    return values.reduce(cute.ReductionOp.ADD, 0.0, 0)


def thread_max(values: cute.TensorSSA) -> Float32:
    """Maximum of the values that one thread holds."""
    return values.reduce(cute.ReductionOp.MAX, -math.inf, 0)


@cute.jit
def thread_online(values: cute.TensorSSA) -> Partial:
    """(maximum, sum of 2 ** (value - maximum)) of the values that one thread holds."""
    largest = thread_max(values)
    shift = Float32(0.0) if largest == Float32(-math.inf) else largest
    return largest, thread_sum(cute.math.exp2(values - shift, fastmath=True))


def warp_reduce(value: Partial, reduction: Reduction, lanes: int = WARP) -> Partial:
    """Over each group of ``lanes`` neighbouring lanes (a power of two up to 32), by butterfly."""
    for i in range(lanes.bit_length() - 1):
        other = tuple(cute.arch.shuffle_sync_bfly(v, offset=1 << i) for v in value)
        value = reduction.combine(value, other)
    return value


@cute.jit
def collect(partials: cute.Tensor, reduction: cutlass.Constexpr, row: Int32) -> Partial:
    """Combine the partial results of a row that lie in shared memory; every warp does it by itself.

    Args:
        partials: float32 (width, slots, rows).
        row: row of this thread within ``partials``.
    """
    slots = const_expr(cute.size(partials, mode=[1]))
    if const_expr(slots <= DIRECT_SLOTS):  # every thread reads all: no shuffles to wait for
        values = [tuple(partials[i, s, row] for i in range(reduction.width)) for s in range(slots)]
        return combine_tree(values, reduction)
    lanes = const_expr(min(WARP, 1 << (slots - 1).bit_length()))
    lane = cute.arch.lane_idx() % lanes
    total = reduction.neutral()
    for first in cutlass.range_constexpr(0, slots, WARP):
        slot = first + lane
        inside = slot < slots
        at = slot if inside else Int32(0)
        neutral = reduction.neutral()
        read = tuple(partials[i, at, row] for i in range(reduction.width))
        value = tuple(r if inside else n for r, n in zip(read, neutral, strict=True))
        total = reduction.combine(total, value)
    return warp_reduce(total, reduction, lanes)


def combine_tree(values: list[Partial], reduction: Reduction) -> Partial:
    """Combine neighbours until one is left: the shortest chain of operations."""
    while len(values) > 1:
        pairs = [reduction.combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(values) & ~1 :]
    return values[0]


@cute.jit
def cta_reduce(
    value: Partial,
    reduction: cutlass.Constexpr,
    partials: cute.Tensor,
    warp_in_row: Int32,
    row: Int32,
    barrier_id: cutlass.Constexpr[int] = 0,
    num_threads: cutlass.Constexpr = None,
) -> Partial:
    """Over the warps of a CTA that share a row, through shared memory.

    Shared memory: ``partials`` (width, slots, rows); give consecutive calls different buffers, or
    a barrier in between. Synchronises: one barrier of ``num_threads`` threads (default: the CTA).
    """
    value = warp_reduce(value, reduction)
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(reduction.width):
            partials[i, warp_in_row, row] = value[i]
    if const_expr(num_threads is None):
        cute.arch.sync_threads()
    else:
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=num_threads)
    return collect(partials, reduction, row)


@cute.jit
def cluster_send(
    value: Partial, partials: cute.Tensor, slot: Int32, mbar: cute.Pointer, peer: Int32
) -> None:
    """Write a partial result into ``slot`` of CTA ``peer``; completes on that CTA's ``mbar``."""
    for i in cutlass.range_constexpr(len(value)):
        there = partials.iterator + cute.crd2idx((i, slot, 0), partials.layout)
        cute.arch.store_async_dsmem(there, value[i].bitcast(Int32), mbar, peer)


@cute.jit
def cluster_reduce(
    value: Partial,
    reduction: cutlass.Constexpr,
    partials: cute.Tensor,
    mbar: cute.Pointer,
    phase: Int32,
    cluster: cutlass.Constexpr[int],
    tid: Int32,
    extra_bytes: cutlass.Constexpr[int] = 0,
) -> Partial:
    """Over all warps of all CTAs of a cluster: every warp writes to every CTA.

    Shared memory: ``partials`` (width, warps * cluster, 1), which peers write; two buffers in turn
    are enough, because a CTA sends round i + 1 only after it has read round i.
    Synchronises: one phase of ``mbar`` (arrival count 1); thread 0 announces the bytes,
    ``extra_bytes`` of others' making included. The cluster must have initialised its barriers.
    """
    slots = const_expr(cute.size(partials, mode=[1]))
    value = warp_reduce(value, reduction)
    lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.block_idx_in_cluster()
    if tid == 0:
        num_bytes = const_expr(4 * reduction.width * slots + extra_bytes)
        cute.arch.mbarrier_arrive_and_expect_tx(mbar, num_bytes)
    if lane < cluster:
        cluster_send(value, partials, warp * cluster + rank, mbar, lane)
    cute.arch.mbarrier_wait(mbar, phase)
    return collect(partials, reduction, Int32(0))
