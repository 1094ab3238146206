"""Rows that begin anywhere: pieces of memory, and vectors that are shifted to and from them."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.memory
from cutlass import Int32, Int64, const_expr, cute

from quack_core.device import copy
from quack_core.jit.compile import symbolic, to_cute
from quack_core.jit.dsl import sym_int
from quack_core.reduction.tiling import WARP

from .specs import ProbeConfig, UnalignedSpec


class Unaligned:
    """A CTA copies a row of x to a row of y that has another alignment.

    * ``piece``: x begins anywhere. What the threads hold, with zeros outside of the row, goes to
      z as well: (rows, columns of the tiling).
    * ``shift``: x begins at a multiple of 16 bytes, y anywhere and gets 16-byte stores.
    * ``vectors``: x begins anywhere and goes through shared memory with what lies around it; y, at
      another offset, gets 16-byte stores. Threads hold the vectors of the row itself.
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
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        pX, pY = (t[Int64(row), None].iterator for t in (mX, mY))
        if const_expr(self.spec.path == "vectors"):
            self._vectors(pX, pY, thread)
        else:
            self._pieces(pX, pY, mZ, row, thread)

    @cute.jit
    def _pieces(self, pX: cute.Pointer, pY: cute.Pointer, mZ, row: Int32, thread: Int32):
        tiling, n = const_expr(self.tiling), const_expr(self.spec.n)
        vec, count = const_expr(tiling.vec), Int32(n)
        piece = const_expr(self.spec.path == "piece")
        offset = copy.vector_offset(pX if piece else pY, vec)
        for p in cutlass.range_constexpr(tiling.passes):
            place = tiling.start(thread) + p * tiling.step
            index = place - offset
            if const_expr(piece):
                values = copy.load_piece(pX, index, count, vec, copy.CHUNK)
                copy.clear_outside(values, index, count)
                pZ = mZ[Int64(row), None].iterator
                copy.store_piece(values, pZ, place, Int32(tiling.cols), copy.CHUNK)
                copy.store_piece(values, pY, index, count, const_expr(pX.dtype.width // 8))
            else:
                values = copy.load_shifted(pX, index, count, vec)
                copy.store_piece(values, pY, index, count, copy.CHUNK)

    @cute.jit
    def _vectors(self, pX: cute.Pointer, pY: cute.Pointer, thread: Int32):
        tiling, vec, n = const_expr(self.tiling), const_expr(self.tiling.vec), Int32(self.spec.n)
        chunk = const_expr(copy.CHUNK * 8 // pX.dtype.width)
        smem = cutlass.memory.SmemAllocator()
        layout = cute.make_layout(tiling.cols + chunk)
        shared = smem.allocate_tensor(pX.dtype, layout, byte_alignment=16).iterator
        before = copy.vector_offset(pX, chunk)
        for at in cutlass.range(thread * chunk, n + before, tiling.num_threads * chunk, unroll=1):
            around = copy.load_piece(pX, at - before, n, chunk, copy.CHUNK)
            copy.store_piece(around, shared, at, Int32(tiling.cols + chunk), copy.CHUNK)
        cute.arch.sync_threads()
        start, num_bytes = shared + tiling.start(thread), before * (pX.dtype.width // 8)
        registers = copy.read_shifted(start, num_bytes, vec, tiling.passes, tiling.step)
        copy.store_shifted(registers, pY, tiling.start(thread // WARP * WARP), n)


def build(spec: UnalignedSpec, config: ProbeConfig) -> tuple[Unaligned, tuple[Any, ...]]:
    """The kernel and its symbolic arguments."""
    rows, element = sym_int(), to_cute(spec.dtype).width // 8
    piece = spec.path == "piece"
    x = symbolic(spec.dtype, (rows, spec.n), align=copy.CHUNK if spec.path == "shift" else element)
    y = symbolic(spec.dtype, (rows, spec.n), align=element)
    z = symbolic(spec.dtype if piece else None, (rows, spec.tiling.cols), align=copy.CHUNK)
    return Unaligned(spec), (x, y, z)
