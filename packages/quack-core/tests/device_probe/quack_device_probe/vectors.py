"""Copies rows vector by vector: load_vectors, store_vectors, fetch_vectors, column_predicate."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.memory
from cutlass import Boolean, Int32, Int64, const_expr, cute

from quack_core.device import copy
from quack_core.jit.compile import symbolic
from quack_core.jit.dsl import sym_int
from quack_core.reduction.tiling import RowTiling

from .specs import ProbeConfig, VectorSpec


class Vectors:
    """A CTA copies ``rows_per_cta`` rows."""

    def __init__(self, spec: VectorSpec) -> None:
        self.spec = spec
        self.tiling = RowTiling(spec.n, spec.vec, spec.threads_per_row, spec.rows_per_cta)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        rows = x.shape[0]
        self.kernel(x, y, rows).launch(
            grid=[cute.ceil_div(rows, self.tiling.rows_per_cta), 1, 1],
            block=[self.tiling.num_threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor, rows: Int32):
        tiling, align = const_expr(self.tiling), const_expr(self.spec.align)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        thread, line = tid % tiling.threads_per_row, tid // tiling.threads_per_row
        row = block * tiling.rows_per_cta + line
        valid = row < rows
        at = Int64(row if valid else Int32(0))
        pred = None
        if const_expr(tiling.ragged or tiling.rows_per_cta > 1):
            pred = copy.column_predicate(tiling, thread, Int32(0), Boolean(valid))
        source, target = mX[at, None].iterator, mY[at, None].iterator
        if const_expr(self.spec.path == "registers"):
            values = copy.load_vectors(source, tiling, thread, align, pred)
        else:
            smem = cutlass.memory.SmemAllocator()
            layout = cute.make_layout((tiling.cols, tiling.rows_per_cta))
            shared = smem.allocate_tensor(mX.element_type, layout, byte_alignment=128)
            mine = shared[None, line].iterator
            copy.fetch_vectors(source, mine, tiling, thread, align, pred)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            values = copy.load_vectors(mine, tiling, thread, copy.CHUNK, pred)
        copy.store_vectors(values, target, tiling, thread, align, pred)


def build(spec: VectorSpec, config: ProbeConfig) -> tuple[Vectors, tuple[Any, ...]]:
    """The kernel and its symbolic arguments."""
    rows = sym_int()
    x, y = (symbolic(spec.dtype, (rows, spec.n), align=spec.align) for _ in range(2))
    return Vectors(spec), (x, y)
