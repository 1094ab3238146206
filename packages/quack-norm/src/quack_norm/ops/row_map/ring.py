"""Long rows: CTAs that stay, draw rows from a counter, and keep rows in flight.

One warp fetches rows by bulk copies; the others compute and hold the columns, in registers or L1. SMs
differ in speed, so rows are drawn: with a fixed assignment the slowest SM decides.
"""

import enum
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Int32, const_expr

from quack_core.device import barrier, copy, tma
from quack_core.reduction.tiling import WARP

from . import shared
from .base import RowMap, coordinates, num_rows, slice_pointer, store_statistics
from .config import RowConfig

NO_ROW = -1


class Barrier(barrier.NamedBarrier):
    """Of the warps that compute."""

    REDUCE = enum.auto()


class Ring(NamedTuple):
    """Rows under way.

    Args:
        x: (columns, stages), each stage from the aligned address below the row's on.
        residual: likewise, or None.
        rows: int32 (stages,): which row a stage holds; ``NO_ROW`` behind the last.
        full: an mbarrier per stage, on which its bytes complete.
        empty: an mbarrier per stage, at which the warps that have read it arrive.
    """

    x: cute.Tensor
    residual: cute.Tensor | None
    rows: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer


class RowMapRing(RowMap):
    """Clusters walk over rows; each CTA owns a slice of the columns.

    Threads: the first ``threads_per_row`` share the CTA's slice; one more warp fetches.
    Shared memory: ``stages`` slices of each row operand in flight; partial results, row numbers.
    Synchronises: a full and an empty mbarrier per stage; one named barrier per row, with a cluster
    one phase of its mbarrier too. In a cluster, row numbers travel from CTA 0 to the others.
    Global state: rows drawn, clusters that left; zero before, cleared by the last cluster to leave.
    Traffic: every operand once; column operands once per CTA, or once per row from L1 where registers
    do not hold them.

    Rows of any length and alignment: a row that is not aligned arrives with what lies around it in
    its 16-byte blocks. Threads own the same elements wherever a row lies; they are shifted in
    registers when read and when written.
    """

    def __init__(self, spec, config: RowConfig):
        super().__init__(spec, config, buffers=2, barrier=Barrier.REDUCE)
        self.early = config.early(spec)
        self.shifted = spec.odd or spec.align < copy.CHUNK
        self.tickets = config.stages + 2  # row numbers that may be under way in a cluster

    @cute.jit
    def start(self, operands, scalars, stream: cuda.CUstream, groups: Int32):
        """Launch; ``operands`` as ``kernel`` takes them."""
        cluster = const_expr(self.tiling.cluster)
        self.kernel(*operands, scalars, groups).launch(
            grid=[cluster * groups, 1, 1],
            block=[self.config.num_threads, 1, 1],
            cluster=[cluster, 1, 1] if const_expr(cluster > 1) else None,
            min_blocks_per_mp=max(1, self.config.ctas_per_sm),
            preferred_smem_carveout=self.smem_percent(not self.early),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mX,
        mW,
        mB,
        mR,
        mY,
        mH,
        mStatistic,
        mState,
        scalars,
        groups: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        group, rank = block // self.tiling.cluster, block % self.tiling.cluster
        warp = cute.arch.make_warp_uniform(tid // WARP)
        smem = cutlass.memory.SmemAllocator()
        ring = self._ring(smem, mX, mR)
        exchange = self.allocate(smem)
        tickets = smem.allocate_tensor(Int32, cute.make_layout(self.tickets), byte_alignment=16)
        drawn = barrier.allocate_mbarriers(smem, self.tickets)  # both: for clusters
        barrier.init_mbarriers(ring.full, self.config.stages, 1, tid)
        barrier.init_mbarriers(ring.empty, self.config.stages, self.tiling.warps_per_row, tid)
        if const_expr(self.tiling.cluster > 1):
            barrier.init_mbarriers(drawn, self.tickets, 1, tid)
        self.start_cluster(exchange, tid)
        self.join_cluster()
        cute.arch.sync_threads()
        if warp == self.tiling.warps_per_row:
            self._produce(mX, mR, ring, tickets, drawn, mState, group, rank, groups)
        else:
            self._consume(mX, mW, mB, mR, mY, mH, mStatistic, ring, exchange, rank, tid, scalars)

    def _ring(self, smem: cutlass.memory.SmemAllocator, mX, mR) -> Ring:
        stages = self.config.stages

        def stage(tensor: cute.Tensor | None):
            if tensor is None:
                return None
            cols = self.tiling.cols + shared.padding(tensor.element_type, self.shifted)
            layout = cute.make_layout((cols, stages))
            return smem.allocate_tensor(tensor.element_type, layout, byte_alignment=128)

        x, residual = stage(mX), stage(mR)
        rows = smem.allocate_tensor(Int32, cute.make_layout(stages), byte_alignment=16)
        full, empty = (barrier.allocate_mbarriers(smem, stages) for _ in range(2))
        return Ring(x, residual, rows, full, empty)

    # --- the warp that fetches

    @cute.jit
    def _produce(
        self,
        mX,
        mR,
        ring: Ring,
        tickets: cute.Tensor,
        drawn: cute.Pointer,
        mState: cute.Tensor,
        group: Int32,
        rank: Int32,
        groups: Int32,
    ):
        """Draw rows and fetch them, until there are none."""
        lane, rows = cute.arch.lane_idx(), num_rows(mX)
        phase, slot = barrier.empty_phase(), barrier.full_phase()
        row, ticket = group, Int32(NO_ROW)
        while row != NO_ROW:
            if rank == 0 and lane == 0:  # the answer comes while the row is fetched
                ticket = groups + draw(mState.iterator + 1)
            self._fetch(mX, mR, ring, phase, row, rank)
            row = self._next_row(ticket, rows, tickets, drawn, slot, rank)
            phase = barrier.next_phase(phase, self.config.stages)
            slot = barrier.next_phase(slot, self.tickets)
        barrier.wait(ring.empty, phase)
        if lane == 0:
            ring.rows[phase.stage] = Int32(NO_ROW)
        barrier.arrive(ring.full, phase)
        if rank == 0 and lane == 0:
            leave(mState, groups)

    @cute.jit
    def _fetch(self, mX, mR, ring: Ring, phase, row: Int32, rank: Int32):
        """Start the copies of this CTA's slice of a row into a stage."""
        at, first = coordinates(mX, row), rank * self.tiling.cols
        count = self.count_from(first, self.tiling.cols)
        covers = [
            shared.cover(slice_pointer(tensor, at, first), count, self.shifted)
            for tensor in (mX, mR)
            if tensor is not None
        ]
        total = covers[0][1]
        if const_expr(mR is not None):
            total = total + covers[1][1]
        if count == 0:  # a slice beyond the end of the row
            total = Int32(0)
        barrier.wait(ring.empty, phase)
        if cute.arch.lane_idx() == 0:
            ring.rows[phase.stage] = row
        cute.arch.sync_warp()
        barrier.expect_bytes(ring.full, phase, total)
        if count > 0:
            mbar, policy = ring.full + phase.stage, self.policy(mX)
            target = ring.x[None, phase.stage].iterator
            tma.bulk_load(covers[0][0], target, covers[0][1], mbar, policy=policy)
            if const_expr(mR is not None):
                target = ring.residual[None, phase.stage].iterator
                tma.bulk_load(covers[1][0], target, covers[1][1], mbar, policy=policy)

    @cute.jit
    def _next_row(
        self,
        ticket: Int32,
        rows: Int32,
        tickets: cute.Tensor,
        drawn: cute.Pointer,
        slot,
        rank: Int32,
    ) -> Int32:
        """The row that lane 0 of CTA 0 drew, in every CTA of the cluster."""
        if ticket >= rows:
            ticket = Int32(NO_ROW)
        row = cute.arch.shuffle_sync(ticket, 0)
        if const_expr(self.tiling.cluster > 1):
            lane = cute.arch.lane_idx()
            barrier.expect_bytes(drawn, slot, 4)
            if rank == 0 and lane < self.tiling.cluster:
                place, mbar = tickets.iterator + slot.stage, drawn + slot.stage
                cute.arch.store_async_dsmem(place, row, mbar, lane)
            barrier.wait(drawn, slot)
            row = tickets[slot.stage]
        return row

    # --- the warps that compute

    @cute.jit
    def _consume(
        self,
        mX,
        mW,
        mB,
        mR,
        mY,
        mH,
        mStatistic,
        ring: Ring,
        exchange,
        rank: Int32,
        tid: Int32,
        scalars,
    ):
        """Work on the rows that arrive."""
        first = rank * self.tiling.cols
        place = (first, tid, self.count_from(first, self.tiling.cols), self._predicate(tid, rank))
        columns = None
        if const_expr(self.early):
            columns = [self._columns(mW, place), self._columns(mB, place)]
        phase, step = barrier.full_phase(), Int32(0)
        barrier.wait(ring.full, phase)
        row = ring.rows[phase.stage]
        while row != NO_ROW:
            at = coordinates(mX, row)
            rX = self._read(mX, ring.x, phase.stage, at, place)  # (vec, passes)
            rR = self._read(mR, ring.residual, phase.stage, at, place)
            barrier.arrive(ring.empty, phase)
            h = self.values([rX, rR], scalars)
            exists = self.exists(self.tiling, tid, self.spec.n - first)
            partial = self.partial(h, exists)
            if const_expr(mH is not None):
                self._write(h, mH, at, place)
            total = self.reduce(partial, exchange, tid, step)
            known = self.finish(total, scalars)
            if const_expr(mStatistic is not None):
                if tid == 0 and rank == 0:
                    store_statistics(mStatistic, at, known)
            h = self.values([rX, rR], scalars)
            self._write(
                self._finished(h, known, (mW, mB), columns, mY, place, scalars), mY, at, place
            )
            step += 1
            phase = barrier.next_phase(phase, self.config.stages)
            barrier.wait(ring.full, phase)
            row = ring.rows[phase.stage]

    def _finished(self, h, known, tensors, columns, mY, place, scalars) -> cute.TensorSSA:
        """The results; column operands are read here unless they are there."""
        if columns is not None:
            return self.result(h, known, columns, scalars)

        def read(p: int) -> list:
            return [self._column_vector(tensor, place, p) for tensor in tensors]

        return self.by_vector([h], [known], read, scalars, mY.element_type, self.tiling)[0]

    def _predicate(self, tid: Int32, rank: Int32) -> cute.Tensor | None:
        """Which vectors of this thread exist; None if all do, or if not even vectors are whole."""
        if self.tiling.ragged and not self.shifted:
            return copy.column_predicate(self.tiling, tid, rank, Boolean(True))
        return None

    def _columns(self, tensor: cute.Tensor | None, place) -> cute.Tensor | None:
        """The thread's vectors of a column operand: (vec, passes); None if there is none."""
        if tensor is None:
            return None
        first, tid, _, pred = place
        tiling, align = self.tiling, self.spec.weight_align
        if not self.shifted:
            return copy.load_vectors(tensor.iterator + first, tiling, tid, align, pred)
        registers = copy.make_registers(tiling, tensor.element_type)
        for p in range(tiling.passes):
            registers[None, p].store(self._column_vector(tensor, place, p).load())
        return registers

    def _column_vector(self, tensor: cute.Tensor | None, place, p: int) -> cute.Tensor | None:
        """The thread's vector of pass ``p`` of a column operand."""
        if tensor is None:
            return None
        first, tid, count, _ = place
        tiling, align = self.tiling, self.spec.weight_align
        index = tiling.start(tid) + p * tiling.step
        return copy.load_piece(tensor.iterator + first, index, count, tiling.vec, align)

    def _read(self, tensor, ring: cute.Tensor | None, stage: Int32, at, place):
        """The thread's vectors of a row in shared memory: (vec, passes); None without a ring."""
        if ring is None:
            return None
        first, tid, count, pred = place
        source, start = slice_pointer(tensor, at, first), ring[None, stage].iterator
        return shared.read(start, source, self.tiling, tid, count, pred, self.shifted, self.fill)

    def _write(self, values: cute.TensorSSA, tensor: cute.Tensor, at, place) -> None:
        """Round the values to the output's dtype and write them to its row."""
        first, tid, count, pred = place
        target = slice_pointer(tensor, at, first)
        shared.write(values, target, self.tiling, tid, count, pred, self.shifted)


def draw(counter: cute.Pointer) -> Int32:
    """Take a number from a counter of rows."""
    return cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")


@cute.jit
def leave(state: cute.Tensor, groups: Int32):
    """The last cluster to leave clears the counters: no cluster draws after it has left."""
    before = cute.arch.atomic_add(state.iterator, Int32(1), sem="acq_rel", scope="gpu")
    if before == groups - 1:
        for i in cutlass.range_constexpr(cute.size(state)):
            state[i] = Int32(0)
