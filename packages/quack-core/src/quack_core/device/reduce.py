"""Reductions, level by level: thread, warp, CTA, cluster. ``barrier.last_arrival`` is the level above.

A partial result is a tuple of float32 values, so that one exchange carries a sum, a maximum, or a
maximum with the sum of exponentials that belongs to it. All trees are fixed by the number of
threads; every thread receives the same bits.
"""

import functools
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
    return (cutlass.max(a[0], b[0]),)


@cute.jit
def _online(a: Partial, b: Partial, factor: float) -> Partial:
    largest = cutlass.max(a[0], b[0])
    # A maximum of -inf on both sides: subtract 0, so that no inf - inf makes a NaN.
    shift = Float32(0.0) if largest == Float32(-math.inf) else largest
    scaled = tuple(v[1] * fast_math.exp2(_times(v[0] - shift, factor)) for v in (a, b))
    return largest, scaled[0] + scaled[1]


def _times(value, factor: float):
    return value if factor == 1.0 else value * Float32(factor)


@cute.jit
def _merge_moments(a: Partial, b: Partial) -> Partial:
    """Both orders give the same bits, so that all lanes of a butterfly agree."""
    count = a[0] + b[0]
    base = a[1] if b[0] == Float32(0.0) else b[1]
    if a[0] > Float32(0.0) and b[0] > Float32(0.0) and a[1] < b[1]:
        base = a[1]
    from_base = tuple((v[1] - base) + v[2] for v in (a, b))
    share = fast_math.reciprocal(cutlass.max(count, Float32(1.0)))
    offset = (a[0] * from_base[0] + b[0] * from_base[1]) * share
    apart = from_base[1] - from_base[0]
    return count, base, offset, (a[3] + b[3]) + apart * apart * (a[0] * b[0] * share)


SUM = Reduction((0.0,), _add)
SUM2 = Reduction((0.0, 0.0), _add)
MAX = Reduction((-math.inf,), _max)
ONLINE_MAX_SUM = Reduction((-math.inf, 0.0), functools.partial(_online, factor=1.0))
"""(m, s): the maximum of values in base-2 logarithmic units and the sum of 2 ** (value - m)."""
ONLINE_SOFTMAX = Reduction((-math.inf, 0.0), functools.partial(_online, factor=fast_math.LOG2_E))
"""(m, s): the maximum of values and the sum of e ** (value - m)."""

MOMENTS = Reduction((0.0, 0.0, 0.0, 0.0), _merge_moments)
"""(number of values, base, mean - base, sum of squared distances from the mean).

The base is one of the values, so that nothing cancels and the mean keeps bits below its own ulp.

Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances, 1979.
"""


def thread_sum(values: cute.TensorSSA) -> Float32:
    """Sum of the values that one thread holds, in index order."""
    return values.reduce(cute.ReductionOp.ADD, 0.0, 0)


def thread_max(values: cute.TensorSSA) -> Float32:
    """Maximum of the values that one thread holds."""
    return values.reduce(cute.ReductionOp.MAX, -math.inf, 0)


@cute.jit
def thread_online(values: cute.TensorSSA, factor: cutlass.Constexpr[float] = 1.0) -> Partial:
    """(maximum, sum of 2 ** ((value - maximum) * factor)) of the values that one thread holds."""
    largest = thread_max(values)
    shift = Float32(0.0) if largest == Float32(-math.inf) else largest
    return largest, thread_sum(cute.math.exp2(_times(values - shift, factor), fastmath=True))


def thread_moments(values: cute.TensorSSA, exists: cute.TensorSSA | None = None) -> Partial:
    """``MOMENTS`` of the values that one thread holds.

    Args:
        exists: which of them count, the first if any; the others are 0. None: all.
    """
    base = values[0]
    away, count = values - base, Float32(cute.size(values.shape))
    share = Float32(1.0 / cute.size(values.shape))
    if exists is not None:
        away = cute.where(exists, away, Float32(0.0))
        count = thread_sum(cute.where(exists, cute.full_like(values, 1.0), Float32(0.0)))
        share = fast_math.reciprocal(cutlass.max(count, Float32(1.0)))
    offset = thread_sum(away) * share
    away = away - offset
    if exists is not None:
        away = cute.where(exists, away, Float32(0.0))
    return count, base, offset, thread_sum(away * away)


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
def cta_post(value: Partial, partials: cute.Tensor, warp_in_row: Int32, row: Int32) -> None:
    """Write a warp's partial result into shared memory: (width, slots, rows).

    A barrier must follow before ``collect``, and must lie between it and the next use of the
    buffer.
    """
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(len(value)):
            partials[i, warp_in_row, row] = value[i]


@cute.jit
def cluster_post(
    value: Partial,
    partials: cute.Tensor,
    mbar: cute.Pointer,
    cluster: cutlass.Constexpr[int],
    tid: Int32,
    extra_bytes: cutlass.Constexpr[int] = 0,
) -> None:
    """Write a CTA's partial result into every CTA of the cluster; completes on their ``mbar``.

    Called by the first warp of a CTA, all lanes with the same value: one message per pair of CTAs,
    which is faster than one per warp and pair.

    Shared memory: ``partials`` (width, cluster, 1), which peers write.
    Synchronises: nothing. Lane 0 announces the bytes that will arrive here, ``extra_bytes`` of
    others' making included, and is the one arrival of the phase. All CTAs must have initialised
    their barriers, and a CTA that has left must not be sent anything.
    """
    width, rank = const_expr(len(value)), cute.arch.block_idx_in_cluster()
    if tid == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(mbar, 4 * width * cluster + extra_bytes)
    if tid < cluster:  # lane i writes to CTA i
        for i in cutlass.range_constexpr(width):
            there = partials.iterator + cute.crd2idx((i, rank, 0), partials.layout)
            cute.arch.store_async_dsmem(there, value[i].bitcast(Int32), mbar, tid)
