"""Split-K: the CTAs of a cluster have parts of a tile's K, and each adds up a share of its sums.

The sums travel through distributed shared memory and are added in a fixed order: there is no scratch,
no counter, and every run gives the same bits.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, const_expr

from quack_core.device import barrier
from quack_core.device.barrier import Phase
from quack_core.reduction.tiling import WARP

from .fragment import WARPGROUP

VECTOR = 4
"""float32 values of an access."""
WARPS = 4
"""Of a warpgroup."""


class Inbox(NamedTuple):
    """Where sums of other CTAs come in.

    Args:
        sums: float32 (VECTOR, threads, vectors, senders, warpgroups).
        arrived: an mbarrier per warpgroup, on which they complete.
        read: an mbarrier per warpgroup, at which all to whom this CTA sends arrive.
    """

    sums: cute.Tensor
    arrived: cute.Pointer
    read: cute.Pointer


class Exchange(NamedTuple):
    """A warpgroup's place among those that have parts of the same tile.

    Args:
        part: of K, that this CTA has.
        first, step: the rank in the cluster of part 0, and from one part to the next.
        group: the warpgroup's number.
        thread: of the warpgroup.
    """

    part: Int32
    first: Int32
    step: int
    group: Int32
    thread: Int32


def part(split: Int32, splits: int, steps: Int32) -> tuple[Int32, Int32]:
    """First step along K, and number of steps, of a part; parts are equal but for the last ones."""
    each = (steps + splits - 1) // splits
    first = cutlass.min(split * each, steps)
    return first, cutlass.min(each, steps - first)


def allocate(
    smem: cutlass.memory.SmemAllocator, sums: int, splits: int, shares: int, groups: int
) -> Inbox:
    """Room for an inbox.

    Args:
        sums: of a thread.
        splits: parts of K.
        shares: of the sums; each is added up by one CTA.
        groups: warpgroups.
    """
    shape = (VECTOR, WARPGROUP, sums // shares // VECTOR, splits - 1, groups)
    values = smem.allocate_tensor(Float32, cute.make_layout(shape), byte_alignment=16)
    return Inbox(values, *(barrier.allocate_mbarriers(smem, groups) for _ in range(2)))


def init(
    inbox: Inbox, shares: cutlass.Constexpr[int], groups: cutlass.Constexpr[int], tid: Int32
) -> None:
    """Initialise the mbarriers; the cluster synchronises before their first use."""
    barrier.init_mbarriers(inbox.arrived, groups, 1, tid)
    barrier.init_mbarriers(inbox.read, groups, shares * WARPS, tid)


@cute.jit
def exchange(
    sums: cute.Tensor,
    inbox: Inbox,
    at: Exchange,
    splits: cutlass.Constexpr[int],
    shares: cutlass.Constexpr[int],
    turn: Int32,
) -> cute.Tensor:
    """Send each share to the CTA that adds it up, and add up this CTA's own.

    A share begins with the sums of the CTA that has it, and then come those of the next parts, round
    to the one before.

    Threads: a warpgroup, whose peers in the other CTAs call it as well.

    Args:
        sums: of this part of K.
        shares: CTAs that have one: those with the first parts.
        turn: how many tiles came before.

    Returns:
        The share's sums, of the whole K; of no meaning where ``at.part`` has none.

    Source: PTX ISA, st.async.
    """
    size = const_expr(cute.size(sums) // shares)
    each = [_part_of(sums, share * size, size) for share in range(shares)]
    mine = cute.make_rmem_tensor(size, Float32)
    mine.fill(Float32(0.0))
    phase = Phase(at.group, turn & 1)
    if turn > 0:  # their inboxes are free again
        drain(inbox, at.group, turn)
    for share in cutlass.range_constexpr(shares):
        if at.part == share:
            mine.store(each[share].load())
        else:
            sender = (at.part - share - 1 + splits) % splits
            target = inbox.sums[None, at.thread, None, sender, at.group]
            peer = at.first + share * at.step
            for i in cutlass.range_constexpr(size // VECTOR):
                _send(
                    sums, share * size + i * VECTOR, target[None, i], inbox.arrived + at.group, peer
                )
    if at.part < shares:
        if at.thread < WARP:
            num_bytes = const_expr((splits - 1) * size * WARPGROUP * Float32.width // 8)
            barrier.expect_bytes(inbox.arrived, phase, Int32(num_bytes))
        barrier.wait(inbox.arrived, phase)
        vector = cute.make_rmem_tensor(VECTOR, Float32)
        for sender in cutlass.range_constexpr(splits - 1):
            for i in cutlass.range_constexpr(size // VECTOR):
                source = inbox.sums[None, at.thread, i, sender, at.group]
                cute.autovec_copy(source, vector)
                for v in cutlass.range_constexpr(VECTOR):
                    mine[i * VECTOR + v] = mine[i * VECTOR + v] + vector[v]
        for other in cutlass.range_constexpr(splits):
            barrier.arrive(inbox.read, phase, at.first + other * at.step)
    return mine


def drain(inbox: Inbox, group: Int32, turn: Int32) -> None:
    """Wait until all have read what this CTA sent them: then it may send more, or leave.

    Args:
        turn: how many tiles there were, at least one.
    """
    barrier.wait(inbox.read, Phase(group, (turn - 1) & 1))


def _part_of(sums: cute.Tensor, first: int, size: int) -> cute.Tensor:
    """So many registers of a tensor."""
    return cute.make_tensor(sums.iterator + first, cute.make_layout(size))


def _send(
    sums: cute.Tensor, first: int, target: cute.Tensor, mbar: cute.Pointer, peer: Int32
) -> None:
    """Four sums to the same place of a peer's inbox."""
    bits = tuple(sums[first + v].bitcast(Int32) for v in range(VECTOR))
    pointer = target.iterator.align(VECTOR * Float32.width // 8)
    cute.arch.store_async_dsmem(pointer, bits, mbar, peer)
