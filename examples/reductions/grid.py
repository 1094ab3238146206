"""Step 5, the grid: all CTAs read the matrix; the last one to arrive adds up what they found.

New is `last_to_arrive`. CTAs of different clusters share global memory only, and may run at any
time, so nobody waits for anybody: who finds that all others were there before finishes the work.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.memory
import staircase
from cutlass import Boolean, Float32, Int32, cute
from torch import Tensor

from quack_core.device.copy import make_registers
from quack_core.device.reduce import SUM, thread_sum, warp_reduce
from quack_core.jit.compile import symbolic
from quack_core.jit.dsl import sym_int
from quack_core.reduction.base import ReductionBase
from quack_core.reduction.tiling import WARP, RowTiling

VEC = 4
THREADS = 256
CTAS = 1024  # on every GPU, since the order of the additions follows from it


def tiling(n: int) -> RowTiling:
    return RowTiling(n, VEC, threads_per_row=THREADS)


def additions(tiling: RowTiling, rows: int) -> int:
    """A CTA's rows, the levels within a CTA, then the CTAs: a lane's, and the tree over lanes."""
    return (
        -(-rows // CTAS)
        + tiling.values
        + staircase.SHUFFLES
        + THREADS // WARP
        + CTAS // WARP
        + staircase.SHUFFLES
    )


@cute.jit
def last_to_arrive(
    value: Float32, partials: cute.Tensor, counter: cute.Tensor, ticket: cute.Tensor
) -> Boolean:
    """Publish the sum of this CTA; tell whether those of all CTAs are there.

    Args:
        partials: float32 (CTAS,) in global memory.
        counter: int32 (1,) in global memory, 0 before and after: the last CTA clears it.
        ticket: int32 (1,) in shared memory.

    Synchronises: one CTA barrier.
    """
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    if tid == 0:
        partials[block] = value
        # Releases what was written above, and acquires what the CTAs before have released.
        before = cute.arch.atomic_add(counter.iterator, Int32(1), sem="acq_rel", scope="gpu")
        if before == CTAS - 1:
            counter[0] = Int32(0)
        ticket[0] = before
    cute.arch.sync_threads()  # what thread 0 has acquired is visible to all threads
    return ticket[0] == CTAS - 1


class GridSum(ReductionBase):
    """All of x is summed; `ReductionBase.reduce` is steps 2 to 4."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        partials: cute.Tensor,
        counter: cute.Tensor,
        out: cute.Tensor,
        stream: cuda.CUstream,
    ):
        self.kernel(x, partials, counter, out, x.shape[0]).launch(
            grid=[CTAS, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mX, mPartials, mCounter, mOut, rows: Int32):
        tid, _, _ = cute.arch.thread_idx()
        smem = cutlass.memory.SmemAllocator()
        exchange = self.allocate(smem)
        ticket = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=4)
        value = self._rows_sum(mX, rows, tid)
        (total,) = self.reduce((value,), exchange, tid, Int32(0))
        if last_to_arrive(total, mPartials, mCounter, ticket):
            if tid < WARP:
                self._finish(mPartials, mOut, tid)

    @cute.jit
    def _rows_sum(self, mX: cute.Tensor, rows: Int32, tid: Int32) -> Float32:
        """A thread's sum over the CTA's rows: every CTAS-th, of each of its columns by itself."""
        block, _, _ = cute.arch.block_idx()
        sums = make_registers(self.tiling, Float32)
        sums.fill(0.0)
        for row in cutlass.range(block, rows, CTAS, unroll=1):
            sums.store(sums.load() + staircase.load_row(mX, row, self.tiling, tid))
        return thread_sum(sums.load())

    @cute.jit
    def _finish(self, mPartials: cute.Tensor, mOut: cute.Tensor, lane: Int32):
        """Who is last differs from run to run; the order in which it adds does not."""
        total = Float32(0.0)
        for i in cutlass.range(lane, CTAS, WARP, unroll=8):
            total += mPartials[i]
        (total,) = warp_reduce((total,), SUM)
        if lane == 0:
            mOut[0] = total


def build(spec: staircase.Sum, tiling: RowTiling) -> tuple[GridSum, tuple]:
    """The kernel and its symbolic arguments."""
    x, partials = symbolic("float32", (sym_int(), spec.n)), symbolic("float32", (CTAS,))
    counter, out = (symbolic(name, (1,), align=4) for name in ("int32", "float32"))
    return GridSum(tiling), (x, partials, counter, out)


def operands(x: Tensor) -> tuple[Tensor, ...]:
    """x, partials, counter and out."""
    return x, x.new_empty(CTAS), x.new_zeros(1).int(), x.new_empty(1)


STEP = staircase.Step("grid", tiling, additions, lengths=(1024, 8192), operands=operands)

if __name__ == "__main__":
    staircase.main(STEP)
