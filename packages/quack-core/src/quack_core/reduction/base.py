"""Base class of kernels that reduce rows: coordinates, shared memory, and the sum over all levels."""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64, const_expr

from quack_core.device.reduce import SUM, Partial, Reduction, cluster_reduce, cta_reduce, warp_reduce
from quack_core.reduction.tiling import WARP, RowTiling


class ReductionBase:
    """A kernel whose CTAs own rows, or slices of rows, as ``tiling`` says.

    Shared memory: partial results, and with a cluster one mbarrier per buffer.
    Use, in order: ``allocate``, ``start_cluster``, then ``reduce`` once per round.

    Args:
        tiling: how a row is spread over threads.
        reduction: the operation; its width is the number of float32 values reduced together.
        buffers: 1 if a kernel reduces once; 2 if it loops (rounds use them in turn).
    """

    def __init__(self, tiling: RowTiling, reduction: Reduction = SUM, buffers: int = 1):
        self.tiling, self.reduction, self.buffers = tiling, reduction, buffers

    def thread_in_row(self, tid: Int32) -> Int32:
        return tid % self.tiling.threads_per_row

    def row_in_cta(self, tid: Int32) -> Int32:
        return tid // self.tiling.threads_per_row

    def allocate(
        self, smem: cutlass.memory.SmemAllocator
    ) -> tuple[cute.Tensor, cute.Pointer]:
        """Partial results (width, slots, rows, buffers) and the mbarriers of a cluster."""
        tiling = self.tiling
        shape = (self.reduction.width, tiling.slots, tiling.rows_per_cta, self.buffers)
        partials = smem.allocate_tensor(Float32, cute.make_layout(shape), byte_alignment=16)
        return partials, smem.allocate_array(Int64, self.buffers)

    @cute.jit
    def start_cluster(self, mbar: cute.Pointer, tid: Int32):
        """Initialise the mbarriers and tell the cluster; ``join_cluster`` waits for the others."""
        if const_expr(self.tiling.cluster > 1):
            if tid == 0:
                for b in cutlass.range_constexpr(self.buffers):
                    cute.arch.mbarrier_init(mbar + b, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def join_cluster(self):
        """Wait until every CTA of the cluster has initialised its mbarriers; before ``reduce``."""
        if const_expr(self.tiling.cluster > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def reduce(
        self,
        value: Partial,
        partials: cute.Tensor,
        mbar: cute.Pointer,
        tid: Int32,
        round_idx: Int32,
        extra_bytes: cutlass.Constexpr[int] = 0,
    ) -> Partial:
        """``value`` over all threads of the row; each of them gets the result.

        Synchronises: nothing if a row fits a warp, one CTA barrier, or one phase of the cluster's
        mbarrier, on which ``extra_bytes`` of other messages may complete too.
        """
        tiling = const_expr(self.tiling)
        buffer = round_idx % self.buffers
        if const_expr(tiling.cluster > 1):
            phase = (round_idx // self.buffers) % 2
            return cluster_reduce(
                value,
                self.reduction,
                partials[None, None, None, buffer],
                mbar + buffer,
                phase,
                tiling.cluster,
                tid,
                extra_bytes,
            )
        elif const_expr(tiling.threads_per_row > WARP):
            warp_in_row = self.thread_in_row(tid) // WARP
            row = self.row_in_cta(tid)
            here = partials[None, None, None, buffer]
            return cta_reduce(value, self.reduction, here, warp_in_row, row)
        else:
            return warp_reduce(value, self.reduction, tiling.threads_per_row)
