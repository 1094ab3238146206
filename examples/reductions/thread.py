"""Step 1, the thread: each thread adds up a row of its own, four floats at a time.

Nothing is shared and nobody waits. But the 32 threads of a warp read 32 rows at once.
"""

import cuda.bindings.driver as cuda
import cutlass
import staircase
from cutlass import Float32, Int32, Int64, cute

from quack_core.device import copy
from quack_core.device.reduce import thread_sum
from quack_core.reduction.tiling import RowTiling

VEC = 4  # floats of one 128-bit load, the widest there is
THREADS = 128


def tiling(n: int) -> RowTiling:
    return RowTiling(n, VEC, threads_per_row=1, rows_per_cta=THREADS)


def additions(tiling: RowTiling, rows: int) -> int:
    """Every fourth element of the row, one after another; then the four sums."""
    return tiling.passes + VEC


class ThreadSum:
    """Row i of x is summed by thread i of the grid."""

    def __init__(self, tiling: RowTiling) -> None:
        self.tiling = tiling

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        rows = x.shape[0]
        self.kernel(x, out, rows).launch(
            grid=[cute.ceil_div(rows, THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mOut: cute.Tensor, rows: Int32):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block * THREADS + tid
        if row < rows:  # the last CTA may have threads to spare
            mOut[row] = self._row_sum(mX, row)

    @cute.jit
    def _row_sum(self, mX: cute.Tensor, row: Int32) -> Float32:
        """Four sums side by side: a load brings one element of each."""
        start = mX[Int64(row), None].iterator  # 64 bits: 32 would wrap at 2**32 elements
        sums = cute.make_rmem_tensor(VEC, Float32)
        sums.fill(0.0)
        for at in cutlass.range(0, self.tiling.n, VEC, unroll=8):  # loads overlap
            sums.store(sums.load() + vector(start + at))
        return thread_sum(sums.load())


def vector(pointer: cute.Pointer) -> cute.TensorSSA:
    """VEC floats by one load, for which the address has to be known as a multiple of 16."""
    there = cute.make_tensor(copy.aligned(pointer, copy.CHUNK), cute.make_layout(VEC))
    here = cute.make_rmem_tensor(VEC, Float32)
    cute.autovec_copy(there, here)
    return here.load()


def build(spec: staircase.Sum, tiling: RowTiling) -> tuple[ThreadSum, tuple]:
    """The kernel and its symbolic arguments."""
    return ThreadSum(tiling), staircase.row_arguments(spec.n)


STEP = staircase.Step("thread", tiling, additions, lengths=(32, 1024))

if __name__ == "__main__":
    staircase.main(STEP)
