"""Step 4, the cluster: four CTAs read one row and send one another their sums.

New is `cluster_sum`. The CTAs of a cluster run at the same time on neighbouring SMs and can write
into one another's shared memory. Such a store is asynchronous: it ends on an mbarrier where it
arrives, and whoever waits there needs no barrier across the cluster.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.memory
import staircase
from cutlass import Float32, Int32, cute

from quack_core.device import barrier
from quack_core.device.reduce import SUM, collect, cta_post, thread_sum, warp_reduce
from quack_core.reduction.tiling import WARP, RowTiling

VEC = 4
THREADS = 256
WARPS = THREADS // WARP
CLUSTER = 4


def tiling(n: int) -> RowTiling:
    return RowTiling(n, VEC, threads_per_row=THREADS, cluster=CLUSTER)


def additions(tiling: RowTiling, rows: int) -> int:
    """A thread's elements, the tree over its warp, the warps, the CTAs."""
    return tiling.values + staircase.SHUFFLES + WARPS + CLUSTER


@cute.jit
def cta_sum(value: Float32, partials: cute.Tensor, tid: Int32) -> Float32:
    """Step 3. Partials are (values of a partial result, warps, rows of the CTA) here."""
    cta_post(warp_reduce((value,), SUM), partials, tid // WARP, Int32(0))
    cute.arch.sync_threads()
    (total,) = collect(partials, SUM, Int32(0))
    return total


@cute.jit
def cluster_sum(
    value: Float32, partials: cute.Tensor, mbar: cute.Pointer, rank: Int32, tid: Int32
) -> Float32:
    """Sum over the CTAs of a cluster; each thread gets it. All CTAs must have their mbarrier.

    No CTA leaves early: it waits for a message of each peer, and so nobody sends to one that left.

    Args:
        value: the sum of this CTA, the same in all threads.
        partials: float32 (CLUSTER,) in shared memory, which the peers fill.
    """
    phase = barrier.full_phase()
    if tid < WARP:
        barrier.expect_bytes(mbar, phase, 4 * CLUSTER)  # what will arrive here
        if tid < CLUSTER:  # lane i writes to CTA i, itself included
            mine = partials.iterator + rank
            cute.arch.store_async_dsmem(mine, value.bitcast(Int32), mbar, tid)
    barrier.wait(mbar, phase)
    total = Float32(0.0)
    for peer in cutlass.range_constexpr(CLUSTER):
        total += partials[peer]
    return total


class ClusterSum:
    """Row i of x is summed by cluster i, a quarter by each of its CTAs."""

    def __init__(self, tiling: RowTiling) -> None:
        self.tiling = tiling

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, out).launch(
            grid=[CLUSTER * x.shape[0], 1, 1],
            block=[THREADS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mOut: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row, rank = block // CLUSTER, block % CLUSTER
        smem = cutlass.memory.SmemAllocator()
        of_warps = smem.allocate_tensor(Float32, cute.make_layout((1, WARPS, 1)), byte_alignment=16)
        of_ctas = smem.allocate_tensor(Float32, cute.make_layout(CLUSTER), byte_alignment=16)
        mbar = barrier.allocate_mbarriers(smem, 1)
        barrier.init_mbarriers(mbar, 1, 1, tid)
        cute.arch.cluster_arrive_relaxed()  # the peers get ready while the row is on its way
        values = staircase.load_row(mX, row, self.tiling, tid, rank)
        total = cta_sum(thread_sum(values), of_warps, tid)
        cute.arch.cluster_wait()
        total = cluster_sum(total, of_ctas, mbar, rank, tid)
        if tid == 0 and rank == 0:
            mOut[row] = total


def build(spec: staircase.Sum, tiling: RowTiling) -> tuple[ClusterSum, tuple]:
    """The kernel and its symbolic arguments."""
    return ClusterSum(tiling), staircase.row_arguments(spec.n)


STEP = staircase.Step("cluster", tiling, additions, lengths=(16384, 131072))

if __name__ == "__main__":
    staircase.main(STEP)
