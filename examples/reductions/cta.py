"""Step 3, the CTA: 256 threads read one row; their warps meet in shared memory.

New is `cta_sum`. Warps know nothing of one another's registers: each writes its sum into shared
memory, and after a barrier every thread reads them all.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.memory
import staircase
from cutlass import Float32, Int32, cute

from quack_core.device.reduce import SUM, thread_sum, warp_reduce
from quack_core.reduction.tiling import WARP, RowTiling

VEC = 4
THREADS = 256
WARPS = THREADS // WARP


def tiling(n: int) -> RowTiling:
    return RowTiling(n, VEC, threads_per_row=THREADS)


def additions(tiling: RowTiling, rows: int) -> int:
    """A thread's elements, the tree over its warp, the warps."""
    return tiling.values + staircase.SHUFFLES + WARPS


@cute.jit
def cta_sum(value: Float32, partials: cute.Tensor, tid: Int32) -> Float32:
    """Sum over the threads of a CTA; each of them gets it, added in the same order.

    Args:
        partials: float32 (WARPS,) in shared memory.

    Synchronises: one CTA barrier.
    """
    (value,) = warp_reduce((value,), SUM)  # step 2
    if tid % WARP == 0:
        partials[tid // WARP] = value
    cute.arch.sync_threads()
    total = Float32(0.0)
    for warp in cutlass.range_constexpr(WARPS):  # all threads read one address: one access
        total += partials[warp]
    return total


class CtaSum:
    """Row i of x is summed by CTA i."""

    def __init__(self, tiling: RowTiling) -> None:
        self.tiling = tiling

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, out).launch(grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mOut: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        partials = smem.allocate_tensor(Float32, cute.make_layout(WARPS), byte_alignment=16)
        values = staircase.load_row(mX, row, self.tiling, tid)
        total = cta_sum(thread_sum(values), partials, tid)
        if tid == 0:
            mOut[row] = total


def build(spec: staircase.Sum, tiling: RowTiling) -> tuple[CtaSum, tuple]:
    """The kernel and its symbolic arguments."""
    return CtaSum(tiling), staircase.row_arguments(spec.n)


STEP = staircase.Step("cta", tiling, additions, lengths=(4096, 16384))

if __name__ == "__main__":
    staircase.main(STEP)
