"""Rows that wait in shared memory: several CTAs on an SM, one row each.

While one CTA writes, others read: the hardware's scheduler overlaps rows. Values are read twice
from shared memory, so that hardly any registers are held and a row may be long.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Int32, Int64, const_expr

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
    """A CTA, or a cluster of CTAs that share the columns, works on some rows, batch by batch.

    Threads: ``threads_per_row``, each with ``unroll`` vectors of a batch, in each row.
    Shared memory: the CTA's slice of each row operand; partial results.
    Synchronises: an mbarrier per batch, on which its bytes complete; one barrier, with a cluster
    one phase of an mbarrier.
    Traffic: every operand once; column operands once per CTA, from L1 or L2.

    Rows of any length and alignment, as in ``shared``.
    """

    def __init__(self, spec, config: RowConfig, barrier: NamedBarrier | None = None):
        self.batch, self.batches = config.batch(spec), config.batches(spec)
        self.holds = self.batches == 1 and not spec.odd
        self.rows = config.rows_per_thread
        if self.rows > 1 and spec.per_head:
            raise ValueError(f"{config}: rows of different heads have no columns in common")
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
            grid=[cluster * ((num_rows(operands[0]) + self.rows - 1) // self.rows), 1, 1],
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
        group, rank = block // self.tiling.cluster, block % self.tiling.cluster
        first = rank * self.cols
        count = self.count_from(first, self.cols)
        smem = cutlass.memory.SmemAllocator()
        sX, sR = self._stages(smem, mX), self._stages(smem, mR)
        exchange = self.allocate(smem)
        full = barrier.allocate_mbarriers(smem, self.rows * self.batches)
        barrier.init_mbarriers(full, self.rows * self.batches, 1, tid)
        slots = [self._slot(mX, group, r) for r in range(self.rows)]
        rows = [coordinates(mX, group * self.rows + slot) for slot in slots]
        places = [(at, first, tid, count) for at in rows]
        stages = [(_stage(sX, slot), _stage(sR, slot)) for slot in slots]
        if tid < WARP:
            cute.arch.sync_warp()
            for r in cutlass.range_constexpr(self.rows):
                if slots[r] == r:
                    mbars = full + r * self.batches
                    self._fetch(mX, mR, *stages[r], mbars, rows[r], first, count)
        self.start_cluster(exchange, tid)
        cute.arch.sync_threads()
        held, partial = [], ()
        for slot, stage, place in zip(slots, stages, places, strict=True):
            mbars = full + slot * self.batches
            if const_expr(self.holds):
                h, of_row = self._hold(mX, mR, mH, stage, mbars, place, scalars)
                held.append(h)
            else:
                of_row = self._accumulate(mX, mR, mH, stage, mbars, place, scalars)
            partial = (*partial, *of_row)
        columns = None
        if const_expr(self.holds and self.early):
            columns = self._columns((mW, mB), places[0], Int32(0))
        self.join_cluster()
        total, width = self.reduce(partial, exchange, tid, Int32(0)), self.of_row.width
        known = [self.finish(total[r * width : (r + 1) * width], scalars) for r in range(self.rows)]
        if const_expr(mStatistic is not None):
            for r in cutlass.range_constexpr(self.rows):
                if tid == 0 and rank == 0:
                    store_statistics(mStatistic, rows[r], known[r])
        if const_expr(self.holds):
            self._finish_batch(held, known, (mW, mB), columns, mY, places, Int32(0), scalars)
        else:
            self._results(mX, mR, mW, mB, mY, stages, places, known, scalars)

    @cute.jit
    def _slot(self, mX, group: Int32, r: cutlass.Constexpr[int]) -> Int32:
        """Which of the CTA's rows is worked on as number r: the first one again, and the same
        written again, beyond the last row of all."""
        slot = Int32(r)
        if const_expr(r > 0):
            if group * self.rows + r >= num_rows(mX):
                slot = Int32(0)
        return slot

    def _stages(self, smem: cutlass.memory.SmemAllocator, tensor: cute.Tensor | None):
        """Room for slices of a row operand, each from the aligned address below it on."""
        if tensor is None:
            return None
        cols, line = self.cols, 128 * 8 // tensor.element_type.width
        if self.shifted:  # a batch is read to its end
            cols = self.batches * self.batch.n + shared.padding(tensor.element_type, True)
        layout = cute.make_layout((cols, self.rows), stride=(1, -(-cols // line) * line))
        return smem.allocate_tensor(tensor.element_type, layout, byte_alignment=128)

    @cute.jit
    def _fetch(self, mX, mR, sX, sR, full: cute.Pointer, at, first: Int32, count: Int32):
        """Start all copies, batch by batch."""
        policy = self.policy(mX)
        for b in cutlass.range_constexpr(self.batches):
            part = self._part(mX, at, first, count, b)
            total = part[2]
            if const_expr(mR is not None):
                other = self._part(mR, at, first, count, b)
                total = total + other[2]
            if count > b * self.batch.n:
                barrier.expect_bytes(full, Phase(Int32(b), Int32(0)), total)
                self._load(part, sX, full + b, policy)
                if const_expr(mR is not None):
                    self._load(other, sR, full + b, policy)

    @cute.jit
    def _load(self, part, stage: cute.Tensor, mbar: cute.Pointer, policy: Int64):
        source, offset, size = part
        if size > 0:  # the rest of a row may have come with the batch before
            tma.bulk_load(source, stage.iterator + offset, size, mbar, policy=policy)

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
        total = self.of_row.neutral()
        for b in cutlass.range((count + self.batch.n - 1) // self.batch.n, unroll=1):
            barrier.wait(full, Phase(b, Int32(0)))
            h = self._values(mX, mR, stages, place, scalars, b)
            partial = self.partial(h, self.exists(self.batch, tid, count - b * self.batch.n))
            total = self.of_row.combine(total, partial)
            if const_expr(mH is not None):
                self._write(h, mH, place, b)
        return total

    def _results(self, mX, mR, mW, mB, mY, stages, places, known, scalars) -> None:
        """Write the results; values are read again."""
        if self.by_pieces:
            for stage, place, facts in zip(stages, places, known, strict=True):
                self._pieces(mY, stage, place, facts, scalars)
        else:
            self._batches(mX, mR, mW, mB, mY, stages, places, known, scalars)

    @cute.jit
    def _batches(self, mX, mR, mW, mB, mY, stages, places, known, scalars):
        """Write the results batch by batch, by the owners of the values."""
        _, _, _, count = places[0]
        for b in cutlass.range((count + self.batch.n - 1) // self.batch.n, unroll=1):
            held = [
                self._values(mX, mR, stage, place, scalars, b)
                for stage, place in zip(stages, places, strict=True)
            ]
            self._finish_batch(held, known, (mW, mB), None, mY, places, b, scalars)

    def _finish_batch(self, held, known, tensors, columns, mY, places, b: Int32, scalars) -> None:
        """Write the results of a batch; column operands are read here unless they are there."""
        if columns is None and any(tensor is not None for tensor in tensors):

            def read(p: int) -> list:
                return [self._column_vector(tensor, places[0], b, p) for tensor in tensors]

            results = self.by_vector(held, known, read, scalars, mY.element_type, self.batch)
        else:
            absent = [None, None]
            results = [
                self.result(h, facts, columns or absent, scalars)
                for h, facts in zip(held, known, strict=True)
            ]
        for y, place in zip(results, places, strict=True):
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


def _stage(stages: cute.Tensor | None, slot: Int32) -> cute.Tensor | None:
    """One of the slices of a row operand; None for an absent operand."""
    return None if stages is None else stages[None, slot]
