"""Rows that wait in shared memory: several CTAs on an SM, one row each.

While one CTA writes, others read: the hardware's scheduler overlaps rows. Values are read twice
from shared memory, so that hardly any registers are held and a row may be long.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Int32, const_expr

from quack_core.device import barrier, copy, tma
from quack_core.device.barrier import NamedBarrier, Phase
from quack_core.device.reduce import Partial
from quack_core.reduction.tiling import WARP

from . import shared
from .base import (
    RowMap,
    column_pointer,
    coordinates,
    num_rows,
    slice_pointer,
    store_piece,
    store_statistics,
)
from .config import RowConfig


class RowMapStaged(RowMap):
    """A CTA, or a cluster of CTAs that share the columns, works on one row, batch by batch.

    Threads: ``threads_per_row``, each with ``unroll`` vectors of a batch.
    Shared memory: the CTA's slice of each row operand; partial results.
    Synchronises: an mbarrier per batch, on which its bytes complete; one barrier, with a cluster
    one phase of an mbarrier.
    Traffic: every operand once; column operands once per row, from L1 or L2.

    Rows of any length and alignment, as in ``shared``.
    """

    def __init__(self, spec, config: RowConfig, barrier: NamedBarrier | None = None):
        self.batch, self.batches = config.batch(spec), config.batches(spec)
        self.holds = self.batches == 1 and not spec.odd
        super().__init__(spec, config, barrier=barrier)
        self.shifted = spec.odd or spec.align < copy.CHUNK
        self.cols, self.early = config.slice_cols(spec), config.early(spec)
        # Results need no fixed owners: pieces of memory then, where they are the same for all rows.
        again = self.shifted and not self.holds
        self.by_pieces = again and spec.in_phase and not spec.columns

    @cute.jit
    def start(self, operands, scalars, stream: cuda.CUstream, groups: Int32 | None = None):
        """Launch; ``operands`` as ``kernel`` takes them."""
        cluster = const_expr(self.tiling.cluster)
        self.kernel(*operands[:7], scalars).launch(
            grid=[cluster * num_rows(operands[0]), 1, 1],
            block=[self.tiling.num_threads, 1, 1],
            cluster=[cluster, 1, 1] if const_expr(cluster > 1) else None,
            min_blocks_per_mp=max(1, self.config.ctas_per_sm),
            preferred_smem_carveout=self.smem_percent(bool(self.spec.columns)),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX, mW, mB, mR, mY, mH, mStatistic, scalars):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row, rank = block // self.tiling.cluster, block % self.tiling.cluster
        at, first = coordinates(mX, row), rank * self.cols
        count = self.count_from(first, self.cols)
        smem = cutlass.memory.SmemAllocator()
        stages = (self._stage(smem, mX), self._stage(smem, mR))
        exchange = self.allocate(smem)
        full = barrier.allocate_mbarriers(smem, self.batches)
        barrier.init_mbarriers(full, self.batches, 1, tid)
        if tid < WARP:
            cute.arch.sync_warp()
            self._fetch(mX, mR, stages[0], stages[1], full, at, first, count)
        self.start_cluster(exchange, tid)
        cute.arch.sync_threads()
        place = (at, first, tid, count)
        if const_expr(self.holds):
            h, partial = self._hold(mX, mR, mH, stages, full, place, scalars)
            columns = None
            if const_expr(self.early):
                columns = self._columns((mW, mB), place, Int32(0))
            self.join_cluster()
            total = self.reduce(partial, exchange, tid, Int32(0))
        else:
            partial = self._accumulate(mX, mR, mH, stages, full, place, scalars)
            self.join_cluster()
            total = self.reduce(partial, exchange, tid, Int32(0))
        known = self.finish(total, scalars)
        if const_expr(mStatistic is not None):
            if tid == 0 and rank == 0:
                store_statistics(mStatistic, at, known)
        if const_expr(self.holds):
            self._finish_batch(h, known, (mW, mB), columns, mY, place, Int32(0), scalars)
        else:
            self._results(mX, mR, mW, mB, mY, stages, place, known, scalars)

    def _stage(self, smem: cutlass.memory.SmemAllocator, tensor: cute.Tensor | None):
        """Room for a slice of a row operand, from the aligned address below it on."""
        if tensor is None:
            return None
        cols = self.cols
        if self.shifted:  # a batch is read to its end
            cols = self.batches * self.batch.n + shared.padding(tensor.element_type, True)
        layout = cute.make_layout(cols)
        return smem.allocate_tensor(tensor.element_type, layout, byte_alignment=128)

    @cute.jit
    def _fetch(self, mX, mR, sX, sR, full: cute.Pointer, at, first: Int32, count: Int32):
        """Start all copies, batch by batch."""
        for b in cutlass.range_constexpr(self.batches):
            part = self._part(mX, at, first, count, b)
            total = part[2]
            if const_expr(mR is not None):
                other = self._part(mR, at, first, count, b)
                total = total + other[2]
            if count > b * self.batch.n:
                barrier.expect_bytes(full, Phase(Int32(b), Int32(0)), total)
                self._load(part, sX, full + b)
                if const_expr(mR is not None):
                    self._load(other, sR, full + b)

    @cute.jit
    def _load(self, part, stage: cute.Tensor, mbar: cute.Pointer):
        source, offset, size = part
        if size > 0:  # the rest of a row may have come with the batch before
            tma.bulk_load(source, stage.iterator + offset, size, mbar)

    @cute.jit
    def _part(self, tensor: cute.Tensor, at, first: Int32, count: Int32, b: cutlass.Constexpr[int]):
        """A batch of a row operand: its start, elements before it, and bytes.

        Where rows are shifted, a batch reads into the block behind its own: it comes with them.
        """
        start, num_bytes = shared.cover(slice_pointer(tensor, at, first), count, self.shifted)
        width = const_expr(tensor.element_type.width // 8)
        end = const_expr((b + 1) * self.batch.n + shared.padding(tensor.element_type, self.shifted))
        begin = const_expr(end - self.batch.n if b else 0)
        size = num_bytes - begin * width
        if size > (end - begin) * width:
            size = Int32((end - begin) * width)
        if size < 0 or count == 0:
            size = Int32(0)
        return start + begin, begin, size

    @cute.jit
    def _hold(self, mX, mR, mH, stages, full: cute.Pointer, place, scalars):
        """What the result needs of the thread's values, the only batch, and its part of the sum."""
        _, _, tid, count = place
        if count > 0:
            barrier.wait(full, Phase(Int32(0), Int32(0)))
        h = self._values(mX, mR, stages, place, scalars, Int32(0))
        if const_expr(mH is not None):
            self._write(h, mH, place, Int32(0))
        exists = self.exists(self.batch, tid, count)
        return self.keep(h, exists)

    @cute.jit
    def _accumulate(self, mX, mR, mH, stages, full: cute.Pointer, place, scalars) -> Partial:
        """The thread's part of the reduction; h is written as well where it is wanted."""
        _, _, tid, count = place
        total = self.reduction.neutral()
        for b in cutlass.range((count + self.batch.n - 1) // self.batch.n, unroll=1):
            barrier.wait(full, Phase(b, Int32(0)))
            h = self._values(mX, mR, stages, place, scalars, b)
            partial = self.partial(h, self.exists(self.batch, tid, count - b * self.batch.n))
            total = self.reduction.combine(total, partial)
            if const_expr(mH is not None):
                self._write(h, mH, place, b)
        return total

    def _results(self, mX, mR, mW, mB, mY, stages, place, known, scalars) -> None:
        """Write the results; values are read again."""
        if self.by_pieces:
            self._pieces(mY, stages, place, known, scalars)
        else:
            self._batches(mX, mR, mW, mB, mY, stages, place, known, scalars)

    @cute.jit
    def _batches(self, mX, mR, mW, mB, mY, stages, place, known, scalars):
        """Write the results batch by batch, by the owners of the values."""
        _, _, _, count = place
        for b in cutlass.range((count + self.batch.n - 1) // self.batch.n, unroll=1):
            h = self._values(mX, mR, stages, place, scalars, b)
            self._finish_batch(h, known, (mW, mB), None, mY, place, b, scalars)

    def _finish_batch(self, h, known, tensors, columns, mY, place, b: Int32, scalars) -> None:
        """Write the results of a batch; column operands are read here unless they are there."""
        if columns is None and any(tensor is not None for tensor in tensors):

            def read(p: int) -> list:
                return [self._column_vector(tensor, place, b, p) for tensor in tensors]

            y = self.by_vector(h, known, read, scalars, mY.element_type, self.batch)
        else:
            y = self.result(h, known, columns or [None, None], scalars)
        self._write(y, mY, place, b)

    @cute.jit
    def _pieces(self, mY, stages, place, known, scalars):
        """Write the results in 16-byte blocks as they lie in memory; first and last in part."""
        at, first, tid, count = place
        batch, target = self.batch, slice_pointer(mY, at, first)
        before = copy.vector_offset(target, batch.vec)
        for b in cutlass.range((before + count + batch.n - 1) // batch.n, unroll=1):
            for p in cutlass.range_constexpr(batch.passes):
                index = b * batch.n + batch.start(tid) + p * batch.step
                if index < before + count:
                    pieces = [
                        None if stage is None else shared.vector(stage.iterator, index, batch.vec)
                        for stage in stages
                    ]
                    y = self.result(self.values(pieces, scalars), known, [None, None], scalars)
                    store_piece(y, target, index - before, count, copy.CHUNK)

    def _write(self, values: cute.TensorSSA, tensor: cute.Tensor, place, b: Int32) -> None:
        """Round the values of a batch to the output's dtype and write them to its row."""
        at, first, tid, count = place
        left = count - b * self.batch.n
        target = slice_pointer(tensor, at, first) + b * self.batch.n
        pred = None if self.shifted else self._predicate(tid, left)
        shared.write(values, target, self.batch, tid, left, pred, self.shifted)

    def _values(self, mX, mR, stages, place, scalars, b: Int32):
        """The thread's values of a batch."""
        at, first, tid, count = place
        base = b * self.batch.n
        pred = None if self.shifted else self._predicate(tid, count - base)
        registers = [
            None
            if tensor is None
            else shared.read(
                stage.iterator + base,
                slice_pointer(tensor, at, first),
                self.batch,
                tid,
                count - base,
                pred,
                self.shifted,
                self.fill,
            )
            for tensor, stage in zip((mX, mR), stages, strict=True)
        ]
        return self.values(registers, scalars)

    @cute.jit
    def _predicate(self, tid: Int32, left: Int32) -> cute.Tensor:
        """Which vectors of a batch exist: (1, 1, unroll)."""
        pred = cute.make_rmem_tensor(cute.make_layout((1, 1, self.batch.passes)), Boolean)
        for p in cutlass.range_constexpr(self.batch.passes):
            pred[0, 0, p] = self.batch.start(tid) + p * self.batch.step < left
        return pred

    def _columns(self, tensors, place, b: Int32) -> list[cute.Tensor | None]:
        """The thread's vectors of column operands: (vec, unroll); None for an absent one."""
        return [self._column(tensor, place, b) for tensor in tensors]

    def _column(self, tensor: cute.Tensor | None, place, b: Int32):
        if tensor is None:
            return None
        at, first, tid, count = place
        batch, align, left = self.batch, self.spec.weight_align, count - b * self.batch.n
        start = column_pointer(tensor, at, first) + b * batch.n
        if not self.shifted:
            return copy.load_vectors(start, batch, tid, align, self._predicate(tid, left))
        registers = copy.make_registers(batch, tensor.element_type)
        for p in range(batch.passes):
            registers[None, p].store(self._column_vector(tensor, place, b, p).load())
        return registers

    def _column_vector(self, tensor: cute.Tensor | None, place, b: Int32, p: int):
        """The thread's vector of pass ``p`` of a column operand."""
        if tensor is None:
            return None
        at, first, tid, count = place
        batch, align = self.batch, self.spec.weight_align
        start, index = column_pointer(tensor, at, first), batch.start(tid) + p * batch.step
        return copy.load_piece(start + b * batch.n, index, count - b * batch.n, batch.vec, align)
