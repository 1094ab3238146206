"""RMSNorm forward of rows whose addresses are no multiples of 16 bytes (odd N).

A row moves in 16-byte chunks between global and shared memory; there threads reach it at its own
offset. Which thread adds which elements does not depend on the offset.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, const_expr

from quack_core.device import copy, fast_math
from quack_core.reduction.base import ReductionBase

from .config import FwdConfig
from .fwd import arguments, coordinates, num_rows, slice_pointer, store_rstd, weight_pointer
from .spec import RMSNormFwdSpec

UNROLL = 8


class RMSNormFwdStaged(ReductionBase):
    """A CTA, or a cluster of CTAs that share the columns, normalises ``rows_per_cta`` rows.

    Threads: ``threads_per_row`` per row and CTA; they walk over the row, which stays in shared
    memory, twice.
    Shared memory: per row the chunks of x, of residual and of one output; partial sums.
    Synchronises: three CTA barriers and the reduction; two more barriers for residual_out.
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
        x_bytes, residual_bytes, out_bytes = self.config.staged_bytes(self.spec)
        sX, sR, sY = (self._row_buffer(smem, n, tid) for n in (x_bytes, residual_bytes, out_bytes))
        partials, mbar = self.allocate(smem)
        self.start_cluster(mbar, tid)
        pX = self._fetch(mX, at, first, count, sX, thread)
        pR = None
        if const_expr(mR is not None):
            pR = self._fetch(mR, at, first, count, sR, thread)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

        square_sum = Float32(0.0)
        for index in cutlass.range(thread * tiling.vec, count, tiling.step, unroll=UNROLL):
            h = self._value(pX, pR, index)
            square_sum += (h * h).reduce(cute.ReductionOp.ADD, 0.0, 0)
        self.join_cluster()
        (square_sum,) = self.reduce((square_sum,), partials, mbar, tid, Int32(0))
        rstd = fast_math.rsqrt(square_sum * (1 / tiling.n) + eps)
        if const_expr(mRstd is not None):
            if valid and thread == 0 and rank == 0:
                store_rstd(mRstd, at, rstd)

        if const_expr(mH is not None):
            pH = slice_pointer(mH, at, first)
            here = copy.at_bytes(sY, copy.chunk_offset(pH), pH.dtype)
            for index in cutlass.range(thread * tiling.vec, count, tiling.step, unroll=UNROLL):
                self._set(here, index, self._value(pX, pR, index))
            cute.arch.sync_threads()
            copy.store_hull(pH, count, sY, thread, tiling.threads_per_row)
            cute.arch.sync_threads()
        pY = slice_pointer(mY, at, first)
        here = copy.at_bytes(sY, copy.chunk_offset(pY), pY.dtype)
        pW, pB = self._weights(mW, at, first), self._weights(mB, at, first)
        for index in cutlass.range(thread * tiling.vec, count, tiling.step, unroll=UNROLL):
            y = self._value(pX, pR, index) * rstd
            if const_expr(mW is not None):
                weight = self._get(pW, index)
                y = y * (weight + weight_offset if const_expr(self.spec.offset) else weight)
            if const_expr(mB is not None):
                y = y + self._get(pB, index)
            self._set(here, index, y)
        cute.arch.sync_threads()
        copy.store_hull(pY, count, sY, thread, tiling.threads_per_row)

    @cute.jit
    def _count(self, first: Int32, valid: Boolean) -> Int32:
        """Elements of the slice that begins at column ``first``."""
        count = self.tiling.n - first
        if count > self.tiling.cols:
            count = Int32(self.tiling.cols)
        if count < 0 or not valid:
            count = Int32(0)
        return count

    def _row_buffer(self, smem: cutlass.memory.SmemAllocator, num_bytes: int, tid: Int32):
        """This row's part of a buffer in shared memory; None for 0 bytes."""
        if num_bytes == 0:
            return None
        layout = cute.make_layout((num_bytes, self.tiling.rows_per_cta))
        rows = smem.allocate_tensor(cutlass.Uint8, layout, byte_alignment=128)
        return rows[None, self.row_in_cta(tid)].iterator.align(copy.CHUNK)

    def _fetch(self, tensor, at, first: Int32, count: Int32, shared: cute.Pointer, thread: Int32):
        """Start the copy of a row's slice; where its first element will lie."""
        pointer = slice_pointer(tensor, at, first)
        threads = self.tiling.threads_per_row
        offset = copy.fetch_hull(pointer, count, shared, thread, threads)
        return copy.at_bytes(shared, offset, pointer.dtype)

    def _weights(self, tensor, at, first: Int32):
        return None if tensor is None else weight_pointer(tensor, at, first)

    def _vector(self, pointer: cute.Pointer, index: Int32) -> cute.Tensor:
        """One vector of a row at any offset."""
        size = pointer.dtype.width // 8
        access = copy.access_elements(self.tiling.vec, pointer.dtype.width, self.spec.align)
        start = (pointer + index).align(access * size)
        return cute.make_tensor(start, cute.make_layout(self.tiling.vec))

    def _get(self, pointer: cute.Pointer, index: Int32) -> cute.TensorSSA:
        registers = cute.make_rmem_tensor(self.tiling.vec, pointer.dtype)
        cute.autovec_copy(self._vector(pointer, index), registers)
        return registers.load().to(Float32)

    def _set(self, pointer: cute.Pointer, index: Int32, values: cute.TensorSSA) -> None:
        registers = cute.make_rmem_tensor(self.tiling.vec, pointer.dtype)
        registers.store(values.to(pointer.dtype))
        cute.autovec_copy(registers, self._vector(pointer, index))

    def _value(self, pX: cute.Pointer, pR: cute.Pointer | None, index: Int32) -> cute.TensorSSA:
        """x, or x + residual."""
        values = self._get(pX, index)
        return values if pR is None else values + self._get(pR, index)


def build(spec: RMSNormFwdSpec, config: FwdConfig) -> tuple[RMSNormFwdStaged, tuple]:
    """The kernel and its symbolic arguments."""
    return RMSNormFwdStaged(spec, config), arguments(spec, config)
