"""From a block's numbers to its scale and codes, in registers; vectors in memory."""

from typing import Any

import cutlass.cute as cute
from cutlass import (
    BFloat16,
    Boolean,
    Float16,
    Float32,
    Int16,
    Int32,
    Int64,
    Uint8,
    const_expr,
)

from quack_core.device import copy, reduce
from quack_core.jit.compile import symbolic
from quack_core.jit.dsl import make_fake_compact_tensor, sym_int, sym_int64

from ..formats import E2M1, E8M0, FLOAT32, SMALLEST_FLOAT32, BlockFormat, ElementFormat
from . import bits
from .spec import QuantizeSpec

ALIGN = 16
LARGEST_FLOAT32 = 2.0**128 - 2.0**104


def widened(held: cute.Tensor) -> list[Float32]:
    """A vector in float32."""
    numbers = copy.widen(held)
    return [numbers[i] for i in range(cute.size(held))]


def registers(words: list[Int32]) -> cute.Tensor:
    """Words side by side, to be stored."""
    held = cute.make_rmem_tensor(len(words), Int32)
    for i, word in enumerate(words):
        held[i] = word
    return held


def largest(held: cute.Tensor) -> Int32:
    """The largest magnitude of a vector, as float32's bits: they have the order of the numbers, NaN
    above all. So do those of 16 bits, of which one instruction compares two."""
    words = cute.recast_tensor(held, Int32)
    if held.element_type is Float32:
        return largest_of([words[i] & bits.MAGNITUDE for i in range(cute.size(words))])
    each = [(words[i] & 0x7FFF7FFF,) for i in range(cute.size(words))]
    (found,) = reduce.combine_tree(each, HALVES)
    return as_float32(largest_of([found & 0xFFFF, found >> 16]), held.element_type)


def largest_of_columns(held: cute.Tensor) -> cute.Tensor:
    """The largest magnitudes of vectors (element, vector) over the vectors, as of `largest`."""
    size, vectors = held.shape
    words = cute.recast_tensor(held, Int32)
    halves = held.element_type is not Float32
    mask, reduction = (0x7FFF7FFF, HALVES) if halves else (bits.MAGNITUDE, reduce.MAX)
    found = cute.make_rmem_tensor(size, Int32)
    for i in range(size // 2 if halves else size):
        each = [(words[i, j] & mask,) for j in range(vectors)]
        (word,) = reduce.combine_tree(each, reduction)
        if halves:
            found[2 * i] = as_float32(word & 0xFFFF, held.element_type)
            found[2 * i + 1] = as_float32(word >> 16, held.element_type)
        else:
            found[i] = word
    return found


def as_float(word: Int32) -> Float32:
    """The number of these bits."""
    return word.bitcast(Float32)


def as_float32(magnitude: Int32, dtype: Any) -> Int32:
    """The bits of a magnitude of 16 bits in float32."""
    if dtype is BFloat16:
        return magnitude << 16
    return Int16(magnitude).bitcast(Float16).to(Float32).bitcast(Int32)


def largest_of(words: list[Int32]) -> Int32:
    """The largest of several."""
    return reduce.combine_tree([(word,) for word in words], reduce.MAX)[0]


def over_lanes(found: Int32, lanes: int) -> Int32:
    """The largest of so many neighbouring lanes, a power of two."""
    return reduce.warp_reduce((found,), reduce.MAX, lanes)[0]


def lost(amax: Int32) -> Int32:
    """-1 of a block with a NaN or an Inf, else 0."""
    return (bits.INF - 1 - amax) >> 31


def scale(
    spec: QuantizeSpec, amax: Int32, tensor_scale: cute.Tensor | None = None
) -> tuple[Any, Float32]:
    """A block's scale as it is stored, and what its elements are multiplied by."""
    element = spec.format.element
    if spec.format.scale == E8M0:
        code = bits.e8m0(amax, element, spec.scale_rounding, ON)
        return Uint8(code), bits.inverse(code, ON).bitcast(Float32)
    divided = amax.bitcast(Float32)
    if tensor_scale is not None:
        quotient = divided / tensor_scale[0]
        quotient = _where(quotient > LARGEST_FLOAT32, LARGEST_FLOAT32, quotient)
        divided = _where(amax > 0, quotient, divided)
    step = divided / Float32(element.max)
    if spec.format.scale == FLOAT32:
        step = _where((amax > 0) & (step < SMALLEST_FLOAT32), SMALLEST_FLOAT32, step)
    # As a word and last: a maximum of numbers that this could be joined with makes another NaN.
    step = _where(amax >= bits.INF, Int32(bits.NAN), step.bitcast(Int32)).bitcast(Float32)
    if spec.format.scale == FLOAT32:
        stored = step
    else:
        code = _convert("e4m3x2", [step, Float32(0.0)], Int16)
        stored, step = Uint8(code), _from_e4m3(code)
    if tensor_scale is not None:
        step = step * tensor_scale[0]
    inverse = Float32(1.0) / step
    infinite = (inverse.bitcast(Int32) & bits.MAGNITUDE) == bits.INF
    return stored, _where(infinite, Float32(0.0), inverse)


def codes(
    spec: QuantizeSpec,
    native: bool,
    numbers: list[Float32],
    inverse: Float32,
    noise: list[Int32] | None = None,
) -> list[Int32]:
    """Of numbers side by side, packed in words.

    Args:
        native: the architecture converts to elements of 4 and 6 bits.
        noise: of each element, to round stochastically.
    """
    element = spec.format.element
    if element.bits == 8 and noise is None or native and noise is None:
        return _converted(element, element, [number * inverse for number in numbers])
    ratios = [word.bitcast(Float32) for word in _rounded(spec, numbers, inverse, noise)]
    return _converted(element, bits.carrier(element), ratios)


def _rounded(
    spec: QuantizeSpec, numbers: list[Float32], inverse: Float32, noise: list[Int32] | None
) -> list[Int32]:
    """Elements in the range of their carrier, as float32's bits: what conversion makes no different."""
    element, shrink = spec.format.element, bits.shrink(spec.format.element)
    if spec.format.scale == E8M0:
        inverse, shrink = inverse * shrink, 1.0  # powers of two: exact
    found = []
    for i, number in enumerate(numbers):
        word = given = _times(number * inverse, shrink).bitcast(Int32)
        if spec.clips and element.bits < 8:
            word = bits.clipped(word, element, ON)
        if noise is not None:
            word = bits.stochastic(word, noise[i], element, ON)
        elif element == E2M1:  # of the others the carrier has as many bits of mantissa
            word = bits.nearest(word, element, ON)
        found.append(word if word is given else bits.signed(word, given))
    return found


def _converted(
    element: ElementFormat, through: ElementFormat, numbers: list[Float32]
) -> list[Int32]:
    """Numbers to elements by the conversion to the format ``through``, packed."""
    if element == through == E2M1:
        return [_eight_e2m1(numbers[i : i + 8]) for i in range(0, len(numbers), 8)]
    kind = f"{through.name}x2"
    if element == E2M1:
        found = []
        for at in range(0, len(numbers), 8):
            even, odd = (_four(kind, numbers[at + i : at + 8 : 2]) for i in (0, 1))
            found.append(bits.pairs(bits.narrowed(even, element), bits.narrowed(odd, element)))
        return found
    found = [_four(kind, numbers[i : i + 4]) for i in range(0, len(numbers), 4)]
    if element != through:
        found = [bits.narrowed(word, element) for word in found]
    return found if element.bits == 8 else bits.joined([bits.quads(word) for word in found])


def _times(number: Float32, factor: float) -> Float32:
    return number if factor == 1.0 else number * factor


def vector(x: cute.Tensor, at: Int64, size: int) -> cute.Tensor:
    """Vector number ``at`` of elements."""
    bytes_ = size * x.element_type.width // 8
    start = copy.aligned(x.iterator + at * size, min(ALIGN, bytes_))
    return cute.make_tensor(start, cute.make_layout(size))


def words(values: cute.Tensor, at: Int64, size: int) -> cute.Tensor:
    """Vector number ``at`` of codes, of so many bytes, as words."""
    start = copy.aligned(values.iterator + at * size, min(ALIGN, size & -size))
    return cute.recast_tensor(cute.make_tensor(start, cute.make_layout(size)), Int32)


def arguments(x: str, format: BlockFormat) -> tuple[Any, ...]:
    """Symbolic numbers, values (uint8), scales (uint8 or float32) and the scale of the tensor:
    contiguous, of one dimension, but scales of a format that has them by column; columns and the
    seed."""
    count = sym_int64(divisibility=format.cols)
    numbers = symbolic(x, (count,), align=ALIGN, contiguous=True)
    packed = sym_int64(divisibility=format.packed(format.cols))
    if format.element.bits == 8:
        packed = count
    scales = _bytes(sym_int64(), 1)
    if format.by_column:
        scales = symbolic("float32", (sym_int(), sym_int()), align=4)
    elif format.scale == FLOAT32:
        scales = symbolic("float32", (sym_int64(),), align=4, contiguous=True)
    per_tensor = "float32" if format.per_tensor else None
    tensor_scale = symbolic(per_tensor, (1,), align=4, contiguous=True)
    return numbers, _bytes(packed, ALIGN), scales, tensor_scale, Int32(0), Int64(0)


@cute.jit
def store_scale(scales: cute.Tensor, block: Int64, value: Any) -> None:
    """The scale of a block, by its number: (blocks,) or (blocks of a row, rows)."""
    if const_expr(cute.rank(scales) == 1):
        scales[block] = value
    else:
        number, of_row = Int32(block), scales.shape[0]  # scales are fewer than 2^31
        scales[Int64(number % of_row), number // of_row] = value


def _bytes(count: Any, align: int) -> Any:
    return make_fake_compact_tensor(Uint8, (count,), stride_order=(0,), assumed_align=align)


@cute.jit
def _where(condition: Boolean, yes: Any, no: Any) -> Any:
    found = no
    if condition:
        found = yes
    return found


def _max_halves(a: tuple[Int32], b: tuple[Int32]) -> tuple[Int32]:
    found = cute.arch.inline_ptx(
        "max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[*a, *b]
    )
    return (found,)


def _add_down(a: Float32, b: Float32) -> Float32:
    return cute.arch.inline_ptx(
        "{ .reg .f32 size; abs.f32 size, {$r0}; add.rz.f32 {$w0}, size, {$r1}; }",
        write_only_types=[Float32],
        read_only_args=[a, b],
    )


def _convert(kind: str, pair: list[Float32], dtype: Any) -> Any:
    """Two codes; the first is in the lower half."""
    return cute.arch.inline_ptx(
        f"cvt.rn.satfinite.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        write_only_types=[dtype],
        read_only_args=pair,
    )


def _four(kind: str, numbers: list[Float32]) -> Int32:
    """Codes of four numbers, each in a byte."""
    halves = cute.make_rmem_tensor(2, Int16)
    halves[0] = _convert(kind, numbers[:2], Int16)
    halves[1] = _convert(kind, numbers[2:], Int16)
    return cute.recast_tensor(halves, Int32)[0]


def _eight_e2m1(numbers: list[Float32]) -> Int32:
    """Codes of eight numbers.

    Source: PTX ISA, cvt.rn.satfinite.e2m1x2.f32.
    """
    convert = " ".join(
        f"cvt.rn.satfinite.e2m1x2.f32 b{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};" for i in range(4)
    )
    return cute.arch.inline_ptx(
        f"{{ .reg .b8 b0, b1, b2, b3; {convert} mov.b32 {{$w0}}, {{b0, b1, b2, b3}}; }}",
        write_only_types=[Int32],
        read_only_args=numbers,
    )


def _from_e4m3(code: Int16) -> Float32:
    """The number of the code in the lower byte."""
    pair = cute.arch.inline_ptx(
        "cvt.rn.f16x2.e4m3x2 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[code]
    )
    return Int16(pair & 0xFFFF).bitcast(Float16).to(Float32)


ON = bits.Arithmetic(
    _where,
    lambda word: word.bitcast(Float32),
    lambda x: x.bitcast(Int32),
    cute.arch.fmin,
    _add_down,
)
"""Words of a kernel: `Int32`."""
HALVES = reduce.Reduction((0.0,), _max_halves)
"""The maximum of two numbers of 16 bits without a sign."""
