"""Reductions, level by level: thread, warp, CTA, cluster. ``barrier.last_arrival`` is the level above.

A partial result is a tuple of float32 values, so that one exchange carries a sum, a maximum, or a
maximum with the sum of exponentials that belongs to it. All trees are fixed by the number of
threads; every thread receives the same bits.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from quack_core.device import fast_math
from quack_core.reduction.tiling import WARP

Partial = tuple[Float32, ...]

CHAINS = 4
"""Sums of a thread side by side: an addition has to wait for the one before it."""
DIRECT_SLOTS = 8
"""Up to this many partial results each thread reads them all instead of shuffling."""
GRID = 2.0**18
"""Sums rounded to its ulp, 2 ** -5, add up without error as long as they stay below it."""


@dataclass(frozen=True)
class Reduction:
    """An associative operation on tuples of float32 and its neutral element.

    ``combine`` must be straight-line code: it is inlined while a kernel is traced.

    Args:
        within_warp: reduces the partial results of so many neighbouring lanes, where those of one
            warp are simpler to combine; None: ``combine`` does.
        collects: ``within_warp`` also combines results of warps and CTAs, however few.
    """

    identity: tuple[float, ...]
    combine: Callable[[Partial, Partial], Partial]
    within_warp: Callable[[Partial, int], Partial] | None = None
    collects: bool = False

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


def _max_number(a: Partial, b: Partial) -> Partial:
    return (cute.arch.fmax(a[0], b[0]),)


@cute.jit
def _online(a: Partial, b: Partial, power: Callable[[Float32], Float32]) -> Partial:
    """The sum below the smaller maximum is scaled to the larger one, which may skip a NaN: the sum
    has it. Both orders give the same bits, in every kernel: no product is left to be fused."""
    largest, smallest = cute.arch.fmax(a[0], b[0]), cute.arch.fmin(a[0], b[0])
    moved, kept = (a[1], b[1]) if a[0] < b[0] else (b[1], a[1])
    return largest, cute.math.fma(moved, power(smallest - finite(largest)), kept)


@cute.jit
def _online_warp(value: Partial, lanes: int, power: Callable[[Float32], Float32]) -> Partial:
    """One maximum for all lanes first: then their sums simply add up."""
    (largest,) = warp_reduce(value[:1], MAX_NUMBER, lanes)
    scaled = fast_math.product(value[1], power(value[0] - finite(largest)))
    return largest, warp_reduce((scaled,), SUM, lanes)[0]


@cute.jit
def _compensated(a: Partial, b: Partial) -> Partial:
    """As ``_online``; sums carry what they lack."""
    largest, smallest = cute.arch.fmax(a[0], b[0]), cute.arch.fmin(a[0], b[0])
    moved, moved_rest = (a[1], a[2]) if a[0] < b[0] else (b[1], b[2])
    kept, kept_rest = (b[1], b[2]) if a[0] < b[0] else (a[1], a[2])
    scaled, scaled_rest = _times_exp(moved, moved_rest, smallest - finite(largest))
    total, error = fast_math.two_sum(scaled, kept)
    return largest, total, (scaled_rest + kept_rest) + error


@cute.jit
def _compensated_warp(value: Partial, lanes: int) -> Partial:
    """One maximum for all lanes first; sums are then split on a common grid and simply add up."""
    (largest,) = warp_reduce(value[:1], MAX_NUMBER, lanes)
    total, rest = _times_exp(value[1], value[2], value[0] - finite(largest))
    shifted, below = fast_math.fast_two_sum(Float32(GRID), total)
    total, rest = warp_reduce((shifted - Float32(GRID), rest + below), SUM2, lanes)
    return largest, *fast_math.fast_two_sum(total, rest)


def _times_exp(total: Float32, rest: Float32, x: Float32) -> tuple[Float32, Float32]:
    """(total + rest) * e ** x, x <= 0, in two numbers again."""
    t, power = fast_math.exp_parts(x)
    whole = fast_math.product(total, power)
    scaled = cute.math.fma(whole, t, whole)
    error = cute.math.fma(whole, t, whole - scaled)
    return scaled, cute.math.fma(rest, cute.math.fma(power, t, power), error)


@cute.jit
def _moments(a: Partial, b: Partial) -> Partial:
    """Around the first one's point, or the other's where the first has no values."""
    point = b[1] if a[0] == 0.0 else a[1]
    one, other = _around(point, a), _around(point, b)
    return a[0] + b[0], point, one[0] + other[0], one[1] + other[1]


def _moments_warp(value: Partial, lanes: int, even: bool) -> Partial:
    """One point for all lanes first, their mean but for its rounding: then sums simply add up."""
    count, point, distances, _ = value
    total = (cute.math.fma(count, point, distances),)
    if even:
        (total,), number = warp_reduce(total, SUM, lanes), count * Float32(lanes)
    else:
        total, number = warp_reduce((*total, count), SUM2, lanes)
    mean = fast_math.product(total, fast_math.inverse(cute.arch.fmax(number, Float32(1.0))))
    return number, mean, *warp_reduce(_around(mean, value), SUM2, lanes)


def _around(point: Float32, value: Partial) -> Partial:
    """Distances from another point, and their squares: (n, p, a, q) to (a, q)."""
    count, old, distances, squares = value
    step = old - point
    moved = cute.math.fma(count, step, distances)
    return moved, cute.math.fma(step, distances + moved, squares)


@cute.jit
def finite(largest: Float32) -> Float32:
    """A maximum that can be subtracted: 0 for -inf, so that no inf - inf makes a NaN."""
    return Float32(0.0) if largest == Float32(-math.inf) else largest


def _online_reduction(power: Callable[[Float32], Float32]) -> Reduction:
    warp = functools.partial(_online_warp, power=power)
    return Reduction((-math.inf, 0.0), functools.partial(_online, power=power), warp)


def _times(value, factor: float):
    return value if factor == 1.0 else value * Float32(factor)


SUM = Reduction((0.0,), _add)
SUM2 = Reduction((0.0, 0.0), _add)
MAX = Reduction((-math.inf,), _max)
MAX_NUMBER = Reduction((-math.inf,), _max_number)
"""As ``MAX``, in one instruction instead of four; a NaN is skipped."""
ONLINE_MAX_SUM = _online_reduction(fast_math.exp2)
"""(m, s): the maximum of values in base-2 logarithmic units and the sum of 2 ** (value - m)."""
ONLINE_SOFTMAX = _online_reduction(fast_math.exp)
"""(m, s): the maximum of values and the sum of e ** (value - m)."""
ONLINE_SOFTMAX_ROUNDED = _online_reduction(fast_math.exp_rounded)
"""The same to the last bits of float32."""
ONLINE_SOFTMAX_COMPENSATED = Reduction(
    (-math.inf, 0.0, 0.0), _compensated, _compensated_warp, collects=True
)
"""(m, s, rest): s + rest is the same sum as if it were rounded once, of up to 2 ** 18 values."""


def moments(even: bool) -> Reduction:
    """(n, p, a, q): of n values, the sum of distances from p, and that of their squares.

    p is the mean of some of them, but for rounding: q is at most a few times what it is around the
    mean of all, whatever that is, and an outlier takes no digits from the others.

    Args:
        even: all threads have the same number of values, and the threads are a power of two.
    """
    warp = functools.partial(_moments_warp, even=even)
    return Reduction((0.0, 0.0, 0.0, 0.0), _moments, warp, collects=True)


def side_by_side(reduction: Reduction, count: int) -> Reduction:
    """Several results of a reduction at once, one behind the other: fewer barriers, shorter waits."""
    if count == 1:
        return reduction
    width = reduction.width

    def each(operation: Callable[..., Partial], *values: Partial) -> Partial:
        parts = [[v[i * width : (i + 1) * width] for v in values] for i in range(count)]
        return tuple(result for part in parts for result in operation(*part))

    def combine(a: Partial, b: Partial) -> Partial:
        return each(reduction.combine, a, b)

    def within_warp(value: Partial, lanes: int) -> Partial:
        return each(lambda part: lanes_reduce(part, reduction, lanes), value)

    return Reduction(reduction.identity * count, combine, within_warp, reduction.collects)


def thread_sum(values: cute.TensorSSA) -> Float32:
    """Sum of the values that one thread holds: some chains side by side, each in index order."""
    return _chains([values[i] for i in range(cute.size(values.shape))], lambda s, v: s + v)


def thread_compensated_sum(values: Iterable[Float32]) -> tuple[Float32, Float32]:
    """(s, rest): the sum of a thread's values, all within 0 and 1, and what s lacks of it.

    Args:
        values: traced one by one as they are added, so that few are in registers at once.
    """
    total, rest = Float32(1.0), Float32(0.0)  # so that no value is larger than the sum
    for value in values:
        total, error = fast_math.fast_two_sum(total, value)
        rest = rest + error
    return total - Float32(1.0), rest


def thread_squares(values: cute.TensorSSA) -> Float32:
    """Sum of their squares, one rounding each."""
    listed = [values[i] for i in range(cute.size(values.shape))]
    squares = [fast_math.product(v, v) for v in listed[:CHAINS]]
    return _chains(squares + listed[CHAINS:], lambda s, v: cute.math.fma(v, v, s))


def thread_moments(values: cute.TensorSSA, exists: cute.TensorSSA | None = None) -> Partial:
    """(n, p, a, q) of the values that one thread holds; p is the mean of the first few.

    Args:
        exists: which of them count: the first so many; the others are finite.
    """
    return thread_distances(values, exists)[0]


@cute.jit
def thread_distances(
    values: cute.TensorSSA, exists: cute.TensorSSA | None = None
) -> tuple[Partial, cute.TensorSSA]:
    """``thread_moments``, and the distances of the values from p.

    Args:
        exists: which of them count: the first so many; the others are finite.
    """
    size = const_expr(cute.size(values.shape))
    few = const_expr(min(CHAINS, 1 << (size.bit_length() - 1)))
    count, point = Float32(size), _mean_of(values, few)
    left = values - point
    distances, squares = thread_sum(left), thread_squares(left)
    if const_expr(exists is not None):
        if not exists[size - 1]:  # some threads at the end of a row
            ones = cute.where(exists, cute.full_like(values, 1.0), cute.full_like(values, 0.0))
            count = thread_sum(ones)
            point = point if count >= few else values[0]
            left = cute.where(exists, values - point, cute.full_like(values, 0.0))
            distances, squares = thread_sum(left), thread_squares(left)
    return (count, point, distances, squares), left


def _mean_of(values: cute.TensorSSA, count: int) -> Float32:
    """Of the first few, a power of two."""
    total = combine_tree([(values[i],) for i in range(count)], SUM)
    return fast_math.product(total[0], Float32(1 / count))


def _chains(values: list[Float32], add: Callable[[Float32, Float32], Float32]) -> Float32:
    """Add values to the first few, in turn, and these up."""
    sums = values[:CHAINS]
    for i, value in enumerate(values[CHAINS:]):
        sums[i % CHAINS] = add(sums[i % CHAINS], value)
    return combine_tree([(s,) for s in sums], SUM)[0]


def thread_max(values: cute.TensorSSA) -> Float32:
    """Maximum of the values that one thread holds."""
    return values.reduce(cute.ReductionOp.MAX, -math.inf, 0)


@cute.jit
def thread_online(values: cute.TensorSSA, factor: cutlass.Constexpr[float] = 1.0) -> Partial:
    """(maximum, sum of 2 ** ((value - maximum) * factor)) of the values that one thread holds."""
    largest = thread_max(values)
    shift = finite(largest)
    return largest, thread_sum(cute.math.exp2(_times(values - shift, factor), fastmath=True))


def warp_reduce(value: Partial, reduction: Reduction, lanes: int = WARP) -> Partial:
    """Over each group of ``lanes`` neighbouring lanes (a power of two up to 32), by butterfly."""
    for i in range(lanes.bit_length() - 1):
        other = tuple(cute.arch.shuffle_sync_bfly(v, offset=1 << i) for v in value)
        value = reduction.combine(value, other)
    return value


def lanes_reduce(value: Partial, reduction: Reduction, lanes: int) -> Partial:
    """Over each group of ``lanes`` neighbouring lanes, in the reduction's own way if it has one."""
    if reduction.within_warp is None:
        return warp_reduce(value, reduction, lanes)
    return reduction.within_warp(value, lanes)


@cute.jit
def collect(partials: cute.Tensor, reduction: cutlass.Constexpr, row: Int32) -> Partial:
    """Combine the partial results of a row that lie in shared memory; every warp does it by itself.

    Args:
        partials: float32 (width, slots, rows).
        row: row of this thread within ``partials``.
    """
    slots = const_expr(cute.size(partials, mode=[1]))
    if const_expr(
        slots <= (1 if reduction.collects else DIRECT_SLOTS)
    ):  # every thread reads all: no shuffles to wait for
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
        total = reduction.combine(total, value) if first or not reduction.collects else value
    if const_expr(reduction.collects):
        return reduction.within_warp(total, lanes)
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
