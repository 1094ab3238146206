"""Quantise blocks of one row along contiguous memory."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32, Int64, Uint8, const_expr

from quack_core.device import copy
from quack_core.jit.compile import symbolic
from quack_core.jit.dsl import make_fake_compact_tensor, sym_int

from ..formats import E4M3, E8M0, SMALLEST_FLOAT32
from . import bits
from .spec import VECTOR, QuantizeConfig, QuantizeSpec

ALIGN = 16
MAGNITUDE = 0x7FFFFFFF


class Quantize:
    """Elements and scales of blocks that lie one behind the other.

    Threads: each has vectors of 8 elements; neighbouring lanes share a block, and find its largest
    magnitude by shuffles.
    Traffic: x, elements and scales, once each.
    """

    def __init__(self, spec: QuantizeSpec, config: QuantizeConfig):
        self.spec, self.config = spec, config
        self.lanes = spec.threads_per_block
        self.power_of_two = spec.format.scale == E8M0

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (elements,)
        values: cute.Tensor,  # uint8 (elements,)
        scales: cute.Tensor,  # uint8 or float32 (blocks,)
        stream: cuda.CUstream,
    ):
        tile = self.config.threads * self.config.unroll * VECTOR
        ctas = Int32((Int64(x.shape[0]) + (tile - 1)) // tile)
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
        count = Int64(x.shape[0]) // VECTOR

        # --- load
        held = cute.make_rmem_tensor(cute.make_layout((VECTOR, unroll)), x.element_type)
        held.fill(x.element_type(0.0))
        for i in cutlass.range_constexpr(unroll):
            at = first + i * threads
            if at < count:
                cute.autovec_copy(_vector(x, at), held[None, i])

        # --- quantise, store; lanes that share a block are inside or outside together
        for i in cutlass.range_constexpr(unroll):
            at = first + i * threads
            numbers = cute.make_rmem_tensor(VECTOR, Float32)
            numbers.store(copy.widen(held[None, i]))
            amax = self._largest(numbers)
            scale, inverse = self._scale(amax)
            words = self._elements(numbers, inverse)
            if at < count:
                cute.autovec_copy(words, _words(values, at))
                if at % self.lanes == 0:
                    scales[at // self.lanes] = scale

    @cute.jit
    def _largest(self, numbers: cute.Tensor) -> Int32:
        """Of a block, the largest magnitude: its bits, which have the order of the numbers."""
        words = cute.recast_tensor(numbers, Int32)
        found = Int32(0)
        for i in cutlass.range_constexpr(VECTOR):
            found = cutlass.max(found, words[i] & MAGNITUDE)
        lanes = self.lanes
        while const_expr(lanes > 1):
            lanes //= 2
            found = cutlass.max(found, cute.arch.shuffle_sync_bfly(found, offset=lanes))
        return found

    @cute.jit
    def _scale(self, amax: Int32) -> tuple[Any, Float32]:
        """A block's scale as it is stored, and what its elements are multiplied by."""
        if const_expr(self.power_of_two):
            code = bits.e8m0(amax, self.spec.format.element, self.spec.scale_rounding, _where)
            return Uint8(code), bits.inverse(code, _where).bitcast(Float32)
        step = amax.bitcast(Float32) / Float32(self.spec.format.element.max)
        step = _where(amax > 0, _where(step < SMALLEST_FLOAT32, SMALLEST_FLOAT32, step), step)
        step = _where(amax >= bits.INF, Int32(bits.NAN).bitcast(Float32), step)
        inverse = _where(amax > 0, Float32(1.0) / step, Float32(0.0))
        return step, inverse

    @cute.jit
    def _elements(self, numbers: cute.Tensor, inverse: Float32) -> cute.Tensor:
        """Codes of a vector, four in a word."""
        halves = cute.make_rmem_tensor(VECTOR // 2, Int16)
        kind = "e4m3x2" if self.spec.format.element == E4M3 else "e5m2x2"
        for i in cutlass.range_constexpr(VECTOR // 2):
            pair = [numbers[2 * i + 1] * inverse, numbers[2 * i] * inverse]  # the upper one first
            halves[i] = cute.arch.inline_ptx(
                f"cvt.rn.satfinite.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
                write_only_types=[Int16],
                read_only_args=pair,
            )
        return cute.recast_tensor(halves, Int32)


@cute.jit
def _where(condition: Boolean, yes: Any, no: Any) -> Any:
    found = no
    if condition:
        found = yes
    return found


def _vector(tensor: cute.Tensor, at: Int64) -> cute.Tensor:
    """A vector of elements."""
    bytes_ = VECTOR * tensor.element_type.width // 8
    start = copy.aligned(tensor.iterator + at * VECTOR, min(ALIGN, bytes_))
    return cute.make_tensor(start, cute.make_layout(VECTOR))


def _words(values: cute.Tensor, at: Int64) -> cute.Tensor:
    """A vector of codes as two words."""
    start = copy.aligned(values.iterator + at * VECTOR, VECTOR)
    return cute.recast_tensor(cute.make_tensor(start, cute.make_layout(VECTOR)), Int32)


def build(spec: QuantizeSpec, config: QuantizeConfig) -> tuple[Quantize, tuple]:
    """The kernel and its symbolic arguments."""
    scale = "float32" if spec.format.scale != E8M0 else None
    count = sym_int(divisibility=spec.format.cols)
    x = symbolic(spec.x, (count,), align=ALIGN, contiguous=True)
    values = _bytes(count, VECTOR)
    scales = symbolic(scale, (sym_int(),), align=4, contiguous=True) or _bytes(sym_int(), 1)
    return Quantize(spec, config), (x, values, scales)


def _bytes(count: Any, align: int) -> Any:
    """A symbolic tensor of bytes."""
    return make_fake_compact_tensor(Uint8, (count,), stride_order=(0,), assumed_align=align)
