"""Step 3, roles: one warp loads and does nothing else; two warpgroups multiply and do nothing else.

New is that warps of one CTA run different code. Whoever loads needs few registers and gives the rest
away; whoever multiplies gets them. The ring of step 2 is all that they share: `quack_core` has it.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.memory
import operands
import steps
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup
from tiling import ATOM_M, WARPGROUP, K, Product, Tiling, arguments

from quack_core.device import barrier, tma
from quack_core.gemm.sm90 import ring
from quack_core.reduction.tiling import WARP

TILING = Tiling(tile_m=128, tile_n=256, stages=4, groups=2, sharing=2)
ALONE, CORNER = (1, 1), ring.Cluster(0, 0)  # no cluster yet


class RolesProduct:
    """Each CTA has a tile of D; its warpgroups have 64 rows of it each."""

    def __init__(self, tiling: Tiling) -> None:
        self.tiling = tiling

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, stream: cuda.CUstream):
        tile_m, tile_n = self.tiling.tile_m, self.tiling.tile_n
        mma = operands.instruction(self.tiling, self.tiling.sharing)
        of_a, of_b = operands.loaded(a, b, self.tiling)
        count = cute.ceil_div(a.shape[1], K)
        grid = [cute.ceil_div(d.shape[0], tile_m), cute.ceil_div(d.shape[1], tile_n), 1]
        self.kernel(mma, of_a, of_b, d, count).launch(
            grid=grid, block=[self.tiling.threads, 1, 1], min_blocks_per_mp=1, stream=stream
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
        group = cute.arch.make_warp_uniform(tid // WARPGROUP)
        stages, tile_m, tile_n = self.tiling.stages, self.tiling.tile_m, self.tiling.tile_n
        smem = cutlass.memory.SmemAllocator()
        barriers = ring.allocate(smem, stages)
        sA, sB = operands.room(smem, of_a), operands.room(smem, of_b)
        a = tma.bind(of_a.atom, of_a.tensor, sA, (tile_m, K))
        b = tma.bind(of_b.atom, of_b.tensor, sB, (tile_n, K))
        ring.init(barriers, stages, 1, self.tiling.groups * WARPGROUP // WARP, tid)
        cute.arch.sync_threads()

        # 128 threads of 40 and 256 of 232 registers take what 384 of 168 do.
        if group == 0:
            cute.arch.setmaxregister_decrease(40)
            if warp == 0:
                self._load(a, b, barriers, row, col, count)
        else:
            cute.arch.setmaxregister_increase(232)
            rA, rB, sums = operands.fragments(mma, sA, sB, self.tiling, group - 1)
            sums.fill(Float32(0.0))
            self._multiply(mma, sums, rA, rB, barriers, count)
            first_row, first_col = row * tile_m + (group - 1) * ATOM_M, col * tile_n
            operands.store_sums(sums, mD, first_row, first_col, tid % WARPGROUP)

    @cute.jit
    def _load(self, a, b, barriers, row: Int32, col: Int32, count: Int32):
        """Fill every stage that is empty, as early as that."""
        phase = barrier.empty_phase()
        for k in cutlass.range(count, unroll=1):
            ring.fill(barriers, phase, a, b, (row, k), (col, k), self.tiling.stage_bytes)
            phase = barrier.next_phase(phase, self.tiling.stages)

    @cute.jit
    def _multiply(self, mma, sums, rA, rB, barriers, count: Int32):
        """Read every stage that is full."""
        phase = barrier.full_phase()
        for _ in cutlass.range(count, unroll=1):
            barrier.wait(barriers.full, phase)
            warpgroup.fence()
            for i in cutlass.range_constexpr(cute.size(rA, mode=[2])):
                at = (None, None, i, phase.stage)
                cute.gemm(mma, sums, rA[at], rB[at], sums)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            ring.release(barriers, phase, ALONE, CORNER)
            phase = barrier.next_phase(phase, self.tiling.stages)


def build(spec: Product, tiling: Tiling) -> tuple[RolesProduct, tuple]:
    """The kernel and its symbolic arguments."""
    return RolesProduct(tiling), arguments()


STEP = steps.Step("roles", TILING)

if __name__ == "__main__":
    steps.main(STEP)
