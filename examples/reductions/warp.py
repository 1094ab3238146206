"""Step 2, the warp: 32 threads read one row side by side and add up their sums by shuffles.

New is `warp_sum`. A shuffle hands a register to another lane of the warp: no memory, no barrier.
"""

import cuda.bindings.driver as cuda
import cutlass
import staircase
from cutlass import Float32, Int32, cute

from quack_core.device.reduce import thread_sum
from quack_core.reduction.tiling import WARP, RowTiling

VEC = 4
WARPS = 4  # of a CTA; each has a row of its own


def tiling(n: int) -> RowTiling:
    return RowTiling(n, VEC, threads_per_row=WARP, rows_per_cta=WARPS)


def additions(tiling: RowTiling, rows: int) -> int:
    """A lane's elements, then a tree over the lanes."""
    return tiling.values + staircase.SHUFFLES


@cute.jit
def warp_sum(value: Float32) -> Float32:
    """Sum over the lanes of a warp; each of them gets it.

    A butterfly: lane l adds what lane l ^ 1 has, then l ^ 2, l ^ 4, l ^ 8, l ^ 16. After i steps it
    has the sum of the 2**i lanes around it.
    """
    for i in cutlass.range_constexpr(staircase.SHUFFLES):
        value = value + cute.arch.shuffle_sync_bfly(value, offset=1 << i)
    return value


class WarpSum:
    """Row i of x is summed by warp i of the grid."""

    def __init__(self, tiling: RowTiling) -> None:
        self.tiling = tiling

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        rows = x.shape[0]
        self.kernel(x, out, rows).launch(
            grid=[cute.ceil_div(rows, WARPS), 1, 1], block=[WARPS * WARP, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mOut: cute.Tensor, rows: Int32):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, lane = tid // WARP, tid % WARP
        row = block * WARPS + warp
        if row < rows:  # the same for all lanes of a warp, as shuffles need it
            values = staircase.load_row(mX, row, self.tiling, lane)
            total = warp_sum(thread_sum(values))
            if lane == 0:
                mOut[row] = total


def build(spec: staircase.Sum, tiling: RowTiling) -> tuple[WarpSum, tuple]:
    """The kernel and its symbolic arguments."""
    return WarpSum(tiling), staircase.row_arguments(spec.n)


STEP = staircase.Step("warp", tiling, additions, lengths=(1024, 4096))

if __name__ == "__main__":
    staircase.main(STEP)
