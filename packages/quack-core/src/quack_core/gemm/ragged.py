"""Groups of rows, one below the other, in clusters that belong to one group each.

How many rows a group has is known on the device only. So those who walk over the clusters of all
groups find the group of a cluster themselves: a warp looks at 32 groups at a time. Within a group the
order is that of `quack_core.gemm.order`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from quack_core.reduction.tiling import WARP


class Groups(NamedTuple):
    """
    Args:
        offsets: int32 (G + 1,): where groups begin, and where the last one ends. What is out of order
            or out of range makes groups shorter, and nothing is read or written outside.
        rows: of all groups.
        across: clusters side by side.
    """

    offsets: cute.Tensor
    rows: Int32
    across: Int32


@dataclass(frozen=True)
class Span:
    """A group, and which clusters are its own: a plain value, which loops carry by assignment.

    Args:
        group: its number; as many as there are groups, or more: there is none.
        before: clusters of the groups before.
        behind: and its own.
        first: row.
        end: the row behind its last one.
    """

    group: Int32
    before: Int32
    behind: Int32
    first: Int32
    end: Int32


def begin() -> Span:
    """Before the first group."""
    return Span(*(Int32(0) for _ in range(5)))


def most(groups: Groups, height: int) -> Int32:
    """At most so many clusters there are."""
    count = Int32(groups.offsets.shape[0]) - 1
    return (groups.rows // height + count) * groups.across


def is_group(groups: Groups, span: Span) -> cutlass.Boolean:
    """Whether there is such a group, or clusters have come to their end."""
    return span.group < groups.offsets.shape[0] - 1


@cute.jit
def find(
    groups: Groups, span: Span, work: Int32, lane: Int32, height: cutlass.Constexpr[int]
) -> Span:
    """The group of a cluster.

    Threads: all lanes of one warp, converged.

    Args:
        span: of an earlier cluster, or `begin`.
        work: number of the cluster, of all.
        height: rows of a cluster.
    """
    count = Int32(groups.offsets.shape[0]) - 1
    group, before, behind = span.group, span.before, span.behind
    first, end = span.first, span.end
    while (behind <= work) & (group < count):
        start = _offset(groups, group + lane, count)
        stop = cutlass.max(_offset(groups, group + lane + 1, count), start)
        own = cute.ceil_div(stop - start, height) * groups.across
        upto = before + _up_to(own, lane)
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= work))
        at = cutlass.min(passed, WARP - 1)
        behind = cute.arch.shuffle_sync(upto, at)
        own = cute.arch.shuffle_sync(own, at)
        first, end = cute.arch.shuffle_sync(start, at), cute.arch.shuffle_sync(stop, at)
        before = behind - own if passed < WARP else behind
        group += passed
    return Span(group, before, behind, first, end)


def place(groups: Groups, span: Span, work: Int32, height: int, band: int) -> tuple[Int32, Int32]:
    """First row, and column in clusters, of a cluster of a group.

    Args:
        band: rows of clusters that are worked on together; at least 1.
    """
    inside = work - span.before
    top = inside // (groups.across * band) * band
    inside = inside - top * groups.across
    tall = cutlass.min(cute.ceil_div(span.end - span.first, height) - top, band)
    col = inside // tall
    return span.first + (top + inside - col * tall) * height, col


def _offset(groups: Groups, i: Int32, count: Int32) -> Int32:
    """Where a group begins; one that there is not, at the end of the last one."""
    return cutlass.max(cutlass.min(groups.offsets[cutlass.min(i, count)], groups.rows), 0)


@cute.jit
def _up_to(value: Int32, lane: Int32) -> Int32:
    """The sum over all lanes up to this one."""
    for i in cutlass.range_constexpr(WARP.bit_length() - 1):
        other = cute.arch.shuffle_sync_up(value, offset=1 << i)
        value = value + (other if lane >= 1 << i else Int32(0))
    return value
