"""Values and scales as numbers."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from . import convert, decode
from .spec import DequantizeConfig, DequantizeSpec


class Dequantize:
    """Elements times the step of their block: the scale, times that of the tensor if there is one.

    Threads: each has vectors whose numbers are 16 bytes; those of neighbouring lanes lie beside
    each other. Blocks of several rows have CTAs of their own.
    Traffic: elements, scales and numbers, once each.
    """

    def __init__(self, spec: DequantizeSpec, config: DequantizeConfig):
        self.spec, self.threads, self.unroll = spec, config.threads, config.unroll
        rows, cols = spec.format.block
        self.across = cols // spec.vector  # vectors of a row of a block
        self.in_block = rows * self.across
        self.square = rows > 1
        self.tile = self.threads * self.unroll  # vectors of a CTA
        self.bytes = spec.format.packed(spec.vector)  # codes of a vector

    @cute.jit
    def __call__(
        self,
        values: cute.Tensor,  # uint8 (bytes,)
        scales: cute.Tensor,  # uint8 or float32 (blocks,), or float32 (blocks of a row, rows)
        tensor_scale: cute.Tensor | None,  # float32 (1,)
        out: cute.Tensor,  # (elements,)
        n: Int32,  # columns, of blocks of several rows
        stream: cuda.CUstream,
    ):
        # From the blocks: a size has 32 bits here, which elements may exceed.
        vectors = Int64(cute.size(scales)) * self.in_block
        ctas = Int32((vectors + (self.tile - 1)) // self.tile)
        self.kernel(values, scales, tensor_scale, out, n).launch(
            grid=[ctas, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        values: cute.Tensor,
        scales: cute.Tensor,
        tensor_scale: cute.Tensor | None,
        out: cute.Tensor,
        n: Int32,
    ):
        # --- coordinates, and the scale of the tensor
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        count = Int64(cute.size(scales)) * self.in_block  # vectors
        whole = None if const_expr(tensor_scale is None) else tensor_scale[0]

        # --- load: all of it before anything is waited for
        layout = cute.make_layout((decode.num_words(self.bytes), self.unroll))
        codes = cute.make_rmem_tensor(layout, Int32)
        stored = cute.make_rmem_tensor(self.unroll, scales.element_type)
        for i in cutlass.range_constexpr(self.unroll):
            at = self._vector(i, tid, cta, n)
            if at < count:
                decode.load(values, at, codes[None, i], self.bytes)
                stored[i] = decode.scale(scales, self._block(at, cta))

        # --- multiply, store
        for i in cutlass.range_constexpr(self.unroll):
            at = self._vector(i, tid, cta, n)
            if at < count:
                step = decode.step(self.spec.format, stored[i], whole)
                element, size = self.spec.format.element, self.spec.vector
                numbers = decode.elements(element, codes[None, i], at, size)
                words = decode.rounded([number * step for number in numbers], out.element_type)
                cute.autovec_copy(words, cute.recast_tensor(convert.vector(out, at, size), Int32))

    def _vector(self, i: int, tid: Int32, cta: Int32, n: Int32) -> Int64:
        """Number of a thread's vector, of all."""
        inside = tid + i * self.threads
        if not self.square:
            return Int64(cta) * self.tile + inside
        rows, cols = self.spec.format.block
        parts, blocks = self.in_block // self.tile, n // cols  # of a block, of a row
        block, row = cta // parts, (cta % parts * self.tile + inside) // self.across
        below = Int64(block // blocks * rows + row)
        return (below * blocks + block % blocks) * self.across + inside % self.across

    def _block(self, at: Int64, cta: Int32) -> Int64:
        """Number of the block of vector number ``at``, which is one of the CTA's."""
        return Int64(cta // (self.in_block // self.tile)) if self.square else at // self.in_block


def build(spec: DequantizeSpec, config: DequantizeConfig) -> tuple[Dequantize, tuple[Any, ...]]:
    """The kernel and its symbolic arguments."""
    out, values, scales, tensor_scale, n, _ = convert.arguments(spec.out, spec.format)
    return Dequantize(spec, config), (values, scales, tensor_scale, out, n)
