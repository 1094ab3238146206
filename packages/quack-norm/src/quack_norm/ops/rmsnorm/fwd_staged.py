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
from quack_core.jit.compile import to_cute
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


UNROLL = 2


class RMSNormFwdStaged(ReductionBase):
    """A CTA, or a cluster of CTAs that share the columns, normalises ``rows_per_cta`` rows.

    Threads: ``threads_per_row`` per row and CTA, walking over the row in shared memory twice: to
    sum and to scale it.
    Shared memory: per row the chunks of x, of residual, and one output from its beginning on.
    Partial sums.
    Synchronises: the reduction, and two CTA barriers (two more for residual_out).
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
        sizes = self.config.staged_bytes(self.spec)
        sX, sR, sY = (self._buffer(smem, num_bytes, tid) for num_bytes in sizes)
        partials, mbar = self.allocate(smem)
        self.start_cluster(mbar, tid)
        threads = const_expr(tiling.threads_per_row)
        staged = [(sX, copy.fetch_hull(slice_pointer(mX, at, first), count, sX, thread, threads))]
        if const_expr(mR is not None):
            pR = slice_pointer(mR, at, first)
            staged.append((sR, copy.fetch_hull(pR, count, sR, thread, threads)))
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

        square_sum = Float32(0.0)
        for index in cutlass.range(thread * tiling.vec, count, tiling.step, unroll=UNROLL):
            h = self._value(staged, index, count)
            square_sum += thread_sum(h * h)
        self.join_cluster()
        (square_sum,) = self.reduce((square_sum,), partials, mbar, tid, Int32(0))
        rstd = fast_math.rsqrt(square_sum * (1 / self.spec.n) + eps)
        if const_expr(mRstd is not None):
            if valid and thread == 0 and rank == 0:
                store_rstd(mRstd, at, rstd)

        if const_expr(mH is not None):
            pH = slice_pointer(mH, at, first)
            for index in cutlass.range(thread * tiling.vec, count, tiling.step, unroll=UNROLL):
                self._set(sY, pH.dtype, index, self._value(staged, index, count))
            cute.arch.sync_threads()
            copy.store_shifted(pH, count, sY, thread, threads)
            cute.arch.sync_threads()
        pY = slice_pointer(mY, at, first)
        for index in cutlass.range(thread * tiling.vec, count, tiling.step, unroll=UNROLL):
            y = self._value(staged, index, count) * rstd
            rW = self._weight(mW, at, first, index, count)
            rB = self._weight(mB, at, first, index, count)
            y = scale(y, rW, rB, weight_offset, self.spec.offset)
            self._set(sY, pY.dtype, index, y)
        cute.arch.sync_threads()
        copy.store_shifted(pY, count, sY, thread, threads)

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
        return copy.aligned(rows[None, self.row_in_cta(tid)].iterator, copy.CHUNK)

    def _value(self, staged: list, index: Int32, count: Int32) -> cute.TensorSSA:
        """x, or x + residual, in float32 from element ``index`` on."""
        names = (self.spec.x, self.spec.residual)
        values = None
        for (shared, offset), name in zip(staged, names, strict=False):
            dtype, vec = to_cute(name), self.tiling.vec
            found = copy.read_shifted(shared, offset, index, count, vec, dtype).load().to(Float32)
            values = found if values is None else values + found
        return values

    def _weight(self, tensor, at, first: Int32, index: Int32, count: Int32):
        """Weight or bias from element ``index`` of the slice on; None if there is none."""
        if tensor is None:
            return None
        pointer, align = weight_pointer(tensor, at, first), self.spec.weight_align
        return copy.load_vector(pointer, index, count, self.tiling.vec, align)

    def _set(self, shared: cute.Pointer, dtype, index: Int32, values: cute.TensorSSA) -> None:
        """Round the values and put them in their place in the output's row."""
        registers = cute.make_rmem_tensor(self.tiling.vec, dtype)
        registers.store(values.to(dtype))
        there = copy.aligned(cute.recast_ptr(shared, dtype=dtype) + index, copy.CHUNK)
        cute.autovec_copy(registers, cute.make_tensor(there, cute.make_layout(self.tiling.vec)))


def build(spec: RMSNormFwdSpec, config: FwdConfig) -> tuple[RMSNormFwdStaged, tuple]:
    """The kernel and its symbolic arguments."""
    return RMSNormFwdStaged(spec, config), arguments(spec, config)
