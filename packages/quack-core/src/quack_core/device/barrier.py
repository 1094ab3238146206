"""Barriers: mbarriers (asynchronous copies and warps), named barriers (a CTA), counters (the grid).

State rules. An mbarrier lives in shared memory and is initialised by the launch that uses it. A
counter in global memory is zero before a launch and zero after it, because the launch itself clears
it. A counter belongs to launches that cannot overlap, never to a process: two that share one
miscount and hang. ``quack_core.torch_workspace`` gives each stream of a device counters of its own,
and each stream of a graph capture others. A kernel that fails leaves its counters behind in any
state; CUDA then refuses all further work of the process, so no launch meets them.

An mbarrier completes a phase when its arrivals and its announced bytes have come; then the next
phase begins. ``wait`` names a phase by its parity: phases 0, 2, 4 have parity 0. A ring of stages
has two mbarriers per stage, ``full`` and ``empty``. Both sides walk over it with a ``Phase`` each.
The warp that fills it:

    phase = empty_phase()
    for i in range(count):
        wait(empty, phase)
        expect_bytes(full, phase, num_bytes)
        (copies into phase.stage that complete on full + phase.stage)
        phase = next_phase(phase, stages)

The warps that read it:

    phase = full_phase()
    for i in range(count):
        wait(full, phase)
        (read phase.stage)
        arrive(empty, phase)
        phase = next_phase(phase, stages)
"""

import enum
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Int32, Int64

MAX_NAMED_BARRIERS = 16
"""Per CTA; number 0 is the one of ``sync_threads``."""


# --- mbarriers


@dataclass(frozen=True)
class Phase:
    """A place in a ring of mbarriers: a plain value, which loops carry by assignment.

    Args:
        stage: index of the mbarrier.
        parity: of the phase to wait for, 0 or 1.
    """

    stage: Int32
    parity: Int32


def full_phase() -> Phase:
    """For the reader of a ring: its first wait is for stage 0 to be filled."""
    return Phase(Int32(0), Int32(0))


def empty_phase() -> Phase:
    """For the writer of a ring: its waits of the first round pass at once, as nothing is in use."""
    return Phase(Int32(0), Int32(1))


@cute.jit
def next_phase(phase: Phase, stages: cutlass.Constexpr[int]) -> Phase:
    """The stage after this one; the parity changes where the ring begins anew.

    Assign the result, in the function that contains the loop.
    """
    stage, parity = phase.stage + 1, phase.parity
    if stage == stages:
        stage, parity = Int32(0), parity ^ 1
    return Phase(stage, parity)


def allocate_mbarriers(smem: cutlass.memory.SmemAllocator, count: int) -> cute.Pointer:
    """Room for ``count`` mbarriers, 8 bytes each."""
    return smem.allocate_array(Int64, count)


@cute.jit
def init_mbarriers(
    mbar: cute.Pointer,
    count: cutlass.Constexpr[int],
    arrivals: cutlass.Constexpr[int],
    tid: Int32,
) -> None:
    """Thread 0 prepares ``count`` mbarriers for ``arrivals`` arrivals per phase.

    ``expect_bytes`` and ``arrive`` are one arrival each.

    Synchronises: nothing. ``sync_threads`` must follow before the first use; where peers of the
    cluster or multicast copies use the mbarriers, ``cluster_arrive_relaxed`` and ``cluster_wait``.

    Source: PTX ISA, mbarrier.init; fence.mbarrier_init.
    """
    if tid == 0:
        for i in cutlass.range_constexpr(count):
            cute.arch.mbarrier_init(mbar + i, arrivals)
    cute.arch.mbarrier_init_fence()


@cute.jit
def expect_bytes(mbar: cute.Pointer, phase: Phase, num_bytes: Int32) -> None:
    """Announce bytes that copies will bring in this phase, and arrive; before the copies.

    Threads: all lanes of one warp, one of which arrives.

    Source: PTX ISA, mbarrier.arrive.expect_tx.
    """
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(mbar + phase.stage, num_bytes)


@cute.jit
def arrive(mbar: cute.Pointer, phase: Phase, peer: Int32 | None = None) -> None:
    """Arrive once for this warp: what its lanes did before happens before a wait returns.

    Threads: all lanes of one warp, one of which arrives.

    Args:
        peer: rank in the cluster of the CTA whose mbarrier it is; None for this CTA's own. It tells
            the peer that this warp has read a stage, and nothing more: data for the peer come by
            copies that complete there. (An arrival that publishes writes to the cluster waits for
            all of them first, by a fence of the GPU: it halves the speed of a GEMM.)

    Source: PTX ISA, mbarrier.arrive; mapa.
    """
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(mbar + phase.stage, peer)


def wait(mbar: cute.Pointer, phase: Phase) -> None:
    """Wait until the phase is complete; then its copies are visible to the thread that waited.

    Source: PTX ISA, mbarrier.try_wait.parity.
    """
    cute.arch.mbarrier_wait(mbar + phase.stage, phase.parity)


# --- named barriers


class NamedBarrier(enum.IntEnum):
    """Base of the table of named barriers of a kernel: distinct numbers from 1 to 15.

    class Barrier(NamedBarrier):
        EPILOGUE = enum.auto()
        ROWS = enum.auto()

    Raises:
        ValueError: two names share a number, or a number is out of range.
    """

    def __init_subclass__(cls) -> None:
        enum.unique(cls)
        for barrier in cls:
            if not 0 < barrier.value < MAX_NAMED_BARRIERS:
                raise ValueError(
                    f"{cls.__name__}.{barrier.name} is {barrier.value}: "
                    f"must be 1 to {MAX_NAMED_BARRIERS - 1}"
                )


def sync_group(barrier: NamedBarrier, num_threads: int) -> None:
    """Wait for ``num_threads`` threads (whole warps, those of ``arrive_group`` included).

    Source: PTX ISA, bar.sync.
    """
    _check_group(num_threads)
    cute.arch.barrier(barrier_id=int(barrier), number_of_threads=num_threads)


def sync_numbered(number: Int32, num_threads: int) -> None:
    """``sync_group``, by a number that is known when the kernel runs: one barrier per warpgroup.

    Args:
        number: from 1 to 15, the same in all threads that meet; none of a ``NamedBarrier``'s.
    """
    _check_group(num_threads)
    cute.arch.barrier(barrier_id=number, number_of_threads=num_threads)


def arrive_numbered(number: Int32, num_threads: int) -> None:
    """``arrive_group``, likewise."""
    _check_group(num_threads)
    cute.arch.barrier_arrive(barrier_id=number, number_of_threads=num_threads)


def arrive_group(barrier: NamedBarrier, num_threads: int) -> None:
    """Count this warp's threads towards ``num_threads`` without waiting for the others.

    Source: PTX ISA, bar.arrive.
    """
    _check_group(num_threads)
    cute.arch.barrier_arrive(barrier_id=int(barrier), number_of_threads=num_threads)


def _check_group(num_threads: int) -> None:
    if num_threads % 32 or not 0 < num_threads <= 1024:
        raise ValueError(f"num_threads={num_threads}: must be a multiple of 32 up to 1024")


# --- counters in global memory


@cute.jit
def last_arrival(
    counter: cute.Pointer, expected: Int32, shared: cute.Tensor, tid: Int32
) -> Boolean:
    """Whether this CTA is the last of ``expected`` to come here; the last one clears the counter.

    Everything that the CTAs wrote to global memory before is visible to the last one after. Only
    who is last differs from run to run: let the last one add up in a fixed order. Bulk copies to
    global memory count as written once ``tma.bulk_wait_written`` has returned.

    Args:
        counter: int32 in global memory, 0 before and after.
        shared: int32 (1,) in shared memory.

    Synchronises: two CTA barriers; all threads of the CTA must call it.

    Source: PTX ISA, memory consistency model: the barriers extend the order of thread 0's atomic
    addition (acquire and release) to the whole CTA.
    """
    cute.arch.sync_threads()
    if tid == 0:
        before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        shared[0] = before
        if before == expected - 1:
            cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)
    cute.arch.sync_threads()
    return shared[0] == expected - 1


@cute.jit
def semaphore_release(counter: cute.Pointer, tid: Int32, amount: Int32 = 1) -> None:
    """Let ``semaphore_acquire`` of other CTAs see what this CTA wrote before; add ``amount``.

    Whoever knows to be the last to release gives the negative sum of the others' amounts: the
    counter is zero again.

    Synchronises: one CTA barrier; all threads of the CTA must call it.

    Source: PTX ISA, red.release.gpu.
    """
    cute.arch.sync_threads()
    if tid == 0:
        amount = Int32(amount)
        cute.arch.red(counter, amount, op="add", dtype=Int32, sem="release", scope="gpu")


@cute.jit
def semaphore_acquire(counter: cute.Pointer, target: Int32, tid: Int32) -> None:
    """Wait until the counter reaches ``target``, then see what was written before the releases.

    The CTAs waited for must be running already or bound to run before this one ends: wait for those
    of a lower ticket (drawn from a counter), or launch no more CTAs than fit the GPU at once.

    Synchronises: one CTA barrier; all threads of the CTA must call it.

    Source: PTX ISA, ld.acquire.gpu.
    """
    if tid == 0:
        seen = load_acquire(counter)
        while seen < target:
            seen = load_acquire(counter)
    cute.arch.sync_threads()


def load_acquire(counter: cute.Pointer) -> Int32:
    """The counter as it is; what was written before the releases that it shows is visible then.

    Source: PTX ISA, ld.acquire.gpu.
    """
    return cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
