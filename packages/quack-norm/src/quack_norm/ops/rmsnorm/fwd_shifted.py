"""RMSNorm forward of rows that are no whole number of vectors (odd N), one tile per CTA.

Such rows begin at changing offsets within 16 bytes of memory. A thread owns 16-byte pieces of
memory, so that x, residual and the outputs move in whole accesses; weight and bias are shifted to
them in registers. The sum does not depend on the offset: element e of a row is added to sum
e mod (threads * vector), in order, whoever holds it, and the sums meet in one fixed tree.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, const_expr

from quack_core.device import copy
from quack_core.device.reduce import SUM, combine_tree
from quack_norm.ops.row_map.base import (
    RowMap,
    column_pointer,
    coordinates,
    num_rows,
    slice_pointer,
    store_piece,
    store_statistics,
)

from .config import FwdConfig
from .fwd import RMSNormRows, arguments
from .spec import RMSNormFwdSpec


class RMSNormFwdShifted(RMSNormRows, RowMap):
    """A CTA, or a cluster of CTAs that share the columns, normalises ``rows_per_cta`` rows.

    Threads: ``threads_per_row`` per row and CTA, each holding its pieces of the row in registers.
    Shared memory: a float32 sum for each residue of an element's index; partial sums.
    Synchronises: one CTA barrier and the reduction.
    Traffic: every operand once; weight and bias twice per row, from L1 or L2.
    """

    def __init__(self, spec: RMSNormFwdSpec, config: FwdConfig):
        super().__init__(spec, config)
        self.cols = config.slice_cols(spec)
        self.step = self.tiling.vec * self.tiling.threads_per_row  # elements of a pass
        self.align = copy.CHUNK if spec.in_phase else 2

    @cute.jit
    def start(self, operands, scalars, stream: cuda.CUstream, groups: Int32):
        rows = num_rows(operands[0])
        cluster = const_expr(self.tiling.cluster)
        self.kernel(*operands[:7], scalars, rows).launch(
            grid=[cluster * cute.ceil_div(rows, self.tiling.rows_per_cta), 1, 1],
            block=[self.tiling.num_threads, 1, 1],
            cluster=[cluster, 1, 1] if const_expr(cluster > 1) else None,
            min_blocks_per_mp=max(1, self.config.ctas_per_sm),
            preferred_smem_carveout=50,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX, mW, mB, mR, mY, mH, mRstd, scalars, rows: Int32):
        tiling, vec = const_expr(self.tiling), const_expr(self.tiling.vec)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        thread, rank = self.thread_in_row(tid), block % tiling.cluster
        row = block // tiling.cluster * tiling.rows_per_cta + self.row_in_cta(tid)
        valid = row < rows
        at, first = coordinates(mX, row if valid else Int32(0)), rank * self.cols
        count = self._count(first, valid)  # elements of this CTA's slice
        smem = cutlass.memory.SmemAllocator()
        layout = cute.make_layout((tiling.threads_per_row, vec, tiling.rows_per_cta))
        sSum = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        exchange = self.allocate(smem)
        self.start_cluster(exchange, tid)

        pX = slice_pointer(mX, at, first)
        offset = Int32(0)
        if const_expr(self.spec.in_phase):
            offset = copy.vector_offset(pX, vec)
        begin = thread * vec - offset  # the thread's first element; may lie before the slice
        indices = [begin + p * self.step for p in range(tiling.passes)]
        rX = self._load(mX, at, first, indices, count)  # (vec,) per pass
        rR = self._load(mR, at, first, indices, count)
        sums = cute.make_rmem_tensor(vec, Float32)
        sums.fill(0.0)
        for p in cutlass.range_constexpr(tiling.passes):
            h = self.values([rX[p], None if rR is None else rR[p]], scalars)
            sums.store(sums.load() + h * h)
        square_sum = meet(sums, sSum, thread, offset, self.row_in_cta(tid), tiling)
        self.join_cluster()
        known = self.finish(self.reduce((square_sum,), exchange, tid, Int32(0)), scalars)
        if const_expr(mRstd is not None):
            if valid and thread == 0 and rank == 0:
                store_statistics(mRstd, at, known)

        for p in cutlass.range_constexpr(tiling.passes):
            h = self.values([rX[p], None if rR is None else rR[p]], scalars)
            if const_expr(mH is not None):
                store_piece(h, slice_pointer(mH, at, first), indices[p], count, self.align)
            rW = self._weight(mW, at, first, indices[p])
            rB = self._weight(mB, at, first, indices[p])
            y = self.result(h, known, (rW, rB), scalars)
            store_piece(y, slice_pointer(mY, at, first), indices[p], count, self.align)

    @cute.jit
    def _count(self, first: Int32, valid: Boolean) -> Int32:
        """Elements of the slice that begins at column ``first``."""
        count = self.spec.n - first
        if count > self.cols:
            count = Int32(self.cols)
        if count < 0 or not valid:
            count = Int32(0)
        return count

    def _load(self, tensor, at, first: Int32, indices: list, count: Int32):
        """The thread's pieces of a row, zeros outside the slice; None for an absent operand."""
        if tensor is None:
            return None
        pointer, vec = slice_pointer(tensor, at, first), self.tiling.vec
        pieces = [copy.load_piece(pointer, index, count, vec, self.align) for index in indices]
        for piece, index in zip(pieces, indices, strict=True):
            copy.clear_outside(piece, index, count)
        return pieces

    def _weight(self, tensor, at, first: Int32, index: Int32):
        """Weight or bias at a piece; None if there is none."""
        if tensor is None:
            return None
        pointer, count = column_pointer(tensor, at, first), self.spec.n - first
        if self.spec.weight_align < copy.CHUNK:
            return copy.load_piece(pointer, index, count, self.tiling.vec, 2)
        return copy.load_shifted(pointer, index, count, self.tiling.vec)


@cute.jit
def meet(
    sums: cute.Tensor,
    shared: cute.Tensor,
    thread: Int32,
    offset: Int32,
    row: Int32,
    tiling: cutlass.Constexpr,
) -> Float32:
    """Exchange sums by residue and add those of elements ``thread * vec`` and following.

    Args:
        sums: (vec,), of elements ``v - offset + thread * vec`` modulo ``threads * vec``.
        shared: float32 (threads, vec, rows).

    Synchronises: one CTA barrier; another one must lie before the next call.
    """
    for v in cutlass.range_constexpr(tiling.vec):
        residue = thread * tiling.vec + v - offset
        if residue < 0:
            residue += tiling.vec * tiling.threads_per_row
        shared[residue // tiling.vec, residue % tiling.vec, row] = sums[v]
    cute.arch.sync_threads()
    values = [(shared[thread, v, row],) for v in range(tiling.vec)]
    return combine_tree(values, SUM)[0]


def build(spec: RMSNormFwdSpec, config: FwdConfig) -> tuple[RMSNormFwdShifted, tuple]:
    """The kernel and its symbolic arguments."""
    return RMSNormFwdShifted(spec, config), arguments(spec, config)
