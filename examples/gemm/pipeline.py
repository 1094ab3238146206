"""Step 2, the pipeline: while a stage is multiplied, the next ones are on their way.

New is a ring of stages, each with two mbarriers. A stage is full when its bytes have come, and empty
when every warp has read it. One warp keeps the ring filled beside multiplying.
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

TILING = Tiling(tile_m=128, tile_n=128, stages=3)  # twice 96 KB of shared memory: two CTAs per SM


class PipelineProduct:
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
        stages, tile_m, tile_n = self.tiling.stages, self.tiling.tile_m, self.tiling.tile_n
        smem = cutlass.memory.SmemAllocator()
        full = barrier.allocate_mbarriers(smem, stages)
        empty = barrier.allocate_mbarriers(smem, stages)
        sA, sB = operands.room(smem, of_a), operands.room(smem, of_b)
        a = tma.bind(of_a.atom, of_a.tensor, sA, (tile_m, K))
        b = tma.bind(of_b.atom, of_b.tensor, sB, (tile_n, K))
        barrier.init_mbarriers(full, stages, 1, tid)  # one arrival: that of whoever expects bytes
        barrier.init_mbarriers(empty, stages, WARPGROUP // WARP, tid)  # one of each warp
        cute.arch.sync_threads()

        rA, rB, sums = operands.fragments(mma, sA, sB, self.tiling, 0)
        sums.fill(Float32(0.0))
        ahead = barrier.empty_phase()  # the stage that is filled next
        for k in cutlass.range(cutlass.min(count, stages - 1), unroll=1):
            if warp == 0:
                self._fill(full, empty, ahead, a, b, row, col, k)
            ahead = barrier.next_phase(ahead, stages)
        phase = barrier.full_phase()  # the stage that is multiplied next
        for k in cutlass.range(count, unroll=1):
            if warp == 0 and k + stages - 1 < count:
                self._fill(full, empty, ahead, a, b, row, col, k + stages - 1)
            ahead = barrier.next_phase(ahead, stages)
            barrier.wait(full, phase)
            warpgroup.fence()
            for i in cutlass.range_constexpr(cute.size(rA, mode=[2])):
                at = (None, None, i, phase.stage)
                cute.gemm(mma, sums, rA[at], rB[at], sums)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            barrier.arrive(empty, phase)  # this warp has read it
            phase = barrier.next_phase(phase, stages)
        operands.store_sums(sums, mD, row * tile_m, col * tile_n, tid)

    @cute.jit
    def _fill(self, full, empty, phase, a, b, row: Int32, col: Int32, k: Int32):
        """Fill a stage, once the warps have read what was in it; one warp calls this."""
        barrier.wait(empty, phase)
        barrier.expect_bytes(full, phase, Int32(self.tiling.stage_bytes))
        tma.load_tile(a, (row, k), phase.stage, full + phase.stage)
        tma.load_tile(b, (col, k), phase.stage, full + phase.stage)


def build(spec: Product, tiling: Tiling) -> tuple[PipelineProduct, tuple]:
    """The kernel and its symbolic arguments."""
    return PipelineProduct(tiling), arguments()


STEP = steps.Step("pipeline", TILING)

if __name__ == "__main__":
    steps.main(STEP)
