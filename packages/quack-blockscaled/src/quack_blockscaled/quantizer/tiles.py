"""Quantise blocks of several rows and columns: a CTA each."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32, Int64, const_expr

from . import convert, noise
from .spec import VECTOR, WARP, QuantizeConfig, QuantizeSpec


class QuantizeTiles:
    """Elements and scales of blocks, those of one matrix below those of the other.

    Threads: each has vectors of 8 elements of the CTA's block; its largest magnitude is found by
    shuffles, and over the warps through shared memory.
    Synchronises: one CTA barrier.
    Traffic: x, elements and scales, once each.
    """

    def __init__(self, spec: QuantizeSpec, config: QuantizeConfig):
        self.spec, self.threads, self.native = spec, config.threads, config.native
        self.across = spec.format.cols // VECTOR  # vectors side by side
        self.vectors = spec.format.rows * self.across // self.threads

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (elements,)
        values: cute.Tensor,  # uint8 (elements,)
        scales: cute.Tensor,  # uint8 or float32 (blocks,)
        tensor_scale: None,
        n: Int32,  # columns
        seed: Int64,
        stream: cuda.CUstream,
    ):
        ctas = Int32(scales.shape[0])
        self.kernel(x, values, scales, n // self.spec.format.cols, seed).launch(
            grid=[ctas, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        values: cute.Tensor,
        scales: cute.Tensor,
        blocks: Int32,
        seed: Int64,
    ):
        # --- coordinates
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row, col = block // blocks * self.spec.format.rows, block % blocks * self.across
        stride = Int64(blocks) * self.across  # vectors from one row to the next
        shared = cutlass.memory.SmemAllocator().allocate_tensor(
            Int32, cute.make_layout(self.threads // WARP), byte_alignment=16
        )

        # --- load, and the largest magnitude
        held = cute.make_rmem_tensor(cute.make_layout((VECTOR, self.vectors)), x.element_type)
        for i in cutlass.range_constexpr(self.vectors):
            at = self._at(i, tid, row, col, stride)
            cute.autovec_copy(convert.vector(x, at, VECTOR), held[None, i])
        each = [convert.largest(held[None, i]) for i in range(self.vectors)]
        amax = convert.over_lanes(convert.largest_of(each), WARP)
        if tid % WARP == 0:
            shared[tid // WARP] = amax
        cute.arch.sync_threads()
        amax = convert.largest_of([shared[warp] for warp in range(self.threads // WARP)])

        # --- quantise, store
        scale, inverse = convert.scale(self.spec, amax)
        for i in cutlass.range_constexpr(self.vectors):
            at = self._at(i, tid, row, col, stride)
            bits = None
            if const_expr(self.spec.stochastic):
                bits = noise.of_vectors(at, VECTOR, seed, convert.lost(amax))
            numbers = convert.widened(held[None, i])
            codes = convert.codes(self.spec, self.native, numbers, inverse, bits)
            cute.autovec_copy(convert.registers(codes), convert.words(values, at, VECTOR))
        if tid == 0:
            scales[block] = scale

    def _at(self, i: int, tid: Int32, row: Int32, col: Int32, stride: Int64) -> Int64:
        """Number of a thread's vector, of all."""
        inside = tid + i * self.threads
        return (row + inside // self.across) * stride + col + inside % self.across


def build(spec: QuantizeSpec, config: QuantizeConfig) -> tuple[QuantizeTiles, tuple]:
    """The kernel and its symbolic arguments."""
    return QuantizeTiles(spec, config), convert.arguments(spec.x, spec.format)
