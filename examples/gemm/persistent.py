"""Step 4, the persistent kernel: CTAs stay, walk over tiles, and load across the end of a tile.

New is that the role of loading has no notion of when a tile ends: while the sums of one are stored,
the ring fills with the next one. And as a CTA has many tiles, their order is ours to choose:
`order.locate` takes them by groups of rows, so that those at work together share A and B in L2.
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

TILING = Tiling(tile_m=128, tile_n=256, stages=4, groups=2, sharing=2)
GROUP = 8  # rows of tiles that are worked on together
ALONE, CORNER = (1, 1), ring.Cluster(0, 0)
STORE = 1  # first of the named barriers of warpgroups


class PersistentProduct:
    """Each CTA has every n-th tile of D, in the order of `order`; there are as many as the GPU holds."""

    def __init__(self, tiling: Tiling) -> None:
        self.tiling = tiling

    @cute.jit
    def __call__(
        self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, most: Int32, stream: cuda.CUstream
    ):
        tile_m, tile_n = self.tiling.tile_m, self.tiling.tile_n
        rows, cols = cute.ceil_div(d.shape[0], tile_m), cute.ceil_div(d.shape[1], tile_n)
        tiles = order.make(rows, cols, Int32(1), GROUP)
        self.kernel(
            operands.instruction(self.tiling, self.tiling.sharing),
            operands.instruction(self.tiling, 1),
            *operands.loaded(a, b, self.tiling),
            operands.stored(d, self.tiling),
            cute.ceil_div(a.shape[1], K),
            tiles,
        ).launch(
            grid=[cutlass.min(tiles.total, most), 1, 1],
            block=[self.tiling.threads, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        mma_of_group: cute.TiledMma,
        of_a: operands.Operand,
        of_b: operands.Operand,
        of_d: operands.Operand,
        count: Int32,
        tiles: order.Order,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // WARP)
        group = cute.arch.make_warp_uniform(tid // WARPGROUP)
        smem = cutlass.memory.SmemAllocator()
        barriers = ring.allocate(smem, self.tiling.stages)
        sA, sB, sD = (operands.room(smem, one) for one in (of_a, of_b, of_d))
        a = tma.bind(of_a.atom, of_a.tensor, sA, (self.tiling.tile_m, K))
        b = tma.bind(of_b.atom, of_b.tensor, sB, (self.tiling.tile_n, K))
        ring.init(barriers, self.tiling.stages, 1, self.tiling.groups * WARPGROUP // WARP, tid)
        cute.arch.sync_threads()

        if group == 0:
            cute.arch.setmaxregister_decrease(40)
            if warp == 0:
                self._load(a, b, barriers, tiles, count)
        else:
            cute.arch.setmaxregister_increase(232)
            thread, group = tid % WARPGROUP, group - 1
            rA, rB, sums = operands.fragments(mma, sA, sB, self.tiling, group)
            d = tma.bind(of_d.atom, of_d.tensor, sD, (ATOM_M, PIECE))
            sink = store.make_sink(mma_of_group, d, sD, operands.ROW, BFloat16, thread)
            self._multiply(mma, sums, rA, rB, barriers, sink, tiles, count, group, thread)

    @cute.jit
    def _load(self, a, b, barriers, tiles: order.Order, count: Int32):
        """Fill stages, tile after tile: the phase goes on where the last tile left it."""
        phase, work = barrier.empty_phase(), cute.arch.block_idx()[0]
        while work < tiles.total:
            row, col, _ = order.locate(tiles, work, GROUP)
            for k in cutlass.range(count, unroll=1):
                ring.fill(barriers, phase, a, b, (row, k), (col, k), self.tiling.stage_bytes)
                phase = barrier.next_phase(phase, self.tiling.stages)
            work += cute.arch.grid_dim()[0]

    @cute.jit
    def _multiply(
        self, mma, sums, rA, rB, barriers, sink, tiles: order.Order, count, group: Int32, thread
    ):
        """Multiply and store, tile after tile."""
        stages, sharing = self.tiling.stages, self.tiling.sharing
        phase, work = barrier.full_phase(), cute.arch.block_idx()[0]
        while work < tiles.total:
            row, col, _ = order.locate(tiles, work, GROUP)
            sums.fill(Float32(0.0))
            phase = ring.multiply(mma, sums, rA, rB, barriers, phase, count, stages, ALONE, CORNER)
            operands.store_tile(
                sums, sink, row * sharing + group, col, group, STORE + group, thread
            )
            work += cute.arch.grid_dim()[0]
        if thread < WARP:
            tma.bulk_wait_read(0)  # shared memory is needed until the last store has read it


def build(spec: Product, tiling: Tiling) -> tuple[PersistentProduct, tuple]:
    """The kernel and its symbolic arguments."""
    return PersistentProduct(tiling), arguments(stays=True)


STEP = steps.Step("persistent", TILING, stays=True)

if __name__ == "__main__":
    steps.main(STEP)
