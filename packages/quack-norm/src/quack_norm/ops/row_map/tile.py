"""One tile per CTA: rows come straight into registers."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, const_expr

from quack_core.device import copy

from .base import (
    RowMap,
    apart,
    column_pointer,
    coordinates,
    num_rows,
    slice_pointer,
    store_piece,
    store_row,
    store_statistics,
    together,
)
from .config import HELD_VALUES, RowConfig


class RowMapTile(RowMap):
    """A CTA, or a cluster of CTAs that share the columns, works on ``rows_per_cta`` rows.

    Threads: ``threads_per_row`` per row and CTA, each holding its part of the row in registers.
    Shared memory: partial results.
    Synchronises: nothing if a row fits a warp, else one barrier or one phase of an mbarrier.
    Traffic: every operand once; column operands once per row, from L1 or L2.
    """

    def __init__(self, spec, config: RowConfig):
        self.holds = config.tiling(spec).values <= HELD_VALUES
        super().__init__(spec, config)

    @cute.jit
    def start(self, operands, scalars, stream: cuda.CUstream, groups: Int32 | None = None):
        """Launch; ``operands`` as ``kernel`` takes them."""
        rows = num_rows(operands[0])
        cluster = const_expr(self.tiling.cluster)
        self.kernel(*operands[:7], scalars, rows).launch(
            grid=[cluster * cute.ceil_div(rows, self.tiling.rows_per_cta), 1, 1],
            block=[self.tiling.num_threads, 1, 1],
            cluster=[cluster, 1, 1] if const_expr(cluster > 1) else None,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX, mW, mB, mR, mY, mH, mStatistic, scalars, rows: Int32):
        tiling, align = const_expr(self.tiling), const_expr(self.spec.align)
        weight_align = const_expr(self.spec.weight_align)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        thread, rank = self.thread_in_row(tid), block % tiling.cluster
        row = block // tiling.cluster * tiling.rows_per_cta + self.row_in_cta(tid)
        valid = row < rows
        at, first = coordinates(mX, row if valid else Int32(0)), rank * tiling.cols
        pred = None  # (1, 1, passes): does the vector exist?
        if const_expr(tiling.ragged or tiling.rows_per_cta > 1):
            pred = copy.column_predicate(tiling, thread, rank, valid)
        smem = cutlass.memory.SmemAllocator()
        exchange = self.allocate(smem)
        self.start_cluster(exchange, tid)

        count = tiling.n - first if const_expr(tiling.cluster > 1) else Int32(tiling.n)
        place = (at, first, thread, pred, count if valid else Int32(0))
        if const_expr(self.holds):
            late = const_expr(mR is not None)  # fewer registers: more CTAs on an SM
            policy = self.policy(mX)
            loaded = self._load((mX, mR), slice_pointer, align, place, self.fill, policy)
            if const_expr(not late):
                columns = self._load((mW, mB), column_pointer, weight_align, place)
            h = self.values(loaded, scalars)
            if const_expr(mH is not None):  # writes while other rows are read
                store_row(h, slice_pointer(mH, at, first), tiling, thread, align, pred)
        else:
            kept = self._combine(mX, mR, mH, place, scalars)
            h = together([registers.load() for registers in kept])

        self.join_cluster()
        exists = self.exists(tiling, thread, tiling.n - first)
        h, partial = self.keep(h, exists) if self.holds else (h, self.partial(h, exists))
        total = self.reduce(partial, exchange, tid, Int32(0))
        known = self.finish(total, scalars)
        if const_expr(mStatistic is not None):
            if valid and thread == 0 and rank == 0:
                store_statistics(mStatistic, at, known)
        if const_expr(self.holds):
            if const_expr(late):
                columns = self._load((mW, mB), column_pointer, weight_align, place)
            y = self.result(h, known, columns, scalars)
            store_row(y, slice_pointer(mY, at, first), tiling, thread, align, pred)
        else:
            self._results(kept, mW, mB, mY, place, known, scalars)

    def _load(self, tensors, pointer, align: int, place, fill: float = 0, policy=None) -> list:
        """Vectors of a row of each operand in registers (vec, passes); None for an absent one."""
        at, first, thread, pred, _ = place
        return [
            None
            if tensor is None
            else copy.load_vectors(
                pointer(tensor, at, first), self.tiling, thread, align, pred, fill, policy
            )
            for tensor in tensors
        ]

    def _combine(self, mX, mR, mH, place, scalars) -> list[cute.Tensor]:
        """The values in float32 registers (vec, passes), piece by piece; also written to mH."""
        at, first, thread, _, count = place
        vec, align, skip = self.tiling.vec, self.spec.align, self.tiling.start(thread)
        kept = [copy.make_registers(self.tiling, Float32) for _ in range(self.num_values)]
        starts = [None if t is None else slice_pointer(t, at, first) + skip for t in (mX, mR)]
        policy = self.policy(mX)
        for p in range(self.tiling.passes):
            cute.arch.sync_warp()  # or else all loads come first, and spill
            index, end = Int32(p * self.tiling.step), count - skip
            pieces = [
                None if q is None else copy.load_piece(q, index, end, vec, align, self.fill, policy)
                for q in starts
            ]
            h = self.values(pieces, scalars)
            for registers, part in zip(kept, apart(h), strict=True):
                registers[None, p].store(part)
            if mH is not None:
                store_piece(h, slice_pointer(mH, at, first) + skip, index, end, align, True)
        return kept

    def _results(self, kept, mW, mB, mY, place, known, scalars) -> None:
        """Write the results piece by piece."""
        at, first, thread, _, count = place
        vec, align, skip = self.tiling.vec, self.spec.weight_align, self.tiling.start(thread)
        start = slice_pointer(mY, at, first) + skip
        for p in range(self.tiling.passes):
            cute.arch.sync_warp()  # or else all loads come first, and spill
            index, end = Int32(p * self.tiling.step), count - skip
            columns = [
                None
                if tensor is None
                else copy.load_piece(
                    column_pointer(tensor, at, first) + skip, index, end, vec, align
                )
                for tensor in (mW, mB)
            ]
            h = together([registers[None, p].load() for registers in kept])
            y = self.result(h, known, columns, scalars)
            store_piece(y, start, index, end, self.spec.align, True)
