"""Rows are reduced over threads, warps, the CTA and a cluster; every thread writes the result."""

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.memory
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute

from quack_core.device import copy, fast_math, reduce
from quack_core.jit.compile import symbolic
from quack_core.jit.dsl import sym_int
from quack_core.reduction.base import ReductionBase
from quack_core.reduction.tiling import RowTiling

from .specs import ProbeConfig, ReduceSpec

REDUCTIONS = {
    "sum": reduce.SUM,
    "sum2": reduce.SUM2,
    "max": reduce.MAX,
    "online": reduce.ONLINE_MAX_SUM,
    "softmax": reduce.ONLINE_SOFTMAX,
    "compensated": reduce.ONLINE_SOFTMAX_COMPENSATED,
}


class Reduce(ReductionBase):
    """Row ``i`` of x, times 1, 2, ... ``rounds``, to y: (rows, rounds, width, threads of a row).

    ``sum2`` reduces (x, x * x).
    """

    def __init__(self, spec: ReduceSpec) -> None:
        tiling = RowTiling(spec.n, spec.vec, spec.threads_per_row, spec.rows_per_cta, spec.cluster)
        super().__init__(tiling, REDUCTIONS[spec.reduction], buffers=min(2, spec.rounds))
        self.spec = spec

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        tiling, rows = const_expr(self.tiling), x.shape[0]
        self.kernel(x, y, rows).launch(
            grid=[tiling.cluster * cute.ceil_div(rows, tiling.rows_per_cta), 1, 1],
            block=[tiling.num_threads, 1, 1],
            cluster=[tiling.cluster, 1, 1] if const_expr(tiling.cluster > 1) else None,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor, rows: Int32):
        tiling = const_expr(self.tiling)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        thread, rank = self.thread_in_row(tid), block % tiling.cluster
        row = block // tiling.cluster * tiling.rows_per_cta + self.row_in_cta(tid)
        valid = Boolean(row < rows)
        smem = cutlass.memory.SmemAllocator()
        exchange = self.allocate(smem)
        self.start_cluster(exchange, tid)
        pred = copy.column_predicate(tiling, thread, rank, valid)
        source = mX[Int64(row if valid else Int32(0)), None].iterator + rank * tiling.cols
        values = copy.load_vectors(source, tiling, thread, copy.CHUNK, pred)
        self.join_cluster()
        for turn in cutlass.range_constexpr(self.spec.rounds):
            partial = self._thread(self._masked(values, pred) * (turn + 1.0))
            total = self.reduce(partial, exchange, tid, Int32(turn))
            if valid:
                for w in cutlass.range_constexpr(self.reduction.width):
                    mY[row, turn, w, rank * tiling.threads_per_row + thread] = total[w]

    @cute.jit
    def _masked(self, values: cute.Tensor, pred: cute.Tensor):
        """The values of a thread; the reduction's neutral element where there are none."""
        largest = const_expr(self.spec.reduction in ("max", "online", "softmax", "compensated"))
        outside = const_expr(-math.inf if largest else 0.0)
        for p in cutlass.range_constexpr(self.tiling.passes):
            for v in cutlass.range_constexpr(self.tiling.vec):
                values[v, p] = values[v, p] if pred[0, 0, p] else Float32(outside)
        return values.load()

    @cute.jit
    def _compensated(self, values: cute.TensorSSA):
        """The maximum and the sum of exponentials below it."""
        largest = reduce.thread_max(values)
        shift = Float32(0.0) if largest == Float32(-math.inf) else largest
        powers = fast_math.exp_rounded(values - shift)
        listed = [powers[i] for i in range(cute.size(powers.shape))]
        return largest, *reduce.thread_compensated_sum(listed)

    def _thread(self, values: cute.TensorSSA):
        kind = self.spec.reduction
        if kind == "max":
            return (reduce.thread_max(values),)
        if kind == "online":
            return reduce.thread_online(values)
        if kind == "softmax":
            return reduce.thread_online(values, fast_math.LOG2_E)
        if kind == "compensated":
            return self._compensated(values)
        squares = (reduce.thread_sum(values * values),) if kind == "sum2" else ()
        return (reduce.thread_sum(values), *squares)


def build(spec: ReduceSpec, config: ProbeConfig) -> tuple[Reduce, tuple[Any, ...]]:
    """The kernel and its symbolic arguments."""
    rows, kernel = sym_int(), Reduce(spec)
    threads = spec.threads_per_row * spec.cluster
    x = symbolic("float32", (rows, spec.n), align=16)
    out = (rows, spec.rounds, kernel.reduction.width, threads)
    return kernel, (x, symbolic("float32", out, align=4, contiguous=True))
