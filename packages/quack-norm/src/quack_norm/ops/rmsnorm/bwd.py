"""RMSNorm backward in one launch: dx, dweight and dbias, the same bits on every run."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from quack_core import dtypes
from quack_core.device import copy
from quack_core.jit.compile import symbolic
from quack_core.reduction.base import ReductionBase
from quack_core.reduction.columns import ColumnSums
from quack_norm.ops.row_map.base import column_pointer, num_rows, slice_pointer, store_row

from .bwd_config import BwdConfig
from .bwd_spec import RMSNormBwdSpec
from .fwd import statistics
from .gradient import NormGradient


class RMSNormBwd(NormGradient, ReductionBase):
    """CTAs walk over tiles of rows, each over its own: a repeatable dweight forbids drawing them.

    Threads: ``threads_per_row`` per row and CTA; each fetches, and reads back, only its own vectors.
    Shared memory: ``stages`` tiles of x, dout and dresidual_out; after the last row the same memory
    holds column sums. Partial dot products, two buffers.
    Synchronises: one barrier, or one phase of the cluster's mbarrier, per tile; nothing if a row
    fits a warp.
    Global state: a counter per head and rank; zero before, cleared by the last CTA to arrive.
    Traffic: x, dout and dx once; clusters * N * 4 bytes per column sum, mostly in L2.
    """

    def __init__(self, spec: RMSNormBwdSpec, config: BwdConfig):
        super().__init__(config.tiling(spec), self.reduction_of(spec), buffers=2)
        self.spec, self.config = spec, config
        self.sums = ColumnSums(self.tiling, config.peers) if spec.column_sums else None

    @cute.jit
    def __call__(  # the launcher's messages use these names
        self,
        x: cute.Tensor,  # (M, N) or (M1, M0, N)
        weight: cute.Tensor | None,  # (N,) or (M0, N)
        dout: cute.Tensor,  # like x
        rstd: cute.Tensor,  # (M,) or (M1, M0), or (..., STATISTICS)
        dresidual_out: cute.Tensor | None,  # like x
        dx: cute.Tensor,  # like x
        dresidual: cute.Tensor | None,  # like x
        dweight: cute.Tensor | None,  # like weight
        dbias: cute.Tensor | None,  # like weight
        work: cute.Tensor | None,  # float32 scratch
        state: cute.Tensor | None,  # (heads * cluster,)
        weight_offset: Float32,
        groups: Int32,
        stream: cuda.CUstream,
    ):
        cluster = const_expr(self.config.cluster)
        heads = x.shape[1] if const_expr(self.spec.per_head) else Int32(1)
        operands = (
            x,
            weight,
            dout,
            rstd,
            dresidual_out,
            dx,
            dresidual,
            dweight,
            dbias,
            work,
            state,
        )
        self.kernel(*operands, weight_offset, groups).launch(
            grid=[cluster * groups, heads, 1],
            block=[self.tiling.num_threads, 1, 1],
            cluster=[cluster, 1, 1] if const_expr(cluster > 1) else None,
            min_blocks_per_mp=self.config.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mX,
        mW,
        mDy,
        mRstd,
        mDh,
        mDx,
        mDr,
        mDw,
        mDb,
        mWork,
        mState,
        weight_offset: Float32,
        groups: Int32,
    ):
        tiling, config = const_expr(self.tiling), const_expr(self.config)
        tid, _, _ = cute.arch.thread_idx()
        block, head, _ = cute.arch.block_idx()
        group, rank = block // config.cluster, block % config.cluster
        thread = self.thread_in_row(tid)
        row_rank = rank % config.split  # which slice of the columns
        first = row_rank * tiling.cols
        rows = mX.shape[0] if const_expr(self.spec.per_head) else num_rows(mX)
        begin = (group * config.peers + rank // config.split) * tiling.rows_per_cta
        stride = groups * config.peers * tiling.rows_per_cta
        row = begin + self.row_in_cta(tid)

        smem = cutlass.memory.SmemAllocator()
        ring_bytes = const_expr(max(128, config.ring_bytes(self.spec)))
        ring = smem.allocate_tensor(cutlass.Uint8, cute.make_layout(ring_bytes), byte_alignment=128)
        exchange = self.allocate(smem)
        ticket = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=4)
        self.start_cluster(exchange, tid)
        inputs = (mX, mDy, mX if const_expr(mDh is None) else mDh)
        for s in cutlass.range_constexpr(config.stages):
            self._fetch(inputs, ring, row + s * stride, rows, head, row_rank, Int32(s), tid)

        weight = (mW, (row, head), first, thread, row_rank)
        held = self._hold(*weight)
        sums = (self._zeros(), self._zeros())  # dweight, dbias
        next_rstd, next_mean, next_rest = self._statistics(mRstd, row, rows, head)
        self.join_cluster()

        step, stage = Int32(0), Int32(0)
        for begin_of_tile in cutlass.range(begin, rows, stride, unroll=1):
            row, rstd = begin_of_tile + self.row_in_cta(tid), next_rstd
            mean = (next_mean, next_rest)
            next_rstd, next_mean, next_rest = self._statistics(mRstd, row + stride, rows, head)
            at = (inputs, ring, row, rows, head, row_rank, stage, tid)
            later = (inputs, ring, row + config.stages * stride, rows, head, row_rank, stage, tid)
            self._await()
            kept, dots = self._first_pass(at, rstd, mean, held, weight, sums, weight_offset)
            self._fetch(*later)
            dots = self.reduce(dots, exchange, tid, step)
            means = self.means(dots, rstd)
            self._second_pass(at, kept, means, rstd, mean, held, weight, (mDx, mDr), weight_offset)
            step += 1
            stage += 1
            if stage == config.stages:
                stage = Int32(0)
        if const_expr(self.sums is not None):
            self._column_sums(
                *sums, mDw, mDb, mWork, mState, ring, ticket, groups, group, rank, head, tid
            )

    def _zeros(self) -> cute.Tensor:
        """float32 registers (vec, passes) for a column sum."""
        registers = copy.make_registers(self.tiling, Float32)
        registers.fill(0.0)
        return registers

    @cute.jit
    def _hold(self, mW, at, first: Int32, thread: Int32, row_rank: Int32) -> cute.Tensor:
        """The thread's vectors of the weight, for all rows."""
        if const_expr(mW is None):
            return self._zeros()
        else:
            pred = self._predicate(thread, row_rank, Boolean(True))
            align = const_expr(self.spec.weight_align)
            return copy.load_vectors(
                column_pointer(mW, at, first), self.tiling, thread, align, pred
            )

    @cute.jit
    def _await(self) -> None:
        """Until the oldest of the thread's rows on their way has arrived."""
        if const_expr(self.config.stages > 0):
            cute.arch.cp_async_wait_group(self.config.stages - 1)

    def _first_pass(
        self,
        at,
        rstd: Float32,
        mean: tuple[Float32, Float32],
        held,
        weight,
        sums,
        weight_offset: Float32,
    ):
        """Add a row to dweight and dbias.

        Returns:
            What the second pass needs, and the thread's part of sum(dout * weight * x); of the
            distances from the mean and of dout * weight as well, if the mean is subtracted.
        """
        x, dy = self.centre(self._read(0, *at), mean), self._read(1, *at)
        xdy = x * dy
        if self.spec.dweight:
            sums[0].store(sums[0].load() + xdy * rstd)
        if self.spec.dbias is not None:
            sums[1].store(sums[1].load() + dy)
        dh_out = None if self.spec.dresidual_out is None else self._read(2, *at)
        return (x, dy, dh_out), self.dots(xdy, dy, held, weight_offset)

    def _second_pass(
        self,
        at,
        kept,
        means,
        rstd: Float32,
        mean: tuple[Float32, Float32],
        held,
        weight,
        outputs,
        weight_offset: Float32,
    ) -> None:
        """Write dh of a row."""
        x, dy, dh_out = kept
        _, _, row, rows, head, row_rank, _, tid = at
        dh = self.gradient(x, dy, means, rstd, held, weight_offset)
        if dh_out is not None:
            dh = dh + dh_out
        for output in outputs:
            if output is not None:
                self._put(dh, output, row, rows, head, row_rank, self.thread_in_row(tid))

    def _coordinates(self, mX, row: Int32, head: Int32) -> tuple[Int32, ...]:
        if self.spec.rank == 2:
            return (row,)
        if self.spec.per_head:
            return row, head
        return row // mX.shape[1], row % mX.shape[1]

    @cute.jit
    def _statistics(self, mRstd, row: Int32, rows: Int32, head: Int32):
        """rstd of a row, and its mean in two parts if that is subtracted."""
        rstd, mean, rest = Float32(0.0), Float32(0.0), Float32(0.0)
        if row < rows:
            at = self._coordinates(mRstd, row, head)
            if const_expr(self.spec.centred):
                rstd, mean, rest = mRstd[(*at, 0)], mRstd[(*at, 1)], mRstd[(*at, 2)]
            else:
                rstd = mRstd[at if const_expr(len(at) > 1) else at[0]]
        return rstd, mean, rest

    def _slot(self, tensor: cute.Tensor, ring: cute.Tensor, index: int, stage: Int32, tid: Int32):
        """Where a row of an input lies in shared memory."""
        spec, tiling = self.spec, self.tiling
        names = (spec.x, spec.dout, spec.dresidual_out)
        widths = [dtypes.width(name) for name in names if name]
        sizes = [tiling.cols * tiling.rows_per_cta * width // 8 for width in widths]
        start = sum(sizes[:index]) * self.config.stages
        shape = (tiling.cols, tiling.rows_per_cta, self.config.stages)
        base = cute.recast_ptr(copy.aligned(ring.iterator + start, 128), dtype=tensor.element_type)
        stages = cute.make_tensor(base, cute.make_layout(shape))
        return stages[None, self.row_in_cta(tid), stage].iterator

    @cute.jit
    def _fetch(
        self,
        inputs,
        ring,
        row: Int32,
        rows: Int32,
        head: Int32,
        row_rank: Int32,
        stage: Int32,
        tid: Int32,
    ):
        """Start the copies of a row, if there is one; a group is committed in any case."""
        if const_expr(self.config.stages > 0):
            tiling, thread = const_expr(self.tiling), self.thread_in_row(tid)
            valid = row < rows
            # A predicate, not a branch: DSL 4.8 mixes up variables that are None inside an `if`.
            pred = copy.column_predicate(tiling, thread, row_rank, valid)
            for i in cutlass.range_constexpr(2 if self.spec.dresidual_out is None else 3):
                source = self._pointer(inputs[i], row, valid, head, row_rank)
                target = self._slot(inputs[i], ring, i, stage, tid)
                copy.fetch_vectors(source, target, tiling, thread, self.spec.align, pred)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def _pointer(self, tensor, row: Int32, valid: Boolean, head: Int32, row_rank: Int32):
        """This CTA's slice of a row in global memory."""
        at = self._coordinates(tensor, row if valid else Int32(0), head)
        return slice_pointer(tensor, at, row_rank * self.tiling.cols)

    @cute.jit
    def _read(
        self,
        index: cutlass.Constexpr[int],
        inputs,
        ring,
        row: Int32,
        rows: Int32,
        head: Int32,
        row_rank: Int32,
        stage: Int32,
        tid: Int32,
    ):
        """The thread's vectors of a row of an input in float32; zeros outside."""
        tensor, tiling, thread = inputs[index], const_expr(self.tiling), self.thread_in_row(tid)
        valid = row < rows
        pred = self._predicate(thread, row_rank, valid)
        if const_expr(self.config.stages > 0):
            pointer = self._slot(tensor, ring, index, stage, tid)
            align = const_expr(copy.CHUNK)
        else:
            pointer = self._pointer(tensor, row, valid, head, row_rank)
            align = const_expr(self.spec.align)
        return copy.load_vectors(pointer, tiling, thread, align, pred).load().to(Float32)

    @cute.jit
    def _put(
        self, values, tensor, row: Int32, rows: Int32, head: Int32, row_rank: Int32, thread: Int32
    ):
        """Round the values to the output's dtype and write them to its row."""
        valid = row < rows
        pred = self._predicate(thread, row_rank, valid)
        pointer = self._pointer(tensor, row, valid, head, row_rank)
        store_row(values, pointer, self.tiling, thread, self.spec.align, pred)

    @cute.jit
    def _column_sums(
        self,
        rDw,
        rDb,
        mDw,
        mDb,
        mWork,
        mState,
        ring,
        ticket,
        groups: Int32,
        group: Int32,
        rank: Int32,
        head: Int32,
        tid: Int32,
    ):
        """dweight and dbias: over the CTA, the cluster and the grid."""
        columns, count = const_expr(self.sums.work_columns), const_expr(self.spec.column_sums)
        row_stride = const_expr(count * columns)
        base = mWork.iterator + Int64(head) * groups * row_stride
        mine = base + Int64(group) * row_stride
        shared = cute.make_tensor(
            cute.recast_ptr(ring.iterator, dtype=Float32), cute.make_layout(self.sums.shape)
        )
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        outputs = [output for output in (mDw, mDb) if output is not None]
        registers = [rDb] if mDw is None else [rDw, rDb]
        for i in cutlass.range_constexpr(count):
            self.sums.partial(registers[i], shared, mine + i * columns, rank, tid)
        counters = mState.iterator + head * self.config.cluster
        is_last = self.sums.arrive(counters, groups, ticket, rank, tid)
        for i in cutlass.range_constexpr(count):
            output = self._of_head(outputs[i], head)
            if is_last:
                self.sums.finish(base + i * columns, row_stride, groups, output, rank, tid)

    def _predicate(self, thread: Int32, row_rank: Int32, valid: Boolean) -> cute.Tensor | None:
        """Which vectors of a row of this tile exist; None if all do."""
        if self.tiling.ragged or self.tiling.rows_per_cta > 1:
            return copy.column_predicate(self.tiling, thread, row_rank, valid)
        return None

    def _of_head(self, tensor: cute.Tensor, head: Int32) -> cute.Tensor:
        return tensor[head, None] if self.spec.per_head else tensor


def arguments(spec: RMSNormBwdSpec) -> tuple:
    """Symbolic operands of the launch function."""
    outer = tuple(cute.sym_int() for _ in range(spec.rank - 1))
    rows, weights = (*outer, spec.n), (outer[-1], spec.n) if spec.per_head else (spec.n,)

    def tensor(name: str | None, shape: tuple):
        align = spec.align if shape is rows else spec.weight_align
        return symbolic(name, shape, align=align)

    work = state = None
    if spec.column_sums:
        work = symbolic("float32", (cute.sym_int64(),), align=16, contiguous=True)
        state = symbolic("int32", (cute.sym_int(),), align=4, contiguous=True)
    return (
        tensor(spec.x, rows),
        tensor(spec.weight, weights),
        tensor(spec.dout, rows),
        statistics(outer, spec.centred),
        tensor(spec.dresidual_out, rows),
        tensor(spec.dx, rows),
        tensor(spec.dresidual, rows),
        tensor(spec.weight if spec.dweight else None, weights),
        tensor(spec.dbias, weights),
        work,
        state,
        Float32(0),
        Int32(0),
    )


def build(spec: RMSNormBwdSpec, config: BwdConfig) -> tuple[RMSNormBwd, tuple]:
    """The kernel and its symbolic arguments."""
    return RMSNormBwd(spec, config), arguments(spec)
