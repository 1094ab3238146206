"""RMSNorm forward of rows whose addresses are no multiples of 16 bytes (odd N).

A row moves in 16-byte chunks between global and shared memory and is shifted into place in
registers. Which thread adds which elements does not depend on the address.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, const_expr

from quack_core.device import copy, fast_math
from quack_core.device.reduce import thread_sum
from quack_core.reduction.base import ReductionBase

from .config import FwdConfig
from .fwd import (
    arguments,
    coordinates,
    num_rows,
    scale,
    slice_pointer,
    store_rstd,
    weight_pointer,
)
from .spec import RMSNormFwdSpec


class RMSNormFwdStaged(ReductionBase):
    """A CTA, or a cluster of CTAs that share the columns, normalises ``rows_per_cta`` rows.

    Threads: ``threads_per_row`` per row and CTA, each holding its part of the row in registers.
    Shared memory: per row the chunks of x, and of residual; outputs take the place of x. Partial
    sums.
    Synchronises: the reduction, and three CTA barriers (two more for residual_out).
    Traffic: every operand once; weight and bias once per row, from L1 or L2.
    """

    def __init__(self, spec: RMSNormFwdSpec, config: FwdConfig):
        super().__init__(config.tiling(spec))
        self.spec, self.config = spec, config

    @cute.jit
    def __call__(  # the launcher's messages use these names
        self,
        x: cute.Tensor,  # (M, N) or (M1, M0, N)
        weight: cute.Tensor | None,  # (N,) or (M0, N)
        bias: cute.Tensor | None,  # like weight
        residual: cute.Tensor | None,  # like x
        out: cute.Tensor,  # like x
        residual_out: cute.Tensor | None,  # like x
        rstd: cute.Tensor | None,  # (M,) or (M1, M0)
        state: cute.Tensor | None,
        eps: Float32,
        weight_offset: Float32,
        groups: Int32,
        stream: cuda.CUstream,
    ):
        rows = num_rows(x)
        cluster = const_expr(self.tiling.cluster)
        operands = (x, weight, bias, residual, out, residual_out, rstd)
        self.kernel(*operands, eps, weight_offset, rows).launch(
            grid=[cluster * cute.ceil_div(rows, self.tiling.rows_per_cta), 1, 1],
            block=[self.tiling.num_threads, 1, 1],
            cluster=[cluster, 1, 1] if const_expr(cluster > 1) else None,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, mX, mW, mB, mR, mY, mH, mRstd, eps: Float32, weight_offset: Float32, rows: Int32
    ):
        tiling = const_expr(self.tiling)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        thread, rank = self.thread_in_row(tid), block % tiling.cluster
        row = block // tiling.cluster * tiling.rows_per_cta + self.row_in_cta(tid)
        valid = row < rows
        at, first = coordinates(mX, row if valid else Int32(0)), rank * tiling.cols
        count = self._count(first, valid)  # elements of this CTA's slice

        smem = cutlass.memory.SmemAllocator()
        sX, sR = (self._buffer(smem, size, tid) for size in self.config.staged_bytes(self.spec))
        partials, mbar = self.allocate(smem)
        self.start_cluster(mbar, tid)
        pX, pR = slice_pointer(mX, at, first), None
        oX = copy.fetch_hull(pX, count, sX, thread, tiling.threads_per_row)
        if const_expr(mR is not None):
            pR = slice_pointer(mR, at, first)
            oR = copy.fetch_hull(pR, count, sR, thread, tiling.threads_per_row)
        cute.arch.cp_async_commit_group()
        rW, rB = self._weights(mW, at, first, thread), self._weights(mB, at, first, thread)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

        rX = copy.read_shifted(sX, oX, count, tiling, thread, pX.dtype)  # (vec, passes)
        h = rX.load().to(Float32)
        if const_expr(mR is not None):
            rR = copy.read_shifted(sR, oR, count, tiling, thread, pR.dtype)
            h = h + rR.load().to(Float32)
        self.join_cluster()
        (square_sum,) = self.reduce((thread_sum(h * h),), partials, mbar, tid, Int32(0))
        rstd = fast_math.rsqrt(square_sum * (1 / self.spec.n) + eps)
        if const_expr(mRstd is not None):
            if valid and thread == 0 and rank == 0:
                store_rstd(mRstd, at, rstd)
        if const_expr(mH is not None):
            self._put(h, slice_pointer(mH, at, first), count, sX, thread)
        y = scale(h * rstd, rW, rB, weight_offset, self.spec.offset)
        self._put(y, slice_pointer(mY, at, first), count, sX, thread)

    @cute.jit
    def _count(self, first: Int32, valid: Boolean) -> Int32:
        """Elements of the slice that begins at column ``first``."""
        count = self.spec.n - first
        if count > self.tiling.cols:
            count = Int32(self.tiling.cols)
        if count < 0 or not valid:
            count = Int32(0)
        return count

    def _buffer(self, smem: cutlass.memory.SmemAllocator, num_bytes: int, tid: Int32):
        """This row's part of a buffer in shared memory; None for 0 bytes."""
        if num_bytes == 0:
            return None
        layout = cute.make_layout((num_bytes, self.tiling.rows_per_cta))
        rows = smem.allocate_tensor(cutlass.Uint8, layout, byte_alignment=128)
        return rows[None, self.row_in_cta(tid)].iterator.align(copy.CHUNK)

    def _weights(self, tensor, at, first: Int32, thread: Int32):
        """The thread's vectors of weight or bias; None if there is none."""
        if tensor is None:
            return None
        pointer = weight_pointer(tensor, at, first)
        count = self.spec.n - first
        return copy.load_partial(pointer, count, self.tiling, thread, self.spec.weight_align)

    @cute.jit
    def _put(self, values, pointer: cute.Pointer, count: Int32, shared, thread: Int32):
        """Round the values to the output's dtype and write them to its row."""
        registers = copy.make_registers(self.tiling, pointer.dtype)
        registers.store(values.to(pointer.dtype))
        row = cute.recast_ptr(shared, dtype=pointer.dtype)
        cute.arch.sync_threads()  # nobody reads the buffer any more
        copy.store_vectors(registers, row, self.tiling, thread, copy.CHUNK)
        cute.arch.sync_threads()
        copy.store_shifted(pointer, count, shared, thread, self.tiling.threads_per_row)


def build(spec: RMSNormFwdSpec, config: FwdConfig) -> tuple[RMSNormFwdStaged, tuple]:
    """The kernel and its symbolic arguments."""
    return RMSNormFwdStaged(spec, config), arguments(spec, config)
