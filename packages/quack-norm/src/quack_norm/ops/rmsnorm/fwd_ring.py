"""RMSNorm forward of long rows: CTAs that stay, draw rows from a counter, and keep rows in flight.

The weight stays in registers, and the next rows arrive while one is reduced. SMs differ in speed,
so rows are drawn: with a fixed assignment the slowest SM decides.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, const_expr

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
    weight_pointer,
)
from .spec import RMSNormFwdSpec

TICKET_BYTES = 4


class RMSNormFwdRing(ReductionBase):
    """Clusters walk over rows; each CTA owns a slice of the columns.

    Threads: all of a CTA share its slice; each fetches, and reads back, only its own vectors.
    Shared memory: ``stages`` slices of x (and residual); partial sums and row numbers, two of each.
    Synchronises: one barrier, or one phase of the cluster's mbarrier, per row. The row number drawn
    for later travels with the partial sums.
    Global state: rows drawn, clusters that left; zero before, cleared by the last cluster to leave.
    Traffic: every operand once; weight and bias once per CTA.
    """

    def __init__(self, spec: RMSNormFwdSpec, config: FwdConfig):
        super().__init__(config.tiling(spec), buffers=2)
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
        state: cute.Tensor,  # (2,)
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
        self, mX, mW, mB, mR, mY, mH, mRstd, mState, eps: Float32, weight_offset: Float32, groups: Int32
    ):
        tiling, align = const_expr(self.tiling), const_expr(self.spec.align)
        weight_align = const_expr(self.spec.weight_align)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        group, rank = block // tiling.cluster, block % tiling.cluster
        first, rows = rank * tiling.cols, num_rows(mX)
        pred = None  # (1, 1, passes): does the vector exist?
        if const_expr(tiling.ragged):
            pred = copy.column_predicate(tiling, tid, rank, cutlass.Boolean(True))

        smem = cutlass.memory.SmemAllocator()
        sX, sR = (self._ring(smem, tensor) for tensor in (mX, mR))  # (cols, stages)
        exchange = self.allocate(smem)
        tickets = smem.allocate_tensor(Int32, cute.make_layout(2), byte_alignment=8)
        self.start_cluster(exchange, tid)

        stages = const_expr(self.config.stages)
        queue = cute.make_rmem_tensor(cute.make_layout(stages), Int32)  # the rows after this one
        for s in cutlass.range_constexpr(stages):
            queue[s] = group + (s + 1) * groups
            self._fetch(mX, mR, sX, sR, group + s * groups, rows, rank, Int32(s), tid)
        ticket = rows  # of thread 0 of rank 0: the row drawn for later; rows and above: none left
        drawn = (stages + 1) * groups
        if tid == 0 and rank == 0 and drawn < rows:
            ticket = drawn + draw(mState)
        rW, rB = None, None
        if const_expr(mW is not None):
            rW = copy.load_vectors(mW.iterator + first, tiling, tid, weight_align, pred)
        if const_expr(mB is not None):
            rB = copy.load_vectors(mB.iterator + first, tiling, tid, weight_align, pred)
        self.join_cluster()

        row, step, stage = group, Int32(0), Int32(0)
        while row < rows:
            at = coordinates(mX, row)
            cute.arch.cp_async_wait_group(stages - 1)
            h = self._read(sX, stage, tid, pred)
            if const_expr(mR is not None):
                h = h + self._read(sR, stage, tid, pred)
            partial = thread_sum(h * h)
            self._fetch(mX, mR, sX, sR, queue[stages - 1], rows, rank, stage, tid)
            self._send_ticket(ticket, tickets, exchange[2], tid, rank, step)
            extra = const_expr(TICKET_BYTES if tiling.cluster > 1 else 0)
            (square_sum,) = self.reduce((partial,), exchange, tid, step, extra)
            rstd = fast_math.rsqrt(square_sum * (1 / tiling.n) + eps)
            row = queue[0]
            for s in cutlass.range_constexpr(stages - 1):
                queue[s] = queue[s + 1]
            queue[stages - 1] = tickets[step % 2]
            if ticket < rows:
                ticket = drawn + draw(mState)
            if const_expr(mRstd is not None):
                if tid == 0 and rank == 0:
                    store_rstd(mRstd, at, rstd)
            if const_expr(mH is not None):
                store_row(h, slice_pointer(mH, at, first), tiling, tid, align, pred)
            y = scale(h * rstd, rW, rB, weight_offset, self.spec.offset)
            store_row(y, slice_pointer(mY, at, first), tiling, tid, align, pred)
            step += 1
            stage += 1
            if stage == stages:
                stage = Int32(0)
        if tid == 0 and rank == 0 and drawn < rows:
            leave(mState, groups)

    def _ring(self, smem: cutlass.memory.SmemAllocator, tensor: cute.Tensor | None):
        if tensor is None:
            return None
        layout = cute.make_layout((self.tiling.cols, self.config.stages))
        return smem.allocate_tensor(tensor.element_type, layout, byte_alignment=128)

    @cute.jit
    def _fetch(
        self, mX, mR, sX, sR, row: Int32, rows: Int32, rank: Int32, stage: Int32, tid: Int32
    ):
        """Start the copy of a row, if there is one; a group of copies is committed in any case."""
        tiling, align = const_expr(self.tiling), const_expr(self.spec.align)
        first, valid = rank * tiling.cols, row < rows
        at = coordinates(mX, row if valid else Int32(0))
        # A predicate, not a branch: DSL 4.8 mixes up variables that are None inside a dynamic `if`.
        pred = copy.column_predicate(tiling, tid, rank, valid)
        source, target = slice_pointer(mX, at, first), sX[None, stage].iterator
        copy.fetch_vectors(source, target, tiling, tid, align, pred)
        if const_expr(mR is not None):
            source, target = slice_pointer(mR, at, first), sR[None, stage].iterator
            copy.fetch_vectors(source, target, tiling, tid, align, pred)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def _read(self, ring: cute.Tensor, stage: Int32, tid: Int32, pred):
        pointer = ring[None, stage].iterator
        registers = copy.load_vectors(pointer, self.tiling, tid, copy.CHUNK, pred)
        return registers.load().to(Float32)

    @cute.jit
    def _send_ticket(
        self, ticket: Int32, tickets: cute.Tensor, mbar: cute.Pointer, tid: Int32, rank: Int32, step: Int32
    ):
        """Give the row number to the CTA, or to every CTA of the cluster, with this round's sums."""
        buffer = step % 2
        if const_expr(self.tiling.cluster == 1):
            if tid == 0:
                tickets[buffer] = ticket
        else:
            if rank == 0 and tid < WARP:
                value = cute.arch.shuffle_sync(ticket, 0)
                if tid < self.tiling.cluster:
                    slot = tickets.iterator + buffer
                    cute.arch.store_async_dsmem(slot, value, mbar + buffer, tid)


def draw(state: cute.Tensor) -> Int32:
    """Take a number from the counter of rows."""
    return cute.arch.atomic_add(state.iterator, Int32(1), sem="relaxed", scope="gpu")


@cute.jit
def leave(state: cute.Tensor, groups: Int32):
    """The last cluster to leave clears the counters: no cluster draws after it has left."""
    left = state.iterator + 1
    if cute.arch.atomic_add(left, Int32(1), sem="acq_rel", scope="gpu") == groups - 1:
        state[0], state[1] = Int32(0), Int32(0)


def build(spec: RMSNormFwdSpec, config: FwdConfig) -> tuple[RMSNormFwdRing, tuple]:
    """The kernel and its symbolic arguments."""
    return RMSNormFwdRing(spec, config), arguments(spec, config)
