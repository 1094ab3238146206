"""Base class of kernels that reduce rows: coordinates, shared memory, and the sum over all levels."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64, const_expr

from quack_core.device.barrier import NamedBarrier, sync_group
from quack_core.device.reduce import (
    SUM,
    Partial,
    Reduction,
    cluster_post,
    collect,
    cta_post,
    lanes_reduce,
)
from quack_core.reduction.tiling import WARP, RowTiling


class Exchange(NamedTuple):
    """Where partial results meet.

    Args:
        warps: of the warps of a CTA: float32 (width, warps, rows, buffers).
        ctas: of the CTAs of a cluster: float32 (width, cluster, 1, buffers).
        mbar: mbarriers, one per buffer, on which the latter complete.
    """

    warps: cute.Tensor
    ctas: cute.Tensor
    mbar: cute.Pointer


class ReductionBase:
    """A kernel whose CTAs own rows, or slices of rows, as ``tiling`` says.

    Shared memory: a partial result per warp; with a cluster, one per CTA and an mbarrier.
    Use, in order: ``allocate``, ``start_cluster``, ``join_cluster``; then ``reduce`` once per round.

    Args:
        tiling: how a row is spread over threads.
        reduction: the operation; its width is the number of float32 values reduced together.
        buffers: 1 if a kernel reduces once; 2 if more often (rounds use them in turn).
        barrier: of the threads that reduce, where a CTA has more; None: the whole CTA reduces.
    """

    def __init__(
        self,
        tiling: RowTiling,
        reduction: Reduction = SUM,
        buffers: int = 1,
        barrier: NamedBarrier | None = None,
    ):
        self.tiling, self.reduction, self.buffers = tiling, reduction, buffers
        self.barrier = barrier

    def thread_in_row(self, tid: Int32) -> Int32:
        return tid % self.tiling.threads_per_row

    def row_in_cta(self, tid: Int32) -> Int32:
        return tid // self.tiling.threads_per_row

    def allocate(self, smem: cutlass.memory.SmemAllocator) -> Exchange:
        """Room for partial results, and the cluster's mbarriers."""
        tiling, width = self.tiling, self.reduction.width
        shapes = (
            (width, tiling.warps_per_row, tiling.rows_per_cta, self.buffers),
            (width, tiling.cluster, 1, self.buffers),
        )
        tensors = (
            smem.allocate_tensor(Float32, cute.make_layout(shape), byte_alignment=16)
            for shape in shapes
        )
        return Exchange(*tensors, smem.allocate_array(Int64, self.buffers))

    @cute.jit
    def start_cluster(self, exchange: Exchange, tid: Int32):
        """Initialise the mbarriers and tell the cluster; ``join_cluster`` waits for the others."""
        if const_expr(self.tiling.cluster > 1):
            if tid == 0:
                for b in cutlass.range_constexpr(self.buffers):
                    cute.arch.mbarrier_init(exchange.mbar + b, 1)
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
        exchange: Exchange,
        tid: Int32,
        round_idx: Int32,
        extra_bytes: cutlass.Constexpr[int] = 0,
    ) -> Partial:
        """``value`` over all threads of the row; each of them gets the result.

        Afterwards all threads of the row have read what they brought.

        Args:
            extra_bytes: of other messages that complete on the round's mbarrier.

        Synchronises: nothing if a row fits a warp; else one CTA barrier and, with a cluster, one
        phase of its mbarrier.
        """
        tiling, buffer = const_expr(self.tiling), round_idx % self.buffers
        operation, mbar = const_expr(self.reduction), exchange.mbar
        total = lanes_reduce(value, operation, tiling.lanes)
        if const_expr(tiling.threads_per_row > WARP or tiling.cluster > 1):
            here, row = exchange.warps[None, None, None, buffer], self.row_in_cta(tid)
            cta_post(total, here, self.thread_in_row(tid) // WARP, row)
            self._sync()
            if const_expr(tiling.cluster == 1):
                total = collect(here, operation, row)
            else:
                there = exchange.ctas[None, None, None, buffer]
                if tid < WARP:
                    of_cta = collect(here, operation, row)
                    cluster_post(of_cta, there, mbar + buffer, tiling.cluster, tid, extra_bytes)
                cute.arch.mbarrier_wait(mbar + buffer, (round_idx // self.buffers) % 2)
                total = collect(there, operation, Int32(0))
        return total

    def _sync(self) -> None:
        """The barrier of the threads that reduce."""
        if self.barrier is None:
            cute.arch.sync_threads()
        else:
            sync_group(self.barrier, self.tiling.num_threads)
