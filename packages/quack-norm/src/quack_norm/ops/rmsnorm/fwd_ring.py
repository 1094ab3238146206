"""RMSNorm forward of long rows: CTAs that stay, draw rows from a counter, and keep rows in flight.

The weight stays in registers, and the next rows arrive while one is reduced. SMs differ in speed,
so rows are drawn: with a fixed assignment the slowest SM decides.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, const_expr

from quack_core.device import copy, fast_math
from quack_core.device.reduce import thread_sum
from quack_core.reduction.base import ReductionBase
from quack_core.reduction.tiling import WARP

from .config import FwdConfig
from .fwd import (
    arguments,
    coordinates,
    num_rows,
    scale,
    slice_pointer,
    store_row,
    store_rstd,
)
from .spec import RMSNormFwdSpec

BUFFERS = 2
TICKET_BYTES = 4


class RMSNormFwdRing(ReductionBase):
    """Clusters walk over rows; each CTA owns a slice of the columns.

    Threads: all of a CTA share its slice; each fetches, and reads back, only its own vectors.
    Shared memory: ``stages`` slices of x (and residual) in flight; partial sums and row numbers.
    Synchronises: one barrier per row, with a cluster one phase of its mbarrier too. The row number
    drawn for later travels with the partial sums.
    Global state: rows drawn, clusters that left; zero before, cleared by the last cluster to leave.
    Traffic: every operand once; weight and bias once per CTA.
    """

    def __init__(self, spec: RMSNormFwdSpec, config: FwdConfig):
        super().__init__(config.tiling(spec), buffers=BUFFERS)
        self.spec, self.config = spec, config

    @cute.jit
    def __call__(  # the launcher's messages use these names
        self,
        x: cute.Tensor,  # (M, N) or (M1, M0, N)
        weight: cute.Tensor | None,  # (N,)
        bias: cute.Tensor | None,  # (N,)
        residual: cute.Tensor | None,  # like x
        out: cute.Tensor,  # like x
        residual_out: cute.Tensor | None,  # like x
        rstd: cute.Tensor | None,  # (M,) or (M1, M0)
        state: cute.Tensor,  # (config.state_ints,)
        eps: Float32,
        weight_offset: Float32,
        groups: Int32,
        stream: cuda.CUstream,
    ):
        cluster = const_expr(self.tiling.cluster)
        operands = (x, weight, bias, residual, out, residual_out, rstd, state)
        self.kernel(*operands, eps, weight_offset, groups).launch(
            grid=[cluster * groups, 1, 1],
            block=[self.tiling.num_threads, 1, 1],
            cluster=[cluster, 1, 1] if const_expr(cluster > 1) else None,
            min_blocks_per_mp=max(1, self.config.ctas_per_sm),
            preferred_smem_carveout=100,
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
        mRstd,
        mState,
        eps: Float32,
        weight_offset: Float32,
        groups: Int32,
    ):
        tiling = const_expr(self.tiling)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        group, rank = block // tiling.cluster, block % tiling.cluster
        line, lines, sharers = self._share(num_rows(mX), group, groups)
        smem = cutlass.memory.SmemAllocator()
        sX, sR = (self._ring(smem, tensor) for tensor in (mX, mR))  # (cols, stages)
        scratch = self._scratch(smem)
        exchange = self.allocate(smem)
        tickets = smem.allocate_tensor(Int32, cute.make_layout(BUFFERS), byte_alignment=16)
        self.start_cluster(exchange, tid)
        place = self._place(mX, group, line, rank, tid)  # where this thread's vectors lie

        stages = const_expr(self.config.stages)
        queue = cute.make_rmem_tensor(cute.make_layout(stages), Int32)  # the lines after this one
        for s in cutlass.range_constexpr(stages):
            queue[s] = line + (s + 1) * sharers
            self._fetch(mX, mR, sX, sR, group, line + s * sharers, lines, place, Int32(s))
        drawn = (stages + 1) * sharers  # lines given out beforehand
        counter = mState.iterator + self._counter(group)
        ticket = lines  # of thread 0 of rank 0: a line drawn for later; lines and above: none left
        if tid == 0 and rank == 0 and drawn < lines:
            ticket = drawn + draw(counter)
        rW, rB = self._weight(mW, place), self._weight(mB, place)
        self.join_cluster()

        step, stage = Int32(0), Int32(0)
        while line < lines:
            cute.arch.cp_async_wait_group(stages - 1)
            rX, rR = self._read(sX, stage, place), self._read(sR, stage, place)  # (vec, passes)
            partial = self._sum(rX, rR, scratch, place)
            self._fetch(mX, mR, sX, sR, group, queue[stages - 1], lines, place, stage)
            self._send_ticket(ticket, tickets, exchange.mbar, tid, rank, step)
            extra = const_expr(TICKET_BYTES if tiling.cluster > 1 else 0)
            (square_sum,) = self.reduce((partial,), exchange, tid, step, extra)
            rstd = fast_math.rsqrt(square_sum * (1 / self.spec.n) + eps)
            at, h = coordinates(mX, self._row(group, line)), self._value(rX, rR)
            line = queue[0]
            for s in cutlass.range_constexpr(stages - 1):
                queue[s] = queue[s + 1]
            queue[stages - 1] = tickets[step % BUFFERS]
            if ticket < lines:
                ticket = drawn + draw(counter)
            if const_expr(mRstd is not None):
                if tid == 0 and rank == 0:
                    store_rstd(mRstd, at, rstd)
            if const_expr(mH is not None):
                self._store(h, mH, at, place)
            y = scale(h * rstd, rW, rB, weight_offset, self.spec.offset)
            self._store(y, mY, at, place)
            step += 1
            stage += 1
            if stage == stages:
                stage = Int32(0)
        if tid == 0 and rank == 0:
            leave(mState, groups)

    def _share(self, rows: Int32, group: Int32, groups: Int32) -> tuple[Int32, Int32, Int32]:
        """First line of this cluster, number of lines, clusters that share them: a line is a row."""
        return group, rows, groups

    def _row(self, group: Int32, line: Int32) -> Int32:
        return line

    def _counter(self, group: Int32) -> Int32:
        """Which counter the cluster draws from; number 0 counts the clusters that left."""
        return Int32(1)

    def _place(self, mX, group: Int32, line: Int32, rank: Int32, tid: Int32):
        """(thread, first column of the CTA, predicate of its vectors or None)"""
        pred = None
        if self.tiling.ragged:
            pred = copy.column_predicate(self.tiling, tid, rank, Boolean(True))
        return tid, rank * self.tiling.cols, pred

    def _scratch(self, smem: cutlass.memory.SmemAllocator):
        """Shared memory that ``_sum`` needs: none."""

    def _ring(self, smem: cutlass.memory.SmemAllocator, tensor: cute.Tensor | None):
        if tensor is None:
            return None
        layout = cute.make_layout((self.tiling.cols, self.config.stages))
        return smem.allocate_tensor(tensor.element_type, layout, byte_alignment=128)

    @cute.jit
    def _fetch(self, mX, mR, sX, sR, group: Int32, line: Int32, lines: Int32, place, stage: Int32):
        """Start the copy of a row, if there is one; a group of copies is committed in any case."""
        tiling, align = const_expr(self.tiling), const_expr(self.spec.align)
        tid, first, _ = place
        valid = line < lines
        at = coordinates(mX, self._row(group, line if valid else Int32(0)))
        # A predicate, not a branch: DSL 4.8 mixes up variables that are None inside a dynamic `if`.
        pred = copy.column_predicate(tiling, tid, first // tiling.cols, valid)
        source, target = slice_pointer(mX, at, first), sX[None, stage].iterator
        copy.fetch_vectors(source, target, tiling, tid, align, pred)
        if const_expr(mR is not None):
            source, target = slice_pointer(mR, at, first), sR[None, stage].iterator
            copy.fetch_vectors(source, target, tiling, tid, align, pred)
        cute.arch.cp_async_commit_group()

    def _read(self, ring: cute.Tensor | None, stage: Int32, place) -> cute.Tensor | None:
        """The thread's vectors of a row in shared memory: (vec, passes); None without a ring."""
        if ring is None:
            return None
        tid, _, pred = place
        return copy.load_vectors(ring[None, stage].iterator, self.tiling, tid, copy.CHUNK, pred)

    def _weight(self, tensor: cute.Tensor | None, place) -> cute.Tensor | None:
        """The thread's vectors of weight or bias: (vec, passes); None if there is none."""
        if tensor is None:
            return None
        tid, first, pred = place
        pointer = tensor.iterator + first
        return copy.load_vectors(pointer, self.tiling, tid, self.spec.weight_align, pred)

    def _sum(self, rX: cute.Tensor, rR: cute.Tensor | None, scratch, place) -> Float32:
        """The thread's part of the sum of squares."""
        h = self._value(rX, rR)
        return thread_sum(h * h)

    def _store(self, values: cute.TensorSSA, tensor: cute.Tensor, at, place) -> None:
        """Round the values to the output's dtype and write them to its row."""
        tid, first, pred = place
        store_row(values, slice_pointer(tensor, at, first), self.tiling, tid, self.spec.align, pred)

    def _value(self, rX: cute.Tensor, rR: cute.Tensor | None) -> cute.TensorSSA:
        """x, or x + residual, in float32."""
        x = rX.load().to(Float32)
        return x if rR is None else x + rR.load().to(Float32)

    @cute.jit
    def _send_ticket(
        self,
        ticket: Int32,
        tickets: cute.Tensor,
        mbar: cute.Pointer,
        tid: Int32,
        rank: Int32,
        step: Int32,
    ):
        """Give the row number to the CTA, or to every CTA of the cluster, with this round's sums."""
        buffer = step % BUFFERS
        if const_expr(self.tiling.cluster == 1):
            if tid == 0:
                tickets[buffer] = ticket
        else:
            if rank == 0 and tid < WARP:
                value = cute.arch.shuffle_sync(ticket, 0)
                if tid < self.tiling.cluster:
                    slot = tickets.iterator + buffer
                    cute.arch.store_async_dsmem(slot, value, mbar + buffer, tid)


def draw(counter: cute.Pointer) -> Int32:
    """Take a number from a counter of lines."""
    return cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")


@cute.jit
def leave(state: cute.Tensor, groups: Int32):
    """The last cluster to leave clears the counters: no cluster draws after it has left."""
    before = cute.arch.atomic_add(state.iterator, Int32(1), sem="acq_rel", scope="gpu")
    if before == groups - 1:
        for i in cutlass.range_constexpr(cute.size(state)):
            state[i] = Int32(0)


def build(spec: RMSNormFwdSpec, config: FwdConfig) -> tuple[RMSNormFwdRing, tuple]:
    """The kernel and its symbolic arguments."""
    return RMSNormFwdRing(spec, config), arguments(spec, config)
