"""RMSNorm forward, one tile per CTA: rows come straight into registers."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64, const_expr

from quack_core.device import copy, fast_math
from quack_core.device.reduce import thread_sum
from quack_core.jit.compile import symbolic
from quack_core.reduction.base import ReductionBase

from .config import HELD_VALUES, FwdConfig
from .spec import RMSNormFwdSpec


class RMSNormFwd(ReductionBase):
    """A CTA, or a cluster of CTAs that share the columns, normalises ``rows_per_cta`` rows.

    Threads: ``threads_per_row`` per row and CTA, each holding its part of the row in registers.
    Shared memory: partial sums.
    Synchronises: nothing if a row fits a warp, else one barrier or one phase of an mbarrier.
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
        if const_expr(tiling.values <= HELD_VALUES):
            late = const_expr(mR is not None)  # fewer registers: more CTAs on an SM
            rows = self._load((mX, mR), slice_pointer, align, place)
            if const_expr(not late):
                weights = self._load((mW, mB), weight_pointer, weight_align, place)
            h = total(*rows)
            if const_expr(mH is not None):  # writes while other rows are read
                store_row(h, slice_pointer(mH, at, first), tiling, thread, align, pred)
        else:
            rH = self._add(mX, mR, mH, place)
            h = rH.load()

        self.join_cluster()
        (square_sum,) = self.reduce((thread_sum(h * h),), exchange, tid, Int32(0))
        rstd = fast_math.rsqrt(square_sum * (1 / tiling.n) + eps)
        if const_expr(mRstd is not None):
            if valid and thread == 0 and rank == 0:
                store_rstd(mRstd, at, rstd)
        if const_expr(tiling.values <= HELD_VALUES):
            if const_expr(late):
                weights = self._load((mW, mB), weight_pointer, weight_align, place)
            y = scale(h, rstd, *weights, weight_offset, self.spec)
            store_row(y, slice_pointer(mY, at, first), tiling, thread, align, pred)
        else:
            self._scale(rH, mW, mB, mY, place, rstd, weight_offset)

    def _load(self, tensors, pointer, align: int, place) -> list:
        """Vectors of a row of each operand in registers (vec, passes); None for an absent one."""
        at, first, thread, pred, _ = place
        return [
            None
            if tensor is None
            else copy.load_vectors(pointer(tensor, at, first), self.tiling, thread, align, pred)
            for tensor in tensors
        ]

    def _add(self, mX, mR, mH, place) -> cute.Tensor:
        """h in float32 registers (vec, passes), piece by piece; also written to residual_out."""
        at, first, thread, _, count = place
        vec, align, skip = self.tiling.vec, self.spec.align, self.tiling.start(thread)
        rH = copy.make_registers(self.tiling, Float32)
        starts = [slice_pointer(t, at, first) + skip for t in (mX, mR) if t is not None]
        for p in range(self.tiling.passes):
            cute.arch.sync_warp()  # or else all loads come first, and spill
            index, end = Int32(p * self.tiling.step), count - skip
            h = [copy.load_piece(q, index, end, vec, align).load().to(Float32) for q in starts]
            h = h[0] if len(h) == 1 else h[0] + h[1]
            rH[None, p].store(h)
            if mH is not None:
                store_piece(h, slice_pointer(mH, at, first) + skip, index, end, align, True)
        return rH

    def _scale(self, rH, mW, mB, mY, place, rstd: Float32, weight_offset: Float32) -> None:
        """Write h * rstd * weight + bias, piece by piece."""
        at, first, thread, _, count = place
        vec, align, skip = self.tiling.vec, self.spec.weight_align, self.tiling.start(thread)
        start = slice_pointer(mY, at, first) + skip
        for p in range(self.tiling.passes):
            cute.arch.sync_warp()  # or else all loads come first, and spill
            index, end = Int32(p * self.tiling.step), count - skip
            rW, rB = (
                None
                if tensor is None
                else copy.load_piece(
                    weight_pointer(tensor, at, first) + skip, index, end, vec, align
                )
                for tensor in (mW, mB)
            )
            y = scale(rH[None, p].load(), rstd, rW, rB, weight_offset, self.spec)
            store_piece(y, start, index, end, self.spec.align, True)


def num_rows(tensor: cute.Tensor) -> Int32:
    """Rows of (M, N) or (M1, M0, N)."""
    if cute.rank(tensor) == 2:
        return tensor.shape[0]
    return tensor.shape[0] * tensor.shape[1]


def coordinates(tensor: cute.Tensor, row: Int32) -> tuple[Int32, ...]:
    """A row index as coordinates of (M, N) or (M1, M0, N)."""
    if cute.rank(tensor) == 2:
        return (row,)
    inner = tensor.shape[1]
    return row // inner, row % inner


def slice_pointer(tensor: cute.Tensor, at: tuple[Int32, ...], first: Int32) -> cute.Pointer:
    """Element ``first`` of a row. 64-bit: a 32-bit offset would wrap at 2**32 elements."""
    return tensor[(*(Int64(i) for i in at), None)].iterator + first


def weight_pointer(tensor: cute.Tensor, at: tuple[Int32, ...], first: Int32) -> cute.Pointer:
    """Element ``first`` of the weight, or of the weight of the row's head."""
    if cute.rank(tensor) == 1:
        return tensor.iterator + first
    return tensor[Int64(at[-1]), None].iterator + first


def store_rstd(tensor: cute.Tensor, at: tuple[Int32, ...], value: Float32) -> None:
    tensor[at if len(at) > 1 else at[0]] = value


def total(rX: cute.Tensor, rR: cute.Tensor | None) -> cute.TensorSSA:
    """x, or x + residual, in float32."""
    x = rX.load().to(Float32)
    return x if rR is None else x + rR.load().to(Float32)


def scale(h, rstd: Float32, rW, rB, weight_offset: Float32, spec: RMSNormFwdSpec):
    """h * rstd * (weight + offset) + bias, in float32; absent operands are None."""
    values = h * rstd
    if rW is not None:
        weight = rW.load().to(Float32)
        weight = weight + weight_offset if spec.offset else weight
        if spec.out == "float32":  # one rounding for both products
            factor = cute.full_like(values, 1.0) * rstd
            lost = cute.math.fma(h, factor, -values)
            values = cute.math.fma(values, weight, lost * weight)
        else:
            values = values * weight
    if rB is not None:
        values = values + rB.load().to(Float32)
    return values


def store_row(values, pointer: cute.Pointer, tiling, thread: Int32, align: int, pred) -> None:
    """Round a thread's values to the output's dtype and write them to its vectors."""
    registers = copy.make_registers(tiling, pointer.dtype)
    registers.store(values.to(pointer.dtype))
    copy.store_vectors(registers, pointer, tiling, thread, align, pred)


def store_piece(
    values, start: cute.Pointer, index: Int32, count: Int32, align: int, whole: bool = False
) -> None:
    """Round one vector to the output's dtype and write it: ``copy.store_piece``."""
    registers = cute.make_rmem_tensor(cute.size(values.shape), start.dtype)
    registers.store(values.to(start.dtype))
    copy.store_piece(registers, start, index, count, align, whole)


def arguments(spec: RMSNormFwdSpec, config: FwdConfig) -> tuple:
    """Symbolic operands of the launch function."""
    outer = tuple(cute.sym_int() for _ in range(spec.rank - 1))
    rows, weights = (*outer, spec.n), (outer[-1], spec.n) if spec.per_head else (spec.n,)

    def tensor(name: str | None, shape: tuple):
        align = spec.align if shape is rows else spec.weight_align
        return symbolic(name, shape, align=align)

    rstd = symbolic("float32", outer, align=4, contiguous=True) if spec.rstd else None
    state = None
    if config.state_ints:
        state = symbolic("int32", (config.state_ints,), align=4, contiguous=True)
    return (
        tensor(spec.x, rows),
        tensor(spec.weight, weights),
        tensor(spec.bias, weights),
        tensor(spec.residual, rows),
        tensor(spec.out, rows),
        tensor(spec.residual_out, rows),
        rstd,
        state,
        Float32(0),
        Float32(0),
        Int32(0),
    )


def build(spec: RMSNormFwdSpec, config: FwdConfig) -> tuple[RMSNormFwd, tuple]:
    """The kernel and its symbolic arguments."""
    return RMSNormFwd(spec, config), arguments(spec, config)
