"""Barriers: within a CTA (named), between asynchronous copies and threads (mbarrier), over the grid.

State rules: an mbarrier lives in shared memory and is initialised by the launch that uses it. A
counter in global memory is zero before a launch and zero after it: whoever arrives last clears it.
It belongs to launches that cannot overlap, that is to one stream of one device
(``quack_core.torch_workspace``), never to a process.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

MAX_NAMED_BARRIERS = 16
"""Per CTA; number 0 is the one of ``sync_threads``."""


def make_mbarriers(smem: cutlass.memory.SmemAllocator, count: int) -> cute.Pointer:
    """Room for ``count`` mbarriers."""
    return smem.allocate_array(Int64, count)


@cute.jit
def init_mbarriers(
    mbar: cute.Pointer, count: cutlass.Constexpr[int], arrivals: int, tid: Int32
) -> None:
    """Thread 0 prepares ``count`` mbarriers for ``arrivals`` arrivals per phase and publishes them.

    A CTA barrier, or a cluster barrier if peers arrive on them, must follow.
    """
    if tid == 0:
        for i in cutlass.range_constexpr(count):
            cute.arch.mbarrier_init(mbar + i, arrivals)
    cute.arch.mbarrier_init_fence()


@cute.jit
def sync_group(barrier_id: cutlass.Constexpr[int], num_threads: cutlass.Constexpr[int]) -> None:
    """Barrier of ``num_threads`` threads (whole warps) under a number from 1 to 15."""
    if const_expr(not 0 < barrier_id < MAX_NAMED_BARRIERS):
        raise ValueError(f"barrier_id={barrier_id}: must be 1 to {MAX_NAMED_BARRIERS - 1}")
    if const_expr(num_threads % 32 != 0):
        raise ValueError(f"num_threads={num_threads}: must be a multiple of 32")
    cute.arch.barrier(barrier_id=barrier_id, number_of_threads=num_threads)


@cute.jit
def last_arrival(
    counter: cute.Pointer, expected: Int32, shared: cute.Tensor, tid: Int32
) -> Boolean:
    """Whether this CTA is the last of ``expected`` to come here; the last one clears the counter.

    Everything that the CTAs wrote to global memory before is visible to the last one after. Only
    who is last differs from run to run: let the last one add up in a fixed order.

    Args:
        counter: int32 in global memory, 0 before and after.
        shared: int32 (1,) in shared memory.

    Synchronises: two CTA barriers; all threads of the CTA must call it.
    """
    cute.arch.fence_acq_rel_gpu()
    cute.arch.sync_threads()
    if tid == 0:
        before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        shared[0] = before
        if before == expected - 1:
            cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)
    cute.arch.sync_threads()
    is_last = shared[0] == expected - 1
    cute.arch.fence_acq_rel_gpu()
    return is_last


@cute.jit
def semaphore_release(counter: cute.Pointer, tid: Int32, amount: Int32 = 1) -> None:
    """Let ``semaphore_acquire`` of other CTAs see what this CTA wrote before."""
    cute.arch.sync_threads()
    if tid == 0:
        cute.arch.fence_acq_rel_gpu()
        cute.arch.red(counter, amount, op="add", sem="release", scope="gpu")


@cute.jit
def semaphore_acquire(counter: cute.Pointer, target: Int32, tid: Int32) -> None:
    """Wait until the counter reaches ``target``; the CTAs waited for must be running already."""
    if tid == 0:
        seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        while seen < target:
            seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    cute.arch.sync_threads()
