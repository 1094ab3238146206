"""Quantise blocks of one row along contiguous memory."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32, Int64, const_expr

from . import convert, noise
from .spec import VECTOR, WARP, QuantizeConfig, QuantizeSpec


class QuantizeRows:
    """Elements and scales of blocks that lie one behind the other.

    Threads: each has vectors of 16 elements; neighbouring lanes share a block, and find its largest
    magnitude by shuffles.
    Shared memory: where the codes of a vector are no power of two, each warp puts its own in order.
    Traffic: x, elements and scales, once each.
    """

    def __init__(self, spec: QuantizeSpec, config: QuantizeConfig):
        self.spec, self.config = spec, config
        self.lanes = spec.format.cols // spec.vector
        self.bytes = spec.format.packed(spec.vector)  # codes of a vector
        self.staged = self.bytes & (self.bytes - 1) != 0

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (elements,)
        values: cute.Tensor,  # uint8 (bytes,)
        scales: cute.Tensor,  # uint8 or float32 (blocks,), or float32 (blocks of a row, rows)
        tensor_scale: cute.Tensor | None,  # float32 (1,)
        n: Int32,  # columns, which do not matter here
        seed: Int64,
        stream: cuda.CUstream,
    ):
        # From the blocks: a size has 32 bits here, which elements may exceed.
        tile = self.config.threads * self.config.unroll
        ctas = Int32((Int64(cute.size(scales)) * self.lanes + (tile - 1)) // tile)
        self.kernel(x, values, scales, tensor_scale, seed).launch(
            grid=[ctas, 1, 1], block=[self.config.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        values: cute.Tensor,
        scales: cute.Tensor,
        tensor_scale: cute.Tensor | None,
        seed: Int64,
    ):
        # --- coordinates
        unroll, threads, size = self.config.unroll, self.config.threads, self.spec.vector
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        first = Int64(block) * (threads * unroll) + tid  # vectors
        count = Int64(cute.size(scales)) * self.lanes
        shared = self._allocate()

        # --- load
        held = cute.make_rmem_tensor(cute.make_layout((size, unroll)), x.element_type)
        held.fill(x.element_type(0.0))
        for i in cutlass.range_constexpr(unroll):
            at = first + i * threads
            if at < count:
                cute.autovec_copy(convert.vector(x, at, size), held[None, i])

        # --- quantise, store; lanes that share a block are inside or outside together
        for i in cutlass.range_constexpr(unroll):
            at = first + i * threads
            amax = convert.over_lanes(convert.largest(held[None, i]), self.lanes)
            scale, inverse = convert.scale(self.spec, amax, tensor_scale)
            bits = self._noise(at, seed, amax)
            numbers = convert.widened(held[None, i])
            codes = convert.codes(self.spec, self.config.native, numbers, inverse, bits)
            self._store(convert.registers(codes), values, at, count, shared, tid)
            if (at < count) & (at % self.lanes == 0):
                convert.store_scale(scales, at // self.lanes, scale)

    def _noise(self, at: Int64, seed: Int64, amax: Int32) -> list[Int32] | None:
        """Of a vector, if elements are rounded stochastically."""
        if not self.spec.stochastic:
            return None
        first = at * (self.spec.vector // VECTOR)
        return noise.of_vectors(first, self.spec.vector, seed, convert.lost(amax))

    def _allocate(self) -> cute.Tensor | None:
        """Words of the codes of each warp: (words, warps)."""
        if not self.staged:
            return None
        words = self.bytes // 4 * WARP
        layout = cute.make_layout((words, self.config.threads // WARP))
        return cutlass.memory.SmemAllocator().allocate_tensor(Int32, layout, byte_alignment=16)

    @cute.jit
    def _store(
        self,
        codes: cute.Tensor,
        values: cute.Tensor,
        at: Int64,
        count: Int64,
        shared: cute.Tensor | None,
        tid: Int32,
    ):
        """Codes of a vector; neighbouring lanes write neighbouring words."""
        if const_expr(not self.staged):
            if at < count:
                cute.autovec_copy(codes, convert.words(values, at, self.bytes))
        else:
            words = const_expr(self.bytes // 4)
            lane = tid % WARP
            mine = shared[None, tid // WARP]
            for i in cutlass.range_constexpr(words):
                mine[lane * words + i] = codes[i]
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(words):
                word = lane + i * WARP
                if at - lane + word // words < count:
                    there = convert.words(values, (at - lane) * words + word, 4)
                    there[0] = mine[word]
            cute.arch.sync_warp()


def build(spec: QuantizeSpec, config: QuantizeConfig) -> tuple[QuantizeRows, tuple]:
    """The kernel and its symbolic arguments."""
    return QuantizeRows(spec, config), convert.arguments(spec.x, spec.format)
