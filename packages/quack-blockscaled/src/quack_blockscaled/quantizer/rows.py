"""Quantise blocks of one row along contiguous memory."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from . import convert
from .spec import VECTOR, QuantizeConfig, QuantizeSpec


class QuantizeRows:
    """Elements and scales of blocks that lie one behind the other.

    Threads: each has vectors of 8 elements; neighbouring lanes share a block, and find its largest
    magnitude by shuffles.
    Traffic: x, elements and scales, once each.
    """

    def __init__(self, spec: QuantizeSpec, config: QuantizeConfig):
        self.spec, self.config = spec, config
        self.lanes = spec.format.cols // VECTOR

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (elements,)
        values: cute.Tensor,  # uint8 (elements,)
        scales: cute.Tensor,  # uint8 or float32 (blocks,)
        n: Int32,  # columns, which do not matter here
        stream: cuda.CUstream,
    ):
        # From the blocks: a size has 32 bits here, which elements may exceed.
        tile = self.config.threads * self.config.unroll
        ctas = Int32((Int64(scales.shape[0]) * self.lanes + (tile - 1)) // tile)
        self.kernel(x, values, scales).launch(
            grid=[ctas, 1, 1], block=[self.config.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, values: cute.Tensor, scales: cute.Tensor):
        # --- coordinates
        unroll, threads = self.config.unroll, self.config.threads
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        first = Int64(block) * (threads * unroll) + tid  # vectors
        count = Int64(scales.shape[0]) * self.lanes

        # --- load
        held = cute.make_rmem_tensor(cute.make_layout((VECTOR, unroll)), x.element_type)
        held.fill(x.element_type(0.0))
        for i in cutlass.range_constexpr(unroll):
            at = first + i * threads
            if at < count:
                cute.autovec_copy(convert.vector(x, at), held[None, i])

        # --- quantise, store; lanes that share a block are inside or outside together
        for i in cutlass.range_constexpr(unroll):
            at = first + i * threads
            numbers = convert.widened(held[None, i])
            amax = convert.over_lanes(convert.largest(numbers), self.lanes)
            scale, inverse = convert.scale(self.spec, amax)
            codes = convert.codes(self.spec, numbers, inverse)
            if at < count:
                cute.autovec_copy(codes, convert.words(values, at))
                if at % self.lanes == 0:
                    scales[at // self.lanes] = scale


def build(spec: QuantizeSpec, config: QuantizeConfig) -> tuple[QuantizeRows, tuple]:
    """The kernel and its symbolic arguments."""
    return QuantizeRows(spec, config), (*convert.arguments(spec), Int32(0))
