"""From a block's numbers to its scale and codes, in registers; vectors in memory."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32, Int64, Uint8, const_expr

from quack_core.device import copy, reduce
from quack_core.jit.compile import symbolic
from quack_core.jit.dsl import make_fake_compact_tensor, sym_int64

from ..formats import E4M3, E8M0, SMALLEST_FLOAT32
from . import bits
from .spec import VECTOR, QuantizeSpec

ALIGN = 16
MAGNITUDE = 0x7FFFFFFF


@cute.jit
def widened(held: cute.Tensor) -> cute.Tensor:
    """A vector in float32."""
    numbers = cute.make_rmem_tensor(VECTOR, Float32)
    numbers.store(copy.widen(held))
    return numbers


@cute.jit
def largest(numbers: cute.Tensor) -> Int32:
    """The largest magnitude of a vector: its bits, which have the order of the numbers, NaN above all."""
    words = cute.recast_tensor(numbers, Int32)
    return largest_of([words[i] & MAGNITUDE for i in range(VECTOR)])


def largest_of(words: list[Int32]) -> Int32:
    """The largest of several."""
    return reduce.combine_tree([(word,) for word in words], reduce.MAX)[0]


def over_lanes(found: Int32, lanes: int) -> Int32:
    """The largest of so many neighbouring lanes, a power of two."""
    return reduce.warp_reduce((found,), reduce.MAX, lanes)[0]


@cute.jit
def scale(spec: cutlass.Constexpr[QuantizeSpec], amax: Int32) -> tuple[Any, Float32]:
    """A block's scale as it is stored, and what its elements are multiplied by."""
    element = spec.format.element
    if const_expr(spec.format.scale == E8M0):
        code = bits.e8m0(amax, element, spec.scale_rounding, _where)
        return Uint8(code), bits.inverse(code, _where).bitcast(Float32)
    step = amax.bitcast(Float32) / Float32(element.max)
    step = _where(amax > 0, _where(step < SMALLEST_FLOAT32, SMALLEST_FLOAT32, step), step)
    step = _where(amax >= bits.INF, Int32(bits.NAN).bitcast(Float32), step)
    return step, _where(amax > 0, Float32(1.0) / step, Float32(0.0))


@cute.jit
def codes(
    spec: cutlass.Constexpr[QuantizeSpec], numbers: cute.Tensor, inverse: Float32
) -> cute.Tensor:
    """Of a vector, four in a word.

    Source: PTX ISA, cvt.rn.satfinite.e4m3x2.f32.
    """
    halves = cute.make_rmem_tensor(VECTOR // 2, Int16)
    kind = const_expr("e4m3x2" if spec.format.element == E4M3 else "e5m2x2")
    for i in cutlass.range_constexpr(VECTOR // 2):
        halves[i] = cute.arch.inline_ptx(
            f"cvt.rn.satfinite.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
            write_only_types=[Int16],
            read_only_args=[numbers[2 * i + 1] * inverse, numbers[2 * i] * inverse],  # upper first
        )
    return cute.recast_tensor(halves, Int32)


def vector(x: cute.Tensor, at: Int64) -> cute.Tensor:
    """Vector number ``at`` of elements."""
    bytes_ = VECTOR * x.element_type.width // 8
    start = copy.aligned(x.iterator + at * VECTOR, min(ALIGN, bytes_))
    return cute.make_tensor(start, cute.make_layout(VECTOR))


def words(values: cute.Tensor, at: Int64) -> cute.Tensor:
    """Vector number ``at`` of codes, as two words."""
    start = copy.aligned(values.iterator + at * VECTOR, VECTOR)
    return cute.recast_tensor(cute.make_tensor(start, cute.make_layout(VECTOR)), Int32)


def arguments(spec: QuantizeSpec) -> tuple[Any, Any, Any]:
    """Symbolic x, values (uint8) and scales (uint8 or float32): contiguous, of one dimension."""
    count, blocks = sym_int64(divisibility=spec.format.cols), sym_int64()
    x = symbolic(spec.x, (count,), align=ALIGN, contiguous=True)
    if spec.format.scale == E8M0:
        return x, _bytes(count, VECTOR), _bytes(blocks, 1)
    return x, _bytes(count, VECTOR), symbolic("float32", (blocks,), align=4, contiguous=True)


def _bytes(count: Any, align: int) -> Any:
    return make_fake_compact_tensor(Uint8, (count,), stride_order=(0,), assumed_align=align)


@cute.jit
def _where(condition: Boolean, yes: Any, no: Any) -> Any:
    found = no
    if condition:
        found = yes
    return found
