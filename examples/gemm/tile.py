"""Step 1, the tile: TMA brings parts of A and B, a warpgroup multiplies them, again and again.

New are the matrix instruction of a warpgroup, which reads both operands from shared memory, and TMA,
which fills it: one thread names a tile, and no thread holds an element of it. The sums stay in
registers. Loading and multiplying take turns.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.memory
import operands
import steps
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup
from tiling import WARPGROUP, K, Product, Tiling, arguments

from quack_core.device import barrier, tma
from quack_core.reduction.tiling import WARP

TILING = Tiling(tile_m=128, tile_n=128, stages=1)


class TileProduct:
    """Each CTA has a tile of D."""

    def __init__(self, tiling: Tiling) -> None:
        self.tiling = tiling

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, stream: cuda.CUstream):
        tile_m, tile_n = self.tiling.tile_m, self.tiling.tile_n
        mma = operands.instruction(self.tiling, 1)
        of_a, of_b = operands.loaded(a, b, self.tiling)
        count = cute.ceil_div(a.shape[1], K)
        grid = [cute.ceil_div(d.shape[0], tile_m), cute.ceil_div(d.shape[1], tile_n), 1]
        self.kernel(mma, of_a, of_b, d, count).launch(
            grid=grid, block=[WARPGROUP, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        of_a: operands.Operand,
        of_b: operands.Operand,
        mD: cute.Tensor,
        count: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        row, col, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tid // WARP)
        smem = cutlass.memory.SmemAllocator()
        mbar = barrier.allocate_mbarriers(smem, 1)
        sA, sB = operands.room(smem, of_a), operands.room(smem, of_b)
        a = tma.bind(of_a.atom, of_a.tensor, sA, (self.tiling.tile_m, K))
        b = tma.bind(of_b.atom, of_b.tensor, sB, (self.tiling.tile_n, K))
        barrier.init_mbarriers(mbar, 1, 1, tid)
        cute.arch.sync_threads()

        rA, rB, sums = operands.fragments(mma, sA, sB, self.tiling, 0)
        sums.fill(Float32(0.0))
        phase = barrier.full_phase()
        for k in cutlass.range(count, unroll=1):
            if warp == 0:
                barrier.expect_bytes(mbar, phase, Int32(self.tiling.stage_bytes))
                tma.load_tile(a, (row, k), Int32(0), mbar)
                tma.load_tile(b, (col, k), Int32(0), mbar)
            barrier.wait(mbar, phase)  # both are there
            warpgroup.fence()
            for i in cutlass.range_constexpr(cute.size(rA, mode=[2])):  # 16 elements along K each
                at = (None, None, i, 0)
                cute.gemm(mma, sums, rA[at], rB[at], sums)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            cute.arch.sync_threads()  # all have read it: the next load may overwrite it
            phase = barrier.next_phase(phase, 1)
        first_row, first_col = row * self.tiling.tile_m, col * self.tiling.tile_n
        operands.store_sums(sums, mD, first_row, first_col, tid)


def build(spec: Product, tiling: Tiling) -> tuple[TileProduct, tuple]:
    """The kernel and its symbolic arguments."""
    return TileProduct(tiling), arguments()


STEP = steps.Step("tile", TILING)

if __name__ == "__main__":
    steps.main(STEP)
