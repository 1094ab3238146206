"""Step 6, ping-pong: two warpgroups have a tile each; one multiplies while the other one stores.

New is that they take turns at the tensor cores, by two named barriers: whoever has multiplied calls
the other one, then stores. Both read the same ring, and each leaves out the stages of the other one.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.memory
import operands
import steps
from cutlass import BFloat16, Float32, Int32, cute
from tiling import ATOM_M, PIECE, WARPGROUP, K, Product, Tiling, arguments

from quack_core.device import barrier, tma
from quack_core.gemm import order
from quack_core.gemm.sm90 import ring, store
from quack_core.reduction.tiling import WARP

TILING = Tiling(tile_m=64, tile_n=256, stages=4, groups=2, sharing=1, cluster=2)
GROUP = 8  # rows of clusters that are worked on together
SHAPE = (TILING.cluster, 1)  # of a cluster: rows and columns of CTAs
STORE, TURN = 1, 3  # first of the named barriers of warpgroups: to store, and whose turn it is
BOTH = 2 * WARPGROUP


class PingpongProduct:
    """As in step 5, each cluster has every n-th pair of tiles; of those, warpgroups take every other."""

    def __init__(self, tiling: Tiling) -> None:
        self.tiling = tiling

    @cute.jit
    def __call__(
        self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, most: Int32, stream: cuda.CUstream
    ):
        tile_m, tile_n = self.tiling.tile_m, self.tiling.tile_n
        rows = cute.ceil_div(d.shape[0], tile_m * self.tiling.cluster)
        cols = cute.ceil_div(d.shape[1], tile_n)
        pairs = order.make(rows, cols, Int32(1), GROUP)
        self.kernel(
            operands.instruction(self.tiling, 1),
            *operands.loaded(a, b, self.tiling),
            operands.stored(d, self.tiling),
            cute.ceil_div(a.shape[1], K),
            pairs,
        ).launch(
            grid=[self.tiling.cluster, 1, cutlass.min(pairs.total, most)],
            block=[self.tiling.threads, 1, 1],
            cluster=[*SHAPE, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        of_a: operands.Operand,
        of_b: operands.Operand,
        of_d: operands.Operand,
        count: Int32,
        pairs: order.Order,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // WARP)
        group = cute.arch.make_warp_uniform(tid // WARPGROUP)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx()[0])  # in the cluster
        smem = cutlass.memory.SmemAllocator()
        barriers = ring.allocate(smem, self.tiling.stages)
        sA, sB, sD = (operands.room(smem, one) for one in (of_a, of_b, of_d))
        a = tma.bind(of_a.atom, of_a.tensor, sA, (self.tiling.tile_m, K))
        tile_b, ranks = (self.tiling.tile_n, K), cute.make_layout((*SHAPE, 1))
        b = tma.bind_shared(of_b.atom, of_b.tensor, sB, tile_b, ranks, (rank, 0, 0), 0)
        warps = WARPGROUP // WARP  # that read a stage: those of one of the two
        ring.init(barriers, self.tiling.stages, self.tiling.cluster, warps, tid)
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()  # the peer's mbarriers are there as well

        if group == 0:
            cute.arch.setmaxregister_decrease(40)
            if warp == 0:
                self._load(a, b, barriers, pairs, count, rank)
        else:
            cute.arch.setmaxregister_increase(232)
            thread, group = tid % WARPGROUP, group - 1
            rA, rB, sums = operands.fragments(mma, sA, sB, self.tiling, 0)
            d = tma.bind(of_d.atom, of_d.tensor, sD, (ATOM_M, PIECE))
            sink = store.make_sink(mma, d, sD, operands.ROW, BFloat16, thread)
            self._multiply(mma, sums, rA, rB, barriers, sink, pairs, count, rank, group, thread)

    @cute.jit
    def _load(self, a, b, barriers, pairs: order.Order, count: Int32, rank: Int32):
        """Fill stages: all of the own part of A, and half of B's part for both."""
        phase, work = barrier.empty_phase(), cute.arch.block_idx()[2]
        while work < pairs.total:
            row, col, _ = order.locate(pairs, work, GROUP)
            for k in cutlass.range(count, unroll=1):
                at_a, at_b = (row * self.tiling.cluster + rank, k), (col, k)
                ring.fill(barriers, phase, a, b, at_a, at_b, self.tiling.stage_bytes)
                phase = barrier.next_phase(phase, self.tiling.stages)
            work += cute.arch.grid_dim()[2]
        ring.drain(barriers, phase, self.tiling.stages)  # nobody leaves while the peer signals it

    @cute.jit
    def _multiply(
        self, mma, sums, rA, rB, barriers, sink, pairs: order.Order, count, rank, group, thread
    ):
        """Multiply when it is this warpgroup's turn, then store, every other tile."""
        stages, at, step = self.tiling.stages, ring.Cluster(rank, Int32(0)), cute.arch.grid_dim()[2]
        phase, first = barrier.full_phase(), cute.arch.block_idx()[2]
        if group == 1:
            phase = ring.skip(phase, count, stages)  # the first tile is the other one's
            barrier.arrive_numbered(Int32(TURN), BOTH)  # who begins
        work = first + group * step
        while work < pairs.total:
            row, col, _ = order.locate(pairs, work, GROUP)
            sums.fill(Float32(0.0))
            barrier.sync_numbered(TURN + group, BOTH)  # wait to be called
            phase = ring.multiply(mma, sums, rA, rB, barriers, phase, count, stages, SHAPE, at)
            barrier.arrive_numbered(TURN + 1 - group, BOTH)  # call the other one
            phase = ring.skip(phase, count, stages)
            operands.store_tile(
                sums, sink, row * self.tiling.cluster + rank, col, group, STORE + group, thread
            )
            work += step * 2
        tiles = (pairs.total - first + step - 1) // step
        if group == tiles % 2:  # was called after the last tile
            barrier.sync_numbered(TURN + group, BOTH)
        if thread < WARP:
            tma.bulk_wait_read(0)


def build(spec: Product, tiling: Tiling) -> tuple[PingpongProduct, tuple]:
    """The kernel and its symbolic arguments."""
    return PingpongProduct(tiling), arguments(stays=True)


STEP = steps.Step("pingpong", TILING, stays=True)

if __name__ == "__main__":
    steps.main(STEP)
