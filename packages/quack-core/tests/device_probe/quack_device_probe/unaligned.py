"""Rows that begin anywhere: load_covering, clear_outside, align_vectors, store_vector."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, const_expr, cute

from quack_core.device import copy
from quack_core.jit.compile import symbolic, to_cute
from quack_core.jit.dsl import sym_int

from .specs import ProbeConfig, UnalignedSpec


class Unaligned:
    """A CTA copies a row of x to a row of y that has another alignment.

    * ``covering``: x begins anywhere. What the threads hold, with zeros outside of the row, goes to
      z as well: (rows, columns of the tiling).
    * ``align``: x begins at a multiple of 16 bytes, y anywhere and gets 16-byte stores.
    """

    def __init__(self, spec: UnalignedSpec) -> None:
        self.spec, self.tiling = spec, spec.tiling

    @cute.jit
    def __call__(
        self, x: cute.Tensor, y: cute.Tensor, z: cute.Tensor | None, stream: cuda.CUstream
    ):
        self.kernel(x, y, z).launch(
            grid=[x.shape[0], 1, 1], block=[self.tiling.num_threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor, mZ: cute.Tensor | None):
        tiling, n = const_expr(self.tiling), const_expr(self.spec.n)
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        pX, pY = (t[Int64(row), None].iterator for t in (mX, mY))
        if const_expr(self.spec.path == "covering"):
            offset = copy.vector_offset(pX, tiling.vec)
            values = copy.load_covering(pX, -offset, Int32(n), tiling, thread, copy.CHUNK)
            copy.clear_outside(values, -offset, Int32(n), tiling, thread)
            pZ = mZ[Int64(row), None].iterator
            copy.store_vectors(values, pZ, tiling, thread, copy.CHUNK)
            align = const_expr(mX.element_type.width // 8)
        else:
            offset = copy.vector_offset(pY, tiling.vec)
            values = copy.align_vectors(pX, offset, Int32(n), tiling, thread)
            align = const_expr(copy.CHUNK)
        for p in cutlass.range_constexpr(tiling.passes):
            index = thread * tiling.vec + p * tiling.step - offset
            copy.store_vector(values[None, p], pY, index, Int32(n), align)


def build(spec: UnalignedSpec, config: ProbeConfig) -> tuple[Unaligned, tuple[Any, ...]]:
    """The kernel and its symbolic arguments."""
    rows, element = sym_int(), to_cute(spec.dtype).width // 8
    covering = spec.path == "covering"
    x = symbolic(spec.dtype, (rows, spec.n), align=element if covering else copy.CHUNK)
    y = symbolic(spec.dtype, (rows, spec.n), align=element)
    z = symbolic(spec.dtype if covering else None, (rows, spec.tiling.cols), align=copy.CHUNK)
    return Unaligned(spec), (x, y, z)


